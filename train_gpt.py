"""Train the target model, and distil the small draft model from it. One page, nanoGPT style.

    python train_gpt.py --out checkpoints/target --compile                  # about 90 minutes on 2 CPU cores
    python train_gpt.py --out checkpoints/draft --size micro --teacher checkpoints/target --tokens 4e6
    python train_gpt.py --out /tmp/toy --size tiny --tokens 2e5             # seconds; see the whole chain run

Interrupt it at any time: the same command continues where the last checkpoint was, on the same loss curve.
Writes a Hugging Face folder (config.json, model.safetensors, tokenizer.json), log.jsonl and, while it runs,
resume.pt with the optimiser's state.
"""
import os
import random

import minispec  # before torch: it tunes the allocator
import numpy as np
import torch
import torch.nn.functional as F

from minispec.core import gpt
from minispec.tools import checkpoints
from minispec.data import corpus, tasks
from minispec.core.attention import dense_attend
from minispec.core.cpu import training_attend
from minispec.tools import training
from minispec.tools.files import read_json
from minispec.tools.script import Parser, run_main
from minispec.data.tokenizer import Tokenizer
from minispec.tools.methods import SHIPPED
from minispec.tools.training import Optimizer, Run, bf16, generator_of, learning_rate, locked

# -- settings -------------------------------------------------------------------------------------
# What the command line does not ask. Change these when the data or the machine is another one.

# Sequence lengths by training progress: (until this part of all tokens, {length: share of tokens}). Short
# ones first: with 256 tokens and small batches the model learns to copy a name from its context within a
# million tokens, with 1,024 tokens and batches of 10,000 it had not after four. Then up to the lengths that
# will be decoded: attention must be trained there, though a token costs 2 to 4 times as much on a CPU.
CURRICULUM = ((0.06, {256: 1.0}),
              (0.14, {512: 1.0}),
              (0.85, {1024: 1.0}),
              (1.0, {1024: 0.4, 6144: 0.4, 10240: 0.2}))
# Tokens of an optimiser step. Larger steps are fewer steps, and a small model wants many; a GPU wants 8 times
# as many tokens, or more.
BATCH_TOKENS = {256: 2048, 512: 2048, 1024: 2048, 6144: 6144, 10240: 10240}
REAL_SHARE = 0.04           # of the documents are real text, if there is any
LOGIT_LIMIT = 20.0          # largest attention logit, see clip_attention
CLIP_EVERY = 20             # steps between two looks at them
ENTROPY_ROWS = 32           # queries per step whose attention entropy --sharpen looks at
COMPILE_UP_TO = 4096        # tokens: compiling for longer sequences takes longer than it saves


def parse_args():
    p = Parser(__doc__)
    training.add_arguments(p, lr=4e-3, warmup=100, save_every=100)
    add = p.add_argument
    add("--size", default="nano", choices=gpt.SIZES, help="model size (default nano, about 5M parameters)")
    add("--data", default=os.environ.get("MINISPEC_DATA"),
        help="folder with real text; without it, procedural text alone")
    add("--tokenizer",
        help="folder of the tokenizer; default: that of --teacher, --init or --out, else the shipped one")
    add("--teacher",
        help="folder of a target to distil from: the loss is the KL divergence to its distribution")
    add("--init", help="folder of a model of the same size to start from, with a new optimiser and schedule")
    add("--start", type=float, default=0.0,
        help="part of the curriculum to leave out, 0 to 1: with --init, 0.85 trains at its last lengths only")
    add("--tokens", type=float, default=32e6, help="training tokens in all")
    add("--max-length", type=int, default=10240,
        help="longest sequence; longer ones of the curriculum are cut to it")
    add("--sharpen", type=float, default=0.0,
        help="weight of the attention entropy, summed over layers, in the loss")
    add("--compile", action="store_true",
        help="torch.compile the model: 15 %% faster on a CPU, a few minutes to start")
    args = p.parse_args()
    training.check_arguments(args, tokens=1, max_length=1)
    if not 0 <= args.start < 1:
        raise ValueError(f"start {args.start} is out of range; allowed is 0 or more, but less than 1")
    return args


# -- data -----------------------------------------------------------------------------------------

def schedule(seed, tokens, longest, start=0.0):
    """The sequence length of every step until `tokens` are used up, drawn by the curriculum from `start` on
    (0 to 1): [(length, tokens so far)]."""
    rng = random.Random(seed)
    plan = []
    used = 0
    while used < tokens:
        done = start + (1 - start) * used / tokens
        shares = next(shares for until, shares in CURRICULUM if done <= until)
        lengths = [length for length in shares if length <= longest] or [min(shares)]
        # Steps of long sequences hold more tokens; dividing keeps `shares` shares of tokens.
        weights = [shares[length] / BATCH_TOKENS[length] for length in lengths]
        length = rng.choices(lengths, weights)[0]
        used += BATCH_TOKENS[length]
        plan.append((length, used))
    return plan


def batch_of_step(stream, step, length, block_size, device):
    """(inputs, positions, targets, learn), each (B, T)."""
    n = BATCH_TOKENS[length] // length
    rows = [stream.sequence(step * 4096 + i, length, block_size) for i in range(n)]
    tokens, positions, learn = (torch.from_numpy(np.stack(x)).to(device) for x in zip(*rows))
    return tokens[:, :-1], positions[:, :-1], tokens[:, 1:], learn[:, 1:]


def entropy_attend(rows, entropies, dense):
    """The causal attend `dense` that also appends, layer by layer, the mean entropy (nats) of the attention
    of queries `rows` (n,). Heads with nothing to fetch spread over the whole context unless that costs
    something; see --sharpen."""
    def attend(layer, q, k, v):
        share = q.shape[2] // k.shape[2]
        keys = k.repeat_interleave(share, 2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q[:, rows], keys).float() / q.shape[-1] ** 0.5
        future = torch.arange(k.shape[1], device=q.device) > rows[:, None]
        log_probs = scores.masked_fill(future, -1e9).log_softmax(-1)
        entropies.append(-(log_probs.exp() * log_probs).sum(-1).mean())
        return dense(layer, q, k, v)
    return attend


@torch.no_grad()
def clip_attention(model, x, positions, limit):
    """Scale the query and key projections of every key/value head whose attention logits exceed `limit` on x
    (1, T) down to it (QK-clip, Kimi K2 2507.20534). Muon moves all directions of a matrix by the same amount,
    so without QK-norm the logits grow to 100 and more within a thousand steps; a softmax that saturated
    passes no gradient, and look-ups that were not learned by then never are. Sharp heads need differences of
    10, not of 100. Returns the largest logit."""
    c = model.config
    share = c.n_head // c.n_kv_head
    t = x.shape[1]
    future = torch.ones(t, t, device=x.device).triu(1).bool()
    largest = 0.0

    def attend(layer, q, k, v):
        nonlocal largest
        # The largest logit of each key/value head, over the query heads that share it.
        keys = k[0].float().repeat_interleave(share, 1)
        scores = torch.einsum("qhd,khd->hqk", q[0].float(), keys) / c.head_dim ** 0.5
        scores = scores.masked_fill(future, 0.0)
        top = scores.flatten(1).amax(-1).view(c.n_kv_head, share).amax(-1)         # (G,)
        largest = max(largest, top.max().item())
        # A logit is a product, so queries and keys each take the root of the factor.
        scale = (limit / top.clamp(min=limit)).sqrt()
        weight = model.blocks[layer].qkv.weight.unflatten(0, (-1, c.head_dim))     # (H + 2G, D, C)
        per_head = scale.view(c.n_kv_head, 1, 1)
        weight[:c.n_head] *= per_head.repeat_interleave(share, 0)
        weight[c.n_head:c.n_head + c.n_kv_head] *= per_head
        return dense_attend()(layer, q, k, v)

    model(x, positions, attend)
    return largest


@torch.no_grad()
def evaluate(model, tokenizer, device):
    """Teacher-forced loss per token of held-out chains, by family."""
    out = {}
    for family in tasks.FAMILIES:
        loss, hits, n = 0.0, 0, 0
        for seed in range(6):
            p = tasks.make(family, seed, "heldout")
            head = tokenizer.prompt_ids(p.prompt)
            body = tokenizer.response_ids(p.think, p.answer)
            x = torch.tensor([(head + body)[:-1]], device=device)
            positions = torch.arange(x.shape[1], device=device)[None]
            with bf16(device):
                logits = model.logits(model(x, positions, dense_attend())).float()[0, len(head) - 1:]
            target = torch.tensor(body, device=device)
            loss += F.cross_entropy(logits, target, reduction="sum").item()
            hits += (logits.argmax(-1) == target).sum().item()
            n += len(body)
        out[family] = {"loss": round(loss / n, 4), "top1": round(hits / n, 4)}
    return out


def load_tokenizer(args):
    """(tokenizer, its tokenizer.json): the one of a model that this one must fit, else the shipped one."""
    folders = [args.tokenizer, args.teacher, args.init, args.out, SHIPPED]
    files = [os.path.join(folder, "tokenizer.json") for folder in folders if folder]
    file = next((file for file in files if os.path.exists(file)), files[0])
    return Tokenizer.load(file), read_json(file)


def make_model(args, tokenizer, teacher):
    """A new model that fits the tokenizer, the teacher and --init."""
    config = gpt.GPTConfig(**{**gpt.SIZES[args.size], "vocab_size": tokenizer.vocab_size},
                           block_size=max(args.max_length, 2048), bos_id=tokenizer.special["<|bos|>"],
                           eos_id=tokenizer.special["<|eos|>"])
    if teacher:
        t = teacher.config
        if t.vocab_size != config.vocab_size or t.block_size < config.block_size:
            has = f"a vocabulary of {t.vocab_size} and a context of {t.block_size}"
            raise ValueError(f"{args.teacher} has {has}; "
                             f"it must have {config.vocab_size} and {config.block_size} or more")
    model = gpt.GPT(config).to(args.device)
    if args.init:
        start = checkpoints.load(args.init, args.device, torch.float32)
        if start.config != config:
            raise ValueError(f"{args.init} has another shape than --size {args.size} "
                             f"with --max-length {args.max_length} and this tokenizer")
        model.load_state_dict(start.state_dict())
    return model


def main():
    args = parse_args()
    teacher = None
    if args.teacher:
        teacher = checkpoints.load(args.teacher, args.device, training.fast_dtype(args.device))
    torch.manual_seed(args.seed)
    with locked(args.out):
        train(args, teacher)


def train(args, teacher):
    # data
    real = corpus.real_documents(args.data)
    sizes = ", ".join(f"{name} {len(documents):,}" for name, documents in real.items()) or "none"
    hint = " (no --data folder given; minispec/data/corpus.py says where to get some)"
    print(f"real text: {sizes}{'' if args.data else hint}")
    tokenizer, tokenizer_json = load_tokenizer(args)
    stream = corpus.Stream(tokenizer, real, REAL_SHARE, args.seed)

    # model
    model = make_model(args, tokenizer, teacher)
    compiled = torch.compile(model, dynamic=False) if args.compile else model
    plan = schedule(args.seed, args.tokens, args.max_length, args.start)
    print(f"{args.size}: {model.n_params() / 1e6:.2f}M parameters, {len(plan)} steps, {plan[-1][1]:,} tokens")

    # training: Muon for the matrices of the blocks, AdamW for embeddings and norms
    optimizer = Optimizer(model, lambda name: name.startswith("blocks."))
    run = Run(args.out, model, optimizer, len(plan), args.save_every)
    for step in run.steps():
        length, tokens = plan[step]
        x, positions, y, learn = batch_of_step(stream, step, length, model.config.block_size, args.device)
        if step % CLIP_EVERY == 0:
            clip_attention(model, x[:1, :1024], positions[:1, :1024], LOGIT_LIMIT)

        # --sharpen needs the attention of some queries, which the forward leaves in `entropies`.
        entropies = []
        attend = training_attend(x.device)
        if args.sharpen:
            queries = torch.randint(x.shape[1], (ENTROPY_ROWS,), generator=generator_of(args, step))
            queries = queries.to(x.device)
            attend = entropy_attend(queries, entropies, attend)

        # The loss: the next token of every response, or with a teacher its whole distribution.
        forward = compiled if x.shape[1] <= COMPILE_UP_TO else model
        with bf16(args.device):
            logits = model.logits(forward(x, positions, attend)[learn]).float()
            if teacher is None:
                loss = F.cross_entropy(logits, y[learn]) + args.sharpen * sum(entropies)
            else:
                with torch.no_grad():
                    hidden = teacher(x, positions, training_attend(x.device))[learn]
                    goal = teacher.logits(hidden).float().log_softmax(-1)
                loss = F.kl_div(logits.log_softmax(-1), goal, log_target=True, reduction="batchmean")

        # One step of the optimiser.
        loss.backward()
        optimizer.step(learning_rate(step, tokens / args.tokens, args.lr, args.warmup))
        run.log(loss=loss)

        if run.checkpoint_due(step):
            results = evaluate(model, tokenizer, args.device)
            checkpoints.save(model, args.out, tokenizer_json)
            run.checkpoint(step, tokens=tokens, **results)


if __name__ == "__main__":
    run_main(main, "interrupted; the same command continues from the last checkpoint",
             "--max-length, --batch-scale or --size")
