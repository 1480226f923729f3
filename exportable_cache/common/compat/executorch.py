"""Private names of executorch, seen in 1.4.1. Nothing of it is imported before an accessor is called.

| name | without it |
|---|---|
| `executorch.exir.passes._quant_patterns_and_replacements` | operators on 8-bit tables cannot be traced |
| `executorch.exir._serialize._program._get_extended_header` | segments of a `.pte` cannot be found |
| `executorch.exir._serialize._flatbuffer_program._patch_generated_flatbuffer_aliases` | the readers fail |
| `executorch.exir._serialize.generated.executorch_flatbuffer.Program` | delegates and segments cannot be listed |
| `executorch.exir._serialize._program.deserialize_pte_binary` | plans in a file cannot be read back |
| `executorch.extension.pybindings.portable_lib._get_operator_names` | a file that no runtime loads is written |
| `EdgeCompileConfig(_check_ir_validity=..., _skip_dim_order=...)` | operators of our own fail a check |
| `_op` of an operator of the edge dialect | an operator of ours is not recognised after lowering |
| `_tab` of a generated reader | the offset of a segment cannot be changed in place |
"""

from __future__ import annotations

from typing import Any


def register_quantized_operators() -> None:
    """Make `torch.ops.quantized_decomposed` known with all its operators."""
    import executorch.exir.passes._quant_patterns_and_replacements  # noqa: F401


def extended_header(data: bytes) -> Any | None:
    """Header of a `.pte`, from its first 64 bytes: where its segments begin; None of a file without segments."""
    from executorch.exir._serialize._program import _get_extended_header

    return _get_extended_header(data)


def flat_program(table: bytes | bytearray) -> Any:
    """Reader of the flatbuffer of a `.pte`."""
    from executorch.exir._serialize._flatbuffer_program import _patch_generated_flatbuffer_aliases
    from executorch.exir._serialize.generated.executorch_flatbuffer.Program import Program

    # The generated readers name modules where they need classes, until the serialiser's own reader has been here.
    _patch_generated_flatbuffer_aliases()
    return Program.GetRootAs(table)


def deserialized_program(data: bytes) -> Any:
    """The program of a `.pte`, as its schema's dataclasses."""
    from executorch.exir._serialize._program import deserialize_pte_binary

    return deserialize_pte_binary(data).program


def operator_names() -> set[str]:
    """Operators that the installed runtime has kernels for."""
    from executorch.extension.pybindings.portable_lib import _get_operator_names

    return set(_get_operator_names())


def edge_config(skip_dim_order: bool = False) -> Any:
    """A compile config whose edge dialect takes operators that are not of its own.

    Args:
        skip_dim_order: Keep the operators that copy and convert as they are.
    """
    from executorch.exir import EdgeCompileConfig

    return EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=skip_dim_order)


def operator_of(target: Any) -> Any:
    """The operator that one of the edge dialect wraps, or `target` itself."""
    return getattr(target, "_op", target)


def position_of_field(table: Any, field: int) -> int | None:
    """Where a field of a generated reader's table lies in the buffer, None where it has its default and is not stored.

    Args:
        table: The reader, such as a `DataSegment`.
        field: Offset of the field in the schema's table.
    """
    offset = table._tab.Offset(field)
    return table._tab.Pos + offset if offset else None
