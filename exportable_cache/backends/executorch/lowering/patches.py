"""Replace functions of ExecuTorch's exporter: same program, without passes that have nothing to do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

from ....common.compat.executorch import operator_of, without_submodules
from ....common.compat.torch import OpOverload, operator_arguments
from ....common.patch import Patch
from ....errors import UnsupportedModelError

if TYPE_CHECKING:
    from torch.export import ExportedProgram


_ATEN = torch.ops.aten
#: Operators that promote the dtypes of their operands.
_PROMOTING = frozenset(
    (_ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.mul.Tensor)
    + (_ATEN.div.Tensor, _ATEN.div.Tensor_mode, _ATEN.minimum.default)
)
#: Operators whose portable kernels need the default dim order.
_ORDERED = frozenset(
    ("aten._adaptive_avg_pool2d.default", "aten.avg_pool2d.default")
    + ("aten.expand_copy.default", "aten.mean.dim", "aten.sum.dim_IntList")
)


def skip_if_unneeded(has_work: Callable[[Node], bool]) -> Callable[[Callable], Callable]:
    """Return a replacement of a pass's `call` that skips graphs in which `has_work` is False for every call."""

    def replace(original: Callable[[Any, GraphModule], PassResult]) -> Callable[[Any, GraphModule], PassResult]:
        def call(self: Any, graph_module: GraphModule) -> PassResult:
            if any(map(has_work, _calls(graph_module))):
                return original(self, graph_module)
            return PassResult(graph_module, False)

        return call

    return replace


def _calls(graph_module: GraphModule) -> Iterator[Node]:
    """Yield operator calls of a graph and its inner graphs."""
    for module in graph_module.modules():
        if isinstance(module, GraphModule):
            yield from (node for node in module.graph.nodes if node.op == "call_function")


def is_transpose(node: Node) -> bool:
    """Return True if `NormalizeTransposePass` replaces the call."""
    return operator_of(node.target) is _ATEN.t.default


def is_view(node: Node) -> bool:
    """Return True if `ReplaceBrokenOpsWithFunctionalOpsPass` replaces the call."""
    target = operator_of(node.target)
    return isinstance(target, OpOverload) and target.is_view


def takes_symbol_as_tensor(node: Node) -> bool:
    """Return True if `SymToTensorPass` changes the call: a symbolic number is passed for a declared tensor."""
    target = operator_of(node.target)
    if not isinstance(target, OpOverload):
        return False
    declared = operator_arguments(target)
    given = dict(zip((argument.name for argument in declared), node.args, strict=False)) | node.kwargs
    return any(
        isinstance(argument.type, torch.TensorType)
        and isinstance(given.get(argument.name), Node)
        and not isinstance(_value(given[argument.name]), torch.Tensor)
        for argument in declared
    )


def mixes_dtypes(node: Node) -> bool:
    """Return True if `RemoveMixedTypeOperators` may change the call: its operands are not floats of one dtype."""
    if operator_of(node.target) not in _PROMOTING:
        return False
    values = [_value(argument) for argument in node.args]
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]
    return len(tensors) < len(values) or len({tensor.dtype for tensor in tensors}) > 1


def reads_another_order(node: Node) -> bool:
    """Return True if `LegalizePortableDimOrderPass` copies the input of the call."""
    if str(operator_of(node.target)) not in _ORDERED:
        return False
    value = _value(node.args[0])
    return not isinstance(value, torch.Tensor) or tuple(map(int, value.dim_order())) != tuple(range(value.dim()))


def calls(*names: str) -> Callable[[Node], bool]:
    """Return a function that is True for calls of these operators, such as `aten._to_copy.default`."""

    def is_call(node: Node) -> bool:
        return str(operator_of(node.target)) in names

    return is_call


def concatenates_many(node: Node) -> bool:
    """Return True if `DecomposeConcatenate` splits the call: it concatenates more than five tensors."""
    tensors = node.args[0] if node.args else None
    return (
        str(operator_of(node.target)) == "aten.cat.default" and isinstance(tensors, list | tuple) and len(tensors) > 5
    )


def is_quantizing(node: Node) -> bool:
    """Return True if `PropagateCustomMetaPass` may change the call, which quantizes or dequantizes."""
    return "quantize" in str(operator_of(node.target))


def _value(argument: Any) -> Any:
    """Return the value of an argument when the program runs on fake tensors."""
    if not isinstance(argument, Node):
        return argument
    if "val" not in argument.meta and argument.op == "get_attr":
        return getattr(argument.graph.owning_module, str(argument.target), None)
    return argument.meta.get("val")


log = logging.getLogger(__name__)


def _once(original: Callable[[ExportedProgram], ExportedProgram]) -> Callable[[ExportedProgram], ExportedProgram]:
    """Run the original on the program's graph only, because it visits the whole graph again for every inner graph."""

    def remove(program: ExportedProgram) -> ExportedProgram:
        original(without_submodules(program))
        return program

    return remove


def _skipping(
    file: str, name: str, has_work: Callable[[Node], bool], digest: str, package: str = "exir.passes"
) -> Patch:
    return Patch(
        f"executorch.{package}.{file}",
        f"{name}.call",
        skip_if_unneeded(has_work),
        "it runs every operator of a program again, even if it changes nothing",
        digests=(digest,),
        source=name,
        package="executorch",
        url=f"https://github.com/pytorch/executorch/blob/v1.4.1/{package.replace('.', '/')}/{file}.py",
    )


_of_xnnpack = partial(_skipping, package="backends.xnnpack._passes")
_BATCH_NORMS = "aten.native_batch_norm.default", "aten._native_batch_norm_legit_no_training.default"
#: Passes for each part of a program that XNNPACK computes. A program of many layers has hundreds of parts.
XNNPACK_PATCHES = (
    _of_xnnpack("convert_to_sdpa", "ConvertToSDPAPass", calls("aten.any.dim"), "967458b4eecab263"),
    _of_xnnpack(
        "convert_to_upsample_bilinear2d",
        "ConvertToUpsampleBilinear2d",
        calls("aten.upsample_bilinear2d.vec"),
        "c883c34e1945a775",
    ),
    _of_xnnpack("propagate_custom_meta_pass", "PropagateCustomMetaPass", is_quantizing, "a52e8aea62ee2d31"),
    _of_xnnpack("fuse_batch_norm", "FuseBatchNormPass", calls(*_BATCH_NORMS), "164f828e10b7510e"),
    _of_xnnpack("decompose_batch_norm", "DecomposeBatchNorm", calls(*_BATCH_NORMS), "f718ae697cd115bb"),
    _of_xnnpack("decompose_cat", "DecomposeConcatenate", concatenates_many, "d0f681362a404a36"),
    _of_xnnpack(
        "fuse_activation_pass",
        "FuseActivationPass",
        calls("aten.relu.default", "aten.hardtanh.default"),
        "6ad12f0b9af84f53",
    ),
    _of_xnnpack("conv1d_unsqueeze_pass", "Conv1dUnsqueezePass", calls("aten.convolution.default"), "fec2140467c7708a"),
    _of_xnnpack("prelu_reshape_pass", "PReLUReshapePass", calls("aten._prelu_kernel.default"), "18dfd5f8c08a1cc2"),
    _of_xnnpack(
        "remove_redundant_copy_pass", "RemoveRedundantCopyPass", calls("aten._to_copy.default"), "bd3ec6fef2336dad"
    ),
    _skipping(
        "remove_getitem_op",
        "RemoveGetItemPass",
        calls("aten.max_pool2d_with_indices.default", "aten.max.dim"),
        "7a6f30ace2150f58",
        package="backends.transforms",
    ),
)


PATCHES = (
    Patch(
        "executorch.exir.program._program",
        "unsafe_remove_auto_functionalized_pass",
        _once,
        "it takes quadratic time: two branches per layer, and the whole graph for each",
        digests=("1d9a9a7259e920bd",),
        package="executorch",
        url="https://github.com/pytorch/pytorch/blob/v2.13.0/torch/export/_remove_auto_functionalized_pass.py",
    ),
    _skipping("normalize_transpose_pass", "NormalizeTransposePass", is_transpose, "912bf0029f61ec18"),
    _skipping(
        "replace_broken_ops_with_function_ops_pass",
        "ReplaceBrokenOpsWithFunctionalOpsPass",
        is_view,
        "0e84e744baf1bfa8",
    ),
    _skipping("sym_to_tensor_pass", "SymToTensorPass", takes_symbol_as_tensor, "6da3bdcf53b35a48"),
    _skipping("remove_mixed_type_operators", "RemoveMixedTypeOperators", mixes_dtypes, "984d68821522d093"),
    _skipping(
        "legalize_portable_dim_order_pass", "LegalizePortableDimOrderPass", reads_another_order, "43565f5a825c2a26"
    ),
    *XNNPACK_PATCHES,
)


def patch_exporter() -> None:
    """Apply the patches; a function whose original changed is left alone."""
    for patch in PATCHES:
        try:
            patch.apply()
        except UnsupportedModelError as error:
            log.info("%s", error)
