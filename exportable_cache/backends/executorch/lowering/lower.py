"""Lower exported programs to one ExecuTorch program and write it to a `.pte`."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from executorch import exir
from executorch.exir import ExecutorchBackendConfig
from executorch.exir.passes import MemoryPlanningPass
from torch.export import ExportedProgram

from ....common.compat.executorch import edge_config, forget_program
from ....errors import ExportableCacheError, InputError, UnsupportedModelError, describe_trace_error
from ..dedup.segment_calls import StampedSegments
from ..graph_edits import forget_histories
from ..native.linears import linears_to_own, tables_to_own
from ..pte.kernels import check_kernels
from ..pte.rewrite import make_largest_first, write_pte
from ..quantized import FoldedLinears, UnfoldLinears, fuse_quantized_embeddings
from .delegates import BACKEND_IDS, check_cache, check_methods, delegated_calls, partitioners_for
from .insertions import insert_what_was_taken
from .patches import patch_exporter
from .rewrites import (
    RemoveNeedlessCopies,
    fold_constants,
    masked_writes_to_where,
    means_to_linear,
    parts_to_weights,
    patches_to_linear,
    rotations_to_linear,
    spell_out_gelus,
    state_of,
)

if TYPE_CHECKING:
    from executorch.exir import (
        EdgeProgramManager,
        ExecutorchProgramManager,
    )

    from ....program.program import Program


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


def write_program(
    program: Program, path: Path, delegate: str = "xnnpack", for_llm_runner: bool = False, own: bool = False
) -> str:
    """Lower a program for a delegate and write it.

    Args:
        for_llm_runner: Insist on what ExecuTorch's own `TextLLMRunner` reads.
        own: Linear layers of 4-bit weights are operators of this package.

    Returns:
        What the file holds, for people.

    Raises:
        UnsupportedModelError: If ExecuTorch cannot lower the model, or has no kernel for an operator of it.
    """
    check_methods(delegate, program)
    lowered = _lowered(program, delegate, for_llm_runner, own)
    holds = f"methods {', '.join(program.methods)}, weights, one cache"
    if delegate != "xnnpack":
        check_cache(delegate, program, lowered)
        calls = ", ".join(f"{count} in {name}" for name, count in delegated_calls(lowered).items())
        holds += f"; calls of {BACKEND_IDS[delegate]}: {calls}"
    write_pte(lowered, path)
    make_largest_first(path)
    forget_program(lowered)
    del lowered
    # Graphs and their nodes refer to one another.
    gc.collect()
    return holds


def _lowered(program: Program, delegate: str, for_llm_runner: bool, own: bool) -> ExecutorchProgramManager:
    with warnings.catch_warnings():
        # Deprecations inside executorch's own operators and passes, hundreds per export, none of the caller's making.
        warnings.simplefilter("ignore", FutureWarning)
        with FoldedLinears(program.model) if delegate == "xnnpack" else nullcontext():
            exported = {name: program.export(name) for name in program.methods}
        metadata = runner_metadata(program, required=for_llm_runner) if "forward" in exported else None
        try:
            lowered = lower_programs(exported, metadata, delegate, own)
        except ExportableCacheError:
            raise
        except Exception as error:  # passes and compilers of ExecuTorch, each with errors of its own
            raise UnsupportedModelError(
                f"{type(program.model).__name__} cannot be lowered for ExecuTorch ({describe_trace_error(error)}); "
                "export it for target 'pt2' instead"
            ) from error
    check_kernels(lowered)
    return lowered


def runner_metadata(program: Program, required: bool = True) -> dict[str, Any]:
    """Constant methods by name (extension/llm/runner/constants.h of ExecuTorch 1.4).

    `get_max_seq_len` is the longest chunk of a prompt, `get_max_context_len` what the cache holds. Ids that the model
    does not state are left to the tokenizer's own.

    Args:
        program: Has a method `forward`.
        required: Refuse a program that the runner would reject; without it such a program gets no metadata.

    Raises:
        InputError: If it is required, and `forward` takes more than the runner gives, or several rows, or the cache has
            no limit to state and the model has no longest position either.
    """
    taken = program.methods["forward"].input_names
    if taken != ("input_ids", "input_pos"):
        if not required:
            return {}
        raise InputError(
            f"the runner gives input_ids and input_pos, forward takes {', '.join(taken)}; export without llm_runner"
        )
    if program.batch_size != 1:
        if not required:
            return {}
        raise InputError(f"the runner feeds one row, the program has {program.batch_size}; export without llm_runner")
    config = program.model.config.get_text_config(decoder=True)
    context = program.cache.max_length or getattr(config, "max_position_embeddings", None)
    if context is None and not required:
        return {}
    if context is None:
        raise InputError(
            "the cache holds any number of tokens and the config has no max_position_embeddings, so there is no "
            "context length to tell the runner; export without llm_runner"
        )
    metadata: dict[str, Any] = {
        "get_max_seq_len": program.methods["forward"].max_length,
        "get_max_context_len": context,
        "get_vocab_size": config.vocab_size,
        "use_kv_cache": True,
        "enable_dynamic_shape": True,
        "use_sdpa_with_kv_cache": False,
    }
    generation = program.model.generation_config
    if generation is not None and generation.bos_token_id is not None:
        metadata["get_bos_id"] = generation.bos_token_id
    if generation is not None and generation.eos_token_id is not None:
        ends = generation.eos_token_id
        metadata["get_eos_ids"] = list(ends) if isinstance(ends, (list, tuple)) else [ends]
    return metadata
