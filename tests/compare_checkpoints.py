"""Do we read folders and texts as transformers and tokenizers do? Random folders of every family, judged by
their code.

    python tests/compare_checkpoints.py     # 3 GB of disk; writes results/checkpoints.json

Of each family: folders in three dtypes, as one file and in shards, tied and not, compared by logits in fp32;
a byte-level BPE with the family's own pre-tokenizer and special tokens, trained here, compared by ids; 200
greedy tokens. And the peak memory of a process that loads 1.2 billion parameters, stored as bf16.
"""
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import textwrap
import time
import unicodedata

from root import ROOT  # before torch
import torch

import bench
import shown
from minispec.core import gpt
from minispec.core.requests import Request
from minispec.data import tasks
from minispec.data.tokenizer import Tokenizer
from minispec.studies import results
from minispec.tools import checkpoints, methods
from minispec.tools.script import Parser

SHAPE = json.loads("""
{"vocab_size": 720, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
 "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6,
 "bos_token_id": null, "eos_token_id": null}""")
LLAMA3_ROPE = json.loads("""
{"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                     "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}""")
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
         r"\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN = "<|endoftext|> <|im_start|> <|im_end|>"
LLAMA3 = ("<|begin_of_text|> <|end_of_text|> <|reserved_special_token_0|> <|start_header_id|> "
          "<|end_header_id|> <|eot_id|>")
# Classes of transformers, what else its shape has, pre-tokenizer, special tokens, further added tokens.
FAMILIES = {
    "Qwen2.5": ("Qwen2", {}, SPLIT % "", QWEN, "<tool_call> </tool_call>"),
    "Qwen3": ("Qwen3", {"head_dim": 16}, SPLIT % "", QWEN, "<tool_call> </tool_call> <think> </think>"),
    "Llama-3": ("Llama", LLAMA3_ROPE, SPLIT % "{1,3}", LLAMA3, ""),
}
# dtype, tied, size of a shard
STORED = list(itertools.product(("float32", "bfloat16", "float16"), (False, True), ("1GB", "20KB")))
LOSSLESS = ("ngram", "draft", "specgen")


# -- random folders ------------------------------------------------------------------------------------------

def write_model(folder, family, dtype="float32", tied=False, shard="1GB", **changes):
    """A random model of a family, as transformers writes it, with biases and norms that do something."""
    import transformers
    torch.manual_seed(0)
    kind, more, *_ = FAMILIES[family]
    shape = {**SHAPE, **more, "tie_word_embeddings": tied, **changes}
    model = getattr(transformers, kind + "ForCausalLM")(getattr(transformers, kind + "Config")(**shape))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(1.0 if "norm" in name else 0.0, 0.8 if "embed" in name else 0.2)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard)
    return folder


def write_tokenizer(folder, family, size=700):
    """A byte-level BPE that splits text as the family's does, with its special tokens behind; a few hundred
    merges."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
    _, _, split, special, added = FAMILIES[family]
    t = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), byte_level])
    if "Qwen" in family:
        t.normalizer = normalizers.NFC()
    with open(textwrap.__file__, encoding="utf-8") as f:
        texts = [f.read(), *(tasks.make(f, i).think for f in tasks.FAMILIES for i in range(6)), *ATOMS * 4]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    t.train_from_iterator(texts, trainer)
    data = json.loads(t.to_str())
    if family == "Llama-3":              # its file lists every way to make a token, and looks whole words up
        vocab = data["model"]["vocab"]
        merges = [[w[:i], w[i:]] for w in sorted(vocab, key=vocab.get) for i in range(1, len(w))
                  if w[:i] in vocab and w[i:] in vocab]
        data["model"] |= {"ignore_merges": True, "merges": merges}
    t = Tokenizer.from_str(json.dumps(data))
    t.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in special.split()])
    t.add_tokens([AddedToken(s, normalized=False, special=False) for s in added.split()])
    t.save(f"{folder}/tokenizer.json")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": special.split()[0],
              "chat_template": CHATS[family]}
    checkpoints.write_json(f"{folder}/tokenizer_config.json", config)
    return t


# What the families' own templates make of a conversation without tools.
CHATS = {
    "Qwen2.5": "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are Qwen, created by Alibaba "
               "Cloud. You are a helpful assistant.<|im_end|>\n{% endif %}{% for m in messages %}"
               "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
               "{{ '<|im_start|>assistant\n' }}",
    "Qwen3": "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
             "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}"
             "<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' }}",
    "Llama-3": "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
               "{{ m.content | trim }}<|eot_id|>{% endfor %}"
               "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}",
}
ATOMS = json.loads(r"""["the ", "and", " don't", "DON'T", "I'VE ", "we'LL", "'S", "'ſ", "’s", "x'", "0", "7",
 "1234567890", " 42", "3.14", "٣٤٥", "²", "Ⅷ", " ", "  ", "     ", "\t", "\n", "\r\n", "\r", "\n\n", " \n ",
 "\u00a0", "\u3000", "\u0085", "\u2028", "\u200b", "\ufeff", "\u0000", "\u001c", "\ufffd", "e\u0301", "é",
 "a\u0301\u0327", "\u212b", "\u1112\u1161\u11ab", "한", "ﬁ", "क्षि", "ไทย", "東京", "ß", "İ", "Straße", "🙂",
 "👍🏽", "🏳️‍🌈", "\u0301", "_", "__init__", "==", "!?…", "<|", "|>", "{", "def f(x):\n\treturn x",
 "https://a.b/c?d=1", "aaaaaaaaaaaaaaaa", "!!!!!!!!", "ＡＢＣ１２３", "𝔘𝔫𝔦", "\udb40\udc41", "…"]""")


def strings(n, special, seed=0):
    """n texts: joined atoms, special tokens' text among them, and random characters of all of Unicode."""
    rng = random.Random(seed)
    known = [chr(c) for c in range(1, 0x2FFFF) if unicodedata.category(chr(c)) not in ("Cn", "Cs", "Co")]
    draw = lambda i: rng.choices(known if i % 4 == 3 else ATOMS + special, k=rng.randint(1, 40))
    return ["".join(draw(i)) for i in range(n)]


LONG = ["a" * 100_000, " " * 100_000 + "x", " \n" * 50_000, "\n" * 50_000, "7" * 100_000, "ab " * 40_000,
        "é" * 50_000, "🙂" * 25_000, "!" * 100_000, "don't " * 20_000]


# -- comparisons ---------------------------------------------------------------------------------------------

def both(folder):
    import transformers
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return checkpoints.load(folder, dtype=torch.float32), theirs


def compare_logits(folder, n=100):
    """Largest difference of the logits of n random tokens, in fp32."""
    ours, theirs = both(folder)
    x = torch.randint(0, SHAPE["vocab_size"], (1, n), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        own = ours.logits(ours(x))
        return (theirs(x).logits - own).abs().max().item()


def compare_ids(family, n, long=False):
    """{"strings", "same", "tokens"}: texts as plain characters, special tokens' names among them, and the
    same texts with special tokens read as such."""
    with tempfile.TemporaryDirectory() as folder:
        theirs = write_tokenizer(folder, family)
        ours = Tokenizer.load(folder)
    same = tokens = 0
    some = strings(n, " ".join(FAMILIES[family][3:]).split()) + LONG * long
    for as_special, encode in ((True, ours.special_ids), (False, ours.encode)):
        theirs.encode_special_tokens = not as_special
        for text, want in zip(some, theirs.encode_batch(some, add_special_tokens=False)):
            same += encode(text) == want.ids
            tokens += len(want.ids)
    return {"strings": 2 * len(some), "same": same, "tokens": tokens}


def compare_greedy(folder, draft_folder, new_tokens=200, n=1):
    """{"transformers" or a method: of how many prompts its greedy tokens are those of our autoregressive
    loop}, in fp32."""
    ours, theirs = both(folder)
    # The tokens that the tokenizer has; transformers would draw the padding too, and skips id 0.
    known = ours.config.vocab_size
    prompts = torch.randint(1, known, (n, 20), generator=torch.Generator().manual_seed(2)).tolist()
    settings = methods.settings(model=folder, drafter=draft_folder, min_budget=16)
    got = {}
    for method in ("ar", *LOSSLESS):
        engine = methods.make_engine(method, ours, settings, n)
        got[method] = [g.token_ids for g in engine.generate([Request(p, new_tokens) for p in prompts])]
    want = got.pop("ar")
    with torch.inference_mode():
        padding = list(range(known, SHAPE["vocab_size"])) or None
        out = theirs.generate(torch.tensor(prompts), max_new_tokens=new_tokens, do_sample=False,
                              eos_token_id=None, pad_token_id=0, suppress_tokens=padding)
    got = {"transformers": out[:, 20:].tolist(), **got}
    return {name: sum(a == b for a, b in zip(want, some)) for name, some in got.items()}


def compare_family(family, folder, n):
    """All of the above for one family."""
    folders = [write_model(os.path.join(folder, "-".join(map(str, how))), family, *how) for how in STORED]
    logit_difference = max(map(compare_logits, folders))
    for f in folders:
        write_tokenizer(f, family)
    # Untied and tied; drafts by the bf16 weights.
    greedy = [compare_greedy(f, folders[4], n=5) for f in (folders[0], folders[2])]
    return {"folders": len(folders), "logit_difference": logit_difference, "prompts": 5 * len(greedy),
            "ids": compare_ids(family, n, long=True),
            "greedy": {name: sum(g[name] for g in greedy) for name in greedy[0]}}


def write_large(folder):
    """1.2 billion bf16 parameters in the shape of Llama-3.2-1B, a shard a layer, of which one is held at a
    time."""
    from safetensors.torch import save_file
    c = gpt.GPTConfig(vocab_size=128256, n_layer=16, n_head=32, n_kv_head=8, d_model=2048, head_dim=64,
                      d_ff=8192, block_size=131072)
    with torch.device("meta"):
        model = gpt.GPT(c)
    checkpoints.write_json(f"{folder}/config.json", checkpoints.to_hf_config(c, "bfloat16"))
    noise = torch.randn(1 << 20).bfloat16() * 0.02
    shards = {}
    for ours, theirs, sizes in checkpoints.weight_names(c):
        for name, rows in zip(theirs, sizes):
            shards.setdefault(name.split(".")[2], {})[name] = rows, *model.get_parameter(ours).shape[1:]
    index = {name: f"model-{shard}.safetensors" for shard, some in shards.items() for name in some}
    checkpoints.write_json(f"{folder}/model.safetensors.index.json", {"weight_map": index})
    for shard, some in shards.items():
        weights = {}
        for name, shape in some.items():
            n = torch.Size(shape).numel()
            weights[name] = noise.repeat(-(-n // len(noise)))[:n].view(shape).clone()
        save_file(weights, f"{folder}/model-{shard}.safetensors")
    return model.n_params()


MEASURE = """
import minispec, re, sys, time, torch
from minispec.tools import checkpoints
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
before, started = peak(), time.perf_counter()
model = checkpoints.load(sys.argv[1], dtype=getattr(torch, sys.argv[2]))
print(before, peak(), time.perf_counter() - started)
"""


def peak_memory(folder, dtype):
    """What a fresh process needs at most while it loads a folder, in bytes: Python and torch included."""
    command = [sys.executable, "-c", MEASURE, folder, dtype]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return dict(zip(("before", "peak", "seconds"), map(float, out.split())))


def main():
    Parser(__doc__).parse_args()
    begun = time.perf_counter()
    result = {"families": {}, "memory": {}}
    with tempfile.TemporaryDirectory() as folder:
        for family in FAMILIES:
            result["families"][family] = compare_family(family, f"{folder}/{family}", 10_000)
            print(family, result["families"][family], flush=True)
    with tempfile.TemporaryDirectory() as folder:
        parameters = write_large(folder)
        for dtype, n in (("bfloat16", 2), ("float32", 4)):
            result["memory"][dtype] = {"parameters": parameters, "bytes": n * parameters,
                                       **peak_memory(folder, dtype)}
    import transformers
    result["transformers_version"] = transformers.__version__
    result["table"] = shown.checkpoints(result)
    print(result["table"])
    results.write("checkpoints", result, time.perf_counter() - begun)
    bench.report(f"{ROOT}/docs/own-models.md")


if __name__ == "__main__":
    main()
