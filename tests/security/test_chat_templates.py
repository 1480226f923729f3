"""Chat templates of somebody who means harm: no files, no modules, no end without an end, no flood."""

from __future__ import annotations

import sys
import time

import pytest

from exportable_cache.errors import InputError
from exportable_cache.generation import templates
from exportable_cache.generation.text import encode_prompt

from ..decoding.byte_tokenizer import byte_tokenizer

MESSAGES = [{"role": "user", "content": "hello"}]


def _refused(template: str) -> str:
    tokenizer = byte_tokenizer(chat=True)
    tokenizer.chat_template = template
    before, start = sys.gettrace(), time.monotonic()
    with pytest.raises(InputError, match="chat template") as caught:
        encode_prompt(tokenizer, MESSAGES)
    assert sys.gettrace() is before
    assert time.monotonic() - start < 30
    return str(caught.value)


_NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_loops_without_end_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MOST_LINES", 100_000)
    assert f"more than {templates.MOST_LINES} lines" in _refused(_NESTED)


def test_and_so_are_slow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MOST_SECONDS", 0.2)
    assert "longer than" in _refused(_NESTED)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% set n = namespace(x='xxxxxxxxxx') %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x=3) %}{% for a in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
        "{{ 9 ** 9 ** 9 ** 9 }}",
        "{{ messages[0].content ** 3 }}",
        "{{ '}}' ~ 9 ** 9 ** 9 ** 9 }}",
        "{% generation %}{{ ('%}', 9 ** 9 ** 9 ** 9) }}{% endgeneration %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
    ids=[
        "output",
        "doubling",
        "squaring",
        "power",
        "power of a value",
        "power after braces",
        "power in a generation",
        "recursion",
    ],
)
def test_floods_are_stopped(template: str) -> None:
    _refused(template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ raise_exception('no') }}",
        "{{ cycler.__init__.__globals__.os.getcwd() }}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ unclosed",
    ],
)
def test_what_the_sandbox_refuses_is_one_sentence(template: str) -> None:
    assert "\n" not in _refused(template)


def test_an_ordinary_one_renders_with_keyword_arguments() -> None:
    tokenizer = byte_tokenizer(chat=True)
    tokenizer.chat_template = (
        "{% macro m(role, text) %}{{ role }}: {{ text }}\n{% endmacro %}"
        "{% for one in messages %}{{ m(**{'role': one.role, 'text': one.content}) }}{% endfor %}"
    )
    ids = encode_prompt(tokenizer, MESSAGES * 1000)
    assert tokenizer.decode(ids[0][:12]) == "user: hello\n"


def test_a_prompt_that_is_no_utf8_is_refused() -> None:
    with pytest.raises(InputError, match=r"no UTF-8: character 2 is '\\udcff'"):
        encode_prompt(byte_tokenizer(), "ab\udcff")
