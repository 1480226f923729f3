"""Every cache and layer of the installed transformers: taken apart, put together, and one more update."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import torch.fx._pytree as fx_pytree
import torch.utils._pytree as pytree
from cache_samples import BATCH, CAPACITY, DIM, HAS_STATES, HEADS, LIST_BASED, SAMPLES, WINDOW, Sample
from transformers import cache_utils

from exportable_cache.pytree import cache_classes, is_ours, register_cache_class, register_transformers_caches

BY_NAME = {sample.name: sample for sample in SAMPLES}
EVERY = pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
# Tokens before the round trip: none, fewer than the window, exactly the window, past it in a prefill, past it by steps.
HISTORIES = pytest.mark.parametrize("history", [(), (2,), (WINDOW,), (WINDOW + 3,), (3, 1, 1, 1, 1)], ids=str)

pytestmark = pytest.mark.usefixtures("registered")


def rebuilt(obj):
    leaves, spec = pytree.tree_flatten(obj)
    return pytree.tree_unflatten([leaf.clone() for leaf in leaves], spec)


def assert_same(left, right):
    """Same class, same attributes, same types and values, all the way down."""
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and left.device == right.device
        torch.testing.assert_close(left, right, rtol=0, atol=0)
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        assert_same(list(left.values()), list(right.values()))
    elif type(left).__module__ == cache_utils.__name__:
        assert_same(dict(sorted(vars(left).items())), dict(sorted(vars(right).items())))
    else:
        assert left == right


def test_the_installed_layout_is_one_of_the_three():
    assert LIST_BASED == hasattr(cache_utils.DynamicCache(), "key_cache")
    names = {cls.__name__ for cls in cache_classes()}
    assert {"DynamicCache", "StaticCache", "EncoderDecoderCache"} <= names
    assert {cls.__name__ for cls in cache_classes()} - {type(sample.make()).__name__ for sample in SAMPLES} == set()
    assert HAS_STATES <= (not LIST_BASED)


def test_everything_is_registered_once():
    assert all(is_ours(cls) for cls in cache_classes())
    again = register_transformers_caches()
    assert {(entry.pytree.value, entry.fx.value) for entry in again} == {("unchanged", "unchanged")}


@EVERY
@HISTORIES
def test_updates_go_on_as_if_nothing_happened(sample: Sample, history):
    original = sample.fed(*history)
    copied = rebuilt(original)
    assert_same(copied, original)
    seen = sum(history)
    for tokens in (1, 1, 2, 1):
        assert_same(sample.feed(copied, seen, tokens), sample.feed(original, seen, tokens))
        seen += tokens
        assert_same(copied, original)


@EVERY
def test_spec_is_the_same_before_and_after_any_number_of_steps(sample: Sample):
    obj = sample.fed(2)
    first = pytree.tree_structure(obj)
    dumped = pytree.treespec_dumps(first)
    for seen in range(2, CAPACITY):
        sample.feed(obj, seen, 1)
        assert pytree.tree_structure(obj) == first
        assert pytree.treespec_dumps(pytree.tree_structure(obj)) == dumped


@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.name.startswith("StaticCache")], ids=lambda s: s.name)
def test_spec_of_an_allocated_static_cache_is_the_same_before_the_first_token(sample: Sample):
    cache = sample.make()
    if hasattr(cache, "early_initialization"):  # in 4.52 a static cache is allocated when it is made
        cache.early_initialization(BATCH, HEADS, DIM, torch.float32, torch.device("cpu"))
    empty = pytree.tree_structure(cache)
    for seen in range(CAPACITY):
        sample.feed(cache, seen, 1)
        assert pytree.tree_structure(cache) == empty


def can_be_reset(obj) -> bool:  # all but the DynamicCache of 4.52
    return hasattr(getattr(obj, "self_attention_cache", obj), "reset")


@pytest.mark.parametrize("sample", [s for s in SAMPLES if can_be_reset(s.make())], ids=lambda s: s.name)
def test_a_reset_object_goes_on_too(sample: Sample):
    original = sample.fed(WINDOW + 1)
    original.reset()
    copied = rebuilt(original)
    assert_same(copied, original)
    assert_same(sample.feed(copied, 0, 2), sample.feed(original, 0, 2))
    assert_same(copied, original)


@EVERY
@HISTORIES
def test_context_is_json_and_the_spec_comes_back_from_it(sample: Sample, history):
    spec = pytree.tree_structure(sample.fed(*history))
    assert json.loads(json.dumps(spec.context)) == spec.context
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


@EVERY
def test_children_are_tensors(sample: Sample):
    assert all(type(leaf) is torch.Tensor for leaf in pytree.tree_leaves(sample.fed(2, 1)))


@EVERY
@HISTORIES
def test_fx_and_pytree_give_the_same_leaves(sample: Sample, history):
    obj = sample.fed(*history)
    spec = pytree.tree_structure(obj)
    through_fx = fx_pytree.tree_flatten_spec(obj, spec)
    assert_same(through_fx, pytree.tree_leaves(obj))
    assert len(through_fx) == spec.num_leaves


@EVERY
def test_what_stands_for_a_tensor_comes_back(sample: Sample):
    spec = pytree.tree_structure(sample.fed(WINDOW + 1))
    for stand_in in (None, "*", 7, object()):
        result = pytree.tree_unflatten([stand_in] * spec.num_leaves, spec)
        leaves, again = pytree.tree_flatten(result)
        assert all(leaf is stand_in for leaf in leaves)
        assert again == spec
    assert pytree.treespec_pprint(spec)


@EVERY
def test_dtype_and_device_follow_the_tensors(sample: Sample):
    obj = sample.fed(2)
    double = pytree.tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, obj)
    assert {leaf.dtype for leaf in pytree.tree_leaves(double)} <= {torch.float64, torch.int64}
    for part in (double, *getattr(double, "layers", ())):
        for name in ("dtype", "_dtype"):
            if getattr(part, name, None) is not None:
                assert getattr(part, name) == torch.float64
    meta = pytree.tree_map(lambda leaf: leaf.to("meta"), obj)
    for part in (meta, *getattr(meta, "layers", ())):
        if getattr(part, "device", None) is not None:
            assert part.device == torch.device("meta")


@EVERY
def test_deep_copies_have_equal_specs(sample: Sample):
    obj = sample.fed(3)
    assert pytree.tree_structure(copy.deepcopy(obj)) == pytree.tree_structure(obj)


def test_keys_name_the_path():
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(BY_NAME["StaticCache"].fed(1))[0]]
    if LIST_BASED:
        assert paths == [".key_cache[0]", ".key_cache[1]", ".value_cache[0]", ".value_cache[1]"]
    else:
        assert paths[:2] == [".layers[0].keys", ".layers[0].values"]
        assert [path for path in paths if path.startswith(".layers[1]")][:2] == [".layers[1].keys", ".layers[1].values"]


@EVERY
def test_key_paths_lead_to_their_leaves(sample: Sample):
    obj = sample.fed(2)
    for path, leaf in pytree.tree_flatten_with_path(obj)[0]:
        found = pytree.key_get(obj, path)
        assert found is leaf or found == int(leaf)  # a counter is an int on the object


def test_encoder_decoder_keeps_what_is_updated():
    sample = BY_NAME["EncoderDecoderCache"]
    fresh, used = sample.make(), sample.fed(2)
    assert rebuilt(fresh).is_updated == {}
    assert rebuilt(used).is_updated == {0: True, 1: True}
    used.is_updated[1] = False
    assert rebuilt(used).is_updated == {0: True, 1: False}


def test_an_unknown_attribute_is_named():
    cache = BY_NAME["DynamicCache"].fed(2)
    cache.surprise = object()
    with pytest.raises(TypeError, match="attribute 'surprise' of DynamicCache is a object"):
        pytree.tree_flatten(cache)


def test_an_offloading_cache_is_refused():
    cache = BY_NAME["DynamicCache"].fed(2)
    cache.offloading = True
    with pytest.raises(TypeError, match="offloading=False"):
        pytree.tree_flatten(cache)


def test_a_subclass_is_registered_by_name():
    class MyCache(cache_utils.DynamicCache):
        pass

    cache = MyCache()
    assert pytree.tree_leaves(cache) == [cache]
    register_cache_class(MyCache)
    BY_NAME["DynamicCache"].feed(cache, 0, 2)
    assert type(rebuilt(cache)) is MyCache
