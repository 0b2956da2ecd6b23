"""Which slots of an answer are masked while a diffusion model learns to fill it in (train_cdlm.py).

n answers of L slots, in L / B whole blocks of B = BLOCK_SIZE slots. Random numbers are drawn on the CPU, so
that they are the same on every device.
"""
import torch

from minispec import cdlm


def per_slot(of_block):
    """What is known of blocks (n, L / B), for each of their slots (n, L)."""
    return of_block.repeat_interleave(cdlm.BLOCK_SIZE, 1)


def mask_rates(n, generator, low=1e-3):
    """n mask rates in [low, 1], spread evenly over it from one random offset, so that batches differ
    little."""
    # Evenly spaced numbers, shuffled: one for each row.
    u = (torch.rand((), generator=generator) + torch.arange(n) / n) % 1
    return (1 - low) * u[torch.randperm(n, generator=generator)] + low


def text_blocks(answer, eos_id):
    """How many blocks (n,) of answers (n, L), filled up with ends of text, hold text: up to the one with the
    first end."""
    return (answer != eos_id).sum(-1).clamp(max=answer.shape[1] - 1) // cdlm.BLOCK_SIZE + 1


def all_blocks(answer, eos_id, generator):
    """For `two_copies`: mask rates (n, L), one for each block, and the slots (n, L) to predict: those of
    blocks with text, because decoding never opens the others."""
    n = len(answer)
    n_blocks = answer.shape[1] // cdlm.BLOCK_SIZE
    rate = mask_rates(n * n_blocks, generator, 1 / cdlm.BLOCK_SIZE).view(n, n_blocks)
    counted = torch.arange(n_blocks) < text_blocks(answer, eos_id)[:, None]
    return per_slot(rate), per_slot(counted)


def teacher_states(answer, eos_id, generator):
    """Mask rates (n, L), and the slots (n, L) to predict. Every second row is in a state that block-wise
    decoding meets: one block of the text is masked at a rate and to be predicted, the blocks before it are
    finished, those behind it all masks. The others have one rate for all slots, with the ends of text that
    fill up an answer: with them the model says how long its answer is."""
    n, length = answer.shape
    block = (torch.rand(n, generator=generator) * text_blocks(answer, eos_id)).long()[:, None]
    rate = mask_rates(n, generator, 1 / cdlm.BLOCK_SIZE)[:, None]
    # Finished before it, all masks behind it.
    of_slot = torch.arange(length) // cdlm.BLOCK_SIZE
    counted = of_slot == block
    rate = torch.where(counted, rate, (of_slot > block).float())
    # The others.
    rate[1::2] = mask_rates(n // 2, generator)[:, None]
    counted[1::2] = True
    return rate, counted


def turns(shape, generator, in_order=0.0):
    """When, from 1 down to 0, each slot (n, L) is revealed: masked are the slots whose turn is below their
    rate. Turns are random numbers, but in a share `in_order` of the blocks they follow the text from left to
    right, more or less. So does decoding: a slot mostly waits for the slots before it. Random masks hardly
    ever show a block like that."""
    size = cdlm.BLOCK_SIZE
    turn = torch.rand(shape, generator=generator).unflatten(1, (-1, size))       # (n, L / B, B)
    loose, ordered = torch.rand(2, *turn.shape[:2], 1, generator=generator)
    # In an ordered block a slot's turn falls with its place, give or take.
    overtake = 0.75 * size * loose ** 2                          # so many slots may overtake each other
    left_to_right = 1 - (torch.arange(size) + (1 + overtake) * turn) / (size + overtake)
    return torch.where(ordered < in_order, left_to_right, turn).flatten(1)
