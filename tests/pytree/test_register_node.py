"""register_node with a toy cache: keys, agreement of pytree and FX, serialisation, other people's registrations."""

from __future__ import annotations

import pytest
import torch
import torch.fx._pytree as fx_pytree
import torch.utils._pytree as pytree

from exportable_cache.pytree import Action, is_ours, owner_of, register_node, unregister_node

HEADS, CAPACITY, DIM = 2, 4, 3


class ToyLayer:
    def __init__(self, keys, values, capacity=CAPACITY):
        self.keys, self.values, self.capacity = keys, values, capacity


class ToyCache:
    def __init__(self, layers):
        self.layers = layers


def flatten_layer(layer):
    return [("keys", layer.keys), ("values", layer.values)], {"capacity": layer.capacity}


def unflatten_layer(children, context):
    return ToyLayer(*children, capacity=context["capacity"])


def flatten_cache(cache):
    return [("layers", cache.layers)], {}


def unflatten_cache(children, context):
    return ToyCache(children[0])


def foreign_flatten(layer):
    return [layer.values, layer.keys], (layer.capacity,)


def foreign_unflatten(children, context):
    return ToyLayer(children[1], children[0], *context)


def register_foreign():
    pytree.register_pytree_node(ToyLayer, foreign_flatten, foreign_unflatten)


def make_cache(layers=2):
    shape = (1, HEADS, CAPACITY, DIM)
    return ToyCache([ToyLayer(torch.randn(shape), torch.randn(shape)) for _ in range(layers)])


@pytest.fixture
def unregistered():
    from exportable_cache.pytree import _torch_private

    yield
    for cls in (ToyLayer, ToyCache):
        unregister_node(cls)
        _torch_private.remove_node(cls)


@pytest.fixture
def registered(unregistered):
    register_node(ToyLayer, flatten_layer, unflatten_layer)
    register_node(ToyCache, flatten_cache, unflatten_cache)


def fx_leaves(obj):
    spec = pytree.tree_structure(obj)
    return fx_pytree.tree_flatten_spec(obj, spec)


def test_keys_name_the_path(registered):
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(make_cache())[0]]
    assert paths == [".layers[0].keys", ".layers[0].values", ".layers[1].keys", ".layers[1].values"]


def test_a_key_path_leads_back_to_its_leaf(registered):
    cache = make_cache()
    for path, leaf in pytree.tree_flatten_with_path(cache)[0]:
        assert pytree.key_get(cache, path) is leaf


def test_fx_and_pytree_give_the_same_leaves(registered):
    cache = make_cache()
    for ours, theirs in zip(fx_leaves(cache), pytree.tree_leaves(cache), strict=True):
        assert ours is theirs


def test_leaves_that_are_not_tensors_survive(registered):
    spec = pytree.tree_structure(make_cache(1))
    for leaves in (["*", None], [7, object()]):
        assert pytree.tree_leaves(pytree.tree_unflatten(leaves, spec)) == leaves
    assert pytree.treespec_pprint(spec)


def test_spec_round_trips_through_json(registered):
    spec = pytree.tree_structure(make_cache())
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


@pytest.mark.parametrize(
    ("context", "message"), [((1, 2), "reads back"), ({1: 2}, "reads back"), ({"dtype": torch.int8}, "not JSON")]
)
def test_a_context_that_is_not_json_is_refused_when_written(unregistered, context, message):
    register_node(ToyLayer, lambda layer: ([("keys", layer.keys)], context), unflatten_layer)
    with pytest.raises(TypeError, match=message):
        pytree.treespec_dumps(pytree.tree_structure(make_cache(1).layers[0]))


def test_fx_refuses_another_context(registered):
    spec = pytree.tree_structure(make_cache())
    other = make_cache()
    other.layers[1].capacity = 9
    with pytest.raises(ValueError, match="'capacity': 9.*'capacity': 4"):
        fx_pytree.tree_flatten_spec(other, spec)


def test_fx_refuses_another_class(registered):
    spec = pytree.tree_structure(make_cache())
    with pytest.raises(TypeError, match="traced with a ToyCache but got a ToyLayer"):
        fx_pytree.tree_flatten_spec(make_cache().layers[0], spec)


def test_registering_twice_changes_nothing(registered):
    again = register_node(ToyLayer, flatten_layer, unflatten_layer)
    assert (again.pytree, again.fx) == (Action.UNCHANGED, Action.UNCHANGED)


def test_registering_other_functions_replaces_ours(registered):
    changed = register_node(ToyLayer, lambda layer: ([("keys", layer.keys)], {}), lambda c, _: ToyLayer(c[0], None))
    assert (changed.pytree, changed.fx) == (Action.REPLACED, Action.UNCHANGED)  # the FX one follows the pytree one
    assert len(fx_leaves(make_cache(1).layers[0])) == 1
    assert len(pytree.tree_leaves(make_cache(1))) == 1


def test_a_foreign_registration_is_kept_and_its_missing_fx_spec_added(unregistered):
    register_foreign()
    result = register_node(ToyLayer, flatten_layer, unflatten_layer)
    assert (result.pytree, result.fx, result.name) == (Action.KEPT, Action.REGISTERED, None)
    assert not is_ours(ToyLayer)
    layer = make_cache(1).layers[0]
    assert pytree.tree_leaves(layer)[0] is layer.values
    assert fx_leaves(layer)[0] is layer.values


def test_a_foreign_fx_spec_is_kept_with_its_pytree_registration(unregistered):
    register_foreign()
    fx_pytree.register_pytree_flatten_spec(ToyLayer, lambda layer, spec: foreign_flatten(layer)[0])
    assert register_node(ToyLayer, flatten_layer, unflatten_layer).fx is Action.KEPT


def test_a_foreign_registration_is_replaced_on_request(unregistered):
    register_foreign()
    fx_pytree.register_pytree_flatten_spec(ToyLayer, lambda layer, spec: foreign_flatten(layer)[0])
    result = register_node(ToyLayer, flatten_layer, unflatten_layer, replace=True)
    assert (result.pytree, result.fx) == (Action.REPLACED, Action.REPLACED)
    assert is_ours(ToyLayer)
    layer = make_cache(1).layers[0]
    assert [leaf is layer.keys for leaf in (pytree.tree_leaves(layer)[0], fx_leaves(layer)[0])] == [True, True]


def test_who_registers_after_us_gets_the_error_they_expect(registered):
    with pytest.raises(ValueError, match="already registered as pytree node"):
        register_foreign()
    assert is_ours(ToyLayer)


def test_an_fx_spec_overwritten_after_us_is_repaired(registered):
    fx_pytree.register_pytree_flatten_spec(ToyLayer, lambda layer, spec: foreign_flatten(layer)[0])
    layer = make_cache(1).layers[0]
    assert fx_leaves(layer)[0] is layer.values
    result = register_node(ToyLayer, flatten_layer, unflatten_layer)
    assert (result.pytree, result.fx) == (Action.UNCHANGED, Action.REPLACED)
    assert fx_leaves(layer)[0] is layer.keys


def test_owner_is_the_package_that_flattens(registered):
    assert owner_of(ToyLayer) == __name__.partition(".")[0]
    assert owner_of(torch.Tensor) is None


def test_unregister_takes_only_ours(unregistered):
    register_foreign()
    assert unregister_node(ToyLayer) is False
    assert owner_of(ToyLayer) is not None
    register_node(ToyLayer, flatten_layer, unflatten_layer, replace=True)
    assert unregister_node(ToyLayer) is True
    assert owner_of(ToyLayer) is None


def test_a_serialised_name_belongs_to_one_class(registered):
    with pytest.raises(ValueError, match="already belongs to"):
        register_node(ToyCache, flatten_cache, unflatten_cache, name=f"{ToyLayer.__module__}.ToyLayer")


def test_an_instance_is_refused():
    with pytest.raises(TypeError, match="not an instance"):
        register_node(make_cache(), flatten_cache, unflatten_cache)


class Step(torch.nn.Module):
    def forward(self, x, cache):
        for layer in cache.layers:
            layer.keys = layer.keys + x
        return x.sum(), cache


def test_exported_program_takes_and_returns_the_cache(registered, tmp_path):
    program = torch.export.export(Step(), (torch.ones(DIM), make_cache()))
    names = [node.name for node in program.graph.nodes if node.op == "placeholder"]
    assert names[1:3] == ["cache_layers_0_keys", "cache_layers_0_values"]
    torch.export.save(program, tmp_path / "step.pt2")
    loaded = torch.export.load(tmp_path / "step.pt2").module()
    cache = make_cache()
    expected = [layer.keys + 1 for layer in cache.layers]
    for _ in range(3):
        _, result = loaded(torch.ones(DIM), cache)
        assert type(result) is ToyCache
        for layer, keys in zip(result.layers, expected, strict=True):
            torch.testing.assert_close(layer.keys, keys)
        cache, expected = result, [keys + 1 for keys in expected]


def test_a_program_loads_without_the_unrestricted_unpickler(registered, tmp_path, caplog):
    torch.export.save(torch.export.export(Step(), (torch.ones(DIM), make_cache())), tmp_path / "step.pt2")
    torch.export.load(tmp_path / "step.pt2")
    assert not [record for record in caplog.records if "weights_only" in record.msg]


@pytest.mark.skipif(not pytree._cxx_pytree_exists, reason="optree is not installed; the layout environments have it")
def test_the_cxx_pytree_follows(registered):
    import torch.utils._cxx_pytree as cxx_pytree

    cache = make_cache()
    for ours, theirs in zip(cxx_pytree.tree_leaves(cache), pytree.tree_leaves(cache), strict=True):
        assert ours is theirs
    register_node(ToyLayer, lambda layer: ([("keys", layer.keys)], {}), unflatten_layer, replace=True)
    assert len(cxx_pytree.tree_leaves(cache)) == 2
