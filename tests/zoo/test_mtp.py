"""The guide's table of model types with MTP modules is that of transformers."""

from __future__ import annotations

import pytest

from .mtp_table import in_guide, outcome, rows, with_modules


@pytest.mark.full
def test_the_table_of_the_guide_is_that_of_transformers() -> None:
    found = {name: outcome(one) for name, one in with_modules().items()}
    assert "wrong" not in found.values()
    assert rows(found) == in_guide()
