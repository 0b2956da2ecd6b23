"""SpecDiff-2 (arXiv 2511.00606): a diffusion drafter proposes a whole window in one forward, and is trained
for what counts.

An autoregressive drafter needs gamma forwards for gamma drafts; a masked-diffusion one fills gamma open slots
in a single one. The price: slot j is guessed without knowing the tokens of slots 1 .. j-1, so acceptance
falls quickly along the window. Two remedies. Streak-distillation trains on the target's own answers for the
expected number of accepted drafts,

    J = sum_m c_m,    c_m = q_1(x_1) .. q_m(x_m)          x the target's tokens, q_j the marginal of slot j

instead of agreement slot by slot. And because the marginals do not depend on the drafted tokens, K chains
cost one forward like one chain does; the target judges their merged trie in one forward, too (`RULES`;
verify.py has the acceptance rules).

Rows of a round: first the tokens committed since the last one, causal, whose keys stay in the drafter's cache
for good. Then the window, whose rows see everything, each other included, and whose keys are overwritten by
the next round:

    plain      t_0   t_1   ..  t_n   | MASK  ..  MASK      a causal prefix: cached keys equal a new prefill's
    tapped     t_0   t_1   ..  t_n   | MASK  ..  MASK      the same, and every row reads a hidden state f of
                     f_0   ..  f_n-1 | f_n-1 ..  f_n-1     the target: the newest when the token is chosen

`shift` True: a row guesses the token after its own, as the target does, whose weights the drafter starts
from; t_n guesses slot 1 and gamma - 1 masks the others. False: every mask guesses its own slot, of which
there are gamma. The tapped form joins the ideas of DFlash (2602.06036), a diffusion drafter that reads the
target, and of EAGLE, which pairs the state of a token with the next token: the row of t_n has what an EAGLE
head has.

What differs from the paper and why: the released drafter sees its prefix bidirectionally and encodes it again
every round; ours is causal, so that a cache is exact and many windows of a text train in one forward. The
released code trains the paper's loss, which fits point-mass acceptance, and decodes with multi-round
rejection; here each rule has its loss (`streak`, `streak-rs`). The drafter starts as the first layers of the
target, whose embedding and head it uses, and not from a diffusion model of its own.

Glossary: window <-> draft block; gamma <-> window length; chains <-> K drafts; `selection` <->
self-selection; J <-> E[streak]. Shapes: B texts, S tokens, W windows per text, r rows of a window, V tokens
of the vocabulary. """
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial

import torch
import torch.nn as nn
import torch.nn.functional as F

from minispec.core import gpt
from minispec.tools import checkpoints
from minispec.core.cpu import store_by_columns, training_attend
from minispec.core.attention import can_fuse
from minispec.core.drafters import Cached, pack
from minispec.core.requests import MAX_K
from minispec.core.words import Words, buffer
from minispec.core.verify import draw, point_mass_tree, rejection_tree, selection_tree, warp

MASK = -1                   # an open slot; not a token, so that any vocabulary will do
MAX_NODES = 256             # drafts of a round, all chains together
OBJECTIVES = ("mdlm", "ce", "streak", "log-streak", "streak-rs")
RULES = {"rejection": rejection_tree, "selection": selection_tree, "walk": point_mass_tree}


@dataclass
class SpecDiffConfig(gpt.GPTConfig):
    """The shape of the model that the drafter starts from, and what makes it a drafter."""
    gamma: int = 8          # slots of a window in training; decoding may use another number
    taps: tuple = None      # layers of the target that it reads; (): the final state; None: none
    target: str = ""        # fingerprint of the target that it is trained for
    draft_vocab: int = 0    # tokens that it may draft, the ids in its weights; 0: all

    def __post_init__(self):
        if self.taps is not None:
            self.taps = tuple(self.taps)
        if not 2 <= self.gamma <= MAX_K:
            raise ValueError(f"gamma {self.gamma} is out of range; allowed is 2 to {MAX_K} slots")


class Drafter(nn.Module):
    """Blocks of a GPT, one vector for an open slot, and, if it is tapped, a projection of the target's
    features. Embedding and head are the target's, and not held here."""

    def __init__(self, config, target):
        super().__init__()
        self.config = c = config
        self.__dict__["target"] = target                 # not registered, so neither trained nor saved
        self.register_buffer("vocabulary", buffer(c))
        self.blocks = nn.ModuleList(gpt.Block(i, c) for i in range(c.n_layer))
        self.norm = gpt.RMSNorm(c.d_model, c.norm_eps)
        self.mask = nn.Parameter(torch.zeros(c.d_model))
        self.fuse = None
        if c.taps is not None:
            n_states = max(len(c.taps), 1)
            self.fuse = gpt.Linear(n_states * target.config.d_model, c.d_model, bias=False)
        self.rope = gpt.Rope(c)

    @cached_property
    def words(self):                                     # not before the ids are loaded
        return Words(self.target, self.vocabulary)

    def forward(self, tokens, positions, attend, features=None):
        """Final states (..., C) of tokens (...), MASK for an open slot, at positions (...). features (...,
        F): for a tapped drafter, the target's of the token before, or of the last one that the target has
        seen."""
        x = self.embed(tokens, features)
        cos, sin = self.rope(positions, x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin, attend)
        return self.norm(x)

    def embed(self, tokens, features):
        x = self.target.embed(tokens.clamp(min=0))
        x = torch.where((tokens == MASK)[..., None], self.mask, x)
        return x if self.fuse is None else x + self.fuse(features)

    def n_params(self):
        return sum(p.numel() for p in self.parameters())

    def check(self, target):
        """ValueError where this drafter was not made for a target of this shape."""
        checkpoints.check_shapes(self.config, target.config, ("vocab_size", "d_model"))


def for_target(target, n_layer=None, gamma=8, shift=True, taps=None):
    """A drafter that starts as the first n_layer layers (default: all) of the target. An open slot starts as
    the mean of all tokens."""
    most = target.config.n_layer
    n_layer = n_layer or most
    if not 1 <= n_layer <= most:
        raise ValueError(f"layers {n_layer} is out of range; the target has {most}")
    shape = {**asdict(target.config), "n_layer": n_layer, "shift": shift}
    config = SpecDiffConfig(**shape, gamma=gamma, taps=taps, target=checkpoints.fingerprint(target))
    drafter = Drafter(config, target).to(target.device)
    with torch.no_grad():
        drafter.norm.load_state_dict(target.norm.state_dict())
        for mine, theirs in zip(drafter.blocks, target.blocks):
            mine.load_state_dict(theirs.state_dict())
        drafter.mask.copy_(target.embed.weight.mean(0))
        if drafter.fuse is not None:
            drafter.fuse.weight.zero_()                  # it starts as the plain form
    return drafter


def tapped(drafter, target, taps):
    """The same drafter, which from now on also reads the target: a projection of 0 changes nothing yet.
    ValueError if it reads the target already."""
    reads = drafter.config.taps
    if reads is not None or taps is None:
        what = "nothing" if reads is None else reads or "the last state"
        raise ValueError(f"the drafter reads {what} of the target; only one that reads nothing can begin to")
    out = Drafter(replace(drafter.config, taps=taps), target).to(target.device)
    with torch.no_grad():
        out.fuse.weight.zero_()
        out.load_state_dict({**out.state_dict(), **drafter.state_dict()})
    return out


# -- training: many windows of a text in one forward -----------------------------------------------

def window_attend(n, seen, rows, clean):
    """attend over n clean rows, the text, followed by W windows of `rows` rows each. A row of window w sees
    the first seen[b, w] clean rows and all rows of its own window, under one softmax. seen: (B, W). clean:
    attend of the text."""
    future = torch.arange(n, device=seen.device) >= seen.repeat_interleave(rows, 1)[..., None]    # (B, wr, n)
    future = future[:, None, None]                                      # the same for all heads

    def attend(layer, q, k, v):
        """q (B, n + W r, H, D), k and v (B, n + W r, G, D) -> (B, n + W r, H, D)."""
        # The text attends to itself, as in any GPT.
        text = clean(layer, q[:, :n], k[:, :n], v[:, :n])

        # A window scores the text and its own rows. g = H / G heads share a key; wr = W r rows in all.
        share = q.shape[2] // k.shape[2]
        q = q[:, n:] * q.shape[-1] ** -0.5
        q = q.unflatten(2, (-1, share)).permute(0, 2, 3, 1, 4)                            # (B, G, g, wr, D)
        k = k.transpose(1, 2)                                                             # (B, G, n + wr, D)
        v = v.transpose(1, 2)
        windows = (-1, rows)
        own_k = k[:, :, None, n:].unflatten(3, windows)                                   # (B, G, 1, W, r, D)
        own_v = v[:, :, None, n:].unflatten(3, windows)
        scores = q.flatten(2, 3) @ k[:, :, :n].transpose(-1, -2)
        scores = scores.unflatten(2, (share, -1)).masked_fill(future, float("-inf"))      # (B, G, g, wr, n)
        own = q.unflatten(3, windows) @ own_k.transpose(-1, -2)                           # (B, G, g, W, r, r)

        # One softmax over both, then the values of both.
        probs = torch.cat([scores, own.flatten(3, 4)], -1).softmax(-1).to(v.dtype)     # (B, G, g, wr, n + r)
        read = (probs[..., :n].flatten(2, 3) @ v[:, :, :n]).unflatten(2, (share, -1))
        read = read + (probs[..., n:].unflatten(3, windows) @ own_v).flatten(3, 4)        # (B, G, g, wr, D)
        return torch.cat([text, read.permute(0, 3, 1, 2, 4).flatten(2, 3)], 1)
    return attend


def window_logits(drafter, ids, starts, features=None, shown=None):
    """Logits (B, W, gamma, N) of the windows that begin at positions `starts` (B, W), above 0, of texts ids
    (B, S).

    shown: the contents of the slots (B, W, gamma), MASK where they are open (default: all are). features (B,
    S, F): what the target makes of every token, for a tapped drafter. Texts are padded on the right; no
    window may begin after that. """
    c = drafter.config
    n = ids.shape[1]
    rows = c.gamma - c.shift                        # shifted, the last committed token guesses slot 1
    at = torch.arange(n, device=ids.device)
    slots = torch.full((*starts.shape, rows), MASK, device=ids.device) if shown is None else shown[..., :rows]
    places = starts[..., None] + torch.arange(rows, device=ids.device)

    # 1. One sequence: the text, then the rows of all windows, at the positions that they have in the text.
    tokens = torch.cat([ids, slots.flatten(1)], 1)
    positions = torch.cat([at.expand(len(ids), -1), places.flatten(1)], 1).clamp(max=c.block_size - 1)
    if c.taps is not None:
        features = F.pad(features, (0, 0, 1, 0))[:, :-1]        # of the token before
        newest = (starts - 1).repeat_interleave(rows, 1)
        features = torch.cat([features, _rows_of(features, newest)], 1)

    # 2. One forward, in which windows do not see each other.
    hidden = drafter(tokens, positions, window_attend(n, starts, rows, training_attend(ids.device)), features)
    windows = hidden[:, n:].unflatten(1, (-1, rows))                                      # (B, W, rows, C)
    if c.shift:
        last = _rows_of(hidden, starts - 1)
        windows = torch.cat([last[:, :, None], windows], 2)                               # (B, W, gamma, C)
    return drafter.words.logits(windows)


def _rows_of(x, at):
    """Rows at[b, i] of x (B, S, C): (B, I, C)."""
    return x.gather(1, at[..., None].expand(-1, -1, x.shape[-1]))


def draw_windows(learn, n, generator):
    """Where n windows of each text begin, (B, n): spread evenly over its tokens to learn (bool (B, S)) from
    one random offset."""
    first = learn.int().argmax(1)
    count = learn.sum(1)
    u = (torch.rand(len(learn), 1, generator=generator) + torch.arange(n) / n) % 1
    return first[:, None] + (u.to(learn.device) * count[:, None]).long()


def of_windows(x, starts, gamma):
    """x (B, S, ..) of the slots of windows, (B, W, gamma, ..), and which of them (B, W, gamma) lie within
    S."""
    at = starts[..., None] + torch.arange(gamma, device=x.device)
    text = torch.arange(len(x), device=x.device)[:, None, None]
    return x[text, at.clamp(max=x.shape[1] - 1)], at < x.shape[1]


def _answers(drafter, batch, starts):
    """What the target wrote in windows, each (B, W, gamma): tokens; their indices; log_p; and valid, False
    behind the end of its answer and for tokens that the drafter cannot draft."""
    gamma = drafter.config.gamma
    tokens, inside = of_windows(batch.ids, starts, gamma)
    written, _ = of_windows(batch.learn, starts, gamma)
    log_p, _ = of_windows(batch.log_p, starts, gamma)
    index = drafter.words.indices(tokens)
    return tokens, index.clamp(min=0), log_p, inside & written & (index >= 0)


def log_streak(log_q, valid):
    """log c_m (..., gamma), the log-probability that the first m drafts are all right, from those of each
    one; -inf from the first slot on that is not valid. log J is its logsumexp, J the sum of its exp: in fp32
    log space, where no product underflows."""
    return log_q.cumsum(-1).masked_fill(valid.long().cumprod(-1) == 0, float("-inf"))


def objective(name, logits, labels, valid, log_p=None, weight=None):
    """The loss of windows, a scalar, from logits (..., gamma, N), labels (indices) and valid (..., gamma).

    The streaks see the window as a whole:
    streak       -J, the paper's: minus the expected number of drafts that point-mass acceptance takes
    log-streak   -log J, whose gradient does not vanish where J is small
    streak-rs    -J of min(1, q / p) instead of q: the same for rejection; log_p (..., gamma): the target's

    The others are a mean over slots:
    mdlm         cross-entropy of slots masked at random; weight (..., gamma): 1 / rate where masked, else 0
    ce           cross-entropy of all slots
    """
    if name not in OBJECTIVES:
        raise ValueError(f"unknown objective '{name}'; choose from {', '.join(OBJECTIVES)}")
    log_q = logits.float().log_softmax(-1).gather(-1, labels[..., None])[..., 0]      # of the target's tokens

    if name == "streak":
        return -log_streak(log_q, valid).exp().sum(-1).mean()
    if name == "log-streak":
        started = valid[..., 0]                          # elsewhere J is 0 whatever the drafter does
        return -log_streak(log_q, valid)[started].logsumexp(-1).sum() / started.sum().clamp(min=1)
    if name == "streak-rs":
        log_accept = (log_q - log_p).clamp(max=0)
        return -log_streak(log_accept, valid).exp().sum(-1).mean()
    # Masked slots count 1 / rate each, so all slots of a window count 1 on average.
    counts = valid if weight is None else valid * weight
    return -(log_q * counts).sum() / valid.sum()


def _mask_at_random(labels, shift, generator):
    """Masked diffusion: a rate per window, every slot masked with that probability. (shown, weight), see
    `objective`."""
    gamma = labels.shape[-1]
    u = torch.rand(*labels.shape[:-1], 1, generator=generator)
    rate = (1 + (gamma - 1) * u) / gamma                           # at least one slot, on average
    masked = torch.rand(labels.shape, generator=generator) < rate
    weight = masked / rate
    if shift:                                                      # no row could show the last slot's token
        weight[..., -1] = 1
    shown = labels.masked_fill(masked.to(labels.device), MASK)
    return shown, weight.to(labels.device)


def training_loss(drafter, name, batch, n_windows, generator):
    """The objective `name` on n_windows windows of each text of a rollouts.Batch."""
    # 1. Windows at random places of the answers.
    c = drafter.config
    starts = draw_windows(batch.learn, n_windows, generator)
    tokens, labels, log_p, valid = _answers(drafter, batch, starts)
    # 2. What the drafter sees: open slots, or for masked diffusion some of the answer.
    shown = weight = None
    if name == "mdlm":
        shown, weight = _mask_at_random(tokens, c.shift, generator)
    # 3. What it guesses, and how good that is.
    logits = window_logits(drafter, batch.ids, starts, batch.features, shown)
    return objective(name, logits, labels, valid, log_p, weight)


@torch.no_grad()
def estimate(drafter, batch, n_windows):
    """What windows of a rollouts.Batch would have accepted, {name: (gamma,)}: how often, on average over
    windows, the first 1, 2, .. drafts are, for the argmax at temperature 0 ("greedy"), and for a chain drawn
    from q under "point_mass" and "rejection"; their sums are mean accepted drafts. "entropy": of the
    marginals, in nats."""
    starts = draw_windows(batch.learn, n_windows, torch.Generator().manual_seed(0))
    _, labels, log_p, valid = _answers(drafter, batch, starts)
    all_q = window_logits(drafter, batch.ids, starts, batch.features).float().log_softmax(-1)
    log_q = all_q.gather(-1, labels[..., None])[..., 0]
    right = (all_q.argmax(-1) == labels) & valid
    per_window = {
        "greedy": right.long().cumprod(-1),
        "point_mass": log_streak(log_q, valid).exp(),
        "rejection": log_streak((log_q - log_p).clamp(max=0), valid).exp(),
        "entropy": -(all_q.exp() * all_q).sum(-1),
    }
    return {name: x.float().mean((0, 1)).cpu() for name, x in per_window.items()}


# -- drafting: K chains from one forward -----------------------------------------------------------

def merge(chains):
    """K chains of tokens as a trie: (tokens, parents, rows of each chain); see verify.py. Row 0 is the root,
    the last committed token; row i holds tokens[i - 1]."""
    tokens, parents, rows = [], [], []
    row = {}                                             # (row of the parent, token) -> row
    for chain in chains:
        path = []
        at = 0
        for token in chain:
            if (at, token) not in row:
                tokens.append(token)
                parents.append(at)
                row[at, token] = len(tokens)
            at = row[at, token]
            path.append(at)
        rows.append(path)
    return tokens, parents, rows


class SpecDiffDrafter(Cached):
    """Drafts for the engine's Lockstep planner: Lockstep(engine, SpecDiffDrafter(..), gamma * k_drafts).

    gamma drafts per chain, k_drafts chains per round. Chains are drawn independently at temperature
    `temperature` (default: of one chain the request's own, of several 1); at 0 the chain is the argmax. rule:
    who judges them where the target samples, see RULES; with one chain, selection and walk both are the point
    mass. """
    name = "specdiff"

    def __init__(self, drafter, target, gamma=None, k_drafts=1, rule="rejection", temperature=None):
        drafter.check(target)
        if gamma is None:
            gamma = drafter.config.gamma
        if not 1 <= gamma <= MAX_K:
            raise ValueError(f"gamma {gamma} is out of range; allowed is 1 to {MAX_K}")
        if not 1 <= k_drafts <= MAX_NODES // gamma:
            raise ValueError(f"k-drafts {k_drafts} is out of range; allowed is 1 to {MAX_NODES // gamma}")
        if rule not in RULES:
            raise ValueError(f"unknown rule '{rule}'; choose from {', '.join(RULES)}")
        if temperature is not None and not 0 <= temperature <= 100:
            raise ValueError(f"draft-temperature {temperature} is out of range; "
                             "allowed is 0 (the argmax) to 100")
        if temperature is None and k_drafts > 1:
            temperature = 1.0                            # chains that are all alike would be one chain
        super().__init__(drafter.config, target)
        self.drafter = drafter.to(target.dtype)
        self.words = drafter.words
        self.gamma = gamma
        self.width = k_drafts
        self.rule = rule
        self.temperature = temperature
        self.max_k = MAX_K if k_drafts == 1 else MAX_NODES
        self.taps = drafter.config.taps

    def prepare(self, batch, longest):
        """On a GPU a forward of all windows is one CUDA graph."""
        if can_fuse(self.target):
            width = 0 if self.taps is None else self.drafter.fuse.in_features
            # A request is there twice: its new tokens, and its window.
            self.make_graphs(self._windows, batch, longest, self.gamma, width, segments=2)

    def _windows(self, x):
        from kernels.fused import decode
        drafter = self.drafter
        h = drafter.embed(x.tokens, x.features)
        return decode(drafter.blocks, drafter.norm, drafter.rope, h, x, self.pool)

    def _note(self, request):
        new = request not in self.notes
        notes = self.note(request, self.gamma)
        if new and self.taps is not None:                # before the first token the target has no state
            width = self.drafter.fuse.in_features
            notes.features.append(notes.cache.k.new_zeros(1, width))
        return notes

    def observe(self, request, features):
        """The target's features (n, F) of its next n cached positions; called for tapped drafters alone."""
        self._note(request).features.append(features)

    def propose(self, requests, limits):
        """For every request, at most limits[i] drafts of one chain or of a trie; see drafters.py."""
        sizes = [min(self.gamma, limit) for limit in limits]               # slots of each window
        live = [(r, size) for r, size in zip(requests, sizes) if size > 0]
        logits = iter(self._forward(live)) if live else None
        out = []
        for r, size, limit in zip(requests, sizes, limits):
            out.append(self._chains(r, next(logits), limit) if size > 0 else ([], None))
        return out

    def _forward(self, live):
        """One forward for all (request, slots of its window): the logits (slots, N) of each."""
        work, wanted, n = [], [], 0
        for request, slots in live:
            for rows in self._rows(request, slots):
                work.append(rows)
                n += len(rows.tokens)
            wanted += range(n - slots, n)                # shifted, the row before the masks guesses slot 1
        if self.graphs and all(rows.keys.cache is self.pool for rows in work):
            hidden, = self.run_graph(work)
        else:
            hidden = self.drafter(*pack(work, self.target.device))
        logits = self.words.logits(hidden[wanted])
        return logits.split([slots for _, slots in live])

    def _rows(self, request, slots):
        """What a request feeds: first its new committed tokens, causal; then the window's masks, which see
        each other."""
        notes = self._note(request)
        new = request.tokens[notes.cached:]
        masks = [MASK] * (slots - self.drafter.config.shift)
        end = len(request.tokens)
        of_new = of_masks = None
        if self.taps is not None:
            # Each new token reads the state of the token before it, each mask the newest state there is.
            of_new = torch.cat(notes.features)[-len(new):]
            of_masks = of_new[-1:].expand(len(masks), -1)
            notes.features = []
        fed = [notes.rows(notes.cached, new, of_new)]
        if masks:
            sees_all = torch.ones(len(masks), len(masks), dtype=torch.bool)
            fed.append(notes.rows(end, masks, of_masks, tail=sees_all))
        notes.cached = end                               # the next round overwrites the masks' keys
        return fed

    def _chains(self, request, logits, limit):
        """What the engine gets of one request: a chain, or the trie of several, drawn from the logits (n, N)
        of the slots."""
        sampling = request.sampling
        if self.temperature is not None:
            sampling = replace(sampling, temperature=self.temperature)
        if sampling.temperature == 0:
            return self.words.tokens(logits.argmax(-1)).tolist(), None

        # Draw k chains from the same marginals. Near the end of an answer, fewer fit into its cache.
        n = len(logits)
        k = min(self.width, limit // n)
        q = warp(logits, sampling)                                                        # (n, N)
        coins = request.coins(n * k).view(n, k).to(q.device)
        drawn = draw(q[:, None].expand(-1, k, -1), coins)                                 # (n, k)
        chains = self.words.tokens(drawn).T.tolist()                                  # k lists of n tokens
        q = self.words.whole(q)                                                           # (n, V)
        if k == 1:
            return chains[0], q if self.rule == "rejection" else None

        # Merge them to a trie, and say which rule judges it.
        tokens, parents, rows = merge(chains)
        rule = RULES[self.rule]
        if self.rule == "rejection":
            rule = partial(rejection_tree, rows, q)
        return tokens, None, parents, rule


# -- folders ---------------------------------------------------------------------------------------

def save(drafter, folder):
    checkpoints.save_drafter(drafter, folder, "specdiff")


def load(folder, target):
    """The drafter in a folder, on the device and in the dtype of its target. ValueError, in one line, says
    what is wrong."""
    def make(shared=True, **config):                     # older drafters say that they share the embedding
        drafter = Drafter(checkpoints.checked(SpecDiffConfig(**config)), target)
        drafter.check(target)
        return drafter
    drafter = checkpoints.load_drafter(folder, "specdiff", make)
    return store_by_columns(drafter.to(device=target.device, dtype=target.dtype).eval())
