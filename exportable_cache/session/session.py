"""One object to prefill, decode and generate with, over any target: eager, compiled, or a bundle."""

from __future__ import annotations

import copy
import functools
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
from ..backends.live.fork import ForkedRunner
from ..common.process.quiet import quietly
from ..common.progress import silent
from ..common.tensors import ordinary_tensors
from ..errors import InputError
from ..generation.checkpoint_settings import CheckpointSettings
from ..generation.multi_step import check_steps_per_launch
from ..generation.sampling import Sampler, Sampling
from ..models.tokenizers.text import TextTokenizer
from ..program.items import ITEMS_SEEN
from ..program.methods import ROPE_DELTAS, ROPE_LENGTHS, smallest_inputs
from . import persistence
from .checks import ProgramLimits, check_ids, check_max_new_tokens, check_one_id_a_token, check_room, split_stops
from .generate import checked_steps, generated_text, make_request
from .inputs.items import recorded_placeholders
from .inputs.stages import InputStages
from .state import SequenceState
from .stepper import ProgramStepper, RowGroups

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..backends.base import Runner
    from ..bundle.bundle import Bundle
    from ..cache.layers import CacheLayer
    from ..common.progress import Progress
    from ..generation.speculative import Draft
    from ..models.cache_factory import ExportableCache, ExportableEncoderDecoderCache
    from ..models.parallel.ranks import Ranks
    from ..models.positions import RopeRule
    from ..program.methods import ProgramMethod
    from .inputs.stages import Prompt


class Session:
    """A running program and where each row is in its sequence: it takes prompts and gives tokens and text.

    Open one with `from_model` or `load`. Every call checks its arguments and the room in the cache before anything
    runs: a refused call changes nothing.

    Args:
        runner: What runs the steps.
        layers: The cache's layers; only their limits are asked for, so they need no tensors.
        vocab_size: Token ids run from 0 to vocab_size - 1.
        batch_size: Rows.
        tokenizer: For text.
        generation_config: The checkpoint's settings of generation, see `generation_settings`. Its `eos_token_id` and
            `pad_token_id` end and fill rows in `generate`.
        device: Where inputs are expected and logits come back.
        target: What the runner is, for reports.
        fingerprint: Of the model's weights, see `fingerprint.fingerprint`; saved states are refused to other models by
            it.
        placeholders: Token ids that stand for images or sound, by the method that encodes those.
        steps_per_launch: Decode steps that `generate` runs at once, see `from_model`.

    Raises:
        InputError: If `steps_per_launch` is none that this cache or this runtime allows.

    Example:
        >>> session = load("artifacts/demo")
        >>> "".join(session.generate_text("the code of amber is 4821. amber?", max_new_tokens=6))
    """

    _cache: ExportableCache | None = None

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
        self._stepper = ProgramStepper(runner, layers, limits, target)
        self._stages = InputStages(runner.methods, placeholders or {}, limits)
        check_steps_per_launch(self._stepper, steps_per_launch)
        self._stepper.steps_per_launch = steps_per_launch
        #: Of each layer, into how many parts its heads are cut over ranks; nothing where there is one process.
        self.parts_of_heads: tuple[int, ...] = ()
        #: What the encoder gave, and the tokens of each row that it was given, where these are tokens.
        self.encoded_ids: tuple[torch.Tensor, list[torch.Tensor]] | None = None
        self._warned: frozenset[str] = frozenset()

    # -- where it is -------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Transformers' tokenizer; of a bundle it is made when it is first asked for."""
        if isinstance(self.text_tokenizer, TextTokenizer):
            self.text_tokenizer = self.text_tokenizer.whole
        return self.text_tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.text_tokenizer = tokenizer

    @property
    def runner(self) -> Runner:
        """What runs the steps."""
        return self._stepper.runner

    @runner.setter
    def runner(self, runner: Runner) -> None:
        self._stepper.use(runner)

    @property
    def steps_per_launch(self) -> int:
        """Decode steps that `generate` runs at once."""
        return self._stepper.steps_per_launch

    @property
    def layers(self) -> tuple[CacheLayer, ...]:
        """The cache's layers, as far as their limits go."""
        return self._stepper.layers

    @property
    def sequence(self) -> SequenceState:
        """Where each row is: what is saved and forked beside the cache's tensors."""
        return self._stepper.state

    @property
    def moves(self) -> int:
        """Counts the calls that took it to another place or wrote its cache, but for `shift`."""
        return self._stepper.moves

    @property
    def length(self) -> torch.Tensor:
        """Tokens seen per row, int64 [batch] on the host."""
        return self.sequence.length.clone()

    @property
    def unfed(self) -> tuple[int | None, ...]:
        """The newest token of each row that a generation gave out, while nothing was fed since and it ended nothing."""
        return self.sequence.unfed

    @property
    def max_length(self) -> int | None:
        """Tokens a row can hold in all, or None where only rings keep state."""
        return self._stepper.max_length

    @property
    def room(self) -> int | None:
        """Tokens that every row still has room for, or None for any number."""
        return self._stepper.room

    @property
    def least_rollback(self) -> tuple[str, int]:
        """The layer of which fewest tokens can be taken back at any length, as `layer 2 (ring)`, and how many
        they are.
        """
        return self._stepper.least_rollback

    @property
    def equal_rows(self) -> bool:
        """Whether all rows have to hold as many tokens, because the model's own code asks for one length of them."""
        return self._stepper.equal_rows

    @property
    def codebooks(self) -> int | None:
        """Ids of each token, where these are several: tokens are [batch, length, codebooks] then, logits [batch,
        codebooks, vocab] where the model gives those of each.
        """
        return self._stages.limits.codebooks

    @property
    def chooses_in_graph(self) -> bool:
        """Whether decode steps choose the next tokens inside their graph."""
        return self.codebooks is None and self._stepper.chooses_in_graph

    # -- ranks -------------------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> Ranks | None:
        """The processes that its model is split over, None of a program of one process."""
        return self._stepper.ranks

    def use_ranks(self, ranks: Ranks | None, parts_of_heads: tuple[int, ...]) -> None:
        """Agree with the other ranks, where the cache holds the heads of one."""
        self._stepper.ranks, self.parts_of_heads = ranks, parts_of_heads

    def check_same(self, call: str, **values: Any) -> None:
        """Refuse a call that another rank makes with other arguments, or from another place; before all other checks,
        whose errors would leave the others waiting.

        Raises:
            InputError: On every rank.
            RankLostError: If a rank is gone.
        """
        if self.ranks is not None:
            self.ranks.check_same(call, length=self.sequence.length, **values)

    def agreed(self, sampling: Sampling) -> Sampling:
        """The same on every rank: with a seed that rank 0 has drawn where it draws and names none."""
        if self.ranks is None or sampling.is_greedy or sampling.seed is not None:
            return sampling
        return replace(sampling, seed=self.ranks.seed())

    # -- encoder -----------------------------------------------------------------------------------------------------

    @property
    def has_encoder(self) -> bool:
        """Whether it runs an encoder-decoder, whose input goes through `encode`."""
        return self._stages.encoder is not None

    def encode(self, main_input: torch.Tensor | None = None, **inputs: torch.Tensor) -> torch.Tensor:
        """Run an encoder-decoder's encoder, and start anew at position 0: the next prefill attends to what it gave.

        `reset()` starts another answer to the same input.

        Args:
            main_input: int64 [batch, length] token ids, or what else the encoder reads.
            **inputs: The same by name, as the tokenizer or processor gives it (input_ids, input_features or
                input_values), and `attention_mask` [batch, length], 0 on the padding behind each row.

        Returns:
            Hidden states [batch, encoder_length, hidden_size].

        Raises:
            InputError: If the model has no encoder, or an input is not what it takes; nothing has changed then.
        """
        encoder = self._stages.encoder
        if encoder is None:
            raise InputError(f"this {self.target!r} session runs a text decoder, which has no encoder; use prefill")
        if main_input is not None:
            inputs = {encoder.method.inputs[0].name: main_input, **inputs}
        hidden = encoder.encode(inputs, self._stepper)
        ids, mask = inputs[encoder.method.inputs[0].name], inputs.get("attention_mask")
        if ids.dtype == torch.int64:
            rows = list(ids) if mask is None else [row[real.bool()] for row, real in zip(ids, mask, strict=True)]
            self.encoded_ids = (hidden, rows)
        self.reset()
        return hidden

    # -- what the checkpoint asks of a generation ----------------------------------------------------------------------

    @property
    def generation_settings(self) -> CheckpointSettings:
        """What `generation_config` asks of the choice of tokens, as it is now: its fields may be set at any time.

        A setting that is not followed is warned of once.

        Raises:
            InputError: If a setting is not what it has to be.
        """
        settings = CheckpointSettings.read(self.generation_config, self.vocab_size, self.text_tokenizer)
        new = settings.unheeded.keys() - self._warned
        self._warned |= new
        for remark in settings.remarks() if new else ():
            warnings.warn(remark, UserWarning, stacklevel=3)
        return settings

    # -- steps -------------------------------------------------------------------------------------------------------

    def prefill(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **inputs: torch.Tensor
    ) -> torch.Tensor:
        """Feed a prompt of any length, after whatever was fed before. Long ones go through in chunks.

        Rows of a batch may be of different length: each row's own tokens follow what it holds, and the padding goes
            nowhere.

        Args:
            input_ids: int64 [batch, length], length at least 1; where a token is several ids [batch, length,
                codebooks].
            attention_mask: [batch, length], 0 on the padding before or behind each row's tokens, as a tokenizer gives
                it.
            **inputs: What a processor gives beside them (pixel_values, input_features), where the session has
                modalities.

        Returns:
            Logits [batch, vocab] of each row's last token.

        Raises:
            InputError: If shape, dtype, device or a token id is wrong, a row has no token, or a shorter row would lose
                what it holds while longer ones go ahead and the runtime does not let it be set aside.
            CacheFullError: If the prompt does not fit.
        """
        self.check_same("prefill", input_ids=input_ids, attention_mask=attention_mask, inputs=inputs)
        prompt = self._checked(input_ids, attention_mask, inputs)
        self._stepper.check_room(prompt.rows)
        return self._stepper.feed(self._stages.steps(prompt, self._stepper))

    def _checked(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        inputs: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> Prompt:
        if not isinstance(input_ids, torch.Tensor):
            check_ids("input_ids", input_ids, self._stages.limits.dims("batch", "length"), self._stages.limits)
        return self._stages.check(input_ids, attention_mask, inputs, self.sequence)

    @contextmanager
    def paced(self, most_tokens: int, before_chunk: Callable[[], None]) -> Iterator[None]:
        """Within the block, feed prompts in short chunks, and call back before each.

        Args:
            most_tokens: Longest chunk, at least 3. Programs whose methods take longer ones only keep their own.
            before_chunk: What it raises gives the prompt up: the session keeps the chunks that were fed.
        """
        stepper = self._stepper
        before = stepper.most_a_chunk, stepper.before_chunk
        stepper.most_a_chunk, stepper.before_chunk = most_tokens, before_chunk
        try:
            yield
        finally:
            stepper.most_a_chunk, stepper.before_chunk = before

    def chunk_sizes(self, length: int) -> list[int]:
        """How many tokens of a prompt of `length` go through each step."""
        return self._stepper.chunk_sizes(length)

    @property
    def placeholders(self) -> tuple[int, ...]:
        """Token ids that stand for images or sound in a prompt, none where the session takes text only."""
        return self._stages.placeholders

    @property
    def score_length(self) -> int:
        """Most tokens that `score` takes, or 0 if no method of the program does that."""
        return self._stepper.score_length

    def score(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Feed a few tokens and judge each: like `prefill`, with the logits after every token.

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
        self._stepper.check_room(self._checked(input_ids).rows)
        if input_ids.shape[1] > self.score_length:
            raise InputError(f"score takes up to {self.score_length} tokens at once, got {input_ids.shape[1]}")
        return self._stepper.score(input_ids)

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Feed one token per row.

        Args:
            tokens: int64 [batch], or [batch, codebooks].

        Returns:
            Logits [batch, vocab].

        Raises:
            InputError: If shape, dtype, device or a token id is wrong.
            CacheFullError: If a row has no slot left.
        """
        self.check_same("decode", tokens=tokens)
        check_ids("tokens", tokens, self._stages.limits.dims("batch"), self._stages.limits)
        if self._stages.encoder is not None:
            self._stages.encoder.check_encoded(self.sequence)
        check_room(int(self.sequence.length.max()), self.max_length, 1)
        return self._stepper.step(tokens[:, None])

    def go_on(self, tokens: torch.Tensor, going: torch.Tensor | None = None) -> torch.Tensor:
        """For decoding loops: feed one token per row as transformers' `generate` does.

        It is `decode`, except where a row gets past the length at which transformers computes the whole sequence again
        (LongRoPE of Phi 3): so it is here, in chunks, at the cost of a prompt of that length.

        Args:
            tokens: int64 [batch].
            going: Rows whose answers go on, bool [batch] on the host; all by default. No others are computed again.

        Returns:
            Logits [batch, vocab].

        Raises:
            InputError: See `decode`; or if the tokens that such a row holds are not known.
            CacheFullError: If a row has no slot left.
        """
        if not self._stepper.crossing([1] * self.batch_size, going):
            return self.decode(tokens)
        self.check_same("go_on", tokens=tokens)
        check_ids("tokens", tokens, self._stages.limits.dims("batch"), self._stages.limits)
        check_room(int(self.sequence.length.max()), self.max_length, 1)
        return self._stepper.go_on(tokens, going)

    @property
    def rope(self) -> RopeRule | None:
        """When the factors of the model's RoPE change; None where no row gets that far."""
        return self._stepper.rope

    def crossed(self, row: int) -> bool:
        """Return True if the newest token of a row was fed by `decode` where `go_on` would have computed it again."""
        rule, length = self._stepper.rope, int(self.sequence.length[row])
        return rule is not None and rule.crosses(length - 1, length)

    def equal_steps(self, going: torch.Tensor | None = None) -> int:
        """Return how many tokens can be fed in one step as though one by one; 0 where `go_on` computes rows again.

        Args:
            going: See `go_on`.
        """
        return self._stepper.equal_steps(going)

    def continues(self, kept: int, length: int) -> bool:
        """Return True if the first tokens of a session of one row are those of a prompt fed at once from position 0.

        They are not where the factors of RoPE change with the length, and were others.

        Args:
            kept: How many of the tokens that it holds.
            length: Tokens of the prompt.
        """
        rule, rope = self._stepper.rope, self.sequence.rope
        if rule is None or rope is None or kept == 0:
            return True
        end = torch.tensor([length])
        wanted = rule.factors(end)
        return bool((rope.factors == wanted) & (rule.factors(rule.after(rope.lengths, end)) == wanted))

    def select_rows(self, rows: torch.Tensor) -> None:
        """For decoding loops that have put the cache's rows in another order: row i is now what row `rows[i]` was.

        All rows hold as many tokens.
        """
        sequence = self.sequence
        if sequence.rope is not None:
            self._stepper.state = replace(sequence, rope=sequence.rope.select(rows.tolist()))

    @property
    def row_groups(self) -> RowGroups:
        """Rows whose steps may overlap with those of others, for decoding loops."""
        return RowGroups(self._stepper)

    def decode_and_choose(self, tokens: torch.Tensor, chooser: Sampler, steps: int = 1) -> torch.Tensor:
        """Feed one token per row and choose the next ones: inside the graph where the target can. Then feed those, and
        so on.

        Args:
            tokens: int64 [batch], taken as they are: the loops feed what was chosen from the vocabulary.
            chooser: How to choose.
            steps: 1, or `steps_per_launch`.

        Returns:
            int64 [batch, steps]; all but the last of each row are in the cache.

        Raises:
            CacheFullError: See `decode`.
        """
        check_one_id_a_token(self.codebooks)
        return self._stepper.decode_and_choose(tokens, chooser, steps)

    # -- other places ------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Start anew at position 0; the next step is the first of a sequence.

        The buffers are zeroed, except by runtimes that do not give them out (executorch). Those keep their contents,
        which no query sees; only if a sequence has left infinities or not-a-number in them, load the bundle again, as
        zero times those is not zero.
        """
        self._stepper.reset()

    def rewind(self, tokens: int) -> None:
        """Take back the newest tokens of every row, so that others can follow in their place.

        A generated token that was given out and not fed yet is dropped as well, and not counted: `rewind(0)` drops it
            alone.

        Args:
            tokens: How many, 0 or more.

        Raises:
            InputError: If a row holds fewer, a ring has overwritten one that would be needed again, a layer keeps a
                state, or part of an image would stay whose tokens belong together.
        """
        self._stepper.guard.check_whole()
        self._stepper.move_to(self.sequence.rewound(tokens, self.layers))

    def set_length(self, row: int, length: int) -> None:
        """Say how many tokens a row holds, for loops that write a row's state themselves (continuous batching)."""
        self._stepper.move_to(self.sequence.with_row(row, length))

    def shift(self, tokens: int | torch.Tensor) -> None:
        """For decoding loops: go back over tokens that were fed, or, where positive, on over tokens that the cache
        still holds.

        `rewind` without its checks: a token that was given out and not fed stays so.

        Args:
            tokens: How many, or how many in each row, int64 [batch] on the host.
        """
        self._stepper.shift(tokens)

    def check_encoded(self, encoded: Sequence[torch.Tensor]) -> None:
        """Refuse what no encoder of this session can have given; nothing is right, too.

        Raises:
            ValueError: Then.
        """
        self._stages.check_given(encoded, self.runner.methods)

    def go_on_from(self, sequence: SequenceState) -> None:
        """Take up another place, for loops that write the cache's tensors themselves."""
        self._stepper.move_to(sequence)
        self._stepper.guard.is_broken = False

    # -- opening -----------------------------------------------------------------------------------------------------

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
                        choosing = cast(ChoosesInGraph, self.runner)
                        choosing.run_and_choose(method.name, sampler, *examples[-1], steps=steps)

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
            cache = cast("ExportableEncoderDecoderCache", self._cache)
            self._stages.encoder.update_cache(cache, self.sequence)
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


@quietly
def load(
    path: str | Path,
    *,
    check_versions: bool = True,
    trust: bool = False,
    key: str | Path | None = None,
    check: bool = False,
    progress: Progress = silent,
) -> Session:
    """Open a bundle that `export` wrote, ready to run.

    Args:
        path: The folder.
        check_versions: Refuse a bundle made with other versions of the packages its target depends on.
        check: Read and check every file. By default those that this user has not checked as they are, going by size,
            time stamps, inode and device.
        trust: Let machine code in it run, as targets `aoti` and `tensorrt` have it: it can do what you can.
        key: File of the public key that must have signed it (`export(..., sign=)`); None for no check of who made it.
        progress: Told about bytes checked.

    Raises:
        BundleError: If it is missing, damaged, of another schema version or of other package versions, not signed with
            the key, or machine code that is not trusted.
        InputError: If the key cannot be read.
        MissingDependencyError: If its target, or the check of a signature, needs a package that is not installed.
    """
    from ..bundle.bundle import Bundle

    bundle = Bundle.open(
        path, check_versions=check_versions, trust=trust, key=key, known=not check, to_run=True, progress=progress
    )
    return Session.from_bundle(bundle)
