"""PRISM (arXiv 2602.01762): a drafter that grows without getting slower, and with it the EAGLE family it grew out of.

A bigger drafter guesses better but takes longer for every guess. So let it have M modules and use one per draft step: the
first guess reads module 0, the second module 1, and so on as `step_map` says (the last entry serves all later steps).
Parameters grow M-fold, what a step reads does not. The hidden state is handed on from step to step, so the token drafted
at step k has passed through k layers with different weights, as if the drafter were deep.

A module is a projection of two vectors to one and a decoder layer. Row r pairs what the target knew at position r, its
`feature`, with the embedding of the token that the target chose next, t_{r+1}, and guesses t_{r+2}:

    step 1      a_1 = module 0 (E[t_{r+1}], feature r)     -> t_{r+2}      the feature is the target's, of an accepted token
    step k      a_k = module m(k) (E[t_{r+k}], a_{k-1})    -> t_{r+k+1}    the state is the drafter's own

at position r + k - 1. Embedding and head are the target's, frozen. The keys and values of all modules go to one cache that
is one layer deep: all but the rows of the running round were written by module 0 from the target's features, so every
module must be able to read module 0's. Accepted tokens are encoded anew, by module 0, when their features are known.

With M = 1 this is the EAGLE family: trained for one step like EAGLE and EAGLE-2 (2406.16858), for several like HASS
(2408.15766) and EAGLE-3 (2503.01840, which reads three layers of the target). With `n_layer` 2 a step passes through a
stack of two layers, the obvious way to grow, and reads both.

Training unrolls the steps from every row at once (section 2.3 of our notes; EAGLE-3's "training-time test"): step k's
query at row r sees the step-1 keys of rows up to r, then its own row's later ones, all as the modules that will write
them in decoding wrote them. States in training therefore equal states in drafting; a test says so to 1e-4.

What differs from the papers and why: the released trainer lets module m recompute the context's keys with its own
weights, which never happens in decoding (`recompute` does this, for comparison); modules are plain Llama blocks with a norm
before the attention and one at the end, so that an own state looks like the target's final one and training needs no
warm-up by regression; a row counts in the loss if the token it guesses is one to learn. Glossary, code <-> paper: module
<-> processing module; `step_map` <-> f_map; `fuse` <-> fusion layer (MHI); `Unrolled` <-> training-time test.
"""
from dataclasses import asdict, dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from minispec.core import gpt
from minispec.tools import checkpoints
from minispec.core.attention import FullKeys, dense_attend, packed_attend, path_mask
from minispec.core.cpu import blocked_attend, store_by_columns
from minispec.core.engine import MAX_K, draw_drafts
from minispec.core.kv_cache import KVCache

MAX_NODES = 256             # the largest draft tree


@dataclass
class PrismConfig(gpt.GPTConfig):
    """The shape of the target's blocks, and what makes it a drafter."""
    n_layer: int = 1        # layers of a module
    step_map: tuple = (0, 1)    # draft step 1, 2, .. -> module; the last entry serves all later steps
    taps: tuple = ()        # layers of the target whose inputs are the feature; none: its final hidden state
    target: str = ""        # fingerprint of the target that it is trained for

    def __post_init__(self):
        self.step_map, self.taps = tuple(self.step_map), tuple(self.taps)
        if not self.step_map or set(self.step_map) != set(range(max(self.step_map) + 1)):
            raise ValueError(f"step map {self.step_map} must use every module from 0 to the largest")
        if self.step_map[0] != 0:
            raise ValueError(f"step map {self.step_map} must begin with module 0, which encodes accepted tokens")

    @property
    def n_modules(self):
        return max(self.step_map) + 1

    def module_of(self, step):
        """The module of draft step 1, 2, .."""
        return self.step_map[min(step, len(self.step_map)) - 1]


class Module(nn.Module):
    """What one draft step reads: (embedding, state) -> state."""

    def __init__(self, c):
        super().__init__()
        self.join = gpt.Linear(2 * c.d_model, c.d_model)
        self.blocks = nn.ModuleList(gpt.Block(i, c) for i in range(c.n_layer))
        self.norm = gpt.RMSNorm(c.d_model, c.norm_eps)

    def forward(self, e, a, cos, sin, attend):
        x = self.join(torch.cat([e, a], dim=-1))                               # (..., 2C) -> (..., C)
        for block in self.blocks:
            x = block(x, cos, sin, attend)
        return self.norm(x)


class Prism(nn.Module):
    """All arms of the family (see the top of this file). Embedding and head are the target's and not held here."""
    _init = gpt.GPT._init

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.fuse = gpt.Linear(len(c.taps) * c.d_model, c.d_model) if c.taps else nn.Identity()
        self.bank = nn.ModuleList(Module(c) for _ in range(c.n_modules))
        self.rope = gpt.Rope(c)
        self.apply(self._init)

    def forward(self, step, e, a, positions, attend):
        """Draft step 1, 2, ..: embeddings e and states a (..., C) at positions (...) -> states (..., C)."""
        return self.bank[self.config.module_of(step)](e, a, *self.rope(positions, a.dtype), attend)

    def n_params(self):
        return sum(p.numel() for p in self.parameters())

    def check(self, target):
        """ValueError where this drafter was not made for a target of this shape."""
        checkpoints.check_shapes(self.config, target.config, ("d_model", "vocab_size"))


def for_target(target, step_map=(0, 1), n_layer=1, taps=()):
    """A new drafter with blocks of the target's shape. The norm of its states starts as the target's last one, so that they
    have the right scale for the head."""
    prism = Prism(PrismConfig(**{**asdict(target.config), "n_layer": n_layer}, step_map=step_map, taps=taps, target=checkpoints.fingerprint(target)))
    with torch.no_grad():
        for module in prism.bank:
            module.norm.weight.copy_(target.norm.weight)
    return prism.to(target.device)


def copy_modules(prism, source):
    """Start a drafter from one with fewer modules (or as many): the further ones begin as copies of the last."""
    for i, module in enumerate(prism.bank):
        module.load_state_dict(source.bank[min(i, len(source.bank) - 1)].state_dict())
    prism.fuse.load_state_dict(source.fuse.state_dict())


# -- training: every row drafts at once --------------------------------------------------------------------------------

class Unrolled:
    """The attention of unrolled drafting. Step 1 is causal. At step k the query of row r sees the step-1 keys of rows
    0 .. r, and of the steps since then the keys of row r alone: those its own drafts wrote. One softmax over all.

    Queries go block by block and skip the future, as in cpu.blocked_attend.
    """

    def __init__(self, block=256):
        self.steps, self.block = {}, block                                     # layer -> [(k, v) of each step]

    def attend(self, layer, q, k, v):
        """q (B, S, H, D), k and v (B, S, G, D) -> (B, S, H, D). The next call for a layer is its next step."""
        s, share, n = q.shape[1], q.shape[2] // k.shape[2], max(self.block, q.shape[1] // 8)
        steps = self.steps.setdefault(layer, [])
        steps.append((k.transpose(1, 2), v.transpose(1, 2)))                   # (B, G, S, D)
        q = (q * q.shape[-1] ** -0.5).unflatten(2, (-1, share)).permute(0, 2, 3, 1, 4)          # (B, G, g, S, D)
        (k1, v1), later = steps[0], steps[1:]
        k1 = k1.transpose(-1, -2)                                              # (B, G, D, S)
        own = [(q * k[:, :, None]).sum(-1, keepdim=True) for k, _ in later]    # (B, G, g, S, 1) each
        future = torch.full((n, n), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
        out = []
        for a in range(0, s, n):
            b = min(a + n, s)
            scores = (q[:, :, :, a:b].flatten(2, 3) @ k1[..., :b]).unflatten(2, (share, b - a))
            scores[..., a:] += future[:b - a, :b - a]
            probs = torch.cat([scores, *(x[:, :, :, a:b] for x in own)], -1).softmax(-1).to(v.dtype)
            read = (probs[..., :b].flatten(2, 3) @ v1[:, :, :b]).unflatten(2, (share, b - a))
            for j, (_, v) in enumerate(later):
                read = read + probs[..., b + j, None] * v[:, :, None, a:b]
            out.append(read)
        return torch.cat(out, 3).permute(0, 3, 1, 2, 4).flatten(2, 3)          # (B, S, H, D)


def unroll(prism, target, ids, features, steps, recompute=False):
    """The states (B, S, C) of draft steps 1 .. `steps` from every row of ids (B, S) with features (B, S, F), drafting the
    tokens that stand there. Row r of step k guesses t_{r+k+1}; the last k rows know too little and are to be ignored.

    recompute=True is the released trainer's way: at every step its module encodes all earlier inputs again.
    """
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    limit = prism.config.block_size - 1
    a, keys, inputs, states = prism.fuse(features), Unrolled(), [], []
    for step in range(1, steps + 1):
        inputs.append((target.embed(ids.roll(-step, 1)), a, (positions + step - 1).clamp(max=limit)))
        if recompute:
            keys = Unrolled()
            for earlier in inputs[:-1]:
                prism(step, *earlier, keys.attend)
        a = prism(step, *inputs[-1], keys.attend)
        states.append(a)
    return states


def unrolled_loss(prism, target, ids, learn, steps, decay=1.0, recompute=False, chunk=1024):
    """Training loss on ids (B, S), and how many drafts it would have had accepted.

    The loss is the KL divergence from the target's distributions to the drafter's, mean over the rows of a step whose
    guessed token is one to learn (bool (B, S)), summed over steps with weights decay^(k-1). Logits are made `chunk` rows
    at a time and made again in the backward pass, so memory does not grow with steps x rows x vocabulary.

    Returns (loss, accepted (steps,)): the share of rows whose first 1, 2, .. guesses all are the target's argmax; their
    sum is the mean number of accepted drafts of a chain, if these tokens are what the target says.
    """
    with torch.no_grad():
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        attend = blocked_attend() if ids.device.type == "cpu" else dense_attend()
        hidden, features = target.features(ids, positions, attend, prism.config.taps)
    states = unroll(prism, target, ids, features, steps, recompute)
    # Row r of step k is judged by the target's row s = r + k, which sees t_s and what came before and is asked for t_{s+1}.
    judged = F.pad(learn[:, 1:], (0, 1))                                       # (B, S): is the token after s one to learn?
    at = judged.nonzero()[:, 1]                                                # (n,) the positions s
    valid = torch.stack([at >= k for k in range(1, steps + 1)])                # (T, n): a row r = s - k exists
    weight = valid * (decay ** torch.arange(steps, device=ids.device))[:, None] / valid.sum(1, keepdim=True).clamp(min=1)
    goal, guess = hidden[judged], torch.stack([a.roll(k, 1)[judged] for k, a in enumerate(states, 1)])   # (n, C), (T, n, C)

    def part(goal, guess, weight):
        log_p, log_q = target.logits(goal).float().log_softmax(-1), target.logits(guess).float().log_softmax(-1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)                           # (T, chunk)
        return (kl * weight).sum(), log_q.argmax(-1) == log_p.argmax(-1)

    loss, hits = 0.0, []
    for i in range(0, len(at), chunk):
        rows = slice(i, i + chunk)
        one, hit = checkpoint(part, goal[rows], guess[:, rows], weight[:, rows], use_reentrant=False)
        loss, hits = loss + one, [*hits, hit]
    # Back to the rows that drafted: a draft is accepted if it and all before it are right.
    right = torch.zeros(steps, *ids.shape, device=ids.device)
    right[:, judged] = torch.cat(hits, 1).float()
    right = torch.stack([x.roll(-k, 1) for k, x in enumerate(right, 1)]).cumprod(0)
    whole = torch.stack([F.pad(judged[:, k:], (0, k)) for k in range(1, steps + 1)]).all(0)
    return loss, (right * whole).sum((1, 2)) / whole.sum().clamp(min=1)


# -- drafting: chains and trees ----------------------------------------------------------------------------------------

class _Draft:
    """What is drafted for one request in one round: nodes in order of creation, each with the node it hangs from (-1: the
    last committed token) and the log-probability of its path. A chain is the tree of width 1."""

    def __init__(self, request, note, limit, depth):
        self.request, self.note, self.limit, self.depth = request, note, limit, min(depth, limit)
        self.tokens, self.parents, self.scores, self.q = [], [], [], []
        self.open, self.states = [-1], None              # nodes whose children are drafted next, and their states (n, C)
        self.leaves, self.paths, self.rows = [], {-1: []}, 0        # paths: node -> its rows in the drafter's cache

    def grow(self, tokens, scores, width):
        """Children for every open node (lists, best first); the best `width` of them will be opened next."""
        first = len(self.tokens)
        for node, some, logs in zip(self.open, tokens, scores):
            so_far = self.scores[node] if node >= 0 else 0.0
            for token, log in zip(some, logs):
                self.tokens.append(token)
                self.parents.append(node)
                self.scores.append(so_far + log)
        self.leaves = self._best(range(first, len(self.tokens)), width)

    def _best(self, nodes, n):
        """The n of largest score, in order of creation. A child's score is at most its parent's, and where they tie the
        parent is older: so the best n of all nodes always include the parents of all of them."""
        return sorted(sorted(nodes, key=lambda i: (-self.scores[i], i))[:n])

    def result(self):
        """(tokens, q, parents) for the engine; see drafters.py."""
        if self.q:                                       # a chain: judged by what it was drawn from
            return self.tokens, torch.stack(self.q) if self.q[0] is not None else None, None
        kept = self._best(range(len(self.tokens)), self.limit)
        row = {node: i for i, node in enumerate([-1, *kept])}
        return [self.tokens[i] for i in kept], None, [row[self.parents[i]] for i in kept]


class _Notes:
    """A request as the drafter knows it: keys and values, how many accepted rows they hold, the features of the rows to come."""

    def __init__(self, cache):
        self.cache, self.cached, self.features = cache, 0, []


class PrismDrafter:
    """Drafts for the engine's Lockstep planner: Lockstep(engine, PrismDrafter(prism, target, depth, width), k).

    width 1: chains of k drafts (at most `depth`), drawn like the target draws, with temperature. width > 1: EAGLE-2's
    dynamic trees. Every step opens the `width` most probable new nodes and drafts `width` children of each; after
    `depth` steps the k most probable nodes of all go to the target. All requests take a step in one forward. The keys
    and values of a request lie in a cache of its own, beside the target's pool.
    """
    def __init__(self, prism, target, depth=MAX_K, width=1, name="prism"):
        prism.check(target)
        if not 1 <= depth <= MAX_K:
            raise ValueError(f"depth {depth} is out of range; allowed is 1 to {MAX_K} draft steps a round")
        if not 1 <= width <= MAX_K:
            raise ValueError(f"width {width} is out of range; allowed is 1 (a chain) to {MAX_K}")
        self.prism, self.target, self.depth, self.width, self.name = prism.to(target.dtype), target, depth, width, name
        self.taps, self.max_k = prism.config.taps, MAX_K if width == 1 else MAX_NODES
        self.notes = {}                                  # request -> _Notes

    def observe(self, request, features):
        if request not in self.notes:
            c, slots = self.prism.config, request.longest + self.width * self.depth
            self.notes[request] = _Notes(KVCache(c, slots, self.target.dtype, self.target.device))
        self.notes[request].features.append(features)

    def release(self, request):
        self.notes.pop(request, None)

    def first_guesses(self, ids):
        """Logits (len(ids) - 2, V) of what it would draft in place of each of ids[2:], knowing all before."""
        x = torch.tensor([ids], device=self.target.device)
        features = self.target.features(x, torch.arange(len(ids), device=x.device)[None], dense_attend(), self.taps)[1]
        return self.target.logits(unroll(self.prism, self.target, x, features, 1)[0][0])[:-2]       # row r guesses token r + 2

    def propose(self, requests, limits):
        drafts = {r: _Draft(r, self.notes[r], limit, self.depth) for r, limit in zip(requests, limits) if limit > 0 and r.n_cached}
        for step in range(1, max((d.depth for d in drafts.values()), default=0) + 1):
            live = [d for d in drafts.values() if d.depth >= step]
            self._run(step, live, [self._encode(d) if step == 1 else self._open(d) for d in live])
            self._grow(live)
        return [drafts[r].result() if r in drafts else ([], None) for r in requests]

    def _encode(self, d):
        """Step 1: rows for the tokens accepted since the last round, from the target's features."""
        r, note = d.request, d.note
        start, n = note.cached, r.n_cached - note.cached
        tokens, features = r.tokens[start + 1:r.n_cached + 1], torch.cat(note.features)
        note.cached, note.features = r.n_cached, []
        return tokens, self.prism.fuse(features), range(start, r.n_cached), FullKeys(note.cache, 0, start, n)

    def _open(self, d):
        """Later steps: a row for every node that is opened, from the state of the node it hangs from. It sees all accepted
        rows and its own path."""
        note, n = d.note, len(d.leaves)
        states = d.states[[d.open.index(d.parents[i]) for i in d.leaves]]
        for i in d.leaves:
            d.paths[i] = [*d.paths[d.parents[i]], d.rows]
            d.rows += 1
        tail = path_mask([d.paths[i] for i in d.leaves], d.rows) if self.width > 1 else None
        position = note.cached - 1 + len(d.paths[d.leaves[0]])                 # one token deeper than the last step
        d.open = d.leaves
        return [d.tokens[i] for i in d.leaves], states, [position] * n, FullKeys(note.cache, 0, note.cached + d.rows - n, n, tail=tail)

    def _run(self, step, drafts, feeds):
        """Feed every draft's rows (tokens, states, positions, keys) through the step's module, in one forward."""
        tokens, positions, segments, n, device = [], [], [], 0, self.target.device
        for some, _, places, keys in feeds:
            tokens += some
            positions += places
            segments.append((n, n + len(some), keys))
            n += len(some)
        states = torch.cat([feed[1] for feed in feeds])
        e = self.target.embed(torch.tensor(tokens, device=device))
        out = self.prism(step, e, states, torch.tensor(positions, device=device), packed_attend(segments))
        for d, (a, b, _) in zip(drafts, segments):
            d.states = out[b - len(d.open):b]            # of step 1: the last row's alone

    def _grow(self, drafts):
        logits = self.target.logits(torch.cat([d.states for d in drafts]))
        if self.width == 1:
            for d, token, q in zip(drafts, *draw_drafts([d.request for d in drafts], logits)):
                d.grow([[token]], [[0.0]], 1)
                d.q.append(q)
            return
        top = logits.float().log_softmax(-1).topk(min(self.width, logits.shape[-1]))
        tokens, scores, at = top.indices.tolist(), top.values.clamp(max=0).tolist(), 0
        for d in drafts:
            n = len(d.open)
            d.grow(tokens[at:at + n], scores[at:at + n], self.width)
            at += n


# -- folders -----------------------------------------------------------------------------------------------------------

def save(prism, folder):
    checkpoints.save_drafter(prism, folder, "prism")


def load(folder, device="cpu", dtype=None):
    """The drafter in a folder. ValueError, in one line, names what is missing, damaged or does not fit."""
    prism = checkpoints.load_drafter(folder, "prism", lambda **config: Prism(checkpoints.checked(PrismConfig(**config))))
    return store_by_columns(prism.to(device=device, dtype=dtype).eval())
