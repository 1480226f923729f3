"""Write a program in the static form: the `.pte`, and the rotary tables that its host reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ....errors import ExportableCacheError, UnsupportedModelError, describe_trace_error
from ...base import LoweredFile
from ..delegates.checks import delegated_calls
from ..lowering.lower import lower_programs
from ..pte.kernels import check_kernels
from ..pte.rewrite import make_largest_first, write_pte
from .program import static_programs
from .runner import PLAN, TABLES

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from ....program.program import Program
    from ..options import ExecutorchOptions


def write_static(program: Program, folder: Path, file: str, options: ExecutorchOptions) -> list[LoweredFile]:
    """Lower the methods of a program in the static form.

    Args:
        program: Program whose methods have fixed lengths.
        folder: Folder to write to.
        file: Name of the `.pte`.
        options: Options of the target.

    Raises:
        UnsupportedModelError: See `static_programs`; or if the delegate refuses a graph.
    """
    from safetensors.torch import save_file

    graphs, plan, tables = static_programs(program, options.keys == "transposed")
    try:
        lowered = lower_programs(graphs, delegate=options.delegate)
    except ExportableCacheError:
        raise
    except Exception as error:  # passes and compilers raise arbitrary errors
        raise UnsupportedModelError(
            f"{type(program.model).__name__} cannot be lowered in the static form ({describe_trace_error(error)}); "
            "export without form='static' (-O form=static)"
        ) from error
    check_kernels(lowered)
    write_pte(lowered, folder / file)
    make_largest_first(folder / file)
    if options.delegate == "openvino":
        from ..delegates.openvino import check_calls

        check_calls(folder / file, program.model, [(name, _zeros(graph)) for name, graph in graphs.items()])
    save_file(tables, folder / TABLES)
    calls = ", ".join(f"{count} in {name}" for name, count in delegated_calls(lowered).items())
    return [
        LoweredFile(
            file, f"methods {', '.join(graphs)}, weights; calls of the delegate: {calls}", {PLAN: plan.to_dict()}
        ),
        LoweredFile(TABLES, "rotary tables, for the host"),
    ]


def _zeros(graph: ExportedProgram) -> list[tuple[list[int], int, str]]:
    """Return zeros for the inputs of a graph, see `openvino.Filled`."""
    given = set(graph.graph_signature.user_inputs)
    values = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder") if node.name in given]
    return [(list(value.shape), 0, str(value.dtype).removeprefix("torch.")) for value in values]
