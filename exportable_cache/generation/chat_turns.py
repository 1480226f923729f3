"""A chat template as the texts between its turns, for runners that have no engine for templates.

Most templates write the same around every turn: what stands between an answer and the next question does not depend on
what was said before. Then a few texts say all of it, and a conversation that goes on is fed its new turn alone. Which
they are is found by rendering, and compared with the template over conversations; of a template that does more (one
that leaves out earlier reasoning, or puts the system message into the last question) nothing is recorded.
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

#: Stand for what is said: words that no template writes itself.
_SYSTEM, _QUESTION, _ANSWER, _NEXT = ("zqsystemqz", "zqfirstqz", "zqanswerqz", "zqsecondqz")
#: What people and models say, as far as templates treat it otherwise: lines, marks of markup and code, other letters.
_SAID = ("one line", "two\nlines, and 'quotes' \"here\"", "<b>{{ x }}</b> [1] & {% y %} \\n", "Grüße, 世界 🙂", "a")


@dataclass(frozen=True)
class ChatTurns:
    """The texts around what is said.

    Attributes:
        opening: In front of the first question, where there is no system message.
        system: In front of a system message, and between it and the first question; None where the template takes none.
        answer: Behind a question, where the model goes on.
        answered: Between a question and an answer that was given: `answer`, and white space if models begin with that.
        question: Between an answer and the next question.
        trims: Whether white space around what is said is left out.
    """

    opening: str
    system: tuple[str, str] | None
    answer: str
    answered: str
    question: str
    trims: bool

    def to_dict(self) -> dict[str, Any]:
        """As a manifest records it."""
        fields = asdict(self)
        return {**fields, "system": None if self.system is None else list(self.system)}

    def render(self, messages: Messages) -> str:
        """The text of a conversation, up to where the assistant begins.

        Args:
            messages: A system message, or none, then questions and answers in turn, a question last.
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
    """The turns of a tokenizer's chat template; None without one, and where turns alone do not make it up.

    What a template says of the day is that of now.
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
    except InputError:  # the template refuses what most take
        pass
    return None


def _found(rendered: Any) -> ChatTurns | None:
    """What can be read from a few renderings, to be compared with others."""
    plain = [_user(_QUESTION), _assistant(_ANSWER), _user(_NEXT)]
    first = _parts(rendered(plain[:1]), _QUESTION)
    second = _parts(rendered(plain), _QUESTION, _ANSWER, _NEXT)
    if first is None or second is None:
        return None
    try:
        told = _parts(rendered([{"role": "system", "content": _SYSTEM}, *plain[:1]]), _SYSTEM, _QUESTION)
    except InputError:  # many refuse the role
        told = None
    spaced = rendered([_user(f" \n{_QUESTION}\n ")])
    trims = f" \n{_QUESTION}" not in spaced
    system = None if told is None else (told[0], told[1])
    answer, answered = first[1], second[1]
    if not answered.startswith(answer) or answered[len(answer) :].strip():
        return None
    return ChatTurns(first[0], system, answer, answered, second[2], trims)


def _parts(text: str, *marks: str) -> list[str] | None:
    """What lies in front of, between and behind marks; None unless each is there once, in this order."""
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
    """Of one to three questions, with and without a system message, of all that people say."""
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
