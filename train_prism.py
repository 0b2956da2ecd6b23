"""Train a drafter of the PRISM / EAGLE family for any target. One page, nanoGPT style.

    # for a model of your own: prompts, answers and the drafter, in an hour
    python train_prism.py --target qwen3 --out checkpoints/qwen3/prism --minutes 60
    # for the shipped target
    python train_prism.py --out mine/prism --arm prism2
    # the same data, one module
    python train_prism.py --out /tmp/one --arm ttt1 --responses mine/prism/responses
    # the paper's recipe: modules start as copies of a trained one; and its control: the same training, with
    # one module. --lr is 2e-3 by default, with --init a third of it.
    python train_prism.py --out /tmp/two --arm prism2 --init /tmp/one --responses mine/prism/responses
    python train_prism.py --out /tmp/more --arm ttt1 --init /tmp/one --responses mine/prism/responses

The target answers prompts, which a real model writes itself, and its hidden states are recorded
(data/rollouts.py).
Other variants, seeds and prefixes (--prompts 1000, 2000, ..) can be trained from the same folder of
--responses. Interrupt it at any time: the same command continues. Writes config.json, model.safetensors,
log.jsonl, command.txt, and resume.pt with the optimisers' state. The tau that it shows is an estimate of the
tokens that a round would commit. Its chains begin at every position; in decoding they begin after rejected
drafts, where fewer drafts are right.
"""
import minispec  # noqa: F401  before torch: it tunes the allocator
from minispec import prism
from minispec.core.requests import MAX_K
from minispec.data.recorded import DrafterRun, add_arguments, begin, feature_layers_of, parsed
from minispec.tools import drafter_files
from minispec.tools.script import Parser, run_main
from minispec.tools.training import bf16, locked

WORTH = 0.05                # share of the rounds in which a draft must be accepted for its step to pay

# name: (PrismConfig.step_map, layers of a module)
ARMS = {
    # One module, many steps: HASS, EAGLE-3; with --unroll 1: EAGLE, EAGLE-2.
    "ttt1": ((0,), 1),
    # The paper's: step 1 reads module 0, all later ones module 1.
    "prism2": ((0, 1), 1),
    "prism3": ((0, 1, 2), 1),
    # Nearly the parameters of prism2, all of them read at every step.
    "stack2": ((0,), 2),
}


def parse_args():
    p = Parser(__doc__)
    add_arguments(p)
    p.add_argument("--arm", default="prism2", choices=ARMS,
                   help="member of the family (default %(default)s)")
    p.add_argument("--init", metavar="DIR",
                   help="drafter to start from; further modules begin as copies of its last one")
    p.add_argument("--unroll", type=int, default=5, help="draft steps in the loss (default %(default)s)")
    args = parsed(p)
    least = len(ARMS[args.arm][0])                       # every module is trained
    if not least <= args.unroll <= MAX_K:
        raise ValueError(f"unroll {args.unroll} is out of range; allowed is {least} to {MAX_K} draft steps")
    return args


def drafter_of(args, target):
    """A new drafter of the variant; with --init its modules are copies of a trained one's."""
    step_map, n_layer = ARMS[args.arm]
    layers = () if args.last_layer else feature_layers_of(target.config)
    model = prism.for_target(target, step_map, n_layer, layers)
    if not args.init:
        return model
    source = drafter_files.load_drafter(args.init, target, prism.PrismConfig)
    for name in ("n_layer", "feature_layers"):
        theirs, mine = getattr(source.config, name), getattr(model.config, name)
        if theirs != mine:
            raise ValueError(f"the drafter in {args.init} has {name} {theirs}; this training needs {mine}")
    if source.config.n_modules > model.config.n_modules:
        raise ValueError(f"the drafter in {args.init} has {source.config.n_modules} modules; "
                         f"{args.arm} has {model.config.n_modules}")
    prism.copy_modules(model, source)
    return model


def evaluate(run):
    """tau on held-out answers, with five drafts a round. Sets the drafter's depth: the number of drafts a
    round that pay."""
    def estimate(batch):
        _, accepted = prism.unrolled_loss(run.model, batch, 5)
        return dict(enumerate(accepted.tolist()))

    share = run.heldout_mean(estimate)
    # If all five drafts pay, so may further ones.
    depth = sum(x > WORTH for x in share.values())
    run.model.config.depth = prism.PrismConfig.depth if depth == 5 else max(depth, 1)
    return round(1 + sum(share.values()), 4)


def main():
    # 1. The target, the drafter, and the target's answers.
    args = parse_args()
    target, model = begin(args, drafter_of)
    with locked(args.out):
        run = DrafterRun(args, model, least=args.unroll)
        step_reads = sum(p.numel() for p in [*model.bank[0].parameters(), model.draft_head.head.weight])
        print(f"{args.arm}: {model.n_params() / 1e6:.2f}M parameters, {step_reads / 1e6:.2f}M read by a "
              f"draft step, {model.draft_head.size} tokens to draft")

        # 2. The loop, from the last checkpoint on.
        for _, batch in run.batches():
            with bf16(args.device):
                loss, accepted = prism.unrolled_loss(model, batch, args.unroll)
            loss = loss / args.unroll
            loss.backward()
            run.update(run.used, loss=loss, tau=1 + accepted.sum())

            if run.checkpoint_due():
                tau = evaluate(run)                      # also sets the depth, which is saved
                drafter_files.save_drafter(model, args.out, target)
                run.checkpoint(tokens=run.tokens, heldout_tau=tau)


if __name__ == "__main__":
    run_main(main, "interrupted; the same command continues from the last checkpoint", "--batch-tokens")
