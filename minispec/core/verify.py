"""Who checks the draft, and how: acceptance rules as pure functions, and the one place where logits become
probabilities.

Notation of the whole repository: p is the target's distribution, q the drafter's. A round proposes a chain of k
tokens; the target sees k + 1 rows (the last committed token, then the k drafts), so row i judges draft i and row k
gives the bonus token. Every rule returns how many drafts were accepted and the token that follows them, so a round
always commits at least one token.

    greedy      accept while the draft is the target's argmax; then the target's argmax
    rejection   accept draft d with probability min(1, p(d) / q(d)); at the first rejection draw from
                max(p - q, 0), normalised (Leviathan et al. 2211.17192, Theorem 3.5; Chen et al. 2302.01318)

A tree of drafts is a list of tokens and `parents`: draft i is row i of the verification (row 0 is the last committed
token) and hangs from row parents[i - 1] < i, so a chain of k is the tree with parents 0 .. k - 1. Siblings differ.
Every tree rule returns the accepted path as a list of rows, and the token that follows it.

    greedy      walk from the root to the child that is the target's argmax, as long as there is one
    point mass  try the children of a row in order: accept child c with probability p(c), else strike c out of p,
                renormalise and try the next; with none left draw from what remains of p (SpecInfer 2305.09781 with
                one-token distributions). The order may depend on the drafter, never on the target's coins. This is the same as
                drawing one token from p and looking whether a child has it, so it serves as the walk of the target on
                a trie of drafted chains as well (SpecDiff-2's walk).
    selection   keep the one path of the tree that the target likes best, then point mass on it (SpecDiff-2 2511.00606)
    rejection   of K chains that were drawn from the same q independently (multi-round, SpecInfer)

The last two judge chains that were drawn with chance. Selection may look at p but must then forget q: a path chosen by p
was not drawn from q any more, and p / q would be wrong. Rejection must know q, and see all draws in an order that p has
no part in.

The rejection rule returns exactly the target's distribution only if d was drawn from q. A drafter that proposes its
argmax, or copies from the prompt, drew from a point mass, and must be judged as one (q = None): dividing by its
softmax instead is a common mistake, and a test here shows the bias. Randomness comes in as explicit coins, so rules
are deterministic functions and a request's draws do not depend on its neighbours.
"""
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampling:
    """How to draw: temperature 0 is greedy; top_k 0 and top_p 1 keep everything. seed: a request's own random stream."""
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not 0 <= self.temperature <= 100:
            raise ValueError(f"temperature {self.temperature} is out of range; allowed is 0 (greedy) to 100")
        if self.top_k < 0:
            raise ValueError(f"top-k {self.top_k} is out of range; allowed is 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top-p {self.top_p} is out of range; allowed is above 0 up to 1 (off)")

    @property
    def settings(self):
        """What makes two requests draw alike: everything but the seed."""
        return self.temperature, self.top_k, self.top_p


def warp(logits, sampling):
    """logits (..., V) -> probabilities (..., V) in fp32 after temperature, then top-k, then top-p. Temperature 0 gives
    the point mass on the argmax. top-p keeps the smallest set of most likely tokens that reaches top_p."""
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


def draw(weights, coin):
    """Tokens (...) from weights (..., V), which need not sum to one, by inverse transform of coins (...) in [0, 1)."""
    total = weights.double().cumsum(-1)                              # fp64: with a large V, fp32 sums lose the tail
    token = torch.searchsorted(total, (coin.double() * total[..., -1])[..., None], right=True)[..., 0]
    # Rounding may land behind the last token with weight; the last one with weight is then meant.
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).int().argmax(-1)
    return torch.minimum(token, last)


def greedy_chain(draft, best):
    """draft: k token ids; best: the target's argmax in each of the k + 1 rows (lists of ints).
    Returns (number accepted, next token)."""
    n = 0
    while n < len(draft) and draft[n] == best[n]:
        n += 1
    return n, best[n]


def rejection_chain(draft, q, p, coins):
    """Rejection sampling of B chains at once.

    draft (B, k) token ids; q (B, k, V) the distributions they were drawn from, or None for point masses on them;
    p (B, k + 1, V) the target's; coins (B, k + 1) independent and uniform in [0, 1): coin i < k judges draft i, the
    last one draws the token that follows. Returns (accepted (B,), next token (B,)).
    """
    b, k = draft.shape
    p_draft = p[:, :k].gather(-1, draft[..., None])[..., 0]                              # (B, k)
    q_draft = torch.ones_like(p_draft) if q is None else q.gather(-1, draft[..., None])[..., 0]
    accept = coins[:, :k] * q_draft < p_draft                                            # coin < p / q, without dividing
    n = accept.long().cumprod(-1).sum(-1)                                                # (B,) length of the accepted prefix
    row = torch.arange(b, device=p.device)
    p_next = p[row, n]                                                       # (B, V)
    if q is None:
        q_all = torch.zeros_like(p[:, :k]).scatter_(-1, draft[..., None], 1.0)
    else:
        q_all = q
    q_next = torch.cat([q_all, torch.zeros_like(p[:, :1])], dim=1)[row, n]   # nothing to subtract for the bonus
    residual = (p_next - q_next).clamp(min=0)
    # p == q leaves no residual; then rejection has probability 0 but for rounding, and p itself is the right draw.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_next)
    return n, draw(residual, coins[:, k])


def greedy_tree(draft, parents, best):
    """draft: n token ids that hang from rows `parents`; best: the target's argmax in each of the n + 1 rows (lists of ints).
    Returns (accepted rows, next token)."""
    path = [0]
    for row, (token, parent) in enumerate(zip(draft, parents), 1):             # parents come first, so one pass will do
        if parent == path[-1] and token == best[parent]:
            path.append(row)
    return path[1:], best[path[-1]]


def point_mass_tree(draft, parents, p, coins):
    """Sampling with a tree of drafts that were chosen without chance.

    draft: n token ids that hang from rows `parents` (lists of ints); p (n + 1, V) the target's distributions; coins
    (n + 1,) independent and uniform in [0, 1): coin i - 1 judges row i, the last one draws the token that follows.
    Returns (accepted rows, next token).
    """
    p, coin, path = p.double().cpu(), coins.tolist(), [0]                      # one copy: every branch below looks at a number
    left = p[0]                                                                # what is not struck out of p
    for row, (token, parent) in enumerate(zip(draft, parents), 1):             # siblings come in order, after their parent
        if parent != path[-1]:
            continue
        if coin[row - 1] * left.sum().item() < left[token].item():
            path.append(row)
            left = p[row]
        else:
            left = left.index_fill(0, torch.tensor([token]), 0.0)
    # Nothing left: the last child had all the mass, and was rejected by rounding alone; p itself is the right draw then.
    left = left if left.sum() > 0 else p[path[-1]]
    return path[1:], draw(left, coins[-1].cpu()).item()


def selection_tree(draft, parents, p, coins):
    """SpecDiff-2's self-selection (section 4, Eq. 7): of all paths take the one of largest sum over its rows of the probability
    that the target would accept that far, and judge it as a point mass. Arguments and result as for point_mass_tree."""
    p = p.cpu()
    given = p[parents, draft].tolist()                                         # of each draft, by the row it hangs from
    reach, score = [1.0], [0.0]
    for parent, one in zip(parents, given):
        reach.append(reach[parent] * one)
        score.append(score[parent] + reach[-1])
    row, rows = score.index(max(score)), []                                    # the end of a path has its largest score
    while row:
        rows.insert(0, row)
        row = parents[row - 1]
    path, token = point_mass_tree([draft[row - 1] for row in rows], range(len(rows)), p[[0, *rows]], coins[[*(row - 1 for row in rows), -1]])
    return rows[:len(path)], token


def rejection_tree(chains, q, draft, parents, p, coins):
    """Multi-round rejection of K chains drawn independently, position j of each from q[j] (k, V).

    chains: the rows of each chain, K lists of k; chains that begin alike share rows. The rest as for point_mass_tree. At every
    position the chains that agree with the accepted path are tried in turn: accept with probability min(1, p / q), else
    go on with max(p - q, 0), normalised. (A token rejected once has no mass left, so one coin a row is enough.)
    """
    p, q, path, coin, live = p.double().cpu(), q.double().cpu(), [], coins.tolist(), chains
    left = p[0]
    for j in range(len(q)):
        for chain in live:
            row, token = chain[j], draft[chain[j] - 1]
            if coin[row - 1] * q[j, token].item() < left[token].item():
                path.append(row)
                live, left = [c for c in live if c[j] == row], p[row]
                break
            rest = (left - q[j]).clamp(min=0)
            if not rest.sum() > 0:                                             # rejected by rounding alone: see rejection_chain
                return path, draw(left, coins[-1].cpu()).item()
            left = rest / rest.sum()
        else:
            break
    return path, draw(left, coins[-1].cpu()).item()
