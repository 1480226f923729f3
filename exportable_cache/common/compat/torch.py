"""Private names of torch, seen in 2.13.0.

| name | without it |
|---|---|
| `torch._check` | facts about symbolic sizes cannot be stated while a program is traced |
| `torch._subclasses.fake_tensor.FakeTensor` | a traced length is taken for a real one, and is read back to Python |
| `torch._subclasses.fake_tensor.FakeTensorMode` | `plan` refuses four architectures of encoder-decoders |
| `FakeTensorMode.cache_clear` of the same module | a process keeps the weights of all that it lowered |
| `torch._ops.OperatorBase`, `OpOverload` | types of operators in annotations; `Any` would do |
| `torch._C._aoti.AOTIModelPackageLoader`: `run`, `load_constants`, `get_constant_fqns` | no target `aoti` |
| `torch._export.serde.serialize.serialize` | no target `pt2` with several methods in a file |
| `torch.utils._python_dispatch._disable_current_modes` | nothing can be traced inside a pass over a graph |
| `torch.utils._pytree.tree_map` | a loop has to clone results |
| `torch.utils._pytree.tree_flatten`, `tree_unflatten` | caches are not passed along as inputs and outputs |
| `torch._ops.OpOverload._schema` | inputs of operators that a file names have no positions, and writes are not found |
| `torch._C.parse_schema` | programs for a device hold kernels of every operator |
| `torch.ops.aten._reshape_copy` | TensorRT networks have reshapes of unknown sizes |
| `torch.ops.aten._to_copy` | rotary tables keep both halves where they are converted between two dtypes |
| `torch.ops.aten._assert_tensor_metadata` | equal layers are lowered separately |
| `torch._C._nn.linear`, `torch.ops.mkldnn._linear_pointwise` | linear layers use MKL even if it is slow |
| `torch.fx.experimental.symbolic_shapes.is_concrete_int` | some steps leave linear layers to oneDNN or MKL |
| `statically_known_true` of the same module | prompts do not compile for a GPU, because of guards on their length |
| `torch._dynamo.mark_dynamic`, `maybe_mark_dynamic`, `exc.TorchDynamoException` | each length of a prompt is a graph |
| `torch._inductor.list_mode_options`, `config.save_config_portable`, `load_config` | no compiled graphs on disk |
| `torch._dynamo.guards.CheckFunctionManager.UNSUPPORTED_SERIALIZATION_GUARD_TYPES` | the same |
| `torch._dynamo.config.enable_aot_compile` | torch 2.11 keeps no compiled graphs |
| `torch._inductor.cudagraph_trees.local`, `torch._C._stash_obj_in_tls` | torch 2.11 captures in one thread only |
| `torch.nn.Module._parameters`, `_buffers` | each step takes longer to find the tensors of its layers |
| `torch.nn.Module._modules` | a step as a CUDA graph does not notice that a module was replaced |
| `torch.nn.Module._forward_hooks`, `_forward_pre_hooks` | linear layers with hooks are joined, and lose their hooks |
| `torch.nn.Module._backward_hooks`, `_backward_pre_hooks` | the same |
| `torch.fx.Graph._codegen` | a graph keeps the signature of the module that it was traced from |
| `torch.compiler.get_default_backend` | public, but torch 2.11 and 2.12 lack it, where no other backend can be set |
| `torch._C._CudaDeviceProperties`, `torch._library.register_fake_class` | torch_tensorrt needs CUDA |

Private names of pytrees are in `exportable_cache/pytree/_torch_private.py`, next to the registry. `torch._dynamo` and
`torch._inductor` take long to import, so functions import them when they are called.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import defaultdict
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
_SLOWLY = "it is slower for few rows than this package's operators"
#: Functions that models call; they are written in C.
LINEAR_CALL = torch_patch("nn.functional", "linear", _SLOWLY, "1f4a94a62629969f")
ATTENTION_CALL = torch_patch("nn.functional", "scaled_dot_product_attention", _SLOWLY, "04fa2797b22091d5")
#: Functions of torch that are replaced within a block.
PATCHES: tuple[Patch, ...] = (_REGISTER, LINEAR_CALL, ATTENTION_CALL)
#: `torch._check`, which states a fact about sizes. Tracers recognise the object itself.
check = torch._check
#: Operators that a trace inserts.
RESHAPE_COPY = torch.ops.aten._reshape_copy.default
TO_COPY = torch.ops.aten._to_copy.default
METADATA_ASSERTION = torch.ops.aten._assert_tensor_metadata.default
#: The function that `torch.nn.functional.linear` calls.
LINEAR = torch._C._nn.linear

__all__ = ["FakeTensor", "OpOverload", "OperatorBase", "check", "tree_flatten", "tree_map", "tree_unflatten"]


def default_backend() -> Any:
    """Return the backend of `torch.compile` without an argument."""
    # torch 2.11 has no such setting.
    return getattr(torch.compiler, "get_default_backend", lambda: "inductor")()


def linear_by_onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `torch.nn.functional.linear` with oneDNN, for float32 on a CPU without gradients."""
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


def fixed_size(size: int | torch.SymInt) -> int | None:
    """Return a size as an int if tracing knows it to be constant, otherwise None."""
    if isinstance(size, int):
        return size
    from torch.fx.experimental.symbolic_shapes import is_concrete_int

    return int(size) if is_concrete_int(size) else None


def has_known_remainder(size: int | torch.SymInt, divisor: int) -> bool:
    """Return True if the remainder of a size is the same for all sizes that a graph serves, without a guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return any(statically_known_true(size % divisor == remainder) for remainder in range(divisor))


def fake_tensors() -> AbstractContextManager[Any]:
    """Return a mode in which new tensors have shapes, dtypes and a device, but no values."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def load_machine_code(path: Path, name: str) -> Any:
    """Load one model of an AOTInductor package.

    `run(inputs)` of the result returns a list of tensors; calls are serialized.

    Raises:
        RuntimeError: If the package has no such model, or does not fit this torch.
    """
    return torch._C._aoti.AOTIModelPackageLoader(str(path), name, True, 1, -1)


def operator_arguments(operator: OpOverload) -> Sequence[Any]:
    """Return the arguments of an operator in order, each with `name`, `type` and `kwarg_only`."""
    return operator._schema.arguments


def writes_in_place(operator: OpOverload) -> bool:
    """Return True if an operator changes one of its arguments."""
    return operator._schema.is_mutable


def written_arguments(operator: OpOverload) -> Iterator[tuple[int, str]]:
    """Yield positions and names of the arguments that an operator changes."""
    for index, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield index, argument.name


def gives_views(operator: OpOverload) -> bool:
    """Return True if a result may share memory with an argument."""
    return any(result.alias_info is not None for result in operator._schema.returns)


def schema_of(operator: str) -> Any:
    """Return the schema of an operator by its dispatcher name, such as "aten::add.out"."""
    library, name = operator.split("::")
    base, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, library), base), overload or "default")._schema


def schema_of_text(text: str) -> Any:
    """Parse a schema, such as "add.out(Tensor self, Tensor other, *, Tensor(a!) out) -> Tensor(a!)"."""
    return torch._C.parse_schema(text)


def serialized_program(program: ExportedProgram) -> dict[str, Any]:
    """Return a program as JSON in torch's schema, without weights, constants and sample inputs."""
    from torch._export.serde.serialize import serialize

    artifact = serialize(program, serialize_state_dict=False, serialize_constants=False, serialize_example_inputs=False)
    return json.loads(artifact.exported_program)


def without_modes() -> AbstractContextManager:
    """Run a block outside all dispatch modes, such as the fake mode of a pass."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def mark_dynamic(tensor: torch.Tensor, dim: int, lowest: int, highest: int) -> None:
    """Mark a size as dynamic within `lowest` to `highest`; compiling fails if it cannot be."""
    torch._dynamo.mark_dynamic(tensor, dim, min=lowest, max=highest)


def maybe_mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Mark a size as dynamic if compiling supports it."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def tracing_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that TorchDynamo raises, including those for sizes that cannot be dynamic."""
    from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

    return torch._dynamo.exc.TorchDynamoException, ConstraintViolationError


def mode_options(mode: str) -> dict[str, Any]:
    """Return the Inductor options of a mode of torch.compile."""
    return torch._inductor.list_mode_options(mode)


def allow_cuda_graphs() -> None:
    """Let this thread capture CUDA graphs. Torch 2.11 lets only the thread that has imported `cudagraph_trees`."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or hasattr(trees.local, "tree_manager_containers"):
        return
    if not torch._C._is_key_in_tls("tree_manager_containers"):
        trees.local.tree_manager_containers = {}
        trees.local.tree_manager_locks = defaultdict(threading.Lock)
        for name in ("tree_manager_containers", "tree_manager_locks"):
            torch._C._stash_obj_in_tls(name, getattr(trees.local, name))


def keepable_graphs() -> AbstractContextManager[Any]:
    """Return a context in which graphs of `torch.compile` can be kept, as is the default after torch 2.11."""
    return torch._dynamo.config.patch(enable_aot_compile=True)


def inductor_config() -> dict[str, Any]:
    """Return the Inductor settings of this thread that affect what a session compiles."""
    settings = torch._inductor.config.save_config_portable()
    # AOTInductor stores its last compilation there.
    return {name: value for name, value in settings.items() if not name.startswith("aot_inductor.")}


def set_inductor_config(settings: dict[str, Any]) -> None:
    """Apply settings that `inductor_config` returned in another process."""
    torch._inductor.config.load_config(settings)


def unwritable_guards() -> frozenset[str]:
    """Return the types of guards that TorchDynamo cannot serialize."""
    from torch._dynamo.guards import CheckFunctionManager

    return frozenset(CheckFunctionManager.UNSUPPORTED_SERIALIZATION_GUARD_TYPES)


def module_tensors(module: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    """Return a module's dicts of tensors by name, because `__getattr__` is slow for hundreds of tensors per step."""
    return module._parameters, module._buffers, vars(module)


def module_children(module: torch.nn.Module) -> dict[str, Any]:
    """Return a module's dict of modules by name."""
    return module._modules


def has_hooks(module: torch.nn.Module) -> bool:
    """Return True if a hook is called before or after the forward or the backward of `module`."""
    forward, backward = module._forward_hooks or module._forward_pre_hooks, module._backward_hooks
    return bool(forward or backward or module._backward_pre_hooks)


def reset_signature(graph: torch.fx.Graph) -> None:
    """Reset a graph's code generator, so that it takes its placeholders in order and returns its outputs unchanged."""
    graph._codegen = torch.fx.graph.CodeGen()


@contextmanager
def cuda_properties() -> Iterator[None]:
    """Define the class of CUDA device properties within a block, for annotations in builds of torch without CUDA."""
    if hasattr(torch._C, "_CudaDeviceProperties"):
        yield
        return
    with mock.patch.object(torch._C, "_CudaDeviceProperties", object, create=True):
        yield


def without_fake_classes() -> AbstractContextManager:
    """Skip the registration of fake classes within a block, because their C++ classes are missing."""
    return _REGISTER.during(lambda register: lambda name: lambda described: described)


def forget_fake_results() -> None:
    """Clear torch's cache of operator results on fake tensors, which keeps their arguments alive, modules included."""
    FakeTensorMode.cache_clear()
