"""Text in, text out, by any method; shows who proposed each token and what it was worth.

    ar, ngram, draft    plain decoding; drafts copied from earlier text; drafts of a small model
    specgen             the model drafts for itself, and reads 5 % of its cache
    prism, eagle        modules that read the model's hidden states draft, chains or trees
    specdiff            a diffusion model drafts a window in one forward
    adaptive            whichever of these promises most tokens/s, chosen every round
    cdlm, dlm           no drafts: a diffusion model fills in blocks of masks

    python decode.py --method ngram --chat                        # talk with the model; green: guessed right
    python decode.py --method specdiff --task story --explain 3   # three rounds, draft by draft
    python decode.py --method specgen --compare                   # how much faster, and is it identical?

All options: python decode.py --help. The model is SmolLM2-135M-Instruct where the package that carries it is
installed, unless the method or the problem is made for the small model in checkpoints/target.
"""
import os
import statistics
import sys

import minispec  # before torch: it tunes the allocator
import torch
from tqdm import tqdm

from minispec import cdlm, specgen
from minispec.core.verify import Sampling
from minispec.data import prompts, tasks
from minispec.data.tokenizer import Tokenizer
from minispec.studies.sparse import measure_costs
from minispec.tools import checkpoints, gguf_file, methods
from minispec.tools.answers import converse, requests_of, schedule_view, verdict
from minispec.tools.files import write_json
from minispec.tools.report import compare, figures, table
from minispec.tools.script import Parser, check_device, check_writable, in_colour, run_main, visible
from minispec.tools.terminal import Printer, chat, legend, stream
from minispec.tools.watch import Explain, Watch

BUILT_IN = ("trace", 2, 40)      # family, seed and size of the problem solved if none is given
SHORT = ("story", 5, 5)          # the same for diffusion models, whose answers have 256 slots

# Of models that speak English: a question, and for SpecGen, which is made for long contexts, a story of
# 4,400 tokens (the first three chapters of The Princess and the Goblin, George MacDonald, 1872).
QUESTION = "Why is the sky blue, and why are sunsets red?"
STORY = os.path.join(os.path.dirname(minispec.__file__), "data", "goblin.txt")
TASK = "\n\nTell me in your own words what happens in this story, and who the old lady is."
ANSWER = 256                     # tokens of an answer to one of these
LONG = 10_000                    # characters of a prompt that are shown; of a longer one, its ends
CHAT = 1024                      # the same of --chat, unless --max-new-tokens says otherwise


# -- arguments -------------------------------------------------------------------------------------------

def parse_args(argv=None):
    parser = Parser(__doc__)
    group = parser.add_argument_group("what to solve (default: a built-in problem)")
    source = group.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="a prompt of your own")
    source.add_argument("--prompts", metavar="FILE",
                        help="a file of prompts, as GSM8K, MATH-500, AIME, HumanEval, MBPP, MT-bench and "
                             "Spec-Bench have them, or like that")
    source.add_argument("--chat", action="store_true",
                        help="talk with the model: Ctrl-C stops an answer, Ctrl-D ends")
    source.add_argument("--task", metavar="FAMILY",
                        help=f"held-out problems: {', '.join(tasks.FAMILIES)}; "
                             f"or a file of the data folder: {', '.join(prompts.PROMPT_FILES)}")
    add = group.add_argument
    add("--n", type=int, help="how many problems (default 1 of a task, all of a file)")
    add("--size", type=int,
        help="difficulty of --task: lines, digits, events, rooms (default: drawn from the trained range)")
    add("--data", default=os.environ.get("MINISPEC_DATA"), metavar="DIR",
        help="folder of real prompt files (default $MINISPEC_DATA)")
    add("--warm-context", type=int, default=0, metavar="N",
        help="enter the reference chain of thought with N tokens of prompt and chain given")
    add("--no-thinking", action="store_true", help="Qwen3: answer at once, without a chain of thought")

    add = parser.add_argument_group("answers").add_argument
    add("--batch", type=int, default=1, help="requests decoded together (default 1)")
    add("--max-new-tokens", type=int,
        help="limit of an answer (default: twice a known solution's length, else 1024)")
    add("--stop", action="append", default=[], metavar="TEXT",
        help="end the answer before this text; may be given several times")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add("--top-k", type=int, default=0, help="keep the k most likely tokens; 0 is off")
    add("--top-p", type=float, default=1.0, help="keep the most likely tokens that reach this mass; 1 is off")
    add("--seed", type=int, default=0, help="of sampling, and of the first problem of --task")

    add = parser.add_argument_group("output").add_argument
    add("--compare", action="store_true",
        help="decode autoregressively too: speed-up, and whether the output is identical")
    add("--explain", type=int, default=0, metavar="N",
        help="show the first N rounds that have drafts: p, q, the coin, the verdict, what the cache keeps")
    add("--watch", action="store_true", help="cdlm, dlm: show the masked positions while they fill in")
    add("--json", metavar="PATH", help="write the result as JSON")
    add("--quiet", action="store_true", help="no streamed text, only the table")

    methods.add_arguments(parser)
    parser.set_defaults(model=None)
    args = parser.parse_args(argv)
    args.model = args.model or default_model(args)
    check(args)
    return args


def default_model(args):
    """SmolLM2 where it is installed, unless the method's drafter or the problem is of the shipped model."""
    if args.method not in methods.FREE or args.task in tasks.FAMILIES:
        return methods.SHIPPED
    if gguf_file.packaged("smollm2"):
        return "smollm2"
    print(f"SmolLM2 is not installed; this is the small model of {methods.SHIPPED}. For the real one: "
          f"{gguf_file.HINT}", file=sys.stderr)
    return methods.SHIPPED


def check(args):
    """ValueError for what can be known to be wrong before anything is loaded."""
    diffusion = args.method in methods.DIFFUSION
    if args.method not in methods.METHODS and not diffusion:
        allowed = ", ".join([*methods.METHODS, *methods.DIFFUSION])
        raise ValueError(f"unknown method '{args.method}'; choose from {allowed}")
    for name in ("n", "batch", "max_new_tokens", "cache_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"{name.replace('_', '-')} {value} is out of range; allowed is 1 or more")
    if args.warm_context < 0:
        raise ValueError(f"warm-context {args.warm_context} is out of range; allowed is 0 (off) or more")
    args.stop = [s.encode("utf-8", "replace").decode() for s in args.stop]
    if args.stop and (diffusion or "" in args.stop):
        raise ValueError("--stop is a text of one character or more, and not for --method cdlm or dlm")
    if args.chat and (args.json or args.compare or args.batch > 1 or args.quiet or diffusion):
        raise ValueError("--chat goes with one request at a time and no --json, --compare, --quiet; "
                         "not with --method cdlm or dlm, which do not chat")
    if args.watch and (not diffusion or args.batch > 1):
        raise ValueError("--watch is for --method cdlm or dlm and --batch 1")
    if args.explain and (diffusion or args.method == "ar" or args.batch > 1 or args.explain < 0 or args.chat):
        raise ValueError("--explain N is for N of 1 or more, methods that verify drafts and --batch 1; the "
                         "steps of --method cdlm or dlm are shown by --watch")
    if args.json:
        inputs = [args.prompts, args.cost, args.model]
        if args.data and args.task in prompts.PROMPT_FILES:
            inputs.append(os.path.join(args.data, prompts.PROMPT_FILES[args.task][0]))
        check_writable(args.json, inputs)


def problems_of(args):
    """What was asked for, or None: then a built-in problem is solved. ValueError names what is wrong."""
    if args.prompt is not None:
        return [tasks.Problem("prompt", args.prompt, "", "")]
    if args.prompts:
        return prompts.load_prompts(args.prompts)[:args.n]
    if args.task in prompts.PROMPT_FILES:
        return prompts.load_named(args.task, args.data)[:args.n or 1]
    if args.task:
        size = args.size
        if args.task == "trace" and args.warm_context and size is None:
            size = tasks.lines_for(args.warm_context + 2 * (args.max_new_tokens or 512))
        return [tasks.make(args.task, args.seed + i, "heldout", size) for i in range(args.n or 1)]
    return None


def built_in(args, tokenizer):
    """The problem that is solved if none is given."""
    if tokenizer.ours:
        family, seed, size = SHORT if args.method in methods.DIFFUSION else BUILT_IN
        return [tasks.make(family, seed, "heldout", size)]
    args.max_new_tokens = args.max_new_tokens or ANSWER
    if args.method != "specgen":
        return [tasks.Problem("prompt", QUESTION, "", "")]
    with open(STORY, encoding="utf-8") as f:
        return [tasks.Problem("prompt", f.read() + TASK, "", "")]


def load(args):
    """(model, tokenizer) of the target."""
    check_device(args.device)
    name = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")
    model = checkpoints.load(args.model, args.device, getattr(torch, name))
    tokenizer = Tokenizer.load(args.model)
    if args.no_thinking:
        if "enable_thinking" not in tokenizer.chat_template:
            raise ValueError(f"--no-thinking is for models of the Qwen3 family; {args.model} is none")
        tokenizer.thinking = False
    return model, tokenizer


class Session:
    """Answers problems with one engine: one after the other with their text, or in batches with a bar."""

    def __init__(self, engine, tokenizer, args, make_requests, quiet):
        self.engine, self.tokenizer, self.args = engine, tokenizer, args
        self.make_requests, self.quiet = make_requests, quiet
        self.first_token = []                            # seconds to the first token of every generation

    def answer(self, problems):
        """Generations of the problems, in order."""
        requests = self.make_requests(problems)
        if self.engine.batch_size == 1 or len(requests) == 1:
            for i, (problem, request) in enumerate(zip(problems, requests)):
                if not self.quiet and len(requests) > 1:
                    print(f"--- {i + 1} of {len(requests)}")
                self._one(problem, request, len(requests) > 1)
        else:
            with tqdm(total=len(requests), unit="request", desc=self.args.method, disable=self.quiet) as bar:
                self.first_token += stream(self.engine, requests, self.tokenizer, self.args.stop, bar=bar)
        return [r.generation for r in requests]

    def _one(self, problem, request, judge):
        """Answer one request; show the prompt, the text while it comes and, if asked, the verdict."""
        printer = None
        if not self.quiet:
            shown = problem.prompt.encode("utf-8", "replace").decode()      # half a character cannot be shown
            if len(shown) > LONG:
                shown = f"{shown[:500]}\n[.. {len(shown) - 700:,} characters ..]\n{shown[-200:]}"
            print(visible(shown))
            if not self.args.watch:
                printer = Printer(self.tokenizer, in_colour(sys.stdout), self.args.stop)
        self.first_token += stream(self.engine, [request], self.tokenizer, self.args.stop, printer)
        if printer and printer.last != "\n":
            print()
        if not self.quiet and judge:
            correct = verdict(problem, request.generation, self.tokenizer)
            if correct is not None:
                print("answer: " + ("correct" if correct else "wrong"))


# -- main ------------------------------------------------------------------------------------------------

def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        print(__doc__)
        return
    args = parse_args(argv)
    diffusion = args.method in methods.DIFFUSION
    if diffusion and args.max_new_tokens is None:
        args.max_new_tokens = cdlm.GEN_LENGTH
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    problems = problems_of(args)                         # what cannot be read fails before a model is loaded
    model, tokenizer = load(args)
    if not args.quiet:
        print(f"{args.model}: {model.n_params() / 1e6:.1f}M parameters, {model.dtype} on {args.device}, "
              f"--method {args.method}\n".replace("torch.", ""))
    engine = methods.make_engine(args.method, model, args, args.batch)
    if in_colour(sys.stdout) and args.batch == 1 and args.method != "ar" and not (args.quiet or diffusion):
        legend()
    if args.chat:
        return chat(engine, tokenizer, sampling, args.max_new_tokens or CHAT, args.stop)
    if problems is None:
        problems = built_in(args, tokenizer)

    def make_requests(some):
        return requests_of(some, tokenizer, model, args.max_new_tokens, sampling, args.warm_context)

    make_requests(problems)                              # what does not fit fails before anything is shown

    # Decode.
    if args.watch and not args.quiet:
        engine.on_step = Watch(tokenizer, sys.stdout)
    explained = Explain(engine, tokenizer, args.explain).lines if args.explain else []
    session = Session(engine, tokenizer, args, make_requests, args.quiet)
    rows = converse(problems, session.answer)

    # Report.
    result = figures(args, model, tokenizer, engine, rows, session.first_token)
    generations = [generation for _, generation, _ in rows]
    if args.method == "specgen":
        result["schedule"] = schedule_view(engine)
        result["regime"] = regime(engine, args, result["accepted_per_round"], generations)
    if args.compare:
        if not args.quiet:
            print("\nonce more, by the plain loop ..", flush=True)
        ar = methods.make_engine("ar", model, args, args.batch)
        plain = converse(problems, Session(ar, tokenizer, args, make_requests, quiet=True).answer)
        compare(result, generations, [generation for _, generation, _ in plain], ar, model)
    if len(rows) == 1:
        result |= result.pop("requests")[0]
    if not args.quiet and args.batch == 1:
        print()
    print("\n".join([*explained, table(result)]))
    if args.json:
        write_json(args.json, result)


def regime(engine, args, accepted, generations):
    """SpecGen's cost model at this run's batch and mean context, from timings made here and now."""
    context = int(statistics.mean(len(g.prompt_ids) + len(g.token_ids) for g in generations))
    k = engine.planner.k
    costs = measure_costs(engine.model, context, args.batch, k, args.sparsity, args.min_budget)
    predicted = specgen.predicted_speedup(k, accepted, **costs, delayed=args.delayed)
    return {**costs, "context": context, "predicted_speedup": predicted}


if __name__ == "__main__":
    run_main(main)
