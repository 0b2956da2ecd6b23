"""Who checks the draft, and how: acceptance rules as pure functions, and the one place where logits become
probabilities.

Notation of the whole repository: p is the target's distribution, q the drafter's. A round proposes a chain of
k tokens. The target sees k + 1 rows (the last committed token, then the k drafts), so row i judges draft i
and row k gives the bonus token. Every rule returns what was accepted and the token that follows, so a round
always commits at least one token.

    greedy      accept while the draft is the target's argmax; then the target's argmax
    rejection   accept draft d with probability min(1, p(d) / q(d)); at the first rejection draw from
                max(p - q, 0), normalised (Leviathan et al. 2211.17192, Theorem 3.5; Chen et al. 2302.01318)

A tree of drafts is a list of tokens and `parents`: draft i is row i of the verification (row 0 is the last
committed token) and hangs from row parents[i - 1] < i, so a chain of k is the tree with parents 0 .. k - 1.
Siblings differ. Every tree rule returns the accepted path as a list of rows, and the token that follows it.

    greedy      walk from the root to the child that is the target's argmax, as long as there is one
    point mass  try the children of a row in order: accept child c with probability p(c), else strike c out
                of p, renormalise and try the next; with none left draw from what remains of p (SpecInfer
                2305.09781 with one-token distributions). The order may depend on the drafter, never on the
                target's coins. This is the same as drawing one token from p and looking whether a child has
                it, so it serves as the walk of the target on a trie of drafted chains as well (SpecDiff-2's
                walk).
    selection   keep the one path of the tree that the target likes best, then point mass on it
                (SpecDiff-2 2511.00606)
    rejection   of K chains, each drawn from a q of its own or copied (multi-round, SpecInfer)

The last two judge chains that were drawn at random. Selection may look at p but must then forget q: a path
chosen by p was not drawn from q any more, and p / q would be wrong. Rejection must know q, and see all draws
in an order that does not depend on p.

The rejection rule returns exactly the target's distribution only if d was drawn from q. A drafter that
proposes its argmax, or copies from the prompt, drew from a point mass, and must be judged as one (q = None):
dividing by its softmax instead is a common mistake, and a test here shows the bias. Randomness comes in as
explicit coins, so rules are deterministic functions, and a request's coins are its own.
"""
import math
from dataclasses import dataclass, replace

import torch


LEAST_TEMPERATURE = 1e-3        # below it logits / temperature may overflow, and greedy is what is meant


@dataclass(frozen=True)
class Sampling:
    """How to draw. temperature: 0 is greedy, else LEAST_TEMPERATURE to 100; top_k 0 and top_p 1 keep
    everything. seed: of the request's own random stream. ValueError for anything out of range."""
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

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

    @property
    def settings(self):
        """What makes two requests draw alike: everything but the seed."""
        return replace(self, seed=0)


def warp(logits, sampling):
    """logits (..., V) -> probabilities (..., V) in fp32 after temperature, then top-k, then top-p.

    Temperature 0 gives the point mass on the argmax. top-p keeps the smallest set of most likely tokens that
    reaches top_p.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    probs = logits.softmax(-1)
    if sampling.top_p < 1:
        sorted_, order = probs.sort(dim=-1, descending=True, stable=True)
        before = sorted_.cumsum(-1) - sorted_                        # mass of the more likely tokens
        kept = sorted_.masked_fill(before >= sampling.top_p, 0.0)
        probs = torch.zeros_like(probs).scatter_(-1, order, kept)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def argmax(logits):
    """The argmax (...) of logits (..., V). In fp32: in bf16 a CPU takes six times as long to find it."""
    return logits.float().argmax(-1)


def check_numbers(logits):
    """ValueError if a logit is not a number, because then no token can be chosen. Waits for a GPU."""
    # A sum takes a tenth of the time of isnan.
    if not math.isfinite(logits.sum()):
        raise ValueError("the logits of the model must be numbers, got NaN: its weights are damaged, or too "
                         "large for this --dtype")


def draw(weights, coin):
    """Tokens (...) from weights (..., V), which need not sum to one, by inverse transform of coins (...) in
    [0, 1)."""
    # fp64: with a large V, fp32 sums lose the tail
    total = weights.double().cumsum(-1)
    end = total[..., -1]
    # Rounding must not land behind the last token that has weight.
    target = torch.minimum(coin.double() * end, end.nextafter(torch.zeros_like(end)))
    return torch.searchsorted(total, target[..., None], right=True)[..., 0]


def rejection_chain(draft, q, p, coins):
    """Rejection sampling of B chains at once.

    draft (B, k) token ids; q (B, k, V) the distributions they were drawn from, or None for point masses on
    them; p (B, k + 1, V) the target's; coins (B, k + 1) independent and uniform in [0, 1): coin i < k judges
    draft i, the last one draws the token that follows. Returns (accepted (B,), next token (B,)).
    """
    b, k = draft.shape
    if k == 0:
        return torch.zeros(b, dtype=torch.long, device=p.device), draw(p[:, 0], coins[:, 0])
    if q is None:
        q = torch.zeros_like(p[:, :k]).scatter_(-1, draft[..., None], 1.0)
    # Accept draft i if coin < p / q (without dividing), and only behind accepted ones.
    p_draft = p[:, :k].gather(-1, draft[..., None])[..., 0]                              # (B, k)
    q_draft = q.gather(-1, draft[..., None])[..., 0]
    accept = coins[:, :k] * q_draft < p_draft
    n = accept.long().cumprod(-1).sum(-1)                                                # (B,)
    # The row behind the accepted ones gives the next token; for the bonus there is no q to subtract.
    row = torch.arange(b, device=p.device)
    p_next = p[row, n]                                                                   # (B, V)
    q_next = torch.cat([q, torch.zeros_like(p[:, :1])], dim=1)[row, n]
    residual = (p_next - q_next).clamp(min=0)
    # p == q leaves no residual; then rejection has probability 0 but for rounding, and p itself is the
    # right draw.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_next)
    return n, draw(residual, coins[:, k])


def greedy_tree(draft, parents, best):
    """draft: n token ids that hang from rows `parents`; best: the target's argmax in each of the n + 1 rows
    (lists of ints). Returns (accepted rows, next token)."""
    path = [0]
    # Parents come first, so one pass is enough.
    for row, (token, parent) in enumerate(zip(draft, parents), 1):
        if parent == path[-1] and token == best[parent]:
            path.append(row)
    return path[1:], best[path[-1]]


def point_mass_tree(draft, parents, p, coins):
    """Sampling with a tree of drafts that were chosen without chance.

    draft: n token ids that hang from rows `parents` (lists of ints); p (n + 1, V) the target's distributions;
    coins (n + 1,) independent and uniform in [0, 1): coin i - 1 judges row i, the last one draws the token
    that follows. Returns (accepted rows, next token).
    """
    # Where a path ends, every child of its last row was struck out. So the token that follows is drawn for
    # each row before the walk, and all numbers come to the host together; p stays on its device.
    parents = list(parents)
    given = p[parents, draft]                            # of each draft, in the row that it hangs from
    rest = p.clone()
    rest[parents, draft] = 0.0
    # Nothing left: the last child had all the mass, and was rejected by rounding alone. Then p is the
    # right draw.
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)
    next_token = draw(rest, coins[-1])
    numbers = torch.cat([given.double(), next_token.double()]).tolist()
    given, next_token = numbers[:len(draft)], numbers[len(draft):]
    coin = coins.tolist()

    path = [0]
    left = 1.0                                           # mass of the row where the path ends
    # Siblings come in order, after their parent.
    for row, parent in enumerate(parents, 1):
        if parent != path[-1]:
            continue
        chance = given[row - 1]
        if coin[row - 1] * left < chance:
            path.append(row)
            left = 1.0
        else:
            left = max(left - chance, 0.0)
    return path[1:], int(next_token[path[-1]])


def selection_tree(draft, parents, p, coins):
    """SpecDiff-2's self-selection (section 4, Eq. 7): of all paths take the one with the largest sum, over
    its rows, of the probability that the target would accept that far, and judge it as a point mass.
    Arguments and result as for point_mass_tree."""
    # reach: the probability to be accepted up to a row; score: its sum along the path.
    given = p[parents, draft].tolist()
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
    return rejection_tree([(rows, None)], draft, parents, p, coins)


def rejection_tree(chains, draft, parents, p, coins):
    """Multi-round rejection of K chains that were drawn independently.

    chains: K pairs (rows, q): position j of a chain is row rows[j] and was drawn from q[j] (k, V); q None: it
    was chosen without chance. Chains that begin alike share rows. The rest as for point_mass_tree. At every
    position the chains that agree with the accepted path are tried in turn: accept with probability min(1,
    p / q), else go on with max(p - q, 0), normalised. (A token rejected once has no mass left, so one coin a
    row is enough.)
    """
    # The drafts' own numbers come to the host first; p and q stay on their device.
    given = p[parents, draft].tolist()
    coin = coins.tolist()
    live = []                                            # the chains that agree with the accepted path
    for rows, q in chains:
        of_q = [1.0] * len(rows)
        if q is not None:
            of_q = q[range(len(rows)), [draft[row - 1] for row in rows]].tolist()
        live.append((rows, q, of_q))
    path = []
    left = p[0].double()
    for j in range(max(len(rows) for rows, _ in chains)):
        live = [chain for chain in live if len(chain[0]) > j]
        for i, (rows, q, of_q) in enumerate(live):
            row = rows[j]
            # After a rejection it is no longer p that judges, but what is left of it.
            chance = left[draft[row - 1]].item() if i else given[row - 1]
            if coin[row - 1] * of_q[j] < chance:
                path.append(row)
                live = [chain for chain in live if chain[0][j] == row]
                left = p[row].double()
                break
            if q is None:
                rest = left.clone()
                rest[draft[row - 1]] = 0.0
            else:
                rest = (left - q[j]).clamp(min=0)
            # No rest: rejected by rounding alone, see rejection_chain.
            left = torch.where(rest.sum() > 0, rest / rest.sum(), left)
        else:
            break
    return path, draw(left, coins[-1]).item()


def graft(chain, tokens, parents):
    """Let a chain of tokens grow on a tree, `tokens` and `parents`, which gets the rows that it lacks.
    Returns the rows of the chain."""
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


# -- a batch of requests -------------------------------------------------------------------------------------

def judge(segments, logits):
    """Apply the acceptance rule that fits to each of `segments` (requests.Segment), which fed their last
    committed token and their drafts. logits (n, V) are of all these rows, one segment after the other.

    Returns [(path, token)]: the rows of the accepted drafts (1 .. a of a chain), and the token that follows
    them.
    """
    verdicts = [None] * len(segments)
    sizes = [len(s.drafts) + 1 for s in segments]
    rows = logits.split(sizes)
    if any(s.request.sampling.temperature == 0 for s in segments):
        best = argmax(logits).cpu().split(sizes)
    alike = {}  # sampled chains of one length and setting: their indices
    for i, (s, n) in enumerate(zip(segments, sizes)):
        sampling = s.request.sampling
        if sampling.temperature == 0:
            verdicts[i] = greedy_tree(s.drafts, s.above, best[i].tolist())
        elif s.parents is not None:
            verdicts[i] = s.rule(s.drafts, s.parents, warp(rows[i], sampling), s.request.coins(n))
        else:
            alike.setdefault((n, s.q is None, sampling.settings), []).append(i)
    for (n, point_masses, _), group in alike.items():
        some = [segments[i] for i in group]
        p = warp(torch.stack([rows[i] for i in group]), some[0].request.sampling)               # (B, n, V)
        draft = torch.tensor([s.drafts for s in some], dtype=torch.long, device=logits.device)
        q = None if point_masses else torch.stack([s.q for s in some])
        coins = torch.stack([s.request.coins(n) for s in some]).to(logits.device)
        accepted, token = rejection_chain(draft, q, p, coins)
        for i, (a, t) in zip(group, torch.stack([accepted, token], 1).tolist()):
            verdicts[i] = list(range(1, a + 1)), t
    return verdicts
