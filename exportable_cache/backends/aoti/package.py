"""A package of machine code, and the one file of constants that all of it is given at load time.

AOTInductor keeps a copy of every constant in each compiled model, the cache among them, unless it is told to manage
none: then whoever loads the package hands in tensors, and the same tensor may be handed to several models. Weights are
shared in this way, and so is the cache: the models write it in place, through the pointer they were given. Regions are
given both as inputs, see `regional.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...common.compat.torch import load_machine_code
from ...common.compat.torch_aoti import write_package
from ...models.layers.layout import vocab_size_of
from .regional import RegionalCompiler
from .table import VERSION, Table, region_name

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from ...program.program import Program


def compile_methods(path: Path, programs: Mapping[str, ExportedProgram]) -> tuple[Table, dict[str, torch.Tensor]]:
    """Compile every program and write them as one package without constants.

    Args:
        path: The package, ending in `.pt2`.
        programs: By method name.

    Returns:
        What the methods call, and the tensors that they must be given, by name: weights, constants and cache tensors.
    """
    compiler, named = RegionalCompiler(), _Named()
    methods = {name: compiler.method(program, named.of(name, program)) for name, program in programs.items()}
    write_package(path, {region_name(number): files for number, files in enumerate(compiler.files)})
    users = {call.region: name for name, method in methods.items() for call in method.calls}
    regions = []
    for number in range(len(compiler.files)):
        method = users[number]
        stored_name = named.of(method, programs[method])
        held = load_machine_code(path, region_name(number)).get_constant_fqns()
        regions.append({name: stored_name(name) for name in sorted(held)})
    table = Table(version=VERSION, regions=regions, methods=methods)
    return table, {name: named.tensors[name] for name in table.tensors()}


class _Named:
    """Names for the tensors of all methods: a constant that another method has with other values gets one of its own.

    Attributes:
        tensors: By name.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def of(self, method: str, program: ExportedProgram) -> Callable[[str], str]:
        """The names for one method's."""
        own = {**{k: v for k, v in program.constants.items() if isinstance(v, torch.Tensor)}, **program.state_dict}

        def stored_name(name: str) -> str:
            tensor = own[name].detach()
            found = self.tensors.setdefault(name, tensor)
            if found is tensor or _same(found, tensor):
                return name
            self.tensors.setdefault(f"{method}/{name}", tensor)
            return f"{method}/{name}"

        return stored_name


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() or torch.equal(one, other)


def write_constants(path: Path, program: Program, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write what the methods must be given, readable by `torch.load` and by C++'s `torch::pickle_load`.

    The file is a dict: `weights`, tensors by name, tied ones stored once; `state`, the cache tensors by name, each as
    one zero expanded to its shape, so that it takes no room and whoever loads it allocates them; `methods`, per name
    its shortest, longest and read length; and `limits`, the sizes that inputs are checked against.

    Args:
        path: The file.
        program: Of which the methods are.
        tensors: All that they need, the cache's among them.
    """
    state = {
        f"layers_{name.removeprefix('layers.').replace('.', '_')}": tensor
        for name, tensor in program.cache.named_state()
    }
    torch.save(
        {
            "weights": {name: tensors[name] for name in sorted(tensors) if name not in state},
            "state": {
                name: torch.zeros(1, dtype=tensor.dtype).expand(tensor.shape)
                for name, tensor in state.items()
                if name in tensors
            },
            "methods": {
                name: (method.min_length, method.max_length, method.kv_read_len)
                for name, method in program.methods.items()
            },
            "limits": {
                "batch_size": program.batch_size,
                "vocab_size": vocab_size_of(program.model),
                "max_length": program.cache.max_length,
            },
        },
        path,
    )
