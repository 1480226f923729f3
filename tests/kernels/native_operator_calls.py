"""This package's operators on ExecuTorch's runtime beside the plain operators that say what they compute; see
`native_programs`.

One program holds a layer of every kind, each over buffers of its own. It takes steps of many lengths, on rows of
different length, through all turns of its rings.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.export import Dim

from exportable_cache.backends.executorch.lowering.lower import lower_programs
from exportable_cache.backends.executorch.native.operators import check_native_kernels
from exportable_cache.cache.storage import FloatStorage, Int4Storage, Int8Storage, RoundedStorage, Storage
from exportable_cache.common.compat.executorch import load_program

BATCH, HEADS, KV_HEADS, DIM = 2, 6, 2, 16
LONGEST = 11
#: Lengths of the steps: past every ring, in chunks shorter and longer than them.
STEPS = (3, 1, 1, 11, 5, 1, 1, 2, 9, 1)
POSITIONS = sum(STEPS) + 2
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
#: Over stored integers, queries and weights of several tokens are rounded to 16 bits.
ROUNDED_TOLERANCE = 3e-4


@dataclass(frozen=True)
class Kind:
    """A layer; see `native_operators.attention`."""

    storage: Storage
    slots: int = POSITIONS
    kept: int = POSITIONS
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    has_bias: bool = False
    dtype: torch.dtype = torch.float32
    to_bfloat16: bool = False

    @property
    def tolerance(self) -> float:
        """Limit of the difference from the plain operator."""
        if self.to_bfloat16:
            return 3e-2
        rounded = isinstance(self.storage, RoundedStorage)
        return ROUNDED_TOLERANCE if rounded else TOLERANCE[self.dtype]


KINDS = (
    Kind(FloatStorage("float32"), softcap=2.0, has_sinks=True, has_bias=True),
    Kind(FloatStorage("float16")),
    Kind(FloatStorage("float16"), to_bfloat16=True),
    Kind(FloatStorage("bfloat16"), dtype=torch.bfloat16),
    Kind(Int4Storage("float32"), has_bias=True),
    Kind(FloatStorage("float32"), slots=7, kept=0, window=7, has_sinks=True),
    Kind(Int8Storage("float32"), slots=11, kept=0, window=8, softcap=1.0),
    Kind(Int4Storage("float32"), slots=9, kept=2, window=6),
    Kind(FloatStorage("float32"), slots=6, kept=0, chunk=6),
)


def steps_of(query: torch.Tensor) -> list[torch.Tensor]:
    """Return results of the operators between linear layers."""
    operators = torch.ops.exportable_cache
    weight, angles = query[0, 0, 0] + 1.0, query[:, :1]
    of_tokens = query.transpose(1, 2).contiguous()
    return [
        operators.rms_norm(query, weight, 1e-6),
        operators.rms_norm(of_tokens, None, 1e-5),
        operators.rotate(query, angles, -2.0 * angles, False),
        operators.rotate(of_tokens, angles[:1], angles[1:], True),
        operators.gate(query, query + 1.0, 1.0, 0.0),
        operators.to_float16(query),
        operators.to_bfloat16(of_tokens),
        operators.gate(of_tokens, of_tokens, 1.5957691, 0.0713548),
    ]


class Layers(torch.nn.Module):
    """[batch, heads, length, dim] queries, keys and values to an output of each kind, and of each step."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.sinks = torch.randn(1, HEADS, 1, 1, generator=generator)
        self.bias = torch.randn(1, HEADS, 1, POSITIONS, generator=generator)
        for index, kind in enumerate(KINDS):
            for number, part in enumerate(self.encoded(kind, torch.zeros(2, BATCH * KV_HEADS, kind.slots, 1, DIM))):
                self.register_buffer(f"part_{index}_{number}", part, persistent=False)

    @staticmethod
    def encoded(kind: Kind, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if isinstance(kind.storage, RoundedStorage):
            quantize = torch.ops.exportable_cache.quantize
            (keys, key_scales), (values, value_scales) = (quantize(one, kind.storage.bits) for one in rows)
            return keys, values, key_scales, value_scales
        rows = rows.to(kind.storage.rows_dtype)
        return kind.storage.encode(rows[0], rows[1])

    def forward(self, query: torch.Tensor, rows: torch.Tensor, length: torch.Tensor) -> list[torch.Tensor]:
        """`rows` [2, batch * kv_heads, length, 1, dim]: keys and values."""
        outputs = []
        operators = torch.ops.exportable_cache
        for index, kind in enumerate(KINDS):
            fresh = self.encoded(kind, rows)
            stored = [getattr(self, f"part_{index}_{number}") for number in range(len(fresh))]
            is_full = kind.kept == kind.slots
            if is_full:
                for new, part in zip(fresh, stored, strict=True):
                    operators.write(new, part, length, kind.kept, None)
            attention = operators.attention_rounded if kind.to_bfloat16 else operators.attention
            output = attention(
                query.to(kind.dtype), stored, fresh, length, 0.25, kind.kept, kind.window, kind.chunk, kind.softcap,
                self.sinks if kind.has_sinks else None, self.bias if kind.has_bias else None,
            )  # fmt: skip
            if not is_full:
                for new, part in zip(fresh, stored, strict=True):
                    operators.write(new, part, length, kind.kept, output)
            outputs.append(output)
        return [*outputs, *steps_of(query)]


def inputs(count: int, lengths: list[int], seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(BATCH, HEADS, count, DIM, generator=generator)
    rows = torch.randn(2, BATCH * KV_HEADS, count, 1, DIM, generator=generator)
    return query, rows, torch.tensor(lengths)


@torch.no_grad()
def check_operators(path: Path) -> None:
    """Lower the program to `path`, and compare every step of it."""
    check_native_kernels()
    length = Dim("length", min=1, max=LONGEST)
    sizes = {"query": {2: length}, "rows": {2: length}, "length": None}
    exported = torch.export.export(Layers(), inputs(4, [0, 0], 0), dynamic_shapes=sizes)
    path.write_bytes(lower_programs({"forward": exported}).buffer)
    method = load_program(path).load_method("forward")
    plain = Layers()
    lengths = [0, 2]
    # The second row has tokens that were written by none: of zeros, in both.
    for seed, count in enumerate(STEPS):
        given = inputs(count, lengths, seed)
        results, wanted = method(given), plain(*given)
        for found, expected in zip(results[len(KINDS) :], wanted[len(KINDS) :], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        for kind, found, expected in zip(KINDS, results[: len(KINDS)], wanted[: len(KINDS)], strict=True):
            assert found.shape == expected.shape == (BATCH, count, HEADS, DIM) and found.dtype == kind.dtype
            off = (found.float() - expected.float()).abs().max().item()
            assert off <= kind.tolerance, (kind, seed, off)
        lengths = [row + count for row in lengths]
    refused(method, lengths)


def refused(method: object, lengths: list[int]) -> None:
    """What does not fit is an error, and no step goes on behind it."""
    for bad in ([0, POSITIONS], [-1, 0], [0, 1 << 62]):
        try:
            method(inputs(1, bad, 0))
        except RuntimeError:
            continue
        raise AssertionError(f"lengths {bad} were taken")
