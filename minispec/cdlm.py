"""CDLM (arXiv 2511.19269): a diffusion model that reveals many tokens a step, with an exact KV cache.

A masked-diffusion model reads a prompt and L answer slots. Some slots hold the mask token, and all masked
slots are predicted at once. One GPT body serves three ways of decoding. They differ in which keys a query may
see:

    autoregressive  row i sees rows 0..i           one token a forward, 1 row       exact cache
    teacher         every row sees all rows        one token a forward, P + L rows  no cache: all keys change
    student         a row sees the prompt, the     several tokens a forward,        exact cache of prompt and
                    finished and its own block     B rows                           finished blocks

The student starts from the teacher's weights and learns from what the teacher did: from an early state of a
block it predicts what the teacher predicted at the later, better informed step at which it revealed each
token.

Glossary: P prompt tokens, L answer slots (`gen_length`), B slots of a block (`BLOCK_SIZE`), n answers in a
batch, C model width, V vocabulary. rank (n, L): the order in which slots were revealed. State k of a
trajectory (y in the paper): the slots of rank < k hold their tokens, the others are masked. The paper's tau
is `threshold`.

What differs from the paper:
  - If no slot is above the threshold, the first masked slot is revealed, not the most confident: see `pick`.
  - The row of a slot predicts the token behind it, as in the autoregressive model that the weights come from
    (and in Dream; in LLaDA it predicts its own slot). The row before a block predicts its first slot, so it
    is fed once more with the block.
  - All blocks of an answer are trained in one forward: see `two_copies`.
  - The shipped student learned consistency inside the block; train_cdlm.py has it as printed.
"""
import time
from dataclasses import dataclass

import torch

from minispec.core.attention import FullKeys, dense_attend
from minispec.core.engine import Engine
from minispec.core.gpt import GPT
from minispec.core.kv_cache import KVCache, whole_blocks
from minispec.core.requests import Request, Segment, Step, check_requests, pack
from minispec.core.noise import stream
from minispec.core.verify import scores

GEN_LENGTH = 256
BLOCK_SIZE = 32
PADDING = -1                     # in place of a token, left of prompts in a batch of training
THRESHOLD = 0.99                 # the paper decodes at 0.9
ORDERS = ("first", "surest")
ORDER = "first"                  # the paper: surest
METHODS = {"cdlm": ("student", "checkpoints/cdlm/student"), "dlm": ("teacher", "checkpoints/cdlm/teacher")}


def mask_free(logits, mask_id):
    """Logits (..., V) in fp32 in which the mask token, which is never an answer, has no probability."""
    return logits.float().index_fill(-1, torch.tensor([mask_id], device=logits.device), -1e9)


# -- decoding: one loop for student, teacher and dual cache --------------------------------------------------

@dataclass
class Answer:
    """The answer of a request while it is filled in.

    tokens: prompt and slots. [first, last): the positions of the open block. n_cached: positions whose cached
    keys are final. rank (L,): when each slot was revealed, or its place. hidden: {slot: (C,)}, the rows from
    which they were, if recorded. """
    request: Request
    mask_id: int

    def __post_init__(self):
        slots = self.request.max_new_tokens
        self.prompt = len(self.request.tokens)
        self.tokens = self.request.tokens + [self.mask_id] * slots
        self.rank = list(range(slots))
        self.hidden = {}
        self.n_revealed = 0
        self.n_cached = 0
        self.last = self.prompt
        self.open_block()

    def open_block(self):
        self.first = self.last
        self.last = min(self.first + BLOCK_SIZE, len(self.tokens))
        self.steps = 0

    def masked(self):
        """Positions of the open block that are still masked."""
        return [i for i in range(self.first, self.last) if self.tokens[i] == self.mask_id]

    def reveal(self, position, token):
        self.tokens[position] = token
        self.rank[position - self.prompt] = self.n_revealed
        self.n_revealed += 1


def choose(logits, request, slots):
    """A token for each row of logits (n, V), which are of these slots, and its probability, which is always
    that of temperature 1. A request that samples has the same noise for a slot in every step."""
    streams = [stream(request.sampling.seed)] * len(slots)
    tokens = scores(logits, request.sampling, streams, slots).argmax(-1)
    confidence = logits.softmax(-1).gather(-1, tokens[:, None])[:, 0]
    return tokens.tolist(), confidence.tolist()


def pick(confidence, n=1, threshold=None, order=ORDER):
    """Which masked slots to reveal, by index into `confidence`: all above the threshold; if there are none,
    or without a threshold, the first n (1 with a threshold) in `order`: the most confident ("surest"), or the
    leftmost ("first").

    A choice that is left open, such as how to begin a sentence, leaves everything behind it a mixture of what
    may follow, and the most confident slot of a mixture is not reliable. Made first, the choice makes the
    rest certain."""
    slots = list(range(len(confidence)))
    if order == "surest":
        slots.sort(key=lambda i: -confidence[i])                 # ties to the left
    # Without a threshold, a fixed number a step; with one, all that are sure, at least one.
    if threshold is None:
        return slots[:n]
    return [i for i in slots if confidence[i] > threshold] or slots[:1]


@dataclass
class Decoder:
    """Answers requests block by block; `stream` and `generate` are the engine's, but a request that was begun
    cannot go on. kind:

        student  feeds the open block, and once the block before it, clean. The cache of the rest is exact.
        teacher  feeds the prompt and all slots, every time.
        dual     the teacher with stale keys: one whole forward when a block opens, then the block alone,
                 against the cached keys of everything, masked slots behind it included (Fast-dLLM's dual
                 cache). Approximate.

    threshold: reveal all slots of higher confidence. None: `steps_a_block` forwards a block (default: a
    token each). order: see `pick`. record: keep the hidden rows, and complete every block, for `collect`.
    on_step(answer, revealed positions) is called after every step. """
    model: GPT
    mask_id: int
    kind: str = "student"
    threshold: float = None
    steps_a_block: int = None
    order: str = ORDER
    batch_size: int = 1
    record: bool = False
    on_step = None
    generate = Engine.generate

    def __post_init__(self):
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold {self.threshold} is out of range; "
                             "allowed is 0 (a block per step) to 1 (a token per step)")
        self.seconds = {"draft": 0.0, "verify": 0.0, "prefill": 0.0, "other": 0.0}   # prefill: all clean rows
        self.counts = {"forwards": 0, "tokens_fed": 0, "tokens_kept": 0}       # one forward for a whole batch

    @torch.inference_mode()
    def stream(self, requests):
        """Answer the requests, `max_new_tokens` slots each. Yields (request, tokens that are final up to the
        first mask). Raises ValueError where a request does not fit the context."""
        left = self._prepare(requests)
        while True:
            started = time.perf_counter()
            # 0. Finished answers make room; the caller may have cancelled others.
            for a in left:
                if a.request.finished and a.request.blocks:
                    self.cache.close(a.request.blocks)
            left = [a for a in left if not a.request.finished]
            if not left:
                return
            # 1. Fill the batch.
            active = left[:self.batch_size]
            for a in active:
                a.request.blocks = a.request.blocks or self.cache.open(len(a.tokens))
            # 2. One forward predicts the masked slots of all open blocks; reveal some of them.
            hidden, logits, seconds = self.forward(active)
            committed = self.settle(active, hidden, logits, seconds / len(active))
            self.seconds["other"] += time.perf_counter() - started - seconds
            yield from committed

    def _prepare(self, requests):
        check_requests(requests, self.model.config)
        for r in requests:
            r.state = Answer(r, self.mask_id)
            r.blocks = None
        # A cache for this stream alone: one that was left in the middle cannot be in the way.
        longest = max((r.longest for r in requests), default=0)
        n_slots = whole_blocks(longest) * min(self.batch_size, len(requests))
        self.cache = KVCache(self.model.config, n_slots, self.model.dtype, self.model.device)
        return [r.state for r in requests]

    def window(self, a):
        """The segments that this answer feeds now: the only place in which student, teacher and dual cache
        differ."""
        everything = len(a.tokens)
        if self.kind == "teacher" or (self.kind == "dual" and a.steps == 0):
            return [self._segment(a, 0, everything, everything)]
        if self.kind == "dual":
            return [self._segment(a, a.first - 1, a.last, everything)]
        # When a block opens, the cached keys of the finished block are those of its last step, in which it
        # still had masks. Feed it again, clean, in the same forward (at first: the prompt). Clean keys stay.
        # Those of the open block are overwritten by the next forward: a token that this step reveals was
        # itself still a mask when its key was computed.
        start = min(a.n_cached, a.first - 1)
        return [self._segment(a, start, a.first, a.first, "prefill"),
                self._segment(a, a.first, a.last, a.last)]

    def _segment(self, a, start, end, seen, kind="verify"):
        # All rows see the same positions, those behind them too.
        sees = torch.ones(end - start, seen, dtype=torch.bool)
        keys = FullKeys(self.cache, a.request.blocks, start, end - start, tail=sees)
        return Segment(a.request, a.tokens[start:end], start, keys, kind)

    def forward(self, active):
        """One packed pass. Returns hidden states (N, C) and logits (N, V) of the masked slots of all open
        blocks, in the order of `active`, and the seconds that it took."""
        started = time.perf_counter()
        segments = [s for a in active for s in self.window(a)]
        x = pack(segments, self.model.device)
        # The row before a slot predicts it.
        rows = []
        for s, (first, _, _) in zip(segments, x.segments):
            if s.kind == "verify":
                rows += [first + slot - 1 - s.start for slot in s.request.state.masked()]
        hidden = self.model(x.tokens, x.positions, x.attend)[rows]
        logits = mask_free(self.model.logits(hidden), self.mask_id)
        # What it took: clean rows are prefill, the others find tokens.
        if hidden.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        for s in segments:
            self.seconds[s.kind] += seconds * len(s.tokens) / len(x.tokens)
        self.counts["forwards"] += 1
        self.counts["tokens_fed"] += len(x.tokens)
        return hidden, logits, seconds

    def settle(self, active, hidden, logits, seconds):
        """Reveal slots of every open block and commit what became final. Returns [(request, tokens)]."""
        counts = [len(a.masked()) for a in active]
        committed = []
        for a, hidden, logits in zip(active, hidden.split(counts), logits.split(counts)):
            masked = a.masked()
            tokens, confidence = choose(logits, a.request, masked)
            # Without a threshold, the block's slots are spread over its steps, early steps first.
            size = a.last - a.first
            share, rest = divmod(size, self.steps_a_block or size)
            picked = pick(confidence, share + (a.steps < rest), self.threshold, self.order)
            for i in picked:
                a.reveal(masked[i], tokens[i])
                if self.record:
                    a.hidden[masked[i] - a.prompt] = hidden[i].to("cpu", torch.float16, copy=True)
            # What lies before the block was fed clean, so its keys are final.
            a.steps += 1
            a.n_cached = a.first
            if self.on_step:
                self.on_step(a, [masked[i] for i in picked])
            committed.append((a.request, self._commit(a, seconds)))
        return committed

    def _commit(self, a, seconds):
        """Hand on what is final, up to the first mask or end of text. Then see if the block or the answer is
        done."""
        g, eos = a.request.generation, a.request.stop_ids
        done = len(a.request.tokens)
        # Slots are revealed in any order; what is handed on is the text up to the first gap.
        stop = next((i for i in range(a.prompt, a.last) if a.tokens[i] in eos), len(a.tokens))
        mask = next((i for i in range(done, a.last) if a.tokens[i] == self.mask_id), a.last)
        kept = a.tokens[done:min(mask, stop + 1)]
        g.steps.append(Step(len(g.token_ids), 0, 0, len(kept), self.kind, 0.0, seconds))
        g.token_ids += kept
        g.who += ["plain"] * len(kept)
        a.request.tokens += kept
        self.counts["tokens_kept"] += len(kept)
        # An end of text ends the answer only when no mask is left before it.
        complete = not a.masked()
        if stop < mask and (complete or not self.record):
            g.finish = "stop"
        elif complete and a.last == len(a.tokens):
            g.finish = "length"
        elif complete:
            a.open_block()
        return kept


def mask_id_of(tokenizer, where):
    if "<|mask|>" not in tokenizer.special:
        raise ValueError(f"{where}: the tokenizer has no <|mask|>")
    return tokenizer.special["<|mask|>"]


# -- masks of whole sequences, for training ------------------------------------------------------------------
# A batch is padded on the left: answers lie in the last L columns, whatever the lengths of the prompts are.

def layout(prompt, gen_length):
    """Positions and block numbers, each (n, width + L), of prompts (n, width). Blocks: -1 padding, 0 the
    prompt, then 1, 2, ... of B slots each."""
    width = prompt.shape[1]
    column = torch.arange(width + gen_length, device=prompt.device) - width             # 0: the first slot
    positions = column + (prompt != PADDING).sum(-1, keepdim=True)
    blocks = (column // BLOCK_SIZE + 1).clamp(min=0)
    return positions.clamp(min=0), torch.where(positions < 0, -1, blocks)


def bidirectional(blocks):
    """Mask (n, 1, T, T) of the teacher: every row sees all but padding. Padding sees itself: no row may be
    empty."""
    own = torch.eye(blocks.shape[1], dtype=torch.bool, device=blocks.device)
    return ((blocks >= 0)[:, None, :] | own)[:, None]


def block_causal(blocks):
    """Mask (n, 1, T, T) of the student: a row sees all of its own block and the blocks before."""
    return bidirectional(blocks) & (blocks[:, None, None, :] <= blocks[:, None, :, None])


def two_copies(blocks, gen_length):
    """Mask (n, 1, T + L, T + L) of prompt, clean answer and noisy answer in one sequence (the training mask
    of BD3-LM). A clean row sees what a student's row does. A noisy row of block b sees the clean blocks
    before b and the noisy block b. So every block has before it what it has in decoding, and one forward
    trains them all."""
    noisy = torch.arange(blocks.shape[1] + gen_length, device=blocks.device) >= blocks.shape[1]
    blocks = torch.cat([blocks, blocks[:, -gen_length:]], 1)
    row, key = blocks[:, :, None], blocks[:, None, :]
    noisy_sees = noisy[:, None] & (key == row)
    clean_sees = key < row + (~noisy)[:, None]                   # a clean row sees its own block too
    return bidirectional(blocks) & torch.where(noisy, noisy_sees, clean_sees)[:, None]


def answer_hidden(model, prompt, answer, mask=block_causal):
    """Hidden states (n, L, C) that predict the slots (n, L) behind left-padded prompts (n, width)."""
    positions, blocks = layout(prompt, answer.shape[1])
    tokens = torch.cat([prompt.clamp(min=0), answer], 1)
    hidden = model(tokens, positions, dense_attend(mask(blocks)))
    return hidden[:, prompt.shape[1] - 1:-1]                     # the row before a slot predicts it


def blocks_hidden(model, prompt, clean, noisy):
    """Hidden states (n, L, C) from which a block-causal model predicts the noisy slots (n, L), each block
    behind clean ones. A clean row predicts a block's first slot, as in decoding."""
    length = clean.shape[1]
    positions, blocks = layout(prompt, length)
    positions = torch.cat([positions, positions[:, -length:]], 1)
    tokens = torch.cat([prompt.clamp(min=0), clean, noisy], 1)
    hidden = model(tokens, positions, dense_attend(two_copies(blocks, length)))
    slot = torch.arange(length, device=clean.device)
    return hidden[:, prompt.shape[1] + slot - 1 + length * (slot % BLOCK_SIZE > 0)]
