"""Compiling methods with AOTInductor, and the one file of constants that all of them are given at load time.

AOTInductor keeps a copy of every constant in each compiled model, the cache among them, unless it is told to manage
none: then whoever loads the package hands in tensors, and the same tensor may be handed to several models. Weights are
shared in this way, and so is the cache: the models write it in place, through the pointer they were given.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...common.compat.torch import compile_ahead_of_time, load_package, write_package
from ...models.layout import vocab_size_of
from ..onednn_linears import linears_by_onednn

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from ...program.program import Program

_OPTIONS = {"aot_inductor.package": True, "aot_inductor.package_constants_in_so": False}


def compile_methods(path: Path, programs: Mapping[str, ExportedProgram]) -> dict[str, list[str]]:
    """Compile every program and write them as one package without constants.

    Args:
        path: The package, ending in `.pt2`.
        programs: By method name.

    Returns:
        Per method, the names of the constants that it must be given.
    """
    files = {}
    with torch.no_grad():
        for name, program in programs.items():
            module = program.module(check_guards=False)
            linears_by_onednn(module)
            files[name] = compile_ahead_of_time(module, program.example_inputs, _OPTIONS)
    write_package(path, files)
    return {name: load_package(path, name).get_constant_fqns() for name in programs}


def write_constants(
    path: Path, program: Program, exported: Mapping[str, ExportedProgram], names: Mapping[str, list[str]]
) -> None:
    """Write what the methods must be given, readable by `torch.load` and by C++'s `torch::pickle_load`.

    The file is a dict: `weights`, tensors by name, tied ones stored once; `state`, the cache tensors by name, each as
    one zero expanded to its shape, so that it takes no room and whoever loads it allocates them; `methods`, per name
    its shortest, longest and read length; and `limits`, the sizes that inputs are checked against.
    """
    available = {}
    for item in exported.values():
        available.update({name: value for name, value in item.constants.items() if isinstance(value, torch.Tensor)})
        available.update(item.state_dict)
    state = {
        f"layers_{name.removeprefix('layers.').replace('.', '_')}": tensor
        for name, tensor in program.cache.named_state()
    }
    needed = sorted({name for constants in names.values() for name in constants})
    torch.save(
        {
            "weights": {name: available[name].detach() for name in needed if name not in state},
            "state": {
                name: torch.zeros(1, dtype=tensor.dtype).expand(tensor.shape)
                for name, tensor in state.items()
                if name in needed
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
