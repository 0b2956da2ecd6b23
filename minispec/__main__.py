"""core/hello.py at work: the shipped model revises a small program, and prompt lookup drafts."""
from minispec import SHIPPED, need_torch
need_torch()
from minispec.core.hello import generate, prompt_lookup
from minispec.data import tasks
from minispec.data.tokenizer import Tokenizer
from minispec.tools import checkpoints
from minispec.tools.script import run_main
from minispec.tools.terminal import coloured


def main():
    model, tokenizer = checkpoints.load(SHIPPED), Tokenizer.load(SHIPPED)
    prompt = tokenizer.prompt_ids(tasks.make("revise", 7).prompt)
    rounds = list(generate(model, prompt, prompt_lookup, stop_ids=tokenizer.ends))
    for accepted, own in rounds:
        print(coloured(tokenizer.decode(accepted), "draft") + tokenizer.decode(own), end="")
    n = sum(len(accepted) + len(own) for accepted, own in rounds)
    print(f"\n{n} tokens (green: guessed) in {len(rounds)} forwards: {n / len(rounds):.2f} tokens a forward")


run_main(main)
