"""Running a program in this process, from the live model: eager or compiled."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from ..cache.attention.functions import ATTENTION
from ..cache.attention.implementation import borrow_attention
from ..common.compat import torch as private
from ..errors import InputError, UnsupportedModelError
from ..generation.choosing_steps import ChoosingSteps
from ..program.program import ResidentModule, front_module, program_methods
from ..program.spec import ProgramSpec
from ..program.tracing import told_by
from .graph_cache import GraphCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..generation.sampler import Sampler
    from ..models.cache_factory import ExportableCache
    from ..program.methods import ProgramMethod

#: Prompts shorter than this may go token by token, where the model's code has no graph for them and longer ones in
#: common.
LONGEST_LEAST = 16
_GUARD = re.compile(r"satisfy the generated guard (\d+) <= L\[.*\] and L\[.*\] <= (\d+)")


class ModuleRunner:
    """Runs the resident form of a program over the cache's own tensors.

    The model's attention implementation is switched to ours until the runner is closed, or gone.

    Args:
        model: A transformers causal LM.
        cache: Its cache; its keys and values are written, its lengths are not.
        spec: Its methods and modalities.
        compiled: Compile every method into one graph: decode with static shapes, prefill with a dynamic length.
        mode: Of torch.compile; `reduce-overhead` (CUDA graphs) by default on a GPU.
        graph_cache: Folder in which compiled graphs are kept for later processes, see `GraphCache`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: ExportableCache,
        spec: ProgramSpec | None = None,
        *,
        compiled: bool = False,
        mode: str | None = None,
        graph_cache: str | Path | None = None,
    ) -> None:
        self._give_back = weakref.finalize(self, borrow_attention(model, ATTENTION))
        self._give_back.atexit = False
        spec = ProgramSpec() if spec is None else spec
        self.methods: dict[str, ProgramMethod] = program_methods(cache, spec)
        self.modules: dict[str, torch.nn.Module] = {
            name: ResidentModule(model, cache, method)
            if method.is_step
            else front_module(model, cache, method, spec.modalities)
            for name, method in self.methods.items()
        }
        self.state: Mapping[str, torch.Tensor] = cache.stored_state()
        self._compiled = compiled
        if mode is None and cache.device.type == "cuda":
            mode = "reduce-overhead"
        self._mode = mode
        self.graph_cache = None if graph_cache is None else GraphCache(graph_cache, model, cache)
        # By method, by how tokens are chosen inside the graph, which is compiled when it is first asked for, and by
        # which of the dynamic sizes are 1: TorchDynamo has no graph for those and others in common.
        self._calls: dict[tuple, Callable[..., torch.Tensor]] = {}

    @property
    def is_open(self) -> bool:
        """Whether it runs: it was not closed."""
        return self._give_back.alive

    def close(self) -> None:
        """Put back the attention that the model had; nothing runs afterwards. A second call does nothing."""
        self._give_back()

    @torch.no_grad()
    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        return self._call((method,), inputs)

    @torch.no_grad()
    def run_and_choose(self, method: str, chooser: Sampler, *inputs: torch.Tensor, steps: int = 1) -> torch.Tensor:
        """Decode steps with the choice of the next tokens inside the graph: int64 [batch, steps].

        One graph serves all settings of a `Sampling`; greedy choice, the repetition penalty and every number of steps
        have graphs of their own.
        """
        greedy, penalised = chooser.sampling.is_greedy, chooser.seen is not None
        further: list[torch.Tensor] = [] if greedy else [chooser.uniform(inputs[0].shape[0], steps)]
        if penalised:
            further.append(chooser.seen)
        return self._call((method, greedy, penalised, steps), inputs, *further, *astuple(chooser.settings))

    def _call(self, key: tuple, inputs: Sequence[torch.Tensor], *further: torch.Tensor) -> Any:
        if not self.is_open:
            raise InputError("this session is closed, and its model has its own attention again; make another session")
        method, ones = self.methods[key[0]], frozenset()
        if self._compiled:
            inputs, ones = _marked(method, inputs)
        arguments, call = [*inputs, *further], self._calls.get((key, ones))
        if call is not None:
            result = call(*arguments)
        else:
            call = self.modules[method.name] if len(key) == 1 else ChoosingSteps(self.modules[method.name], *key[1:])
            if self._compiled:
                call = self._compile(
                    call, (key, ones), arguments, None if method.dynamic_sizes.keys() - ones else False
                )
            try:
                result = call(*arguments)
            except (private.dynamo_error(), ConstraintViolationError) as error:
                raised = self.methods[method.name] = _raised(method, error)
                enough = inputs[0].shape[1] >= raised.min_length
                return self._call(key, inputs, *further) if enough else self._token_by_token(raised, inputs)
            self._calls[key, ones] = call
        # CUDA graphs give out their own buffers, which the next step overwrites.
        return private.tree_map(lambda tensor: tensor.clone() if tensor.is_cuda else tensor, result)

    def _token_by_token(self, method: ProgramMethod, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Logits [batch, vocab] after the last token of a step that is too short for its method."""
        tokens, position, *more = inputs
        decode = next(
            one
            for one in self.methods.values()
            if one.serves(1, 1) and one.kv_read_len == method.kv_read_len and one.input_names == method.input_names
        )
        for index in range(tokens.shape[1]):
            logits = self._call((decode.name,), (tokens[:, index : index + 1], position + index, *more))
        return logits

    def _compile(
        self, module: torch.nn.Module, key: tuple, inputs: Sequence[torch.Tensor], dynamic: bool | None
    ) -> Callable[..., torch.Tensor]:
        step = _step_of(module)
        # A graph from disk has no others beside it.
        if self.graph_cache is not None and not _has_graphs_by_length(self.methods[key[0][0]]):
            options = private.mode_options(self._mode) if self._mode else None
            name = f"{self.methods[key[0][0]]} {key[0][1:]} {sorted(key[1])}"
            call = self.graph_cache.get(name, step, {"module": module}, inputs, dynamic=dynamic, options=options)
            if call is not None:
                # Its guards are those of unmarked inputs.
                return lambda *inputs: call(*(tensor.detach() for tensor in inputs))
        return torch.compile(step, fullgraph=True, dynamic=dynamic, mode=self._mode)


def _marked(method: ProgramMethod, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], frozenset[str]]:
    """Copies of the inputs that say which of their sizes are dynamic, and the names of dynamic sizes that are 1 here.

    Guards look at strides, which a slice of a longer prompt carries along, and dynamic sizes are marked on the tensor.
    """
    sizes, marked, ones = method.dynamic_sizes, [], set()
    for spec, tensor in zip(method.inputs, inputs, strict=True):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        for index, size in enumerate(spec.shape):
            if size in sizes and tensor.shape[index] == 1:
                ones.add(size)
            elif size in sizes and _has_graphs_by_length(method):
                private.maybe_mark_dynamic(tensor, index)
            elif size in sizes:
                private.mark_dynamic(tensor, index, max(2, sizes[size][0]), sizes[size][1])
        marked.append(tensor)
    return marked, frozenset(ones)


def _raised(method: ProgramMethod, error: Exception) -> ProgramMethod:
    """The method with the `min_length` from which on the model's code is the same for all lengths.

    Some code compares the length with a kernel or a small constant, here as under `Program.export`. Shorter prompts go
    token by token then.

    Raises:
        UnsupportedModelError: If that is not why it could not be compiled.
    """
    found = _GUARD.search(str(error))
    if found is not None and method.takes_ids and method.is_step and not method.scores and method.min_length > 1:
        lowest, highest = int(found[1]), int(found[2])
        least = lowest if highest == method.max_length else highest + 1
        if method.min_length < least <= min(LONGEST_LEAST, method.max_length):
            return replace(method, min_length=least)
    raise UnsupportedModelError(
        f"{method.name} cannot be compiled into one graph ({told_by(error)}); run the session without compile=True"
    ) from error


def _has_graphs_by_length(method: ProgramMethod) -> bool:
    """Encoders of sound shorten it by convolutions, whose guards split the lengths: there is a graph for each range of
    them.

    That a length is a multiple is such a guard, too.
    """
    return not method.is_step and (not method.takes_ids or method.pads)


def _step_of(module: torch.nn.Module) -> Callable[..., torch.Tensor]:
    """A function that calls `module`, with a code object of its own.

    TorchDynamo keeps compiled graphs per code object: methods, and runners, that shared one would count as
    recompilations of each other and together run into the recompile limit.
    """

    def step(*inputs: torch.Tensor) -> torch.Tensor:
        return module(*inputs)

    return FunctionType(step.__code__.replace(), step.__globals__, "step", None, step.__closure__)
