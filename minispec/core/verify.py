"""Verification: acceptance rules as pure functions, and the place where logits become probabilities.

Notation of the whole repository: p is the target's distribution, q the drafter's. A round proposes n drafts:
a chain, or a tree with `parents`. Draft i is row i of the verification (row 0 is the last committed token),
and its parent is row parents[i - 1] < i, so a chain of k is the tree with parents 0 .. k - 1. Siblings
differ. Every rule returns the accepted path as a list of rows, and the token that follows it, so a round
always commits at least one token.

    walk        the target chooses a token in every row, independently of the drafts. Start at row 0 and go to
                the child that is the row's choice, as long as there is one. The first choice that is no child
                is the token that follows.
    rejection   accept draft d with probability min(1, p(d) / q(d)), else continue with max(p - q, 0),
                normalised (Leviathan et al. 2211.17192, appendix A.1; Chen et al. 2302.01318); for K chains
                in turn (multi-round, SpecInfer 2305.09781)

The walk commits exactly the tokens of plain decoding, whatever the drafts are: they only save forwards. At
temperature 0 the choice is the argmax. Above, it is the largest of p / e, with noise e that depends only on
seed, position and token (noise.py). So a seed has one text, for every method, batch and drafter.

Sampling.rule determines how drafts are drawn and which rule verifies them. At temperature 0 all rules accept
alike, and only SpecDiff-2's chains are drawn by chance:

    coupled     drafts are the largest of q / e, with the target's own noise; the walk
    point-mass  drafts are the most likely tokens of q (several chains of SpecDiff-2 are drawn); the walk
    walk        drafts are drawn from q with other noise; the walk (of K chains: SpecDiff-2 2511.00606)
    selection   the same, but in SpecDiff-2's trees only the path that `best_path` selects is walked
    rejection   drafts are drawn from q with other noise, and rejection verifies them. The walk verifies
                drafts without a q: prompt-lookup tokens alone, and trees that were chosen without chance.
                Prompt-lookup tokens beside a drawn chain count as drawn from a point mass

Rejection is exact only if d was drawn from q. A drafter that proposes its argmax draws from a point mass:
dividing by its softmax is a common mistake, and a test shows the bias. Selection may use p, but must then
ignore q: a path selected by p was not drawn from q. Rejection needs coins, which are explicit arguments, so
all rules are deterministic functions.
"""
import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from minispec.core.noise import COINS, OWN, TARGET, apart, noise, stream, uniform

RULES = ("coupled", "rejection", "point-mass", "selection", "walk")
LEAST_TEMPERATURE = 1e-3        # below it logits / temperature may overflow


@dataclass(frozen=True)
class Sampling:
    """Sampling settings. temperature: 0 is greedy, else LEAST_TEMPERATURE to 100; top_k 0 and top_p 1 keep
    all tokens. seed: of the noise. rule: see above. ValueError for values out of range."""
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    rule: str = "coupled"

    def __post_init__(self):
        if self.temperature != 0 and not LEAST_TEMPERATURE <= self.temperature <= 100:
            raise ValueError(f"temperature {self.temperature} is out of range; "
                             f"allowed is 0 (greedy), or {LEAST_TEMPERATURE} to 100")
        if self.top_k < 0:
            raise ValueError(f"top-k {self.top_k} is out of range; allowed is 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top-p {self.top_p} is out of range; allowed is above 0 up to 1 (off)")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed {self.seed} is out of range; allowed is 0 to {(1 << 63) - 1}")
        if self.rule not in RULES:
            raise ValueError(f"rule must be one of {', '.join(RULES)}, got {self.rule}")

    @cached_property
    def settings(self):
        """All but the seed: requests with equal settings are drawn in one batch."""
        return replace(self, seed=0)

    @cached_property
    def drafting(self):
        """The settings that drafts are drawn with."""
        return replace(self, temperature=0.0) if self.rule == "point-mass" else self

    @property
    def rejects(self):
        """Whether rejection verifies chains whose q is known."""
        return self.temperature > 0 and self.rule == "rejection"

    @property
    def lane(self):
        """The stream of noise that drafts are drawn with."""
        return TARGET if self.rule == "coupled" else OWN


# -- a batch of requests -------------------------------------------------------------------------------------

def verify(segments, logits):
    """Apply its acceptance rule to each of `segments`, which fed a committed token and the drafts after it.
    logits (n, V): of all these rows, one segment after the other.

    Returns [(path, token)]: the rows of the accepted drafts (1 .. a of a chain), and the token that follows
    them."""
    verdicts = []
    rows = logits.split([len(s.drafts) + 1 for s in segments])
    walked = [(s, own) for s, own in zip(segments, rows) if not s.drawn]
    chosen = iter(choose(*zip(*walked)) if walked else [])
    for s, own in zip(segments, rows):
        sampling = s.request.sampling
        if s.drawn:
            chains = [(path, q and q()) for path, q in s.drawn]
            verdicts.append(rejection(chains, s.drafts, warp(own, sampling), coins(s)))
            continue
        parents = s.above
        if s.select and s.drafts and sampling.rule == "selection" and sampling.temperature > 0:
            kept = s.select(s.drafts, parents, warp(own, sampling))
            parents = [parent if row in kept else None for row, parent in enumerate(parents, 1)]
        verdicts.append(verify_tree(s.drafts, parents, next(chosen)))
    return verdicts


def choose(segments, logits, drafting=False):
    """The choices in the last n rows of each of `segments` (requests.Segment): a list of n tokens each.
    logits: (n, V) of each. drafting: the logits are SpecGen's, and its choices are drafts."""
    groups = {}                                          # settings -> indices of segments
    for i, s in enumerate(segments):
        sampling = s.request.sampling.drafting if drafting else s.request.sampling
        groups.setdefault(sampling.settings, []).append(i)
    choices = [None] * len(segments)
    for sampling, group in groups.items():
        lane = sampling.lane if drafting else TARGET
        streams, positions = [], []
        for i in group:
            s, n = segments[i], len(logits[i])
            streams += [stream(s.request.sampling.seed, lane)] * n
            positions += [position + 1 + apart(s.request, lane) for position in s.positions[-n:]]
        rows = torch.cat([logits[i] for i in group])
        best = scores(rows, sampling, streams, positions).argmax(-1).tolist()
        for i in group:
            n = len(logits[i])
            choices[i], best = best[:n], best[n:]
    return choices


def coins(s):
    """Coins (n + 1,) for rejection of a segment, different in every round of its request."""
    # a round has fewer drafts than 1 << 10
    places = (s.start << 10) + np.arange(len(s.drafts) + 1)
    return uniform(stream(s.request.sampling.seed, COINS), places, 1)[:, 0]


# -- the rules, for one request ------------------------------------------------------------------------------

def verify_tree(draft, parents, best):
    """The walk. draft: n token ids; parents: the parent row of each; best: the target's choice in each of the
    n + 1 rows. Returns (accepted rows, next token)."""
    path = [0]
    # Parents come first, so one pass is enough.
    for row, (token, parent) in enumerate(zip(draft, parents), 1):
        if parent == path[-1] and token == best[parent]:
            path.append(row)
    return path[1:], best[path[-1]]


def rejection(chains, draft, p, coins):
    """Rejection sampling of chains that were drawn independently, of one or of several in turn.

    chains: pairs (rows, q): token j of a chain is row rows[j] and was drawn from q[j], q (k, V); q None: it
    was chosen without chance. Chains that begin alike share rows. draft: n token ids; p (n + 1, V); coins (n
    + 1,) independent and uniform in [0, 1): coin i - 1 is for row i, the last one draws the token that
    follows. Returns (accepted rows, next token).
    """
    path = []
    left = p[0].double()                                 # the residual that the next chain is compared with
    for j in range(max(len(rows) for rows, _ in chains)):
        # Only chains that agree with the accepted path.
        chains = [(rows, q) for rows, q in chains if len(rows) > j and rows[:j] == path]
        for rows, q in chains:
            row = rows[j]
            token = draft[row - 1]
            of_q = torch.zeros_like(left)
            of_q[token] = 1.0
            if q is not None:
                of_q = q[j]
            # No division by q. A token rejected once has no mass left, so one coin per row is enough.
            if coins[row - 1] * of_q[token] < left[token]:
                path.append(row)
                left = p[row].double()
                break
            rest = (left - of_q).clamp(min=0)
            # An empty residual means that rounding alone rejected: p stays the right distribution.
            if rest.any():
                left = rest / rest.sum()
        else:
            break
    return path, draw(left, coins[-1]).item()


def graft(chain, tokens, parents):
    """Add a chain of tokens to a tree, `tokens` and `parents`, which gets the missing rows. Returns the rows
    of the chain."""
    row = {place: i for i, place in enumerate(zip(parents, tokens), 1)}          # (parent, token) -> row
    rows = []
    at = 0
    for token in chain:
        if (at, token) not in row:
            tokens.append(token)
            parents.append(at)
            row[at, token] = len(tokens)
        at = row[at, token]
        rows.append(at)
    return rows


# -- from logits to tokens -----------------------------------------------------------------------------------

def scores(logits, sampling, streams, positions):
    """Numbers (n, V) for rows of logits (n, V): the largest of a row is the token at its position, positions
    (n,), with the noise of its stream, streams (n,)."""
    if sampling.temperature == 0:
        return logits.float()
    p = warp(logits, sampling)
    return p / noise(np.array(streams), np.array(positions), p.shape[-1], device=p.device)


def warp(logits, sampling):
    """logits (..., V) -> probabilities (..., V) in fp32 after temperature, then top-k, then top-p.

    Temperature 0 gives the softmax, whose largest is the choice. top-p keeps the smallest set of most likely
    tokens that reaches top_p.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        return logits.softmax(-1)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    probs = logits.softmax(-1)
    if sampling.top_p < 1:
        sorted_, order = probs.sort(dim=-1, descending=True, stable=True)
        before = sorted_.cumsum(-1) - sorted_                        # mass of the more likely tokens
        kept = sorted_.masked_fill(before >= max(sampling.top_p, 1e-30), 0.0)
        probs = torch.zeros_like(probs).scatter_(-1, order, kept)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def draw(weights, coin):
    """Tokens (...) from weights (..., V), which need not sum to one, by inverse transform of coins (...) in
    [0, 1)."""
    # fp64: with a large V, fp32 sums lose the tail
    total = weights.double().cumsum(-1)
    end = total[..., -1]
    # Rounding must not lead past the last token that has weight.
    target = torch.minimum(coin.double() * end, end.nextafter(torch.zeros_like(end)))
    return torch.searchsorted(total, target[..., None], right=True)[..., 0]


def check_numbers(logits):
    """ValueError if a logit is not finite, because then no token can be chosen. Waits for a GPU."""
    # A sum takes a tenth of the time of isnan; one of fp16 would overflow.
    wide = torch.float32 if logits.dtype == torch.float16 else None
    if not math.isfinite(logits.sum(dtype=wide)):
        raise ValueError("the logits of the model must be numbers, got NaN: its weights are damaged, or too "
                         "large for this --dtype")
