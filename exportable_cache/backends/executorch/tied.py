"""One copy of a tied table in a `.pte`: where a delegate's weights repeat a constant, both names point at the same
bytes.

ExecuTorch stores constants of its own kernels (the embedding table) in one segment and what delegates read (the head)
in named segments, and compares contents within each kind only. Segments are offsets into the file, so one may lie
inside another.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.compat.executorch import extended_header, flat_program, position_of_field

if TYPE_CHECKING:
    from executorch.exir import ExecutorchProgramManager

# Of segments, and so of what follows one that is left out.
_ALIGNMENT = 128
# More than the header takes.
_HEADER_BYTES = 64
# Below this a repetition is not worth a search.
_SMALLEST = 1024
# Of the fields in the schema's table DataSegment: what a generated class reads, and has no setter for.
_OFFSET_FIELD = 4


def write_pte(program: ExecutorchProgramManager, path: Path) -> None:
    """Write a program, a delegate's named data that equals a constant only once."""
    with path.open("wb") as file:
        file.writelines(tied_pieces(program.buffer))


def tied_pieces(data: bytes) -> Iterator[bytes | memoryview]:
    """The same program without the named segments whose bytes the constant segment holds already, in pieces.

    The pieces lie in `data`: a program is as large as its weights, and a second copy would be an export's peak of
    memory.
    """
    # All of the data would be copied to look for the header.
    header = extended_header(data[:_HEADER_BYTES])
    if header is None:
        yield data
        return
    base = header.segment_base_offset
    table = bytearray(data[:base])
    program = flat_program(table)
    constants = program.ConstantSegment()
    named = {program.NamedData(index).SegmentIndex() for index in range(program.NamedDataLength())}
    if constants is None or not named:
        yield data
        return
    whole = memoryview(data)
    segments = [program.Segments(index) for index in range(program.SegmentsLength())]
    start = segments[constants.SegmentIndex()].Offset()
    end = start + segments[constants.SegmentIndex()].Size()
    starts = [start + constants.Offsets(index) for index in range(constants.OffsetsLength())]
    pieces: list[bytes | memoryview] = []
    size = 0
    for index, segment in enumerate(segments):
        content = whole[base + segment.Offset() : base + segment.Offset() + segment.Size()]
        found = None
        if index in named and len(content) >= _SMALLEST:
            found = next(
                (at for at in starts if at + len(content) <= end and data.startswith(content, base + at)), None
            )
        if found is None:
            padding = -size % _ALIGNMENT
            found = size + padding
            pieces += [bytes(padding), content]
            size += padding + len(content)
        _set_offset(table, segment, found)
    # The header's length of all segments: after magic, header length, program size and segment base offset.
    struct.pack_into("<Q", table, 8 + 24, size)
    yield bytes(table)
    yield from pieces


def _set_offset(table: bytearray, segment: Any, offset: int) -> None:
    position = position_of_field(segment, _OFFSET_FIELD)
    # Zero is the default and is not stored; the first segment stays where it is.
    if position is not None:
        struct.pack_into("<Q", table, position, offset)
    elif offset:
        raise ValueError(f"segment without an offset of its own cannot move to {offset}")
