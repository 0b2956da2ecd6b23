"""Faster decoding on a CPU. Every function here has a plain torch operator that computes the same. A reader
of the other files may take `Linear` for nn.Linear and `rms_norm` for F.rms_norm.
"""
import math
from functools import cache
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

CONVERT_ROWS = 12           # from which it pays to convert bf16 weights, if a processor has no bf16 products
MANY_KEYS = 1024            # above which few rows attend by plain products

# Linux describes the processor in a file; other systems have no such file.
INFO = Path("/proc/cpuinfo")
DESCRIPTION = INFO.read_text() if INFO.exists() else ""
INTEL = "GenuineIntel" in DESCRIPTION

# The dtypes that oneDNN multiplies here with weights in its own layout.
PACKED_TYPES = set()
if torch.backends.mkldnn.is_available():
    PACKED_TYPES.add(torch.float32)
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        PACKED_TYPES.add(torch.bfloat16)
# Those in which a single row is faster with the matrix as it is.
ROW_TYPES = PACKED_TYPES - {torch.bfloat16} if INTEL else PACKED_TYPES


class Linear(nn.Linear):
    """nn.Linear that decodes faster on a CPU.

    A single row is multiplied by `row_product`. Several rows (and single bf16 rows on Intel) are multiplied
    with a copy of the matrix in oneDNN's layout, as torch.compile does, because torch's product is slow for
    few rows. On a processor without bf16 products, many bf16 rows are multiplied in fp32. Training uses
    F.linear.
    """
    _packed = None, None        # version and address of the weights, and their copy
    pack_up_to = 1 << 25        # elements: a copy of every matrix is too much for a model of billions

    def forward(self, x):
        w, bias = self._parameters.values()              # nn.Module's own look-up takes longer
        if w.is_cuda or w.is_inference() or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return F.linear(x, w, bias)
        multiplied = w.dtype in PACKED_TYPES
        if w.dtype in ROW_TYPES and x.numel() == w.shape[1]:
            return row_product(x, w, bias)
        if multiplied and w.numel() <= self.pack_up_to:
            # Pack again if an optimiser or a loader has changed the weights in place.
            state = w._version, w.data_ptr()
            if self._packed[0] != state:
                self._packed = state, torch.ops.mkldnn._reorder_linear_weight(w.detach())
            return torch.ops.mkldnn._linear_pointwise.default(x, self._packed[1], bias, "none", [], "")
        if w.dtype == torch.bfloat16 and not multiplied and x.numel() >= CONVERT_ROWS * w.shape[1]:
            return F.linear(x.float(), w.float(), None if bias is None else bias.float()).bfloat16()
        return F.linear(x, w, bias)

    def _apply(self, *args):
        """`to`, `float` and the like; the new weights may lie at the address of earlier ones."""
        self._packed = None, None
        return super()._apply(*args)

    def __getstate__(self):
        """The state for copy.deepcopy and pickle, which cannot read the packed copy."""
        return self.__dict__ | {"_packed": (None, None)}


def row_product(x, w, bias):
    """F.linear of a single row x (.., C), by operators that read a matrix on all cores."""
    if w.dtype == torch.float32 and not INTEL:
        # A matrix times a vector runs on one core; a batch of up to 16 parts of the matrix runs on all.
        parts = math.gcd(len(w), 16)
        rows = x.reshape(1, -1).t().expand(parts, -1, 1)
        out = torch.bmm(w.unflatten(0, (parts, -1)), rows).view(*x.shape[:-1], -1)
        return out if bias is None else out + bias
    # torch uses oneDNN for bf16 if it may, but its own product of a row takes two thirds of the time. The
    # switch belongs to the process: if two threads use it at once, products may be slower, but are right.
    enabled = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False
    try:
        return F.linear(x, w, bias)
    finally:
        torch.backends.mkldnn.enabled |= enabled


def products_are_faster(keys, few, length):
    """Whether plain products attend faster than torch's attention: few rows over `length` keys, or the many
    rows of a prompt. On an Intel processor they never do. They are as exact in bf16, because other roundings
    count more."""
    if INTEL and not keys.is_cuda:
        return False
    if few:
        return length > MANY_KEYS
    return keys.dtype == torch.bfloat16 and keys.dtype in PACKED_TYPES and not keys.is_cuda


scalar = cache(torch.tensor)                 # a number as a tensor, made once


def rms_norm(x, weight, eps):
    """F.rms_norm of few rows (.., C), in five operators instead of torch's eight.

    In decoding each operator takes longer to start than to compute, because the weights that were read since
    have evicted its code from the processor's cache."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
    mean = torch.addcmul(scalar(eps), length, length, value=1 / x.shape[-1])
    return (x * weight).mul_(mean.rsqrt_())
