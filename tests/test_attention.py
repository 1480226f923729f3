"""Both attention functions against the eager functions of transformers' own modeling files."""

import gc

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import PreTrainedModel
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_attention
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_attention
from transformers.models.llama.modeling_llama import eager_attention_forward as llama_attention
from transformers.models.mistral import modeling_mistral

from exportable_cache import ExportableCache, Session
from exportable_cache.cache.attention import functions
from exportable_cache.cache.attention.functions import fused_attention, matmul_attention, passed_to_attention
from exportable_cache.cache.attention.implementation import attention_of
from exportable_cache.errors import InputError, UnsupportedModelError

from .support.models import tiny_model, tokens
from .support.multimodal import tiny_multimodal

HEADS, KV_HEADS, KV_LENGTH = 6, 2, 11
FORMS = {"fused": fused_attention, "matmul": matmul_attention}


@pytest.fixture(params=FORMS)
def attend(request):
    return FORMS[request.param]


def module(**attributes) -> torch.nn.Module:
    holder = torch.nn.Module().eval()
    holder.__dict__.update({"num_key_value_groups": HEADS // KV_HEADS, "is_causal": True, **attributes})
    return holder


def inputs(q_length: int, value_dim: int = 8, batch: int = 2):
    torch.manual_seed(q_length)
    query = torch.randn(batch, HEADS, q_length, 8)
    key, value = torch.randn(batch, KV_HEADS, KV_LENGTH, 8), torch.randn(batch, KV_HEADS, KV_LENGTH, value_dim)
    seen = torch.rand(batch, 1, q_length, KV_LENGTH) > 0.4
    seen[..., 0] = True
    return query, key, value, torch.where(seen, 0.0, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("q_length", [1, 5])
@pytest.mark.parametrize("value_dim", [8, 4])
def test_grouped_heads(attend, q_length: int, value_dim: int) -> None:
    query, key, value, mask = inputs(q_length, value_dim)
    expected, _ = llama_attention(module(), query, key, value, mask, scaling=0.3)
    actual, weights = attend(module(), query, key, value, mask, scaling=0.3)
    assert weights is None and actual.shape == (2, q_length, HEADS, value_dim)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("q_length", [1, 5])
def test_soft_capping(attend, q_length: int) -> None:
    query, key, value, mask = inputs(q_length)
    expected, _ = gemma2_attention(module(head_dim=8), query, key, value, mask, scaling=1.0, softcap=1.5)
    actual, _ = attend(module(), query, key, value, mask, scaling=1.0, softcap=1.5)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(actual, attend(module(), query, key, value, mask, scaling=1.0)[0], atol=1e-3)


@pytest.mark.parametrize("q_length", [1, 5])
def test_attention_sinks(attend, q_length: int) -> None:
    query, key, value, mask = inputs(q_length)
    sinks = torch.randn(HEADS)
    expected, _ = gpt_oss_attention(module(sinks=sinks), query, key, value, mask, scaling=0.3)
    actual, _ = attend(module(), query, key, value, mask, scaling=0.3, s_aux=sinks)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(actual, attend(module(), query, key, value, mask, scaling=0.3)[0], atol=1e-3)


@pytest.mark.parametrize("heads", [1, HEADS])
def test_bool_and_per_head_masks_and_position_bias(attend, heads: int) -> None:
    query, key, value, mask = inputs(3)
    bias = torch.randn(1, heads, 3, KV_LENGTH)
    expected, _ = llama_attention(module(), query, key, value, (mask + bias).expand(2, HEADS, -1, -1), scaling=0.3)
    for given in (mask, mask == 0):
        actual, _ = attend(module(), query, key, value, given, scaling=0.3, position_bias=bias)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    actual, _ = attend(module(), query, key, value, (mask + bias).expand(2, heads, -1, -1), scaling=0.3)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_without_a_mask(attend, causal: bool) -> None:
    query, key, value, _ = inputs(KV_LENGTH)
    mask = torch.zeros(1, 1, KV_LENGTH, KV_LENGTH)
    if causal:
        mask = mask.masked_fill(
            ~torch.ones(KV_LENGTH, KV_LENGTH, dtype=torch.bool).tril(), torch.finfo(torch.float32).min
        )
    expected, _ = llama_attention(module(), query, key, value, mask, scaling=0.3)
    actual, _ = attend(module(is_causal=causal), query, key, value, None, scaling=0.3)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("q_length", [1, 5])
def test_key_heads_are_never_repeated(attend, q_length: int) -> None:
    query, key, value, mask = inputs(q_length, batch=1)
    graph = make_fx(lambda *tensors: attend(module(), *tensors, scaling=0.3)[0])(query, key, value, mask).graph
    repeated = HEADS * KV_LENGTH * 8
    sizes = [node.meta["val"].numel() for node in graph.nodes if hasattr(node.meta.get("val"), "numel")]
    assert sizes and max(sizes) < repeated


def test_a_fully_masked_row_stays_finite(attend) -> None:
    query, key, value, mask = inputs(2)
    mask[0] = torch.finfo(torch.float32).min
    assert torch.isfinite(attend(module(), query, key, value, mask, scaling=0.3)[0]).all()


def test_softmax_is_taken_in_float32() -> None:
    query, key, value, mask = (tensor.to(torch.float16) if tensor.dim() == 4 else tensor for tensor in inputs(3))
    mask = torch.where(mask == 0, 0.0, torch.finfo(torch.float16).min).to(torch.float16)
    actual, _ = matmul_attention(module(), query, key, value, mask, scaling=0.3)
    expected, _ = llama_attention(module(), query.float(), key.float(), value.float(), mask.float(), scaling=0.3)
    assert actual.dtype == torch.float16
    torch.testing.assert_close(actual.float(), expected, atol=5e-3, rtol=5e-3)


def test_an_unknown_argument_of_the_model_is_refused_by_name(attend, monkeypatch) -> None:
    """It asks for another result than the one without it: dropped, the logits would be wrong silently."""
    query, key, value, mask = inputs(3)
    monkeypatch.setattr(functions, "passed_to_attention", lambda module: frozenset({"gate"}))
    with pytest.raises(UnsupportedModelError, match="passes 'gate' to attention"):
        attend(module(), query, key, value, mask, scaling=0.3, gate=torch.zeros(2, 1, 3, 1))
    expected, _ = attend(module(), query, key, value, mask, scaling=0.3)
    given = {
        "sliding_window": 4,
        "position_ids": torch.arange(3)[None],
        "gate": None,
        "output_attentions": False,
    }
    assert torch.equal(attend(module(), query, key, value, mask, scaling=0.3, **given)[0], expected)


@pytest.mark.parametrize("close", ["with", "close", "gone"])
def test_a_session_puts_back_what_each_part_of_the_model_named(close: str) -> None:
    """One name over a composite model would leave its parts with the same one; and nothing was put back at all."""
    model = tiny_multimodal("llava")
    model.set_attn_implementation({"": "sdpa", "text_config": "eager", "vision_config": "sdpa"})
    own = names_of(model)
    assert len(set(own)) == 2
    cache = ExportableCache.from_model(model, 32, attn_implementation=None)
    assert names_of(model) == own
    session = Session.from_model(model, cache, prefill_chunk=16)
    assert set(names_of(model)) == {"exportable_cache"}
    session.prefill(torch.arange(3)[None])
    if close == "with":
        with session:
            session.prefill(torch.arange(3)[None])
    elif close == "close":
        session.close()
        with pytest.raises(InputError, match="this session is closed"):
            session.prefill(torch.arange(3)[None])
        session.close()
    else:
        del session
        gc.collect()
    assert names_of(model) == own


def test_the_last_of_a_models_sessions_puts_its_attention_back() -> None:
    model = tiny_multimodal("llava")
    own = names_of(model)
    caches = [ExportableCache.from_model(model, 32, attn_implementation=None) for _ in range(2)]
    first, second = (Session.from_model(model, cache, prefill_chunk=16) for cache in caches)
    fork = second.fork()
    first.close()
    second.close()
    assert set(names_of(model)) == {"exportable_cache"}
    fork.prefill(torch.arange(3)[None])
    fork.close()
    assert names_of(model) == own


def test_a_cache_made_while_a_session_is_open_keeps_the_attention_it_set() -> None:
    model = tiny_multimodal("llava")
    with Session.from_model(model, ExportableCache.from_model(model, 32, attn_implementation=None), prefill_chunk=16):
        ExportableCache.from_model(model, 32)
    assert set(names_of(model)) == {"exportable_cache"}


def test_a_block_puts_back_what_each_part_of_the_model_named() -> None:
    model = tiny_multimodal("llava")
    model.set_attn_implementation({"": "sdpa", "text_config": "eager", "vision_config": "sdpa"})
    own = names_of(model)
    with attention_of(model, "exportable_cache"):
        assert set(names_of(model)) == {"exportable_cache"}
    assert names_of(model) == own


def names_of(model) -> list[str]:
    return [found.config._attn_implementation for found in model.modules() if isinstance(found, PreTrainedModel)]


def test_arguments_that_a_model_does_not_hand_to_attention_itself_change_nothing() -> None:
    """A caller's own keywords reach attention through `**kwargs`, and transformers' attention ignores them."""
    model, ids = tiny_model("llama"), tokens(7)
    expected = model(ids).logits
    cache = ExportableCache.from_model(model, 32)
    given = {"num_items_in_batch": torch.tensor(9), "tokenizer": object(), "cache_position": torch.arange(7), "mine": 3}
    torch.testing.assert_close(model(ids, **given).logits, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(model(ids, past_key_values=cache, **given).logits, expected, atol=1e-5, rtol=1e-4)


def test_names_that_modeling_code_hands_to_attention_are_found() -> None:
    found = passed_to_attention(modeling_mistral.__name__)
    assert "sliding_window" in found and "num_items_in_batch" not in found
    assert passed_to_attention("no.such.module") == frozenset()
