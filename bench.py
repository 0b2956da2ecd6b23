"""Measure, write results/*.json, render the README's tables from them.

    python bench.py                      # all studies on the shipped models, about 40 minutes on 2 CPU cores
    python bench.py accuracy --quick     # one study, small: minutes
    python bench.py speed specgen        # some studies
    python bench.py report               # only render the tables into README.md

A study whose file is there is skipped unless --force is given, so an interrupted run continues.
"""
import argparse
import json
import os
import platform
import re
import statistics
import sys
import time

import minispec  # before torch: it tunes the allocator
import torch
from tqdm import tqdm

from minispec import gpt, methods, specgen, tasks
from minispec.attention import FullKeys, mass_in_top, packed_attend
from minispec.engine import Engine, Lockstep, Request
from minispec.kv_cache import KVCache
from minispec.tokenizer import Tokenizer
from decode import summary, tie_gap, verdict

ROOT = os.path.dirname(os.path.abspath(__file__))
RESULTS, CHECKPOINTS = os.path.join(ROOT, "results"), os.path.join(ROOT, "checkpoints")


def requests_of(problems, tokenizer, model, limit=None):
    """Greedy requests with room for twice the known solution."""
    out = []
    for p in problems:
        ids = tokenizer.prompt_ids(p.prompt)
        n = 2 * len(tokenizer.response_ids(p.think, p.answer))
        out.append(Request(ids, min(n, limit or n, model.config.block_size - len(ids)), stop_ids=[model.config.eos_id]))
    return out


def warm_requests(tokenizer, model, context, new_tokens, n, seed=0):
    """Held-out `trace` problems entered in the middle: the prompt and the first part of the reference chain, `context`
    tokens in all, are given. A long context is reached in seconds, and all methods continue the same text."""
    out = []
    for i in range(n):
        p = tasks.make("trace", seed + i, "heldout", min(int((context + 2 * new_tokens) / (tasks.TOKENS_PER_LINE + 7)), tasks.TRACE_MAX))
        ids = tokenizer.prompt_ids(p.prompt) + tokenizer.encode(p.think)
        out.append(Request(ids[:context], new_tokens, stop_ids=[model.config.eos_id]))
    return out


def accuracy(args, model, tokenizer):
    """Share of held-out problems solved, greedy, at the trained difficulty; and `trace` with chains of 4,000 tokens."""
    n, rows = 20 if args.quick else 200, {}
    for name, family, size, count in [(f, f, None, n) for f in tasks.FAMILIES] + [("trace, 4,000 tokens", "trace", 4000 // tasks.TOKENS_PER_LINE, n // 4)]:
        problems = [tasks.make(family, i, "heldout", size) for i in range(count)]
        engine = methods.make_engine("ar", model, args, 16 if size else 32)
        requests = requests_of(problems, tokenizer, model)
        with tqdm(total=count, desc=name) as bar:
            for request, _ in engine.stream(requests):
                bar.update(int(request.finished))
        generations = [r.generation for r in requests]
        right = sum(verdict(p, g, tokenizer) for p, g in zip(problems, generations))
        rows[name] = {"size": [size, size] if size else list(tasks.SIZES[family]), "problems": count, "correct": right, "accuracy": right / count,
                      "mean_tokens": statistics.mean(len(g.token_ids) for g in generations), "finished": sum(g.finish == "stop" for g in generations)}
    return {"families": rows, "mean": statistics.mean(rows[f]["accuracy"] for f in tasks.FAMILIES)}


def lossless(args, model, tokenizer):
    """Greedy output against autoregressive output on held-out prompts of all families: identical in fp32; in bf16, where
    the number of rows changes rounding, a first difference must sit at a near-tie."""
    per_family, out = 4 if args.quick else 20, {}
    problems = [tasks.make(f, 1000 + i, "heldout") for f in tasks.FAMILIES for i in range(per_family)]
    for dtype in (torch.float32, torch.bfloat16):
        target = gpt.load(args.model, dtype=dtype)
        reference = methods.make_engine("ar", target, args, 10).generate(requests_of(problems, tokenizer, target))
        rows = {}
        for name in tqdm([m for m in methods.METHODS if m != "ar"], desc=str(dtype)):
            got = methods.make_engine(name, target, args, 10).generate(requests_of(problems, tokenizer, target))
            gaps = [tie_gap(target, r.prompt_ids, r.token_ids, g.token_ids) for r, g in zip(reference, got) if r.token_ids != g.token_ids]
            rows[name] = {"prompts": len(problems), "identical": len(problems) - len(gaps), "largest_tie_gap": max(gaps, default=0.0)}
        out[str(dtype).removeprefix("torch.")] = {"methods": rows, "row_count_noise": row_count_noise(target, tokenizer)}
    return out


@torch.inference_mode()
def row_count_noise(model, tokenizer):
    """Largest difference of a logit between feeding a held-out chain one row at a time and nine rows at a time."""
    largest = 0.0
    for seed in range(4):
        p = tasks.make("trace", seed, "heldout", 12)
        ids = (tokenizer.prompt_ids(p.prompt) + tokenizer.encode(p.think))[:360]
        runs = []
        for n in (1, 9):
            cache, logits = KVCache(model.config, 360, model.dtype), []
            for start in range(0, 360, n):
                x, keys = torch.tensor(ids[start:start + n]), FullKeys(cache, 0, start, n)
                logits.append(model.logits(model(x, torch.arange(start, start + n), packed_attend([(0, n, keys)]))).float())
            runs.append(torch.cat(logits))
        largest = max(largest, (runs[0] - runs[1]).abs().max().item())
    return largest


def attention(args, model, tokenizer):
    """Attention mass each layer's heads put on their own top 5 % of keys, at 2,000 and 4,000 tokens."""
    out, n = {}, 2 if args.quick else 8
    for at in (2000, 4000):
        masses = torch.stack([mass_in_top(model, torch.tensor([r.tokens]), 0.05) for r in warm_requests(tokenizer, model, at, 64, n)])
        out[str(at)] = {"layers": masses.mean((0, 2)).tolist(), "heads": masses.mean(0).tolist(), "mean": masses.mean().item()}
    return out


def acceptance(args, model, tokenizer):
    """SpecGen on long chains: accepted drafts of 8 and tau, by selection and budget, at contexts of 4,000 tokens and more."""
    n, new, rows = (2, 64, []) if args.quick else (8, 192, [])
    cells = [("pillar", s, share) for s in (0.02, 0.05, 0.1) for share in (0.0, 0.5)] + [(select, s, 0.0) for select in ("window", "random") for s in (0.02, 0.05, 0.1)]
    for select, sparsity, share in tqdm(cells + [("pillar", 1.0, 0.0)], desc="acceptance"):
        engine = Engine(model, lambda e: specgen.SpecGen(e, 8, sparsity, 0, share, select), n)
        generations = engine.generate(warm_requests(tokenizer, model, 4000, new, n))
        # The first round of each request sees everything (no scores yet) and is left out; so are rounds cut short at the end.
        steps = [[s for s in g.steps[1:] if s.proposed == 8] for g in generations]
        means = [statistics.mean(s.accepted for s in one) for one in steps if one]
        rows.append({"select": select, "sparsity": sparsity, "recent_share": share, "accepted": statistics.mean(means),
                     "standard_error": statistics.stdev(means) / len(means) ** 0.5 if len(means) > 1 else 0.0,
                     "tau": statistics.mean(s.committed for one in steps for s in one), "rounds": sum(map(len, steps))})
    return {"context": 4000, "requests": n, "new_tokens": new, "k": 8, "rows": rows}


def speed(args, model, tokenizer):
    """Tokens a second of every method against the faster dtype of the autoregressive loop: interleaved repeats, medians."""
    repeats, rows = (1 if args.quick else 3), []
    workloads = {f: (lambda t, f=f: requests_of([tasks.make(f, 500 + i, "heldout") for i in range(3)], tokenizer, t, 192)) for f in tasks.FAMILIES}
    workloads["trace at 4,000"] = lambda t: warm_requests(tokenizer, t, 4000, 128, 3)
    targets = {"float32": model, "bfloat16": gpt.load(args.model, dtype=torch.bfloat16)}
    for workload, build in workloads.items():
        cells = [("ar", d) for d in targets] + [(m, "float32") for m in methods.METHODS if m != "ar"]
        engines = {cell: methods.make_engine(cell[0], targets[cell[1]], args, 1) for cell in cells}
        times = {cell: [] for cell in cells}
        for repeat in tqdm(range(repeats + 1), desc=workload):
            for cell, engine in engines.items():
                engine.seconds = dict.fromkeys(engine.seconds, 0.0)
                generations = engine.generate(build(targets[cell[1]]))
                if repeat:                               # the first one warms up
                    busy = engine.seconds["draft"] + engine.seconds["verify"] + engine.seconds["other"]
                    times[cell].append(sum(len(g.token_ids) for g in generations) / busy)
                    last = {cell: summary(generations, engine)} if repeat == 1 else last | {cell: summary(generations, engine)}
        for cell in cells:
            best = [max(a, b) for a, b in zip(times[("ar", "float32")], times[("ar", "bfloat16")])]
            ratios = [t / b for t, b in zip(times[cell], best)]
            rows.append({"workload": workload, "method": cell[0], "dtype": cell[1], "tokens_per_second": statistics.median(times[cell]),
                         "speedup": statistics.median(ratios), "speedup_range": [min(ratios), max(ratios)], "tau": last.get(cell, {}).get("tau")})
    return {"repeats": repeats, "batch": 1, "rows": rows}


STUDIES = {"accuracy": accuracy, "lossless": lossless, "attention": attention, "acceptance": acceptance, "speed": speed}


# -- tables ------------------------------------------------------------------------------------------------------------

def _table(head, rows):
    return "\n".join("| " + " | ".join(map(str, r)) + " |" for r in [head, ["---"] * len(head), *rows])


def render(name, r):
    """The Markdown table of a study's result."""
    if name == "accuracy":
        rows = [[f, "{}-{}".format(*x["size"]) if x["size"][0] != x["size"][1] else x["size"][0], x["problems"], f"{x['mean_tokens']:.0f}", f"{100 * x['accuracy']:.1f} %"]
                for f, x in r["families"].items()]
        return _table(["held-out problems", "size", "problems", "tokens an answer", "solved"], rows + [["mean of the five families", "", "", "", f"{100 * r['mean']:.1f} %"]])
    if name == "lossless":
        rows = [[m, d, f"{x['identical']} of {x['prompts']}", f"{x['largest_tie_gap']:.3g}", f"{r[d]['row_count_noise']:.2g}"]
                for d in ("float32", "bfloat16") for m, x in r[d]["methods"].items()]
        return _table(["method", "dtype", "identical to autoregressive", "largest top-2 gap at a difference", "row-count noise of a logit"], rows)
    if name == "attention":
        layers = len(r["4000"]["layers"])
        return _table(["mass in the top 5 % of keys", *(f"layer {i}" for i in range(layers)), "mean"],
                      [[f"{at} tokens", *(f"{m:.2f}" for m in r[at]["layers"]), f"{r[at]['mean']:.2f}"] for at in r])
    if name == "acceptance":
        label = lambda x: x["select"] + (", half recent" if x["recent_share"] else ", official rule" if x["select"] == "pillar" and x["sparsity"] < 1 else "")
        rows = [[label(x), f"{100 * x['sparsity']:g} %", f"{x['accepted']:.2f} ± {x['standard_error']:.2f}", f"{x['tau']:.2f}", x["rounds"]] for x in r["rows"]]
        return _table(["selection", "budget s", "accepted of 8 (± standard error over requests)", "tau", "rounds"], rows)
    if name == "speed":
        rows = [[x["workload"], x["method"], x["dtype"], f"{x['tokens_per_second']:.0f}", f"{x['speedup']:.2f} ({x['speedup_range'][0]:.2f}-{x['speedup_range'][1]:.2f})", f"{x['tau']:.2f}"]
                for x in r["rows"]]
        return _table(["workload", "method", "dtype", "tokens/s", "speed-up (range)", "tau"], rows)
    if name == "transformers":
        return _table(["loop", "tokens/s, median (range)", "ratio to transformers"],
                      [["transformers generate", _spread(r["transformers"]), "1.00"], ["minispec ar", _spread(r["minispec"]), f"{r['ratio']:.2f}"]])
    raise KeyError(name)


def training_table(folder):
    """Command, size, tokens, minutes and last held-out figures of every checkpoint, from its command.txt and log.jsonl."""
    rows = []
    for name in sorted(os.listdir(folder)):
        files = [os.path.join(folder, name, f) for f in ("command.txt", "log.jsonl")]
        if all(map(os.path.exists, files)):
            with open(files[0], encoding="utf-8") as f:
                command = f.read().strip()
            with open(files[1], encoding="utf-8") as f:
                log = [json.loads(line) for line in f]
            seconds = sum(max(b - a, 0) if b > a else b for a, b in zip([0] + [r["seconds"] for r in log], [r["seconds"] for r in log]))
            params = gpt.load(os.path.join(folder, name)).n_params()
            rows.append([name, f"{params / 1e6:.2f}M", f"{log[-1]['tokens'] / 1e6:.1f}M", f"{seconds / 60:.0f}", f"{log[-1]['loss']:.3f}", f"`{command}`"])
    return _table(["checkpoint", "parameters", "tokens", "minutes on 2 CPU cores", "last loss", "command"], rows)


def _spread(values):
    return f"{statistics.median(values):.0f} ({min(values):.0f}-{max(values):.0f})"


def report(readme):
    """Replace what stands between the markers of each table in README.md."""
    with open(readme, encoding="utf-8") as f:
        text = f.read()
    for file in sorted(os.listdir(RESULTS)):
        name = file.removesuffix(".json")
        mark = re.compile(rf"(<!-- results:{name} -->\n).*?(\n<!-- end -->)", re.S)
        if mark.search(text):
            with open(os.path.join(RESULTS, file), encoding="utf-8") as f:
                r = json.load(f)
            source = f"\n\n`{r['command']}` on {r['device']}, torch {r['torch']}, {r['date']}, {r['seconds'] / 60:.0f} minutes."
            text = mark.sub(lambda m: m[1] + render(name, r["result"]) + source + m[2], text)
    text = re.sub(r"(<!-- training -->\n).*?(\n<!-- end -->)", lambda m: m[1] + training_table(CHECKPOINTS) + m[2], text, flags=re.S)
    with open(readme + ".tmp", "w", encoding="utf-8") as f:
        f.write(text)
    os.replace(readme + ".tmp", readme)


def processor():
    try:
        with open("/proc/cpuinfo") as f:
            return next(line.split(":")[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def write_result(name, result, seconds):
    """results/NAME.json with what is needed to repeat it."""
    os.makedirs(RESULTS, exist_ok=True)
    gpt.write_json(os.path.join(RESULTS, name + ".json"), {
        "command": "python " + " ".join([os.path.relpath(sys.argv[0]), *sys.argv[1:]]), "device": f"{processor()}, {torch.get_num_threads()} threads",
        "python": platform.python_version(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "seconds": round(seconds, 1), "result": result})


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("studies", nargs="*", metavar="STUDY", help=f"{', '.join(STUDIES)}, report (default: all)")
    p.add_argument("--quick", action="store_true", help="a tenth of the work, to see that it runs; not written to results/")
    p.add_argument("--force", action="store_true", help="measure again what has a result already")
    methods.add_arguments(p)
    args = p.parse_args()
    unknown = [s for s in args.studies if s not in (*STUDIES, "report")]
    if unknown:
        p.error(f"unknown study '{unknown[0]}'; choose from {', '.join((*STUDIES, 'report'))}")
    if args.studies != ["report"]:
        model, tokenizer = gpt.load(args.model, args.device), Tokenizer.load(args.model)
    for name, study in STUDIES.items():
        if args.studies and name not in args.studies:
            continue
        if os.path.exists(os.path.join(RESULTS, name + ".json")) and not args.force and not args.quick:
            print(f"{name}: already measured (--force measures again)")
            continue
        started = time.perf_counter()
        result = study(args, model, tokenizer)
        print(render(name, result))
        if not args.quick:
            write_result(name, result, time.perf_counter() - started)
    if not args.quick:
        report(os.path.join(ROOT, "README.md"))


if __name__ == "__main__":
    try:
        main()
    except ValueError as e:
        sys.exit(print(f"bench.py: {e}", file=sys.stderr) or 2)
