"""Train a drafter of the PRISM / EAGLE family for any target. One page, nanoGPT style.

    # for a model of your own: prompts, answers and the drafter, in an hour
    python train_prism.py --target qwen3 --out checkpoints/qwen3/prism --minutes 60
    # for the shipped target
    python train_prism.py --out mine/prism --arm prism2
    # the same data, one module
    python train_prism.py --out /tmp/one --arm ttt1 --responses mine/prism/responses
    # the paper's recipe: modules start as copies of a trained one; and its control: as much training, no
    # module more. With --init the learning rate is a third.
    python train_prism.py --out /tmp/two --arm prism2 --init /tmp/one --responses mine/prism/responses
    python train_prism.py --out /tmp/more --arm ttt1 --init /tmp/one --responses mine/prism/responses

The target writes prompts and answers them itself, and what it knew at every token is kept (rollouts.py).
Other arms, seeds and prefixes (--prompts 1000, 2000, ..) can be trained from the same folder of --responses.
Interrupt it at any time: the same command continues. Writes config.json, model.safetensors, log.jsonl,
command.txt, and resume.pt with the optimisers' state. tau, on the way, is an estimate of the tokens that a
round of chain drafting would commit.
"""
import minispec  # before torch: it tunes the allocator
import torch
import torch.nn.functional as F

from minispec import prism
from minispec.core.verify import argmax
from minispec.core.words import Words, feature_layers_of
from minispec.data import rollouts
from minispec.tools import checkpoints
from minispec.tools.script import Parser, run_main
from minispec.tools.training import Divergence, bf16, numbers_of

LR = 2e-3                   # at the peak, from scratch; a third of it for copies of a trained module
WORTH = 0.05                # a draft step pays if its draft is accepted in this share of the rounds

# name: (which module every draft step reads, the last entry serving all later steps; layers of a module)
ARMS = {
    # One module, many steps: HASS, EAGLE-3; with --unroll 1: EAGLE, EAGLE-2.
    "ttt1": ((0,), 1),
    # The paper's: step 1 reads module 0, all later ones module 1.
    "prism2": ((0, 1), 1),
    "prism3": ((0, 1, 2), 1),
    # As many parameters as prism2, all of them read at every step.
    "stack2": ((0,), 2),
}


def parse_args():
    p = Parser(__doc__)
    rollouts.add_arguments(p)
    p.add_argument("--arm", default="prism2", choices=ARMS,
                   help="which member of the family (default prism2)")
    p.add_argument("--init", metavar="DIR",
                   help="start from this drafter; further modules begin as copies of its last")
    p.add_argument("--unroll", type=int, default=5, help="draft steps in the loss (default %(default)s)")
    p.set_defaults(lr=None)
    args = rollouts.parsed(p)
    if args.lr is None:
        args.lr = LR / 3 if args.init else LR
    return args


def drafter_of(args, target):
    """A new drafter for the arm; with --init its modules are copies of a trained one's."""
    step_map, n_layer = ARMS[args.arm]
    layers = () if args.last_layer else feature_layers_of(target.config)
    model = prism.for_target(target, step_map, n_layer, layers)
    if not args.init:
        return model
    source = checkpoints.load_drafter(args.init, target, prism.PrismConfig)
    for name in ("n_layer", "feature_layers"):
        theirs, mine = getattr(source.config, name), getattr(model.config, name)
        if theirs != mine:
            raise ValueError(f"the drafter in {args.init} has {name} {theirs}; this training needs {mine}")
    prism.copy_modules(model, source)
    return model


# -- the loss: every row of a text drafts at once ------------------------------------------------------------
# EAGLE-3's "training-time test". Step k's query at row r sees the step-1 keys of rows up to r, then its own
# row's later ones, each as the module that writes it in decoding wrote it. So states in training equal states
# in drafting; a test says so to 1e-4. The released trainer of PRISM lets module m compute the context's keys
# again with its own weights, which never happens in decoding. A row drafts if a token it guesses is one to
# learn: rows of a prompt give keys in step 1, and later steps leave them out.

def unrolled_attend(rows):
    """attend of unrolled drafting. Step 1 is causal, over whole texts (B, S). Later steps are those of `rows`
    (N,) alone, numbered along all texts. At step k the query of row r sees the step-1 keys of its text up to
    r, and of the steps since then the keys of row r alone: those its own drafts wrote. The next call for a
    layer is its next step.

    In single operators: a CPU's fused attention would compute S keys a step more, all but one of them hidden.
    """
    steps = {}                                           # layer -> the keys and values of its steps so far

    def spread(x, like):
        """Rows (N, heads, D) at their places in (B, S, heads, D)."""
        out = x.new_zeros(like.shape[0] * like.shape[2], *x.shape[1:])
        return out.index_copy(0, rows, x).unflatten(0, (like.shape[0], -1))

    def attend(layer, q, k, v):
        """Step 1: q (B, S, H, D), k and v (B, S, G, D) -> (B, S, H, D). Later: q (N, H, D), .."""
        if layer in steps:
            q, k, v = (spread(x, steps[layer][0][0]) for x in (q, k, v))
            return causal(layer, q, k, v).flatten(0, 1)[rows]
        return causal(layer, q, k, v)

    def causal(layer, q, k, v):
        s, h, d = q.shape[1:]
        group = h // k.shape[2]
        steps.setdefault(layer, []).append((k.transpose(1, 2), v.transpose(1, 2)))
        (first_k, first_v), *own = steps[layer]                                # (B, G, S, D) each
        q = q.transpose(1, 2).unflatten(1, (-1, group)) * d ** -0.5            # (B, G, g, S, D)

        # 1. What every row makes of the step-1 keys up to its own, and of its own later ones.
        hidden = torch.full((s, s), float("-inf"), device=q.device).triu(1)
        logits = (q.flatten(2, 3) @ first_k.mT).unflatten(2, (group, s)) + hidden
        later = [(q * k[:, :, None]).sum(-1, keepdim=True) for k, _ in own]    # (B, G, g, S, 1)
        weights = torch.cat([logits, *later], -1).float().softmax(-1).to(v.dtype)
        # 2. What it reads there.
        out = (weights[..., :s].flatten(2, 3) @ first_v).unflatten(2, (group, s))
        for i, (_, v) in enumerate(own, s):
            out = out + weights[..., i:i + 1] * v[:, :, None]
        return out.flatten(1, 2).transpose(1, 2)
    return attend


def unroll(prism, words, ids, features, steps, rows):
    """The states (N, C) of draft steps 1 .. `steps` from `rows` (N,), numbered along all texts ids (B, S)
    with features (B, S, (F + 1) * C), if the drafted tokens are those in ids. Row r of step k guesses
    t_{r+k+1}; the last k rows of a text know too little and are to be ignored."""
    attend = unrolled_attend(rows)
    # Step 1 reads whole texts. Row r reads the next token, t_{r+1}, and the feature in front of it.
    positions = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
    a = prism(1, words.embed(ids.roll(-1, 1)), features, positions, attend)
    states = [a.flatten(0, 1)[rows]]
    for step in range(2, steps + 1):
        # Row r reads the token drafted last, t_{r+k}, and the state that drafted it, one position further on.
        e = words.embed(ids.roll(-step, 1).flatten()[rows])
        at = (positions.flatten()[rows] + step - 1).clamp(max=prism.config.block_size - 1)
        states.append(prism(step, e, states[-1], at, attend))
    return states


def unrolled_loss(prism, words, batch, steps):
    """Training loss on a rollouts.Batch of shape (B, S), and how many drafts it would have had accepted.

    The loss is the KL divergence from the target's distributions to the drafter's, mean over the rows of a
    step whose guessed token is one to learn, summed over steps. words: of the drafter's target.

    Returns (loss, accepted (steps,)): the share of rows whose first 1, 2, .. guesses all are the target's
    argmax. Their sum is the mean number of accepted drafts of a chain, if these tokens are what the target
    says.
    """
    # 1. Row r of step k is judged by the target's row s = r + k, which sees t_s and is asked for t_{s+1}. The
    # rows that guess any of the tokens to learn draft.
    judged = F.pad(batch.learn[:, 1:], (0, 1))           # (B, S): is t_{s+1} one to learn?
    judged[:, :steps] = False                            # too near the beginning to be guessed at every step
    drafts = sum(judged.roll(-k, 1) for k in range(1, steps + 1)) > 0
    judges, n = numbers_of(judged.flatten())             # numbered along all texts; the first n judge
    rows, _ = numbers_of(drafts.flatten())
    states = unroll(prism, words, batch.ids, batch.features(prism.config), steps, rows)

    # 2. Both are distributions over the draft vocabulary, the target's renormalised, because that is the most
    # that the drafter can become.
    divergence = Divergence(words.logits(batch.hidden.flatten(0, 1)[judges])[:n])        # of (n, N)
    best = batch.best.flatten()[judges[:n]]
    place = torch.zeros_like(drafts.flatten(), dtype=torch.long)
    place[rows] = torch.arange(len(rows), device=rows.device)
    loss, chains = 0.0, []
    right = whole = rows >= 0                            # are all guesses of a row right, and all judged?
    for k, a in enumerate(states, 1):
        own = place[(judges - k).clamp(min=0)]           # where the rows r lie among `rows`
        guess = words.logits(a[own])[:n]
        own = own[:n]
        loss = loss + divergence(guess).sum() / max(n, 1)
        # 3. How far the guesses of each row are the target's argmax.
        hits = words.tokens(argmax(guess)) == best
        guessed = torch.zeros_like(whole).index_fill(0, own, True)
        right = right.index_copy(0, own, right[own] & hits)
        whole = whole & guessed
        chains.append(right)
    accepted = (torch.stack(chains) & whole).sum(1) / whole.sum().clamp(min=1)
    return loss, accepted


def evaluate(run, words):
    """On held-out answers, five drafts a round: tau; and how many drafts pay."""
    def estimate(batch):
        _, accepted = unrolled_loss(run.model, words, batch, 5)
        return dict(enumerate(accepted.tolist()))

    share = run.heldout_mean(estimate)
    # Steps whose draft is accepted less often cost more than they give. If all five pay, so may further ones.
    depth = sum(x > WORTH for x in share.values())
    run.model.config.depth = prism.PrismConfig.depth if depth == 5 else max(depth, 1)
    return round(1 + sum(share.values()), 4)


# -- training ------------------------------------------------------------------------------------------------

def train(args, target, model):
    # 1. The data, which texts every step reads, and which tokens are drafted.
    run = rollouts.DrafterRun(args, target, model, least=args.unroll)
    module = sum(p.numel() for p in model.bank[0].parameters())
    print(f"{args.arm}: {model.n_params() / 1e6:.2f}M parameters, {module / 1e6:.2f}M read by a draft step, "
          f"{model.config.draft_vocab or target.config.vocab_size} tokens to draft")

    # 2. The loop, from the last checkpoint on.
    words = Words(target, model.vocabulary)                  # of a resumed run: that of its first answers
    for _, batch in run.batches():
        # Every row drafts; the loss compares its guesses with the target's distributions.
        with bf16(args.device):
            loss, accepted = unrolled_loss(model, words, batch, args.unroll)
        loss = loss / args.unroll
        loss.backward()
        run.update(run.used, loss=loss, tau=1 + accepted.sum())
        if run.checkpoint_due():
            tau = evaluate(run, words)                     # also sets the depth, which is saved
            checkpoints.save_drafter(model, args.out, target)
            run.checkpoint(tokens=run.tokens, heldout_tau=tau)


def main():
    rollouts.start(parse_args(), drafter_of, train)


if __name__ == "__main__":
    run_main(main, "interrupted; the same command continues from the last checkpoint", "--batch-tokens")
