"""SpecDiff-2 (arXiv 2511.00606): a diffusion drafter proposes a whole window in one forward, and is trained
for what counts.

An autoregressive drafter needs gamma forwards for gamma drafts; a masked-diffusion one fills gamma open slots
in a single one. The price: slot j is guessed without knowing the tokens of slots 1 .. j-1, so acceptance
falls quickly along the window. Two remedies. Streak-distillation trains on the target's own answers for the
expected number of accepted drafts,

    J = sum_m c_m,    c_m = q_1(x_1) .. q_m(x_m)          x the target's tokens, q_j the marginal of slot j

instead of agreement slot by slot. And because the marginals do not depend on the drafted tokens, K chains
cost one forward like one chain does; the target judges their merged trie in one forward, too (verify.py has
the acceptance rules).

Rows of a round: first the tokens committed since the last one, causal, whose keys stay in the drafter's cache
for good. Then the window, whose rows see everything, each other included, and whose keys are overwritten by
the next round:

    blind      t_0   t_1   ..  t_n   | MASK  ..  MASK      a causal prefix: cached keys equal a new prefill's
    reading    t_0   t_1   ..  t_n   | MASK  ..  MASK      the same, and every row reads a hidden state f of
                     f_0   ..  f_n-1 | f_n-1 ..  f_n-1     the target: the newest when the token is chosen

A slot's marginal knows nothing of the token drafted one slot earlier. The optional Markov head (`rank` > 0;
as in DSpark, 2607.05147) adds a low-rank term of that token to the slot's logits,

    h_j + U V E[x_j-1]     in place of the state h_j of slot j; rank 0: the paper's drafter

so slots are drawn one after the other, among the CANDIDATES likeliest tokens of each marginal, without
another forward. Such a chain has a known q, and every rule judges it as it judges the marginals' chains.

A row guesses the token after its own, as the target does, whose weights the drafter starts from: t_n guesses
slot 1 and gamma - 1 masks the others. The reading form joins the ideas of DFlash (2602.06036), a diffusion
drafter that reads the target, and of EAGLE, which pairs the state of a token with the next token: the row of
t_n has what an EAGLE head has.

What differs from the paper and why: the released drafter sees its prefix bidirectionally and encodes it again
every round; ours is causal, so that a cache is exact and many windows of a text train in one forward. The
released code trains the paper's loss, which fits point-mass acceptance, and decodes with multi-round
rejection; here each rule has its loss (`streak`, `streak-rs`). The drafter starts as the first layers of the
target, whose embedding and head it uses, or as a trained EAGLE head (`from_module`), and not from a diffusion
model of its own. A single chain ends where it gets improbable.

Glossary: window <-> draft block; gamma <-> window length; chains <-> K drafts; `selection` <->
self-selection; J <-> E[streak]. Shapes: B texts, S tokens, W windows per text, r rows of a window, V tokens
of the vocabulary. """
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import numpy as np
import torch
import torch.nn as nn

from minispec.core import gpt
from minispec.core.attention import can_fuse
from minispec.core.drafters import STOP, Cached
from minispec.core.requests import MAX_K, MAX_NODES
from minispec.core.words import Words, buffer, fusion
from minispec.core.noise import stream
from minispec.core.verify import LEAST_TEMPERATURE, graft, warp

CANDIDATES = 16             # tokens of a slot that the Markov head chooses among
MASK = -1                   # an open slot; not a token, so that any vocabulary will do


@dataclass
class SpecDiffConfig(gpt.GPTConfig):
    """The shape of the model that the drafter starts from, and what makes it a drafter."""
    kind = "specdiff"       # in the file of a drafter
    gamma: int = 8          # slots of a window in training; decoding may use another number
    reads: bool = False     # whether it reads the target's final hidden states,
    feature_layers: tuple = ()      # and those of these layers
    rank: int = 0           # of the Markov head; 0: none
    target: str = ""        # fingerprint of the target that it was saved for
    draft_vocab: int = 0    # tokens that it may draft, the ids in its weights; 0: all

    def __post_init__(self):
        if not 2 <= self.gamma <= MAX_K:
            raise ValueError(f"gamma {self.gamma} is out of range; allowed is 2 to {MAX_K} slots")
        if not 0 <= self.rank <= self.d_model:
            raise ValueError(f"rank {self.rank} is out of range; allowed is 0 to {self.d_model}")
        self.feature_layers = tuple(self.feature_layers)         # JSON has lists only

    def make(self, target):
        """An untrained drafter of this shape."""
        return Drafter(self, target)


class Drafter(nn.Module):
    """Blocks of a GPT, one vector for an open slot, and, if it reads the target's states, a projection of a
    token's embedding and a state to one vector. Embedding and head are the target's, and not held here."""
    n_params = gpt.GPT.n_params

    def __init__(self, config, target):
        super().__init__()
        self.config = c = config
        self.__dict__["target"] = target                 # not registered, so neither trained nor saved
        self.register_buffer("vocabulary", buffer(c))
        self.blocks = nn.ModuleList(gpt.Block(i, c) for i in range(c.n_layer))
        self.norm = gpt.RMSNorm(c.d_model, c.norm_eps)
        self.mask = nn.Parameter(torch.zeros(c.d_model))
        self.join = gpt.Linear(2 * c.d_model, c.d_model) if c.reads else None
        self.fuse = fusion(c)
        self.markov = markov_head(c)
        self.rope = gpt.Rope(c)

    @cached_property
    def words(self):                                     # not before the ids are loaded
        return Words(self.target, self.vocabulary)

    def forward(self, tokens, positions, attend, features=None):
        """Final states (..., C) of tokens (...), MASK for an open slot, at positions (...). features (...,
        (F + 1) * C): for a drafter that reads them, the target's states of the token before, or of the last
        one that the target has seen."""
        return gpt.body(self, self.rope, self.embed(tokens, features), positions, attend)

    def embed(self, tokens, features):
        # An open slot has no token, but a vector of its own.
        x = self.target.embed(tokens.clamp(min=0))
        x = torch.where((tokens == MASK)[..., None], self.mask, x)
        if self.join is None:
            return x
        if self.fuse is not None:
            features = self.fuse(features)
        return self.join(torch.cat([x, features], -1))


def markov_head(c):
    """The map (..., C) -> (..., C) from the embedding of a token to what it adds to the state of the next
    slot; at first nothing."""
    if not c.rank:
        return None
    head = nn.Sequential(gpt.Linear(c.d_model, c.rank, bias=False), gpt.Linear(c.rank, c.d_model, bias=False))
    nn.init.zeros_(head[1].weight)
    return head


def for_target(target, n_layer=None, gamma=8, reads=False, feature_layers=(), rank=0):
    """A drafter that starts as the first n_layer layers (default: all) of the target. An open slot starts as
    the mean of all tokens. Where it reads the target's states, these pass the projection as they are, and
    embeddings, small next to states in most models, are scaled to weigh as much."""
    shape = {**asdict(target.config), "n_layer": n_layer or target.config.n_layer}
    config = SpecDiffConfig(**shape, gamma=gamma, reads=reads, feature_layers=feature_layers, rank=rank)
    drafter = config.make(target).to(target.device)
    # Nothing starts at random: the target's own layers guess the first slot well from the beginning.
    with torch.no_grad():
        drafter.norm.load_state_dict(target.norm.state_dict())
        for mine, theirs in zip(drafter.blocks, target.blocks):
            mine.load_state_dict(theirs.state_dict())
        drafter.mask.copy_(target.embed.weight.mean(0))
        if reads:
            c = config.d_model
            one = torch.eye(c, device=target.device)
            size_of_states = target.norm.weight.norm() / c ** 0.5
            drafter.join.bias.zero_()
            drafter.join.weight[:, :c] = one * size_of_states / target.embed.weight.std()
            drafter.join.weight[:, c:] = one
    return drafter


@torch.no_grad()
def from_prism(prism, target, gamma, rank=0):
    """A drafter that starts as module 0 of a trained drafter of prism.py: its first slot is drafted as an
    EAGLE head drafts it, but for a row more at the beginning of the text, and only the others are to be
    learned. A layer comes behind the module's, which adds nothing yet: there, open slots can read what the
    row of t_n guesses."""
    module = prism.bank[0]
    n_layer = len(module.blocks)
    drafter = for_target(target, n_layer + 1, gamma, True, prism.config.feature_layers, rank)
    if drafter.fuse is not None:
        drafter.fuse.load_state_dict(prism.fuse.state_dict())
    drafter.norm.load_state_dict(module.norm.state_dict())
    drafter.join.load_state_dict(module.join.state_dict())
    for mine, trained in zip(drafter.blocks, module.blocks):
        mine.load_state_dict(trained.state_dict())
    drafter.blocks[n_layer].out.weight.zero_()
    drafter.blocks[n_layer].down.weight.zero_()
    return drafter


# -- drafting: K chains from one forward -----------------------------------------------------------

class SpecDiffDrafter(Cached):
    """Drafts for the engine's Lockstep planner: Lockstep(engine, SpecDiffDrafter(..), gamma * k_drafts).

    gamma drafts per chain, k_drafts chains per round. Under the rule `coupled` chain i begins with the i-th
    best token of the first slot, and all go on with the best. Under the others chains are drawn independently
    at temperature `temperature` (default: of one chain the request's own, of several 1); at 0 they are the
    argmax. A single chain is cut where it gets improbable, like those of `Chained`. """
    name = "specdiff"

    def __init__(self, drafter, target, gamma=None, k_drafts=1, temperature=None):
        if gamma is None:
            gamma = drafter.config.gamma
        if not 1 <= gamma <= MAX_K:
            raise ValueError(f"gamma {gamma} is out of range; allowed is 1 to {MAX_K}")
        if not 1 <= k_drafts <= MAX_NODES // gamma:
            raise ValueError(f"k-drafts {k_drafts} is out of range; allowed is 1 to {MAX_NODES // gamma}")
        if temperature and not LEAST_TEMPERATURE <= temperature <= 100:
            raise ValueError(f"draft-temperature {temperature} is out of range; "
                             f"allowed is 0 (the argmax), or {LEAST_TEMPERATURE} to 100")
        super().__init__(drafter.config, target, drafter.rope, gamma)
        self.drafter = drafter.to(target.dtype)
        self.words = drafter.words
        self.gamma = gamma
        self.width = k_drafts
        self.temperature = temperature
        self.stop = STOP if k_drafts == 1 else 0.0
        self.reads = drafter.config.reads
        self.feature_layers = drafter.config.feature_layers

    def prepare(self, batch, longest):
        if can_fuse(self.target):
            # A request is there twice: its new tokens, and its window.
            self.make_graphs(batch, longest, segments=2)

    def round(self, x):
        """One forward of all windows: hidden states (N, C)."""
        return [self.body(self.drafter, self.drafter.embed(x.tokens, x.features), x)]

    def propose(self, requests, limits):
        """For every request, at most limits[i] drafts of one chain or of a trie; see drafters.py."""
        out = [([], None)] * len(requests)
        # All windows of the batch share one forward, and all K chains of a request share its window. A
        # request near its end has a shorter window, or none.
        live = [i for i, limit in enumerate(limits) if limit > 0]
        sizes = [min(self.gamma, limits[i]) for i in live]                 # slots of each window
        if not live:
            return out
        work, wanted, n = [], [], 0
        for i, slots in zip(live, sizes):
            for rows in self._rows(requests[i], slots):
                work.append(rows)
                n += len(rows.tokens)
            wanted += range(n - slots, n)                # the rows of t_n and of the masks
        hidden, = self.run_round(work)
        for i, own in zip(live, hidden[wanted].split(sizes)):
            out[i] = self._chains(requests[i], own, limits[i])
        return out

    def _rows(self, request, slots):
        """What a request feeds: first its new committed tokens, causal; then the window's masks, which see
        each other."""
        notes = self.note(request)
        # The row of the last token guesses the first slot.
        masks = [MASK] * (slots - 1)
        of_new, of_masks = None, None
        if self.reads:
            # Each new token reads the state of the token before it, the first one none; each mask the newest
            # state there is.
            if notes.cached == 0:
                notes.features.insert(0, notes.cache.k.new_zeros(1, self.n_features))
            of_new = notes.take_features()
            of_masks = of_new[-1:].expand(len(masks), -1)
        fed = [notes.rows(request.tokens[notes.cached:], of_new)]
        notes.cached = len(request.tokens)               # the next round overwrites the masks' keys
        if masks:
            sees_all = torch.ones(len(masks), len(masks), dtype=torch.bool)
            fed.append(notes.rows(masks, of_masks, tail=sees_all))
        return fed

    def _chains(self, request, states, limit):
        """What the engine gets of one request: a chain, or the trie of several, drawn from the states (n, C)
        of the slots."""
        # At which temperature?
        sampling = request.sampling.drafting
        temperature = self.temperature
        if temperature is None and self.width > 1 and sampling.rule != "coupled":
            temperature = 1.0                            # chains that are all alike would be one chain
        if temperature is not None:
            sampling = replace(sampling, temperature=temperature)
        # Draw k chains. Near the end of an answer, fewer fit into its cache.
        n = len(states)
        k = min(self.width, limit // n, CANDIDATES, self.words.size)
        drawn, q = self._draw(request, states, k, sampling)                               # (n, k), (n, k, N)
        known = sampling.temperature and sampling.rule == "rejection"
        if k == 1:
            chain = self._cut(drawn[:, 0], q[:, 0])
            return chain, self.words.whole(q[:len(chain), 0]) if known else None

        # Merge them to a trie.
        tokens, parents = [], []
        rows = [graft(chain, tokens, parents) for chain in self.words.tokens(drawn).T.tolist()]
        if known:
            return tokens, None, parents, list(zip(rows, self.words.whole(q).unbind(1)))  # k of (n, V)
        return tokens, None, parents

    def _noise(self, request, n, k, sampling):
        """The noise (n, k, N) of n slots: under the rule `coupled` the target's, else one for each chain."""
        if not sampling.temperature:
            return torch.ones(n, k, self.words.size, device=self.target.device)
        lanes = [sampling.lane + chain * (sampling.rule != "coupled") for chain in range(k)]
        streams = np.array([stream(request.sampling.seed, lane) for lane in lanes] * n)
        slots = len(request.tokens) + np.arange(n).repeat(k)
        return self.words.noise(streams, slots).unflatten(0, (n, k))

    def _draw(self, request, states, k, sampling):
        """k chains from the states (n, C) of n slots: indices (n, k), and the distributions (n, k, N) that
        they were drawn from; at temperature 0 the argmax, and the softmax."""
        noise = self._noise(request, len(states), k, sampling)
        logits = self.words.logits(states)                                                # (n, N)
        if self.drafter.markov is None:
            q = _distribution(logits, sampling)[:, None].expand(-1, k, -1)                # (n, k, N)
            scores = q / noise
            drawn = scores.argmax(-1)                                                     # (n, k)
            if k > 1 and sampling.rule == "coupled":
                drawn[0] = scores[0, 0].topk(k).indices
            return drawn, q

        # With a Markov head one slot follows the other, among the likeliest tokens of its marginal.
        top, among = logits.topk(min(CANDIDATES, self.words.size))                        # (n, c)
        of_head = self.words.head.weight[among]                                           # (n, c, C)
        indices, qs, more = [], [], 0.0
        for slot in range(len(states)):
            q = _distribution((top[slot] + more).expand(k, -1), sampling)
            index = _best(q, noise[slot][:, among[slot]], slot, sampling)
            indices.append(among[slot][index])                                            # (k,)
            qs.append(logits.new_zeros(k, self.words.size, dtype=q.dtype).index_copy_(1, among[slot], q))
            if slot + 1 < len(states):
                term = self.drafter.markov(self.words.embed(self.words.tokens(indices[-1])))   # (k, C)
                more = term @ of_head[slot + 1].mT                                        # (k, c)
        return torch.stack(indices), torch.stack(qs)

    def _cut(self, index, q):
        """The tokens of a chain of indices (n,) drawn from q (n, N), up to the first one that makes the
        product of their probabilities less than `stop`; it stays, see Chained."""
        reach = q.gather(-1, index[:, None])[:, 0].cumprod(0)
        n = 1 + int((reach[:-1] >= self.stop).sum())
        return self.words.tokens(index[:n]).tolist()


def _distribution(logits, sampling):
    """What drafts are drawn from; at temperature 0, the softmax whose largest is drafted."""
    return warp(logits, sampling) if sampling.temperature else logits.float().softmax(-1)


def _best(q, noise, slot, sampling):
    """What k chains draw (k,) for a slot from q (k, N)."""
    scores = q / noise
    if slot == 0 and sampling.rule == "coupled":
        return scores[0].topk(len(q)).indices
    return scores.argmax(-1)
