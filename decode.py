"""Text in, text out, by any method; shows who proposed each token and what it was worth. On a terminal green
tokens were guessed right, red ones replace a wrong guess, blue ones come free behind right guesses.

    ar, ngram, draft    plain decoding; drafts copied from earlier text; drafts of a small model
    specgen             the model drafts for itself, and reads 5 % of its cache
    prism, eagle        modules that read the model's hidden states draft, chains or trees
    specdiff            a diffusion model drafts a window in one forward
    adaptive            whichever of these promises most tokens/s, chosen every round
    cdlm, dlm           no drafts: a diffusion model fills in blocks of masks

    python decode.py --method ngram --chat                        # talk with the model; green: guessed right
    python decode.py --method specdiff --task story --html run.html   # every round, in a browser
    python decode.py --method specgen --compare                   # how much faster, and is it identical?

All options: python decode.py --help. The model is SmolLM2-135M-Instruct where the package that carries it is
installed. Problems of --task, and methods without a drafter for SmolLM2 (draft, cdlm, dlm), get the small
model in checkpoints/target.
"""
import gc
import shlex
import sys

import minispec  # before torch: it tunes the allocator
minispec.need_torch()
import torch

from minispec import cdlm
from minispec.core.verify import RULES, Sampling
from minispec.data import prompts, tasks
from minispec.data.tokenizer import Tokenizer
from minispec.tools import checkpoints, gguf_file, methods
from minispec.tools.answers import UNKNOWN, requests_of
from minispec.tools.files import write_json
from minispec.tools.load import Load
from minispec.tools.recorder import Recorder, write_page
from minispec.tools.report import compare, figures, table
from minispec.tools.script import Parser, check_device, check_writable, positive, run_main, visible
from minispec.tools.terminal import Printer, chat, stream

# Models that speak English are asked a question, and SpecGen, which is made for long contexts, about a story.
TASK = "\n\nTell me in your own words what happens in this story, and who the old lady is."
ANSWER = 256                     # tokens of an answer to one of these
LONG = 10_000                    # characters of a prompt that are shown; of a longer one, its ends


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
    source.add_argument("--task", choices=tasks.FAMILIES, help="held-out problems of a family")
    add = group.add_argument
    add("--n", type=positive, help="how many problems (default 1 of a task, all of a file)")
    add("--size", type=int,
        help="difficulty of --task: lines, digits, events, rooms (default: drawn from the trained range)")

    add = parser.add_argument_group("answers").add_argument
    add("--batch", type=positive, default=1, help="requests decoded together (default 1)")
    add("--max-new-tokens", type=positive,
        help="limit of an answer (default: twice a known solution's length, else 1024)")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add("--top-k", type=int, default=0, help="keep the k most likely tokens; 0 is off")
    add("--top-p", type=float, default=1.0, help="keep the most likely tokens that reach this mass; 1 is off")
    add("--seed", type=int, default=0, help="of sampling, and of the first problem of --task")
    add("--rule", default="coupled", choices=RULES,
        help="how drafts are drawn and judged above temperature 0, see core/verify.py; under all but "
             "rejection a seed has one text, that of plain decoding (default %(default)s)")

    add = parser.add_argument_group("output").add_argument
    add("--compare", action="store_true",
        help="time this method and plain decoding once more, both warmed up: speed-up, and whether the "
             "output is identical")
    add("--explain", type=positive, metavar="N",
        help="show the first N rounds that have drafts: p, the target's choice, verdicts, the cache")
    add("--html", metavar="PATH", help="write a page that shows the run round by round")
    add("--json", metavar="PATH", help="write the result as JSON")

    methods.add_arguments(parser)
    parser.set_defaults(model=None)
    args = parser.parse_args(argv)
    args.target = args.model = args.model or default_model(args)
    if args.method in methods.DIFFUSION:
        # It decodes; the target is for --compare.
        args.model = args.drafter = methods.folder_of(args.method, args)
        args.max_new_tokens = args.max_new_tokens or cdlm.GEN_LENGTH
    args.sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed, args.rule)
    check(args)
    return args


def default_model(args):
    """SmolLM2 where it is installed, if the method is ready for it and nothing is given that belongs to the
    shipped model."""
    args.model = gguf_file.SMOLLM2
    suits = args.method in ("ar", *methods.ready(args))
    if suits and not (args.task or args.drafter or args.cost):
        if gguf_file.packaged():
            return args.model
        print(f"SmolLM2 is not installed; this is the small model of {methods.SHIPPED}. For the real one: "
              f"{gguf_file.HINT}", file=sys.stderr)
    return methods.SHIPPED


def check(args):
    """ValueError for what can be known to be wrong before anything is loaded."""
    diffusion = args.method in methods.DIFFUSION
    if args.chat and (args.json or args.html or args.compare or args.batch > 1 or diffusion):
        raise ValueError("--chat goes with one request at a time and no --json, --html, --compare; "
                         "not with --method cdlm or dlm, which do not chat")
    if args.explain and (diffusion or args.method == "ar" or args.batch > 1 or args.chat):
        raise ValueError("--explain is for methods that verify drafts and --batch 1; --html shows the others")
    for path in filter(None, (args.json, args.html)):
        check_writable(path, [args.prompts, methods.costs_of(args), args.model])


def problems_of(args):
    """What was asked for, or None: then a built-in problem is solved. ValueError names what is wrong."""
    if args.prompt is not None:
        return [tasks.Problem("prompt", args.prompt)]
    if args.prompts:
        return prompts.load_prompts(args.prompts)[:args.n]
    if args.task:
        return [tasks.make(args.task, args.seed + i, "heldout", args.size) for i in range(args.n or 1)]
    return None


def built_in(args, tokenizer):
    """The problem that is solved if none is given."""
    if tokenizer.ours:
        return [tasks.make("story", 5, "heldout", 5)]
    args.max_new_tokens = args.max_new_tokens or ANSWER
    if args.method != "specgen":
        return [tasks.Problem("prompt", prompts.QUESTIONS[0])]
    return [tasks.Problem("prompt", prompts.story() + TASK)]


def answer(engine, problems, tokenizer, args, quiet=False):
    """Answer the problems: together, or at batch 1 one after the other with their text. Returns the figures
    of the run."""
    requests = requests_of(problems, tokenizer, engine.model, args.max_new_tokens, args.sampling)
    load = Load()
    if quiet or args.batch > 1:
        first_token = stream(engine, requests)
    else:
        first_token = []
        for i, (problem, request) in enumerate(zip(problems, requests)):
            if len(requests) > 1:
                print(f"--- {i + 1} of {len(requests)}")
            text = problem.prompt
            if len(text) > LONG:
                text = f"{text[:500]}\n[.. {len(text) - 700:,} characters ..]\n{text[-200:]}"
            print(visible(text))
            first_token += stream(engine, [request], Printer(tokenizer))
            print()
    warning = "" if args.device.startswith("cuda") else load.warning(torch.get_num_threads())
    result = figures(args, tokenizer, engine, problems, [r.generation for r in requests], first_token)
    return {**result, "busy": warning} if warning else result


# -- main ------------------------------------------------------------------------------------------------

def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        print(__doc__)
        return
    args = parse_args(argv)
    problems = problems_of(args)                         # what cannot be read fails before a model is loaded
    check_device(args.device)
    args.dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")
    model = checkpoints.load(args.model, args.device, getattr(torch, args.dtype))
    tokenizer = Tokenizer.load(args.model)
    print(f"{args.model}: {model.n_params() / 1e6:.1f}M parameters, {args.dtype} on {args.device}, "
          f"--method {args.method}\n")
    engine = methods.make_engine(args.method, model, args, args.batch)
    if args.compare:
        target = methods.loaded(args.target, model, args)
    if args.chat:
        return chat(engine, tokenizer, args.sampling, args.max_new_tokens or UNKNOWN)
    problems = problems or built_in(args, tokenizer)

    # Decode.
    recorder = Recorder(engine, tokenizer) if args.explain or args.html else None
    result = answer(engine, problems, tokenizer, args)
    if args.compare:
        print("\nonce more without output, in turn with the plain loop ..", flush=True)
        # The first run of each loop is a warm-up, which packs weights and makes kernels.
        runs = []
        for name in ("ar", args.method, "ar"):
            engine = None
            gc.collect()                                 # an engine and its planner hold each other
            engine = methods.make_engine(name, target if name == "ar" else model, args, args.batch)
            runs.append(answer(engine, problems, tokenizer, args, quiet=True))
        _, result, plain = runs
        compare(result, plain, target, args.sampling)

    # Report. The file first, because standard output may be closed or full.
    lines = ["", *(recorder.lines(args.explain) if args.explain else []), table(result)]
    if args.html:
        about = {"command": shlex.join(["python", "decode.py", *argv]), "rule": args.rule}
        write_page(args.html, [recorder.run(result | about)])
    if args.json:
        if len(problems) == 1:
            result |= result.pop("requests")[0]
        write_json(args.json, result)
    print("\n".join(lines))


if __name__ == "__main__":
    run_main(main)
