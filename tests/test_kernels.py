"""The Triton kernels without a GPU: numerics in Triton's interpreter against the torch references, and
ahead-of-time compilation. The interpreter must be chosen before triton is imported and cannot compile, so all
of `CHECKS` run in a child process, together with those of test_graphs.py, and the tests below report its
verdicts. (The interpreter of triton 3.7 cannot multiply bf16; fp16 takes the same path through the kernels,
and bf16 is compiled.)"""

import dataclasses
import functools
import mmap
from unittest import mock

from conftest import ROOT, seeded  # before torch
import pytest
import torch

import kernels
from kernels import attention as att
from kernels import scores, triton
from minispec.tools.files import read_json
import compile_report
import references

NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python names from 3.13 on
KV_HEADS = 2
ROOM = 128

# (rows, length, selected, tail)
MIXED = [
    (1, 100, 12, 90),  # a draft row
    (9, 128, 0, 0),
    (17, 90, 0, 0),  # verifications of k = 8 and k = 16
    (1, 1, 0, 0),  # a row at the very first position
    (0, 50, 0, 0),  # a request that waits
    (1, 70, 1, 69),  # a draft row with one position and its own
    (21, 21, 0, 0),
    (20, 60, 0, 0),  # a prompt, and the second chunk of one
    (1, 33, 0, 0),  # a first draft, which sees everything
    (3, 80, 5, 70),
    (1, 40, 0, 30),  # a draft row that reads recent positions alone
]


class Batch:
    """Random queries and a pool for the requests of MIXED, whose positions are in random slots."""

    def __init__(self, g, d, dtype):
        torch.manual_seed(0)
        b = len(MIXED)
        n = sum(r[0] for r in MIXED)
        # Queries arrive as part of a fused projection: their rows are not contiguous, their heads are.
        self.q = (3 * torch.randn(n, KV_HEADS * (g + 2), d)).to(dtype)[:, : KV_HEADS * g]
        self.k, self.v = torch.randn(2, KV_HEADS, b * ROOM, d).to(dtype)
        self.slots = torch.randperm(b * ROOM).view(b, ROOM).int()
        self.selected = torch.zeros(b, KV_HEADS, 12, dtype=torch.int32)
        for i, (_, _, c, tail) in enumerate(MIXED):
            for group in range(KV_HEADS):
                self.selected[i, group, :c] = torch.randperm(tail)[:c]

    def args(self, **changes):
        x = vars(self) | changes
        return x["q"], x["k"], x["v"], x["slots"], x["selected"]


@functools.cache
def attended(g, d, chunk, dtype):
    """(batch, plan, rows, lse) of the kernel on MIXED. A chunk of 48 splits the long lists."""
    batch = Batch(g, d, dtype)
    plan = att.make_plan(MIXED, g, chunk)
    return batch, plan, *att.attention(*batch.args(), plan)


def close(a, b, tolerance):
    error = (a.float() - b.float()).abs().max().item()
    assert error <= tolerance, f"largest error {error:.2e}, allowed {tolerance:.0e}"


def check_mixed(g, d=64, chunk=48, dtype=torch.float32, tolerance=1e-5):
    """One launch for the whole mixture, and the scores of the verifying requests."""
    batch, plan, out, lse = attended(g, d, chunk, dtype)
    assert (len(plan.merges) > 0) == (chunk == 48)
    want, want_lse = references.attention(*batch.args(), plan)
    close(out, want, tolerance)
    close(lse, want_lse, 1e-5)
    args = batch.q, batch.k, lse, batch.slots, plan, torch.tensor([2, -1, 1], dtype=torch.int32)
    unset = torch.full((len(MIXED), KV_HEADS, ROOM), -1.0)
    got = scores.scores(*args, unset.clone())
    close(got, references.scores(*args, unset), 1e-6)  # -1 for other requests
    close(got[1, :, :128].sum(-1), torch.ones(KV_HEADS), 1e-5)


def alone(i, g):
    """A request of MIXED without the others: its arguments, its plan, and its result in the mixture."""
    batch, _, out, _ = attended(g, 64, 48, torch.float32)
    first = sum(r[0] for r in MIXED[:i])
    rows = slice(first, first + MIXED[i][0])
    own = batch.args(q=batch.q[rows], slots=batch.slots[i : i + 1], selected=batch.selected[i : i + 1])
    return own, att.make_plan(MIXED[i : i + 1], g, 48), out[rows]


def check_batch_of_one():
    """The result of a request is the same, bit for bit, alone and in the mixture. Two of three are split."""
    for i in (0, 1, 7):
        own, plan, want = alone(i, 5)
        assert torch.equal(att.attention(*own, plan)[0], want)


def check_padded():
    """A plan with room for more, as a captured graph has, gives the same; a plan of nothing gives nothing."""
    own, plan, want = alone(1, 1)
    longer = {
        name: torch.nn.functional.pad(getattr(plan, name), (0, 0, 0, 3), value=-1)
        for name in ("items", "merges")
    }
    padded = dataclasses.replace(plan, **longer, n_part_rows=plan.n_part_rows + 50)
    assert torch.equal(att.attention(*own, padded)[0], want)
    empty = att.make_plan([(0, 10, 0, 0)], 1)
    assert att.attention(own[0][:0], *own[1:], empty)[0].numel() == 0


def check_trees(g=5):
    """Rows of trees see their paths and all before the last 64 positions; windows of masks see themselves. A
    tree that is a chain is causal, bit for bit."""
    batch, _, causal, _ = attended(g, 64, 48, torch.float32)
    n = MIXED[1][0]
    path = torch.rand(n, 20, generator=seeded(1)) < 0.5
    path[:, -n:] |= torch.eye(n, dtype=torch.bool)
    deep = torch.eye(17, 64).bool() | (torch.arange(64) < 40)
    whole = torch.ones(21, 21, dtype=torch.bool)
    plan = att.make_plan(MIXED, g, 48, {1: path, 2: deep, 6: whole, 7: whole[1:, 1:].tril()})
    out, _ = att.attention(*batch.args(), plan)
    close(out, references.attention(*batch.args(), plan)[0], 1e-5)
    first = sum(r[0] for r in MIXED[:7])                   # the chain's, then those of no tree
    assert torch.equal(out[first:], causal[first:])


def check_large_offsets():
    """Results of parts that begin 2^31 numbers into their buffer are written and read there. (72 requests
    that each read 512 tokens of a prompt of 8,192 need that many.) The buffer is address space, of which a
    few pages are touched; half of it is before its first number, where an offset of 32 bits would lead.
    """
    own, plan, want = alone(1, 1)
    row = KV_HEADS * 64                                    # numbers of a part's row
    skipped = (1 << 31) // row
    for work in (plan.items, plan.merges):
        work[:, 3] += skipped
    plan.n_part_rows += skipped
    n = plan.n_part_rows * row
    room = mmap.mmap(-1, 8 * (n + row), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    parts = torch.frombuffer(room, dtype=torch.float32)[n + row:][:n].view(-1, KV_HEADS, 64)

    def spacious(q, *size, real=torch.Tensor.new_empty, **kwargs):
        return parts if size == parts.shape else real(q, *size, **kwargs)

    with mock.patch.object(torch.Tensor, "new_empty", spacious):
        got, _ = att.attention(*own, plan)
    assert torch.equal(got, want) and parts[skipped:].abs().sum() > 0, "parts are elsewhere"


# The interpreter is slow, so it runs a few pairs of group and head size. All are compiled
# (results/kernels.json).
CHECKS = {
    "mixed g=1 D=64": lambda: check_mixed(1),
    "mixed g=5 D=64": lambda: check_mixed(5),
    "mixed g=8 D=128": lambda: check_mixed(8, 128),
    "fp16 g=4 D=128": lambda: check_mixed(4, 128, dtype=torch.float16, tolerance=4e-3),
    "no list is split": lambda: check_mixed(1, chunk=att.CHUNK),
    "batch of one": check_batch_of_one,
    "padded": check_padded,
    "large offsets": check_large_offsets,
    "trees": check_trees,
}


needs_triton = pytest.mark.skipif(triton is None, reason="triton is not installed")


@needs_triton
@pytest.mark.parametrize("name", CHECKS)
def test_in_the_interpreter(name, verdicts):
    assert verdicts[name] == "", verdicts[name]


@needs_triton
@pytest.mark.parametrize(
    "kernel, dtype, group, d, arch",
    [
        ("packed_attention", "bf16", 4, 128, 90),
        ("merge_parts", "bf16", 4, 128, 90),
        ("pillar_scores", "bf16", 5, 64, 90),
        ("packed_attention", "bf16", 4, 256, 120),
    ],
)
def test_compiles_without_spills(kernel, dtype, group, d, arch, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    row = compile_report.compile_one(kernel, dtype, group, d, arch)
    assert compile_report.faults(row) == ""
    assert 16 < row["registers"] <= 255
    assert row["blocks_per_sm"] >= (2 if arch == 90 else 1)
    bad = compile_report.faults({**row, "spill_bytes": 8, "shared_bytes": (227 << 10) + 1})
    assert "spills 8 bytes" in bad and "shared memory" in bad


def test_shipped_report_covers_every_configuration():
    report = read_json(f"{ROOT}/results/kernels.json")
    assert report["faults"] == []
    made = [
        (r["kernel"], r["dtype"], r["group"], r["head_dim"], int(r["arch"][3:])) for r in report["rows"]
    ]
    assert sorted(made) == sorted(compile_report.cells())


def test_plans_read_every_entry_once_and_no_more_than_a_tile_sees():
    group, chunk = 4, 32
    plan = att.make_plan(MIXED, group, chunk)
    seen = {}
    for request, first, entry, _ in plan.items.tolist():
        seen.setdefault((request, first), []).append(entry)
    for i, (rows, length, selected, tail) in enumerate(MIXED):
        height = att.SMALL if rows * group <= att.SMALL else att.LARGE
        for first in range(0, rows * group, height):
            n = min(height, rows * group - first)
            entries = selected + length - tail - (rows - 1 - (first + n - 1) // group)
            assert seen.pop((i, first)) == list(range(0, entries, chunk))
    assert not seen


@needs_triton
def test_cpu_tensors_are_for_the_interpreter():
    assert not kernels.supported(64, torch.float64)
    assert not kernels.available(torch.zeros(1))
    assert kernels.available(torch.zeros(1, device="meta"))
