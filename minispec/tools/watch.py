"""decode.py --watch: a diffusion model's answer while it fills in."""
import shutil
import time

from minispec.tools.script import in_colour, visible

GREEN, PLAIN = "\033[32m", "\033[0m"


class Watch:
    """Called by the decoder after every step. On a terminal the answer is redrawn in place, new tokens in
    green, masked slots as dots. Elsewhere every step is a line with its open block."""

    def __init__(self, tokenizer, out, pause=0.0):
        self.tokenizer = tokenizer
        self.out = out
        self.pause = pause
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
            time.sleep(self.pause)
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
