"""The plain loop on SmolLM2, next to llama.cpp and transformers: the same greedy tokens? how many a second?

    pip install xllamacpp transformers && python tests/compare_llamacpp.py

All of them decode the same weights, dequantised once and written as bf16 and as fp32; llama.cpp also reads the 4-bit file as it
is. One request at a time, the loops in turn, decoding alone (no prompt) is timed. Writes results/llamacpp.json.
"""
import argparse
import os
import statistics
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "tests")]

import minispec  # noqa: E402, F401  before torch: it tunes the allocator

import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

from gguf_writer import write_gguf  # noqa: E402
from minispec.core.engine import Engine, Lockstep  # noqa: E402
from minispec.core.requests import Request  # noqa: E402
from minispec.data.tokenizer import Tokenizer  # noqa: E402
from minispec.studies import results  # noqa: E402
from minispec.tools import checkpoints, gguf_file  # noqa: E402

QUESTIONS = ("Why is the sky blue?", "Tell me a story about a fox and a mill.", "What is photosynthesis?", "Write a poem about rain.",
             "How do I bake bread?", "Explain what a computer does.", "Who was Isaac Newton?", "Describe a day at the sea.")
DTYPES = {"float32": "F32", "bfloat16": "BF16"}


def ours(model):
    def run(ids, n):
        engine = Engine(model, Lockstep, 1)
        generation = engine.generate([Request(ids, n)])[0]
        return generation.token_ids, (n - 1) / (engine.seconds["verify"] + engine.seconds["other"])
    return run


def llama_cpp(path, threads):
    import xllamacpp
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.warmup = 1024, 1, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def run(ids, n):
        out = server.handle_completions({"prompt": ids, "n_predict": n, "temperature": 0, "ignore_eos": True,
                                         "cache_prompt": False})
        return out["choices"][0]["text"], out["timings"]["predicted_per_second"]
    return run


def transformers_generate(folder, dtype):
    import transformers
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    @torch.inference_mode()
    def run(ids, n):
        seconds = []
        for tokens in (1, n):                            # the prompt alone, then all
            started = time.perf_counter()
            out = model.generate(torch.tensor([ids]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, eos_token_id=None)
            seconds.append(time.perf_counter() - started)
        return out[0, len(ids):].tolist(), (n - 1) / (seconds[1] - seconds[0])
    return run


def compare(n_new, repeats):
    """Rows of the table, one for each loop and precision."""
    source, tokenizer = gguf_file.open_gguf("smollm2"), Tokenizer.load("smollm2")
    prompts = [tokenizer.prompt_ids(q) for q in QUESTIONS]
    vocabulary = source.field("tokenizer.ggml.tokens"), set(tokenizer.special.values()), source.field("tokenizer.ggml.merges")
    threads, rows = torch.get_num_threads(), []
    with tempfile.TemporaryDirectory() as folder:
        for dtype, kind in DTYPES.items():
            model = checkpoints.load("smollm2", dtype=getattr(torch, dtype))
            checkpoints.save(model, os.path.join(folder, dtype))
            path = write_gguf(os.path.join(folder, dtype + ".gguf"), model, *vocabulary, kind=kind)
            loops = {"minispec ar": ours(model), "llama.cpp": llama_cpp(path, threads),
                     "transformers generate": transformers_generate(os.path.join(folder, dtype), getattr(torch, dtype))}
            if kind == "BF16":
                loops["llama.cpp, Q4_1"] = llama_cpp(source.file, threads)
            rates, texts = {name: [] for name in loops}, {name: [] for name in loops}
            for i in tqdm(range(repeats), desc=dtype):
                for name, run in loops.items():          # in turn, so that a slow minute falls on all of them
                    out, rate = run(prompts[i % len(prompts)], n_new)
                    if not isinstance(out, str):         # llama.cpp gives text, without special tokens
                        out = tokenizer.decode([token for token in out if token not in tokenizer.name_of])
                    rates[name].append(rate)
                    texts[name].append(out)
            for name in loops:
                same = sum(a == b for a, b in zip(texts[name], texts["minispec ar"]))
                rows.append({"loop": name, "dtype": dtype if "Q4" not in name else "4 bits", "tokens_per_second": rates[name],
                             "ratio": statistics.median(a / b for a, b in zip(rates["minispec ar"], rates[name])),
                             "identical": same, "prompts": repeats})
    return {"new_tokens": n_new, "rows": rows}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--new", type=int, default=128, help="tokens of an answer (default %(default)s)")
    p.add_argument("--repeats", type=int, default=8, help="prompts (default %(default)s)")
    args = p.parse_args()
    started = time.perf_counter()
    result = compare(args.new, args.repeats)
    for r in result["rows"]:
        print(f"{r['loop']:24} {r['dtype']:9} {statistics.median(r['tokens_per_second']):7.1f} tokens/s, "
              f"ours is {r['ratio']:.2f} of it, {r['identical']} of {r['prompts']} with our text")
    results.write("llamacpp", result, time.perf_counter() - started)


if __name__ == "__main__":
    main()
