"""Chat templates reduced to the texts between turns, for runners without a template engine.

Most templates write the same text around every turn, independent of earlier turns. A few strings describe such a
template, and a runner feeds only the new turn of a conversation. They are found by rendering the template, and checked
against it over several conversations. Templates that do more are not recorded, such as those that drop earlier
reasoning or put the system message into the last question.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .templates import render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
