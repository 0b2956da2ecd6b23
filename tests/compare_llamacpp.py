"""SmolLM2 in our loop next to the programs that know it: the same ids, the same tokens, how many a second?

    pip install xllamacpp transformers tokenizers
    python tests/compare_llamacpp.py                 # or some of: speed ids greedy load

speed     tokens/s of our plain loop, llama.cpp and transformers in turn, one request at a time, the prompt
          not counted. All decode the same weights, written as fp32 and as bf16; llama.cpp also reads the
          4-bit file as it is.
ids       ids of 10,000 texts are those of `tokenizers` (prompts of --data, and random strings)
greedy    fp32: after every token of our greedy answers to Spec-Bench prompts, transformers' most likely token
          is our next one
load      seconds and peak memory of loading, in a fresh process

Writes results/llamacpp.json, and keeps there what other parts found.
"""
import atexit
import multiprocessing
import os
import statistics
import tempfile
import time

import root  # noqa: F401  before torch
import torch
from tqdm import tqdm

import compare_checkpoints
import shown
from gguf_writer import write_gguf
from minispec.core.engine import Engine
from minispec.core.requests import Request
from minispec.core.scheduler import SyncScheduler
from minispec.data import prompts
from minispec.data.tokenizer import Tokenizer
from minispec.studies import results
from minispec.tools import checkpoints, gguf_file, methods
from minispec.tools.files import read_json
from minispec.tools.script import Parser

QUESTIONS = """\
Why is the sky blue?
Tell me a story about a fox and a mill.
What is photosynthesis?
Write a poem about rain.
How do I bake bread?
Explain what a computer does.
Who was Isaac Newton?
Describe a day at the sea.""".split("\n")
DTYPES = {"float32": "F32", "bfloat16": "BF16"}
NEW, REPEATS = 48, 5            # tokens of a timed answer, timed rounds


# -- speed ---------------------------------------------------------------------------------------------------

def ours(model):
    return lambda ids, n: Engine(model, SyncScheduler, 1).generate([Request(ids, n)])[0].token_ids


def llama_cpp(path, threads):
    """In a process of its own: OpenMP counts its threads with torch's, and more threads than cores wait for
    each other asleep."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    context.Process(target=serve, args=(theirs, path, threads), daemon=True).start()
    atexit.register(ours.send, None)
    return lambda ids, n: (ours.send((ids, n)), ours.recv())[1]


def serve(pipe, path, threads):
    import xllamacpp
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.warmup = 1024, 1, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    settings = {"temperature": 0, "ignore_eos": True, "cache_prompt": False}
    while asked := pipe.recv():
        ids, n = asked
        answer = server.handle_completions({"prompt": ids, "n_predict": n, **settings})
        pipe.send(answer["choices"][0]["text"])


def transformers_generate(folder, dtype):
    import transformers
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    @torch.inference_mode()
    def run(ids, n):
        new = dict(max_new_tokens=n, min_new_tokens=n, do_sample=False, eos_token_id=None)
        return model.generate(torch.tensor([ids]), **new)[0, len(ids):].tolist()
    return run


def in_turn(loops):
    """{loop: ([tokens/s], [output])} of one question after the other, all loops in turn, so that a slow
    minute falls on all."""
    tokenizer = Tokenizer.load("smollm2")
    found = {name: ([], []) for name in loops}
    for i in tqdm(range(-1, REPEATS)):                   # the first one warms up
        ids = tokenizer.prompt_ids(QUESTIONS[i % len(QUESTIONS)])
        for name, run in loops.items():
            moments = [time.perf_counter()]
            for n in (1, NEW):                           # the prompt alone, then all
                out = run(ids, n)
                moments.append(time.perf_counter())
            start, between, end = moments
            if i >= 0:
                found[name][0].append((NEW - 1) / (end - between - (between - start)))
                found[name][1].append(out)
    return found


def about(rows):
    return {"new_tokens": NEW, "threads": torch.get_num_threads(), "rows": rows}


def speed(args):
    source, tokenizer = gguf_file.open_gguf("smollm2"), Tokenizer.load("smollm2")
    special = set(tokenizer.special.values())
    tokens, merges = (source.field(f"tokenizer.ggml.{name}") for name in ("tokens", "merges"))
    threads = torch.get_num_threads()
    rows = []
    for dtype, kind in DTYPES.items():
        with tempfile.TemporaryDirectory() as folder:
            model = checkpoints.load("smollm2", dtype=getattr(torch, dtype))
            checkpoints.save(model, folder)
            path = write_gguf(f"{folder}/x.gguf", model, tokens, special, merges, kind=kind)
            loops = {"minispec ar": ours(model), "llama.cpp": llama_cpp(path, threads),
                     "transformers generate": transformers_generate(folder, model.dtype)}
            if kind == "BF16":
                loops["llama.cpp, 4 bits"] = llama_cpp(source.file, threads)
            found = in_turn(loops)
        plain, want = found["minispec ar"]
        for name, (rates, outputs) in found.items():
            rows.append({"loop": name, "dtype": dtype, "tokens_per_second": rates,
                         "ratio": statistics.median(a / b for a, b in zip(plain, rates)),
                         "identical": sum(text_of(a, tokenizer) == text_of(b, tokenizer)
                                          for a, b in zip(outputs, want)), "prompts": REPEATS})
    return about(rows)


def text_of(out, tokenizer):
    """As llama.cpp gives it, without special tokens."""
    special = tokenizer.special.values()
    return out if isinstance(out, str) else tokenizer.decode([t for t in out if t not in special])


# -- the same ids and tokens ---------------------------------------------------------------------------------

def their_tokenizer():
    """SmolLM2's in the library that made the format."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    source = gguf_file.open_gguf("smollm2")
    vocab = {t: i for i, t in enumerate(source.field("tokenizer.ggml.tokens"))}
    merges = [tuple(m.split(" ")) for m in source.field("tokenizer.ggml.merges")]
    theirs = Tokenizer(models.BPE(vocab, merges))
    parts = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.pre_tokenizer = pre_tokenizers.Sequence([*parts])
    return theirs


def ids(args):
    """How many of 10,000 texts get the ids that `tokenizers` gives them."""
    tokenizer, theirs = Tokenizer.load("smollm2"), their_tokenizer()
    names = "spec_bench", "gsm8k", "humaneval", "aime"
    texts = [p.prompt for name in names for p in prompts.load_named(name, args.data)]
    real = len(texts)
    texts += compare_checkpoints.strings(10_000 - real, list(tokenizer.special))
    wanted = [theirs.encode(text, add_special_tokens=False).ids for text in texts]
    same = sum(tokenizer.encode(text) == want for text, want in zip(tqdm(texts), wanted))
    return {"texts": len(texts), "real": real, "same": same, "tokens": sum(map(len, wanted))}


def greedy(args, n=50, n_new=100, longest=400):
    """On Spec-Bench prompts of at most `longest` tokens, evenly over its categories."""
    import transformers
    model, tokenizer = checkpoints.load("smollm2"), Tokenizer.load("smollm2")
    asked = [tokenizer.prompt_ids(p.prompt) for p in prompts.load_named("spec_bench", args.data)]
    asked = [ids for ids in asked if len(ids) <= longest]
    asked = [asked[i * len(asked) // n] for i in range(n)]
    with tempfile.TemporaryDirectory() as folder:
        checkpoints.save(model, folder)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    same, gaps, difference = 0, [], 0.0
    engine = methods.make_engine("ar", model, methods.settings(), 10)
    for g in tqdm(engine.generate([Request(x, n_new) for x in asked])):
        x = torch.tensor([g.prompt_ids + g.token_ids[:-1]])
        with torch.inference_mode():
            logits = theirs(x).logits[0]
            mine = model.logits(model(x))[0]
        difference = max(difference, (logits - mine).abs().max().item())
        best, second = logits[-n_new:].topk(2).values.T
        differs = logits[-n_new:].argmax(-1) != torch.tensor(g.token_ids)
        same += not differs.any()
        gaps += (best - second)[differs].tolist()
    return {"prompts": n, "new_tokens": n_new, "same": same, "gaps": gaps, "logit_difference": difference,
            "transformers": transformers.__version__}


def load(args):
    n = checkpoints.load("smollm2").n_params()
    return {dtype: {"bytes": n * size, **compare_checkpoints.peak_memory("smollm2", dtype)}
            for dtype, size in (("bfloat16", 2), ("float32", 4))}


PARTS = {f.__name__: f for f in (speed, ids, greedy, load)}


def main():
    p = Parser(__doc__)
    add = p.add_argument
    add("parts", nargs="*", choices=[*PARTS, []], default=[], help="default: all of them")
    add("--data", default=os.environ.get("MINISPEC_DATA"), help="folder of public prompts (docs/prompts.md)")
    args = p.parse_args()
    file = results.path("llamacpp.json")
    result = read_json(file)["result"] if os.path.exists(file) else {}
    for part in args.parts or PARTS:
        started = time.perf_counter()
        result[part] = PARTS[part](args)
        print(part, result[part])
        result["table"] = shown.llamacpp(result)
        results.write("llamacpp", result, time.perf_counter() - started)


if __name__ == "__main__":
    main()
