"""One `.pt2` archive for several exported programs that share their weights and their cache.

torch packages each program with a copy of its own weights and of its buffers' contents. Here the first program keeps
the weights, the others and every cache buffer are written as empty stand-ins, and reading puts one set of tensors under
all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...common.compat.torch import load_pt2, write_pt2
from ...errors import BundleError

if TYPE_CHECKING:
    from torch.export import ExportedProgram

SHARED_STATE_FILE = "exportable_cache_shared_state.json"


def write_archive(path: Path, programs: Mapping[str, ExportedProgram]) -> None:
    """Write programs exported from one module.

    Args:
        programs: By method name; the first keeps the weights.
    """
    owner = next(iter(programs))
    state = {
        name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        for program in programs.values()
        for name, tensor in _cache_buffers(program).items()
    }
    shared = {"owner": owner, "state": state}
    with _without_contents(programs, owner, set(state)):
        write_pt2(str(path), programs, extra_files={SHARED_STATE_FILE: json.dumps(shared)})


def read_archive(path: Path) -> dict[str, ExportedProgram]:
    """Read what `write_archive` wrote: all programs over one set of weights and one zeroed cache.

    Raises:
        BundleError: If the file is not such an archive.
    """
    try:
        contents = load_pt2(str(path))
        shared = json.loads(contents.extra_files[SHARED_STATE_FILE])
    except (KeyError, OSError, RuntimeError, ValueError, AssertionError) as error:
        raise BundleError(f"cannot read the programs in {path.name}: {error}; export the model again") from error
    programs = contents.exported_programs
    weights = programs[shared["owner"]].state_dict
    state = {
        name: torch.zeros(tensor["shape"], dtype=getattr(torch, tensor["dtype"]))
        for name, tensor in shared["state"].items()
    }
    for program in programs.values():
        program.state_dict.update(weights)
        program.constants.update({name: tensor for name, tensor in state.items() if name in program.constants})
    return programs


def _cache_buffers(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """The cache tensors among a program's buffers, by fully qualified name."""
    return {
        name: program.constants[name]
        for name in program.graph_signature.non_persistent_buffers
        if name.startswith("layers_")
    }


@contextmanager
def _without_contents(programs: Mapping[str, ExportedProgram], owner: str, state: set[str]) -> Iterator[None]:
    """Put empty stand-ins where an archive would otherwise repeat contents; the programs are restored
    after the block.
    """
    kept = {name: (dict(program.state_dict), dict(program.constants)) for name, program in programs.items()}
    try:
        for name, program in programs.items():
            for key in state & program.constants.keys():
                program.constants[key] = _stand_in(program.constants[key])
            if name != owner:
                for key, tensor in program.state_dict.items():
                    program.state_dict[key] = _stand_in(tensor)
        yield
    finally:
        for name, program in programs.items():
            program.state_dict.update(kept[name][0])
            program.constants.update(kept[name][1])


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0, dtype=tensor.dtype)
    # torch checks that a program's parameters are parameters.
    return (
        torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter)
        else empty
    )
