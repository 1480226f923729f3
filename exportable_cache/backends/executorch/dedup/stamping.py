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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ....common.compat.executorch import named_data, pack_pairs
from .delegate_shapes import replaced, with_known_shapes
from .segments import Unexplained

if TYPE_CHECKING:
    from executorch.exir.lowered_backend_module import LoweredBackendModule


@dataclass(frozen=True)
class _Packing:
    """One way in which XNNPACK's compiler writes a tensor it is given.

    Attributes:
        pack: Gives the tensor whose bytes it writes.
        takes: Whether a tensor is one of those that are packed so.
        bits: Of each number.
    """

    pack: Callable[[torch.Tensor], torch.Tensor]
    takes: Callable[[torch.Tensor], bool]
    bits: int | None = None

    def bytes(self, tensor: torch.Tensor) -> int:
        """How many it writes."""
        return tensor.nbytes if self.bits is None else tensor.numel() * self.bits // 8


def _is_int4(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.int8 and tensor.dim() == 2 and -8 <= int(tensor.min()) <= int(tensor.max()) <= 7


def _is_matrix(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dim() == 2


_PACKINGS = {
    "as it is": _Packing(lambda tensor: tensor, lambda tensor: True),
    "float32": _Packing(torch.Tensor.float, torch.Tensor.is_floating_point, 32),
    "bfloat16": _Packing(torch.Tensor.bfloat16, torch.Tensor.is_floating_point, 16),
    "transposed": _Packing(lambda tensor: tensor.float().t(), _is_matrix, 32),
    "two to a byte": _Packing(pack_pairs, _is_int4, 4),
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
        weights: Name in the delegate's program -> number, of those it reads.

    Raises:
        Unexplained: If some of its data is neither a weight, packed in a known way, nor the same for all weights; or a
            weight is in none of its data.
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
        baked = set(weights.values()) - {piece.weight for piece in self._pieces}
        if baked:
            raise Unexplained(f"weights that are in none of its data: {sorted(baked)}")

    def stamped(self, weights: Sequence[torch.Tensor], packed: dict[Any, Any]) -> LoweredBackendModule:
        """The call over other weights.

        Args:
            weights: By number.
            packed: What was packed before, for other methods of the program.
        """
        data = self._lowered.named_data_store_output
        buffers: list[bytes] = []
        entries, keys = {}, {}
        for key in self._fixed:
            entries[key] = replace(data.pte_data[key], buffer_index=len(buffers))
            buffers.append(data.buffers[data.pte_data[key].buffer_index])
        for piece in self._pieces:
            tensor = weights[piece.weight]
            place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), piece.packing)
            if place not in packed:
                content = _content(_PACKINGS[piece.packing].pack(tensor.detach()))
                # With the tensor: its address is no other's while it is held.
                packed[place] = (hashlib.sha256(content).hexdigest(), content, tensor)
            digest, content, _ = packed[place]
            name = piece.key[:-64] + digest
            keys[piece.key.encode()] = name.encode()
            if name not in entries:
                entries[name] = replace(data.pte_data[piece.key], buffer_index=len(buffers))
                buffers.append(content)
        payload = _KEY.sub(lambda match: keys.get(match.group(), match.group()), self._lowered.processed_bytes)
        return replaced(self._lowered, processed_bytes=payload, named_data=named_data(buffers, entries))


def _packings(tensor: torch.Tensor, content: bytes) -> Iterator[str]:
    """The way in which a tensor's bytes are these, if there is one."""
    for name, packing in _PACKINGS.items():
        if packing.takes(tensor) and packing.bytes(tensor) == len(content):
            if _content(packing.pack(tensor.detach())) == content:
                yield name
                return


def _content(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
