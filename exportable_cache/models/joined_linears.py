"""Linear layers with the same input as one product: queries, keys and values; gate and up.

A step of one row reads each weight once, so its time is that of memory and of launching kernels. One product over the
joined weights launches one kernel in place of two or three, and a wider one uses more of a GPU. The weights are moved
into one tensor, of which the parameters become views: nothing is stored twice, and the state dict is unchanged.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..common.compat.torch import has_hooks
from ..common.tensors import ordinary_tensors

#: Names of layers in one module that get the same input, in the order in which models call them.
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
#: Parts of names of modules whose layers get different inputs, or are not called as layers.
_APART = ("cross", "encoder_attn", "experts")


class _Step(threading.local):
    """The newest joined product of this thread, for the other layers of its group."""

    def __init__(self) -> None:
        self.is_joined = False
        self.group: _Group | None = None
        self.source: torch.Tensor | None = None
        self.parts: Sequence[torch.Tensor] = ()


_step = _Step()


class _Group:
    """Layers whose weights are rows of one tensor.

    Attributes:
        sizes: Output size of each layer.
        is_valid: False once a parameter was replaced, because the joined tensor then has old weights.
        first: Weak reference to the first layer, which has the joined tensors. It is weak because a cycle would keep a
            deleted model's memory until the next garbage collection.
    """

    first: weakref.ref[JoinedLinear] | None = None

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.is_valid = True

    def __getstate__(self) -> dict[str, Any]:
        # The copied first layer sets it again.
        return {name: value for name, value in vars(self).items() if name != "first"}

    def end(self) -> None:
        """Compute the layers separately from now on, and drop the joined tensors."""
        self.is_valid = False
        first = None if self.first is None else self.first()
        if first is not None:
            first.joined_weight = first.joined_bias = None

    def is_current(self, layer: JoinedLinear) -> bool:
        """Return True if the parameters of a layer of this group are rows of the joined tensors."""
        first = None if self.first is None else self.first()
        # A copy of a single layer has no first layer, and computes alone.
        return first is None or (
            _are_rows(layer.weight, first.joined_weight) and _are_rows(layer.bias, first.joined_bias)
        )


class JoinedLinear(nn.Linear):
    """A linear layer whose parameters are rows of a group's; inside `joined_products` the first layer computes all.

    Args:
        linear: The layer to take the parameters of.
        group: Its group.
        index: Index in the group.

    Attributes:
        joined_weight: Weights of the group, [sum of outputs, in_features]; None except in its first layer.
        joined_bias: Biases of the group, if it has any.
    """

    joined_weight: torch.Tensor | None
    joined_bias: torch.Tensor | None

    def __init__(self, linear: nn.Linear, group: _Group, index: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        self.train(linear.training)
        self.group, self.index = group, index
        self._join_group()
        self.register_buffer("joined_weight", None, persistent=False)
        self.register_buffer("joined_bias", None, persistent=False)

    def _join_group(self) -> None:
        if self.index == 0:
            self.group.first = weakref.ref(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._join_group()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, computed with the group's if the group has the same input."""
        group = self.group
        if not _step.is_joined or not group.is_valid:
            return super().forward(input)
        if self.index == 0:
            assert self.joined_weight is not None
            outputs = F.linear(input, self.joined_weight, self.joined_bias)
            _step.group, _step.source, _step.parts = group, input, outputs.split(group.sizes, dim=-1)
            return _step.parts[0]
        if _step.group is group and _step.source is input:
            return _step.parts[self.index]
        return super().forward(input)

    def __setattr__(self, name: str, value: Any) -> None:
        # The first assignment comes before the group's.
        if name in ("weight", "bias") and "group" in self.__dict__:
            self.group.end()
        super().__setattr__(name, value)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> JoinedLinear:
        # Otherwise the parameters would become copies, and the group's tensor a second one.
        if self.group.is_valid and not (self.group.is_current(self) and _keeps(fn, self.weight.data[:1])):
            self.group.end()
        return super()._apply(fn, recurse)


@contextmanager
def joined_products() -> Iterator[None]:
    """Compute groups as one product inside the block, without gradients."""
    before = _step.is_joined
    _step.is_joined = True
    try:
        yield
    finally:
        _step.is_joined = before
        # Not kept, because a captured graph would return it.
        _step.group, _step.source, _step.parts = None, None, ()


def join_linears(model: nn.Module) -> int:
    """Move the weights of layers with the same input into one tensor, and return the number of groups.

    Layers are found by `GROUPS`. Quantized, shared, hooked and parallel layers, layers of other classes, inference
    tensors, and layers that were joined before are left unchanged.

    Args:
        model: Model on one device.
    """
    shared = _shared_weights(model)
    count = 0
    for name, module in list(model.named_modules()):
        if any(part in name.lower() for part in _APART) or getattr(module, "is_kv_shared_layer", False):
            continue
        for names in GROUPS:
            layers: list[Any] = [getattr(module, one, None) for one in names]
            if _can_join(layers) and not any(layer.weight.data_ptr() in shared for layer in layers):
                _join(module, names, layers)
                count += 1
    return count


def end_outdated_groups(model: nn.Module) -> None:
    """Compute layers separately whose parameters are no longer rows of their group's tensor.

    A copy of a model has copies of parameters and of the joined tensors. Assignments to `weight.data` and to a module's
    dict of parameters do not notify the layer.
    """
    for module in model.modules():
        if isinstance(module, JoinedLinear) and module.group.is_valid and not module.group.is_current(module):
            module.group.end()


def separate_linears(model: nn.Module) -> None:
    """Undo `join_linears`: give each joined layer parameters with memory of their own, and drop the joined tensors.

    Programs on disk would otherwise contain the joined tensors as well.
    """
    for module in model.modules():
        if isinstance(module, JoinedLinear) and module.group.is_valid:
            module.group.end()
    with ordinary_tensors():
        for module in model.modules():
            if isinstance(module, JoinedLinear):
                for parameter in module.parameters(recurse=False):
                    if parameter.untyped_storage().nbytes() > parameter.nbytes:
                        parameter.data = parameter.data.clone()


def _are_rows(parameter: torch.Tensor | None, joined: torch.Tensor | None) -> bool:
    if parameter is None or joined is None:
        return parameter is joined
    if type(parameter.data) is not torch.Tensor:
        return False
    return parameter.untyped_storage().data_ptr() == joined.untyped_storage().data_ptr()


def _keeps(fn: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> bool:
    """Return True if a function returns a tensor where it is, in its dtype."""
    found = fn(tensor)
    return found.data_ptr() == tensor.data_ptr() and found.dtype == tensor.dtype


def _shared_weights(model: nn.Module) -> set[int]:
    """Return the addresses of parameters that several modules have."""
    seen: set[int] = set()
    shared: set[int] = set()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        if type(parameter) is nn.Parameter:
            (shared if parameter.data_ptr() in seen else seen).add(parameter.data_ptr())
    return shared


def _can_join(layers: Sequence[Any]) -> bool:
    # Layers whose joined weights were dropped, because the model was moved, are joined again.
    if not all(type(one) is nn.Linear or type(one) is JoinedLinear and not one.group.is_valid for one in layers):
        return False
    first = layers[0]
    for layer in layers:
        weight, bias = layer.weight, layer.bias
        if type(weight) is not nn.Parameter or type(weight.data) is not torch.Tensor or hasattr(layer, "_hf_hook"):
            return False
        if has_hooks(layer) or "forward" in vars(layer) or weight.is_inference():
            return False
        if (bias is None) is not (first.bias is None) or weight.dtype != first.weight.dtype:
            return False
        if weight.shape[1] != first.weight.shape[1] or weight.device != first.weight.device:
            return False
    return True


def _join(module: nn.Module, names: Sequence[str], layers: Sequence[nn.Linear]) -> None:
    group = _Group(tuple(layer.out_features for layer in layers))
    with ordinary_tensors():
        joined = {"joined_weight": _moved([layer.weight for layer in layers])}
        if layers[0].bias is not None:
            joined["joined_bias"] = _moved([layer.bias for layer in layers])
    for index, (name, layer) in enumerate(zip(names, layers, strict=True)):
        made = JoinedLinear(layer, group, index)
        if index == 0:
            for buffer, tensor in joined.items():
                setattr(made, buffer, tensor)
        setattr(module, name, made)


def _moved(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the parameters as rows of one tensor, of which they are views afterwards."""
    joined = torch.cat([parameter.data for parameter in parameters])
    for parameter, rows in zip(parameters, joined.split([one.shape[0] for one in parameters]), strict=True):
        parameter.data = rows
    return joined
