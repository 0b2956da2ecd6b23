"""Train the target model, and distil the small draft model from it. One page, nanoGPT style.

    python train_gpt.py --out mine/target                                   # over two hours on 2 CPU cores
    python train_gpt.py --out mine/draft --size micro --teacher mine/target --tokens 4e6
    python train_gpt.py --out /tmp/toy --size tiny --tokens 2e5             # seconds; see the whole chain run

Interrupt it at any time: the same command continues where the last checkpoint was, on the same loss curve.
Writes a Hugging Face folder (config.json, model.safetensors, tokenizer.json), log.jsonl, command.txt, and
resume.pt with the optimiser's state.
"""
import random

import minispec  # before torch: it tunes the allocator
import torch
import torch.nn.functional as F

from minispec.core import gpt
from minispec.core.losses import goal_of, kl
from minispec.data import corpus, tasks
from minispec.data.tokenizer import Tokenizer
from minispec.tools import checkpoints, training
from minispec.tools.hf_config import checked
from minispec.tools.script import Parser, run_main
from minispec.tools.training import Run, bf16, locked

# -- settings -------------------------------------------------------------------------------------
# Settings without an option. Change these when the data or the machine is another one.

# Sequence lengths by training progress: (until this part of all tokens, {length: share of tokens}). Short
# ones first: with 256 tokens and small batches the model learns to copy a name from its context within a
# million tokens, with 1,024 tokens and batches of 10,000 it had not after four. Then up to the lengths that
# will be decoded: attention must be trained there, though a token costs 2 to 4 times as much on a CPU.
CURRICULUM = ((0.06, {256: 1.0}),
              (0.14, {512: 1.0}),
              (0.85, {1024: 1.0}),
              (1.0, {1024: 0.4, 6144: 0.4, 10240: 0.2}))
# Tokens of an optimiser step, or one sequence, if that is longer. Larger steps are fewer steps, and a small
# model wants many; a GPU wants 8 times this number, or more.
BATCH_TOKENS = 2048
LOGIT_LIMIT = 20.0          # largest attention logit, see clip_attention
CLIP_EVERY = 20             # steps between two looks at them


def parse_args():
    p = Parser(__doc__)
    training.add_arguments(p, lr=4e-3, save_every=100)
    add = p.add_argument
    add("--size", default="nano", choices=gpt.SIZES, help="model size (default nano, about 5M parameters)")
    add("--teacher",
        help="folder of a target to distil from: the loss is the KL divergence to its distribution")
    add("--tokens", type=float, default=32e6, help="training tokens (default 32e6)")
    add("--max-length", type=int, default=10240,
        help="longest sequence in tokens; longer ones of the curriculum are cut to it (default %(default)s)")
    return training.parsed(p)


# -- data -----------------------------------------------------------------------------------------

def schedule(seed, tokens, longest):
    """The sequence length of every step until `tokens` are used up, drawn by the curriculum: [(length, tokens
    so far)]."""
    rng = random.Random(seed)
    plan = []
    used = 0
    while used < tokens:
        shares = next(shares for until, shares in CURRICULUM if used / tokens <= until)
        # Steps of long sequences hold more tokens; dividing keeps `shares` shares of tokens.
        lengths = [min(length, longest) for length in shares]
        weights = [share / (rows_of(n) * n) for n, share in zip(lengths, shares.values())]
        length, = rng.choices(lengths, weights)
        used += rows_of(length) * length
        plan.append((length, used))
    return plan


def rows_of(length):
    """How many sequences of this length an optimiser step has."""
    return max(BATCH_TOKENS // length, 1)


def batch_of_step(tokenizer, args, step, length):
    """(inputs, targets, learn), each (B, T)."""
    rows = [corpus.sequence(tokenizer, args.seed, step * 4096 + i, length) for i in range(rows_of(length))]
    tokens, learn = (torch.stack(x).to(args.device) for x in zip(*rows))
    return tokens[:, :-1], tokens[:, 1:], learn[:, 1:]


@torch.no_grad()
def clip_attention(model, x, limit):
    """Scale the query and key projections of every key/value head whose attention logits exceed `limit` on x
    (1, T) down to it (QK-clip, Kimi K2 2507.20534). Muon moves all directions of a matrix by the same amount,
    so without QK-norm the logits grow to 100 and more within a thousand steps; a softmax that saturated
    passes no gradient, and look-ups that were not learned by then never are. Sharp heads need differences of
    10, not of 100."""
    c = model.config
    share = c.n_head // c.n_kv_head

    def attend(layer, q, k, v):
        # The largest logit of each key/value head, over the query heads that share it and what they see.
        queries = q[0].float().unflatten(1, (c.n_kv_head, share))                  # (T, G, g, D)
        scores = torch.einsum("qghd,kgd->ghqk", queries, k[0].float()) / c.head_dim ** 0.5
        top = scores.tril().amax((1, 2, 3))                                        # (G,)
        # A logit is a product, so queries and keys each take the root of the factor.
        scale = (limit / top.clamp(min=limit)).sqrt()[:, None, None]
        weight = model.blocks[layer].qkv.weight.unflatten(0, (-1, c.head_dim))     # (H + 2G, D, C)
        weight[:c.n_head] *= scale.repeat_interleave(share, 0)
        weight[c.n_head:c.n_head + c.n_kv_head] *= scale
        return gpt.dense_attend()(layer, q, k, v)

    model(x, attend=attend)


@torch.no_grad()
def evaluate(model, tokenizer):
    """Teacher-forced loss per token of held-out chains, by family."""
    out = {}
    for family in tasks.FAMILIES:
        losses = []
        for seed in range(6):
            problem = tasks.make(family, seed, "heldout")
            ids, learn = (torch.tensor(x, device=model.device) for x in corpus.encode(tokenizer, problem))
            logits = model.logits(model(ids[None]))[0, :-1]
            losses.append(F.cross_entropy(logits[learn[1:]], ids[1:][learn[1:]]).item())
        out[family] = round(sum(losses) / len(losses), 4)
    return out


def make_model(args, tokenizer, teacher):
    """A new model that fits the tokenizer and the teacher, which may lack weights of its last tokens."""
    special = tokenizer.special
    shape = gpt.SIZES[args.size] | {"vocab_size": (teacher.config if teacher else tokenizer).vocab_size}
    config = checked(gpt.GPTConfig(**shape, block_size=max(args.max_length, 2048), bos_id=special["<|bos|>"],
                                   eos_id=special["<|eos|>"]))
    if teacher and teacher.config.block_size < config.block_size:
        raise ValueError(f"{args.teacher} has a context of {teacher.config.block_size}; "
                         f"it must have {config.block_size} or more")
    return gpt.GPT(config).to(args.device)


def main():
    # 1. The tokenizer, the model, and the sequence length of every step.
    args = parse_args()
    if args.max_length < 64:                             # in shorter sequences there would be prompts alone
        raise ValueError(f"max-length must be 64 or more, got {args.max_length}")
    teacher = None
    if args.teacher:
        teacher = checkpoints.load(args.teacher, args.device, training.fast_dtype(args.device))
    source = args.teacher or minispec.SHIPPED
    tokenizer = Tokenizer.load(source)
    if not tokenizer.is_puzzle_model:
        raise ValueError(f"{source} has another tokenizer than the shipped target")
    torch.manual_seed(args.seed)
    model = make_model(args, tokenizer, teacher)
    plan = schedule(args.seed, args.tokens, args.max_length)
    print(f"{args.size}: {model.n_params() / 1e6:.2f}M parameters, {len(plan)} steps, {plan[-1][1]:,} tokens")

    # 2. The loop. Muon is for the matrices of the blocks, AdamW for embeddings and norms.
    with locked(args.out):
        run = Run(args, args.out, model, len(plan), args.lr)
        for step in run.steps():
            length, tokens = plan[step]
            x, y, learn = batch_of_step(tokenizer, args, step, length)
            if step % CLIP_EVERY == 0:
                clip_attention(model, x[:1, :1024], LOGIT_LIMIT)

            # The loss: the next token of every response, or with a teacher its whole distribution.
            with bf16(args.device):
                logits = model.logits(model(x)[learn]).float()
                if teacher is None:
                    loss = F.cross_entropy(logits, y[learn])
                else:
                    with torch.no_grad():
                        goal = teacher.logits(teacher(x)[learn])
                    loss = kl(goal_of(goal), logits).mean()

            # One step of the optimiser.
            loss.backward()
            run.update(tokens / args.tokens, loss=loss)

            if run.checkpoint_due():
                checkpoints.save(model, args.out, source)
                run.checkpoint(tokens=tokens, heldout=evaluate(model, tokenizer))


if __name__ == "__main__":
    run_main(main, "interrupted; the same command continues from the last checkpoint",
             "--max-length or --size")
