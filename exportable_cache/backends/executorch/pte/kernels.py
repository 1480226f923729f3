"""Check that the runtime has every kernel that a program calls, by name and C++ signature."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....common.compat.executorch import operator_names, register_fused_operators, register_quantized_operators
from ....common.compat.torch import schema_of, schema_of_text
from ....errors import InputError, MissingDependencyError, UnsupportedModelError

if TYPE_CHECKING:
    from executorch.exir import ExecutorchProgramManager


#: Namespaces whose libraries are linked as a whole: ExecuTorch's `custom_ops` and the native kernels.
WHOLE_LIBRARIES = ("llama", "exportable_cache")
#: Operators of the runtime itself, on scalars.
_RUNTIME = ("executorch_prim::", "aten::sym_size.int", "aten::sym_numel", "aten::_local_scalar_dense")
#: Tables of operators and their kernels in the executorch package.
_TABLES = ("portable/functions.yaml", "quantized/quantized.yaml")
#: Operators that have an optimized kernel only, whose name adds the prefix `opt_`.
_ONLY_OPTIMIZED = {"_fft_c2r.out": "fft_c2r_out", "_fft_r2c.out": "fft_r2c_out", "linear.out": "linear_out"}
_VALUES = {
    "int": "int64_t",
    "float": "double",
    "bool": "bool",
    "str": "string_view",
    "ScalarType": "ScalarType",
    "MemoryFormat": "MemoryFormat",
    "Layout": "Layout",
    "Device": "Device",
    "List[int]": "IntArrayRef",
    "List[bool]": "ArrayRef<bool>",
    "List[float]": "ArrayRef<double>",
}
#: Types that are passed by reference.
_REFERENCES = {"Tensor": "Tensor", "number": "Scalar"}
_LISTS = {"List[Tensor]": "TensorList", "List[Optional[Tensor]]": "ArrayRef<optional<Tensor>>"}


@dataclass(frozen=True)
class KernelSignature:
    """C++ function of a kernel, in namespace `torch::executor::native`, without its context argument.

    Attributes:
        operator: Name in a program, such as "aten::add.out".
        kernel: Name of the function; an optimized kernel has the prefix `opt_`.
        arguments: C++ types, outputs last.
        outputs: Number of returned tensors; 0 for a kernel that writes to a list of them.
    """

    operator: str
    kernel: str
    arguments: tuple[str, ...]
    outputs: int


def is_in_runtime(operator: str) -> bool:
    """Return True if every program that links the runtime has the operator."""
    return operator.startswith(_RUNTIME)


def signatures_of(operators: Sequence[str]) -> list[KernelSignature]:
    """Return the signatures of the kernels for operators, sorted by name.

    Raises:
        InputError: If the installed executorch has no kernel for an operator.
        MissingDependencyError: If the installed executorch has no tables of its kernels.
    """
    wanted, known = sorted(set(operators)), _kernels()
    missing = [name for name in wanted if name not in known]
    if missing:
        raise InputError(
            f"the installed executorch has no kernel for {', '.join(missing)}; build with all kernels, and link a "
            "library that has these operators"
        )
    return [_signature(name, *known[name]) for name in wanted]


def _signature(operator: str, kernel: str, text: str | None) -> KernelSignature:
    schema = schema_of(operator) if text is None else schema_of_text(text)
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
    types = [_type(str(argument.real_type), out) for argument, out in zip(schema.arguments, written, strict=True)]
    return KernelSignature(operator, kernel, tuple(types), len(schema.returns))


def _type(kind: str, out: bool) -> str:
    if kind in _REFERENCES:
        return f"{_REFERENCES[kind]}&" if out else f"const {_REFERENCES[kind]}&"
    if kind in _LISTS:
        return _LISTS[kind]
    if kind.startswith("Optional["):
        inner = kind.removeprefix("Optional[").removesuffix("]")
        if inner in _REFERENCES:
            return f"const optional<{_REFERENCES[inner]}>&"
        return f"optional<{_VALUES[inner]}>"
    return _VALUES[kind]


@functools.cache
def _kernels() -> dict[str, tuple[str, str | None]]:
    """Return the kernel's name by operator, with the schema as text if torch has none."""
    found: dict[str, tuple[str, str | None]] = {}
    found |= {f"aten::{name}": (kernel, None) for name, kernel in _ONLY_OPTIMIZED.items()}
    for table in _TABLES:
        for entry in _table(table):
            text = entry.get("func")
            name = entry["op"] if text is None else text.split("(")[0]
            kernel = entry["kernels"][0]["kernel_name"].split("::")[-1]
            found[name if "::" in name else f"aten::{name}"] = (kernel, text)
    return found


def _table(name: str) -> list[dict[str, Any]]:
    import yaml

    spec = util.find_spec("executorch")
    folders = () if spec is None else spec.submodule_search_locations or ()
    path = next((path for folder in folders if (path := Path(folder, "kernels", name)).is_file()), None)
    if path is None:
        raise MissingDependencyError(
            f"the installed executorch has no kernels/{name}; pip install 'exportable-cache[executorch]'"
        )
    return yaml.safe_load(path.read_text(encoding="utf-8"))


register_fused_operators()
register_quantized_operators()


def check_kernels(lowered: ExecutorchProgramManager) -> None:
    """Refuse a program that calls an operator which is not delegated and has no kernel in the runtime.

    Raises:
        UnsupportedModelError: If there is such an operator; with all names.
        MissingDependencyError: If it is an operator of this package, which older compiled kernels lack.
    """
    called = {
        f"{operator.name}.{operator.overload}".rstrip(".")
        for plan in lowered.executorch_program.execution_plan
        for operator in plan.operators
    }
    missing = sorted(called - operator_names())
    if missing and all(name.startswith("exportable_cache::") for name in missing):
        raise MissingDependencyError(
            f"the compiled kernels are of an older release and lack {', '.join(missing)}; build them again with "
            "`exportable-cache native build`, or export with --recipe portable"
        )
    if missing:
        raise UnsupportedModelError(
            f"the ExecuTorch runtime has no kernel for {', '.join(missing)}; export for target 'pt2' instead"
        )
