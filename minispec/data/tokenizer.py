"""Text to token ids and back: byte-level BPE. tiktoken is the engine, `tokenizer.json` (Hugging Face) the format.

`Tokenizer.load` reads a `tokenizer.json`, ours or one of the Qwen2, Qwen3 and Llama-3 families, and builds a tiktoken
`Encoding` of it; `train_bpe` makes the merges of our own small vocabulary: 256 bytes, 1,785 merges, 7 special tokens.
Digits are always single tokens, since arithmetic is learned digit by digit. Any bytes round-trip.

Special tokens come only from the templates below, never from user text: a prompt that contains the string
"<|eos|>" is encoded as plain characters.
"""
import heapq
import os
import re
import unicodedata
from collections import Counter, defaultdict

import tiktoken

from minispec.tools.files import read_json

SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|mask|>", "<|prompt|>", "<|think|>", "<|answer|>")
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The same split for counting words while training; Python's `re` has no \p{..} classes.
PATTERN_RE = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?[^\W\d_]+|\d| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")

# What a model reads before it answers, by the special tokens that tell its family: ours, Qwen3, Qwen2.5, Qwen2, Llama-3.
TEMPLATES = {
    ("<|prompt|>", "<|think|>"): "<|bos|><|prompt|>{prompt}<|think|>",
    ("<|im_start|>", "<think>"): "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n",
    ("<|im_start|>", "<tool_call>"): "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
                                     "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n",
    ("<|im_start|>",): "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
                       "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n",
    ("<|start_header_id|>",): "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{prompt}<|eot_id|>"
                              "<|start_header_id|>assistant<|end_header_id|>\n\n",
}
TURNS = {   # by the first such token in the vocabulary: how an answer is closed, and where the template begins again for the next prompt
    "<|prompt|>": ("<|eos|>", "<|prompt|>"),
    "<|im_start|>": ("<|im_end|>\n", "<|im_start|>user"),
    "<|start_header_id|>": ("<|eot_id|>", "<|start_header_id|>user"),
}
NO_THINKING = "<think>\n\n</think>\n\n"       # how a prompt for Qwen3 ends when it shall answer at once
MOST_SPACE = 100_000         # white-space characters in a row; of a million, the regular expressions run out of stack
ENDS = ("<|eos|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")


def byte_letters():
    """GPT-2's printable stand-in for each byte, in which `tokenizer.json` spells its tokens: list of 256 characters."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    letter = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}
    return [letter[b] for b in range(256)]


class Tokenizer:
    """ids in, text out and back. `special` maps names like "<|eos|>" to ids, `ends` are the ids that end an answer."""

    def __init__(self, ranks, special, pattern=PATTERN, form=None):
        self.encoding = tiktoken.Encoding("minispec", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        self.special, self.form = special, form                  # form: Unicode normal form of plain text
        self.vocab_size = self.encoding.n_vocab
        self.template = next((t for marks, t in TEMPLATES.items() if all(m in special for m in marks)), "{prompt}")
        self.ours = "<|answer|>" in special
        self.ends = [special[name] for name in ENDS if name in special]

    @classmethod
    def load(cls, path):
        """From a folder holding tokenizer.json, or from that file. ValueError names what is wrong."""
        file = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
        if not os.path.exists(file):
            raise ValueError(f"no tokenizer: {file} does not exist")
        try:
            data = read_json(file)
            if data["model"]["type"] != "BPE":
                raise KeyError("model.type 'BPE'")
            _check_kind(data)
            byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}
            special = {t["content"]: t["id"] for t in data["added_tokens"]}
            ranks = {bytes(byte_of[c] for c in token): i for token, i in data["model"]["vocab"].items()
                     if token not in special}
            if not all(bytes([b]) in ranks for b in range(256)):
                raise ValueError("the vocabulary lacks some of the 256 bytes, so not every text has ids")
            if len({*ranks.values(), *special.values()}) < len(ranks) + len(special):
                raise ValueError("two tokens of the vocabulary have the same id")
            return cls(ranks, special, data["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"], (data.get("normalizer") or {}).get("type"))
        except (LookupError, TypeError, AttributeError, OverflowError) as e:
            raise ValueError(f"{file} is not a byte-level BPE tokenizer.json ({type(e).__name__}: {e})") from None
        except ValueError as e:
            raise ValueError(str(e) if file in str(e) else f"{file}: {e}") from None

    def encode(self, text):
        """Plain text to ids. Lone surrogates (from undecodable command-line bytes) keep their original bytes' place."""
        text = text.encode("utf-8", "replace").decode("utf-8")
        if len(text) > MOST_SPACE and any(len(space) > MOST_SPACE for space in re.findall(r"\s+", text)):
            raise ValueError(f"a text with more than {MOST_SPACE:,} spaces or line ends in a row cannot be split into tokens")
        return self.encoding.encode_ordinary(unicodedata.normalize(self.form, text) if self.form else text)

    def decode_bytes(self, ids):
        """Ids to bytes; ids outside the vocabulary (a padded embedding has some) are skipped."""
        out = []
        for i in ids:
            try:
                out.append(self.encoding.decode_single_token_bytes(i))
            except KeyError:
                pass
        return b"".join(out)

    def decode(self, ids):
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def template_ids(self, template, prompt=""):
        """A template's ids: special tokens where it names them, and {prompt} replaced by plain text, whatever that says."""
        ids, marks = [], "|".join(map(re.escape, self.special))
        for piece in re.split(f"({marks})", template) if marks else [template]:
            ids += [self.special[piece]] if piece in self.special else self.encode(piece.replace("{prompt}", prompt))
        return ids

    def prompt_ids(self, text):
        """What the model reads before it answers. Of ours: <bos><prompt>text<think>. Chat models get no space around the text."""
        return self.template_ids(self.template, text if self.ours or self.template == "{prompt}" else text.strip())

    def next_prompt_ids(self, prompt_ids, answer_ids, text):
        """What the model reads after a prompt and its own answer to it, when it is asked again. Chains of thought of Qwen3 are left
        out, as its chat template has it."""
        close, begin = next((turn for mark, turn in TURNS.items() if mark in self.special), ("\n", "{prompt}"))
        said, suffix = list(answer_ids), self.template_ids(NO_THINKING)
        while said and said[-1] in self.ends:
            said.pop()
        if "</think>" in self.special:
            if prompt_ids[-len(suffix):] == suffix:
                prompt_ids = prompt_ids[:-len(suffix)]
            while self.special["</think>"] in said:
                said = said[said.index(self.special["</think>"]) + 1:]
            while said and not self.decode(said[:1]).strip("\n"):
                said = said[1:]
        again = close + self.template[self.template.rindex(begin):]
        return [*prompt_ids, *said, *self.template_ids(again, text if self.ours or begin == "{prompt}" else text.strip())]

    def response_ids(self, think, answer):
        """What the model is trained to write: think<answer>answer<eos>."""
        s = self.special
        return [*self.encode(think), s["<|answer|>"], *self.encode(answer), s["<|eos|>"]]

    def answer_text(self, ids):
        """The text after the (first) answer mark, up to the end of text; "" where no answer was given. Of other models: all that
        stands behind a chain of thought."""
        s = self.special
        if not self.ours:
            return self.decode([i for i in ids if i not in self.ends]).rpartition("</think>")[2]
        if s["<|answer|>"] not in ids:
            return ""
        tail = ids[ids.index(s["<|answer|>"]) + 1:]
        return self.decode(tail[:tail.index(s["<|eos|>"])] if s["<|eos|>"] in tail else tail)


def _check_kind(data):
    """ValueError where a BPE `tokenizer.json` does what tiktoken would do otherwise, and ids would differ without a word."""
    model, kind, steps = data["model"], (data.get("normalizer") or {}).get("type"), data["pre_tokenizer"].get("pretokenizers", [])
    if [s["type"] for s in steps] != ["Split", "ByteLevel"]:
        raise KeyError("pre_tokenizer of one Split and ByteLevel")
    if steps[0]["behavior"] != "Isolated" or steps[0].get("invert") or steps[1].get("use_regex", True) or steps[1]["add_prefix_space"]:
        raise ValueError("pre_tokenizer with another behaviour than an isolating Split and a plain ByteLevel is not supported")
    if kind not in (None, "NFC"):
        raise ValueError(f"normalizer {kind} is not supported; supported are none and NFC")
    for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            raise ValueError(f"{key} {model[key]} is not supported")
    ids = [model["vocab"]["".join(m) if isinstance(m, list) else m.replace(" ", "", 1)] for m in model["merges"]]
    if any(a > b for a, b in zip(ids, ids[1:])):
        raise ValueError("the merges are not in the order of their ids, by which tiktoken merges")


def train_bpe(texts, n_merges):
    """Byte-level BPE by word counts: merge the most frequent adjacent pair, n_merges times. Returns [(left, right)]
    as bytes, in order. Ties go to the pair that sorts first, so the result does not depend on hashing."""
    words = Counter()
    for text in texts:
        words.update(PATTERN_RE.findall(text))
    pieces = [[bytes([b]) for b in w.encode()] for w in words]
    counts = list(words.values())
    total, where = Counter(), defaultdict(set)          # pair -> occurrences, pair -> words that hold it
    for i, piece in enumerate(pieces):
        for pair in zip(piece, piece[1:]):
            total[pair] += counts[i]
            where[pair].add(i)
    heap = [(-n, pair) for pair, n in total.items()]    # lazily updated: stale entries are skipped when popped
    heapq.heapify(heap)
    merges = []
    while len(merges) < n_merges and heap:
        n, pair = heapq.heappop(heap)
        if -n != total[pair]:
            continue
        merges.append(pair)
        changed = set()
        for i in where.pop(pair):
            old, new, j = pieces[i], [], 0
            while j < len(old):
                if j + 1 < len(old) and (old[j], old[j + 1]) == pair:
                    new.append(old[j] + old[j + 1])
                    j += 2
                else:
                    new.append(old[j])
                    j += 1
            for p in zip(old, old[1:]):
                total[p] -= counts[i]
                changed.add(p)
            for p in zip(new, new[1:]):
                total[p] += counts[i]
                where[p].add(i)
                changed.add(p)
            pieces[i] = new
        for p in changed:
            if total[p] > 0 and p != pair:
                heapq.heappush(heap, (-total[p], p))
        total[pair] = 0
    return merges


def to_json(merges, specials=SPECIALS):
    """The `tokenizer.json` of these merges: bytes are ids 0-255, merges follow in order, special tokens come last."""
    letters = byte_letters()
    spell = lambda piece: "".join(letters[b] for b in piece)
    vocab = {letters[b]: b for b in range(256)}
    for left, right in merges:
        vocab.setdefault(spell(left + right), len(vocab))
    added = [{"id": len(vocab) + i, "content": s, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": True} for i, s in enumerate(specials)]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
                  "vocab": vocab, "merges": [[spell(a), spell(b)] for a, b in merges]},
    }
