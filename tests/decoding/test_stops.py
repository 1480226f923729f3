"""Stop strings never leak, whatever pieces a text comes in, and see special tokens."""

from __future__ import annotations

import random
import time

import pytest

from exportable_cache.decoding import StopStrings
from exportable_cache.generation.text import stream_text

from .byte_tokenizer import END, byte_tokenizer


def brute(text: str, strings: list[str]) -> str:
    """Text up to the string that is complete first, and of those that end there the longest."""
    for end in range(1, len(text) + 1):
        found = [len(string) for string in strings if text[:end].endswith(string)]
        if found:
            return text[: end - max(found)]
    return text


def test_stop_string_is_cut_off_wherever_it_is_split() -> None:
    text, stop = "first line\n\nUser: second", "\n\nUser:"
    for first in range(len(text)):
        for second in range(first, len(text)):
            stops = StopStrings([stop])
            given = ""
            for piece in (text[:first], text[first:second], text[second:]):
                if not stops.stopped:
                    given += stops.push(piece)
                assert "first line".startswith(given)
            assert stops.stopped
            assert given == "first line"


def test_false_start_is_given_back() -> None:
    stops = StopStrings(["abcabd"])
    pieces = [stops.push(char) for char in "xabcabcaby"]
    # "abcab" is held; the second "c" shows that only its last "abc" can still begin the string.
    assert pieces == ["x", "", "", "", "", "", "abc", "", "", "abcaby"]
    assert not stops.stopped
    assert stops.finish() == ""


def test_held_text_comes_with_finish() -> None:
    stops = StopStrings(["END"])
    assert [stops.push("the E"), stops.push("N"), stops.finish()] == ["the ", "", "EN"]


def test_first_of_several_strings_ends() -> None:
    stops = StopStrings(["zz", "b", "abc"])
    assert stops.push("xxabczz") == "xx"
    assert stops.stopped


def test_without_strings_all_passes() -> None:
    stops = StopStrings([])
    assert stops.push("anything") == "anything"
    assert not stops.stopped


@pytest.mark.parametrize("seed", range(5))
def test_any_strings_end_any_text_as_a_search_does(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(200):
        strings = ["".join(draw.choices("ab", k=draw.randint(1, 4))) for _ in range(draw.randint(1, 4))]
        text = "".join(draw.choices("abc", k=12))
        stops, given = StopStrings(strings), ""
        for char in text:
            given += stops.push(char)
            if stops.stopped:
                break
        assert given + stops.finish() == brute(text, strings)


def test_many_long_strings_cost_a_token_little() -> None:
    stops = StopStrings(["a" * 2000 + str(index) for index in range(20)])
    start = time.perf_counter()
    given = sum(len(stops.push("aaaa")) for _ in range(5000))
    assert time.perf_counter() - start < 2
    assert given == 20000 - 2000 and stops.finish() == "a" * 2000


@pytest.mark.parametrize(
    ("strings", "text"),
    [
        ([END], "ab"),
        ([f"b{END}"], "a"),
        ([f"{END}c"], "ab"),
        ([f"b{END}c{END}"], "a"),
        # Without special tokens the text has it, and would give it out.
        (["bc"], "a"),
        (["d>x", f"{END}cd"], "ab"),
        (["x"], "abcd"),
    ],
)
def test_special_tokens_are_seen_and_not_given_out(strings: list[str], text: str) -> None:
    tokenizer = byte_tokenizer()
    tokens = tokenizer(f"ab{END}c{END}d")["input_ids"]
    if END in strings[-1] and strings[-1].endswith("cd"):
        tokens = tokenizer(f"ab{END}cd")["input_ids"]
    assert "".join(stream_text(tokens, tokenizer, stop_strings=strings)) == text


def test_hidden_text_holds_back_what_may_begin_a_string() -> None:
    stops = StopStrings(["b<x>c"])
    assert [stops.push("ab"), stops.hide("<x>"), stops.push("d")] == ["a", "", "bd"]
    assert [stops.push("b"), stops.hide("<x>"), stops.push("c")] == ["", "", ""]
    assert stops.stopped


def test_text_that_may_still_change_stops_at_once() -> None:
    stops = StopStrings(["ab"])
    assert [stops.push("xa"), stops.look_ahead("c"), stops.push("c")] == ["x", "", "ac"]
    assert [stops.push("ya"), stops.look_ahead("b")] == ["y", ""] and stops.stopped
