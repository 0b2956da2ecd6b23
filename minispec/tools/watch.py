"""decode.py --watch: a diffusion model's answer while it fills in. --explain: the first rounds, draft by
draft."""
from minispec.core.verify import warp
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
        # Greedy rounds toss no coins.
        p, coins = logits.float().softmax(-1), [None] * n
        if r.sampling.temperature > 0:
            p, coins = warp(logits, r.sampling), r.drawn
        self.lines += [f"at {len(r.tokens)} tokens: {n - 1} drafts",
                       "  row after  token                 q       p    coin"]

        # The drafts. Of a tree, those that hang from the accepted path were tried, in order.
        for row, (draft, parent) in enumerate(zip(s.drafts, s.above), 1):
            if row in path:
                verdict = "accepted"
            elif parent in (0, *path) and not any(s.above[i - 1] == parent for i in path if i < row):
                verdict = "rejected"
            else:
                verdict = "not reached"
            q = self.q(s, draft, s.positions[row] - s.start)
            self.line(row, parent, draft, [q, p[parent, draft], coins[row - 1]], verdict)

        # The token that follows.
        last = path[-1] if path else 0
        verdict = "correction" if last in s.above else "bonus"
        self.line("", last, token, [None, p[last, token], coins[-1]], verdict)
        kept = r.n_cached + 1 + len(path)
        self.lines += [f"  the cache keeps {1 + len(path)} of {n} rows, {kept} in all\n"]

    def q(self, s, draft, depth):
        """The probability that this draft was drawn with; 1 where it was not drawn, but chosen."""
        q = s.q if s.parents is None else getattr(s.rule, "args", (None, None))[1]
        return 1.0 if q is None else q[depth - 1, draft]

    def line(self, row, after, token, numbers, verdict):
        """A line of the table; of the numbers q, p and the coin, None is an empty cell."""
        text = visible(repr(self.tokenizer.decode([token])))
        cells = "".join(" " * 8 if x is None else f"{x:8.3f}" for x in numbers)
        self.lines.append(f"  {row:>3} {after:>5}  {text:<16}{cells}  {verdict}")
