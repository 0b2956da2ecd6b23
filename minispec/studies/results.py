"""results/: NAME.json holds what study NAME found; NAME.part, the finished cells of one that was
interrupted."""
import os
import platform
import re
import sys
import time

import torch
from tqdm import tqdm

from minispec import ROOT
from minispec.core.cpu import PACKED_TYPES
from minispec.tools import checkpoints
from minispec.tools.files import blame, read_json, write_json

FOLDER = f"{ROOT}results"


def path(file):
    """Where a file of results/ is."""
    return os.path.join(FOLDER, file)


def processor():
    """The name of this machine's processor. Linux has it in a file, other systems have no such file."""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as f:
            if name := re.search(r"model name\s*: (.*)", f.read()):
                return name[1]
    return platform.processor() or platform.machine()


def device_name(device="cpu"):
    if device != "cpu":
        return torch.cuda.get_device_name(device)
    # What bf16 is worth depends on this, and the name of a processor does not always tell.
    products = " with bf16 products" if torch.bfloat16 in PACKED_TYPES else ""
    return f"{processor()}{products}, {torch.get_num_threads()} threads"


def dtype_name(model):
    return str(model.dtype).removeprefix("torch.")


def write(name, result, seconds, device="cpu", dtype=""):
    """Write NAME.json with what is needed to repeat it, and remove NAME.part."""
    write_json(path(name + ".json"), {
        "command": "python " + " ".join([os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
        "device": device_name(device),
        "dtype": dtype,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(seconds, 1),
        "result": result,
    })
    if os.path.exists(path(name + ".part")):
        os.remove(path(name + ".part"))


def each_kept(name, args, model, cells, measure, **more):
    """[measure(*cell) for every cell] of a long study. Each is kept in NAME.part when it is done, and taken
    from there if an interrupted run has left it whose settings, target, dtype, machine and `more` are the
    same. Runs that write no result keep no cells either."""
    settings = {k: v for k, v in vars(args).items() if k not in ("studies", "force", "arms")}
    about = {
        **more,
        "settings": settings,
        "target": [checkpoints.fingerprint(model), dtype_name(model)],
        "machine": [device_name(), torch.__version__],
    }
    part, done = path(f"{name}.part"), []
    if os.path.exists(part) and not args.quick:
        saved = read_json(part)
        with blame(part):
            if saved["about"] == about:
                done = saved["cells"]

    for cell in tqdm(cells[len(done):], desc=name):
        done.append(measure(*cell))
        if not args.quick:
            write_json(part, {"about": about, "cells": done})
    return done
