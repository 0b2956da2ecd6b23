"""PRISM (arXiv 2602.01762): a drafter that grows without getting slower, and with it the EAGLE family it grew
out of.

A bigger drafter guesses better but takes longer for every guess. So let it have M modules and use one per
draft step: the first guess reads module 0, the second module 1, and so on as `step_map` says (the last entry
serves all later steps). Parameters grow M-fold, what a step reads does not. The hidden state is handed on
from step to step, so the token drafted at step k has passed through k layers with different weights, as if
the drafter were deep.

A module is a projection of two vectors to one and a decoder layer. Row r pairs what the target knew at
position r, its `feature`, with the embedding of the token that the target chose next, t_{r+1}, and guesses
t_{r+2}:

    step 1      a_1 = module 0 (E[t_{r+1}], feature r)     -> t_{r+2}      the feature is the target's
    step k      a_k = module m(k) (E[t_{r+k}], a_{k-1})    -> t_{r+k+1}    the state is the drafter's own

at position r + k - 1. Embedding and head are the target's, frozen. The keys and values of all modules go to
one cache that is one layer deep. All its rows but those of the running round were written by module 0 from
the target's features, so every module must be able to read module 0's. When the features of accepted tokens
are known, module 0 encodes them again.

With M = 1 this is the EAGLE family: trained for one step like EAGLE and EAGLE-2 (2406.16858), for several
like HASS (2408.15766) and EAGLE-3 (2503.01840, which reads three layers of the target). With `n_layer` 2 a
step passes through a stack of two layers, the obvious way to grow, and reads both.

Training, in train_prism.py, unrolls these steps from every row of a text at once.

What differs from the papers and why: modules are plain Llama blocks with a norm before the attention and one
at the end, so that an own state looks like the target's final one and training needs no warm-up by
regression. Glossary, code <-> paper: module <-> processing module; `step_map` <-> f_map; `fuse` <-> fusion
layer (MHI).
"""
from dataclasses import asdict, dataclass, replace

import torch
import torch.nn as nn

from minispec.core import gpt
from minispec.core.attention import TREE, can_fuse, path_mask
from minispec.core.cpu import store_by_columns
from minispec.core.drafters import Chained, pack
from minispec.core.requests import MAX_K, draw_drafts
from minispec.core.words import Words, buffer
from minispec.tools import checkpoints

MAX_NODES = 256             # the largest draft tree


@dataclass
class PrismConfig(gpt.GPTConfig):
    """The shape of the target's blocks, and what makes it a drafter."""
    n_layer: int = 1        # layers of a module
    step_map: tuple = (0, 1)    # draft step 1, 2, .. -> module; the last entry serves all later steps
    taps: tuple = ()        # layers of the target whose inputs are the feature; none: its final hidden state
    target: str = ""        # fingerprint of the target that it is trained for
    draft_vocab: int = 0    # tokens that it may draft, the ids in its weights; 0: all

    def __post_init__(self):
        # JSON has lists only.
        self.step_map = tuple(self.step_map)
        self.taps = tuple(self.taps)
        if not self.step_map or set(self.step_map) != set(range(max(self.step_map) + 1)):
            raise ValueError(f"step map {self.step_map} must use every module from 0 to the largest")
        if self.step_map[0] != 0:
            raise ValueError(f"step map {self.step_map} must begin with module 0, "
                             "which encodes accepted tokens")

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
    """All arms of the family (see the top of this file). Embedding and head are the target's and not held
    here."""
    _init = gpt.GPT._init

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.fuse = gpt.Linear(len(c.taps) * c.d_model, c.d_model) if c.taps else nn.Identity()
        self.bank = nn.ModuleList(Module(c) for _ in range(c.n_modules))
        self.rope = gpt.Rope(c)
        self.register_buffer("vocabulary", buffer(c))
        self.apply(self._init)

    def forward(self, step, e, a, positions, attend):
        """Draft step 1, 2, ..: embeddings e and states a (..., C) at positions (...) -> states (..., C)."""
        module = self.bank[self.config.module_of(step)]
        cos, sin = self.rope(positions, a.dtype)
        return module(e, a, cos, sin, attend)

    def n_params(self):
        return sum(p.numel() for p in self.parameters())

    def check(self, target):
        """ValueError where this drafter was not made for a target of this shape."""
        checkpoints.check_shapes(self.config, target.config, ("d_model", "vocab_size"))


def for_target(target, step_map=(0, 1), n_layer=1, taps=()):
    """A new drafter with blocks of the target's shape. The norm of its states starts as the target's last
    one, so that they have the right scale for the head."""
    shape = {**asdict(target.config), "n_layer": n_layer}
    prism = Prism(PrismConfig(**shape, step_map=step_map, taps=taps, target=checkpoints.fingerprint(target)))
    with torch.no_grad():
        for module in prism.bank:
            module.norm.weight.copy_(target.norm.weight)
    return prism.to(target.device)


def copy_modules(prism, source):
    """Start a drafter from one with fewer modules (or as many): the further ones begin as copies of the
    last."""
    for i, module in enumerate(prism.bank):
        module.load_state_dict(source.bank[min(i, len(source.bank) - 1)].state_dict())
    prism.fuse.load_state_dict(source.fuse.state_dict())


# -- drafting: chains and trees ------------------------------------------------------------------------------

class Draft:
    """What is drafted for one request in one round: nodes in order of creation, each with the node it hangs
    from (-1: the last committed token) and the log-probability of its path. A chain is the tree of width
    1."""

    def __init__(self, request, notes, limit, depth):
        self.request = request
        self.notes = notes
        self.limit = limit                               # the most nodes that may go to the target
        self.depth = min(depth, limit)
        self.tokens = []
        self.parents = []
        self.scores = []                                 # log-probability of the path from the root to a node
        self.q = []  # of a chain: the distributions its tokens were drawn from
        self.open = [-1]                                 # nodes whose children are drafted now ..
        self.states = None                               # .. and their states (n, C)
        self.leaves = []                                 # nodes to open next
        self.paths = {-1: []}  # opened node -> rows of its path behind the accepted ones
        self.rows = 0                                    # such rows in all

    def grow(self, tokens, scores, width):
        """Children for every open node (lists, best first); the best `width` of them will be opened next."""
        first = len(self.tokens)
        for node, some, logs in zip(self.open, tokens, scores):
            so_far = self.scores[node] if node >= 0 else 0.0
            for token, log in zip(some, logs):
                self.tokens.append(token)
                self.parents.append(node)
                self.scores.append(so_far + log)
        self.leaves = self.best(range(first, len(self.tokens)), width)

    def best(self, nodes, n):
        """The n of largest score, in order of creation. A child's score is at most its parent's, and where
        they tie the parent is older. So the best n of all nodes always include the parents of all of them."""
        by_score = sorted(nodes, key=lambda node: (-self.scores[node], node))
        return sorted(by_score[:n])

    def open_leaves(self):
        """Make the leaves the open nodes, and return the rows (Notes.rows) that do it: the token of each, and
        the state of the node it hangs from. A row sees all accepted rows and its own path."""
        nodes = self.leaves
        states = self.states[[self.open.index(self.parents[node]) for node in nodes]]
        for node in nodes:
            self.paths[node] = [*self.paths[self.parents[node]], self.rows]
            self.rows += 1
        # All leaves are equally deep. A single one is a chain so far, in which causal rows see the same.
        depth = len(self.paths[nodes[0]])
        positions = [self.notes.cached - 1 + depth] * len(nodes)
        tail = None
        if self.rows > depth:
            tail = path_mask([self.paths[node] for node in nodes], self.rows)
        start = self.notes.cached + self.rows - len(nodes)
        self.open = nodes
        return self.notes.rows(start, [self.tokens[node] for node in nodes], states, positions, tail)

    def result(self):
        """(tokens, q) of a chain, (tokens, None, parents) of a tree, for the engine; see drafters.py."""
        if self.q:                                       # a chain
            return self.tokens, None if self.q[0] is None else torch.stack(self.q)
        kept = self.best(range(len(self.tokens)), self.limit)
        # The target's row 0 is the last committed token, the kept nodes follow.
        row = {node: i for i, node in enumerate([-1, *kept])}
        parents = [row[self.parents[node]] for node in kept]
        return [self.tokens[node] for node in kept], None, parents


class PrismDrafter(Chained):
    """Drafts for the engine's Lockstep planner: Lockstep(engine, PrismDrafter(prism, target, depth, width),
    k).

    width 1: chains of k drafts (at most `depth`), drawn like the target draws, with temperature. width > 1:
    EAGLE-2's dynamic trees. Every step opens the `width` most probable new nodes and drafts `width` children
    of each; after `depth` steps the k most probable nodes of all go to the target. All requests take a step
    in one forward.
    """
    def __init__(self, prism, target, depth=MAX_K, width=1, name="prism"):
        prism.check(target)
        if not 1 <= depth <= MAX_K:
            raise ValueError(f"depth {depth} is out of range; allowed is 1 to {MAX_K} draft steps a round")
        if not 1 <= width <= MAX_K:
            raise ValueError(f"width {width} is out of range; allowed is 1 (a chain) to {MAX_K}")
        super().__init__(prism.config, target)
        self.prism = prism.to(target.dtype)
        self.words = Words(target, prism.vocabulary)
        self.depth = depth
        self.width = width
        self.alike = width > 1
        self.name = name
        self.taps = prism.config.taps
        self.max_k = MAX_K if width == 1 else MAX_NODES

    def prepare(self, batch, longest):
        c = self.config
        if self.width == 1:
            super().prepare(batch, longest, c.d_model)
        elif can_fuse(self.target) and self.width * self.depth <= TREE and self.width <= self.words.size:
            self.make_graphs(self._tree, batch, longest, self.width * self.depth, c.d_model)
            self.later = self.later_plan(batch, self.width)

    def step(self, number, tokens, states, x):
        """A step on the kernels; see Chained."""
        from kernels.fused import decode
        module = self.prism.bank[self.config.module_of(number)]
        h = module.join(torch.cat([self.words.embed(tokens), states], -1))
        return decode(module.blocks, module.norm, self.prism.rope, h, x, self.pool)[0]

    def observe(self, request, features):
        self.note(request, self.width * self.depth).features.append(features)

    def propose(self, requests, limits):
        # A prompt of one token has no row yet that the target knows.
        drafts = {r: Draft(r, self.notes[r], limit, self.depth)
                  for r, limit in zip(requests, limits) if limit > 0 and r.n_cached}
        live = list(drafts.values())
        if self.in_graph(list(drafts), [d.notes for d in live]):
            self._in_graph(live)
            live = []
        step = 1
        while live:
            if step == 1:
                work = [self._encode(d) for d in live]
            else:
                work = [d.open_leaves() for d in live]
            self._forward(step, live, work)
            self._grow(live)
            live = [d for d in live if d.depth > step]
            step += 1
        return [drafts[r].result() if r in drafts else ([], None) for r in requests]

    def _in_graph(self, live):
        """All steps of all drafts as one CUDA graph."""
        work = [self._encode(d) for d in live]
        if self.width == 1:
            chains = self.chains([d.request for d in live], work, [d.depth for d in live])
            for d, (tokens, q) in zip(live, chains):
                d.tokens = tokens
                d.q = [None] if q is None else list(q)
            return
        self.steps = max(self.steps, *(d.depth for d in live))
        nodes, = self.run_graph(work, self.table(work), (self.steps,))
        for d, (tokens, parents, scores) in zip(live, nodes.tolist()):
            # This draft's steps may be fewer.
            n = self.width + (d.depth - 1) * self.width ** 2
            d.tokens = [int(token) for token in tokens[:n]]
            d.parents = [int(parent) for parent in parents[:n]]
            d.scores = scores[:n]

    def _tree(self, x):
        """What `_forward` and `_grow` do, on the device: token, parent and score (B, 3, n) of all n nodes."""
        from kernels.graphs import slots_of
        steps, = x.how
        last, first, ends = x.more["table"]
        width = self.width
        batch = len(first)
        slots = slots_of(first, self.size)
        requests = self.later.requests.clone()
        ranks = torch.arange(width, device=first.device)
        states = self.step(1, x.tokens, x.features, x)[last][:, None]          # (B, open nodes, C)
        sees = torch.full_like(first, -1)[:, None]                             # (B, open nodes): see Plan
        so_far = torch.zeros_like(sees, dtype=torch.double)                    # scores of the open nodes
        nodes = torch.full_like(sees, -1)                                      # and their numbers
        out, n = [], 0
        for number in range(1, steps + 1):
            # The most probable children of all open nodes.
            top = self.words.logits(states).float().log_softmax(-1).topk(width)
            tokens = self.words.tokens(top.indices).flatten(1)                 # (B, open nodes * width)
            scores = (so_far[..., None] + top.values.clamp(max=0)).flatten(1)
            parents = nodes[..., None].expand(-1, -1, width).flatten(1)
            out.append(torch.stack([tokens.double(), parents.double(), scores], 1))
            if number == steps:
                break
            # The best of them are opened, in order of creation.
            best = scores.sort(dim=1, descending=True, stable=True).indices[:, :width].sort(1).values
            parent = best // width
            states = states.gather(1, parent[..., None].expand(-1, -1, states.shape[-1]))
            sees = (sees.gather(1, parent) << width) | (1 << (width - 1 - ranks))
            so_far = scores.gather(1, best)
            nodes = best + n
            n += tokens.shape[1]
            # They are the newest rows of the request.
            at = ends + (number - 1) * width
            requests[:, 2] = at + width
            positions = (ends + number - 1).clamp(max=self.config.block_size - 1)
            plan = replace(self.later, requests=requests, sees=sees.flatten())
            row = replace(x, tokens=tokens.gather(1, best).flatten(), plan=plan, slots=slots,
                          positions=positions[:, None].expand(-1, width).flatten(),
                          new=((first + at)[:, None] + ranks).flatten())
            states = self.step(number + 1, row.tokens, states.flatten(0, 1), row).unflatten(0, (batch, width))
        return [torch.cat(out, 2)]

    def _encode(self, d):
        """Step 1: rows for the tokens accepted since the last round, from the target's features. Row r reads
        t_{r+1}."""
        notes, start, end = d.notes, d.notes.cached, d.request.n_cached
        features = self.prism.fuse(torch.cat(notes.features))
        notes.cached = end
        notes.features = []
        return notes.rows(start, d.request.tokens[start + 1:end + 1], features)

    def _forward(self, step, drafts, work):
        """Feed every draft's rows through the step's module, in one forward; leaves the states of the open
        nodes."""
        tokens, positions, attend, states = pack(work, self.target.device)
        out = self.prism(step, self.words.embed(tokens), states, positions, attend)
        for d, some in zip(drafts, out.split([len(rows.tokens) for rows in work])):
            d.states = some[-len(d.open):]               # of step 1: the last row's alone

    def _grow(self, drafts):
        """Draft the children of all open nodes from their states."""
        logits = self.words.logits(torch.cat([d.states for d in drafts]))
        if self.width == 1:
            # A chain: draw one child as the target would, and keep what it was drawn from.
            indices, qs = draw_drafts([d.request for d in drafts], logits)
            tokens = self.words.tokens(torch.tensor(indices, device=logits.device)).tolist()
            for d, token, q in zip(drafts, tokens, qs):
                d.grow([[token]], [[0.0]], 1)
                d.q.append(None if q is None else self.words.whole(q))
            return
        # A tree: the most probable children, without chance.
        top = logits.float().log_softmax(-1).topk(min(self.width, logits.shape[-1]))
        opened = [len(d.open) for d in drafts]
        tokens = self.words.tokens(top.indices).split(opened)
        scores = top.values.clamp(max=0).split(opened)
        for d, some, logs in zip(drafts, tokens, scores):
            d.grow(some.tolist(), logs.tolist(), self.width)


# -- folders -------------------------------------------------------------------------------------------------

def save(prism, folder):
    checkpoints.save_drafter(prism, folder, "prism")


def load(folder, device="cpu", dtype=None):
    """The drafter in a folder. ValueError, in one line, names what is missing, damaged or does not fit."""
    def make(**config):
        return Prism(checkpoints.checked(PrismConfig(**config)))

    prism = checkpoints.load_drafter(folder, "prism", make)
    return store_by_columns(prism.to(device=device, dtype=dtype).eval())
