"""Text in, text out, by any method; shows who proposed each token and what it was worth.

    python decode.py --method specgen                                # solve a built-in long reasoning problem
    python decode.py --method specgen --compare                      # and say how much faster that was, and whether identical
    python decode.py --method draft --task story --n 8 --batch 4     # eight held-out problems, four at a time
    python decode.py --method ngram --prompt "Once upon a time"      # your own prompt
    python decode.py --method prism --tree 15 --depth 6 --compare    # a trained drafter and a draft tree
    python decode.py --method specgen --task trace --n 16 --batch 8 --warm-context 4000 --max-new-tokens 200
    python decode.py --method cdlm --watch                           # a diffusion model: masked positions fill in
    python decode.py --method specgen --prompts questions.jsonl --temperature 0.7 --top-p 0.9 --json out.json
    python decode.py --method ngram --model qwen3 --prompt "Why is the sky blue?" --no-thinking     # a model of your own
"""
import codecs
import itertools
import os
import statistics
import sys

import minispec  # before torch: it tunes the allocator
import torch
from tqdm import tqdm

from minispec import cdlm, specgen
from minispec.tools import checkpoints
from minispec.data import prompts, tasks
from minispec.tools import methods
from minispec.tools.answers import converse, requests_of, schedule_view, summary, tie_gap, verdict
from minispec.tools.script import Parser, check_device, check_writable, run_main
from minispec.data.tokenizer import NO_THINKING, Tokenizer
from minispec.core.verify import Sampling

COLOURS = {"draft": "\033[32m", "correction": "\033[31m", "bonus": "\033[36m", "plain": ""}
RESET = "\033[0m"
BUILT_IN = ("trace", 2, 40)      # family, seed and size of the problem solved when none is given
SHORT = ("story", 5, 5)          # the same for diffusion models, whose answers have 256 slots


def parse_args(argv=None):
    p = Parser(__doc__)
    methods.add_arguments(p)
    source = p.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="a prompt of your own")
    source.add_argument("--prompts", metavar="FILE", help="JSON lines as GSM8K, MATH-500, AIME, HumanEval, MBPP, MT-bench and Spec-Bench have them, or like that")
    source.add_argument("--task", metavar="FAMILY", help=f"held-out problems: {', '.join(tasks.FAMILIES)}; or a file of the data folder: {', '.join(prompts.PROMPT_FILES)}")
    p.add_argument("--n", type=int, default=None, help="how many problems (default 1 of a task, all of a file)")
    p.add_argument("--size", type=int, help="difficulty of --task: lines, digits, events, rooms (default: drawn from the trained range)")
    p.add_argument("--data", default=os.environ.get("MINISPEC_DATA"), metavar="DIR", help="folder of real prompt files (default $MINISPEC_DATA)")
    p.add_argument("--batch", type=int, default=1, help="requests decoded together (default 1)")
    p.add_argument("--max-new-tokens", type=int, default=None, help="limit of an answer (default: twice a known solution's length, else 1024)")
    p.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end the answer before this text; may be given several times")
    p.add_argument("--no-thinking", action="store_true", help="Qwen3: answer at once, without a chain of thought")
    p.add_argument("--warm-context", type=int, default=0, metavar="N", help="enter the reference chain of thought with N tokens of prompt and chain given")
    p.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    p.add_argument("--top-k", type=int, default=0, help="keep the k most likely tokens; 0 is off")
    p.add_argument("--top-p", type=float, default=1.0, help="keep the most likely tokens that reach this mass; 1 is off")
    p.add_argument("--seed", type=int, default=0, help="of sampling, and of the first problem of --task")
    p.add_argument("--compare", action="store_true", help="decode autoregressively too: speed-up, and whether the output is identical")
    p.add_argument("--watch", action="store_true", help="cdlm, dlm: show the masked positions while they fill in")
    p.add_argument("--json", metavar="PATH", help="write the result as JSON")
    p.add_argument("--quiet", action="store_true", help="no streamed text, only the table")
    return p.parse_args(argv)


def problems_of(args):
    """What to solve. ValueError names what is wrong."""
    if args.n is not None and args.n < 1:
        raise ValueError(f"n {args.n} is out of range; allowed is 1 or more")
    if args.prompt is not None:
        return [tasks.Problem("prompt", args.prompt, "", "")]
    if args.prompts:
        return prompts.load_prompts(args.prompts)[:args.n]
    if args.task in prompts.PROMPT_FILES:
        return prompts.load_named(args.task, args.data)[:args.n or 1]
    if args.task:
        if args.task == "trace" and args.warm_context and args.size is None:
            args.size = tasks.lines_for(args.warm_context + 2 * (args.max_new_tokens or 512))
        return [tasks.make(args.task, args.seed + i, "heldout", args.size) for i in range(args.n or 1)]
    family, seed, size = SHORT if args.method in methods.DIFFUSION else BUILT_IN
    return [tasks.make(family, seed, "heldout", size)]


def before_stop(text, stops):
    """The text up to the first stop string in it."""
    return text[:min((text.index(s) for s in stops if s in text), default=len(text))]


def end_at_stop(generation, tokens, tokenizer, stops):
    """Of newly committed tokens, those up to the one that completes a stop string, with which the answer then ends."""
    stops, ids = [s.encode() for s in stops], generation.token_ids
    reach, begin = max(map(len, stops)), len(ids) - len(tokens)
    for end in range(begin + 1, len(ids) + 1):
        if any(s in tokenizer.decode_bytes(ids[max(end - reach, 0):end]) for s in stops):       # a token has a byte at least
            del ids[end:], generation.who[end:]
            generation.finish = "stop"
            break
    return ids[begin:]


class Printer:
    """Streams the text of one request, coloured by who proposed each token when the output is a terminal. What could be
    the beginning of a stop string is held back."""

    def __init__(self, tokenizer, colour, stops=()):
        self.tokenizer, self.colour, self.stops = tokenizer, colour, stops
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.marks = {tokenizer.special.get("<|answer|>"): "\n=> ", **dict.fromkeys(tokenizer.ends, "\n")}
        self.held = []                                   # (character, who)

    def __call__(self, tokens, who, last=False):
        for token, by in zip(tokens, who):
            text = self.marks.get(token)
            if text is None:
                text = self.utf8.decode(self.tokenizer.decode_bytes([token]))
            self.held += [(c, by) for c in text]
        text = "".join(c for c, _ in self.held)
        ready = len(before_stop(text, self.stops))
        if not last:
            ready = min((i for i in range(len(text)) if any(s.startswith(text[i:]) for s in self.stops)), default=ready)
        shown, self.held = self.held[:ready], self.held[ready:]
        for by, same in itertools.groupby(shown, lambda x: x[1]):
            text = "".join(c for c, _ in same)
            sys.stdout.write(f"{COLOURS[by]}{text}{RESET}" if self.colour and COLOURS[by] else text)
        sys.stdout.flush()


def run(engine, requests, tokenizer, quiet=False, title=None, stops=()):
    """Decode, showing text (one request at a time) or progress (a batch). Returns the generations."""
    many, printers = engine.batch_size > 1 and len(requests) > 1, {}
    with tqdm(total=len(requests), unit="request", desc=title, disable=quiet or not many) as bar:
        n = 0
        for request, tokens in engine.stream(requests):
            if stops:
                tokens = end_at_stop(request.generation, tokens, tokenizer, stops)
            n += len(tokens)
            bar.set_postfix(tokens=n, refresh=False)
            bar.update(int(request.finished))
            if quiet or many:
                continue
            if request not in printers:
                printers[request] = Printer(tokenizer, sys.stdout.isatty(), stops)
                if len(requests) > 1:
                    print(f"--- {len(printers)} of {len(requests)}")
            printers[request](tokens, request.generation.who[len(request.generation.who) - len(tokens):], request.finished)
    if printers:
        print()
    return [r.generation for r in requests]


def regime(engine, args, accepted, context):
    """SpecGen's cost model at this run's batch and mean context, from timings made here and now."""
    k = engine.planner.k
    costs = specgen.measure_costs(engine.model, context, args.batch, k, args.sparsity, args.min_budget)
    return {**costs, "context": context,
            "predicted_speedup": specgen.predicted_speedup(k, accepted, **costs, delayed=args.delayed)}


def describe(problem, generation, turn, tokenizer, stops=()):
    return {"turn": turn, "prompt_token_ids": generation.prompt_ids, "token_ids": generation.token_ids,
            "text": before_stop(tokenizer.decode(generation.token_ids), stops),
            "who": generation.who, "finish": generation.finish, "steps": [vars(s) for s in generation.steps],
            "correct": verdict(problem, generation, tokenizer)}


def table(result):
    """The closing lines of a run."""
    phases, seconds = result["phase_seconds"], result["seconds"]
    lines = [f"{result['method']} on {result['device']}, {result['dtype']}: {result['new_tokens']} tokens in {seconds:.2f} s = {result['tokens_per_second']:.1f} tokens/s"]
    if "counts" in result:
        c = result["counts"]
        lines.append(f"{result['tau']:.2f} tokens per forward of a request; {c['forwards']} forwards were fed {c['tokens_fed']} tokens for {c['tokens_kept']} kept")
    else:
        lines.append(f"tau {result['tau']:.2f} tokens per verifying forward of the target (bonus token included)")
    if result["acceptance_by_position"]:
        lines.append("accepted by draft position: " + " ".join(f"{a:.2f}" for a in result["acceptance_by_position"]))
    lines.append("time: " + ", ".join(f"{name} {100 * phases[name] / seconds:.0f} %" for name in ("prefill", "draft", "verify", "other")))
    if "speedup" in result:
        lines.append(f"autoregressive: {result['ar_tokens_per_second']:.1f} tokens/s, so the speed-up is {result['speedup']:.2f}x" + ("" if "counts" in result else "; output "
                     + ("identical" if result["identical"] else f"differs (top-2 logit gap there: {result['tie_gap']:.2g})")))
    if "regime" in result:
        r, v = result["regime"], result["schedule"]
        lines.append(f"forwards: {v['iterations']} of {v['rows_mean']:.1f} rows (standard deviation {v['rows_deviation']:.1f}); rows: {v['prefill_rows']} prefill, "
                     f"{v['draft_rows']} draft, {v['verify_rows']} verify; {v['active_mean']:.1f} requests at once, {v['stalled']} stalls")
        lines.append(f"cache: at most {v['cache_peak']} of {v['cache_slots']} slots; {v['offloaded']} tokens offloaded, {v['recomputed']} recomputed, {v['moved']} moved")
        lines.append(f"attention takes {100 * r['attention_share']:.0f} % of an autoregressive step here; on long answers the cost model predicts a speed-up of {r['predicted_speedup']:.2f}x"
                     + ("" if r["attention_share"] > 1 / 3 else ". Under a third, reading less of the cache saves too little to win: try longer contexts or a larger batch"))
    correct = result["correct"]
    if correct is not None:
        lines.append("answer: " + (f"{correct} of {len(result['requests'])} correct" if "requests" in result else "correct" if correct else "wrong"))
    return "\n".join(lines)


def main(argv=None):
    args = parse_args(argv)
    diffusion = args.method in methods.DIFFUSION
    if args.method not in methods.METHODS and not diffusion:
        raise ValueError(f"unknown method '{args.method}'; choose from {', '.join([*methods.METHODS, *methods.DIFFUSION])}")
    for name, value in (("batch", args.batch), ("max-new-tokens", args.max_new_tokens), ("cache-tokens", args.cache_tokens), ("warm-context", args.warm_context or None)):
        if value is not None and value < 1:
            raise ValueError(f"{name} {value} is out of range; allowed is 1 or more")
    args.stop = [s.encode("utf-8", "replace").decode() for s in args.stop]
    if args.stop and (diffusion or "" in args.stop):
        raise ValueError("--stop is a text of one character or more, and not for --method cdlm or dlm")
    if args.watch and (not diffusion or args.batch > 1):
        raise ValueError("--watch is for --method cdlm or dlm and --batch 1")
    if diffusion and args.max_new_tokens is None:
        args.max_new_tokens = cdlm.GEN_LENGTH
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    if args.json:
        check_writable(args.json)
    problems = problems_of(args)
    check_device(args.device)
    dtype = getattr(torch, args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32"))
    model, tokenizer = checkpoints.load(args.model, args.device, dtype), Tokenizer.load(args.model)
    if args.no_thinking:
        if "</think>" not in tokenizer.special:
            raise ValueError(f"--no-thinking is for models of the Qwen3 family; {args.model} is none")
        tokenizer.template += NO_THINKING
    engine = methods.make_engine(args.method, model, args, args.batch)
    make_requests = lambda some: requests_of(some, tokenizer, model, args.max_new_tokens, sampling, args.warm_context)
    make_requests(problems)                                          # what does not fit fails before anything is shown

    def answer(some):
        if not args.quiet and len(some) == 1:
            print(some[0].prompt.encode("utf-8", "replace").decode())        # bytes that are no text stay unprintable
        return run(engine, make_requests(some), tokenizer, args.quiet or args.watch, args.method, args.stop)

    if not args.quiet and sys.stdout.isatty() and args.method != "ar" and not diffusion and args.batch == 1:
        print("legend: " + "  ".join(f"{c}{name}{RESET}" for name, c in COLOURS.items() if c) + "  plain\n")
    if args.watch and not args.quiet:
        engine.on_step = cdlm.Watch(tokenizer, sys.stdout)
    rows = converse(problems, answer)

    generations = [g for _, g, _ in rows]
    each = [describe(p, g, turn, tokenizer, args.stop) for p, g, turn in rows]
    result = {"method": args.method, "device": args.device, "dtype": str(dtype).removeprefix("torch."), **summary(generations, engine)}
    if args.method == "specgen":
        result["schedule"] = schedule_view(engine)
        result["regime"] = regime(engine, args, result["accepted_per_round"], int(statistics.mean(len(g.prompt_ids) + len(g.token_ids) for g in generations)))
    if diffusion:
        result["counts"] = engine.counts
    if args.compare:
        baseline = methods.make_engine("ar", model, args, args.batch)
        ar = [g for _, g, _ in converse(problems, lambda some: run(baseline, make_requests(some), tokenizer, True, stops=args.stop))]
        reference = summary(ar, baseline)
        for one, a, g in zip(each, ar, generations):
            same = a.prompt_ids == g.prompt_ids                  # a later turn is asked about the answers before it
            one["identical"] = same and a.token_ids == g.token_ids
            one["tie_gap"] = tie_gap(model, g.prompt_ids, a.token_ids, g.token_ids) if same and args.temperature == 0 else 0.0
        result |= {"ar_tokens_per_second": reference["tokens_per_second"],
                   "speedup": result["tokens_per_second"] / reference["tokens_per_second"],
                   "identical": all(one["identical"] for one in each), "tie_gap": max(one["tie_gap"] for one in each)}
    if len(each) == 1:
        result |= each[0]
    else:
        known = [one["correct"] for one in each if one["correct"] is not None]
        result |= {"correct": sum(known) if known else None, "requests": each}
    print(table(result))
    if args.json:
        checkpoints.write_json(args.json, result)


if __name__ == "__main__":
    run_main(main)
