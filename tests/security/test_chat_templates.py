"""Chat templates of somebody who means harm: no files, no modules, no end without an end, no flood."""

from __future__ import annotations

import re
import time

import pytest

from exportable_cache.errors import InputError
from exportable_cache.generation import templates
from exportable_cache.generation.templates import render_chat
from exportable_cache.generation.text import encode_prompt

from ..decoding.byte_tokenizer import byte_tokenizer

MESSAGES = [{"role": "user", "content": "hello"}]


def _refused(template: str) -> str:
    tokenizer = byte_tokenizer(chat=True)
    tokenizer.chat_template = template
    start = time.monotonic()
    with pytest.raises(InputError, match="chat template") as caught:
        encode_prompt(tokenizer, MESSAGES)
    assert time.monotonic() - start < 8
    return str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set n = namespace(l=[1]) %}{% for i in range(90) %}{% set n.l = [n.l, n.l] %}{% endfor %}{{ n.l|string }}",
        "{{ ('a.b ' * 2000000)|urlize }}",
        "{{ ('a' * 5000000)|wordwrap(1) }}",
        "{{ (range(99999)|list * 90)|sort|length }}",
        "{{ ([[0] * 9999] * 9999)|sum(start=[])|length }}",
        "{% set n = namespace(x=3) %}{% for a in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
        "{{ 9 ** (9 ** (9 ** 9)) }}",
        "{% generation %}{{ ('%}', 9 ** (9 ** (9 ** 9))) }}{% endgeneration %}",
    ],
    ids=["loop", "doubled list", "links", "lines", "sort", "sum", "squaring", "power", "power in a generation"],
)
def test_one_that_takes_too_long_is_ended_also_amid_one_operation(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "MOST_SECONDS", 0.3)
    assert re.search("longer than 0.3 s|out of memory", _refused(template))
    test_an_ordinary_one_renders_with_keyword_arguments()


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        # Ended by the same limit of memory as the next one, which asks for all of it at once.
        pytest.param(
            "{% set n = namespace(x='xxxxxxxxxx') %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
            marks=pytest.mark.full,
        ),
        "{{ [[0] * 9999] * 99999 | list }}{{ range(99999) | list * 9999 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
    ids=[
        "output",
        "doubling",
        "memory",
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


def test_what_a_template_sees_is_what_transformers_shows_it() -> None:
    tokenizer = byte_tokenizer(chat=True)
    tokenizer.chat_template = (
        "{%- for one in messages %}{% generation %}{{ one | tojson }}{% endgeneration %}\n"
        "   {%- if one.tool_calls is not defined %}{{ one.content | trim }}{% endif %}\n"
        "{% if loop.last %}{% break %}{% endif %}{% endfor %}"
        "{% set n = namespace(a=1) %}{% set n.a = n.a + 1 %}{{ n.a }}{{ dict(b=2) | tojson(indent=2) }}"
        "{{ tools is none }}{{ add_generation_prompt }}{{ eos_token }}{{ strftime_now('%Y') }}"
    )
    said = [
        {"role": "system", "content": "Grüße 🙂 <b>"},
        {"role": "user", "content": [{"type": "image", "image": object()}, {"type": "text", "text": "x"}], "n": None},
        {"role": "assistant", "content": "y", "reasoning": "z", "score": 0.5, "ok": True},
    ]
    assert render_chat(tokenizer, said) == tokenizer.apply_chat_template(
        said, tokenize=False, add_generation_prompt=True
    )


def test_of_several_templates_the_default_is_taken() -> None:
    tokenizer = byte_tokenizer(chat=True)
    tokenizer.chat_template = {"tool_use": "t", "default": "d"}
    assert render_chat(tokenizer, MESSAGES) == "d"
    tokenizer.chat_template = {"tool_use": "t"}
    with pytest.raises(InputError, match="must have one named default, got tool_use; name one"):
        render_chat(tokenizer, MESSAGES)


def test_half_a_character_amid_a_message_is_refused() -> None:
    tokenizer = byte_tokenizer(chat=True)
    tokenizer.chat_template = "{{ messages[0].content[0].text }}"
    with pytest.raises(InputError, match="must be UTF-8"):
        encode_prompt(tokenizer, [{"role": "user", "content": [{"type": "text", "text": "\ud83d"}]}])


def test_a_prompt_that_is_no_utf8_is_refused() -> None:
    with pytest.raises(InputError, match=r"must be UTF-8, got '\\udcff' at character 2"):
        encode_prompt(byte_tokenizer(), "ab\udcff")
