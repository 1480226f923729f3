"""`Session`: prefill, decode and generate over any target (eager, compiled, or a bundle); `load` opens a bundle."""

from __future__ import annotations

import copy
import functools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from transformers import GenerationConfig

from ..backends.base import GRAPH_CACHE_MB, ChoosesInGraph, HasDevice, WaitsForGraphs
from ..backends.wrappers import ForkedRunner
from ..common.process.quiet import quietly
from ..common.progress import silent
from ..common.tensors import ordinary_tensors
from ..errors import InputError
from ..generation.checkpoint_settings import CheckpointSettings
from ..generation.loop import check_steps_per_launch
from ..generation.sampling import Sampler, Sampling
from ..models.lora import ADAPTERS
from ..models.tokenizers.text import TextTokenizer
from ..program.methods import ITEMS_SEEN, ROPE_DELTAS, ROPE_LENGTHS, smallest_inputs
from . import persistence
from .adapters import SessionAdapters, read_adapter
from .checks import (
    PROTECTED,
    ProgramLimits,
    check_ids,
    check_max_new_tokens,
    check_one_id_a_token,
    check_room,
    split_stops,
)
from .generate import checked_steps, generated_text, make_request, prompts_of
from .inputs.items import recorded_placeholders
from .inputs.stages import InputStages
from .state import LoadedAdapter, SequenceState
from .stepper import ProgramStepper

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

    from ..backends.base import Runner
    from ..bundle.bundle import Bundle
    from ..cache.layers import CacheLayer
    from ..common.progress import Progress
    from ..generation.speculative import Draft
    from ..models.cache_factory import ExportableCache, ExportableEncoderDecoderCache
    from ..models.loading.adapters import LoraWeights
    from ..parallel.ranks import Ranks
    from ..program.methods import ProgramMethod
    from .rows import Prompt


class Session:
    """A running program with the position of each row: it takes prompts and gives logits, tokens and text.

    Open one with `from_model` or `load`. Every call checks its arguments and the room in the cache before anything
    runs, so a refused call changes nothing.

    Args:
        runner: Runs the methods of the program.
        layers: Layers of the cache. Only their limits are read, so they need no tensors.
        vocab_size: Token ids run from 0 to vocab_size - 1.
        batch_size: Number of rows.
        tokenizer: Tokenizer for text.
        generation_config: Settings of the checkpoint, see `generation_settings`. `generate` ends rows with its
            `eos_token_id` and fills them with its `pad_token_id`.
        device: Device of the inputs and the logits.
        target: Name of the target, for reports.
        fingerprint: Fingerprint of the model's weights, see `fingerprint.fingerprint`. A saved state of other weights
            is refused.
        placeholders: Token ids that represent images or audio, by the name of the method that encodes them.
        steps_per_launch: Number of decode steps that `generate` runs at once, see `from_model`.

    Attributes:
        stepper: Runs the steps. Decoding loops use it directly; it does not check token ids.
        stages: Turn what a user gives into inputs of steps.
        parts_of_heads: Number of parts that each layer's heads are split into over ranks; empty for one process.
        load_processor: Returns the processor of images or audio; None if the model came without one.
        encoded_ids: Output of the encoder and the tokens of each row that it encoded; None if it took no tokens.

    Raises:
        InputError: If this cache or this runtime does not allow `steps_per_launch`.

    Example:
        >>> session = load("artifacts/demo")
        >>> session.generate_text("the code of amber is 4821. amber?", max_new_tokens=6)
    """

    _cache: ExportableCache | None = None
    _scores_by_default = False
    load_processor: Callable[[], ProcessorMixin] | None = None

    def __init__(
        self,
        runner: Runner,
        layers: Sequence[CacheLayer],
        vocab_size: int,
        *,
        batch_size: int,
        tokenizer: PreTrainedTokenizerBase | TextTokenizer | None = None,
        generation_config: GenerationConfig | None = None,
        device: torch.device | str = "cpu",
        target: str = "eager",
        fingerprint: str | None = None,
        placeholders: Mapping[str, int] | None = None,
        steps_per_launch: int = 1,
    ) -> None:
        self.vocab_size = vocab_size
        self.batch_size = batch_size
        self.text_tokenizer = tokenizer
        self.generation_config = generation_config
        self.device = torch.device(device)
        self.target = target
        self.fingerprint = fingerprint
        codebooks = next((method.codebooks for method in runner.methods.values() if method.codebooks), None)
        limits = ProgramLimits(batch_size, vocab_size, self.device, codebooks)
        self.stepper = ProgramStepper(runner, layers, limits, target)
        self.stages = InputStages(runner.methods, placeholders or {}, limits)
        check_steps_per_launch(self, steps_per_launch)
        self.stepper.steps_per_launch = steps_per_launch
        self.parts_of_heads: tuple[int, ...] = ()
        self.encoded_ids: tuple[torch.Tensor, list[torch.Tensor]] | None = None
        self._adapters = SessionAdapters(None)
        self._settings: tuple[object, CheckpointSettings] | None = None
        self._warned: frozenset[str] = frozenset()

    # -- properties --------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Tokenizer of transformers; that of a bundle is made on first use."""
        if isinstance(self.text_tokenizer, TextTokenizer):
            self.text_tokenizer = self.text_tokenizer.whole
        return self.text_tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.text_tokenizer = tokenizer

    @property
    def processor(self) -> ProcessorMixin | None:
        """Processor of images or audio, made on first use; None if the model came without one."""
        return None if self.load_processor is None else self.load_processor()

    @processor.setter
    def processor(self, processor: ProcessorMixin | None) -> None:
        self.load_processor = None if processor is None else lambda: processor

    @property
    def runner(self) -> Runner:
        """Runner of the program's methods."""
        return self.stepper.runner

    @runner.setter
    def runner(self, runner: Runner) -> None:
        self.stepper.use(runner)

    @property
    def layers(self) -> tuple[CacheLayer, ...]:
        """Layers of the cache; those of a bundle have limits and no tensors."""
        return self.stepper.layers

    @property
    def length(self) -> torch.Tensor:
        """Number of tokens in each row, int64 [batch] on the host."""
        return self.stepper.state.length.clone()

    @property
    def unfed(self) -> tuple[int | None, ...]:
        """Newest token of each row that a generation gave out; None if something was fed since, or it ended the row."""
        return self.stepper.state.unfed

    @property
    def max_length(self) -> int | None:
        """Tokens that a row can hold, or None if all layers are rings."""
        return self.stepper.max_length

    @property
    def room(self) -> int | None:
        """Number of tokens that fit every row, or None for any number."""
        return self.stepper.room

    @property
    def score_length(self) -> int:
        """Most tokens that `score` takes; 0 if the program has no such method."""
        return self.stepper.score_length

    @property
    def codebooks(self) -> int | None:
        """Number of ids in each token, for models with several codebooks.

        Tokens are then [batch, length, codebooks], and logits [batch, codebooks, vocab] if the model has one head each.
        """
        return self.stages.limits.codebooks

    @property
    def placeholders(self) -> tuple[int, ...]:
        """Token ids that represent images or audio in a prompt; empty if the session takes text only."""
        return self.stages.placeholders

    @property
    def has_encoder(self) -> bool:
        """True for an encoder-decoder, whose input goes through `encode`."""
        return self.stages.encoder is not None

    @property
    def generation_settings(self) -> CheckpointSettings:
        """Settings of `generation_config` for the choice of tokens, read again after its fields were set.

        A setting that is not followed causes one warning.

        Raises:
            InputError: If a setting is not valid.
        """
        return self.settings_of(self.generation_config)

    def settings_of(self, config: GenerationConfig | None) -> CheckpointSettings:
        """Return the settings of a generation config for this model, see `generation_settings`.

        Raises:
            InputError: If a setting is not valid.
        """
        # Compared by value, because fields may be set between two calls.
        source = repr(None if config is None else vars(config)), getattr(self.text_tokenizer, "eos_token_id", None)
        if self._settings is not None and self._settings[0] == source:
            return self._settings[1]
        settings = CheckpointSettings.read(config, self.vocab_size, self.text_tokenizer)
        self._settings = source, settings
        new = settings.unheeded.keys() - self._warned
        self._warned |= new
        for remark in settings.remarks() if new else ():
            warnings.warn(remark, UserWarning, stacklevel=3)
        return settings

    # -- ranks -------------------------------------------------------------------------------------------------------

    def use_ranks(self, ranks: Ranks | None, parts_of_heads: tuple[int, ...]) -> None:
        """Agree with the other ranks on arguments and tokens, if the model is split over processes."""
        self.stepper.ranks, self.parts_of_heads = ranks, parts_of_heads

    def check_same(self, call: str, **values: Any) -> None:
        """Check that all ranks make the same call at the same length.

        It comes before all other checks, because an error on one rank only would leave the others waiting.

        Raises:
            InputError: If they do not; on every rank.
            RankLostError: If a rank has ended.
        """
        if self.stepper.ranks is not None:
            self.stepper.ranks.check_same(call, length=self.stepper.state.length, **values)

    def agreed(self, sampling: Sampling) -> Sampling:
        """Return the sampling settings for all ranks: with rank 0's seed if they draw and have none."""
        if self.stepper.ranks is None or sampling.is_greedy or sampling.seed is not None:
            return sampling
        return replace(sampling, seed=self.stepper.ranks.seed())

    # -- steps -------------------------------------------------------------------------------------------------------

    def encode(self, main_input: torch.Tensor | None = None, **inputs: torch.Tensor) -> torch.Tensor:
        """Run the encoder of an encoder-decoder, and reset the decoder; the next prefill attends to the output.

        `reset()` starts another response to the same input.

        Args:
            main_input: int64 [batch, length] token ids, or the features that the encoder takes.
            **inputs: The same by name, as a tokenizer or processor gives it (input_ids, input_features or
                input_values), and `attention_mask` [batch, length], 0 on the padding after each row.

        Returns:
            Hidden states [batch, encoder_length, hidden_size].

        Raises:
            InputError: If the model has no encoder, or an input is not valid; nothing has changed then.
        """
        encoder = self.stages.encoder
        if encoder is None:
            raise InputError(f"this {self.target!r} session runs a text decoder, which has no encoder; use prefill")
        if main_input is not None:
            inputs = {encoder.method.inputs[0].name: main_input, **inputs}
        with self.stepper.guard:
            hidden = encoder.encode(inputs, self.stepper)
            ids, mask = inputs[encoder.method.inputs[0].name], inputs.get("attention_mask")
            if ids.dtype == torch.int64:
                rows = list(ids) if mask is None else [row[real.bool()] for row, real in zip(ids, mask, strict=True)]
                self.encoded_ids = (hidden, rows)
            self.stepper.reset()
        return hidden

    def prefill(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **inputs: torch.Tensor
    ) -> torch.Tensor:
        """Feed a prompt of any length after the tokens that were fed before. Long prompts are fed in chunks.

        Rows of a batch may differ in length. Padding is not written to the cache.

        Args:
            input_ids: int64 [batch, length], length at least 1; [batch, length, codebooks] for several codebooks.
            attention_mask: [batch, length], 0 on the padding before or after each row's tokens.
            **inputs: Further outputs of a processor (pixel_values, input_features), if the session has modalities.

        Returns:
            Logits [batch, vocab] of each row's last token.

        Raises:
            InputError: If a shape, dtype, device or token id is wrong, or a row has no token. Also if a shorter row
                would lose tokens while longer rows are fed, and the runtime does not give out its cache to save them.
            CacheFullError: If the prompt does not fit.
        """
        self.check_same("prefill", input_ids=input_ids, attention_mask=attention_mask, inputs=inputs)
        prompt = self._checked(input_ids, attention_mask, inputs)
        with self.stepper.guard:
            self.stepper.check_room(prompt.rows)
            return self.stepper.feed(self.stages.steps(prompt, self.stepper))

    def _checked(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        inputs: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> Prompt:
        if not isinstance(input_ids, torch.Tensor):
            check_ids("input_ids", input_ids, ("batch", "length"), self.stages.limits)
        return self.stages.check(input_ids, attention_mask, inputs, self.stepper.state)

    @contextmanager
    def paced(self, most_tokens: int, before_chunk: Callable[[], None]) -> Iterator[None]:
        """Feed prompts in short chunks within the block, and call `before_chunk` before each.

        Args:
            most_tokens: Longest chunk, at least 3. A program whose methods only take longer chunks keeps its own sizes.
            before_chunk: An exception that it raises ends the prompt. The session keeps the chunks that were fed.
        """
        stepper = self.stepper
        before = stepper.most_a_chunk, stepper.before_chunk
        stepper.most_a_chunk, stepper.before_chunk = most_tokens, before_chunk
        try:
            yield
        finally:
            stepper.most_a_chunk, stepper.before_chunk = before

    def score(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Feed a few tokens like `prefill`, and return the logits after every token.

        Args:
            input_ids: int64 [batch, length], length 1 to `score_length`.

        Returns:
            Logits [batch, length, vocab].

        Raises:
            InputError: If the program has no `score` method, or as `prefill` does.
            CacheFullError: If the tokens do not fit.
        """
        if self.score_length == 0:
            raise InputError(
                "this program gives the logits of the last token only; make the session, or export, with "
                "score_length=8 or more"
            )
        rows = self._checked(input_ids).rows
        with self.stepper.guard:
            self.stepper.check_room(rows)
            if input_ids.shape[1] > self.score_length:
                raise InputError(f"score takes up to {self.score_length} tokens at once, got {input_ids.shape[1]}")
            return self.stepper.score(input_ids)

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Feed one token per row.

        Args:
            tokens: int64 [batch], or [batch, codebooks].

        Returns:
            Logits [batch, vocab].

        Raises:
            InputError: If the shape, dtype, device or a token id is wrong.
            CacheFullError: If a row has no slot left.
        """
        self.check_same("decode", tokens=tokens)
        check_ids("tokens", tokens, ("batch",), self.stages.limits)
        with self.stepper.guard:
            if self.stages.encoder is not None:
                self.stages.encoder.check_encoded(self.stepper.state)
            check_room(self.stepper.state.longest, self.max_length, 1)
            return self.stepper.step(tokens[:, None])

    def decode_for_generation(self, tokens: torch.Tensor) -> torch.Tensor:
        """Feed one token per row as transformers' `generate` does.

        It is `decode`, except for rows that cross the length at which transformers computes the whole sequence again
        (LongRoPE of Phi 3). These are recomputed in chunks, at the cost of a prompt of that length.

        Args:
            tokens: int64 [batch].

        Returns:
            Logits [batch, vocab].

        Raises:
            InputError: See `decode`; or if the tokens of such a row are not known.
            CacheFullError: If a row has no slot left.
        """
        if not self.stepper.crossing([1] * self.batch_size):
            return self.decode(tokens)
        self.check_same("decode_for_generation", tokens=tokens)
        check_ids("tokens", tokens, ("batch",), self.stages.limits)
        with self.stepper.guard:
            check_room(self.stepper.state.longest, self.max_length, 1)
            return self.stepper.decode_for_generation(tokens)

    def decode_and_choose(self, tokens: torch.Tensor, chooser: Sampler, steps: int = 1) -> torch.Tensor:
        """Feed one token per row, choose the next ones (inside the graph if the target can), and feed those.

        Args:
            tokens: int64 [batch]. The ids are not checked, because loops feed what was chosen from the vocabulary.
            chooser: Chooses the tokens.
            steps: 1, or `steps_per_launch`.

        Returns:
            int64 [batch, steps]; all but the last of each row are in the cache.

        Raises:
            CacheFullError: See `decode`.
        """
        check_one_id_a_token(self.codebooks)
        with self.stepper.guard:
            check_room(self.stepper.state.longest, self.max_length, steps)
            return self.stepper.decode_and_choose(tokens, chooser, steps)

    def reset(self) -> None:
        """Return to position 0; the next step is the first of a sequence.

        The buffers are zeroed, except by runtimes that do not give them out (executorch). Those keep their contents,
        which no query sees. If a sequence has left infinities or NaN there, load the bundle again, because zero times
        those is not zero.
        """
        with self.stepper.guard:
            self.stepper.reset()

    def rewind(self, tokens: int) -> None:
        """Take back the newest tokens of every row, so that others can replace them.

        A generated token that was given out and not fed is dropped as well, and not counted: `rewind(0)` drops only it.

        Args:
            tokens: Number of tokens, at least 0.

        Raises:
            InputError: If a row holds fewer, a ring has overwritten a token that would be needed again, a layer keeps a
                state, or only part of an image would remain.
        """
        self.stepper.guard.check_whole()
        self.stepper.move_to(self.stepper.state.rewound(tokens, self.layers))

    def shift(self, count: int, first: int = 0) -> None:
        """Drop old tokens of every row, so that a full cache has room: later tokens move to lower positions.

        Keys are rotated to their new positions by the model's own formula. The next logits are those of the model over
        the kept keys and values at these positions. Deeper layers computed them with the dropped tokens in sight.

        Args:
            count: Number of tokens to drop.
            first: Number of tokens before them that stay, such as a system prompt.

        Raises:
            InputError: If a number is out of range, a sliding window would lack tokens, an image would be cut, it is
                unknown which factors of RoPE the keys have, or the program has no such method (`shift=True`).
            UnsupportedModelError: If the model's keys are not a rotation by their position.
        """
        self.check_same("shift", count=count, first=first)
        with self.stepper.guard:
            self.stepper.drop(first, count)
            self.stepper.moves += 1

    # -- adapters ----------------------------------------------------------------------------------------------------

    def use_slots(self, adapters: SessionAdapters) -> None:
        """Load and choose the adapters in the slots of the program."""
        self._adapters = adapters

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the LoRA adapters that are loaded."""
        return tuple(self._adapters.names)

    def named_adapter(self, name: str | None) -> LoadedAdapter:
        """Return a loaded adapter by its name; None for the model itself.

        Raises:
            InputError: If no adapter has this name.
        """
        return self._adapters.named(name)

    def read_adapter(self, path: str | os.PathLike, key: str | os.PathLike | None = None) -> LoraWeights:
        """Read a LoRA adapter and check that it fits the slots of the program, see `load_adapter`."""
        return read_adapter(path, self._adapters.checked(), self.fingerprint, key)

    def load_adapter(
        self, path: str | os.PathLike, name: str | None = None, key: str | os.PathLike | None = None
    ) -> str:
        """Load a LoRA adapter into a free slot of the program, or in place of the one of the same name.

        Nothing is compiled, and rows that use other adapters are not disturbed.

        Args:
            path: File of `exportable-cache adapter`, or a folder that peft saved. A folder is compared with the program
                by names and shapes only.
            name: Name for `use_adapter`; by default that of the folder.
            key: File of the public key that must have signed the file; None for no signature check.

        Returns:
            The name.

        Raises:
            BundleError: If the file is damaged, or not signed with the key.
            InputError: If the program has no slot for it, or the adapter was made for other weights, does not fit, or
                has values that are not finite.
            UnsupportedModelError: If the adapter changes more than linear layers.
        """
        adapter = self.read_adapter(path, key)
        name = adapter.name if name is None else name
        with self.stepper.guard:
            self._adapters.load(self.runner, adapter, name)
        return name

    def unload_adapter(self, name: str) -> None:
        """Free the slot of an adapter. Rows that use it continue without an adapter.

        Raises:
            InputError: If no adapter has this name.
        """
        with self.stepper.guard:
            self._adapters.unload(self.runner, name)

    def use_adapter(self, name: str | None | Sequence[str | None]) -> None:
        """Run the next steps with a loaded adapter; None for the model itself.

        Tokens that are in the cache keep the keys and values that they were computed with: `reset()` first for a new
        sequence. `reset()` does not change the adapter.

        Args:
            name: Name of the adapter for all rows, or a list with one for each row.

        Raises:
            InputError: If no adapter has this name, or the list does not have one for each row.
        """
        with self.stepper.guard:
            self._adapters.use(self.stepper, name)

    # -- opening -----------------------------------------------------------------------------------------------------

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        cache: ExportableCache | None = None,
        *,
        max_cache_len: int | None = None,
        compile: bool | Literal["background", "wait"] = False,
        mode: str | None = None,
        prefill_chunk: int | None = None,
        buckets: bool | Sequence[int] = True,
        score_length: int | None = None,
        steps_per_launch: int = 1,
        modalities: Sequence[str] | Mapping[str, Any] = (),
        image_size: int | Sequence[int] | None = None,
        lora_slots: int = 0,
        lora_rank: int = 16,
        lora_targets: Sequence[str] = (),
        draft: str | Path | None = None,
        graph_cache: str | Path | None = None,
        graph_cache_mb: int = GRAPH_CACHE_MB,
        tokenizer: PreTrainedTokenizerBase | None = None,
        progress: Progress = silent,
    ) -> Session:
        """Run a live model over a cache, which may hold tokens already: the session continues after them.

        The session owns the cache. It writes keys and values in place, and does not see steps taken with the cache
        elsewhere. The model's attention implementation is replaced by ours until `close`, or the end of a `with` block.

        Args:
            model: A causal LM of transformers in eval mode.
            cache: A cache allocated for it; None to allocate one for a single row.
            max_cache_len: Tokens that this cache holds, 4096 or the model's positions by default. Its rings can take
                back the tokens of a draft.
            compile: Run through torch.compile, one graph per method. With True, a subprocess compiles while steps run
                uncompiled over the same cache; if that is not possible (on MPS, with a `mode`, on a GPU with little
                memory left, or for a model that cannot be sent to a process), each method is compiled on first use.
                "wait" always compiles on first use. "background" raises an error instead; only on CUDA, this process
                compiles graphs that the subprocess could not.
            mode: Mode of torch.compile. Without one, steps of one size are CUDA graphs of this package on a GPU.
            prefill_chunk: Longest chunk of a prompt, see `methods.methods_for`.
            buckets: Read lengths that have methods of their own, so that a step reads the filled part of the cache
                instead of all of it. True for powers of two, see `methods.length_buckets`; False for none.
            score_length: Most tokens that `score` takes, as speculative decoding needs it; 0 for no such method, which
                is the default with a cache. Without one, drafts work by default, if the cache can take tokens back.
            steps_per_launch: Number of decode steps that `generate` runs at once. Each chooses the tokens of the next
                inside the graph: the same tokens, with less overhead per step. Tokens after a stop are taken back.
                Each decode method gets a second graph, that many times as large. Drafts do not need it.
            modalities: Names of the inputs besides text: `image`, `video` and `audio`; or a dict of what the processor
                gives for one item of each, which fixes the sizes, see `modalities.modalities_of`.
            image_size: Size of every image in pixels, if the model's config does not state it.
            lora_slots: Number of LoRA adapters that the session holds at once, see `load_adapter`; 0 for none. Linear
                layers of the model then have buffers for them; its weights and its state dict stay the same.
            lora_rank: Largest rank of these adapters.
            lora_targets: Names of the linear layers that they may change; all of the decoder by default.
            draft: "mtp" to attach the multi-token-prediction modules of the checkpoint, or the folder of an EAGLE-3
                head, for `TrainedDraft`; None for no draft head. A cache must be allocated after it is attached, see
                `draft_heads.attach_head`.
            graph_cache: Folder that keeps compiled graphs, so that a later process neither traces nor compiles them,
                see `backends.live.graph_cache.GraphCache`; only with `compile`.
            graph_cache_mb: Size limit of the folder in megabytes; the least recently used graphs are deleted first.
            tokenizer: Tokenizer for text.
            progress: Receives the graphs that are compiled in the background, from another thread.

        Raises:
            InputError: If the model is in training mode, or the cache does not fit it or holds more tokens than it has
                positions. Also if an argument is out of range, such as more steps per launch than a ring with these
                rollback slots, or a state of fixed size, can take back.
        """
        from ..backends.live.compile import CompileOptions
        from ..models.cache_factory import check_is_model
        from ..models.draft_heads import attach_head
        from ..program.lengths import needs_equal_rows
        from .live import LiveOptions, changing_rope, live_session, new_cache, scored_by_drafts

        check_is_model(model)
        plans_drafts = cache is None and score_length is None
        if draft is not None:
            attach_head(model, draft)
        if cache is None:
            cache = new_cache(model, max_cache_len)
        elif max_cache_len is not None:
            raise InputError(f"max_cache_len must be left out with a cache, got {max_cache_len}; pass one of them")
        options = LiveOptions(
            CompileOptions(compile, mode, graph_cache, graph_cache_mb, progress),
            prefill_chunk=prefill_chunk,
            buckets=buckets,
            score_length=scored_by_drafts(cache) if plans_drafts else score_length or 0,
            steps_per_launch=steps_per_launch,
            modalities=modalities,
            image_size=image_size,
            lora=(lora_slots, lora_rank, lora_targets),
        )
        session = live_session(cls, model, cache, options, tokenizer)
        session._cache, session._scores_by_default = cache, plans_drafts
        if lora_slots:
            session.use_slots(SessionAdapters.of_model(model, session.device))
        session.use_ranks(cache.ranks, cache.parts_of_heads)
        session.stepper.rope = changing_rope(model, cache)
        # A copy, because the session owns its lengths and the cache writes its own.
        length = cache.cumulative_length.detach().cpu().clone()
        session.stepper.move_to(SequenceState.of_layers(cache.layers, length))
        session.stepper.needs_equal_rows = functools.cache(lambda: needs_equal_rows(model, cache))
        return session

    @classmethod
    def from_bundle(cls, bundle: Bundle, runner: Runner | None = None) -> Session:
        """Open the program of a bundle at position 0.

        Args:
            bundle: The bundle.
            runner: A runner to use instead of the bundle's program.
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
        session.stepper.needs_equal_rows = lambda: manifest.program.equal_rows
        if manifest.program.rope is not None:
            session.stepper.rope = manifest.program.rope.described()
            session.stepper.move_to(session.stepper.state)
        if manifest.program.lora is not None:
            session.use_slots(SessionAdapters(manifest.program.lora.described(), session.device))
        session.stepper.logits_size = manifest.logits_size or manifest.vocab_size
        if bundle.has_processor:
            session.load_processor = functools.cache(bundle.processor)
        return session

    def warm_up(self, progress: Progress = silent) -> None:
        """Run every method, so that no later step waits for a compilation, and reset.

        The graph that applies the repetition penalty is still compiled on first use, and so are those that score drafts
        if `score_length` was not given.

        Args:
            progress: Receives each method.

        Raises:
            InputError: If the session holds tokens, which would be overwritten.
        """
        if self.stepper.state.has_begun:
            raise InputError(
                f"warm_up overwrites the cache, which holds {self.length.tolist()} tokens; call it first, or reset()"
            )
        methods = [one for one in self.runner.methods.values() if not (self._scores_by_default and one.only_scores)]
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
                    # Compiling has narrowed the lengths that the method takes.
                    for inputs in smallest_inputs(self.runner.methods[method.name], self.batch_size, self.device):
                        self.runner.run(method.name, *inputs)
            warm.add(graph_of(method.name))
            tokens, extra = {"input_ids", "input_pos"}, {ROPE_DELTAS.name, ROPE_LENGTHS.name, ITEMS_SEEN, ADAPTERS.name}
            feeds = tokens <= set(method.input_names) <= tokens | extra
            if feeds and method.max_length == 1 and self.stepper.chooses_in_graph:
                samplings, launches = (Sampling(), Sampling(temperature=1.0)), {1, self.stepper.steps_per_launch}
                for sampling, steps in product(samplings, launches):
                    choice = (graph_of(method.name), sampling.is_greedy, steps)
                    if method.serves(1, steps) and choice not in warm:
                        warm.add(choice)
                        sampler = Sampler(sampling, examples[-1][0], self.vocab_size)
                        choosing = cast(ChoosesInGraph, self.runner)
                        choosing.run_and_choose(method.name, sampler, *examples[-1], steps=steps)

    @property
    def pending_graphs(self) -> int:
        """Number of graphs being compiled in the background; 0 once every method that was used has its graph."""
        return self.runner.pending_graphs if isinstance(self.runner, WaitsForGraphs) else 0

    def close(self) -> None:
        """Close the session; closing the last one over a live model restores the model's attention implementation.

        Garbage collection closes a session as well. A session over a bundle has nothing to restore.
        """
        if hasattr(self.runner, "close"):
            self.runner.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def check_request(self, input_ids: torch.Tensor, max_new_tokens: int | None, stop: Sequence[int]) -> list[int]:
        """Check that a prompt and its response fit an empty cache; nothing changes.

        Returns:
            The tokens that end the response: the model's end tokens and `stop`.
        """
        check_max_new_tokens(max_new_tokens)
        self.stepper.check_room(self._checked(input_ids).rows, max_new_tokens, from_start=True)
        tokens, strings = split_stops(stop, self.vocab_size)
        if strings:
            raise InputError(f"stop must be token ids for rows of a batch, got {strings[0]!r}; leave out strings")
        return [*self.generation_settings.ends, *tokens]

    # -- saved and copied states -------------------------------------------------------------------------------------

    @property
    def cache(self) -> ExportableCache:
        """Cache that was given to `from_model`, with its lengths and cross-attention flags brought up to date.

        Raises:
            InputError: If the session runs a bundle, whose cache is inside the program, or is a fork.
        """
        if self._cache is None and self.target in ("eager", "compiled"):
            raise InputError(
                "a fork has no cache object: its tensors are swapped into the cache of the session that it was forked "
                "from; save_state() writes what it holds"
            )
        if self._cache is None:
            raise InputError(
                f"a session over a {self.target!r} bundle has no cache object; its program keeps the tensors"
            )
        if isinstance(self.runner, ForkedRunner):
            self.runner.activate()
        for layer in self._cache.layers:
            if layer.follows_decoder and not layer.is_dummy:
                layer.cumulative_length.copy_(self.stepper.state.length)
            layer._max_len_ever = self.stepper.state.most_ever
        if self.stages.encoder is not None:
            cache = cast("ExportableEncoderDecoderCache", self._cache)
            self.stages.encoder.update_cache(cache, self.stepper.state)
        return self._cache

    def save_state(self, path: str | Path) -> None:
        """Write the contents of the cache (safetensors, atomically), for another session of the same model.

        Rank 0 of a parallel session writes one file, which any number of ranks, or one process, can load.

        Raises:
            InputError: If the runtime does not give out its cache.
        """
        self.check_same("save_state", path=str(path))
        self.stepper.guard.check_whole()
        persistence.save_state(self, Path(path))

    def load_state(self, path: str | Path) -> None:
        """Load a state that `save_state` wrote, on this or another target; nothing changes if it is refused.

        Raises:
            BundleError: If the file is missing, damaged or not a saved state.
            InputError: If it has another model, other layers, another batch size or dtype, or does not fit.
        """
        persistence.load_state(self, Path(path))

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        raise InputError("a session cannot be copied; fork() it, or save_state() and load_state() into another")

    def fork(self) -> Session:
        """Return a second session that continues from here, over the same weights and compiled graphs.

        Each has its own cache contents. They are swapped whenever another one runs, at the cost of a copy. The forked
        session is not changed.

        Raises:
            InputError: If the runtime does not give out its cache.
        """
        persistence.runner_state(self)
        self.runner, runner = ForkedRunner.of(self.runner)
        forked = copy.copy(self)
        forked.stepper = copy.copy(self.stepper)
        forked.stepper.guard = self.stepper.guard.forked()
        forked.runner = runner
        forked._cache = None
        return forked

    # -- generation --------------------------------------------------------------------------------------------------

    def generate(
        self,
        input_ids: torch.Tensor | Sequence[torch.Tensor | Sequence[int]],
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        stop: int | str | Sequence[int | str] | None = None,
        draft: Draft | None = None,
        generation_config: GenerationConfig | Literal["model"] | None = None,
        on_full: Literal["refuse", "shift"] = "refuse",
        protected: int = PROTECTED,
        **inputs: torch.Tensor,
    ) -> Iterator[Any]:
        """Generate tokens after a prompt. Arguments are checked now; steps run as the iterator is consumed.

        Generation continues from the session's position: `reset()` first for a new sequence. The newest token given out
        is not in the cache yet. To continue later, start the next prompt with it, as `stream_text` does.

        Args:
            input_ids: int64 [batch, length]; or a list of prompts of any length, one per row, each int64 [length] or
                token ids.
            max_new_tokens: Most tokens per row. By default the checkpoint's limit (`max_new_tokens` or `max_length` of
                its generation config), or else what fits after the fullest row.
            temperature: Divisor of the logits; 0 is greedy, see `decoding.Sampling`. By default that of
                `generation_config`, or else 0.
            top_k: Number of most probable tokens to draw from; 0 for all, which is the default without a
                `generation_config`.
            top_p: Probability that the drawn tokens together reach; 1 for all, see `top_k`.
            min_p: Least probability relative to the most probable token; 0 for all, see `top_k`.
            repetition_penalty: Penalty on tokens seen before; the checkpoint's by default. The other settings of its
                generation config are followed too, see `generation_settings`; set its fields to change them.
            seed: Seed of the draws; None for torch's global generator.
            stop: Token ids that end a row, besides the model's end tokens, or strings if there is a tokenizer. The
                token that ends a row is given out too.
            draft: Speculative decoding at batch size 1: `PromptLookup()`, `DraftModel(session)` or
                `TrainedDraft(session)`. Several tokens are scored per step; they are those of plain decoding, or follow
                the same distribution.
            generation_config: "model" to draw as the checkpoint's generation config says, if it has `do_sample`; or a
                config whose settings replace the checkpoint's, which are used for those that it leaves open. None to
                take the most probable token by default. Arguments come before both.
            on_full: What happens when the cache is full. "refuse": a prompt that does not fit is an error, and the
                generation ends. "shift": half of the tokens after the protected ones are dropped, see `shift`; without
                a limit of tokens the generation then ends after half a cache, or where the cache was full.
            protected: Number of first tokens that stay with `on_full="shift"`, such as a system prompt.
            **inputs: Further outputs of a tokenizer or processor, such as `attention_mask`, as `prefill` takes them:
                `generate(**tokenizer(texts, padding=True, return_tensors="pt"))`.

        Yields:
            A token id (int) at batch size 1, otherwise int64 [batch], with the padding token in rows that have ended.
            These keep their length while others continue, unless a layer keeps a state that cannot be taken back.

        Raises:
            InputError: If an argument is wrong.
            CacheFullError: If the prompt, or the prompt with `max_new_tokens`, does not fit.
        """
        given = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "seed": seed,
        }
        options = (max_new_tokens, given, stop, str(generation_config), on_full, protected)
        self.check_same("generate", input_ids=input_ids, options=options, draft=draft, inputs=inputs)
        request = make_request(self, max_new_tokens, given, generation_config, stop, draft)
        if on_full != "refuse":
            request = request.shifting(self.stepper, on_full, protected)
        steps = checked_steps(self, input_ids, inputs, request)
        return (int(step[0]) for step in steps) if self.batch_size == 1 else steps

    def generate_text(self, prompt: Any, max_new_tokens: int | None = None, **options: Any) -> Any:
        """Return the text that `stream_text` yields in pieces.

        Args:
            prompt: See `stream_text`.
            max_new_tokens: See `generate`.
            **options: Further arguments of `stream_text`.

        Returns:
            The text; or a list of texts, one per row, where `stream_text` yields lists.

        Raises:
            InputError, CacheFullError: See `stream_text`.
        """
        pieces = list(self.stream_text(prompt, max_new_tokens, **options))
        if prompts_of(self, prompt)[1]:
            return ["".join(row) for row in zip(*pieces, strict=True)] or [""] * self.batch_size
        return "".join(pieces)

    def stream_text(
        self,
        prompt: str | Sequence[Mapping[str, Any]] | Mapping[str, torch.Tensor] | Sequence[Any],
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        stop: int | str | Sequence[int | str] | None = None,
        draft: Draft | None = None,
        generation_config: GenerationConfig | Literal["model"] | None = None,
        on_full: Literal["refuse", "shift"] = "refuse",
        protected: int = PROTECTED,
    ) -> Iterator[Any]:
        """Generate text after a prompt, in pieces that never split a character and join to the whole.

        An encoder-decoder encodes the prompt, and its decoder starts again with the model's start token.

        Text continues from the session's position. The newest token given out is not in the cache yet, so it is fed in
        front of the prompt and takes one slot. It is left out if it is an end or stop token, or if the session was
        reset, rewound or fed since. Chat messages are a whole conversation and reset the session. An end token, stop
        token or stop string is not part of the text; text that continues sees the tokens of a stop string.

        Args:
            prompt: Text, or chat messages such as `[{"role": "user", "content": "hello"}]`. Empty text continues from
                the newest token. Or the output of a processor, fed as by `generate`; for an encoder-decoder it goes to
                `encode`, and its `decoder_input_ids` [1, length] follow the start token. Or a list of texts or
                conversations, one per row: each step then gives a list of pieces, one per row.
            max_new_tokens: See `generate`.
            temperature: See `generate`.
            top_k: See `generate`.
            top_p: See `generate`.
            min_p: See `generate`.
            repetition_penalty: See `generate`.
            seed: See `generate`.
            stop: See `generate`.
            draft: See `generate`.
            generation_config: See `generate`.
            on_full: See `generate`.
            protected: See `generate`.

        Raises:
            InputError: If there is no tokenizer, there is not one prompt per row, or an argument is wrong.
            CacheFullError: See `generate`.
        """
        given = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "seed": seed,
        }
        options = (max_new_tokens, given, stop, str(generation_config), on_full, protected)
        self.check_same("stream_text", prompt=prompt, options=options, draft=draft)
        request = make_request(self, max_new_tokens, given, generation_config, stop, draft)
        if on_full != "refuse":
            request = request.shifting(self.stepper, on_full, protected)
        return generated_text(self, prompt, request)


@quietly
def load(
    path: str | Path,
    *,
    target: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    check_versions: bool = True,
    trust: bool = False,
    key: str | Path | None = None,
    check: bool = False,
    progress: Progress = silent,
) -> Session:
    """Open a bundle that `export` wrote.

    Args:
        path: Folder of the bundle; or a repository of the hub, such as `user/name`, unless there is a folder `user`.
            Its files are downloaded once, and checked like those of a folder.
        target: Target of the bundle; required if the repository has several.
        revision: Branch, tag or commit of the repository.
        token: Token of the hub; by default that of `hf auth login`.
        check_versions: Refuse a bundle made with other versions of the packages that its target depends on.
        trust: Run machine code in the bundle (targets `aoti` and `tensorrt`), with all rights of the current user.
        key: File of the public key that must have signed it (`export(..., sign=)`); None for no signature check.
        check: Read and check every file. By default a file is skipped if this user has checked it before and its size,
            time stamps, inode and device are unchanged.
        progress: Receives the bytes that were checked.

    Raises:
        BundleError: If it is missing or damaged, has another schema version or other package versions, is not signed
            with the key, or contains machine code that is not trusted.
        InputError: If the key cannot be read, or the hub has no such repository or cannot be reached.
        MissingDependencyError: If its target, or the signature check, needs a package that is not installed.
    """
    from ..bundle.bundle import Bundle
    from ..bundle.hub import HubChoice, local_folder

    folder = local_folder(path, HubChoice(target, revision, token), progress)
    bundle = Bundle.open(
        folder, check_versions=check_versions, trust=trust, key=key, known=not check, to_run=True, progress=progress
    )
    return Session.from_bundle(bundle)
