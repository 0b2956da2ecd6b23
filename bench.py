"""Measure, write results/*.json, and paste their tables into README.md and docs/.

    python bench.py                     # every method: where its time goes, and what would be possible
    python bench.py serving --quick     # one study, a tenth of the work: does it run here?

    python bench.py all --force         # all but cdlm_ablations and arms, some hours on 2 CPU cores
    python bench.py run serving --device cpu                   # the results of a GPU go to results/gpu
    python bench.py --pages             # only paste tables into the pages; docs/plots.py draws the figures

If no study is named, the target is SmolLM2 if it is installed; else the puzzle model in checkpoints/target.
The results of another target are in a folder of their own, results/smollm2. A study that has a result is
skipped unless --force is given, so an interrupted run continues; long studies go on cell by cell. A real
model is measured in bf16 if the processor multiplies it, because the plain loop is fastest then; the small
one in fp32.
"""
import os
import re
import time
from pathlib import Path

import minispec  # before torch: it tunes the allocator
minispec.need_torch()
import torch

from minispec import ROOT
from minispec.costs import read_costs
from minispec.data.tokenizer import Tokenizer
from minispec.studies import results
from minispec.studies.cdlm import cdlm_ablations, cdlm_accuracy, cdlm_curves, cdlm_speed
from minispec.studies.drafters import arms, chains, tau
from minispec.studies.rules import lossless, rules
from minispec.studies.run import PRICED, bounds, profile, run, speed, trace
from minispec.studies.specgen import scheduler, serving
from minispec.tools import checkpoints, gguf_file, methods
from minispec.tools.files import naming, read_json, write_text
from minispec.tools.script import Parser, check_device, check_writable, positive, run_main, visible
from minispec.tools.training import fast_dtype

# A study is a function (settings, target, tokenizer) -> its result; see studies/results.py.
STUDIES = {study.__name__: study for study in (
    profile, trace, run, bounds, speed, tau, chains, lossless, rules, serving, scheduler, cdlm_accuracy,
    cdlm_curves, cdlm_speed, cdlm_ablations, arms,
)}
ALL = list(STUDIES)[:-2]                # the last two need a folder of trained models
DEFAULT = ("profile", "trace", "run", "bounds")
SIZED = {"trace", "run", "speed", "all"}        # their number of problems can be chosen
VARIED = ("method", "prompt_lookup", "tree", "k_drafts", "select", "schedule", "delayed", "admission")
MARKS = r"<!-- table (\w+/)?(\w+) ?(\w*) -->\n.*?<!-- end -->"  # model/, study, which of its tables


# -- arguments -------------------------------------------------------------------------------------

def parse_args():
    p = Parser(__doc__)
    known = (*STUDIES, "all")
    p.add_argument("studies", nargs="*", metavar="STUDY",
                   help=f"{', '.join(known)} (default: {' '.join(DEFAULT)})")
    p.add_argument("--quick", action="store_true",
                   help="a tenth of the work, to see that it runs; not written to results/")
    p.add_argument("--force", action="store_true", help="measure again what has a result already")
    p.add_argument("--pages", action="store_true", help="measure nothing; paste tables into the pages")
    p.add_argument("--data", default=os.environ.get("MINISPEC_DATA") or None, metavar="DIR",
                   help="folder of real prompt files (default $MINISPEC_DATA)")
    p.add_argument("--problems", type=positive, metavar="N",
                   help=f"problems of each workload in trace, run and speed, at most {PRICED}, and batches in "
                        "proportion (default: 2, 10 or 16, by study and model)")
    methods.add_arguments(p)
    p.set_defaults(model=None)
    args = p.parse_args()
    if unknown := set(args.studies).difference(known):
        raise ValueError(f"unknown study {', '.join(unknown)}; choose from {', '.join(known)}")
    if args.drafter and not set(args.studies or DEFAULT) <= {"arms", "cdlm_ablations"}:
        raise ValueError("--drafter is for arms and cdlm_ablations; the other studies take the model's own")
    for name, option in methods.given(args).items():
        if name in VARIED:
            raise ValueError(f"{option} is for decode.py; the studies vary it themselves")
    if args.problems and (args.quick or not SIZED & set(args.studies or DEFAULT)):
        raise ValueError("--problems is for trace, run and speed, without --quick")
    if args.problems and args.problems > PRICED:
        raise ValueError(f"--problems must be at most {PRICED}, got {args.problems}")
    if args.pages and (args.studies or args.quick):
        raise ValueError("--pages measures nothing; it goes without studies and --quick")
    if args.cost:
        read_costs(args.cost)                            # ValueError if it is missing or damaged
    return args


def chosen(args):
    """The names of the studies to run, in the order of STUDIES."""
    wanted = ALL if "all" in args.studies else args.studies or DEFAULT
    if args.quick and wanted is not args.studies:
        wanted = set(wanted) - {"bounds"}            # a quick run leaves no files to compute bounds from
    return [name for name in STUDIES if name in wanted or name in args.studies]


def choose_target(args):
    """Fill in the model, the folder of its results and its cost table."""
    if args.model is None:
        real = not args.studies and gguf_file.packaged()
        args.model = gguf_file.SMOLLM2 if real else methods.SHIPPED
    results.FOLDER = methods.results_of(args, results.FOLDER)
    args.cost = args.cost or results.path("costs.json")


# -- studies ---------------------------------------------------------------------------------------

def measure(names, args):
    """Run the studies, write their results and print their tables."""
    model = tokenizer = None
    if set(names) - {"bounds"}:
        tokenizer = Tokenizer.load(args.model)
        small = tokenizer.is_puzzle_model and args.device == "cpu"
        usual = torch.float32 if small else fast_dtype(args.device)
        model = checkpoints.load(args.model, args.device, getattr(torch, args.dtype) if args.dtype else usual)
    if not args.quick:
        os.makedirs(results.FOLDER, exist_ok=True)
        check_writable(results.path(f"{names[0]}.json"))

    for name in names:
        # Bounds take no time, and their inputs may be new; --drafter has drafters of the user's own.
        again = args.force or args.quick or args.drafter or name == "bounds"
        if os.path.exists(results.path(f"{name}.json")) and not again:
            print(f"{name}: already measured (--force measures again)")
            continue
        started = time.perf_counter()
        try:
            result = STUDIES[name](args, model, tokenizer)
        except results.LeftOut as e:
            if "all" not in args.studies:
                raise
            print(f"{name} is left out: {visible(str(e))}")
            continue
        if not args.quick:
            seconds = time.perf_counter() - started
            dtype = results.dtype_name(model) if model else ""          # `bounds` loads none
            results.write(name, result, seconds, args.device, dtype)
        print(visible(result["table"]))


# -- pages -----------------------------------------------------------------------------------------

def pages():
    """The texts with tables: README.md, the lessons and their appendices."""
    root = Path(ROOT)
    return [root / "README.md", *sorted(root.glob("docs/**/*.md"))]


def report(page):
    """Paste the tables of results/ into a page, between markers: `<!-- table smollm2/speed short -->` is
    followed by the table "short" of results/smollm2/speed.json, and where it is from. A table that was not
    measured stays as it is."""
    def pasted(mark):
        file = results.path(f"{mark[1] or ''}{mark[2]}.json")
        if not os.path.exists(file):
            return mark[0]
        with naming(file):
            r = read_json(file)
            where = ", ".join(filter(None, (r["device"], r.get("dtype"))))
            took = f"{r['seconds'] / 60:.0f} minutes" if r["seconds"] >= 90 else f"{r['seconds']:.2g} seconds"
            source = f"`{r['command']}` on {where}, torch {r['torch']}, {r['date']}, {took}."
            if "bench.py" in r["command"] and mark[2] not in STUDIES:
                source += " This study is no longer part of bench.py."
            head = mark[0].split("\n")[0]
            return f"{head}\n{r['result'][mark[3] or 'table']}\n\n{source}\n<!-- end -->"

    text = Path(page).read_text(encoding="utf-8")
    write_text(page, re.sub(MARKS, pasted, text, flags=re.S))


def main():
    args = parse_args()
    check_device(args.device)
    everything = results.FOLDER
    if not args.pages:
        choose_target(args)
        measure(chosen(args), args)
    if args.quick:
        return
    results.FOLDER = everything
    for page in pages():
        report(page)


if __name__ == "__main__":
    run_main(main, "interrupted; studies that were finished are kept", "--cache-tokens, or --quick")
