"""Triton kernels, one file each. Those of attention have a slow and obvious torch reference next to them; the
small ones of a layer compute what gpt.Block does.

Everything here imports without triton and without a GPU; `unavailable` says why a kernel cannot run. With
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


def unavailable(x):
    """Why the kernels cannot run on tensor x, in one line; "" if they can."""
    if triton is None:
        return "triton is not installed (pip install triton)"
    if x.device.type == "cpu" and not INTERPRETED:
        return ("the tensors are on the CPU (TRITON_INTERPRET=1, set before triton is imported, "
                "would interpret the kernels)")
    return ""


def supported(head_dim, dtype):
    """Whether the kernels take heads of so many numbers: powers of two from 16 to 256.

    fp32 ends at 128, because more does not fit into the shared memory of smaller GPUs."""
    largest = 128 if dtype == torch.float32 else 256
    return 16 <= head_dim <= largest and head_dim & (head_dim - 1) == 0


def check(q, *pools):
    """Heads must have a supported size and be contiguous in q (N, H, D) and in the pools (G, n_slots, D)."""
    if reason := unavailable(q):
        raise RuntimeError(f"the Triton kernels cannot run: {reason}; the *_reference functions can")
    d = q.shape[-1]
    if not supported(d, q.dtype):
        raise ValueError(f"head size {d} is not supported by the kernels; "
                         "allowed are powers of two from 16 to 256, in fp32 to 128")
    for x in (q, *pools):
        same_pool = x is q or x.stride() == pools[0].stride()
        if x.dtype != q.dtype or x.stride()[1:] != (d, 1) or not same_pool:
            raise ValueError(f"q and the pools need one dtype and contiguous heads; got {x.dtype}, "
                             f"strides {x.stride()}")
