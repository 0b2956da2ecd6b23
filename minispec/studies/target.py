"""What bench.py measures of the shipped target: which problems it solves, and whether every method gives
its very output.

A study is a function (settings, target, tokenizer) -> a dict that JSON can hold. `--quick` is a tenth of
the work. tables.py and figures.py say how each one is shown.
"""
import statistics

import torch
from tqdm import tqdm

from minispec.core.attention import FullKeys
from minispec.core.kv_cache import KVCache
from minispec.data import tasks
from minispec.studies.replay import feed
from minispec.tools import checkpoints, methods
from minispec.tools.answers import requests_of, tie_gap, verdict

LONG = "trace, 4,000 tokens"
NOISE_TOKENS = 360          # length of the chains that row_count_noise reads


def accuracy(args, model, tokenizer):
    """Share of held-out problems solved, greedy, at the trained difficulty; and `trace` with chains of
    4,000 tokens."""
    n = 20 if args.quick else 200
    cells = [(family, family, None, n) for family in tasks.FAMILIES]
    cells.append((LONG, "trace", 4000 // tasks.TOKENS_PER_LINE, n // 4))

    rows = {}
    for name, family, size, count in tqdm(cells, desc="accuracy"):
        problems = [tasks.make(family, i, "heldout", size) for i in range(count)]
        engine = methods.make_engine("ar", model, args, 16 if size else 32)
        generations = engine.generate(requests_of(problems, tokenizer, model))
        right = sum(verdict(p, g, tokenizer) for p, g in zip(problems, generations))
        rows[name] = {
            "size": [size, size] if size else list(tasks.SIZES[family]),
            "problems": count,
            "accuracy": right / count,
            "mean_tokens": statistics.mean(len(g.token_ids) for g in generations),
        }
    return {"families": rows, "mean": statistics.mean(rows[f]["accuracy"] for f in tasks.FAMILIES)}


def lossless(args, model, tokenizer):
    """Greedy output against autoregressive output on held-out prompts of all families: identical in fp32;
    in bf16, where the number of rows changes rounding, a first difference must sit at a near-tie."""
    per_family = 4 if args.quick else 20
    problems = [tasks.make(f, 1000 + i, "heldout") for f in tasks.FAMILIES for i in range(per_family)]

    out = {}
    for dtype in (torch.float32, torch.bfloat16):
        target = checkpoints.load(args.model, dtype=dtype)

        def answers(method):
            engine = methods.make_engine(method, target, args, 10)
            return engine.generate(requests_of(problems, tokenizer, target))

        plain = answers("ar")
        rows = {}
        for name in tqdm(methods.ready(args), desc=str(dtype)):
            gaps = [tie_gap(target, a.prompt_ids, a.token_ids, b.token_ids)
                    for a, b in zip(plain, answers(name)) if a.token_ids != b.token_ids]
            rows[name] = {
                "prompts": len(problems),
                "identical": len(problems) - len(gaps),
                "largest_tie_gap": max(gaps, default=0.0),
            }
        noise = row_count_noise(target, tokenizer)
        out[str(dtype).removeprefix("torch.")] = {"methods": rows, "row_count_noise": noise}
    return out


@torch.inference_mode()
def row_count_noise(model, tokenizer):
    """Largest difference of a logit between feeding a held-out chain one row at a time and nine rows at a
    time."""
    largest = 0.0
    for seed in range(4):
        p = tasks.make("trace", seed, "heldout", 12)
        ids = tokenizer.prompt_ids(p.prompt) + tokenizer.encode(p.think)
        one, nine = (_logits_by_rows(model, torch.tensor(ids[:NOISE_TOKENS]), rows) for rows in (1, 9))
        largest = max(largest, (one - nine).abs().max().item())
    return largest


def _logits_by_rows(model, ids, rows):
    """Logits (T, V) of a sequence that is fed `rows` tokens a forward."""
    cache = KVCache(model.config, len(ids), model.dtype)
    starts = range(0, len(ids), rows)
    keys = (FullKeys(cache, 0, start, min(rows, len(ids) - start)) for start in starts)
    return torch.cat([model.logits(feed(model, ids, some)).float() for some in keys])
