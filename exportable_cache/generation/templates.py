"""Limits on a chat template, which is a small program that comes with a tokenizer.

transformers runs it in Jinja's sandbox: it reaches no files, no modules and no private names. A sandbox bounds neither
time nor size, so a template could still keep the process busy for ever, or fill its memory. While one runs, each of its
lines and each piece of its output is counted, in this thread only.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ..errors import InputError, first_line

#: What a template may take: lines of its compiled form that are run, a few for each message, and seconds.
MOST_LINES = 1_000_000
MOST_SECONDS = 10.0
#: Characters of output, and items or characters of one value.
MOST_CHARACTERS = 10_000_000
#: Of an int: arithmetic on longer ones takes time that nothing can interrupt.
_MOST_BITS = 4096
#: The file name of Jinja's compiled templates.
_TEMPLATE = "<template>"


class TemplateLimit(Exception):
    """A chat template takes too much."""


@contextmanager
def limited_template(template: Any) -> Iterator[None]:
    """A block that renders a chat template, stopped where it takes more than a template needs.

    Args:
        template: Its text, or several by name.

    Raises:
        InputError: If it exceeds a limit, or fails.
    """
    for text in template.values() if isinstance(template, dict) else [template]:
        if isinstance(text, str) and "**" in text and _has_power(text):
            raise InputError("the chat template computes a power (**), which none needs and which may take for ever")
    before = sys.gettrace()
    sys.settrace(_Watch().trace)
    try:
        yield
    except InputError:
        raise
    except MemoryError as error:
        raise InputError("the chat template ran out of memory; correct it, or pass the prompt as text") from error
    except Exception as error:  # templates raise what they like
        raise InputError(
            f"the chat template refuses the messages: {first_line(error)[:300]}; change them, or pass text instead"
        ) from error
    finally:
        sys.settrace(before)


def _has_power(text: str) -> bool:
    """Whether a template has a power. It is parsed and not compiled, since the compiler computes constant ones."""
    from jinja2 import Environment, TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols

    class Generation(Extension):
        """`{% generation %}`, which transformers adds: its contents."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    try:
        tree = Environment(extensions=[loopcontrols, Generation], autoescape=False).parse(text)
    except (TemplateError, RecursionError) as error:
        raise InputError(f"the chat template cannot be read: {first_line(error)[:300]}; correct it") from error
    return tree.find(nodes.Pow) is not None


class _Watch:
    """Counts the lines of a template and what it gives out."""

    def __init__(self) -> None:
        self.lines = self.characters = 0
        self.end = time.monotonic() + MOST_SECONDS
        # Imported where chats are: opening a bundle does not need it.
        from jinja2.utils import Namespace

        self.namespace: type = Namespace

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self.trace_template if frame.f_code.co_filename == _TEMPLATE else None

    def trace_template(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines > MOST_LINES:
                raise TemplateLimit(f"it runs more than {MOST_LINES} lines")
            if time.monotonic() > self.end:
                raise TemplateLimit(f"it runs longer than {MOST_SECONDS:.0f} s")
            for value in frame.f_locals.values():
                self._check_size(value)
        elif event == "return" and isinstance(argument, str):
            # A piece of output, which a template yields.
            self.characters += len(argument)
            if self.characters > MOST_CHARACTERS:
                raise TemplateLimit(f"it gives more than {MOST_CHARACTERS} characters")
        return self.trace_template

    def _check_size(self, value: Any) -> None:
        if isinstance(value, int):
            if value.bit_length() > _MOST_BITS:
                raise TemplateLimit(f"it computes a number of more than {_MOST_BITS} bits")
        elif isinstance(value, (str, list, tuple, dict)):
            if len(value) > MOST_CHARACTERS:
                raise TemplateLimit(f"it makes a value of {len(value)} items or characters")
        elif isinstance(value, self.namespace):
            # What a template sets on it; its own `__getattribute__` looks there, too.
            for attribute in object.__getattribute__(value, "_Namespace__attrs").values():
                if not isinstance(attribute, self.namespace):
                    self._check_size(attribute)
