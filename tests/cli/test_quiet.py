"""What is dropped from stderr, and that nothing else is."""

import io
import sys

import pytest

from exportable_cache.common.process.quiet import known_lines_hidden

CHATTER = "[cpuinfo_utils.cpp:71] Reading file /sys/devices/soc0/image_version\n"


def passed(monkeypatch, *pieces):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with known_lines_hidden():
        for piece in pieces:
            assert sys.stderr.write(piece) == len(piece)
        sys.stderr.flush()
    return stream.getvalue()


@pytest.mark.parametrize(
    "pieces",
    [
        [CHATTER],
        ["[", "cpuinfo_utils.cpp", ":71", "] ", "Reading file ", "/sys/devices/soc0/image_version", "\n"],
        list(CHATTER),
    ],
)
def test_known_lines_are_dropped_however_they_come(monkeypatch, pieces):
    assert passed(monkeypatch, *pieces) == ""
    assert passed(monkeypatch, "before\n", *pieces, "after\n") == "before\nafter\n"


@pytest.mark.parametrize(
    "text",
    [
        "error: x\n",
        "no newline",
        "[",
        "[cpuinfo_utils.cpp:71] Cannot continue\n",
        "[cpuinfo_utils.cpp:71] Reading file x",
        "[other.cpp:71] Reading file x\n",
        "note: " + CHATTER,
        "\n\n",
        "a\rb\r\n",
    ],
)
def test_everything_else_passes(monkeypatch, text):
    assert passed(monkeypatch, text) == text
    assert passed(monkeypatch, *text) == text


def test_text_is_not_delayed(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with known_lines_hidden():
        sys.stderr.write("working ")
        assert stream.getvalue() == "working "


def test_stderr_comes_back_after_an_exception(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with pytest.raises(ValueError), known_lines_hidden():
        sys.stderr.write("[cpu")
        raise ValueError
    assert sys.stderr is stream and stream.getvalue() == "[cpu"
