"""Which layers go through ExecuTorch's fused operators, and what their programs consist of."""

from collections import Counter

import pytest
import torch

from exportable_cache import ExportableCache
from exportable_cache.backends import backend_for
from exportable_cache.program import Program

from ..support.models import tiny_model

pytest.importorskip("executorch", reason="the executorch extra is not installed")

from exportable_cache.backends.executorch.fused import FusedFullLayer, fusable_layers  # noqa: E402
from exportable_cache.backends.executorch.lower import to_edge, to_program  # noqa: E402

from .test_executorch import instructions  # noqa: E402

CAPACITY = 48


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", [True, True]),
        ("mistral", [False, False]),  # rings
        ("gemma3_text", [False, True]),
        ("gemma2", [False, False]),  # soft-capping
        ("gpt_oss", [False, False]),  # sinks
        ("bloom", [False, False]),  # attention and position bias of its own
    ],
)
def test_only_layers_the_operators_compute_exactly_are_fused(family: str, expected: list[bool]) -> None:
    model = tiny_model(family, n_layer=2, n_head=4) if family == "bloom" else tiny_model(family)
    cache = ExportableCache.from_model(model, CAPACITY, attn_implementation=None)
    own = model.config._attn_implementation
    assert fusable_layers(model, cache) == expected
    assert model.config._attn_implementation == own


@pytest.mark.parametrize("change", ["dtype", "batch"])
def test_other_dtypes_and_batches_are_not_fused(change: str) -> None:
    model = tiny_model("llama", dtype=torch.bfloat16 if change == "dtype" else torch.float32)
    cache = ExportableCache.from_model(model, CAPACITY, batch_size=2 if change == "batch" else 1)
    assert fusable_layers(model, cache) == [False, False]


def test_a_window_that_is_never_reached_is_fused() -> None:
    model = tiny_model("mistral", sliding_window=64)
    assert fusable_layers(model, ExportableCache.from_model(model, CAPACITY)) == [True, True]


def test_the_fused_layout_is_part_of_the_program() -> None:
    model = tiny_model("gemma3_text")
    options = backend_for("executorch").program_options({})
    program = Program(model, ExportableCache.from_model(model, CAPACITY), **options)
    assert [type(layer).__name__ for layer in program.cache.layers] == ["RingLayer", "FusedFullLayer"]
    fused = program.cache.layers[1]
    assert fused.keys.shape == (1, CAPACITY, 2, 8)
    assert fused.max_length == CAPACITY and fused.config() == {"capacity": CAPACITY}
    rebuilt = FusedFullLayer.from_state(fused.config(), {})
    assert rebuilt.max_rollback(9, 20) == 9


def test_decode_touches_the_cache_through_the_fused_operators_only() -> None:
    model = tiny_model("llama")
    options = backend_for("executorch").program_options({})
    program = Program(model, ExportableCache.from_model(model, CAPACITY), prefill_length=16, **options)
    result = to_program(to_edge({name: program.export(name) for name in program.methods}))
    for method in ("decode", "prefill"):
        calls = list(instructions(result, method))
        counts = Counter(name for name, _ in calls)
        assert counts["llama::update_cache"] == 4 and counts["llama::custom_sdpa"] == 2
        # RMSNorm stays inside the delegate.
        assert not {"aten::mean", "aten::rsqrt", "aten::mul", "aten::linear"} & counts.keys()
        touching = {name for name, shapes in calls if [1, CAPACITY, 2, 8] in shapes}
        assert touching == {"llama::update_cache", "llama::custom_sdpa"}
        # The mask that transformers prepares goes unused, so neither it nor anything of the allocated length is computed.
        assert not [shapes for name, shapes in calls for shape in shapes if CAPACITY in shape and shape != [1, CAPACITY, 2, 8]]
