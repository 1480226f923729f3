"""Rendering of chat templates, in the process of `templates.py`: it imports Jinja and nothing of this package.

The environment is that of transformers' `apply_chat_template`, which `tests/compat` compares it with.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


def handle(request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    """Render a template.

    Args:
        request: `variables` of the template, and `most`, the largest number of characters of its output.
        data: The template.
    """
    parts: list[str] = []
    count = 0
    for part in _compiled(data.decode("utf-8", "surrogatepass")).generate(**request["variables"]):
        count += len(part)
        if count > request["most"]:
            raise ValueError(f"it gives more than {request['most']} characters")
        parts.append(part)
    return {}, "".join(parts).encode("utf-8", "surrogatepass")


@lru_cache(8)
def _compiled(text: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Attributes
    )
    return environment.from_string(text)


class _Generation(Extension):
    """`{% generation %}`, which marks what the assistant says: its contents."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Return the nodes between the tag and its end, in a scope of their own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_contents"), [], [], body).set_lineno(line)

    def _contents(self, caller: Any) -> str:
        return caller()


class _Dict:
    """`dict` without the attributes of a class."""

    def __call__(self, *arguments: Any, **options: Any) -> dict[Any, Any]:
        return dict(*arguments, **options)

    def fromkeys(self, *arguments: Any, **options: Any) -> dict[Any, Any]:
        """Return what `dict.fromkeys` does."""
        return dict.fromkeys(*arguments, **options)


class _Attributes(Namespace):
    """`namespace` that takes no private names."""

    def __init__(*arguments: Any, **options: Any) -> None:
        self, *others = arguments
        attributes = dict(*others, **options)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the private attribute {name!r}")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
