"""Running a program in this process, from the live model: eager or compiled."""

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
from ...common.compat import torch as private
from ...common.process.tuning import torch_threads, warn_if_threads_spin
from ...errors import InputError, UnsupportedModelError, describe_trace_error
from ...generation.choosing_steps import Choice, of_step
from ...program.lengths import shared_methods, slots_to_read
from ...program.program import ResidentModule, front_module, program_methods
from ...program.spec import ProgramSpec
from .background import background_compiler
from .compile import CompileOptions, Step, StepCompiler, marked
from .graphs import Graph, OutdatedGraph, choice_graph, choosing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...generation.sampling import Sampler
    from ...models.cache_factory import ExportableCache
    from ...program.methods import ProgramMethod
    from .graph_cache import GraphCache

#: Prompts shorter than this may go token by token, where the model's code has no graph for them and longer ones in
#: common.
LONGEST_LEAST = 16
_EITHER = (False, True)
_GUARD = re.compile(r"satisfy the generated guard (\d+) <= L\[.*\] and L\[.*\] <= (\d+)")


class ModuleRunner:
    """Runs the resident form of a program over the cache's own tensors.

    The model's attention implementation is switched to ours until the runner is closed, or gone.

    Args:
        model: A transformers causal LM.
        cache: Its cache; its keys and values are written, its lengths are not.
        spec: Its methods and modalities.
        options: Whether and how it is compiled.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: ExportableCache,
        spec: ProgramSpec | None = None,
        options: CompileOptions | None = None,
    ) -> None:
        options = CompileOptions() if options is None else options
        self._give_back = weakref.finalize(self, borrow_attention(model, ATTENTION))
        self._give_back.atexit = False
        spec = ProgramSpec() if spec is None else spec
        self.methods: dict[str, ProgramMethod] = program_methods(model, cache, spec)
        self.modules: dict[str, torch.nn.Module] = {
            name: ResidentModule(model, cache, method)
            if method.is_step
            else front_module(model, cache, method, spec.modalities)
            for name, method in self.methods.items()
        }
        self.state: Mapping[str, torch.Tensor] = cache.stored_state()
        self.ranks = cache.ranks
        self.background = background_compiler(model, cache, spec, options)
        self.compiler: StepCompiler | None = None
        if options.compile:
            if cache.device.type == "cpu":
                warn_if_threads_spin()
            self.compiler = self.background.compiler if self.background else StepCompiler(model, cache, options)
        # CUDA graphs are recorded for each size.
        self._records = options.compile and cache.device.type == "cuda"
        shares = options.compile and cache.device.type == "cpu"
        self._shared = shared_methods(cache, self.methods) if shares else {}
        self._shared_modules = {method.name: ResidentModule(model, cache, method) for method in self._shared.values()}
        self._slots = torch.empty(
            max((one.kv_read_len or 0 for one in self._shared.values()), default=0), dtype=torch.bool
        )
        # By methods, of the last step of each.
        self._marked: dict[str, torch.Tensor] = {}
        self._calls: dict[tuple, Step] = {}
        self._choices = {(greedy, penalised): Choice(greedy, penalised) for greedy in _EITHER for penalised in _EITHER}
        self._threads = torch.get_num_threads()
        # TorchDynamo does not follow a model that is left before its decoder, or whose decoder is handed more than the
        # model hands it.
        self._as_they_are = {
            name
            for name, method in self.methods.items()
            if method.item is not None
            or method.extra_features
            or (name == "embed" and self.modules[name].extra_features)
        }

    @property
    def graph_cache(self) -> GraphCache | None:
        """The compiled graphs on disk, None where none are kept."""
        return None if self.compiler is None else self.compiler.graph_cache

    @property
    def is_open(self) -> bool:
        """Whether it runs: it was not closed."""
        return self._give_back.alive

    def close(self) -> None:
        """Put back the attention that the model had; nothing runs afterwards. A second call does nothing."""
        self._give_back()
        if self.background is not None:
            self.background.close()

    @property
    def pending_graphs(self) -> int:
        """Graphs that are being compiled in the background."""
        return 0 if self.background is None else self.background.pending

    def waiting(self) -> AbstractContextManager[None]:
        """A block in which steps wait for their graph, where they are compiled in the background."""
        return nullcontext() if self.background is None else self.background.waiting()

    def graph_of(self, method: str) -> str:
        """The same for methods that one graph serves."""
        return self._shared[method].name if method in self._shared else method

    @torch.no_grad()
    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if self.ranks is None:
            return self._call((method,), inputs)
        with self.ranks.watched():
            result = self._call((method,), inputs)
        return self.ranks.of_first(result) if self.methods[method].is_step else result

    @torch.no_grad()
    def run_and_choose(self, method: str, chooser: Sampler, *inputs: torch.Tensor, steps: int = 1) -> torch.Tensor:
        """Decode steps with the choice of the next tokens inside the graph: int64 [batch, steps].

        One graph serves all settings of a `Sampling`; greedy choice, the repetition penalty and every number of steps
        have graphs of their own. Where graphs are made of layers the choice is one by itself, behind that of the step:
        there is nothing to be saved by having both in one, and a model would be traced again for each. See
        `StepCompiler.chooses_apart`.
        """
        with nullcontext() if self.ranks is None else self.ranks.watched():
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
        if self.compiler is None or not self.compiler.chooses_apart(penalised):
            return self._call((method, greedy, penalised, steps), inputs, *further)
        choice = self._choices[greedy, penalised]
        tokens, position, *more = inputs
        chosen: list[torch.Tensor] = []
        for index in range(steps):
            if chosen:
                tokens, position = chosen[-1], position + 1
            logits = self._call((method,), [tokens, position, *more])
            tokens = self._choose(choice, [logits, *of_step(further, index, greedy)])
            chosen.append((tokens if self.ranks is None else self.ranks.of_first(tokens))[:, None])
        return chosen[0] if steps == 1 else torch.cat(chosen, dim=1)

    def _choose(self, choice: Choice, inputs: list[torch.Tensor]) -> torch.Tensor:
        """Tokens, int64 [batch], by a graph where that is worth one."""
        if choice.greedy and not choice.penalised:
            return choice(*inputs)
        graph = choice_graph(choice, inputs)
        call = self._calls.get(graph.key)
        if call is None and self.background is not None:
            call = self.background.take(graph, inputs)
        elif call is None:
            call = self._compile(graph)
        if call is None:
            return choice(*inputs)
        self._calls[graph.key] = call
        try:
            return self._run_graph(call, inputs)
        except OutdatedGraph as outdated:
            self._lose(graph, outdated)
            return self._choose(choice, inputs)

    def _call(self, key: tuple, inputs: Sequence[torch.Tensor], *further: torch.Tensor) -> Any:
        """What a step gives.

        Args:
            key: Of the step, see `Graph.asked`.
            inputs, further: What it takes.
        """
        if not self.is_open:
            raise InputError("this session is closed, and its model has its own attention again; make another session")
        if self.compiler is None or key[0] in self._as_they_are:
            return choosing(self.modules[key[0]], key, self.ranks)(*inputs, *further)
        graph = self.graph(key, inputs, further)
        if graph is None:
            return choosing(self.modules[key[0]], key, self.ranks)(*inputs, *further)
        call = self._calls.get(graph.key)
        if call is None and self.background is not None:
            call = self._from_background(graph, inputs, further)
            if (method := self.background.unshared(graph.key)) is not None:
                self.unshare(method.name)
                return self._call(key, inputs, *further)
            if call is None:
                with self.background.meanwhile():
                    return choosing(self.modules[key[0]], key, self.ranks)(*inputs, *further)
            self._calls[graph.key] = call
        if call is not None:
            try:
                result = self._run_graph(call, graph.arguments)
            except OutdatedGraph as outdated:
                self._lose(graph, outdated)
                return self._call(key, inputs, *further)
            except private.tracing_errors():
                if self.background is not None:
                    raise
                # The model has changed, to what TorchDynamo cannot make of the graph that it has: it begins anew.
                del self._calls[graph.key]
                return self._call(key, inputs, *further)
        else:
            call = self._compile(graph)
            try:
                result = self._run_graph(call, graph.arguments)
            except private.tracing_errors() as error:
                if graph.is_shared:
                    self.unshare(graph.method.name)
                    return self._call(key, inputs, *further)
                raised = self.methods[key[0]] = _raised(cast("ProgramMethod", graph.method), error)
                enough = inputs[0].shape[1] >= raised.min_length
                return self._call(key, inputs, *further) if enough else self._token_by_token(raised, inputs)
            self._calls[graph.key] = call
        if not self._records:
            return result
        # CUDA graphs give out their own buffers, which the next step overwrites.
        return private.tree_map(lambda tensor: tensor.clone() if tensor.is_cuda else tensor, result)

    def _compile(self, graph: Graph) -> Step:
        assert self.compiler is not None
        # As it will run: a thread of the caller's may have another number of threads.
        with torch_threads(self._threads):
            return self.compiler.compile(graph.module, graph.method, graph.name, graph.arguments)

    def _run_graph(self, call: Step, arguments: Sequence[torch.Tensor]) -> Any:
        # A graph is compiled for a number of threads.
        with torch_threads(self._threads):
            return call(*arguments)

    def _lose(self, graph: Graph, outdated: OutdatedGraph) -> None:
        """Compile a graph again when it is needed next. Another process would compile what it has: steps go on as they
        are then.
        """
        del self._calls[graph.key]
        if self.background is not None:
            self.background.lose(graph.key, str(outdated))

    def _from_background(
        self, graph: Graph, inputs: Sequence[torch.Tensor], further: Sequence[torch.Tensor]
    ) -> Step | None:
        """A graph if another process has compiled it, and None while it does."""
        assert self.background is not None
        if (first := self._token_behind(graph, inputs)) is not None:
            self.background.take(*first)
        call = self.background.take(graph, [*inputs, *further])
        # Steps to come, of rows that are longer: the graphs behind a ring's first turn.
        for other in self.methods.values():
            if other.inputs == self.methods[graph.asked[0]].inputs and other.is_step:
                later = self.graph((other.name, *graph.asked[1:]), inputs, further)
                if later is not None and later.key != graph.key:
                    self.background.take(later, [*inputs, *further], ahead=True)
        return call

    def _token_behind(self, graph: Graph, inputs: Sequence[torch.Tensor]) -> tuple[Graph, list[torch.Tensor]] | None:
        """The graph of the first token behind a prompt, and inputs for it: it is needed as soon as the prompt is read,
        and again for each token. None for other steps, and where a token takes something else.
        """
        prompt, size = self.methods[graph.asked[0]], inputs[0].shape[1]
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
        behind = self.graph((decode.name,), token, ())
        return None if behind is None else (behind, token)

    def graph(self, key: tuple, inputs: Sequence[torch.Tensor], further: Sequence[torch.Tensor]) -> Graph | None:
        """What compiled graph serves a call, and with which arguments.

        None for a step that fills the cache to its last slot: that one runs as it is, instead of waiting for a graph of
        its own.
        """
        method = self.methods[key[0]]
        shared = self._shared.get(method.name)
        if shared is not None:
            size, steps = inputs[0].shape[1], 1 if len(key) == 1 else key[3]
            end = _last_of(inputs[1]) + size + steps - 1
            slots = slots_to_read(shared, end, None if self._is_compiled(shared, key) else size)
            if slots is None:
                return None
            kept = self._marked.get(shared.name)
            arguments, ones = marked(shared, [*inputs, self._slots[:slots]], self.background is None, kept)
            self._marked[shared.name] = arguments[-1]
            module = choosing(self._shared_modules[shared.name], key, self.ranks)
            return Graph(shared, module, (shared.name, True, *key[1:], ones), [*arguments, *further], key)
        arguments, ones = marked(method, inputs, self.background is None)
        module = choosing(self.modules[method.name], key, self.ranks)
        return Graph(method, module, (method.name, False, *key[1:], ones), [*arguments, *further], key)

    def _is_compiled(self, shared: ProgramMethod, key: tuple) -> bool:
        return any(known[:-1] == (shared.name, True, *key[1:]) for known in self._calls)

    def unshare(self, name: str) -> None:
        """The model's code asks how far the cache is read: a graph for each length, as for a phone."""
        self._shared = {one: method for one, method in self._shared.items() if method.name != name}

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


def _last_of(positions: torch.Tensor) -> int:
    return int(positions if positions.numel() == 1 else positions.max())


def _raised(method: ProgramMethod, error: Exception) -> ProgramMethod:
    """The method with the `min_length` from which on the model's code is the same for all lengths.

    Some code compares the length with a kernel or a small constant, here as under `Program.export`. Shorter prompts go
    token by token then.

    Raises:
        UnsupportedModelError: If that is not why it could not be compiled.
    """
    found = _GUARD.search(str(error))
    if found is not None and method.takes_ids and method.is_step and not method.only_scores and method.min_length > 1:
        lowest, highest = int(found[1]), int(found[2])
        least = lowest if highest == method.max_length else highest + 1
        if method.min_length < least <= min(LONGEST_LEAST, method.max_length):
            return replace(method, min_length=least)
    raise UnsupportedModelError(
        f"{method.name} cannot be compiled into one graph ({describe_trace_error(error)}); run the session without "
        "compile=True"
    ) from error
