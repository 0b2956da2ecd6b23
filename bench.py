"""Measure, write results/*.json, render the README's tables from them.

    python bench.py                      # every method, where its time goes, how far it is from what is possible (docs/bounds.md)
    python bench.py accuracy --quick     # one study, small: minutes
    python bench.py speed serving        # some studies; all: all of them, about an hour and a half on 2 CPU cores
    python bench.py bounds --traces T.jsonl --cost C.json     # bounds for traces and prices of your own, from files alone
    python bench.py --workload spec_bench                     # the methods on real prompts (minispec/data/prompts.py); --workload FILE on your own
    python bench.py --suite gpu --device cuda                 # a GPU's figures; again and again until it is done
    python bench.py report               # only render tables and figures, into README.md and docs/

A study whose file is there is skipped unless --force is given, so an interrupted run continues; `run` and `cdlm_accuracy` go on cell by cell.
"""
import contextlib
import glob
import os
import platform
import re
import sys
import time

import minispec  # before torch: it tunes the allocator
import torch
from tqdm import tqdm

from minispec import cdlm
from minispec.data import prompts, tasks, traces
from minispec.studies import cdlm as cdlm_studies, drafters as drafter_studies, figures, gpu as gpu_suite, ladder, measure, specgen as studies
from minispec.tools import checkpoints, methods
from minispec.tools.answers import converse, requests_of, summary, verdict
from minispec.core.engine import Request
from minispec.tools.files import blame, read_json, replaced, write_json
from minispec.tools.script import Parser, check_device, run_main
from minispec.studies.tables import render, training_table, whole_table
from minispec.data.tokenizer import Tokenizer

ROOT = os.path.dirname(os.path.abspath(__file__))
RESULTS, CHECKPOINTS = os.path.join(ROOT, "results"), os.path.join(ROOT, "checkpoints")


# -- performance or illusion: what a round costs, what is accepted, what was observed, what is possible ----------------------

DEEPEST, NEW = 16, 160      # most drafts a round in cost tables and traces; most tokens of an answer


def profile(args, model, tokenizer):
    """What a round costs on this machine, by rows, drafts and context, and what drafters got accepted on problems that are used nowhere
    else: results/costs.json. And how well fits do."""
    quick = {"rows": (1, 4), "contexts": (64,), "drafts": (0, 1, 4)} if args.quick else {}
    drafters = methods.chain_drafters(model, args, DEEPEST)
    table, report = measure.cost_table(model, drafters, progress=tqdm, **quick)
    problems = [tasks.make(f, 600 + i, "heldout") for f in tasks.FAMILIES for i in range(1 if args.quick else 2)]
    answers = methods.make_engine("ar", model, args, 16).generate(requests_of(problems, tokenizer, model, NEW))
    texts = [(g.prompt_ids, g.token_ids) for g in answers]
    table["accept"] = {name: measure.acceptance(d, model, texts) for name, d in drafters.items() if name != "ngram"}      # lookups are not asked
    c, width = model.config, 4 if model.dtype == torch.float32 else 2
    for fit in report["fits"].values():
        kv_bytes = traces.kv_bytes_per_token(c.n_layer, c.n_kv_head, c.head_dim, width)
        rates = traces.implied_rates(fit["entry"], kv_bytes, width * model.n_params(), 2 * model.n_params())
        fit |= {name: rate if rate < 1e30 else None for name, rate in rates.items()}
    table["about"] = {"device": f"{processor()}, {torch.get_num_threads()} threads", "dtype": str(model.dtype).removeprefix("torch."), "torch": torch.__version__}
    if not args.quick:
        write_json(os.path.join(RESULTS, "costs.json"), table)
    return {"table": table, **report}


def workload_requests(args, model, tokenizer):
    """({"block/i": request}, {"block/i": problem}) of --workload: a family, a known file of prompts or any other, its blocks in turn. A
    second turn, "block/i/2", is asked after the target's own greedy answer, which is what every method here gives."""
    name, n, out = args.workload, 4 if args.quick else 16, {}
    if name in tasks.FAMILIES:
        problems = [tasks.make(name, 800 + i, "heldout") for i in range(n)]
    else:
        problems = prompts.load_named(name, args.data) if name in prompts.PROMPT_FILES else prompts.load_prompts(name)
    blocks = {f: [p for p in problems if p.family == f] for f in dict.fromkeys(p.family for p in problems)}
    new = lambda some: requests_of(some, tokenizer, model, args.max_new_tokens or NEW)
    for i, f in [(i, f) for i in range(n) for f in blocks if i < len(blocks[f])]:
        p = blocks[f][i]
        turns = converse([p], lambda some: methods.make_engine("ar", model, args, 1).generate(new(some))) if p.turns else [(p, None, 1)]
        out |= {f"{f}/{i}" + f"/{turn}" * (turn > 1): q for q, _, turn in turns}
    return dict(zip(out, new(list(out.values())))), out


def family_requests(tokenizer, model, n, data=None):
    """{"family/i": request}: the held-out problems on which outputs are frozen, traced and timed, the i-th of each family in turn;
    and questions of GSM8K, where there is a data folder."""
    problems = {f: [tasks.make(f, 800 + i, "heldout") for i in range(n)] for f in tasks.FAMILIES}
    if data:
        problems["gsm8k"] = prompts.load_named("gsm8k", data)[:n]
    some = {f: requests_of(p, tokenizer, model, NEW) for f, p in problems.items()}
    return {f"{f}/{i}": some[f][i] for i in range(n) for f in some}


def trace(args, model, tokenizer):
    """What every drafter would get accepted at every position of one frozen greedy output: results/traces.jsonl."""
    requests = family_requests(tokenizer, model, 2 if args.quick else 16, args.data)
    generations = methods.make_engine("ar", model, args, 16).generate(list(requests.values()))
    texts = {name: (g.prompt_ids, g.token_ids) for name, g in zip(requests, generations)}
    drafters = methods.chain_drafters(model, args, DEEPEST)
    some = measure.traces_of(drafters, model, texts, DEEPEST, tqdm)
    if not args.quick:
        traces.write_traces(os.path.join(RESULTS, "traces.jsonl"), some)
    children = {name: measure.child_rates(d, list(texts.values())) for name, d in drafters.items()}
    return {"k_max": DEEPEST, "k": 8, "requests": len(texts), "accept": {w: ladder.statistics(t, list(drafters), 8) for w, t in ladder.by_workload(some).items()},
            "children": {name: rates for name, rates in children.items() if rates}}


def suitable(args, model):
    """Of the methods that are ready, those for this target; a drafter of another one is left out with a line that says so."""
    out = []
    for name in methods.ready(args) + methods.diffusion_ready(args):
        try:
            methods.make_engine(name, model, args, 1)
            out.append(name)
        except ValueError as e:
            print(f"{name} is left out: {e}")
    return out


def run(args, model, tokenizer):
    """Every method on every family and on all mixed, by batch, against the autoregressive loop of the same batch and dtype: families once,
    the mixed workload, on which methods that choose are judged, three times in turn, of which the middle one counts. A batch is of
    different requests, or of copies of one as in the paper; specgen, which has no trace, and the diffusion models, which give answers of
    their own and so are compared by tokens a second, have no copies and one turn. `dlm`, a whole forward a token, has one request of
    each family, alone."""
    n = 4 if args.quick else 16
    requests, problems = workload_requests(args, model, tokenizer) if args.workload else (family_requests(tokenizer, model, n, args.data), {})
    new = args.max_new_tokens or NEW
    grid = [(1, "different", 4), (4, "different", 8), (16, "different", 16), (16, "copies", 1)]
    cells = [(w, b, kind, [i for i in requests if i.startswith(w + "/")][:n]) for w in dict.fromkeys(i.split("/")[0] for i in requests) for b, kind, n in grid]
    cells += [("mixed", b, "different", list(requests)[:n]) for b, n in ((1, 12), (4, 12), (16, 24)) if len(cells) > len(grid) or not args.workload]

    def solved(ids, generations):
        known = [v for i, g in zip(ids, generations) if (v := verdict(problems[i], g, tokenizer)) is not None]
        return [sum(known), len(known)]

    names = ["ar", *(methods.ready(args) + methods.diffusion_ready(args) if not args.workload else suitable(args, model))]

    def measured(workload, batch, kind, ids):
        timed, rows = {}, []
        for repeat in range(3 if workload == "mixed" and not args.quick else 1):
            for m in names:
                if m in ("specgen", *methods.DIFFUSION) and (repeat or kind == "copies") or m == "dlm" and (batch > 1 or workload == "mixed"):
                    continue
                asked = ids[:1] if m == "dlm" else ids
                engine = methods.make_engine(m, model, args, batch)
                fresh = [Request(requests[i].tokens, requests[i].max_new_tokens, stop_ids=requests[i].stop_ids) for i in asked for _ in range(batch if kind == "copies" else 1)]
                generations = engine.generate(fresh)
                timed.setdefault(m, []).append((sum(engine.seconds.values()), engine, generations))
        timed = {m: middle(runs) for m, runs in timed.items()}
        plain = timed["ar"][0] / sum(len(g.token_ids) for g in timed["ar"][2])
        for m, (seconds, engine, generations) in timed.items():
            steps, tokens, lossless = [s for g in generations for s in g.steps], sum(len(g.token_ids) for g in generations), m in methods.METHODS
            drafts = lossless and m != "ar"
            rows.append({"workload": workload, "batch": batch, "kind": kind, "ids": ids, "method": m, "k": engine.planner.k if drafts else None, "seconds": seconds,
                         "tokens": tokens, "tokens_per_second": tokens / seconds, "speedup": plain / seconds * tokens, "tau": summary(generations, engine)["tau"],
                         "acceptance": sum(s.accepted for s in steps) / (sum(s.proposed for s in steps) or 1) if drafts else None, "rounds": len(steps),
                         "phases": studies.phases(engine),
                         **({"solved": solved(ids, generations)} if problems else {}),
                         "plans": {i: ladder.pack(g.steps) for i, g in zip(ids, generations)} if m == ladder.COMBINED else None,
                         "identical": sum(a.token_ids == b.token_ids for a, b in zip(timed["ar"][2], generations)) if lossless else None, "prompts": len(generations)})
        return rows

    prices = traces.read_costs(args.cost) if "adaptive" in names else None       # it plans with them
    kept = each_kept("run", args, model, {"new_tokens": new, "methods": names, "prices": prices})
    return {"new_tokens": new, "rows": [r for rows in kept([c for c in cells if c[1] == 4 or not args.quick], measured) for r in rows]}


def middle(runs):
    """Of runs (seconds, ..) the one of the median time; of an even number the faster of the two."""
    return sorted(runs, key=lambda run: run[0])[(len(runs) - 1) // 2]


def cdlm_accuracy(args, model, tokenizer):
    """The study of cdlm_studies, kept row by row."""
    models = {name: checkpoints.fingerprint(checkpoints.load(folder)) for name, (_, folder) in cdlm.METHODS.items()}
    return cdlm_studies.cdlm_accuracy(args, model, tokenizer, each_kept("cdlm_accuracy", args, model, models))


def each_kept(name, args, model, more=()):
    """each(cells, measure) -> [measure(*cell)] for a long study: an interrupted one goes on. more: what else must be the same."""
    about = {**dict(more), "settings": {k: v for k, v in vars(args).items() if k not in ("studies", "force", "method", "arms")},
             "target": checkpoints.fingerprint(model), "machine": [processor(), torch.get_num_threads(), torch.__version__]}

    def each(cells, measure):
        cells = tqdm(cells, desc=name)
        return [measure(*cell) for cell in cells] if args.quick or args.workload else resumable(name, about, cells, measure)
    return each


def resumable(name, about, cells, measure, until=None):
    """[measure(*cell) for every cell], each kept in results/NAME.part when it is done, and taken from there if an interrupted run with
    the same settings has left it. Removed once the result is written. No cell is begun after `until`, by time.monotonic."""
    file, done = os.path.join(RESULTS, name + ".part"), []
    if os.path.exists(file):
        saved = read_json(file)
        with blame(file):
            done = list(saved["cells"]) if saved["about"] == about else []
    out = []
    for i, cell in enumerate(cells):
        if i >= len(done):
            if until is not None and time.monotonic() > until:
                break
            done.append(measure(*cell))
            write_json(file, {"about": about, "cells": done})
        out.append(done[i])
    return out


def bounds(args, model, tokenizer):
    """The ladder of bounds, from files alone: the traces and cost table that were measured here, with what `run` observed;
    or those given with --traces and --cost."""
    more = {}
    for name in ("run", "trace") if args.traces is None else ():
        file = os.path.join(RESULTS, name + ".json")
        if os.path.exists(file):
            with blame(file):
                more[name] = read_json(file)["result"]
    some = traces.read_traces(args.traces or os.path.join(RESULTS, "traces.jsonl"))
    cost = traces.read_costs(args.cost)
    with blame("run.json or trace.json in " + RESULTS) if more else contextlib.nullcontext():
        return ladder.analyse(some, cost, more.get("run", {}).get("rows"), more.get("trace", {}).get("children"), args.as_published)


STUDIES = {**{study.__name__: study for study in (studies.accuracy, studies.lossless, studies.attention, studies.acceptance, studies.speed, studies.serving,
                                                  studies.scheduler)},
           **{study.__name__: study for study in (drafter_studies.prism_arms, drafter_studies.prism_steps, drafter_studies.prism_trees, drafter_studies.specdiff_objectives,
                                                  drafter_studies.specdiff_chains, drafter_studies.specdiff_budgets, cdlm_accuracy, cdlm_studies.cdlm_curves,
                                                  cdlm_studies.cdlm_blocks, cdlm_studies.cdlm_speed, cdlm_studies.cdlm_losses, cdlm_studies.cdlm_teachers)},
           "profile": profile, "trace": trace, "run": run, "bounds": bounds}
WHOLE = ("profile", "trace", "run", "bounds")           # what is measured where nothing is asked for


def gpu(args):
    """--suite gpu: results/DEVICE.json, cell by cell."""
    if not args.dry_run and not (args.device.startswith("cuda") and torch.cuda.is_available()):
        raise ValueError("--suite gpu needs --device cuda and a GPU; --dry-run runs it on tiny shapes anywhere")
    check_device(args.device)
    model, tokenizer = checkpoints.load(args.model, args.device, torch.bfloat16 if args.device.startswith("cuda") else None), Tokenizer.load(args.model)
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else "dry-run"
    name, started = re.sub(r"[^a-z0-9]+", "-", device.lower()), time.perf_counter()
    until = time.monotonic() + 60 * args.minutes

    def measured(about, cells, measure):
        cells = tqdm(cells, desc="gpu")
        return [measure(*cell) for cell in cells] if args.dry_run else resumable(name, about, cells, measure, until)

    result = gpu_suite.run(args, model, tokenizer, measured)
    if result is not None:
        print(render("gpu", result))
    if result is not None and not args.dry_run:
        write_result(name, {"suite": "gpu", **result}, time.perf_counter() - started, device)


# -- pages and files -----------------------------------------------------------------------------------------------------

def pages():
    """The texts with tables: README.md and the lessons."""
    return [os.path.join(ROOT, "README.md"), *sorted(glob.glob(os.path.join(ROOT, "docs", "*.md")))]


def report(page):
    """Replace what stands between the markers of each table in a page."""
    with open(page, encoding="utf-8") as f:
        text = f.read()
    for file in sorted(os.listdir(RESULTS)):
        name = file.removesuffix(".json")
        mark = re.compile(rf"(<!-- results:{name} -->).*?(\n<!-- end -->)", re.S)
        if mark.search(text):
            with blame(os.path.join(RESULTS, file)):
                r = read_json(os.path.join(RESULTS, file))
                source = f"\n\n`{r['command']}` on {r['device']}, torch {r['torch']}, {r['date']}, {r['seconds'] / 60:.0f} minutes."
                table = render(name, r["result"])
            text = mark.sub(lambda m: m[1] + "\n" + table + source + m[2], text)
    text = re.sub(r"(<!-- gpu -->).*?(\n<!-- end -->)", lambda m: m[1] + "\n" + gpu_tables() + m[2], text, flags=re.S)
    text = re.sub(r"(<!-- training -->).*?(\n<!-- end -->)", lambda m: m[1] + "\n" + training_table(CHECKPOINTS) + m[2], text, flags=re.S)
    with replaced(page) as temporary, open(temporary, "w", encoding="utf-8") as f:
        f.write(text)


def gpu_tables():
    """What `--suite gpu` found, a part for each device."""
    out = []
    for file in sorted(glob.glob(os.path.join(RESULTS, "*.json"))):
        r = read_json(file)
        if isinstance(r, dict) and isinstance(r.get("result"), dict) and r["result"].get("suite") == "gpu":
            out.append(f"{render('gpu', r['result'])}\n\n`{r['command']}` on {r['device']}, torch {r['torch']}, {r['date']}.")
    return "\n\n".join(out) or "No GPU has been measured yet."


def processor():
    try:
        with open("/proc/cpuinfo") as f:
            return next(line.split(":")[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def write_result(name, result, seconds, device=None):
    """results/NAME.json with what is needed to repeat it. device: what it was measured on, if not on this CPU."""
    os.makedirs(RESULTS, exist_ok=True)
    write_json(os.path.join(RESULTS, name + ".json"), {
        "command": "python " + " ".join([os.path.relpath(sys.argv[0]), *sys.argv[1:]]), "device": device or f"{processor()}, {torch.get_num_threads()} threads",
        "python": platform.python_version(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "seconds": round(seconds, 1), "result": result})
    part = os.path.join(RESULTS, name + ".part")
    if os.path.exists(part):
        os.remove(part)


def possible(name, args):
    """Whether what a study needs is there, where it was not asked for by name."""
    if name == "bounds":
        return os.path.exists(os.path.join(RESULTS, "traces.jsonl"))       # a quick run leaves no files to compute from
    if name in ("prism_arms", "specdiff_objectives"):
        kinds = [checkpoints.kind_of(os.path.join(args.arms, arm)) for arm in os.listdir(args.arms)] if args.arms and os.path.isdir(args.arms) else []
        return {"prism_arms": "prism", "specdiff_objectives": "specdiff"}[name] in kinds
    if name == "cdlm_teachers":
        return False                                     # compares runs that somebody has made for it
    if name.startswith("cdlm_"):
        return all(os.path.exists(folder) for _, folder in cdlm.METHODS.values()) and (name != "cdlm_losses" or bool(cdlm_studies.arms_of(args)))
    needed = {"prism_trees": ("prism", "eagle"), "specdiff_chains": ("specdiff",), "specdiff_budgets": ("specdiff",)}.get(name, ())
    return not needed or any(method in methods.ready(args) for method in needed)


def main():
    p = Parser(__doc__)
    p.add_argument("studies", nargs="*", metavar="STUDY", help=f"{', '.join(STUDIES)}, all, report (default: {' '.join(WHOLE)})")
    p.add_argument("--quick", action="store_true", help="a tenth of the work, to see that it runs; not written to results/")
    p.add_argument("--force", action="store_true", help="measure again what has a result already")
    p.add_argument("--arms", metavar="DIR", help="prism_arms, specdiff_objectives, cdlm_losses, cdlm_curves, cdlm_teachers: a folder of trained models to compare, a folder each")
    p.add_argument("--data", default=os.environ.get("MINISPEC_DATA"), metavar="DIR", help="folder of real prompt files, for the same (default $MINISPEC_DATA)")
    p.add_argument("--workload", metavar="NAME", help=f"run: on these prompts alone, and nothing is written: a family ({', '.join(tasks.FAMILIES)}), "
                   f"a file of the data folder ({', '.join(prompts.PROMPT_FILES)}) or any FILE that decode.py --prompts takes")
    p.add_argument("--max-new-tokens", type=int, help=f"--workload: most tokens of an answer (default {NEW})")
    p.add_argument("--traces", metavar="FILE", help="bounds: accept traces of your own (format: minispec/data/traces.py), with --cost; then nothing is written")
    p.add_argument("--as-published", action="store_true", help="bounds: also what the paper's simulator would say, defects included")
    p.add_argument("--suite", choices=("gpu",), help="gpu: kernels, decoding and every method on this GPU, into results/DEVICE.json; goes on where it was (needs --device cuda)")
    p.add_argument("--minutes", type=float, default=9.0, help="--suite: begin no cell after so many minutes (default %(default)g)")
    p.add_argument("--dry-run", action="store_true", help="--suite: tiny shapes, on any device, to see that it runs; nothing is written")
    methods.add_arguments(p)
    args = p.parse_args()
    unknown = [s for s in args.studies if s not in (*STUDIES, "all", "report")]
    if unknown:
        p.error(f"unknown study '{unknown[0]}'; choose from {', '.join((*STUDIES, 'all', 'report'))}")
    if args.suite:
        return gpu(args)
    check_device(args.device)
    if args.workload and (set(args.studies) - {"run"} or args.max_new_tokens is not None and args.max_new_tokens < 1):
        raise ValueError("--workload is for the study run alone, with --max-new-tokens 1 or more")
    if args.workload:
        args.studies = ["run"]
    default = STUDIES if "all" in args.studies else () if args.studies else WHOLE
    model = tokenizer = None
    if default or set(args.studies) - {"bounds", "report"}:
        model, tokenizer = checkpoints.load(args.model, args.device), Tokenizer.load(args.model)
    for name, study in STUDIES.items():
        if name not in args.studies and not (name in default and possible(name, args)):
            continue
        if os.path.exists(os.path.join(RESULTS, name + ".json")) and not (args.force or args.quick or args.workload) and name != "bounds":
            print(f"{name}: already measured (--force measures again)")
            continue
        started = time.perf_counter()
        result = study(args, model, tokenizer)
        if args.studies or args.quick:                   # else one table at the end
            print(render(name, result))
        outside = args.workload or name == "bounds" and (args.traces is not None or args.cost != p.get_default("cost"))
        if not args.quick and not outside:
            write_result(name, result, time.perf_counter() - started)
    if not args.quick and not args.workload:
        for page in pages():
            report(page)
        figures.draw(RESULTS, os.path.join(ROOT, "docs", "figures"))
    if not args.studies and not args.quick:
        print(whole_table(RESULTS))


if __name__ == "__main__":
    run_main(main, "interrupted; studies that were finished are kept", "--cache-tokens, or --quick")
