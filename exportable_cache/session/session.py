"""One object to prefill, decode and generate with, over any target: eager, compiled, or a bundle."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import GenerationConfig

from ..backends.base import HasDevice, WaitsForGraphs
from ..backends.live.fork import ForkedRunner
from ..backends.live.graph_cache import GRAPH_CACHE_MB
from ..common.progress import silent
from ..common.tensors import ordinary_tensors
from ..errors import InputError
from ..generation.sampling import Sampler, Sampling
from ..program.items import ITEMS_SEEN
from ..program.methods import ROPE_DELTAS, ROPE_LENGTHS, smallest_inputs
from . import persistence
from .checks import check_max_new_tokens, split_stops
from .generate import checked_steps, generated_text, make_request
from .inputs.items import recorded_placeholders
from .sequence_state import SequenceState
from .stepped import SteppedSession

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..backends.base import Runner
    from ..bundle.bundle import Bundle
    from ..common.progress import Progress
    from ..generation.speculative import Draft
    from ..models.cache_factory import ExportableCache
    from ..program.methods import ProgramMethod


class Session(SteppedSession):
    """A program that runs: opened over a live model or a bundle, it generates tokens and text.

    See `SteppedSession` for what feeds single steps, and for the arguments.

    Example:
        >>> session = load("artifacts/demo")
        >>> "".join(session.generate_text("the code of amber is 4821. amber?", max_new_tokens=6))
    """

    _cache: ExportableCache | None = None

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        cache: ExportableCache,
        *,
        compile: bool | Literal["background", "wait"] = False,
        mode: str | None = None,
        prefill_chunk: int | None = None,
        buckets: bool | Sequence[int] = True,
        score_length: int = 0,
        steps_per_launch: int = 1,
        modalities: Sequence[str] | Mapping[str, Any] = (),
        image_size: int | Sequence[int] | None = None,
        graph_cache: str | Path | None = None,
        graph_cache_mb: int = GRAPH_CACHE_MB,
        tokenizer: PreTrainedTokenizerBase | None = None,
        progress: Progress = silent,
    ) -> Session:
        """Run a live model over a cache, which may hold tokens already: the session goes on from there.

        The session owns the cache: its keys and values are written in place, and steps taken with it elsewhere go
        unseen. The model's attention implementation is switched to ours until `close`, or the end of a `with` block.

        Args:
            model: A transformers causal LM in eval mode.
            cache: Allocated for it.
            compile: Run through torch.compile, one graph per method. True: another process compiles, while steps run as
                they are over the same cache; where that cannot be (on a GPU, with a `mode`, for a model that cannot be
                handed over) each is compiled when it is first needed. "wait": always so. "background": never so, but
                refused.
            mode: Of torch.compile; `reduce-overhead` (CUDA graphs) by default for steps of one size on a GPU.
            prefill_chunk: Longest chunk of a prompt, see `methods.methods_for`.
            buckets: Read lengths with methods of their own, so that a step costs what the filled part of the cache
                costs, not what is allocated. True for powers of two, see `methods.length_buckets`; False for none.
            score_length: Most tokens that `score` takes, as speculative decoding needs it; 0 for no such method.
            steps_per_launch: Decode steps that `generate` runs at once, each choosing the tokens for the next inside
                the graph: the same tokens, at less cost per step outside of it. Tokens after a stop are dropped, and
                taken back by length. Each method for decoding gets a second graph, as many times as large. Drafts judge
                several tokens without it.
            modalities: What is fed beside text, of `image`, `video` and `audio`; or by kind what the model's processor
                gives for one item, whose sizes the program is made for: see `modalities.modalities_of`.
            image_size: Of every image, in pixels, where the model's config leaves it open: see there.
            graph_cache: Folder that keeps compiled graphs, so that a later process neither traces nor compiles them,
                see `backends.live.graph_cache.GraphCache`; only with `compile`.
            graph_cache_mb: Megabytes that the folder may hold; those used longest ago are dropped first.
            tokenizer: For text.
            progress: Told of graphs that are compiled in the background, from another thread.

        Raises:
            InputError: If the model is in training mode, or the cache is not one for this model, or holds more tokens
                than the model has positions for; or if an argument is out of range, such as more steps per launch than
                a ring with these rollback slots, or a state of fixed size, can take back.
        """
        from ..backends.live.compile import CompileOptions
        from ..program.lengths import needs_equal_rows
        from .live import LiveOptions, changing_rope, live_session

        options = LiveOptions(
            CompileOptions(compile, mode, graph_cache, graph_cache_mb, progress),
            prefill_chunk=prefill_chunk,
            buckets=buckets,
            score_length=score_length,
            steps_per_launch=steps_per_launch,
            modalities=modalities,
            image_size=image_size,
        )
        session = live_session(cls, model, cache, options, tokenizer)
        session._cache = cache
        session._stepper.rope = changing_rope(model, cache)
        session._stepper.move_to(SequenceState.of_layers(cache.layers, cache.cumulative_length.detach().cpu().clone()))
        session._stepper.needs_equal_rows = functools.cache(lambda: needs_equal_rows(model, cache))
        return session

    @classmethod
    def from_bundle(cls, bundle: Bundle, runner: Runner | None = None) -> Session:
        """Open the program of a bundle and start at position 0.

        Args:
            runner: What runs the steps instead of the bundle's own program.
        """
        if runner is None:
            with ordinary_tensors():
                runner, layers = bundle.open_runner()
        else:
            layers = bundle.layers()
        manifest = bundle.manifest
        session = cls(
            runner,
            layers,
            manifest.vocab_size,
            batch_size=manifest.program.batch_size,
            tokenizer=bundle.text_tokenizer(),
            generation_config=GenerationConfig.from_dict(dict(manifest.generation_config)),
            device=runner.device if isinstance(runner, HasDevice) else "cpu",
            target=manifest.target,
            fingerprint=manifest.fingerprint,
            placeholders=recorded_placeholders(runner.methods.values(), manifest.config),
        )
        session.use_ranks(getattr(runner, "ranks", None), manifest.parts_of_heads)
        session._stepper.needs_equal_rows = lambda: manifest.program.equal_rows
        if manifest.program.rope is not None:
            session._stepper.rope = manifest.program.rope.described()
            session._stepper.move_to(session.sequence)
        session._stepper.logits_size = manifest.logits_size or manifest.vocab_size
        return session

    def warm_up(self, progress: Progress = silent) -> None:
        """Run every method, so that no later step waits for a compilation; then start anew at position 0.

        Only the repetition penalty, whose choice of tokens has a graph of its own, is compiled when it is first used.

        Args:
            progress: Told about each method.

        Raises:
            InputError: If tokens were fed already, which this would overwrite.
        """
        if self.sequence.has_begun:
            raise InputError(
                f"warm_up overwrites the cache, which holds {self.length.tolist()} tokens; call it first, or reset()"
            )
        methods = list(self.runner.methods.values())
        with self.runner.waiting() if isinstance(self.runner, WaitsForGraphs) else nullcontext():
            self._run_all(methods, progress)
        self.reset()

    def _run_all(self, methods: Sequence[ProgramMethod], progress: Progress) -> None:
        graph_of = self.runner.graph_of if isinstance(self.runner, WaitsForGraphs) else str
        warm: set[object] = set()
        for done, method in enumerate(methods):
            progress(f"warming up {method.name}", done, len(methods))
            examples = list(smallest_inputs(method, self.batch_size, self.device))
            if graph_of(method.name) not in warm:
                for inputs in examples:
                    self.runner.run(method.name, *inputs)
                if self.runner.methods[method.name] != method:
                    # Compiling it found that it takes longer steps only.
                    for inputs in smallest_inputs(self.runner.methods[method.name], self.batch_size, self.device):
                        self.runner.run(method.name, *inputs)
            warm.add(graph_of(method.name))
            tokens, further = {"input_ids", "input_pos"}, {ROPE_DELTAS.name, ROPE_LENGTHS.name, ITEMS_SEEN}
            feeds = tokens <= set(method.input_names) <= tokens | further
            if feeds and method.max_length == 1 and self.chooses_in_graph:
                for sampling, steps in product((Sampling(), Sampling(temperature=1.0)), {1, self.steps_per_launch}):
                    choice = (graph_of(method.name), sampling.is_greedy, steps)
                    if method.serves(1, steps) and choice not in warm:
                        warm.add(choice)
                        sampler = Sampler(sampling, examples[-1][0], self.vocab_size)
                        self.runner.run_and_choose(method.name, sampler, *examples[-1], steps=steps)

    @property
    def pending_graphs(self) -> int:
        """Graphs that are being compiled in the background: 0 once every step that was taken has one."""
        return self.runner.pending_graphs if isinstance(self.runner, WaitsForGraphs) else 0

    def close(self) -> None:
        """Put back the attention implementation that a live model had before its first session, with the last of them.

        A session that is no longer referred to is closed as well. Over a bundle there is nothing to put back.
        """
        if hasattr(self.runner, "close"):
            self.runner.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def check_request(self, input_ids: torch.Tensor, max_new_tokens: int | None, stop: Sequence[int]) -> list[int]:
        """Refuse a prompt that could not be answered from an empty cache; nothing changes.

        Returns:
            The tokens that end an answer: the model's own and `stop`.
        """
        check_max_new_tokens(max_new_tokens)
        self._stepper.check_room(self._checked(input_ids).rows, max_new_tokens, anew=True)
        tokens, strings = split_stops(stop, self.vocab_size)
        if strings:
            raise InputError(f"stop has {strings[0]!r}; rows of a batch stop at token ids only")
        return [*self.generation_settings.ends, *tokens]

    # -- the state, kept and copied ------------------------------------------------------------------------------------

    @property
    def cache(self) -> ExportableCache:
        """The cache given to `from_model`, brought up to date: its lengths, and whether cross-attention was computed.

        Raises:
            InputError: If the session runs a bundle, whose cache is inside the program, or is a fork.
        """
        if self._cache is None and self.target in ("eager", "compiled"):
            raise InputError(
                "a fork has no cache object of its own: its tensors take turns in that of the session it was forked "
                "from; save_state() writes what it holds"
            )
        if self._cache is None:
            raise InputError(
                f"a session over a {self.target!r} bundle has no cache object; its program keeps the tensors"
            )
        if isinstance(self.runner, ForkedRunner):
            self.runner.take_turn()
        for layer in self._cache.layers:
            if layer.follows_decoder and not layer.is_dummy:
                layer.cumulative_length.copy_(self.sequence.length)
            layer._max_len_ever = self.sequence.most_ever
        if self._stages.encoder is not None:
            self._stages.encoder.update_cache(self._cache, self.sequence)
        return self._cache

    def save_state(self, path: str | Path) -> None:
        """Write what the cache holds (safetensors, atomically), to go on from in another session of the same model.

        Of a parallel session one file, which rank 0 writes; any number of ranks, or one process, goes on from it.

        Raises:
            InputError: If the runtime does not give out its cache.
        """
        self.check_same("save_state", path=str(path))
        self._stepper.guard.check_whole()
        persistence.save_state(self, Path(path))

    def load_state(self, path: str | Path) -> None:
        """Go on from what `save_state` wrote, on this or another target; nothing changes if it is refused.

        Raises:
            BundleError: If the file is missing, damaged or not a saved state.
            InputError: If it is of another model, other layers, another batch size or dtype, or does not fit.
        """
        persistence.load_state(self, Path(path))

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        raise InputError("a session cannot be copied; fork() it, or save_state() and load_state() into another")

    def fork(self) -> Session:
        """A second session that goes on from here by itself, over the same weights and compiled graphs.

        Each keeps a cache of its own; whenever another one's turn comes, the cache in place is exchanged, at the cost
        of a copy. The session that was forked goes on unchanged.

        Raises:
            InputError: If the runtime does not give out its cache.
        """
        persistence.runner_state(self)
        self.runner, runner = ForkedRunner.of(self.runner)
        forked = copy.copy(self)
        forked._stepper = copy.copy(self._stepper)
        forked._stepper.guard = self._stepper.guard.forked()
        forked.runner = runner
        forked._cache = None
        return forked

    # -- generation --------------------------------------------------------------------------------------------------

    def generate(
        self,
        input_ids: torch.Tensor | Sequence[torch.Tensor | Sequence[int]],
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        stop: int | str | Sequence[int | str] | None = None,
        draft: Draft | None = None,
        **inputs: torch.Tensor,
    ) -> Iterator[Any]:
        """Tokens that follow a prompt, one step each. Arguments are checked now, steps run as the iterator is consumed.

        It continues from where the session is: `reset()` first for a new sequence. The newest token given out is not in
        the cache yet; to continue after the end, start the next prompt with it, as `generate_text` does.

        Args:
            input_ids: int64 [batch, length]; or a list of prompts of any length, one per row, each int64 [length] or
                token ids.
            max_new_tokens: Most tokens per row; by default the checkpoint's own limit (`max_new_tokens` or `max_length`
                of its generation config), or else as many as fit, beside the fullest row.
            temperature, top_k, top_p, min_p, seed: See `decoding.Sampling`; greedy by default.
            repetition_penalty: See there; the checkpoint's by default. What else its generation config asks of the
                choice of tokens holds, too: see `generation_settings`, and set fields of `generation_config` to change
                it.
            stop: Token ids that end a row, besides the model's end tokens, or strings where there is a tokenizer. The
                token that ends a row is given out too.
            draft: Speculative decoding, at batch size 1: `PromptLookup()` or `DraftModel(session)`. The tokens are
                those of plain decoding, or follow the same distribution; several are judged per step.
            **inputs: What a tokenizer or processor gives beside input_ids, `attention_mask` among it, as `prefill`
                takes it: `generate(**tokenizer(texts, padding=True, return_tensors="pt"))`.

        Yields:
            A token id (int) at batch size 1, otherwise int64 [batch], where ended rows give the padding token. They
            stay at the length they ended with while others go on, unless a layer keeps a state that cannot be taken
            back.

        Raises:
            InputError: If an argument is wrong.
            CacheFullError: If the prompt, or the prompt with `max_new_tokens`, does not fit.
        """
        given = (max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, stop)
        self.check_same("generate", input_ids=input_ids, options=given, draft=draft, inputs=inputs)
        sampling = self.agreed(Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed))
        request = make_request(self, max_new_tokens, sampling, stop, draft)
        steps = checked_steps(self, input_ids, inputs, request)
        return (int(step[0]) for step in steps) if self.batch_size == 1 else steps

    def generate_text(
        self,
        prompt: str | Sequence[Mapping[str, Any]] | Mapping[str, torch.Tensor] | Sequence[Any],
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        stop: int | str | Sequence[int | str] | None = None,
        draft: Draft | None = None,
    ) -> Iterator[Any]:
        """Text that follows a prompt, in pieces that never split a character and join to the whole.

        An encoder-decoder encodes the prompt, and its decoder starts anew with the model's start token.

        Text continues from where the session is, and so from all that was generated before: the newest token given out,
        which is not in the cache yet, is fed in front of the prompt and takes one token of room. It is left out if it
        is an end or a stop token, or if the session was reset, rewound or fed something else since. Chat messages are a
        whole conversation: with them the session starts again. What ends the text (an end token, a stop token or a stop
        string) is not part of it; the tokens that made up a stop string are seen by text that continues.

        Args:
            prompt: Text, or chat messages such as `[{"role": "user", "content": "hello"}]`. Empty text goes on from the
                newest token, where one is left to be fed. Or what a processor gives, `processor(...)`, fed as
                `generate` does; with an encoder-decoder as `encode` does, and the answer begins with
                `decoder_input_ids` [1, length] behind the start token, if they are in it. Or a list of texts, or of
                conversations, one per row: then each step gives a list of pieces, one per row.
            max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, stop, draft: See `generate`.

        Raises:
            InputError: If there is no tokenizer, there is not one prompt per row, or an argument is wrong.
            CacheFullError: See `generate`.
        """
        given = (max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, stop)
        self.check_same("generate_text", prompt=prompt, options=given, draft=draft)
        sampling = self.agreed(Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed))
        request = make_request(self, max_new_tokens, sampling, stop, draft)
        return generated_text(self, prompt, request)
