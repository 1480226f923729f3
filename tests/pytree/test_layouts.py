"""The tests of this folder, against the older transformers releases whose caches have another form."""

from __future__ import annotations

from pathlib import Path

import layout_environment
import pytest
from layout_environment import Layout

LAYOUTS = (Layout("4.52.4", "lists of tensors"), Layout("4.57.6", "layers"))


@pytest.mark.full
@pytest.mark.layouts
@pytest.mark.parametrize("layout", LAYOUTS, ids=["4.52.4", "4.57.6"])
def test_pytree_tests_pass_against(layout: Layout):
    layout_environment.ensure(layout)
    report = layout_environment.run_tests(layout, Path(__file__).parent)
    print(report.output)
    assert report.failed == 0, report.output
    assert report.skipped == []
    assert report.passed > 100
