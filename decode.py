"""Text in, text out, by any method, with the proposer of each token and the figures of the run. On a
terminal green tokens are accepted drafts, red ones replace a rejected draft, and cyan ones follow a chain
whose drafts were all accepted.

    ar, ngram, draft    plain decoding; prompt lookup; drafts of a small model
    specgen             the model drafts for itself and reads 5 % of its cache
    prism, eagle        modules on the model's hidden states draft chains or trees
    specdiff            a diffusion model drafts a window in one forward
    adaptive            every round, the drafter with most expected tokens/s
    cdlm, dlm           no drafts: a diffusion model fills in blocks of masks

    python decode.py --method ngram --chat                            # talk with the model
    python decode.py --method specdiff --task story --html run.html   # every round, in a browser
    python decode.py --method specgen --compare                       # eight questions, one text

All options: python decode.py --help. The model is SmolLM2-135M-Instruct if its package is installed. Problems
of --task, and methods without a drafter for SmolLM2 (draft, cdlm, dlm), use the puzzle model in
checkpoints/target.
"""
import gc
import os
import shlex
import sys
from dataclasses import replace

import minispec  # before torch: it tunes the allocator
minispec.need_torch()
import torch

from minispec import cdlm
from minispec.core.requests import Request
from minispec.core.verify import RULES, Sampling
from minispec.data import prompts, tasks
from minispec.data.tokenizer import Tokenizer
from minispec.tools import checkpoints, gguf_file, methods
from minispec.tools.answers import UNKNOWN, requests_of
from minispec.tools.files import write_json, written_to
from minispec.tools.load import Load
from minispec.tools.recorder import Recorder, write_page
from minispec.tools.report import compare, figures, table
from minispec.tools.script import Parser, check_device, check_writable, positive, run_main, visible
from minispec.tools.terminal import Lines, Printer, chat, stream

# Built-in problems: a question, and for SpecGen, which is made for batches of long requests, eight questions
# about one text, at its paper's temperature.
ANSWER, STORY_ANSWER = 256, 48   # new tokens per answer
TEMPERATURE = 0.65
LONG = 10_000                    # characters; a longer prompt is shown by its ends
WARM_UP = 256, 16                # prompt tokens and new tokens of a warm-up


# -- arguments -------------------------------------------------------------------------------------------

def parse_args(argv=None):
    parser = Parser(__doc__)
    group = parser.add_argument_group("problems (default: built-in ones)")
    source = group.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="prompt text")
    source.add_argument("--prompts", metavar="FILE",
                        help="prompt file in the format of GSM8K, MATH-500, AIME, HumanEval, MBPP, MT-bench, "
                             "Spec-Bench or similar")
    source.add_argument("--chat", action="store_true",
                        help="conversation with the model: Ctrl-C stops an answer, Ctrl-D ends")
    source.add_argument("--task", choices=tasks.FAMILIES, help="family of held-out problems")
    add = group.add_argument
    add("--n", type=positive, help="number of problems (default: 1 of a task, all of a file)")
    add("--size", type=int,
        help="difficulty of --task in lines, digits, events or rooms (default: drawn from the trained range)")

    add = parser.add_argument_group("answers").add_argument
    add("--batch", type=positive,
        help="requests decoded together (default 1; 8 for specgen's built-in questions)")
    add("--max-new-tokens", type=positive,
        help="limit of an answer in tokens (default: twice the length of a puzzle's solution; cdlm and dlm "
             f"{cdlm.GEN_LENGTH}; built-in questions {ANSWER}, those of specgen {STORY_ANSWER}; else "
             f"{UNKNOWN})")
    add("--temperature", type=float,
        help=f"sampling temperature, 0 is greedy (default 0; {TEMPERATURE} for specgen's built-in questions)")
    add("--top-k", type=int, default=0, help="number of likeliest tokens to sample from; 0: all (default)")
    add("--top-p", type=float, default=1.0,
        help="probability mass of the likeliest tokens to sample from, 1 is all (default 1)")
    add("--seed", type=int, default=0, help="seed of sampling and of --task (default 0)")
    add("--rule", default="coupled", choices=RULES,
        help="acceptance rule above temperature 0, see core/verify.py; all but rejection give the text of "
             "plain decoding with the same seed (default %(default)s)")

    add = parser.add_argument_group("output").add_argument
    add("--compare", action="store_true",
        help="plain decoding of the same problems afterwards: speed-up, and whether the output is identical")
    add("--explain", type=positive, metavar="N",
        help="first N rounds that have drafts: p, q, the target's choice or the coins, verdicts, the cache")
    add("--html", metavar="PATH", help="page that shows the run round by round in a browser")
    add("--json", metavar="PATH", help="file for the result")

    methods.add_arguments(parser)
    parser.set_defaults(model=None)
    args = parser.parse_args(argv)
    args.target = args.model = args.model or default_model(args)
    if args.method in methods.DIFFUSION:
        # The diffusion model decodes; the target is for --compare.
        args.model = args.drafter = methods.folder_of(args.method, args)
        args.max_new_tokens = args.max_new_tokens or cdlm.GEN_LENGTH
    args.sampling = Sampling(args.temperature or 0.0, args.top_k, args.top_p, args.seed, args.rule)
    check(args)
    return args


def default_model(args):
    """SmolLM2 if it is installed, the method needs no training or has it, and no argument belongs to the
    puzzle model."""
    args.model = gguf_file.SMOLLM2
    suits = args.method in ("ar", "adaptive", *methods.ready(args))
    if suits and not (args.task or args.drafter or args.cost):
        if gguf_file.packaged():
            return args.model
        print(f"SmolLM2 is not installed; this is the puzzle model of {methods.SHIPPED}. For SmolLM2: "
              f"{gguf_file.HINT}", file=sys.stderr)
    return methods.SHIPPED


def check(args):
    """ValueError for mistakes that can be seen before anything is loaded."""
    diffusion = args.method in methods.DIFFUSION
    several = (args.batch or 1) > 1
    if args.chat and (args.json or args.html or args.compare or several or diffusion):
        raise ValueError("--chat goes with one request at a time and no --json, --html, --compare; "
                         "not with --method cdlm or dlm, which do not chat")
    if args.explain and (diffusion or args.method == "ar" or several or args.chat):
        raise ValueError("--explain is for methods that verify drafts and --batch 1; --html shows the others")
    if args.size is not None and not args.task:
        raise ValueError("--size is for --task")
    if args.n and not (args.task or args.prompts):
        raise ValueError("--n is for --task and --prompts")
    if args.compare and (args.explain or args.html):
        raise ValueError("--compare goes without --explain and --html, whose work would be timed")
    for name, option in methods.given(args).items():
        owners = methods.OF_METHODS.get(name, (args.method,))
        if args.method not in owners:
            raise ValueError(f"{option} is for {', '.join(owners)}")
    if 0 < args.prompt_lookup < (args.batch or 1):
        raise ValueError("--prompt-lookup is shared by the batch; it must be at least --batch")
    if args.chat and args.cache_tokens:
        raise ValueError("--cache-tokens goes without --chat, whose cache grows with the conversation")
    for path in filter(None, (args.json, args.html)):
        check_writable(path, [args.prompts, methods.costs_of(args), args.model, args.target, args.drafter])
    if args.html and args.json and written_to(args.html) == written_to(args.json):
        raise ValueError(f"--html and --json must be different files, got {args.json}")


def problems_of(args):
    """The problems that the arguments name, or None. ValueError says what is wrong with them."""
    if args.prompt is not None:
        return [tasks.Problem("prompt", args.prompt)]
    if args.prompts:
        return prompts.load_prompts(args.prompts)[:args.n]
    if args.task:
        return [tasks.make(args.task, args.seed + i, "heldout", args.size) for i in range(args.n or 1)]
    return None


def built_in(args, tokenizer):
    """The problems without a --prompt, --prompts or --task. Sets the arguments that the user left open."""
    if tokenizer.is_puzzle_model:
        return [tasks.make("story", 5, "heldout", 5)]
    if args.method != "specgen":
        args.max_new_tokens = args.max_new_tokens or ANSWER
        return [tasks.Problem("prompt", prompts.QUESTIONS[0])]
    args.max_new_tokens = args.max_new_tokens or STORY_ANSWER
    questions = prompts.STORY_QUESTIONS
    args.batch = args.batch or (1 if args.explain else len(questions))
    if args.temperature is None:
        args.sampling = replace(args.sampling, temperature=TEMPERATURE)
    return [tasks.Problem("prompt", f"{prompts.story()}\n\n{question}") for question in questions]


# -- answers ---------------------------------------------------------------------------------------------

def answer(engine, problems, tokenizer, args, quiet=False):
    """Answer the problems, together or at batch 1 one after the other, and show their text unless quiet.
    Returns the figures of the run."""
    requests = requests_of(problems, tokenizer, engine.model, args.max_new_tokens, args.sampling)
    if args.method not in methods.DIFFUSION:
        engine.slots_for(requests)                       # ValueError before the first answer
    load = Load()
    if quiet:
        first_token = stream(engine, requests)
    elif args.batch > 1:
        first_token = together(engine, requests, problems, tokenizer)
    else:
        first_token = []
        for i, (problem, request) in enumerate(zip(problems, requests), 1):
            show_prompt(problem.prompt, i, len(requests))
            first_token += stream(engine, [request], Printer(tokenizer))
            print()
    warning = "" if args.device.startswith("cuda") else load.warning(torch.get_num_threads())
    result = figures(args, tokenizer, engine, problems, [r.generation for r in requests], first_token)
    return {**result, "busy": warning} if warning else result


def together(engine, requests, problems, tokenizer):
    """Answer the requests in a batch: a line for each on a terminal, then prompts and answers. A common
    beginning of the prompts is shown once."""
    common = os.path.commonprefix([problem.prompt for problem in problems]) if len(problems) > 1 else ""
    common = common[:common.rfind("\n") + 1]
    if common:
        show_prompt(common.rstrip() + "\n")
    lines = Lines(tokenizer)
    first_token = stream(engine, requests, lines)
    lines.close()
    for i, (problem, request) in enumerate(zip(problems, requests), 1):
        show_prompt(problem.prompt.removeprefix(common), i, len(problems))
        Printer(tokenizer)(request, request.generation.token_ids)
        print()
    return first_token


def show_prompt(text, i=1, n=1):
    """Print prompt i of n; the two ends of a long one."""
    if n > 1:
        print(f"--- {i} of {n}")
    if len(text) > LONG:
        text = f"{text[:500]}\n[.. {len(text) - 700:,} characters ..]\n{text[-200:]}"
    print(visible(text))


def warm_up(engine, problems, tokenizer, args):
    """Answer the ends of the prompts in brief, so that weights are packed and kernels made before timing."""
    n_prompt, n_new = WARM_UP
    requests = requests_of(problems[:args.batch], tokenizer, engine.model, args.max_new_tokens, args.sampling)
    engine.generate([Request(r.tokens[-n_prompt:], min(n_new, r.max_new_tokens), r.sampling)
                     for r in requests])


# -- main ------------------------------------------------------------------------------------------------

def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        print(__doc__)
        return
    args = parse_args(argv)
    problems = problems_of(args)                         # fails before a model is loaded
    check_device(args.device)
    args.dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")
    model = checkpoints.load(args.model, args.device, getattr(torch, args.dtype))
    tokenizer = Tokenizer.load(args.model)
    print(f"{args.model}: {model.n_params() / 1e6:.1f}M parameters, {args.dtype} on {args.device}, "
          f"--method {args.method}\n")
    if not (problems or args.chat):
        problems = built_in(args, tokenizer)
    args.batch = args.batch or 1

    def make(name):
        gc.collect()                                     # an engine and its scheduler hold each other
        return methods.make_engine(name, target if name == "ar" else model, args, args.batch)

    target = methods.loaded(args.target, model, args) if args.compare else model
    if args.compare:
        for name in ("ar", args.method):
            warm_up(make(name), problems, tokenizer, args)
    engine = make(args.method)
    if args.chat:
        return chat(engine, tokenizer, args.sampling, args.max_new_tokens or UNKNOWN)

    # Decode.
    recorder = Recorder(engine, tokenizer) if args.explain or args.html else None
    result = answer(engine, problems, tokenizer, args)
    if args.compare:
        print("\nplain decoding of the same problems ..", flush=True)
        engine = None                                    # its cache is not needed any more
        plain = answer(make("ar"), problems, tokenizer, args, quiet=True)
        compare(result, plain, target, args.sampling)
        result |= {"busy": plain["busy"]} if "busy" in plain else {}

    # Report. The files first, because standard output may be closed or full.
    lines = ["", *(recorder.lines(args.explain) if args.explain else []), table(result)]
    if recorder:
        lines.append("the time for recording the rounds is included, as other")
    if args.html:
        about = {"command": shlex.join(["python", "decode.py", *argv]), "rule": args.rule}
        write_page(args.html, [recorder.run(result | about)])
        lines.append(f"{args.html}: open it in a browser")
    if args.json:
        if len(problems) == 1:
            result |= result.pop("requests")[0]
        write_json(args.json, result)
    print("\n".join(lines))


if __name__ == "__main__":
    run_main(main)
