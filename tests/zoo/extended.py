"""What a session in eager mode is asked beyond the prompts of every target, each against `DynamicCache`.

Prompts of 1, 2, a window less one, a window, a window and one, and three windows; a second sequence in the same
session; tokens taken back; a fork; half precision against itself; sizes from the config alone.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from exportable_cache import ExportableCache, Session
from exportable_cache.errors import ExportableCacheError
from exportable_cache.pipeline.plan import plan

from .architectures import Architecture
from .build import (
    STEPS,
    cached_logits,
    encoder_inputs,
    encoder_options,
    tokens,
    uncached_logits,
)
from .conditioning import is_sound, model_without_choices, movement, tolerance
from .shrink import WINDOW

LENGTHS = (1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW)
LONGEST = max(LENGTHS) + STEPS
#: Of the checks that are about something else than its length.
PROMPT = WINDOW + 3
#: Where a fork leaves, and where tokens are taken back: past the window.
BRANCH = PROMPT + 3
#: Tokens taken back: those that every ring lets go, and as many as rings are given slots for.
TAKEN_BACK = (1, 4)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Seeds of tokens to look for a reference without a tie among.
OTHER_TOKENS = (1, 2, 3, 4)
MAX_CACHE_LEN = 64
PREFILL_CHUNK = 16

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Finding:
    """Of one check.

    Attributes:
        status: pass, refused (by a sentence of the package), wrong, error, or unknown: the reference itself cannot be
            had, or is ill-conditioned and no margin helps.
        difference: Largest |logit difference| to the reference.
        limit: What it may be.
        reason: Why not, or what was done to have a reference.
    """

    status: str
    difference: float | None = None
    limit: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Precision:
    """A model in one dtype, and what it gives over `DynamicCache`.

    Attributes:
        ids: What both are fed.
        reference: float32 [STEPS + 1, vocab], after a prompt of `PROMPT` tokens.
        moved: By the smallest change of every weight.
        is_sound: Whether that is little enough to compare with it.
        note: What was done to it, if the first one had a tie.
    """

    model: PreTrainedModel
    ids: torch.Tensor
    reference: torch.Tensor
    moved: float
    is_sound: bool = True
    note: str = ""


class Extended:
    """The checks of one architecture. References are computed as it is made, before anything of the package's own is
    patched in.

    Args:
        architecture: Which.
        model: Its tiny model, in float32; it stays as it is.
    """

    def __init__(self, architecture: Architecture, model: PreTrainedModel) -> None:
        self.architecture, self.model = architecture, model
        self.ids, self.others = tokens(model, length=LONGEST), tokens(model, seed=1, length=LONGEST)
        self.inputs, self.other_inputs = encoder_inputs(model), encoder_inputs(model, seed=2)
        #: As the ids, until the fork goes its own way.
        self.branched = torch.cat([self.ids[:, :BRANCH], self.others[:, BRANCH:]], dim=1)
        self.references = {length: _reference(model, self.ids, length, self.inputs) for length in (*LENGTHS, PROMPT)}
        self.second = _reference(model, self.others, PROMPT, self.other_inputs)
        self.branch = _reference(model, self.branched, PROMPT, self.inputs)
        self.precisions = {dtype: _attempt(functools.partial(self._precision, dtype)) for dtype in DTYPES}

    def findings(self) -> dict[str, Finding]:
        """Of every check.

        Raises:
            ExportableCacheError: If the model is refused.
        """
        with _session(self.model, self.inputs) as session:
            found = {f"prompt of {length}": _checked(self._prompt, session, length) for length in LENGTHS}
            found["second sequence"] = _checked(self._second_sequence, session)
            found[f"{TAKEN_BACK[0]} taken back"] = _checked(self._taken_back, session, TAKEN_BACK[0])
            found["fork"] = _checked(self._fork, session)
        found[f"{TAKEN_BACK[1]} taken back"] = _checked(self._taken_back_of_slots)
        for dtype in DTYPES:
            found[_name(dtype)] = _checked(self._in_precision, dtype)
        found["sizes"] = _checked(self._sizes)
        return found

    @property
    def ill_conditioned(self) -> dict[str, str]:
        """By dtype: how the reference moved, where it has a tie."""
        return {
            _name(dtype): made.note
            for dtype, made in self.precisions.items()
            if not isinstance(made, str) and made.note
        }

    # -- one check each ------------------------------------------------------------------------------------------------

    def _prompt(self, session: Session, length: int) -> Finding:
        _begin(session, self.inputs)
        return _compared(_fed(session, self.ids, length), self.references[length])

    def _second_sequence(self, session: Session) -> Finding:
        """Of other tokens, after another encoding, where the buffers hold the last of the first."""
        _begin(session, self.inputs)
        _fed(session, self.ids, max(LENGTHS))
        _begin(session, self.other_inputs)
        return _compared(_fed(session, self.others, PROMPT), self.second)

    def _taken_back(self, session: Session, count: int) -> Finding:
        """Other tokens are fed past the window, and taken back again."""
        _begin(session, self.inputs)
        rows = [session.prefill(self.ids[:, :PROMPT])[0].clone()]
        rows += _decoded(session, self.ids, PROMPT, BRANCH)
        _decoded(session, self.others, BRANCH, BRANCH + count)
        session.rewind(count)
        rows += _decoded(session, self.ids, BRANCH, PROMPT + STEPS)
        return _compared(torch.stack(rows), self.references[PROMPT])

    def _taken_back_of_slots(self) -> Finding:
        with _session(self.model, self.inputs, rollback_slots=TAKEN_BACK[1] - 1) as session:
            return self._taken_back(session, TAKEN_BACK[1])

    def _fork(self, session: Session) -> Finding:
        """Two go on in turns, with other tokens."""
        _begin(session, self.inputs)
        rows = [session.prefill(self.ids[:, :PROMPT])[0].clone(), *_decoded(session, self.ids, PROMPT, BRANCH)]
        forked, forked_rows = session.fork(), list(rows)
        for position in range(BRANCH, PROMPT + STEPS):
            rows += _decoded(session, self.ids, position, position + 1)
            forked_rows += _decoded(forked, self.branched, position, position + 1)
        found = torch.cat([torch.stack(rows), torch.stack(forked_rows)])
        return _compared(found, torch.cat([self.references[PROMPT], self.branch]))

    def _in_precision(self, dtype: torch.dtype) -> Finding:
        """The same model in the same dtype over `DynamicCache`."""
        made = self.precisions[dtype]
        if isinstance(made, str):
            return Finding("unknown", reason=f"no reference: {made}")
        inputs = _cast(self.inputs, dtype)
        with _session(made.model, inputs) as session:
            _begin(session, inputs)
            found = _fed(session, made.ids, PROMPT).float()
        if not made.is_sound:
            return Finding("unknown", _gap(found, made.reference), reason=made.note)
        return _compared(found, made.reference, tolerance(dtype, made.moved), made.note)

    def _sizes(self) -> Finding:
        """Bytes of each layer, from the config alone."""
        options = encoder_options(self.model, self.inputs)
        expected = _sizes(ExportableCache.from_model(self.model, MAX_CACHE_LEN, attn_implementation=None, **options))
        config = copy.deepcopy(self.model.config)
        # As saved: one kind of config may be of two models, and has not been told apart before.
        config.architectures = [type(self.model).__name__]
        if self.inputs:
            made = plan(config, MAX_CACHE_LEN, dtype="float32", **options)
            if made.refusal is not None:
                return Finding("refused", reason=made.refusal)
            found = [layer.bytes for layer in made.layers]
        else:
            cache = ExportableCache.from_config(config, MAX_CACHE_LEN, dtype=torch.float32, attn_implementation=None)
            found = _sizes(cache)
        if found == expected:
            return Finding("pass")
        return Finding("wrong", reason=f"bytes of layers are {found} from the config, {expected} from the model")

    # -- references ----------------------------------------------------------------------------------------------------

    def _precision(self, dtype: torch.dtype) -> Precision:
        """In `dtype`; where the reference has a tie without choices, then of other tokens, if that leaves none."""
        first = self._measured(self.model, dtype, self.ids)
        if is_sound(dtype, first.reference, first.moved):
            return first
        note = f"ill-conditioned: the reference moves by {first.moved:.0e} with the last bit of its weights"
        try:
            model = model_without_choices(self.architecture)
        except ValueError as error:
            sound = is_sound(dtype, first.reference, first.moved, chooses=False)
            return replace(first, is_sound=sound, note="" if sound else f"{note}; {error}")
        for seed in (0, *OTHER_TOKENS):
            made = self._measured(model, dtype, tokens(model, seed, LONGEST))
            sound = is_sound(dtype, made.reference, made.moved)
            after = f"{note}; by {made.moved:.0e} with every expert and key chosen, tokens of seed {seed}"
            if sound:
                break
        return replace(made, is_sound=sound, note=after)

    def _measured(self, model: PreTrainedModel, dtype: torch.dtype, ids: torch.Tensor) -> Precision:
        inputs, model = _cast(self.inputs, dtype), copy.deepcopy(model).to(dtype)

        def at_once(one: PreTrainedModel) -> torch.Tensor:
            return _at_once(one, ids, PROMPT, _cast(inputs, one.dtype))

        moved = movement(model, at_once)
        if dtype != torch.float32:
            # The same weights, in sums that are not rounded: another way to compute the same.
            moved = max(moved, _gap(at_once(copy.deepcopy(model).float()), at_once(model)))
        return Precision(model, ids, _reference(model, ids, PROMPT, inputs), moved)


def _at_once(model: PreTrainedModel, ids: torch.Tensor, prompt: int, inputs: Inputs) -> torch.Tensor:
    """float32 [STEPS + 1, vocab], of one call without a cache."""
    return uncached_logits(model, ids[:, : prompt + STEPS], inputs)[prompt - 1 :].float()


def _reference(model: PreTrainedModel, ids: torch.Tensor, prompt: int, inputs: Inputs) -> torch.Tensor:
    """float32 [STEPS + 1, vocab]."""
    try:
        # Recurrent Gemma keeps its states in its modules, and goes on from them with a prompt of one token; a call
        # without a cache drops them.
        uncached_logits(model, ids[:, :1], inputs)
        return cached_logits(model, ids, prompt, inputs).float()
    except Exception:  # models with a cache of their own, or none
        return _at_once(model, ids, prompt, inputs)


@contextmanager
def _session(model: PreTrainedModel, inputs: Inputs, **options: Any) -> Iterator[Session]:
    cache = ExportableCache.from_model(
        model, MAX_CACHE_LEN, attn_implementation=None, **encoder_options(model, inputs), **options
    )
    with Session.from_model(model, cache, prefill_chunk=PREFILL_CHUNK) as session:
        yield session


def _begin(session: Session, inputs: Inputs) -> None:
    session.reset()
    if inputs:
        session.encode(**inputs)


@torch.no_grad()
def _fed(session: Session, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """[STEPS + 1, vocab]."""
    rows = [session.prefill(ids[:, :prompt])[0].clone()]
    return torch.stack(rows + _decoded(session, ids, prompt, prompt + STEPS))


@torch.no_grad()
def _decoded(session: Session, ids: torch.Tensor, start: int, end: int) -> list[torch.Tensor]:
    return [session.decode(ids[:, position])[0].clone() for position in range(start, end)]


def _gap(found: torch.Tensor, reference: torch.Tensor) -> float:
    difference = (found - reference).abs().max().item()
    return float("inf") if difference != difference else difference


def _compared(found: torch.Tensor, reference: torch.Tensor, limit: float | None = None, reason: str = "") -> Finding:
    limit, difference = tolerance(torch.float32, 0) if limit is None else limit, _gap(found, reference)
    return Finding("pass" if difference <= limit else "wrong", difference, limit, reason)


def _checked(check: Callable[..., Finding], *arguments: Any) -> Finding:
    try:
        return check(*arguments)
    except ExportableCacheError as error:
        return Finding("refused", reason=str(error))
    except Exception as error:  # any model's code runs here
        return Finding("error", reason=_told(error))


def _attempt(make: Callable[[], Precision]) -> Precision | str:
    """Or what stopped it: transformers' own code does not run every model in every dtype."""
    try:
        return make()
    except Exception as error:
        return _told(error)


def _told(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def _cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}


def _sizes(cache: ExportableCache) -> list[int]:
    return [layer.nbytes for layer in cache.layers]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
