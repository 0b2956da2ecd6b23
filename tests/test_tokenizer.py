import itertools
import json
import random
from importlib.util import find_spec

import pytest
from conftest import TARGET, refused, table

from minispec.data import tasks
from minispec.data.tokenizer import Tokenizer
from minispec.tools import files, gguf_file

SPECIALS = "<|bos|> <|eos|> <|pad|> <|mask|> <|prompt|> <|think|> <|answer|>".split()
TEXTS = ["the cat sat on the mat, the cat sat", "12 + 34 = 46, and 46 is 46", "naïve café 東京 👍🏽",
         "don't we'll", "\tif x:\n\t\treturn  y  \n\n",
         "", " ", "\n\n \n", "a\x00b", "\ufffd", "<|eos|><|think|>",
         "  leading", "trailing  ", "ＡＢＣ１２３", "٣٤٥ ²³", "e\u0301",
         "_snake_case__", "\u200b\u2028x", "'s 'S 'll", "🏳️‍🌈",
         "1234567890", "Hello, world! 1 + 1 = 2", "hello\n\n12 all 3456"]


def hugging_face(folder):
    """A folder's tokenizer in the library that made the format, or None if it is not installed."""
    if find_spec("tokenizers"):
        import tokenizers
        return tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")


def automatic(folder):
    """A folder's tokenizer in transformers, or None if it is not installed."""
    if find_spec("transformers"):
        import transformers
        return transformers.AutoTokenizer.from_pretrained(folder)


def strings():
    rng = random.Random(0)
    alphabet = [chr(rng.randrange(1, 0xD7FF)) for _ in range(200)] + list("abc XYZ 019 .,_'\n\t") * 10
    return TEXTS + ["".join(rng.choices(alphabet, k=rng.randint(1, 60))) for _ in range(500)]


def test_any_text_and_any_bytes_round_trip(tokenizer):
    for s in strings():
        assert tokenizer.decode(tokenizer.encode(s)) == s
    # All bytes are tokens, so bytes always have ids.
    assert sorted(tokenizer.decode_bytes(range(256))) == list(range(256))
    for lone in ("\ud800", "\udcff"):
        assert tokenizer.encode(lone) == tokenizer.encode("?")


def test_a_folder_does_not_hide_the_packaged_model(tmp_path, monkeypatch):
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gguf_file, "packaged", lambda: None)
    with refused("the model smollm2 is not installed"):
        Tokenizer.load("smollm2")


def test_special_tokens_never_come_from_text(tokenizer):
    assert list(tokenizer.special) == SPECIALS
    assert tokenizer.vocab_size == 2048
    for s in SPECIALS:
        assert tokenizer.special[s] not in tokenizer.encode(f"x{s}y")


def test_digits_are_single_tokens(tokenizer):
    assert len(tokenizer.encode("20487")) == 5


def test_the_answer_follows_its_mark_and_padding_is_skipped(tokenizer):
    ids = tokenizer.response_ids(tasks.Problem("arith", "", "so ", "42"))
    assert [tokenizer.answer_text(some) for some in (ids, ids[:-1], [1, 2])] == ["42", "42", ""]
    assert tokenizer.decode_bytes([5, 999999]) == tokenizer.decode_bytes([5])


def test_hugging_face_reads_the_same_file(tokenizer):
    theirs = hugging_face(TARGET) or pytest.skip("needs tokenizers")
    for s in strings():
        assert theirs.encode(s, add_special_tokens=False).ids == tokenizer.encode(s) or "<|" in s
        assert theirs.decode(tokenizer.encode(s), skip_special_tokens=False) == s


def test_transformers_finds_the_tokenizer_and_the_template(tokenizer):
    theirs = automatic(TARGET) or pytest.skip("needs transformers")
    assert theirs.eos_token == "<|eos|>"
    assert theirs("so 12").input_ids == tokenizer.encode("so 12")
    asked = [{"role": "user", "content": "2 + 2?\n"}]
    got = theirs.apply_chat_template(asked, tokenize=True, return_dict=True)["input_ids"]
    assert got == tokenizer.prompt_ids("2 + 2?\n")


@pytest.mark.parametrize("content, message", table("""
    | tokenizer.json: not JSON
    {} | tokenizer.json is damaged: KeyError: 'model'
    {"model": {"type": "Unigram"}} | type of the vocabulary must be BPE, got Unigram
"""))
def test_bad_files_are_named(tmp_path, content, message):
    with refused("cannot read", "tokenizer.json: No such file"):
        Tokenizer.load(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text(content)
    with refused(message):
        Tokenizer.load(str(tmp_path))


# -- other people's files --------------------------------------------------------------------------------

SPLITS = [r"\w+", r"\d*", r"\d*|l", r"(?=l)", r"(?i:HE|l+)", r"\p{N}{1,3}", r"[^\n]+\n", r"(?<=l)o", r"\s+"]
# A post_processor of a tokenizer.json whose texts begin with <|bos|>.
BOS = json.loads("""
{"type": "Sequence", "processors": [
  {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true},
  {"type": "TemplateProcessing",
   "single": [{"SpecialToken": {"id": "<|bos|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
   "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
   "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [2041], "tokens": ["<|bos|>"]}}}]}
""")


def written(folder, change=lambda data: None, **config):
    """A folder with the shipped vocabulary after a change. config: entries of its tokenizer_config."""
    data = files.read_json(f"{TARGET}/tokenizer.json")
    change(data)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "eos_token": "<|eos|>",
              **config}
    files.write_json(folder / "tokenizer.json", data)
    config = {key: value for key, value in config.items() if value is not None}
    files.write_json(folder / "tokenizer_config.json", config)
    return str(folder)


def split_at(regex):
    return lambda data: data["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": regex})


@pytest.mark.parametrize("regex", SPLITS)
def test_text_between_the_matches_of_a_split_is_kept(regex, tmp_path):
    """And split as tokenizers does."""
    ours = Tokenizer.load(written(tmp_path, split_at(regex)))
    theirs = hugging_face(tmp_path)
    for s in strings():
        ids = ours.encode(s)
        assert ours.decode(ids) == s
        assert not theirs or "<|" in s or ids == theirs.encode(s).ids


def test_a_long_text_without_a_match_is_kept(tmp_path):
    ours = Tokenizer.load(written(tmp_path, split_at(r"\w+")))
    assert ours.decode(ours.encode("!" * 1_000_000)) == "!" * 1_000_000


def test_an_unused_token_of_other_characters_does_not_refuse_a_file(tmp_path):
    def change(data):
        merges, vocab = data["model"]["merges"], data["model"]["vocab"]
        for name in ("unused 5", "東京", " "):
            vocab[name] = vocab.pop("".join(merges.pop()))

    ours = Tokenizer.load(written(tmp_path, change))
    assert ours.vocab_size == 2048
    for s in ("unused 5 東京 ÿ and  a text\n", "the cat"):
        assert ours.decode(ours.encode(s)) == s
        assert not {2038, 2039, 2040} & set(ours.encode(s))


FIRST = "{{ messages[0].content }}"
ADDED = ["a <|think|>  b", "<|think|><|think|>", "  <|think|>\n\t<|answer|>  x", "<|answer|> <|think|> ",
         "no name", "<|think", " \n<|mask|>  y"]


@pytest.mark.parametrize("special, lstrip, rstrip", list(itertools.product([False, True], repeat=3)))
def test_added_tokens_in_texts(special, lstrip, rstrip, tmp_path):
    """Special ones are found only in the template, the others in any text. Both absorb the white space next
    to them if their entry says so."""
    def change(data):
        data["added_tokens"][5].update(special=special, lstrip=lstrip, rstrip=rstrip)        # <|think|>

    ours = Tokenizer.load(written(tmp_path, change, chat_template=FIRST))
    want = [*ours.encode("a" + " " * (not lstrip)), 2046, *ours.encode(" " * (not rstrip) + "b")]
    text = "a <|think|> b"
    assert ours.special_ids(text) == want
    assert ours.encode(text) == ours.prompt_ids(text)
    assert (ours.encode(text) == want) != special
    assert 2046 not in ours.encode("<|think")
    long = "a" + " " * 50_000 + "b"
    assert ours.decode(ours.encode(long)) == long
    if theirs := hugging_face(tmp_path):
        for as_special, encode in ((True, ours.special_ids), (False, ours.encode)):
            theirs.encode_special_tokens = not as_special
            assert [encode(s) for s in ADDED] == [theirs.encode(s).ids for s in ADDED]


@pytest.mark.parametrize("add_bos_token", [None, False, True])
@pytest.mark.parametrize("post_processor", [None, BOS])
def test_text_without_a_template_begins_as_the_folder_says(post_processor, add_bos_token, tmp_path):
    """With begin-of-text if one of the two says so. As in transformers, whose version 5 ignores add_bos_token
    where version 4 does not."""
    want = bool(post_processor or add_bos_token)
    change = lambda data: data.update(post_processor=post_processor)
    folder = written(tmp_path, change, add_bos_token=add_bos_token)
    ours = Tokenizer.load(folder)
    if (post_processor or not add_bos_token) and (theirs := automatic(folder)):
        assert theirs(" hi").input_ids == ours.prompt_ids(" hi")
    ours.is_puzzle_model = False
    assert ours.prompt_ids(" hi") == [2041] * want + ours.encode(" hi")
    said = {"role": "assistant", "content": ours.encode("b")}
    assert ours.chat_ids([ours.asked("a"), said]).count(2041) == want
    template = "{{ bos_token }}{{ messages[0].content }}"
    with_template = Tokenizer.load(written(tmp_path, add_bos_token=add_bos_token, chat_template=template))
    assert with_template.prompt_ids("hi").count(2041) == 1


NAMED = [{"name": "tool_use", "template": "B"}, {"name": "default", "template": f"A{FIRST}"}]
GENERATION = ("{% for m in messages %}\n  {%- generation %}\n{{ m.content }}{% set x = 1 %}"
              "{% endgeneration -%} \n{% endfor %}{{ x }}generation")
TO_JSON = "{{ messages[0].content | tojson }}{{ {'b': [1], 'a': 2} | tojson(indent=1, sort_keys=true) }}"
RENDERED = [    # message, template, text
    ("hi", NAMED, "Ahi"),
    ("hi", {"tool_use": "B", "default": f"A{FIRST}"}, "Ahi"),
    ("hi", GENERATION, "higeneration"),
    ("hi", "{% if tools is not none or documents is not none %}B{% endif %}" + FIRST, "hi"),
    ("<é> & 'x'", TO_JSON, "\"<é> & 'x'\"{\n \"a\": 2,\n \"b\": [\n  1\n ]\n}"),
    ("é <|eos|> é", "{{ messages | tojson }}", '[{"role": "user", "content": "é <|eos|> é"}]'),
    ("<|eos|><|eos|>", "{{ messages[0].content | length }}{{ messages[0].content[3:9] }}", "14os|><|"),
]


@pytest.mark.parametrize("text, template, want", RENDERED)
def test_templates_are_rendered(text, template, want, tmp_path):
    """As in transformers."""
    folder = written(tmp_path, chat_template=template)
    ours = Tokenizer.load(folder)
    ids = ours.prompt_ids(text)
    assert ours.decode(ids) == want
    assert 2042 not in ids
    if theirs := automatic(folder):
        assert theirs.apply_chat_template([{"role": "user", "content": text}], tokenize=False) == want


def test_the_file_of_a_bad_template_is_named(tmp_path):
    config, own = tmp_path / "tokenizer_config.json", tmp_path / "chat_template.jinja"

    def message():
        with pytest.raises(ValueError) as e:
            Tokenizer.load(tmp_path).prompt_ids("<|eos|>")
        assert "tokenizer.json" not in str(e.value) and str(e.value).encode()
        return str(e.value)

    for template in ("{% if %}", "{{ 1 / 0 }}", "{{ raise_exception(messages[0].content) }}", 7, {}, [{}],
                     NAMED[:1], {"default": 7}):
        written(tmp_path, chat_template=template)
        assert message().startswith(str(config))
    own.write_text("{% if %}")
    assert "chat_template.jinja: the chat template does not render" in message()
    own.write_bytes(b"\xff")
    for file in (own, config):
        assert str(file) in message()
        config.write_text("{")
