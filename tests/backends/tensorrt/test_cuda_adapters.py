"""LoRA adapters in the runner without torch, over CUDA on the CPU: files, slots, and errors."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("exportable_cache.backends.tensorrt.upstream", reason="no tensorrt extra is installed")

from exportable_cache import ExportableCache
from exportable_cache.backends.tensorrt.cuda_engines import Cuda, CudaEngines, _stored
from exportable_cache.backends.tensorrt.options import TensorRTOptions
from exportable_cache.backends.tensorrt.target import backend, engine_networks
from exportable_cache.errors import BundleError, InputError
from exportable_cache.generation.checkpoint_settings import CheckpointSettings
from exportable_cache.models.lora import LoraSlots
from exportable_cache.models.lora_arrays import AdapterSlots
from exportable_cache.program.program import Program
from exportable_cache.program.spec import ProgramSpec
from exportable_cache.session.adapters import write_adapter_file
from exportable_cache.session.engine_session import CacheLimits, EngineSession, Step
from exportable_cache.verification.verify import _with_products
from exportable_cache_runner import Options

from .cpu_cuda import CpuCuda, CpuTensorRT
from .cpu_engine import records_by_method
from .models import engine_model
from .programs import CAPACITY, PREFILL
from .test_lora import RANK, SLOTS, random_adapter

PROMPT = [5, 9, 2, 7, 1, 3]
WEIGHTS = "of these weights"


def described(slots: LoraSlots, fingerprint: str = WEIGHTS) -> AdapterSlots:
    """Return the slots as a manifest has them."""
    fields = {"program": {"lora": dataclasses.asdict(slots)}, "fingerprint": fingerprint}
    found = AdapterSlots.of(json.loads(json.dumps(fields)))
    assert found is not None
    return found


def test_adapters_are_loaded_swapped_and_unloaded(tmp_path: Path) -> None:
    """Compare logits with the model that has the adapter's products; the step is one CUDA graph throughout."""
    model = engine_model("llama", num_hidden_layers=1)
    cache = ExportableCache.from_model(model, CAPACITY, attn_implementation=None)
    spec = backend.program_spec(ProgramSpec(PREFILL, lora_slots=SLOTS, lora_rank=RANK), TensorRTOptions())
    program = Program(model, cache, spec)
    assert program.lora is not None
    networks = engine_networks(program, TensorRTOptions())
    records = {name: ("engine.plan", record) for name, record in records_by_method(networks).items()}
    (tmp_path / "engine.plan").write_bytes(b"plan")
    runtime = CpuCuda()
    engines = CudaEngines(tmp_path, records, Cuda(runtime), CpuTensorRT([networks[name] for name in records], runtime))
    methods = {name: Step(*(getattr(program.methods[name], one) for one in LENGTHS)) for name in records}
    limits = CacheLimits.of([{"policy": one.policy.to_config(), "states": None} for one in program.cache.layers])
    slots = described(program.lora)
    session = EngineSession(engines, methods, model.config.vocab_size, limits, CheckpointSettings(), slots=slots)

    adapters = {name: random_adapter(program.lora, seed, rank) for seed, (name, rank) in enumerate(RANKS.items())}
    for name, adapter in adapters.items():
        write_adapter_file(tmp_path / name, adapter, program.lora, WEIGHTS, None)
    for name in ("a", "b"):
        session.load_adapter(tmp_path / name, name)
    with pytest.raises(InputError, match="2 slots for adapters, which hold a, b"):
        session.load_adapter(tmp_path / "c", "c")

    def check(name: str | None) -> None:
        with _with_products(model, {} if name is None else adapters[name].tensors), torch.no_grad():
            expected = model(torch.tensor([[*PROMPT, 7]])).logits[0, -1]
        session.reset()
        session.prefill(PROMPT)
        torch.testing.assert_close(torch.tensor(session.prefill([7])), expected, rtol=0, atol=1e-4)

    check(None)
    for name in ("a", "b", None, "a"):
        session.use_adapter(name)
        check(name)
    session.unload_adapter("a")
    check(None)
    with pytest.raises(InputError, match=r"adapter must be one that was loaded \(b\), got 'a'"):
        session.use_adapter("a")
    session.load_adapter(tmp_path / "c", "c")
    session.use_adapter("c")
    check("c")
    session.load_adapter(tmp_path / "a", "c")
    check("a")
    session.generate([3], Options(max_new_tokens=3))
    session.close()
    assert not runtime.allocated


LENGTHS = ("min_length", "max_length", "scored_tokens")
#: Ranks of the adapters.
RANKS = {"a": RANK, "b": 2, "c": 1}


@pytest.fixture
def slots() -> LoraSlots:
    from exportable_cache.models.lora import LoraTarget

    return LoraSlots(1, 3, "float16", (LoraTarget("one", 4, 2), LoraTarget("two", 2, 6)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_arrays_are_padded_to_the_rank(tmp_path: Path, slots: LoraSlots, dtype: torch.dtype) -> None:
    adapter = random_adapter(slots, 0, 2)
    tensors = {name: (a.to(dtype), b.to(dtype)) for name, (a, b) in adapter.tensors.items() if name == "two"}
    write_adapter_file(tmp_path / "x", dataclasses.replace(adapter, tensors=tensors), slots, WEIGHTS, None)
    found = described(slots).read(tmp_path / "x")
    assert [one.shape for one in found] == [(4, 3), (3, 2), (2, 3), (3, 6)]
    a, b = tensors["two"]
    assert not found[0].any() and not found[1].any() and not found[2][:, 2].any() and not found[3][2].any()
    assert torch.equal(torch.tensor(found[2][:, :2]), a.t().float())
    assert torch.equal(torch.tensor(found[3][:2]), b.t().float())


def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, slots: LoraSlots) -> None:
    path = tmp_path / "x"
    write_adapter_file(path, random_adapter(slots, 0, 3), slots, WEIGHTS, None)
    content = path.read_bytes()
    with pytest.raises(InputError, match="made for other weights"):
        described(slots, "others").read(path)
    for changed, message in (
        ({"rank": 2}, "a rank of at most 2, got 3 in one"),
        ({"targets": slots.targets[:1]}, "changes 'two', which has no slot"),
        ({"targets": (slots.targets[0], dataclasses.replace(slots.targets[1], inputs=3))}, "must have 3 inputs"),
    ):
        with pytest.raises(InputError, match=message):
            described(dataclasses.replace(slots, **changed)).read(path)
    deep = b"[" * 100_000
    for damaged, message in (
        (content[:-1] + bytes([content[-1] ^ 1]), "its checksum differs"),
        (content[:40], "in its header"),
        (b"", "in its header"),
        (len(deep).to_bytes(8, "little") + deep, "in its header"),
        (content.replace(b"adapter.v1", b"adapter.v9"), "has format 'exportable_cache.adapter.v9'"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(BundleError, match=message):
            described(slots).read(path)
    with pytest.raises(BundleError, match="cannot read the adapter"):
        described(slots).read(tmp_path)


def test_slots_that_the_engine_lacks_are_refused(slots: LoraSlots) -> None:
    """An adapter would be written past the memory of the device."""
    shapes = [[2, *one.shape] for one in described(slots).empty()]
    described(slots).check(shapes)
    for changed in ({"slots": 2}, {"rank": 4}, {"targets": slots.targets[:1]}):
        with pytest.raises(BundleError, match="slots for adapters, as its manifest says"):
            described(dataclasses.replace(slots, **changed)).check(shapes)


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    found = torch.from_numpy(_stored(values.numpy(), "bfloat16").view(np.int16)).view(torch.bfloat16)
    assert torch.equal(found, values.bfloat16())
