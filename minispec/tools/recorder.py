"""A decode, round by round: the data of the page that `decode.py --html` writes, and the text of --explain.

A Recorder listens to an engine and its drafters: their methods run as they are, and it keeps what goes in and
comes out. Tokens stay the same, and a run without a recorder does nothing more. The time of recording counts
as "other". Drafters inside CUDA graphs cannot be heard, so their rounds have no q.

A round is requests.Step and
    drafts, parents   the draft tokens, and the row that each hangs from
    path, token       the rows of the accepted drafts, and the token that follows them
    rows              for each row {token: [p, q, score]} of the tokens with the largest p, q or score, and of
                      drafts that hang from it. The target's choice has the largest score: p / noise, at
                      temperature 0 the logit. q is -1 where it is unknown: in rows after prompt lookup,
                      after all chains but the first, and in trees after the first row
    coins             of rejection, one a draft and one for `token`; None under the other rules
    cached            tokens in the cache before the round
    selected          SpecGen: selected positions in each part of the context, summed over `heads`; each head
                      reads the `recent` newest ones, too
    promises          see Adaptive.promises
A step of a diffusion model has the open `block` (first position, last + 1), its masked `slots` (position,
likeliest token, confidence), and which of them it reveals (`picked`).
"""
import itertools
import json
import os
from collections import defaultdict
from dataclasses import asdict

import torch

from minispec.core.noise import stream
from minispec.core.verify import Sampling, coins, scores, warp
from minispec.tools.files import write_text
from minispec.tools.script import visible

TEMPLATE = os.path.join(os.path.dirname(__file__), "viewer.html")
LIKELIEST = 10          # tokens of p, of q and of the scores
BINS = 240              # parts of the context


def write_page(path, runs):
    """The page of these runs (see Recorder.run), in one file."""
    with open(TEMPLATE, encoding="utf-8") as f:
        template = f.read()
    # In a script no "<" may appear: </script> would end it.
    data = json.dumps(runs, separators=(",", ":")).replace("<", "\\u003c")
    write_text(path, template.replace("{{runs}}", data))


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
        self.tokenizer = tokenizer
        self.numbers = defaultdict(itertools.count().__next__)     # of requests, as they enter
        self.rounds = defaultdict(list)                  # of each request
        self.forwards = []                               # of each, [(number of the request, kind, rows)]
        self.q = defaultdict(list)                       # of each request, q (V,) of the round's first rows
        self.ids = set()                                 # tokens that the page names
        self.threshold = getattr(engine, "threshold", None)
        if hasattr(engine, "on_step"):
            engine.on_step = self.revealed
            return
        self.drafter = getattr(engine.scheduler, "drafter", None)
        listen(engine, "forward", self.fed)
        listen(engine, "verify", self.verified)
        listen(engine.scheduler, "take_drafts", self.drafted_sparsely)
        if not engine.fused:
            several = getattr(self.drafter, "drafters", None)
            for drafter in (several or {"": self.drafter}).values():
                self.hear(drafter)

    # -- q of the drafts -----------------------------------------------------------------------------------

    def hear(self, drafter):
        """Listen to a drafter with a cache; others have no q."""
        asked, guesses = [], []

        def drafted(*args):
            # Draft step i has row i of a chain; a tree has many rows, so keep its first step.
            if guesses:
                q = torch.cat(guesses[:1] if drafter.width > 1 else guesses, 1)
                self.q.update(zip(asked, drafter.draft_head.whole(q)))
            asked.clear()
            guesses.clear()

        def drawn(chains, request, *args):
            # SpecDiff: the first of K chains.
            self.q[request] = drafter.draft_head.whole(chains[1][:, 0])

        listen(drafter, "first_rows", lambda rows, request: asked.append(request) if rows else None)
        listen(drafter, "guess", lambda guess, *args: guesses.append(guess[0]))
        listen(drafter, "run_round", drafted)
        listen(drafter, "_draw", drawn)

    def drafted_sparsely(self, _, segments, logits):
        """A draft step of SpecGen."""
        for s, row in zip(segments, logits):
            self.q[s.request].append(probabilities(row, s.request))

    # -- rounds --------------------------------------------------------------------------------------------

    def fed(self, _, segments):
        self.forwards.append([(self.numbers[s.request], s.kind, len(s.tokens)) for s in segments])

    def verified(self, verdicts, segments, logits):
        each = logits.split([len(s.drafts) + 1 for s in segments])
        for s, rows, verdict in zip(segments, each, verdicts):
            if s.kind == "verify":
                self.rounds[s.request].append(self.round(s, rows, *verdict))

    def round(self, s, logits, path, token):
        """One round: its segment, the logits (n, V) of the rows, and the verdict."""
        r = s.request
        p = probabilities(logits, r)
        q = torch.full_like(p, -1)
        for row, known in zip(q, self.q.pop(r, [])):
            row.copy_(known)
        positions = [position + 1 for position in s.positions]
        score = scores(logits, r.sampling, [stream(r.sampling.seed)] * len(p), positions)
        numbers = torch.stack((p, q, score), -1).double().round(decimals=4)        # (n, V, 3)
        # The likeliest tokens of each row, and those that hang from it.
        likely = numbers.topk(LIKELIEST, 1).indices.flatten(1).tolist()
        for draft, parent in zip([*s.drafts, token], [*s.above, [0, *path][-1]]):
            likely[parent].append(draft)
        self.ids.update(*likely)
        rows = [dict(zip(ids, row[ids].tolist())) for ids, row in zip(likely, numbers)]
        by_coins = r.sampling.temperature > 0 and (s.q is not None or s.chains)
        out = {
            "drafts": s.drafts, "parents": list(s.above), "path": path, "token": token, "rows": rows,
            "coins": coins(s).tolist() if by_coins else None, "cached": r.n_cached,
        }
        selected = getattr(r.state, "selected", None)
        if selected is not None:
            bins = torch.histc(selected.float(), BINS, 0, r.longest).int().tolist()
            out |= {"selected": bins, "heads": selected[..., 0].numel(), "recent": r.state.recent}
        if hasattr(self.drafter, "promises"):
            out["promises"] = self.drafter.promises(r)
        return out

    def revealed(self, a, masked, tokens, confidence, picked):
        """One step of a diffusion model."""
        self.numbers[a.request]                          # counts it
        self.ids.update(tokens)
        self.rounds[a.request].append({"block": [a.first, a.last], "picked": picked,
                                       "slots": list(zip(masked, tokens, confidence))})

    # -- the finished run ----------------------------------------------------------------------------------

    def run(self, about):
        """The run as a dict for the page, with everything that is in `about`."""
        requests = []
        for r in self.numbers:
            g = asdict(r.generation)
            g["rounds"] = [a | step for a, step in zip(self.rounds[r], g["rounds"])]
            requests.append(g | {"longest": r.longest})
            self.ids.update(g["prompt_ids"], g["token_ids"])
        # Bytes, as Latin-1: a character may span tokens.
        words = {i: self.tokenizer.decode_bytes([i]).decode("latin-1") for i in self.ids}
        return {**about, "threshold": self.threshold, "requests": requests, "forwards": self.forwards,
                "words": words}

    def lines(self, n):
        """The first n rounds that have drafts, as text."""
        lines, word = [], lambda token: visible(repr(self.tokenizer.decode([token])))
        rounds = itertools.chain.from_iterable(self.rounds.values())
        for a in [a for a in rounds if a["drafts"]][:n]:
            lines.append(f"at {a['cached'] + 1} tokens: {len(a['drafts'])} drafts")
            for i, (draft, parent) in enumerate(zip(a["drafts"], a["parents"]), 1):
                row = a["rows"][parent]
                choice = word(max(row, key=lambda token: row[token][2]))
                rule = f"coin {a['coins'][i - 1]:.3f}" if a["coins"] else f"target's choice {choice}"
                p, q, _ = row[draft]
                known = "    ?" if q < 0 else f"{q:5.3f}"
                lines.append(f"{i:4} after {parent:<3} {word(draft):16} p {p:5.3f}  q {known}  {rule:32} "
                             + "accepted" * (i in a["path"]))
            end = "correction" if [0, *a["path"]][-1] in a["parents"] else "bonus"
            kept = f"{len(a['path']) + 1} of {len(a['rows'])} rows"
            lines.append(f"     {end} {word(a['token'])}; the cache keeps {kept}\n")
        return lines


def probabilities(logits, request):
    """As the request samples; the softmax if it is greedy, because a point mass would show nothing."""
    return warp(logits, request.sampling if request.sampling.temperature else Sampling(1.0))
