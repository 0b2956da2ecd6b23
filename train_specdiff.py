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

from minispec import specdiff, specdiff_training
from minispec.core.words import most_frequent, restrict
from minispec.data import rollouts
from minispec.tools import checkpoints
from minispec.tools.script import Parser, run_main
from minispec.data.tokenizer import Tokenizer
from minispec.tools.training import Optimizer, Run, bf16, fast_dtype, generator_of, learning_rate, locked


def parse_args():
    p = Parser(__doc__)
    rollouts.add_arguments(p)
    p.add_argument("--objective", default="ce", choices=specdiff_training.OBJECTIVES,
                   help="what to train for, see specdiff_training.objective (default %(default)s)")
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


def evaluate(model, heldout, args):
    """On held-out answers: tau by each way of accepting, and how often the greedy draft 1, 2, .. is right
    where those before it are."""
    total = {}
    for numbers in torch.arange(len(heldout.rows)).split(4):
        batch = heldout.batch(numbers.tolist(), args.device)
        with bf16(args.device):
            means = specdiff_training.estimate(model, batch, args.windows)
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
            loss = specdiff_training.training_loss(model, args.objective, batch, args.windows, generator)
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
