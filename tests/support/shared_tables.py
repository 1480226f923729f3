"""A `.pte` whose instructions are one and the same call, with a long list of arguments: small, and long to read."""

from __future__ import annotations

import struct

from exportable_cache.backends.executorch.pte import instructions

#: Where the file's own header says how long the program is.
_PROGRAM_SIZE = 16


def with_one_call_for_all(program: bytes, count: int, arguments: int) -> bytes:
    """The first method's instructions are `count` times a kernel call of as many arguments as said, in `4 * (count +
    arguments)` more bytes.
    """
    root = instructions._root(instructions._Bytes(program), 0)
    chain = root.tables(instructions._PLANS)[0].tables(instructions._CHAINS)[0]
    field = chain._table.Pos + chain._at(instructions._INSTRUCTIONS)
    data = bytearray(program)
    data += bytes(-len(data) % 8)
    listed = len(data)
    # Behind the list, each at a multiple of 8: an instruction, its call, and the call's arguments, with their fields.
    instruction = (listed + 4 + 4 * count + 15) // 8 * 8 + 8
    call, numbers = instruction + 24, instruction + 48
    data += struct.pack("<I", count)
    for index in range(count):
        data += struct.pack("<I", instruction - (listed + 4 + 4 * index))
    data += bytes(instruction - 8 - len(data))
    # Fields of 12 bytes: what kind it is, at 4, and the call, at 8.
    data += struct.pack("<HHHH", 8, 12, 4, 8)
    data += struct.pack("<iB3xI", 8, instructions._KERNEL_CALL, call - (instruction + 8))
    data += bytes(call - 8 - len(data))
    # No operator is the first one.
    data += struct.pack("<HHHH", 8, 8, 0, 4) + struct.pack("<iI", 8, numbers - (call + 4))
    data += bytes(numbers - len(data)) + struct.pack("<I", arguments) + bytes(4 * arguments)
    struct.pack_into("<I", data, field, listed - field)
    struct.pack_into("<Q", data, _PROGRAM_SIZE, len(data))
    return bytes(data)
