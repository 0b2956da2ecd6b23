"""decode.py --watch: a diffusion model's answer while it fills in. --explain: the first rounds, draft by
draft."""
import shutil

import torch

from minispec.core.verify import warp
from minispec.tools.script import in_colour, visible

GREEN, PLAIN = "\033[32m", "\033[0m"


class Watch:
    """Called by the decoder after every step. On a terminal the answer is redrawn in place, new tokens in
    green, masked slots as dots. Elsewhere every step is a line with its open block."""

    def __init__(self, tokenizer, out):
        self.tokenizer = tokenizer
        self.out = out
        self.drawn = 0                   # lines on the terminal
        special = tokenizer.special
        self.names = {special.get("<|answer|>"): "\n=> ", special.get("<|eos|>"): "<end>"}

    def spell(self, a, i):
        """The text of position i."""
        token = a.tokens[i]
        if token == a.mask_id:
            return "·"
        return self.names.get(token) or self.tokenizer.decode([token])

    def __call__(self, a, revealed):
        if self.out.isatty():
            self.draw(a, revealed)
            return
        block = "".join(self.spell(a, i) for i in range(a.first, a.last)).replace("\n", "|")
        step = len(a.request.generation.steps) + 1
        self.out.write(f"{step:4d} +{len(revealed):<2d} {visible(block)}\n")

    def draw(self, a, revealed):
        columns, rows = shutil.get_terminal_size()
        ends = (i for i in range(a.prompt, a.last) if a.tokens[i] in a.request.stop_ids)
        stop = next(ends, a.last - 1)
        new = set(revealed) if in_colour(self.out) else set()
        lines, room = [""], columns - 1
        for i in range(a.prompt, stop + 1):
            for c in self.spell(a, i):
                if c == "\n" or room == 0:
                    lines.append("")
                    room = columns - 1
                if c.isprintable():
                    lines[-1] += f"{GREEN}{c}{PLAIN}" if i in new else c
                    room -= 1
        lines = lines[-(rows - 2):]      # what has scrolled away cannot be redrawn
        up = f"\033[{self.drawn}A" if self.drawn else ""
        self.out.write(up + "\r\033[J" + "\n".join(lines) + "\n")
        self.out.flush()
        self.drawn = len(lines)


class Explain:
    """The first `rounds` rounds that have drafts, of one request at a time, as `lines`. It takes the place of
    the engine's `judge`, and draws the coins a second time, from where the request's random stream was."""

    def __init__(self, engine, tokenizer, rounds):
        self.judge, engine.judge = engine.judge, self
        self.tokenizer = tokenizer
        self.rounds = rounds
        self.lines = []

    def __call__(self, segments, logits):
        stream = segments[0].request.rng.get_state()
        verdicts = self.judge(segments, logits)
        s = segments[0]
        if s.drafts and self.rounds > 0:
            self.rounds -= 1
            n = len(s.drafts) + 1
            coins = torch.rand(n, generator=torch.Generator().set_state(stream))
            self.explain(s, logits[:n], coins, *verdicts[0])
        return verdicts

    def explain(self, s, logits, coins, path, token):
        """One round: the segment s, the logits (n, V) of its rows, its coins (n,), and the verdict."""
        r, n = s.request, len(logits)
        greedy = r.sampling.temperature == 0
        p = logits.float().softmax(-1) if greedy else warp(logits, r.sampling)
        parents = range(n - 1) if s.parents is None else s.parents
        depths = [position - s.start for position in s.positions]
        last = path[-1] if path else 0
        ms = {phase: f"{1000 * r.spent[phase]:.1f} ms" for phase in ("draft", "verify")}
        self.lines += [
            f"at {len(r.tokens)} tokens: {n - 1} drafts in {ms['draft']}, verified in {ms['verify']}",
            "  row after  token                 q       p    coin"]

        # The drafts. Of a tree, those that hang from the accepted path were tried, in order.
        for row, (draft, parent) in enumerate(zip(s.drafts, parents), 1):
            if row in path:
                verdict = "accepted"
            elif parent in (0, *path) and not any(parents[i - 1] == parent for i in path if i < row):
                verdict = "rejected"
            else:
                verdict = "not reached"
            coin = None if greedy else coins[row - 1]
            self.line(row, parent, draft, self.q(s, draft, depths[row]), p[parent, draft], coin, verdict)

        # The token that follows.
        verdict = "bonus" if depths[last] == max(depths) else "correction"
        self.line("", last, token, None, p[last, token], None if greedy else coins[-1], verdict)
        kept = r.n_cached + 1 + len(path)
        self.lines += [f"  the cache keeps {1 + len(path)} of {n} rows, {kept} in all\n"]

    def q(self, s, draft, depth):
        """The probability that this draft was drawn with; 1 where it was not drawn, but chosen."""
        q = s.q if s.parents is None else getattr(s.rule, "args", (None, None))[1]
        return 1.0 if q is None else q[depth - 1, draft]

    def line(self, row, after, token, q, p, coin, verdict):
        """A line of the table; None is an empty cell."""
        text = visible(repr(self.tokenizer.decode([token])))
        numbers = "".join(" " * 8 if x is None else f"{x:8.3f}" for x in (q, p, coin))
        self.lines.append(f"  {row:>3} {after:>5}  {text:<16}{numbers}  {verdict}")
