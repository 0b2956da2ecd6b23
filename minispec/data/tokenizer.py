"""Text to token ids and back: byte-level BPE. tiktoken is the engine; `tokenizer.json` (Hugging Face) and
GGUF are the formats.

`Tokenizer.load` reads a model's vocabulary and its chat template, Jinja text that turns a conversation into
the model's prompt. The vocabulary of the puzzle models (256 bytes, 1,785 merges counted on training text, 7
special tokens) is in checkpoints/target.

Special tokens ("<|im_end|>", ..) come only from the chat template and from the model's own answers, never
from a user: a prompt that contains the string "<|im_end|>" is encoded as plain characters. Added tokens that
are not special, such as "<tool_call>", are recognised in any text.
"""
import functools
import itertools
import json
import re
import time
import unicodedata
from pathlib import Path

import tiktoken

from minispec.tools import gguf_file
from minispec.tools.files import naming, read_json

# Regular expressions that split text before the merges; SPLITS has GGUF's names for them.
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SMOLLM = (r"\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|"      # digits one by one, then GPT-2's
          r"\s+(?=\p{N})|\s+(?!\S)|\s+")
TODAY = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s|"
         r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA_3 = TODAY % "{1,3}"
SPLITS = {"smollm": SMOLLM, "gpt-2": GPT2, "llama-bpe": LLAMA_3, "llama3": LLAMA_3, "llama-v3": LLAMA_3,
          "qwen2": TODAY % "", "deepseek-r1-qwen": TODAY % ""}

ENDS = ("<|eos|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
MASK = "<|mask|>"
# The template of a model without one.
TEXT_ALONE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
MOST_SPACE = 100_000         # white space in a row; with a million the regular expressions overflow the stack
USER_DEFINED = 4             # GGUF's type of added tokens that are not special; special tokens have type 3


def byte_letters():
    """GPT-2's printable character for each byte, 256 of them; vocabularies spell tokens with them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = itertools.count(256)
    return [chr(b if b in printable else next(others)) for b in range(256)]


def one_of(names):
    """A regular expression for any of the names, the longest first."""
    return "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)"


class Tokenizer:
    """Text to ids and back.

    `special` maps names like "<|eos|>" to ids; `ends` are the ids that end an answer.

    ranks: {bytes: id} of plain tokens. added: the other tokens, in the form of tokenizer.json. pattern: the
    regular expression that splits text. form: Unicode normal form of plain text, or None. chat_template:
    Jinja; its bos_token and eos_token are bos and eos, names of special tokens. ends: more ids that end an
    answer, or None. bos_first, add_bos: without a template, a text begins with bos if one of them is true.
    """
    file = "tokenizer"                                           # source of the template, for errors
    now = None                                                   # a template's date, if not today

    def __init__(self, ranks, added, pattern, form=None, bos_first=False, chat_template=None, bos="",
                 eos="", ends=(), add_bos=False):
        special = {t["content"]: t["id"] for t in added}
        ids = [*ranks.values(), *special.values()]
        self.known = set(ids)
        if len(self.known) < len(ids):
            raise ValueError("two tokens of the vocabulary have the same id")
        if not (chat_template or bos_first or add_bos):
            bos = ""
        self.special, self.form, self.bos, self.eos = special, form, bos, eos
        self.vocab_size = 1 + max(ids)
        # Bytes that a vocabulary lacks get ids after the last one; `encode` drops them.
        whole = {bytes([b]): self.vocab_size + b for b in range(256)} | ranks
        self.encoding = tiktoken.Encoding(
            "minispec", pat_str=pattern, mergeable_ranks=whole, special_tokens=special)
        self.is_puzzle_model = "<|answer|>" in special
        ends = *map(special.get, (*ENDS, eos)), *ends
        self.ends = [i for i in ends if i is not None]
        self.names = re.compile(f"({one_of(special)})")
        # Names that are hidden in messages; names that absorb the white space before or after them.
        hidden, left, right = ([t["content"] for t in added if t.get(flag)]
                               for flag in ("special", "lstrip", "rstrip"))
        self.space = re.compile(rf"({one_of(right)})\s+|(?<!\s)\s+(?={one_of(left)})")
        self.begins = re.compile(f"(?s)(?={one_of(hidden)}).")
        # A surrogate, which no text contains, replaces the first character of a hidden name.
        self.shown = dict(enumerate({name[0] for name in hidden}, 0xD800))
        self.stand_in = {c: chr(half) for half, c in self.shown.items()}
        self.chat_template = chat_template or TEXT_ALONE

    @classmethod
    def load(cls, path):
        """From a model folder or a GGUF file. ValueError names the file and the error."""
        gguf = gguf_file.is_gguf(path)
        file = path if gguf else f"{path}/tokenizer.json"
        source, *chat = [file] if gguf else _chat_of(Path(path))
        with naming(file):
            read = _from_gguf if gguf else _from_json
            out = cls(*read(file), *chat)
        out.file = source
        return out

    @property
    def mask_id(self):
        """The id of the mask token of a diffusion model."""
        if MASK not in self.special:
            raise ValueError(f"{self.file}: the tokenizer has no {MASK}")
        return self.special[MASK]

    # -- plain text --------------------------------------------------------------------------------------

    def encode(self, text):
        """Text to ids. Names of special tokens in the text are plain text."""
        return self.special_ids(self._spell(text))

    def _plain_ids(self, text):
        """Ids of plain tokens."""
        text = text.translate(self.shown)
        if re.search(rf"(?<!\s)\s{{{MOST_SPACE + 1}}}", text):
            raise ValueError(f"a text with more than {MOST_SPACE:,} spaces or line ends in a row cannot be "
                             "tokenized")
        if self.form:
            text = unicodedata.normalize(self.form, text)
        return [i for i in self.encoding.encode_ordinary(text) if i < self.vocab_size]

    def decode_bytes(self, ids):
        """Ids to bytes; ids outside the vocabulary, such as padding, are skipped."""
        return self.encoding.decode_bytes([i for i in ids if i in self.known])

    def decode(self, ids):
        return self.decode_bytes(ids).decode("utf-8", "replace")

    # -- chat --------------------------------------------------------------------------------------------

    def chat_ids(self, messages):
        """The ids of the prompt for the next answer.

        messages: [{"role", "content"}]. The content of "user" and "system" is plain text, the content of
        "assistant" is the ids of an earlier answer. ValueError if the template does not render."""
        said = [{**m, "content": self._spell(m["content"])} for m in messages]
        try:
            rendered = _compiled(self.chat_template).render(
                messages=said, tools=None, documents=None, add_generation_prompt=True,
                bos_token=self.bos, eos_token=self.eos,
                strftime_now=lambda form: time.strftime(form, self.now or time.localtime()))
        except Exception as e:                                   # a template may raise anything
            line = f"{type(e).__name__}: {e}".translate(self.shown).splitlines()[0]
            raise ValueError(f"{self.file}: the chat template does not render ({line})") from None
        return self.special_ids(rendered)

    def prompt_ids(self, text):
        """The ids of the prompt for one message."""
        return self.chat_ids([self.asked(text)])

    def asked(self, text):
        """A prompt as a message, without space around it for chat models."""
        if not self.is_puzzle_model and self.chat_template != TEXT_ALONE:
            text = text.strip()
        return {"role": "user", "content": text}

    def special_ids(self, text):
        """Text to ids. Names of special tokens in the text are special tokens."""
        ids = []
        # Every second part is a name.
        for i, part in enumerate(self.names.split(self.space.sub(r"\1", text))):
            ids += [self.special[part]] if i % 2 else self._plain_ids(part)
        return ids

    def _spell(self, content):
        """A text or ids for the template. Names of special tokens are hidden in text and stay in ids."""
        if isinstance(content, str):
            # Lone surrogates (undecodable bytes of a command line) become "?".
            content = content.encode("utf-8", "replace").decode("utf-8")
            return self.begins.sub(lambda c: self.stand_in[c[0]], content)
        # The template writes the end of an answer itself.
        while content and content[-1] in self.ends:
            content = content[:-1]
        out = ""
        for own, run in itertools.groupby(content, self.encoding.is_special_token):
            text = self.decode(run)
            out += text if own else self._spell(text)
        return out

    # -- answers -----------------------------------------------------------------------------------------

    def response_ids(self, problem):
        """The answer to a problem that puzzle models are trained to write: think<answer>answer<eos>."""
        mark, end = self.special["<|answer|>"], self.special["<|eos|>"]
        return [*self.encode(problem.think), mark, *self.encode(problem.answer), end]

    def answer_text(self, ids):
        """The answer up to the end of text, without its chain of thought: the text after <|answer|> of a
        puzzle model, or the text after </think> of other models; "" where the chain has no end."""
        text = self.decode(itertools.takewhile(lambda token: token not in self.ends, ids))
        if self.is_puzzle_model:
            return text.partition("<|answer|>")[2]
        _, closed, answer = text.rpartition("</think>")
        return answer if closed or "<think>" not in text else ""


# -- formats ---------------------------------------------------------------------------------------------

def _from_json(file):
    """The arguments of a Tokenizer from a Hugging Face tokenizer.json."""
    data = read_json(file)
    model = data["model"]
    if model["type"] != "BPE":
        raise ValueError(f"type of the vocabulary must be BPE, got {model['type']}")
    form = (data.get("normalizer") or {}).get("type")
    if form not in (None, "NFC"):
        raise ValueError(f"normalizer must be none or NFC, got {form}")
    for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            raise ValueError(f"{key} must be absent, got {model[key]}")
    added = data["added_tokens"]
    ranks = _ranks(model["vocab"], model["merges"], added)
    bos_first = '"single": [{"SpecialToken"' in json.dumps(data.get("post_processor"))
    return ranks, added, _pattern(data["pre_tokenizer"]), form, bos_first


def _pattern(pre):
    """One regular expression that splits like the steps of a `pre_tokenizer`."""
    steps = pre.get("pretokenizers", [pre])
    kinds = [s["type"] for s in steps]
    if kinds[-1] != "ByteLevel" or steps[-1].get("add_prefix_space", True):
        raise ValueError("pre_tokenizer must end in ByteLevel without add_prefix_space, got "
                         f"{' + '.join(kinds)}")
    regex = steps[-1].get("use_regex", True)
    if kinds == ["ByteLevel"] and regex:
        return GPT2
    if kinds == ["Digits", "ByteLevel"] and regex and steps[0]["individual_digits"]:
        return SMOLLM
    if kinds == ["Split", "ByteLevel"] and not regex:
        if steps[0]["behavior"] == "Isolated" and not steps[0].get("invert"):
            # The text between two matches is a piece too. An empty match is no piece, but ends one.
            match = steps[0]["pattern"]["Regex"]
            return rf"(?:{match})(?!\G)|(?s:.)+?(?={match}|\z)"
    raise ValueError("pre_tokenizer must be an isolating Split + ByteLevel, Digits + ByteLevel with single "
                     f"digits, or ByteLevel, got {' + '.join(kinds)} with other settings")


def _chat_of(folder):
    """(file of the chat template, chat template or None, bos, eos, ends, add_bos) of a model's folder."""
    file = folder / "tokenizer_config.json"
    data = read_json(file, {})
    with naming(file):
        template = data.get("chat_template")
        # Several templates have names.
        if isinstance(template, list):
            template = {t["name"]: t["template"] for t in template}
        if isinstance(template, dict):
            template = template["default"]
        bos, eos = (name["content"] if isinstance(name, dict) else name or ""
                    for name in map(data.get, ("bos_token", "eos_token")))
    ends = []
    for name in ("config.json", "generation_config.json"):
        config = folder / name
        with naming(config):
            ids = read_json(config, {}).get("eos_token_id")
        ends += ids if isinstance(ids, list) else [ids]
    own = folder / "chat_template.jinja"
    if own.exists():
        file = own
        with naming(file):
            template = file.read_text("utf-8")
    return file, template, bos, eos, ends, data.get("add_bos_token")


def _from_gguf(file):
    """The arguments of a Tokenizer from a GGUF file."""
    source = gguf_file.open_gguf(file)
    kind, pre = source.field("tokenizer.ggml.model"), source.field("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise ValueError(f"tokenizer must be gpt2, which is byte-level BPE, got {kind!r}")
    if pre not in SPLITS:
        raise ValueError(f"pre-tokenizer must be one of {', '.join(SPLITS)}, got {pre!r}")
    tokens = source.field("tokenizer.ggml.tokens")
    bos, eos = (tokens[i] if i is not None else "" for i in (source.config.bos_id, source.config.eos_id))
    added = [{"content": t, "id": i, "special": kind != USER_DEFINED}
             for i, (t, kind) in enumerate(zip(tokens, source.types))
             if kind in (3, USER_DEFINED) or t in (bos, eos)]
    vocab = {t: i for i, (t, kind) in enumerate(zip(tokens, source.types)) if kind != gguf_file.UNUSED}
    ranks = _ranks(vocab, source.field("tokenizer.ggml.merges"), added)
    form = "NFC" if pre == "qwen2" else None
    bos_first = source.field("tokenizer.ggml.add_bos_token")
    if bos_first is None:
        bos_first = SPLITS[pre] == LLAMA_3                       # as llama.cpp
    ends = map(source.field, ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"))
    return (ranks, added, SPLITS[pre], form, bos_first, source.field("tokenizer.chat_template"), bos, eos,
            ends)


def _ranks(vocab, merges, added):
    """{bytes: id} of the plain tokens of a vocabulary {spelled token: id}. merges: "a b" or ["a", "b"]."""
    ids = [vocab["".join(m) if isinstance(m, list) else m.replace(" ", "", 1)] for m in merges]
    if ids != sorted(ids):
        raise ValueError("the merges are not in the order of their ids, by which tiktoken merges")
    byte_of = dict(zip(byte_letters(), range(256)))
    special = {t["content"] for t in added}
    # Other characters become the byte 0xFF, which is in no text, so the token is in no text.
    return {bytes(byte_of.get(c, 0xFF) for c in token): i
            for token, i in vocab.items() if token not in special}


# -- templates -------------------------------------------------------------------------------------------

@functools.cache
def _compiled(template):
    """A compiled chat template, in a sandbox, because it is code from other people's files."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message):
        raise jinja2.TemplateError(message)

    # A {% generation %} block marks the answer for training code; here it becomes a block without a meaning.
    template = re.sub(r"({%[-+]?\s*(?:end)?)generation\b", r"\1with", template)
    # The settings, the filter and the function that chat templates expect.
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    env.globals["raise_exception"] = refuse
    return env.from_string(template)
