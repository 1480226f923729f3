"""Small changes of bytes, of numbers in a binary file, and of values in JSON: what the fuzzer does to a file."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any


def flip(data: bytes, choose: random.Random) -> bytes:
    """1 to 4 bytes changed."""
    found = bytearray(data)
    start = choose.randrange(len(found))
    for index in range(start, min(start + choose.randint(1, 4), len(found))):
        found[index] = choose.randrange(256)
    return bytes(found)


def cut(data: bytes, choose: random.Random) -> bytes:
    """The end gone, or a piece in the middle."""
    start = choose.randrange(len(data))
    return data[:start] if choose.random() < 0.5 else data[:start] + data[start + choose.randint(1, 64) :]


def repeat(data: bytes, choose: random.Random) -> bytes:
    """A piece there twice."""
    start = choose.randrange(len(data))
    end = start + choose.randint(1, 64)
    return data[:end] + data[start:end] + data[end:]


_INTERESTING = (0, 1, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)


def number(data: bytes, choose: random.Random) -> bytes:
    """Four or eight bytes that are a size or an offset near a limit."""
    width = choose.choice((4, 8))
    if len(data) < width:
        return flip(data, choose)
    start = choose.randrange(len(data) - width + 1)
    value = choose.choice(_INTERESTING) % 2 ** (8 * width)
    return data[:start] + value.to_bytes(width, "little") + data[start + width :]


_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**63,
    1e308,
    "",
    "x" * 300,
    "../../etc/passwd",
    [],
    {},
    [[[]]],
    "torch.os.system",
)


def value(data: bytes, choose: random.Random) -> bytes:
    """One value of a JSON document another one; of other files, bytes."""
    try:
        document = json.loads(data)
    except ValueError:
        return flip(data, choose)
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            places.append((node, key))
            walk(node[key])

    walk(document)
    if not places:
        return flip(data, choose)
    node, key = choose.choice(places)
    if isinstance(node, dict) and choose.random() < 0.2:
        del node[key]
    else:
        node[key] = choose.choice(_VALUES)
    return json.dumps(document).encode()


#: What a stranger would write where a name, a number or a list is wanted.
STRANGE: tuple[Any, ...] = (
    *_VALUES,
    "\ud800",
    "x" * 5000,
    "\x1b]52;c;eA==\x1b\\\x1b[2J",
    "a\u202eb\u2028c",
    "a\nb\0c",
    2**31,
    10**30,
    10**400,
    1.5,
    float("nan"),
    ["\ud800"],
    {"\x1b[2J": ["x"]},
    [1, 2, 3],
    "int8",
    "float64",
)


def strange(document: Any, choose: random.Random) -> None:
    """Put a strange value, or a strange name, somewhere into a JSON document, in place."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            places.append((node, key))
            walk(node[key])

    walk(document)
    if not places:
        return
    node, key = choose.choice(places)
    kind = choose.random()
    if isinstance(node, dict) and kind < 0.15:
        node[choose.choice([one for one in STRANGE if isinstance(one, str)])] = node.pop(key)
    elif isinstance(node, dict) and kind < 0.25:
        del node[key]
    elif isinstance(node, list) and kind < 0.25:
        node.insert(key, copy.deepcopy(node[key]))
    elif type(node[key]) is int and kind < 0.6:
        node[key] = choose.choice((node[key] * 2, node[key] + 1, node[key] - 1, 0, -node[key]))
    else:
        node[key] = copy.deepcopy(choose.choice(STRANGE))


MUTATIONS = (flip, cut, repeat, number, value)


def mutate(path: Path, choose: random.Random, head: int | None) -> None:
    """Change a file in place, its first `head` bytes where that is given."""
    data = changed = path.read_bytes()
    head = len(data) if head is None else min(head, len(data))
    # Now and then a byte is replaced by itself.
    while changed == data:
        changed = choose.choice(MUTATIONS)(data[:head], choose) + data[head:]
    path.write_bytes(changed)


def mutate_archive(path: Path, choose: random.Random) -> None:
    """Change one entry of a `.pt2`, so that the change gets past the zip."""
    from .archives import entries_of, rewritten

    entries = entries_of(path)
    texts = [name for name in entries if name.endswith(".json")]
    name = choose.choice(texts)
    entries[name] = choose.choice((value, value, value, flip, cut))(entries[name], choose)
    rewritten(path, entries)
