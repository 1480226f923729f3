"""Integers of GGUF files, by the layouts of blocks in ggml (https://github.com/ggml-org/ggml, `ggml-common.h`).

transformers reads the weights as floats, renames them and reorders rows, in two loaders. So a tensor of the file is
found in the model by its rows: the rows of its integers are dequantised by the same arithmetic, and have the same bits.
Weights whose columns change, and those that are merged or split while loading, are not found and stay in float.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from ...errors import InputError
from .integers import IntegerWeight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Values of 4-bit indices in IQ4_NL and IQ4_XS.
_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
#: Rows whose hashes are computed at once, in elements.
_ELEMENTS_AT_ONCE = 1 << 22


class _Parts(NamedTuple):
    """The weights of blocks: `integers * scales - minimums`.

    Attributes:
        integers: int16 [blocks, groups, size].
        scales: float32 or float16 [blocks, groups].
        minimums: float32 [blocks, groups], or None for zeros.
    """

    integers: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor | None = None


class _Type(NamedTuple):
    """A type of blocks: bits of an integer, the least integer, and a reader of blocks uint8 [blocks, bytes]."""

    bits: int
    least: int
    read: Callable[[torch.Tensor], _Parts]


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _fields(data: torch.Tensor, width: int, shifts: tuple[int, ...]) -> torch.Tensor:
    """Return fields at some shifts of bytes [blocks, bytes]: of each run of `width` bytes, shift after shift."""
    each = torch.tensor(shifts, dtype=torch.uint8)[:, None]
    return (data.reshape(len(data), -1, 1, width) >> each).reshape(len(data), -1)


def _nibbles(data: torch.Tensor, width: int = 16) -> torch.Tensor:
    return _fields(data, width, (0, 4)) & 15


def _grouped(integers: torch.Tensor, size: int) -> torch.Tensor:
    return integers.to(torch.int16).reshape(len(integers), -1, size)


def _q4_0(blocks: torch.Tensor) -> _Parts:
    return _Parts(_grouped(_nibbles(blocks[:, 2:]), 32) - 8, _half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> _Parts:
    return _Parts(_grouped(_nibbles(blocks[:, 4:]), 32), _half(blocks, 0), -_half(blocks, 2).float())


def _fifth_bits(data: torch.Tensor) -> torch.Tensor:
    return (_fields(data, 1, tuple(range(8))) & 1) << 4


def _q5_0(blocks: torch.Tensor) -> _Parts:
    return _Parts(_grouped(_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), 32) - 16, _half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> _Parts:
    integers = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _Parts(_grouped(integers, 32), _half(blocks, 0), -_half(blocks, 2).float())


def _q8_0(blocks: torch.Tensor) -> _Parts:
    return _Parts(_grouped(blocks[:, 2:].contiguous().view(torch.int8), 32), _half(blocks, 0))


def _q2_k(blocks: torch.Tensor) -> _Parts:
    packed = blocks[:, :16]
    scales, minimums = (
        _half(blocks, start).float() * part.float() for start, part in ((80, packed & 15), (82, packed >> 4))
    )
    return _Parts(_grouped(_fields(blocks[:, 16:80], 32, (0, 2, 4, 6)) & 3, 16), scales, minimums)


def _q3_k(blocks: torch.Tensor) -> _Parts:
    packed = blocks[:, 96:108]
    scales = _nibbles(packed[:, :8], 8) | (_fields(packed[:, 8:], 4, (0, 2, 4, 6)) & 3) << 4
    low = _fields(blocks[:, 32:96], 32, (0, 2, 4, 6)) & 3
    high = _fields(blocks[:, :32], 32, tuple(range(8))) & 1
    integers = _grouped(low, 16) - 4 * (1 - _grouped(high, 16))
    return _Parts(integers, _half(blocks, 108).float() * (scales.float() - 32))


def _scales_of_k(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and minimums of Q4_K and Q5_K, of 6 bits each."""
    first, second, third = blocks[:, 4:16].split(4, dim=1)
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=1)
    minimums = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=1)
    return _half(blocks, 0).float() * scales.float(), _half(blocks, 2).float() * minimums.float()


def _q4_k(blocks: torch.Tensor) -> _Parts:
    return _Parts(_grouped(_nibbles(blocks[:, 16:], 32), 32), *_scales_of_k(blocks))


def _q5_k(blocks: torch.Tensor) -> _Parts:
    high = _fields(blocks[:, 16:48], 32, tuple(range(8))) & 1
    return _Parts(_grouped(_nibbles(blocks[:, 48:], 32) | high << 4, 32), *_scales_of_k(blocks))


def _q6_k(blocks: torch.Tensor) -> _Parts:
    integers = _nibbles(blocks[:, :128], 64) | (_fields(blocks[:, 128:192], 32, (0, 2, 4, 6)) & 3) << 4
    scales = _half(blocks, 208).float() * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return _Parts(_grouped(integers, 16) - 32, scales)


def _leveled(data: torch.Tensor) -> torch.Tensor:
    return _grouped(torch.tensor(_LEVELS, dtype=torch.int16)[_nibbles(data).long()], 32)


def _iq4_nl(blocks: torch.Tensor) -> _Parts:
    return _Parts(_leveled(blocks[:, 2:]), _half(blocks, 0))


def _iq4_xs(blocks: torch.Tensor) -> _Parts:
    high = _fields(blocks[:, 2:4], 1, (0, 2, 4, 6)) & 3
    scales = _nibbles(blocks[:, 4:8], 1) | high << 4
    return _Parts(_leveled(blocks[:, 8:]), _half(blocks, 0).float() * (scales.float() - 32))


#: Types whose integers are kept, by name in ggml.
TYPES = {
    "Q4_0": _Type(4, -8, _q4_0),
    "Q4_1": _Type(4, 0, _q4_1),
    "Q5_0": _Type(5, -16, _q5_0),
    "Q5_1": _Type(5, 0, _q5_1),
    "Q8_0": _Type(8, -128, _q8_0),
    "Q2_K": _Type(2, 0, _q2_k),
    "Q3_K": _Type(3, -4, _q3_k),
    "Q4_K": _Type(4, 0, _q4_k),
    "Q5_K": _Type(5, 0, _q5_k),
    "Q6_K": _Type(6, -32, _q6_k),
    "IQ4_NL": _Type(8, -128, _iq4_nl),
    "IQ4_XS": _Type(8, -128, _iq4_xs),
}


def integers_of_blocks(name: str, kind: str, rows: torch.Tensor) -> tuple[IntegerWeight, torch.Tensor]:
    """Read the blocks of a matrix.

    Args:
        name: Name of the tensor, for messages.
        kind: One of `TYPES`.
        rows: uint8 [outputs, bytes].

    Returns:
        The integers, and the weight float32 [outputs, inputs] as ggml computes it.

    Raises:
        InputError: If scales are not finite.
    """
    bits, least, read = TYPES[kind]
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    integers, scales, minimums = read(rows.reshape(-1, block_bytes))
    if not scales.isfinite().all() or (minimums is not None and not minimums.isfinite().all()):
        raise InputError(
            f"the scales of {name} must be finite, got infinities or not-a-number; the file is damaged, download it "
            "again"
        )
    weight = integers.float() * scales.float()[..., None]
    size = integers.shape[2]
    zeros = None
    if minimums is not None:
        weight = weight - minimums[..., None]
        scales, is_constant = scales.float(), scales == 0
        zeros = (minimums / scales.masked_fill(is_constant, 1)).masked_fill(is_constant, 0)
        # A group without a scale has one value, which an integer represents that is one less than its zero point.
        constant = is_constant & (minimums != 0)
        scales, zeros = torch.where(constant, minimums, scales), torch.where(constant, 1.0, zeros)
        integers = integers.masked_fill(is_constant[..., None], 0)
        if least == 0:
            integers, zeros = integers - 2 ** (bits - 1), zeros - 2 ** (bits - 1)
        zeros = zeros.reshape(len(rows), -1)
    found = IntegerWeight(
        integers.to(torch.int8).reshape(len(rows), -1), scales.reshape(len(rows), -1), zeros, None, bits, size
    )
    return found, weight.reshape(len(rows), -1)


def kept_blocks(path: Path, model: PreTrainedModel) -> tuple[dict[str, IntegerWeight], str]:
    """Return integers of linear layers and of the table, by the names of parameters, and a line about other tensors.

    Args:
        path: The file that the model was read from.
        model: The model, in the dtype of loading.

    Raises:
        InputError: See `integers_of_blocks`.
    """
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    layers: dict[tuple, list[str]] = {}
    hashes: dict[str, torch.Tensor] = {}
    for module_name, module in model.named_modules():
        is_tied = module is head and head.weight is table.weight
        is_table = module is table and isinstance(module, nn.Embedding)
        if is_table or (isinstance(module, nn.Linear) and not is_tied):
            name = f"{module_name}.weight"
            matrix: torch.Tensor = module.weight
            hashes[name] = _hashes(matrix)
            layers.setdefault(_key(matrix, hashes[name]), []).append(name)
    kept: dict[str, IntegerWeight] = {}
    left: dict[str, list[str]] = {}
    for name, kind, rows in _matrices(path):
        if kind in TYPES:
            integers, weight = integers_of_blocks(name, kind, rows)
            weight = weight.to(model.dtype)
            found = _hashes(weight)
            fitting = layers.get(_key(weight, found), [])
            for parameter in fitting:
                kept[parameter] = _reordered(integers, found, hashes[parameter])
            if fitting:
                continue
        left.setdefault(kind, []).append(name)
    others = "; ".join(f"{len(names)} in {kind}, such as {names[0]}" for kind, names in left.items())
    return kept, f"dequantised tensors of {path.name}: {others}" if others else ""


def _matrices(path: Path) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield name, type and blocks uint8 [rows, bytes] of each tensor that is not of floats, all experts in one."""
    from gguf import GGUFReader

    for tensor in GGUFReader(path).tensors:
        kind = tensor.tensor_type.name
        if kind not in ("F32", "F16", "BF16", "F64"):
            # Copied, because the file is mapped without write access.
            yield tensor.name, kind, torch.from_numpy(tensor.data.copy()).reshape(-1, tensor.data.shape[-1])


def _hashes(weight: torch.Tensor) -> torch.Tensor:
    """Return a hash of the bits of each row, int64 [rows]."""
    columns = weight.shape[1]
    factors = torch.randint(-(2**62), 2**62, (columns,), generator=torch.Generator().manual_seed(columns)) * 2 + 1
    rows = max(1, _ELEMENTS_AT_ONCE // columns)
    bits = {4: torch.int32, 2: torch.int16}[weight.element_size()]
    # Plus zero, because zeros have two signs.
    parts = ((part.detach() + 0.0).view(bits).long() * factors for part in weight.split(rows))
    return torch.cat([part.sum(1) for part in parts])


def _key(weight: torch.Tensor, hashes: torch.Tensor) -> tuple:
    return (*weight.shape, int(hashes.sum()))


def _reordered(weight: IntegerWeight, stored: torch.Tensor, wanted: torch.Tensor) -> IntegerWeight:
    """Return a weight with its rows in another order, by the hashes of rows in both orders."""
    if torch.equal(stored, wanted):
        return weight
    order = torch.empty_like(stored)
    order[wanted.argsort()] = stored.argsort()
    zeros = None if weight.zero_points is None else weight.zero_points[order]
    return weight._replace(integers=weight.integers[order], scales=weight.scales[order], zero_points=zeros)
