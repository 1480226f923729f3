"""Completions over a `Session`, in this process."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from ..errors import BundleError, InputError, MissingDependencyError, UnsupportedModelError
from .completion import (
    AnyCompleter,
    Cancelled,
    Choice,
    Completion,
    FinishReason,
    Piece,
    PromptItems,
    check_decoder,
)

if TYPE_CHECKING:
    import torch

    from ..generation.checkpoint_settings import CheckpointSettings
    from ..generation.loop import Chosen
    from ..generation.sampling import Sampler
    from ..generation.speculative import Draft, Speculation, SpeculationStatistics
    from ..session.session import Session

#: Longest chunk of a prompt, because a completion can be cancelled only between chunks.
MOST_A_CHUNK = 256


def check_completes(session: Session) -> None:
    """Check that a session can complete prompts.

    Raises:
        InputError: If it is an encoder-decoder, is split over processes, or has no tokenizer.
    """
    check_decoder(session.has_encoder)
    if session.stepper.ranks is not None:
        raise InputError(
            f"this session runs on {session.stepper.ranks.size} ranks, which must all get the same requests in the "
            "same order; completions are for sessions of one process, use generate_text"
        )
    if session.text_tokenizer is None:
        raise InputError("completions need a tokenizer and this session has none; export the model with its own")


def layers_of(session: Session) -> list[tuple[str, int | None]]:
    """Return what `AnyCompleter.layers` gives for a session."""
    return [(layer.label, getattr(layer.policy, "capacity", None)) for layer in session.layers]


class Completer(AnyCompleter):
    """Completes prompts over a `Session`; see `AnyCompleter`.

    Args:
        session: A text decoder at batch size 1 with a tokenizer. No other code may use it meanwhile.
        split_special_tokens: True to encode control tokens that are spelled in messages as text; see `encode_ids`.
        draft: Proposes tokens, which the session verifies; None for plain decoding. A completion with images or audio,
            a constraint, log probabilities, a bias or penalties of presence and frequency is decoded without it.

    Attributes:
        statistics: Counts of proposals over all completions; None without a draft.

    Raises:
        InputError: If the session is another one, or cannot verify proposals.
    """

    def __init__(self, session: Session, split_special_tokens: bool = True, draft: Draft | None = None) -> None:
        if session.batch_size != 1:
            raise InputError(
                f"batch_size must be 1 for Completer, got {session.batch_size}; use BatchCompleter for several rows"
            )
        check_completes(session)
        assert session.text_tokenizer is not None
        super().__init__(session.text_tokenizer, session.vocab_size, split_special_tokens)
        self.session = session
        self.statistics: SpeculationStatistics | None = None
        if draft is not None:
            from ..generation.speculative import SpeculationStatistics
            from ..session.generate import check_draft

            check_draft(session, draft)
            self.statistics = SpeculationStatistics()
        self._draft = draft
        # The proposals of the newest completion that has any.
        self._speculation: Speculation | None = None
        self._own = session.stepper.adapters
        self._used = [(one, one.loads) for one in self._own if one.slot]

    @property
    def settings(self) -> CheckpointSettings:
        """See `AnyCompleter.settings`."""
        return self.session.generation_settings

    @property
    def length(self) -> int:
        """See `AnyCompleter.length`."""
        return int(self.session.length[0])

    @property
    def max_length(self) -> int | None:
        """See `AnyCompleter.max_length`."""
        return self.session.max_length

    @property
    def layers(self) -> list[tuple[str, int | None]]:
        """See `AnyCompleter.layers`."""
        return layers_of(self.session)

    def pieces(self, completion: Completion) -> Generator[tuple[Piece, FinishReason | None]]:
        """See `AnyCompleter.pieces`."""
        import torch

        from ..generation.sampling import Sampling
        from ..session.generate import sampler_after
        from ..session.rows import TokenRows

        ids = completion.ids
        self._speculation = None
        self._use(completion.options.adapter)
        self.protect(completion.options)
        try:
            completion.reused_tokens, logits = self.feed(ids, completion.check_not_cancelled, completion.items)
        except Cancelled:
            return
        rows = TokenRows.whole(torch.tensor([ids], device=self.session.device))
        sampler = sampler_after(self.session, Sampling(**asdict(completion.options.sampling)), rows, completion.limit)
        if self._may_draft(completion):
            yield from self._drafted_pieces(completion, sampler, logits)
            return
        ends = self.end_tokens
        while True:
            piece, reason = chosen_piece(completion, sampler, ends, logits)
            completion.dropped_tokens = self.dropped_tokens
            yield piece, reason
            if reason is not None:
                return
            try:
                logits = self.step(piece.token, completion.check_not_cancelled)
            except Cancelled:
                return

    def _may_draft(self, completion: Completion) -> bool:
        """Return True if the draft may propose tokens: the loop of proposals knows neither logits nor constraints."""
        options = completion.options
        return (
            self._draft is not None
            and completion.items is None
            and completion.follower is None
            and options.alternatives is None
            and not options.changes_logits
        )

    def _drafted_pieces(
        self, completion: Completion, sampler: Sampler, logits: torch.Tensor
    ) -> Generator[tuple[Piece, FinishReason | None]]:
        """Yield what `pieces` does, with the draft.

        The session may be ahead of the tokens that were given out, so the held tokens are known after the last one.
        """
        from ..generation.loop import Ending
        from ..generation.speculative import Speculation, speculative_loop

        session, draft, statistics, given = self.session, self._draft, self.statistics, 0
        while True:
            assert draft is not None and statistics is not None and self._held is not None
            speculation = self._speculation = Speculation(self._held, draft, statistics)
            self._held = None
            ending = Ending(None if completion.limit is None else completion.limit - given, self.end_tokens)
            begin = partial(speculative_loop, session.stepper, logits, sampler, ending, speculation)
            steps = session.stepper.guarded(begin)
            try:
                while (token := self._next(steps, completion)) is not None:
                    given += 1
                    piece, reason = completion.take(Choice(token))
                    completion.dropped_tokens = self.dropped_tokens
                    yield piece, reason
                    if reason is not None:
                        return
            finally:
                steps.close()
                # Unless a step failed, or another completion has begun.
                if self._speculation is speculation:
                    self._held = speculation.context[: self.length]
            if completion.is_given_up:
                return
            # The cache is full.
            try:
                logits = self.step(piece.token, completion.check_not_cancelled)
            except Cancelled:
                return

    def _next(self, steps: Iterator[Chosen], completion: Completion) -> int | None:
        """Return the next token of a loop of proposals, or None after the last one."""
        try:
            with self.session.paced(MOST_A_CHUNK, completion.check_not_cancelled):
                step = next(steps, None)
        except Cancelled:
            return None
        except BaseException:
            self._speculation = None
            raise
        return None if step is None else int(step.tokens[0])

    @property
    def adapters(self) -> tuple[str, ...]:
        """See `AnyCompleter.adapters`."""
        return self.session.adapters

    def encode_items(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[list[int], PromptItems]:
        """See `AnyCompleter.encode_items`."""
        from ..session.inputs.prompt import message_inputs

        session, digest = self.session, sha256()
        methods = session.runner.methods
        self.check_items(messages, session.stages.most_items(self.max_length, methods))
        for content in (one["content"] for one in messages if isinstance(one.get("content"), list)):
            for value in (value for part in content for value in part.values() if isinstance(value, bytes)):
                digest.update(len(value).to_bytes(8, "big") + value)
        try:
            processor = session.processor
            if processor is None:
                raise InputError("messages must have text only, because this model came without its processor")
            inputs = message_inputs(processor, methods, messages, tools, self._split_special_tokens)
        except (BundleError, MissingDependencyError) as error:
            raise InputError(str(error)) from error
        ids = inputs.pop("input_ids")[0].tolist()
        inputs.pop("attention_mask", None)
        key = -1 - int.from_bytes(digest.digest(), "big")
        return ids, PromptItems(inputs, [key if token in session.stages.placeholders else token for token in ids])

    def _use(self, adapter: str | None) -> None:
        """Use an adapter. Tokens that were computed with another one are not used again."""
        stepper = self.session.stepper
        if adapter is None:
            stepper.adapters = self._own
        else:
            self.session.use_adapter(adapter)
        used = [(one, one.loads) for one in stepper.adapters if one.slot]
        if used != self._used:
            self._held, self._used = None, used

    def score(self, completion: Completion) -> Iterator[tuple[float, tuple[tuple[int, float], ...]]]:
        """See `AnyCompleter.score`."""
        import torch

        session, ids = self.session, completion.ids
        self._speculation = None
        self._use(completion.options.adapter)
        self._held = None
        session.reset()
        every = torch.tensor([ids], device=session.device)
        size, begin, end = max(session.score_length, 1), 0, 1
        while end < len(ids):
            completion.check_not_cancelled()
            # The last token has no logits to give here.
            logits = session.score(every[:, begin:end])[0] if end - begin > 1 else session.prefill(every[:, begin:end])
            for token, row in zip(ids[begin + 1 : end + 1], logits, strict=True):
                logprob, found = _logprobs(row, token, completion.options.alternatives)
                assert logprob is not None
                yield logprob, found
            begin, end = end, min(end + size, max(end + 1, len(ids) - 1))
        self._held = list(ids[: self.length])

    def feed(
        self,
        ids: list[int],
        before_chunk: Callable[[], None] = lambda: None,
        items: PromptItems | None = None,
    ) -> tuple[int, torch.Tensor]:
        """Feed the rest of a prompt, and return the number of tokens reused and logits [1, vocab].

        Args:
            ids: Token ids of the whole prompt.
            before_chunk: Called before each chunk of at most `MOST_A_CHUNK` tokens. An exception that it raises ends
                the prompt; the chunks that were fed are kept, for a prompt that begins with them.
            items: Images and audio of the prompt.
        """
        import torch

        session, inputs = self.session, dict[str, torch.Tensor]()
        held, common = self.place(ids if items is None else items.keys)
        if items is None:
            ids = held
        elif common == 0:
            inputs = {name: tensor.to(session.device) for name, tensor in items.inputs.items()}
        self._held = None
        try:
            with session.paced(MOST_A_CHUNK, before_chunk):
                logits = session.prefill(torch.tensor([ids[common:]], device=session.device), **inputs)
        except Cancelled:
            self._held = held[: int(session.length[0])]
            raise
        self._held = list(held)
        return common, logits

    def common(self, ids: Sequence[int]) -> int | None:
        """See `Context.common`. No token is common where RoPE has other factors at the length of the prompt.

        Items are fed with the whole prompt, because processors do not tell which part of their outputs an item has.
        """
        found = super().common(ids)
        seen = [*(self._held or ()), *ids] if self.session.stages.sees_prompt else ids[found or 0 :]
        if any(key < 0 for key in seen):
            return 0
        return 0 if found and not self.session.stepper.continues(found, len(ids)) else found

    def most_dropped(self, first: int) -> int:
        """See `Context.most_dropped`."""
        stepper = self.session.stepper
        try:
            stepper.check_shifts()
        except (InputError, UnsupportedModelError):
            return 0
        return max(0, stepper.state.most_dropped(first, stepper.layers))

    def _drop(self, count: int, first: int, reaching: int = 0) -> None:
        stepper = self.session.stepper
        with stepper.guard:
            stepper.drop(first, count, reaching)
            stepper.moves += 1

    def _keep(self, count: int) -> int:
        session = self.session
        if count:
            try:
                session.rewind(self.length - count)
            except InputError:  # a layer has overwritten slots that would be needed again, or keeps a state
                count = 0
        if not count:
            session.reset()
        return count

    def step(self, token: int, before_chunk: Callable[[], None] = lambda: None) -> torch.Tensor:
        """Feed one token, and return logits [1, vocab].

        Args:
            token: Token id.
            before_chunk: See `feed`; it is called if the sequence is computed again because RoPE changes.
        """
        import torch

        session = self.session
        if self.on_full == "shift" and self.is_full:
            self.make_room(lambda ids: session.prefill(torch.tensor([ids], device=session.device)))
        held, self._held = self._held, None
        try:
            with session.paced(MOST_A_CHUNK, before_chunk):
                logits = session.decode_for_generation(torch.tensor([token], device=session.device))
        except Cancelled:
            self._held = None if held is None else [*held, token][: int(session.length[0])]
            raise
        if held is not None:
            held.append(token)
        self._held = held
        return logits


def chosen_piece(
    completion: Completion, sampler: Sampler, ends: frozenset[int], logits: torch.Tensor
) -> tuple[Piece, FinishReason | None]:
    """Choose the next token of a completion, and return what `Completion.take` gives for it.

    Args:
        completion: The completion.
        sampler: Its sampler.
        ends: Tokens that end a generation.
        logits: [1, vocab].
    """
    follower = completion.follower
    token = int(sampler.choose(logits, completion.allowed())[0])
    if completion.bias is not None:
        completion.bias.see(token)
    if follower is not None and token not in ends:
        follower.take(token)
    completes = follower is not None and follower.ended
    return completion.take(Choice(token, completes, *_logprobs(logits[0], token, completion.options.alternatives)))


def _logprobs(
    logits: torch.Tensor, token: int, alternatives: int | None
) -> tuple[float | None, tuple[tuple[int, float], ...]]:
    """Return the log probability of a token, and those of the most probable ones, under logits [vocab]."""
    if alternatives is None:
        return None, ()
    logprobs = logits.float().log_softmax(dim=-1)
    values, tokens = logprobs.topk(min(alternatives, len(logprobs)))
    return float(logprobs[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True))
