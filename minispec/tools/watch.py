"""decode.py --watch: a diffusion model's answer while it fills in. --explain: the first rounds, draft by
draft."""
from minispec.core.noise import stream
from minispec.core.verify import coins, scores, warp
from minispec.tools.script import visible
from minispec.tools.terminal import coloured


class Watch:
    """Called by the decoder after every step: prints how many slots it revealed, and its open block. On a
    terminal the new tokens are green. A masked slot is a dot, a new line |."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        special = tokenizer.special
        self.names = {special.get("<|answer|>"): "|=> ", special.get("<|eos|>"): "<end>"}

    def __call__(self, a, revealed):
        block = ""
        names = {**self.names, a.mask_id: "·"}
        for i in range(a.first, a.last):
            text = names.get(a.tokens[i]) or self.tokenizer.decode([a.tokens[i]])
            block += coloured(text.replace("\n", "|"), "draft" if i in revealed else "plain")
        step = len(a.request.generation.steps) + 1
        print(f"{step:4d} +{len(revealed):<2d} {block}")


class Explain:
    """The first `rounds` rounds that have drafts, of one request at a time, as `lines`. It takes the place of
    the engine's `judge`."""

    def __init__(self, engine, tokenizer, rounds):
        self.judge = engine.judge
        engine.judge = self
        self.tokenizer = tokenizer
        self.rounds = rounds
        self.lines = []

    def __call__(self, segments, logits):
        s = segments[0]
        verdicts = self.judge(segments, logits)
        if s.drafts and self.rounds > 0:
            self.rounds -= 1
            self.explain(s, logits[:len(s.drafts) + 1], *verdicts[0])
        return verdicts

    def explain(self, s, logits, path, token):
        """One round: the segment s, the logits (n, V) of its rows, and the verdict."""
        r, n = s.request, len(logits)
        p = logits.float().softmax(-1)
        if r.sampling.temperature > 0:
            p = warp(logits, r.sampling)
        positions = [position + 1 for position in s.positions]
        choices = scores(logits, r.sampling, [stream(r.sampling.seed)] * n, positions).argmax(-1).tolist()
        chains = s.chains or [(None, s.q)]
        rejection = chains[0][1] is not None and r.sampling.temperature > 0
        heads = "q       p    coin" if rejection else "        p  target's choice"
        self.lines += [f"at {len(r.tokens)} tokens: {n - 1} drafts",
                       f"  row after  token                 {heads}"]

        # The drafts. Of a tree, those that hang from the accepted path were tried, in order.
        for row, (draft, parent) in enumerate(zip(s.drafts, s.above), 1):
            if row in path:
                verdict = "accepted"
            elif parent in (0, *path) and not any(s.above[i - 1] == parent for i in path if i < row):
                verdict = "rejected"
            else:
                verdict = "not reached"
            if rejection:
                q = 1.0 if chains[0][1] is None else chains[0][1][s.positions[row] - s.start - 1, draft]
                numbers = f"{q:8.3f}{p[parent, draft]:8.3f}{coins(s)[row - 1]:8.3f}"
            else:
                numbers = f"        {p[parent, draft]:8.3f}  {self.text(choices[parent])}"
            self.line(row, parent, draft, numbers, verdict)

        # The token that follows.
        last = path[-1] if path else 0
        verdict = "correction" if last in s.above else "bonus"
        coin = f"{coins(s)[-1]:8.3f}" if rejection else f"  {self.text(token)}"
        self.line("", last, token, f"        {p[last, token]:8.3f}{coin}", verdict)
        kept = r.n_cached + 1 + len(path)
        self.lines += [f"  the cache keeps {1 + len(path)} of {n} rows, {kept} in all\n"]

    def text(self, token):
        return f"{visible(repr(self.tokenizer.decode([token]))):<16}"

    def line(self, row, after, token, numbers, verdict):
        """A line of the table."""
        self.lines.append(f"  {row:>3} {after:>5}  {self.text(token)}{numbers}  {verdict}")
