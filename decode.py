"""Text in, text out, by any method; shows who proposed each token and what it was worth.

    python decode.py --method specgen                                # a built-in task about a long text
    python decode.py --method specgen --compare                      # how much faster, and is it identical?
    python decode.py --method ngram --chat                           # talk with the model
    python decode.py --method draft --task story --n 8 --batch 4     # eight held-out problems, four at a time
    python decode.py --method ngram --prompt "Once upon a time"      # your own prompt
    python decode.py --method prism --tree 15 --depth 6 --compare    # a trained drafter and a draft tree
    python decode.py --method specgen --task trace --n 16 --batch 8 --warm-context 4000 --max-new-tokens 200
    python decode.py --method cdlm --watch                           # a diffusion model: masks fill in
    python decode.py --method specgen --prompts questions.jsonl --temperature 0.7 --top-p 0.9 --json out.json
    python decode.py --method ngram --model qwen3 --prompt "Why is the sky blue?" --no-thinking
    python decode.py --method specgen --model model.gguf --dtype bfloat16

The default model is SmolLM2-135M-Instruct (--model smollm2) where the package that carries it is installed,
unless the method or the problem is made for the small model in checkpoints/target.
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
from minispec.tools.answers import converse, requests_of, schedule_view, summary, tie_gap, verdict
from minispec.tools.files import write_json
from minispec.tools.script import Parser, check_device, check_writable, in_colour, run_main, visible
from minispec.tools.terminal import Printer, before_stop, chat, legend, stream
from minispec.tools.watch import Watch

BUILT_IN = ("trace", 2, 40)      # family, seed and size of the problem solved if none is given
SHORT = ("story", 5, 5)          # the same for diffusion models, whose answers have 256 slots

# Of models that speak English: a question, and for SpecGen, which is made for long contexts, a story of
# 4,400 tokens (the first three chapters of The Princess and the Goblin, George MacDonald, 1872).
QUESTION = "Why is the sky blue, and why are sunsets red?"
STORY = os.path.join(os.path.dirname(minispec.__file__), "data", "goblin.txt")
TASK = "\n\nTell me in your own words what happens in this story, and who the old lady is."
ANSWER = 256                     # tokens of an answer to one of these
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
            whole = problem.prompt.encode("utf-8", "replace").decode()      # half a character cannot be shown
            print(visible(whole))
            if not self.args.watch:
                printer = Printer(self.tokenizer, in_colour(sys.stdout), self.args.stop)
        self.first_token += stream(self.engine, [request], self.tokenizer, self.args.stop, printer)
        if printer and printer.last != "\n":
            print()
        if not self.quiet and judge:
            correct = verdict(problem, request.generation, self.tokenizer)
            if correct is not None:
                print("answer: " + ("correct" if correct else "wrong"))


# -- the report ------------------------------------------------------------------------------------------

def describe(problem, generation, turn, tokenizer, stops):
    """All there is to know about one answer, for JSON."""
    return {
        "turn": turn,
        "prompt_token_ids": generation.prompt_ids,
        "token_ids": generation.token_ids,
        "text": before_stop(tokenizer.decode(generation.token_ids), stops),
        "who": generation.who,
        "finish": generation.finish,
        "steps": [vars(s) for s in generation.steps],
        "correct": verdict(problem, generation, tokenizer),
    }


def regime(engine, args, accepted, context):
    """SpecGen's cost model at this run's batch and mean context, from timings made here and now."""
    k = engine.planner.k
    costs = measure_costs(engine.model, context, args.batch, k, args.sparsity, args.min_budget)
    predicted = specgen.predicted_speedup(k, accepted, **costs, delayed=args.delayed)
    return {**costs, "context": context, "predicted_speedup": predicted}


def compare(result, each, generations, baseline, model, greedy):
    """Put into `result` how much faster it was than the autoregressive baseline (generations, engine), and
    into `each` answer whether it is identical."""
    plain, engine = baseline
    for one, a, g in zip(each, plain, generations):
        same_prompt = a.prompt_ids == g.prompt_ids       # a later turn is asked about the answers before it
        one["identical"] = same_prompt and a.token_ids == g.token_ids
        one["tie_gap"] = 0.0
        if same_prompt and greedy:
            one["tie_gap"] = tie_gap(model, g.prompt_ids, a.token_ids, g.token_ids)
    reference = summary(plain, engine)

    def ratio(name):
        if result[name] is None or reference[name] is None:
            return None
        return result[name] / reference[name]

    result |= {
        "ar_tokens_per_second": reference["tokens_per_second"],
        "ar_decode_tokens_per_second": reference["decode_tokens_per_second"],
        "speedup": ratio("decode_tokens_per_second"),
        "speedup_end_to_end": ratio("tokens_per_second"),
        "identical": all(one["identical"] for one in each),
        "tie_gap": max(one["tie_gap"] for one in each),
    }


def table(result):
    """The closing lines of a run."""
    diffusion = "counts" in result
    lines = _speed_lines(result)
    if diffusion:
        counts = result["counts"]
        lines.append(f"{result['tau']:.2f} tokens per forward of a request; "
                     f"{counts['forwards']} forwards were fed {counts['tokens_fed']} tokens "
                     f"for {counts['tokens_kept']} kept")
    else:
        lines.append(f"tau {result['tau']:.2f} tokens per verifying forward of the target "
                     "(bonus token included)")
    if result["acceptance_by_position"]:
        shares = " ".join(f"{a:.2f}" for a in result["acceptance_by_position"])
        lines.append(f"accepted by draft position: {shares}")
    phases = result["phase_seconds"]
    shares = [f"{name} {100 * phases[name] / result['seconds']:.0f} %"
              for name in ("prefill", "draft", "verify", "other")]
    lines.append("time: " + ", ".join(shares))
    if "speedup" in result:
        lines += _speedup_lines(result, diffusion)
    if "regime" in result:
        lines += _specgen_lines(result["schedule"], result["regime"])

    correct = result["correct"]
    if correct is not None and "requests" in result:
        lines.append(f"answer: {correct} of {len(result['requests'])} correct")
    elif correct is not None:
        lines.append("answer: " + ("correct" if correct else "wrong"))
    return "\n".join(lines)


def _rate(tokens_per_second):
    return "-" if tokens_per_second is None else f"{tokens_per_second:.1f} tokens/s"


def _times(speedup):
    return "-" if speedup is None else f"{speedup:.2f}x"


def _speed_lines(r):
    first = "-" if r["time_to_first_token"] is None else f"{r['time_to_first_token']:.3f} s"
    return [
        f"{r['method']} on {r['device']}, {r['dtype']}: {r['new_tokens']} tokens in {r['seconds']:.2f} s, "
        f"{_rate(r['tokens_per_second'])} end to end",
        f"prefill: {r['prompt_tokens']} prompt tokens, {_rate(r['prefill_tokens_per_second'])}; "
        f"first token after {first}; decoding: {_rate(r['decode_tokens_per_second'])}",
    ]


def _speedup_lines(r, diffusion):
    lines = [f"autoregressive: {_rate(r['ar_tokens_per_second'])} end to end, "
             f"decoding {_rate(r['ar_decode_tokens_per_second'])}; "
             f"speed-up {_times(r['speedup'])} in decoding, {_times(r['speedup_end_to_end'])} end to end"]
    if not diffusion and r["identical"]:
        lines.append("output: identical to autoregressive")
    elif not diffusion:
        lines.append(f"output: differs from autoregressive (top-2 logit gap there: {r['tie_gap']:.2g})")
    return lines


def _specgen_lines(v, r):
    advice = ""
    if r["attention_share"] <= 1 / 3:
        advice = (". Under a third, reading less of the cache saves too little to win: "
                  "try longer contexts or a larger batch")
    return [
        f"forwards: {v['iterations']} of {v['rows_mean']:.1f} rows "
        f"(standard deviation {v['rows_deviation']:.1f}); "
        f"rows: {v['prefill_rows']} prefill, {v['draft_rows']} draft, {v['verify_rows']} verify; "
        f"{v['active_mean']:.1f} requests at once, {v['stalled']} stalls",
        f"cache: at most {v['cache_peak']} of {v['cache_slots']} slots; "
        f"{v['offloaded']} tokens offloaded, {v['recomputed']} recomputed, {v['moved']} moved",
        f"attention takes {100 * r['attention_share']:.0f} % of an autoregressive step here; on long answers "
        f"the cost model predicts a speed-up of {r['predicted_speedup']:.2f}x{advice}",
    ]


# -- main ------------------------------------------------------------------------------------------------

def main(argv=None):
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
    if args.chat:
        if in_colour(sys.stdout):
            legend()
        limit = args.max_new_tokens or CHAT
        return chat(engine, tokenizer, sampling, limit, args.stop)
    if problems is None:
        problems = built_in(args, tokenizer)

    def make_requests(some):
        return requests_of(some, tokenizer, model, args.max_new_tokens, sampling, args.warm_context)

    make_requests(problems)                              # what does not fit fails before anything is shown

    # Decode.
    if not args.quiet and in_colour(sys.stdout) and args.method != "ar" and not diffusion and args.batch == 1:
        legend()
    if args.watch and not args.quiet:
        engine.on_step = Watch(tokenizer, sys.stdout)
    session = Session(engine, tokenizer, args, make_requests, args.quiet)
    rows = converse(problems, session.answer)

    # Report.
    generations = [generation for _, generation, _ in rows]
    each = [describe(problem, generation, turn, tokenizer, args.stop) for problem, generation, turn in rows]
    result = {
        "method": args.method,
        "device": args.device,
        "dtype": str(model.dtype).removeprefix("torch."),
        **summary(generations, engine),
        "time_to_first_token": statistics.mean(session.first_token) if session.first_token else None,
    }
    if args.method == "specgen":
        context = statistics.mean(len(g.prompt_ids) + len(g.token_ids) for g in generations)
        result["schedule"] = schedule_view(engine)
        result["regime"] = regime(engine, args, result["accepted_per_round"], int(context))
    if diffusion:
        result["counts"] = engine.counts
    if args.compare:
        ar = methods.make_engine("ar", model, args, args.batch)
        plain = converse(problems, Session(ar, tokenizer, args, make_requests, quiet=True).answer)
        baseline = [generation for _, generation, _ in plain], ar
        compare(result, each, generations, baseline, model, args.temperature == 0)
    if len(each) == 1:
        result |= each[0]
    else:
        known = [one["correct"] for one in each if one["correct"] is not None]
        result |= {"correct": sum(known) if known else None, "requests": each}
    if not args.quiet and args.batch == 1:
        print()
    print(table(result))
    if args.json:
        write_json(args.json, result)


if __name__ == "__main__":
    run_main(main)
