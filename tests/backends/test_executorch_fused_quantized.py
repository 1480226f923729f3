"""Keys and values in 8 bits through ExecuTorch's fused operators: the logits, and what the file calls."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from exportable_cache import ExportableCache, export, load
from exportable_cache.cache.attention.implementation import attention_of
from exportable_cache.cache.layers import layer_from
from exportable_cache.cache.storage import Int8Storage
from exportable_cache.verification.references import RoundingCache
from exportable_cache.verification.verify import verify_session

from ..support.models import WINDOW, hybrid_model, tiny_model, tokens
from ..support.sessions import folded_bundle, lowered_session, traced_session

pytest.importorskip("executorch", reason="the executorch extra is not installed")

from executorch.exir._serialize._program import deserialize_pte_binary

from exportable_cache.backends.executorch.attention.forms import dequantize_slots
from exportable_cache.backends.executorch.attention.fused import fuse_layers
from exportable_cache.backends.executorch.attention.layouts import FusedFullLayout, FusedRingLayout, fold_of

from .test_executorch import instructions

CAPACITY = 96
INT8 = Int8Storage("float32")
SCALES = ([2, CAPACITY, 1, 1], [2, WINDOW + 1, 1, 1])
FULL, RING = [2, CAPACITY, 1, 8], [2, WINDOW + 1, 1, 8]


@pytest.fixture(scope="module", params=["traced", pytest.param("lowered", marks=pytest.mark.full)])
def hybrid(request: pytest.FixtureRequest):
    """A ring and a full layer with 4 query heads folded into one product: the model and its session.

    ExecuTorch's kernels are torch operators, too: the graph shows what the layers compute before it is lowered.
    """
    assert fold_of(16, 2, WINDOW) == 4
    if request.param == "lowered":
        model, folder = folded_bundle(kv_dtype="int8", verify=False)
        return model, load(folder)
    model = hybrid_model(num_attention_heads=16)
    for layer in model.model.layers:
        # Not the root of the size of a head, which an operator would take by default.
        layer.self_attn.scaling *= 0.7
    return model, traced_session(model, "executorch", {"kv_dtype": "int8"}, kernels="executorch")


def test_the_layers_take_a_quarter_and_their_scales() -> None:
    model = tiny_model("gemma3_text")
    cache = fuse_layers(model, ExportableCache.from_model(model, CAPACITY, kv_dtype="int8", attn_implementation=None))
    ring, full = cache.layers
    assert (ring.layout, full.layout) == (FusedRingLayout(), FusedFullLayout())
    assert ring.storage == full.storage == INT8
    assert [list(tensor.shape) for _, tensor in full.named_state()] == [FULL, FULL, SCALES[0], SCALES[0], [1]]
    assert [list(tensor.shape) for _, tensor in ring.named_state()] == [RING, RING, SCALES[1], SCALES[1], [1]]
    assert full.keys.dtype == ring.values.dtype == torch.int8 and full.storage.rows_dtype == torch.float32
    rebuilt = layer_from(ring.config(), {})
    assert rebuilt.max_rollback(20, 20) == 1 and rebuilt.storage == INT8


def test_slots_are_read_as_they_were_rounded() -> None:
    stored, scales = INT8.quantize(torch.randn(2, 5, 1, 8))
    assert torch.equal(dequantize_slots(stored, scales), INT8.dequantize(stored, scales))


# Of one to three tokens: fewer slots than the folded form needs. Past the window, and in chunks that are longer than
# it.
@pytest.mark.parametrize("prompt", [1, 2, 3, 7, 8, 9, 17, 40])
@torch.no_grad()
def test_the_logits_are_those_over_rounded_keys_and_values(hybrid, prompt: int) -> None:
    model, session = hybrid
    ids = tokens(prompt + 30, seed=prompt)
    session.reset()
    rows = [
        session.prefill(ids[:, :prompt]),
        *(session.decode(ids[:, position]) for position in range(prompt, prompt + 30)),
    ]
    with attention_of(model, "eager"):
        cache = RoundingCache(INT8, config=model.config)
        expected = [model(ids[:, :prompt], past_key_values=cache).logits[:, -1]]
        expected += [
            model(ids[:, at : at + 1], past_key_values=cache).logits[:, -1] for at in range(prompt, prompt + 30)
        ]
    # A value in the middle between two steps may round the other way; most do not.
    differences = torch.tensor([(row - other).abs().max() for row, other in zip(rows, expected, strict=True)])
    assert differences.max() <= 2e-2 and differences.median() <= 1e-4


def test_the_cache_rounds(hybrid) -> None:
    model, session = hybrid
    rounded, exact = (
        verify_session(session, model, exact_cache=exact, tolerance=9.0).max_difference for exact in (False, True)
    )
    assert rounded < exact / 4 and 1e-3 < exact < 0.2


@pytest.mark.full
def test_the_cache_is_written_in_place_and_read_as_far_as_it_is_filled() -> None:
    _, folder = folded_bundle(kv_dtype="int8", verify=False)
    written = deserialize_pte_binary((folder / "program.pte").read_bytes()).program
    calls = list(instructions(SimpleNamespace(executorch_program=written), "forward"))
    counts = Counter(name for name, _ in calls)
    # Keys, values and their scales; of the ring once more for several tokens.
    assert counts["llama::update_cache"] == 8 and counts["llama::update_cache_with_indices"] == 4
    # Two branches per layer, each of which makes the keys and values it reads float32.
    assert counts["llama::custom_sdpa"] == 4 and counts["quantized_decomposed::dequantize_per_token"] == 8
    assert (
        not {"aten::copy_", "aten::index_put", "aten::index_put_", "aten::expand_copy", "aten::bmm", "aten::mm"}
        & counts.keys()
    )
    writes = {"llama::update_cache", "llama::update_cache_with_indices"}
    plan = written.execution_plan[0]
    buffers = {
        index for chain in plan.chains for instruction in chain.instructions
        if hasattr(instruction.instr_args, "op_index")
        and plan.operators[instruction.instr_args.op_index].name in writes
        for index in instruction.instr_args.args[1:2]
    }  # fmt: skip
    assert len(buffers) == 8 and sorted(list(plan.values[index].val.sizes) for index in buffers) == sorted(
        [FULL, FULL, RING, RING, *SCALES * 2]
    )
    touching = {
        plan.operators[instruction.instr_args.op_index].name
        for chain in plan.chains for instruction in chain.instructions
        if hasattr(instruction.instr_args, "op_index") and buffers & set(instruction.instr_args.args)
    }  # fmt: skip
    # Slices with an end: of the filled slots of a full layer, and of the window of a ring.
    assert touching == writes | {"aten::slice_copy"}


@pytest.mark.full
def test_with_quantised_weights(tmp_path) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    options = {"quantize": "8da4w", "kv_dtype": "int8", "kernels": "executorch"}
    bundle = export(model, "executorch", 48, tmp_path / "out", prefill_chunk=16, **options)
    manifest = bundle.manifest
    assert manifest.verification["passed"]
    assert {(layer.kernel["kind"], layer.storage["kind"]) for layer in manifest.layers} == {("executorch_full", "int8")}
    # 8 + 4 bytes for what takes 32 in float32.
    assert (manifest.cache_bytes - 8) / (manifest.kv_cache.float_bytes - 8) == 12 / 32
    # The cache's own share, of the model with quantised weights, and that of both.
    assert 1e-4 < manifest.kv_cache.max_difference < manifest.quantization.max_difference


@pytest.mark.full
@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
def test_half_precision_goes_through_the_fused_operators(kv_dtype: str) -> None:
    model = tiny_model("gemma3_text")
    session = lowered_session(model, "executorch", CAPACITY, cache_options={"kv_dtype": kv_dtype})
    assert list(session.runner.methods) == ["forward"]
    cache = ExportableCache.from_model(model, CAPACITY, kv_dtype=kv_dtype, attn_implementation=None)
    ring, full = fuse_layers(model, cache).layers
    assert (ring.layout, full.layout) == (FusedRingLayout(), FusedFullLayout())
    assert [list(tensor.shape) for _, tensor in full.named_state()] == [FULL, FULL, [1]]
    report = verify_session(session, model)
    assert report.passed and report.rounding.effect < 0.1
