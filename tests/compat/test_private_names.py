"""Private names of six packages are used in common/compat only; a use elsewhere fails here."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import exportable_cache

pytestmark = pytest.mark.project

ROOT = Path(exportable_cache.__file__).parent
PACKAGES = ("torch", "transformers", "executorch", "torchao", "torch_tensorrt", "coreai_torch")

#: Files that may, and why.
EXCEPTIONS = {
    "common/compat": "the seam itself",
    "pytree": "a seam of its own, beside the registry that it is a part of, with tests/pytree/test_torch_private.py",
    "models/patches": "replacements call what is private to the class they replace; the patch's digest covers it",
}
#: Private names of other packages.
FOREIGN = ("_hf_hook",)  # accelerate's, on modules that it has placed
_BY_NAME = ("getattr", "setattr", "hasattr", "delattr", "object")


#: Public, whatever they begin with.
DOCUMENTED = {"os._exit"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in FOREIGN


def own_names(trees: list[ast.AST]) -> set[str]:
    """Names that the package defines: functions, classes, arguments, variables, and attributes assigned on `self`."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


def private_names(tree: ast.AST, own: set[str]) -> list[str]:
    """Those that a file uses and the package does not define, as source."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module.split(".")[0] in PACKAGES:
            parts = [*node.module.split("."), *(alias.name for alias in node.names)]
            found += [node.module] if any(map(is_private, parts)) else []
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] in PACKAGES]
            found += [name for name in names if any(map(is_private, name.split(".")))]
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Call):
            found += [f"{ast.unparse(node.func)}({key.arg}=)" for key in node.keywords if is_private(key.arg or "")]
            called = ast.unparse(node.func).rsplit(".", 1)[-1]
            if called in _BY_NAME and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
                name = str(node.args[1].value)
                found += [ast.unparse(node)] if is_private(name) and name not in own else []
    return found


def test_private_names_are_used_in_compat_only() -> None:
    trees = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}
    own = own_names(list(trees.values()))
    found = {
        path: names
        for path, tree in trees.items()
        if not path.startswith(tuple(EXCEPTIONS)) and (names := [*{*private_names(tree, own)} - DOCUMENTED])
    }
    assert found == {}


def test_the_scan_finds_them() -> None:
    source = """
import torch
import torch._inductor
from torch.utils._pytree import tree_map
from executorch.exir import to_edge
def step(config, self):
    self._mine = torch._check(True)
    config._attn_implementation = "eager"
    return getattr(config, "_experts"), self._theirs(), call(_valid=False), self._mine
"""
    tree = ast.parse(source)
    assert set(private_names(tree, own_names([tree]))) == {
        "torch._inductor",
        "torch.utils._pytree",
        "config._attn_implementation",
        "getattr(config, '_experts')",
        "call(_valid=)",
        "torch._check",
        "self._theirs",
    }


def test_the_package_imports_no_target() -> None:
    code = """
import sys, exportable_cache, exportable_cache.common.compat.executorch, exportable_cache.common.compat.torch_tensorrt
assert not {"executorch", "torch_tensorrt", "torchao"} & {name.split(".")[0] for name in sys.modules}
"""
    subprocess.run([sys.executable, "-c", code], check=True)
