"""The one place of this package that touches what torch keeps private about pytrees.

It is next to the registry whose registrations it reads, and not in `common/compat`, where all other private names are.

Three things have no public form in torch 2.13, the release this was written against:

* reading a registration (`SUPPORTED_NODES`): needed to see whether another package registered a class first, and to
  build an FX flatten spec that agrees with *that* registration;
* taking a registration back: `register_pytree_node` raises when a class is registered twice, so replacing a lossy
  registration starts by removing it. torch has `_deregister_pytree_node`, but it stops half-way, with a KeyError and
  the lock released, for a class that shares its serialised name with another one (every class registered without a
  name shares the same placeholder), and it leaves the C++ pytree alone;
* telling a tensor that is being traced from one that merely has no value: needed to turn a length into a symbol.

`tests/pytree/test_torch_private.py` fails as soon as torch offers either publicly: this file is then to be deleted.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.fx._pytree as fx_pytree
import torch.utils._pytree as pytree


def node_of(cls: type) -> pytree.NodeDef | None:
    """Return the registration of `cls` in the Python pytree, or None."""
    return pytree.SUPPORTED_NODES.get(cls)


def fx_flatten_of(cls: type) -> Any | None:
    """Return the function that FX-generated code calls to flatten a `cls`, or None if it uses the pytree."""
    return fx_pytree.SUPPORTED_NODES.get(cls)


def serialized_name_of(cls: type) -> str | None:
    """Return the name under which `treespec_dumps` writes `cls`, or None when its specs cannot be written."""
    definition = pytree.SUPPORTED_SERIALIZED_TYPES.get(cls)
    if definition is None or definition.serialized_type_name == pytree.NO_SERIALIZED_TYPE_NAME_FOUND:
        return None
    return definition.serialized_type_name


def class_named(serialized_name: str) -> type | None:
    """Return the class that `treespec_loads` builds for a serialised name, or None."""
    return pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(serialized_name)


def remove_node(cls: type) -> None:
    """Take every registration of `cls` back: Python pytree, its serialised name, FX and C++ pytree. Never raises."""
    with pytree._NODE_REGISTRY_LOCK:
        pytree.SUPPORTED_NODES.pop(cls, None)
        pytree.CONSTANT_NODES.discard(cls)
        definition = pytree.SUPPORTED_SERIALIZED_TYPES.pop(cls, None)
        # A name may have been taken over by another class since; that one keeps it.
        if definition is not None and class_named(definition.serialized_type_name) is cls:
            del pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[definition.serialized_type_name]
        # `treespec_loads` remembers the specs it built, with the contexts of the registration that goes away.
        pytree.treespec_loads.cache_clear()
    remove_fx_flatten(cls)
    _remove_cxx_node(cls)


def remove_fx_flatten(cls: type) -> None:
    """Take the FX flatten spec of `cls` back, if there is one."""
    fx_pytree.SUPPORTED_NODES.pop(cls, None)
    fx_pytree.SUPPORTED_NODES_EXACT_MATCH.pop(cls, None)


def _remove_cxx_node(cls: type) -> None:
    # torch mirrors registrations to optree when `torch.utils._cxx_pytree` is imported, and queues them until then.
    pending = pytree._cxx_pytree_pending_imports
    pending[:] = [(args, kwargs) for args, kwargs in pending if args[0] is not cls]
    if "torch.utils._cxx_pytree" in sys.modules:
        import optree

        try:
            optree.unregister_pytree_node(cls, namespace="torch")
        except ValueError:  # never mirrored: a registration made through the Python-only entry points
            pass


def is_traced(leaf: Any) -> bool:
    """Return True if `leaf` is a tensor of a graph being traced, whose `.item()` is a symbol of that graph.

    A fake tensor alone does not say so: `torch.export` also unflattens while it prepares its example inputs, before any
    graph exists, and a symbol allocated there belongs to nothing ("pending unbacked symbols").
    """
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return isinstance(leaf, torch.Tensor) and get_proxy_mode() is not None


def is_plain(leaf: Any) -> bool:
    """Return True if `leaf` is a tensor with a readable value: not fake, not functional, not on `meta`."""
    return type(leaf) in (torch.Tensor, torch.nn.Parameter) and not leaf.is_meta
