"""The order in which a `.pte` has its delegates made when it is loaded: those with the most weights first.

XNNPACK packs a delegate's weights into memory of its own while the file's pages of them are there, and gives these back
then. So what loading takes at most is everything that was packed so far and the pages of the weights at hand. A head
over the vocabulary, which comes last in a graph, is the largest: made early, its pages are gone before the rest comes.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from ....common.compat.executorch import delegate_calls, extended_header, flat_program, position_of_field

# More than the header takes.
_HEADER_BYTES = 64
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
