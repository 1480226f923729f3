"""This package's operators: what they mean, which layers they serve, and programs that call them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

pytest.importorskip("executorch", reason="the executorch extra is not installed")

from exportable_cache import ExportableCache
from exportable_cache.backends.executorch.attention.fused import fusable_layers, fuse_layers, native_layouts
from exportable_cache.backends.executorch.attention.layouts import NativeLatentLayout, NativeLayout, RowsLayout
from exportable_cache.backends.executorch.lowering.steps import steps_to_native
from exportable_cache.backends.executorch.native.operators import check_native_kernels
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.cache.attention.functions import matmul_attention
from exportable_cache.cache.layers import layer_from
from exportable_cache.cache.storage import KV_DTYPES, storage_of
from exportable_cache.cli.inspect import opened_elsewhere
from exportable_cache.common.native.kernels import VARIABLE
from exportable_cache.errors import BundleError, MissingDependencyError
from exportable_cache.models.patches.mechanisms import fused_attention
from exportable_cache.models.patches.registry import patch_model

from ..support.kinds import KINDS, kind_model
from ..support.models import among, tiny_model
from .native_programs import CAPACITY, LINEARS, OPERATORS, PROGRAMS

STORAGES = {kind: storage_of(torch.float32, None if kind == "float32" else kind) for kind in ("float32", *KV_DTYPES)}
#: First slots, ring, window and chunk of a layer.
REACH = {
    "full": (40, 0, 0, 0),
    "ring": (0, 8, 8, 0),
    "ring with room": (0, 11, 8, 0),
    "first tokens": (3, 7, 6, 0),
    "chunks": (0, 8, 0, 8),
}


@pytest.mark.parametrize("stored", STORAGES)
@pytest.mark.parametrize("reach", REACH)
def test_the_operator_is_attention_over_the_tokens_that_are_seen(reach: str, stored: str) -> None:
    """Over tokens in the order of their positions, by torch's own products: nothing of slots."""
    kept, ring, window, chunk = REACH[reach]
    batch, heads, kv_heads, dim, new, queries = 2, 6, 2, 8, 5, 3
    lengths, storage = torch.tensor([21, 2]), STORAGES[stored]
    rows = torch.randn(2, batch * kv_heads, 26, 1, dim)
    encoded = storage.encode(rows[0], rows[1])
    keys, values = (part.view(batch, kv_heads, 26, dim) for part in storage.decode(encoded))
    slots = [part.new_zeros(part.shape[0], kept + ring, *part.shape[2:]) for part in encoded]
    fresh = [torch.zeros(batch * kv_heads, new, *part.shape[2:], dtype=part.dtype) for part in encoded]
    for part, slot, one in zip(encoded, slots, fresh, strict=True):
        for row, length in enumerate(lengths):
            of_row = slice(row * kv_heads, (row + 1) * kv_heads)
            for position in range(length):
                place = position if position < kept else kept + (position - kept) % ring
                slot[of_row, place] = part[of_row, position]
            one[of_row] = part[of_row, length : length + new]
            if not ring:
                slot[of_row, length : length + new] = one[of_row]
    query = torch.randn(batch, heads, queries, dim)
    sinks, bias = torch.randn(1, heads, 1, 1), torch.randn(batch, heads, queries, 40)
    given = (query, slots, fresh, lengths, 0.3, kept, window, chunk, 2.0, sinks, bias)
    found = torch.ops.exportable_cache.attention(*given)
    for row, length in enumerate(lengths):
        at = length + new - queries + torch.arange(queries)[:, None]
        key_at = torch.arange(length + new)
        seen = (key_at > at - window) if window else (key_at // chunk == at // chunk) if chunk else key_at >= 0
        seen = (seen | (key_at < kept)) & (key_at <= at)
        end = int(length) + new
        mask = torch.where(seen, 0.0, -torch.inf)[None, None]
        expected, _ = matmul_attention(
            torch.nn.Module(), query[row : row + 1], keys[row : row + 1, :, :end], values[row : row + 1, :, :end], mask,
            scaling=0.3, softcap=2.0, s_aux=sinks.flatten(), position_bias=bias[row : row + 1, :, :, :end],
        )  # fmt: skip
        torch.testing.assert_close(found[row], expected[0], atol=1e-5, rtol=1e-5)
    out = torch.empty_like(found)
    assert torch.equal(torch.ops.exportable_cache.attention.out(*given, out=out), found)


def test_the_compiled_operators_are_the_plain_ones(native_bundle) -> None:
    native_bundle(OPERATORS)


@pytest.mark.parametrize(("bits", "kind"), [(8, "int8"), (4, "int4")])
def test_rows_are_rounded_as_the_storage_has_them(bits: int, kind: str) -> None:
    rows, storage = torch.randn(6, 5, 1, 16), STORAGES[kind]
    found, expected = torch.ops.exportable_cache.quantize(rows, bits), storage.quantize(rows)
    assert all(torch.equal(*both) for both in zip(found, expected, strict=True))
    out = {name: torch.empty_like(one) for name, one in zip(("numbers", "scales"), found, strict=True)}
    torch.ops.exportable_cache.quantize.out(rows, bits, **out)
    assert all(torch.equal(*both) for both in zip(out.values(), expected, strict=True))


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_new_keys_and_values_are_rounded_by_one_operator(kv_dtype: str) -> None:
    """Instead of eight plain ones, between which delegates are cut."""
    model = tiny_model("llama")
    cache = ExportableCache.from_model(model, 32, kv_dtype=kv_dtype)
    layer = fuse_layers(model, cache, native=True).layers[0]

    class Update(torch.nn.Module):
        def forward(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return layer.layout.encoded(layer, keys, values)

    states = torch.randn(1, layer.keys.shape[0], 3, layer.storage.head_dim(layer.keys.shape[-1]))
    program = torch.export.export(Update(), (states, states))
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {name for name in called if "getitem" not in name} == {
        "aten.reshape.default", "exportable_cache.quantize.default",
    }  # fmt: skip


# In the fast lane the operator alone: test_native_linears.py.
@pytest.mark.full
def test_a_program_of_4_bits_is_the_model(native_bundle) -> None:
    """Compared with torchao's model by the export itself."""
    native_bundle(LINEARS)


@pytest.mark.parametrize("name", among(PROGRAMS, fast=["rows"]))
def test_a_program_with_our_operators_is_the_model(native_bundle, name: str) -> None:
    native_bundle(name)


def test_a_program_says_what_it_needs_where_that_is_missing(native_bundle) -> None:
    folder = native_bundle("rows")
    assert '"kind": "native"' in (folder / "manifest.json").read_text()
    code = f"from exportable_cache import load; load({str(folder)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, VARIABLE: "executorch"}
    )
    assert f"{BundleError.__name__}: " in done.stderr and f"unset {VARIABLE}, which is 'executorch'" in done.stderr
    # ExecuTorch's log has a page for each operator that it lacks.
    assert "operator_registry.cpp" not in done.stderr


def test_a_program_is_opened_by_the_lines_of_inspect(
    native_bundle, native_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = native_bundle("rows")
    monkeypatch.setattr("exportable_cache.common.native.kernels.installed_path", lambda: native_library)
    lines = opened_elsewhere(Bundle.open(folder).manifest)
    code = "\n".join([*lines, "import sys", "assert 'exportable_cache' not in sys.modules", "print(list(methods))"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0 and "['forward']" in done.stdout, done.stderr[-2000:]


EXPORT = """
import sys
from exportable_cache import export
from tests.support.kinds import kind_model
from tests.support.models import tiny_model
# Verified against the eager model with a cache of the same storage, past one chunk and token by token.
model = kind_model("deepseek_v3") if sys.argv[2] == "latents" else tiny_model("llama")
export(model, "executorch", 64, sys.argv[3], prefill_chunk=16, kernels="native", kv_dtype=sys.argv[1])
"""


@pytest.mark.full
@pytest.mark.parametrize(("kv_dtype", "kept"), [*((kind, "keys") for kind in KV_DTYPES), ("float16", "latents")])
def test_a_program_over_fewer_bits_is_the_model_over_them(
    native_library: Path, tmp_path: Path, kv_dtype: str, kept: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXPORT, kv_dtype, kept, tmp_path / "bundle"],
        capture_output=True, text=True, timeout=600, env={**os.environ, VARIABLE: str(native_library)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_they_cannot_be_exported_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exportable_cache.backends.executorch.native.operators.load_native_kernels", lambda: None)
    with pytest.raises(
        MissingDependencyError, match="kernels='native' and linears='native' need.*exportable-cache native build"
    ):
        check_native_kernels()


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("gemma2", [NativeLayout()] * 2),
        ("gpt_oss", [NativeLayout()] * 2),
        ("llama4_text", [NativeLayout(chunked=True), NativeLayout()]),
        ("gemma3n_text", [NativeLayout(readers=2)] * 2 + [None] * 2),
        ("falcon_h1", [NativeLayout()] * 2),
        ("deepseek_v3", [NativeLatentLayout()] * 2),
        ("deepseek_v32", [NativeLatentLayout(masked=True)] * 2),
        ("mamba2", [None] * 2),
        ("bloom", [NativeLayout()] * 2),
        ("falcon", [NativeLayout()] * 2),
        ("gptj", [NativeLayout()] * 2),
    ],
)
def test_which_layers_are_fused(family: str, expected: list[NativeLayout | None]) -> None:
    model = _model(family)
    assert native_layouts(model, ExportableCache.from_model(model, CAPACITY, rollback_slots=2)) == expected


ZOO = {"falcon": "FalconForCausalLM", "gpt_neox_japanese": "GPTNeoXJapaneseForCausalLM"}


def _model(family: str) -> torch.nn.Module:
    sizes = {
        "bloom": {"n_layer": 2, "n_head": 4},
        "gptj": {"n_layer": 2, "n_head": 4, "n_embd": 32, "rotary_dim": 4},
    }
    if family in ZOO:
        from ..zoo.architectures import Architecture
        from ..zoo.build import tiny_model as zoo_model

        return zoo_model(Architecture(family, "causal", ZOO[family]))
    return kind_model(family) if family in KINDS else tiny_model(family, **sizes.get(family, {}))


@pytest.mark.parametrize("family", ["bloom", "codegen", "deepseek_v3", "falcon", "gptj"])
def test_a_model_with_attention_of_its_own_is_whole_without_its_patch(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where transformers has another source, none of its layers is fused, and nothing else changes."""
    (patch,) = fused_attention.PATCHES[family]
    digest = type(patch).digest
    monkeypatch.setattr(type(patch), "digest", lambda self: "another" if self is patch else digest(self))
    owner, name = patch._owner()
    monkeypatch.setattr(owner, name, getattr(getattr(owner, name), "_exportable_cache_original", getattr(owner, name)))
    model = tiny_model(family, n_layer=2, n_head=4, n_embd=32, rotary_dim=4) if family == "codegen" else _model(family)
    patch_model(model)
    assert not patch.apply()
    cache = ExportableCache.from_model(model, CAPACITY)
    assert native_layouts(model, cache) == [None] * len(cache.layers)
    assert not any(fusable_layers(model, cache))


def test_latents_are_expanded_where_the_operator_cannot_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = kind_model("deepseek_v3")
    assert native_layouts(model, ExportableCache.from_model(model, CAPACITY, kv_dtype="int8")) == [None] * 2
    cache = ExportableCache.from_model(model, CAPACITY, kv_dtype="float16")
    assert native_layouts(model, cache) == [NativeLatentLayout()] * 2
    assert NativeLatentLayout().fused(cache.layers[0]).keys.dtype == torch.float16
    cache = ExportableCache.from_model(model, CAPACITY)
    assert not any(fusable_layers(model, cache))
    # Its weights are in fewer bits: their parts cannot be taken from them.
    monkeypatch.setattr(
        "exportable_cache.backends.executorch.attention.fused.has_quantized_weights", lambda model: True
    )
    assert native_layouts(model, cache) == [None] * 2


def test_several_rows_of_what_our_operators_do_not_serve_go_through_plain_ones() -> None:
    model = _model("gpt_neox_japanese")
    fused = fuse_layers(model, ExportableCache.from_model(model, CAPACITY, 2), native=True)
    assert [type(layer.layout) for layer in fused.layers] == [RowsLayout] * 2


def test_a_layer_is_described_by_its_kernel() -> None:
    model = kind_model("falcon_h1")
    cache = ExportableCache.from_model(model, CAPACITY, 3)
    layer = fuse_layers(model, cache, native=True).layers[0]
    assert layer.keys.shape == (6, CAPACITY, 1, 8) and layer.label == "full + states (native)"
    assert layer_from(layer.config(), {}).layout == NativeLayout()
    latents = ExportableCache.from_model(kind_model("deepseek_v3"), CAPACITY, 3).layers[0]
    assert NativeLatentLayout().fused(latents).keys.shape == (3, CAPACITY, 1, 16 + 8)
    assert {name for name, _ in layer.named_state()} == {name for name, _ in cache.layers[0].named_state()}


#: Calls of native operators in `Between`.
WANTED = {"rms_norm": 1, "rotate": 2, "gate": 1, "to_float16": 1}


class Between(torch.nn.Module):
    """The steps between linear layers as modeling code of transformers has them."""

    def __init__(self, norm: torch.nn.Module, activation: str) -> None:
        super().__init__()
        self.norm, self.activation = norm, ACT2FN[activation]

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Take [1, tokens, heads, dim] and angles [1, tokens, dim]."""
        query = self.norm(x).transpose(1, 2)
        rotated, plain = apply_rotary_pos_emb(query, x.permute(0, 2, 1, 3), cos, sin)
        return rotated, plain.half(), self.activation(x) * plain.transpose(1, 2)


@pytest.mark.parametrize(("norm", "activation"), [(LlamaRMSNorm, "silu"), (Gemma3RMSNorm, "gelu_pytorch_tanh")])
def test_steps_between_linear_layers_become_native(norm: type[torch.nn.Module], activation: str) -> None:
    module = Between(norm(8, eps=1e-3), activation)
    torch.nn.init.normal_(module.norm.weight)
    given = (torch.randn(1, 5, 2, 8), torch.randn(1, 5, 8), torch.randn(1, 5, 8))
    expected = module(*given)
    program = steps_to_native(torch.export.export(module, given))
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    names = Counter(str(node.target) for node in calls if "exportable_cache" in str(node.target))
    assert names == {f"exportable_cache.{name}.default": count for name, count in WANTED.items()}
    # The weight is part of the call, and a transposed view is read where it is.
    assert next(node for node in calls if "rms_norm" in str(node.target)).args[1] is not None
    assert sorted(node.args[3] for node in calls if "rotate" in str(node.target)) == [False, True]
    for found, wanted in zip(program.module()(*given), expected, strict=True):
        torch.testing.assert_close(found, wanted)


class UnequalAngles(torch.nn.Module):
    """A rotation by cosines and sines of different batch sizes."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Take [2, 2, 5, 8] twice."""
        return x * y[:1, :1] + torch.cat([-x[..., 4:], x[..., :4]], -1) * y[:, :1]


def test_a_rotation_by_unequal_angles_stays_as_it_is() -> None:
    """Check that the operator is not called with angles which it refuses."""
    program = steps_to_native(torch.export.export(UnequalAngles(), (torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8))))
    assert not [node for node in program.graph.nodes if "exportable_cache" in str(node.target)]


def test_a_gate_of_a_huge_value_is_finite() -> None:
    """Check a value whose square is infinite."""
    huge = torch.tensor([1e20, float("inf")])
    assert torch.equal(torch.ops.exportable_cache.gate(huge, torch.ones(2), 1.0, 0.0), huge)


class Unlike(torch.nn.Module):
    """Steps that differ from those of the native operators in one thing each."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Take [1, 2, 5, 8] twice."""
        turned = torch.cat([-x[..., 4:], x[..., :4]], -1)
        odd = x[..., :7]
        changed = x.clone()
        gated = torch.nn.functional.silu(changed)
        changed[0].add_(1)
        scaled = torch.nn.functional.silu(y)
        scaled[:, :1].mul_(2)
        return (
            x * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-3),
            x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-3),
            x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + 1e-3),
            x * y + turned * y,
            y * y[:, :1] + turned * y[:, :1],
            torch.nn.functional.gelu(x) * y,
            torch.nn.functional.silu(x) * y[..., :1],
            (torch.nn.functional.silu(x.double()) * y.double()).float(),
            torch.add(x * y[:, :1], turned * x[:, :1], alpha=2),
            x * torch.rsqrt(torch.add(x.pow(2).mean(-1, keepdim=True), 1e-3, alpha=2)),
            x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True, dtype=torch.float64) + 1e-3),
            odd * y[:, :1, :, 1:] + torch.cat([-odd[..., 3:], odd[..., :3]], -1) * y[:, :1, :, 1:],
            gated * y,
            scaled * x,
        )


def test_other_steps_stay_as_they_are() -> None:
    given = (torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8))
    expected = Unlike()(*given)
    program = steps_to_native(torch.export.export(Unlike(), given))
    for found, wanted in zip(program.module()(*given), expected, strict=True):
        torch.testing.assert_close(found, wanted, equal_nan=True)
    assert not [node for node in program.graph.nodes if "exportable_cache" in str(node.target)]
