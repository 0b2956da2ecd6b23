"""minispec: five papers on fast LLM decoding, one small GPT, one decoding loop.

Import this package before torch: it sets two options of the process.

Freed memory stays with the process. A PyTorch step on a CPU allocates and frees the same megabytes again and
again. By default glibc returns large blocks to the operating system at once, and the next step pays a page
fault for every 4 KiB that it touches again. On virtual machines this can cost more than the arithmetic; three
calls avoid it. Only glibc has these options, so elsewhere nothing happens.

Compiled kernels stay cached. oneDNN, which multiplies on CPUs, compiles a kernel for every number of rows and
shape of weights, and by default keeps the last 1,024. If requests of a batch verify different numbers of
drafts, its number of rows changes every round, for some ten shapes. So more are kept, but not too many: each
may take a megabyte.
"""
import contextlib
import ctypes
import importlib.util
import os
import sys

# The folder of the scripts, so that defaults are found from any working directory; "" inside it.
ROOT = os.path.abspath(f"{__file__}/../..") + "/"
if os.path.samefile(ROOT, os.curdir):
    ROOT = ""
SHIPPED = f"{ROOT}checkpoints/target"

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4   # from glibc's malloc.h

# Serve every request from the heap and never shrink it.
with contextlib.suppress(OSError, AttributeError):       # not glibc
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(M_MMAP_MAX, 0)                          # no private mapping per large block
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)            # never give the top of the heap back
    libc.mallopt(M_TOP_PAD, 1 << 28)                     # grow it 256 MiB at a time

# The number of oneDNN's kernels to keep, unless the environment sets it.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "4096")


def trim():
    """Return the free memory between used blocks, which grows in a long training with batches of changing
    shapes."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def need_torch():
    """For scripts that are run first: without torch, say what to install and end (exit code 2)."""
    if importlib.util.find_spec("torch") is None:
        print("minispec needs torch: pip install -r requirements.txt (README.md, Two commands)",
              file=sys.stderr)
        sys.exit(2)
