"""Prompts that the target writes itself (Magpie, 2406.08464).

A chat model has read many conversations, so it can also write the user's part. It gets its chat template up
to the user's turn and continues at temperature 1 until it closes the turn. This works for any chat model,
needs no data set, and gives prompts about subjects that the model knows.
"""
import itertools
import os

from minispec.core.engine import Engine
from minispec.core.requests import Request
from minispec.core.scheduler import SyncScheduler
from minispec.core.verify import Sampling
from minispec.tools.files import read_json, write_json

TURNS = 128                 # turns between two writes
LONGEST = 256               # tokens; a turn that has not ended by then is no prompt
TOGETHER = 64               # requests decoded at once


def opening(tokenizer):
    """(what the model reads before the user speaks, the token that ends the user's turn). ValueError where
    there is no chat template."""
    # Two turns that share nothing: what their ids share is the template's.
    x, y = (tokenizer.prompt_ids(text) for text in ("x", "7"))
    before = os.path.commonprefix([x, y])
    behind = os.path.commonprefix([x[::-1], y[::-1]])
    if not before or not behind:
        raise ValueError(f"{tokenizer.file} has no chat template, so the model cannot write prompts; "
                         "give some with --prompt-file")
    return before, behind[-1]


def written(target, tokenizer, folder):
    """The target's prompts, one by one: from the shards of `folder`, else written now, until a shard has no
    new one. Turns that do not end, are empty or repeat an earlier one are left out. ValueError where there is
    none at all."""
    seen = {""}
    engine = Engine(target, SyncScheduler, TOGETHER)
    for shard in itertools.count():
        file = f"{folder}/own-{shard:05d}.json"
        if not os.path.exists(file):
            write_json(file, _write(engine, tokenizer, range(shard * TURNS, (shard + 1) * TURNS)))
        new = [text for text in dict.fromkeys(read_json(file)) if text not in seen]
        if not new and shard:
            return
        if not new:
            raise ValueError(f"of {TURNS} turns that the target wrote for a user none is a new prompt; "
                             "give some with --prompt-file")
        seen.update(new)
        yield from new


def _write(engine, tokenizer, seeds):
    """The turns of these seeds that end, as text."""
    before, end = opening(tokenizer)
    stops = [end, *tokenizer.ends]
    room = min(LONGEST, engine.model.config.block_size - len(before))
    requests = [Request(before, room, Sampling(1.0, seed=seed), stops) for seed in seeds]
    turns = [g.token_ids for g in engine.generate(requests)]
    return [tokenizer.decode(turn[:-1]).strip() for turn in turns if turn[-1] == end]
