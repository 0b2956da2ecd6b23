"""Output of decode.py during decoding: text in colour by the proposer of each token, and --chat."""
import codecs
import os
import shutil
import sys
from dataclasses import replace

from tqdm import tqdm

from minispec.core.requests import Request
from minispec.tools.answers import summary
from minispec.tools.script import visible

# An accepted draft, the target's token in place of a rejected draft, and its token after accepted drafts.
COLOURS = {"draft": "\033[32m", "correction": "\033[31m", "bonus": "\033[36m"}
RESET = "\033[0m"


# -- text as it comes ------------------------------------------------------------------------------------

def coloured(text, who):
    """The text in the colour of its proposer, on a terminal without NO_COLOR (no-color.org)."""
    text = visible(text)
    if who in COLOURS and sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        text = COLOURS[who] + text + RESET
    return text


class Printer:
    """Streams the text of one request, in colour by the proposer of each token."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")     # a character may span tokens
        self.marks = {tokenizer.special.get("<|answer|>"): "\n=> ", **dict.fromkeys(tokenizer.ends, "")}

    def __call__(self, request, tokens):
        """Print the newest tokens of the request."""
        who = request.generation.who[-len(tokens):]
        for token, by in zip(tokens, who):
            text = self.marks.get(token)
            if text is None:
                text = self.utf8.decode(self.tokenizer.decode_bytes([token]))
            sys.stdout.write(coloured(text, by))
        sys.stdout.flush()


class Lines:
    """On a terminal, a line for each request of a batch: its number of new tokens and the end of its text."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.bars = {}

    def __call__(self, request, tokens):
        ids = request.generation.token_ids
        if request not in self.bars:
            self.bars[request] = tqdm(bar_format="{desc}", leave=False, disable=None)
        width = shutil.get_terminal_size().columns - 8
        text = " ".join(visible(self.tokenizer.decode(ids[-2 * width:])).split())
        self.bars[request].set_description_str(f"{len(ids):5}  {text[-width:]}")

    def close(self):
        """Remove the lines."""
        for bar in reversed(self.bars.values()):
            bar.close()


def stream(engine, requests, show=None):
    """Decode the requests together. Returns the seconds from the start to the first token of each, by the
    clock of the engine, which stops while text is shown; the time before a request enters the batch counts.

    show(request, new tokens) is called with all new tokens. On a terminal a bar shows the progress of reading
    the prompts, if that takes two seconds."""
    def clock():
        return sum(engine.seconds.values())

    began = clock()
    first = {}
    # A common beginning is read once, but for each request by diffusion models and drafters that need its
    # hidden states.
    shares = getattr(engine, "scheduler", None) and engine.scheduler.shares
    common = len(os.path.commonprefix([r.tokens for r in requests])) if shares else 0
    total = common + sum(len(r.tokens) - common for r in requests)
    with tqdm(total=total, desc="reading", unit="token", delay=2, leave=False, disable=None) as bar:
        engine.on_prefill = bar.update
        for request, tokens in engine.stream(requests):
            if tokens:
                first.setdefault(request, clock() - began)
            if show and tokens:
                bar.close()
                show(request, tokens)
    return list(first.values())


# -- chat ------------------------------------------------------------------------------------------------

def chat(engine, tokenizer, sampling, limit):
    """Talk with the model: a line in, an answer out, until the end of input (Ctrl-D).

    limit: tokens of an answer; Ctrl-C stops it too. The prompt is the whole conversation, most of it cached
    unless the drafter reads the target's hidden states. An eighth of the context is kept for the answer."""
    block_size = engine.model.config.block_size
    most = block_size - block_size // 8
    messages = []
    while True:
        try:
            line = input("\n> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:                        # a moment after the end of an answer
            continue
        if "\ufffd" in line:
            print(f"(this line was dropped: it is not valid {sys.stdin.encoding})")
            continue
        if not line.strip():
            continue
        asked = tokenizer.asked(line + "\n")
        ids = tokenizer.chat_ids([*messages, asked])
        if len(ids) > most:
            print(f"({line[:60]!r} was dropped: with it the conversation has {len(ids)} tokens, the limit is "
                  f"{most}. A new one begins)")
            messages.clear()
            continue
        request = Request(ids, min(limit, block_size - len(ids)), sampling, tokenizer.ends)
        # Rounded up, so that few turns need a larger cache, and on a GPU new graphs.
        request.longest = min(block_size, 1 << (request.longest - 1).bit_length())
        printer = Printer(tokenizer)
        # The clock of this answer alone.
        engine.seconds = dict.fromkeys(engine.seconds, 0.0)
        engine.iterations.clear()
        try:
            stream(engine, [request], printer)
        except KeyboardInterrupt:
            request.cancel()                             # its tokens stay in the conversation
        print()
        answer = request.generation
        figures = summary([answer], engine)
        print(f"[{figures['new_tokens']} tokens, tau {figures['tau']:.2f}, "
              f"{figures['decode_tokens_per_second'] or 0:.1f} tokens/s]")
        messages += [asked, {"role": "assistant", "content": answer.token_ids}]
        # A template may drop thoughts: the next answer may then have positions of this one.
        sampling = replace(sampling, seed=(sampling.seed + 1) % (1 << 63))
