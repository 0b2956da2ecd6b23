"""Training PRISM and EAGLE: every row of a text drafts at once (EAGLE-3's "training-time test").

Step k's query at row r sees the step-1 keys of rows up to r, then its own row's later ones, each as the
module that writes it in decoding wrote it. So states in training equal states in drafting; a test says so to 1e-4.
The released trainer of PRISM lets module m compute the context's keys again with its own weights, which never
happens in decoding. A row counts in the loss if the token it guesses is one to learn.
"""
import torch
import torch.nn.functional as F


class Unrolled:
    """The attention of unrolled drafting. Step 1 is causal. At step k the query of row r sees the step-1 keys
    of rows 0 .. r, and of the steps since then the keys of row r alone: those its own drafts wrote. One
    softmax over all.

    Queries go block by block and skip the future, as in cpu.blocked_attend.
    """

    def __init__(self, block=256):
        self.steps = {}                                  # layer -> [(k, v) of each step]
        self.block = block

    def attend(self, layer, q, k, v):
        """q (B, S, H, D), k and v (B, S, G, D) -> (B, S, H, D). The next call for a layer is its next
        step."""
        s, d = q.shape[1], q.shape[3]
        group = q.shape[2] // k.shape[2]  # g query heads share a key head
        steps = self.steps.setdefault(layer, [])
        steps.append((k.transpose(1, 2), v.transpose(1, 2)))                   # (B, G, S, D)
        first_k, first_v = steps[0]
        first_k = first_k.transpose(-1, -2)                                    # (B, G, D, S)
        q = (q * d ** -0.5).unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4)   # (B, G, g, S, D)

        # Every later step left one key that only its own row sees.
        later = steps[1:]
        own = [(q * k[:, :, None]).sum(-1, keepdim=True) for k, _ in later]    # (B, G, g, S, 1) each

        size = max(self.block, s // 8)
        future = torch.full((size, size), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
        out = []
        for start in range(0, s, size):
            end = min(start + size, s)
            n = end - start
            # Step-1 keys up to the row itself ..
            rows = q[:, :, :, start:end].flatten(2, 3)                         # (B, G, g * n, D)
            logits = (rows @ first_k[..., :end]).unflatten(2, (group, n))      # (B, G, g, n, end)
            logits[..., start:] += future[:n, :n]
            # .. and its own later ones, under one softmax.
            logits = torch.cat([logits, *(x[:, :, :, start:end] for x in own)], -1)
            probs = logits.softmax(-1).to(v.dtype)
            read = (probs[..., :end].flatten(2, 3) @ first_v[:, :, :end]).unflatten(2, (group, n))
            for j, (_, own_v) in enumerate(later):
                read = read + probs[..., end + j, None] * own_v[:, :, None, start:end]
            out.append(read)
        return torch.cat(out, 3).permute(0, 3, 1, 2, 4).flatten(2, 3)          # (B, S, H, D)


def unroll(prism, words, ids, features, steps):
    """The states (B, S, C) of draft steps 1 .. `steps` from every row of ids (B, S) with features (B, S, F),
    if the drafted tokens are those in ids. Row r of step k guesses t_{r+k+1}; the last k rows know too little
    and are to be ignored."""
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    attention = Unrolled()
    a = prism.fuse(features)
    states = []
    for step in range(1, steps + 1):
        # Row r reads the token drafted last, t_{r+k}, and the state that drafted it, one position further on.
        e = words.embed(ids.roll(-step, 1))
        at = (positions + step - 1).clamp(max=prism.config.block_size - 1)
        a = prism(step, e, a, at, attention.attend)
        states.append(a)
    return states


def unrolled_loss(prism, words, batch, steps):
    """Training loss on a rollouts.Batch of shape (B, S), and how many drafts it would have had accepted.

    The loss is the KL divergence from the target's distributions to the drafter's, mean over the rows of a
    step whose guessed token is one to learn, summed over steps. words: of the drafter's target.

    Returns (loss, accepted (steps,)): the share of rows whose first 1, 2, .. guesses all are the target's
    argmax. Their sum is the mean number of accepted drafts of a chain, if these tokens are what the target
    says.
    """
    # 1. Every row drafts.
    states = unroll(prism, words, batch.ids, batch.features, steps)

    # 2. Row r of step k is judged by the target's row s = r + k, which sees t_s and is asked for t_{s+1}.
    judged = F.pad(batch.learn[:, 1:], (0, 1))           # (B, S): is t_{s+1} one to learn?
    goal, best = batch.hidden[judged], batch.best[judged]                      # (n, C), (n,)
    guess = torch.stack([a.roll(k, 1)[judged] for k, a in enumerate(states, 1)])         # (T, n, C)

    # 3. The mean over the rows r = s - k that exist, by step.
    s = judged.nonzero()[:, 1]                                                 # (n,)
    exists = s >= torch.arange(1, steps + 1, device=s.device)[:, None]         # (T, n)
    weight = exists / exists.sum(1, keepdim=True).clamp(min=1)
    loss, slope, drafts = _divergence(words, goal, guess.detach(), weight)

    # 4. The slope is the loss's gradient in guess: a product with it has the same one.
    product = (guess * slope).sum()
    return loss + product - product.detach(), _accepted(drafts == best, judged)


@torch.no_grad()
def _divergence(words, goal, guess, weight, chunk=128):
    """KL divergence of the target's states goal (n, C) to the drafter's guess (T, n, C), weighted by (T, n)
    and summed; its gradient in guess; and the tokens (T, n) that the drafter would draft.

    Both are distributions over the draft vocabulary, the target's renormalised, because that is the most that
    the drafter can become. The gradient is taken where the logits are at hand, `chunk` rows at a time: no
    logits are kept for a backward pass, or made a second time in it.
    """
    loss, slopes, drafts = 0.0, [], []
    for goal, guess, weight in zip(goal.split(chunk), guess.split(chunk, 1), weight.split(chunk, 1)):
        log_p = words.logits(goal).float().log_softmax(-1)                     # (chunk, N)
        log_q = words.logits(guess).float().log_softmax(-1)                    # (T, chunk, N)
        p = log_p.exp()
        kl = (p * log_p).sum(-1) - (p * log_q).sum(-1)                         # (T, chunk)
        loss = loss + (kl * weight).sum()
        drafts.append(words.tokens(log_q.argmax(-1)))
        # The gradient of KL in the drafter's logits is q - p.
        slopes.append(words.slope((log_q.exp_() - p) * weight[..., None]))     # (T, chunk, C)
    return loss, torch.cat(slopes, 1), torch.cat(drafts, 1)


def _accepted(hits, judged):
    """The share (T,) of drafting rows whose first 1, 2, .. guesses are right, from hits (T, n) at the rows
    that are judged (B, S). Rows that draft past the last judged one do not count."""
    steps = range(1, len(hits) + 1)
    right = torch.zeros(len(hits), *judged.shape, device=judged.device)
    right[:, judged] = hits.float()
    # Back to the rows that drafted: a draft is accepted if it and all before it are right.
    right = torch.stack([x.roll(-k, 1) for k, x in zip(steps, right)]).cumprod(0)
    whole = torch.stack([F.pad(judged[:, k:], (0, k)) for k in steps]).all(0)
    return (right * whole).sum((1, 2)) / whole.sum().clamp(min=1)
