"""The point at which an answer begins to repeat itself.

Greedy answers of a small model often fall into a loop. Every drafter guesses a loop, so the tokens of a loop
teach a drafter nothing and flatter every speed-up. One definition serves training and benchmarks:
an answer loops where the same N tokens occur for the third time.
"""
N = 8                       # tokens of the piece that recurs
TIMES = 3


def loops(tokens):
    """Whether the last N tokens of an answer occur there for at least the third time."""
    last = tokens[-N:]
    # To compare one token first takes a fifth of the time.
    same = (tokens[i:i + N] == last for i in range(len(tokens) - N + 1) if tokens[i] == last[0])
    return len(last) == N and sum(same) >= TIMES


def generate(engine, requests):
    """Answer the requests and return their generations. A greedy answer ends with the round in which it
    loops."""
    for request, _ in engine.stream(requests):
        if request.sampling.temperature == 0 and loops(request.generation.token_ids):
            request.cancel()
    return [r.generation for r in requests]
