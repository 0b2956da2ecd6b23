"""CDLM (2511.19269): a diffusion language model that finalises many tokens a step and still has an exact key/value cache.

A masked-diffusion model reads the prompt and L answer slots, some of which hold the mask token, and predicts all masked
slots at once. One GPT body serves three ways of decoding; what differs is which keys a query may see:

    autoregressive   row i sees 0..i          a token a forward, one row each          exact cache
    teacher          every row sees all       a token a forward, all P + L rows each   no cache: every key is stale after a reveal
    student          a row sees the prompt, the finished blocks and all of its own     exact cache for prompt and finished blocks
                     block of B slots          several tokens a forward, B rows each

The student is the teacher's weights, trained further on the teacher's own trajectories: from a state early in a block to
predict what the teacher predicted for each token at the later, better informed step at which it finalised it.

This file decodes: one loop for student, teacher and the baselines. What they are trained with is in cdlm_losses.py.

Notation: P prompt tokens, L answer slots (`gen_length`), B slots a block (n in shapes: the batch), rank (L,) the order in
which slots were finalised. State k of a trajectory: the slots of rank < k hold their tokens, all others are masked.
The row of a slot predicts the token behind it, as in the autoregressive model that the weights come from (`config.shift`): what
a block's first slot will be, the last finished row says, so that row is fed with the block once more. Without shift a row
predicts its own slot; then even the first slot profits from what is revealed behind it, but the model learns more slowly.
"""
import random
import shutil
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from minispec.tools import checkpoints
from minispec.data import tasks
from minispec.core.attention import group_rows, packed_attend, ungroup_rows
from minispec.core.engine import Step
from minispec.core.kv_cache import KVCache
from minispec.data.tokenizer import Tokenizer

GEN_LENGTH, BLOCK_SIZE, THRESHOLD, LONGEST_PROMPT = 256, 32, 0.99, 160       # the paper decodes at 0.9
KINDS = ("student", "teacher", "dual")
COMMITS = ("fused", "separate")
STOPS = ("at_once", "block", "never")
ORDERS = ("first", "surest")
ORDER = "first"                                                                # the papers: surest


# -- decoding: one loop for student, teacher and the baselines ---------------------------------------------------------

def mask_free(logits, mask_id):
    """Logits in fp32, in which the mask token, which is never an answer, has no probability."""
    return logits.float().index_fill(-1, torch.tensor([mask_id], device=logits.device), -1e9)


class BlockKeys:
    """Keys of n new rows at positions start.. of a request whose slots begin at `base`. The first n_clean rows are final and
    their keys are there to stay; they see everything up to the last of them. The other rows, of the open block, see
    the first `seen` positions. Their keys are overwritten by the next forward: they were computed beside masks, and a
    token revealed in this step was itself still a mask when its key was written."""
    pool = None

    def __init__(self, cache, base, start, n_clean, n, seen):
        self.cache, self.new = cache, slice(base + start, base + start + n)
        self.parts = [(0, n_clean, slice(base, base + start + n_clean))] if n_clean else []
        self.parts += [(n_clean, n, slice(base, base + seen))] if n > n_clean else []

    def attend(self, layer, q, k, v):
        """q (n, H, D), k and v (n, G, D) -> (n, H, D)."""
        keys, values = self.cache.layers[layer]                                # (G, n_slots, D)
        keys[:, self.new], values[:, self.new] = k.transpose(0, 1), v.transpose(0, 1)
        out = [ungroup_rows(F.scaled_dot_product_attention(group_rows(q[a:b], k.shape[1])[None], keys[None, :, see], values[None, :, see])[0], b - a)
               for a, b, see in self.parts]
        return torch.cat(out) if len(out) > 1 else out[0]


class Answer:
    """The answer of a request while it is filled in. tokens: prompt and slots; [first, last): the open block; n_cached: clean
    positions in the cache. rank (L,) and hidden, {slot: (C,)}, tell when and from what each slot was finalised.
    given: {slot: token} that stand from the beginning (infilling)."""

    def __init__(self, request, mask_id, block_size, given=None):
        self.request, self.mask_id, self.prompt = request, mask_id, len(request.tokens)
        self.tokens = request.tokens + [(given or {}).get(i, mask_id) for i in range(request.max_new_tokens)]
        self.rank, self.hidden, self.n_revealed, self.n_cached = [None] * request.max_new_tokens, {}, 0, 0
        self.last, self.block_size = self.prompt, block_size
        self.open_block()

    def open_block(self):
        self.first, self.last = self.last, min(self.last + self.block_size, len(self.tokens))
        self.steps, self.at_opening = 0, len(self.masked())

    def masked(self):
        """Positions of the open block that are still masked."""
        return [i for i in range(self.first, self.last) if self.tokens[i] == self.mask_id]


@dataclass
class Window:
    """What one answer feeds in one forward: positions [start, end), of which the first n_clean are final; `seen` keys."""
    answer: Answer
    start: int
    n_clean: int
    end: int
    seen: int


def choose(logits, answers):
    """A token for each row of logits (N, V), and its probability. answers: whose masked slots the rows are, in order. At a
    temperature, Gumbel noise from the request's own random stream draws the token; confidence is that of temperature 1."""
    noisy, row = logits, 0
    for a in answers:
        n, temperature = len(a.masked()), a.request.sampling.temperature
        if temperature > 0 and n:
            noisy = noisy.double()                     # fp32 noise loses the tail
            u = torch.rand(n, logits.shape[-1], dtype=torch.float64, generator=a.request.rng).to(logits.device)
            noisy[row:row + n] -= temperature * (-u.clamp(min=1e-300).log()).log()
        row += n
    tokens = noisy.argmax(-1)
    confidence = logits.softmax(-1).gather(-1, tokens[:, None])[:, 0]
    return tokens.tolist(), confidence.tolist()


def pick(confidence, n=1, threshold=None, order=ORDER):
    """Which of the masked slots to reveal, by index into `confidence`: all above the threshold, or else, so that every step makes
    progress, one; without a threshold n. These are the surest, ties to the left, or, in the order "first", the leftmost."""
    best = sorted(range(len(confidence)), key=lambda i: -confidence[i] if order == "surest" else i)
    if threshold is None:
        return best[:n]
    return [i for i in best if confidence[i] > threshold] or best[:1]


class Decoder:
    """Answers requests block by block; the same `stream` and `generate` as the engine's. kind:

        student  feeds the open block, and once the block before it, clean; everything before comes from the cache, exactly
        teacher  feeds prompt and all slots, every time
        dual     the teacher with stale keys: one whole forward when a block opens, then the block alone against the cached keys
                 of everything, masked slots behind it included (Fast-dLLM's dual cache). Approximate.

    threshold: reveal all slots of higher confidence; None: `steps` forwards a block (default: as many as slots, a token each).
    order: what a step reveals where nothing is above the threshold, or none is given: the "surest" slot, as in the papers, or
    the "first" one. A choice that is left open, such as how to begin a sentence, leaves all behind it a mixture of what may follow;
    the surest of that is not sure. Made first, it makes the rest sure.
    commit: clean keys of a finished block are computed in the next block's first forward ("fused"), or in one of their own
    ("separate"). stop: "at_once" when nothing is masked before an end of text, "block" when that block is complete,
    "never": all slots are filled in. on_step(answer, revealed positions) is called after every step.
    """

    def __init__(self, model, mask_id, kind="student", block_size=BLOCK_SIZE, threshold=None, steps=None, commit="fused", stop="at_once",
                 order=ORDER, batch_size=1, record=False, on_step=None):
        for name, value, allowed in (("kind", kind, KINDS), ("commit", commit, COMMITS), ("stop", stop, STOPS), ("order", order, ORDERS)):
            if value not in allowed:
                raise ValueError(f"unknown {name} '{value}'; choose from {', '.join(allowed)}")
        for name, value in (("block-size", block_size), ("batch", batch_size), ("steps", steps)):
            if value is not None and value < 1:
                raise ValueError(f"{name} {value} is out of range; allowed is 1 or more")
        if threshold is not None and not 0 <= threshold <= 1:
            raise ValueError(f"threshold {threshold} is out of range; allowed is 0 (a whole block a step) to 1 (one token a step)")
        self.shift = int(model.config.shift)
        self.model, self.mask_id, self.kind, self.block_size, self.threshold, self.steps = model, mask_id, kind, block_size, threshold, steps
        self.commit, self.stop, self.order, self.batch_size, self.record, self.on_step = commit, stop, order, batch_size, record, on_step
        self.cache, self.seconds = None, {"draft": 0.0, "verify": 0.0, "prefill": 0.0, "other": 0.0}    # prefill: all clean rows
        self.counts = {"forwards": 0, "tokens_fed": 0, "tokens_kept": 0}          # measured; a forward counts once for a whole batch

    def generate(self, requests, given=None):
        """Answer the requests and return their generations, in order."""
        for _ in self.stream(requests, given):
            pass
        return [r.generation for r in requests]

    @torch.inference_mode()
    def stream(self, requests, given=None):
        """Answer the requests, `max_new_tokens` slots each; yields (request, tokens that are final up to the first mask).
        given: for each request, {slot: token} that stand from the beginning."""
        waiting, active = self._prepare(requests, given or [None] * len(requests)), []
        while waiting or active:
            started, counted = time.perf_counter(), sum(self.seconds.values())
            while waiting and len(active) < self.batch_size:
                active.append(waiting.pop(0))
                active[-1].request.run = self.cache.open(len(active[-1].tokens))
            plan = [self.window(a) for a in active]
            hidden, logits, spent = self.forward(plan)
            committed = self.settle(plan, hidden, logits, spent)
            for a in [a for a in active if a.request.finished]:
                self.cache.close(a.request.run)
                active.remove(a)
            self.seconds["other"] += time.perf_counter() - started - (sum(self.seconds.values()) - counted)
            yield from committed
            waiting = [a for a in waiting if not a.request.finished]

    def _prepare(self, requests, given):
        answers = []
        for r, fixed in zip(requests, given):
            if r.longest > self.model.config.block_size:
                raise ValueError(f"prompt of {len(r.tokens)} tokens and {r.max_new_tokens} new ones exceed the context of {self.model.config.block_size}")
            if r.sampling.top_k or r.sampling.top_p < 1:
                raise ValueError("top-k and top-p are not for diffusion models; temperature is")
            r.state = Answer(r, self.mask_id, self.block_size, fixed)
            answers.append(r.state)
        slots = max((len(a.tokens) for a in answers), default=0) * min(self.batch_size, len(answers))
        if self.cache is None or self.cache.n_slots < slots:
            self.cache = KVCache(self.model.config, slots, self.model.dtype, self.model.device)
        return answers

    def window(self, a):
        """What this answer feeds now: the only place in which student, teacher and the dual cache differ."""
        if self.kind == "teacher" or self.kind == "dual" and a.steps == 0:
            return Window(a, 0, 0, len(a.tokens), len(a.tokens))
        if self.kind == "dual":
            return Window(a, a.first - self.shift, 0, a.last, len(a.tokens))
        end = a.first if a.n_cached < a.first and self.commit == "separate" else a.last
        start = min(a.n_cached, a.first - self.shift)    # of the prompt, or the block before, when a block opens
        return Window(a, start, a.first - start, end, end)

    def forward(self, plan):
        """One packed pass. Returns hidden states (N, C) and logits (N, V) of the masked slots of all open blocks that were fed, in
        plan order, and each request's share of the seconds it took."""
        started, device = time.perf_counter(), self.model.device
        tokens, positions, segments, wanted = [], [], [], []
        for w in plan:
            n = len(tokens)
            tokens += w.answer.tokens[w.start:w.end]
            positions += range(w.start, w.end)
            segments.append((n, len(tokens), BlockKeys(self.cache, w.answer.request.run.first, w.start, w.n_clean, w.end - w.start, w.seen)))
            wanted += [n + i - w.start - self.shift for i in w.answer.masked() if i < w.end]
        hidden = self.model(torch.tensor(tokens, device=device), torch.tensor(positions, device=device), packed_attend(segments))
        hidden = hidden[torch.tensor(wanted, dtype=torch.long, device=device)]
        logits = mask_free(self.model.logits(hidden), self.mask_id)
        if hidden.is_cuda:
            torch.cuda.synchronize()
        spent = time.perf_counter() - started
        self.counts["forwards"] += 1
        self.counts["tokens_fed"] += len(tokens)
        clean = sum(w.n_clean for w in plan) / len(tokens)
        self.seconds["prefill"] += spent * clean
        self.seconds["verify"] += spent * (1 - clean)
        return hidden, logits, spent / len(plan)

    def settle(self, plan, hidden, logits, spent):
        """Reveal, commit, open the next block or finish. Returns [(request, tokens)]."""
        tokens, confidence = choose(logits, [w.answer for w in plan if w.end > w.answer.first])
        row, committed = 0, []
        for w in plan:
            a, revealed = w.answer, []
            if self.kind == "student":
                a.n_cached = w.start + w.n_clean
            if w.end > a.first:
                masked = a.masked()
                revealed = [(masked[i], row + i) for i in pick(confidence[row:row + len(masked)], self._quota(a), self.threshold, self.order)]
                row += len(masked)
                a.steps += 1
            for position, i in revealed:
                a.tokens[position], a.rank[position - a.prompt] = tokens[i], a.n_revealed
                a.n_revealed += 1
                if self.record:
                    a.hidden[position - a.prompt] = hidden[i].to("cpu", torch.float16, copy=True)
            if self.on_step and revealed:
                self.on_step(a, [position for position, _ in revealed])
            committed.append((a.request, self._commit(a, w.end > a.first, spent)))
        return committed

    def _quota(self, a):
        """Slots to reveal in this step where there is no threshold: the block's masks spread over its steps, early steps first."""
        return a.at_opening // self.steps + (a.steps < a.at_opening % self.steps) if self.steps else 1

    def _commit(self, a, fed_block, spent):
        """Hand on what has become final up to the first mask or end of text; then see whether the block, or the answer, is done."""
        g, eos = a.request.generation, a.request.stop_ids
        done = a.prompt + len(g.token_ids)
        stop = next((i for i in range(a.prompt, a.last) if a.tokens[i] in eos), len(a.tokens))
        until = next((i for i in range(done, a.last) if a.tokens[i] == self.mask_id), a.last)
        kept = a.tokens[done:min(until, stop + 1)]
        g.steps.append(Step(len(g.token_ids), 0, 0, len(kept), self.kind, 0.0, spent))
        g.token_ids += kept
        g.who += ["plain"] * len(kept)
        a.request.tokens += kept
        self.counts["tokens_kept"] += len(kept)
        complete = fed_block and not a.masked()
        if complete and a.last == len(a.tokens) or stop < until and (self.stop == "at_once" or complete and self.stop == "block"):
            g.finish = g.finish or ("stop" if stop < len(a.tokens) else "length")
        elif complete:
            a.open_block()
        return kept


# -- trajectories ------------------------------------------------------------------------------------------------------

def collect(model, mask_id, requests, block_size=BLOCK_SIZE, batch_size=8, stop="block", order=ORDER):
    """What the teacher did, a token a step: tokens and rank (n, L), live (n,) slots that were decoded, and hidden (n, L, C), the
    row from which each token was finalised, as it enters the head, in 16 bit. Behind the block that ends the text
    everything is an end of text, its rank is its place, and its hidden row is 0."""
    Decoder(model, mask_id, "teacher", block_size, stop=stop, order=order, batch_size=batch_size, record=True).generate(requests)
    length, eos = requests[0].max_new_tokens, model.config.eos_id
    out = {"tokens": torch.full((len(requests), length), eos), "rank": torch.arange(length).repeat(len(requests), 1),
           "live": torch.zeros(len(requests), dtype=torch.long), "hidden": torch.zeros(len(requests), length, model.config.d_model, dtype=torch.float16)}
    for row, a in enumerate(r.state for r in requests):
        n = out["live"][row] = a.n_revealed
        out["tokens"][row, :n] = torch.tensor(a.tokens[a.prompt:a.prompt + n])
        out["rank"][row, :n] = torch.tensor(a.rank[:n])
        out["hidden"][row, :n] = torch.stack([a.hidden[i] for i in range(n)])
    return out


def pad_prompts(prompts):
    """Lists of ids -> (left-padded (n, width), lengths (n,))."""
    width = max(map(len, prompts))
    return torch.tensor([[0] * (width - len(p)) + p for p in prompts]), torch.tensor([len(p) for p in prompts])


def fitting(tokenizer, family, seed, split="train", gen_length=GEN_LENGTH, longest_prompt=LONGEST_PROMPT):
    """A problem whose solution fits the answer slots: (problem, prompt ids, answer ids (L,), filled up with ends of text).
    Sizes are drawn from the trained range and from 3 on, smaller and smaller until one fits. ValueError where none does."""
    rng, (low, high) = random.Random(f"{family}/{split}/{seed}/fitting"), tasks.SIZES[family]
    low = min(low, 3)
    for _ in range(100):
        size = rng.randint(low, high)
        problem = tasks.make(family, rng.randrange(1 << 40), split, size)
        prompt, answer = tokenizer.prompt_ids(problem.prompt), tokenizer.response_ids(problem.think, problem.answer)
        if len(prompt) <= longest_prompt and len(answer) <= gen_length:
            return problem, prompt, answer + [answer[-1]] * (gen_length - len(answer))
        high = max(size - 1, low)
    raise ValueError(f"no problem of '{family}' fits a prompt of {longest_prompt} and an answer of {gen_length} tokens")


# -- what decode.py needs ----------------------------------------------------------------------------------------------

METHODS = {"cdlm": ("student", "checkpoints/cdlm/student"), "dlm": ("teacher", "checkpoints/cdlm/teacher")}


def mask_id_of(tokenizer, where):
    if "<|mask|>" not in tokenizer.special:
        raise ValueError(f"{where}: the tokenizer has no <|mask|>")
    return tokenizer.special["<|mask|>"]


def load_decoder(name, settings, batch_size, target):
    """The decoder of `--method cdlm` or `dlm`, from a namespace with their settings."""
    kind, folder = METHODS[name]
    folder = settings.diffusion_model or folder
    model = checkpoints.load(folder, target.device, target.dtype)
    if model.config.vocab_size != target.config.vocab_size:
        raise ValueError(f"the diffusion model has {model.config.vocab_size} tokens in its vocabulary, the target {target.config.vocab_size}")
    threshold = THRESHOLD if settings.threshold is None and name == "cdlm" else settings.threshold
    return Decoder(model, mask_id_of(Tokenizer.load(folder), folder), kind, settings.block_size, threshold, order=settings.order, batch_size=batch_size)


class Watch:
    """Shows an answer while it fills in: on a terminal the answer is redrawn in place, new tokens in green, masked slots as dots;
    elsewhere every step is a line with its open block."""

    def __init__(self, tokenizer, out, pause=0.0):
        self.tokenizer, self.out, self.pause, self.drawn = tokenizer, out, pause, 0
        self.names = {tokenizer.special.get("<|answer|>"): "\n=> ", tokenizer.special.get("<|eos|>"): "<end>"}

    def spell(self, a, i):
        """The text of position i."""
        token = a.tokens[i]
        return "·" if token == a.mask_id else self.names.get(token) or self.tokenizer.decode([token])

    def __call__(self, a, revealed):
        if not self.out.isatty():
            block = "".join(self.spell(a, i) for i in range(a.first, a.last)).replace("\n", "|")
            self.out.write(f"{len(a.request.generation.steps) + 1:4d} +{len(revealed):<2d} {block}\n")
            return
        columns, rows = shutil.get_terminal_size()
        stop = next((i for i in range(a.prompt, a.last) if a.tokens[i] in a.request.stop_ids), a.last - 1)
        lines, room = [""], columns - 1
        for i in range(a.prompt, stop + 1):
            for c in self.spell(a, i):
                if c == "\n" or room == 0:
                    lines.append("")
                    room = columns - 1
                if c.isprintable():
                    lines[-1] += f"\033[32m{c}\033[0m" if i in revealed else c
                    room -= 1
        lines = lines[-(rows - 2):]                      # what has scrolled away cannot be redrawn
        self.out.write((f"\033[{self.drawn}A" if self.drawn else "") + "\r\033[J" + "\n".join(lines) + "\n")
        self.out.flush()
        self.drawn = len(lines)
        time.sleep(self.pause)
