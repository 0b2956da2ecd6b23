"""Train SpecDiff-2's diffusion drafter for any target: the objectives side by side, on the same answers at
the same cost.

    # for a model of your own: prompts, answers and the drafter, in an hour
    python train_specdiff.py --target qwen3 --out checkpoints/qwen3/specdiff --gamma 4 --minutes 60
    # a window drafter that reads the target's states
    python train_specdiff.py --out mine/specdiff --objective ce
    # the unaligned one: plain masked diffusion
    python train_specdiff.py --out /tmp/base --objective mdlm --blind
    # streak-distillation goes on from it, on the same answers; then longer windows
    python train_specdiff.py --out /tmp/streak --objective streak --init /tmp/base \\
                             --responses /tmp/base/responses
    python train_specdiff.py --out /tmp/more --objective log-streak --init /tmp/streak --gamma 16 \\
                             --responses /tmp/base/responses
    # answers sampled, for rejection sampling
    python train_specdiff.py --out /tmp/rs --objective streak-rs --temperature 1

The target writes prompts and answers them itself (rollouts.py), and all objectives and seeds are trained on
the same answers. Streak objectives barely move a drafter that is never right: let them go on from another one
(--init). Interrupt it at any time: the same command continues. Writes config.json, model.safetensors,
log.jsonl, command.txt, and resume.pt with the optimisers' state.

heldout_tau estimates the tokens a round would commit, bonus included: greedy, the argmax at temperature 0;
point_mass and rejection, chains drawn from the drafter, under the answers' temperature.
"""
from dataclasses import replace

import minispec  # before torch: it tunes the allocator
import torch
import torch.nn.functional as F

from minispec import prism, specdiff
from minispec.core.attention import dense_attend
from minispec.core.words import feature_layers_of
from minispec.data import rollouts
from minispec.tools import checkpoints
from minispec.tools.script import Parser, run_main
from minispec.specdiff import MASK
from minispec.tools.training import Divergence, bf16, generator_of

# kl learns from the target's distributions, the others from the answers' tokens.
OBJECTIVES = ("kl", "mdlm", "ce", "streak", "log-streak", "streak-rs")
LAYERS = 2                  # a new drafter starts as so many first layers of the target
DECAY = 0.8                 # kl: a slot weighs so much of the one before


def parse_args():
    p = Parser(__doc__)
    rollouts.add_arguments(p)
    p.add_argument("--objective", default="kl", choices=OBJECTIVES,
                   help="what to train for, see objective (default %(default)s)")
    p.add_argument("--init", metavar="DIR",
                   help="start from this drafter; its shape is kept, but for --gamma. "
                        "One of train_prism.py drafts the first slot already, and learns the others")
    p.add_argument("--gamma", type=int, default=8, help="slots of a window (default %(default)s)")
    p.add_argument("--blind", action="store_true",
                   help="it reads nothing of the target, as in the paper (default: the final hidden states)")
    p.add_argument("--markov", type=int, default=0, metavar="RANK",
                   help="rank of the Markov head on the token of the slot before (default 0: none)")
    p.add_argument("--windows", type=int, default=32, help="windows of a text per step (default %(default)s)")
    return rollouts.parsed(p)


def drafter_of(args, target):
    """A new drafter, or the one to go on from."""
    if not args.init:
        n_layer = min(LAYERS, target.config.n_layer)
        layers = () if args.last_layer or args.blind else feature_layers_of(target.config)
        return specdiff.for_target(target, n_layer, args.gamma, not args.blind, layers, args.markov)

    if checkpoints.kind_of(args.init) == "prism":
        head = checkpoints.load_drafter(args.init, target, prism.PrismConfig)
        drafter = specdiff.from_prism(head, target, args.gamma, args.markov)
    else:
        drafter = checkpoints.load_drafter(args.init, target, specdiff.SpecDiffConfig)
        drafter.config = replace(drafter.config, gamma=args.gamma, rank=args.markov or drafter.config.rank)
        drafter.markov = drafter.markov or specdiff.markov_head(drafter.config)
    if args.blind and drafter.config.reads:
        raise ValueError(f"the drafter in {args.init} reads the target's states; --blind cannot change that")
    if args.last_layer and drafter.config.feature_layers:
        raise ValueError(f"the drafter in {args.init} reads three layers; --last-layer cannot change that")
    return drafter


# -- the loss: many windows of a text in one forward ---------------------------------------------------------
# The expected number of accepted drafts of a window is J = sum_m c_m with c_m = q_1(x_1) .. q_m(x_m), x being
# the target's tokens and q_j the marginal of slot j. That fits point-mass acceptance; `streak-rs` is the same
# for rejection. Prefixes are causal, so that all windows of a text share one. Shapes: B texts, S tokens, W
# windows per text, r rows of a window, N tokens to draft.

def window_mask(n, seen, rows):
    """Who sees whom among n tokens of a text, followed by W windows of `rows` rows each: bool (B, 1, n + W r,
    n + W r). The text is causal. A row of window w sees the first seen[b, w] (B, W) tokens and all rows of
    its own window."""
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
    the right; no window may begin after that. """
    c = drafter.config
    n = ids.shape[1]
    rows = c.gamma - 1                              # the last committed token guesses slot 1
    at = torch.arange(n, device=ids.device)
    slots = torch.full((*starts.shape, rows), MASK, device=ids.device) if shown is None else shown[..., :rows]
    places = places_of(starts, rows)

    # 1. One sequence: the text, then the rows of all windows, at the positions that they have in the text.
    tokens = torch.cat([ids, slots.flatten(1)], 1)
    positions = torch.cat([at.expand(len(ids), -1), places.flatten(1)], 1).clamp(max=c.block_size - 1)
    if c.reads:
        features = F.pad(features, (0, 0, 1, 0))[:, :-1]        # of the token before
        newest = (starts - 1).repeat_interleave(rows, 1)
        features = torch.cat([features, at_places(features, newest)], 1)

    # 2. One forward, in which windows do not see each other.
    hidden = drafter(tokens, positions, dense_attend(window_mask(n, starts, rows)), features)
    windows = hidden[:, n:].unflatten(1, (-1, rows))                                      # (B, W, rows, C)
    last = at_places(hidden, starts - 1)
    return torch.cat([last[:, :, None], windows], 2), hidden[:, :n]                       # (B, W, gamma, C)


def markov_terms(drafter, tokens):
    """What the Markov head adds to the states of windows whose right tokens (B, W, gamma) are known; nothing
    in the first slot, whose row has read the token before."""
    if drafter.markov is None:
        return 0.0
    return F.pad(drafter.markov(drafter.words.embed(tokens[..., :-1])), (0, 0, 1, 0))


def draw_windows(learn, n, generator):
    """Where n windows of each text begin, (B, n): spread evenly over its tokens to learn (bool (B, S)) from
    one random offset."""
    first = learn.int().argmax(1)
    count = learn.sum(1)
    u = (torch.rand(len(learn), 1, generator=generator) + torch.arange(n) / n) % 1
    return first[:, None] + (u.to(learn.device) * count[:, None]).long()


def places_of(starts, gamma):
    """The places (B, W, gamma) of the slots of windows that begin at `starts` (B, W)."""
    return starts[..., None] + torch.arange(gamma, device=starts.device)


def at_places(x, places):
    """x (B, S, ..) at places (B, ..) of each text, where they lie in it."""
    text = torch.arange(len(x), device=x.device)[:, None]
    rows = x[text, places.flatten(1).clamp(max=x.shape[1] - 1)]
    return rows.unflatten(1, places.shape[1:])


def _answers(drafter, batch, starts):
    """What the target wrote in windows, each (B, W, gamma): tokens; their indices; log_p; and valid, False
    behind the end of its answer and for tokens that the drafter cannot draft."""
    places = places_of(starts, drafter.config.gamma)
    tokens, written, log_p = (at_places(x, places) for x in (batch.ids, batch.learn, batch.log_p))
    index = drafter.words.indices(tokens)
    valid = written & (places < batch.ids.shape[1]) & (index >= 0)
    return tokens, index.clamp(min=0), log_p, valid


def log_probability(logits, labels):
    """log q (...) of the tokens with indices `labels` (...), under the logits (..., N)."""
    return logits.float().log_softmax(-1).gather(-1, labels[..., None])[..., 0]


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
    log_q = log_probability(logits, labels)

    if name == "streak-rs":
        log_q = (log_q - log_p).clamp(max=0)             # of being accepted
    if name in ("streak", "streak-rs"):
        return -log_streak(log_q, valid).exp().sum(-1).mean()
    if name == "log-streak":
        started = valid[..., 0]                          # elsewhere J is 0 whatever the drafter does
        return -log_streak(log_q, valid)[started].logsumexp(-1).sum() / started.sum().clamp(min=1)
    # Masked slots count 1 / rate each, so all slots of a window count 1 on average.
    counts = valid if weight is None else valid * weight
    return -(log_q * counts).sum() / valid.sum()


def _mask_at_random(labels, generator):
    """Masked diffusion: a rate per window, every slot masked with that probability. (shown, weight), see
    `objective`."""
    gamma = labels.shape[-1]
    u = torch.rand(*labels.shape[:-1], 1, generator=generator)
    rate = (1 + (gamma - 1) * u) / gamma                           # at least one slot, on average
    masked = torch.rand(labels.shape, generator=generator) < rate
    weight = masked / rate
    weight[..., -1] = 1                                            # no row could show the last slot's token
    shown = labels.masked_fill(masked.to(labels.device), MASK)
    return shown, weight.to(labels.device)


def training_loss(drafter, name, batch, n_windows, generator):
    """The objective `name` on n_windows windows of each text of a rollouts.Batch."""
    # 1. Windows at random places of the answers.
    starts = draw_windows(batch.learn, n_windows, generator)
    tokens, labels, log_p, valid = _answers(drafter, batch, starts)
    # 2. What the drafter sees: open slots, or for masked diffusion some of the answer.
    shown = weight = None
    if name == "mdlm":
        shown, weight = _mask_at_random(tokens, generator)
    # 3. What it guesses, and how good that is.
    windows, text = window_states(drafter, batch.ids, starts, batch.features(drafter.config), shown)
    windows = windows + markov_terms(drafter, tokens)
    if name == "kl":
        return distillation(drafter, batch, starts, windows, text, valid)
    return objective(name, drafter.words.logits(windows), labels, valid, log_p, weight)


def distillation(drafter, batch, starts, windows, text, valid):
    """KL divergence from the target's distribution of every slot, given the true tokens before it, to the
    drafter's, slot by slot. Where answers are sampled it has the optimum of cross-entropy, and learns it from
    fewer of them. windows and text: from window_states."""
    gamma = drafter.config.gamma
    logits = drafter.words.logits
    # Every row of an answer is the first slot of a window.
    judged = F.pad(batch.learn[:, 1:], (0, 1))                                            # (B, S)
    first = Divergence(logits(batch.hidden[judged]))(logits(text[judged])).mean()
    # The others are those of the windows.
    goal = at_places(batch.hidden, places_of(starts - 1, gamma))                          # (B, W, gamma, C)
    slots = Divergence(logits(goal))(logits(windows)) * valid                             # (B, W, gamma)
    mean = slots.sum((0, 1)) / valid.sum((0, 1)).clamp(min=1)
    decay = DECAY ** torch.arange(gamma, device=mean.device)
    return first + (mean * decay)[1:].sum()


def estimate(drafter, batch, n_windows):
    """How many drafts windows of a rollouts.Batch would have accepted on average: {"greedy"}, the argmax at
    temperature 0, and {"point_mass", "rejection"}, a chain drawn from q. It is the sum of how often the first
    1, 2, .. are."""
    starts = draw_windows(batch.learn, n_windows, torch.Generator().manual_seed(0))
    tokens, labels, log_p, valid = _answers(drafter, batch, starts)
    windows, _ = window_states(drafter, batch.ids, starts, batch.features(drafter.config))
    logits = drafter.words.logits(windows + markov_terms(drafter, tokens))
    log_q = log_probability(logits, labels)
    right = (logits.argmax(-1) == labels) & valid
    per_window = {
        "greedy": right.long().cumprod(-1),
        "point_mass": log_streak(log_q, valid).exp(),
        "rejection": log_streak((log_q - log_p).clamp(max=0), valid).exp(),
    }
    return {name: x.float().sum(-1).mean().item() for name, x in per_window.items()}


def evaluate(run):
    """On held-out answers: tau by each way of accepting."""
    means = run.heldout_mean(lambda batch: estimate(run.model, batch, run.args.windows))
    # 1 is the bonus token.
    return {name: round(1 + x, 4) for name, x in means.items()}


def train(args, target, model):
    # The target's own answers, the rows of every step, and which tokens are drafted.
    c = model.config
    run = rollouts.DrafterRun(args, target, model)
    print(f"{args.objective}: {c.n_layer} layers, {model.n_params() / 1e6:.2f}M parameters of its own, "
          f"gamma {c.gamma}, {args.windows} windows a text")

    for step, batch in run.batches():
        # Windows are drawn by a generator of this step, so that a resumed run draws the same ones.
        generator = generator_of(args, step)
        with bf16(args.device):
            loss = training_loss(model, args.objective, batch, args.windows, generator)
        loss.backward()
        run.update(run.used, loss=loss)

        if run.checkpoint_due():
            checkpoints.save_drafter(model, args.out, target)
            run.checkpoint(tokens=run.tokens, heldout_tau=evaluate(run))


def main():
    rollouts.start(parse_args(), drafter_of, train)


if __name__ == "__main__":
    run_main(main, "interrupted; the same command continues from the last checkpoint",
             "--batch-tokens or --windows")
