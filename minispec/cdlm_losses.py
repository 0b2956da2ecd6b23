"""What CDLM's teacher and student are trained with (2511.19269; decoding is in cdlm.py): masks over whole sequences, the states
that models are trained on, the masked-diffusion loss, the student's three losses.

Notation: P prompt tokens, L answer slots, B slots a block (n in shapes: the batch), rank (L,) the order in which the teacher
finalised the slots. State k of a trajectory: the slots of rank < k hold their tokens, all others are masked.

A batch is padded on the left, so that the answers stand in the last L columns whatever the lengths of the prompts are.
"""
import torch
import torch.nn.functional as F

from minispec.core.attention import dense_attend
from minispec.core.cpu import blocked_attend
from minispec.cdlm import mask_free


# -- masks: whole sequences, for training ------------------------------------------------------------------------------

def layout(lengths, width, gen_length, block_size):
    """Positions and block numbers, each (n, width + L), of prompts of `lengths` (n,) padded on the left to `width` columns.
    Blocks: -1 padding, 0 the prompt, then 1, 2, ... of B slots each; the first one starts right behind the prompt."""
    column = torch.arange(width + gen_length, device=lengths.device) - width            # 0: the first slot
    positions = column + lengths[:, None]
    blocks = (column.div(block_size, rounding_mode="floor") + 1).clamp(min=0).expand_as(positions)
    return positions.clamp(min=0), blocks.masked_fill(positions < 0, -1)


def bidirectional(blocks):
    """Mask (n, 1, T, T) of the teacher: every row sees all but padding. Padding sees itself, for a row needs a key."""
    own = torch.eye(blocks.shape[1], dtype=torch.bool, device=blocks.device)
    return ((blocks >= 0)[:, None, :] | own)[:, None].expand(-1, -1, blocks.shape[1], -1)


def block_causal(blocks):
    """Mask (n, 1, T, T) of the student: a row sees its own block, all of it, and the blocks before."""
    return bidirectional(blocks) & (blocks[:, None, None, :] <= blocks[:, None, :, None])


def two_copies(blocks, gen_length):
    """Mask (n, 1, T + L, T + L) of prompt, clean answer and noisy answer in one sequence. A clean row sees what a student's row
    does; a noisy row of block b sees the clean blocks before b and the noisy block b. So every block stands where
    decoding has it, behind finished ones, and one forward trains them all (the training mask of BD3-LM)."""
    noisy = torch.arange(blocks.shape[1] + gen_length, device=blocks.device) >= blocks.shape[1]
    blocks = torch.cat([blocks, blocks[:, -gen_length:]], 1)
    row, key = blocks[:, :, None], blocks[:, None, :]
    sees = torch.where(noisy, noisy[:, None] & (key == row), key < row + (~noisy)[:, None]) & (key >= 0)
    return (sees | torch.eye(len(noisy), dtype=torch.bool, device=blocks.device))[:, None]


def attend_by(mask):
    return (blocked_attend if mask.device.type == "cpu" else dense_attend)(mask)


def answer_hidden(model, prompt, lengths, answer, block_size, mask=block_causal):
    """Hidden states (n, L, C) from which the answer slots (n, L) behind left-padded prompts (n, width) are predicted."""
    positions, blocks = layout(lengths, prompt.shape[1], answer.shape[1], block_size)
    first = prompt.shape[1] - model.config.shift
    return model(torch.cat([prompt, answer], 1), positions, attend_by(mask(blocks)))[:, first:first + answer.shape[1]]


def blocks_hidden(model, prompt, lengths, clean, noisy, block_size):
    """Hidden states (n, L, C) from which a block-causal model predicts the noisy slots (n, L), each block behind clean ones:
    `two_copies`. Where logits are shifted, a block's first slot is predicted by the clean row before it, as in decoding."""
    length = clean.shape[1]
    positions, blocks = layout(lengths, prompt.shape[1], length, block_size)
    positions = torch.cat([positions, positions[:, -length:]], 1)
    slot, shift = torch.arange(length, device=clean.device), int(model.config.shift)
    row = prompt.shape[1] + slot - shift + length * (slot % block_size >= shift)
    return model(torch.cat([prompt, clean, noisy], 1), positions, attend_by(two_copies(blocks, length)))[:, row]


# -- losses ------------------------------------------------------------------------------------------------------------

def mask_rates(n, generator, low=1e-3):
    """n mask rates in [low, 1], spread evenly over it from one random offset, so that batches differ little."""
    u = (torch.rand((), generator=generator) + torch.arange(n) / n) % 1
    return (1 - low) * u[torch.randperm(n, generator=generator)] + low


def per_slot(of_block, gen_length, block_size):
    """What is known of blocks (n, L / B), for each of their slots (n, L)."""
    return of_block.repeat_interleave(block_size, 1)[:, :gen_length]


def text_blocks(answer, eos_id, block_size):
    """How many blocks (n,) of answers (n, L), filled up with ends of text, hold text: up to the one with the first end."""
    return (answer != eos_id).sum(-1).clamp(max=answer.shape[1] - 1) // block_size + 1


def open_block(answer, eos_id, block_size, generator):
    """The states that block-wise decoding meets, as mask rates (n, L) of the slots: one block of the text is masked at a rate, the
    blocks before it are finished, those behind it all masks. Also the slots of that block, (n, L): the ones to predict."""
    n, length = answer.shape
    block = (torch.rand(n, generator=generator) * text_blocks(answer, eos_id, block_size)).long()[:, None]
    of_slot = torch.arange(length) // block_size
    return torch.where(of_slot == block, mask_rates(n, generator, 1 / block_size)[:, None], (of_slot > block).float()), of_slot == block


def all_blocks(answer, eos_id, block_size, generator):
    """Mask rates (n, L), one for each block, for `two_copies`, and the slots (n, L) to predict: those of blocks with text. The
    blocks behind are never opened in decoding, and there is nothing to decide in them."""
    n, length = answer.shape
    n_blocks = -(-length // block_size)
    rate = mask_rates(n * n_blocks, generator, 1 / block_size).view(n, n_blocks)
    counted = torch.arange(n_blocks) < text_blocks(answer, eos_id, block_size)[:, None]
    return per_slot(rate, length, block_size), per_slot(counted, length, block_size)


def teacher_states(answer, eos_id, block_size, generator):
    """For every second row the states of block-wise decoding, `open_block`; for the others one rate for all slots, the ends of
    text that fill up an answer included: they are how the model says how long its answer is."""
    rate, counted = open_block(answer, eos_id, block_size, generator)
    rate[1::2] = mask_rates(len(answer) // 2, generator)[:, None]
    counted[1::2] = True
    return rate, counted


def turns(shape, block_size, generator, in_order=0.0):
    """When, from 1 down to 0, each slot (n, L) is revealed: masked are the slots whose turn is below their rate. Turns are random
    numbers; but in a share `in_order` of the blocks they follow the text from left to right, more or less, as decoding does:
    what a slot waits for is mostly the slots before it. Masks drawn at random hardly ever show a block like that."""
    turn, per_block = torch.rand(shape, generator=generator), (shape[0], -(-shape[1] // block_size))
    if not in_order:
        return turn
    loose, ordered = (per_slot(torch.rand(per_block, generator=generator), shape[1], block_size) for _ in range(2))
    loose, place = 0.75 * block_size * loose ** 2, torch.arange(shape[1]) % block_size      # so many slots may overtake each other
    return torch.where(ordered < in_order, 1 - (place + (1 + loose) * turn) / (block_size + loose), turn)


def dlm_loss(model, batch, mask_id, rate, counted, generator, block_size, mask, in_order=0.0):
    """The masked-diffusion loss. Slots of the answers (n, L) become masks by their `turns`, about as many as `rate` (n, L) says. The
    loss is the mean over rows of the summed cross-entropies of masked slots, each divided by its rate and by the number of
    `counted` slots (n, L). With all counted, nothing in order and one rate t a row, 1 / (t L) times the sum, that is an upper
    bound on the answer's negative log-likelihood per slot."""
    answer = batch["answer"]
    masked = turns(answer.shape, block_size, generator, in_order) < rate
    rate, counted, masked = (x.to(answer.device) for x in (rate, counted, masked))
    noisy, where = answer.masked_fill(masked, mask_id), masked & counted
    if mask is two_copies:
        hidden = blocks_hidden(model, batch["prompt"], batch["length"], answer, noisy, block_size)
    else:
        hidden = answer_hidden(model, batch["prompt"], batch["length"], noisy, block_size, mask)
    loss = F.cross_entropy(mask_free(model.logits(hidden[where]), mask_id), answer[where], reduction="none")
    return (loss / (rate * counted.sum(-1, keepdim=True))[where]).sum() / len(answer)


def state(tokens, rank, k, mask_id):
    """State k (n,) of trajectories: tokens and rank (n, L) -> (n, L)."""
    return tokens.masked_fill(rank >= k[:, None], mask_id)


def draw_states(live, gen_length, block_size, generator, target="block_end"):
    """A step k (n, L / B) in the life of each block of trajectories of `live` (n,) decoded slots, uniform over it, and the step k* > k
    whose state is the consistency target. "block_end" is the paper's: the block is complete. "later_state": a step
    before that. Blocks behind the one that ends the text were never opened: they are at their end."""
    if target not in ("block_end", "later_state"):
        raise ValueError(f"unknown consistency target '{target}'; choose from block_end, later_state")
    first = torch.arange(0, gen_length, block_size).expand(len(live), -1)
    end = (first + block_size).clamp(max=gen_length)
    k = first + (torch.rand(first.shape, generator=generator) * (end - first)).long()
    k_star = k + 1 + (torch.rand(first.shape, generator=generator) * (end - k - 1)).long() if target == "later_state" else end
    opened = first < live[:, None]
    return torch.where(opened, k, end), torch.where(opened, k_star, end)


def divergence(target, logits, direction="forward"):
    """KL divergence (...) of two sets of logits (..., V): forward is KL(target || model), which covers all of the target's mass."""
    p, q = target.log_softmax(-1), logits.log_softmax(-1)
    if direction == "reverse":
        p, q = q, p
    elif direction != "forward":
        raise ValueError(f"unknown KL direction '{direction}'; choose from forward, reverse")
    return (p.exp() * (p - q)).sum(-1)


def state_mean(values, where, block_size, n_states):
    """The mean over states of the mean over each one's slots. values: those of the slots `where` (n, L); a state: `block_size` slots."""
    count = F.pad(where, (0, -where.shape[1] % block_size)).unflatten(1, (-1, block_size)).sum(-1).clamp(min=1)
    return (values / per_slot(count, where.shape[1], block_size)[where]).sum() / n_states


def student_losses(model, teacher_head, batch, reference, mask_id, block_size, eos_id, k, k_star, generator, weights=(1.0, 0.5, 0.01),
                   direction="forward", target="block_end", in_order=0.0):
    """The three losses of the student, and "loss", their weighted sum. With y the state k of a block and y* its state k*:

        distill  mean over U, the slots of the block that are masked in y, of KL(p_teacher || q(y))
        cons     mean over S, the slots that are masked in y*, of KL(stop(q(y*)) || q(y)): predict now what you will predict then
        dlm      `dlm_loss` of the answers in `reference`, which need not belong to the trajectories

    p_teacher is rebuilt from the hidden row with which the teacher finalised the token, by the teacher's own head (V, C):
    it is better informed than y, and that is the lesson. All blocks of an answer, k and k* (n, L / B), are trained at once.

    Where y* is the end of the block, as the paper prints it, S holds later blocks with text alone, and nothing in the last one;
    this takes two forwards of their own, from one block of each answer. "later_state" keeps S inside the block.
    A loss of weight 0 is not computed.
    """
    tokens, rank, (w_distill, w_cons, w_dlm) = batch["tokens"], batch["rank"], weights
    length, device = tokens.shape[1], tokens.device
    at = lambda step: rank >= per_slot(step.to(device), length, block_size)
    rows = lambda masked: blocks_hidden(model, batch["prompt"], batch["length"], tokens, tokens.masked_fill(masked, mask_id), block_size)
    logits = lambda hidden: mask_free(model.logits(hidden), mask_id)
    losses = dict.fromkeys(("distill", "cons", "dlm"), torch.zeros((), device=device))
    u, n_states = at(k), -(-batch["live"] // block_size).sum()
    hidden = rows(u) if w_distill or w_cons and target == "later_state" else None
    if w_distill:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            goal = mask_free(batch["hidden"][u].to(teacher_head.dtype) @ teacher_head.T, mask_id)
        losses["distill"] = state_mean(divergence(goal, logits(hidden[u]), direction), u, block_size, n_states)
    if w_cons and target == "later_state":
        s = at(k_star)
        with torch.no_grad():
            goal = logits(rows(s)[s])
        losses["cons"] = state_mean(divergence(goal, logits(hidden[s]), direction), s, block_size, n_states)
    elif w_cons:
        losses["cons"] = later_blocks_loss(model, batch, mask_id, block_size, k, k_star, generator, direction)
    if w_dlm:
        rate, counted = all_blocks(reference["answer"].cpu(), eos_id, block_size, generator)
        losses["dlm"] = dlm_loss(model, reference, mask_id, rate, counted, generator, block_size, two_copies, in_order)
    losses["loss"] = w_distill * losses["distill"] + w_cons * losses["cons"] + w_dlm * losses["dlm"]
    return losses


def later_blocks_loss(model, batch, mask_id, block_size, k, k_star, generator, direction="forward"):
    """The consistency loss as printed: while one block of each answer is half done, at its k, predict for all slots behind it what
    you will predict once it is done, at its k*."""
    tokens, rank = batch["tokens"], batch["rank"]
    block = (torch.rand(len(tokens), 1, generator=generator) * -(-batch["live"].cpu() // block_size)[:, None]).long()
    k, k_star = (x.gather(1, block)[:, 0].to(rank.device) for x in (k, k_star))
    rows = lambda step: answer_hidden(model, batch["prompt"], batch["length"], state(tokens, rank, step, mask_id), block_size)
    s = (rank >= k_star[:, None]) & (torch.arange(rank.shape[1], device=rank.device) < batch["live"][:, None])
    if not s.any():
        return torch.zeros((), device=rank.device)
    with torch.no_grad():
        goal = mask_free(model.logits(rows(k_star)[s]), mask_id)
    return state_mean(divergence(goal, mask_free(model.logits(rows(k)[s]), mask_id), direction), s, s.shape[1], len(tokens))
