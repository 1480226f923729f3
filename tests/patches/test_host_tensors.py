"""What is made where a step runs is what the originals make on the CPU, and these still do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.models.falcon.modeling_falcon import FalconAttention
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP
from transformers.models.longt5 import modeling_longt5
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding
from transformers.models.pp_formulanet.modeling_pp_formulanet import PPFormulaNetVisionAttention

from exportable_cache.common.patch import ORIGINAL
from exportable_cache.models.patches.mechanisms import host_tensors
from exportable_cache.models.patches.registry import PATCHES, patch_model

from ..decoding.test_gpu_steps import in_a_fork
from ..zoo.architectures import architectures
from ..zoo.build import tiny_model, tokens


def original(function):
    return getattr(function, ORIGINAL, function)


def assert_same(found, expected) -> None:
    pairs = [(found, expected)] if isinstance(found, torch.Tensor) else list(zip(found, expected, strict=True))
    for one, other in pairs:
        assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize(("new", "multi_query", "kv_heads"), [(True, False, 2), (False, True, 1), (False, False, 4)])
def test_heads_of_falcon(new: bool, multi_query: bool, kv_heads: int) -> None:
    attention = SimpleNamespace(
        new_decoder_architecture=new, multi_query=multi_query, num_heads=4, num_kv_heads=kv_heads, head_dim=3
    )
    width = 4 + 2 * kv_heads if new else 6 if multi_query else 12
    fused, function = torch.randn(2, 5, width * 3), original(FalconAttention._split_heads)
    assert_same(host_tensors._falcon_heads(attention, fused, original=function), function(attention, fused))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_quantile_of_gemma_3n(dtype: torch.dtype) -> None:
    layer, states = SimpleNamespace(activation_sparsity=0.95), torch.randn(2, 5, 32, dtype=dtype)
    function = original(Gemma3nTextMLP._gaussian_topk)
    assert_same(host_tensors._gaussian_topk(layer, states, original=function), function(layer, states))


def test_the_local_mask_of_longt5() -> None:
    mask, function = torch.rand(2, 3, 4, 12) < 0.8, original(modeling_longt5._mask_local_attention_mask)
    assert_same(host_tensors._local_mask(mask, 4, original=function), function(mask, 4))


@pytest.mark.parametrize("length", [3, 4, 7, 16])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_the_global_blocks_of_longt5(length: int, dtype: torch.dtype) -> None:
    mask = torch.ones(3, length, dtype=dtype)
    mask[1, 2:] = 0
    mask[2, : length // 2] = 0
    function = original(modeling_longt5._make_global_fixed_block_ids)
    assert_same(host_tensors._global_blocks(mask, 4, original=function), function(mask, 4))


@torch.no_grad()
def test_the_rotary_embedding_of_phimoe() -> None:
    module = next(one for one in model_of("causal", "phimoe").modules() if isinstance(one, PhimoeRotaryEmbedding))
    states, positions = torch.zeros(1, 3, 4, dtype=torch.bfloat16), torch.tensor([[5, 900, 2]])
    function = original(PhimoeRotaryEmbedding.forward)
    assert_same(host_tensors._phimoe(module, states, positions, original=function), function(module, states, positions))


@pytest.mark.parametrize(("q_size", "k_size"), [(4, 4), (4, 7), (7, 4)])
def test_relative_positions_of_towers(q_size: int, k_size: int) -> None:
    table, function = torch.randn(9, 6), original(PPFormulaNetVisionAttention.get_rel_pos)
    assert_same(
        host_tensors._relative_positions(None, q_size, k_size, table, original=function),
        function(None, q_size, k_size, table),
    )


@torch.no_grad()
def test_image_tokens_of_chameleon() -> None:
    model = model_of("image", "chameleon")
    patch_model(model)
    function = type(model).forward
    assert model.image_token_ids.numel() and "image_token_ids" not in model.state_dict()
    for kept in (0, 1):
        found = host_tensors._chameleon(model, tokens(model)[:, :6], logits_to_keep=kept, original=function)
        assert_same(found.logits, function(model, tokens(model)[:, :6], logits_to_keep=kept).logits)


def model_of(group: str, model_type: str):
    return tiny_model(row_of(group, model_type))


def row_of(group: str, model_type: str):
    return next(row for row in architectures() if (row.group, row.model_type) == (group, model_type))


#: Rows of the zoo whose steps leave the device, as upstream has them.
LEAVING = (
    ("causal", "falcon"),
    ("causal", "gemma3n_text"),
    ("causal", "phimoe"),
    ("image", "chameleon"),
    ("image", "pp_formulanet"),
    ("seq2seq", "longt5"),
)


def without_patches(group: str, model_type: str) -> tuple[str, str]:
    from ..zoo.gpu import check

    left_out = host_tensors.PATCHES[model_type]
    for patch in left_out:
        owner, attribute = patch._owner()
        setattr(owner, attribute, original(getattr(owner, attribute)))
    PATCHES[model_type] = tuple(patch for patch in PATCHES[model_type] if patch not in left_out)
    found = check(row_of(group, model_type))
    return found.plain, found.traced


@pytest.mark.canary
@pytest.mark.parametrize(("group", "model_type"), LEAVING)
def test_upstream_still_leaves_the_device(group: str, model_type: str) -> None:
    """Fails once it does not: then the entry in PATCHES can go."""
    assert in_a_fork(without_patches, group, model_type)[1] != "clean"


def test_the_others_are_towers_alone() -> None:
    """Which run once for a picture, and not in steps."""
    shown = {model_type for _, model_type in LEAVING}
    others = {patch.label for name, ones in host_tensors.PATCHES.items() if name not in shown for patch in ones}
    assert others == {"get_rel_pos"}
