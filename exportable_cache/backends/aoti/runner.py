"""Running an AOTInductor package from Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...common.compat.torch import load_machine_code
from ...errors import BundleError
from .table import Method, read_table, region_name

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
