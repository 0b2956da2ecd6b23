"""Models of other people: folders and tokenizers of other families, their prompts, ends of answers, drafters
of other targets, and a clear line for every damaged file. compare_checkpoints.py does the same at length."""
import json
import os
import pickle
import shutil

import pytest
import torch
from conftest import (TARGET, decoded, dense_logits, refusal, refused, same, save_toy_target, table,
                      toy_model, values, weights)
from safetensors.torch import save_file

import compare_checkpoints as compare
import decode
from minispec import prism, specdiff
from minispec.core import gpt
from minispec.data import tasks
from minispec.tools import answers, checkpoints, drafter_files, files, methods
from minispec.data.tokenizer import TEXT_ALONE, Tokenizer

every_family = pytest.mark.parametrize("family", compare.FAMILIES)
SCALES = '"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32'
SCALING = json.loads('{"factor": 8.0, %s}' % SCALES)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """family -> a random folder of it, as transformers and tokenizers write it."""
    pytest.importorskip("transformers")
    out = {}
    for family in compare.FAMILIES:
        out[family] = compare.write_model(tmp_path_factory.mktemp(family), family)
        compare.write_tokenizer(out[family], family)
    return out


# -- weights ---------------------------------------------------------------------------------------------

@every_family
@pytest.mark.parametrize("how", values("""
    "bfloat16" | true  | "20KB"
    "float16"  | false | "1GB"
    "float32"  | true  | "20KB"
"""), ids=str)
def test_logits_are_those_of_transformers(family, how, tmp_path):
    pytest.importorskip("transformers")
    assert compare.compare_logits(compare.write_model(tmp_path, family, *how)) < 1e-4


@every_family
def test_200_greedy_tokens_are_those_of_transformers_and_of_every_method(family, made, tmp_path):
    draft = compare.write_model(tmp_path, family, "bfloat16")
    compare.write_tokenizer(draft, family)
    assert set(compare.compare_greedy(made[family], draft).values()) == {1}


KINDS = ({}, {"qk_norm": True}, {"qkv_bias": True}, {"rope_scaling": SCALING})
WRITTEN = [dict(tied=tied, n_kv_head=heads, head_dim=width, **more)
           for tied in (True, False) for heads, width in ((1, 8), (4, 16)) for more in KINDS]


def test_transformers_computes_the_same_logits_for_every_shape_we_write(tmp_path):
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(0, 64, (120,)).tolist()
    for i, shape in enumerate(WRITTEN):
        model = toy_model(gain=2.0, eos_id=None, **shape)
        folder = tmp_path / str(i)
        for block in model.blocks if model.config.qkv_bias else ():
            torch.nn.init.normal_(block.qkv.bias)
        checkpoints.save(model, folder)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.inference_mode():
            difference = theirs(torch.tensor([ids])).logits[0] - dense_logits(model, ids)
        assert difference.abs().max() < 1e-4, shape
        assert checkpoints.load(folder).config == model.config


def test_positions_are_stretched_at_low_frequencies():
    turn = torch.tensor([1.0, 0.5, 0.1, 1e-3])           # 5.1, 2.5, 0.5 and 0.005 turns in 32 positions
    middle = 0.125 + 0.875 * (16 / 6.2831853 - 1) / 3
    want = torch.tensor([1.0, middle, 0.125, 0.125])
    assert torch.allclose(gpt.llama3_scaling(turn, **SCALING) / turn, want)


# -- folders ---------------------------------------------------------------------------------------------

def shards(folder):
    """Cut model.safetensors into two shards."""
    tensors = weights(folder)
    os.remove(folder / "model.safetensors")
    where = {name: f"model-{'mlp' in name:d}.safetensors" for name in tensors}
    for file in set(where.values()):
        save_file({name: x for name, x in tensors.items() if where[name] == file}, folder / file)
    files.write_json(folder / INDEX, {"weight_map": where})


def change_weight(folder, change, name):
    tensors = weights(folder)
    changed = change(tensors.pop(name, None))
    tensors |= {} if changed is None else {name: changed.contiguous()}
    save_file(tensors, folder / "model.safetensors")


WEIGHTS = [     # name, change, part of the line
    ("1.mlp.down_proj.weight", lambda x: x * float("nan"), "down_proj.weight must hold finite"),
    ("1.mlp.down_proj.weight", lambda x: x * float("-inf"), "must hold finite"),
    ("1.mlp.down_proj.weight", lambda x: x.to(torch.int8), "must hold finite floating-point numbers"),
    ("1.mlp.down_proj.weight", lambda x: x.to(torch.float8_e4m3fn), "numbers of at least 16 bits"),
    ("0.self_attn.k_proj.weight", lambda x: x[:, :3], "must be (16, 32) as in the config, got (16, 3)"),
    ("0.mlp.up_proj.bias", lambda _: torch.ones(64), "0.mlp.up_proj.bias, which this model does not use"),
    ("1.mlp.up_proj.weight", lambda _: None, "lacks model.layers.1.mlp.up_proj.weight"),
]
# Changes of config.json, part of the line.
CONFIGS = """
{"num_attention_heads": 0, "head_dim": null} | config.json
{"vocab_size": "many"} | vocab_size must be a number above 0 and at most 1048576, got 'many'
{"rope_theta": "wide"} | got 'wide'
{"rope_theta": 0} | rope_theta must be a number above 0 and at most 1e+12, got 0
{"rope_parameters": {"rope_theta": -5.0}} | at most 1e+12, got -5.0
{"rms_norm_eps": 1e12} | norm_eps must be a number above 0 and at most 0.01, got 1000000000000.0
{"rms_norm_eps": NaN} | at most 0.01, got nan
{"eos_token_id": -1} | eos_id must be a number at least 0 and at most 1048576, got -1
{"bos_token_id": true} | got True
{"max_position_embeddings": 1000000000000} | block_size must be a number above 0 and at most 1048576, got
{"num_key_value_heads": 3} | n_kv_head must divide n_head 4, got 3
{"head_dim": 7} | head_dim must be even, got 7
{"model_type": "gpt2"} | architecture must be one of llama, qwen2, qwen3, got 'gpt2'
{"hidden_act": "gelu"} | hidden_act must be silu, got 'gelu'
{"attention_bias": true} | attention_bias must be absent, got True
{"use_mrope": true} | use_mrope must be absent, got True
{"quantization_config": {"bits": 4}} | quantization_config must be absent, got {'bits': 4}
{"tie_word_embeddings": "false"} | tied must be true or false, got 'false'
{"rope_ratio": 2} | rope_ratio must be absent, got 2
{"rope_scaling": {"rope_type": "llama3", "factor": 0, ..}} | factor must be a number above 0
{"rope_scaling": {"type": "yarn", "factor": 4.0}} | rope scaling must be default or llama3, got 'yarn'
{"rope_scaling": {"rope_type": "llama3", "factor": 4.0}} | is damaged: KeyError: 'low_freq_factor'
{"rope_scaling": {"factor": 4.0}} | factor must be absent, got 4.0
{"rope_parameters": {"rope_theta": 1e4, "factor": 4.0}} | factor must be absent, got 4.0
{"rope_parameters": {"partial_rotary_factor": 0.5}} | partial_rotary_factor must be 1.0, got 0.5
"""
INDEX = "model.safetensors.index.json"
FILES = [       # file, its new text in Latin-1, part of the line
    *table(f"""
        model.safetensors | | model.safetensors is damaged
        model.safetensors | gone | (.bin and .pt are pickles, which could run anything and are never read)
        model-1.safetensors | gone | there is no
        config.json | [] | config.json is damaged
        config.json | {{ | config.json: not JSON
        config.json | ÿþ | config.json: 'utf-8' codec can't decode
        {INDEX} | [] | {INDEX} is damaged
        {INDEX} | {{"weight_map": {{"a": 1}}}} | {INDEX} is damaged
        tokenizer.json | {{}} | tokenizer.json is damaged
        tokenizer.json | {{"added_tokens": [], "model": {{"type": "Unigram", "vocab": []}}}} | must be BPE
    """),
    ("model.safetensors", pickle.dumps({}).decode("latin-1"), "model.safetensors is damaged"),
    ("model-1.safetensors", "ÿ" * 2000, "model-1.safetensors is damaged"),
]
CHANGED = [(None, json.loads(x.replace("..", SCALES)), message) for x, message in table(CONFIGS)]


@pytest.mark.parametrize("what, change, message", [*WEIGHTS, *CHANGED, *FILES])
def test_damaged_folders_get_one_line(what, change, message, tmp_path):
    checkpoints.save(toy_model(), tmp_path)
    if what and "-1" in what:
        shards(tmp_path)
    if callable(change):
        change_weight(tmp_path, change, f"model.layers.{what}")
    elif isinstance(change, dict):
        change_json(tmp_path / "config.json", lambda config: {**config, **change})
    elif change == "gone":
        os.remove(tmp_path / what)
    else:
        (tmp_path / what).write_text(change, "latin-1")
    with refused(message, tmp_path):
        checkpoints.load(tmp_path)


def test_what_a_config_says_is_off_may_be_there(tmp_path):
    checkpoints.save(toy_model(), tmp_path)
    off = {"use_mrope": False, "attention_bias": False, "use_sliding_window": False, "rope_scaling": None}
    change_json(tmp_path / "config.json", lambda config: {**config, **off})
    assert holds(tmp_path, toy_model())


def holds(folder, model):
    """Whether a folder's weights are those of a model."""
    return same(checkpoints.load(folder).state_dict(), model.state_dict())


def test_shards_are_read_and_files_beside_the_weights_are_not(tmp_path):
    """A backup next to model.safetensors, and shards of an older split next to those of the index."""
    model = toy_model()
    other = toy_model(seed=1)
    checkpoints.save(other, tmp_path)
    os.rename(tmp_path / "model.safetensors", tmp_path / "model_old.safetensors")
    checkpoints.save(model, tmp_path)
    assert holds(tmp_path, model)
    shards(tmp_path)
    os.rename(tmp_path / "model_old.safetensors", tmp_path / "model-2.safetensors")
    shutil.copy(tmp_path / "model-2.safetensors", tmp_path / "model.safetensors")
    assert holds(tmp_path, model)
    os.remove(tmp_path / INDEX)
    assert holds(tmp_path, other)


def test_a_copy_knows_all_ends_of_text(tmp_path):
    """Some of them are in generation_config.json alone."""
    source = tmp_path / "source"
    shutil.copytree(TARGET, source)
    (source / "generation_config.json").write_text('{"eos_token_id": [0, 7]}')
    checkpoints.save(checkpoints.load(source), tmp_path / "copy", source)
    assert 7 in Tokenizer.load(tmp_path / "copy").ends


def test_a_head_that_is_stored_is_the_head(tmp_path):
    """Also if the config calls it tied, as in some small Qwen3 models."""
    model = toy_model(tied=True)
    checkpoints.save(model, tmp_path)
    change_weight(tmp_path, lambda _: 2 * model.embed.weight.data, "lm_head.weight")
    got = dense_logits(checkpoints.load(tmp_path), [1, 2, 3])
    assert torch.allclose(got, 2 * dense_logits(model, [1, 2, 3]), atol=1e-4)


# -- vocabularies ----------------------------------------------------------------------------------------

def test_padding_of_the_vocabulary_is_cut_off(tmp_path):
    """2,048 of its tokens are in the shipped tokenizer. No method can draw the others."""
    model = toy_model(vocab=2176, tied=True, gain=1.0)
    checkpoints.save(model, tmp_path, TARGET)
    loaded = checkpoints.load(tmp_path)
    assert loaded.config.vocab_size == 2048
    assert torch.equal(dense_logits(loaded, [1, 2]), dense_logits(model, [1, 2])[:, :2048])


def change_json(file, change):
    """Rewrite a JSON file with change(its value), which may be a new one."""
    files.write_json(file, change(files.read_json(file, {})))


def test_a_drafter_of_another_vocabulary_is_refused(tmp_path, toy):
    """By the tokens that both tokenizers have. One may have more."""
    draft = save_toy_target(tmp_path)
    model = checkpoints.load(toy)
    settings = methods.settings(model=toy, drafter=draft)
    file = tmp_path / "target" / "tokenizer.json"

    def add(id, last=None):
        more = {"content": "<|more|>", "id": id, "special": True}
        change_json(file, lambda d: {**d, "added_tokens": [*d["added_tokens"][:last], more]})

    add(2048)
    methods.make_engine("draft", model, settings, 1)
    add(2047, -2)
    with refused("token 2047 differs"):
        methods.make_engine("draft", model, settings, 1)


# -- ends ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("file, said, ends", table("""
    config.json | {"eos_token_id": [2042, 2045]} | 2045
    generation_config.json | {"eos_token_id": 2046} | 2046
    generation_config.json | {"eos_token_id": [2045, 2046]} | 2045 2046
    generation_config.json | {"eos_token_id": null} |
    tokenizer_config.json | {"eos_token": "<\\u007cprompt\\u007c>"} | 2045
    tokenizer_config.json | {"eos_token": {"content": "<\\u007cprompt\\u007c>"}} | 2045
"""))
def test_every_end_that_a_file_declares_ends_an_answer(file, said, ends, tmp_path):
    folder = save_toy_target(tmp_path)
    change_json(tmp_path / "target" / file, lambda data: {**data, **json.loads(said)})
    tokenizer = Tokenizer.load(folder)
    request, = answers.requests_of([tasks.Problem("prompt", "hi")], tokenizer, checkpoints.load(folder))
    assert request.stop_ids == {2042, *map(int, ends.split())} == set(tokenizer.ends)


# -- text ------------------------------------------------------------------------------------------------

@every_family
def test_ids_are_those_of_tokenizers(family):
    pytest.importorskip("tokenizers")
    result = compare.compare_ids(family, 400)
    assert result["same"] == result["strings"] == 800


CHATML = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
CHATS = {"Qwen2.5": f"<|im_start|>system\n{SYSTEM}<|im_end|>\n{CHATML}", "Qwen3": CHATML,
         "Llama-3": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
                    "<|start_header_id|>assistant<|end_header_id|>\n\n"}


@every_family
def test_chats_are_asked_in_the_format_of_the_family(family, tmp_path):
    pytest.importorskip("tokenizers")
    theirs = compare.write_tokenizer(tmp_path, family)
    ours = Tokenizer.load(tmp_path)
    for text in ("Hi", "1 + 1 = ?\r\nand 23", "e\u0301 🙂 don't", ""):
        want = theirs.encode(CHATS[family].format(text), add_special_tokens=False).ids
        assert ours.prompt_ids(text) == ours.prompt_ids(f" {text}\n") == want
    special = [*ours.special][2]                         # its name in a prompt is text
    assert ours.prompt_ids(special).count(ours.special[special]) == CHATS[family].count(special)
    assert ours.special["<|eot_id|>" if family == "Llama-3" else "<|im_end|>"] in ours.ends


# Path in the shipped tokenizer.json, new value, part of the line.
SPOILED = """
normalizer | {"type": "NFKC"} | normalizer must be none or NFC, got NFKC
pre_tokenizer pretokenizers 0 individual_digits | false | got Digits + ByteLevel with other
pre_tokenizer pretokenizers 1 add_prefix_space | true | must end in ByteLevel without
pre_tokenizer pretokenizers 0 pattern | {"Regex": "("} | tokenizer.json
model end_of_word_suffix | "</w>" | end_of_word_suffix must be absent, got </w>
model merges | [["t", "h"], ["a", "n"]] | not in the order of their ids
added_tokens 0 id | 7 | two tokens of the vocabulary have the same id
"""


@pytest.mark.parametrize("path, value, message", table(SPOILED))
def test_tokenizers_that_tiktoken_cannot_be_are_refused(path, value, message, tmp_path):
    def change(data):
        if "individual_digits" in path:
            data["pre_tokenizer"]["pretokenizers"][0] = {"type": "Digits"}
        if "merges" in path:
            data["model"]["vocab"] |= {"th": 400, "an": 300}
        place = data
        *way, last = path.split()
        for key in way:
            place = place[int(key) if key.isdigit() else key]
        place[last] = json.loads(value)
        return data

    shutil.copy(f"{TARGET}/tokenizer.json", tmp_path)
    change_json(tmp_path / "tokenizer.json", change)
    with refused(message, "tokenizer.json"):
        Tokenizer.load(tmp_path)


# -- decode.py -------------------------------------------------------------------------------------------

@every_family
def test_other_models_are_decoded(family, made, tmp_path):
    model = f"--model {made[family]}"
    prompt = "🙂 <|im_end|>"
    got, _ = decoded(tmp_path, f"{model} --method specgen --max-new-tokens 30 --compare --prompt", prompt)
    assert got["prompt_ids"] == Tokenizer.load(made[family]).prompt_ids(prompt)
    assert got["identical"] and got["correct"] is None
    got, _ = decoded(tmp_path, f"{model} --task story --n 2 --batch 2 --max-new-tokens 5")
    assert got["correct"] is None and len(got["requests"]) == 2


@pytest.mark.parametrize("part, times, message", values(r"""
    "a" | 100000 | "exceed the context of 512"
    "word " | 20000 | "exceed the context of 512"
    " " | 100000 | "exceed the context of 512"
    "🙂" | 100000 | "exceed the context of 512"
    " \n" | 100000 | "more than 100,000 spaces or line ends in a row"
"""))
def test_prompts_that_cannot_be_answered_get_one_line(part, times, message, toy):
    assert message in refusal(decode, f"--model {toy} --prompt", part * times)


def test_an_empty_prompt_without_a_template_is_refused():
    tokenizer = Tokenizer.load(TARGET)
    tokenizer.chat_template, tokenizer.bos, tokenizer.is_puzzle_model = TEXT_ALONE, "", False
    ask = lambda text: answers.requests_of([tasks.Problem("", text)], tokenizer, toy_model(vocab=2048), 2)
    assert len(ask("x")[0].tokens) == 1
    with refused("an empty prompt"):
        ask("")


# -- fingerprints ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("method, paper", [("prism", prism), ("specdiff", specdiff)])
def test_a_drafter_of_another_target_is_refused_by_name(method, paper, tmp_path):
    target, other = toy_model(seed=1), toy_model(seed=2)
    drafter_files.save_drafter(paper.for_target(target), tmp_path, target)
    settings = methods.settings(drafter=tmp_path)
    methods.make_engine(method, target, settings, 1)
    needed, got = map(checkpoints.fingerprint, (target, other))
    with refused(f"must be {needed}, got {got}"):
        methods.make_engine(method, other, settings, 1)


def test_fingerprints_tell_weights_apart_and_not_dtypes(tmp_path):
    model = toy_model()
    checkpoints.save(model, tmp_path)
    name = checkpoints.fingerprint(model)
    assert name.startswith("2x32-")
    for dtype in (torch.float32, torch.bfloat16):
        assert checkpoints.fingerprint(checkpoints.load(tmp_path, dtype=dtype)) == name
    model.blocks[-1].qkv.weight.data *= 1.1
    assert name not in (checkpoints.fingerprint(model), checkpoints.fingerprint(toy_model(seed=1)))
