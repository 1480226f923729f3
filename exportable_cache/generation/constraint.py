"""Constrained generation: JSON of a schema, a regular expression, or a grammar.

llguidance (https://github.com/guidance-ai/llguidance) computes a mask of the allowed tokens for each step.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from decimal import Decimal
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

from ..common.process.limited import LimitedProcess, WorkFailed
from ..errors import InputError, MissingDependencyError, first_line

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from ..models.tokenizers.text import TextTokenizer


ConstraintKind = Literal["json_schema", "regex", "lark"]

#: Seconds for the compilation of a constraint, or for one token; and seconds per token on average after that.
MOST_SECONDS = 3.0
TOKEN_SECONDS = 0.1
#: Seconds for loading a large vocabulary.
_TOKENIZER_SECONDS = 60.0
#: Address space of a subprocess, including Python and the vocabulary, and bytes of a mask.
_MOST_MEMORY, _MOST_BYTES = 2 << 30, 1 << 24
#: Idle subprocesses that are kept.
_MOST_FREE = 2
_SHOWN = 300


@dataclass(frozen=True)
class Constraint:
    """A constraint on generated text: `Constraint("regex", "yes|no")`.

    Attributes:
        kind: Kind of `text`: a JSON schema (https://json-schema.org), a regular expression without lookaround or
            backreferences, or a grammar in llguidance's dialect of Lark.
        text: The constraint; a schema is JSON.

    Raises:
        InputError: If the kind is unknown, the text has a lone surrogate, or a schema is not a JSON object or has a
            number that cannot be enforced exactly, see `exact_schema`.
    """

    kind: ConstraintKind
    text: str

    def __post_init__(self) -> None:
        kinds = get_args(ConstraintKind)
        if self.kind not in kinds:
            raise InputError(f"kind of a constraint must be one of {', '.join(kinds)}, got {self.kind!r}")
        if not isinstance(self.text, str):
            raise InputError(f"a constraint must be text, got {type(self.text).__name__}; pass a schema as JSON")
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"a constraint must be valid Unicode, got {self.text[error.start]!r} at character {error.start}; "
                "correct it"
            ) from error
        if self.kind == "json_schema":
            exact_schema(self.text)

    @classmethod
    def json_object(cls) -> Constraint:
        """Return a constraint that allows any JSON object."""
        return cls("json_schema", '{"type": "object"}')


class ConstraintCompiler:
    """Compiler of constraints for one tokenizer.

    llguidance runs in subprocesses, because some constraints crash it or keep it busy for hours. Each `Follower` has
    its own subprocess until it is closed; idle ones are reused.

    Args:
        tokenizer: A tokenizer of the library `tokenizers` ("fast").
        vocab_size: Number of logits.
        end_tokens: Tokens that end a generation.

    Raises:
        InputError: If the tokenizer is of another library.
        MissingDependencyError: If llguidance is not installed.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | TextTokenizer, vocab_size: int, end_tokens: Collection[int]
    ) -> None:
        if find_spec("llguidance") is None:
            raise MissingDependencyError(
                "constrained generation needs llguidance; pip install 'exportable-cache[serve]'"
            )
        self._vocab_size = vocab_size
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise InputError(
                "constrained generation needs a tokenizer of the library tokenizers, got "
                f"{type(tokenizer).__name__}; export the model with its fast tokenizer"
            )
        # A model may have more logits than its tokenizer has tokens.
        known = max(backend.get_vocab_size(with_added_tokens=True), vocab_size)
        self._start = {"do": "tokenizer", "vocab": known, "ends": sorted(end_tokens)}
        self._tokenizer = backend.to_str().encode()
        self._lock = threading.Lock()
        self._free: list[LimitedProcess] = []
        self._all: weakref.WeakSet[LimitedProcess] = weakref.WeakSet()
        # Refuses unsupported tokenizers early.
        self._release(self._new())

    def follow(self, constraint: Constraint) -> Follower:
        """Compile a constraint and return its follower. This method is thread-safe.

        Raises:
            InputError: If the constraint is invalid, or takes too much time or memory.
        """
        text = exact_schema(constraint.text) if constraint.kind == "json_schema" else constraint.text
        with self._lock:
            process = self._free.pop() if self._free else None
        if process is None or not process.is_alive:
            process = self._new()
        return Follower(process, self._release, constraint.kind, text, self._vocab_size)

    def close(self) -> None:
        """End all subprocesses. Followers that wait for one raise an error."""
        for process in list(self._all):
            process.stop()

    def _new(self) -> LimitedProcess:
        process = LimitedProcess("exportable_cache.generation.constraint_child", _MOST_MEMORY, _MOST_BYTES)
        self._all.add(process)
        try:
            process.call(_TOKENIZER_SECONDS, self._start, self._tokenizer)
        except WorkFailed as error:
            raise InputError(
                f"this tokenizer does not support constrained generation: {str(error)[:_SHOWN]}; remove the constraint"
            ) from error
        return process

    def _release(self, process: LimitedProcess) -> None:
        with self._lock:
            if len(self._free) < _MOST_FREE and process.is_alive:
                self._free.append(process)
                return
        process.stop()


class Follower:
    """State of a constraint during one generation; made by `ConstraintCompiler.follow`.

    Args:
        process: The subprocess, with the tokenizer.
        release: Function that takes the subprocess back.
        kind: Kind of the constraint.
        text: Text of the constraint.
        vocab_size: Number of logits.

    Attributes:
        ended: True if only an end token is allowed next.
    """

    def __init__(
        self,
        process: LimitedProcess,
        release: Callable[[LimitedProcess], None],
        kind: ConstraintKind,
        text: str,
        vocab_size: int,
    ) -> None:
        self._process, self._vocab_size = process, vocab_size
        self._starts = process.starts
        self._seconds = MOST_SECONDS
        #: Releases the subprocess of a follower that is never closed.
        self._finalizer = weakref.finalize(self, release, process)
        self.ended, self._allowed = False, b""
        try:
            self._call({"do": "compile", "kind": kind}, text.encode())
        except BaseException:
            self.close()
            raise

    def only_allowed(self, logits: torch.Tensor) -> torch.Tensor:
        """Set the logits [1, vocab] of forbidden tokens to minus infinity.

        Raises:
            InputError: If no token is allowed, or the follower is closed.
        """
        import numpy as np
        import torch

        self._check_open()
        packed = np.frombuffer(self._allowed, dtype=np.uint8)
        allowed = torch.from_numpy(np.unpackbits(packed, bitorder="little")[: self._vocab_size]).bool()
        if not allowed.any():
            raise InputError("the constraint allows no token of this model here; pass another constraint")
        return logits.masked_fill(~allowed.to(logits.device), -torch.inf)

    @property
    def mask(self) -> bytes:
        """The allowed tokens, one bit each: bit `token % 8` of byte `token // 8`.

        Raises:
            InputError: If the follower is closed.
        """
        self._check_open()
        return self._allowed

    def take(self, token: int) -> None:
        """Advance by a token.

        Raises:
            InputError: If this takes too much time or memory.
        """
        self._check_open()
        self._call({"do": "take", "token": token})
        # Unused time is available for later tokens, up to the limit.
        self._seconds = min(MOST_SECONDS, self._seconds + TOKEN_SECONDS)

    def close(self) -> None:
        """Release the subprocess. A closed follower cannot be used."""
        self._finalizer()

    def _check_open(self) -> None:
        # A restarted subprocess has lost the constraint.
        if not (self._finalizer.alive and self._process.is_alive and self._process.starts == self._starts):
            raise InputError("the constraint of this generation is closed; start the generation again")

    def _call(self, request: dict[str, Any], data: bytes = b"") -> None:
        start = time.monotonic()
        try:
            reply, self._allowed = self._process.call(max(self._seconds, TOKEN_SECONDS), request, data)
        except WorkFailed as error:
            raise InputError(f"the constraint cannot be enforced: {str(error)[:_SHOWN]}; pass a simpler one") from error
        self._seconds -= time.monotonic() - start
        self.ended = reply["ended"]


#: Largest integer up to which every integer is a float64.
MOST_WHOLE = 2**53
#: Decimal digits that every float64 keeps, and the largest power of ten that is exact.
MOST_DIGITS, MOST_POWER = 15, 22
#: Keywords whose value is a limit -> its sign.
_LIMITS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}
#: Keywords whose value maps names to schemas.
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
#: Keywords that restrict nothing.
_REMARKS = frozenset(("default", "example", "examples", "title", "description", "$comment", "deprecated"))


def exact_schema(text: str) -> str:
    """Return a JSON schema that is at least as strict, with numbers that llguidance enforces exactly.

    A lower limit below -2**53 or an upper limit above 2**53, such as those of 64-bit integers, becomes that number. Any
    other number that would not be enforced exactly is refused.

    Args:
        text: A JSON object.

    Raises:
        InputError: If it is not, or has such a number.
    """
    try:
        schema = json.loads(text, parse_float=Decimal, parse_constant=_refuse_constant)
        if not isinstance(schema, dict):
            raise InputError(
                f"the JSON schema must be an object, got {type(schema).__name__}: {text[:80]}; wrap it in one"
            )
        return json.dumps(_schema(schema))
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"the JSON schema cannot be read: {first_line(error)[:300]}; correct it") from error


def _schema(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_schema(one) for one in schema]
    if not isinstance(schema, dict):
        return _values(schema, "the JSON schema")
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _REMARKS:
            continue
        if key in _NAMED and isinstance(value, dict):
            found[key] = {name: _schema(one) for name, one in value.items()}
        elif key in ("const", "enum"):
            found[key] = _values(value, key)
        elif key in _LIMITS and _is_number(value):
            found[key] = _limit(key, value, schema.get("type") == "number")
        elif _is_number(value):
            found[key] = _number(value, key)
        else:
            found[key] = _schema(value)
    return found


def _limit(key: str, value: int | Decimal, is_real: bool) -> int | float:
    # A limit of numbers that need not be whole is compared as a float, which may be larger.
    if abs(Decimal(value)) > MOST_WHOLE and not (is_real and isinstance(value, Decimal)):
        if (value > 0) == (_LIMITS[key] > 0):
            return _LIMITS[key] * MOST_WHOLE
        raise InputError(f"{key} must be a number of at most 2**53 either way, got {_shown(value)}; use text")
    return _number(value, key)


def _values(value: Any, key: str) -> Any:
    if isinstance(value, list):
        return [_values(one, key) for one in value]
    if isinstance(value, dict):
        return {name: _values(one, key) for name, one in value.items()}
    return _number(value, key) if _is_number(value) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, Decimal)) and not isinstance(value, bool)


def _number(value: int | Decimal, key: str) -> int | float:
    if isinstance(value, int):
        if abs(value) > MOST_WHOLE:
            raise InputError(f"{key} must be a whole number of at most 2**53 either way, got {_shown(value)}; use text")
        return value
    digits = len(value.normalize().as_tuple().digits)
    if value and (digits > MOST_DIGITS or abs(value.adjusted()) > MOST_POWER):
        raise InputError(
            f"{key} must be a number of at most {MOST_DIGITS} digits between 1e-{MOST_POWER} and 1e{MOST_POWER}, got "
            f"{_shown(value)}; round it"
        )
    return float(value)


def _shown(value: int | Decimal) -> str:
    # Python refuses to write whole numbers of more than 4,300 digits.
    text = str(value) if isinstance(value, Decimal) or abs(value) < 10**60 else f"{value.bit_length()} bits"
    return text if len(text) <= 60 else text[:60] + "..."


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
