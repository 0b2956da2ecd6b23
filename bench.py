"""Measure, write results/*.json, and render the tables of README.md and docs/ from them.

    python bench.py                     # every method: where its time goes, and what would be possible
    python bench.py accuracy --quick    # one study, a tenth of the work: does it run here?
    python bench.py bounds --traces T.jsonl --cost C.json      # what is possible, from files of your own

    python bench.py --long              # of a real model: more problems, longer answers, larger batches
    python bench.py all --force         # all studies again, about an hour and a half on 2 CPU cores
    python bench.py --workload FILE     # the methods on your own prompts (minispec/data/prompts.py)
    python bench.py --suite gpu --device cuda                  # a GPU's figures; run again until it is done
    python bench.py report              # only render tables and figures

Where no study is named, the target is SmolLM2 if it is installed; else the small model in
checkpoints/target. The results of another target than that are in a folder of their own, results/smollm2. A
study whose file is there is skipped unless --force is given, so an interrupted run continues; `run` and
`cdlm_accuracy` go on cell by cell.
"""
import glob
import os
import re
import sys
import time
from pathlib import Path

from minispec.studies import own_files
from minispec.tools.script import Parser, check_device, run_main

# From files alone, and so before torch is imported: it need not be there.
if __name__ == "__main__" and own_files.asked():
    run_main(own_files.main)
    sys.exit()

import minispec  # before torch: it tunes the allocator
import torch

from minispec import cdlm
from minispec.data import prompts, tasks, traces
from minispec.data.tokenizer import Tokenizer
from minispec.studies import figures, gpu, ladder, picture, results
from minispec.studies.cdlm import cdlm_curves, cdlm_speed
from minispec.studies.drafters import prism_arms, prism_trees, specdiff_chains, specdiff_objectives
from minispec.studies.markdown import pick
from minispec.studies.run import LONG, MORE, SHORT, cdlm_accuracy, profile, run, trace
from minispec.studies.specgen import acceptance, scheduler, serving
from minispec.studies.tables import SHOWN_FROM, render, training_table
from minispec.studies.target import accuracy, lossless
from minispec.tools import checkpoints, gguf_file, methods
from minispec.tools.files import blame, read_json, replaced

CHECKPOINTS = os.path.join(results.ROOT, "checkpoints")


def bounds(args, model, tokenizer):
    """The ladder of bounds, from the traces and the cost table that were measured here, with what `run`
    observed. For other files see studies/own_files.py."""
    some = traces.read_traces(results.path("traces.jsonl"))
    observed = results.read("run") or {"rows": None}
    with blame(results.path("run.json")):
        return ladder.analyse(some, traces.read_costs(args.cost), observed["rows"])


STUDIES = {study.__name__: study for study in (
    accuracy, lossless, acceptance, serving, scheduler,
    prism_arms, prism_trees, specdiff_objectives, specdiff_chains,
    cdlm_accuracy, cdlm_curves, cdlm_speed,
    profile, trace, run, bounds,
)}
WHOLE = ("profile", "trace", "run", "bounds")                       # where nothing is asked for


# -- arguments -------------------------------------------------------------------------------------

def parser():
    p = Parser(__doc__)
    p.add_argument("studies", nargs="*", metavar="STUDY",
                   help=f"{', '.join(STUDIES)}, all, report (default: {' '.join(WHOLE)})")
    p.add_argument("--quick", action="store_true",
                   help="a tenth of the work, to see that it runs; not written to results/")
    p.add_argument("--force", action="store_true", help="measure again what has a result already")
    p.add_argument("--arms", metavar="DIR", help="prism_arms, specdiff_objectives: "
                   "a folder of trained models to compare, a folder each")
    p.add_argument("--data", default=os.environ.get("MINISPEC_DATA"), metavar="DIR",
                   help="folder of real prompt files (default $MINISPEC_DATA)")
    p.add_argument("--workload", metavar="NAME", help="run: on these prompts alone, and nothing is written: "
                   f"a family ({', '.join(tasks.FAMILIES)}), a file of the data folder "
                   f"({', '.join(prompts.PROMPT_FILES)}) or any FILE that decode.py --prompts takes")
    p.add_argument("--max-new-tokens", type=int,
                   help=f"run: most tokens of an answer (default {LONG.new}, of a real model {SHORT.new})")
    p.add_argument("--long", action="store_true", help=MORE)
    p.add_argument("--traces", metavar="FILE", help="bounds: of accept traces of your own; see "
                   "bench.py bounds --traces FILE --help")
    p.add_argument("--suite", choices=("gpu",), help="gpu: kernels, decoding and every method on this GPU, "
                   "into results/DEVICE.json; goes on where it was (needs --device cuda)")
    p.add_argument("--minutes", type=float, default=9.0,
                   help="--suite: begin no cell after so many minutes (default %(default)g)")
    p.add_argument("--dry-run", action="store_true",
                   help="--suite: tiny shapes, on any device, to see that it runs; nothing is written")
    methods.add_arguments(p)
    p.set_defaults(model=None, cost=None)
    return p


def check(args):
    """ValueError for studies that there are not, and for arguments that do not go together."""
    allowed = (*STUDIES, "all", "report")
    for name in args.studies:
        if name not in allowed:
            raise ValueError(f"unknown study '{name}'; choose from {', '.join(allowed)}")
    if args.workload and set(args.studies) - {"run"}:
        raise ValueError("--workload is for the study run alone")
    if args.max_new_tokens is not None and args.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {args.max_new_tokens} is out of range; allowed is 1 or more")


def chosen(args):
    """The names of the studies to run, in the order of STUDIES."""
    if args.workload:
        return ["run"]
    wanted = STUDIES if "all" in args.studies else () if args.studies else WHOLE
    return [name for name in STUDIES if name in args.studies or name in wanted and possible(name, args)]


def possible(name, args):
    """Whether what a study needs is there, where it was not asked for by name."""
    ready = methods.ready(args)
    needs = {
        # A quick run leaves no files to compute from.
        "bounds": not args.quick or os.path.exists(results.path("traces.jsonl")),
        "prism_trees": "prism" in ready or "eagle" in ready,
        "specdiff_chains": "specdiff" in ready,
        # These compare what --arms holds.
        "prism_arms": False,
        "specdiff_objectives": False,
    }
    if name.startswith("cdlm_"):
        return all(os.path.exists(folder) for _, folder in cdlm.METHODS.values())
    return needs.get(name, True)


def is_kept(name, args):
    """Whether the result of a study is written to results/: not of a quick run, nor of the user's prompts or
    prices."""
    if args.quick or args.workload:
        return False
    return name != "bounds" or args.cost == results.path("costs.json")


def choose_target(args):
    """Fill in the model, the folder of its results and its cost table."""
    if args.model is None:
        real = not (args.studies or args.suite or args.workload) and gguf_file.packaged("smollm2")
        args.model = "smollm2" if real else methods.SHIPPED
    if args.model != methods.SHIPPED and not args.suite:
        name = os.path.splitext(os.path.basename(os.path.normpath(args.model)))[0]
        results.FOLDER = os.path.join(results.FOLDER, name)
    args.cost = args.cost or results.path("costs.json")


# -- studies ---------------------------------------------------------------------------------------

def measure(names, args):
    """Run the studies, print their tables and write their results."""
    if any(is_kept(name, args) for name in names):
        os.makedirs(results.FOLDER, exist_ok=True)
    model = tokenizer = None
    if set(names) - {"bounds"}:
        model = checkpoints.load(args.model, args.device)
        tokenizer = Tokenizer.load(args.model)

    for name in names:
        # Bounds take no time, and their inputs may be new.
        again = args.force or args.quick or args.workload or name == "bounds"
        if os.path.exists(results.path(name + ".json")) and not again:
            print(f"{name}: already measured (--force measures again)")
            continue
        started = time.perf_counter()
        result = STUDIES[name](args, model, tokenizer)
        print(render(name, result))
        if is_kept(name, args):
            results.write(name, result, time.perf_counter() - started)


def gpu_suite(args):
    """--suite gpu: results/DEVICE.json, cell by cell."""
    on_gpu = args.device != "cpu"
    if not args.dry_run and not (on_gpu and torch.cuda.is_available()):
        raise ValueError("--suite gpu needs --device cuda and a GPU; "
                         "--dry-run runs it on tiny shapes anywhere")
    check_device(args.device)
    model = checkpoints.load(args.model, args.device, torch.bfloat16 if on_gpu else None)
    device = name = None
    if not args.dry_run:
        device = torch.cuda.get_device_name()
        name = re.sub(r"[^a-z0-9]+", "-", device.lower())
    started = time.perf_counter()
    result = gpu.run(args, model, Tokenizer.load(args.model), name)
    if result is None:                                            # the time was up
        return
    print(render("gpu", result))
    if name:
        results.write(name, result, time.perf_counter() - started, device)


# -- pages -----------------------------------------------------------------------------------------

def pages():
    """The texts with tables: README.md, the lessons and their appendices."""
    lessons = glob.glob(os.path.join(results.ROOT, "docs", "**", "*.md"), recursive=True)
    return [os.path.join(results.ROOT, "README.md"), *sorted(lessons)]


def report(page):
    """Render again what is between the markers of each table in a page: `<!-- results:NAME -->` for a
    study, `<!-- gpu -->` and `<!-- training -->`. A table whose study was not measured stays as it is.

    A part of a study's table: lines in the marker choose `columns: a, b` and `rows: c; d` by how they
    begin."""
    with open(page, encoding="utf-8") as f:
        text = f.read()

    def table(mark):
        what, choice = mark[1], mark[2]
        if what == "gpu":
            new = gpu_tables()
        elif what == "training":
            new = training_table(CHECKPOINTS)
        else:
            new = study_table(what.removeprefix("results:"), choice)
        return mark[0] if new is None else f"<!-- {what}{choice} -->\n{new}\n<!-- end -->"

    marks = r"<!-- (gpu|training|results:[\w/]+)((?:\n\w+: [^\n]+)*) -->.*?\n<!-- end -->"
    text = re.sub(marks, table, text, flags=re.S)
    with replaced(page) as temporary, open(temporary, "w", encoding="utf-8") as f:
        f.write(text)


def study_table(name, choice=""):
    """The table of a study, or the part of it that the lines `choice` ask for; None if it was not
    measured."""
    target, _, name = name.rpartition("/")
    file = results.path(os.path.join(target, SHOWN_FROM.get(name, name) + ".json"))
    return shown(file, name, choice) if os.path.exists(file) else None


def shown(file, name, choice=""):
    """The table of a file of results, with a line that says where it is from."""
    with blame(file):
        r = read_json(file)
        minutes = f"{r['seconds'] / 60:.0f} minutes"
        source = f"`{r['command']}` on {r['device']}, torch {r['torch']}, {r['date']}, {minutes}."
        if "bench.py" in r["command"] and name not in (*STUDIES, *SHOWN_FROM, "gpu"):
            source += " This study is no longer part of bench.py."
        wanted = dict(line.split(": ", 1) for line in choice.split("\n")[1:])
        return f"{pick(render(name, r['result']), **wanted)}\n\n{source}"


def gpu_tables():
    """What `--suite gpu` found, a part for each device."""
    files = sorted(Path(results.FOLDER).glob("*.json"))
    found = [shown(file, "gpu") for file in files if '"suite": "gpu"' in file.read_text(encoding="utf-8")]
    return "\n\n".join(found) or "No GPU has been measured yet."


def main():
    if own_files.asked():
        return own_files.main()
    args = parser().parse_args()
    check(args)
    everything = results.FOLDER
    choose_target(args)
    if args.suite:
        return gpu_suite(args)
    check_device(args.device)

    names = chosen(args)
    measure(names, args)
    asked_to_render = "report" in args.studies and not args.quick
    if not asked_to_render and not any(is_kept(name, args) for name in names):
        return
    results.FOLDER = everything
    for page in pages():
        report(page)
    drawings = os.path.join(results.ROOT, "docs", "figures", "")
    figures.draw(everything, drawings)
    figures.draw(os.path.join(everything, "smollm2"), drawings + "smollm2_")
    picture.draw()


if __name__ == "__main__":
    run_main(main, "interrupted; studies that were finished are kept", "--cache-tokens, or --quick")
