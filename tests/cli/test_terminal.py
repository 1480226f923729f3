"""Progress, JSON and sizes as they are written."""

import io
import json
import pickle
import sys

import pytest
from rich.console import Console
from rich.table import Table

from exportable_cache.cli import terminal as module
from exportable_cache.cli.command import quiet_third_parties
from exportable_cache.cli.terminal import Terminal, simple_table
from exportable_cache.common.progress import bytes_text
from exportable_cache.errors import InputError, MissingDependencyError

from ..support.waiting import wait_until


@pytest.fixture
def streams(monkeypatch):
    """A terminal whose stdout and stderr are buffers; stderr looks like a screen if asked to."""

    def make(screen=False):
        out, err = io.StringIO(), io.StringIO()
        terminal = Terminal(out)
        terminal._err = Console(file=err, force_terminal=screen, width=100, highlight=False, markup=False)
        return terminal, out, err

    return make


def test_progress_off_a_terminal_is_a_line_per_stage(streams, monkeypatch):
    monkeypatch.setattr(module, "_SECONDS_OF_SILENCE", 0.0)
    terminal, out, err = streams()
    with terminal.progress("loading") as progress:
        for done in range(5):
            progress("tracing", done, 5)
        progress("verifying", 0, None)
    assert err.getvalue().splitlines()[-2:] == ["tracing ...", "verifying ..."]
    assert out.getvalue() == ""


def test_progress_off_a_terminal_says_how_far_a_long_stage_is(streams, monkeypatch):
    monkeypatch.setattr(module, "_SECONDS_OF_SILENCE", 0.0)
    monkeypatch.setattr(module, "_SECONDS_BETWEEN_LINES", 0.0)
    terminal, _, err = streams()
    with terminal.progress("loading") as progress:
        progress("tracing", 0, 2)
        progress("tracing", 1, 2)
    assert err.getvalue().splitlines()[-2:] == ["tracing ...", "tracing ... 1/2"]


@pytest.mark.parametrize("screen", [False, True])
def test_a_name_of_several_lines_is_one_of_progress(streams, monkeypatch, screen: bool):
    monkeypatch.setattr(module, "_SECONDS_OF_SILENCE", 0.0)
    terminal, _, err = streams(screen=screen)
    with terminal.progress("reading a\nb\x1b[2Jc \u00fc"):
        if screen:
            wait_until(err.getvalue, 60)
    assert "reading a\\nb\\x1b[2Jc \u00fc" in err.getvalue() and "\x1b[2J" not in err.getvalue()


def test_progress_of_a_short_command_prints_nothing(streams):
    terminal, out, err = streams()
    with terminal.progress("loading") as progress:
        progress("tracing", 0, 2)
    assert out.getvalue() == err.getvalue() == ""


def test_progress_speaks_up_although_the_first_stage_never_reports(streams, monkeypatch):
    monkeypatch.setattr(module, "_SECONDS_OF_SILENCE", 0.05)
    terminal, _, err = streams()
    with terminal.progress("loading"):
        wait_until(err.getvalue, 60)
    assert err.getvalue() == "loading ...\n"


def test_progress_on_a_terminal_shows_the_count_and_leaves_no_bar(streams):
    terminal, out, err = streams(screen=True)
    with terminal.progress("loading") as progress:
        progress("tracing", 3, 8)
        wait_until(lambda: "3/8" in err.getvalue(), 60)
    drawn = err.getvalue()
    assert "tracing" in drawn and "3/8" in drawn
    # The cursor is shown again, and the line erased.
    assert drawn.endswith("\x1b[2K") and "\x1b[?25h" in drawn
    assert out.getvalue() == ""


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_what_libraries_say_while_a_bar_is_drawn_appears_but_for_chatter(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    with quiet_third_parties():
        terminal = Terminal(io.StringIO())
        with terminal.progress("loading"):
            print("[cpuinfo_utils.cpp:71] Reading file x", file=sys.stderr)
            print("a real problem", file=sys.stderr)
        terminal.note("done")
    assert "loading" in screen.getvalue() and "done" in screen.getvalue()
    assert "a real problem" in screen.getvalue()
    assert "cpuinfo" not in screen.getvalue()
    assert sys.stderr is screen


def test_json_is_one_document_with_null_for_what_json_has_no_word_for(streams):
    terminal, out, _ = streams()
    terminal.json({"a": float("nan"), "b": [float("inf"), 1.5, (2,)], "c": "ä"})
    assert json.loads(out.getvalue()) == {"a": None, "b": [None, 1.5, [2]], "c": "ä"}


def test_tables_and_lines_are_never_cut(streams):
    terminal, out, _ = streams()
    table = Table(box=None)
    table.add_column("a", no_wrap=True)
    table.add_column("b", no_wrap=True)
    table.add_row("x" * 200, "y" * 200)
    terminal.print(table)
    terminal.print("z" * 400)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert lines[1].split() == ["x" * 200, "y" * 200]
    assert lines[2] == "z" * 400


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "unknown"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (3 << 30, "3.0 GiB"),
        (5 << 50, "5120.0 TiB"),
    ],
)
def test_bytes_text(count, text):
    assert bytes_text(count) == text


STRANGE = "a\x1b]52;c;eA==\x07b\x9b2Jc\u202ed\u2028e"
SPELLED = r"a\x1b]52;c;eA==\x07b\x9b2Jc\u202ed\u2028e"


def test_a_strangers_words_are_spelled_wherever_they_are_shown(streams):
    terminal, out, err = streams()
    terminal.print(STRANGE)
    terminal.note(STRANGE)
    terminal.error(STRANGE)
    terminal.error(str(InputError(f"{STRANGE} is wrong")))
    table = simple_table("name")
    table.add_row(STRANGE + "\n")
    terminal.print(table)
    assert [line.rstrip() for line in out.getvalue().splitlines()] == [SPELLED, "name", SPELLED + r"\n"]
    assert err.getvalue().splitlines() == [SPELLED, SPELLED, f"{SPELLED} is wrong"]


def test_what_a_model_generates_does_not_reach_a_terminals_controls(streams, monkeypatch):
    """A file gets every byte; joiners of emoji and marks of direction are text."""
    terminal, out, _ = streams()
    emoji = "\U0001f468\u200d\U0001f469 \u05d0\u200f\n\t"
    terminal.generated(STRANGE + emoji)
    assert out.getvalue() == STRANGE + emoji
    monkeypatch.setattr(out, "isatty", lambda: True)
    out.truncate(0), out.seek(0)
    terminal.generated("a\x1b[2Jb\rc\u202ed" + emoji)
    assert out.getvalue() == r"a\x1b[2Jb\rc\u202ed" + emoji


def test_errors_spell_what_they_quote():
    error = MissingDependencyError("no \x1b[2J\u202e\nhere")
    assert str(error) == "no \\x1b[2J\\u202e\nhere" == str(pickle.loads(pickle.dumps(error)))
