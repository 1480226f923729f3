"""The indexer's keys of a sparse attention layer."""

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from exportable_cache import ExportableCache, Session
from exportable_cache.cache.attention.functions import selected_mask
from exportable_cache.cache.layers import IndexedLayer
from exportable_cache.cache.step import StepContext
from exportable_cache.errors import InputError

from ..support.layers import indexed_layer
from ..zoo.build import STEPS, cached_logits, made, tiny_model, tokens
from ..zoo.conditioning import TOLERANCE
from ..zoo.shrink import FIRST_TOKEN, VOCAB
from ..zoo.test_zoo import row_of

CAPACITY, DIM = 8, 3


def layer(batch_size: int = 1) -> IndexedLayer:
    return indexed_layer(batch_size, 1, 2, CAPACITY, index_head_dim=DIM)


def new(length: int, value: float, batch_size: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((batch_size, 1, length, 2), value), torch.full((batch_size, length, DIM), value)


@pytest.mark.parametrize("indexer_first", [False, True])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_keys_of_both_kinds_share_their_slots(indexer_first: bool, batch_size: int) -> None:
    kept = layer(batch_size)
    for step, length in enumerate((3, 1, 2), start=1):
        keys, indexer_keys = new(length, float(step), batch_size)
        if indexer_first:
            found = kept.update_indexer(indexer_keys)
            kept.update(keys, keys)
        else:
            kept.update(keys, keys)
            found = kept.update_indexer(indexer_keys)
    for row in range(batch_size):
        assert found[row, :, 0].tolist() == kept.keys[row, 0, :, 0].tolist() == [1, 1, 1, 2, 3, 3, 0, 0]


def test_rows_of_different_length_in_a_program() -> None:
    cache = ExportableCache([layer(2)])
    stepped = cache.with_state(dict(cache.named_state()), StepContext(torch.tensor([0, 4]), in_place=False)).layers[0]
    keys, indexer_keys = new(2, 5.0, 2)
    stepped.update(keys, keys)
    found = stepped.update_indexer(indexer_keys)
    assert found[:, :, 0].tolist() == [[5, 5, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 5, 5, 0, 0]]
    assert not cache.layers[0].indexer_keys.any()


def test_wrong_size() -> None:
    with pytest.raises(InputError, match="index_head_dim of an indexed layer is 0"):
        indexed_layer(1, 1, 2, CAPACITY, index_head_dim=0)


def test_a_program_that_counts_nothing_still_tells_the_length_after_the_update() -> None:
    """GLM 5 Next hides keys by the length that it asks for between `update` and `update_indexer`."""
    cache = ExportableCache([layer()])
    stepped = cache.with_state(dict(cache.named_state()), StepContext(torch.tensor([2]))).layers[0]
    assert stepped.get_seq_length().item() == 2
    keys, _ = new(3, 1.0)
    stepped.update(keys, keys)
    assert stepped.get_seq_length().item() == 5 and stepped.cumulative_length.tolist() == [2]


def test_a_token_may_have_a_key_alone() -> None:
    kept = indexed_layer(1, 1, 2, CAPACITY, index_head_dim=DIM, value_head_dim=0)
    keys, _ = new(3, 1.0)
    found, values = kept.update(keys, keys[..., :0])
    assert found[0, 0, :, 0].tolist() == [1, 1, 1, 0, 0, 0, 0, 0] and values.shape == (1, 1, CAPACITY, 0)


def test_selected_blocks_are_those_of_the_model() -> None:
    """The mask equals upstream's, with a last block that is cut off, and indices that select no block."""
    model = tiny_model(row_of("minimax_m3_vl_text"))
    attention = model.model.layers[1].self_attn
    keys, queries = 11, 3
    blocks = torch.tensor([[[[0, 2, -1], [2, 1, 0], [1, -1, -1]], [[2, -1, -1], [0, -1, -1], [1, 2, -1]]]])
    positions = torch.arange(keys - queries, keys)[None]
    expected = attention.indexer.build_block_mask(blocks, None, keys, torch.float32, "cpu", positions)
    lowest = torch.finfo(torch.float32).min
    causal = torch.where(torch.arange(keys) <= positions[0, :, None], 0.0, lowest)[None, None]
    for mask in (causal, causal == 0):
        assert torch.equal(selected_mask(attention, mask, {"block_indices": blocks}, keys, torch.float32), expected)
    assert selected_mask(attention, causal, {}, keys, torch.float32) is causal


@torch.no_grad()
def difference(model: PreTrainedModel, ids: torch.Tensor, expected: torch.Tensor, prompt: int) -> float:
    session = Session.from_model(model, ExportableCache.from_model(model, 64, attn_implementation=None))
    rows = [session.prefill(ids[:, :prompt])[0].clone()]
    rows += [session.decode(ids[:, prompt + step])[0].clone() for step in range(STEPS)]
    return (torch.stack(rows) - expected).abs().max().item()


def test_a_model_with_blocks_of_keys_is_the_model_itself() -> None:
    """MiniMax M3 past the tokens that its blocks hold, where the selection decides."""
    model = tiny_model(row_of("minimax_m3_vl_text"))
    ids, prompt = tokens(model), 11
    expected = cached_logits(model, ids, prompt)
    assert difference(model, ids, expected, prompt) <= TOLERANCE
    model.config.index_topk_blocks = 16
    whole = made(row_of("minimax_m3_vl_text"), model.config).eval()
    whole.load_state_dict(model.state_dict())
    assert (cached_logits(whole, ids, prompt) - expected).abs().max() > 1e-2


@pytest.mark.skipif(not hasattr(transformers, "MistralLarge4Config"), reason="this transformers has no Mistral Large 4")
@pytest.mark.parametrize("kv_dtype", [None, "float16"])
def test_a_layer_may_keep_indexer_keys_alone(kv_dtype: str | None) -> None:
    """Layers of Mistral Large 4 read another layer's keys, with an indexer of their own or without."""
    model = tiny_model(row_of("mistral_large4"))
    cache = ExportableCache.from_model(model, 64, kv_dtype=kv_dtype, attn_implementation=None)
    kinds = [(type(layer).__name__, getattr(layer.storage, "kind", None)) for layer in cache.layers]
    rows = kv_dtype or "float"
    assert kinds == [("IndexedLayer", rows), ("CacheLayer", "float"), ("CacheLayer", None), ("IndexedLayer", rows)]
    ids, prompt = tokens(model), 11
    assert kv_dtype or difference(model, ids, cached_logits(model, ids, prompt), prompt) <= TOLERANCE


def test_keys_selected_by_their_values_are_the_models() -> None:
    """Doge past its keep_window_size, without repeated tokens, which tie in its first layer."""
    model = tiny_model(row_of("doge"))
    ids, prompt = FIRST_TOKEN + torch.randperm(VOCAB - FIRST_TOKEN, generator=generator())[None, : 11 + STEPS], 11
    whole = cached_logits(model, ids, prompt)
    for layer in model.model.layers:
        layer.self_attn.keep_window_size = 12
        torch.nn.init.normal_(layer.self_attn.A, std=2, generator=generator())
    expected = cached_logits(model, ids, prompt)
    assert difference(model, ids, expected, prompt) <= TOLERANCE
    assert (whole - expected)[2:].abs().max() > 1e-2


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
