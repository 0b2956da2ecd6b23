"""SmolLM2 in our loop next to the programs that know it: the same ids, the same tokens, how many a second?

    pip install xllamacpp transformers tokenizers
    python tests/compare_llamacpp.py                 # or some of: speed steps rows ids greedy load

speed     tokens/s of our plain loop, llama.cpp and transformers in turn, one request at a time, the prompt not counted. All
          decode the same weights, written as fp32 and as bf16; llama.cpp also reads the 4-bit file as it is.
steps     what each step of the optimisation of a forward gained
rows      seconds of a forward by its rows, and of its products alone
ids       ids of 10,000 texts are those of `tokenizers` (prompts of --data, and random strings)
greedy    fp32: after every token of our greedy answers to Spec-Bench prompts, transformers' most likely token is our next one
load      seconds and peak memory of loading, in a fresh process

Writes results/llamacpp.json, and keeps there what other parts found.
"""
import argparse
import atexit
import contextlib
import functools
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from unittest import mock

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, f"{ROOT}/tests"]

import minispec  # noqa: E402, F401  before torch: it tunes the allocator

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from tqdm import tqdm  # noqa: E402

import compare_checkpoints  # noqa: E402
import shown  # noqa: E402
from gguf_writer import write_gguf  # noqa: E402
from minispec.core import cpu, gpt  # noqa: E402
from minispec.core.attention import FullKeys, packed_attend  # noqa: E402
from minispec.core.gpt import dense_attend  # noqa: E402
from minispec.core.engine import Engine, SyncScheduler  # noqa: E402
from minispec.core.kv_cache import KVCache  # noqa: E402
from minispec.core.requests import Request  # noqa: E402
from minispec.data import prompts  # noqa: E402
from minispec.data.tokenizer import Tokenizer  # noqa: E402
from minispec.studies import results  # noqa: E402
from minispec.tools.files import read_json  # noqa: E402
from minispec.tools import checkpoints, gguf_file, methods  # noqa: E402

QUESTIONS = ("Why is the sky blue?", "Tell me a story about a fox and a mill.", "What is photosynthesis?", "Write a poem about rain.",
             "How do I bake bread?", "Explain what a computer does.", "Who was Isaac Newton?", "Describe a day at the sea.")
DTYPES = {"float32": "F32", "bfloat16": "BF16"}


# -- speed -------------------------------------------------------------------------------------------------------------------

def ours(model):
    return lambda ids, n: Engine(model, SyncScheduler, 1).generate([Request(ids, n)])[0].token_ids


def llama_cpp(path, threads):
    """In a process of its own: OpenMP counts its threads with torch's, and more threads than cores wait for each other asleep."""
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, path, threads), daemon=True).start()

    def run(ids, n):
        ours.send((ids, n))
        return ours.recv()
    atexit.register(ours.send, None)
    return run


def serve(pipe, path, threads):
    import xllamacpp
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.warmup = 1024, 1, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    while asked := pipe.recv():
        ids, n = asked
        pipe.send(server.handle_completions({"prompt": ids, "n_predict": n, "temperature": 0, "ignore_eos": True,
                                             "cache_prompt": False})["choices"][0]["text"])


def transformers_generate(folder, dtype):
    import transformers
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    @torch.inference_mode()
    def run(ids, n):
        return model.generate(torch.tensor([ids]), max_new_tokens=n, min_new_tokens=n, do_sample=False, eos_token_id=None)[0, len(ids):].tolist()
    return run


def in_turn(loops, prompts, args):
    """{loop: ([tokens/s], [output])} of one prompt after the other, all loops in turn, so that a slow minute falls on all."""
    clock = time.process_time if args.cpu_time else time.perf_counter
    found = {name: ([], []) for name in loops}
    for i in tqdm(range(-1, args.repeats)):              # the first one warms up
        for name, run in loops.items():
            moments = [clock()]
            for n in (1, args.new):                      # the prompt alone, then all
                out = run(prompts[i % len(prompts)], n)
                moments.append(clock())
            start, between, end = moments
            if i >= 0:
                found[name][0].append((args.new - 1) / (end - between - (between - start)))
                found[name][1].append(out)
    return found


def speed(args):
    source = gguf_file.open_gguf("smollm2")
    tokenizer = Tokenizer.load("smollm2")
    asked = [tokenizer.prompt_ids(q) for q in QUESTIONS]
    vocabulary = source.field("tokenizer.ggml.tokens"), set(tokenizer.special.values()), source.field("tokenizer.ggml.merges")
    threads = torch.get_num_threads()
    rows = []
    for dtype, kind in DTYPES.items():
        with tempfile.TemporaryDirectory() as folder:
            model = checkpoints.load("smollm2", dtype=getattr(torch, dtype))
            checkpoints.save(model, folder)
            path = write_gguf(f"{folder}/x.gguf", model, *vocabulary, kind=kind)
            loops = {"minispec ar": ours(model), "llama.cpp": llama_cpp(path, threads),
                     "transformers generate": transformers_generate(folder, model.dtype)}
            if kind == "BF16":
                loops["llama.cpp, 4 bits"] = llama_cpp(source.file, threads)
            found = in_turn(loops, asked, args)
        texts = {}
        special = set(tokenizer.special.values())
        for name, (_, outputs) in found.items():         # llama.cpp gives text, without special tokens
            texts[name] = [out if isinstance(out, str) else tokenizer.decode([t for t in out if t not in special]) for out in outputs]
        for name, (rates, _) in found.items():
            rows.append({"loop": name, "dtype": dtype, "tokens_per_second": rates,
                         "ratio": statistics.median(a / b for a, b in zip(found["minispec ar"][0], rates)),
                         "identical": sum(a == b for a, b in zip(texts[name], texts["minispec ar"])), "prompts": args.repeats})
    return {"new_tokens": args.new, "threads": threads, "cpu_time": args.cpu_time, "rows": rows}


@functools.cache
def packed(w):
    return torch.ops.mkldnn._reorder_linear_weight(w.detach())


def packed_product(x, w, bias):
    """A lone row, multiplied as several rows are."""
    return torch.ops.mkldnn._linear_pointwise.default(x, packed(w), bias, "none", [], "")


def plain_norm(self, x):
    return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def steps(args):
    """The loop without any of the steps, and with one after the other; the last row has them all."""
    tokenizer = Tokenizer.load("smollm2")
    rows = []
    asked = [tokenizer.prompt_ids(q) for q in QUESTIONS]
    without = {                                          # a step: what undoes it
        "weights are packed": lambda: mock.patch.object(cpu, "PACKED_TYPES", set()),
        "a lone row is multiplied as it is": lambda: mock.patch.object(cpu, "row_product", packed_product),
        "a norm takes five operators": lambda: mock.patch.object(gpt.RMSNorm, "forward", plain_norm),
    }
    for dtype in DTYPES:
        model = checkpoints.load("smollm2", dtype=getattr(torch, dtype))
        names = list(without)
        loops = {}
        for done in range(len(names) + 1):
            loops["with: " + names[done - 1] if done else "before"] = undone([without[n] for n in names[done:]], ours(model))
        found = in_turn(loops, asked, args)
        rows += [{"step": name, "dtype": dtype, "tokens_per_second": rates} for name, (rates, _) in found.items()]
    return {"new_tokens": args.new, "threads": torch.get_num_threads(), "cpu_time": args.cpu_time, "rows": rows}


@torch.no_grad()
def rows(args, cached=200, repeats=25):
    """Median seconds of a forward of n rows behind `cached` tokens, and of its products one after the other, all ways in turn."""
    counts = (1, 2, 4, 9)
    found = []
    ways = [("packed", 1, packed_product), *(("", n, cpu.row_product) for n in counts)]
    for dtype in DTYPES:
        model = checkpoints.load("smollm2", dtype=getattr(torch, dtype))
        linears = [m for m in model.modules() if isinstance(m, cpu.Linear)]
        inputs = {n: [torch.randn(n, m.in_features).to(model.dtype) for m in linears] for n in counts}
        cache = KVCache(model.config, 2 * cached, model.dtype)
        blocks = cache.open(2 * cached)

        def forward(n):
            attend = packed_attend([(0, n, FullKeys(cache, blocks, cached, n))])
            model.logits(model(torch.arange(n), torch.arange(cached, cached + n), attend))

        def products(n):
            for linear, x in zip(linears, inputs[n]):
                linear(x)

        seconds = {(how, n, run): [] for how, n, _ in ways for run in (forward, products)}
        for i in range(-3, repeats):                     # the first ones warm up
            for how, n, product in ways:
                with mock.patch.object(cpu, "row_product", product):
                    for run in (forward, products):
                        start = time.perf_counter()
                        run(n)
                        if i >= 0:
                            seconds[how, n, run].append(time.perf_counter() - start)
        size = sum(m.weight.numel() * m.weight.element_size() for m in linears)
        found += [{"dtype": dtype, "rows": n, "how": how, "bytes": size, "forward": statistics.median(seconds[how, n, forward]),
                   "products": statistics.median(seconds[how, n, products])} for how, n, _ in ways]
        packed.cache_clear()
    return {"threads": torch.get_num_threads(), "cached": cached, "rows": found}


def undone(patches, run):
    """run while these patches are in force."""
    def patched(ids, n):
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch())
            return run(ids, n)
    return patched


# -- the same ids and tokens -------------------------------------------------------------------------------------------------

def ids(args):
    """How many of 10,000 texts get the ids that `tokenizers` gives them."""
    from tokenizers import Tokenizer as Theirs
    from tokenizers import models, pre_tokenizers
    source = gguf_file.open_gguf("smollm2")
    tokenizer = Tokenizer.load("smollm2")
    vocab = {t: i for i, t in enumerate(source.field("tokenizer.ggml.tokens"))}
    theirs = Theirs(models.BPE(vocab, [tuple(m.split(" ")) for m in source.field("tokenizer.ggml.merges")]))
    theirs.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    texts = [p.prompt for name in ("spec_bench", "gsm8k", "humaneval", "aime") for p in prompts.load_named(name, args.data)]
    real = len(texts)
    texts += compare_checkpoints.strings(10_000 - real, list(tokenizer.special))
    lacking = [bytes([b]) for b in range(256) if not tokenizer.encode(bytes([b]).decode("latin-1")) and b < 128]
    same = tokens = explained = 0
    for text in tqdm(texts):
        want = theirs.encode(text, add_special_tokens=False).ids
        got = tokenizer.encode(text)
        same += got == want
        tokens += len(want)
        explained += got != want and any(b in text.encode() for b in lacking)
    return {"texts": len(texts), "real": real, "same": same, "tokens": tokens, "differ_with_bytes_without_a_token": explained}


def spec_bench(args, n, longest=400):
    """The ids of n Spec-Bench prompts of at most `longest` tokens, evenly over its categories."""
    tokenizer = Tokenizer.load("smollm2")
    asked = [tokenizer.prompt_ids(p.prompt) for p in prompts.load_named("spec_bench", args.data)]
    asked = [ids for ids in asked if len(ids) <= longest]
    return [asked[i * len(asked) // n] for i in range(n)]


def greedy(args, n=50, n_new=100):
    import transformers
    model = checkpoints.load("smollm2")
    asked = spec_bench(args, 50)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints.save(model, folder)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    same = 0
    gaps = []
    difference = 0.0
    answers = methods.make_engine("ar", model, methods.settings(), 10).generate([Request(ids, n_new) for ids in asked])
    for prompt, answer in zip(tqdm(asked), [g.token_ids for g in answers]):
        x = torch.tensor([prompt + answer[:-1]])
        with torch.inference_mode():
            logits = theirs(x).logits[0]
            mine = model.logits(model(x, torch.arange(x.shape[1])[None], dense_attend()))[0]
        difference = max(difference, (logits - mine).abs().max().item())
        best, second = logits[len(prompt) - 1:].topk(2).values.T
        differs = logits[len(prompt) - 1:].argmax(-1) != torch.tensor(answer)
        same += not differs.any()
        gaps += (best - second)[differs].tolist()
    return {"prompts": n, "new_tokens": n_new, "same": same, "gaps": gaps, "logit_difference": difference,
            "transformers": transformers.__version__}


def load(args):
    sizes = {"bfloat16": 2, "float32": 4}
    n = checkpoints.load("smollm2").n_params()
    return {dtype: {"bytes": n * size, **compare_checkpoints.peak_memory("smollm2", dtype)} for dtype, size in sizes.items()}


PARTS = {f.__name__: f for f in (speed, steps, rows, ids, greedy, load)}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[], help="default: all of them")
    p.add_argument("--data", default=os.environ.get("MINISPEC_DATA"), help="folder of public prompts (docs/prompts.md)")
    p.add_argument("--new", type=int, default=48, help="tokens of a timed answer (default %(default)s)")
    p.add_argument("--cpu-time", action="store_true", help="count the process's own seconds, for a busy machine and one thread")
    p.add_argument("--repeats", type=int, default=5, help="timed rounds (default %(default)s)")
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
