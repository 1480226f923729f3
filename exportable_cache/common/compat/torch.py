"""Private names of torch, seen in 2.13.0.

| name | without it |
|---|---|
| `torch._check` | facts about symbolic sizes cannot be stated while a program is traced |
| `torch._subclasses.fake_tensor.FakeTensor` | a traced length is not told from a real one, and is read back to Python |
| `torch._subclasses.fake_tensor.FakeTensorMode` | `plan` refuses four architectures of encoder-decoders |
| `FakeTensorMode.cache_clear` of the same module | a process keeps the weights of all that it lowered |
| `torch._ops.OperatorBase`, `OpOverload` | types of operators in annotations; `Any` would do |
| `torch._C._aoti.AOTIModelPackageLoader`: `run`, `load_constants`, `get_constant_fqns` | no target `aoti` |
| `torch._export.serde.serialize.serialize` | no target `pt2` with several methods in a file |
| `torch.utils._python_dispatch._disable_current_modes` | nothing can be traced inside a pass over a graph |
| `torch.utils._pytree.tree_map` | results are cloned by a loop of one's own |
| `torch.utils._pytree.tree_flatten`, `tree_unflatten` | caches are not passed along as inputs and outputs |
| `torch._ops.OpOverload._schema` | inputs of operators that a file names cannot be told by position, nor writes found |
| `torch._C.parse_schema` | programs for a device hold kernels of every operator |
| `torch.ops.aten._reshape_copy` | networks of TensorRT have reshapes with sizes that it does not know |
| `torch.ops.aten._assert_tensor_metadata` | equal layers are lowered one by one |
| `torch._C._nn.linear`, `torch.ops.mkldnn._linear_pointwise` | linear layers are MKL's where it is slow |
| `torch.fx.experimental.symbolic_shapes.is_concrete_int` | some steps leave linear layers to oneDNN or MKL |
| `torch._dynamo.mark_dynamic`, `maybe_mark_dynamic`, `exc.TorchDynamoException` | each length of a prompt is a graph |
| `torch._inductor.list_mode_options`, `config.save_config_portable`, `load_config` | no compiled graphs on disk |
| `torch._dynamo.guards.CheckFunctionManager.UNSUPPORTED_SERIALIZATION_GUARD_TYPES` | the same |
| `torch.nn.Module._parameters`, `_buffers` | each step takes longer to find the tensors of its layers |
| `torch.fx.Graph._codegen` | a graph keeps the signature of the module that it was traced from |
| `torch._C._len_torch_dispatch_stack`, `torch.autograd._profiler_enabled` | who watches operators misses some |
| `torch._C._CudaDeviceProperties`, `torch._library.register_fake_class` | torch_tensorrt needs CUDA |

What is private about pytrees is in `exportable_cache/pytree/_torch_private.py`, beside the registry that it is a part
of. Modules that take long to import, `torch._dynamo` and `torch._inductor`, are imported where they are needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch._ops import OperatorBase, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ..patch import Patch, torch_patch

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_REGISTER = torch_patch(
    "_library",
    "register_fake_class",
    "it fails for classes of C++ that are not loaded",
    *("d86928da6e62332f", "c7b0ea0e13e83457"),
)
_SLOWLY = "it is slower for few rows than what this package has"
#: As models call them; written in C.
LINEAR_CALL = torch_patch("nn.functional", "linear", _SLOWLY, "1f4a94a62629969f")
ATTENTION_CALL = torch_patch("nn.functional", "scaled_dot_product_attention", _SLOWLY, "04fa2797b22091d5")
#: Functions of torch that are replaced for the time of a block.
PATCHES: tuple[Patch, ...] = (_REGISTER, LINEAR_CALL, ATTENTION_CALL)
#: States a fact about sizes: the object itself, which tracers know.
check = torch._check
#: What a trace leaves where a dtype was looked at.
RESHAPE_COPY = torch.ops.aten._reshape_copy.default
METADATA_ASSERTION = torch.ops.aten._assert_tensor_metadata.default
#: `torch.nn.functional.linear` as it runs.
LINEAR = torch._C._nn.linear

__all__ = ["FakeTensor", "OpOverload", "OperatorBase", "check", "tree_flatten", "tree_map", "tree_unflatten"]


def linear_by_onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear` of float32 on a CPU, without a gradient."""
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


def fixed_size(size: int | torch.SymInt) -> int | None:
    """A size that tracing has found to be one number, None of one that may be several."""
    if isinstance(size, int):
        return size
    from torch.fx.experimental.symbolic_shapes import is_concrete_int

    return int(size) if is_concrete_int(size) else None


def fake_tensors() -> AbstractContextManager[Any]:
    """Tensors made inside have shapes, dtypes and a device, and no values."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def load_machine_code(path: Path, name: str) -> Any:
    """One model of an AOTInductor package, for calls that wait for each other: `run(inputs)` gives a list of tensors.

    Raises:
        RuntimeError: If there is no such model, or it does not fit this torch.
    """
    return torch._C._aoti.AOTIModelPackageLoader(str(path), name, True, 1, -1)


def operator_arguments(operator: OpOverload) -> Sequence[Any]:
    """What an operator takes, in order: `name`, `type` and `kwarg_only` of each."""
    return operator._schema.arguments


def writes_in_place(operator: OpOverload) -> bool:
    """Whether an operator changes one of its arguments."""
    return operator._schema.is_mutable


def written_arguments(operator: OpOverload) -> Iterator[tuple[int, str]]:
    """Positions and names of the arguments that an operator changes."""
    for index, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield index, argument.name


def gives_views(operator: OpOverload) -> bool:
    """Whether a result may share memory with an argument."""
    return any(result.alias_info is not None for result in operator._schema.returns)


def schema_of(operator: str) -> Any:
    """Schema of an operator of torch's dispatcher by its name, such as "aten::add.out"."""
    library, name = operator.split("::")
    base, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, library), base), overload or "default")._schema


def schema_of_text(text: str) -> Any:
    """Schema that a text describes, such as "add.out(Tensor self, Tensor other, *, Tensor(a!) out) -> Tensor(a!)"."""
    return torch._C.parse_schema(text)


def serialized_program(program: ExportedProgram) -> dict[str, Any]:
    """A program as torch's schema has it: JSON, without weights, constants and sample inputs."""
    from torch._export.serde.serialize import serialize

    artifact = serialize(program, serialize_state_dict=False, serialize_constants=False, serialize_example_inputs=False)
    return json.loads(artifact.exported_program)


def without_modes() -> AbstractContextManager:
    """A block outside of every dispatch mode that is on, such as the fake mode of a pass."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def mark_dynamic(tensor: torch.Tensor, dim: int, lowest: int, highest: int) -> None:
    """Have the next compilation take a size for any from `lowest` to `highest`, or fail."""
    torch._dynamo.mark_dynamic(tensor, dim, min=lowest, max=highest)


def maybe_mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Have the next compilation take a size for any where it can."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def tracing_errors() -> tuple[type[Exception], ...]:
    """What TorchDynamo raises, also where a size is not as free as it is said to be."""
    from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

    return torch._dynamo.exc.TorchDynamoException, ConstraintViolationError


def mode_options(mode: str) -> dict[str, Any]:
    """Inductor's options that a mode of torch.compile stands for."""
    return torch._inductor.list_mode_options(mode)


def inductor_config() -> dict[str, Any]:
    """Inductor's settings, as far as they decide what a session compiles; those of the thread's context."""
    settings = torch._inductor.config.save_config_portable()
    # AOTInductor notes there what it compiled last.
    return {name: value for name, value in settings.items() if not name.startswith("aot_inductor.")}


def set_inductor_config(settings: dict[str, Any]) -> None:
    """Take over what `inductor_config` gave in another process."""
    torch._inductor.config.load_config(settings)


def unwritable_guards() -> frozenset[str]:
    """Types of guards that TorchDynamo cannot write to a file."""
    from torch._dynamo.guards import CheckFunctionManager

    return frozenset(CheckFunctionManager.UNSUPPORTED_SERIALIZATION_GUARD_TYPES)


def is_watched() -> bool:
    """Whether somebody looks at each operator of this thread."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch.autograd._profiler_enabled()


def module_tensors(module: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    """Where a module has its tensors by name. Its own `__getattr__` takes longer, for hundreds in each step."""
    return module._parameters, module._buffers, vars(module)


def reset_signature(graph: torch.fx.Graph) -> None:
    """Have a graph take its placeholders, in order, and give its outputs as they are."""
    graph._codegen = torch.fx.graph.CodeGen()


@contextmanager
def cuda_properties() -> Iterator[None]:
    """A block in which torch without CUDA names the class of a device's properties, which annotations ask for."""
    if hasattr(torch._C, "_CudaDeviceProperties"):
        yield
        return
    with mock.patch.object(torch._C, "_CudaDeviceProperties", object, create=True):
        yield


def without_fake_classes() -> AbstractContextManager:
    """A block in which descriptions of C++ classes are not registered: the classes are not there."""
    return _REGISTER.during(lambda register: lambda name: lambda described: described)


def forget_fake_results() -> None:
    """Let go of what operators gave on fake tensors, which torch remembers by their arguments: modules among them."""
    FakeTensorMode.cache_clear()
