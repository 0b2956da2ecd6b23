"""Triton kernels (attention.py, scores.py), and CUDA graphs of forwards on them (graphs.py, rounds.py). The
kernels' slow and obvious torch references are in tests/references.py.

Everything here imports without triton and without a GPU; `available` and `supported` say what can run. With
TRITON_INTERPRET=1 set before triton is first imported, Triton runs the kernels on CPU tensors, slowly, for
tests. Names in kernels: p_ pointer, b_ block of values, i_ index of a program or a loop, o_ offsets, s_
stride.
"""
from types import SimpleNamespace

import torch

try:
    import triton
    import triton.language as tl
    from triton import jit
    INTERPRETED = triton.knobs.runtime.interpret
except ImportError:
    triton, INTERPRETED = None, False
    tl = SimpleNamespace(constexpr=None)         # all that a kernel's signature needs

    def jit(function):
        return function

SEEN = 64                               # newest positions of which a tree's row says what it sees


def can_run(model, rows):
    """Whether the kernels run for this model, and for trees of up to so many rows. (A chain always fits.)"""
    return rows <= SEEN and available(model.embed.weight) and supported(model.config.head_dim, model.dtype)


def available(x):
    """Whether the kernels can run on tensor x: on a GPU, or in the interpreter."""
    return triton is not None and (x.device.type != "cpu" or INTERPRETED)


def supported(head_dim, dtype):
    """Whether the kernels take heads of this size: powers of two from 16 to 256.

    fp32 ends at 128, because more does not fit into the shared memory of smaller GPUs."""
    largest = {torch.float32: 128, torch.float16: 256, torch.bfloat16: 256}.get(dtype, 0)
    return 16 <= head_dim <= largest and head_dim & (head_dim - 1) == 0
