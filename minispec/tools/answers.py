"""Between problems and figures: requests made of problems, and what a finished run says about them. For all scripts."""
import statistics
from dataclasses import replace

import torch

from minispec.data import prompts, tasks
from minispec.core.attention import dense_attend
from minispec.core.engine import Request
from minispec.core.verify import Sampling


def requests_of(problems, tokenizer, model, limit=None, sampling=Sampling(), warm=0):
    """One engine request a problem, the i-th with the i-th seed after sampling's: `limit` new tokens at most, or room for
    twice a known solution. warm: enter the reference chain of thought where prompt and chain have so many tokens; a long
    context is then reached in seconds. ValueError where a prompt does not fit the context, or a chain is too short, or the
    tokenizer is another model's."""
    block, ends, out = model.config.block_size, [model.config.eos_id, *tokenizer.ends], []
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ValueError(f"tokenizer.json has ids up to {tokenizer.vocab_size - 1}, the model a vocabulary of {model.config.vocab_size}; they do not belong together")
    for i, p in enumerate(problems):
        ids = tokenizer.next_prompt_ids(*p.before, p.prompt) if p.before else tokenizer.prompt_ids(p.prompt)
        chain = p.think if tokenizer.ours else ""                # other models write chains of their own
        known = len(tokenizer.response_ids(chain, p.answer)) if chain else 512
        final = len(ids) + known if chain else None
        if warm:
            ids = (ids + tokenizer.encode(p.think))[:warm]
            if len(ids) < warm:
                raise ValueError(f"problem {i + 1} has a known chain of {len(ids)} tokens with its prompt; a warm context of {warm} needs a longer one (--task trace)")
        later = sum(len(tokenizer.next_prompt_ids([], [], t)) for t in p.turns)      # every turn gets as much room as the first
        room = (block - len(ids) - later) // (1 + len(p.turns))
        if room < max(limit or 1, 1):
            turns = f" for each of {1 + len(p.turns)} answers" if p.turns else ""
            raise ValueError(f"prompt {i + 1} has {len(ids) + later} tokens and asks for {limit or 2 * known} more{turns}; the context of this model is {block}")
        out.append(Request(ids, limit or min(2 * known, room), replace(sampling, seed=sampling.seed + i), ends, final))
    return out


def summary(generations, engine):
    """The figures of one run, over all its requests, as a dict (see README for what each one means)."""
    steps = [s for g in generations for s in g.steps]
    k = max((s.proposed for s in steps), default=0)
    tokens, seconds = sum(len(g.token_ids) for g in generations), sum(engine.seconds.values())
    by_position = []
    for i in range(k):
        tried = [s for s in steps if s.proposed > i]
        by_position.append(round(sum(s.accepted > i for s in tried) / len(tried), 4))
    return {
        "new_tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds,
        "tau": sum(s.committed for s in steps) / len(steps) if steps else 0.0,
        "accepted_per_round": sum(s.accepted for s in steps) / len(steps) if steps else 0.0,
        "acceptance_by_position": by_position,
        "phase_seconds": dict(engine.seconds),
    }


def schedule_view(engine):
    """What the scheduler did: rows an iteration, how many requests were in which phase, use of the cache."""
    its = engine.iterations
    rows = [i["prefill"] + i["draft"] + i["verify"] for i in its]
    return {"iterations": len(its), "rows_mean": statistics.mean(rows), "rows_deviation": statistics.pstdev(rows),
            "prefill_rows": sum(i["prefill"] for i in its), "draft_rows": sum(i["draft"] for i in its), "verify_rows": sum(i["verify"] for i in its),
            "stalled": sum(i["stalled"] for i in its), "active_mean": statistics.mean(i["active"] for i in its),
            "cache_slots": engine.cache.n_slots, "cache_peak": max(i["used"] for i in its), "moved": engine.cache.moved,
            "offloaded": engine.cache.offloaded, "recomputed": engine.admission.recomputed}


@torch.inference_mode()
def tie_gap(model, prompt_ids, a, b):
    """Gap between the target's two largest logits where outputs a and b first differ; 0 when they do not."""
    i = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)
    if i is None:
        return 0.0
    ids = torch.tensor([prompt_ids + a[:i]], device=model.device)
    hidden = model(ids, torch.arange(ids.shape[1], device=model.device)[None], dense_attend())[0, -1]
    top = model.logits(hidden).float().topk(2).values
    return (top[0] - top[1]).item()


def converse(problems, answer):
    """Ask the problems, then what their further turns ask about the answers. answer(problems) -> generations. Returns [(problem,
    generation, turn)], a problem's turns one after the other."""
    out, live, turn = [], list(enumerate(problems)), 1
    while live:
        generations = answer([p for _, p in live])
        out += [(i, turn, p, g) for (i, p), g in zip(live, generations)]
        live, turn = [(i, _next(p, g)) for (i, p), g in zip(live, generations) if p.turns], turn + 1
    return [(p, g, turn) for _, turn, p, g in sorted(out, key=lambda row: row[:2])]


def _next(problem, generation):
    return replace(problem, prompt=problem.turns[0].rstrip("\n") + "\n", think="", answer="", turns=problem.turns[1:], before=(generation.prompt_ids, generation.token_ids))


def verdict(problem, generation, tokenizer):
    """True or False where the problem has a checkable answer, else None. The answer of a procedural problem needs a mark, which only
    our models have."""
    text = tokenizer.answer_text(generation.token_ids)
    if "check" in problem.facts:
        return prompts.check(problem, text)
    return tasks.check(problem, text) if problem.answer and tokenizer.ours else None
