"""A cache used wrongly says so in a sentence: rows, padding masks, autocast; and gradients stay out of it."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch

from exportable_cache import ExportableCache, Session, load
from exportable_cache.cache.policies import RingPolicy
from exportable_cache.errors import BundleError, InputError, UnsupportedModelError

from ..support.models import WINDOW, tiny_model, tokens
from .conftest import reseal


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_return_sequences": 3, "do_sample": True}])
@pytest.mark.parametrize("rows", [1, 2])
def test_too_few_rows_for_beams(options: dict, rows: int) -> None:
    model = tiny_model("gemma2")
    cache = ExportableCache.from_model(model, 32, batch_size=rows)
    with pytest.raises(InputError, match=f"allocated for {rows} rows, the model runs 3; allocate it with batch_size=3"):
        model.generate(tokens(5), past_key_values=cache, max_new_tokens=3, **options)
    assert cache.cumulative_length.tolist() == [0] * rows
    cache = ExportableCache.from_model(model, 32, batch_size=3)
    found = model.generate(tokens(5), past_key_values=cache, max_new_tokens=3, **options)
    assert found.shape == (options.get("num_return_sequences", 1), 8)


def test_more_rows_than_the_batch_has() -> None:
    model = tiny_model("llama")
    cache = ExportableCache.from_model(model, 32, batch_size=3)
    with pytest.raises(InputError, match="allocated for 3 rows, the model runs 1"):
        model(tokens(5), past_key_values=cache)


@pytest.mark.parametrize("method", ["batch_select_indices", "reorder_cache"])
@pytest.mark.parametrize(
    ("indices", "said"),
    [
        ((1, 0), "are a tuple; pass an int64 tensor"),
        ([1, 0], "are a list"),
        (None, "are a NoneType"),
        (torch.tensor([1.0, 0.0]), "torch.float32"),
        (torch.tensor([True, False]), "torch.bool"),
        (torch.tensor([[1], [0]]), r"of shape \[2, 1\]"),
        (torch.tensor([1]), "cannot keep 1 rows"),
        (torch.tensor([0, 2]), "of rows 0 to 1"),
        (torch.tensor([0, -1]), "of rows 0 to 1"),
    ],
)
def test_rows_that_are_no_rows(method: str, indices, said: str) -> None:
    model = tiny_model("gemma2")
    cache = ExportableCache.from_model(model, 32, batch_size=2)
    with torch.no_grad():
        model(tokens(5, batch_size=2), past_key_values=cache)
    before = {name: tensor.clone() for name, tensor in cache.named_state()}
    with pytest.raises(InputError, match=said):
        getattr(cache, method)(indices)
    assert all(torch.equal(tensor, before[name]) for name, tensor in cache.named_state())
    getattr(cache, method)(torch.tensor([1, 0]))
    assert torch.equal(cache.layers[0].keys, before["layers.0.keys"].flip(0))


def test_a_second_prompt_over_a_cache_that_was_not_reset() -> None:
    model = tiny_model("llama")
    cache = ExportableCache.from_model(model, 32)
    first = model.generate(tokens(6), past_key_values=cache, max_new_tokens=5, do_sample=False)
    with pytest.raises(InputError, match=r"no new tokens, and the cache holds 10: .*reset\(\) the cache"):
        model.generate(tokens(3), past_key_values=cache, max_new_tokens=3)
    # The whole sequence goes on; another one starts after reset().
    further = torch.cat([first, tokens(2)], dim=1)
    expected = model.generate(further, max_new_tokens=3, do_sample=False)
    assert torch.equal(model.generate(further, past_key_values=cache, max_new_tokens=3, do_sample=False), expected)
    cache.reset()
    again = model.generate(tokens(6), past_key_values=cache, max_new_tokens=5, do_sample=False)
    assert torch.equal(again, first)


def test_a_padding_mask_that_leaves_out_what_the_cache_holds() -> None:
    model = tiny_model("gemma2")
    cache = ExportableCache.from_model(model, 32)
    with torch.no_grad():
        model(tokens(6), attention_mask=torch.ones(1, 6), past_key_values=cache)
        with pytest.raises(InputError, match=r"for 4 tokens, but the cache holds 6 and 4 more are fed; reset\(\)"):
            model(tokens(4), attention_mask=torch.ones(1, 4), past_key_values=cache)
        assert cache.cumulative_length.tolist() == [6]
        model(tokens(4), attention_mask=torch.ones(1, 10), past_key_values=cache)


def test_a_session_goes_on_with_a_second_prompt() -> None:
    """As its documentation says: the second prompt follows the first and its answer."""
    model = tiny_model("llama")
    session = Session.from_model(model, ExportableCache.from_model(model, 64))
    first = list(session.generate(tokens(6), 4))
    held = torch.cat([tokens(6), torch.tensor([first[:-1]]), tokens(5)], dim=1)
    found = list(session.generate(tokens(5), 4))
    session.reset()
    assert list(session.generate(held, 4)) == found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_around_a_cache(dtype: torch.dtype) -> None:
    model = tiny_model("llama")
    cache = ExportableCache.from_model(model, 32, dtype=dtype)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(InputError, match=r"torch.autocast is on.*leave the autocast block, and load the model in"):
            model(tokens(5), past_key_values=cache)
        assert cache.cumulative_length.tolist() == [0]
    # And the remedy is one.
    model = tiny_model("llama", torch.bfloat16)
    cache = ExportableCache.from_model(model, 32)
    with torch.no_grad():
        assert model(tokens(5), past_key_values=cache).logits.dtype == torch.bfloat16


def test_autocast_around_a_session(pt2_bundle: Path) -> None:
    model = tiny_model("llama")
    sessions = [Session.from_model(model, ExportableCache.from_model(model, 32)), load(pt2_bundle)]
    for session in sessions:
        before = session.prefill(tokens(5))
        with torch.autocast("cpu", torch.bfloat16):
            for call in (
                lambda session=session: session.prefill(tokens(5)),
                lambda session=session: session.decode(torch.tensor([5])),
                lambda session=session: list(session.generate(tokens(5), 3)),
            ):
                with pytest.raises(InputError, match="load or export the model in torch.bfloat16 instead"):
                    call()
        assert session.length.tolist() == [5]
        session.reset()
        assert torch.equal(session.prefill(tokens(5)), before)


def test_a_cache_made_in_inference_mode_is_used_outside_of_it(tmp_path: Path, pt2_bundle: Path) -> None:
    model = tiny_model("llama")
    with torch.inference_mode():
        cache = ExportableCache.from_model(model, 32)
        session = Session.from_model(model, ExportableCache.from_model(model, 32))
        opened = load(pt2_bundle)
        expected = model(tokens(5), past_key_values=cache).logits.clone()
        assert torch.allclose(session.prefill(tokens(5)), expected[:, -1], atol=1e-5)
        opened.prefill(tokens(5))
        session.save_state(tmp_path / "state")
        cache.save(tmp_path / "cache")
        loaded = ExportableCache.load(tmp_path / "cache")
    model(tokens(1), past_key_values=cache)
    model(tokens(1), past_key_values=loaded)
    assert all(torch.equal(tensor, dict(loaded.named_state())[name]) for name, tensor in cache.named_state())
    for one in (session, opened):
        one.decode(torch.tensor([5]))
        one.reset()
        list(one.generate(tokens(3), 3))
    with torch.inference_mode():
        session.load_state(tmp_path / "state")
    session.decode(torch.tensor([5]))


@pytest.mark.parametrize("given", [None, 3, "llama", tiny_model("llama").config, torch.nn.Linear(2, 2)])
def test_what_is_no_model(given) -> None:
    with pytest.raises(InputError, match=f"model must be a transformers model, got {type(given).__name__}"):
        ExportableCache.from_model(given, 32)


def test_what_is_no_device() -> None:
    model = tiny_model("llama")
    for device in ("nonsense", "cpu:x", 3.5, ["cpu"]):
        with pytest.raises(InputError, match="device is .* it must be one of torch's"):
            ExportableCache.from_model(model, 32, device=device)
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="on cuda; pass a smaller max_cache_len or batch_size, or another device"):
            ExportableCache.from_model(model, 32, device="cuda")


@pytest.mark.parametrize("given", [(1, 0), None, "1", 1.5, torch.tensor([]), torch.tensor([1.0]), torch.tensor([1, 2])])
def test_numbers_that_are_none(given) -> None:
    model = tiny_model("llama")
    cache = ExportableCache.from_model(model, 32)
    with torch.no_grad():
        model(tokens(5), past_key_values=cache)
    with pytest.raises(InputError, match="crop takes minus the number of tokens to remove, got"):
        cache.crop(given)
    with pytest.raises(InputError, match="a static cache cannot be repeated"):
        cache.batch_repeat_interleave(given)
    assert cache.cumulative_length.tolist() == [5]
    cache.crop(torch.tensor(-2))
    assert cache.cumulative_length.tolist() == [3]


def test_ids_that_are_not_dense() -> None:
    model = tiny_model("llama")
    session = Session.from_model(model, ExportableCache.from_model(model, 32))
    with pytest.raises(InputError, match=r"must be dense, .*pass input_ids.to_dense\(\)"):
        session.prefill(torch.tensor([[1, 2]]).to_sparse())
    with pytest.raises(InputError, match=r"cannot be copied; fork\(\) it"):
        copy.deepcopy(session)


def test_a_sliding_layer_without_a_window() -> None:
    config = copy.deepcopy(tiny_model("mistral").config)
    config.sliding_window = None
    config.layer_types = ["sliding_attention"] * config.num_hidden_layers
    with pytest.raises((InputError, UnsupportedModelError), match=r"sliding_window.* must be a positive int, got None"):
        ExportableCache.from_config(config, 32)
    model = tiny_model("mistral")
    model.config.sliding_window = None
    model.config.layer_types = ["sliding_attention"] * config.num_hidden_layers
    with pytest.raises((InputError, UnsupportedModelError), match=r"sliding_window.* must be a positive int, got None"):
        ExportableCache.from_model(model, 32)
    # A model that says nothing of windows keeps every token.
    del model.config.layer_types
    assert ExportableCache.from_model(model, 32).max_length == 32


@pytest.mark.parametrize("window", [None, 0, -1, "8", 2.5, True, 10**30])
def test_a_manifest_whose_ring_has_no_window(bundle: Path, window) -> None:
    path = bundle / "manifest.json"
    fields = json.loads(path.read_text())
    fields["layers"][0]["policy"] = {"kind": "ring", "window": window, "rollback_slots": 0}
    path.write_text(json.dumps(fields))
    reseal(bundle)
    with pytest.raises((BundleError, InputError)) as caught:
        load(bundle).prefill(tokens(5))
    assert "\n" not in str(caught.value)


# -- gradients -------------------------------------------------------------------------------------------------------

FAMILIES = ("llama", "gemma2", "mistral")


LFM2 = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False}
QWEN3_NEXT = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}


def _graph(tensor: torch.Tensor) -> int:
    """Nodes of the graph that a tensor keeps."""
    seen, left = set(), [tensor.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [following for following, _ in node.next_functions]
    return len(seen)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_used_with_gradients_keeps_no_graph(family: str) -> None:
    model = tiny_model(family)
    cache = ExportableCache.from_model(model, 48)
    model(tokens(12), past_key_values=cache)
    for _ in range(12):
        last = model(tokens(1), past_key_values=cache).logits
    assert all(_graph(tensor) == 0 and not tensor.requires_grad for _, tensor in cache.named_state())
    # Of one step.
    assert 0 < _graph(last) < 400


def test_states_keep_no_graph_either() -> None:
    model = tiny_model("falcon_h1", mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8)
    cache = ExportableCache.from_model(model, 48)
    plain = ExportableCache.from_model(model, 48)
    for length in (7, 1, 1):
        found = model(tokens(length), past_key_values=cache).logits
        with torch.no_grad():
            assert torch.equal(found, model(tokens(length), past_key_values=plain).logits)
    assert all(not tensor.requires_grad for _, tensor in cache.named_state())


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_a_call_are_those_without_a_cache(family: str) -> None:
    """Of its own tokens: what is trained over a cache is not silently trained without its keys."""
    model, ids = tiny_model(family), tokens(20)
    model(ids).logits[:, -1].square().sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    assert any("k_proj" in name or "qkv" in name for name in expected)
    model.zero_grad()
    model(ids, past_key_values=ExportableCache.from_model(model, 48)).logits[:, -1].square().sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, expected[name], atol=1e-4, rtol=1e-3), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tracked", [True, False])
def test_a_copy_of_a_used_cache_is_independent(family: str, tracked: bool) -> None:
    model = tiny_model(family)
    cache = ExportableCache.from_model(model, 48)
    with torch.set_grad_enabled(tracked):
        model(tokens(10), past_key_values=cache)
        model(tokens(1), past_key_values=cache)
    other = copy.deepcopy(cache)
    kept = {name: tensor.clone() for name, tensor in cache.named_state()}
    with torch.no_grad():
        found = model(tokens(3), past_key_values=other).logits
        assert all(torch.equal(tensor, kept[name]) for name, tensor in cache.named_state())
        assert torch.equal(model(tokens(3), past_key_values=cache).logits, found)


# -- a ring as long as the window ------------------------------------------------------------------------------------


def test_a_cache_as_long_as_the_window_is_a_ring() -> None:
    model = tiny_model("mistral")
    cache = ExportableCache.from_model(model, WINDOW)
    assert all(isinstance(layer.policy, RingPolicy) and layer.capacity == WINDOW for layer in cache.layers)
    assert cache.max_length is None
    ids = tokens(3 * WINDOW)
    with torch.no_grad():
        expected = model(ids).logits
        found = [model(ids[:, :5], past_key_values=cache).logits]
        found += [model(ids[:, step : step + 1], past_key_values=cache).logits for step in range(5, 3 * WINDOW)]
    assert torch.allclose(torch.cat(found, dim=1), expected, atol=1e-4)
    assert ExportableCache.from_model(model, WINDOW - 1).max_length == WINDOW - 1


def test_gradients_over_recurrent_states_are_those_without_a_cache() -> None:
    model, ids = tiny_model("qwen3_next", **QWEN3_NEXT), tokens(9)
    model(ids, use_cache=False).logits[:, -1].square().sum().backward()
    expected = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    cache = ExportableCache.from_model(model, 48)
    model(ids, past_key_values=cache).logits[:, -1].square().sum().backward()
    for name, parameter in model.named_parameters():
        if name in expected:
            torch.testing.assert_close(parameter.grad, expected[name], atol=1e-4, rtol=1e-3)
    assert all(_graph(tensor) == 0 and not tensor.requires_grad for _, tensor in cache.named_state())


@pytest.mark.parametrize(("family", "sizes"), [("lfm2", LFM2), ("qwen3_next", QWEN3_NEXT)])
def test_a_batch_of_other_rows_is_refused_before_a_state_is_written(family: str, sizes: dict) -> None:
    model = tiny_model(family, **sizes)
    cache = ExportableCache.from_model(model, 32)
    with pytest.raises(InputError, match="allocated for 1 rows, the model runs 2"):
        model.generate(tokens(5, 2), past_key_values=cache, max_new_tokens=2, do_sample=False)
    assert all(not tensor.any() for _, tensor in cache.named_state())
