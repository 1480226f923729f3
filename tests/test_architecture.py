"""The shape of the package: rooms whose imports point one way, and few of them."""

from __future__ import annotations

from pathlib import Path

import pytest

import exportable_cache

pytestmark = pytest.mark.project

ROOT = Path(__file__).parents[1]
PACKAGE = Path(exportable_cache.__file__).parent
MOST_ENTRIES = 18


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


def test_there_are_few_entries_at_the_top() -> None:
    entries = sorted(
        path.name for path in PACKAGE.iterdir() if not path.name.startswith(("__pycache__", ".", "py.typed"))
    )
    assert len(entries) <= MOST_ENTRIES, entries
