"""How fast is our autoregressive loop beside the transformers `generate` loop, and are the logits the same?

    python tests/compare_transformers.py             # needs transformers; writes results/transformers.json

Same folder, same prompts, same process and allocator settings, batch 1, fp32, greedy, no stop token, so both
produce the same number of tokens; repeats alternate, the ratio is the median of the pairwise ratios.
"""
import statistics
import time

from root import ROOT  # before torch
import torch

import bench
import shown
from minispec.studies import results
from minispec.tools import checkpoints
from minispec.data import tasks
from minispec.core.gpt import dense_attend
from minispec.core.engine import Engine
from minispec.core.requests import Request
from minispec.core.scheduler import SyncScheduler
from minispec.data.tokenizer import Tokenizer
from minispec.tools.script import Parser


def compare(folder, new_tokens=128, repeats=5, n=5):
    """Returns {"minispec": [tokens/s], "transformers": [tokens/s], "ratio", "logit_difference",
    "same_tokens"}."""
    import transformers
    ours, tokenizer = checkpoints.load(folder, dtype=torch.float32), Tokenizer.load(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    problems = [tasks.make(f, 900 + i, "heldout") for i, f in enumerate(tasks.FAMILIES[:n])]
    prompts = [tokenizer.prompt_ids(p.prompt) for p in problems]
    new = dict(max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, eos_token_id=None,
               pad_token_id=0)

    def difference(x):
        mine = ours.logits(ours(x, torch.arange(x.shape[1])[None], dense_attend()))
        return (theirs(x).logits - mine).abs().max().item()

    def run_ours(x):
        request = Request(x[0].tolist(), new_tokens)
        return Engine(ours, SyncScheduler, 1).generate([request])[0].token_ids

    def run_theirs(x):
        return theirs.generate(x, attention_mask=torch.ones_like(x), **new)[0, x.shape[1]:].tolist()

    rates, outputs = {"minispec": [], "transformers": []}, {}
    with torch.inference_mode():
        asked = [torch.tensor([ids]) for ids in prompts]
        worst = max(map(difference, asked))
        for repeat in range(repeats + 1):
            for name, run in (("minispec", run_ours), ("transformers", run_theirs)):
                started = time.perf_counter()
                outputs[name] = list(map(run, asked))
                if repeat:                               # the first one warms up
                    rates[name].append(n * new_tokens / (time.perf_counter() - started))
    ratio = statistics.median(a / b for a, b in zip(*rates.values()))
    return {**rates, "ratio": ratio, "logit_difference": worst,
            "transformers_version": transformers.__version__,
            "same_tokens": outputs["minispec"] == outputs["transformers"]}


if __name__ == "__main__":
    p = Parser(__doc__)
    p.add_argument("--model", default=f"{ROOT}/checkpoints/target")
    p.add_argument("--repeats", type=int, default=5)
    args = p.parse_args()
    begun = time.perf_counter()
    result = compare(args.model, repeats=args.repeats)
    result["table"] = shown.transformers(result)
    print(result["table"])
    print(f"largest logit difference {result['logit_difference']:.2g}, same tokens: {result['same_tokens']}")
    results.write("transformers", result, time.perf_counter() - begun)
    bench.report(f"{ROOT}/docs/appendix/speed.md")
