"""Rendering of chat templates within limits, because a template is a program that comes with a tokenizer.

Jinja's sandbox, which transformers uses, denies access to files, modules and private names. It limits neither time nor
size, and one filter over a long value can take minutes. So a subprocess with limited memory renders templates, and is
killed at a deadline. It is kept, because starting it takes a tenth of a second.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..common.process.limited import LimitedProcess, WorkEnded, WorkFailed
from ..errors import InputError
from ..models.tokenizers.untrusted import check_cost

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from ..models.tokenizers.text import TextTokenizer

#: Limits of a rendering: seconds, bytes of memory including Python, and characters of output in addition to four times
#: those of the messages. The output is tokenised, which takes a second per million characters.
MOST_SECONDS = 10.0
MOST_MEMORY = 1 << 30
MOST_CHARACTERS = 1_000_000
_OF_MESSAGES = 4
_RENDERING = LimitedProcess("exportable_cache.generation.template_child", MOST_MEMORY, MOST_MEMORY)
#: Names under which messages carry a model's reasoning; the first is the one that templates read.
_REASONING = ("reasoning_content", "thinking", "reasoning")
#: A template that returns a given text, for processors, which always render one.
_RENDERED = "exportable_cache_rendered"
_GIVE_RENDERED = f"{{{{ {_RENDERED} }}}}"
#: Scalar classes and their converters. These give an enum's value, because `str()` would give its name.
_SCALARS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (str, str.__str__),
    (int, int.__int__),
    (float, float.__float__),
)


def render_chat(
    tokenizer: PreTrainedTokenizerBase | TextTokenizer,
    messages: Sequence[Mapping[str, Any]],
    template: str | Mapping[str, str] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Render the chat template over messages, up to where the assistant begins, as `apply_chat_template` does.

    Args:
        tokenizer: Its special tokens are variables of the template.
        messages: `[{"role": "user", "content": "hello"}]`. The template sees JSON: any other object is replaced by the
            name of its type.
        template: Another one than the tokenizer's, as processors have; of several by name the one called `default`, or
            `tool_use` with tools.
        tools: Tools that the template describes to the model: `[{"type": "function", "function": {"name": "add",
            "description": "...", "parameters": {...}}}]`.

    Returns:
        The text. The template has written its special tokens, so it is encoded with `add_special_tokens=False`.

    Raises:
        InputError: If there is no template, it refuses the messages, or it takes too much time or memory.
    """
    text = _chosen(tokenizer.chat_template if template is None else template, bool(tools))
    variables = {
        "messages": [_with_reasoning(_plain(_given(one))) for one in messages],
        "tools": _plain(tools) or None,
        "documents": None,
        "add_generation_prompt": True,
        **_plain(tokenizer.special_tokens_map),
    }
    characters = characters_of(variables["messages"]) + characters_of(variables["tools"])
    request = {"variables": variables, "most": MOST_CHARACTERS + _OF_MESSAGES * characters}
    try:
        _, rendered = _RENDERING.call(MOST_SECONDS, request, text.encode("utf-8", "surrogatepass"))
    except WorkEnded as error:
        raise InputError(
            f"the chat template exceeds a limit: {error}; correct it, or pass the prompt as text"
        ) from error
    except WorkFailed as error:  # templates may raise any error
        raise InputError(
            f"the chat template refuses the messages: {str(error)[:300]}; change them, or pass text instead"
        ) from error
    except (RecursionError, ValueError) as error:
        raise InputError(f"messages must be JSON values ({error}); pass text, numbers, lists and mappings") from error
    return rendered.decode("utf-8", "surrogatepass")


def apply_chat_template(
    processor: ProcessorMixin,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    **options: Any,
) -> Any:
    """Do what a processor's `apply_chat_template` does, with the template rendered by `render_chat`.

    Args:
        processor: It reads images and audio from the messages, and puts their tokens into the text.
        messages: Of one conversation.
        tools: See `render_chat`.
        options: Of the processor's method.

    Raises:
        InputError: See `render_chat`.
    """
    rendered = render_chat(processor.tokenizer, messages, processor.chat_template, tools)
    check_cost(processor.tokenizer, rendered)
    # Typed loosely, because transformers annotates messages as plain text and knows no variables of a template.
    conversation: list[Any] = list(messages)
    variables: dict[str, Any] = {_RENDERED: rendered}
    return processor.apply_chat_template(
        conversation, chat_template=_GIVE_RENDERED, add_generation_prompt=True, **variables, **options
    )


def _given(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a message that have a value, because many templates write "None" for others.

    A message with tool calls keeps a content of None, because templates look for it.
    """
    calls = message.get("tool_calls")
    return {key: value for key, value in message.items() if value is not None or (key == "content" and calls)}


def _chosen(template: Any, has_tools: bool = False) -> str:
    if isinstance(template, Mapping) and has_tools and "tool_use" in template:
        template = template["tool_use"]
    if isinstance(template, Mapping):
        if "default" not in template:
            raise InputError(
                f"the chat templates must have one named default, got {', '.join(sorted(template)) or 'none'}; name one"
            )
        template = template["default"]
    if not isinstance(template, str):
        raise InputError(
            f"the chat template must be text, got {type(template).__name__}; correct the tokenizer's files"
        )
    return template


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning under all names that templates read, as transformers does."""
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def characters_of(value: Any) -> int:
    """Return the number of characters of all texts in a value."""
    if isinstance(value, str):
        return len(value)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(characters_of, parts))


def _plain(value: Any) -> Any:
    """Return a value as JSON has it. Images and arrays are replaced by a name, which templates never look into."""
    if value is None or isinstance(value, bool):
        return value
    for kind, convert in _SCALARS:
        if isinstance(value, kind):
            return convert(value)
    # Only looked up, because a process without numpy has none of its numbers.
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return _plain(value.item())
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):
        return _plain(value.model_dump())
    return f"<{type(value).__name__}>"
