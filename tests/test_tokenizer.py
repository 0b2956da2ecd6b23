import json
import os
import random

import pytest
from conftest import TARGET

from minispec.data.tokenizer import Tokenizer

SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|mask|>", "<|prompt|>", "<|think|>", "<|answer|>")
TEXTS = ["the cat sat on the mat, the cat sat", "12 + 34 = 46, and 46 is 46", "naïve café 東京 👍🏽", "\tif x:\n\t\treturn  y  \n\n", "don't we'll"]
HARD = ["", " ", "\n\n \n", "a\x00b", "\ufffd", "<|eos|><|think|>", "  leading", "trailing  ", "ＡＢＣ１２３", "٣٤٥ ²³", "e\u0301", "_snake_case__",
        "\u200b\u2028x", "'s 'S 'll", "🏳️‍🌈", "1234567890"]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(TARGET)


def strings():
    rng = random.Random(0)
    alphabet = [chr(rng.randrange(1, 0xD7FF)) for _ in range(200)] + list("abc XYZ 019 .,_'\n\t") * 10
    return TEXTS + HARD + ["".join(rng.choices(alphabet, k=rng.randint(1, 60))) for _ in range(500)]


def test_any_text_and_any_bytes_round_trip(tokenizer):
    for s in strings():
        assert tokenizer.decode(tokenizer.encode(s)) == s
    every_byte = tokenizer.decode_bytes(range(256))
    assert sorted(every_byte) == list(range(256))      # all bytes are tokens, so bytes always have ids
    assert tokenizer.encode("\udcff")                  # a lone surrogate is replaced, not an error


def test_special_tokens_never_come_from_text(tokenizer):
    assert list(tokenizer.special) == list(SPECIALS) and tokenizer.vocab_size == 2048
    for s in SPECIALS:
        assert tokenizer.special[s] not in tokenizer.encode(f"x{s}y")


def test_digits_are_single_tokens(tokenizer):
    assert len(tokenizer.encode("20487")) == 5


def test_templates(tokenizer):
    s = tokenizer.special
    assert tokenizer.prompt_ids("hi")[:2] == [s["<|bos|>"], s["<|prompt|>"]] and tokenizer.prompt_ids("hi")[-1] == s["<|think|>"]
    ids = tokenizer.response_ids("so ", "42")
    assert tokenizer.answer_text(ids) == "42" and tokenizer.answer_text(ids[:-1]) == "42" and tokenizer.answer_text([1, 2]) == ""
    assert tokenizer.decode_bytes([5, 999999]) == tokenizer.decode_bytes([5])


def test_hugging_face_reads_the_same_file(tokenizer, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    theirs = tokenizers.Tokenizer.from_file(os.path.join(TARGET, "tokenizer.json"))
    for s in strings():
        assert theirs.encode(s, add_special_tokens=False).ids == tokenizer.encode(s) or "<|" in s
        assert theirs.decode(tokenizer.encode(s), skip_special_tokens=False) == s


def test_transformers_finds_the_tokenizer_and_the_template(tokenizer):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(TARGET)
    assert theirs.eos_token == "<|eos|>" and theirs("so 12").input_ids == tokenizer.encode("so 12")
    got = theirs.apply_chat_template([{"role": "user", "content": "2 + 2?\n"}], tokenize=True, return_dict=True)["input_ids"]
    assert got == tokenizer.prompt_ids("2 + 2?\n")


@pytest.mark.parametrize("content, message", [(None, "cannot read .*tokenizer.json: No such file"), ("{", "tokenizer.json: Expecting"), ("{}", "tokenizer.json is damaged: KeyError: 'model'"),
                                              ('{"model": {"type": "Unigram"}}', "type Unigram is not supported")])
def test_bad_files_are_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        Tokenizer.load(str(tmp_path))


# -- other people's files ----------------------------------------------------------------------------------------------

SPLITS = [r"\w+", r"\d*", r"\d*|l", r"(?=l)", r"(?i:HE|l+)", r"\p{N}{1,3}", r"[^\n]+\n", r"(?<=l)o", r"\s+"]


def written(folder, change=lambda data: None, **config):
    """A folder with the shipped vocabulary after a change, and with these entries of tokenizer_config.json. None: no entry."""
    with open(os.path.join(TARGET, "tokenizer.json"), encoding="utf-8") as f:
        data = json.load(f)
    change(data)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "eos_token": "<|eos|>", **config}
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(data))
    (folder / "tokenizer_config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return str(folder)


def split_at(regex):
    return lambda data: data["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": regex})


@pytest.mark.parametrize("regex", SPLITS)
def test_text_between_the_matches_of_a_split_is_kept(regex, tmp_path):
    ours = Tokenizer.load(written(tmp_path, split_at(regex)))
    for s in ["Hello, world! 1 + 1 = 2", "hello\n\n12 all 3456", *strings()]:
        assert ours.decode(ours.encode(s)) == s


def test_a_long_text_without_a_match_is_kept(tmp_path):
    ours = Tokenizer.load(written(tmp_path, split_at(r"\w+")))
    assert ours.decode(ours.encode("!" * 1_000_000)) == "!" * 1_000_000


@pytest.mark.parametrize("regex", SPLITS)
def test_text_between_the_matches_of_a_split_is_split_as_tokenizers_does(regex, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    ours = Tokenizer.load(written(tmp_path, split_at(regex)))
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for s in ["Hello, world! 1 + 1 = 2", "hello\n\n12 all 3456", *strings()]:
        assert ours.encode(s) == theirs.encode(s).ids or "<|" in s
