"""Triton kernels, one file each, with a slow and obvious torch reference beside every one.

Everything here imports without triton and without a GPU; `unavailable` says why a kernel cannot run. With TRITON_INTERPRET=1
set before triton is first imported, Triton runs the kernels on CPU tensors, slowly, for tests.
Names in kernels: p_ pointer, b_ block of values, i_ index of a program or a loop, o_ offsets, s_ stride.
"""
from types import SimpleNamespace

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
        return "the tensors are on the CPU (TRITON_INTERPRET=1, set before triton is imported, would interpret the kernels)"
    return ""


def check(q, *pools):
    """The kernels take heads of 16, 32, .. numbers, contiguous in q (N, H, D) and in the pools (G, n_slots, D)."""
    if reason := unavailable(q):
        raise RuntimeError(f"the Triton kernels cannot run: {reason}; the *_reference functions can")
    d, pool = q.shape[-1], pools[0]
    if d < 16 or d & (d - 1):
        raise ValueError(f"head size {d} is not supported by the kernels; allowed are powers of two from 16")
    for x in (q, *pools):
        if x.dtype != q.dtype or x.stride()[1:] != (d, 1) or (x is not q and x.stride() != pool.stride()):
            raise ValueError(f"q and the pools need one dtype and contiguous heads; got {x.dtype}, strides {x.stride()}")
