"""Answers of a given form: JSON of a schema, a regular expression, or a grammar, by llguidance's masks over tokens.

https://github.com/guidance-ai/llguidance works out, token by token, which may come next.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch

from ..errors import InputError, MissingDependencyError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..models.text_tokenizer import TextTokenizer

ConstraintKind = Literal["json_schema", "regex", "lark"]

_SHOWN = 300


@dataclass(frozen=True)
class Constraint:
    """The form of an answer: `Constraint("regex", "yes|no")`.

    Attributes:
        kind: What `text` is: a JSON schema (https://json-schema.org), a regular expression without lookaround or
            backreferences, or a grammar in llguidance's form of Lark.
        text: As text; a schema is JSON.

    Raises:
        InputError: If the kind is unknown, or a schema is no JSON object.
    """

    kind: ConstraintKind
    text: str

    def __post_init__(self) -> None:
        kinds = get_args(ConstraintKind)
        if self.kind not in kinds:
            raise InputError(f"the kind of a constraint is {self.kind!r}; it must be one of {', '.join(kinds)}")
        if not isinstance(self.text, str):
            raise InputError(f"a constraint is text, got {type(self.text).__name__}; pass a schema as JSON")
        if self.kind == "json_schema":
            try:
                schema = json.loads(self.text)
            except (ValueError, RecursionError) as error:
                raise InputError(f"the JSON schema cannot be read: {first_line(error)[:_SHOWN]}") from error
            if not isinstance(schema, dict):
                raise InputError(f"the JSON schema is {type(schema).__name__}, not an object: {self.text[:80]}")

    @classmethod
    def json_object(cls) -> Constraint:
        """Any JSON object."""
        return cls("json_schema", '{"type": "object"}')


class ConstraintCompiler:
    """Makes followers of constraints over one tokenizer.

    Args:
        tokenizer: One that the library `tokenizers` runs ("fast").
        vocab_size: Of the logits.
        end_tokens: Which tokens end an answer.

    Raises:
        InputError: If the tokenizer is another one.
        MissingDependencyError: If llguidance is not installed.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | TextTokenizer, vocab_size: int, end_tokens: Collection[int]
    ) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise MissingDependencyError(
                "answers of a given form need llguidance; pip install 'exportable-cache[serve]'"
            ) from error
        self._library = llguidance
        self._vocab_size = vocab_size
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise InputError(
                f"answers of a given form need a tokenizer of the library tokenizers, and {type(tokenizer).__name__} "
                "is none; export the model with its fast tokenizer"
            )
        known = backend.get_vocab_size(with_added_tokens=True)
        try:
            # A model's head may be wider than its tokenizer, by tokens that mean nothing.
            self._tokens = llguidance.LLTokenizer(
                backend.to_str(), n_vocab=max(known, vocab_size), eos_token=sorted(end_tokens) or None
            )
        except ValueError as error:
            raise InputError(
                f"this tokenizer cannot be followed token by token: {first_line(error)[:_SHOWN]}; ask for no form"
            ) from error

    def follow(self, constraint: Constraint) -> Follower:
        """One answer's way through a constraint.

        Raises:
            InputError: If it cannot be read, or takes too much to follow.
        """
        matcher_of = self._library.LLMatcher
        readers: dict[ConstraintKind, Callable[[str], str]] = {
            "json_schema": matcher_of.grammar_from_json_schema,
            "regex": matcher_of.grammar_from_regex,
            "lark": matcher_of.grammar_from_lark,
        }
        # Silent: what is wrong is in the error.
        return Follower(
            matcher_of(self._tokens, readers[constraint.kind](constraint.text), log_level=0), self._vocab_size
        )


class Follower:
    """Where an answer is in its constraint; made by `ConstraintCompiler.follow`."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._check()

    @property
    def ended(self) -> bool:
        """Whether nothing may come but the end."""
        return self._matcher.is_stopped()

    def only_allowed(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [1, vocab], those of tokens that may not come next at minus infinity.

        Raises:
            InputError: If there are none that may.
        """
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        allowed = torch.from_numpy(np.unpackbits(packed, bitorder="little")[: self._vocab_size]).bool()
        if not allowed.any():
            raise InputError("no token of this model can go on in the form that was asked for; ask for another form")
        return logits.masked_fill(~allowed.to(logits.device), -torch.inf)

    def take(self, token: int) -> None:
        """Go on by a token.

        Raises:
            InputError: If following takes too much from here.
        """
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            said = " ".join(self._matcher.get_error().split())[:_SHOWN]
            raise InputError(f"the form that was asked for cannot be followed: {said}; ask for a simpler one")
