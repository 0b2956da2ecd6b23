"""Measure, write results/*.json, render the README's tables from them.

    python bench.py                      # all studies on the shipped models, about half an hour on 2 CPU cores
    python bench.py accuracy --quick     # one study, small: minutes
    python bench.py speed serving        # some studies
    python bench.py report               # only render tables and figures, into README.md and docs/

A study whose file is there is skipped unless --force is given, so an interrupted run continues.
"""
import glob
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

from minispec import figures, gpt, methods, specgen, tasks
from minispec.attention import FullKeys, mass_in_top, packed_attend
from minispec.engine import Engine
from minispec.kv_cache import KVCache
from minispec.script import Parser, run_main
from minispec.tokenizer import Tokenizer
from decode import requests_of, schedule_view, summary, tie_gap, verdict

ROOT = os.path.dirname(os.path.abspath(__file__))
RESULTS, CHECKPOINTS = os.path.join(ROOT, "results"), os.path.join(ROOT, "checkpoints")


def warm_requests(tokenizer, model, context, new_tokens, n, seed=0):
    """Held-out `trace` problems entered in the middle: the prompt and the first part of the reference chain, `context`
    tokens in all, are given. A long context is reached in seconds, and all methods continue the same text."""
    size = tasks.lines_for(context + 2 * new_tokens)
    return requests_of([tasks.make("trace", seed + i, "heldout", size) for i in range(n)], tokenizer, model, new_tokens, warm=context)


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
        for name in tqdm(methods.ready(args), desc=str(dtype)):
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


class Captured(specgen.SpecGen):
    """SpecGen that notes, at every verification, how much of the attention mass on cached positions the round's selection
    had caught: (context, share) in engine.notes."""

    def __init__(self, *settings):
        super().__init__(*settings)
        self.record = True

    def _select(self, r, keys, accepted):
        if r.state and r.state.selected is not None:              # none at the end of a prompt
            n = keys.all.stop - keys.all.start - keys.n            # cached when the round began
            old = keys.scores[:, :, :n]
            caught = old.gather(2, r.state.selected).sum(-1) + old[:, :, n - r.state.recent:].sum(-1)
            self.engine.notes.append((n, (caught / old.sum(-1)).mean().item()))
        return super()._select(r, keys, accepted)


def attention(args, model, tokenizer):
    """Attention mass each layer's heads put on their own top 5 % of keys, at 2,000 and 4,000 tokens; and what SpecGen's
    selection of 5 % catches of it, from the beginning of a chain to its end."""
    out, n = {}, 2 if args.quick else 8
    for at in (2000, 4000):
        masses = torch.stack([mass_in_top(model, torch.tensor([r.tokens]), 0.05) for r in warm_requests(tokenizer, model, at, 64, n)])
        out[str(at)] = {"layers": masses.mean((0, 2)).tolist(), "heads": masses.mean(0).tolist(), "mean": masses.mean().item()}
    captured = {}
    for name, select, share in (("pillar", "pillar", 0.0), ("window", "window", 0.0)):
        engine = Engine(model, lambda e: Captured(e, 8, 0.05, 64, share, select), 4)
        engine.notes, problems = [], [tasks.make("trace", i, "heldout", 20 if args.quick else 100) for i in range(1 if args.quick else 4)]
        engine.generate(requests_of(problems, tokenizer, model))
        captured[name] = engine.notes
    return {"mass": out, "captured": captured}


def acceptance(args, model, tokenizer):
    """SpecGen on long chains: accepted drafts and tau by selection, budget s, share of newest positions and k, at contexts
    of 4,000 tokens and more; one setting varies at a time."""
    n, new, rows = (2, 64, []) if args.quick else (8, 160, [])
    cells = [(select, 8, 0.05, share) for select, share in (("oracle", 0.0), ("pillar", 0.5), ("pillar", 0.0), ("shared", 0.5), ("window", 0.0), ("random", 0.0))]
    cells += [("pillar", 8, s, share) for s in (0.01, 0.02, 0.1, 0.25) for share in (0.5, 0.0)] + [("window", 8, s, 0.0) for s in (0.02, 0.1)]
    cells += [("random", 8, s, 0.0) for s in (0.02, 0.1)] + [("pillar", 8, 0.05, share) for share in (0.25, 0.75)]
    cells += [("pillar", k, 0.05, 0.5) for k in (2, 4, 16, 20)] + [("pillar", 8, 1.0, 0.0)]
    for select, k, sparsity, share in tqdm(cells[:6] if args.quick else cells, desc="acceptance"):
        engine = Engine(model, lambda e: specgen.SpecGen(e, k, sparsity, 0, share, select), n)
        generations = engine.generate(warm_requests(tokenizer, model, 4000, new, n))
        # Rounds that the schedule or the end of the answer cut short are left out.
        steps = [[s for s in g.steps if s.proposed == k] for g in generations]
        means = [statistics.mean(s.accepted for s in one) for one in steps if one]
        rows.append({"select": select, "k": k, "sparsity": sparsity, "recent_share": share, "accepted": statistics.mean(means),
                     "standard_error": statistics.stdev(means) / len(means) ** 0.5 if len(means) > 1 else 0.0,
                     "tau": statistics.mean(s.committed for one in steps for s in one), "rounds": sum(map(len, steps))})
    return {"context": 4000, "requests": n, "new_tokens": new, "rows": rows}


def busy(engine):
    """Seconds of decoding: everything but reading the prompts, which all methods do alike."""
    return engine.seconds["draft"] + engine.seconds["verify"] + engine.seconds["other"]


def race(cells, repeats, desc, warm_up=True):
    """cells: {name: function that returns (engine, fresh requests)}. Runs them in turn, `repeats` times after one warm-up;
    {name: ([tokens a second], last engine, last generations)}."""
    out = {}
    for repeat in tqdm(range(repeats + warm_up), desc=desc):
        for name, build in cells.items():
            engine, requests = build()
            generations = engine.generate(requests)
            counts = repeat >= warm_up
            out[name] = out.get(name, ([],))[0] + [sum(len(g.token_ids) for g in generations) / busy(engine)] * counts, engine, generations
    return out


def ratio(rates, *baselines):
    """Median and range of the pairwise ratios to the fastest of the baselines."""
    ratios = [r / max(b) for r, b in zip(rates, zip(*baselines))]
    return {"tokens_per_second": statistics.median(rates), "speedup": statistics.median(ratios), "speedup_range": [min(ratios), max(ratios)]}


def speed(args, model, tokenizer):
    """Tokens a second of every method, one request at a time, against the faster dtype of the autoregressive loop."""
    rows, targets = [], {"float32": model, "bfloat16": gpt.load(args.model, dtype=torch.bfloat16)}
    workloads = {f: (lambda t, f=f: requests_of([tasks.make(f, 500 + i, "heldout") for i in range(3)], tokenizer, t, 192)) for f in tasks.FAMILIES}
    workloads["trace at 4,000"] = lambda t: warm_requests(tokenizer, t, 4000, 128, 3)
    for workload, requests in workloads.items():
        cells = {(m, d): (lambda m=m, d=d: (methods.make_engine(m, targets[d], args, 1), requests(targets[d])))
                 for m, d in [("ar", d) for d in targets] + [(m, "float32") for m in methods.ready(args)]}
        results = race(cells, 1 if args.quick else 3, workload)
        plain = results["ar", "float32"]
        for (m, d), (rates, engine, generations) in results.items():
            rows.append({"workload": workload, "method": m, "dtype": d, **ratio(rates, plain[0], results["ar", "bfloat16"][0]),
                         "tau": summary(generations, engine)["tau"],
                         "identical": sum(a.token_ids == b.token_ids for a, b in zip(plain[2], generations)), "prompts": len(generations)})
    return {"batch": 1, "rows": rows}


def serving(args, model, tokenizer):
    """SpecGen where it should win: several requests with long contexts. Speed-up over the autoregressive loop of the same
    batch (the faster dtype), and what the cost model predicts from timings of single steps (for the same dtype)."""
    rows, targets = [], {"float32": model, "bfloat16": gpt.load(args.model, dtype=torch.bfloat16)}
    grid = [(1000, 2)] if args.quick else [(1000, 8), (4000, 8), (8192, 8)]
    for context, batch in grid:
        new = 96
        cells = {(m, d): (lambda m=m, t=t: (methods.make_engine(m, t, args, batch), warm_requests(tokenizer, t, context, new, batch)))
                 for m in ("ar", "specgen") for d, t in targets.items()}
        results = race(cells, 2, f"{batch} requests at {context}")
        both = [results["ar", d][0] for d in targets]
        for (m, d), (rates, engine, generations) in results.items():
            row = {"context": context, "requests": batch, "method": m, "dtype": d, **ratio(rates, *both), "identical": None}
            if m == "specgen":
                accepted = statistics.mean(s.accepted for g in generations for s in g.steps if s.proposed == 8)
                costs = specgen.measure_costs(targets[d], context, batch, 8)
                own = statistics.median(rates) / statistics.median(results["ar", d][0])
                row |= {"accepted": accepted, **costs, "own_speedup": own, "phase_seconds": dict(engine.seconds),
                        "predicted": specgen.predicted_speedup(8, max(args.sparsity, args.min_budget / context), accepted, **costs),
                        "identical": sum(a.token_ids == b.token_ids for a, b in zip(results["ar", d][2], generations))}
            rows.append(row)
    return {"k": 8, "sparsity": args.sparsity, "rows": rows}


def scheduler(args, model, tokenizer):
    """The parts of SpecGen's system, one after the other, with a cache of half of what all requests may need; and how even
    the forwards are with 40 requests in steady state."""
    n, lines = (4, 8) if args.quick else (8, 50)
    problems = [tasks.make("trace", 700 + i, "heldout", lines) for i in range(n)]
    new = lambda: requests_of(problems, tokenizer, model)
    demand = sum(r.longest for r in new())
    stages = {"autoregressive, reserve": ("ar", {}), "naive self-speculation": ("specgen", {"schedule": "lockstep"}), "+ unified schedule": ("specgen", {}),
              "+ cache manager (offload)": ("specgen", {"admission": "offload"}), "+ delayed verification": ("specgen", {"admission": "offload", "delayed": True}),
              "preempt instead of offload": ("specgen", {"admission": "preempt"}), "oracle lengths": ("specgen", {"admission": "oracle"})}
    cells = {name: (lambda m=m, c=c: (methods.make_engine(m, model, methods.settings(**{**vars(args), "cache_tokens": demand // 2, **c}), n), new()))
             for name, (m, c) in stages.items()}
    results, rows = race(cells, 1, "scheduler", warm_up=False), []
    plain = results["autoregressive, reserve"]
    for name, (rates, engine, generations) in results.items():
        rows.append({"stage": name, **ratio(rates, plain[0]), **schedule_view(engine),
                     "identical": sum(a.token_ids == b.token_ids for a, b in zip(plain[2], generations))})
    even = {}
    for schedule in specgen.SCHEDULES:
        batch = 8 if args.quick else 40
        engine = methods.make_engine("specgen", model, methods.settings(**{**vars(args), "schedule": schedule}), batch)
        engine.generate(requests_of([tasks.make("trace", i, "heldout", 12) for i in range(batch)], tokenizer, model, 120))
        steady = [i["draft"] + i["verify"] for i in engine.iterations if i["active"] == batch and not i["prefill"]][9:-9]
        even[schedule] = {"rows": steady, "mean": statistics.mean(steady), "deviation": statistics.pstdev(steady), "most": max(steady), "least": min(steady)}
    return {"requests": n, "cache_tokens": demand // 2, "demand": demand, "rows": rows, "evenness": even}


STUDIES = {"accuracy": accuracy, "lossless": lossless, "attention": attention, "acceptance": acceptance, "speed": speed, "serving": serving, "scheduler": scheduler}


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
        mass, layers = r["mass"], len(r["mass"]["4000"]["layers"])
        return _table(["mass in the top 5 % of keys", *(f"layer {i}" for i in range(layers)), "mean"],
                      [[f"{at} tokens", *(f"{m:.2f}" for m in mass[at]["layers"]), f"{mass[at]['mean']:.2f}"] for at in mass])
    if name == "acceptance":
        label = lambda x: x["select"] + (f", {100 * x['recent_share']:.0f} % newest" if x["recent_share"] else ", official rule" if x["select"] == "pillar" and x["sparsity"] < 1 else "")
        rows = [[label(x), x["k"], f"{100 * x['sparsity']:g} %", f"{x['accepted']:.2f} ± {x['standard_error']:.2f}", f"{100 * x['accepted'] / x['k']:.0f} %", f"{x['tau']:.2f}", x["rounds"]] for x in r["rows"]]
        return _table(["selection", "k", "budget s", "accepted (± standard error over requests)", "of k", "tau", "rounds"], rows)
    times = lambda x: f"{x['speedup']:.2f} ({x['speedup_range'][0]:.2f}-{x['speedup_range'][1]:.2f})"
    if name == "speed":
        rows = [[x["workload"], x["method"], x["dtype"], f"{x['tokens_per_second']:.0f}", times(x), f"{x['tau']:.2f}", f"{x['identical']} of {x['prompts']}"] for x in r["rows"]]
        return _table(["workload", "method", "dtype", "tokens/s", "speed-up (range)", "tau", "identical to ar, float32"], rows)
    if name == "serving":
        rows = [[x["context"], x["requests"], x["method"], x["dtype"], f"{x['tokens_per_second']:.0f}", times(x),
                 *([f"{x['accepted']:.2f}", f"{100 * x['attention_share']:.0f} %", f"{x['own_speedup']:.2f}", f"{x['predicted']:.2f}", f"{x['identical']} of {x['requests']}"]
                   if x["method"] == "specgen" else [""] * 5)] for x in r["rows"]]
        return _table(["context", "requests", "method", "dtype", "tokens/s", "speed-up over the best ar (range)", "accepted of 8", "attention share",
                       "speed-up in its dtype", "predicted", "identical to ar in its dtype"], rows)
    if name == "scheduler":
        rows = [[x["stage"], f"{x['tokens_per_second']:.0f}", times(x), f"{x['active_mean']:.1f}", x["iterations"], x["offloaded"], x["recomputed"], f"{x['identical']} of {r['requests']}"] for x in r["rows"]]
        even = [[name, f"{e['mean']:.1f}", f"{e['deviation'] / e['mean']:.2f}", f"{e['most'] / e['least']:.1f}"] for name, e in r["evenness"].items()]
        return (_table(["stage", "tokens/s", "speed-up (range)", "requests at once", "forwards", "tokens offloaded", "recomputed", "identical to ar"], rows) + "\n\n"
                + _table(["schedule, 40 requests", "rows a forward", "standard deviation / mean", "most / least"], even))
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


def pages():
    """The texts with tables: README.md and the lessons."""
    return [os.path.join(ROOT, "README.md"), *sorted(glob.glob(os.path.join(ROOT, "docs", "*.md")))]


def report(page):
    """Replace what stands between the markers of each table in a page."""
    with open(page, encoding="utf-8") as f:
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
    with open(page + ".tmp", "w", encoding="utf-8") as f:
        f.write(text)
    os.replace(page + ".tmp", page)


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
    p = Parser(__doc__)
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
        for page in pages():
            report(page)
        figures.draw(RESULTS, os.path.join(ROOT, "docs", "figures"))


if __name__ == "__main__":
    run_main(main, "interrupted; studies that were finished are kept")
