"""The report of a finished run of decode.py: one dict, which --json writes, and the closing lines made from
it."""
import statistics
from dataclasses import asdict, replace

from minispec.tools.answers import ratio, schedule_view, summary, tie_gap, verdict


def figures(args, tokenizer, engine, problems, generations, first_token):
    """The figures of a run, as a dict that JSON can hold. first_token: seconds to the first token, for each
    answer."""
    result = {
        "method": args.method,
        "model": args.model.rstrip("/"),
        "temperature": args.sampling.temperature,
        "device": args.device,
        "dtype": args.dtype,
        **summary(generations, engine),
        "time_to_first_token": statistics.mean(first_token),
        "requests": [{
            **asdict(generation),
            "text": tokenizer.decode(generation.token_ids),
            "correct": verdict(problem, generation, tokenizer),
        } for problem, generation in zip(problems, generations)],
    }
    known = [one["correct"] for one in result["requests"] if one["correct"] is not None]
    result["correct"] = sum(known) if known else None
    if hasattr(engine, "counts"):                        # a diffusion model's decoder
        result["counts"] = engine.counts
        result["threshold"] = engine.threshold
    if args.method == "specgen":
        result["schedule"] = schedule_view(engine)
    return result


def compare(result, plain, model, sampling):
    """Add to the figures of a run its speed-ups over the plain loop, whose figures are `plain`, and whether
    the answers are identical. Rejection sampling above temperature 0 keeps the distribution, not the text, so
    its answers are not compared."""
    rates = {"speedup": "decode_tokens_per_second", "speedup_end_to_end": "tokens_per_second"}
    for speedup, name in rates.items():
        result[f"ar_{name}"] = plain[name]
        result[speedup] = ratio(result[name], plain[name])
    if "counts" in result:                               # a diffusion model's rate includes its prompts
        result["speedup"] = None
    if not sampling.rejects:
        pairs = [(g["prompt_ids"], a["token_ids"], g["token_ids"], replace(sampling, seed=sampling.seed + i))
                 for i, (a, g) in enumerate(zip(plain["requests"], result["requests"]))]
        result["identical"] = all(a == b for _, a, b, _ in pairs)
        result["tie_gap"] = max(tie_gap(model, *pair) for pair in pairs)


# -- the closing lines -----------------------------------------------------------------------------------

def table(r):
    """The closing lines of a run."""
    diffusion = "counts" in r
    # Method, device, tokens/s.
    lines = [
        f"{r['method']} on {r['device']}, {r['dtype']}: {r['new_tokens']} tokens in {r['seconds']:.2f} s, "
        f"{known(r['tokens_per_second'])} end to end",
        f"prefill: {r['prompt_tokens']} prompt tokens, {known(r['prefill_tokens_per_second'])}; "
        f"first token after {r['time_to_first_token']:.3f} s; "
        f"decoding: {known(r['decode_tokens_per_second'])}",
    ]
    # Tokens per forward, acceptance, and time by phase.
    if diffusion:
        counts = r["counts"]
        lines.append(f"{r['tau']:.2f} tokens per forward of a request; "
                     f"{counts['forwards']} forwards were fed {counts['tokens_fed']} tokens "
                     f"for {r['new_tokens']} kept")
    else:
        lines.append(f"tau {r['tau']:.2f} tokens per round of a request (bonus token included)")
    if r["acceptance_by_position"]:
        shares = " ".join(f"{a:.2f}" for a in r["acceptance_by_position"])
        lines.append(f"accepted by draft position: {shares}")
    shares = [f"{name} {100 * r['phase_seconds'][name] / r['seconds']:.0f} %"
              for name in ("prefill", "draft", "verify", "other")]
    lines.append(f"time: {', '.join(shares)}")
    if r.get("warm_up_seconds"):                         # on a GPU
        lines.append(f"warm-up, in none of these figures: {r['warm_up_seconds']:.1f} s "
                     "to compile kernels and capture CUDA graphs")

    # --compare adds the plain loop.
    if "speedup" in r:
        lines.append(f"autoregressive: {known(r['ar_tokens_per_second'])} end to end, "
                     f"decoding {known(r['ar_decode_tokens_per_second'])}; "
                     f"speed-up {known(r['speedup'], '{:.2f}x')} in decoding, "
                     f"{known(r['speedup_end_to_end'], '{:.2f}x')} end to end")
    if "identical" in r and not diffusion:
        differs = f"differs from autoregressive (top-2 gap of logits and noise there: {r['tie_gap']:.2g})"
        lines.append("output: " + ("identical to autoregressive" if r["identical"] else differs))

    # Lines that only some methods and problems have.
    if "schedule" in r:
        lines += schedule_lines(r["schedule"])
    if r["correct"] is not None:
        checked = sum(x["correct"] is not None for x in r["requests"])
        lines.append(f"answer: {r['correct']} of {checked} correct")
    if "busy" in r:
        lines.append(r["busy"])
    return "\n".join(lines)


def known(x, form="{:.1f} tokens/s"):
    """A figure as text, or "-" if it is None."""
    return "-" if x is None else form.format(x)


def schedule_lines(v):
    return [
        f"forwards: {v['iterations']} of {v['rows_mean']:.1f} rows "
        f"(standard deviation {v['rows_deviation']:.1f}); "
        f"rows: {v['prefill_rows']} prefill, {v['draft_rows']} draft, {v['verify_rows']} verify; "
        f"{v['active_mean']:.1f} requests at once, {v['stalled']} stalls",
        f"cache: at most {v['cache_peak']} of {v['cache_slots']} slots; "
        f"{v['offloaded']} tokens offloaded, {v['dropped']} dropped"
        + (f", {v['shared']} shared" if v["shared"] else ""),
    ]
