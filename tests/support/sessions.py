"""Sessions over each target, without the bundle around them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from exportable_cache import ExportableCache, Session
from exportable_cache.backends import backend_for
from exportable_cache.backends.base import ProgramDescription
from exportable_cache.models.layout import vocab_size_of
from exportable_cache.program.program import Program
from exportable_cache.program.spec import ProgramSpec


def describe(program: Program) -> ProgramDescription:
    """What a bundle's manifest would say of a program."""
    layers = [
        {
            "class": type(layer).__name__,
            "config": layer.config(),
            "tensors": {
                name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
                for name, tensor in layer.named_state()
            },
        }
        for layer in program.cache.layers
    ]
    return ProgramDescription(program.methods, program.form, program.logits, program.batch_size, layers)


def lowered_session(
    model: PreTrainedModel,
    target: str,
    folder: Path,
    max_cache_len: int,
    batch_size: int = 1,
    prefill_length: int = 16,
    attention_sinks: int | None = None,
    max_encoder_len: int | None = None,
    cache_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Session:
    """Lower a model for `pt2` or `executorch` into `folder` and open what was written."""
    backend = backend_for(target)
    cache = ExportableCache.from_model(
        model,
        max_cache_len,
        batch_size,
        attention_sinks=attention_sinks,
        max_encoder_len=max_encoder_len,
        **(cache_options or {}),
    )
    parsed = backend.options.parse(options)
    program = Program(model, cache, backend.program_spec(ProgramSpec(prefill_length), parsed))
    backend.lower(program, folder, parsed)
    runner = backend.open(folder, describe(program))
    return Session(runner, cache.layers, vocab_size_of(model), batch_size=batch_size, target=target)


def live_session(
    model: PreTrainedModel, compile: bool, max_cache_len: int, batch_size: int = 1, **options: Any
) -> Session:
    """A session over the model itself."""
    cache = ExportableCache.from_model(model, max_cache_len, batch_size)
    return Session.from_model(model, cache, compile=compile, prefill_length=16, **options)
