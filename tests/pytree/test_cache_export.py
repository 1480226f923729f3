"""Programs that take a transformers cache and return it: saved, loaded, and run for several steps beside eager."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.utils._pytree as pytree
from cache_samples import CAPACITY, DIM, HAS_STATES, HEADS, LAYERS, LIST_BASED, SAMPLES, SIZES, WINDOW, states
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, cache_utils

pytestmark = pytest.mark.usefixtures("registered")

BY_NAME = {sample.name: sample for sample in SAMPLES}
STEPS = 4
# What each layout can run as one program for every step. The static sliding layers branch on their length, except in
# 4.52, where the position decides.
ONE_PROGRAM = ["DynamicCache", "StaticCache"]
ONE_PROGRAM += ["SlidingWindowCache", "HybridCache"] if LIST_BASED else ["DynamicCache-sliding"]
BRANCHING = "HybridChunkedCache" if LIST_BASED else "StaticCache-sliding"


class Step(torch.nn.Module):
    """One token through every layer, the way a model does it."""

    def forward(self, keys, values, position, cache):
        sums = []
        for layer in range(LAYERS):
            seen_keys, seen_values = cache.update(keys + layer, values - layer, layer, {"cache_position": position})
            sums.append(seen_keys.sum() + seen_values.sum())
        return torch.stack(sums), cache


def arguments(seen, cache):
    return *states(seen, 1), torch.tensor([seen]), cache


def dynamic(dim, obj):
    """dynamic_shapes of a cache: one dimension of every key and value."""
    if isinstance(obj, torch.Tensor):
        return {dim: torch.export.Dim.AUTO} if obj.dim() == 4 else None
    children = obj if isinstance(obj, (list, tuple)) else pytree.SUPPORTED_NODES[type(obj)].flatten_fn(obj)[0]
    return [dynamic(dim, child) for child in children]


def assert_caches_equal(left, right):
    assert pytree.tree_structure(left) == pytree.tree_structure(right)
    for one, other in zip(pytree.tree_leaves(left), pytree.tree_leaves(right), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.full)], ids=["non-strict", "strict"])
@pytest.mark.parametrize("name", ONE_PROGRAM)
def test_one_program_serves_every_step_past_the_window(name, strict, tmp_path):
    seen = WINDOW + 3
    sample = BY_NAME[name]
    shapes = (None, None, None, dynamic(2, sample.fed(seen))) if name.startswith("Dynamic") else None
    program = torch.export.export(Step(), arguments(seen, sample.fed(seen)), dynamic_shapes=shapes, strict=strict)
    assert not program.constants
    torch.export.save(program, tmp_path / "step.pt2")
    loaded = torch.export.load(tmp_path / "step.pt2").module()

    eager_cache, cache = sample.fed(seen), sample.fed(seen)
    for position in range(seen, seen + STEPS):
        expected, eager_cache = Step()(*arguments(position, eager_cache))
        result, cache = loaded(*arguments(position, cache))
        torch.testing.assert_close(result, expected)
        assert type(cache) is type(eager_cache)
        assert_caches_equal(cache, eager_cache)
        sample.feed(copy.deepcopy(cache), position + 1, 1)  # what comes out is a working cache


def test_a_length_survives_decomposition():
    name = ONE_PROGRAM[-1]
    sample = BY_NAME[name]
    seen = WINDOW + 3
    module = torch.export.export(Step(), arguments(seen, sample.fed(seen))).run_decompositions().module()
    result, cache = module(*arguments(seen, sample.fed(seen)))
    expected, eager_cache = Step()(*arguments(seen, sample.fed(seen)))
    torch.testing.assert_close(result, expected)
    assert_caches_equal(cache, eager_cache)


def test_make_fx_traces_a_rebuilt_cache_without_constants():
    sample = BY_NAME[ONE_PROGRAM[-1]]
    seen = WINDOW + 3
    leaves, spec = pytree.tree_flatten(arguments(seen, sample.fed(seen)))

    def step(*leaves):
        return pytree.tree_leaves(Step()(*pytree.tree_unflatten(list(leaves), spec)))

    graph = make_fx(step, tracing_mode="symbolic")(*leaves).graph
    assert not [node for node in graph.nodes if node.op == "get_attr"]


def test_a_length_that_python_branches_on_stops_the_export():
    sample = BY_NAME[BRANCHING]
    with pytest.raises(Exception, match="data-dependent"):
        torch.export.export(Step(), arguments(2, sample.fed(2)))


def test_encoder_decoder_cache_is_taken_and_returned(tmp_path):
    class Cross(torch.nn.Module):
        def forward(self, keys, values, position, cache):
            _, cache.self_attention_cache = Step()(keys, values, position, cache.self_attention_cache)
            return cache

    sample = BY_NAME["EncoderDecoderCache"]
    program = torch.export.export(Cross(), arguments(3, sample.fed(3)))
    torch.export.save(program, tmp_path / "cross.pt2")
    result = torch.export.load(tmp_path / "cross.pt2").module()(*arguments(3, sample.fed(3)))
    assert_caches_equal(result, Cross()(*arguments(3, sample.fed(3))))
    assert result.is_updated == {0: True, 1: True}


def test_inputs_and_guards_carry_the_names_of_the_path():
    program = torch.export.export(Step(), arguments(3, BY_NAME["StaticCache"].fed(3)))
    names = [node.name for node in program.graph.nodes if node.op == "placeholder" and node.name.startswith("cache")]
    assert names[0] == ("cache_key_cache_0" if LIST_BASED else "cache_layers_0_keys")


def test_a_cache_of_another_form_is_refused():
    sample = BY_NAME["StaticCache"]
    module = torch.export.export(Step(), arguments(3, sample.fed(3))).module()
    other = sample.fed(3)
    if LIST_BASED:
        other.max_cache_len += 1
    else:
        other.layers[1].max_cache_len += 1
    with pytest.raises(Exception, match="max_cache_len"):
        module(*arguments(3, other))


if not LIST_BASED:  # whose static caches carry their batch size as a setting

    def test_the_batch_of_a_static_cache_can_be_dynamic():
        def inputs(batch):
            cache = cache_utils.StaticCache(LlamaConfig(**SIZES), max_cache_len=CAPACITY)
            cache.early_initialization(batch, HEADS, DIM, torch.float32, torch.device("cpu"))
            keys, values = (torch.ones(batch, HEADS, 1, DIM) for _ in range(2))
            return keys, values, torch.tensor([0]), cache

        shapes = tuple(dynamic(0, argument) for argument in inputs(2))
        module = torch.export.export(Step(), inputs(2), dynamic_shapes=shapes).module()
        for batch in (2, 5):
            (result, cache), (expected, eager_cache) = module(*inputs(batch)), Step()(*inputs(batch))
            torch.testing.assert_close(result, expected)
            assert_caches_equal(cache, eager_cache)
            assert [layer.values.shape[0] for layer in cache.layers] == [batch] * LAYERS


if HAS_STATES:  # whole models need the masks of a release that traces them

    @pytest.mark.parametrize("kind", ["static", "dynamic"])
    @torch.no_grad()
    def test_a_model_with_its_cache_as_input_and_output(kind):
        model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
        static = kind == "static"
        cache = cache_utils.StaticCache(model.config, CAPACITY) if static else cache_utils.DynamicCache()
        model(torch.tensor([[1, 2, 3]]), past_key_values=cache)

        def inputs(cache, position):
            return {
                "input_ids": torch.tensor([[position]]),
                "position_ids": torch.tensor([[position]]),
                "past_key_values": cache,
                "use_cache": True,
            }

        eager_cache, cache = copy.deepcopy(cache), copy.deepcopy(cache)
        module = torch.export.export(model, (), inputs(copy.deepcopy(cache), 3)).module()
        for position in range(3, 6 if static else 4):  # a dynamic cache grows out of a static shape
            expected = model(**inputs(eager_cache, position))
            result = module(**inputs(cache, position))
            torch.testing.assert_close(result.logits, expected.logits)
            cache, eager_cache = result.past_key_values, expected.past_key_values
            assert_caches_equal(cache, eager_cache)

    @torch.no_grad()
    def test_a_model_with_sliding_layers_is_traced_before_the_window_and_stops_past_it():
        config = MistralConfig(**SIZES, sliding_window=WINDOW)
        config.layer_types = ["full_attention", "sliding_attention"]
        model = MistralForCausalLM(config).eval()

        def inputs(seen):
            cache = cache_utils.DynamicCache(config=config)
            if seen:
                model(torch.arange(seen)[None], past_key_values=cache)
            position = torch.tensor([[seen]])
            return {"input_ids": position, "position_ids": position, "past_key_values": cache}

        for seen in (0, WINDOW - 2):
            program = torch.export.export(model, (), inputs(seen))
            result, expected = program.module()(**inputs(seen)), model(**inputs(seen))
            torch.testing.assert_close(result.logits, expected.logits)
            assert_caches_equal(result.past_key_values, expected.past_key_values)
        with pytest.raises(Exception, match="data-dependent"):
            torch.export.export(model, (), inputs(WINDOW + 1))
