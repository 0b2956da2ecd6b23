"""A byte-level BPE vocabulary of our own: merges counted on training text, written as a `tokenizer.json`.

256 bytes, 1,785 merges and 7 special tokens make the shipped vocabulary of 2,048. Digits are always single
tokens, because arithmetic is learned digit by digit.
"""
import heapq
import re
from collections import Counter, defaultdict

from minispec.data.tokenizer import byte_letters

SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|mask|>", "<|prompt|>", "<|think|>", "<|answer|>")
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The same split for counting words while training; Python's `re` has no \p{..} classes.
PATTERN_RE = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?[^\W\d_]+|\d| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")


def train_bpe(texts, n_merges):
    """Byte-level BPE by word counts: merge the most frequent adjacent pair, n_merges times.

    Returns [(left, right)] as bytes, in order. Ties go to the pair that sorts first, so the result does not
    depend on hashing."""
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
    heap = [(-n, pair) for pair, n in total.items()]    # lazily updated: stale entries are skipped
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
    """The `tokenizer.json` of these merges: ids 0-255 are bytes, then come merges, then special tokens."""
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
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                  "ignore_merges": True,
                  "vocab": vocab, "merges": [[spell(a), spell(b)] for a, b in merges]},
    }
