"""Train SpecDiff-2's diffusion drafter for any target: the objectives side by side, on the same answers at
the same cost.

    # for a model of your own: prompts, answers and the drafter, in an hour
    python train_specdiff.py --target qwen3 --out checkpoints/qwen3/specdiff --gamma 4 --minutes 60
    # a window drafter that reads the target's states
    python train_specdiff.py --out mine/specdiff --objective ce
    # the baseline: plain masked diffusion
    python train_specdiff.py --out /tmp/base --objective mdlm --blind
    # streak-distillation goes on from it, on the same answers; then longer windows
    python train_specdiff.py --out /tmp/streak --objective streak --init /tmp/base \\
                             --responses /tmp/base/responses
    python train_specdiff.py --out /tmp/more --objective log-streak --init /tmp/streak --gamma 16 \\
                             --responses /tmp/base/responses
    # answers sampled, for rejection sampling
    python train_specdiff.py --out /tmp/rs --objective streak-rs --temperature 1

The target answers prompts, which a real model writes itself (data/rollouts.py), and all objectives and seeds
are trained on the same answers. Streak objectives barely move a drafter that is never right: start them from
a trained one (--init). --lr is 2e-3 by default, with --init a third of it. Interrupt it at any time: the same
command continues. Writes config.json, model.safetensors, log.jsonl, command.txt, and resume.pt with the
optimisers' state.

heldout_tau estimates the tokens that a round commits, bonus included, of windows at random positions; rounds
begin after rejected drafts, where tau is lower. greedy: the drafter's argmax must equal
the answer's token, in greedy and in sampled answers. point_mass, rejection: chains drawn from the drafter at
temperature 1; the target has the answer's temperature.
"""
from dataclasses import replace

import minispec  # noqa: F401  before torch: it tunes the allocator
from minispec import prism, specdiff
from minispec.data.recorded import DrafterRun, add_arguments, begin, feature_layers_of, parsed
from minispec.tools import drafter_files
from minispec.tools.script import Parser, run_main
from minispec.tools.training import bf16, generator_of, locked

LAYERS = 2                  # first layers of the target, from which a new drafter starts
GAMMA = 8                   # slots of a window


def parse_args():
    p = Parser(__doc__)
    add_arguments(p)
    p.add_argument("--objective", default="kl", choices=specdiff.OBJECTIVES,
                   help="training objective, see docs/specdiff.md (default %(default)s)")
    p.add_argument("--init", metavar="DIR",
                   help="drafter to start from; its shape is kept, and its draft vocabulary is chosen anew. "
                        "A drafter of train_prism.py drafts the first slot already, and learns the others")
    p.add_argument("--gamma", type=int,
                   help=f"slots of a window (default {GAMMA}, or as in the drafter of --init)")
    p.add_argument("--blind", action="store_true",
                   help="do not read the target's hidden states, as in the paper (default: read them)")
    p.add_argument("--markov", type=int, default=0, metavar="RANK",
                   help="rank of the Markov head on the token of the slot before (default 0: none)")
    p.add_argument("--windows", type=int, default=32, help="windows per text and step (default %(default)s)")
    return parsed(p)


def drafter_of(args, target):
    """A new drafter, or the one to go on from."""
    gamma = args.gamma or GAMMA
    if not args.init:
        n_layer = min(LAYERS, target.config.n_layer)
        layers = () if args.last_layer or args.blind else feature_layers_of(target.config)
        return specdiff.for_target(target, n_layer, gamma, not args.blind, layers, args.markov)

    if drafter_files.kind_of(args.init) == "prism":
        head = drafter_files.load_drafter(args.init, target, prism.PrismConfig)
        drafter = specdiff.from_prism(head, target, gamma, args.markov)
    else:
        drafter = drafter_files.load_drafter(args.init, target, specdiff.SpecDiffConfig)
        rank = drafter.config.rank
        if args.markov not in (0, rank):
            raise ValueError(f"the Markov head of the drafter in {args.init} has rank {rank}, not {args.markov}")
        drafter.config = replace(drafter.config, gamma=args.gamma or drafter.config.gamma)
    if args.blind and drafter.config.reads:
        raise ValueError(f"the drafter in {args.init} reads the target's states; --blind cannot change that")
    if args.last_layer and drafter.config.feature_layers:
        raise ValueError(f"the drafter in {args.init} reads three layers; --last-layer cannot change that")
    return drafter


def evaluate(run):
    """On held-out answers: tau by each way of accepting; 1 is the bonus token."""
    means = run.heldout_mean(lambda batch: specdiff.estimate(run.model, batch, run.args.windows))
    return {name: round(1 + x, 4) for name, x in means.items()}


def main():
    # 1. The target, the drafter, and the target's answers.
    args = parse_args()
    target, model = begin(args, drafter_of)
    with locked(args.out):
        run = DrafterRun(args, model)
        c = model.config
        print(f"{args.objective}: {c.n_layer} layers, {model.n_params() / 1e6:.2f}M parameters of its own, "
              f"gamma {c.gamma}, {args.windows} windows a text")

        # 2. The loop, from the last checkpoint on.
        for step, batch in run.batches():
            # Windows are drawn by a generator of this step, so that a resumed run draws the same ones.
            generator = generator_of(args, step)
            with bf16(args.device):
                loss = specdiff.training_loss(model, args.objective, batch, args.windows, generator)
            loss.backward()
            run.update(run.used, loss=loss)

            if run.checkpoint_due():
                drafter_files.save_drafter(model, args.out, target)
                run.checkpoint(tokens=run.tokens, heldout_tau=evaluate(run))


if __name__ == "__main__":
    run_main(main, "interrupted; the same command continues from the last checkpoint",
             "--batch-tokens or --windows")
