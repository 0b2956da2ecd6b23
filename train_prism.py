"""Train a drafter of the PRISM / EAGLE family for any target. One page, nanoGPT style.

    python train_prism.py --out checkpoints/prism --arm prism2                       # for the shipped target
    python train_prism.py --out /tmp/one --arm ttt1 --responses checkpoints/prism/responses      # the same data, one module
    python train_prism.py --out /tmp/two --arm prism2 --init /tmp/one                # modules start as copies of a trained one
    python train_prism.py --out /tmp/more --arm ttt1 --init /tmp/one                 # its control: as much training, no module more

The target answers the prompts itself (greedily, unless --temperature says otherwise); the answers are kept in shards, from
which other arms, seeds and prefixes (--prompts 1000, 2000, ..) can be trained. Its hidden states are computed when they are
needed. Interrupt it at any time: the same command continues. Writes config.json, model.safetensors, log.jsonl, command.txt,
and resume.pt with the optimisers' state. tau, on the way, estimates the tokens a round of chain drafting would commit.
"""
import minispec  # before torch: it tunes the allocator
import torch

from minispec import prism
from minispec.core import gpt
from minispec.tools import checkpoints
from minispec.data import rollouts
from minispec.tools.script import Parser, run_main
from minispec.data.tokenizer import Tokenizer
from minispec.tools.training import Optimizer, Run, learning_rate, locked

# unroll: draft steps in the loss. All arms but the first are trained to draft from their own states.
ARMS = {
    "eagle2": dict(step_map=(0,), n_layer=1, unroll=1),           # one module, one step: EAGLE and EAGLE-2
    "ttt1": dict(step_map=(0,), n_layer=1, unroll=None),          # one module, many steps: HASS, EAGLE-3
    "prism2": dict(step_map=(0, 1), n_layer=1, unroll=None),      # the paper's: step 1 reads module 0, all later ones module 1
    "prism3": dict(step_map=(0, 1, 2), n_layer=1, unroll=None),
    "stack2": dict(step_map=(0,), n_layer=2, unroll=None),        # as many parameters as prism2, all of them read at every step
}


def parse_args():
    p = Parser(__doc__)
    rollouts.add_arguments(p)
    p.add_argument("--arm", default="prism2", choices=ARMS, help="which member of the family (default prism2)")
    p.add_argument("--taps", default="last", choices=("last", "three"), help="what it reads of the target: the final hidden state, or three layers")
    p.add_argument("--init", metavar="DIR", help="start from this drafter; further modules begin as copies of its last")
    p.add_argument("--recompute", action="store_true", help="ablation: the context's keys from the current module, as in the released trainer")
    p.add_argument("--unroll", type=int, default=5, help="draft steps in the loss (default 5; arm eagle2: 1)")
    p.add_argument("--decay", type=float, default=1.0, help="weight of a step in the loss relative to the one before (EAGLE-3: 0.8)")
    p.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    args = p.parse_args()
    rollouts.check_arguments(args, {"unroll": 1})                # a wrong name fails before the work
    return args


# -- training ----------------------------------------------------------------------------------------------------------

@torch.no_grad()
def evaluate(model, target, heldout, args, autocast):
    """On held-out answers, five drafts a round: tau, and how often draft 1, 2, .. is right where those before it are."""
    total, n = torch.zeros(5), 0
    for i in range(0, len(heldout), 4):
        ids, learn, _ = rollouts.batch_of(heldout[i:i + 4], args.max_length, args.device)
        with autocast:
            _, accepted = prism.unrolled_loss(model, target, ids, learn, 5)
        total, n = total + accepted.cpu() * learn.sum().item(), n + learn.sum().item()
    share = total / n
    given = share / torch.cat([torch.ones(1), share[:-1]]).clamp(min=1e-9)
    return {"heldout_tau": round(1 + share.sum().item(), 4), "heldout_acceptance": [round(a, 4) for a in given.tolist()]}


def main():
    args = parse_args()
    arm = ARMS[args.arm]
    unroll = arm["unroll"] or args.unroll
    target, tokenizer = checkpoints.load(args.target, args.device), Tokenizer.load(args.target)
    target.requires_grad_(False)
    torch.manual_seed(args.seed)
    taps = gpt.three_taps(target.config.n_layer) if args.taps == "three" else ()
    model = prism.for_target(target, arm["step_map"], arm["n_layer"], taps)
    if args.init:
        source = prism.load(args.init, args.device)
        source.check(target)
        if (source.config.n_layer, source.config.taps) != (arm["n_layer"], taps):
            raise ValueError(f"{args.init} has modules of {source.config.n_layer} layers and reads taps {source.config.taps}; "
                             f"this arm needs {arm['n_layer']} and {taps}")
        prism.copy_modules(model, source)
    with locked(args.out):
        train(args, target, tokenizer, model, unroll)


def train(args, target, tokenizer, model, unroll):
    rows, heldout = rollouts.collect(args, target, tokenizer)
    lengths = [min(len(p) + len(a), args.max_length) for p, a, _ in rows]
    rows = [row for row, n in zip(rows, lengths) if n > len(row[0]) + unroll]                # something to guess at every step
    lengths = [min(len(p) + len(a), args.max_length) for p, a, _ in rows]
    heldout = [row for row in heldout if len(row[0]) < args.max_length]
    if not rows or not heldout:
        raise ValueError(f"no {'held-out ' * bool(rows)}answer has {f'more than {unroll} tokens' if not rows else 'a token'} within max-length {args.max_length}; nothing to train on")
    plan = rollouts.schedule(args.seed, lengths, args.batch_tokens, args.tokens)
    one = sum(p.numel() for p in model.bank[0].parameters())
    print(f"{args.arm}: {model.n_params() / 1e6:.2f}M parameters, {one / 1e6:.2f}M read by a draft step; {len(rows)} texts, {sum(lengths):,} tokens, {len(plan)} steps")

    autocast = torch.autocast(args.device.split(":")[0], torch.bfloat16)
    optimizer = Optimizer(model)
    run = Run(args.out, model, optimizer, len(plan), args.save_every)
    for step in run.steps():
        numbers, tokens = plan[step]
        ids, learn, _ = rollouts.batch_of([rows[i] for i in numbers], args.max_length, args.device)
        with autocast:
            loss, accepted = prism.unrolled_loss(model, target, ids, learn, unroll, args.decay, args.recompute)
        loss = loss / unroll
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(learning_rate(step, tokens / plan[-1][1], args.lr, args.warmup))
        run.log(loss=loss, tau=1 + accepted.sum())
        if run.checkpoint_due(step):
            results = evaluate(model, target, heldout, args, autocast)
            prism.save(model, args.out)
            run.checkpoint(step, tokens=tokens, **results)


if __name__ == "__main__":
    run_main(main, "interrupted; the same command continues from the last checkpoint", "--batch-tokens or --max-length")
