"""Compile every kernel ahead of time for six generations of GPUs, without having one, and report what it
takes.

    python tests/compile_report.py                # 5 minutes of one core; writes results/kernels.json

For each kernel, dtype, head size and architecture, and apart where every query head has a key head of its own
(group 1; Triton compiles that apart, all larger groups are one): registers a thread, bytes spilled, shared
memory a block, and the blocks that fit a multiprocessor at once. Triton compiles to PTX and machine code
for any target. How many registers it took Triton itself learns only from a loaded module, that is, from a
GPU, so the bundled ptxas is asked again, with -v.

Exits with 1 when a kernel spills (a value pushed out to memory costs more than the arithmetic around it) or
wants more shared memory than the device has.
"""
import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile

from root import ROOT
import torch

from kernels import INTERPRETED, attention, scores, supported, triton
from minispec.tools.files import write_text

GROUPS = (1, 4)
HEADS = (32, 64, 128, 256)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}           # fp16 takes the same path as bf16
KERNELS = ("packed_attention", "merge_parts", "pillar_scores")
# of arguments; other pointers are to numbers of the kernel's dtype, other arguments "i32"
TYPES = {
    **dict.fromkeys(("p_lse", "p_part", "p_part_lse", "p_scores"), "*fp32"),
    **dict.fromkeys(("p_slot", "p_selected", "p_request", "p_item", "p_merge", "p_which"), "*i32"),
    "p_sees": "*i64",
    "scale": "fp32",
}

# Of each architecture, from the CUDA programming guide's table of compute capabilities: the most shared
# memory that a block may have and what a multiprocessor has, in KB, and the most threads and blocks of a
# multiprocessor. Each block takes 1 KB more for the system.
ARCHS = {80: (163, 164, 2048, 32), 86: (99, 100, 1536, 16), 89: (99, 100, 1536, 24), 90: (227, 228, 2048, 32),
         100: (227, 228, 2048, 32), 120: (99, 100, 1536, 24)}
# of a multiprocessor (tensor memory: sm_100)
REGISTERS = 65536
TENSOR_COLUMNS = 512


def variants(dtype, group, d):
    """{name: (kernel, its constants)} as the functions beside the kernels launch them."""
    shape = dict(D=d, **({"group": 1} if group == 1 else {}))
    tiles = dict(SMALL=attention.SMALL, LARGE=attention.LARGE)
    own = {**shape, **tiles, **attention.settings(dtype, d)}
    return {"packed_attention": (attention.packed_attention, own),
            "merge_parts": (attention.merge_parts, dict(**shape, M=attention.SMALL)),
            "pillar_scores": (scores.pillar_scores, {**shape, **scores.settings(dtype, d)})}


def signature(kernel, dtype, constants):
    """The types of a kernel's arguments, told by their names, and which are known to be multiples of 16."""
    types = {}
    aligned = {}
    for p in kernel.params:
        pointer = p.name.startswith("p_")
        types[p.name] = TYPES.get(p.name, "*" + dtype if pointer else "i32")
        if pointer or p.name in ("s_q", "s_kv"):        # strides of lists may be anything
            aligned[(p.num,)] = [["tt.divisibility", 16]]
    return types | dict.fromkeys(constants, "constexpr"), aligned


def compile_one(name, dtype, group, d, arch):
    """One row of the report. Raises what triton raises when the kernel does not compile."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
    kernel, constants = variants(DTYPES[dtype], group, d)[name]
    options = {k: constants.pop(k) for k in ("num_warps", "num_stages") if k in constants}
    types, aligned = signature(kernel, dtype, constants)
    source = triton.compiler.ASTSource(kernel, types, constants, aligned)
    compiled = triton.compile(source, GPUTarget("cuda", arch, 32), options)
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/kernel.ptx", "w") as f:
            f.write(compiled.asm["ptx"])
        # Triton's own options, and -v.
        command = [get_ptxas(arch).path, "-v", "-lineinfo", "--regAllocOptLevel=2",
                   f"--gpu-name={sm_arch_from_capability(arch)}", f.name, "-o", f"{folder}/kernel.cubin"]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = int(re.search(r"Used (\d+) registers", log)[1])
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", log))
    meta = compiled.metadata
    row = {"kernel": name, "dtype": dtype, "group": group, "head_dim": d, "arch": f"sm_{arch}",
           "registers": registers, "spill_bytes": spilled, "shared_bytes": meta.shared,
           "threads": 32 * meta.num_warps}
    row["blocks_per_sm"] = blocks_per_sm(row, arch, getattr(meta, "tmem_size", None) or 0)
    return row


def blocks_per_sm(row, arch, tensor_columns):
    """How many blocks a multiprocessor holds at once: what hides the latency of gathering keys slot by
    slot."""
    _, shared, threads, blocks = ARCHS[arch]
    registers = -(-row["registers"] // 8) * 8 * row["threads"]            # registers are given out by eights
    return min(blocks, threads // row["threads"], REGISTERS // registers,
               (shared << 10) // (row["shared_bytes"] + 1024), TENSOR_COLUMNS // max(tensor_columns, 1))


def faults(row):
    """What is wrong with a row, in words; "" if nothing is."""
    limit = ARCHS[int(row["arch"].removeprefix("sm_"))][0] << 10
    found = []
    if row["spill_bytes"]:
        found.append(f"spills {row['spill_bytes']} bytes")
    if row["shared_bytes"] > limit:
        found.append(f"wants {row['shared_bytes']} bytes of shared memory of {limit}")
    return ", ".join(found)


def write(path, head, rows):
    """JSON with one row a line."""
    head, rows = json.dumps(head, indent=1)[:-2], ",\n  ".join(map(json.dumps, rows))
    write_text(path, f'{head},\n "rows": [\n  {rows}\n ]\n}}\n')


def cells():
    """The arguments of compile_one for every row of the report."""
    for name, dtype, d, arch, group in itertools.product(KERNELS, DTYPES, HEADS, ARCHS, GROUPS):
        if supported(d, DTYPES[dtype]):
            yield name, dtype, group, d, arch


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default=f"{ROOT}/results/kernels.json", help="where the report goes")
    args = parser.parse_args()
    if triton is None or INTERPRETED:
        sys.exit("compile_report.py needs triton installed and TRITON_INTERPRET unset")

    rows = []
    for cell in cells():
        rows.append(compile_one(*cell))
        print(rows[-1], faults(rows[-1]), flush=True)

    bad = [f"{row} {faults(row)}" for row in rows if faults(row)]
    write(args.out, {"command": "python tests/compile_report.py", "triton": triton.__version__,
                     "compiled": len(rows), "faults": bad}, rows)
    print(f"{len(rows)} kernels compiled, {len(bad)} with faults; report in {args.out}", *bad, sep="\n")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
