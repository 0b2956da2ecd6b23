"""What decode.py shows while it decodes: text in colour by who proposed each token, stop strings, --chat."""
import codecs
import itertools
import sys

from tqdm import tqdm

from minispec.core.requests import Request
from minispec.tools.script import in_colour, visible

COLOURS = {"draft": "\033[32m", "correction": "\033[31m", "bonus": "\033[36m", "plain": ""}
RESET = "\033[0m"


# -- stop strings ----------------------------------------------------------------------------------------

def before_stop(text, stops):
    """The text up to the first stop string in it."""
    found = [text.index(s) for s in stops if s in text]
    return text[:min(found, default=len(text))]


def end_at_stop(generation, tokens, tokenizer, stops):
    """Of newly committed tokens, those up to the one that completes a stop string. The answer ends there."""
    stops = [s.encode() for s in stops]
    ids = generation.token_ids
    begin = len(ids) - len(tokens)
    reach = max(map(len, stops))                         # in tokens too, because a token has a byte at least
    for end in range(begin + 1, len(ids) + 1):
        tail = tokenizer.decode_bytes(ids[max(end - reach, 0):end])
        if any(s in tail for s in stops):
            del ids[end:], generation.who[end:]
            generation.finish = "stop"
            break
    return ids[begin:]


# -- text as it comes ------------------------------------------------------------------------------------

class Printer:
    """Streams the text of one request, in colour by who proposed each token. What could be the beginning of a
    stop string is held back."""

    def __init__(self, tokenizer, colour, stops=()):
        self.tokenizer, self.colour, self.stops = tokenizer, colour, stops
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")     # a character may span tokens
        self.marks = {tokenizer.special.get("<|answer|>"): "\n=> ", **dict.fromkeys(tokenizer.ends, "\n")}
        self.held = []                                   # [(character, who)] that are not shown yet
        self.last = "\n"                                 # the last character shown

    def __call__(self, tokens, who, last=False):
        for token, by in zip(tokens, who):
            text = self.marks.get(token)
            if text is None:
                text = self.utf8.decode(self.tokenizer.decode_bytes([token]))
            self.held += [(c, by) for c in text]
        ready = self._ready("".join(c for c, _ in self.held), last)
        shown, self.held = self.held[:ready], self.held[ready:]
        for by, same in itertools.groupby(shown, lambda pair: pair[1]):
            text = "".join(c for c, _ in same)
            self.last = text[-1]
            text = visible(text)
            if self.colour and COLOURS[by]:
                text = COLOURS[by] + text + RESET
            sys.stdout.write(text)
        sys.stdout.flush()

    def _ready(self, text, last):
        """How many characters are certainly in front of any stop string."""
        ready = len(before_stop(text, self.stops))
        if not last:
            for i in range(ready):
                if any(s.startswith(text[i:]) for s in self.stops):
                    return i
        return ready


def legend():
    names = [f"{colour}{name}{RESET}" for name, colour in COLOURS.items() if colour]
    print("legend: " + "  ".join(names) + "  plain\n")


def stream(engine, requests, tokenizer, stops=(), printer=None, bar=None):
    """Decode the requests together. Returns the seconds from the beginning to each one's first token, by the
    engine's clock, which stops while text is shown. Waiting for a place in the batch counts. On a terminal a
    bar shows how far the prompts are read, if that takes two seconds."""
    def clock():
        return sum(engine.seconds.values())

    began = clock()
    first = {}
    total = sum(len(r.tokens) for r in requests)
    reading = tqdm(total=total, desc="reading", unit="token", delay=2, leave=False,
                   disable=None if printer else True)
    engine.on_read = reading.update
    for request, tokens in engine.stream(requests):
        reading.close()
        if tokens:
            first.setdefault(request, clock() - began)
        if stops:
            tokens = end_at_stop(request.generation, tokens, tokenizer, stops)
        if printer:
            who = request.generation.who
            printer(tokens, who[len(who) - len(tokens):], request.finished)
        if bar is not None:
            bar.update(int(request.finished))
    return list(first.values())


# -- chat ------------------------------------------------------------------------------------------------

def chat(engine, tokenizer, sampling, limit, stops=()):
    """Talk with the model: a line in, an answer out, until the end of input (Ctrl-D).

    limit: tokens of an answer, which Ctrl-C stops as well. The conversation so far is read with each line."""
    ends = [engine.model.config.eos_id, *tokenizer.ends]
    messages = []
    while True:
        try:
            line = input("\n> ")
        except EOFError:
            print()
            return
        if not line.strip():
            continue
        asked = tokenizer.asked(line + "\n")
        try:
            ids = fitting(messages, asked, tokenizer, engine.model.config.block_size)
        except ValueError as e:                          # one line is refused; the conversation goes on
            print(e)
            continue
        messages.append(asked)
        room = engine.model.config.block_size - len(ids)
        request = Request(ids, min(limit, room), sampling, ends)
        printer = Printer(tokenizer, in_colour(sys.stdout), stops)
        before = dict(engine.seconds)
        try:
            stream(engine, [request], tokenizer, stops, printer)
        except KeyboardInterrupt:
            request.cancel()                             # what was said stays in the conversation
        if printer.last != "\n":
            print()
        print(turn_line(request.generation, engine, before))
        messages.append({"role": "assistant", "content": request.generation.token_ids})


def fitting(messages, asked, tokenizer, block_size):
    """The ids of a conversation and what is asked next. The oldest turns leave `messages` if together they
    leave less than an eighth of the context. ValueError, and nothing leaves, if the line alone does not fit.
    """
    most = block_size - block_size // 8
    alone = len(tokenizer.chat_ids([asked]))
    if alone > most:
        raise ValueError(f"a line of {alone} tokens; "
                         f"allowed are {most} in this model's context of {block_size}")
    ids = tokenizer.chat_ids([*messages, asked])
    while len(ids) > most:
        del messages[:2]
        print("(the conversation is longer than the context; its oldest turn is forgotten)")
        ids = tokenizer.chat_ids([*messages, asked])
    return ids


def turn_line(generation, engine, before):
    """tau and tokens/s of one answer."""
    spent = {phase: seconds - before.get(phase, 0.0) for phase, seconds in engine.seconds.items()}
    steps = generation.steps
    tau = sum(s.committed for s in steps) / max(len(steps), 1)
    n = len(generation.token_ids)
    decoding = max(sum(spent.values()) - spent["prefill"], 1e-9)
    return (f"[{n} tokens, tau {tau:.2f}, {max(n - 1, 0) / decoding:.1f} tokens/s, "
            f"first one after {spent['prefill']:.2f} s]")
