"""A decode, round by round: the data of the page that `decode.py --html` writes, and the text of --explain.

A Recorder listens to an engine: its methods run as they are, and it keeps what goes in and comes out. Tokens
stay the same, and a run without a recorder does nothing more. The time of recording counts as "other".

A request has its Generation and
    longest           tokens of the prompt and of the longest answer
    fed               [(number of the forward of the target, kind, rows)]
    heard             of each round, see below
A round is
    tokens, parents   the drafts and the token that follows them, and the row that each hangs from
    path              the rows of the accepted drafts
    numbers           [score, p, q] of each of the tokens, in the row that it hangs from. q is -1 where it is
                      unknown: in rows after prompt lookup, after all chains but the first, and in trees after
                      the first row
    rows              for each row {token: [score, p, q]} of the tokens with the largest p or q; first the
                      target's choice, which has the largest score: p / noise, at temperature 0 the logit
    coins             of rejection, one a token; None under the other rules
    cached            tokens in the cache before the round
    promises          of Adaptive: {drafter: [drafts, best for the batch; tokens and tokens/s of this request]}
    selected          SpecGen: selected positions in each part of the context, summed over `heads`; each head
                      reads the `recent` newest ones, too
A step of a diffusion model has the open `block` (first position, last + 1), its masked `slots` (position,
likeliest token, confidence), and which of them it reveals (`picked`).
"""
import json
from collections import defaultdict
from pathlib import Path

import torch

from minispec.core.noise import stream
from minispec.core.verify import coins, scores, warp
from minispec.tools.files import write_text

TEMPLATE = Path(__file__).with_name("viewer.html")
LIKELIEST = 10          # tokens of p, of q and of the scores
BINS = 240              # parts of the context


def write_page(path, runs):
    """The page of these runs (see Recorder.run), in one file."""
    # In a script no "<" may appear: </script> would end it.
    data = json.dumps(runs, separators=(",", ":"), default=vars).replace("<", "\\u003c")
    write_text(path, TEMPLATE.read_text("utf-8").replace("{{runs}}", data))


def listen(owner, name, told):
    """After each call of this method, if the owner has it, call told(result, *arguments)."""
    method = getattr(owner, name, None)

    def call(*args):
        result = method(*args)
        told(result, *args)
        return result

    if method:
        setattr(owner, name, call)


class Recorder:
    """Records an engine, or the decoder of a diffusion model, from now on."""

    def __init__(self, engine, tokenizer):
        self.engine = engine
        self.tokenizer = tokenizer
        self.fed = defaultdict(list)                     # of each request, as above
        self.heard = defaultdict(list)
        self.ids = set()                                 # tokens that the page names
        listen(engine, "_record", self.scheduled)
        listen(engine, "verify", self.verified)
        listen(engine, "reveal", self.revealed)

    def scheduled(self, _, segments):
        """The next forward of the target."""
        for s in segments:
            self.fed[s.request].append((len(self.engine.iterations), s.kind, len(s.tokens)))

    def verified(self, verdicts, segments, logits):
        each = logits.split([s.n_logits for s in segments])
        for s, rows, verdict in zip(segments, each, verdicts):
            if s.kind == "verify":
                self.heard[s.request].append(self.round(s, rows, *verdict))

    def round(self, s, logits, path, token):
        """One round: its segment, the logits (n, V) of the rows, and the verdict."""
        r = s.request
        # p, q and score of all tokens in each row.
        p = warp(logits, r.sampling)
        q = torch.full_like(p, -1)
        if s.q:
            # Rows of prompt-lookup tokens come last.
            known = s.q()[:len(p) - s.lookup]
            q[:len(known)] = known
        score = scores(logits, r.sampling, [stream(r.sampling.seed)] * len(p),
                       [position + 1 for position in s.positions])
        numbers = torch.stack((score, p, q), -1).double().round(decimals=4)        # (n, V, 3)
        # The choice first: of equal numbers topk may name another one.
        likely = [score.argmax(-1, keepdim=True), numbers.topk(LIKELIEST, 1).indices.flatten(1)]
        likely = torch.cat(likely, 1).tolist()
        tokens, parents = [*s.drafts, token], [*s.above, [0, *path][-1]]
        self.ids.update(tokens, *likely)
        out = {
            "tokens": tokens, "parents": parents, "path": path,
            "numbers": numbers[parents, tokens].tolist(),
            "rows": [{token: x for token, x in zip(ids, row[ids].tolist()) if token == ids[0] or max(x[1:]) > 0}
                     for ids, row in zip(likely, numbers)],
            "coins": coins(s).tolist() if s.drawn else None,
            "cached": r.n_cached,
            "promises": self.engine.scheduler.drafter.promises.get(r),
        }
        selected = getattr(r.state, "selected", None)
        if selected is not None and s.drafts:
            bins = torch.histc(selected.float(), BINS, 0, r.longest).int().tolist()
            out |= {"selected": bins, "heads": selected.shape[:2].numel(), "recent": r.state.recent}
        return out

    def revealed(self, picked, a, masked, hidden, tokens, confidence):
        """One step of a diffusion model."""
        self.ids.update(tokens)
        self.heard[a.request].append({
            "block": [a.first, a.last], "picked": picked, "slots": list(zip(masked, tokens, confidence)),
        })

    # -- the finished run ----------------------------------------------------------------------------------

    def run(self, about):
        """The run as a dict for the page, with everything that is in `about`."""
        known = self.fed | self.heard
        self.ids.update(*(r.tokens for r in known))
        requests = [{**vars(r.generation), "heard": self.heard[r], "fed": self.fed[r], "longest": r.longest}
                    for r in known]
        # Bytes, as Latin-1: a character may span tokens.
        words = {i: self.tokenizer.decode_bytes([i]).decode("latin-1") for i in self.ids}
        return {**about, "requests": requests, "words": words}

    def lines(self, n):
        """The first n rounds that have drafts, as text."""
        word = lambda token: repr(self.tokenizer.decode([token]))
        rounds = [(a, b) for r, heard in self.heard.items() for a, b in zip(heard, r.generation.rounds)
                  if a["rows"][1:]]
        for a, done in rounds[:n]:
            *drafts, (token, last, _) = zip(a["tokens"], a["parents"], a["numbers"])
            yield f"at {a['cached'] + 1} tokens: {len(drafts)} drafts"
            for i, (draft, parent, (_, p, q)) in enumerate(drafts, 1):
                choice = word(next(iter(a["rows"][parent])))
                rule = f"coin {a['coins'][i - 1]:.3f}" if a["coins"] else f"target's choice {choice}"
                known = f"{q:5.3f}" if q >= 0 and i <= len(drafts) - done.lookup else "    ?"
                verdict = "accepted" * (i in a["path"])
                yield f"{i:4} after {parent:<3} {word(draft):16} p {p:5.3f}  q {known}  {rule:32} {verdict}"
            end = ("correction" if last in a["parents"][:-1] else "bonus") + f" {word(token)}"
            if done.committed <= len(a["path"]):
                end = "the answer ends"
            yield f"     {end}; the cache keeps {len(a['path']) + 1} of {len(a['rows'])} rows\n"
