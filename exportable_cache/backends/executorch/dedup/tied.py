"""One copy of a tied table in a `.pte`: where a delegate's weights repeat a constant, both names point at the same
bytes.

ExecuTorch stores constants of its own kernels (the embedding table) in one segment and what delegates read (the head)
in named segments, and compares contents within each kind only. Segments are offsets into the file, so one may lie
inside another.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....common.compat.executorch import extended_header, flat_program, position_of_field

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
    """Write a program, a delegate's named data that equals a constant only once.

    In pieces: a program is as large as its weights, and a copy of it would be an export's peak of memory.
    """
    with path.open("wb") as file:
        program.write_to_file(file)
    with path.open("rb") as source, mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as data:
        pieces = tied_pieces(data)
        if pieces is None:
            return
        tied = path.with_name(f"{path.name}.tied")
        try:
            with tied.open("wb") as written:
                while pieces:
                    written.write(pieces.pop(0))
        finally:
            # A view of the data that is left keeps it from being closed, and would hide that the disk is full.
            pieces.clear()
    tied.replace(path)


def tied_pieces(data: bytes | mmap.mmap) -> list[bytes | memoryview] | None:
    """The same program without the named segments whose bytes the constant segment holds already, as pieces that lie in
    `data`; None where no segment is.
    """
    # All of the data would be copied to look for the header.
    header = extended_header(data[:_HEADER_BYTES])
    if header is None:
        return None
    base = header.segment_base_offset
    table = bytearray(data[:base])
    program = flat_program(table)
    constants = program.ConstantSegment()
    named = {program.NamedData(index).SegmentIndex() for index in range(program.NamedDataLength())}
    if constants is None or not named:
        return None
    whole = memoryview(data)
    segments = [program.Segments(index) for index in range(program.SegmentsLength())]
    start = segments[constants.SegmentIndex()].Offset()
    end = start + segments[constants.SegmentIndex()].Size()
    starts = [start + constants.Offsets(index) for index in range(constants.OffsetsLength())]
    pieces: list[bytes | memoryview] = []
    size, repeated = 0, False
    for index, segment in enumerate(segments):
        content = whole[base + segment.Offset() : base + segment.Offset() + segment.Size()]
        found = None
        if index in named and len(content) >= _SMALLEST:
            found = next((at for at in starts if at + len(content) <= end and _equal(whole, base + at, content)), None)
            repeated |= found is not None
        if found is None:
            padding = -size % _ALIGNMENT
            found = size + padding
            pieces += [bytes(padding), content]
            size += padding + len(content)
        _set_offset(table, segment, found)
    # The header's length of all segments: after magic, header length, program size and segment base offset.
    struct.pack_into("<Q", table, 8 + 24, size)
    return [bytes(table), *pieces] if repeated else None


def _equal(whole: memoryview, start: int, content: memoryview) -> bool:
    # Most differ at once, and a view is compared number by number.
    end = start + len(content)
    return whole[start : start + _SMALLEST] == content[:_SMALLEST] and whole[start:end] == content


def _set_offset(table: bytearray, segment: Any, offset: int) -> None:
    position = position_of_field(segment, _OFFSET_FIELD)
    # Zero is the default and is not stored; the first segment stays where it is.
    if position is not None:
        struct.pack_into("<Q", table, position, offset)
    elif offset:
        raise ValueError(f"segment without an offset of its own cannot move to {offset}")
