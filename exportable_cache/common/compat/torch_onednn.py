"""Private names of torch that call oneDNN's linear layer from compiled code, seen in 2.13.0.

Importing this imports the compiler.

| name | without it |
|---|---|
| `torch._inductor.mkldnn_ir.LinearUnary` | compiled steps use MKL |
| `torch._inductor.lowering.register_lowering`, `torch._inductor.ir.TensorBox` | the same |

Inductor lowers that operator only for constant weights; here the weights are inputs of the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.ir import TensorBox
from torch._inductor.lowering import register_lowering
from torch._inductor.mkldnn_ir import LinearUnary

from .torch import LINEAR, linear_by_onednn

#: `torch.nn.functional.linear` as TorchDynamo and `torch.export` record it.
LINEARS = (LINEAR, torch.ops.aten.linear.default)
_NO_MORE: tuple[str, list[Any], str] = ("none", [], "")

_library = torch.library.Library("exportable_cache", "FRAGMENT")
_library.define("onednn_linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor")
#: float32 [..., in] and [out, in]: [..., out].
ONEDNN_LINEAR = torch.ops.exportable_cache.onednn_linear.default


@torch.library.impl(_library, "onednn_linear", "CPU")
def _onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return linear_by_onednn(x, weight, bias)


@torch.library.register_fake("exportable_cache::onednn_linear", lib=_library)
def _shape_of(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@register_lowering(ONEDNN_LINEAR, type_promotion_kind=None)
def _lowered(x: Any, weight: Any, bias: Any = None) -> Any:
    return TensorBox.create(LinearUnary.create(x, weight, bias, *_NO_MORE))
