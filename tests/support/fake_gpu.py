"""A GPU that computes nothing: tensors with shapes, dtypes and a device, and no values.

What reads a value back to the host raises there, as no step on a GPU may wait for one, and so does an operator over
tensors of two devices. It needs no GPU, and no build of torch for one.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from exportable_cache.cache import checks

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from exportable_cache.cache.layers import CacheLayer

_setup_privateuseone_for_python_backend("gpu")
DEVICE = torch.device("gpu:0")
#: Operators that a CUDA graph cannot hold: they wait for a value, or have an output whose size is one.
_WAITING = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "masked_select", "unique", "equal")


class FakeGpu:
    """Moves tensors there, and is a block in which steps over them run.

    A value that is asked for raises in it, by this package's own checks as well, which elsewhere take tensors without
    values for those of a tracer.
    """

    def __init__(self) -> None:
        self._traced = checks.FakeTensor
        self._mode = FakeTensorMode(allow_non_fake_inputs=False)
        self._moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __enter__(self) -> FakeGpu:
        self._mode.__enter__()
        checks.FakeTensor = ()  # type: ignore[assignment,misc]
        return self

    def __exit__(self, *raised: Any) -> None:
        checks.FakeTensor = self._traced  # type: ignore[misc]
        self._mode.__exit__(*raised)

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor without values there, of the same shape, strides and dtype; one for each that is given."""
        if id(tensor) not in self._moved:
            shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            made = FakeTensor(self._mode, shape, DEVICE)
            if isinstance(tensor, torch.nn.Parameter):
                made = torch.nn.Parameter(made, requires_grad=False)
            # With the original, whose number another tensor would have if it went.
            self._moved[id(tensor)] = tensor, made
        return self._moved[id(tensor)][1]

    def move(self, *modules: torch.nn.Module) -> None:
        """Put their parameters and buffers there, in place."""
        for module in modules:
            for part in module.modules():
                for tensors in (part._parameters, part._buffers):
                    tensors.update({name: self.moved(one) for name, one in tensors.items() if one is not None})

    def move_state(self, layer: CacheLayer) -> None:
        """Put what a layer keeps there, in place, where it keeps it itself."""
        for name, tensor in list(layer.named_state()):
            with suppress(AttributeError):  # what belongs to another layer, or to a program
                setattr(layer, name, self.moved(tensor))


def waiting_nodes(program: ExportedProgram) -> list[str]:
    """Calls of a traced step that make the host wait for a value."""
    calls = [node.target for node in program.graph.nodes if node.op == "call_function"]
    names = [call.overloadpacket.__name__ for call in calls if isinstance(call, torch._ops.OpOverload)]
    return sorted({f"waits for `{name}`" for name in names if name in _WAITING})


def nodes_elsewhere(program: ExportedProgram) -> list[str]:
    """Tensors of a traced step that are not on the GPU; not those of one value, which operators take as a number."""
    values = [(node, node.meta.get("val")) for node in program.graph.nodes]
    tensors = [(node, value) for node, value in values if isinstance(value, torch.Tensor) and value.dim()]
    return [f"`{node.name}` is on {value.device}" for node, value in tensors if value.device != DEVICE]


def unaligned_masks(program: ExportedProgram) -> list[str]:
    """Return a finding for each mask of attention whose rows are not known to be aligned for every length.

    CUDA's memory-efficient kernel takes strides that are multiples of 8. `scaled_dot_product_attention` copies a mask
    whose strides are no such multiples, and asks so by comparisons, which become guards if a stride is symbolic.
    """
    calls = [node for node in program.graph.nodes if node.target is torch.ops.aten.scaled_dot_product_attention.default]
    masks = [node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask") for node in calls]
    strides = [mask.meta["val"].stride() for mask in masks if mask is not None]
    return sorted({f"the mask has strides {found}" for found in strides if not all(map(_is_aligned, found[:-1]))})


def _is_aligned(stride: int | torch.SymInt) -> bool:
    """Return True if a stride is a known size or a multiple of 8 for every length."""
    return isinstance(stride, int) or statically_known_true(stride % 8 == 0)
