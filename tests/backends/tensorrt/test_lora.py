"""Slots for adapters as inputs of an engine: written once, chosen for each row by an index."""

from __future__ import annotations

import pytest
import torch

from exportable_cache import ExportableCache, Session
from exportable_cache.models.loading.adapters import LoraWeights
from exportable_cache.models.lora import WRITE_ADAPTER, LoraSlots
from exportable_cache.program.program import Program
from exportable_cache.program.spec import ProgramSpec
from exportable_cache.session.adapters import SessionAdapters
from exportable_cache.verification.verify import _with_products, verify_session

pytest.importorskip("exportable_cache.backends.tensorrt.upstream", reason="no tensorrt extra is installed")

from exportable_cache.backends.tensorrt.evaluator.evaluator import NetworkRunner
from exportable_cache.backends.tensorrt.options import TensorRTOptions
from exportable_cache.backends.tensorrt.target import backend, engine_networks, methods_by_engine

from .cpu_engine import cpu_engine_runner
from .models import engine_model
from .programs import CAPACITY, PREFILL

SLOTS, RANK = 2, 5


def random_adapter(slots: LoraSlots, seed: int, rank: int) -> LoraWeights:
    """Return an adapter of all layers that moves the logits far."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        one.name: (
            0.3 * torch.randn(rank, one.inputs, generator=generator),
            0.3 * torch.randn(one.outputs, rank, generator=generator),
        )
        for one in slots.targets
    }
    return LoraWeights(f"adapter-{seed}", tensors)


def test_networks_add_the_adapter_in_a_slot() -> None:
    """Compare each adapter, and none, with the model that computes the products next to its layers."""
    model = engine_model("llama", num_hidden_layers=1)
    cache = ExportableCache.from_model(model, CAPACITY, attn_implementation=None)
    spec = backend.program_spec(ProgramSpec(PREFILL, lora_slots=SLOTS, lora_rank=RANK), TensorRTOptions())
    program = Program(model, cache, spec)
    assert program.lora is not None and set(program.methods) == {"prefill", "decode", WRITE_ADAPTER}
    networks = engine_networks(program, TensorRTOptions())
    assert len(methods_by_engine(networks)) == 1
    # Nothing of the slots is a constant of the plan.
    assert not any(RANK in one.shape for one in networks["decode"].constants.values())
    adapters = {
        name: random_adapter(program.lora, seed, rank) for seed, (name, rank) in enumerate((("a", RANK), ("b", 2)))
    }
    for runner in (NetworkRunner(program.methods, networks), cpu_engine_runner(program, networks)):
        session = Session(runner, program.cache.layers, model.config.vocab_size, batch_size=1, target="tensorrt")
        loaded = SessionAdapters(program.lora)
        for name, adapter in adapters.items():
            loaded.load(runner, adapter, name)
        # `Session.from_bundle` takes them from the manifest, which these networks lack.
        session.use_slots(loaded)
        for name in ("a", "b", None):
            session.use_adapter(name)
            with _with_products(model, {} if name is None else adapters[name].tensors):
                report = verify_session(session, model, prompts=[3, 20], decode_steps=5, tolerance=1e-4)
            assert report.passed, f"{name}: {report}"
        session.use_adapter("a")
        assert not verify_session(session, model, prompts=[3], decode_steps=1).passed
        session.unload_adapter("a")
        assert verify_session(session, model, prompts=[3], decode_steps=8).passed
