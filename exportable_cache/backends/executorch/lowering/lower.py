"""Lower exported programs to one ExecuTorch program and write it to a `.pte`."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from executorch import exir
from executorch.exir import ExecutorchBackendConfig
from executorch.exir.passes import MemoryPlanningPass
from torch.export import ExportedProgram

from ....common.compat.executorch import edge_config, release_program
from ....common.fs.tensor_files import Scratch
from ....common.process.tuning import give_back_heap
from ....errors import ExportableCacheError, InputError, UnsupportedModelError, describe_trace_error
from ..dedup.delegates import ClonedSegments
from ..delegates.checks import check_cache, check_methods, delegated_calls
from ..delegates.table import DELEGATES
from ..graph_edits import drop_provenance
from ..native.experts import experts_to_native
from ..native.linears import linears_to_native, tables_to_native, tied_tables_to_native
from ..native.operators import round_attention
from ..pte.kernels import check_kernels
from ..pte.rewrite import make_largest_first, write_pte
from ..quantized import FoldedLinears, UnfoldLinears, fuse_quantized_embeddings
from .insertions import replace_placeholders
from .patches import patch_exporter
from .rewrites import (
    RemoveNeedlessCopies,
    decompose_tanh_gelus,
    fold_constants,
    indices_to_int64,
    masked_writes_to_where,
    means_to_linear,
    parts_to_weights,
    patches_to_linear,
    rotations_to_linear,
    state_of,
)
from .steps import steps_to_native

if TYPE_CHECKING:
    from executorch.exir import (
        EdgeProgramManager,
        ExecutorchProgramManager,
    )

    from ....program.program import Program


# Bytes of a processor's cache line.
_ALIGNMENT = 64

Rewrite = Callable[[ExportedProgram], ExportedProgram]

#: Passes for every delegate, in order: before constants are folded, and after.
BEFORE_FOLDING: tuple[Rewrite, ...] = (patches_to_linear,)
REWRITES: tuple[Rewrite, ...] = (masked_writes_to_where, decompose_tanh_gelus, parts_to_weights)
#: XNNPACK only: other compilers take means and slices, and coremltools 9.0 fails on linear layers of one output.
XNNPACK_REWRITES: tuple[Rewrite, ...] = (means_to_linear, rotations_to_linear)


# Passes differentiate branches otherwise, which fails if these read a position.
@torch.no_grad()
def to_edge(
    programs: Mapping[str, ExportedProgram],
    constant_methods: Mapping[str, Any] | None = None,
    delegate: str = "xnnpack",
    native: bool = False,
    rounded: bool = False,
    scratch: Scratch | None = None,
) -> EdgeProgramManager:
    """Partition for a delegate, all methods together, so that weights they share are stored once.

    Args:
        programs: Exported programs by method name.
        constant_methods: Values that methods of the file return, by name.
        delegate: A key of `DELEGATES`.
        native: Use native operators for linear layers, and for embedding tables that 16 bits hold without loss.
        rounded: Round the inputs of native layers with bfloat16 weights, and of attention, to bfloat16.
        scratch: Storage of large packed weights in files; None for memory.
    """
    patch_exporter()
    segments, facts = ClonedSegments(_segment_to_edge), DELEGATES[delegate]
    state = state_of(programs.values())
    rewrites: tuple[Rewrite, ...] = (
        indices_to_int64,
        *((partial(tied_tables_to_native, scratch=scratch),) if native else ()),
        # Delegates with their own schemes take dequantized tables.
        *(() if facts.schemes else (fuse_quantized_embeddings,)),
        *BEFORE_FOLDING,
        partial(fold_constants, state=state),
        # First, because later passes decompose activations.
        *((steps_to_native,) if native else ()),
        *REWRITES,
    )
    to_native: tuple[Rewrite, ...] = (
        partial(tables_to_native, scratch=scratch),
        partial(linears_to_native, rounded=rounded, scratch=scratch),
        partial(experts_to_native, scratch=scratch),
    )
    to_native = (*to_native, *((round_attention,) if rounded else ()))
    rewrites = (*rewrites, *(to_native if native else ()))
    replace_segments: Rewrite = partial(segments.replace, state=state)
    rewrites = (*rewrites, *((replace_segments, *XNNPACK_REWRITES) if delegate == "xnnpack" else ()))
    rewrites = (*rewrites, *getattr(facts.module(), "rewrites", tuple)())
    rewritten = {name: _rewritten(program, rewrites) for name, program in programs.items()}
    edge = replace_placeholders(_partitioned(rewritten, delegate, constant_methods), segments)
    for name in programs:
        restore_sizes(edge.exported_program(name))
        drop_provenance(edge.exported_program(name).graph_module)
    return edge


def _segment_to_edge(program: ExportedProgram) -> ExportedProgram:
    edge = _partitioned({"forward": _rewritten(program, XNNPACK_REWRITES)}, "xnnpack")
    return edge.exported_program("forward")


def _rewritten(program: ExportedProgram, rewrites: Sequence[Rewrite]) -> ExportedProgram:
    rewritten = reduce(lambda rewritten, rewrite: rewrite(rewritten), rewrites, program)
    drop_provenance(rewritten.graph_module)
    return rewritten


def _partitioned(
    programs: dict[str, ExportedProgram], delegate: str, constant_methods: Mapping[str, Any] | None = None
) -> EdgeProgramManager:
    module = DELEGATES[delegate].module()
    partitioner, methods = module.partitioner(), dict(constant_methods or {})
    passes = [UnfoldLinears(), RemoveNeedlessCopies()] if delegate == "xnnpack" else getattr(module, "passes", list)()
    kept = partitioner.kept_operators(programs.values()) if delegate == "xnnpack" else None
    # No validity check, because cache writes are not core operators; no dim orders, because these would copy the cache.
    # TOSA's partitioner takes copies with dim orders only, and its programs have no cache.
    config = edge_config(skip_dim_order=delegate != "tosa", kept=kept or ())
    if kept is None:
        edge = exir.to_edge_transform_and_lower(
            programs,
            transform_passes=[drop_provenance, *passes],
            partitioner=[partitioner],
            compile_config=config,
            constant_methods=methods,
        )
    else:
        # Equivalent, with one decomposition instead of three, because the kept operators are known.
        edge = exir.to_edge(programs, methods, config).transform([drop_provenance, *passes])
        edge = edge.to_backend(partitioner)
    for name in programs:
        drop_provenance(edge.exported_program(name).graph_module)
    return edge


def restore_sizes(program: ExportedProgram) -> None:
    """Restore the ranges that the program states for the sizes of its inputs, in place.

    Passes run operators on fake tensors. An operator that chooses a kernel by the amount of work, as convolutions do,
    narrows the range to sizes with the same choice. Memory is planned for the largest size, and the runtime then
    refuses longer inputs.
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
    """Plan memory and serialize.

    `share_mutable_buffers` makes the methods share one cache; otherwise the second one reads garbage.
    `run_reinplace_pass` keeps cache writes in place; otherwise every write copies the whole buffer out and back.
    """
    return edge.to_executorch(
        ExecutorchBackendConfig(
            memory_planning_pass=MemoryPlanningPass(
                alloc_graph_input=True, alloc_graph_output=True, share_mutable_buffers=True
            ),
            run_reinplace_pass=True,
            # The names by which sessions find the cache, to save and copy it.
            emit_mutable_buffer_names=True,
            # Native kernels read vectors, and a vector across two cache lines takes two reads.
            constant_tensor_alignment=_ALIGNMENT,
        )
    )


def lower_programs(
    programs: Mapping[str, ExportedProgram],
    constant_methods: Mapping[str, Any] | None = None,
    delegate: str = "xnnpack",
    native: bool = False,
    rounded: bool = False,
    scratch: Scratch | None = None,
) -> ExecutorchProgramManager:
    """Call `to_edge`, then `to_program`."""
    return to_program(to_edge(programs, constant_methods, delegate, native, rounded, scratch))


def write_program(
    program: Program,
    path: Path,
    delegate: str = "xnnpack",
    for_llm_runner: bool = False,
    compute: str | None = None,
    allow_partial: bool = False,
) -> str:
    """Lower a program for a delegate and write it.

    Args:
        program: Program to lower.
        path: File to write.
        delegate: A key of `DELEGATES`.
        for_llm_runner: Require what ExecuTorch's `TextLLMRunner` reads.
        compute: None for ExecuTorch's operators for linear layers and embedding tables. Otherwise native ones are used,
            and "bfloat16" rounds the inputs of layers with bfloat16 weights, and of attention, to bfloat16.
        allow_partial: See `check_cache`.

    Returns:
        Description of the file's contents for people.

    Raises:
        UnsupportedModelError: If ExecuTorch cannot lower the model, or lacks a kernel for one of its operators.
    """
    facts = DELEGATES[delegate]
    check_methods(facts, program)
    # Packed weights take two bytes each in 16 bits, and at most one if they are quantized.
    sizes = (weight.numel() * (2 if weight.is_floating_point() else 1) for weight in program.model.parameters())
    scratch = None if compute is None else Scratch.for_weights(path.parent, sum(sizes))
    lowered = _lowered(program, delegate, for_llm_runner, compute is not None, compute == "bfloat16", scratch)
    holds = f"methods {', '.join(program.methods)}, weights, one cache"
    if delegate != "xnnpack":
        check_cache(facts, program, lowered, allow_partial)
        calls = ", ".join(f"{count} in {name}" for name, count in delegated_calls(lowered).items())
        holds += f"; calls of {facts.backend_id}: {calls}"
    write_lowered(lowered, path)
    del lowered
    # Graphs and their nodes are reference cycles.
    gc.collect()
    give_back_heap()
    return holds


def _lowered(
    program: Program, delegate: str, for_llm_runner: bool, native: bool, rounded: bool, scratch: Scratch | None
) -> ExecutorchProgramManager:
    with warnings.catch_warnings():
        # Deprecations inside executorch, hundreds per export, which callers cannot change.
        warnings.simplefilter("ignore", FutureWarning)
        with FoldedLinears(program.model) if delegate == "xnnpack" else nullcontext():
            exported = {name: program.export(name) for name in program.methods}
        metadata = runner_metadata(program, required=for_llm_runner) if "forward" in exported else None
        what = f"{type(program.model).__name__} cannot be lowered for ExecuTorch"
        with refusing(what, "export it for target 'pt2' instead"):
            lowered = lower_programs(exported, metadata, delegate, native, rounded, scratch)
    check_kernels(lowered)
    return lowered


@contextmanager
def refusing(what: str, remedy: str) -> Iterator[None]:
    """Refuse a model whose lowering fails in this block, because passes and compilers raise errors of any class.

    Raises:
        UnsupportedModelError: If it does, with the reason between the two texts.
    """
    try:
        yield
    except ExportableCacheError:
        raise
    except Exception as error:
        raise UnsupportedModelError(f"{what} ({describe_trace_error(error)}); {remedy}") from error


def write_lowered(lowered: ExecutorchProgramManager, path: Path) -> None:
    """Write a lowered program to a `.pte`, and release its memory."""
    write_pte(lowered, path)
    make_largest_first(path)
    release_program(lowered)


def runner_metadata(program: Program, required: bool = True) -> dict[str, Any]:
    """Return the constant methods that `TextLLMRunner` reads (extension/llm/runner/constants.h of ExecuTorch 1.4).

    `get_max_seq_len` is the longest prompt chunk, `get_max_context_len` the capacity of the cache. Ids that the model
    does not state are left to the tokenizer.

    Args:
        program: Program with a method `forward`.
        required: Refuse a program that the runner would reject; otherwise such a program gets no metadata.

    Raises:
        InputError: If it is required, and `forward` has other inputs, or the batch size is not 1, or neither the cache
            nor the model limits the context length.
    """
    taken = program.methods["forward"].input_names
    if taken != ("input_ids", "input_pos"):
        if not required:
            return {}
        raise InputError(
            f"llm_runner needs forward(input_ids, input_pos), got inputs {', '.join(taken)}; export without llm_runner"
        )
    if program.batch_size != 1:
        if not required:
            return {}
        raise InputError(f"batch_size must be 1 for llm_runner, got {program.batch_size}; export without llm_runner")
    config = program.model.config.get_text_config(decoder=True)
    context = program.cache.max_length or getattr(config, "max_position_embeddings", None)
    if context is None and not required:
        return {}
    if context is None:
        raise InputError(
            "llm_runner needs a context length, but the cache is unlimited and the config has no "
            "max_position_embeddings; export without llm_runner"
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
