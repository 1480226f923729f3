"""Run an AOTInductor package, and read the table of the code that each method calls."""

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
    """Runs the methods of a package, all with the same weights, mapped from disk, and the same cache.

    Raises:
        BundleError: If this torch or this processor cannot load the files.
    """

    def __init__(self, code: Path, table: Path, constants: Path, description: ProgramDescription) -> None:
        self.methods = description.methods
        try:
            stored = torch.load(constants, mmap=True, weights_only=True)
            known = read_table(table, self.methods, {*stored["weights"], *stored["state"]})
            # Kept alive, because they may hold pointers to their tensors.
            self._code = [load_machine_code(code, region_name(index)) for index in range(len(known.regions))]
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
                loaded.load_constants({inner: tensors[name] for inner, name in held.items()}, False, True, True)
        self._calls = {name: _Calls(method, tensors, self._code) for name, method in known.methods.items()}

    @torch.no_grad()
    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run a method, see `Runner.run`."""
        outputs = self._calls[method](inputs)
        return outputs[0] if self.methods[method].is_step else outputs


class _Calls:
    """The calls of a method.

    Args:
        method: The checked method.
        tensors: Tensors by name.
        code: The compiled regions.
    """

    def __init__(self, method: Method, tensors: dict[str, torch.Tensor], code: Sequence[Any]) -> None:
        self._tensors = [tensors[name] for name in method.tensors]
        self._calls = [(code[call.region].run, call.sources, call.results, call.done) for call in method.calls]
        self._outputs = method.outputs

    def __call__(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        values: list[Any] = [tensor.contiguous() for tensor in inputs]
        values += self._tensors
        for run, sources, results, done in self._calls:
            found = run([values[slot] for slot in sources])
            if len(found) != results:
                raise BundleError(f"a region must return {results} values, got {len(found)}; export the model again")
            values += found
            for slot in done:
                values[slot] = None
        return tuple(values[slot] for slot in self._outputs)


#: Version of `regions.json`. Earlier releases, which compiled each method whole, wrote no such file.
VERSION = 1
_AGAIN = "export the model again"

Slot = Annotated[int, Field(ge=0)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Call(_Entry):
    """A call of a region.

    Attributes:
        region: Index of the region.
        sources: Slots of its inputs.
        results: Number of its outputs, which take the next slots.
        done: Slots that are not read afterwards.
    """

    region: Slot
    sources: list[Slot]
    results: Slot
    done: list[Slot] = []


class Method(_Entry):
    """The calls of a method, whose values are in numbered slots: its inputs, then `tensors`, then the outputs of calls.

    Attributes:
        inputs: Number of inputs.
        tensors: Names of weights and cache tensors in `constants.pt`.
        calls: The calls, in order.
        outputs: Slots of the method's outputs.
    """

    inputs: Slot
    tensors: list[str]
    calls: list[Call]
    outputs: Annotated[list[Slot], Field(min_length=1)]

    @property
    def slots(self) -> int:
        """Number of slots."""
        return self.inputs + len(self.tensors) + sum(call.results for call in self.calls)


class Table(_Entry):
    """The methods of a package.

    Attributes:
        version: `VERSION`.
        regions: For each region, the tensors that it gets once when it is loaded: name in the region -> name in
            `constants.pt`. Empty for regions of equal layers.
        methods: Methods by name.
    """

    version: int
    regions: list[dict[str, str]]
    methods: dict[str, Method]

    def tensors(self) -> set[str]:
        """Return the names of all tensors of `constants.pt` that are used."""
        return {name for held in self.regions for name in held.values()}.union(
            *(method.tensors for method in self.methods.values())
        )

    def write(self, path: Path) -> None:
        """Write the table, one line per call."""
        path.write_text("".join(self._lines()), encoding="utf-8")

    def _lines(self) -> Iterator[str]:
        yield f'{{"version": {self.version},\n "regions": {json.dumps(self.regions)},\n "methods": {{'
        for index, (name, method) in enumerate(self.methods.items()):
            yield (",\n" if index else "\n") + f"  {json.dumps(name)}: "
            fields = method.model_dump()
            calls = ",\n".join(f"    {json.dumps(call)}" for call in fields.pop("calls"))
            yield json.dumps(fields)[:-1] + ', "calls": [\n' + calls + "]}"
        yield "}}\n"


def region_name(index: int) -> str:
    """Return the name of a region in the package."""
    return f"region_{index}"


def read_table(path: Path, methods: Collection[str], stored: Collection[str]) -> Table:
    """Read a table and check every index and name.

    Args:
        path: Path of the file.
        methods: Names of the methods that the manifest lists.
        stored: Names of the tensors in `constants.pt`.

    Raises:
        BundleError: If the file is missing, or `Table.write` could not have written it for these.
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
        # A slot may be read after the call that fills it, up to the call that lists it as done.
        filled = set(range(method.inputs + len(method.tensors)))
        end = len(filled)
        for index, call in enumerate(method.calls):
            where = f"methods.{name}.calls.{index}"
            if call.region >= len(table.regions):
                yield f"{where}.region: is {call.region}, of {len(table.regions)}"
            for field, slots in (("sources", call.sources), ("done", call.done)):
                for slot in slots:
                    if slot not in filled:
                        yield f"{where}.{field}: slot {slot} is empty"
            filled.difference_update(call.done)
            # Limited, because an untrusted number must not set the size of an allocation.
            if call.results > 10_000:
                yield f"{where}.results: {call.results} values are more than 10000"
                return
            filled.update(range(end, end + call.results))
            end += call.results
        for slot in method.outputs:
            if slot not in filled or slot < method.inputs + len(method.tensors):
                yield f"methods.{name}.outputs: no call fills slot {slot}"
