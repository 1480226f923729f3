"""What the README shows is what happens."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_nothing_is_left_to_fill_in() -> None:
    assert not re.findall(r"<<\w+>>|TODO|TBD", README)


def test_the_python_example_prints_what_it_says(tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("executorch", reason="the executorch extra is not installed")
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    expected = re.search(r'# -> "(.*)"', code).group(1)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == expected + "\n"
