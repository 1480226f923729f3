"""Attention over the filled slots: the operator's forms agree, and steps that use it compute the same."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from exportable_cache import ExportableCache, Session
from exportable_cache.backends.live import runner
from exportable_cache.cache.attention import functions, operators
from exportable_cache.cache.attention.operators import FILLED_ATTENTION, finding_filled
from exportable_cache.program.program import ResidentModule, program_methods
from exportable_cache.program.spec import ProgramSpec

from .support.attention_operands import CASES, exact, operands, tolerance
from .support.kinds import KINDS
from .support.models import VOCAB, among
from .support.models import tiny_model as model_of_family

_CUDA = torch.device("cuda:0")


def tiny_model(family: str, *given: Any, **overrides: Any) -> Any:
    """Return a tiny model of a family, also of those whose configs have fields of their own."""
    fields = KINDS[family][0] if family in KINDS else {}
    return model_of_family(family, *given, **{**fields, **overrides})


@pytest.mark.parametrize("case", CASES)
def test_the_form_for_cpus_is_exact(case: str) -> None:
    """The CPU form agrees with plain attention over the filled slots, and the fake form has its shape and strides."""
    given = operands(**CASES[case])
    found = FILLED_ATTENTION(*given)
    allowed = tolerance(given[0].dtype)
    torch.testing.assert_close(found.to(torch.float64), exact(*given), atol=allowed, rtol=allowed)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        shape = FILLED_ATTENTION(*torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, given))
    assert (shape.shape, shape.stride(), shape.dtype) == (found.shape, found.stride(), found.dtype)


@pytest.fixture(scope="module")
def interpreted() -> Any:
    """Return the module of the kernels, run by Triton's interpreter, because there may be no GPU."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed; see docs/gpu.md")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("set TRITON_INTERPRET=1 to run kernels on a CPU, as `make test-triton` does")
    from exportable_cache.cache.attention import filled_triton

    return filled_triton


@pytest.mark.parametrize("multiprocessors", [1, 16, 200])
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_is_exact(interpreted: Any, case: str, multiprocessors: int, monkeypatch) -> None:
    """The kernel agrees with plain attention, undivided and in a few and many parts, with the fake form's strides."""
    monkeypatch.setattr(interpreted, "multiprocessors", lambda device: multiprocessors)
    given = operands(**CASES[case])
    found, form = interpreted.filled_attention(*given), FILLED_ATTENTION(*given)
    allowed = tolerance(given[0].dtype)
    torch.testing.assert_close(found.to(torch.float64), exact(*given), atol=allowed, rtol=allowed)
    assert (found.shape, found.stride(), found.dtype) == (form.shape, form.stride(), form.dtype)


#: Dtypes of queries and keys, sizes of heads, or of latents and rotated parts, query heads of a key head, query tokens.
COMPILED = {
    "bfloat16": ("bf16", "bf16", 128, 128, 4, 1),
    "bfloat16, heads of 64": ("bf16", "bf16", 64, 64, 4, 1),
    "bfloat16, heads of 80": ("bf16", "bf16", 80, 80, 1, 1),
    "bfloat16, heads of 256": ("bf16", "bf16", 256, 256, 4, 1),
    "8 bits": ("bf16", "i8", 128, 128, 4, 1),
    "8 queries": ("bf16", "bf16", 128, 128, 8, 8),
    "float16": ("fp16", "fp16", 192, 128, 1, 1),
    "float32": ("fp32", "fp32", 256, 256, 4, 1),
    "latents": ("bf16", "bf16", 512, 64, 128, 1),
    "latents of 256, 16 queries": ("bf16", "bf16", 256, 64, 128, 16),
    "latents in 8 bits": ("bf16", "i8", 512, 64, 16, 1),
    "latents, float16": ("fp16", "fp16", 512, 64, 20, 4),
    "latents, float32": ("fp32", "fp32", 512, 64, 16, 1),
}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("case", COMPILED)
def test_the_kernels_compile_without_a_gpu(case: str, capability: int) -> None:
    """Both kernels compile to machine code, within the shared memory of the smallest GPU with bfloat16 (99 KB)."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed; see docs/gpu.md")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("Triton's interpreter compiles nothing; leave TRITON_INTERPRET out")
    from exportable_cache.cache.attention import filled_triton

    dtype, stored, dim, value_dim, group, queries = COMPILED[case]
    itemsize = 4 if dtype == "fp32" else 2
    rotated = value_dim if case.startswith("latents") else 0
    value_dim = dim if rotated else value_dim
    rows, block, dim_tile, value_tile, rotated_tile = filled_triton.tile_sizes(
        group * queries, dim, value_dim, itemsize, rotated
    )
    pointers = dict.fromkeys(("QUERY", "MASK", "SINKS", "OUT"), f"*{dtype}")
    pointers |= dict.fromkeys(("KEYS", "VALUES"), f"*{stored}") | {"ENDS": "*i64"}
    constants: dict[str, Any] = {
        "KV_HEADS": 8, "GROUP": group, "QUERIES": queries, "PARTS": 64, "PARTS_TILE": 64, "DIM": dim,
        "DIM_TILE": dim_tile, "VALUE_DIM": value_dim, "VALUE_TILE": value_tile, "ROTATED": rotated,
        "ROTATED_TILE": rotated_tile, "ROWS": rows, "BLOCK": block,
        "HAS_SCALES": stored == "i8", "HAS_ENDS": True, "HAS_MASK": True, "MASK_IS_BOOL": False, "HAS_SOFTCAP": True,
        "HAS_SINKS": True, "mask_slot": 1, "key_scale_slot": 1, "value_scale_slot": 1,
    }  # fmt: skip
    made = compiled_for(filled_triton._attend_part, capability, pointers, constants)
    assert made.metadata.shared <= 99 * 1024
    # Products of whole tiles run on tensor cores, and keys are copied in 16 bytes, or 8 if they have 8 bits.
    assert ("mma" in made.asm["ptx"]) is (dtype != "fp32")
    assert "cp.async" in made.asm["ptx"]
    warps = filled_triton.warps_of_merge(value_tile)
    merge = compiled_for(filled_triton._merge_parts, capability, pointers, constants, warps)
    assert merge.metadata.shared <= 99 * 1024


def compiled_for(
    kernel: Any, capability: int, pointers: dict[str, str], constants: dict[str, Any], warps: int = 4
) -> Any:
    """Return a kernel compiled for a GPU that need not be there, with pointers and strides that are divisible by 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, divisible = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("scale", "softcap"):
            signature[name] = "fp32"
        else:
            signature[name] = pointers.get(name, "*fp32" if name.isupper() else "i32")
            divisible[(index,)] = [["tt.divisibility", 16]]
    fixed = {(kernel.arg_names.index(name),): constants[name] for name in kernel.arg_names if name in constants}
    source = ASTSource(kernel, signature, constexprs=fixed, attrs=divisible)
    options = {"num_warps": warps, "num_stages": 2}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.fixture
def counted(monkeypatch) -> list[tuple[int, int]]:
    """Make sessions use the operator on the CPU, and count its calls: query tokens and slots of each."""
    calls: list[tuple[int, int]] = []

    def noted(query: torch.Tensor, stored: Any, *others: Any) -> torch.Tensor:
        calls.append((query.shape[2], stored[0].shape[2]))
        return FILLED_ATTENTION(query, stored, *others)

    monkeypatch.setattr(runner, "reads_filled", lambda device: True)
    monkeypatch.setattr(functions, "FILLED_ATTENTION", noted)
    return calls


def logits_of(model: Any, steps: int = 20, rows: int = 1, **options: Any) -> torch.Tensor:
    """Return the logits of a prompt and of steps past the window, [steps + 1, rows, vocab]."""
    kinds = {name: options.pop(name) for name in ("kv_dtype", "rollback_slots") if name in options}
    cache = ExportableCache.from_model(model, 48, rows, attn_implementation=None, **kinds)
    tokens = torch.randint(3, VOCAB, (rows, steps + 5), generator=torch.Generator().manual_seed(1))
    with Session.from_model(model, cache, score_length=4, **options) as session:
        found = [session.prefill(tokens[:, :5])]
        found += [session.decode(tokens[:, 5 + index]) for index in range(steps)]
        # A few tokens after the window, as in the verification of a draft.
        found += session.score(tokens[:, :3]).unbind(1)
        return torch.stack(found)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"rows": 2, "kv_dtype": "float16"}),
        ("gemma2", {}),
        ("gemma3_text", {"rollback_slots": 3}),
        ("gpt_oss", {}),
        ("deepseek_v3", {"rows": 2}),
        ("deepseek_v32", {}),
    ],
)
def test_steps_compute_the_same(family: str, options: dict[str, Any], counted, monkeypatch) -> None:
    """Eager steps with the operator give the logits of those without, past every window."""
    model = tiny_model(family)
    found = logits_of(model, **options)
    # Rows that would be decoded for nothing keep torch's attention in eager steps.
    assert bool(counted) is ("kv_dtype" not in options)
    monkeypatch.setattr(runner, "reads_filled", lambda device: False)
    torch.testing.assert_close(found, logits_of(model, **options), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", among(["llama", "deepseek_v3"], fast=["llama"]))
def test_one_compiled_step_serves_every_length(family: str, counted, monkeypatch) -> None:
    """A compiled session has one decode step instead of one for each read length, and computes the same."""
    model = tiny_model(family, num_hidden_layers=1)

    def steps(compile: bool | str) -> tuple[list[str], torch.Tensor]:
        cache = ExportableCache.from_model(model, 300, attn_implementation=None, kv_dtype="int8")
        with Session.from_model(model, cache, compile=compile) as session:
            found = torch.stack([session.decode(torch.tensor([3 + index])) for index in range(6)])
            return sorted(name for name in session.runner.methods if name.startswith("decode")), found

    names, found = steps("wait")
    assert names == ["decode"] and (1, 300) in counted
    monkeypatch.setattr(runner, "reads_filled", lambda device: False)
    names, expected = steps(False)
    assert names == ["decode", "decode_128", "decode_256"]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("chunk", [None, operators.MOST_QUERIES])
def test_a_prompt_of_any_length_is_one_graph(chunk: int | None, monkeypatch) -> None:
    """A prompt is compiled once for all lengths, short ones among them, and computes what an eager one does.

    Chunks of few tokens, like drafts that are scored, attend by the operator.
    """
    monkeypatch.setattr(runner, "reads_filled", lambda device: True)
    model = tiny_model("llama", num_hidden_layers=1)
    found = []
    for compile in (False, "wait"):
        cache = ExportableCache.from_model(model, 64, attn_implementation=None)
        with Session.from_model(model, cache, compile=compile, prefill_chunk=chunk) as session:
            found.append(torch.stack([session.prefill(torch.arange(3, 3 + length)[None]) for length in (5, 21, 3)]))
    torch.testing.assert_close(*found, atol=2e-5, rtol=1e-4)


def test_latents_are_expanded_where_their_attention_is_not_the_operators(counted, monkeypatch) -> None:
    """Latents are expanded before attention if their weights cannot be absorbed, or inside it if it cannot use them."""
    model = tiny_model("deepseek_v3")
    found = []
    with monkeypatch.context() as patch:
        patch.setattr(operators.FilledKeys, "are_supported", lambda *given: False)
        found.append(logits_of(model))
    hooks = [layer.self_attn.kv_b_proj.register_forward_hook(lambda *given: None) for layer in model.model.layers]
    found.append(logits_of(model))
    for hook in hooks:
        hook.remove()
    assert not counted
    found.append(logits_of(model))
    assert counted
    monkeypatch.setattr(runner, "reads_filled", lambda device: False)
    expected = logits_of(model)
    for logits in found:
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)


@torch.no_grad()
def traced(family: str, kv_dtype: str | None = None, queries: int = 1) -> list[tuple[str, str]]:
    """Return the operators of a step traced over tensors of a GPU without values, each with the dtype of its keys."""
    from .support.fake_gpu import FakeGpu

    model = tiny_model(family, torch.bfloat16)
    cache = ExportableCache.from_model(model, 64, attn_implementation="exportable_cache", kv_dtype=kv_dtype)
    name = "decode" if queries == 1 else "score"
    method = program_methods(model, cache, ProgramSpec(score_length=0 if queries == 1 else queries))[name]
    gpu = FakeGpu()
    module = ResidentModule(model, cache, method, on_gpu=True)
    gpu.move(module)
    for layer in cache.layers:
        gpu.move_state(layer)
    given = [gpu.moved(torch.zeros(1, queries, dtype=torch.int64)), gpu.moved(torch.zeros(1, dtype=torch.int64))]
    program = torch.export.export(module, tuple(given), strict=False)
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    keys = [node.args[1][0].meta["val"].dtype if node.target is FILLED_ATTENTION else "" for node in calls]
    return [(str(node.target), str(dtype)) for node, dtype in zip(calls, keys, strict=True)]


@pytest.mark.parametrize(
    ("family", "kv_dtype", "queries"),
    [
        ("llama", None, 1),
        pytest.param("llama", "int8", 1, marks=pytest.mark.full),
        pytest.param("llama", None, 4, marks=pytest.mark.full),
        pytest.param("gemma3_text", None, 1, marks=pytest.mark.full),
        ("gpt_oss", None, 1),
        pytest.param("deepseek_v3", None, 1, marks=pytest.mark.full),
        ("deepseek_v3", "int8", 4),
    ],
)
def test_a_step_for_a_gpu_has_one_operator_a_layer(family: str, kv_dtype: str | None, queries: int) -> None:
    """A step of few tokens traced for a GPU attends by the operator, to keys as they are stored."""
    # In a fork, because the device without values is a process's for good.
    with multiprocessing.get_context("fork").Pool(1) as pool:
        calls = pool.apply_async(traced, (family, kv_dtype, queries)).get(300)
    stored = "torch.int8" if kv_dtype == "int8" else "torch.bfloat16"
    assert [dtype for name, dtype in calls if name == str(FILLED_ATTENTION)] == [stored] * 2
    assert not [name for name, _ in calls if "scaled_dot_product" in name]
    # Latents are not expanded: queries and outputs are multiplied by the weights that would expand them.
    products = [name for name, _ in calls if "bmm" in name]
    assert len(products) == (4 if family == "deepseek_v3" else 0)


@torch.no_grad()
def folded_masks(on_gpu: bool) -> int:
    """Return the number of different masks that attention gets in a traced prompt of four layers."""
    model = tiny_model("llama", num_hidden_layers=4)
    cache = ExportableCache.from_model(model, 64)
    method = program_methods(model, cache, ProgramSpec())["prefill"]
    module = ResidentModule(model, cache, method, on_gpu=on_gpu)
    given = (torch.zeros(1, 20, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    program = torch.export.export(module, given, strict=False)
    nodes = [node for node in program.graph.nodes if node.target is torch.ops.aten.scaled_dot_product_attention.default]
    assert len(nodes) == 4 and all(node.args[1].meta["val"].shape[1] == 2 for node in nodes)
    return len({node.args[3] for node in nodes})


def test_a_prompt_folds_a_mask_once() -> None:
    """A prompt's mask is expanded to the query heads of a key head once for all layers; keys never are."""
    assert folded_masks(on_gpu=True) == 1
    assert folded_masks(on_gpu=False) == 4


def test_attention_ignores_keys_of_other_layers() -> None:
    """Keys that a layer did not return, such as expanded ones, are attended to as before."""
    keys = torch.zeros(1, 2, 8, 16)
    with finding_filled([operators.FilledKeys(keys, keys, (keys, keys), None)]):
        assert operators.filled_keys(keys, keys) is not None
        assert operators.filled_keys(keys, keys.clone()) is None
    assert operators.filled_keys(keys, keys) is None


def test_the_reason_against_the_operator_is_said(monkeypatch, caplog) -> None:
    """A GPU without Triton, an old one and the environment variable are named, once each."""
    assert operators.unsupported(torch.device("cpu")) == "it is for CUDA, and the cache is on cpu"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not operators.reads_filled(_CUDA) and "triton is not installed" in caplog.text
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr("exportable_cache.cache.attention.operators.c_compiler", lambda: "")
    assert operators.unsupported(_CUDA) == "triton needs a C compiler, and none was found; install gcc"
    monkeypatch.setattr("exportable_cache.cache.attention.operators.c_compiler", lambda: "gcc")
    assert operators.unsupported(_CUDA) == "the GPU has compute capability 7.5, and the kernel needs 8.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert operators.reads_filled(_CUDA)
    monkeypatch.setenv("EXPORTABLE_CACHE_ATTENTION", "torch")
    assert operators.unsupported(_CUDA) == "EXPORTABLE_CACHE_ATTENTION is torch"
