"""The package runs on every Python that pyproject.toml promises: its syntax, and the standard library it uses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.project

ROOT = Path(__file__).parents[1]
FOLDERS = ("exportable_cache", "plugins", "runners", "benchmarks", "export_scripts", "tests")
OLDEST = int(re.search(r'requires-python = ">=3\.(\d+)', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1])
#: Names by the version of Python that brought them (What's New of each release). "*" is a whole module.
SINCE = {
    11: {
        "typing": "Self Never NotRequired Required LiteralString Unpack TypeVarTuple assert_never assert_type "
        "reveal_type dataclass_transform get_overloads",
        "enum": "StrEnum ReprEnum verify member nonmember",
        "asyncio": "TaskGroup Runner timeout timeout_at Barrier",
        "builtins": "ExceptionGroup BaseExceptionGroup",
        "contextlib": "chdir",
        "datetime": "UTC",
        "hashlib": "file_digest",
        "math": "cbrt exp2",
        "tomllib": "*",
    },
    12: {"typing": "override TypeAliasType", "itertools": "batched", "collections.abc": "Buffer", "math": "sumprod"},
    13: {"typing": "TypeIs NoDefault ReadOnly", "warnings": "deprecated", "copy": "replace", "queue": "ShutDown"},
}
NEWER = {
    (module, name)
    for version, modules in SINCE.items()
    for module, names in modules.items()
    for name in names.split()
    if version > OLDEST
}
NEW_MODULES = {module for module, name in NEWER if name == "*"}


def run_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run: without blocks for type checkers, and without imports whose failure is handled."""
    yield node
    for child in ast.iter_child_nodes(node):
        for_checkers = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        handled = isinstance(child, ast.Try) and any(
            one.type is not None and "ImportError" in ast.unparse(one.type) for one in child.handlers
        )
        if not (for_checkers or handled):
            yield from run_nodes(child)


def newer_names(source: str) -> list[str]:
    """Names of the standard library that the oldest promised Python lacks, each with its line."""
    aliases: dict[str, str] = {}
    found = []
    for node in run_nodes(ast.parse(source, feature_version=(3, OLDEST))):
        if isinstance(node, ast.Import):
            aliases |= {name.asname or name.name: name.name for name in node.names}
            found += [f"{node.lineno}: {name.name}" for name in node.names if name.name in NEW_MODULES]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            names = [name.name for name in node.names if module in NEW_MODULES or (module, name.name) in NEWER]
            found += [f"{node.lineno}: {module}.{name}" for name in names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (aliases.get(node.value.id), node.attr) in NEWER:
                found.append(f"{node.lineno}: {aliases[node.value.id]}.{node.attr}")
        elif isinstance(node, ast.Name) and ("builtins", node.id) in NEWER:
            found.append(f"{node.lineno}: {node.id}")
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_oldest_python_has_what_is_used(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    found = {str(path.relative_to(ROOT)): newer_names(path.read_text(encoding="utf-8")) for path in paths}
    assert not {path: lines for path, lines in found.items() if lines}


def test_newer_names_are_seen_and_handled_imports_are_not() -> None:
    assert newer_names("from typing import Any, Self") == ["1: typing.Self"]
    assert newer_names("import typing as t\nx: t.Self") == ["2: typing.Self"]
    assert newer_names("import tomllib") == ["1: tomllib"]
    assert newer_names("try:\n    import tomllib\nexcept ImportError:\n    pass") == []
    assert newer_names("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from typing import Self") == []
    with pytest.raises(SyntaxError):
        newer_names("try:\n    pass\nexcept* ValueError:\n    pass")
