"""Fewer passes of XNNPACK's compiler, for partitions that need no more.

The compiler (executorch 1.4.1, backends/xnnpack/_passes) takes every partition through 17 passes, and each traces it
again whether it found its operators or not. That was a third to two fifths of an export's time. A compile spec of
XNNPACK's own leaves one pass, the one that makes linear layers of products with weights; the others have nothing to do
in partitions of `PLAIN` operators alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, PartitionResult

if TYPE_CHECKING:
    from torch.fx import Node

#: Read by backends/xnnpack/xnnpack_preprocess.py; the runtime does not look at it.
LINEAR_ONLY = CompileSpec("dqlinear_partitioner", b"")

_ATEN = (
    *("linear.default", "addmm.default", "mm.default", "bmm.default"),
    *("_softmax.default", "sigmoid.default", "tanh.default", "gelu.default"),
    *("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "maximum.default", "minimum.default"),
    *("exp.default", "log.default", "sqrt.default", "rsqrt.default", "pow.Tensor_Scalar", "neg.default", "abs.default"),
    *("sin.default", "cos.default", "clamp.default"),
    *("permute_copy.default", "view_copy.default", "unsqueeze_copy.default", "slice_copy.Tensor"),
)
_TORCHAO = ("choose_qparams_affine.default", "quantize_affine.default", "dequantize_affine.default")
#: No pass but that one looks for these. Of operators with several results, only torchao's are among them.
PLAIN = frozenset((*(f"aten.{name}" for name in _ATEN), *(f"torchao.{name}" for name in _TORCHAO), "getitem"))
#: XNNPACK concatenates so many tensors at once; a pass splits longer lists.
LONGEST_CAT = 5


def with_needed_passes(result: PartitionResult) -> PartitionResult:
    """The same partitions, those of plain operators marked so that one pass is run over them."""
    nodes: dict[str, list[Node]] = {tag: [] for tag in result.partition_tags}
    for node in result.tagged_exported_program.graph.nodes:
        if node.op == "call_function" and node.meta.get("delegation_tag") in nodes:
            nodes[node.meta["delegation_tag"]].append(node)
    specs = {
        tag: _linear_only(spec) if all(map(is_plain, nodes[tag])) else spec
        for tag, spec in result.partition_tags.items()
    }
    return PartitionResult(tagged_exported_program=result.tagged_exported_program, partition_tags=specs)


def is_plain(node: Node) -> bool:
    """Whether no pass but the one for linear layers has anything to do with an operator of a delegate."""
    name = getattr(node.target, "__name__", "")
    return name in PLAIN or (name == "aten.cat.default" and len(node.args[0]) <= LONGEST_CAT)


def _linear_only(spec: DelegationSpec) -> DelegationSpec:
    return DelegationSpec(spec.backend_id, [*spec.compile_specs, LINEAR_ONLY])
