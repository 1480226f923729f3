"""Run a live model in this process, eagerly or through torch.compile."""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from ...cache.attention import ATTENTION
from ...cache.attention.implementation import borrow_attention
from ...cache.attention.operators import reads_filled
from ...common.compat import torch as private
from ...common.devices import memory_errors, refuse_out_of_memory, weights_bytes
from ...common.process.tuning import torch_threads, warn_if_threads_spin
from ...errors import InputError, UnsupportedModelError, describe_trace_error
from ...generation.loop import Choice, of_step
from ...models.cache_factory import ExportableEncoderDecoderCache
from ...models.joined_linears import join_linears
from ...models.lora import ADAPTED, LORA_TENSORS, WRITE_ADAPTER, lora_layers
from ...program.lengths import shared_methods, slots_to_read
from ...program.methods import SHIFT, moves_images
from ...program.program import ResidentModule, front_module, program_methods
from ...program.shift import shift_module
from ...program.spec import ProgramSpec
from ..probe_attention import reads_filled_everywhere, without_narrow_decodes
from .background import background_compiler
from .compile import CompileOptions, Step, StepCompiler, generates_cuda, marked
from .cuda_graphs import CudaGraphs
from .graph_cache import Graph, GraphKey, OutdatedGraph, StepKey, choice_graph, choosing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...generation.sampling import Sampler
    from ...models.cache_factory import ExportableCache
    from ...program.methods import ProgramMethod
    from .graph_cache import GraphCache

#: Shorter prompts may run token by token, because some models' code has no common graph for them and longer ones.
MAX_MIN_LENGTH = 16
_EITHER = (False, True)
_GUARD = re.compile(r"satisfy the generated guard (\d+) <= L\[.*\] and L\[.*\] <= (\d+)")


class ModuleRunner:
    """Runs the resident form of a program over the cache's own tensors.

    The model uses this package's attention implementation until the runner is closed or garbage-collected.

    Args:
        model: A transformers causal LM.
        cache: The model's cache. Steps write its keys and values, but not its lengths.
        spec: The program's methods and modalities.
        options: Whether and how steps are compiled.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: ExportableCache,
        spec: ProgramSpec | None = None,
        options: CompileOptions | None = None,
    ) -> None:
        options = CompileOptions() if options is None else options
        self._restore_attention = weakref.finalize(self, borrow_attention(model, ATTENTION))
        self._restore_attention.atexit = False
        spec = ProgramSpec() if spec is None else spec
        self.methods: dict[str, ProgramMethod] = program_methods(model, cache, spec)
        self._model, self._cache = model, cache
        self._needed = lambda: {"the weights": weights_bytes(model), "the cache": cache.resident_nbytes}
        filled = cache.offloader is None and reads_filled(cache.device)
        if filled and options.compile:
            if reads_filled_everywhere(model, cache):
                self.methods = without_narrow_decodes(self.methods)
            if cache.ranks is None and not isinstance(cache, ExportableEncoderDecoderCache):
                with memory_errors(cache.device, self._needed):
                    join_linears(model)
                if cache.device.type == "cuda":
                    # The memory of separate weights is free for other processes then, such as the compiling one.
                    torch.cuda.empty_cache()
        self.modules: dict[str, torch.nn.Module] = {
            name: ResidentModule(model, cache, method, on_gpu=filled)
            if method.is_step
            else front_module(model, cache, method, spec.modalities)
            for name, method in self.methods.items()
        }
        self.state: Mapping[str, torch.Tensor] = cache.stored_state()
        layers = lora_layers(model) if WRITE_ADAPTER in self.methods else {}
        #: The first layer with slots for adapters, and the tensor of its slots.
        self._lora = next(((one, one.lora_a) for one in layers.values()), None)
        self.ranks = cache.ranks
        self._device = cache.device
        self.background = background_compiler(model, cache, spec, options)
        self.compiler: StepCompiler | None = None
        if options.compile:
            if cache.device.type == "cpu":
                warn_if_threads_spin()
            self.compiler = self.background.compiler if self.background else StepCompiler(model, cache, options)
        is_alone = cache.offloader is None and cache.ranks is None
        self._cuda_graphs: CudaGraphs | None = None
        if options.compile and is_alone and generates_cuda(cache.device, options.mode):
            self._cuda_graphs = CudaGraphs(model, cache.device)
        # Torch captures them itself with a mode.
        self._has_torch_graphs = options.mode is not None and cache.device.type == "cuda"
        shares = options.compile and cache.device.type == "cpu"
        self._shared = shared_methods(cache, self.methods) if shares else {}
        self._shared_modules = {method.name: ResidentModule(model, cache, method) for method in self._shared.values()}
        self._slots = torch.empty(
            max((one.kv_read_len or 0 for one in self._shared.values()), default=0), dtype=torch.bool
        )
        #: The marked slots input of the last step, by method.
        self._marked: dict[str, torch.Tensor] = {}
        self._calls: dict[GraphKey, Step] = {}
        self._choices = {(greedy, penalised): Choice(greedy, penalised) for greedy in _EITHER for penalised in _EITHER}
        self._threads = torch.get_num_threads()
        # These run eagerly, because TorchDynamo cannot trace a model that is left before its decoder, or a decoder that
        # gets extra inputs.
        self._shift_refusal: tuple[type[InputError | UnsupportedModelError], str] | None = None
        self._uncompiled = {
            name
            for name, method in self.methods.items()
            if method.item is not None
            or method.extra_features
            or name == WRITE_ADAPTER
            or (name == "embed" and self.modules[name].extra_features)
        }

    @property
    def graph_cache(self) -> GraphCache | None:
        """The compiled graphs on disk, None without a folder."""
        return None if self.compiler is None else self.compiler.graph_cache

    @property
    def is_open(self) -> bool:
        """True until the runner is closed."""
        return self._restore_attention.alive

    def close(self) -> None:
        """Restore the model's attention implementation. Calling it again has no effect."""
        self._restore_attention()
        if self._cuda_graphs is not None:
            self._cuda_graphs.clear()
        if self.background is not None:
            self.background.close()

    def _compiles_aside(self, method: str) -> bool:
        """Return True if a subprocess compiles a method's graphs; False if this process does when they are needed."""
        return self.background is not None and not self.background.gave_up(method)

    @property
    def pending_graphs(self) -> int:
        """Number of graphs that are being compiled in the background."""
        return 0 if self.background is None else self.background.pending

    def waiting(self) -> AbstractContextManager[None]:
        """Make steps in this block wait for their graph instead of running eagerly."""
        return nullcontext() if self.background is None else self.background.waiting()

    def graph_of(self, method: str) -> str:
        """Return the graph name of `method`. Methods that share a graph return the same name."""
        return self._shared[method].name if method in self._shared else method

    def make_shift(self) -> None:
        """See `MakesShift.make_shift`. The method runs uncompiled, because it is called once in thousands of steps."""
        if self._shift_refusal is not None:
            kind, message = self._shift_refusal
            raise kind(message)
        if SHIFT.name not in self.methods:
            try:
                module = shift_module(self._model, self._cache, moves_images(self.methods))
            except (InputError, UnsupportedModelError) as error:
                # Not the error itself, whose traceback would keep this runner alive.
                self._shift_refusal = type(error), str(error)
                raise
            self.modules[SHIFT.name], self.methods[SHIFT.name] = module, module.method
            self._uncompiled.add(SHIFT.name)

    @torch.no_grad()
    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run a method, see `Runner.run`."""
        try:
            if self.ranks is None:
                return self._call(StepKey(method), inputs)
            with self.ranks.watched():
                result = self._call(StepKey(method), inputs)
            return self.ranks.of_first(result) if self.methods[method].is_step else result
        except RuntimeError as error:
            refuse_out_of_memory(error, self._device, self._needed, "a step")
            raise

    @torch.no_grad()
    def run_and_choose(self, method: str, chooser: Sampler, *inputs: torch.Tensor, steps: int = 1) -> torch.Tensor:
        """Run decode steps and choose their tokens: int64 [batch, steps].

        One graph serves all settings of a `Sampling`. Greedy choice, the repetition penalty and each number of steps
        need separate graphs. On a CPU the choice is a separate graph, because the model would otherwise be traced again
        for each of these. See `StepCompiler.chooses_separately`.
        """
        watched = nullcontext() if self.ranks is None else self.ranks.watched()
        with memory_errors(self._device, self._needed, "a step"), watched:
            return self._run_and_choose(method, chooser, inputs, steps)

    def _run_and_choose(
        self, method: str, chooser: Sampler, inputs: Sequence[torch.Tensor], steps: int
    ) -> torch.Tensor:
        seen = chooser.seen
        greedy, penalised = chooser.sampling.is_greedy, seen is not None
        further: list[torch.Tensor] = [] if greedy else [chooser.uniform(inputs[0].shape[0], steps)]
        if seen is not None:
            further.append(seen)
        further += chooser.settings
        if self.compiler is None or not self.compiler.chooses_separately(penalised):
            return self._call(StepKey(method, greedy, penalised, steps), inputs, *further)
        choice = self._choices[greedy, penalised]
        tokens, position, *more = inputs
        chosen: list[torch.Tensor] = []
        for index in range(steps):
            if chosen:
                tokens, position = chosen[-1], position + 1
            logits = self._call(StepKey(method), [tokens, position, *more])
            tokens = self._choose(choice, [logits, *of_step(further, index, greedy)])
            chosen.append((tokens if self.ranks is None else self.ranks.of_first(tokens))[:, None])
        return chosen[0] if steps == 1 else torch.cat(chosen, dim=1)

    def _choose(self, choice: Choice, inputs: list[torch.Tensor]) -> torch.Tensor:
        """Return the next tokens, int64 [batch]. Greedy choice without a penalty needs no graph."""
        if choice.greedy and not choice.penalised:
            return choice(*inputs)
        graph = choice_graph(choice, inputs)
        call = self._calls.get(graph.key)
        if call is None and self._compiles_aside(graph.key.step.method):
            assert self.background is not None
            call = self.background.get(graph, inputs)
        # Asked again, because the subprocess may have given up while this thread waited.
        if call is None and not self._compiles_aside(graph.key.step.method):
            call = self._compile(graph)
        if call is None:
            return choice(*inputs)
        self._calls[graph.key] = call
        try:
            return self._run_graph(call, inputs)
        except OutdatedGraph as outdated:
            self._discard(graph, outdated)
            return self._choose(choice, inputs)

    def _call(self, key: StepKey, inputs: Sequence[torch.Tensor], *further: torch.Tensor) -> Any:
        """Run one call.

        Args:
            key: The requested call.
            inputs: The method's inputs.
            further: The inputs of the choice.
        """
        if not self._restore_attention.alive:
            raise InputError("this session is closed, and the model has its own attention again; make another session")
        if self._lora is not None and key.method.startswith((ADAPTED, WRITE_ADAPTER)):
            layer, slots = self._lora
            if getattr(layer, LORA_TENSORS[0], None) is not slots:
                raise InputError(
                    "the model must keep the slots of this session's adapters, but another session or an export has "
                    "replaced them; make another session, and load the adapters into it"
                )
        if self.compiler is None or key.method in self._uncompiled:
            return self._eager(key, inputs, further)
        if self._cuda_graphs is not None:
            result = self._cuda_graphs.replay(key, [*inputs, *further])
            if result is not None:
                return result
        graph = self.graph(key, inputs, further)
        if graph is None:
            return self._eager(key, inputs, further)
        call = self._calls.get(graph.key)
        if call is None and self._compiles_aside(graph.key.step.method):
            assert self.background is not None
            call = self._from_background(graph, inputs, further)
            if (method := self.background.unshared(graph.key)) is not None:
                self.unshare(method.name)
                return self._call(key, inputs, *further)
            if call is None and not self._compiles_aside(graph.key.step.method):
                return self._call(key, inputs, *further)
            if call is None:
                with self.background.eager_step():
                    return self._eager(key, inputs, further)
            self._calls[graph.key] = call
        if call is not None:
            try:
                result = self._run_graph(call, graph.arguments, graph)
            except OutdatedGraph as outdated:
                self._discard(graph, outdated)
                return self._call(key, inputs, *further)
            except private.tracing_errors():
                if self._compiles_aside(graph.key.step.method):
                    raise
                # Compile from scratch, because TorchDynamo cannot recompile its graph for the changed model.
                del self._calls[graph.key]
                return self._call(key, inputs, *further)
        else:
            call = self._compile(graph)
            try:
                result = self._run_graph(call, graph.arguments, graph)
            except private.tracing_errors() as error:
                if graph.key.is_shared:
                    self.unshare(graph.method.name)
                    return self._call(key, inputs, *further)
                method = self.methods[key.method] = with_min_length(cast("ProgramMethod", graph.method), error)
                enough = inputs[0].shape[1] >= method.min_length
                return self._call(key, inputs, *further) if enough else self._token_by_token(method, inputs)
            self._calls[graph.key] = call
        if not self._has_torch_graphs:
            return result
        # Copy the outputs, because the next replay of the CUDA graph overwrites them.
        return private.tree_map(lambda tensor: tensor.clone() if tensor.is_cuda else tensor, result)

    def _eager(self, key: StepKey, inputs: Sequence[torch.Tensor], further: Sequence[torch.Tensor]) -> Any:
        module = self.modules[key.method]
        return (module if key.greedy is None else choosing(module, key, self.ranks))(*inputs, *further)

    def _compile(self, graph: Graph) -> Step:
        assert self.compiler is not None
        # Set the thread count, because the calling thread may have another one, and graphs are compiled for one.
        with torch_threads(self._threads):
            return self.compiler.compile(graph.module, graph.method, graph.name, graph.arguments)

    def _run_graph(self, call: Step, arguments: Sequence[torch.Tensor], step: Graph | None = None) -> Any:
        """Run a compiled graph. A step of one size becomes a CUDA graph where this process captures them."""
        if self._has_torch_graphs:
            private.allow_cuda_graphs()
        with torch_threads(self._threads):
            if self._cuda_graphs is None or step is None or step.method.dynamic_sizes:
                return call(*arguments)
            return self._cuda_graphs.run(step.requested, call, arguments)

    def _discard(self, graph: Graph, outdated: OutdatedGraph) -> None:
        """Compile a graph again when it is next needed.

        With background compilation, the subprocess does not compile it, because that has the old model. On a CPU steps
        run eagerly from then on; on a GPU this process compiles.
        """
        del self._calls[graph.key]
        if self.background is not None:
            self.background.discard(graph.key, str(outdated))

    def _from_background(
        self, graph: Graph, inputs: Sequence[torch.Tensor], further: Sequence[torch.Tensor]
    ) -> Step | None:
        """Return a graph that the subprocess has compiled, None while it compiles."""
        assert self.background is not None
        # Not where the graph of a step chooses the token too, because its choice is known only at the step.
        chooses_separately = self.compiler is not None and self.compiler.chooses_separately(penalised=False)
        if chooses_separately and (first := self._first_decode(graph, inputs)) is not None:
            self.background.get(*first)
        call = self.background.get(graph, [*inputs, *further])
        # Also request the graphs of later, longer steps, such as those after a ring buffer has wrapped.
        for other in self.methods.values():
            if other.inputs == self.methods[graph.requested.method].inputs and other.is_step:
                later = self.graph(graph.requested._replace(method=other.name), inputs, further)
                if later is not None and later.key != graph.key:
                    self.background.get(later, [*inputs, *further], ahead=True)
        return call

    def _first_decode(self, graph: Graph, inputs: Sequence[torch.Tensor]) -> tuple[Graph, list[torch.Tensor]] | None:
        """Return the graph and inputs of the decode step after a prompt, None if `graph` is not a prompt's.

        It is requested together with the prompt, because it is needed as soon as the prompt has run.
        """
        prompt, size = self.methods[graph.requested.method], inputs[0].shape[1]
        if size == 1 or not prompt.is_step or prompt.only_scores:
            return None
        end = _last_of(inputs[1]) + size + 1
        decode = next(
            (
                one
                for one in self.methods.values()
                if one.max_length == 1 and one.serves(1, end) and one.input_names == prompt.input_names
            ),
            None,
        )
        if decode is None:
            return None
        token = []
        for spec, tensor in zip(prompt.inputs, inputs, strict=True):
            for index, name in enumerate(spec.shape):
                tensor = tensor.narrow(index, 0, 1) if name == "length" else tensor
            token.append(tensor)
        token[1] = token[1] + size
        following = self.graph(StepKey(decode.name), token, ())
        return None if following is None else (following, token)

    def graph(self, key: StepKey, inputs: Sequence[torch.Tensor], further: Sequence[torch.Tensor]) -> Graph | None:
        """Return the graph that serves a call, with its arguments.

        None for a step that fills the cache to its last slot: it runs eagerly, because it would need a separate graph.
        """
        method = self.methods[key.method]
        shared = self._shared.get(method.name)
        if shared is None:
            arguments, ones = marked(method, inputs, not self._compiles_aside(method.name))
            module = choosing(self.modules[method.name], key, self.ranks)
            return Graph(method, module, GraphKey(key, ones=ones), [*arguments, *further], key)
        size = inputs[0].shape[1]
        end = _last_of(inputs[1]) + size + key.steps - 1
        step = key._replace(method=shared.name)
        slots = slots_to_read(shared, end, None if self._is_compiled(step) else size)
        if slots is None:
            return None
        kept = self._marked.get(shared.name)
        arguments, ones = marked(shared, [*inputs, self._slots[:slots]], not self._compiles_aside(shared.name), kept)
        self._marked[shared.name] = arguments[-1]
        module = choosing(self._shared_modules[shared.name], key, self.ranks)
        return Graph(shared, module, GraphKey(step, True, ones), [*arguments, *further], key)

    def _is_compiled(self, step: StepKey) -> bool:
        return any(known.is_shared and known.step == step for known in self._calls)

    def unshare(self, name: str) -> None:
        """Compile a graph for each read length, because the model's code depends on it."""
        self._shared = {one: method for one, method in self._shared.items() if method.name != name}

    def _token_by_token(self, method: ProgramMethod, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run a step that is too short for its method and return its logits [batch, vocab]."""
        tokens, position, *more = inputs
        decode = next(
            one
            for one in self.methods.values()
            if one.serves(1, 1) and one.kv_read_len == method.kv_read_len and one.input_names == method.input_names
        )
        for index in range(tokens.shape[1]):
            logits = self._call(StepKey(decode.name), (tokens[:, index : index + 1], position + index, *more))
        return logits


def _last_of(positions: torch.Tensor) -> int:
    return int(positions if positions.numel() == 1 else positions.max())


def with_min_length(method: ProgramMethod, error: Exception) -> ProgramMethod:
    """Return the method with the smallest `min_length` for which the model's code is the same for all lengths.

    Some code compares the length with a kernel size or a small constant, as under `Program.export`. Shorter prompts run
    token by token.

    Raises:
        UnsupportedModelError: If the error has another cause.
    """
    found = _GUARD.search(str(error))
    if found is not None and method.takes_ids and method.is_step and not method.only_scores and method.min_length > 1:
        lowest, highest = int(found[1]), int(found[2])
        least = lowest if highest == method.max_length else highest + 1
        if method.min_length < least <= min(MAX_MIN_LENGTH, method.max_length):
            return replace(method, min_length=least)
    raise UnsupportedModelError(
        f"{method.name} cannot be compiled into one graph ({describe_trace_error(error)}); run the session without "
        "compile=True"
    ) from error
