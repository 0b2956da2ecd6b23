"""Text to token ids and back: byte-level BPE. tiktoken is the engine; `tokenizer.json` (Hugging Face) and
GGUF are the formats.

`Tokenizer.load` reads a model's vocabulary and its chat template, the Jinja text that says what the model
reads before it answers. The vocabulary of our own models (256 bytes, 1,785 merges counted on training text,
7 special tokens) comes with checkpoints/target.

Special tokens ("<|im_end|>", ..) come only from the chat template and from the model's own answers, never
from what a user writes: a prompt that contains the string "<|im_end|>" is encoded as plain characters.
"""
import functools
import itertools
import os
import re
import time
import unicodedata

import tiktoken

from minispec.tools import gguf_file
from minispec.tools.files import blame, read_json

# How text is split before the merges, by the name that GGUF has for it.
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SMOLLM = (r"\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|"      # digits one by one, then GPT-2's
          r"\s+(?=\p{N})|\s+(?!\S)|\s+")
TODAY = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s|"
         r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
SPLITS = {"smollm": SMOLLM, "gpt-2": GPT2, "llama-bpe": TODAY % "{1,3}", "qwen2": TODAY % ""}

ENDS = ("<|eos|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
TEXT_ALONE = "{% for m in messages %}{{ m.content }}{% endfor %}"        # a model without a chat template
MARK = "\udc00"              # half a character, which no text has: it breaks names of special tokens in texts
MOST_SPACE = 100_000         # white space in a row; of a million, the regular expressions run out of stack
SPECIAL_TYPES = (3, 4)       # GGUF's token types "control" and "user defined"


def byte_letters():
    """GPT-2's printable stand-in for each byte, which vocabularies spell tokens in: 256 characters."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = itertools.count(256)
    return [chr(b if b in printable else next(others)) for b in range(256)]


class Tokenizer:
    """ids in, text out and back.

    `special` maps names like "<|eos|>" to ids; `ends` are the ids that end an answer. ranks: {bytes: id} of
    plain tokens; pattern: how text is split; form: Unicode normal form of plain text, or None; chat_template:
    Jinja, with bos and eos, names of special tokens, as its bos_token and eos_token.
    """
    file = "tokenizer"                                           # where it came from, for errors

    def __init__(self, ranks, special, pattern, form=None, chat_template=None, bos="", eos=""):
        ids = [*ranks.values(), *special.values()]
        if len(set(ids)) < len(ids):
            raise ValueError("two tokens of the vocabulary have the same id")
        self.special, self.form, self.bos, self.eos = special, form, bos, eos
        self.vocab_size = 1 + max(ids)
        # Some vocabularies lack bytes. These get ids after the last one, which `encode` drops.
        whole = {bytes([b]): self.vocab_size + b for b in range(256)} | ranks
        self.encoding = tiktoken.Encoding(
            "minispec", pat_str=pattern, mergeable_ranks=whole, special_tokens=special)
        self.ours = "<|answer|>" in special
        self.ends = [special[name] for name in ENDS if name in special]
        longest_first = sorted(special, key=len, reverse=True)
        self.names = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self.begins = re.compile(f"(?s)(?={self.names.pattern}).")
        self.bytes_of = {i: b for b, i in ranks.items()} | {i: name.encode() for name, i in special.items()}
        self.chat_template = chat_template or TEXT_ALONE

    @classmethod
    def load(cls, path):
        """From a model's folder, its tokenizer.json, or a GGUF file. ValueError names what is wrong."""
        file = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
        read = _from_gguf if gguf_file.is_gguf(path) else _from_json
        with blame(file):
            out = cls(*read(file))
        out.file = file
        return out

    # -- plain text --------------------------------------------------------------------------------------

    def encode(self, text):
        """Plain text to ids. Lone surrogates (undecodable bytes of a command line) become "?"."""
        text = text.replace(MARK, "").encode("utf-8", "replace").decode("utf-8")
        if any(len(space) > MOST_SPACE for space in re.findall(r"\s+", text)):
            raise ValueError(f"a text with more than {MOST_SPACE:,} spaces or line ends in a row cannot be "
                             "split into tokens")
        if self.form:
            text = unicodedata.normalize(self.form, text)
        return [i for i in self.encoding.encode_ordinary(text) if i < self.vocab_size]

    def decode_bytes(self, ids):
        """Ids to bytes; ids outside the vocabulary (a padded embedding has some) are skipped."""
        return b"".join(self.bytes_of.get(i, b"") for i in ids)

    def decode(self, ids):
        return self.decode_bytes(ids).decode("utf-8", "replace")

    # -- chat --------------------------------------------------------------------------------------------

    def chat_ids(self, messages):
        """What the model reads before its next answer.

        messages: [{"role", "content"}]. The content of "user" and "system" is plain text, that of "assistant"
        is the ids of an earlier answer. ValueError where the template does not render."""
        said = [{**m, "content": self._spell(m["content"])} for m in messages]
        try:
            rendered = _compiled(self.chat_template).render(
                messages=said, add_generation_prompt=True, bos_token=self.bos, eos_token=self.eos)
        except Exception as e:                                   # a template may raise anything
            line = f"{type(e).__name__}: {e}".splitlines()[0]
            raise ValueError(f"{self.file}: the chat template does not render ({line})") from None
        return self.special_ids(rendered)

    def prompt_ids(self, text):
        """What the model reads before it answers one prompt."""
        return self.chat_ids([self.asked(text)])

    def asked(self, text):
        """A prompt as a message. Chat models get no space around it."""
        if not self.ours and self.chat_template != TEXT_ALONE:
            text = text.strip()
        return {"role": "user", "content": text}

    def special_ids(self, text):
        """Ids of a text in which names of special tokens mean these tokens."""
        ids = []
        # Every second part is a name.
        for i, part in enumerate(self.names.split(text)):
            ids += [self.special[part]] if i % 2 else self.encode(part)
        return ids

    def _spell(self, content):
        """A message for the template: only an answer's own special tokens are written by their names."""
        if isinstance(content, str):
            return self.begins.sub(rf"\g<0>{MARK}", content)
        # The template writes the end of an answer itself.
        while content and content[-1] in self.ends:
            content = content[:-1]
        out = ""
        for own, run in itertools.groupby(content, self.encoding.is_special_token):
            text = self.decode(run)
            out += text if own else self._spell(text)
        return out

    # -- answers -----------------------------------------------------------------------------------------

    def response_ids(self, think, answer):
        """What our models are trained to write: think<answer>answer<eos>."""
        mark, end = self.special["<|answer|>"], self.special["<|eos|>"]
        return [*self.encode(think), mark, *self.encode(answer), end]

    def answer_text(self, ids):
        """The answer without its chain of thought, up to the end of text: what comes after <|answer|> (our
        models; "" where there is none), or after </think>."""
        text = self.decode(itertools.takewhile(lambda token: token not in self.ends, ids))
        if self.ours:
            return text.partition("<|answer|>")[2]
        return text.rpartition("</think>")[2]


# -- formats ---------------------------------------------------------------------------------------------

def _from_json(file):
    """The arguments of a Tokenizer, of a Hugging Face tokenizer.json and the chat template next to it."""
    data = read_json(file)
    model = data["model"]
    if model["type"] != "BPE":
        raise ValueError(f"a vocabulary of type {model['type']} is not supported; supported is BPE")
    form = (data.get("normalizer") or {}).get("type")
    if form not in (None, "NFC"):
        raise ValueError(f"normalizer {form} is not supported; supported are none and NFC")
    for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            raise ValueError(f"{key} {model[key]} is not supported")
    special = {t["content"]: t["id"] for t in data["added_tokens"]}
    ranks = _ranks(model["vocab"], model["merges"], special)
    return ranks, special, _pattern(data["pre_tokenizer"]), form, *_template_of(os.path.dirname(file))


def _pattern(pre):
    """The one regular expression that splits as the steps of a `pre_tokenizer` do."""
    steps = pre.get("pretokenizers", [pre])
    kinds = [s["type"] for s in steps]
    if kinds[-1] != "ByteLevel" or steps[-1].get("add_prefix_space", True):
        raise ValueError("a pre_tokenizer without ByteLevel, or one that adds a space, is not supported")
    regex = steps[-1].get("use_regex", True)
    if kinds == ["ByteLevel"] and regex:
        return GPT2
    if kinds == ["Digits", "ByteLevel"] and regex and steps[0]["individual_digits"]:
        return SMOLLM
    if kinds == ["Split", "ByteLevel"] and not regex:
        if steps[0]["behavior"] == "Isolated" and not steps[0].get("invert"):
            # The text between two matches is a piece, too. An empty match is none, but ends one.
            match = steps[0]["pattern"]["Regex"]
            return rf"(?:{match})(?!\G)|(?s:.)+?(?={match}|\z)"
    raise ValueError(f"pre_tokenizer {' + '.join(kinds)} with these settings is not supported; supported are "
                     "an isolating Split + ByteLevel, Digits + ByteLevel, and ByteLevel")


def _template_of(folder):
    """(chat template or None, bos, eos) of a model's folder."""
    file = os.path.join(folder, "tokenizer_config.json")
    data = read_json(file) if os.path.exists(file) else {}
    template = data.get("chat_template")
    own = os.path.join(folder, "chat_template.jinja")
    if os.path.exists(own):
        with open(own, encoding="utf-8") as f:
            template = f.read()
    names = [data.get(key) or "" for key in ("bos_token", "eos_token")]
    return template, *(name["content"] if isinstance(name, dict) else name for name in names)


def _from_gguf(file):
    """The arguments of a Tokenizer, of a GGUF file."""
    source = gguf_file.open_gguf(file)
    kind, pre = source.field("tokenizer.ggml.model"), source.field("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise ValueError(f"tokenizer '{kind}' is not supported; supported is gpt2, byte-level BPE")
    if pre not in SPLITS:
        raise ValueError(f"pre-tokenizer '{pre}' is not supported; supported are {', '.join(SPLITS)}")
    tokens, types = source.field("tokenizer.ggml.tokens"), source.field("tokenizer.ggml.token_type")
    special = {t: i for i, (t, kind) in enumerate(zip(tokens, types)) if kind in SPECIAL_TYPES}
    vocab = {t: i for i, t in enumerate(tokens)}
    ranks = _ranks(vocab, source.field("tokenizer.ggml.merges"), special)
    names = [tokens[i] if i is not None else "" for i in (source.config.bos_id, source.config.eos_id)]
    form = "NFC" if pre == "qwen2" else None
    return ranks, special, SPLITS[pre], form, source.field("tokenizer.chat_template"), *names


def _ranks(vocab, merges, special):
    """{bytes: id} of the plain tokens of a vocabulary {spelled token: id}. merges: "a b" or ["a", "b"]."""
    ids = [vocab["".join(m) if isinstance(m, list) else m.replace(" ", "", 1)] for m in merges]
    if any(a > b for a, b in zip(ids, ids[1:])):
        raise ValueError("the merges are not in the order of their ids, by which tiktoken merges")
    byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}
    return {bytes(byte_of[c] for c in token): i for token, i in vocab.items() if token not in special}


# -- templates -------------------------------------------------------------------------------------------

@functools.cache
def _compiled(template):
    """A chat template, in a sandbox: it is code from a file that somebody else wrote."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message):
        raise jinja2.TemplateError(message)

    # The settings and the two functions that chat templates are written for.
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.globals["raise_exception"] = refuse
    env.globals["strftime_now"] = time.strftime
    return env.from_string(template)
