"""Lower one delegate call for equal segments, and clone it with the weights of each segment.

A model's layers run the same operators over different weights, and lowering each layer takes most of an export. So one
segment of each kind is lowered over random weights. XNNPACK's payload names its data by SHA-256 digests: the digest
shows where each weight went and how it was packed. A clone is the same payload with the digests of other weights,
packed in the same way. Segments whose payload cannot be explained so are lowered in place.

Clones also carry the shapes of their outputs (`DelegateShapes`), because every ExecuTorch pass would otherwise run the
operators of each delegate on fake tensors: 0.6 s for each delegate of a quantized layer.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from executorch.exir.lowered_backend_module import LoweredBackendModule
from torch.fx import Graph

from ....common.compat.executorch import named_data, pack_pairs
from .segments import CannotClone, source_of_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from executorch.exir.lowered_backend_module import LoweredBackendModule
    from torch.export import ExportedProgram
    from torch.fx import Node

    from ....common.compat.executorch import NamedDataStoreOutput


@dataclass(frozen=True)
class _Packing:
    """A way in which XNNPACK's compiler writes a tensor.

    Attributes:
        pack: Returns the tensor whose bytes are written.
        takes: Returns True for tensors that may be packed so.
        bits: Bits per number, or None for those of the tensor's dtype.
    """

    pack: Callable[[torch.Tensor], torch.Tensor]
    takes: Callable[[torch.Tensor], bool]
    bits: int | None = None

    def bytes(self, tensor: torch.Tensor) -> int:
        """Return the number of bytes written for a tensor."""
        return tensor.nbytes if self.bits is None else tensor.numel() * self.bits // 8


def _is_int4(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.int8 and tensor.dim() == 2 and -8 <= int(tensor.min()) <= int(tensor.max()) <= 7


def _is_matrix(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dim() == 2


_PACKINGS = {
    "unchanged": _Packing(lambda tensor: tensor, lambda tensor: True),
    "float32": _Packing(torch.Tensor.float, torch.Tensor.is_floating_point, 32),
    "bfloat16": _Packing(torch.Tensor.bfloat16, torch.Tensor.is_floating_point, 16),
    "transposed": _Packing(lambda tensor: tensor.float().t(), _is_matrix, 32),
    "two to a byte": _Packing(pack_pairs, _is_int4, 4),
}
_KEY = re.compile(rb"(?:scale_)?[0-9a-f]{64}")


@dataclass(frozen=True)
class _WeightEntry:
    """An entry of a delegate's data that holds a weight.

    Attributes:
        key: Key in the template.
        weight: Index of the weight.
        packing: A key of `_PACKINGS`.
    """

    key: str
    weight: int
    packing: str


class DelegateTemplate:
    """A lowered delegate call whose weights can be replaced.

    Args:
        lowered: Call over weights that differ from one another.
        weights: Indices of the weights that the delegate reads, by name in its program.

    Raises:
        CannotClone: If some of its data is neither a weight, packed in a known way, nor the same for all weights; or if
            a weight is in none of its data.
    """

    def __init__(self, lowered: LoweredBackendModule, weights: Mapping[str, int]) -> None:
        self._lowered = with_known_shapes(lowered)
        program = lowered.original_module
        tensors = {**program.state_dict, **program.constants}
        data = lowered.named_data_store_output
        if data is None or data.external_data:
            raise CannotClone("the delegate stores data outside the program")
        self._weight_entries: list[_WeightEntry] = []
        self._fixed: list[str] = []
        for key, entry in data.pte_data.items():
            content = data.buffers[entry.buffer_index]
            found = [(name, packing) for name, tensor in tensors.items() for packing in _packings(tensor, content)]
            if not found:
                raise CannotClone(f"{len(content)} bytes match no tensor of the segment")
            name, packing = found[0]
            if name not in weights:
                self._fixed.append(key)
            else:
                if any(other != name for other, _ in found):
                    raise CannotClone(f"{len(content)} bytes match several tensors of the segment")
                self._weight_entries.append(_WeightEntry(key, weights[name], packing))
        baked = set(weights.values()) - {entry.weight for entry in self._weight_entries}
        if baked:
            raise CannotClone(f"weights are missing in the data: {sorted(baked)}")

    def clone(self, weights: Sequence[torch.Tensor], packed: dict[Any, Any]) -> LoweredBackendModule:
        """Return the call over other weights.

        Args:
            weights: Weights by index.
            packed: Weights packed so far, shared between the methods of the program.
        """
        data = self._lowered.named_data_store_output
        buffers: list[bytes] = []
        entries, keys = {}, {}
        for key in self._fixed:
            entries[key] = replace(data.pte_data[key], buffer_index=len(buffers))
            buffers.append(data.buffers[data.pte_data[key].buffer_index])
        for entry in self._weight_entries:
            tensor = weights[entry.weight]
            identity = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), entry.packing)
            if identity not in packed:
                content = _content(_PACKINGS[entry.packing].pack(tensor.detach()))
                # The tensor is kept, so that its address is not reused.
                packed[identity] = (hashlib.sha256(content).hexdigest(), content, tensor)
            digest, content, _ = packed[identity]
            name = entry.key[:-64] + digest
            keys[entry.key.encode()] = name.encode()
            if name not in entries:
                entries[name] = replace(data.pte_data[entry.key], buffer_index=len(buffers))
                buffers.append(content)
        payload = _KEY.sub(lambda match: keys.get(match.group(), match.group()), self._lowered.processed_bytes)
        return replaced(self._lowered, processed_bytes=payload, named_data=named_data(buffers, entries))


def _packings(tensor: torch.Tensor, content: bytes) -> Iterator[str]:
    """Yield the packing whose bytes equal `content`, if there is one."""
    for name, packing in _PACKINGS.items():
        if packing.takes(tensor) and packing.bytes(tensor) == len(content):
            if _content(packing.pack(tensor.detach())) == content:
                yield name
                return


def _content(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


class DelegateShapes:
    """Replacement for the program that a delegate was made from, of which only the outputs' shapes are needed.

    Attributes:
        graph: Graph with as many outputs.
    """

    def __init__(self, outputs: list[tuple[torch.dtype, list[int | str]]]) -> None:
        self._outputs = outputs
        self.graph = Graph()
        self.graph.output((None,) * len(outputs))

    def module(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """Return a function that makes empty outputs for the delegate's inputs."""
        return self._run

    def _run(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(
            torch.empty([size_of(size, inputs) for size in sizes], dtype=dtype) for dtype, sizes in self._outputs
        )


def with_known_shapes(lowered: LoweredBackendModule) -> LoweredBackendModule:
    """Return the call with a `DelegateShapes`, or unchanged if the shapes cannot be described."""
    program = lowered.original_module
    shapes = None if isinstance(program, DelegateShapes) else shapes_of(program)
    return lowered if shapes is None else replaced(lowered, original_module=shapes)


def replaced(
    lowered: LoweredBackendModule,
    original_module: Any = None,
    processed_bytes: bytes | None = None,
    named_data: NamedDataStoreOutput | None = None,
) -> LoweredBackendModule:
    """Return a copy of the call with the arguments that are not None exchanged."""
    changed = LoweredBackendModule(
        original_module or lowered.original_module,
        lowered.backend_id,
        lowered.processed_bytes if processed_bytes is None else processed_bytes,
        lowered.compile_specs,
        named_data or lowered.named_data_store_output,
    )
    changed.meta = lowered.meta
    return changed


def shapes_of(program: ExportedProgram) -> DelegateShapes | None:
    """Return the output shapes of a delegate's program, or None if an output size is not a size of its inputs."""
    inputs = [
        node for node in program.graph.find_nodes(op="placeholder") if node.name in program.graph_signature.user_inputs
    ]
    outputs = [node.meta["val"] for node in program.graph.output_node().args[0]]
    if not all(isinstance(value, torch.Tensor) and value.is_contiguous() for value in outputs):
        return None
    described: list[tuple[torch.dtype, list[int | str]]] = []
    for value in outputs:
        sizes = [described_size(size, inputs) for size in value.shape]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            return None
        described.append((value.dtype, known))
    return DelegateShapes(described)


def described_size(size: int | torch.SymInt, inputs: Sequence[Node]) -> int | str | None:
    """Return a static size, or the source of a symbolic one, as `size_of` reads it."""
    return source_of_size(size, inputs) if isinstance(size, torch.SymInt) else size


def size_of(described: int | str, inputs: Sequence[torch.Tensor]) -> int | torch.SymInt:
    """Return the size that `described_size` described, for these inputs."""
    if isinstance(described, int):
        return described
    index, dim = map(int, described.split("."))
    return inputs[index].shape[dim]
