"""Rewrite a `.pte` after it was serialized: store tied tables once, and load the largest delegates first.

ExecuTorch stores constants of its own kernels (the embedding table) in one segment and weights of delegates (the head)
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


# Of a delegate whose payload lies in a segment.
_IN_SEGMENT = 1
# Of fields in the schema's tables ExecutionPlan and DelegateCall.
_DELEGATES_FIELD, _INDEX_FIELD = 18, 4


def make_largest_first(path: Path) -> None:
    """Order the delegates of each method in a file that was just written, in place; what runs stays the same.

    The first that is called stays the first: its number is 0, which the format leaves out, so that there is no place
    for another.
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
    """Put the delegates of a method into another order, and call them by their new numbers, in place.

    Args:
        table: The program's flatbuffer.
        plan: Reader of a method in it.
        order: The number that each had before; the first is 0.
    """
    position = position_of_field(plan, _DELEGATES_FIELD)
    if position is None:
        return
    # A list of tables: where it is from here, how long it is, and where each is from its own place.
    start = position + struct.unpack_from("<I", table, position)[0] + 4
    places = [start + 4 * index for index in range(len(order))]
    delegates = [place + struct.unpack_from("<I", table, place)[0] for place in places]
    calls = [
        (position_of_field(call, _INDEX_FIELD), order.index(call.DelegateIndex())) for call in delegate_calls(plan)
    ]
    for place, index in zip(places, order, strict=True):
        struct.pack_into("<I", table, place, delegates[index] - place)
    for place, number in calls:
        if place is not None:
            struct.pack_into("<i", table, place, number)
