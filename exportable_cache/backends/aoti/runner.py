"""Running an AOTInductor package from Python."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...common.compat.torch import load_machine_code
from ...errors import BundleError, first_line

if TYPE_CHECKING:
    from ..base import ProgramDescription


class AotiRunner:
    """The methods of one package, all over the tensors that are held here: weights mapped from disk, and a zeroed
    cache.

    Raises:
        BundleError: If the files cannot be loaded by this torch, or on this processor.
    """

    def __init__(self, code: Path, table: Path, constants: Path, description: ProgramDescription) -> None:
        self.methods = description.methods
        try:
            stored = torch.load(constants, mmap=True, weights_only=True)
            known = read_table(table, self.methods, {*stored["weights"], *stored["state"]})
            # They may keep bare pointers to what they were given: the runner has to live as long.
            self._code = [load_machine_code(code, region_name(number)) for number in range(len(known.regions))]
        except (OSError, RuntimeError, ValueError) as error:
            raise BundleError(f"cannot load {code.name}: {error}; export the model again, on this machine") from error
        state = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in stored["state"].items()}
        tensors = {**stored["weights"], **state}
        self._tensors = tensors
        names = (
            f"layers.{index}.{name}" for index, layer in enumerate(description.layers) for name in layer["tensors"]
        )
        self.state = {name: state[name.replace(".", "_")] for name in names if name.replace(".", "_") in state}
        for loaded, held in zip(self._code, known.regions, strict=True):
            if held:
                loaded.load_constants({own: tensors[name] for own, name in held.items()}, False, True, True)
        self._calls = {name: _Calls(method, tensors, self._code) for name, method in known.methods.items()}

    @torch.no_grad()
    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        outputs = self._calls[method](inputs)
        return outputs[0] if self.methods[method].is_step else outputs


class _Calls:
    """A method of the table, over tensors and code.

    Args:
        method: It, checked.
        tensors: By name.
        code: The regions.
    """

    def __init__(self, method: Method, tensors: dict[str, torch.Tensor], code: Sequence[Any]) -> None:
        self._tensors = [tensors[name] for name in method.tensors]
        self._calls = [(code[call.region].run, call.sources, call.results, call.done) for call in method.calls]
        self._outputs = method.outputs

    def __call__(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        values: list[Any] = [tensor.contiguous() for tensor in inputs]
        values += self._tensors
        for run, sources, results, done in self._calls:
            found = run([values[place] for place in sources])
            if len(found) != results:
                raise BundleError(f"machine code gives {len(found)} values, of {results}; export the model again")
            values += found
            for place in done:
                values[place] = None
        return tuple(values[place] for place in self._outputs)


#: Of the file. Bundles of releases that compiled each method whole have none.
VERSION = 1
_AGAIN = "export the model again"

Place = Annotated[int, Field(ge=0)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Call(_Entry):
    """One region's turn.

    Attributes:
        region: Number of the machine code.
        sources: Places of what it is given.
        results: How many values it gives: they take the next places.
        done: Places that nothing reads afterwards.
    """

    region: Place
    sources: list[Place]
    results: Place
    done: list[Place] = []


class Method(_Entry):
    """The calls of one method over numbered places: its inputs come first, then `tensors`, then what calls give.

    Attributes:
        inputs: How many.
        tensors: Names of weights and cache tensors in `constants.pt`.
        calls: In order.
        outputs: Places of what the method gives.
    """

    inputs: Place
    tensors: list[str]
    calls: list[Call]
    outputs: Annotated[list[Place], Field(min_length=1)]

    @property
    def places(self) -> int:
        """How many there are."""
        return self.inputs + len(self.tensors) + sum(call.results for call in self.calls)


class Table(_Entry):
    """All methods of a package.

    Attributes:
        version: `VERSION`.
        regions: Of each piece of machine code, `region_0` of the package first, the tensors that it is given once,
            when it is loaded: its own name -> name in `constants.pt`. Those of equal layers have none.
        methods: By name.
    """

    version: int
    regions: list[dict[str, str]]
    methods: dict[str, Method]

    def tensors(self) -> set[str]:
        """Names of all that are needed of `constants.pt`."""
        return {name for held in self.regions for name in held.values()}.union(
            *(method.tensors for method in self.methods.values())
        )

    def write(self, path: Path) -> None:
        """Write it: a line for each call."""
        path.write_text("".join(self._lines()), encoding="utf-8")

    def _lines(self) -> Iterator[str]:
        yield f'{{"version": {self.version},\n "regions": {json.dumps(self.regions)},\n "methods": {{'
        for index, (name, method) in enumerate(self.methods.items()):
            yield (",\n" if index else "\n") + f"  {json.dumps(name)}: "
            fields = method.model_dump()
            calls = ",\n".join(f"    {json.dumps(call)}" for call in fields.pop("calls"))
            yield json.dumps(fields)[:-1] + ', "calls": [\n' + calls + "]}"
        yield "}}\n"


def region_name(number: int) -> str:
    """Of a region in the package."""
    return f"region_{number}"


def read_table(path: Path, methods: Collection[str], stored: Collection[str]) -> Table:
    """Read a table, whose every place and name is checked.

    Args:
        path: The file.
        methods: Names of the methods that there must be.
        stored: Names of the tensors that there are.

    Raises:
        BundleError: If there is none, or it is not one that `Table.write` could have written for these.
    """
    if not path.is_file():
        raise BundleError(
            f"{path.parent} has no {path.name}: an earlier release wrote it, which compiled each method whole; {_AGAIN}"
        )
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        version = fields.get("version") if isinstance(fields, dict) else None
        if version != VERSION:
            raise BundleError(f"{path} has version {version!r:.40}, this release reads {VERSION}; {_AGAIN}")
        table = Table.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise _damaged(path, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise _damaged(path, first_line(error)) from error
    problem = next(_problems(table, methods, stored), None)
    if problem is not None:
        raise _damaged(path, problem)
    return table


def _damaged(path: Path, problem: str) -> BundleError:
    return BundleError(f"{path} is damaged: {problem}; {_AGAIN}")


def _problems(table: Table, methods: Collection[str], stored: Collection[str]) -> Iterator[str]:
    if set(table.methods) != set(methods):
        yield f"methods: has {sorted(table.methods)}, the manifest {sorted(methods)}"
    for name in sorted(table.tensors() - set(stored)):
        yield f"no tensor of constants.pt is named {name!r}"
    for name, method in table.methods.items():
        # A place may be read from the call on that fills it, until the one behind which it is emptied.
        filled = set(range(method.inputs + len(method.tensors)))
        end = len(filled)
        for index, call in enumerate(method.calls):
            where = f"methods.{name}.calls.{index}"
            if call.region >= len(table.regions):
                yield f"{where}.region: is {call.region}, of {len(table.regions)}"
            for field, places in (("sources", call.sources), ("done", call.done)):
                for place in places:
                    if place not in filled:
                        yield f"{where}.{field}: nothing is at place {place}"
            filled.difference_update(call.done)
            # Not more than any call gives: what a stranger writes is no size to allocate.
            if call.results > 10_000:
                yield f"{where}.results: {call.results} values are more than 10000"
                return
            filled.update(range(end, end + call.results))
            end += call.results
        for place in method.outputs:
            if place not in filled or place < method.inputs + len(method.tensors):
                yield f"methods.{name}.outputs: no call leaves a value at place {place}"
