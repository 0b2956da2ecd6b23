"""Train SpecDiff-2's diffusion drafter for any target: the objectives side by side, on the same answers at
the same cost.

    # a window drafter that reads the target's states
    python train_specdiff.py --out checkpoints/specdiff --objective ce
    # the unaligned one: plain masked diffusion
    python train_specdiff.py --out /tmp/base --objective mdlm --taps none
    # streak-distillation goes on from it, on the same answers; then longer windows that read the target
    python train_specdiff.py --out /tmp/streak --objective streak --init /tmp/base \\
                             --responses /tmp/base/responses
    python train_specdiff.py --out /tmp/more --objective log-streak --init /tmp/streak --taps last \\
                             --gamma 16 --responses /tmp/base/responses
    # answers sampled, for rejection sampling
    python train_specdiff.py --out /tmp/rs --objective streak-rs --temperature 1

The target writes prompts and answers them itself (rollouts.py), and all objectives and seeds are trained on
the same answers. Streak objectives barely move a drafter that is never
right: let them go on from another one (--init). Interrupt it at any time: the same command continues. Writes
config.json, model.safetensors, log.jsonl, command.txt, and resume.pt with the optimisers' state. heldout_tau
estimates the tokens a round would commit, bonus included: greedy, the argmax at temperature 0; point_mass and
rejection, chains drawn from the drafter, under the answers' temperature. """
from dataclasses import replace

import minispec  # before torch: it tunes the allocator
import torch
import torch.nn.functional as F

from minispec import specdiff
from minispec.core.cpu import training_attend
from minispec.core.words import most_frequent, restrict
from minispec.data import rollouts
from minispec.tools import checkpoints
from minispec.tools.script import Parser, run_main
from minispec.data.tokenizer import Tokenizer
from minispec.specdiff import MASK
from minispec.tools.training import Optimizer, Run, bf16, fast_dtype, generator_of, learning_rate, locked

OBJECTIVES = ("mdlm", "ce", "streak", "log-streak", "streak-rs")


def parse_args():
    p = Parser(__doc__)
    rollouts.add_arguments(p)
    p.add_argument("--objective", default="ce", choices=OBJECTIVES,
                   help="what to train for, see objective (default %(default)s)")
    p.add_argument("--init", metavar="DIR",
                   help="start from this drafter; its shape is kept, but windows may be longer (--gamma), "
                        "and it may begin to read the target (--taps)")
    p.add_argument("--layers", type=int,
                   help="a new drafter starts as so many first layers of the target (default 2)")
    p.add_argument("--gamma", type=int, help="slots of a window (default 8)")
    p.add_argument("--taps", choices=("none", "last", "three"),
                   help="what it reads of the target: nothing, the final state (default), or three layers")
    p.add_argument("--no-shift", action="store_true",
                   help="a mask guesses its own token, not the one after it")
    p.add_argument("--windows", type=int, default=32, help="windows of a text per step (default %(default)s)")
    args = p.parse_args()
    rollouts.check_arguments(args, windows=1, layers=1)
    if args.init and (args.layers or args.no_shift):
        raise ValueError("--init keeps the shape of its drafter; --layers and --no-shift are for a new one")
    return args


def drafter_of(args, target):
    """A new drafter, or the one to go on from."""
    taps = rollouts.taps_of(args.taps or "last", target)
    if not args.init:
        n_layer = args.layers or min(2, target.config.n_layer)
        return specdiff.for_target(target, n_layer, args.gamma or 8, not args.no_shift, taps)

    drafter = specdiff.load(args.init, target)
    gamma = args.gamma or drafter.config.gamma
    drafter.config = replace(drafter.config, gamma=gamma, target=checkpoints.fingerprint(target))
    if args.taps and taps != drafter.config.taps:
        drafter = specdiff.tapped(drafter, target, taps)
    return drafter


# -- the loss: many windows of a text in one forward ---------------------------------------------------------
# The expected number of accepted drafts of a window is J = sum_m c_m with c_m = q_1(x_1) .. q_m(x_m), x being
# the target's tokens and q_j the marginal of slot j. That fits point-mass acceptance; `streak-rs` is the same
# for rejection. Prefixes are causal, so that all windows of a text share one. Shapes: B texts, S tokens, W
# windows per text, r rows of a window, N tokens to draft.

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


def evaluate(model, heldout, args):
    """On held-out answers: tau by each way of accepting, and how often the greedy draft 1, 2, .. is right
    where those before it are."""
    total = {}
    for numbers in torch.arange(len(heldout.rows)).split(4):
        batch = heldout.batch(numbers.tolist(), args.device)
        with bf16(args.device):
            means = estimate(model, batch, args.windows)
        for name, mean in means.items():
            total[name] = total.get(name, 0) + mean * len(numbers)
    share = {name: x / len(heldout.rows) for name, x in total.items()}
    entropy = share.pop("entropy").mean().item()
    tau = {name: round(1 + x.sum().item(), 4) for name, x in share.items()}      # 1: the bonus token
    return {"heldout_tau": tau, "heldout_acceptance": rollouts.of_those_before(share["greedy"]),
            "heldout_entropy": round(entropy, 4)}


def main():
    args = parse_args()
    target = checkpoints.load(args.target, args.device, fast_dtype(args.device)).requires_grad_(False)
    tokenizer = Tokenizer.load(args.target)
    torch.manual_seed(args.seed)
    model = drafter_of(args, target).float()
    with locked(args.out):
        train(args, target, tokenizer, model)


def train(args, target, tokenizer, model):
    # The target's own answers, the rows of every step, and which tokens are drafted.
    c = model.config
    texts, heldout, plan = rollouts.collect(args, target, tokenizer, c.taps or ())
    restrict(model, most_frequent(texts.answers(), args.draft_vocab, target.config.vocab_size))
    print(f"{args.objective}: {c.n_layer} layers, {model.n_params() / 1e6:.2f}M parameters of its own, "
          f"gamma {c.gamma}, {args.windows} windows a text")

    optimizer = Optimizer(model)
    run = Run(args.out, model, optimizer, len(plan), args.save_every, args.minutes and args.minutes / 2)
    for step in run.steps():
        numbers, tokens = plan[step]
        batch = texts.batch(numbers, args.device)

        # Windows are drawn by a generator of this step, so that a resumed run draws the same ones.
        generator = generator_of(args, step)
        with bf16(args.device):
            loss = training_loss(model, args.objective, batch, args.windows, generator)
        loss.backward()
        progress = run.progress(tokens / plan[-1][1])
        optimizer.step(learning_rate(step, progress, args.lr, args.warmup))
        run.log(loss=loss)

        if run.checkpoint_due(step):
            results = evaluate(model, heldout, args)
            specdiff.save(model, args.out)
            run.checkpoint(step, tokens=tokens, **results)


if __name__ == "__main__":
    run_main(main, "interrupted; the same command continues from the last checkpoint",
             "--batch-tokens or --windows")
