"""A program over a cache, step by step: what is fed, what is taken back, and where each row is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig

from ..errors import InputError
from ..generation.checkpoint_settings import CheckpointSettings
from ..generation.multi_step import check_steps_per_launch
from ..generation.sampling import Sampler
from ..models.tokenizers.text import TextTokenizer
from .checks import ProgramLimits, check_ids, check_one_id_a_token, check_room
from .inputs.stages import InputStages
from .program_stepper import ProgramStepper
from .row_groups import RowGroups
from .sequence_state import SequenceState

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..backends.base import Runner
    from ..cache.layers import CacheLayer
    from ..generation.sampling import Sampling
    from ..models.parallel.ranks import Ranks
    from ..models.rope import RopeRule
    from .inputs.stages import Prompt


class SteppedSession:
    """A running program and where each row is in its sequence: tokens are fed, judged and taken back.

    Every call checks its arguments and the room in the cache before anything runs: a refused call changes nothing.
    `Session` opens and generates over it.

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
    """

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
