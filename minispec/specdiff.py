"""SpecDiff-2 (arXiv 2511.00606): a diffusion drafter proposes a whole window in one forward, and is trained for what counts.

An autoregressive drafter needs gamma forwards for gamma drafts; a masked-diffusion one fills gamma open slots in a single
one. The price: slot j is guessed without knowing what stands in slots 1 .. j-1, so acceptance falls quickly along the window.
Two remedies. Streak-distillation trains on the target's own answers for the expected number of accepted drafts,

    J = sum_m c_m,    c_m = q_1(x_1) .. q_m(x_m)          x the target's tokens, q_j the marginal of slot j

instead of agreement slot by slot. And as the marginals do not depend on the drafted tokens, K chains cost one forward like
one chain does; the target judges their merged trie in one forward, too (`RULES`; verify.py has the acceptance rules).

Rows of a round: the tokens committed since the last one, causal, whose keys stay in the drafter's cache for good; then the
window, whose rows see everything, each other included, and whose keys are overwritten by the next round:

    plain      t_0   t_1   ..  t_n   | MASK  ..  MASK      a causal prefix, so cached keys are exactly those of a new prefill
    tapped     t_0   t_1   ..  t_n   | MASK  ..  MASK      the same, and every row comes with the newest hidden state (f) that the target
                     f_0   ..  f_n-1 | f_n-1 ..  f_n-1     has when the row's token is chosen: that of the token before

`shift` True: a row guesses the token after its own, as the target does, whose weights the drafter starts from; t_n guesses slot 1
and gamma - 1 masks the others. False: every mask guesses its own slot, of which there are gamma. The tapped form joins the
ideas of DFlash (2602.06036), a diffusion drafter that reads the target, and of EAGLE, by which the state of a token stands beside
the next one: the row of t_n has what an EAGLE head has.

What differs from the paper and why: the released drafter sees its prefix bidirectionally and encodes it anew every round; ours
is causal, so that a cache is exact and many windows of a text train in one forward. The released code trains the paper's
loss, which fits point-mass acceptance, and decodes with multi-round rejection; here each rule has its loss (`streak`,
`streak-rs`). Embedding and head are the target's where the drafter starts from it. Glossary: window <-> draft block; gamma
<-> window length; chains <-> K drafts; `selection` <-> self-selection; J <-> E[streak].
"""
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

from minispec.core import gpt
from minispec.tools import checkpoints
from minispec.core.attention import FullKeys, dense_attend, packed_attend
from minispec.core.cpu import blocked_attend, store_by_columns
from minispec.core.engine import MAX_K
from minispec.core.kv_cache import KVCache
from minispec.core.verify import draw, point_mass_tree, rejection_tree, selection_tree, warp

MASK = -1                   # an open slot; not a token, so that any vocabulary will do
MAX_NODES = 256             # drafts of a round, all chains together
OBJECTIVES = ("mdlm", "first", "ce", "exp-ce", "kl", "streak", "log-streak", "streak-rs")
RULES = {"rejection": rejection_tree, "selection": selection_tree, "walk": point_mass_tree}


@dataclass
class SpecDiffConfig(gpt.GPTConfig):
    """The shape of the model that the drafter starts from, and what makes it a drafter."""
    gamma: int = 8          # slots of a window in training; decoding may use another number
    taps: tuple = None      # layers of the target that it reads; (): the final hidden state; None: it reads tokens alone
    shared: bool = True     # embedding and head are the target's
    target: str = ""        # fingerprint of the target that it is trained for

    def __post_init__(self):
        self.taps = None if self.taps is None else tuple(self.taps)
        if not 2 <= self.gamma <= MAX_K:
            raise ValueError(f"gamma {self.gamma} is out of range; allowed is 2 to {MAX_K} slots")


class Words(nn.Module):
    """Embedding and head of a drafter that does not use the target's."""

    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.head = None if c.tied else gpt.Linear(c.d_model, c.vocab_size, bias=False)

    def logits(self, hidden):
        return F.linear(hidden, (self.embed if self.head is None else self.head).weight)


class Drafter(nn.Module):
    """Blocks of a GPT, one vector for an open slot, and, if it is tapped, a projection of the target's features."""

    def __init__(self, config, target):
        super().__init__()
        self.config = c = config
        if c.shared:
            self.__dict__["words"] = target              # not registered: the target's, not ours to train or to save
        else:
            self.words = Words(c)
        self.blocks = nn.ModuleList(gpt.Block(i, c) for i in range(c.n_layer))
        self.norm = gpt.RMSNorm(c.d_model, c.norm_eps)
        self.mask = nn.Parameter(torch.zeros(c.d_model))
        self.fuse = None if c.taps is None else gpt.Linear(max(len(c.taps), 1) * target.config.d_model, c.d_model, bias=False)
        self.rope = gpt.Rope(c)

    def forward(self, tokens, positions, attend, features=None):
        """Final states (..., C) of tokens (...), MASK for an open slot, at positions (...). features (..., F): the target's of the
        token before, or of the last one it has seen; for a tapped drafter."""
        x = torch.where((tokens == MASK)[..., None], self.mask, self.words.embed(tokens.clamp(min=0)))
        if self.fuse is not None:
            x = x + self.fuse(features)
        cos, sin = self.rope(positions, x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin, attend)
        return self.norm(x)

    def n_params(self):
        return sum(p.numel() for p in self.parameters())

    def check(self, target):
        """ValueError where this drafter was not made for a target of this shape."""
        checkpoints.check_shapes(self.config, target.config, ("vocab_size", "d_model") if self.config.shared else ("vocab_size",))


def for_target(target, source=None, n_layer=None, gamma=8, shift=True, taps=None):
    """A drafter that starts as the first n_layer layers (default: all) of `source`, a GPT: the target itself, whose embedding
    and head it then uses, or a smaller model of the same vocabulary. An open slot starts as the mean of all tokens."""
    source = source or target
    n = n_layer or source.config.n_layer
    if not 1 <= n <= source.config.n_layer:
        raise ValueError(f"layers {n} is out of range; the model that the drafter starts from has {source.config.n_layer}")
    config = SpecDiffConfig(**{**asdict(source.config), "n_layer": n, "shift": shift}, gamma=gamma, taps=taps, shared=source is target, target=checkpoints.fingerprint(target))
    drafter = Drafter(config, target).to(target.device)
    drafter.check(target)
    with torch.no_grad():
        drafter.norm.load_state_dict(source.norm.state_dict())
        for mine, theirs in zip(drafter.blocks, source.blocks):
            mine.load_state_dict(theirs.state_dict())
        drafter.mask.copy_(source.embed.weight.mean(0))
        if drafter.fuse is not None:
            drafter.fuse.weight.zero_()                  # it starts as the plain form
        if not config.shared:
            drafter.words.load_state_dict({n: x for n, x in source.state_dict().items() if n in drafter.words.state_dict()})
    return drafter


def tapped(drafter, target, taps):
    """The same drafter, beginning to read the target: a projection of 0 changes nothing yet. ValueError if it reads already."""
    if drafter.config.taps is not None or taps is None:
        raise ValueError(f"the drafter reads {'nothing' if drafter.config.taps is None else drafter.config.taps or 'the last state'} of the target; only one that reads nothing can begin to")
    out = Drafter(replace(drafter.config, taps=taps), target).to(target.device)
    with torch.no_grad():
        out.fuse.weight.zero_()
        out.load_state_dict({**out.state_dict(), **drafter.state_dict()})
    return out


# -- training: many windows of a text in one forward -------------------------------------------------------------------

def window_attend(n, seen, rows, clean):
    """attend over n clean rows, for which `clean` cares, and behind them W windows of `rows` rows each. A row of window w sees the
    first seen[b, w] clean rows and all rows of its own window, under one softmax. seen: (B, W)."""
    future = torch.arange(n, device=seen.device) >= seen.repeat_interleave(rows, 1)[:, None, None, :, None]       # (B, 1, 1, W r, n)

    def attend(layer, q, k, v):
        """q (B, n + W r, H, D), k and v (B, n + W r, G, D) -> (B, n + W r, H, D)."""
        first = clean(layer, q[:, :n], k[:, :n], v[:, :n])
        windows, share = (-1, rows), q.shape[2] // k.shape[2]
        q = (q[:, n:] * q.shape[-1] ** -0.5).unflatten(2, (-1, share)).permute(0, 2, 3, 1, 4)                     # (B, G, g, W r, D)
        k, v = k.transpose(1, 2), v.transpose(1, 2)                                                              # (B, G, n + W r, D)
        scores = (q.flatten(2, 3) @ k[:, :, :n].transpose(-1, -2)).unflatten(2, (share, -1))                     # (B, G, g, W r, n)
        own = q.unflatten(3, windows) @ k[:, :, None, n:].unflatten(3, windows).transpose(-1, -2)                # (B, G, g, W, r, r)
        probs = torch.cat([scores.masked_fill(future, float("-inf")), own.flatten(3, 4)], -1).softmax(-1).to(v.dtype)
        read = (probs[..., :n].flatten(2, 3) @ v[:, :, :n]).unflatten(2, (share, -1))
        read = read + (probs[..., n:].unflatten(3, windows) @ v[:, :, None, n:].unflatten(3, windows)).flatten(3, 4)
        return torch.cat([first, read.permute(0, 3, 1, 2, 4).flatten(2, 3)], 1)
    return attend


def window_logits(drafter, ids, starts, features=None, shown=None):
    """Logits (B, W, gamma, V) of the windows that begin at positions `starts` (B, W), above 0, of texts ids (B, S).

    shown: what stands in the slots (B, W, gamma), MASK where they are open (default: all are). features (B, S, F): what the target
    makes of every token, for a tapped drafter. Texts are padded on the right, which no window may begin behind.
    """
    c, (b, s) = drafter.config, ids.shape
    at = torch.arange(c.gamma, device=ids.device)
    slots = torch.full((*starts.shape, c.gamma), MASK, device=ids.device) if shown is None else shown
    slots, places = slots[..., :c.gamma - c.shift], (starts[..., None] + at)[..., :c.gamma - c.shift]
    if c.taps is not None:
        features = F.pad(features, (0, 0, 1, 0))[:, :-1]                                                         # of the token before
        newest = (starts - 1).repeat_interleave(slots.shape[-1], 1)[..., None].expand(-1, -1, features.shape[-1])
        features = torch.cat([features, features.gather(1, newest)], 1)
    positions = torch.cat([torch.arange(s, device=ids.device).expand(b, -1), places.flatten(1)], 1).clamp(max=c.block_size - 1)
    attend = window_attend(s, starts, slots.shape[-1], blocked_attend() if ids.device.type == "cpu" else dense_attend())
    hidden = drafter(torch.cat([ids, slots.flatten(1)], 1), positions, attend, features)
    windows = hidden[:, s:].unflatten(1, slots.shape[1:])                                                        # (B, W, r, C)
    if c.shift:                                                                  # slot 1 is guessed by a clean row, the last committed token
        last = hidden.gather(1, (starts - 1)[..., None].expand(-1, -1, hidden.shape[-1]))
        windows = torch.cat([last[:, :, None], windows], 2)
    return drafter.words.logits(windows)


def draw_windows(learn, n, generator):
    """Where n windows of each text begin, (B, n): spread evenly over its tokens to learn (bool (B, S)) from one random offset."""
    first, count = learn.int().argmax(1), learn.sum(1)
    u = (torch.rand(len(learn), 1, generator=generator) + torch.arange(n) / n) % 1
    return first[:, None] + (u.to(learn.device) * count[:, None]).long()


def of_windows(x, starts, gamma):
    """x (B, S, ..) of the slots of windows, (B, W, gamma, ..), and which of them (B, W, gamma) lie within S."""
    at = starts[..., None] + torch.arange(gamma, device=x.device)
    row = torch.arange(len(x), device=x.device)[:, None, None]
    return x[row, at.clamp(max=x.shape[1] - 1)], at < x.shape[1]


def log_streak(log_q, valid):
    """log c_m (..., gamma), the log-probability that the first m drafts are all right, from those of each one; -inf behind the end
    of the text. log J is its logsumexp, J the sum of its exp: in fp32 log space, where no product can underflow."""
    return log_q.cumsum(-1).masked_fill(~valid, float("-inf"))


def objective(name, logits, labels, valid, log_p=None, goal=None, weight=None):
    """The loss of windows, a scalar, from logits (..., gamma, V), labels and valid (..., gamma). What else objectives need:

    mdlm         cross-entropy of slots masked at random: masked diffusion; weight (..., gamma): 1 / rate where masked, else 0
    first        KL divergence from the target's distribution at slot 1 alone: distillation as for autoregressive drafters
    ce, exp-ce   cross-entropy; weights exp(-(j - 1) / tau) with DFlash's tau of 7 at 16 slots, in proportion
    kl           KL divergence from the target's distributions, along its own answer; goal: its logits (..., gamma, V)
    streak       -J, the paper's: the expected number of accepted drafts under point-mass acceptance, with the sign turned
    log-streak   -log J, whose gradient does not vanish where J is small
    streak-rs    -J of min(1, q / p) instead of q: the same for rejection sampling; log_p (..., gamma): the target's own
    """
    all_q = logits.float().log_softmax(-1)
    log_q = all_q.gather(-1, labels[..., None])[..., 0]
    slot = torch.arange(labels.shape[-1], device=labels.device)
    if name == "streak":
        return -log_streak(log_q, valid).exp().sum(-1).mean()
    if name == "log-streak":
        return -log_streak(log_q, valid).logsumexp(-1).mean()
    if name == "streak-rs":
        return -log_streak((log_q - log_p).clamp(max=0), valid).exp().sum(-1).mean()
    if name == "mdlm":
        return -(log_q * valid * weight).sum() / valid.sum()
    if name in ("first", "kl"):
        log_goal = goal.float().log_softmax(-1)
        loss, weight = (log_goal.exp() * (log_goal - all_q)).sum(-1), valid * (slot == 0) if name == "first" else valid
    elif name in ("ce", "exp-ce"):
        loss, weight = -log_q, valid * torch.exp(-slot * 16 / (7 * len(slot))) if name == "exp-ce" else valid
    else:
        raise ValueError(f"unknown objective '{name}'; choose from {', '.join(OBJECTIVES)}")
    return (loss * weight).sum() / weight.sum()


def _windows(drafter, target, ids, starts, shown=None, goal=False):
    """Logits of windows, and the target's for the same slots if `goal`; the target runs only where it is needed."""
    c, features, goals = drafter.config, None, None
    if goal or c.taps is not None:
        with torch.no_grad():
            clean = blocked_attend() if ids.device.type == "cpu" else dense_attend()
            hidden, features = target.features(ids, torch.arange(ids.shape[1], device=ids.device)[None], clean, c.taps or ())
            goals = target.logits(of_windows(hidden, starts - 1, c.gamma)[0]) if goal else None
    return window_logits(drafter, ids, starts, None if c.taps is None else features, shown), goals


def training_loss(drafter, target, name, ids, learn, log_p, n_windows, generator, temperature=1.0):
    """The objective `name` on n_windows windows of each text of ids (B, S), of which `learn` is to be guessed and has log_p under the
    target. temperature: that of its answers. Distillation from greedy answers, a point mass, uses the target's plain softmax."""
    gamma, starts = drafter.config.gamma, draw_windows(learn, n_windows, generator)
    (labels, inside), (written, _), (log_p, _) = (of_windows(x, starts, gamma) for x in (ids, learn, log_p))
    shown, weight = None, None
    if name == "mdlm":
        rate = (1 + (gamma - 1) * torch.rand(*starts.shape, 1, generator=generator)) / gamma       # at least one slot, on average
        masked = torch.rand(labels.shape, generator=generator) < rate
        weight = masked / rate
        if drafter.config.shift:                         # the last slot has no row in which a token could stand
            weight[..., -1] = 1
        weight, shown = weight.to(ids.device), labels.masked_fill(masked.to(ids.device), MASK)
    logits, goal = _windows(drafter, target, ids, starts, shown, name in ("first", "kl"))
    return objective(name, logits, labels, inside & written, log_p, goal if goal is None else goal / (temperature or 1.0), weight)


@torch.no_grad()
def estimate(drafter, target, ids, learn, log_p, n_windows):
    """What windows of texts ids (B, S) would have accepted, {name: (gamma,)}: how often, on average over windows, the first 1, 2, ..
    drafts are, for the argmax at temperature 0 ("greedy"), and for a chain drawn from q under "point_mass" and "rejection"; their
    sums are mean accepted drafts. "entropy": of the marginals, in nats."""
    starts = draw_windows(learn, n_windows, torch.Generator().manual_seed(0))
    (labels, inside), (written, _), (log_p, _) = (of_windows(x, starts, drafter.config.gamma) for x in (ids, learn, log_p))
    valid, all_q = inside & written, _windows(drafter, target, ids, starts)[0].float().log_softmax(-1)
    log_q = all_q.gather(-1, labels[..., None])[..., 0]
    mean = lambda x: x.float().mean((0, 1)).cpu()
    return {"greedy": mean(((all_q.argmax(-1) == labels) & valid).long().cumprod(-1)), "point_mass": mean(log_streak(log_q, valid).exp()),
            "rejection": mean(log_streak((log_q - log_p).clamp(max=0), valid).exp()), "entropy": mean(-(all_q.exp() * all_q).sum(-1))}


# -- drafting: K chains from one forward -------------------------------------------------------------------------------

def merge(chains):
    """K chains of tokens as a trie: (tokens, parents, rows of each chain); see verify.py."""
    tokens, parents, row, rows = [], [], {}, []
    for chain in chains:
        path, at = [], 0
        for token in chain:
            if (at, token) not in row:
                tokens.append(token)
                parents.append(at)
                row[at, token] = len(tokens)
            at = row[at, token]
            path.append(at)
        rows.append(path)
    return tokens, parents, rows


class _Notes:
    """A request as the drafter knows it: a cache of clean rows, how many it holds, features up to those of the rows to come."""

    def __init__(self, cache, features):
        self.cache, self.cached, self.features = cache, 0, features


class SpecDiffDrafter:
    """Drafts for the engine's Lockstep planner: Lockstep(engine, SpecDiffDrafter(..), gamma * k_drafts).

    gamma drafts a chain, k_drafts chains a round. Chains are drawn independently at temperature `temperature` (default: of one
    chain the request's own, of several 1); at 0 the chain is the argmax. rule: who judges them where the target samples, see
    RULES; with one chain, selection and walk both are the point mass. steps > 1: the window is filled in in so many forwards, the
    most confident slots first; such a chain is judged as a point mass, for nobody knows the probability it was drawn with.
    """
    name = "specdiff"

    def __init__(self, drafter, target, gamma=None, k_drafts=1, rule="rejection", temperature=None, steps=1):
        drafter.check(target)
        gamma = drafter.config.gamma if gamma is None else gamma
        for what, value, most in (("gamma", gamma, MAX_K), ("k-drafts", k_drafts, MAX_NODES // max(gamma, 1)), ("draft-steps", steps, gamma)):
            if not 1 <= value <= most:
                raise ValueError(f"{what} {value} is out of range; allowed is 1 to {most}")
        if rule not in RULES:
            raise ValueError(f"unknown rule '{rule}'; choose from {', '.join(RULES)}")
        if temperature is not None and not 0 <= temperature <= 100:
            raise ValueError(f"draft-temperature {temperature} is out of range; allowed is 0 (the argmax) to 100")
        if steps > 1 and (k_drafts > 1 or rule == "rejection"):
            raise ValueError("draft-steps above 1 go with one chain, judged as a point mass: --k-drafts 1 --rule walk")
        self.drafter, self.target, self.gamma, self.rule, self.steps = drafter.to(target.dtype), target, gamma, rule, steps
        self.temperature = 1.0 if temperature is None and k_drafts > 1 else temperature
        self.width, self.max_k, self.taps = k_drafts, MAX_K if k_drafts == 1 else MAX_NODES, drafter.config.taps
        self.notes = {}                                  # request -> _Notes

    def _note(self, request):
        if request not in self.notes:
            like, fuse = {"dtype": self.target.dtype, "device": self.target.device}, self.drafter.fuse
            cache = KVCache(self.drafter.config, request.longest + self.gamma, **like)
            self.notes[request] = _Notes(cache, [] if fuse is None else [torch.zeros(1, fuse.in_features, **like)])      # before the first token: nothing
        return self.notes[request]

    def observe(self, request, features):
        """(Called for tapped drafters alone: the others have taps None.)"""
        self._note(request).features.append(features)

    def release(self, request):
        self.notes.pop(request, None)

    def propose(self, requests, limits):
        windows = {r: [MASK] * min(self.gamma, limit) for r, limit in zip(requests, limits) if limit > 0}
        out = {r: ([], None) for r in requests}
        for left in range(self.steps if windows else 0, 0, -1):
            rows = self._forward(windows).split([len(w) for w in windows.values()])
            for (r, window), logits in zip(windows.items(), rows):
                if left > 1:
                    self._reveal(r, window, logits, left)
                else:
                    out[r] = self._chains(r, window, logits, limits[requests.index(r)])
        return [out[r] for r in requests]

    def _forward(self, windows):
        """Feed each request's new committed tokens, then its window; one forward. Returns the logits of all slots, in order."""
        c, tokens, positions, segments, features, wanted = self.drafter.config, [], [], [], [], []
        for r, window in windows.items():
            note = self._note(r)
            start, end = min(note.cached, len(r.tokens) - 1), len(r.tokens)    # the last token again, where a window takes several steps
            inner, n = window[:len(window) - c.shift], len(tokens)
            segments.append((n, n + end - start, FullKeys(note.cache, 0, start, end - start)))
            if inner:
                sees = torch.ones(len(inner), len(inner), dtype=torch.bool)
                segments.append((n + end - start, n + end - start + len(inner), FullKeys(note.cache, 0, end, len(inner), tail=sees)))
            tokens += r.tokens[start:] + inner
            positions += range(start, end + len(inner))
            wanted += range(len(tokens) - len(window), len(tokens))
            if c.taps is not None:
                known = torch.cat(note.features)[start - end:]
                features += [known, known[-1:].expand(len(inner), -1)]
                note.features = [known[-1:]]
            note.cached = end
        device = self.target.device
        hidden = self.drafter(torch.tensor(tokens, device=device), torch.tensor(positions, device=device), packed_attend(segments),
                              torch.cat(features) if features else None)
        return self.drafter.words.logits(hidden[wanted])

    def _reveal(self, request, window, logits, left):
        """Fill in the most confident of the open slots, so many that `left` forwards, this one included, fill them all."""
        q = warp(logits, self._sampling(request))
        token = draw(q, request.coins(len(window)).to(q.device))
        sure = logits.float().softmax(-1).gather(-1, token[:, None])[:, 0].tolist()
        slots = [i for i, t in enumerate(window) if t == MASK]
        for i in sorted(slots, key=lambda i: -sure[i])[:-(-len(slots) // left)]:
            window[i] = token[i].item()

    def _sampling(self, request):
        return request.sampling if self.temperature is None else replace(request.sampling, temperature=self.temperature)

    def _chains(self, request, window, logits, limit):
        """What the engine gets of one request: a chain, or the trie of several, drawn from the logits (n, V) of the slots."""
        sampling, n = self._sampling(request), len(window)
        k = min(self.width, limit // n)                  # near the end of an answer fewer chains fit into its slots of the cache
        if sampling.temperature == 0:
            return [best if t == MASK else t for t, best in zip(window, logits.argmax(-1).tolist())], None
        q = warp(logits, sampling)
        chains = draw(q[:, None].expand(-1, k, -1), request.coins(n * k).view(n, k).to(q.device)).T.tolist()
        if k == 1:
            return [x if t == MASK else t for t, x in zip(window, chains[0])], q if self.rule == "rejection" else None
        tokens, parents, rows = merge(chains)
        return tokens, None, parents, partial(rejection_tree, rows, q) if self.rule == "rejection" else RULES[self.rule]


# -- folders -----------------------------------------------------------------------------------------------------------

def save(drafter, folder):
    checkpoints.save_drafter(drafter, folder, "specdiff")


def load(folder, target):
    """The drafter in a folder, on the device and in the dtype of its target. ValueError, in one line, says what is wrong."""
    def make(**config):
        drafter = Drafter(checkpoints.checked(SpecDiffConfig(**config)), target)
        drafter.check(target)
        return drafter
    return store_by_columns(checkpoints.load_drafter(folder, "specdiff", make).to(device=target.device, dtype=target.dtype).eval())
