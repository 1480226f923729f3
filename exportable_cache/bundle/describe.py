"""Filling in a manifest: what a lowered program, its model and this installation are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig

from ..common.dtypes import dtype_name
from ..common.tensor_spec import TensorSpec
from ..generation.checkpoint_settings import end_tokens
from ..models.fingerprint import fingerprint
from ..models.layout import layer_types_and_windows, logits_size_of, vocab_size_of
from ..models.rope import rope_rule
from ..program.row_lengths import needs_equal_rows
from ..program.spec import Form, Logits
from .layer_entry import Layer, Tensor
from .manifest import SCHEMA_VERSION, Manifest
from .program_entry import LOGITS, STATE_PREFIX, ItemEntry, MethodEntry, ProgramEntry, RopeEntry, Signature
from .versions import installed_versions

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..program.methods import ProgramMethod
    from ..program.program import Program
    from .entries import File


@dataclass(frozen=True)
class Provenance:
    """Where a program comes from, as its manifest records it.

    Attributes:
        source: Where the model came from, see `LoadedModel`.
        target: What it was lowered for.
        max_cache_len: As asked for.
        options: Of the target, as given.
        whole: The model that the program's is one rank's part of; None of a program in one part.
    """

    source: str
    target: str
    max_cache_len: int
    options: Mapping[str, Any] = field(default_factory=dict)
    whole: PreTrainedModel | None = None


def describe(
    program: Program,
    provenance: Provenance,
    *,
    packages: tuple[str, ...],
    tokenizer: PreTrainedTokenizerBase | None,
    files: Mapping[str, File],
) -> Manifest:
    """The manifest of a program that has been lowered, not verified yet.

    Args:
        program: What was lowered.
        provenance: Of it.
        packages: Those whose versions decide whether it can be opened.
        tokenizer: None where there is none.
        files: What is in the folder.
    """
    # A rank's part has the same config, and names nobody would find its weights by.
    model, cache = provenance.whole or program.model, program.cache
    layer_types = [layer_type for layer_type, _ in layer_types_and_windows(model.config)]
    layers = [
        Layer(
            layer_type=layer_type,
            **layer.config(),
            tensors={
                name: Tensor(
                    shape=list(tensor.shape),
                    dims=list(layer.state[name].dims),
                    dtype=dtype_name(tensor.dtype),
                    bytes=tensor.nbytes,
                )
                for name, tensor in layer.named_state()
            },
            bytes=layer.nbytes,
        )
        for layer_type, layer in zip(layer_types, cache.layers, strict=True)
    ]
    vocab_size, logits_size = vocab_size_of(model), logits_size_of(model)
    return Manifest(
        schema_version=SCHEMA_VERSION,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        target=provenance.target,
        source=provenance.source,
        model_type=model.config.model_type,
        architecture=type(model).__name__,
        program=ProgramEntry(
            form=program.form,
            logits=program.logits,
            batch_size=program.batch_size,
            max_cache_len=provenance.max_cache_len,
            methods={name: _method(program, method, logits_size) for name, method in program.methods.items()},
            equal_rows=needs_equal_rows(program.model, cache),
            rope=_rope(program),
        ),
        vocab_size=vocab_size,
        logits_size=None if logits_size == vocab_size else logits_size,
        dtype=dtype_name(model.dtype),
        layers=layers,
        cache_bytes=cache.nbytes,
        weights_bytes=weights_bytes(model),
        fingerprint=fingerprint(model),
        tokenizer=None if tokenizer is None else type(tokenizer).__name__,
        config=config_fields(model),
        generation_config=generation_config_fields(model, tokenizer),
        packages=installed_versions(packages),
        files=dict(files),
        options=json.loads(json.dumps(dict(provenance.options), default=str)),
        verification=None,
    )


def _rope(program: Program) -> RopeEntry | None:
    rule = rope_rule(program.model)
    if rule is None or not rule.is_reached(program.cache.max_length):
        return None
    return RopeEntry(kind=rule.kind, borders=list(rule.borders), recomputes=rule.recomputes)


def config_fields(model: PreTrainedModel) -> dict[str, Any]:
    """The model's config as JSON, with its class and dtype, without where it was loaded from."""
    fields = json.loads(model.config.to_json_string(use_diff=False))
    fields.pop("_name_or_path", None)
    return {**fields, "architectures": [type(model).__name__], "dtype": dtype_name(model.dtype)}


def generation_config_fields(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> dict[str, Any]:
    """Return what the model's generation config sets, as JSON, with the tokenizer's end token if it names none."""
    config = model.generation_config
    fields = json.loads((config or GenerationConfig()).to_json_string(use_diff=True))
    ends = end_tokens(config, vocab_size_of(model), tokenizer)
    if ends and fields.get("eos_token_id") is None:
        fields["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return fields


def weights_bytes(model: torch.nn.Module) -> int:
    """Bytes of the parameters, tied ones counted once."""
    return sum(parameter.nbytes for parameter in model.parameters())


def _method(program: Program, method: ProgramMethod, logits_size: int) -> MethodEntry:
    inputs, outputs = [_signature(spec) for spec in method.inputs], [_signature(spec) for spec in method.outputs]
    if method.is_step:
        length = method.inputs[0].shape[1]
        gives_all = method.only_scores or program.logits is Logits.ALL
        shape: tuple[int | str, ...] = ("batch", logits_size)
        if gives_all or method.scored_tokens:
            shape = ("batch", length if gives_all else "scored", logits_size)
        outputs = [_signature(TensorSpec(LOGITS, dtype_name(program.model.dtype), shape))]
    if method.is_step and program.form is Form.EXPLICIT:
        state = [
            Signature(name=f"{STATE_PREFIX}{name}", dtype=dtype_name(tensor.dtype), shape=["batch", *tensor.shape[1:]])
            for name, tensor in program.cache.named_state()
        ]
        inputs, outputs = inputs + state, outputs + state
    return MethodEntry(
        min_length=method.min_length,
        max_length=method.max_length,
        read_length=method.kv_read_len,
        scored_tokens=method.scored_tokens,
        ranges=dict(method.ranges),
        inputs=inputs,
        outputs=outputs,
        grid=method.grid,
        item=None if method.item is None else ItemEntry.model_validate(method.item.to_dict()),
        multiple=method.multiple,
    )


def _signature(spec: TensorSpec) -> Signature:
    return Signature(name=spec.name, dtype=spec.dtype, shape=list(spec.shape))
