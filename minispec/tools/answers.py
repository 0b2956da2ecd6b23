"""Requests from problems, and figures from a finished run."""
import os
import statistics
from dataclasses import replace

import torch

from minispec.core.requests import Request, check_requests
from minispec.core.noise import stream
from minispec.core.verify import Sampling, scores
from minispec.data import prompts, tasks
from minispec.tools.files import naming

UNKNOWN = 1024           # limit of new tokens if no solution is known


# -- from problems to requests ----------------------------------------

def requests_of(problems, tokenizer, model, limit=None, sampling=Sampling()):
    """One engine request per problem; request i has sampling's seed + i.

    limit: new tokens at most (default: twice a known solution, within the context). ValueError names a prompt
    that does not fit the context or has ids outside the vocabulary."""
    c = model.config
    requests = []
    for i, problem in enumerate(problems):
        most = UNKNOWN
        if problem.think and tokenizer.is_puzzle_model:      # chains of other models have other lengths
            most = 2 * len(tokenizer.response_ids(problem))
        seeded = replace(sampling, seed=sampling.seed + i)
        with naming(f"prompt {i + 1} {problem.facts.get('id', '')}".strip()):
            ids = tokenizer.prompt_ids(problem.prompt)
            most = min(most, max(c.block_size - len(ids), 1))
            requests.append(Request(ids, limit or most, seeded, tokenizer.ends))
            check_requests(requests[-1:], c)
    return requests


def verdict(problem, generation, tokenizer):
    """True or False if the problem has an answer to check, else None. Only the puzzle models mark the answer
    of a procedural problem; prompts.py checks problems from files."""
    text = tokenizer.answer_text(generation.token_ids)
    if "check" in problem.facts:
        return prompts.check(problem, text)
    if problem.answer and tokenizer.is_puzzle_model:
        return tasks.check(problem, text)
    return None


# -- from a finished run to figures ----------------------------------------

def tau(rounds):
    """The mean number of tokens committed per round."""
    return sum(r.committed for r in rounds) / max(len(rounds), 1)


def summary(generations, engine):
    """The figures of one run over all its requests, as a dict (docs/glossary.md explains them). The rate of a
    phase that did not happen is None.

    Prefill is the target's forwards over the prompts. Its last row yields the first token of an answer, so
    decoding is credited with the other tokens, and charged with all other time: drafting (a drafter reads the
    prompt too), verification, acceptance, and recomputation of evicted prompts. A diffusion model reads the
    prompt together with its first block of masks: all of its time is decoding."""
    # A step is a round of one request.
    steps = [s for g in generations for s in g.rounds]
    tokens = decoded = sum(len(g.token_ids) for g in generations)
    seconds = sum(engine.seconds.values())

    # Prefill and decoding.
    prompt = sum(len(g.prompt_ids) for g in generations)
    prefill = 0.0
    fed = sum(i["prefill"] for i in getattr(engine, "iterations", []))
    if fed:
        prefill = engine.seconds["prefill"] * min(prompt / fed, 1)       # without recomputation
        decoded -= sum(bool(g.token_ids) for g in generations)

    # The share of accepted drafts among the rounds that proposed one at this position.
    by_position = [round(statistics.fmean(s.accepted > i for s in steps if s.proposed > i), 4)
                   for i in range(max((s.proposed for s in steps), default=0))]
    return {
        "new_tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": ratio(tokens, seconds),
        "prompt_tokens": prompt,
        "prefill_tokens_per_second": ratio(min(prompt, fed), prefill),   # without shared tokens
        "decode_tokens_per_second": ratio(decoded, seconds - prefill),
        "tau": tau(steps),
        "acceptance_by_position": by_position,
        "phase_seconds": dict(engine.seconds),
        "warm_up_seconds": getattr(engine, "warm_up", 0.0),
    }


def ratio(a, b):
    """a / b, or None if either is 0 or None."""
    return a / b if a and b else None


def schedule_view(engine):
    """Figures of the scheduler: rows per iteration, requests per phase, use of the cache."""
    iterations = engine.iterations
    kinds = ("prefill", "draft", "verify")
    rows = [sum(i[kind] for kind in kinds) for i in iterations]
    return {
        "iterations": len(iterations),
        "rows_mean": statistics.mean(rows),
        "rows_deviation": statistics.pstdev(rows),
        **{f"{kind}_rows": sum(i[kind] for i in iterations) for kind in kinds},
        "stalled": sum(i["stalled"] for i in iterations),
        "active_mean": statistics.mean(i["active"] for i in iterations),
        "cache_slots": engine.cache.n_slots,
        "cache_peak": max(i["used"] for i in iterations),
        "offloaded": engine.cache.offloaded,
        "dropped": engine.admission.dropped,
        "shared": engine.admission.shared,
    }


@torch.inference_mode()
def tie_gap(model, prompt_ids, a, b, sampling=Sampling()):
    """Gap between the target's two largest logits, with their noise, at the first difference of outputs a and
    b; 0 if they are equal."""
    same = os.path.commonprefix([a, b])
    if same in (a, b):
        return 0.0
    ids = torch.tensor([prompt_ids + same], device=model.device)
    own = scores(model.logits(model(ids)[:, -1]), sampling, [stream(sampling.seed)], [ids.shape[1]])[0]
    if sampling.temperature > 0:
        own = own.log()
    best, second = own.topk(2).values.tolist()
    return best - second
