"""Imports run one way: bench.py -> studies -> papers -> core, and the other scripts -> papers; data and tools
stand beside them."""
import ast
import glob
import os

import pytest
from conftest import ROOT

PARTS = "*.py", "minispec/**/*.py", "kernels/*.py"
FILES = sorted(f for part in PARTS for f in glob.glob(part, root_dir=ROOT, recursive=True))
MAY = {                                      # room: rooms whose files it may import
    "core": {"core"},
    "kernels": {"core", "kernels"},
    "papers": {"core"},
    "data": {"core", "data", "tools"},
    "tools": {"core", "data", "tools", "papers", "adaptive", "bounds"},
    "bounds": {"tools", "bounds"},
    "adaptive": {"core", "bounds"},
    "studies": {"core", "data", "tools", "papers", "bounds", "studies"},
    "scripts": {"core", "data", "tools", "papers"},
    "bench": {"core", "data", "tools", "papers", "bounds", "studies"},
}


def room(file):
    *folders, name = file.removesuffix(".py").split("/")
    if folders[1:]:
        return folders[1]
    if folders == ["kernels"]:
        return "kernels"
    if not folders:
        return "bench" if name == "bench" else "scripts"
    rooms = {"bounds": "bounds", "traces": "bounds", "costs": "bounds", "adaptive": "adaptive", "__main__": "scripts",
             "__init__": None}
    return rooms.get(name, "papers")


def imported(file):
    """Files of the project that a file imports, in any function; kernels only at the top of the file, because
    a CPU never runs the other imports."""
    with open(os.path.join(ROOT, file), encoding="utf-8") as f:
        tree = ast.parse(f.read())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None)
            some = [a.name for a in node.names]
            some = [module, *(f"{module}.{name}" for name in some)] if module else some
            names |= {name for name in some if not name.startswith("kernels") or node in tree.body}
    paths = [name.replace(".", "/") for name in names]
    known = set(FILES) - {"minispec/__init__.py"}
    return {path + end for path in paths for end in (".py", "/__init__.py")} & known


@pytest.mark.parametrize("file", FILES)
def test_imports_run_one_way(file):
    mine = room(file)
    for other in imported(file) if mine else ():
        assert room(other) in MAY[mine], f"{file} ({mine}) imports {other} ({room(other)})"
