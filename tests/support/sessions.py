"""Sessions over each target, without the bundle around them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from exportable_cache import ExportableCache, Session, export
from exportable_cache.backends import backend_for
from exportable_cache.backends.base import ProgramDescription
from exportable_cache.models.layers.specs import vocab_size_of
from exportable_cache.models.quantization.quantize import QuantizedModel, quantize
from exportable_cache.models.quantization.spec import Quantization
from exportable_cache.program.program import Program
from exportable_cache.program.spec import ProgramSpec

from .compiling import require_compiler
from .models import WINDOW, hybrid_model, tiny_model
from .store import model_key, stored

DESCRIPTION = "description.pickle"


def describe(program: Program) -> ProgramDescription:
    """What a bundle's manifest would say of a program."""
    layers = [
        {
            "config": layer.config(),
            "tensors": {
                name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
                for name, tensor in layer.named_state()
            },
        }
        for layer in program.cache.layers
    ]
    return ProgramDescription(program.methods, program.form, program.logits, program.batch_size, layers)


#: Of a program with `forward` besides `prefill` and `decode`, and of its chunks: not those of other programs.
BOTH_PREFILL = 24

#: The spec of tests that need no other: entries of the store are shared only where specs are equal.
CAPACITY, PREFILL = 96, 16


@dataclass(frozen=True)
class Lowered:
    """A model lowered for a target: the files, what a manifest would say of them, and a cache of the same layers."""

    target: str
    folder: Path
    description: ProgramDescription
    cache: ExportableCache


def lowered(
    model: PreTrainedModel,
    target: str,
    max_cache_len: int = CAPACITY,
    batch_size: int = 1,
    prefill_chunk: int = PREFILL,
    attention_sinks: int | None = None,
    max_encoder_len: int | None = None,
    cache_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Lowered:
    """Taken from the store if it was lowered before. Read the files only."""
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
    program = Program(model, cache, backend.program_spec(ProgramSpec(prefill_chunk), parsed))

    def lower(folder: Path) -> None:
        folder.mkdir()
        backend.lower(program, folder, parsed)
        # After lowering, which may narrow the lengths that a method takes.
        (folder / DESCRIPTION).write_bytes(pickle.dumps(describe(program)))

    spec = {
        "target": target, "max_cache_len": max_cache_len, "batch_size": batch_size, "prefill_chunk": prefill_chunk,
        "attention_sinks": attention_sinks, "max_encoder_len": max_encoder_len, "cache_options": cache_options,
        "options": options, "model": model_key(model),
    }  # fmt: skip
    folder = stored({"lowered": spec}, lower)
    return Lowered(target, folder, pickle.loads((folder / DESCRIPTION).read_bytes()), cache)


def lowered_session(model: PreTrainedModel, target: str, *arguments: Any, **options: Any) -> Session:
    """A session over what `lowered` gives; the same arguments."""
    return opened(model, lowered(model, target, *arguments, **options))


def opened(model: PreTrainedModel, found: Lowered) -> Session:
    """A session over what was lowered from a model."""
    runner = backend_for(found.target).open(found.folder, found.description)
    batch_size = found.description.batch_size
    return Session(runner, found.cache.layers, vocab_size_of(model), batch_size=batch_size, target=found.target)


class TracedRunner:
    """Runs the graphs that a target would lower, by torch."""

    def __init__(self, program: Program) -> None:
        self.methods = program.methods
        self._modules = {name: program.export(name).module() for name in program.methods}

    @torch.no_grad()
    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor:
        return self._modules[method](*inputs)


def traced_session(
    model: PreTrainedModel, target: str, cache_options: Mapping[str, Any] | None = None, **options: Any
) -> Session:
    """Return a session over a target's graphs before they are lowered, in a quarter of the time of `lowered_session`.

    For what a target's layers compute, of a program with one method: methods would have a cache each.
    """
    backend = backend_for(target)
    cache = ExportableCache.from_model(model, CAPACITY, **(cache_options or {}))
    program = Program(model, cache, backend.program_spec(ProgramSpec(PREFILL), backend.options.parse(options)))
    assert len(program.methods) == 1
    return Session(TracedRunner(program), cache.layers, vocab_size_of(model), batch_size=1, target=target)


def exported_bundle(model: PreTrainedModel, target: str, max_cache_len: int = CAPACITY, **options: Any) -> Path:
    """Folder of a model's bundle, taken from the store if it was exported before. Read it only.

    Args:
        options: Of `export`; values that JSON can write. For `executorch` the operators are ExecuTorch's by default, so
            that every runner opens the bundle, whatever is installed here.
    """
    if target == "executorch" and "delegate" not in options:
        options = {"kernels": "executorch", **options}
    key = {"bundle": {"target": target, "max_cache_len": max_cache_len, "options": options, "model": model_key(model)}}
    return stored(key, lambda folder: export(model, target, max_cache_len, folder, **options))


def folded_bundle(**options: Any) -> tuple[PreTrainedModel, Path]:
    """A ring and a full layer for ExecuTorch, 4 query heads folded into one product: the model and its bundle."""
    model = hybrid_model(num_attention_heads=16)
    return model, exported_bundle(model, "executorch", prefill_chunk=PREFILL, **options)


def split_bundle() -> tuple[PreTrainedModel, Path]:
    """A ring and a full layer for ExecuTorch, two methods of plain operators, whose tied table is most of the file."""
    model = tiny_model("gemma2", vocab_size=16384, tie_word_embeddings=True)
    return model, exported_bundle(model, "executorch", prefill_chunk=PREFILL, verify=False)


def bundle_of_both() -> tuple[PreTrainedModel, Path]:
    """One full layer for ExecuTorch with all three methods, whose weights, with a tied table, are most of the file."""
    sizes = {"hidden_size": 128, "intermediate_size": 1024, "vocab_size": 4096, "num_hidden_layers": 1}
    model = tiny_model("llama", **sizes, tie_word_embeddings=True)
    options = {"methods": "both", "prefill_chunk": BOTH_PREFILL, "verify": False}
    return model, exported_bundle(model, "executorch", **options)


def quantized_model(scheme: Quantization, tied: bool) -> QuantizedModel:
    """A model of one layer whose weights and token table are integers."""
    sizes = {"hidden_size": 64, "head_dim": 16, "vocab_size": 2048, "num_hidden_layers": 1}
    return quantize(tiny_model("llama", **sizes, tie_word_embeddings=tied), scheme)


def sinks_bundle() -> tuple[PreTrainedModel, Path]:
    """A ring and a layer with three attention sinks and a window of 8 for ExecuTorch: the model and its bundle."""
    model = tiny_model("gemma3_text", max_position_embeddings=16384)
    options = {"prefill_chunk": PREFILL, "attention_sinks": 3, "verify": False}
    return model, exported_bundle(model, "executorch", 3 + WINDOW, **options)


#: Of `aoti` bundles.
AOTI_CAPACITY = 64


def layer_for_aoti() -> PreTrainedModel:
    """A ring alone: its decode step is the least that there is to compile ahead of time."""
    return tiny_model("mistral", num_hidden_layers=1, tie_word_embeddings=True)


def aoti_bundle(model: PreTrainedModel) -> Path:
    """Machine code of a model."""
    with _headers_as_they_are():
        return exported_bundle(model, "aoti", AOTI_CAPACITY, prefill_chunk=PREFILL, verify=False)


def regional_aoti_bundle(model: PreTrainedModel, **options: Any) -> Path:
    """Machine code of a model, token by token."""
    with _headers_as_they_are():
        return exported_bundle(model, "aoti", AOTI_CAPACITY, prefill_chunk=1, verify=False, **options)


def rounded_aoti_bundle() -> tuple[PreTrainedModel, Path]:
    """A model and its machine code over keys and values in 8 bits, token by token in two buckets."""
    model = tiny_model("llama", num_hidden_layers=1)
    with _headers_as_they_are():
        return model, exported_bundle(model, "aoti", AOTI_CAPACITY, prefill_chunk=1, kv_dtype="int8", buckets=[16])


def _headers_as_they_are() -> AbstractContextManager[None]:
    """A block in which AOTInductor compiles no headers beforehand, for which a test has too few kernels."""
    require_compiler()
    from torch._inductor import config

    return config.patch({"aot_inductor.precompile_headers": False})


def live_session(
    model: PreTrainedModel, compile: bool, max_cache_len: int, batch_size: int = 1, **options: Any
) -> Session:
    """A session over the model itself."""
    cache = ExportableCache.from_model(model, max_cache_len, batch_size)
    return Session.from_model(model, cache, compile="wait" if compile else False, prefill_chunk=16, **options)
