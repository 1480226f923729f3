"""`_torch_private` exists because torch has no public form of what it does; these tests fail once torch has one."""

from __future__ import annotations

import pytest
import torch.fx._pytree as fx_pytree
import torch.utils._pytree as pytree

from exportable_cache.pytree import _torch_private


class Node:
    pass


class Other:
    pass


def flatten(node):
    return [], None


def unflatten(children, context):
    return Node()


@pytest.fixture(autouse=True)
def clean():
    yield
    _torch_private.remove_node(Node)
    _torch_private.remove_node(Other)


def test_torch_still_refuses_a_second_registration():
    pytree.register_pytree_node(Node, flatten, unflatten)
    with pytest.raises(ValueError, match="already registered as pytree node"):
        pytree.register_pytree_node(Node, flatten, unflatten)


def test_torch_still_has_no_public_way_to_unregister_or_look_up():
    words = ("unregister", "deregister", "registered", "replace")
    public = [name for module in (pytree, fx_pytree) for name in dir(module) if not name.startswith("_")]
    assert not [name for name in public if any(word in name.lower() for word in words)], "use it, drop _torch_private"


def test_torch_still_stops_half_way_when_two_classes_have_no_serialised_name():
    pytree.register_pytree_node(Node, flatten, unflatten)
    pytree.register_pytree_node(Other, flatten, unflatten)
    pytree._deregister_pytree_node(Other)
    with pytest.raises(KeyError):
        pytree._deregister_pytree_node(Node)
    assert Node in pytree.SUPPORTED_SERIALIZED_TYPES


def test_remove_node_leaves_nothing_behind():
    pytree.register_pytree_node(Node, flatten, unflatten, serialized_type_name="toy.Node")
    fx_pytree.register_pytree_flatten_spec(Node, lambda node, spec: [])
    _torch_private.remove_node(Node)
    _torch_private.remove_node(Node)
    assert _torch_private.node_of(Node) is None
    assert _torch_private.fx_flatten_of(Node) is None
    assert _torch_private.serialized_name_of(Node) is None
    assert _torch_private.class_named("toy.Node") is None
    pytree.register_pytree_node(Node, flatten, unflatten)


def test_a_spec_read_before_does_not_outlive_its_class():
    pytree.register_pytree_node(Node, flatten, unflatten, serialized_type_name="toy.Node")
    text = pytree.treespec_dumps(pytree.tree_structure(Node()))
    assert pytree.treespec_loads(text).type is Node
    _torch_private.remove_node(Node)
    pytree.register_pytree_node(Other, flatten, unflatten, serialized_type_name="toy.Node")
    assert pytree.treespec_loads(text).type is Other


def test_remove_node_leaves_a_name_to_the_class_that_took_it():
    pytree.register_pytree_node(Node, flatten, unflatten, serialized_type_name="toy.Node")
    pytree.register_pytree_node(Other, flatten, unflatten, serialized_type_name="toy.Node")
    _torch_private.remove_node(Node)
    assert _torch_private.class_named("toy.Node") is Other
