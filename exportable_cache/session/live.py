"""A session over a model in this process, eager or compiled."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ..backends.live.compile import CompileOptions
from ..backends.live.runner import ModuleRunner
from ..errors import InputError
from ..models.cache_factory import ExportableCache, ExportableEncoderDecoderCache
from ..models.joined_linears import end_outdated_groups
from ..models.layers.specs import check_layers, vocab_size_of
from ..models.positions import check_positions, default_cache_len, rope_rule
from ..models.weights import fingerprint
from ..parallel.ranks import is_split
from ..program.decoders import length_buckets
from ..program.inputs.modalities import modalities_of
from ..program.spec import LORA_RANK, ProgramSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..models.positions import RopeRule


Made = TypeVar("Made")


@dataclass(frozen=True)
class LiveOptions:
    """Options of a live model: keywords of `Session.from_model`."""

    compiling: CompileOptions = CompileOptions()
    prefill_chunk: int | None = None
    buckets: bool | Sequence[int] = True
    score_length: int = 0
    steps_per_launch: int = 1
    modalities: Sequence[str] | Mapping[str, Any] = ()
    image_size: int | Sequence[int] | None = None
    #: Number of LoRA adapters, their largest rank, and the names of the layers that they may change.
    lora: tuple[int, int, Sequence[str]] = (0, LORA_RANK, ())


def live_session(
    make: Callable[..., Made],
    model: PreTrainedModel,
    cache: ExportableCache,
    options: LiveOptions,
    tokenizer: PreTrainedTokenizerBase | None,
) -> Made:
    """Return a session at position 0 over a model and the cache that it writes.

    Args:
        make: The class of the session.
        model: The model.
        cache: Its cache.
        options: Options of the session.
        tokenizer: The tokenizer.

    Raises:
        InputError: If the cache does not fit the model, or an option is out of range.
    """
    check_pair(model, cache)
    _check_unused(cache)
    end_outdated_groups(model)
    if options.compiling.graph_cache is not None and (cache.ranks is not None or cache.offloader is not None):
        # Not kept, because graphs contain the rank's sizes, and their keys do not include the device of a layer.
        raise InputError("graph_cache must be None for a parallel session, and for offloaded layers; leave it out")
    modalities = modalities_of(model, options.modalities, options.image_size)
    runner = ModuleRunner(
        model,
        cache,
        ProgramSpec(
            options.prefill_chunk,
            options.score_length,
            buckets=length_buckets(cache) if options.buckets is True else options.buckets or (),
            modalities=modalities,
            lora_slots=options.lora[0],
            lora_rank=options.lora[1],
            lora_targets=options.lora[2],
        ),
        options.compiling,
    )
    _users[cache] = weakref.ref(runner)
    return make(
        runner,
        cache.layers,
        vocab_size_of(model),
        batch_size=cache.batch_size,
        tokenizer=tokenizer,
        generation_config=model.generation_config,
        device=cache.device,
        target="compiled" if options.compiling.compile else "eager",
        fingerprint=fingerprint(model),
        placeholders={
            modality.method.name: modality.token_id for modality in modalities if modality.method.name in runner.methods
        },
        steps_per_launch=options.steps_per_launch,
    )


#: Tokens that a draft proposes by default.
_PROPOSED = 8


def new_cache(model: PreTrainedModel, max_cache_len: int | None) -> ExportableCache:
    """Allocate the cache of a session for one row, whose rings can take back the tokens of a draft.

    Args:
        model: The model.
        max_cache_len: Tokens that full-attention layers hold; None for `default_cache_len`.
    """
    length = default_cache_len(model.config) if max_cache_len is None else max_cache_len
    # The session's runner borrows the model's attention, and gives it back.
    return ExportableCache.from_model(model, length, rollback_slots=_PROPOSED - 1, attn_implementation=None)


def scored_by_drafts(cache: ExportableCache) -> int:
    """Return the tokens that a step with a draft scores; 0 if no draft is possible over the cache."""
    if cache.batch_size != 1 or isinstance(cache, ExportableEncoderDecoderCache) or cache.ranks is not None:
        return 0
    far = 2**40
    taken_back = min((layer.max_rollback(far, far) for layer in cache.layers), default=0)
    length = min(_PROPOSED + 1, taken_back + 1, cache.max_length or far)
    return length if length > 1 else 0


def changing_rope(model: PreTrainedModel, cache: ExportableCache) -> RopeRule | None:
    """Return the rule by which a model's RoPE changes, or None if no row of the cache gets that far."""
    rule = rope_rule(model)
    return rule if rule is not None and rule.is_reached(cache.max_length) else None


#: The runner that writes each cache.
_users: weakref.WeakKeyDictionary[ExportableCache, weakref.ref[ModuleRunner]] = weakref.WeakKeyDictionary()


def _check_unused(cache: ExportableCache) -> None:
    """Check that no other session writes the cache, because each would overwrite the other's tokens.

    Raises:
        InputError: If there is one that was not closed.
    """
    user = _users[cache]() if cache in _users else None
    if user is not None and user.is_open:
        raise InputError(
            "this cache belongs to another session, which writes it; close() that one first, fork() it, or allocate "
            "another cache"
        )


def check_pair(model: PreTrainedModel, cache: ExportableCache) -> None:
    """Check that a model can run over a cache.

    Raises:
        InputError: If the model is in training mode, or the cache has another class, other layers, another device, or
            more tokens than the model has positions.
    """
    if model.training:
        raise InputError(f"{type(model).__name__} is in training mode; call model.eval() first")
    if not isinstance(cache, ExportableCache):
        raise InputError(
            f"cache must be an ExportableCache, got a {type(cache).__name__}; allocate one with "
            "ExportableCache.from_model(model, max_cache_len=...)"
        )
    check_layers(model, cache)
    if cache.ranks is None and any(is_split(parameter) for parameter in model.parameters()):
        raise InputError(
            "the cache must be allocated on every rank for a model that is split over processes; use "
            "ExportableCache.from_model(model, ...) on each"
        )
    if cache.device != model.device:
        raise InputError(
            f"the cache is on {cache.device}, the model on {model.device}; allocate the cache with "
            f"device={str(model.device)!r}"
        )
    check_positions(model, cache.max_length)
