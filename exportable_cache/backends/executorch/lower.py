"""Lowering exported programs to one ExecuTorch program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import torch
from executorch import exir
from executorch.exir import ExecutorchBackendConfig
from executorch.exir.passes import MemoryPlanningPass
from torch.export import ExportedProgram

from ...common.compat.executorch import edge_config
from .copies import RemoveNeedlessCopies
from .decompositions import spell_out_gelus
from .delegates import partitioners_for
from .encoders import fold_constants, patches_to_linear, state_of
from .graph_edits import forget_histories
from .insertions import insert_what_was_taken
from .masked_writes import masked_writes_to_where
from .means import means_to_linear
from .own_embeddings import tables_to_own
from .own_linears import linears_to_own
from .parts_of_weights import parts_to_weights
from .patches import patch_exporter
from .quantized import fuse_quantized_embeddings
from .quantized_linears import UnfoldLinears
from .rotations import rotations_to_linear
from .segment_calls import StampedSegments

if TYPE_CHECKING:
    from executorch.exir import (
        EdgeProgramManager,
        ExecutorchProgramManager,
    )

# A line of a cache, in bytes.
_ALIGNMENT = 64

Rewrite = Callable[[ExportedProgram], ExportedProgram]

#: What every delegate and the runtime need, in this order: before what is constant in all methods is folded, and after.
BEFORE_FOLDING: tuple[Rewrite, ...] = (fuse_quantized_embeddings, patches_to_linear)
REWRITES: tuple[Rewrite, ...] = (masked_writes_to_where, spell_out_gelus, parts_to_weights)
#: Other compilers take means and slices as they are, and coremltools 9.0 fails on a linear layer of one output.
XNNPACK_REWRITES: tuple[Rewrite, ...] = (means_to_linear, rotations_to_linear)


# Without it, passes over the branches differentiate them, which fails where these read a position.
@torch.no_grad()
def to_edge(
    programs: Mapping[str, ExportedProgram],
    constant_methods: Mapping[str, Any] | None = None,
    delegate: str = "xnnpack",
    own: bool = False,
) -> EdgeProgramManager:
    """Partition for a delegate, all methods together, so that weights they share are stored once.

    Args:
        programs: By method name.
        constant_methods: Values that the file answers as methods of their own.
        delegate: See `delegates`.
        own: Linear layers, and tables of embeddings that 16 bits have without loss, are operators of this package.
    """
    patch_exporter()
    segments = StampedSegments(_segment_to_edge)
    rewrites: tuple[Rewrite, ...] = (
        *BEFORE_FOLDING,
        partial(fold_constants, state=state_of(programs.values())),
        *REWRITES,
    )
    rewrites = (*rewrites, *((tables_to_own, linears_to_own) if own else ()))
    rewrites = (*rewrites, *((segments.take, *XNNPACK_REWRITES) if delegate == "xnnpack" else ()))
    rewritten = {name: _rewritten(program, rewrites) for name, program in programs.items()}
    edge = insert_what_was_taken(_partitioned(rewritten, delegate, constant_methods), segments)
    for name in programs:
        restore_sizes(edge.exported_program(name))
        forget_histories(edge.exported_program(name).graph_module)
    return edge


def _segment_to_edge(program: ExportedProgram) -> ExportedProgram:
    edge = _partitioned({"forward": _rewritten(program, XNNPACK_REWRITES)}, "xnnpack")
    return edge.exported_program("forward")


def _rewritten(program: ExportedProgram, rewrites: Sequence[Rewrite]) -> ExportedProgram:
    rewritten = reduce(lambda rewritten, rewrite: rewrite(rewritten), rewrites, program)
    forget_histories(rewritten.graph_module)
    return rewritten


def _partitioned(
    programs: dict[str, ExportedProgram], delegate: str, constant_methods: Mapping[str, Any] | None = None
) -> EdgeProgramManager:
    partitioners = partitioners_for(delegate)
    methods = dict(constant_methods or {})
    passes = [UnfoldLinears(), RemoveNeedlessCopies()] if delegate == "xnnpack" else []
    kept = partitioners[0].kept_operators(programs.values()) if delegate == "xnnpack" else None
    # Cache writes are not in the core operator set's validity list, and a dim order of the cache would be copied to.
    config = edge_config(skip_dim_order=True, kept=kept or ())
    if kept is None:
        edge = exir.to_edge_transform_and_lower(
            programs,
            transform_passes=[forget_histories, *passes],
            partitioner=partitioners,
            compile_config=config,
            constant_methods=methods,
        )
    else:
        # The same with one decomposition in place of three, which find out call by call what is to be kept.
        edge = exir.to_edge(programs, methods, config).transform([forget_histories, *passes])
        edge = edge.to_backend(partitioners[0])
    for name in programs:
        forget_histories(edge.exported_program(name).graph_module)
    return edge


def restore_sizes(program: ExportedProgram) -> None:
    """Give each size of the inputs the range again that the program states, in place.

    Passes run operators on fake tensors, and where one chooses a kernel by the work there is (convolutions do), the
    size is taken to be among those with the same choice. Memory is planned for the largest: longer inputs were refused
    by the runtime.
    """
    ranges = program.range_constraints
    for node in program.graph.find_nodes(op="placeholder"):
        for size in getattr(node.meta["val"], "shape", ()):
            if isinstance(size, torch.SymInt):
                size.node.shape_env.var_to_range.update(
                    {name: ranges[name] for name in size.node.expr.free_symbols & ranges.keys()}
                )


@torch.no_grad()
def to_program(edge: EdgeProgramManager) -> ExecutorchProgramManager:
    """Plan memory and serialise.

    Two settings carry the design. `share_mutable_buffers`: the methods see one cache; without it the second reads
    garbage. `run_reinplace_pass`: a cache write stays in place; without it every write copies the whole buffer out and
    back, per tensor and token.
    """
    return edge.to_executorch(
        ExecutorchBackendConfig(
            memory_planning_pass=MemoryPlanningPass(
                alloc_graph_input=True, alloc_graph_output=True, share_mutable_buffers=True
            ),
            run_reinplace_pass=True,
            # What our kernels read: a vector that lies across two lines of a cache takes two reads.
            constant_tensor_alignment=_ALIGNMENT,
        )
    )


def lower_programs(
    programs: Mapping[str, ExportedProgram],
    constant_methods: Mapping[str, Any] | None = None,
    delegate: str = "xnnpack",
    own: bool = False,
) -> ExecutorchProgramManager:
    """`to_edge`, then `to_program`."""
    return to_program(to_edge(programs, constant_methods, delegate, own))
