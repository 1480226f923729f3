"""Tool calls and reasoning in generated text: one parser and one form for all formats of `tool_formats`.

The parser reads text piece by piece. It holds text back only while it may still become the beginning of a part other
than content, so content, reasoning and JSON arguments are passed on at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import regex

from ..errors import InputError
from .constraint import Constraint, exact_schema
from .tool_formats import DEFAULT, FORMATS, NONE, THOUGHTS, Format, Head, Tools, compiled

PartKind = Literal["content", "reasoning", "name", "arguments"]
#: Spaces in forced arguments, as models write them; llguidance would allow any number.
_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
#: Longest beginning of a part, in characters. It is matched again with each piece of text.
_LONGEST_HEAD = 1024
#: Parts that are not valid, after which a response has no further calls. Each is read to the end of the response.
_MOST_FAILURES = 32


class Part(NamedTuple):
    """A part of a response.

    Attributes:
        kind: "content" and "reasoning" are text, "name" begins a call, and "arguments" continues its JSON.
        text: Text, to be appended to the earlier text of its kind.
        call: Index of the call.
    """

    kind: PartKind
    text: str
    call: int = 0


@dataclass(frozen=True)
class Dialect:
    """A checkpoint's way to write tool calls and reasoning.

    Attributes:
        format: Format of calls.
        thoughts: Texts before and after reasoning.
        takes_tools: True if the chat template describes tools to the model.
        special: Ids of the special tokens that forms of calls contain, by name.
        template: The checkpoint's response template, which comes before `format` and `thoughts` to parse responses.
    """

    format: Format
    thoughts: tuple[tuple[str, str], ...] = ()
    takes_tools: bool = False
    special: Mapping[str, int] = field(default_factory=dict)
    template: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, tokenizer: Any) -> Dialect:
        """Return the dialect of a tokenizer, from its chat templates and its added tokens."""
        templates = getattr(tokenizer, "chat_template", None) or ""
        template = "\0".join(templates.values()) if isinstance(templates, Mapping) else str(templates)
        takes_tools = "tools" in template
        found = next((one for one in FORMATS if all(mark in template for mark in one.marks)), None)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        added = {} if backend is None else backend.get_added_tokens_decoder()
        names = {token.content for token in added.values()}
        thoughts = tuple(pair for pair in THOUGHTS if pair[0] in template or pair[0] in names)
        # llguidance takes other added tokens in angle brackets for special ones, too.
        special = {
            token.content: index
            for index, token in added.items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }
        response = getattr(tokenizer, "response_template", None)
        form = found or (DEFAULT if takes_tools else NONE)
        return cls(form, thoughts, takes_tools, special, response if isinstance(response, Mapping) else None)

    @property
    def tokens(self) -> tuple[str, ...]:
        """Special tokens that the parser needs to see in the text."""
        # Patterns escape some characters of tokens.
        template = json.dumps(self.template, ensure_ascii=False).replace("\\", "") if self.template else ""
        in_template = (token for token in self.special if token in template)
        return (*self.format.tokens, *(text for pair in self.thoughts for text in pair), *in_template)

    @property
    def is_plain(self) -> bool:
        """True if responses without tools are content alone."""
        return not self.thoughts and self.format.name != "harmony" and self.template is None

    def thinks(self, prompt: str) -> tuple[str, str] | None:
        """Return the texts around reasoning if a prompt ends within it."""
        end = prompt.rstrip()
        return next((pair for pair in self.thoughts if end.endswith(pair[0])), None)

    def form(
        self,
        tools: Tools,
        *,
        required: bool,
        parallel: bool = True,
        content: Constraint | None = None,
        thought: tuple[str, str] | None = None,
    ) -> Constraint:
        """Return a constraint for responses in which the arguments of every call match the tool's schema.

        Args:
            tools: Schema of each tool; empty for responses without calls.
            required: True if the response must be a call.
            parallel: True if there may be several calls.
            content: Constraint of content; None for any text.
            thought: Texts around reasoning if the response begins within it.

        Raises:
            InputError: If a schema is not valid.
        """
        trigger = "" if required or content is not None or not tools else self._trigger()
        rules = ["%llguidance {}", "TEXT: /(.|\\n)*/", "SPACE: /[ \\n]*/"]
        before = self._reasoning(rules, thought)
        options = [] if required else [self._content_form(rules, content)]
        if tools:
            calls = self._calls_form(rules, tools, parallel, trigger)
            if trigger:
                # A lazy rule ends at the first trigger, so that text cannot contain one.
                lazy = "" if trigger in self.special else "[lazy]"
                rules.append(f"until{lazy}: TEXT {self._literal(trigger)}")
            options.append(f"until {calls}" if trigger else calls)
        rules.append(f"start: {before} ({' | '.join(options)})")
        return Constraint("lark", "\n".join(rules))

    def _reasoning(self, rules: list[str], thought: tuple[str, str] | None) -> str:
        if self.format.name == "harmony":
            parts = "<|channel|>", "analysis", "<|message|>", "<|end|>", "<|start|>", "assistant"
            first, name, begin, end, start, role = map(self._literal, parts)
            rules.append(f"thought: {first} {name} {begin} {self._until(rules, '<|end|>')} {start} {role}")
            return "thought*"
        pair = thought or next(iter(self.thoughts), None)
        if pair is None:
            return ""
        begin = "" if thought else self._literal(pair[0])
        rules.append(f"thought: {begin} {self._until(rules, pair[1])} SPACE")
        return "thought" if thought else "thought?"

    def _until(self, rules: list[str], end: str) -> str:
        """Return a rule for text up to and with an end."""
        if end in self.special:
            return f"TEXT {self._literal(end)}"
        rules.append(f"thinking[lazy]: TEXT {json.dumps(end)}")
        return "thinking"

    def _content_form(self, rules: list[str], content: Constraint | None) -> str:
        before = ""
        if self.format.name == "harmony":
            before = " ".join(map(self._literal, ("<|channel|>", "final", "<|message|>"))) + " "
        if content is None:
            if self.format.name != "llama":
                return before + "TEXT"
            # Calls have no text before them.
            rules.append("OTHER: /([^{](.|\\n)*)?/")
            return "OTHER"
        if content.kind == "lark":
            raise InputError("a grammar must not be combined with tools or reasoning, got both; leave one out")
        if content.kind == "regex":
            # Slashes that are escaped already keep their backslash. An empty pattern would begin a comment.
            text = regex.sub(r"(\\.)|/", lambda found: found[1] or "\\/", content.text)
            return before + (f"/{text}/" if text else '""')
        return before + f"%json {exact_schema(content.text)}"

    def _calls_form(self, rules: list[str], tools: Tools, parallel: bool, trigger: str) -> str:
        """Return a rule for calls; of the first one, the text after `trigger`."""
        form = self.format
        for index, schema in enumerate(tools.values()):
            exact = exact_schema(json.dumps({"x-guidance": _SPACES, **schema}))
            rules.append(f"arguments_{index}: %json {exact}")
        cut = 0 if form.first else len(trigger)
        for rule, start in (("first", cut), ("call", 0)):
            calls = (
                f"{self._literal(form.begin.replace('NAME', name)[start:])} arguments_{index} {self._literal(form.end)}"
                for index, name in enumerate(tools)
            )
            rules.append(f"{rule}: {' | '.join(calls)}")
        more = "" if not parallel or form.between is None else f"({self._literal(form.between)} call)*"
        first = form.first[len(trigger) :] if form.first else ""
        return f"{self._literal(first)} first {more} {self._literal(form.last)}"

    def _trigger(self) -> str:
        """Return the text that begins the first call after content, or "" if calls have no content before them."""
        form = self.format
        if form.name in ("harmony", "llama"):
            return ""
        return next(text for text in form.opens if (form.first or form.begin).startswith(text))

    def _literal(self, text: str) -> str:
        """Return text in Lark, with special tokens by their ids."""
        names = [name for name in self.special if name in text]
        if not names:
            return json.dumps(text) if text else ""
        parts = regex.split("(" + "|".join(map(regex.escape, sorted(names, key=len, reverse=True))) + ")", text)
        shown = (f"<[{self.special[part]}]>" if part in self.special else json.dumps(part) for part in parts if part)
        return " ".join(shown)


class ResponseParser:
    """Splits a response into parts. The parts of a text do not depend on how it is cut into pieces.

    Text that only looks like a call is content: a call of a tool that is not known, or one that is not well-formed. If
    the response ends within JSON arguments that were passed on already, the call stays incomplete.

    Args:
        dialect: How the checkpoint writes calls and reasoning.
        tools: Schema of each tool; empty to recognize no calls.
        thought: Texts around reasoning if the response begins within it, see `Dialect.thinks`.
        most: The limit of calls; None for no limit.
    """

    def __init__(
        self,
        dialect: Dialect,
        tools: Tools | None = None,
        thought: tuple[str, str] | None = None,
        most: int | None = None,
    ) -> None:
        self._tools, self._most = tools or {}, most
        thoughts = tuple(
            Head(compiled(r"\s*" + regex.escape(begin)), "reasoning", "s", ends=(end,))
            for begin, end in dialect.thoughts
        )
        calls = bool(tools) or dialect.format.name == "harmony"
        self._heads = (*(dialect.format.heads if calls else ()), *thoughts)
        self._opens = dialect.format.opens if calls else ()
        self._text, self._calls, self._failures = "", 0, 0
        # Space that is content only if no other part follows it; space after other parts belongs to the format.
        self._space, self._strips = "", False
        self._head = Head(compiled(""), "content")
        # The text of the part's beginning, which is content if the part is not valid.
        self._opening, self._name, self._passed, self._where = "", "", 0, "s"
        self._scan = _JsonEnd()
        self._state: Callable[[bool], Iterator[Part | None]] = self._begin
        if thought is not None:
            self._enter(Head(compiled(""), "reasoning", ends=(thought[1],)))

    @property
    def calls(self) -> int:
        """Number of calls so far."""
        return self._calls

    def feed(self, text: str) -> list[Part]:
        """Return the parts that are known with a piece of text."""
        self._text += text
        return self._run(False)

    def finish(self) -> list[Part]:
        """Return the remaining parts, because the response has ended."""
        found = self._run(True)
        space, self._space = self._space, ""
        return [*found, Part("content", space)] if space else found

    def _run(self, final: bool) -> list[Part]:
        """Run states until one waits for more text. A state yields parts, and None if it has changed the state."""
        found: list[Part] = []
        moved = True
        while moved:
            moved = False
            for part in self._state(final):
                if part is None:
                    moved = True
                elif part.text:
                    if found and part.kind != "name" and (found[-1].kind, found[-1].call) == (part.kind, part.call):
                        part = Part(part.kind, found.pop().text + part.text, part.call)
                    found.append(part)
        return found

    def _content(self, text: str) -> Iterator[Part]:
        text = self._space + text
        if self._strips:
            text = text.lstrip()
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._strips = False
            yield Part("content", kept)

    def _other(self) -> None:
        """Note that a part other than content begins."""
        self._space, self._strips = "", True

    def _begin(self, final: bool) -> Iterator[Part | None]:
        """Recognize the part that begins at the text's start."""
        is_full = self._most is not None and self._calls >= self._most
        for head in self._heads:
            if self._where not in head.where or (is_full and head.kind in ("json", "value", "body")):
                continue
            match = head.pattern.match(self._text, 0, _LONGEST_HEAD, partial=not final)
            if match is None or (not match.partial and not self._is_known(head, match)):
                continue
            if match.partial and len(self._text) >= _LONGEST_HEAD:
                continue
            if match.partial:
                return
            name = match["name"] if "name" in head.pattern.groupindex else None
            self._enter(head, match.end(), name or "")
            if head.kind == "json":
                self._other()
                yield Part("name", self._name, self._calls)
            yield None
            return
        if self._where == "o":
            # Not a part: its first character is text, and another part may begin within it.
            yield from self._content(self._text[:1])
            self._text = self._text[1:]
        self._state = self._read_content
        yield None

    def _is_known(self, head: Head, match: Any) -> bool:
        return "name" not in head.pattern.groupindex or match["name"] in self._tools

    def _enter(self, head: Head, end: int = 0, name: str = "") -> None:
        self._opening, self._text = self._text[:end], self._text[end:]
        self._head, self._name, self._passed = head, name, 0
        self._scan = _JsonEnd()
        self._state = {
            "json": self._read_arguments,
            "value": self._read_value,
            "body": self._read_body,
            "reasoning": self._read_reasoning,
            "content": self._read_content,
            "skip": self._read_content,
        }[head.kind]
        if head.kind == "skip" and head.where == "a":
            self._where, self._state = "a", self._begin

    def _go_on(self, where: str) -> None:
        self._where, self._state = where, self._begin

    def _read_content(self, final: bool) -> Iterator[Part | None]:
        found = min((at for at in map(self._text.find, self._opens) if at >= 0), default=-1)
        if found >= 0:
            yield from self._content(self._text[:found])
            self._text = self._text[found:]
            self._go_on("o")
            yield None
            return
        held = 0 if final else _held(self._text, self._opens)
        text, self._text = self._text[: len(self._text) - held], self._text[len(self._text) - held :]
        yield from self._content(text)

    def _read_reasoning(self, final: bool) -> Iterator[Part | None]:
        self._other()
        if not self._passed:
            self._text = self._text.lstrip()
            if not self._text and not final:
                return
        ends = [(at, end) for end in self._head.ends if (at := self._text.find(end)) >= 0]
        if ends:
            at, end = min(ends)
            yield Part("reasoning", self._text[:at].rstrip())
            self._text = self._text[at + (0 if self._head.keeps_end else len(end)) :]
            self._go_on("o" if self._head.keeps_end else "s")
            yield None
            return
        # Space before the end is left out, as templates write it themselves.
        held = 0 if final else _held(self._text, self._head.ends)
        text = self._text[: len(self._text) - held]
        text = text.rstrip()
        self._passed += len(text)
        self._text = "" if final else self._text[len(text) :]
        yield Part("reasoning", text)

    def _read_arguments(self, final: bool) -> Iterator[Part | None]:
        end = self._scan.find(self._text)
        text, self._text = self._text[:end], "" if end is None else self._text[end:]
        yield Part("arguments", text, self._calls)
        if end is not None or final:
            self._calls += 1
            self._state = self._read_tail
            yield None

    def _read_tail(self, final: bool) -> Iterator[Part | None]:
        tail = self._head.tail
        if tail is not None and self._head.kind != "body":
            match = tail.match(self._text, partial=True)
            if match is not None and match.partial and not final:
                return
            # An unfinished end belongs to the format, too.
            self._text = self._text if match is None else self._text[match.end() :]
        self._go_on("a")
        yield None

    def _read_value(self, final: bool) -> Iterator[Part | None]:
        end = self._scan.find(self._text[self._passed :])
        if end is None and not final:
            self._passed = len(self._text)
            return
        yield from self._read("" if end is None else self._text[: self._passed + end])

    def _read_body(self, final: bool) -> Iterator[Part | None]:
        assert self._head.tail is not None
        match = self._head.tail.search(self._text)
        if match is None and not final:
            return
        body = "" if match is None else self._text[: match.start()]
        yield from self._read(body, 0 if match is None else match.end())

    def _read(self, body: str, end: int | None = None) -> Iterator[Part | None]:
        assert self._head.read is not None
        calls = self._head.read(self._name, body, self._tools) if body or end else None
        if calls is None:
            # Not a call: its first character is text, and another part may begin within it.
            self._failures += 1
            if self._failures == _MOST_FAILURES:
                self._opens = ()
            text = self._opening + self._text
            yield from self._content(text[:1])
            self._text, self._state = text[1:], self._read_content
            yield None
            return
        self._other()
        for name, arguments in calls:
            yield Part("name", name, self._calls)
            yield Part("arguments", arguments, self._calls)
            self._calls += 1
        self._text = self._text[len(body) if end is None else end :]
        self._state = self._read_tail
        yield None


def _held(text: str, marks: Collection[str]) -> int:
    """Return the length of the longest end of a text with which one of some marks may begin."""
    longest = max(map(len, marks), default=1) - 1
    ends = (text[-size:] for size in range(min(longest, len(text)), 0, -1))
    return next((len(end) for end in ends if any(mark.startswith(end) for mark in marks)), 0)


class _JsonEnd:
    """Finds the end of a JSON object or list, piece by piece."""

    _MARKS = regex.compile(r'["\\{}\[\]]')

    def __init__(self) -> None:
        self._depth, self._in_text, self._skips = 0, False, False

    def find(self, text: str) -> int | None:
        """Return the index after the value's end in a piece of text, or None if it continues."""
        index = 0
        if self._skips and text:
            index, self._skips = 1, False
        while (match := self._MARKS.search(text, index)) is not None:
            mark, index = match[0], match.end()
            if self._in_text:
                if mark == "\\":
                    self._skips = index == len(text)
                    index += 1
                elif mark == '"':
                    self._in_text = False
            elif mark == '"':
                self._in_text = True
            elif mark in "{[":
                self._depth += 1
            elif mark in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return index
        return None
