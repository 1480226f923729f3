"""Steps on a GPU that computes nothing: they wait for no value, and no tensor of theirs is anywhere else."""

from __future__ import annotations

import multiprocessing
from types import SimpleNamespace

import pytest
import torch
from transformers import Llama4TextConfig
from transformers.masking_utils import bidirectional_mask_function
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from exportable_cache import ExportableCache
from exportable_cache.backends.live.compile import CompileOptions, StepCompiler
from exportable_cache.cache.attention.functions import fused_attention
from exportable_cache.cache.attention.masks import position_mask
from exportable_cache.models.joined_linears import join_linears
from exportable_cache.models.patches.registry import patch_types
from exportable_cache.program.program import ResidentModule, program_methods
from exportable_cache.program.spec import ProgramSpec

from ..support.models import hybrid_model, tiny_model

CLEAN = {"plain": "clean", "traced": "clean"}


def in_a_fork(work, *arguments):
    """The device is a process's for good, and other tests ask for none."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply_async(work, arguments).get(300)


def checked(group: str, model_type: str) -> dict[str, str]:
    from ..zoo.architectures import architectures
    from ..zoo.gpu import check

    (row,) = (row for row in architectures() if (row.group, row.model_type) == (group, model_type))
    found = check(row)
    return {"plain": found.plain, "traced": found.traced}


@pytest.mark.parametrize(
    ("group", "model_type"),
    [
        # Windows and recurrent layers: their masks and states have widths that depend on the length of a prompt.
        # GPT-OSS has both of Llama's and Mistral's layers.
        pytest.param("causal", "gemma3_text", marks=pytest.mark.full),
        pytest.param("causal", "mistral", marks=pytest.mark.full),
        ("causal", "gpt_oss"),
        ("causal", "qwen3_next"),
        pytest.param("causal", "falcon_h1", marks=pytest.mark.full),
        pytest.param("causal", "llama4_text", marks=pytest.mark.full),
        pytest.param("causal", "opt", marks=pytest.mark.full),
        pytest.param("causal", "deepseek_v3", marks=pytest.mark.full),
        pytest.param("seq2seq", "bart", marks=pytest.mark.full),
        pytest.param("seq2seq", "t5", marks=pytest.mark.full),
        pytest.param("speech", "whisper", marks=pytest.mark.full),
    ],
)
def test_a_prompt_and_a_step_stay_on_the_gpu(group: str, model_type: str) -> None:
    """Check that both run on the device, and that one graph of the prompt serves every length."""
    assert in_a_fork(checked, group, model_type) == CLEAN


@torch.no_grad()
def scanned() -> list[str]:
    """Run every scan over a prompt and a token on the GPU that computes nothing; return results that are elsewhere."""
    from ..scans.test_scans import SCANS
    from ..support.fake_gpu import DEVICE, FakeGpu

    gpu, found = FakeGpu(), []
    for name, (scan, make, _, _) in SCANS.items():
        for length in (9, 1):
            inputs, state = make(length)
            given = {key: gpu.moved(one) if isinstance(one, torch.Tensor) else one for key, one in inputs.items()}
            try:
                with gpu:
                    results = scan(**given, initial_state=gpu.moved(state))
            except Exception as error:  # not all of torch's can be sent from a fork
                found.append(f"{name} of {length}: {error}")
                continue
            found += [f"{name} of {length} is on {one.device}" for one in results if one.device != DEVICE]
    return found


def test_scans_stay_on_the_gpu() -> None:
    """Check what recurrent layers share, because only --full runs a model with them, above."""
    assert in_a_fork(scanned) == []


@torch.no_grad()
def traced(part: str) -> list[str]:
    """Export a part of a model for every length on the GPU that computes nothing, and return the findings."""
    from ..support.fake_gpu import FakeGpu, unaligned_masks

    module, shape = PARTS[part]()
    gpu, length = FakeGpu(), torch.export.Dim("length", min=2, max=64)
    gpu.move(module)
    shapes = ({shape.index(7): length},)
    return unaligned_masks(torch.export.export(module, (gpu.moved(torch.zeros(shape)),), dynamic_shapes=shapes))


class EncoderAttention(torch.nn.Module):
    """Self-attention of an encoder with a padding mask; `groups` query heads share a key head."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Attend among states [1, length, 4]."""
        length, device = states.shape[1], states.device
        padding = torch.ones(1, length, dtype=torch.int64, device=device)
        mask = position_mask(1, length, length, 0, 0, bidirectional_mask_function, padding, device=device)
        keys = states[:, None]
        return fused_attention(self, keys.expand(1, self.groups, length, 4), keys, keys, mask)[0]


def llama_experts(is_patched: bool = True) -> torch.nn.Module:
    """Return a mixture of experts of Llama 4, with or without the patches of its model type."""
    config = Llama4TextConfig(hidden_size=8, intermediate_size=8, num_local_experts=2)
    if is_patched:
        patch_types(["llama4_text"])
    return Llama4TextMoe(config)


#: Part -> a function that returns its module and the shape of its input, in which 7 is the length.
PARTS = {
    "experts": lambda: (llama_experts(), (1, 7, 8)),
    "original experts": lambda: (llama_experts(is_patched=False), (1, 7, 8)),
    "attention": lambda: (EncoderAttention(1), (1, 7, 4)),
    "grouped attention": lambda: (EncoderAttention(2), (1, 7, 4)),
}


@pytest.mark.parametrize("part", ["experts", pytest.param("attention", marks=pytest.mark.full), "grouped attention"])
def test_a_part_is_traced_for_every_length(part: str) -> None:
    """Check the experts of Llama 4 and the attention of encoders, whose graphs had guards on the length."""
    assert in_a_fork(traced, part) == []


@torch.no_grad()
def guarded(part: str) -> str:
    """Return the error of exporting a part for every length, "" if there is none."""
    try:
        traced(part)
    except Exception as error:  # torch raises several classes
        return str(error)
    return ""


@pytest.mark.canary
def test_the_original_experts_still_have_a_guard_on_the_length() -> None:
    """Fails once transformers' can be traced for every length: then the patch of Llama4TextExperts can go."""
    assert "length" in in_a_fork(guarded, "original experts")


@pytest.mark.full
def test_what_waits_is_found() -> None:
    found = in_a_fork(checked, "causal", "dbrx")
    assert "waits for a size at `modeling_dbrx.py`" in found["plain"] and found["traced"] == "clean"


@torch.no_grad()
def chosen(greedy: bool, penalised: bool) -> tuple[list[int], list[str]]:
    """Shape of the tokens of two steps with the choice in them, as they are; and what is wrong with them traced."""
    from exportable_cache.generation.loop import ChoosingSteps

    from ..support.fake_gpu import DEVICE, FakeGpu, nodes_elsewhere, waiting_nodes

    model = hybrid_model()
    cache = ExportableCache.from_model(model, 64, rollback_slots=1)
    decode = program_methods(model, cache, ProgramSpec())["decode"]
    steps, gpu = ChoosingSteps(ResidentModule(model, cache, decode), greedy, penalised, 2), FakeGpu()
    gpu.move(steps)
    given = [torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)]
    given += [] if greedy else [torch.rand(2, 1)]
    given += [torch.zeros(1, model.config.vocab_size, dtype=torch.bool)] if penalised else []
    given += [torch.tensor(number) for number in (0.8, 40, 0.9, 0.1, 1.2)]
    given = [gpu.moved(tensor) for tensor in given]
    with gpu:
        tokens = steps(*given)
    assert tokens.device == DEVICE
    program = torch.export.export(steps, tuple(given), strict=False)
    return list(tokens.shape), [*waiting_nodes(program), *nodes_elsewhere(program)]


@pytest.mark.parametrize(("greedy", "penalised"), [pytest.param(True, False, marks=pytest.mark.full), (False, True)])
def test_the_choice_stays_on_the_gpu(greedy: bool, penalised: bool) -> None:
    assert in_a_fork(chosen, greedy, penalised) == ([1, 2], [])


@pytest.mark.parametrize("on_gpu", [False, True])
@torch.no_grad()
def test_a_graph_finds_all_but_the_inputs_of_a_step_where_they_were(on_gpu: bool) -> None:
    """A CUDA graph is recorded with these addresses. Of other tensors it keeps copies, and cannot write to them."""
    model, tensors = tiny_model("gemma3_text"), {}
    if on_gpu:
        assert join_linears(model) == 4
    cache = ExportableCache.from_model(model, 64)
    decode = program_methods(model, cache, ProgramSpec())["decode"]

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        for node in graph.graph.find_nodes(op="placeholder"):
            tensors[node.name] = "_dynamo_static_input_type" in node.meta["tensor_dict"]
        return graph

    module = ResidentModule(model, cache, decode, on_gpu=on_gpu)
    step = torch.compile(module, fullgraph=True, dynamic=False, backend=backend)
    step(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    assert sum("keys" in name for name in tensors) == len(cache.layers)
    assert len([name for name, stays in tensors.items() if not stays]) == 2
    assert sum("joined_weight" in name for name in tensors) == (4 if on_gpu else 0)


@pytest.mark.parametrize("given", [None, "max-autotune"])
def test_a_mode_is_passed_on(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one, torch captures no CUDA graphs: the runner does (`tests/backends/test_cuda_graphs.py`)."""
    model = tiny_model("llama")
    methods = program_methods(model, ExportableCache.from_model(model, 64), ProgramSpec(16))
    there = SimpleNamespace(device=torch.device("cuda"), batch_size=1)
    modes: list[str | None] = []
    monkeypatch.setattr(torch, "compile", lambda step, **options: modes.append(options["mode"]))
    compiler = StepCompiler(model, there, CompileOptions("wait", given))
    for name, length in (("decode", 1), ("prefill", 7)):
        inputs = torch.zeros(1, length, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        compiler.compile(torch.nn.Identity(), methods[name], name, inputs)
    assert [compiler.chooses_separately(penalised) for penalised in (False, True)] == [False, True]
    assert modes == [given, given]
