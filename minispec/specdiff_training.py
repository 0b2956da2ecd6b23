"""Training SpecDiff-2's drafter: many windows of a text in one forward, and what is learned of them.

The expected number of accepted drafts of a window is J = sum_m c_m with c_m = q_1(x_1) .. q_m(x_m), x being
the target's tokens and q_j the marginal of slot j. That fits point-mass acceptance; `streak-rs` is the same for
rejection. Prefixes are causal, so that all windows of a text share one. Shapes: B texts, S tokens, W windows
per text, r rows of a window, N tokens to draft.
"""
import torch
import torch.nn.functional as F

from minispec.core.cpu import training_attend
from minispec.specdiff import MASK

OBJECTIVES = ("mdlm", "ce", "streak", "log-streak", "streak-rs")


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
