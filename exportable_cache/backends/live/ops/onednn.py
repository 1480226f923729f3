"""Linear layers of compiled steps, and of those that have no graph yet, by oneDNN, where MKL is slow.

torch multiplies float32 by MKL, which takes a generic path on processors that are not Intel's. oneDNN compiles its
products for the processor that it finds. It takes weights as they lie in memory, as the model has them, so nothing is
packed and no copy is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ....common.compat.torch import linear_by_onednn
from ....common.native.machine_code import cpu_fields

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node


def onednn_is_better() -> bool:
    """Whether torch has both libraries, and this processor is one that MKL does not serve well."""
    vendor = cpu_fields().get("vendor_id", "GenuineIntel")
    return vendor != "GenuineIntel" and torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()


def linear_of_float32(input: Any, weight: Any, bias: Any = None) -> torch.Tensor | None:
    """`torch.nn.functional.linear` by oneDNN; None of what it does not compute."""
    if _is_matrix(weight) and all(_is_float32(one) for one in (input, weight, bias) if one is not None):
        return linear_by_onednn(input, weight, bias)
    return None


def linears_by_onednn(module: GraphModule) -> int:
    """Replace, in place, the linear layers of a captured graph that oneDNN can compute.

    Args:
        module: As TorchDynamo or `torch.export` gives it, without gradients.

    Returns:
        How many.
    """
    if not onednn_is_better():
        return 0
    # Here, as it imports the compiler, which takes long.
    from ....common.compat.torch_onednn import LINEARS, ONEDNN_LINEAR

    found = [node for node in module.graph.nodes if node.op == "call_function" and node.target in LINEARS]
    found = [node for node in found if _is_plain(node)]
    for node in found:
        named = (node.kwargs.get(name) for name in ("input", "weight", "bias")[len(node.args) :])
        node.args, node.kwargs, node.target = (*node.args, *named), {}, ONEDNN_LINEAR
    if found:
        module.recompile()
    return len(found)


def _is_plain(node: Node) -> bool:
    """Whether it is of float32 tensors on the CPU, and its weight lies in memory without gaps."""
    values = [_value_of(source) for source in node.all_input_nodes]
    weight = _value_of(node.args[1] if len(node.args) > 1 else node.kwargs["weight"])
    return _is_matrix(weight) and all(map(_is_float32, values))


def _is_matrix(weight: object) -> bool:
    return isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.is_contiguous()


def _is_float32(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == torch.float32
        and value.device.type == "cpu"
        # Quantised weights of torchao call themselves float32.
        and not hasattr(value, "__tensor_flatten__")
    )


def _value_of(node: object) -> object:
    """The fake tensor of a node, where TorchDynamo and `torch.export` note it."""
    meta = getattr(node, "meta", {})
    return meta.get("example_value", meta.get("val"))
