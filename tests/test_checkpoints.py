"""Models that are not ours: folders and tokenizers of other families, their prompts, stop strings, drafters of other targets, and one
clear line for every damaged file. compare_checkpoints.py does the same at length."""
import json
import os
import shutil

import pytest
import torch
from conftest import ROOT, TARGET, dense_logits, run_script, save_toy_target, toy_model
from safetensors.torch import load_file, save_file

import compare_checkpoints as compare
import decode
from minispec import prism, specdiff
from minispec.core import gpt
from minispec.data import tasks
from minispec.tools import answers, checkpoints, methods
from minispec.core.requests import Request
from minispec.core.verify import Sampling
from minispec.data.tokenizer import TEXT_ALONE, Tokenizer

FAMILIES = list(compare.FAMILIES)
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """family -> a random folder of it, as transformers and tokenizers write it."""
    pytest.importorskip("transformers")
    out = {}
    for family in FAMILIES:
        out[family] = compare.write_model(str(tmp_path_factory.mktemp(family)), family)
        compare.write_tokenizer(out[family], family)
    return out


# -- weights ---------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", [("bfloat16", True, "20KB"), ("float16", False, "1GB"), ("float32", True, "20KB")], ids=str)
def test_logits_are_those_of_transformers(family, how, tmp_path):
    pytest.importorskip("transformers")
    assert compare.compare_logits(compare.write_model(tmp_path, family, *how)) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_200_greedy_tokens_are_those_of_transformers_and_of_every_method(family, made, tmp_path):
    draft = compare.write_model(tmp_path, family, "bfloat16")
    compare.write_tokenizer(draft, family)
    assert set(compare.compare_greedy(made[family], draft).values()) == {1}


WRITTEN = [dict(tied=t, n_kv_head=g, head_dim=d, **more) for t in (True, False) for g, d in ((1, 8), (4, 16))
           for more in ({}, {"qk_norm": True}, {"qkv_bias": True}, {"rope_scaling": SCALING})]


def test_transformers_computes_the_same_logits_for_every_shape_we_write(tmp_path):
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(0, 64, (120,)).tolist()
    for i, shape in enumerate(WRITTEN):
        model, folder = toy_model(gain=2.0, eos_id=None, **shape), tmp_path / str(i)
        if model.config.qkv_bias:
            for block in model.blocks:
                torch.nn.init.normal_(block.qkv.bias)
        checkpoints.save(model, folder)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.inference_mode():
            assert (theirs(torch.tensor([ids])).logits[0] - dense_logits(model, ids)).abs().max() < 1e-4, shape
        assert checkpoints.load(str(folder)).config == model.config


def test_positions_are_stretched_where_they_turn_slowly():
    turn = torch.tensor([1.0, 0.5, 0.1, 1e-3])             # 32 positions of pretraining: 5.1, 2.5, 0.5 and 0.005 turns
    assert torch.allclose(gpt.stretched(turn, **SCALING) / turn, torch.tensor([1.0, 0.125 + 0.875 * (16 / 6.2831853 - 1) / 3, 0.125, 0.125]))


# -- damaged folders ---------------------------------------------------------------------------------------------------------

def shards(folder):
    """Cut model.safetensors into two shards."""
    tensors = load_file(folder / "model.safetensors")
    os.remove(folder / "model.safetensors")
    where = {name: f"model-{'mlp' in name:d}.safetensors" for name in tensors}
    for file in set(where.values()):
        save_file({name: x for name, x in tensors.items() if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def change_weight(folder, change, name="model.layers.1.mlp.down_proj.weight"):
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file(tensors, folder / "model.safetensors")


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def add_weight(folder, name):
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, name: torch.ones(64)}, folder / "model.safetensors")


def set_first(value):
    def change(x):
        x[0, 0] = value
        return x
    return change


def only_pickles(folder):
    os.remove(folder / "model.safetensors")
    torch.save({}, folder / "pytorch_model.bin")


def cut_shard(folder):
    shards(folder)
    with open(folder / "model-1.safetensors", "r+b") as f:
        f.truncate(2000)


def lost_shard(folder):
    shards(folder)
    os.remove(folder / "model-1.safetensors")


DAMAGE = {      # what is wrong: (how it gets so, what the line must say)
    "not a number": (lambda f: change_weight(f, set_first(float("nan"))), "model.layers.1.mlp.down_proj.weight must hold finite"),
    "infinite": (lambda f: change_weight(f, set_first(float("-inf"))), "must hold finite"),
    "integers": (lambda f: change_weight(f, lambda x: x.to(torch.int8)), "down_proj.weight must hold finite floating-point numbers"),
    "shape of a part": (lambda f: change_weight(f, lambda x: x[:, :3].contiguous(), "model.layers.0.self_attn.k_proj.weight"), "k_proj.weight must be (16, 32) as in the config, got (16, 3)"),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "model.safetensors is damaged"),
    "a pickle by name": (only_pickles, "model.safetensors (.bin and .pt are pickles, which could run anything and are never read)"),
    "a pickle by content": (lambda f: torch.save({}, f / "model.safetensors"), "model.safetensors is damaged"),
    "a shard is cut": (cut_shard, "model-1.safetensors is damaged"),
    "a shard is lost": (lost_shard, "there is no "),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "config.json is damaged"),
    "config is binary": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe"), "config.json: 'utf-8' codec can't decode"),
    "no heads": (lambda f: change_config(f, num_attention_heads=0, head_dim=None), "config.json"),
    "words for numbers": (lambda f: change_config(f, vocab_size="many"), "vocab_size must be a number above 0 and at most 1048576, got 'many'"),
    "words for a base": (lambda f: change_config(f, rope_theta="wide"), "got 'wide'"),
    "a base of zero": (lambda f: change_config(f, rope_theta=0), "rope_theta must be a number above 0 and at most 1e+12, got 0"),
    "a base in a newer file": (lambda f: change_config(f, rope_parameters={"rope_theta": -5.0}), "at most 1e+12, got -5.0"),
    "a norm of nothing": (lambda f: change_config(f, rms_norm_eps=1e12), "norm_eps must be a number above 0 and at most 0.01, got 1000000000000.0"),
    "no number for a norm": (lambda f: change_config(f, rms_norm_eps=float("nan")), "at most 0.01, got nan"),
    "an end that cannot be": (lambda f: change_config(f, eos_token_id=-1), "eos_id must be a number from 0 and at most 1048576, got -1"),
    "a beginning that cannot be": (lambda f: change_config(f, bos_token_id=True), "got True"),
    "no stretch": (lambda f: change_config(f, rope_scaling={"rope_type": "llama3", **SCALING, "factor": 0}), "factor must be a number above 0 and at most 1048576, got 0"),
    "no end of positions": (lambda f: change_config(f, max_position_embeddings=10 ** 12), "block_size must be a number above 0 and at most 1048576, got 1000000000000"),
    "heads do not divide": (lambda f: change_config(f, num_key_value_heads=3), "n_kv_head must divide n_head 4, got 3"),
    "gpt2": (lambda f: change_config(f, model_type="gpt2"), "architecture must be one of llama, qwen2, qwen3, got 'gpt2'"),
    "yarn": (lambda f: change_config(f, rope_scaling={"type": "yarn", "factor": 4.0}), "rope scaling must be default or llama3, got 'yarn'"),
    "half of llama3": (lambda f: change_config(f, rope_scaling={"rope_type": "llama3", "factor": 4.0}), "config.json is damaged: KeyError: 'low_freq_factor'"),
    "activation": (lambda f: change_config(f, hidden_act="gelu"), "hidden_act must be silu, got 'gelu'"),
    "bias of the output": (lambda f: change_config(f, attention_bias=True), "attention_bias must be absent, got True"),
    "a weight that nobody reads": (lambda f: add_weight(f, "model.layers.0.mlp.up_proj.bias"), "holds model.layers.0.mlp.up_proj.bias, which this model does not use"),
    "scaling of no type": (lambda f: change_config(f, rope_scaling={"factor": 4.0}), "factor must be absent, got 4.0"),
    "scaling of no type in a newer file": (lambda f: change_config(f, rope_parameters={"rope_theta": 1e4, "factor": 4.0}), "factor must be absent, got 4.0"),
    "half of a head in a newer file": (lambda f: change_config(f, rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary_factor must be 1.0, got 0.5"),
    "positions of another model": (lambda f: change_config(f, rope_ratio=2), "rope_ratio must be absent, got 2"),
    "a word for tied": (lambda f: change_config(f, tie_word_embeddings="false"), "tied must be true or false, got 'false'"),
    "an index of nothing": (lambda f: (f / "model.safetensors.index.json").write_text("[]"), "model.safetensors.index.json is damaged"),
    "an index of numbers": (lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": 1}}'), "model.safetensors.index.json is damaged"),
    "a tokenizer of nothing": (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json is damaged"),
    "quantised": (lambda f: change_config(f, quantization_config={"bits": 4}), "quantization_config must be absent, got {'bits': 4}"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_folders_get_one_line(what, tmp_path):
    checkpoints.save(toy_model(), tmp_path)
    damage, message = DAMAGE[what]
    damage(tmp_path)
    with pytest.raises(ValueError) as e:
        checkpoints.load(str(tmp_path))
    assert message in str(e.value) and "\n" not in str(e.value) and str(tmp_path) in str(e.value)


def test_shards_are_read_as_one(tmp_path):
    model = toy_model()
    checkpoints.save(model, tmp_path)
    shards(tmp_path)
    again = checkpoints.load(str(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_files_beside_the_weights_are_not_read(tmp_path):
    """A backup next to model.safetensors, and the shards of an older split next to those of the index."""
    model, other = toy_model(), toy_model(seed=1)
    checkpoints.save(other, tmp_path)
    os.rename(tmp_path / "model.safetensors", tmp_path / "model_old.safetensors")
    checkpoints.save(model, tmp_path)
    assert same(checkpoints.load(str(tmp_path)), model)
    shards(tmp_path)
    os.rename(tmp_path / "model_old.safetensors", tmp_path / "model-2.safetensors")
    shutil.copy(tmp_path / "model-2.safetensors", tmp_path / "model.safetensors")
    assert same(checkpoints.load(str(tmp_path)), model)
    os.remove(tmp_path / "model.safetensors.index.json")
    assert same(checkpoints.load(str(tmp_path)), other)


@pytest.mark.parametrize("head", [1.0, 2.0])
def test_a_head_that_is_stored_is_the_head(head, tmp_path):
    """Also where the config calls it tied, as those of some small Qwen3 models do."""
    model = toy_model(tied=True)
    checkpoints.save(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "lm_head.weight": head * tensors["model.embed_tokens.weight"]}, tmp_path / "model.safetensors")
    assert torch.allclose(dense_logits(checkpoints.load(str(tmp_path)), [1, 2, 3]), head * dense_logits(model, [1, 2, 3]), atol=1e-4)


# -- vocabularies ------------------------------------------------------------------------------------------------------------

def save_padded(folder, vocab, **changes):
    """A target of `vocab` tokens of which the shipped tokenizer knows 2,048. It would say no others: their rows are large."""
    model = toy_model(vocab=vocab, tied=True, gain=1.0, **changes)
    with torch.no_grad():
        model.embed.weight[2048:] = 50 * torch.randn(vocab - 2048, 32)
    checkpoints.save(model, folder, TARGET)
    return str(folder)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["ar", "draft", "specgen"])
def test_ids_without_a_token_are_never_drawn(method, temperature, tmp_path):
    folder, draft = save_padded(tmp_path / "target", 2176), save_padded(tmp_path / "draft", 2112, seed=1)
    model = checkpoints.load(folder)
    assert model.config.vocab_size == 2048 and dense_logits(model, [1, 2]).shape == (2, 2048)
    engine = methods.make_engine(method, model, methods.settings(model=folder, drafter=draft), 1)
    request = Request([1, 2, 3], 60, Sampling(temperature))
    for _ in engine.stream([request]):
        assert max(request.tokens) < 2048
    assert len(request.generation.token_ids) == 60


def test_a_drafter_of_another_vocabulary_is_refused(tmp_path, toy):
    """By the tokens that both tokenizers know. One may know more of them."""
    draft, settings = save_toy_target(tmp_path), methods.settings(model=str(toy), drafter=str(tmp_path / "target"))
    file = os.path.join(draft, "tokenizer.json")
    with open(file, encoding="utf-8") as f:
        data = json.load(f)
    more = {"content": "<|more|>", "id": 2048, "special": True}
    for tokens, message in ((data["added_tokens"] + [more], None), (data["added_tokens"][:-1] + [{**more, "id": 2047}], "token 2047 differs")):
        with open(file, "w", encoding="utf-8") as f:
            json.dump({**data, "added_tokens": tokens}, f)
        model = checkpoints.load(str(toy))
        if message is None:
            methods.make_engine("draft", model, settings, 1)
            continue
        with pytest.raises(ValueError, match=message):
            methods.make_engine("draft", model, settings, 1)


# -- ends --------------------------------------------------------------------------------------------------------------------

DECLARED = {    # a file, what it says, the ids of unknown names that it makes ends: 2045 to 2047 are tokens no model of ours ends with
    "several": ("config.json", {"eos_token_id": [2042, 2045]}, {2045}),
    "an id": ("generation_config.json", {"eos_token_id": 2046}, {2046}),
    "ids": ("generation_config.json", {"eos_token_id": [2045, 2046]}, {2045, 2046}),
    "a name": ("tokenizer_config.json", {"eos_token": "NAME"}, {2045}),
    "a name as a dict": ("tokenizer_config.json", {"eos_token": {"content": "NAME"}}, {2045}),
    "nothing": ("generation_config.json", {"eos_token_id": None}, set()),
}


@pytest.mark.parametrize("what", DECLARED)
def test_every_end_that_a_file_declares_ends_an_answer(what, tmp_path):
    folder = save_toy_target(tmp_path)
    name, said, ends = DECLARED[what]
    file = os.path.join(folder, name)
    own = Tokenizer.load(folder)
    old = {}
    if os.path.exists(file):
        with open(file) as f:
            old = json.load(f)
    spelled = next(token for token, i in own.special.items() if i == 2045)
    with open(file, "w") as f:
        f.write(json.dumps({**old, **said}).replace("NAME", spelled))
    tokenizer = Tokenizer.load(folder)
    request, = answers.requests_of([tasks.Problem("prompt", "hi")], tokenizer, checkpoints.load(folder))
    assert request.stop_ids == {own.special["<|eos|>"]} | ends == set(tokenizer.ends)


# -- text --------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("family", FAMILIES)
def test_ids_are_those_of_tokenizers(family):
    pytest.importorskip("tokenizers")
    result = compare.compare_ids(family, 400)
    assert result["same"] == result["strings"] == 800


CHATS = {"Qwen2.5": "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
         "Qwen3": "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
         "Llama-3": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"}


@pytest.mark.parametrize("family", FAMILIES)
def test_chats_are_asked_as_the_family_is_used_to(family, tmp_path):
    pytest.importorskip("tokenizers")
    theirs, ours = compare.write_tokenizer(tmp_path, family), Tokenizer.load(tmp_path)
    read = lambda text: theirs.encode(text, add_special_tokens=False).ids
    for text in ("Hi", "1 + 1 = ?\r\nand 23", "e\u0301 🙂 don't", ""):
        assert ours.prompt_ids(text) == ours.prompt_ids(f" {text}\n") == read(CHATS[family].format(text))
    special = [*ours.special][2]
    assert ours.prompt_ids(special).count(ours.special[special]) == CHATS[family].count(special)       # a name in the text is text
    assert ours.special["<|eot_id|>" if family == "Llama-3" else "<|im_end|>"] in ours.ends


def spoil(data, *path, value):
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = value


SPOILED = {     # where in our own tokenizer.json, what instead, what the line must say
    "normaliser": (("normalizer",), {"type": "NFKC"}, "normalizer must be none or NFC, got NFKC"),
    "split": (("pre_tokenizer", "pretokenizers"), [{"type": "Digits", "individual_digits": False}, {"type": "ByteLevel", "add_prefix_space": False}], "got Digits + ByteLevel with other settings"),
    "prefix": (("pre_tokenizer", "pretokenizers", 1, "add_prefix_space"), True, "must end in ByteLevel without add_prefix_space, got"),
    "pattern": (("pre_tokenizer", "pretokenizers", 0, "pattern"), {"Regex": "("}, "tokenizer.json"),
    "suffix": (("model", "end_of_word_suffix"), "</w>", "end_of_word_suffix must be absent, got </w>"),
    "order": (("model", "merges"), [["Ġt", "h"], ["Ġ", "t"]], "not in the order of their ids"),
    "twice": (("added_tokens", 0, "id"), 7, "two tokens of the vocabulary have the same id"),
}


@pytest.mark.parametrize("what", SPOILED)
def test_tokenizers_that_tiktoken_cannot_be_are_refused(what, tmp_path):
    with open(os.path.join(TARGET, "tokenizer.json"), encoding="utf-8") as f:
        data = json.load(f)
    path, value, message = SPOILED[what]
    data["model"]["merges"] = data["model"]["merges"] if what == "order" else []
    if what == "order":
        data["model"]["vocab"] |= {"Ġt": 300, "Ġth": 400}
    spoil(data, *path, value=value)
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(ValueError) as e:
        Tokenizer.load(tmp_path)
    assert message in str(e.value) and "\n" not in str(e.value) and "tokenizer.json" in str(e.value)


# -- decode.py -----------------------------------------------------------------------------------------------------------------

def run(folder, tmp_path, *args):
    """What decode.py writes for --json."""
    run_script(decode, "--model", folder, "--json", tmp_path / "o.json", *args)
    return json.loads((tmp_path / "o.json").read_text())


@pytest.mark.parametrize("family", FAMILIES)
def test_other_models_are_decoded(family, made, tmp_path):
    ours = Tokenizer.load(made[family])
    got = run(made[family], tmp_path, "--method", "specgen", "--prompt", "🙂 <|im_end|>", "--max-new-tokens", 30, "--compare")
    assert got["prompt_ids"] == ours.prompt_ids("🙂 <|im_end|>") and got["identical"] and got["correct"] is None
    got = run(made[family], tmp_path, "--task", "story", "--n", 2, "--batch", 2, "--max-new-tokens", 5)
    assert got["correct"] is None and len(got["requests"]) == 2


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    checkpoints.save(toy_model(), tmp_path)
    shutil.copy(os.path.join(TARGET, "tokenizer.json"), tmp_path)
    with pytest.raises(ValueError, match="the vocabulary of this model is 0 to 63"):
        run_script(decode, "--model", tmp_path, "--prompt", "x")


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    save_toy_target(folder)
    return folder / "target"


@pytest.mark.parametrize("prompt", ["", "x", "🙂", "\udcff\udc80", "\x00", "<|eos|>" * 3])
def test_odd_prompts_are_answered(prompt, toy, tmp_path, capsys):
    assert run(toy, tmp_path, "--prompt", prompt, "--max-new-tokens", 3)["new_tokens"] <= 3
    run_script(decode, "--model", toy, "--prompt", prompt, "--max-new-tokens", 3)
    assert "tokens/s" in capsys.readouterr().out


def test_prompts_that_cannot_be_answered_get_one_line(toy, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_bytes(b'{"prompt": "\xff\xfe"}\n')
    cases = [(["--prompts", file], "cannot read")]
    cases += [(["--prompt", text], "exceed the context of 512") for text in ("a" * 100_000, "word " * 20_000, " " * 100_000, "🙂" * 100_000)]
    cases += [(["--prompt", " \n" * 100_000], "more than 100,000 spaces or line ends in a row")]
    for args, message in cases:
        with pytest.raises(ValueError) as e:
            run_script(decode, "--model", toy, *args)
        assert message in str(e.value) and "\n" not in str(e.value)
    tokenizer = Tokenizer.load(TARGET)
    tokenizer.chat_template, tokenizer.bos, tokenizer.ours = TEXT_ALONE, "", False                        # no family that is known: text alone
    make = lambda text: answers.requests_of([tasks.Problem("prompt", text)], tokenizer, toy_model(vocab=2048), 2)
    assert len(make("x")[0].tokens) == 1
    with pytest.raises(ValueError, match="an empty prompt"):
        make("")


# -- fingerprints ------------------------------------------------------------------------------------------------------------

def test_a_drafter_of_another_target_is_refused_by_name(tmp_path):
    target, other = toy_model(seed=1), toy_model(seed=2)
    for method, module in (("prism", prism.for_target(target)), ("specdiff", specdiff.for_target(target, n_layer=1, gamma=3))):
        checkpoints.save_drafter(module, tmp_path, target)
        settings = methods.settings(drafter=str(tmp_path))
        assert len(methods.make_engine(method, target, settings, 1).generate([Request([1, 2, 3], 4)])[0].token_ids) == 4
        with pytest.raises(ValueError) as e:
            methods.make_engine(method, other, settings, 1)
        assert f"must be {checkpoints.fingerprint(target)}, got {checkpoints.fingerprint(other)}" in str(e.value)


def test_fingerprints_tell_weights_apart_and_not_dtypes(tmp_path):
    model = toy_model()
    checkpoints.save(model, tmp_path)
    name = checkpoints.fingerprint(model)
    assert name.startswith("2x32-") and {checkpoints.fingerprint(checkpoints.load(str(tmp_path), dtype=d)) for d in (torch.float32, torch.bfloat16)} == {name}
    with torch.no_grad():
        model.blocks[-1].qkv.weight.mul_(1.1)
    assert checkpoints.fingerprint(model) != name and checkpoints.fingerprint(toy_model(seed=1)) != name


def test_shipped_drafters_name_the_shipped_target(shipped):
    for name in methods.TRAINED:
        with open(os.path.join(ROOT, "checkpoints", name, "config.json"), encoding="utf-8") as f:
            assert json.load(f)["target"] == checkpoints.fingerprint(shipped[0])
