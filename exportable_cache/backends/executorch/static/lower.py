"""Write a program in the static form: the `.pte`, and the rotary tables that its host reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ....common.tensors import dtype_name
from ....errors import UnsupportedModelError
from ....models.layers.specs import vocab_size_of
from ....models.quantized_rows import rounds_activations
from ...base import LoweredFile, ProgramDescription
from ..delegates.checks import check_whole, delegated_calls
from ..lowering.lower import lower_programs, refusing, write_lowered
from ..pte.kernels import check_kernels
from .program import REMEDY, static_programs
from .runner import PLAN, TABLES, StaticRunner

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from ....program.program import Program
    from ..options import ExecutorchOptions


#: Largest root mean square of differences in the trial, of the logits' spread: in float, and with 8-bit activations.
_MOST, _MOST_ROUNDED = 0.02, 0.25


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
    from safetensors.torch import save

    graphs, plan, tables = static_programs(program, options.keys == "transposed")
    layers = [
        {"tensors": {name: {"shape": one.shape, "dtype": dtype_name(one.dtype)} for name, one in layer.named_state()}}
        for layer in program.cache.layers
    ]
    description = ProgramDescription(program.methods, program.form, program.logits, program.batch_size, layers)
    check_steps(program, StaticRunner(Traced(graphs), plan, tables, description))
    with refusing(f"{type(program.model).__name__} cannot be lowered in the static form", REMEDY):
        lowered = lower_programs(graphs, delegate=options.delegate)
    check_kernels(lowered)
    if options.delegate == "tosa":
        check_whole(options.facts, program, lowered)
    calls = ", ".join(f"{count} in {name}" for name, count in delegated_calls(lowered).items())
    write_lowered(lowered, folder / file)
    if options.delegate == "openvino":
        from ..delegates.openvino import check_calls

        check_calls(folder / file, program.model, [(name, _zeros(graph)) for name, graph in graphs.items()])
    # Not by save_file, whose files no other user can read.
    (folder / TABLES).write_bytes(save(tables))
    return [
        LoweredFile(
            file, f"methods {', '.join(graphs)}, weights; calls of the delegate: {calls}", {PLAN: plan.to_dict()}
        ),
        LoweredFile(TABLES, "rotary tables, for the host"),
    ]


class Traced:
    """Runs traced graphs in torch, in place of a `.pte`."""

    def __init__(self, graphs: Mapping[str, ExportedProgram]) -> None:
        self._modules = {name: graph.module() for name, graph in graphs.items()}

    def outputs(self, method: str, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See `static.runner.Graphs`."""
        return self._modules[method](*inputs)


@torch.no_grad()
def check_steps(program: Program, runner: StaticRunner) -> None:
    """Feed a few tokens one by one, and compare with the model over all of them.

    Some models derive positions from the length of their cache, or masks from their config, in place of those that are
    given; they are traced without an error.

    Raises:
        UnsupportedModelError: If the logits differ by more than rounding.
    """
    model, count = program.model, min(8, program.cache.max_length or 8)
    ids = torch.arange(1, count + 1)[None] % vocab_size_of(model)
    expected = model(input_ids=ids, use_cache=False).logits[0, -1].float()
    for position in range(count):
        logits = runner.run("decode", ids[:, position : position + 1], torch.tensor([position]))
    difference = (logits[0].float() - expected).square().mean().sqrt() / expected.std()
    is_rounded = any(rounds_activations(weight) for weight in model.parameters())
    if not difference <= (_MOST_ROUNDED if is_rounded else _MOST):
        raise UnsupportedModelError(
            f"{type(model).__name__} computes something else in the static form (logits differ by {difference:.2f} of "
            f"their spread after a few tokens), because it derives positions or masks itself; {REMEDY}"
        )


def _zeros(graph: ExportedProgram) -> list[tuple[list[int], int, str]]:
    """Return zeros for the inputs of a graph, see `openvino.Filled`."""
    given = set(graph.graph_signature.user_inputs)
    values = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder") if node.name in given]
    return [(list(value.shape), 0, dtype_name(value.dtype)) for value in values]
