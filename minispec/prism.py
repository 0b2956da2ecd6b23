"""PRISM (arXiv 2602.01762): a drafter with more parameters at the same cost per draft step. The EAGLE family
is its case of one module.

A bigger drafter guesses better but takes longer for every guess. PRISM has M modules and uses one per draft
step: step 1 runs module 0, step 2 module 1, and so on as `step_map` says (its last entry serves all later
steps). Parameters grow M-fold, the parameters that a step reads do not. The hidden state is handed on from
step to step, so the token drafted at step k has passed through k layers, with the weights of up to M modules,
as if the drafter were deep.

A module is a projection of two vectors to one, and a decoder layer. Row r pairs the target's hidden state at
position r, the `feature`, with the embedding of the token that the target chose next, t_{r+1}, and guesses
t_{r+2}:

    step 1      a_1 = module 0 (E[t_{r+1}], feature r)     -> t_{r+2}      the feature is the target's
    step k      a_k = module m(k) (E[t_{r+k}], a_{k-1})    -> t_{r+k+1}    the state is the drafter's own

at position r + k - 1. The feature is the target's final state, or a projection of its states after a low, a
middle and the last layer (`feature_layers`). Embedding and head are the target's, frozen.

The keys and values of all modules go to one cache that is one layer deep. After a round, the target's
features of the accepted tokens are known, and module 0 encodes these tokens again, over the rows that the
round wrote. So module 0 wrote all cached keys of committed tokens, and every module must be able to read
them.

With M = 1 this is the EAGLE family: trained for one step like EAGLE and EAGLE-2 (2406.16858), for several
like HASS (2408.15766) and EAGLE-3 (2503.01840). With `n_layer` 2 a step passes through a stack of two layers,
the obvious way to grow, and reads both.

Training unrolls these steps from every row of a text at once (`unroll`), with the same `forward` as
decoding.

What differs from the papers and why: modules are plain Llama blocks with a norm before the attention and one
at the end, so that the drafter's states have the scale of the target's final ones, and training needs no
warm-up by regression. Each of the three states passes the target's last norm, which gives them one scale.
The loss is the KL alone, on the target's own answers, over a draft vocabulary and five unrolled steps.
Glossary, code <-> paper: module <-> processing module; `step_map` <-> f_map; `feature_layers` <-> MHI.
"""
import math
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

from minispec.core import gpt
from minispec.core.drafters import ChainDrafter
from minispec.core.losses import goal_of, kl
from minispec.core.requests import MAX_K, check_k
from minispec.core.verify import warp
from minispec.core.draft_head import DrafterConfig, TrainedDrafter, fusion

# Gathered rows are a multiple of this: oneDNN compiles a kernel for every number of rows, which takes longer
# than to run it, so their products should have few shapes.
ROWS = 128


@dataclass
class PrismConfig(DrafterConfig):
    """The shape of the target's blocks, and the settings of a drafter of the family."""
    kind = "prism"          # in the file of a drafter
    n_layer: int = 1        # layers of a module
    step_map: tuple = (0, 1)    # draft step 1, 2, .. -> module; the last entry serves all later steps
    depth: int = 8          # the default number of draft steps a round

    def __post_init__(self):
        super().__post_init__()
        self.step_map = tuple(self.step_map)
        if self.step_map[:1] != (0,) or set(self.step_map) != set(range(self.n_modules)):
            raise ValueError(f"step map {self.step_map} must begin with module 0, which encodes accepted "
                             "tokens, and use every module up to the largest")

    def make(self, target):
        """An untrained drafter of this shape."""
        return Prism(self, target)

    @property
    def n_modules(self):
        return max(self.step_map) + 1


class Module(nn.Module):
    """The weights of one draft step: a projection of embedding and state to one vector, and blocks."""

    def __init__(self, c):
        super().__init__()
        self.join = gpt.Linear(2 * c.d_model, c.d_model)
        self.blocks = nn.ModuleList(gpt.Block(i, c) for i in range(c.n_layer))
        self.norm = gpt.RMSNorm(c.d_model, c.norm_eps)


class Prism(TrainedDrafter):
    """All variants of the family (see the top of this file)."""
    _init = gpt.GPT._init

    def __init__(self, config, target):
        super().__init__(config, target)
        self.bank = nn.ModuleList(Module(config) for _ in range(config.n_modules))
        self.apply(self._init)
        self.fuse = fusion(config)

    def forward(self, step, tokens, a, positions, attend):
        """Draft step 1, 2, ..: tokens (...) and states a (..., C) at positions (...) -> states (..., C). In
        step 1 the states are the target's features (..., (F + 1) * C)."""
        e = self.target.embed(tokens)
        if step == 1:
            a = self.fuse(a)
        module = self.bank[self.config.step_map[:step][-1]]
        h = module.join(torch.cat([e, a], dim=-1))                             # (..., 2C) -> (..., C)
        return gpt.body(module, self.rope, h, positions, attend)


def for_target(target, step_map=(0, 1), n_layer=1, feature_layers=()):
    """A new drafter with blocks of the target's shape, which begins near the target. Its last norm is the
    target's, so that its states have the scale that the head expects. The projection adds the state to random
    weights. In most models embeddings are small next to states, so their weights are scaled up to equal them.
    """
    shape = {**asdict(target.config), "n_layer": n_layer}
    config = PrismConfig(**shape, step_map=step_map, feature_layers=feature_layers)
    prism = config.make(target)
    c = prism.config.d_model
    with torch.no_grad():
        scale = target.norm.weight.norm() / c ** 0.5 / target.embed.weight.std()
        for module in prism.bank:
            module.norm.weight.copy_(target.norm.weight)
            module.join.weight[:, :c] *= scale.item()            # the target may be on a GPU, this is not yet
            module.join.weight[:, c:] += torch.eye(c)
    return prism.to(target.device)


def copy_modules(prism, source):
    """Start a drafter from one with at most as many modules: the additional ones begin as copies of the last
    one."""
    prism.fuse.load_state_dict(source.fuse.state_dict())
    for i, module in enumerate(prism.bank):
        module.load_state_dict(source.bank[min(i, len(source.bank) - 1)].state_dict())


# -- the loss: every row of a text drafts at once ------------------------------------------------------------
# EAGLE-3's "training-time test". Step k's query at row r sees the step-1 keys of rows up to r, and the later
# keys of row r alone. Each key comes from the module that writes it in decoding, so states in training equal
# states in drafting (a test allows 1e-4). In PRISM's released trainer, module m computes the context's keys
# again with its own weights, which never happens in decoding.

def unrolled_attend():
    """attend of unrolled drafting, over whole texts (B, S). Step 1 is causal. At step k the query of row r
    sees the step-1 keys of its text up to r, and of the steps since then the keys of row r alone: those its
    own drafts wrote. The next call for a layer is its next step.

    In single operators: with torch's fused attention each step would add S keys, all but one of them hidden.
    """
    steps = {}                                           # layer -> the keys and values of its steps so far

    def attend(layer, q, k, v):
        """q (B, S, H, D), k and v (B, S, G, D) -> (B, S, H, D)."""
        s, h, d = q.shape[1:]
        group = h // k.shape[2]
        steps.setdefault(layer, []).append((k.transpose(1, 2), v.transpose(1, 2)))
        (first_k, first_v), *own = steps[layer]                                # (B, G, S, D) each
        q = q.transpose(1, 2).unflatten(1, (-1, group)) * d ** -0.5            # (B, G, g, S, D)

        # 1. The weights of the step-1 keys up to each row, and of the row's own later ones.
        causal = torch.full((s, s), float("-inf"), device=q.device).triu(1)
        logits = (q.flatten(2, 3) @ first_k.mT).unflatten(2, (group, s)) + causal
        later = [(q * k[:, :, None]).sum(-1, keepdim=True) for k, _ in own]    # (B, G, g, S, 1)
        weights = torch.cat([logits, *later], -1).float().softmax(-1).to(v.dtype)
        # 2. The weighted values.
        out = (weights[..., :s].flatten(2, 3) @ first_v).unflatten(2, (group, s))
        for i, (_, v) in enumerate(own, s):
            out = out + weights[..., i:i + 1] * v[:, :, None]
        return out.flatten(1, 2).transpose(1, 2)
    return attend


def unroll(prism, ids, features, steps):
    """The states of draft steps 1 .. `steps`, a list of (B, S, C), from every row of texts ids (B, S) with
    features (B, S, (F + 1) * C), if the drafted tokens are those in ids. Row r of step k guesses t_{r+k+1};
    ignore the last k rows of a text, which read tokens from its beginning."""
    attend = unrolled_attend()
    positions = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
    states, a = [], features
    for step in range(1, steps + 1):
        # Row r reads the token drafted last, t_{r+k}, and the state that drafted it, one position further on.
        a = prism(step, ids.roll(-step, 1), a, positions + step - 1, attend)
        states.append(a)
    return states


def unrolled_loss(prism, batch, steps):
    """Training loss on a data.recorded.Batch of shape (B, S), and how many drafts would have been accepted.

    The loss is KL(target || drafter), the mean over those rows of a step whose guessed token is to be learned
    (batch.learn), summed over the steps.

    Returns (loss, accepted (steps,)): the share of rows whose first 1, 2, .. guesses all are the target's
    argmax. The sum of the shares is the mean number of accepted drafts of chains that begin at every row; in
    decoding they begin after rejected drafts, so fewer are accepted. In a sampled answer a guess is compared
    with the argmax, but the next step reads the token that was drawn.
    """
    # 1. The target's row s = r + k sees t_s and predicts t_{s+1}, which is the label of row r at step k.
    to_learn = F.pad(batch.learn[:, 1:], (0, 1))         # (B, S): is t_{s+1} one to learn?
    to_learn[:, :steps] = False                          # too near the beginning to be guessed at all steps
    to_learn = to_learn.flatten()                        # rows are numbered along all texts
    # The true ones, followed by false ones up to a multiple of ROWS: the first n count.
    n = int(to_learn.sum())
    target_rows = to_learn.logical_not().byte().argsort(stable=True)[:-(-n // ROWS) * ROWS]
    states = unroll(prism, batch.ids, batch.features(prism.config), steps)
    draft_head = prism.draft_head

    # 2. Both are distributions over the draft vocabulary, the target's renormalised: no drafter with this
    # vocabulary can come closer to the target.
    goal = goal_of(draft_head.head(batch.hidden.flatten(0, 1)[target_rows])[:n])           # (n, N)
    best = batch.best.flatten()[target_rows[:n]]
    loss, chains = 0.0, []
    right = counted = torch.ones_like(to_learn)          # are all guesses right, and all to be learned?
    for k, a in enumerate(states, 1):
        own = (target_rows - k).clamp(min=0)             # the rows r
        logits = draft_head.head(a.flatten(0, 1)[own])[:n]
        own = own[:n]
        loss = loss + kl(goal, logits).sum() / max(n, 1)
        # 3. How far the guesses of each row are the target's argmax.
        # (In bf16 a CPU takes six times as long.)
        hits = draft_head.tokens(logits.float().argmax(-1)) == best
        right = right.index_copy(0, own, right[own] & hits)
        counted = counted & to_learn.roll(-k)
        chains.append(right)
    accepted = (torch.stack(chains) & counted).sum(1) / counted.sum().clamp(min=1)
    return loss, accepted


# -- drafting: chains ----------------------------------------------------------------------------------------

class PrismDrafter(ChainDrafter):
    """Drafts chains, drawn like the target draws, with temperature, for the engine's SyncScheduler:
    SyncScheduler(engine, PrismDrafter(prism, target, depth), k), with k of at most `depth` drafts."""
    uses_hidden_states = True

    def __init__(self, prism, target, depth=MAX_K, name="prism"):
        check_k(depth)
        super().__init__(prism.config, target, depth)
        self.step = prism.to(target.dtype)               # see ChainDrafter
        self.feature_layers = prism.config.feature_layers
        self.draft_head = prism.draft_head
        self.gamma = depth
        self.name = name

    def first_rows(self, request, limit):
        """Rows for the tokens committed since the last round, with the target's features. Row r reads
        t_{r+1}."""
        if not request.n_cached:                         # a prompt of one token: the target has no state yet
            return []
        state = self.state_of(request)
        # Module 0 writes over the rows of the last round's drafts.
        return [state.rows(request.tokens[state.cached + 1:request.n_cached + 1])]


# -- drafting: trees -----------------------------------------------------------------------------------------

def prune(tokens, parents, scores, n):
    """The n nodes of largest score of a tree as (tokens, parents) for the engine; see Drafter.propose.
    Nodes are in order of creation, each with the one it hangs from (-1: the last committed token) and its
    score.

    A child's score is at most its parent's, and where they tie the parent is older. So the best n of all
    nodes always include the parents of all of them."""
    by_score = sorted(range(len(scores)), key=lambda node: -scores[node])      # ties: as created
    kept = sorted(by_score[:n])
    # The target's row 0 is the last committed token, the kept nodes follow.
    row = {node: i for i, node in enumerate([-1, *kept])}
    return [int(tokens[node]) for node in kept], [row[parents[node]] for node in kept]


class PrismTreeDrafter(PrismDrafter):
    """Drafts EAGLE-2's dynamic trees of k nodes: SyncScheduler(engine, PrismTreeDrafter(prism, target, depth,
    width), k).

    Every step opens the `width` new nodes of largest score and drafts `width` children of each; after `depth`
    steps the k nodes of largest score go to the target. A score is the log-probability of a path, with the
    target's noise in it under the rule `coupled`. All requests take a step in one forward.

    A tree ends early like a chain: where no new node has a path as probable as `min_confidence`. A node whose
    path is a quarter as probable still goes to the target, where a row costs less than a draft step."""

    def __init__(self, prism, target, depth, width, name="prism"):
        super().__init__(prism, target, depth, name)
        self.room = width * depth
        self.width = min(width, self.draft_head.size)

    def result(self, request, drafts, q, limit):
        """A tree of at most `limit` drafts from columns (3, n) of nodes, see `round` and Drafter.propose."""
        # Other requests may have gone deeper.
        n = self.width + (min(self.gamma, limit) - 1) * self.width ** 2
        tokens, parents, scores = (column[:n] for column in drafts)
        worth = sum(math.exp(score) >= self.min_confidence / 4 for score in scores)
        tokens, parents = prune(tokens, parents, scores, max(min(limit, worth), 1))
        return tokens, partial(self.draft_head.whole, q), parents

    def round(self, x):
        """All steps: the token, parent and score (B, 3, n) of all n nodes of the trees, see `prune`, and q
        (B, 1, N) of the first step."""
        steps, _ = x.options
        width = self.width
        itself = torch.eye(width, dtype=torch.bool, device=x.tokens.device)
        # Step 1: the children of the last committed token.
        states = self.step(1, x.tokens, x.features, x.positions, x.attend)
        states = states[x.per_request["last"]][:, None]                        # (B, open nodes, C)
        sees = states.new_empty(len(states), 1, 0, dtype=torch.bool)           # (B, open nodes, rows so far)
        so_far = states.new_zeros(states.shape[:2], dtype=torch.double)
        tokens, scores, q = self._children(1, x, states, so_far)               # (B, new nodes)
        out = [torch.stack([tokens.double(), torch.full_like(scores, -1), scores], 1)]
        n_nodes = 0                                                            # before the new ones

        for number in range(2, steps + 1):
            ended = scores.amax(1) < x.per_request["min_confidence"].log()
            if x.ends_early and ended.all():
                break
            # The best of the new nodes are opened, in order of creation. Each sees its parent's path and
            # itself, and goes on from its parent's state.
            best = scores.sort(dim=1, descending=True, stable=True).indices[:, :width].sort(1).values
            parent = (best // width)[..., None]                                # among those open before
            path = sees.take_along_dim(parent, 1)
            sees = torch.cat([path, itself.expand(len(path), -1, -1)], 2)
            x = x.next_rows(number, tokens.gather(1, best), sees)
            states = states.take_along_dim(parent, 1).flatten(0, 1)
            states = self.step(number, x.tokens, states, x.positions, x.attend).unflatten(0, (-1, width))
            # Their children are the next new ones.
            parents = (best + n_nodes)[..., None].expand(-1, -1, width).flatten(1)
            n_nodes += tokens.shape[1]
            tokens, scores, _ = self._children(number, x, states, scores.gather(1, best))
            scores = scores.masked_fill(ended[:, None], float("-inf"))
            out.append(torch.stack([tokens.double(), parents.double(), scores], 1))
        return [torch.cat(out, 2), q]

    def _children(self, number, x, states, so_far):
        """The `width` best children of each open node: tokens and scores (B, open nodes * width), and the
        distributions q (B, open nodes, N). states (B, open nodes, C); so_far (B, open nodes): the nodes'
        scores."""
        _, settings = x.options
        logits = self.draft_head.head(states).float()
        q = scores = logits.softmax(-1)
        # A tree has no noise but the target's.
        if settings.temperature > 0 and settings.rule == "coupled":
            q = warp(logits, settings)
            scores = q / self.noise(x, 1, number - 1)
        top = (scores / scores.sum(-1, keepdim=True)).topk(self.width)
        scores = so_far[..., None] + top.values.log().clamp(max=0)
        return self.draft_head.tokens(top.indices).flatten(1), scores.flatten(1), q
