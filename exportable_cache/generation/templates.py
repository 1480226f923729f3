"""Templates that come with a checkpoint: of chats, rendered or reduced to texts between turns, and of responses.

A template is a program that comes with a tokenizer. Jinja's sandbox, which transformers uses, denies access to files,
modules and private names. It limits neither time nor size, and one filter over a long value can take minutes. So a
subprocess with limited memory renders templates, and is killed at a deadline. It is kept, because starting it takes a
tenth of a second. A response template has regular expressions, which may take hours, so a second one parses responses.

Most chat templates write the same text around every turn, independent of earlier turns. A few strings describe such a
template (`ChatTurns`), and a runner without a template engine feeds only the new turn of a conversation. They are found
by rendering the template, and checked against it over several conversations. Templates that do more are not recorded,
such as those that drop earlier reasoning or put the system message into the last question.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..common.process.limited import LimitedProcess, WorkEnded, WorkFailed
from ..errors import InputError, first_line
from ..models.tokenizers.text import check_cost
from .tool_calls import Part

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


Messages = Sequence[Mapping[str, str]]

#: Placeholders for message contents, which no template contains.
_SYSTEM, _QUESTION, _ANSWER, _NEXT = ("zqsystemqz", "zqfirstqz", "zqanswerqz", "zqsecondqz")
#: Message contents that templates may treat specially: newlines, markup, code, non-ASCII characters.
_SAID = ("one line", "two\nlines, and 'quotes' \"here\"", "<b>{{ x }}</b> [1] & {% y %} \\n", "Grüße, 世界 🙂", "a")


@dataclass(frozen=True)
class ChatTurns:
    """The texts that a chat template writes around message contents.

    Attributes:
        opening: Text before the first question if there is no system message.
        system: Text before the system message, and between it and the first question; None if the template refuses one.
        answer: Text after the last question, where the model continues.
        answered: Text between a question and its answer: `answer`, plus white space that models generate themselves.
        question: Text between an answer and the next question.
        trims: True if white space around contents is removed.
    """

    opening: str
    system: tuple[str, str] | None
    answer: str
    answered: str
    question: str
    trims: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for a manifest."""
        fields = asdict(self)
        return {**fields, "system": None if self.system is None else list(self.system)}

    def render(self, messages: Messages) -> str:
        """Return the text of a conversation, up to the start of the assistant's message.

        Args:
            messages: An optional system message, then alternating questions and answers, ending with a question.
        """
        said = [one["content"].strip() if self.trims else one["content"] for one in messages]
        text = self.opening
        if messages[0]["role"] == "system":
            assert self.system is not None
            text = self.system[0] + said.pop(0) + self.system[1]
        for index, content in enumerate(said):
            is_last = index == len(said) - 1
            text += content + (self.question if index % 2 else self.answer if is_last else self.answered)
        return text


def chat_turns(tokenizer: PreTrainedTokenizerBase) -> ChatTurns | None:
    """Return the turns of a tokenizer's chat template; None if there is no template or turns do not describe it.

    A template that writes the date gives today's.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str):
        return None

    def rendered(messages: Messages) -> str:
        return render_chat(tokenizer, messages)

    try:
        found = _found(rendered)
        if found is not None and all(found.render(one) == rendered(one) for one in _conversations(found)):
            return found
    except InputError:  # the template refuses an ordinary conversation
        pass
    return None


def _found(rendered: Any) -> ChatTurns | None:
    """Derive turns from a few renderings, without checking them."""
    plain = [_user(_QUESTION), _assistant(_ANSWER), _user(_NEXT)]
    first = _parts(rendered(plain[:1]), _QUESTION)
    second = _parts(rendered(plain), _QUESTION, _ANSWER, _NEXT)
    if first is None or second is None:
        return None
    try:
        with_system = _parts(rendered([{"role": "system", "content": _SYSTEM}, *plain[:1]]), _SYSTEM, _QUESTION)
    except InputError:  # many templates refuse the role
        with_system = None
    spaced = rendered([_user(f" \n{_QUESTION}\n ")])
    trims = f" \n{_QUESTION}" not in spaced
    system = None if with_system is None else (with_system[0], with_system[1])
    answer, answered = first[1], second[1]
    if not answered.startswith(answer) or answered[len(answer) :].strip():
        return None
    return ChatTurns(first[0], system, answer, answered, second[2], trims)


def _parts(text: str, *marks: str) -> list[str] | None:
    """Split a text at marks; None unless each occurs once, in this order."""
    if any(text.count(mark) != 1 for mark in marks):
        return None
    parts = []
    for mark in marks:
        before, found, text = text.partition(mark)
        if not found:
            return None
        parts.append(before)
    return [*parts, text]


def _conversations(turns: ChatTurns) -> Iterator[list[dict[str, str]]]:
    """Yield conversations of one to three questions, with and without a system message, over all contents."""
    for shift, text in enumerate(_SAID):
        said = [*_SAID[shift:], *_SAID[:shift]]
        for questions in (1, 2, 3):
            talk = [(_assistant if index % 2 else _user)(said[index]) for index in range(2 * questions - 1)]
            yield talk
            if turns.system is not None:
                yield [{"role": "system", "content": f"be {text}"}, *talk]
    yield [_user("  spaces around\n"), _assistant("\n  here, too "), _user(" and here ")]


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


#: Limits of the subprocess: seconds for one piece of text, seconds for the import, address space, bytes of a reply.
_SECONDS, _START_SECONDS = 1.0, 30.0
_MEMORY, _MOST_BYTES = 1 << 30, 1 << 24
_PARSING = LimitedProcess("exportable_cache.generation.response_child", _MEMORY, _MOST_BYTES)
#: Names of fields that hold reasoning.


class TemplateParser:
    """Splits a response into parts by a response template; see `ResponseParser` for the methods.

    Args:
        template: The checkpoint's template.
        prompt: Text of the prompt, whose end may begin a part of the response.
        tools: The tools, as chat templates take them; empty to recognize no calls.

    Raises:
        InputError: If the template is not valid.
    """

    def __init__(self, template: Mapping[str, Any], prompt: str, tools: Sequence[Mapping[str, Any]]) -> None:
        self._names = {tool["function"]["name"] for tool in tools}
        self._name, self._calls = uuid.uuid4().hex, 0
        # The text of the current region, for a call that is not valid.
        self._raw = self._space = ""
        self._strips = True
        self._call("begin", prompt, _START_SECONDS, template=template, tools=list(tools))
        self._starts = _PARSING.starts

    def feed(self, text: str) -> list[Part]:
        """Return the parts that are known with a piece of text."""
        return [*self._parts(self._call("feed", text))] if text else []

    def finish(self) -> list[Part]:
        """Return the remaining parts, because the response has ended."""
        try:
            return [*self._parts(self._call("finish"))]
        except InputError:
            # The response ends within a call, or without a part that the template demands.
            return [Part("content", self._raw)] if self._raw else []

    def _call(self, do: str, text: str = "", seconds: float = _SECONDS, **more: Any) -> list[dict[str, Any]]:
        if do != "begin" and (_PARSING.starts != self._starts or not _PARSING.is_alive):
            raise InputError("the parser of this response was ended by a limit; send the request again")
        request = {"do": do, "name": self._name, **more}
        try:
            _, found = _PARSING.call(seconds, request, text.encode("utf-8", "surrogatepass"))
        except WorkFailed as error:
            raise InputError(
                f"the checkpoint's response_template cannot parse the response: {first_line(error)[:300]}; correct it, "
                "or remove it from tokenizer_config.json"
            ) from error
        events: list[dict[str, Any]] = json.loads(found)
        return events

    def _parts(self, events: Sequence[Mapping[str, Any]]) -> Iterator[Part]:
        for event in events:
            name = event["field"]
            if event["type"] == "region_open":
                self._raw, self._space, self._strips = "", "", True
            elif event["type"] == "region_chunk" and name != "tool_calls":
                kind = "reasoning" if name in _REASONING else "content"
                # Space around a region belongs to the format.
                text = self._space + event["text"]
                text = text.lstrip() if self._strips else text
                kept = text.rstrip()
                self._space, self._strips = text[len(kept) :], self._strips and not kept
                if kept and name in (*_REASONING, "content"):
                    yield Part(kind, kept)  # type: ignore[arg-type]
            elif event["type"] == "region_chunk":
                self._raw += event["text"]
            elif name == "tool_calls":
                yield from self._called(event["value"])
                self._raw = ""

    def _called(self, value: Any) -> Iterator[Part]:
        found = value if isinstance(value, list) else [value]
        calls = [one.get("function", one) for one in found if isinstance(one, dict)]
        names = [one.get("name") for one in calls if isinstance(one, dict)]
        if len(names) < len(found) or not all(isinstance(name, str) and name in self._names for name in names):
            yield Part("content", self._raw)
            return
        for one in calls:
            arguments = one.get("arguments") or {}
            yield Part("name", one["name"], self._calls)
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            yield Part("arguments", text, self._calls)
            self._calls += 1
