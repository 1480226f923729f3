"""Cache layers of TensorRT programs: which have a null slot for attention sinks, and that nothing ever writes it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from exportable_cache import ExportableCache, Session, export
from exportable_cache.cache.spec import KV_DTYPES
from exportable_cache.errors import CacheFullError, UnsupportedModelError
from exportable_cache.verification.verify import verify_session

from ...support.layers import full_layer, ring_layer
from ...support.models import WINDOW, tiny_model, tokens

pytest.importorskip("exportable_cache.backends.tensorrt.upstream", reason="no tensorrt extra is installed")

from exportable_cache.backends.tensorrt.kv_cache import EngineLayout, layers_with_sinks
from exportable_cache.backends.tensorrt.options import TensorRTOptions
from exportable_cache.backends.tensorrt.target import engine_networks

from .cpu_engine import cpu_engine_runner
from .models import engine_model
from .programs import CAPACITY, engine_program, network_session, program_of


def null_slots(state: dict[str, torch.Tensor], program) -> dict[str, torch.Tensor]:
    """What lies behind each layer's capacity, by tensor."""
    capacities = {f"cache.layers.{index}.": layer.capacity for index, layer in enumerate(program.cache.layers)}
    return {name: tensor[:, :, capacities[name.rpartition(".")[0] + "."] :] for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("family", "expected"), [("gpt_oss", {0, 1}), ("llama", set()), ("gemma2", set()), ("deepseek_v3", set())]
)
def test_which_layers_have_sinks(family: str, expected: set[int]) -> None:
    model = engine_model(family)
    assert layers_with_sinks(model) == expected
    assert model.config._attn_implementation == "eager"


def test_only_layers_with_sinks_have_a_null_slot() -> None:
    for family, extra in (("gpt_oss", 1), ("llama", 0)):
        program = program_of(engine_model(family))
        for layer in program.cache.layers:
            assert (
                layer.keys.shape[2]
                == layer.values.shape[2]
                == layer.capacity + extra
                == layer.capacity + layer.layout.null_slots
            )


def test_no_step_writes_the_null_slot_and_a_full_cache_refuses_it() -> None:
    model, program, networks = engine_program("gpt_oss")
    runner = cpu_engine_runner(program, networks)
    session = Session(runner, program.cache.layers, model.config.vocab_size, batch_size=1, target="tensorrt")
    assert session.max_length == CAPACITY
    session.prefill(tokens(CAPACITY - 2 * WINDOW))
    for token in tokens(2 * WINDOW, seed=1)[0]:
        session.decode(token[None])
    behind = null_slots(runner.state, program)
    assert {tensor.shape[2] for tensor in behind.values()} == {1}
    assert all(not tensor.any() for tensor in behind.values())
    # Every slot before it was.
    assert all(tensor[:, :, :-1].abs().sum((1, 3)).all() for tensor in runner.state.values())
    with pytest.raises(CacheFullError):
        session.decode(torch.tensor([1]))
    assert all(not tensor.any() for tensor in behind.values())


@pytest.mark.parametrize("make", [full_layer, ring_layer])
def test_a_loaded_state_leaves_the_null_slot_alone(make, tmp_path: Path) -> None:
    """Also one that had reached further than this cache does: its slots behind the length are not wanted."""

    def session(capacity: int) -> Session:
        layer = EngineLayout(null_slots=1).engine_layer(make(1, 2, 4, capacity))
        state = {
            f"cache.layers.0.{name}": tensor for name, tensor in layer.named_state() if name != "cumulative_length"
        }
        runner = SimpleNamespace(methods=engine_program("gemma3_text")[1].methods, state=state)
        return Session(runner, [layer], 128, batch_size=1, target="tensorrt")

    saved = session(8)
    for tensor in saved.runner.state.values():
        tensor[:, :, :8] = 1
    saved.stepper.set_length(0, 20 if make is ring_layer else 8)
    saved.stepper.shift(3 - saved.length)
    saved.save_state(tmp_path / "state.safetensors")
    assert {
        tensor.shape[2] for name, tensor in load_file(tmp_path / "state.safetensors").items() if "layers" in name
    } == {8}
    loaded = session(8 if make is ring_layer else 4)
    loaded.load_state(tmp_path / "state.safetensors")
    for tensor in loaded.runner.state.values():
        assert tensor[:, :, :-1].all() and not tensor[:, :, -1:].any()


@pytest.mark.full
def test_attention_sinks_and_a_window_run_on_in_place() -> None:
    model = tiny_model("llama")
    cache = ExportableCache.from_model(
        model, CAPACITY, attn_implementation=None, attention_sinks=2, attention_window=WINDOW - 2
    )
    program = program_of(model, cache=cache)
    networks = engine_networks(program, TensorRTOptions())
    assert networks["decode"].layer_counts["KV_CACHE_UPDATE"] == 4 == len(networks["decode"].aliases)
    assert (
        networks["decode"].layer_counts["ATTENTION_INPUT"] == networks["prefill"].layer_counts["ATTENTION_INPUT"] == 2
    )
    report = verify_session(
        network_session(model, program, networks), model, tolerance=1e-4, prompts=[3, 40], decode_steps=8
    )
    assert report.passed, str(report)
    assert report.windows == (WINDOW,)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_few_bits_are_refused_before_anything_is_traced(kv_dtype: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=f"target tensorrt, got {kv_dtype}, because its KVCacheUpdate"):
        export(tiny_model("llama"), "tensorrt", CAPACITY, tmp_path / "out", kv_dtype=kv_dtype)
    assert not (tmp_path / "out").exists()
