"""Measure, write results/*.json, and render the tables of README.md and docs/ from them.

    python bench.py                     # every method: where its time goes, and what would be possible
    python bench.py serving --quick     # one study, a tenth of the work: does it run here?

    python bench.py all --force         # all studies again, about an hour and a half on 2 CPU cores
    python bench.py run serving --device cpu                   # the results of a GPU go to results/gpu
    python bench.py report              # only render tables and figures

Where no study is named, the target is SmolLM2 if it is installed; else the small model in
checkpoints/target. The results of another target than that are in a folder of their own, results/smollm2. A
study whose file is there is skipped unless --force is given, so an interrupted run continues; long studies
go on cell by cell. A real model is measured in bf16 where the processor multiplies it, because the plain loop
is fastest then; the small one in fp32.
"""
import os
import re
import time
from pathlib import Path

import minispec  # before torch: it tunes the allocator
minispec.need_torch()
import torch

from minispec import ROOT, traces
from minispec.bounds import analyse
from minispec.data.tokenizer import Tokenizer
from minispec.studies import figures, results
from minispec.studies.cdlm import cdlm_accuracy, cdlm_curves
from minispec.studies.drafters import prism_arms, specdiff_chains, specdiff_objectives
from minispec.studies.run import lossless, profile, run, speed, trace
from minispec.studies.specgen import acceptance, scheduler, serving
from minispec.studies.tables import SHOWN_FROM, render
from minispec.tools import checkpoints, gguf_file, methods
from minispec.tools.files import blame, read_json, write_text
from minispec.tools.markdown import join
from minispec.tools.plots import draw
from minispec.tools.script import Parser, check_device, run_main, visible
from minispec.tools.training import fast_dtype


def bounds(args, model, tokenizer):
    """The ladder of bounds, from the traces and the cost table that were measured here, with what `run`
    observed. For other files: python -m minispec.bounds."""
    some = traces.read_traces(results.path("traces.jsonl"))
    table, file = traces.read_costs(args.cost), results.path("run.json")
    with blame(file):
        return analyse(some, table, read_json(file)["result"]["rows"])


STUDIES = {study.__name__: study for study in (
    lossless, acceptance, serving, scheduler, specdiff_chains, cdlm_accuracy, cdlm_curves,
    profile, trace, run, bounds, speed,
    prism_arms, specdiff_objectives,                                # not in `all`: they need --arms
)}
ALL = list(STUDIES)[:-2]
OWN_DTYPES = ("lossless", "cdlm_accuracy", "cdlm_curves")           # not that of the loaded model
WHOLE = ("profile", "trace", "run", "bounds")                       # where nothing is asked for


# -- arguments -------------------------------------------------------------------------------------

def parse_args():
    p = Parser(__doc__)
    known = (*STUDIES, "all", "report")
    p.add_argument("studies", nargs="*", metavar="STUDY",
                   help=f"{', '.join(known)} (default: {' '.join(WHOLE)})")
    p.add_argument("--quick", action="store_true",
                   help="a tenth of the work, to see that it runs; not written to results/")
    p.add_argument("--force", action="store_true", help="measure again what has a result already")
    p.add_argument("--arms", metavar="DIR", help="prism_arms, specdiff_objectives: "
                   "a folder of trained models to compare, a folder each")
    p.add_argument("--data", default=os.environ.get("MINISPEC_DATA"), metavar="DIR",
                   help="folder of real prompt files (default $MINISPEC_DATA)")
    methods.add_arguments(p)
    p.set_defaults(model=None)
    args = p.parse_args()
    if unknown := set(args.studies).difference(known):
        raise ValueError(f"unknown study {', '.join(unknown)}; choose from {', '.join(known)}")
    if args.method != "ar":
        raise ValueError("--method is for decode.py; the studies take every method in turn")
    return args


def chosen(args):
    """The names of the studies to run, in the order of STUDIES."""
    wanted = args.studies or WHOLE
    if "all" in wanted:
        wanted = [*wanted, *ALL]
    # A quick run leaves no files to compute bounds from.
    if args.quick and not args.studies:
        wanted = WHOLE[:-1]
    return [name for name in STUDIES if name in wanted]


def choose_target(args):
    """Fill in the model, the folder of its results and its cost table."""
    if args.model is None:
        real = not args.studies and gguf_file.packaged()
        args.model = gguf_file.SMOLLM2 if real else methods.SHIPPED
    results.FOLDER = methods.results_of(args, results.FOLDER)
    args.cost = args.cost or results.path("costs.json")


# -- studies ---------------------------------------------------------------------------------------

def measure(names, args):
    """Run the studies, print their tables and write their results."""
    os.makedirs(results.FOLDER, exist_ok=True)
    model = tokenizer = None
    if set(names) - {"bounds"}:
        tokenizer = Tokenizer.load(args.model)
        small = tokenizer.ours and args.device == "cpu"
        usual = torch.float32 if small else fast_dtype(args.device)
        model = checkpoints.load(args.model, args.device, getattr(torch, args.dtype) if args.dtype else usual)

    for name in names:
        # Bounds take no time, and their inputs may be new.
        again = args.force or args.quick or name == "bounds"
        if os.path.exists(results.path(name + ".json")) and not again:
            print(f"{name}: already measured (--force measures again)")
            continue
        started = time.perf_counter()
        result = STUDIES[name](args, model, tokenizer)
        if not args.quick:
            seconds = time.perf_counter() - started
            dtype = result["about"].get("dtype", "") if name == "bounds" else results.dtype_name(model)
            results.write(name, result, seconds, args.device, "" if name in OWN_DTYPES else dtype)
        print(visible(render(name, result)))


# -- pages -----------------------------------------------------------------------------------------

def pages():
    """The texts with tables: README.md, the lessons and their appendices."""
    root = Path(ROOT)
    return [root / "README.md", *sorted(root.glob("docs/**/*.md"))]


def report(page):
    """Render again what is between the markers of each table in a page, `<!-- results:NAME -->`. A table
    whose study was not measured stays as it is. Lines in the marker choose a part of a table,
    `columns: a, b` and `rows: c; d`, by how they begin."""
    def table(mark):
        new = study_table(mark[1], mark[2])
        return mark[0] if new is None else f"<!-- results:{mark[1]}{mark[2]} -->\n{new}\n<!-- end -->"

    marks = r"<!-- results:([\w/]+)((?:\n\w+: [^\n]+)*) -->.*?\n<!-- end -->"
    text = Path(page).read_text(encoding="utf-8")
    write_text(page, re.sub(marks, table, text, flags=re.S))


def study_table(name, choice=""):
    """The table of a study, or the part of it that the lines `choice` ask for, and where it is from; None if
    it was not measured."""
    target, _, name = name.rpartition("/")
    file = results.path(os.path.join(target, SHOWN_FROM.get(name, name) + ".json"))
    if not os.path.exists(file):
        return None
    with blame(file):
        r = read_json(file)
        where = ", ".join(filter(None, (r["device"], r.get("dtype"))))
        source = (f"`{r['command']}` on {where}, torch {r['torch']}, {r['date']}, "
                  f"{r['seconds'] / 60:.0f} minutes.")
        if "bench.py" in r["command"] and name not in (*STUDIES, *SHOWN_FROM):
            source += " This study is no longer part of bench.py."
        wanted = dict(line.split(": ", 1) for line in choice.split("\n")[1:])
        return f"{pick(render(name, r['result']), **wanted)}\n\n{source}"


def pick(text, columns="", rows="", say=""):
    """Of the first table in `text`, the columns "a, b" and the rows "c; d" that begin so, in that order, with
    what follows the table; all where nothing is asked for. Or the sentence `say`, in which {a @ c} becomes
    the cell of that column and row. ValueError for what is not there."""
    shown, *notes = text.split("\n\n")
    head, rule, *body = shown.splitlines()
    heads = cells_of(head)

    def cell_at(match):
        column, row = match[1].split(" @ ")
        return cells_of(body[place(f"| {row}", body)])[place(column, heads)]

    if say:
        return re.sub("{(.+?)}", cell_at, say)
    if rows:
        body = [body[place(f"| {row}", body)] for row in rows.split("; ")]
    places = range(len(heads))
    if columns:
        places = [place(column, heads) for column in columns.split(", ")]
    shown = join([[cells_of(line)[i] for i in places] for line in (head, rule, *body)])
    return "\n\n".join([shown, *notes])


def cells_of(line):
    return line[2:-2].split(" | ")


def place(name, lines):
    """Which one of `lines` is the first that begins so."""
    for i, line in enumerate(lines):
        if line.startswith(name):
            return i
    raise ValueError(f"a page asks for '{name}', which is not in the table: {lines}")


def main():
    args = parse_args()
    check_device(args.device)
    everything = results.FOLDER
    choose_target(args)
    names = chosen(args)
    measure(names, args)
    if args.quick:
        return
    results.FOLDER = everything
    for page in pages():
        report(page)
    drawings = f"{ROOT}docs/figures/"
    draw(figures.FIGURES, figures.stored(everything), drawings)
    draw(figures.FIGURES, figures.stored(os.path.join(everything, "smollm2")), drawings + "smollm2_")


if __name__ == "__main__":
    run_main(main, "interrupted; studies that were finished are kept", "--cache-tokens, or --quick")
