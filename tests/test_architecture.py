"""The shape of the package: rooms whose imports point one way, and few of them."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from os.path import dirname
from pathlib import Path

import pytest

import exportable_cache
from benchmarks.functions_passed import functions_of_a_response

pytestmark = pytest.mark.project

ROOT = Path(__file__).parents[1]
PACKAGE = Path(exportable_cache.__file__).parent
MOST_ENTRIES, MOST_IN_A_FOLDER = 18, 20
#: Functions and files that a reader opens to follow a generated token.
MOST_PASSED, MOST_FILES_PASSED = 145, 25


def test_imports_point_downwards_and_go_in_no_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    importlinter = pytest.importorskip(
        "importlinter.cli", reason="import-linter is not installed: the extra `test` has it"
    )
    monkeypatch.chdir(ROOT)
    # It configures logging, and would silence every logger that is there, for all tests after this one.
    monkeypatch.setattr("logging.config.dictConfig", lambda config: None)
    assert importlinter.lint_imports(no_cache=True) == importlinter.EXIT_STATUS_SUCCESS


def test_every_room_has_its_place_in_the_contract() -> None:
    contract = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    missing = {room for room in rooms - {"__init__", "__main__"} if f'"exportable_cache.{room}",' not in contract}
    assert not missing


def test_a_prompt_passes_few_functions() -> None:
    found = functions_of_a_response()
    assert len(found) <= MOST_PASSED and len({file for file, _ in found}) <= MOST_FILES_PASSED, sorted(found)


def test_a_folder_has_few_entries() -> None:
    for folder in (PACKAGE, *(path for path in PACKAGE.rglob("*") if path.is_dir() and path.name != "__pycache__")):
        entries = sorted(
            path.name for path in folder.iterdir() if not path.name.startswith(("__pycache__", ".", "py.typed"))
        )
        assert len(entries) <= (MOST_ENTRIES if folder == PACKAGE else MOST_IN_A_FOLDER), (folder, entries)


def test_the_page_names_files_that_exist() -> None:
    there = {path.relative_to(ROOT).as_posix() for room in (PACKAGE, ROOT / "tests") for path in room.rglob("*")}
    missing = []
    for line in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines():
        room = re.match(r"\| `(\w+)` \|", line)
        folder = f"{PACKAGE.name}/{room[1]}" if room else ""
        for name in re.findall(r"`([\w*/]+(?:\.py|/))`", line):
            found = sorted(path for path in there if fnmatch(f"/{path}", f"*/{name.rstrip('/')}"))
            if line.startswith("|") and "/" not in name:
                # A bare name follows a room or a path in the same row, and is in its folder or next to that.
                found = [path for path in found if path in (f"{folder}/{name}", f"{dirname(folder)}/{name}")]
            if not found:
                missing.append(name)
            elif "/" in name.rstrip("/"):
                folder = found[0] if name.endswith("/") else dirname(found[0])
    assert not missing
