"""Between problems and figures: requests made of problems, and what a finished run says about them."""
import statistics
from dataclasses import replace

import torch

from minispec.core.attention import dense_attend
from minispec.core.requests import Request
from minispec.core.verify import Sampling
from minispec.data import prompts, tasks

UNKNOWN = 512            # tokens expected of an answer whose solution is not known


# -- from problems to requests ----------------------------------------

def requests_of(problems, tokenizer, model, limit=None, sampling=Sampling(), warm=0):
    """One engine request per problem, the i-th with the i-th seed after sampling's.

    limit: new tokens at most (default: twice a known solution). warm: enter the reference chain of thought
    where prompt and chain have so many tokens, which reaches a long context in seconds. ValueError if a
    prompt does not fit the context, a chain is too short, or the tokenizer is another model's."""
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ValueError(f"tokenizer.json has ids up to {tokenizer.vocab_size - 1}, "
                         f"the model a vocabulary of {model.config.vocab_size}; they do not belong together")
    requests = []
    for i, problem in enumerate(problems):
        ids, expected = _lengths(i + 1, problem, tokenizer, warm)
        room = _room(i + 1, problem, ids, limit, 2 * expected, tokenizer, model.config.block_size)
        seeded = replace(sampling, seed=sampling.seed + i)
        ends = [model.config.eos_id, *tokenizer.ends]
        requests.append(Request(ids, limit or min(2 * expected, room), seeded, ends))
    return requests


def _lengths(number, problem, tokenizer, warm):
    """(ids of the prompt, tokens expected of the answer)."""
    ids = tokenizer.chat_ids([*problem.before, tokenizer.asked(problem.prompt)])
    expected = UNKNOWN
    if problem.think and tokenizer.ours:                 # other models write chains of their own
        expected = len(tokenizer.response_ids(problem.think, problem.answer))
    if warm:
        ids = (ids + tokenizer.encode(problem.think))[:warm]
        if len(ids) < warm:
            raise ValueError(f"problem {number} has a known chain of {len(ids)} tokens with its prompt; "
                             f"a warm context of {warm} needs a longer one (--task trace)")
    return ids, expected


def _room(number, problem, ids, limit, wanted, tokenizer, block_size):
    """How many new tokens the context has room for: every later turn gets as much as the first."""
    answers = 1 + len(problem.turns)
    later = sum(len(tokenizer.prompt_ids(turn)) for turn in problem.turns)
    room = (block_size - len(ids) - later) // answers
    if room < (limit or 1):
        each = f" for each of {answers} answers" if problem.turns else ""
        raise ValueError(f"prompt {number} has {len(ids) + later} tokens and asks for {limit or wanted} more"
                         f"{each}; the context of this model is {block_size}")
    return room


def converse(problems, answer):
    """Ask the problems, then what their further turns ask about the answers; answer(problems) -> generations.
    Returns [(problem, generation, turn)], with the turns of a problem next to each other."""
    rows = [[] for _ in problems]
    live = list(enumerate(problems))
    turn = 1
    while live:
        generations = answer([problem for _, problem in live])
        following = []
        for (i, problem), generation in zip(live, generations):
            rows[i].append((problem, generation, turn))
            if problem.turns:
                following.append((i, following_turn(problem, problem.turns[0], generation)))
        live = following
        turn += 1
    return [row for turns in rows for row in turns]


def following_turn(problem, prompt, generation):
    """The problem of the next turn: `prompt` continues the conversation after the answer so far."""
    said = [{"role": "user", "content": problem.prompt},
            {"role": "assistant", "content": generation.token_ids}]
    return replace(problem, prompt=prompt.rstrip("\n") + "\n", think="", answer="", turns=problem.turns[1:],
                   before=[*problem.before, *said])


def verdict(problem, generation, tokenizer):
    """True or False if the problem has an answer that can be checked, else None. The answer of a procedural
    problem comes after a mark that only our models have; prompts.py checks those of problems from files."""
    text = tokenizer.answer_text(generation.token_ids)
    if "check" in problem.facts:
        return prompts.check(problem, text)
    if problem.answer and tokenizer.ours:
        return tasks.check(problem, text)
    return None


# -- from a finished run to figures ----------------------------------------

def summary(generations, engine):
    """The figures of one run, over all its requests, as a dict (docs/glossary.md has the words)."""
    steps = [s for g in generations for s in g.steps]
    rounds = max(len(steps), 1)
    tokens = sum(len(g.token_ids) for g in generations)
    seconds = sum(engine.seconds.values())

    # Of the rounds that proposed a draft at this position, how many accepted it?
    by_position = []
    for i in range(max((s.proposed for s in steps), default=0)):
        tried = [s for s in steps if s.proposed > i]
        by_position.append(round(sum(s.accepted > i for s in tried) / len(tried), 4))
    return {
        "new_tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        **phase_rates(generations, engine),
        "tau": sum(s.committed for s in steps) / rounds,
        "accepted_per_round": sum(s.accepted for s in steps) / rounds,
        "acceptance_by_position": by_position,
        "phase_seconds": dict(engine.seconds),
        "warm_up_seconds": getattr(engine, "warm_up", 0.0),
    }


def phase_rates(generations, engine):
    """Prompt tokens, and the tokens/s of prefill and of decoding; a rate is None if there was no such phase.

    Prefill is the target's forwards over the prompts. Its last row yields the first token of an answer, so
    decoding is credited with the others. It is charged with everything else: drafting (a drafter reads the
    prompt too), verification, acceptance, and reading again what had to leave a full cache. A
    diffusion model reads the prompt together with its first block of masks: all of its time is decoding."""
    prompt = sum(len(g.prompt_ids) for g in generations)
    decoded = sum(len(g.token_ids) for g in generations)
    prefill = 0.0
    fed = sum(i["prefill"] for i in getattr(engine, "iterations", []))
    if fed:
        prefill = engine.seconds["prefill"] * prompt / fed
        decoded -= sum(bool(g.token_ids) for g in generations)
    decode = sum(engine.seconds.values()) - prefill
    return {
        "prompt_tokens": prompt,
        "prefill_tokens_per_second": prompt / prefill if prefill else None,
        "decode_tokens_per_second": decoded / decode if decoded else None,
    }


def schedule_view(engine):
    """What the scheduler did: rows per iteration, requests per phase, use of the cache."""
    iterations = engine.iterations
    rows = [i["prefill"] + i["draft"] + i["verify"] for i in iterations]

    def total(name):
        return sum(i[name] for i in iterations)

    return {
        "iterations": len(iterations),
        "rows_mean": statistics.mean(rows),
        "rows_deviation": statistics.pstdev(rows),
        "prefill_rows": total("prefill"),
        "draft_rows": total("draft"),
        "verify_rows": total("verify"),
        "stalled": total("stalled"),
        "active_mean": statistics.mean(i["active"] for i in iterations),
        "cache_slots": engine.cache.n_slots,
        "cache_peak": max(i["used"] for i in iterations),
        "moved": engine.cache.moved,
        "offloaded": engine.cache.offloaded,
        "recomputed": engine.admission.recomputed,
    }


@torch.inference_mode()
def tie_gap(model, prompt_ids, a, b):
    """Gap between the target's two largest logits where outputs a and b first differ; 0 if they do not."""
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y:
            break
    else:
        return 0.0
    ids = torch.tensor([prompt_ids + a[:i]], device=model.device)
    positions = torch.arange(ids.shape[1], device=model.device)[None]
    hidden = model(ids, positions, dense_attend())[0, -1]
    best, second = model.logits(hidden).float().topk(2).values.tolist()
    return best - second
