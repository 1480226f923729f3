"""The language lint over the whole project finds nothing, and finds what it is for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import language


# `make check` runs the same as a program.
@pytest.mark.full
def test_the_project_is_written_in_plain_words() -> None:
    assert [str(one) for file in language.checked_files() for one in language.findings_of(file)] == []


@pytest.mark.parametrize(
    ("source", "finding"),
    [
        ('"""Whether rows are equal."""\n', "begins with 'whether rows are'"),
        ('"""Of the second row."""\n', "begins with 'of the second'"),
        ('def f():\n    """The rows of a batch."""\n', "a function's docstring begins with 'the rows of'"),
        ('"""Read rows.\n\nThe rest lies behind them.\n"""\n', "'behind': write after"),
        ("x = 1  # as it is\n", "'as it is': write"),
        ('raise ValueError("rows is no list of rows")\n', "'is no ': write is not a valid"),
        ('print("pass pictures or text instead")\n', "'pictures': write image"),
    ],
)
def test_each_rule_finds_what_it_forbids(source: str, finding: str) -> None:
    assert [one.message for one in language.python_findings("x.py", source) if finding in one.message]


@pytest.mark.parametrize(
    "source",
    [
        '"""Return the rows of a batch."""\n',
        'class Rows:\n    @property\n    def size(self):\n        """The number of rows."""\n',
        "# There is no limit, and a step in place is no longer needed.\n",
        '"""Call `whatever` or `behind` of the model."""\n',
        'x = "pictures"\n',
    ],
)
def test_the_field_s_words_pass(source: str) -> None:
    assert list(language.python_findings("x.py", source)) == []


def test_pages_are_read_without_their_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# Images\n\n```python\nbehind = 1\n```\n\nOne lies behind\nthe other.\n")
    assert [str(one) for one in language.findings_of(page)] == ["page.md:7: 'behind': write after"]
