"""`bench.py bounds --traces T --cost C`: what would have been possible, from traces and prices of your own.
numpy alone, no torch. docs/own-traces.md has a converter for the logs of an engine."""
import os
import sys

from minispec import ROOT
from minispec.bounds import BATCHES
from minispec.data.traces import read_costs, read_traces
from minispec.studies import figures, ladder
from minispec.studies.tables import ladder_table
from minispec.tools.files import write_json
from minispec.tools.script import Parser, check_writable, positive, visible


def asked():
    """Whether bench.py is called for this."""
    return any(word.startswith("--traces") for word in sys.argv)


def sizes(text):
    """The type of an option that is a list of sizes."""
    return [positive(one) for one in text.split(",")]


def parse_args(argv=None):
    p = Parser(__doc__)
    p.add_argument("study", choices=("bounds",))
    p.add_argument("--traces", required=True, metavar="FILE",
                   help="accept traces, a request a line (minispec/data/traces.py)")
    p.add_argument("--cost", default=f"{ROOT}results/costs.json", metavar="FILE",
                   help="prices of a round (the same file; default %(default)s; those of the paper are "
                   "results/costs_h100.json)")
    p.add_argument("--batches", type=sizes, default=BATCHES, metavar="N,N,..",
                   help="batch sizes, like 1,8,64 (default %(default)s)")
    p.add_argument("--k-max", type=positive, metavar="K",
                   help="most drafts in a round (default: the most that a trace has accepted)")
    p.add_argument("--json", metavar="OUT", help="write all figures as JSON, and next to it drawings")
    args = p.parse_args(argv)
    largest = max(*args.batches, args.k_max or 1)
    if largest > 1000:
        raise ValueError(f"{largest} is out of range; batches and k-max are 1000 at most")
    if args.json:
        check_writable(args.json, [args.traces, args.cost])
    return args


def main(argv=None):
    args = parse_args(argv)
    some, table = read_traces(args.traces), read_costs(args.cost)
    positions = sum(t.n_out - 1 for t in some)
    result = ladder.analyse(some, table, batches=args.batches, k_max=args.k_max)
    longest = max(c["k_max"] for c in result["cells"])
    about = " ".join(f"{name}: {value};" for name, value in table.get("about", {}).items())
    if args.json:
        write_json(args.json, result)
        figures.draw({"bounds.json": result, "traces.jsonl": some}, os.path.splitext(args.json)[0] + "_")
    print(visible(f"traces  {args.traces}: {len(some):,} requests, {positions:,} positions\n"
                  f"prices  {args.cost} {about}\n"
                  f"rounds  of at most {longest} drafts\n\n{ladder_table(result)}"))
