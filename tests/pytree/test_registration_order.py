"""transformers and other tools register the same classes: before us, after us, with and without `replace`."""

from __future__ import annotations

import importlib.util
import warnings

import pytest
import torch
import torch.fx._pytree as fx_pytree
import torch.utils._pytree as pytree
from cache_samples import HAS_STATES, LIST_BASED, SAMPLES, WINDOW
from transformers import cache_utils
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache

from exportable_cache.pytree import (
    Action,
    _torch_private,
    cache_classes,
    is_ours,
    owner_of,
    register_transformers_caches,
)

BY_NAME = {sample.name: sample for sample in SAMPLES}
HAS_EXPORTERS = importlib.util.find_spec("transformers.exporters") is not None


@pytest.fixture
def unregistered(registered):
    for cls in cache_classes():
        _torch_private.remove_node(cls)


def register_as_transformers_does() -> None:
    """Every registration the installed release makes of DynamicCache or StaticCache, by its own functions."""
    if LIST_BASED:  # made when the module is imported; the fixture has taken it back
        if DynamicCache not in pytree.SUPPORTED_NODES:
            pytree.register_pytree_node(
                DynamicCache,
                cache_utils._flatten_dynamic_cache,
                cache_utils._unflatten_dynamic_cache,
                serialized_type_name=f"{DynamicCache.__module__}.{DynamicCache.__name__}",
                flatten_with_keys_fn=cache_utils._flatten_with_keys_dynamic_cache,
            )
            fx_pytree.register_pytree_flatten_spec(DynamicCache, cache_utils._flatten_dynamic_cache_for_fx)
    else:
        from transformers.integrations.executorch import register_dynamic_cache_export_support

        register_dynamic_cache_export_support()
    if HAS_EXPORTERS:
        from transformers.exporters.exporter_dynamo import register_pytree_node

        register_pytree_node(StaticCache)
        register_pytree_node(EncoderDecoderCache)


def tool_flatten(cache):
    return (cache.key_cache if LIST_BASED else cache.layers,), {"offloading": False}


def tool_unflatten(children, context):
    raise NotImplementedError


def register_as_a_tool_does() -> None:
    """As TICO registers StaticCache: children without keys, a context of its own, no usable FX spec."""
    tool_flatten.__module__ = "tico.utils.pytree_utils"
    pytree.register_pytree_node(StaticCache, tool_flatten, tool_unflatten, serialized_type_name="tico.StaticCache")


def result_for(cls, **options):
    (result,) = [entry for entry in register_transformers_caches(**options) if entry.cls is cls]
    return result


def leaves_agree(cache):
    spec = pytree.tree_structure(cache)
    through_fx = fx_pytree.tree_flatten_spec(cache, spec)
    return [one is other for one, other in zip(through_fx, pytree.tree_leaves(cache), strict=True)]


def test_transformers_own_registration_is_replaced_by_default(unregistered):
    register_as_transformers_does()
    assert owner_of(DynamicCache) == "transformers"
    result = result_for(DynamicCache)
    assert (result.pytree, result.fx, result.owner) == (Action.REPLACED, Action.REPLACED, "exportable_cache")
    assert "DynamicCache: pytree replaced, fx replaced" in str(result)
    assert is_ours(DynamicCache)
    assert all(leaves_agree(BY_NAME["DynamicCache"].fed(3)))


def test_transformers_own_registration_is_kept_on_request(unregistered):
    register_as_transformers_does()
    result = result_for(DynamicCache, replace=False)
    assert (result.pytree, result.fx, result.owner) == (Action.KEPT, Action.KEPT, "transformers")


def test_a_tool_that_came_first_is_kept_and_given_an_fx_spec(unregistered):
    register_as_a_tool_does()
    result = result_for(StaticCache)
    assert (result.pytree, result.fx, result.owner) == (Action.KEPT, Action.REGISTERED, "tico")
    assert result.name == "tico.StaticCache"
    assert all(leaves_agree(BY_NAME["StaticCache"].fed(3)))


def test_a_tool_that_came_first_is_replaced_on_request(unregistered):
    register_as_a_tool_does()
    result = result_for(StaticCache, replace=True)
    assert (result.pytree, result.owner) == (Action.REPLACED, "exportable_cache")
    assert _torch_private.class_named("tico.StaticCache") is None


def test_transformers_registering_after_us_changes_nothing(registered):
    register_as_transformers_does()
    assert all(is_ours(cls) for cls in cache_classes())
    assert all(leaves_agree(BY_NAME["DynamicCache"].fed(3)))
    assert {(entry.pytree, entry.fx) for entry in register_transformers_caches()} == {(Action.UNCHANGED,) * 2}


def test_a_tool_registering_after_us_gets_the_error_it_expects(registered):
    with pytest.raises(ValueError, match="already registered as pytree node"):
        register_as_a_tool_does()
    assert is_ours(StaticCache)


def test_who_overwrites_ours_with_the_deprecated_call_is_reported_and_can_be_undone(registered):
    tool_flatten.__module__ = "tico.utils.pytree_utils"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytree._register_pytree_node(StaticCache, tool_flatten, tool_unflatten)
    assert (result_for(StaticCache).pytree, owner_of(StaticCache)) == (Action.KEPT, "tico")
    assert result_for(StaticCache, replace=True).pytree is Action.REPLACED
    assert all(leaves_agree(BY_NAME["StaticCache"].fed(3)))


# Why ours replaces transformers' own. When one of these fails, look at what that release registers now.


def test_transformers_own_is_still_lossy(unregistered):
    register_as_transformers_does()
    if LIST_BASED:  # its FX spec gives the tensors where the spec has lists of tensors
        cache = BY_NAME["DynamicCache"].fed(3)
        through_fx = fx_pytree.tree_flatten_spec(cache, pytree.tree_structure(cache))
        assert [leaf.shape for leaf in through_fx] != [leaf.shape for leaf in pytree.tree_leaves(cache)]
        return
    cache = BY_NAME["DynamicCache-sliding"].fed(WINDOW + 3)
    leaves, spec = pytree.tree_flatten(cache)
    result = pytree.tree_unflatten(leaves, spec)
    assert result.get_seq_length(1) != cache.get_seq_length(1)
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(cache)[0]]
    assert paths[0] == "['key_cache'][0]"


if HAS_EXPORTERS:

    def test_the_spec_of_transformers_exporters_still_changes_with_every_token(unregistered):
        register_as_transformers_does()
        sample = BY_NAME["StaticCache-sliding"]
        assert pytree.tree_structure(sample.fed(2)) != pytree.tree_structure(sample.fed(2, 1))

    @pytest.mark.parametrize("kind", ["dynamic", "static"])
    @torch.no_grad()
    def test_transformers_exporter_works_on_our_registrations(registered, kind):
        from cache_samples import CAPACITY, SIZES
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.exporters import DynamoConfig, DynamoExporter

        model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
        cache = DynamicCache() if kind == "dynamic" else StaticCache(model.config, CAPACITY)
        model(torch.tensor([[1, 2, 3]]), past_key_values=cache)
        inputs = {"input_ids": torch.tensor([[4, 5]]), "past_key_values": cache}
        exported = DynamoExporter().export(model, inputs, DynamoConfig(dynamic=kind == "dynamic"))
        # Its earlier releases give the ExportedProgram itself.
        program = getattr(exported, "program", exported)
        names = [node.name for node in program.graph.nodes if node.op == "placeholder" and "layers_0" in node.name]
        assert any("past_key_values_layers_0_keys" in name for name in names)
        assert is_ours(DynamicCache) and HAS_STATES
