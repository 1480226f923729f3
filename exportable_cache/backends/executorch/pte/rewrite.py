"""Rewrite a `.pte` after it was serialized: store tied tables once, and load the largest delegates first.

ExecuTorch stores constants of its kernels (the embedding table) in one segment and weights of delegates (the head)
in named segments, and deduplicates within each kind only. Segments are offsets into the file, so one may lie inside
another.

XNNPACK packs the weights of a delegate into its own memory while the file's pages are mapped, and releases these pages
afterwards. The peak of loading is therefore everything packed so far plus the pages of the current weights. The head
over the vocabulary is the largest and comes last in a graph; if it is loaded early, its pages are released first.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....common.compat.executorch import delegate_calls, extended_header, flat_program, position_of_field

if TYPE_CHECKING:
    from executorch.exir import ExecutorchProgramManager


# Alignment of segments in bytes.
_ALIGNMENT = 128
# At least the size of the header.
_HEADER_BYTES = 64
# Smaller segments are not searched for.
_SMALLEST = 1024
# Vtable offset of a field of table DataSegment; generated classes have no setters.
_OFFSET_FIELD = 4


def write_pte(program: ExecutorchProgramManager, path: Path) -> None:
    """Write a program; named data of a delegate that equals a constant is stored once.

    The file is written in chunks, because a copy of the program would raise the peak memory of an export by its size.
    """
    with path.open("wb") as file:
        program.write_to_file(file)
    with path.open("rb") as source, mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as data:
        chunks = deduplicated(data)
        if chunks is None:
            return
        tied = path.with_name(f"{path.name}.tied")
        try:
            with tied.open("wb") as written:
                while chunks:
                    written.write(chunks.pop(0))
        finally:
            # A remaining view would keep the file open, and that error would hide a full disk.
            chunks.clear()
    tied.replace(path)


def deduplicated(data: bytes | mmap.mmap) -> list[bytes | memoryview] | None:
    """Return the program without named segments that repeat a part of the constant segment, as chunks of `data`.

    Returns:
        None if there is no such segment.
    """
    # A slice, because reading the header would copy all of the data.
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
    chunks: list[bytes | memoryview] = []
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
            chunks += [bytes(padding), content]
            size += padding + len(content)
        _set_offset(table, segment, found)
    # The header's size of all segments, after magic, header length, program size and segment base offset.
    struct.pack_into("<Q", table, 8 + 24, size)
    return [bytes(table), *chunks] if repeated else None


def _equal(whole: memoryview, start: int, content: memoryview) -> bool:
    # The start first, because comparing a view goes byte by byte and most segments differ early.
    end = start + len(content)
    return whole[start : start + _SMALLEST] == content[:_SMALLEST] and whole[start:end] == content


def _set_offset(table: bytearray, segment: Any, offset: int) -> None:
    position = position_of_field(segment, _OFFSET_FIELD)
    # Zero is the default and is not stored; the first segment does not move.
    if position is not None:
        struct.pack_into("<Q", table, position, offset)
    elif offset:
        raise ValueError(f"segment without a stored offset cannot move to {offset}")


# Location of a delegate's payload that is in a segment.
_IN_SEGMENT = 1
# Vtable offsets of fields of the tables ExecutionPlan and DelegateCall.
_DELEGATES_FIELD, _INDEX_FIELD = 18, 4


def make_largest_first(path: Path) -> None:
    """Order the delegates of each method by size in a file that was just written, in place; what runs stays the same.

    The first called delegate stays first, because its index 0 is the default that the format leaves out and cannot be
    overwritten.
    """
    with path.open("r+b") as file:
        header = extended_header(file.read(_HEADER_BYTES))
        if header is None or not header.segment_base_offset:
            return
        file.seek(0)
        table = bytearray(file.read(header.segment_base_offset))
        program = flat_program(table)
        segments = [program.Segments(index) for index in range(program.SegmentsLength())]
        named = [program.NamedData(index) for index in range(program.NamedDataLength())]
        sizes = {entry.Key(): segments[entry.SegmentIndex()].Size() for entry in named}
        if not sizes:
            return
        for plan in (program.ExecutionPlan(index) for index in range(program.ExecutionPlanLength())):
            weights = []
            for processed in (plan.Delegates(index).Processed() for index in range(plan.DelegatesLength())):
                payload = b""
                if processed.Location() == _IN_SEGMENT:
                    file.seek(header.segment_base_offset + segments[processed.Index()].Offset())
                    payload = file.read(segments[processed.Index()].Size())
                weights.append(sum(size for name, size in sizes.items() if name in payload))
            order = list(range(len(weights)))
            order[1:] = sorted(order[1:], key=weights.__getitem__, reverse=True)
            reorder(table, plan, order)
        file.seek(0)
        file.write(table)


def reorder(table: bytearray, plan: Any, order: list[int]) -> None:
    """Reorder the delegates of a method and the indices of their calls, in place.

    Args:
        table: Flatbuffer of the program.
        plan: Reader of a method in it.
        order: Previous index of each delegate; the first is 0.
    """
    position = position_of_field(plan, _DELEGATES_FIELD)
    if position is None:
        return
    # A vector of tables: its relative offset, its length, and for each table the offset relative to its entry.
    start = position + struct.unpack_from("<I", table, position)[0] + 4
    entries = [start + 4 * index for index in range(len(order))]
    delegates = [entry + struct.unpack_from("<I", table, entry)[0] for entry in entries]
    calls = [
        (position_of_field(call, _INDEX_FIELD), order.index(call.DelegateIndex())) for call in delegate_calls(plan)
    ]
    for entry, index in zip(entries, order, strict=True):
        struct.pack_into("<I", table, entry, delegates[index] - entry)
    for field, index in calls:
        if field is not None:
            struct.pack_into("<i", table, field, index)
