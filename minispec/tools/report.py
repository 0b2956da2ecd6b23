"""What decode.py says of a finished run: one dict, which --json writes, and the closing lines made of it."""
import statistics

from minispec.tools.answers import summary, tie_gap, verdict
from minispec.tools.terminal import before_stop


def figures(args, model, tokenizer, engine, rows, first_token):
    """The figures of a run. rows: [(problem, generation, turn)]; first_token: seconds to the first token of
    every answer."""
    generations = [generation for _, generation, _ in rows]
    result = {
        "method": args.method,
        "model": args.model,
        "temperature": args.temperature,
        "device": args.device,
        "dtype": str(model.dtype).removeprefix("torch."),
        **summary(generations, engine),
        "time_to_first_token": statistics.mean(first_token) if first_token else None,
        "requests": [describe(*r, tokenizer, args.stop) for r in rows],
    }
    known = [one["correct"] for one in result["requests"] if one["correct"] is not None]
    result["correct"] = sum(known) if known else None
    if hasattr(engine, "counts"):                        # of a diffusion model
        result["counts"] = engine.counts
    return result


def describe(problem, generation, turn, tokenizer, stops):
    """All there is to know about one answer."""
    return {
        "turn": turn,
        "prompt_token_ids": generation.prompt_ids,
        "token_ids": generation.token_ids,
        "text": before_stop(tokenizer.decode(generation.token_ids), stops),
        "who": generation.who,
        "finish": generation.finish,
        "steps": [vars(s) for s in generation.steps],
        "correct": verdict(problem, generation, tokenizer),
    }


def compare(result, generations, plain, ar, model):
    """Add to `result` how much faster it was than the plain loop `ar`, whose generations are `plain`, and to
    each of its answers whether it is identical."""
    greedy = result["temperature"] == 0
    for one, a, g in zip(result["requests"], plain, generations):
        same_prompt = a.prompt_ids == g.prompt_ids       # a later turn is asked about the answers before it
        one["identical"] = same_prompt and a.token_ids == g.token_ids
        one["tie_gap"] = 0.0
        if same_prompt and greedy:
            one["tie_gap"] = tie_gap(model, g.prompt_ids, a.token_ids, g.token_ids)
    reference = summary(plain, ar)
    rates = {"speedup": "decode_tokens_per_second", "speedup_end_to_end": "tokens_per_second"}
    for speedup, name in rates.items():
        result["ar_" + name] = reference[name]
        known = result[name] is not None and reference[name] is not None
        result[speedup] = result[name] / reference[name] if known else None
    result["identical"] = all(one["identical"] for one in result["requests"])
    result["tie_gap"] = max(one["tie_gap"] for one in result["requests"])


# -- the closing lines -----------------------------------------------------------------------------------

def table(r):
    """The closing lines of a run."""
    diffusion = "counts" in r
    first = "-" if r["time_to_first_token"] is None else f"{r['time_to_first_token']:.3f} s"
    lines = [
        f"{r['method']} on {r['device']}, {r['dtype']}: {r['new_tokens']} tokens in {r['seconds']:.2f} s, "
        f"{rate(r['tokens_per_second'])} end to end",
        f"prefill: {r['prompt_tokens']} prompt tokens, {rate(r['prefill_tokens_per_second'])}; "
        f"first token after {first}; decoding: {rate(r['decode_tokens_per_second'])}",
    ]
    if diffusion:
        counts = r["counts"]
        lines.append(f"{r['tau']:.2f} tokens per forward of a request; "
                     f"{counts['forwards']} forwards were fed {counts['tokens_fed']} tokens "
                     f"for {counts['tokens_kept']} kept")
    else:
        lines.append(f"tau {r['tau']:.2f} tokens per verifying forward of the target "
                     "(bonus token included)")
    if r["acceptance_by_position"]:
        shares = " ".join(f"{a:.2f}" for a in r["acceptance_by_position"])
        lines.append(f"accepted by draft position: {shares}")
    shares = [f"{name} {100 * r['phase_seconds'][name] / r['seconds']:.0f} %"
              for name in ("prefill", "draft", "verify", "other")]
    lines.append("time: " + ", ".join(shares))
    if r.get("warm_up_seconds"):                         # of a GPU
        lines.append(f"warm-up, in none of these figures: {r['warm_up_seconds']:.1f} s "
                     "to compile kernels and capture CUDA graphs")

    # What --compare adds.
    if "speedup" in r:
        lines.append(f"autoregressive: {rate(r['ar_tokens_per_second'])} end to end, "
                     f"decoding {rate(r['ar_decode_tokens_per_second'])}; speed-up {times(r['speedup'])} in "
                     f"decoding, {times(r['speedup_end_to_end'])} end to end")
    if "speedup" in r and not diffusion:
        differs = f"differs from autoregressive (top-2 logit gap there: {r['tie_gap']:.2g})"
        lines.append("output: " + ("identical to autoregressive" if r["identical"] else differs))

    if "regime" in r:
        lines += specgen_lines(r["schedule"], r["regime"])
    if r["correct"] is not None and "requests" in r:
        lines.append(f"answer: {r['correct']} of {len(r['requests'])} correct")
    elif r["correct"] is not None:
        lines.append("answer: " + ("correct" if r["correct"] else "wrong"))
    return "\n".join(lines)


def rate(tokens_per_second):
    return "-" if tokens_per_second is None else f"{tokens_per_second:.1f} tokens/s"


def times(speedup):
    return "-" if speedup is None else f"{speedup:.2f}x"


def specgen_lines(v, r):
    advice = ""
    if r["attention_share"] <= 1 / 3:
        advice = (". Under a third, reading less of the cache saves too little to win: "
                  "try longer contexts or a larger batch")
    return [
        f"forwards: {v['iterations']} of {v['rows_mean']:.1f} rows "
        f"(standard deviation {v['rows_deviation']:.1f}); "
        f"rows: {v['prefill_rows']} prefill, {v['draft_rows']} draft, {v['verify_rows']} verify; "
        f"{v['active_mean']:.1f} requests at once, {v['stalled']} stalls",
        f"cache: at most {v['cache_peak']} of {v['cache_slots']} slots; "
        f"{v['offloaded']} tokens offloaded, {v['recomputed']} recomputed, {v['moved']} moved",
        f"attention takes {100 * r['attention_share']:.0f} % of an autoregressive step here; on long answers "
        f"the cost model predicts a speed-up of {r['predicted_speedup']:.2f}x{advice}",
    ]
