"""Train a drafter of the PRISM / EAGLE family for any target. One page, nanoGPT style.

    # for a model of your own: prompts, answers and the drafter, in an hour
    python train_prism.py --target qwen3 --out checkpoints/qwen3/prism --minutes 60
    # for the shipped target
    python train_prism.py --out checkpoints/prism --arm prism2
    # the same data, one module
    python train_prism.py --out /tmp/one --arm ttt1 --responses checkpoints/prism/responses
    # modules start as copies of a trained one, and its control: as much training, no module more
    python train_prism.py --out /tmp/two --arm prism2 --init /tmp/one
    python train_prism.py --out /tmp/more --arm ttt1 --init /tmp/one

The target writes prompts and answers them itself, and what it knew at every token is kept (rollouts.py).
Other arms, seeds and prefixes (--prompts 1000, 2000, ..) can be trained from the same folder of --responses.
Interrupt it at any time: the same command continues. Writes config.json, model.safetensors, log.jsonl,
command.txt, and resume.pt with the optimisers' state. tau, on the way, is an estimate of the tokens that a
round of chain drafting would commit.
"""
import minispec  # before torch: it tunes the allocator
import torch

from minispec import prism, prism_training
from minispec.core.words import Words, most_frequent, restrict
from minispec.data import rollouts
from minispec.data.tokenizer import Tokenizer
from minispec.tools import checkpoints
from minispec.tools.script import Parser, run_main
from minispec.tools.training import Optimizer, Run, bf16, fast_dtype, learning_rate, locked

# unroll: draft steps in the loss (None: as --unroll says). All arms but the first draft from own states too.
ARMS = {
    # One module, one step: EAGLE and EAGLE-2.
    "eagle2": {"step_map": (0,), "n_layer": 1, "unroll": 1},
    # One module, many steps: HASS, EAGLE-3.
    "ttt1": {"step_map": (0,), "n_layer": 1, "unroll": None},
    # The paper's: step 1 reads module 0, all later ones module 1.
    "prism2": {"step_map": (0, 1), "n_layer": 1, "unroll": None},
    "prism3": {"step_map": (0, 1, 2), "n_layer": 1, "unroll": None},
    # As many parameters as prism2, all of them read at every step.
    "stack2": {"step_map": (0,), "n_layer": 2, "unroll": None},
}


def parse_args():
    p = Parser(__doc__)
    rollouts.add_arguments(p)
    p.add_argument("--arm", default="prism2", choices=ARMS,
                   help="which member of the family (default prism2)")
    p.add_argument("--taps", default="last", choices=("last", "three"),
                   help="what it reads of the target: the final hidden state, or three layers")
    p.add_argument("--init", metavar="DIR",
                   help="start from this drafter; further modules begin as copies of its last")
    p.add_argument("--unroll", type=int, default=5, help="draft steps in the loss (default 5; arm eagle2: 1)")
    args = p.parse_args()
    rollouts.check_arguments(args, unroll=1)
    return args


def drafter_of(args, target):
    """A new drafter for the arm; with --init its modules are copies of a trained one's."""
    arm = ARMS[args.arm]
    taps = rollouts.taps_of(args.taps, target)
    model = prism.for_target(target, arm["step_map"], arm["n_layer"], taps)
    if not args.init:
        return model
    source = prism.load(args.init, args.device)
    source.check(target)
    if (source.config.n_layer, source.config.taps) != (arm["n_layer"], taps):
        raise ValueError(f"{args.init} has modules of {source.config.n_layer} layers and reads taps "
                         f"{source.config.taps}; this arm needs {arm['n_layer']} and {taps}")
    prism.copy_modules(model, source)
    return model


@torch.no_grad()
def evaluate(model, words, heldout, args):
    """On held-out answers, five drafts a round: tau; how often draft 1, 2, .. is right if all before are."""
    total = torch.zeros(5)
    n = 0
    for numbers in torch.arange(len(heldout.rows)).split(4):
        batch = heldout.batch(numbers.tolist(), args.device)
        with bf16(args.device):
            _, accepted = prism_training.unrolled_loss(model, words, batch, 5)
        total += accepted.cpu() * batch.learn.sum().item()
        n += batch.learn.sum().item()
    share = total / n
    return {
        "heldout_tau": round(1 + share.sum().item(), 4),
        "heldout_acceptance": rollouts.of_those_before(share),
    }


# -- training ------------------------------------------------------------------------------------------------

def main():
    args = parse_args()
    target = checkpoints.load(args.target, args.device, fast_dtype(args.device))
    tokenizer = Tokenizer.load(args.target)
    target.requires_grad_(False)
    torch.manual_seed(args.seed)
    model = drafter_of(args, target).float()
    with locked(args.out):
        train(args, target, tokenizer, model)


def train(args, target, tokenizer, model):
    # 1. The data, which texts every step reads, and which tokens are drafted.
    unroll = ARMS[args.arm]["unroll"] or args.unroll
    texts, heldout, plan = rollouts.collect(args, target, tokenizer, model.config.taps, unroll)
    restrict(model, most_frequent(texts.answers(), args.draft_vocab, target.config.vocab_size))
    words = Words(target, model.vocabulary)
    module = sum(p.numel() for p in model.bank[0].parameters())
    print(f"{args.arm}: {model.n_params() / 1e6:.2f}M parameters, {module / 1e6:.2f}M read by a draft step, "
          f"{model.config.draft_vocab or target.config.vocab_size} tokens to draft")

    # 2. The loop, from the last checkpoint on.
    optimizer = Optimizer(model)
    run = Run(args.out, model, optimizer, len(plan), args.save_every, args.minutes and args.minutes / 2)
    for step in run.steps():
        numbers, tokens = plan[step]
        batch = texts.batch(numbers, args.device)
        # Every row drafts; the loss compares its guesses with the target's distributions.
        with bf16(args.device):
            loss, accepted = prism_training.unrolled_loss(model, words, batch, unroll)
        loss = loss / unroll
        loss.backward()
        progress = run.progress(tokens / plan[-1][1])
        optimizer.step(learning_rate(step, progress, args.lr, args.warmup))
        run.log(loss=loss, tau=1 + accepted.sum())
        if run.checkpoint_due(step):
            results = evaluate(model, words, heldout, args)
            prism.save(model, args.out)
            run.checkpoint(step, tokens=tokens, **results)


if __name__ == "__main__":
    run_main(main, "interrupted; the same command continues from the last checkpoint", "--batch-tokens")
