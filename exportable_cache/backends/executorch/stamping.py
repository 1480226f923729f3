"""Equal segments lowered once and stamped out, each with its own weights.

A model's layers are the same operators over other weights, and a lowering that goes through them one by one takes the
time of all. So one of each kind is lowered over weights that are told apart by their values, and what the delegate's
compiler made of each is found again in what it wrote: XNNPACK's payload names its data by digests of 64 digits. A
stamped payload is the same one with the digests of other weights in their places, packed as the compiler packs them.
Where something in a payload cannot be explained so, the segments are lowered in place like everything else.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ...common.compat.executorch import named_data, pack_pairs
from .delegate_shapes import replaced, with_known_shapes

if TYPE_CHECKING:
    from executorch.exir.lowered_backend_module import LoweredBackendModule

#: How XNNPACK's compiler packs the tensors it is given: name -> the tensor whose bytes it writes.
_PACKINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda tensor: tensor,
    "float32": lambda tensor: tensor.float(),
    "bfloat16": lambda tensor: tensor.to(torch.bfloat16),
    "transposed": lambda tensor: tensor.float().t(),
    "two to a byte": pack_pairs,
}
_KEY = re.compile(rb"(?:scale_)?[0-9a-f]{64}")


@dataclass(frozen=True)
class _Piece:
    """One entry of a delegate's data that holds a weight.

    Attributes:
        key: In the template.
        weight: Its number.
        packing: One of `_PACKINGS`.
    """

    key: str
    weight: int
    packing: str


class DelegateTemplate:
    """A lowered delegate call whose weights can be replaced.

    Args:
        lowered: Over weights that differ from one another.
        weights: Name in the delegate's program -> number.

    Raises:
        Unexplained: If some of its data is neither a weight, packed in a known way, nor the same for all weights.
    """

    def __init__(self, lowered: LoweredBackendModule, weights: Mapping[str, int]) -> None:
        self._lowered = with_known_shapes(lowered)
        program = lowered.original_module
        tensors = {**program.state_dict, **program.constants}
        data = lowered.named_data_store_output
        if data is None or data.external_data:
            raise Unexplained("data outside of the program")
        self._pieces: list[_Piece] = []
        self._fixed: list[str] = []
        for key, entry in data.pte_data.items():
            content = data.buffers[entry.buffer_index]
            found = [(name, packing) for name, tensor in tensors.items() for packing in _packings(tensor, content)]
            if not found:
                raise Unexplained(f"{len(content)} bytes that are no tensor of the segment")
            name, packing = found[0]
            if name not in weights:
                self._fixed.append(key)
            else:
                if any(other != name for other, _ in found):
                    raise Unexplained(f"{len(content)} bytes that are several tensors of the segment")
                self._pieces.append(_Piece(key, weights[name], packing))

    def stamped(self, weights: Sequence[torch.Tensor], packed: dict[Any, Any]) -> LoweredBackendModule:
        """The call over other weights.

        Args:
            weights: By number.
            packed: What was packed before, for other methods of the program.
        """
        data = self._lowered.named_data_store_output
        buffers, entries, keys = [], {}, {}
        for key in self._fixed:
            entries[key] = replace(data.pte_data[key], buffer_index=len(buffers))
            buffers.append(data.buffers[data.pte_data[key].buffer_index])
        for piece in self._pieces:
            tensor = weights[piece.weight]
            place = (tensor.data_ptr(), tuple(tensor.shape), piece.packing)
            if place not in packed:
                content = _content(_PACKINGS[piece.packing](tensor.detach()))
                packed[place] = (hashlib.sha256(content).hexdigest(), content)
            digest, content = packed[place]
            name = piece.key[:-64] + digest
            keys[piece.key.encode()] = name.encode()
            if name not in entries:
                entries[name] = replace(data.pte_data[piece.key], buffer_index=len(buffers))
                buffers.append(content)
        payload = _KEY.sub(lambda match: keys.get(match.group(), match.group()), self._lowered.processed_bytes)
        return replaced(self._lowered, processed_bytes=payload, named_data=named_data(buffers, entries))


class Unexplained(Exception):
    """What a segment was lowered to cannot be stamped."""


def _packings(tensor: torch.Tensor, content: bytes) -> list[str]:
    """In which ways a tensor's bytes are these."""
    found = []
    for name, pack in _PACKINGS.items():
        if name == "two to a byte":
            fits = tensor.dtype == torch.int8 and tensor.dim() == 2 and len(content) * 2 == tensor.numel()
            fits = fits and int(tensor.min()) >= -8 and int(tensor.max()) <= 7
        elif name == "as it is":
            fits = tensor.nbytes == len(content)
        elif name == "transposed":
            fits = tensor.is_floating_point() and tensor.dim() == 2 and tensor.numel() * 4 == len(content)
        else:
            size = {"float32": 4, "bfloat16": 2}[name]
            fits = tensor.is_floating_point() and tensor.numel() * size == len(content)
        if fits and _content(pack(tensor.detach())) == content:
            found.append(name)
            break
    return found


def _content(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
