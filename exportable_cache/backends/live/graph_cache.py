"""Compiled graphs: their keys, the tensors that they read without taking them as inputs, and their folder on disk.

A later process loads kept graphs instead of tracing and compiling.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
import io
import json
import logging
import os
import platform
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers

from ...common.compat.torch import default_backend, inductor_config, keepable_graphs, module_tensors, unwritable_guards
from ...common.devices import kind_of_gpu
from ...common.fs.files import atomic_path, clear_partials
from ...common.fs.user_files import is_user_file, sealed, unsealed, user_folder, user_key
from ...common.native.machine_code import instructions, processor_name
from ...common.process.tuning import few_collections
from ...common.tensors import TensorSpec, kind_of_tensor
from ...common.version import __version__
from ...generation.loop import Choice, ChoosingSteps
from ..base import GRAPH_CACHE_MB
from .ops import NATIVE_OPERATORS

if TYPE_CHECKING:
    from torch import nn

    from ...models.cache_factory import ExportableCache
    from ...parallel.ranks import Ranks
    from ...program.methods import ProgramMethod


class OutdatedGraph(Exception):
    """A guard of a loaded graph fails."""

    def __init__(self) -> None:
        super().__init__("the model or torch's settings have changed since a graph was compiled")


#: Method name of a graph that chooses tokens and runs no model.
CHOICE = "choice"


class StepKey(NamedTuple):
    """A requested call.

    Attributes:
        method: Name of the method, or `CHOICE`.
        greedy, penalised: How the graph chooses tokens, see `Choice`; None if it returns logits.
        steps: Number of decode steps in the graph.
    """

    method: str
    greedy: bool | None = None
    penalised: bool | None = None
    steps: int = 1


class GraphKey(NamedTuple):
    """The key of a graph among those of one runner.

    Attributes:
        step: The call, with the name of the method that is compiled.
        is_shared: True if the graph serves several read lengths.
        ones: Dynamic sizes that are 1. They are part of the key because TorchDynamo specializes on 1.
    """

    step: StepKey
    is_shared: bool = False
    ones: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ChoiceMethod:
    """A choice of tokens, in the form of a method: all sizes are fixed, and settings are tensors."""

    greedy: bool
    penalised: bool
    name: str = "choice"
    is_step: bool = True
    inputs: tuple[TensorSpec, ...] = ()
    dynamic_sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Graph:
    """A call of a compiled graph.

    Attributes:
        method: The method that is compiled.
        module: The module that is compiled.
        key: The graph's key.
        arguments: The inputs, with dynamic sizes marked.
        requested: The call as it was requested: its method may be another one that `method` serves as well.
    """

    method: ProgramMethod | ChoiceMethod
    module: torch.nn.Module
    key: GraphKey
    arguments: list[torch.Tensor]
    requested: StepKey

    @property
    def name(self) -> str:
        """The graph's name among those of its method, equal in all processes."""
        step = self.key.step
        return f"{step.greedy} {step.penalised} {step.steps} {sorted(self.key.ones)}"


def choice_graph(choice: Choice, inputs: list[torch.Tensor]) -> Graph:
    """Return the graph of a choice without a step."""
    step = StepKey(CHOICE, choice.greedy, choice.penalised)
    return Graph(ChoiceMethod(choice.greedy, choice.penalised), choice, GraphKey(step), inputs, step)


def choosing(module: torch.nn.Module, step: StepKey, ranks: Ranks | None = None) -> torch.nn.Module:
    """Return a step followed by the choice of tokens that `step` asks for, which is rank 0's on all ranks."""
    if step.greedy is None or step.penalised is None:
        return module
    return ChoosingSteps(
        module, step.greedy, step.penalised, step.steps, None if ranks is None else ranks.of_first_in_graph
    )


# -- Bound tensors. TorchDynamo takes 0.1 s for the inputs of one layer, and each input has a guard, which costs time at
# load and in every step. Copies of a traced layer avoid both: the graph looks their tensors up in the model and the
# cache, and compares them with what it was compiled for.


class BoundTensor(NamedTuple):
    """A tensor of a layer that a graph looks up, described independently of the process.

    Attributes:
        module: Name of the module in the model, None for a tensor of the cache.
        layer: Index of the layer in the cache.
        name: Name of the tensor in the module or the cache layer.
        kind: See `kind_of_tensor`.
    """

    module: str | None
    layer: int
    name: str
    kind: tuple[str, ...]


_owners: ContextVar[tuple[nn.Module, ExportableCache]] = ContextVar("_owners")


@contextmanager
def binding_tensors(model: nn.Module, cache: ExportableCache) -> Iterator[None]:
    """Look up the tensors of graphs that are loaded in this block in `model` and `cache`."""
    token = _owners.set((model, cache))
    try:
        yield
    finally:
        _owners.reset(token)


class BoundTensors:
    """The bound tensors of one graph, in the model and cache of `binding_tensors`.

    Raises:
        OutdatedGraph: If a tensor is missing, or of another kind.
    """

    def __init__(self, specs: Sequence[BoundTensor]) -> None:
        self.specs = tuple(specs)
        self._found: list[tuple[dict[str, Any], str, tuple[Any, ...]]] = []
        if not self.specs:
            return
        model, cache = _owners.get()
        modules = dict(model.named_modules(remove_duplicate=False))
        for spec in self.specs:
            if spec.module is None:
                holder = vars(cache.layers[spec.layer])
            else:
                module = modules.get(spec.module)
                holders = () if module is None else module_tensors(module)
                holder = next((one for one in holders if spec.name in one), {})
            tensor = holder.get(spec.name)
            if not isinstance(tensor, torch.Tensor) or tuple(kind_of_tensor(tensor)) != spec.kind:
                raise OutdatedGraph
            self._found.append((holder, spec.name, _form(tensor)))

    def tensors(self) -> list[torch.Tensor]:
        """Return the current tensors.

        Raises:
            OutdatedGraph: If one has changed its class, dtype, shape or strides.
        """
        found = []
        for holder, name, form in self._found:
            tensor = holder.get(name)
            if tensor is None or _form(tensor) != form:
                raise OutdatedGraph
            found.append(tensor)
        return found


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return type(tensor), tensor.dtype, tensor.shape, tensor.stride()


log = logging.getLogger(__name__)

#: Suffix of a graph's file.
GRAPH = ".graph"
_MAIN, _PLAIN = "graph", b"plain"
_LIBRARY = re.compile(r"\w+/[\w.]+\.so")


class GraphCache:
    """Compiled steps of one model over one cache layout, one file each.

    torch's own cache keeps generated code, but a later process still traces every graph. This one keeps whole graphs
    (`aot_compile` of torch.compile, see `torch.compiler.load_compiled_function`), without weights. A file is used only
    if versions, processor, torch's settings, the model's structure and the cache's layout are those it was compiled
    for, if the source of every function in the graph is unchanged, and if TorchDynamo's guards hold. Otherwise the step
    is compiled again and the file replaced. Like torch's own, the files are pickled, and loading them runs code. So a
    folder that others can write to is refused, and a file that belongs to another user or was not signed with this
    user's key is not read.

    Args:
        folder: The folder, created when the first graph is kept.
        model: In eval mode, with its attention implementation set.
        cache: The cache that the steps write.
        limit: Size limit in megabytes. Above it the least recently used graphs of any model are deleted, except those
            that this object has kept or loaded.

    Raises:
        InputError: If users other than this one and root can write to the folder or to one above it, or if there is no
            key, see `user_key`.
    """

    def __init__(
        self, folder: str | Path, model: nn.Module, cache: ExportableCache, limit: int = GRAPH_CACHE_MB
    ) -> None:
        self.folder = user_folder(Path(folder))
        self._owners = model, cache
        self._key = user_key()
        self._limit = limit * 10**6
        self._used: set[Path] = set()
        # Each file contains all of these, because graphs share regions.
        self._libraries: set[Path] = set()
        #: Numbers of graphs loaded from the folder and of graphs compiled.
        self.loaded, self.compiled = 0, 0
        #: Reason why the newest graph was not kept, "" if it was.
        self.last_error = ""
        self._structure = _digest([*_settings(), *_structure(model, cache)])

    @functools.cached_property
    def _identity(self) -> str:
        # Computed late because it imports the compiler, which takes seconds.
        return self._structure + _digest([inductor_config()])

    def get(
        self,
        key: str,
        step: Callable[..., Any],
        external: dict[str, nn.Module],
        inputs: Sequence[torch.Tensor],
        **options: Any,
    ) -> Callable[..., Any] | None:
        """Return a step from the folder, or compile and keep it. Return None if it cannot be compiled in that form.

        Args:
            key: Name of the step among those of this model and cache.
            step: The function to compile.
            external: Modules that `step` closes over, by name. They are not written.
            inputs: Example inputs with dynamic sizes marked.
            **options: Options of torch.compile.

        Raises:
            InputError: If other users can write to Inductor's folder, from which machine code is loaded.
        """
        self.last_error = ""
        call = self.load(key, step, external, inputs)
        if call is not None:
            return call
        # Imported here because it imports the compiler, which takes seconds.
        from ...common.compat import torch_compile as private

        user_folder(private.code_folder())
        if not self._libraries:
            private.forget_processor()
        by_layers = "backend" in options
        options["options"] = {**(options.get("options") or {}), "guard_filter_fn": _keepable}
        try:
            with (
                private.sources_once(),
                private.nameless_methods_omitted(),
                private.libraries_recorded(self._libraries),
                binding_tensors(*self._owners),
                few_collections(),
            ):
                call = self._compiled(step, inputs, options)
        except Exception as error:  # tensor subclasses and backends that cannot be serialized raise various errors
            self._not_kept(key, error)
            return None
        self.compiled += 1
        try:
            user_folder(self.folder, make=True)
            with atomic_path(self._path(key)) as temporary:
                call.save_compiled_function(str(temporary), external_data=external)
                plainly = not by_layers or not private.takes_short_cuts()
                written = packed(temporary.read_bytes(), self._libraries, private.code_folder(), plainly)
                temporary.write_bytes(sealed(written, self._key, self._path(key).name))
            self._used.add(self._path(key))
            self._trim()
        except (
            Exception
        ) as error:  # a full disk, or something in the graph that cannot be pickled: it runs all the same
            self._not_kept(key, error)
        return call

    def _compiled(self, step: Callable[..., Any], inputs: Sequence[torch.Tensor], options: dict[str, Any]) -> Any:
        # Imported here because it imports the compiler, which takes seconds.
        from ...common.compat.torch_compile import own_buffers

        def compiled() -> Any:
            # Copied because torch.compile removes some entries.
            copied = {**options, "options": dict(options["options"])}
            with own_buffers(), keepable_graphs() if "backend" not in options else contextlib.nullcontext():
                wrapped: Any = torch.compile(step, fullgraph=True, **copied)
                return wrapped.aot_compile((tuple(inputs), {}))

        equal = getattr(options.get("backend"), "equal", None)
        if equal is not None and equal.kinds:
            try:
                with equal.tracing_few():
                    return compiled()
            except Exception as error:  # TorchDynamo wraps `CloneError` in errors of its own
                log.info("tracing every layer: %s", error)
        return compiled()

    def load(
        self, key: str, step: Callable[..., Any], external: dict[str, nn.Module], inputs: Sequence[torch.Tensor]
    ) -> Callable[..., Any] | None:
        """Return a step from the folder, or None. See `get`."""
        # Copies carry no marks, like the inputs of later calls.
        call = self._load(self._path(key), step, external, [tensor.clone() for tensor in inputs])
        if call is not None:
            self.loaded += 1
            self._used.add(self._path(key))
            with contextlib.suppress(OSError):  # deleted by another process
                os.utime(self._path(key))
        return call

    def _trim(self) -> None:
        """Delete the least recently used graphs.

        Other processes may do so at the same time, or be about to read: a process that finds no file compiles.
        """
        clear_partials(self.folder)
        found = []
        for path in self.folder.glob(f"*{GRAPH}"):
            with contextlib.suppress(OSError):
                found.append((path.stat().st_mtime_ns, path.stat().st_size, path))
        size = sum(each for _, each, _ in found)
        for _, each, path in sorted(found):
            if size <= self._limit:
                break
            if path not in self._used:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
                    size -= each

    def _path(self, key: str) -> Path:
        return self.folder / f"{hashlib.sha256(f'{self._identity} {key}'.encode()).hexdigest()}{GRAPH}"

    def _not_kept(self, key: str, error: Exception) -> None:
        self.last_error = f"{type(error).__name__}: {error}".partition("\n")[0]
        log.warning("%s was not kept in %s: %s", key, self.folder, self.last_error)

    def _load(
        self, path: Path, step: Callable[..., Any], external: dict[str, nn.Module], inputs: Sequence[torch.Tensor]
    ) -> Callable[..., Any] | None:
        if not path.exists():
            return None
        try:
            user_folder(self.folder)
            with path.open("rb") as file:
                if not is_user_file(file.fileno()):
                    log.warning("%s is ignored: it belongs to another user, or others can write to it", path)
                    return None
                written = unsealed(file.read(), self._key, path.name)
            # Imported here because it imports the compiler, which takes seconds.
            from ...common.compat.torch_compile import code_folder, compiled_here, libraries_recorded

            graph, plainly = unpacked(written, user_folder(code_folder()))
            for operators in NATIVE_OPERATORS:
                if operators.are_called_in(graph):
                    operators.load()
            owners = binding_tensors(*self._owners)
            with compiled_here(plainly), libraries_recorded(self._libraries), owners:
                call: Any = torch.compiler.load_compiled_function(
                    io.BytesIO(graph), f_globals=step.__globals__, external_data=external
                )
            if _sources_unchanged(call) and call.guard_check(*inputs):
                return call
            reason = "the model's code or its state has changed"
        except Exception as error:  # a damaged file, or one of another version
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        log.info("%s is compiled again: %s", path.name, reason)
        return None


def import_loader() -> None:
    """Import the modules that loading the first graph of a process would import."""
    from ...common.compat.torch_loading import import_loader

    import_loader()
    for name in ("...common.compat.torch_compile", ".layered", ".clone_layers"):
        importlib.import_module(name, __package__)


def packed(graph: bytes, libraries: Iterable[Path], folder: Path, plainly: bool) -> bytes:
    """Archive a graph with its machine code, because Inductor's folder is temporary.

    Args:
        graph: The graph, as serialized by torch.
        libraries: Files of machine code. Those outside `folder` are left out.
        folder: Inductor's folder.
        plainly: True if it was compiled without shortcuts, and must be loaded so.
    """
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        archive.writestr(_MAIN, graph)
        archive.comment = _PLAIN if plainly else b""
        for path in sorted(libraries):
            if path.is_relative_to(folder) and path.is_file():
                archive.write(path, path.relative_to(folder).as_posix())
    return written.getvalue()


def unpacked(written: bytes, folder: Path) -> tuple[bytes, bool]:
    """Return the graph of an archive and whether it was compiled plainly; restore missing machine code to `folder`."""
    with zipfile.ZipFile(io.BytesIO(written)) as archive:
        for name in archive.namelist():
            path = folder / name
            if _LIBRARY.fullmatch(name) and not path.exists():
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with atomic_path(path) as temporary:
                    temporary.write_bytes(archive.read(name))
        return archive.read(_MAIN), archive.comment == _PLAIN


def _keepable(guards: Sequence[Any]) -> list[bool]:
    """Return which guards to keep. Checking them takes most of the time of a load, and every step checks them.

    Left out are guards that cannot be serialized (on identities and globals; source digests replace them), and
    thousands that the file's name already covers: on modules' hooks, attributes and classes, and on types of dicts.
    """
    left_out = {
        *unwritable_guards(),
        "EMPTY_NN_MODULE_HOOKS_DICT",
        "NOT_PRESENT_IN_GENERIC_DICT",
    }
    # Also guards on torchao's weights, which cannot be serialized and which the file's name covers too.
    packed_weights = tuple(
        f"{guard.name}." for guard in guards if guard.has_value and hasattr(guard.value, "__tensor_flatten__")
    )
    return [
        not (
            guard.is_global
            or left_out & {guard.guard_type, *(guard.derived_guard_types or ())}
            or f"{guard.name}.".startswith(packed_weights)
            or _is_of_a_class(guard)
        )
        for guard in guards
    ]


def _is_of_a_class(guard: Any) -> bool:
    """Return True if a guard compares the class of a module or dictionary, or reads a class."""
    if guard.guard_type == "DICT_NOT_CONTAINS":
        return guard.name.startswith("dict(type(")
    return guard.guard_type == "TYPE_MATCH" and guard.has_value and isinstance(guard.value, (torch.nn.Module, dict))


def _sources_unchanged(call: Any) -> bool:
    """Return True if the source of every traced function is unchanged."""
    return all(
        hashlib.sha256(
            "".join(_lines(source.module)[source.firstlineno - 1 : source.lastlineno - 1]).encode()
        ).hexdigest()
        == source.checksum
        for source in call.source_info().inlined_sources
    )


@functools.cache
def _lines(module: str) -> list[str]:
    return inspect.getsourcelines(importlib.import_module(module))[0]


def _digest(values: list[Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=repr).encode()).hexdigest()


def _settings() -> list[Any]:
    return [
        __version__,
        torch.__version__,
        transformers.__version__,
        platform.machine(),
        # The exact model, because kernels are compiled with -march=native.
        processor_name(),
        instructions(),
        torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        default_backend(),
        # A setting of Inductor that this package changes, see `own_buffers`.
        "inplace_buffers=False",
        *(operators.identity() for operators in NATIVE_OPERATORS),
    ]


def _structure(model: nn.Module, cache: ExportableCache) -> list[Any]:
    config: Any = model.config
    tensors = [*model.named_parameters(), *model.named_buffers(), *cache.named_state()]
    return [
        config.to_dict(),
        str(model),
        [
            (name, type(module).__module__, type(module).__qualname__, *_attributes(module))
            for name, module in model.named_modules()
        ],
        [(type(layer).__qualname__, layer.config()) for layer in cache.layers],
        [(name, *kind_of_tensor(tensor)) for name, tensor in tensors],
        kind_of_gpu(cache.device),
    ]


def _attributes(module: nn.Module) -> list[str]:
    """Return the names of a module's attributes, with the number of its hooks."""
    return sorted(f"{name} {len(value)}" if name.endswith("_hooks") else name for name, value in vars(module).items())
