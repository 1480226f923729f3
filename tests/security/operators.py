"""Sealed `.pt2` programs of random operators with random arguments: each operator that a program may call is called."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from exportable_cache.backends.pt2 import operators
from exportable_cache.backends.pt2.archive import read_archive
from exportable_cache.backends.pt2.contents import DTYPE_CODES, DTYPES, SCHEMA_MAJOR
from exportable_cache.backends.pt2.target import StoredRunner

from .archives import entries_of, rewritten

METHOD = "run"
PROGRAM = "program.pt2"
_TABLE = f"data/weights/{METHOD}_weights_config.json"
#: Most dimensions are 8, so that many random calls have shapes that fit.
_SHAPES = (
    (), (8,), (8, 8), (2, 8), (1, 8, 8), (2, 8, 8), (3, 2, 8), (8, 8, 3), (2, 2, 8, 8), (1, 8, 8, 8), (8, 8, 3, 3),
    (8, 1, 3, 3), (1, 2, 8, 8, 8), (0,), (0, 8), (8, 0), (1,), (1, 1), (5,), (7, 3),
)  # fmt: skip
_FLOATS = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
_INTS = (torch.int64, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
_HARSH_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-5, 1e-300, 1e30, 1e300, math.inf, -math.inf, math.nan)
_HARSH_INTS = (
    -1, 7, 8, 9, 16, 255, 1000, 2**20, 2**31 - 1, 2**31, -(2**31), 2**32, 2**33, 2**40, 2**62, 2**63 - 1, -(2**63),
)  # fmt: skip
_TEXTS = (
    "trunc", "floor", "mean", "sum", "none", "tanh", "constant", "reflect", "replicate", "circular", "valid", "same",
    "ij", "xy", "left", "right", "x" * 300,
)  # fmt: skip


def write_pool(path: Path) -> None:
    """Write a program without operators over tensors of many shapes, dtypes and values."""
    choose = random.Random(0)
    tensors = dict(_pool(choose))
    entries = {
        "archive_format": b"pt2",
        "archive_version": b"0",
        "byteorder": b"little",
        ".data/version": b"6\n",
        _TABLE: b"",
        f"data/constants/{METHOD}_constants_config.json": json.dumps({"config": {}}).encode(),
    }
    table = {}
    for index, (name, tensor) in enumerate(tensors.items()):
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        flat = tensor.as_strided((0 if 0 in tensor.shape else span,), (1,))
        entries[f"data/weights/weight_{index}"] = bytes(flat.view(torch.uint8).numpy().data) if flat.numel() else b""
        table[name] = {
            "path_name": f"weight_{index}",
            "is_param": False,
            "use_pickle": False,
            "tensor_meta": {
                "dtype": DTYPE_CODES[tensor.dtype],
                "sizes": [{"as_int": size} for size in tensor.shape],
                "strides": [{"as_int": stride} for stride in tensor.stride()],
                "requires_grad": False,
                "device": {"type": "cpu", "index": None},
                "storage_offset": {"as_int": 0},
                "layout": 7,
            },
        }
    entries[_TABLE] = json.dumps({"config": table}).encode()
    entries[f"models/{METHOD}.json"] = _graph(list(tensors), [])
    rewritten(path, entries)


def _pool(choose: random.Random) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of each tensor; a name says which dtype it is of."""
    generator = torch.Generator().manual_seed(0)
    for index, shape in enumerate(_SHAPES):
        floats = torch.randn(shape, generator=generator)
        yield f"float_{index}", floats.to(choose.choice(_FLOATS) if index % 3 == 2 else torch.float32)
        ints = torch.randint(0, 8, shape, generator=generator)
        yield f"int_{index}", ints.to(choose.choice(_INTS) if index % 3 == 2 else torch.int64)
    for dtype in (torch.int64, torch.int32):
        limits = torch.iinfo(dtype)
        harsh = [value for value in _HARSH_INTS if limits.min <= value <= limits.max][-8:]
        yield f"int_harsh_{limits.bits}", torch.tensor(harsh, dtype=dtype)
        yield f"int_least_{limits.bits}", torch.full((8, 8), limits.min, dtype=dtype)
        yield f"int_minus_{limits.bits}", torch.full((8,), -1, dtype=dtype)
    yield "float_harsh", torch.tensor(_HARSH_FLOATS[-8:])
    yield "int_mask", torch.rand(8, 8, generator=generator) > 0.5
    yield "float_turned", torch.randn(8, 2, generator=generator).t()
    yield "float_large", torch.randn(64, 1024, generator=generator)
    yield "float_wide", torch.randn(1, generator=generator).as_strided((8, 2**20), (0, 0))
    yield "int_wide", torch.zeros(1, dtype=torch.int64).as_strided((2**20, 0, 8), (0, 0, 0))
    yield "float_complex", torch.randn(8, 8, dtype=torch.complex64, generator=generator)


def _graph(names: list[str], nodes: list[dict[str, Any]]) -> bytes:
    specs = [{"parameter": {"arg": {"name": name}, "parameter_name": name}} for name in names]
    graph = {"inputs": [{"as_tensor": {"name": name}} for name in names], "nodes": nodes, "outputs": []}
    module = {"signature": {"input_specs": specs, "output_specs": []}, "graph": graph}
    return json.dumps({"schema_version": {"major": SCHEMA_MAJOR, "minor": 0}, "graph_module": module}).encode()


class Pool:
    """The tensors of a program that `write_pool` wrote."""

    def __init__(self, path: Path) -> None:
        self.entries = entries_of(path)
        self.table = json.loads(self.entries[_TABLE])["config"]


def random_program(path: Path, choose: random.Random, pool: Pool) -> None:
    """Write a program of one or two random calls over some tensors of a pool."""
    names = list(pool.table)
    nodes: list[dict[str, Any]] = []
    results: list[str] = []
    for index in range(choose.choice((1, 1, 2))):
        node, given = _node(choose, names, results, f"result_{index}")
        nodes.append(node)
        results += given
    # Only the tensors that are used, because reading them takes longer than the calls.
    written = json.dumps(nodes)
    used = [name for name in names if f'"{name}"' in written]
    table = {name: pool.table[name] for name in used}
    kept = {f"data/weights/{described['path_name']}" for described in table.values()}
    entries = {name: data for name, data in pool.entries.items() if "weight_" not in name or name in kept}
    entries[_TABLE] = json.dumps({"config": table}).encode()
    entries[f"models/{METHOD}.json"] = _graph(used, nodes)
    rewritten(path, entries)


def callable_targets() -> list[str]:
    """Names of all operators on tensors that a program may call."""
    listed = [name if "." in name else f"{name}.default" for name in sorted(operators._LISTED)]
    return [f"torch.ops.aten.{name}" for name in listed] + sorted(operators._OF_PACKAGES)


_TARGETS = callable_targets()


def _node(choose: random.Random, names: list[str], results: list[str], name: str) -> tuple[dict[str, Any], list[str]]:
    target = choose.choice(_TARGETS)
    schema = operators.operator_named(target)._schema
    harshness = choose.choice((0.0, 0.1, 0.1, 0.3))
    # Tensors of one shape fit more often.
    twins = [choose.choice(names)]
    twins += [one for one in names if one.split("_")[-1] == twins[0].split("_")[-1]] + results * 4
    inputs = []
    for argument in schema.arguments:
        if argument.has_default_value() and choose.random() < 0.5:
            continue
        value = _value(str(argument.real_type), argument.name, choose, names, twins, harshness)
        inputs.append({"name": argument.name, "arg": value, "kind": 2 if argument.kwarg_only else 1})
    kinds = [str(result.type) for result in schema.returns]
    given = [f"{name}_{index}" for index, kind in enumerate(kinds) if kind == "Tensor"]
    outputs: list[dict[str, Any]] = [{"as_tensor": {"name": one}} for one in given]
    if kinds == ["List[Tensor]"]:
        given = [f"{name}_{index}" for index in range(choose.choice((0, 1, 2)))]
        outputs = [{"as_tensors": [{"name": one} for one in given]}]
    return {"target": target, "inputs": inputs, "outputs": outputs, "metadata": {}}, given


def _value(
    kind: str, name: str, choose: random.Random, names: list[str], twins: list[str], harshness: float
) -> dict[str, Any]:
    is_harsh = choose.random() < harshness
    if is_harsh and choose.random() < 0.2:
        # Of another kind.
        kind = choose.choice(("Tensor", "int", "float", "str", "bool", "List[int]", "ScalarType", "MemoryFormat"))
    if kind.startswith("Optional["):
        if choose.random() < 0.4:
            return {"as_none": True}
        kind = kind.removeprefix("Optional[").removesuffix("]")

    def tensor() -> str:
        found = choose.choice(names if choose.random() < 0.4 else twins)
        if name in ("index", "indices", "mask", "condition", "offs", "cond") and choose.random() < 0.8:
            found = choose.choice([one for one in names if one.startswith("int")])
        return found

    def integer() -> int:
        if is_harsh:
            return choose.choice(_HARSH_INTS)
        return choose.choice((-1, 0, 1)) if name in ("dim", "dim0", "dim1") else choose.choice((0, 1, 2, 3, 8, 8, -1))

    def real() -> float:
        return choose.choice(_HARSH_FLOATS if is_harsh else (0.0, 0.5, 1.0, 2.0, -1.0))

    def number() -> dict[str, Any]:
        return {"as_int": integer()} if choose.random() < 0.6 else {"as_float": _written(real())}

    count = choose.choice((1, 1, 2, 2, 3, 4, 0, 6))
    if kind == "Tensor":
        return number() if choose.random() < 0.1 else {"as_tensor": {"name": tensor()}}
    if kind == "List[Tensor]":
        return {"as_tensors": [{"name": tensor()} for _ in range(count)]}
    if kind == "List[Optional[Tensor]]":
        given = [
            {"as_tensor": {"name": tensor()}} if choose.random() < 0.7 else {"as_none": True} for _ in range(count)
        ]
        return {"as_optional_tensors": given}
    if kind == "int":
        return {"as_int": integer()}
    if kind == "float":
        return {"as_float": _written(real())}
    if kind == "number":
        return number()
    if kind == "bool":
        return {"as_bool": choose.random() < 0.5}
    if kind == "str":
        return {"as_string": choose.choice(_TEXTS)}
    if kind in ("List[int]", "List[float]", "List[bool]"):
        if kind == "List[int]":
            return {"as_ints": [integer() for _ in range(count)]}
        if kind == "List[float]":
            return {"as_floats": [_written(real()) for _ in range(count)]}
        return {"as_bools": [choose.random() < 0.5 for _ in range(count)]}
    if kind == "ScalarType":
        return {"as_scalar_type": 200 if is_harsh else choose.choice(list(DTYPES))}
    if kind == "Layout":
        return {"as_layout": choose.choice((7, 7, 7, 1))}
    if kind == "MemoryFormat":
        return {"as_memory_format": choose.choice((1, 2, 3, 4, 9))}
    return {"as_device": {"type": choose.choice(("cpu", "cpu", "cpu", "cuda")), "index": choose.choice((None, 0, 99))}}


def _written(value: float) -> float | str:
    """A float as torch writes it into JSON."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def run_program(folder: Path) -> None:
    """Read a program and run it, as a session does."""
    programs = read_archive(folder / PROGRAM)
    description = SimpleNamespace(methods={METHOD: SimpleNamespace(is_step=False)}, batch_size=1, layers=[])
    with torch.no_grad():
        StoredRunner(programs, description).call(METHOD, ())
