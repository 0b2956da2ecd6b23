"""CDLM (arXiv 2511.19269): a diffusion model that reveals many tokens a step, with an exact KV cache.

A masked-diffusion model reads a prompt and L answer slots, some of which hold the mask token, and predicts
all masked slots at once. One GPT body decodes in three ways, which differ in the keys that a query may see:

    autoregressive  row i sees rows 0..i           one token a forward, 1 row       exact cache
    teacher         every row sees all rows        one token a forward, P + L rows  no cache: all keys change
    student         a row sees the prompt, the     several tokens a forward,        exact cache of prompt and
                    finished and its own block     B rows                           finished blocks

The student starts from the teacher's weights. At an early state of a block it learns the distributions from
which the teacher revealed the block's tokens later, when fewer masks were left.

Glossary: P prompt tokens, L answer slots (`gen_length`), B slots of a block (`block_size`), n answers in a
batch, T prompt and slots, C model width, V vocabulary. rank (n, L): the order in which slots were revealed.
y: state k of a trajectory, in which the slots of rank < k hold their tokens and the others are masked. y*:
the state in which the block that is open in y is complete. U_y: slots masked in y but not in y*. S_y: slots
masked in y*, up to the end of the text's last block. q: the student. The paper's tau is `threshold`.

What differs from the paper:
  - The threshold is 0.99, not 0.9, and if no slot is above it, the first masked slot is revealed, not the
    most confident: see `pick`. Trajectories are recorded most confident slot first, as in the paper.
  - The row of a slot predicts the token after it, as in the autoregressive model that the weights come from
    (and in Dream, 2508.15487, not in LLaDA, 2502.09992). So the row before a block is fed with it once more.
  - L_distill and L_dlm train all blocks of an answer in one forward: see `two_copies`. Some masks of L_dlm
    are in reading order: see `turns`. L_cons leaves out the blocks behind the text. No LoRA: all weights
    learn. The shipped student has L_dlm at weight 1.
"""
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from minispec.core.attention import FullKeys
from minispec.core.gpt import GPT, dense_attend
from minispec.core.kv_cache import KVCache, whole_blocks
from minispec.core.losses import goal_of, kl
from minispec.core.requests import Request, Segment, Round, check_requests, pack
from minispec.core.noise import stream
from minispec.core.verify import check_numbers, scores

GEN_LENGTH = 256
BLOCK_SIZE = 32                  # of a model whose config names none
PADDING = -1                     # in place of a token, left of prompts in a batch of training
THRESHOLD = 0.99                 # the paper decodes at 0.9
ORDERS = ("first", "surest")     # see `pick`
ORDER = "first"                  # the paper: surest
METHODS = {"cdlm": "student", "dlm": "teacher"}          # the command line's names of a Decoder's kinds


def mask_free(logits, mask_id):
    """Logits (..., V) in fp32 in which the mask token, which is never an answer, has no probability."""
    return logits.float().index_fill(-1, torch.tensor([mask_id], device=logits.device), -1e9)


def block_size_of(model):
    """B of the model's training."""
    return model.config.diffusion_block_size or BLOCK_SIZE


# -- attention masks of whole sequences, for training --------------------------------------------------------

def layout(prompt, gen_length, block_size):
    """Positions and block numbers, each (n, width + L), of prompts (n, width), padded on the left, and L
    slots. Blocks: -1 padding, 0 the prompt, then 1, 2, ... of B slots each."""
    width = prompt.shape[1]
    column = torch.arange(width + gen_length, device=prompt.device) - width             # 0: the first slot
    positions = column + (prompt != PADDING).sum(-1, keepdim=True)
    blocks = (column // block_size + 1).clamp(min=0)
    return positions.clamp(min=0), torch.where(positions < 0, -1, blocks)


def bidirectional(blocks):
    """Mask (n, 1, T, T) of the teacher: a row sees all but padding, and itself, so no softmax is empty."""
    own = torch.eye(blocks.shape[1], dtype=torch.bool, device=blocks.device)
    return ((blocks >= 0)[:, None, :] | own)[:, None]


def block_causal(blocks):
    """Mask (n, 1, T, T) of the student: a row sees all of its own block and the blocks before."""
    return bidirectional(blocks) & (blocks[:, None, None, :] <= blocks[:, None, :, None])


def two_copies(blocks, gen_length):
    """Mask (n, 1, T + L, T + L) of prompt, clean answer and noisy answer in one sequence (the training mask
    of BD3-LM, 2503.09573). A row sees its own block in its own copy, and the clean blocks before. So every
    noisy block has the same context as in decoding, and one forward trains them all."""
    noisy = torch.arange(blocks.shape[1] + gen_length, device=blocks.device) >= blocks.shape[1]
    blocks = torch.cat([blocks, blocks[:, -gen_length:]], 1)
    row, key = blocks[:, :, None], blocks[:, None, :]
    sees = (key == row) & (noisy == noisy[:, None]) | (key < row) & ~noisy
    return bidirectional(blocks) & sees[:, None]


def answer_hidden(model, prompt, answer, mask=block_causal):
    """Hidden states (n, L, C) that predict the slots (n, L) after left-padded prompts (n, width)."""
    positions, blocks = layout(prompt, answer.shape[1], block_size_of(model))
    tokens = torch.cat([prompt.clamp(min=0), answer], 1)
    hidden = model(tokens, positions, dense_attend(mask(blocks)))
    return hidden[:, prompt.shape[1] - 1:-1]                     # the row before a slot predicts it


def blocks_hidden(model, prompt, clean, noisy):
    """Hidden states (n, L, C) that predict the noisy slots (n, L), each block after clean blocks."""
    length, block_size = clean.shape[1], block_size_of(model)
    positions, blocks = layout(prompt, length, block_size)
    positions = torch.cat([positions, positions[:, -length:]], 1)
    tokens = torch.cat([prompt.clamp(min=0), clean, noisy], 1)
    hidden = model(tokens, positions, dense_attend(two_copies(blocks, length)))
    # The row before a slot predicts it: a clean one at the start of a block, else a noisy one, L rows on.
    slot = torch.arange(length, device=clean.device)
    return hidden[:, prompt.shape[1] + slot - 1 + length * (slot % block_size > 0)]


# -- masked states, drawn on the CPU: the same on every device. Answers have L / B whole blocks --------------

def mask_rates(n, generator, low=1e-3):
    """n mask rates t in [low, 1], one from each n-th of the interval, so that batches differ little."""
    u = torch.randperm(n, generator=generator) + torch.rand(n, generator=generator)
    return low + (1 - low) * u / n


def text_blocks(answer, eos_id, block_size):
    """How many blocks (n,) of answers (n, L) decoding opens: up to the one with the first end of text."""
    return (answer != eos_id).sum(-1).clamp(max=answer.shape[1] - 1) // block_size + 1


def student_rates(answer, eos_id, block_size, generator):
    """For `two_copies`: mask rates (n, L), one a block, and the slots (n, L) to predict: opened blocks."""
    n, length = answer.shape
    rate = mask_rates(n * length // block_size, generator, 1 / block_size).view(n, -1)
    counted = torch.arange(rate.shape[1]) < text_blocks(answer, eos_id, block_size)[:, None]
    return rate.repeat_interleave(block_size, 1), counted.repeat_interleave(block_size, 1)


def teacher_rates(answer, eos_id, block_size, generator):
    """Mask rates (n, L), and the slots (n, L) to predict. Every second answer is in a state of decoding: one
    block is masked at a rate and to be predicted, the blocks before it are clean, those after it all masks.
    The others have one rate for all slots, ends of text included, which teaches the length of an answer."""
    n, length = answer.shape
    opened = torch.rand(n, generator=generator) * text_blocks(answer, eos_id, block_size)
    rate = mask_rates(n, generator, 1 / block_size)[:, None]
    block, of_slot = opened.long()[:, None], torch.arange(length) // block_size
    counted = of_slot == block
    rate = torch.where(counted, rate, (of_slot > block).float())
    rate[1::2] = mask_rates(n // 2, generator)[:, None]
    counted[1::2] = True
    return rate, counted


def turns(shape, block_size, generator, in_order=0.0):
    """The turn (n, L) of each slot: while the mask rate falls from 1 to 0, the slot is masked as long as its
    turn is below the rate. Turns are uniform random numbers, but in a share `in_order` of the blocks they
    roughly fall from left to right, because decoding fills a block so, and random masks hardly ever do."""
    turn = torch.rand(shape, generator=generator).unflatten(1, (-1, block_size))         # (n, L / B, B)
    loose, ordered = torch.rand(2, *turn.shape[:2], 1, generator=generator)
    overtake = 0.75 * block_size * loose ** 2            # places by which a slot may come too early
    place = torch.arange(block_size) + (1 + overtake) * turn
    left_to_right = 1 - place / (block_size + overtake)
    return torch.where(ordered < in_order, left_to_right, turn).flatten(1)


def draw_states(live, length, block_size, generator):
    """A state k (n, L / B) for each block of trajectories with `live` (n,) decoded slots, uniform over the
    block's steps. A block after these slots was never opened; its state is the complete one."""
    first = torch.arange(0, length, block_size)
    step = (torch.rand(len(live), len(first), generator=generator) * block_size).long()
    return first + torch.where(first < live.cpu()[:, None], step, block_size)


# -- the three losses ----------------------------------------------------------------------------------------

def distillation_loss(model, teacher_head, batch, k, mask_id, reverse=False):
    """L_distill: KL(p_teacher || q(y)), the mean over the slots U_y of a block, then over blocks. y: state k
    (n, L / B) of every block, all blocks at once, so U_y is every masked slot. p_teacher: by the teacher's
    head (V, C) from the hidden row that revealed the slot. So the student learns to decide as early as y."""
    tokens, block_size = batch["tokens"], block_size_of(model)
    k = k.to(tokens.device).repeat_interleave(block_size, 1)             # of each slot's block
    u_y = batch["rank"] >= k
    hidden = blocks_hidden(model, batch["prompt"], tokens, tokens.masked_fill(u_y, mask_id))
    q = mask_free(model.logits(hidden[u_y]), mask_id)
    with torch.autocast(tokens.device.type, enabled=False):
        of_teacher = batch["hidden"][u_y].to(teacher_head.dtype) @ teacher_head.T
    p_teacher = goal_of(mask_free(of_teacher, mask_id))
    masked = block_size - k % block_size                         # masked slots of each slot's block
    return (kl(p_teacher, q, reverse) / masked[u_y]).sum() / (batch["live"] // block_size).sum()


def consistency_loss(model, batch, mask_id, generator, reverse=False):
    """L_cons: KL(stop(q(y*)) || q(y)), the mean over the slots S_y of an answer, then over answers. At y
    the student learns to predict the later blocks, S_y, as it does at y*, with the open block complete."""
    tokens, rank, live = batch["tokens"], batch["rank"], batch["live"][:, None]
    block_size = block_size_of(model)
    # The numbers (n, 1) of the states y and y*, and the slots that are masked in both.
    k = (torch.rand(len(tokens), 1, generator=generator).to(live.device) * live).long()
    k_star = (k // block_size + 1) * block_size
    s_y = (rank >= k_star) & (rank < live)

    def q(k):
        y = tokens.masked_fill(rank >= k, mask_id)
        return mask_free(model.logits(answer_hidden(model, batch["prompt"], y)[s_y]), mask_id)

    with torch.no_grad():
        goal = goal_of(q(k_star))
    size = s_y.sum(-1, keepdim=True).expand_as(s_y)
    return (kl(goal, q(k), reverse) / size[s_y]).sum() / len(tokens)


def dlm_loss(model, batch, mask_id, blockwise):
    """L_dlm of reference answers: the sum of cross-entropy / t over the slots that are `masked` and `counted`
    (n, L), divided by the number of counted slots; the mean over answers. t is `rate` (n, L), the mean share
    of random masks; masks in order (see `turns`) have a smaller share at low rates. With all slots counted,
    one t, and random masks, this bounds an answer's negative log-likelihood per slot.
    blockwise: the student's attention, all blocks at once; else the teacher's."""
    answer = batch["answer"]
    where = batch["masked"] & batch["counted"]
    noisy = answer.masked_fill(batch["masked"], mask_id)
    if blockwise:
        hidden = blocks_hidden(model, batch["prompt"], answer, noisy)
    else:
        hidden = answer_hidden(model, batch["prompt"], noisy, bidirectional)
    logits = mask_free(model.logits(hidden[where]), mask_id)
    loss = F.cross_entropy(logits, answer[where], reduction="none")
    share = batch["rate"] * batch["counted"].sum(-1, keepdim=True)
    return (loss / share[where]).sum() / len(answer)


# -- an answer and its trajectory ----------------------------------------------------------------------------

@dataclass
class Answer:
    """The answer of a request while it is filled in. tokens: n_prompt of the prompt, then the slots. [first,
    last): the positions of the open block, `steps` steps old. n_cached: positions with final cached keys.
    revealed: slots in the order of the reveals. hidden: if recorded, each step's predicting rows (.., C)."""
    request: Request
    mask_id: int
    block_size: int
    cache: KVCache
    blocks: object = None            # its Allocation in the cache

    def __post_init__(self):
        self.n_prompt = len(self.request.tokens)
        self.tokens = self.request.tokens + [self.mask_id] * self.request.remaining
        self.revealed, self.hidden = [], []
        self.n_cached = 0
        self.last = self.n_prompt
        self.open_block()

    def open_block(self):
        self.first = self.last
        self.last = min(self.first + self.block_size, len(self.tokens))
        self.steps = 0

    def masked(self):
        """Positions of the open block that are still masked."""
        return [i for i in range(self.first, self.last) if self.tokens[i] == self.mask_id]


def trajectory(a, eos_id):
    """How a recording decoder filled in an answer: its tokens (L,), their rank (L,), the number of decoded
    slots `live`, and hidden (L, C) in fp16, the head's input when it predicted each token. Behind the block
    that ends the text, tokens are ends of text, rank is the slot's number, and hidden is 0."""
    tokens = torch.tensor(a.tokens[a.n_prompt:])
    tokens[tokens == a.mask_id] = eos_id
    rows = torch.cat(a.hidden).cpu()
    rank = torch.arange(len(tokens))
    rank[a.revealed] = torch.arange(len(rows))
    hidden = rows.new_zeros(len(tokens), rows.shape[1])
    hidden[a.revealed] = rows
    return {"tokens": tokens, "rank": rank, "live": torch.tensor(len(rows)), "hidden": hidden}


# -- decoding: one loop for student, teacher and dual cache --------------------------------------------------

def choose(logits, answers, masked):
    """A token for each row of logits (n, V), and its probability at temperature 1. masked: for each answer,
    the positions of its rows. A sampling request has the same noise for a position in every step."""
    tokens = []
    for a, positions, rows in zip(answers, masked, logits.split(list(map(len, masked)))):
        how = a.request.sampling
        tokens.append(scores(rows, how, [stream(how.seed)] * len(rows), positions).argmax(-1))
    tokens = torch.cat(tokens)
    confidence = logits.softmax(-1).gather(-1, tokens[:, None])[:, 0]
    return tokens.tolist(), confidence.tolist()          # this waits for a GPU


def pick(confidence, n=1, threshold=None, order=ORDER):
    """The masked slots to reveal, as indices into `confidence`: all above the threshold, or one if none is;
    without a threshold, n. The order "surest" begins with the most confident slot, "first" with the leftmost.
    Behind an open choice, such as the start of a sentence, slots are predicted from a mixture of all
    continuations, and the most confident of them is not reliable."""
    indices = list(range(len(confidence)))
    if order == "surest":
        indices.sort(key=lambda i: -confidence[i])               # ties to the left
    if threshold is None:
        return indices[:n]
    return [i for i in indices if confidence[i] > threshold] or indices[:1]


@dataclass
class Decoder:
    """Answers requests block by block, with the engine's `stream` and `generate`. kind:
        student  feeds the open block, and once the finished block before it. The cache of the rest is exact.
        teacher  feeds the prompt and all slots, every time.
        dual     the teacher with stale keys: one whole forward when a block opens, then the block alone,
                 against the cached keys of all positions (Fast-dLLM, 2505.22618). Approximate.
    threshold: reveal all slots of higher confidence. None: `steps_a_block` forwards a block (default: a
    token each). order: see `pick`. record: for `trajectory`, keep hidden rows and complete every block.
    """
    model: GPT
    mask_id: int
    kind: str = "student"
    threshold: float = None
    steps_a_block: int = None
    order: str = ORDER
    batch_size: int = 1
    record: bool = False
    block_size: int = None

    def __post_init__(self):
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold {self.threshold} is out of range; "
                             "allowed is 0 (a block per step) to 1 (a token per step)")
        self.block_size = self.block_size or block_size_of(self.model)
        self.seconds = dict.fromkeys(("draft", "verify", "prefill", "other"), 0.0)
        self.counts = dict.fromkeys(("forwards", "tokens_fed"), 0)

    def generate(self, requests):
        """Answer the requests and return their generations, in order."""
        list(self.stream(requests))
        return [r.generation for r in requests]

    @torch.inference_mode()
    def stream(self, requests):
        """Answer requests, in as many slots as tokens remain. Yields (request, new tokens before the first
        mask). ValueError where a request does not fit the context."""
        check_requests(requests, self.model.config)
        # A cache for this stream alone, because another one may be open.
        largest = whole_blocks(max((r.longest for r in requests), default=0))
        n_slots = largest * min(self.batch_size, len(requests))
        cache = KVCache(self.model.config, n_slots, self.model.dtype, self.model.device)
        for r in requests:
            r.engine, r.state = self, Answer(r, self.mask_id, self.block_size, cache)
        left = [r.state for r in requests if not r.finished]
        try:
            while left:
                started = time.perf_counter()
                # 1. Fill the batch.
                active = left[:self.batch_size]
                for a in active:
                    a.blocks = a.blocks or cache.open(len(a.tokens))
                # 2. One forward predicts the masked slots of all open blocks; reveal some of them.
                hidden, logits, seconds = self.forward(active)
                masked, end = [a.masked() for a in active], 0
                tokens, confidence = choose(logits, active, masked)
                for a, positions in zip(active, masked):
                    start, end = end, end + len(positions)
                    self.reveal(a, positions, hidden[start:end], tokens[start:end], confidence[start:end])
                # 3. Hand on the tokens that became final.
                committed = [(a.request, self.commit(a, seconds / len(active))) for a in active]
                self.seconds["other"] += time.perf_counter() - started - seconds
                yield from committed
                # 4. Finished answers make room; the caller may have cancelled others.
                for a in active:
                    if a.request.finished:
                        cache.close(a.blocks)
                left = [a for a in left if not a.request.finished]
        finally:
            for r in requests:
                r.engine = None

    def spans(self, a):
        """[(first position fed, end, end of the keys that these rows see)]. The kinds differ only here."""
        everything = len(a.tokens)
        if self.kind == "teacher" or (self.kind == "dual" and a.steps == 0):
            return [(0, everything, everything)]
        if self.kind == "dual":
            return [(a.first - 1, a.last, everything)]
        # A finished block's cached keys are of its last step, in which it still had masks. Feed it again,
        # clean, with the next block (at first: the prompt). The open block's keys are overwritten each step.
        return [(min(a.n_cached, a.first - 1), a.first, a.first), (a.first, a.last, a.last)]

    def forward(self, active):
        """Hidden states (N, C) and logits (N, V) of the masked slots of all open blocks, and the seconds."""
        started = time.perf_counter()
        segments, rows, n = [], [], 0
        for a in active:
            for start, end, seen in self.spans(a):
                sees = torch.ones(end - start, seen, dtype=torch.bool)   # not causal
                keys = FullKeys(a.cache, a.blocks, start, end - start, tail=sees)
                # Kinds as in the engine: clean rows alone, or those of a block.
                kind = "prefill" if end == a.first else "verify"
                segments.append(Segment(a.request, a.tokens[start:end], start, keys, kind))
                # The row before a slot predicts it; before a student's first slot, its last clean row.
                if kind == "verify":
                    rows += [n + position - 1 - start for position in a.masked()]
                n += end - start
        x = pack(segments, self.model.device)
        hidden = self.model(x.tokens, x.positions, x.attend)[rows]
        logits = mask_free(self.model.logits(hidden), self.mask_id)
        check_numbers(logits)                            # this waits for a GPU
        seconds = time.perf_counter() - started
        for s in segments:
            self.seconds[s.kind] += seconds * len(s.tokens) / n
        self.counts["forwards"] += 1                     # one for the whole batch
        self.counts["tokens_fed"] += n
        return hidden, logits, seconds

    def reveal(self, a, masked, hidden, tokens, confidence):
        """One step of an open block: put tokens into some of its masked slots, given those of all. Returns
        the indices of these slots."""
        # Without a threshold, the block's slots are spread over its steps, early steps first.
        share, rest = divmod(a.last - a.first, self.steps_a_block or a.last - a.first)
        picked = pick(confidence, share + (a.steps < rest), self.threshold, self.order)
        for i in picked:
            a.tokens[masked[i]] = tokens[i]
            a.revealed.append(masked[i] - a.n_prompt)
        if self.record:
            a.hidden.append(hidden[picked].half())
        # The tokens before the block were fed clean, so their keys are final.
        a.steps += 1
        a.n_cached = a.first
        return picked

    def commit(self, a, seconds):
        """Hand on the tokens that are final, up to the first mask or end of text; then end the answer, or
        open its next block."""
        g, masked = a.request.generation, a.masked()
        gap = masked[0] if masked else a.last
        ends = (i for i in range(a.n_prompt, a.last) if a.tokens[i] in a.request.stop_ids)
        stop = next(ends, len(a.tokens))
        kept = a.tokens[len(a.request.tokens):min(gap, stop + 1)]
        g.rounds.append(Round(len(g.token_ids), 0, 0, len(kept), self.kind, 0.0, seconds))
        g.token_ids += kept
        g.who += ["plain"] * len(kept)
        a.request.tokens += kept
        # An end of text ends the answer only when no mask is left before it.
        if stop < gap and not (masked and self.record):
            g.finish = "stop"
        elif not masked and a.last == len(a.tokens):
            g.finish = "length"
        elif not masked:
            a.open_block()
        return kept
