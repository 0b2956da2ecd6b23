"""SpecDiff-2 (arXiv 2511.00606): a diffusion drafter proposes a whole window in one forward, and is trained
for the number of accepted drafts.

An autoregressive drafter needs gamma forwards for gamma drafts; a masked-diffusion one fills gamma open slots
in a single one. The price: slot j is guessed without knowing the tokens of slots 1 .. j-1, so acceptance
falls quickly along the window. Two remedies. Streak-distillation trains on the target's own answers for the
expected number of accepted drafts,

    J = sum_m c_m,    c_m = q_1(x_1) .. q_m(x_m)          x the target's tokens, q_j the marginal of slot j

instead of agreement slot by slot. And because the marginals do not depend on the drafted tokens, K chains
cost one forward like one chain does; the target verifies their merged trie in one forward, too (verify.py has
the acceptance rules).

Rows of a round: first the tokens committed since the last one, causal, whose keys stay in the drafter's cache
for good; then the window, whose rows see everything, each other included. The next round overwrites the
window's keys:

    blind      t_0   t_1   ..  t_n   | MASK  ..  MASK      a causal prefix: cached keys equal a new prefill's
    reading    t_0   t_1   ..  t_n   | MASK  ..  MASK      the same, and every row reads a hidden state f of
                     f_0   ..  f_n-1 | f_n-1 ..  f_n-1     the target: the newest when the token is chosen

A slot's marginal does not depend on the token drafted one slot earlier. The optional Markov head (`rank` > 0;
as in DSpark, 2607.05147) adds a low-rank term of that token to the slot's logits,

    h_j + U V E[x_j-1]     in place of the state h_j of slot j; rank 0: the paper's drafter

so slots are drawn one after the other, among the CANDIDATES likeliest tokens of each marginal, without
another forward. Such a chain has a known q, and every rule verifies it like the marginals' chains.

A row guesses the token after its own, as in the target, whose weights the drafter starts from: the row of t_n
guesses slot 1, and gamma - 1 masks guess the other slots. The reading form joins the ideas of DFlash
(2602.06036), a diffusion drafter that reads the target, and of EAGLE, which pairs the state of a token with
the next token: the row of t_n reads the same as in an EAGLE head.

What differs from the paper and why: the released drafter sees its prefix bidirectionally and encodes it again
every round; ours is causal, so that a cache is exact and many windows of a text train in one forward. The
released code trains the paper's loss, which fits point-mass acceptance, and decodes with multi-round
rejection; here either has its loss (`streak`, `streak-rs`), with q at temperature 1. The defaults `kl` and
`coupled`, the target's states and the draft vocabulary are not the paper's. The drafter starts as the first
layers of the target, whose embedding and head it uses, or as a trained EAGLE head (`from_prism`), and not
from a diffusion model of its own. A single chain ends where it gets improbable.

Glossary: window <-> draft block; gamma <-> window length; chains <-> K drafts; `selection` <->
self-selection; J <-> E[streak]. Shapes: B texts, S tokens, W windows per text, r rows of a window, V tokens
of the vocabulary, N of the draft vocabulary."""
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

from minispec.core import gpt
from minispec.core.drafters import PAD_DRAFT, ChainDrafter
from minispec.core.losses import goal_of, kl
from minispec.core.requests import MAX_K, MAX_NODES, check_k
from minispec.core.draft_head import DrafterConfig, TrainedDrafter, fusion
from minispec.core.verify import LEAST_TEMPERATURE, graft, warp

CANDIDATES = 16             # tokens of a slot that the Markov head chooses among
MASK = -1                   # an open slot; not a token, so that any vocabulary will do
# kl learns from the target's distributions, the others from the answers' tokens.
OBJECTIVES = ("kl", "mdlm", "ce", "streak", "log-streak", "streak-rs")
DECAY = 0.8                 # kl: the weight of a slot, relative to the slot before it


@dataclass
class SpecDiffConfig(DrafterConfig):
    """The shape of the model that the drafter starts from, and what makes it a drafter."""
    kind = "specdiff"       # in the file of a drafter
    gamma: int = 8          # slots of a window in training; decoding may use another number
    reads: bool = False     # whether it reads the target's hidden states
    rank: int = 0           # of the Markov head; 0: none

    def __post_init__(self):
        super().__post_init__()
        if not 2 <= self.gamma <= MAX_K:
            raise ValueError(f"gamma {self.gamma} is out of range; allowed is 2 to {MAX_K} slots")
        if not 0 <= self.rank <= self.d_model:
            raise ValueError(f"rank {self.rank} is out of range; allowed is 0 to {self.d_model}")

    def make(self, target):
        """An untrained drafter of this shape."""
        return SpecDiff(self, target)


class SpecDiff(TrainedDrafter):
    """Blocks of a GPT, one vector for an open slot, and, if it reads the target's states, a projection of a
    token's embedding and a state to one vector."""

    def __init__(self, config, target):
        super().__init__(config, target)
        c = config
        self.blocks = nn.ModuleList(gpt.Block(i, c) for i in range(c.n_layer))
        self.norm = gpt.RMSNorm(c.d_model, c.norm_eps)
        self.mask = nn.Parameter(torch.zeros(c.d_model))
        self.join = gpt.Linear(2 * c.d_model, c.d_model) if c.reads else None
        self.fuse = fusion(c)
        self.markov = markov_head(c)

    def forward(self, tokens, positions, attend, features=None):
        """Final states (..., C) of tokens (...), MASK for an open slot, at positions (...). features (...,
        (F + 1) * C): for a drafter that reads them, the target's states of the token before, or of the last
        one that the target has seen."""
        return gpt.body(self, self.rope, self.embed(tokens, features), positions, attend)

    def embed(self, tokens, features):
        # An open slot has no token, but its own vector.
        x = self.target.embed(tokens.clamp(min=0))
        x = torch.where((tokens == MASK)[..., None], self.mask, x)
        if self.join is None:
            return x
        return self.join(torch.cat([x, self.fuse(features)], -1))


def markov_head(c):
    """The map (..., C) -> (..., C) from the embedding of a token to what it adds to the state of the next
    slot; at first nothing."""
    if not c.rank:
        return None
    head = nn.Sequential(gpt.Linear(c.d_model, c.rank, bias=False), gpt.Linear(c.rank, c.d_model, bias=False))
    nn.init.zeros_(head[1].weight)
    return head


def for_target(target, n_layer=None, gamma=8, reads=False, feature_layers=(), rank=0):
    """A drafter that starts as the first n_layer layers (default: all) of the target. The vector of an open
    slot starts as the mean of all embeddings; the projection of a drafter that reads the target's states, as
    the sum of state and embedding, scaled because embeddings are smaller than states in most models."""
    shape = {**asdict(target.config), "n_layer": n_layer or target.config.n_layer}
    config = SpecDiffConfig(**shape, gamma=gamma, reads=reads, feature_layers=feature_layers, rank=rank)
    drafter = config.make(target).to(target.device)
    # Only the Markov head starts at random. A blind drafter with all layers guesses slot 1 like the target.
    with torch.no_grad():
        drafter.load_state_dict(target.state_dict(), strict=False)       # its first layers, and its last norm
        drafter.mask.copy_(target.embed.weight.mean(0))
        if reads:
            one = torch.eye(config.d_model, device=target.device)
            size_of_states = target.norm.weight.norm() / len(one) ** 0.5
            drafter.join.bias.zero_()
            drafter.join.weight.copy_(torch.cat([one * size_of_states / target.embed.weight.std(), one], 1))
    return drafter


@torch.no_grad()
def from_prism(head, target, gamma, rank=0):
    """A drafter that starts as module 0 of a trained drafter of prism.py. It drafts the first slot as an
    EAGLE head does, except for one more row at the beginning of the text, so only the other slots are to be
    learned. One more layer, whose output starts as 0, follows the module's: there the masks can read the
    guess of the row of t_n."""
    n_layer = head.config.n_layer
    drafter = for_target(target, n_layer + 1, gamma, True, head.config.feature_layers, rank)
    drafter.fuse.load_state_dict(head.fuse.state_dict())
    drafter.load_state_dict(head.bank[0].state_dict(), strict=False)     # it has no tensors of the new layer
    drafter.blocks[n_layer].out.weight.zero_()
    drafter.blocks[n_layer].down.weight.zero_()
    return drafter


# -- the loss: many windows of a text in one forward ---------------------------------------------------------

def window_mask(n, seen, rows):
    """Which row sees which among n tokens of a text, followed by W windows of r = `rows` rows each: bool (B,
    1, n + W r, n + W r). The text is causal, so all windows share it. A row of window w sees the first
    seen[b, w] (B, W) tokens and all rows of its own window."""
    # How many tokens of the text each row sees.
    text = torch.arange(1, n + 1, device=seen.device).expand(len(seen), -1)
    limit = torch.cat([text, seen.repeat_interleave(rows, 1)], 1)                         # (B, n + W r)
    sees_text = text[0] <= limit[..., None]                                               # (B, n + W r, n)
    # Which windows' rows it sees: its own.
    window = torch.arange(seen.shape[1], device=seen.device).repeat_interleave(rows)      # (W r,)
    same = F.pad(window, (n, 0), value=-1)[:, None] == window                             # (n + W r, W r)
    return torch.cat([sees_text, same.expand(len(seen), -1, -1)], -1)[:, None]


def window_states(drafter, ids, starts, features=None, shown=None):
    """Final states (B, W, gamma, C) of the slots of windows that begin at positions `starts` (B, W), above 0,
    of texts ids (B, S), and (B, S, C) of the texts themselves.

    shown: the contents of the slots (B, W, gamma), MASK where they are open (default: all are). features (B,
    S, (F + 1) * C): the target's states of every token, for a drafter that reads them. Texts are padded on
    the right; no window may begin in the padding."""
    c = drafter.config
    n = ids.shape[1]
    rows = c.gamma - 1                              # the last committed token guesses slot 1
    places = places_of(starts, rows)
    slots = torch.full_like(places, MASK) if shown is None else shown[..., :rows]

    # 1. One sequence: the text, then the rows of all windows, at the positions that they have in the text.
    tokens = torch.cat([ids, slots.flatten(1)], 1)
    at = torch.arange(n, device=ids.device).expand(len(ids), -1)
    positions = torch.cat([at, places.flatten(1)], 1)
    if c.reads:
        features = F.pad(features, (0, 0, 1, 0))[:, :-1]        # of the token before
        newest = (starts - 1).repeat_interleave(rows, 1)
        features = torch.cat([features, at_places(features, newest)], 1)

    # 2. One forward, in which windows do not see each other.
    hidden = drafter(tokens, positions, gpt.dense_attend(window_mask(n, starts, rows)), features)
    windows = hidden[:, n:].unflatten(1, (-1, rows))                                      # (B, W, rows, C)
    last = at_places(hidden, starts - 1)
    return torch.cat([last[:, :, None], windows], 2), hidden[:, :n]                       # (B, W, gamma, C)


def markov_terms(drafter, tokens):
    """What the Markov head adds to the states of windows with the right tokens (B, W, gamma): (B, W, gamma,
    C), 0 in the first slot, whose row has read the token before."""
    if drafter.markov is None:
        return 0.0
    return F.pad(drafter.markov(drafter.target.embed(tokens[..., :-1])), (0, 0, 1, 0))


def draw_windows(learn, n, generator):
    """The positions (B, n) where n windows of each text begin: spread evenly over its tokens to learn, bool
    (B, S), from one random offset."""
    first = learn.int().argmax(1)
    count = learn.sum(1)
    u = (torch.rand(len(learn), 1, generator=generator) + torch.arange(n) / n) % 1
    return first[:, None] + (u.to(learn.device) * count[:, None]).long()


def places_of(starts, gamma):
    """The places (B, W, gamma) of the slots of windows that begin at `starts` (B, W)."""
    return starts[..., None] + torch.arange(gamma, device=starts.device)


def at_places(x, places):
    """x (B, S, ..) at places (B, ..) of each text; a place after its end reads the last one."""
    text = torch.arange(len(x), device=x.device)[:, None]
    rows = x[text, places.flatten(1).clamp(max=x.shape[1] - 1)]
    return rows.unflatten(1, places.shape[1:])


def _answers(drafter, batch, starts):
    """The target's tokens in the windows, each (B, W, gamma): tokens; their indices; log_p; and valid, False
    after the end of the answer and for tokens outside the draft vocabulary."""
    places = places_of(starts, drafter.config.gamma)
    tokens, written, log_p = (at_places(x, places) for x in (batch.ids, batch.learn, batch.log_p))
    index = drafter.draft_head.indices(tokens)
    valid = written & (places < batch.ids.shape[1]) & (index >= 0)
    return tokens, index.clamp(min=0), log_p, valid


def log_streak(log_q, valid):
    """log c_m (..., gamma), the log-probability that the first m drafts are all right, from the log q (...,
    gamma) of each; -inf from the first invalid slot on. log J is its logsumexp, J the sum of its exp: in fp32
    log space, where no product underflows."""
    return log_q.cumsum(-1).masked_fill(valid.long().cumprod(-1) == 0, float("-inf"))


def objective(name, logits, labels, valid, log_p=None, weight=1):
    """The loss of windows, a scalar, from logits (..., gamma, N), labels (indices) and valid (..., gamma).

    The streaks see the window as a whole:
    streak       -J, the paper's: minus the expected number of drafts that point-mass acceptance takes
    log-streak   -log J, whose gradient does not vanish where J is small
    streak-rs    -J of min(1, q / p) instead of q: the same for rejection; log_p (..., gamma): the target's

    The others are a mean over slots:
    mdlm         cross-entropy of slots masked at random; weight (..., gamma): 1 / rate where masked, else 0
    ce           cross-entropy of all slots
    """
    log_q = logits.float().log_softmax(-1).gather(-1, labels[..., None])[..., 0]          # (..., gamma)

    if name == "streak-rs":
        log_q = (log_q - log_p).clamp(max=0)             # of being accepted
    if name in ("streak", "streak-rs"):
        return -log_streak(log_q, valid).exp().sum(-1).mean()
    if name == "log-streak":
        started = valid[..., 0]                          # elsewhere J is 0 whatever the drafter does
        return -log_streak(log_q, valid)[started].logsumexp(-1).sum() / started.sum().clamp(min=1)
    # Masked slots count 1 / rate each, so all slots of a window count 1 on average.
    return -(log_q * valid * weight).sum() / valid.sum().clamp(min=1)


def _mask_at_random(tokens, generator):
    """Masked diffusion of windows (B, W, gamma): a rate for each window, with which its slots are masked.
    Returns what the slots show, for `window_states`, and their weights in `objective`."""
    gamma = tokens.shape[-1]
    u = torch.rand(*tokens.shape[:-1], 1, generator=generator)
    rate = (1 + (gamma - 1) * u) / gamma                           # at least one slot, on average
    masked = torch.rand(tokens.shape, generator=generator) < rate
    weight = masked / rate
    weight[..., -1] = 1                                            # no row could show the last slot's token
    shown = tokens.masked_fill(masked.to(tokens.device), MASK)
    return shown, weight.to(tokens.device)


def training_loss(drafter, name, batch, n_windows, generator):
    """The objective `name` on n_windows windows of each text of a data.recorded.Batch."""
    # 1. Windows at random places of the answers.
    starts = draw_windows(batch.learn, n_windows, generator)
    tokens, labels, log_p, valid = _answers(drafter, batch, starts)
    # 2. The contents of the slots: all open, or for masked diffusion some of the answer.
    shown, weight = None, 1
    if name == "mdlm":
        shown, weight = _mask_at_random(tokens, generator)
        shown = shown.masked_fill(~valid, MASK)          # only what may be drafted, up to the end
    # 3. The guesses, and their loss.
    windows, text = window_states(drafter, batch.ids, starts, batch.features(drafter.config), shown)
    windows = windows + markov_terms(drafter, tokens)
    if name == "kl":
        return distillation(drafter, batch, starts, windows, text, valid)
    return objective(name, drafter.draft_head.head(windows), labels, valid, log_p, weight)


def distillation(drafter, batch, starts, windows, text, valid):
    """KL divergence from the target's distribution of every slot, given the true tokens before it, to the
    drafter's, slot by slot. On sampled answers it has the same optimum as cross-entropy, and learns it from
    fewer answers. windows and text: from window_states."""
    gamma = drafter.config.gamma
    logits = drafter.draft_head.head
    # The first slot: the text's rows predict it, so every row of an answer can learn.
    to_learn = F.pad(batch.learn[:, 1:], (0, 1))                                          # (B, S)
    first = kl(goal_of(logits(batch.hidden[to_learn])), logits(text[to_learn])).mean()
    # The others, slot by slot.
    goal = at_places(batch.hidden, places_of(starts - 1, gamma))                          # (B, W, gamma, C)
    slots = kl(goal_of(logits(goal)), logits(windows)) * valid                            # (B, W, gamma)
    mean = slots.sum((0, 1)) / valid.sum((0, 1)).clamp(min=1)
    decay = DECAY ** torch.arange(gamma, device=mean.device)
    return first + (mean * decay)[1:].sum()


def estimate(drafter, batch, n_windows):
    """The mean number of drafts that windows of a data.recorded.Batch would have accepted: {"greedy"}, the
    argmax at temperature 0, and {"point_mass", "rejection"}, a chain drawn from q at temperature 1. It is the
    sum of the probabilities that the first 1, 2, .. drafts are accepted. With a Markov head q is over all
    tokens here, and in drafting over CANDIDATES of them."""
    starts = draw_windows(batch.learn, n_windows, torch.Generator().manual_seed(0))
    tokens, labels, log_p, valid = _answers(drafter, batch, starts)
    windows, _ = window_states(drafter, batch.ids, starts, batch.features(drafter.config))
    logits = drafter.draft_head.head(windows + markov_terms(drafter, tokens))
    right = (logits.argmax(-1) == labels) & valid
    accepted = {
        "greedy": right.long().cumprod(-1).sum(-1).float().mean(),
        "point_mass": -objective("streak", logits, labels, valid),
        "rejection": -objective("streak-rs", logits, labels, valid, log_p),
    }
    return {name: x.item() for name, x in accepted.items()}


# -- drafting: K chains from one forward -----------------------------------------------------------

def best_path(draft, parents, p):
    """SpecDiff-2's self-selection (Eq. 7): the rows of the path with the largest sum, over its rows, of the
    probability that the target would accept that far. p (n + 1, V)."""
    # reach: the probability to be accepted up to a row; score: its sum along the path.
    given = p[list(parents), draft].tolist()
    reach, score = [1.0], [0.0]
    for parent, one in zip(parents, given):
        reach.append(reach[parent] * one)
        score.append(score[parent] + reach[-1])
    # The end of a path has its largest score; walk back from the best one.
    row = score.index(max(score))
    rows = []
    while row:
        rows.insert(0, row)
        row = parents[row - 1]
    return rows


class SpecDiffDrafter(ChainDrafter):
    """Drafts for the engine's SyncScheduler: SyncScheduler(engine, SpecDiffDrafter(..), gamma * k_drafts).

    gamma drafts per chain, k_drafts chains per round. Under the rule `coupled` chain i begins with the i-th
    best token of the first slot, and all go on with the best. Under the others chains are independent.
    temperature: of q, under any rule (default: the request's own; under `point-mass` 0; of several chains
    that are not coupled 1); at 0 drafts are the argmax. A single chain is cut where it gets improbable."""
    name = "specdiff"
    segments = 2            # of a request in a round: its new tokens, and its window
    select = staticmethod(best_path)

    def __init__(self, drafter, target, gamma=None, k_drafts=1, temperature=None):
        if gamma is None:
            gamma = drafter.config.gamma
        check_k(gamma)
        most = min(MAX_NODES // gamma, CANDIDATES)
        if not 1 <= k_drafts <= most:
            raise ValueError(f"k-drafts {k_drafts} is out of range; allowed is 1 to {most}")
        if temperature and not LEAST_TEMPERATURE <= temperature <= 100:
            raise ValueError(f"draft-temperature {temperature} is out of range; "
                             f"allowed is 0 (the argmax), or {LEAST_TEMPERATURE} to 100")
        super().__init__(drafter.config, target, gamma)
        self.drafter = drafter.to(target.dtype)
        self.draft_head = drafter.draft_head
        self.gamma = gamma
        self.width = min(k_drafts, self.draft_head.size)
        self.temperature = temperature
        self.uses_hidden_states = drafter.config.reads
        self.feature_layers = drafter.config.feature_layers

    def first_rows(self, request, limit):
        """First its new committed tokens, causal; then the window's masks, which see each other. A request
        near its end has a shorter window."""
        state = self.state_of(request)
        # The row of the last token guesses the first slot.
        masks = [MASK] * (min(self.gamma, limit) - 1)
        # Each new token reads the state of the token before it, the first one none.
        if self.uses_hidden_states and state.cached == 0:
            state.features.insert(0, state.cache.k.new_zeros(1, self.n_features))
        fed = [state.rows(request.tokens[state.cached:])]
        if masks:
            # Each mask reads the newest state there is.
            if self.uses_hidden_states:
                state.features = [fed[0].features[-1:].expand(len(masks), -1)]
            sees_all = torch.ones(len(masks), len(masks), dtype=torch.bool)
            fed.append(state.rows(masks, tail=sees_all))
        return fed

    def settings_of(self, request):
        settings = super().settings_of(request)
        if self.temperature is not None:
            return replace(settings, temperature=self.temperature)
        if self.width > 1 and settings.rule != "coupled":
            return replace(settings, temperature=1.0)    # chains that are all alike would be one chain
        return settings

    def round(self, x):
        """One forward of all windows, and the K chains of each: tokens (B, n, K), PAD_DRAFT after a chain
        that was cut, and the distributions q (B, n, K, N) that they were drawn from, (B, n, 1, N) without a
        Markov head."""
        n, settings = x.options
        hidden = self.drafter(x.tokens, x.positions, x.attend, x.features)
        # The window follows the last token. After a shorter one come rows of other requests or none; the
        # drafts of these are not used.
        rows = x.per_request["last"][:, None] + torch.arange(n, device=hidden.device)
        index, q = self.chains(hidden[rows.clamp(max=len(hidden) - 1)], x)
        tokens = self.draft_head.tokens(index)
        if self.width == 1:                              # the draft that drops below is still verified
            reach = q.gather(-1, index[..., None])[..., 0].cumprod(1)
            ended = reach[:, :-1] < x.per_request["min_confidence"][:, None, None]
            tokens[:, 1:].masked_fill_(ended, PAD_DRAFT)
        return [tokens, q]

    def chains(self, states, x):
        """K chains from the states (B, n, C) of the slots: indices (B, n, K), and q, see `round`. Drafts are
        the largest of q / noise, or of q."""
        n, settings = x.options
        coupled = settings.rule == "coupled"
        logits = self.draft_head.head(states)                                             # (B, n, N)
        noise = torch.ones_like(logits, dtype=torch.float)[:, :, None]                    # (B, n, 1, N)
        if settings.temperature:
            # Under the rule `coupled` all chains have the target's noise, else each its own.
            own = range(1 if coupled else self.width)
            noise = torch.stack([self.noise(x, n, chain=chain) for chain in own], 2)
        noise = noise.expand(-1, -1, self.width, -1)                                      # (B, n, K, N)
        if self.drafter.markov is None:
            q = warp(logits, settings)[:, :, None]
            return best(q / noise, coupled), q

        # With a Markov head one slot follows the other, among the likeliest tokens of its marginal.
        top, among = logits.topk(min(CANDIDATES, self.draft_head.size))                   # (B, n, c)
        of_head = self.draft_head.head.weight[among]                                      # (B, n, c, C)
        drawn, qs = [], torch.zeros_like(noise)
        for slot in range(n):
            given = top[:, slot, None].expand(-1, self.width, -1)                         # (B, K, c)
            if slot:
                before = self.draft_head.tokens(drawn[-1])
                term = self.drafter.markov(self.drafter.target.embed(before))             # (B, K, C)
                given = given + term @ of_head[:, slot].mT
            q, here = warp(given, settings), among[:, slot, None].expand_as(given)
            scores = q / noise[:, slot].gather(-1, here)
            index = best(scores[:, None], coupled and not slot)[:, 0]                     # (B, K)
            drawn.append(here.gather(-1, index[..., None])[..., 0])
            qs[:, slot].scatter_(-1, here, q)
        return torch.stack(drawn, 1), qs

    def result(self, request, drafts, q, limit):
        """The proposal for a request: a chain of `drafts` (n, K), or a trie of all that fit."""
        n = min(len(drafts), limit)
        k = min(self.width, limit // n)
        by_chance = self.settings_of(request).temperature > 0
        chains, qs = list(zip(*drafts)), q.expand(-1, self.width, -1).unbind(1)
        if k == 1:
            chain, q = super().result(request, list(chains[0]), qs[0], limit)
            # Rejection cannot verify an argmax.
            known = by_chance or not request.sampling.rejects
            return chain, q if known else None
        qs = [partial(self.draft_head.whole, own) for own in qs]
        tokens, parents = [], []
        rows = [graft(chain[:n], tokens, parents) for chain in chains[:k]]
        drawn = [list(zip(rows, qs))] if request.sampling.rejects and by_chance else []
        return tokens, qs[0], parents, *drawn


def best(scores, spread):
    """The best of scores (B, n, K, c): indices (B, n, K). spread: in the first slot chain i begins with the
    i-th best."""
    index = scores.argmax(-1)
    if spread and index.shape[-1] > 1:
        index[:, 0] = scores[:, 0, 0].topk(index.shape[-1]).indices
    return index
