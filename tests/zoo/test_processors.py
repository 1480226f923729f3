"""Items that published processors make: every checkpoint with --full, two cheap ones always."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("PIL", reason="image processors without torchvision need Pillow")

from .media_items import TOWERS
from .media_table import PUBLISHED
from .processors import Published, check_published, published

#: A grid between a smallest and a largest number of pixels, and images whose tokens see the whole prompt.
ALWAYS = ("Qwen/Qwen2-VL-7B-Instruct", "google/paligemma-3b-pt-224")


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.checkpoint, marks=[pytest.mark.full] * (row.checkpoint not in ALWAYS))
        for row in published()
    ],
)
def test_items_of_a_published_processor(row: Published) -> None:
    outcome = check_published(row)
    assert outcome.status == "pass", outcome


def test_settings_have_a_source_and_shapes_of_their_own() -> None:
    rows = published()
    assert len({row.checkpoint for row in rows}) == len(rows) >= 17
    for row in rows:
        assert row.source and row.towers and len(row.sizes) >= 2, row.checkpoint
        assert any(TOWERS.get(name, {}) != {**TOWERS.get(name, {}), **fields} for name, fields in row.towers.items())
        assert row.kind == "audio" or any(height != width for height, width in row.sizes), row.checkpoint


def test_every_published_processor_passes() -> None:
    """Check the committed results: eager sessions pass for each processor, and other targets where they ran."""
    results = json.loads(PUBLISHED.read_text())
    assert set(results) == {row.checkpoint for row in published()} and len(results) >= 17
    assert all("eager" in targets for targets in results.values())
    passes = {(name, target, one["status"]) for name, targets in results.items() for target, one in targets.items()}
    assert {status for *_, status in passes} == {"pass"}, passes
