"""Runs the steps of a program: selects the method, builds its inputs, and advances the sequence state."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

import torch

from ..backends.base import ChoosesInGraph, MakesShift, state_of
from ..cache.layer_spec import KEPT_POSITIONS
from ..cache.step import starting_at
from ..errors import BundleError, InputError
from ..models.lora import ADAPTED, ADAPTERS
from ..models.positions import ANY
from ..program.methods import (
    DRAFT,
    ITEM_STATES,
    ITEMS_SEEN,
    POSITIONS,
    ROPE_AFTER,
    ROPE_BEFORE,
    ROPE_DELTAS,
    ROPE_LENGTHS,
    SHIFT,
    TURN,
    chunk_sizes,
    method_for,
)
from .checks import Generation, StepGuard, check_chunks, check_no_autocast, check_room, check_rows_may_differ
from .images import shifted
from .rows import Steps, TokenRows
from .state import LoadedAdapter, RopeState, SequenceState

if TYPE_CHECKING:
    from ..backends.base import Runner
    from ..cache.layers import CacheLayer
    from ..generation.sampling import Sampler
    from ..models.positions import RopeRule
    from ..parallel.ranks import Ranks
    from ..program.methods import ProgramMethod
    from .checks import ProgramLimits
    from .images import PlacedImages

Tokens = TypeVar("Tokens")

_NONE: Mapping[str, torch.Tensor] = MappingProxyType({})
#: An input of the methods that compute the keys and values of cross-attention.
_ENCODED = "encoder_hidden_states"


class WholePrompt(NamedTuple):
    """Facts that the chunks of a prompt share.

    Attributes:
        before: Images that the session held before the prompt.
        placed: Images of the prompt at their positions in the session; None if it has none.
        lengths: Lengths that choose the factors of RoPE, int64 [batch]; None if the factors never change. They are
            those after the whole prompt, because its chunks must give the same as one step.
    """

    before: PlacedImages
    placed: PlacedImages | None
    lengths: torch.Tensor | None


class ProgramStepper:
    """Advances a `SequenceState` by running steps.

    Its methods do not check token ids, and they do not take the lock: `Session` and `Generation` do both, once a call.

    Args:
        runner: Runs the methods of the program.
        layers: Layers of the cache. Only their limits are read, so they need no tensors.
        limits: Limits of the program.
        target: Name of the target, for messages.

    Attributes:
        state: Lengths of the rows and what belongs to them. It owns the lengths, see `SequenceState`.
        needs_equal_rows: Returns True if all rows must have the same length; called on first use.
        most_a_chunk: Longest chunk of a prompt; None for the longest of the program.
        before_chunk: Called before each chunk of a prompt. An exception that it raises ends the prompt between chunks.
        logits_size: Vocabulary size of each step's logits; None if no file states it.
        moves: Number of calls that changed the state or wrote the cache, except `shift`.
        steps_per_launch: Number of decode steps that a loop runs at once.
        ranks: Processes that the model is split over; None for a program of one process.
        rope: Rule by which the factors of RoPE change; None if no row gets that far.
        adapters: Each row's adapter; empty for the model itself.
        max_length: Tokens that a row can hold; None if all layers are rings.
        keeps_prompt: True if a step of one token ends the prompt, see `SlotPolicy.keeps_prompt`.
        least_rollback: Label of the layer that can take back the fewest tokens, such as `layer 2 (ring)`, and how many.
        chooses_in_graph: True if decode steps can choose the next tokens inside their graph.
    """

    def __init__(self, runner: Runner, layers: Sequence[CacheLayer], limits: ProgramLimits, target: str) -> None:
        self.layers = tuple(layers)
        self.limits = limits
        self.batch_size, self.vocab_size, self.device = limits.batch_size, limits.vocab_size, limits.device
        self.target = target
        self.use(runner)
        self.state = SequenceState.empty(limits.batch_size)
        self.moves = 0
        self.guard = StepGuard()
        self.needs_equal_rows: Callable[[], bool] = lambda: False
        self.most_a_chunk: int | None = None
        self.before_chunk: Callable[[], None] | None = None
        self.logits_size: int | None = None
        self.steps_per_launch = 1
        self.ranks: Ranks | None = None
        self.rope: RopeRule | None = None
        self.adapters: tuple[LoadedAdapter, ...] = ()
        self.max_length = min((layer.max_length for layer in layers if layer.max_length is not None), default=None)
        self.keeps_prompt = any(layer.policy.keeps_prompt for layer in layers)
        far = 2**40
        taken_back = [layer.max_rollback(far, far) for layer in layers]
        labels = [f"layer {index} ({layer.label})" for index, layer in enumerate(layers)]
        self.least_rollback = min(
            zip(labels, taken_back, strict=True), key=lambda one: one[1], default=("no layer", far)
        )
        self._forgetful = [layer for layer, tokens in zip(layers, taken_back, strict=True) if tokens < far]
        self.all_rows = torch.ones(limits.batch_size, dtype=torch.bool)

    def use(self, runner: Runner) -> None:
        """Run the steps with another runner of the same program."""
        self.runner = runner
        self.chooses_in_graph = isinstance(runner, ChoosesInGraph) and self.limits.codebooks is None

    @property
    def equal_rows(self) -> bool:
        """True if all rows must have the same length."""
        return self.needs_equal_rows()

    @property
    def length(self) -> torch.Tensor:
        """Number of tokens in each row, int64 [batch] on the host; not to be written."""
        return self.state.length

    @property
    def room(self) -> int | None:
        """Number of tokens that fit every row, or None for any number."""
        return None if self.max_length is None else self.max_length - self.state.longest

    @property
    def score_length(self) -> int:
        """Most tokens that `score` takes; 0 if the program has no such method."""
        return max((method.scored_tokens for method in self.runner.methods.values()), default=0)

    @property
    def most_drafted(self) -> int:
        """Most tokens that the program's draft head proposes at once; 0 without one."""
        method = self.runner.methods.get(DRAFT.name)
        return KEPT_POSITIONS - 1 if method is not None and method.input_names == DRAFT.input_names else 0

    def chunk_sizes(self, length: int, by_ids: bool = True) -> list[int]:
        """Return the number of tokens in each step of a prompt of `length` tokens."""
        return chunk_sizes(self._callable(by_ids), length, self.keeps_prompt, self.most_a_chunk)

    def check_room(self, rows: TokenRows, max_new_tokens: int | None = None, from_start: bool = False) -> None:
        """Check that a prompt fits, with the tokens that are to be generated after it.

        Args:
            rows: The prompt.
            max_new_tokens: Number of tokens after it; None if no number was given.
            from_start: True if the rows will be at position 0.

        Raises:
            CacheFullError: If there are not enough slots.
            InputError: If a row must wait for longer rows and would lose tokens.
        """
        held = [0] * self.batch_size if from_start else self.state.length.tolist()
        ends = [before + length for before, length in zip(held, rows.lengths, strict=True)]
        fullest = ends.index(max(ends))
        check_room(held[fullest], self.max_length, rows.lengths[fullest], max_new_tokens)
        if not rows.are_even:
            check_rows_may_differ(self.equal_rows, f"the rows of the prompt have {list(rows.lengths)} tokens")
        if not (from_start or rows.are_even):
            rows_to_save(self, rows)

    def guarded(self, begin: Callable[[], Generator[Tokens]]) -> Generator[Tokens]:
        """Return the items of the generator that `begin` makes, each computed under the lock, see `Generation`."""
        return Generation(self).steps(begin)

    # -- prompts -----------------------------------------------------------------------------------------------------

    def feed(self, steps: Steps, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Feed a prompt in chunks. Shorter rows begin later, so that all rows end together.

        Args:
            steps: The prompt.
            rows: Rows that advance, see `step`.

        Returns:
            Logits [batch, vocab] of each row's last token.
        """
        if not steps.rows.are_even:
            return self._feed_segments(steps)
        return deque(self.chunks(steps, rows), maxlen=1).pop()

    def chunks(
        self, steps: Steps, rows: torch.Tensor | None = None, whole: WholePrompt | None = None
    ) -> Iterator[torch.Tensor]:
        """Feed a prompt as `feed` does, chunk by chunk, and yield the logits [batch, vocab] after each.

        Its rows have equal length. The caller may put other sequences into the session between two chunks, if it
        restores this one before the next.

        Args:
            steps: The prompt.
            rows: Rows that advance, see `step`.
            whole: The prompt that `steps` is a part of; all of it by default.
        """
        whole = self._whole(steps) if whole is None else whole
        start, length, limit = 0, steps.fed.shape[1], self.most_a_chunk
        sizes = [*(steps.sizes or self.chunk_sizes(length, steps.are_ids))]
        if self.keeps_prompt:
            check_chunks(sizes)
        while sizes:
            if steps.sizes is None and limit != self.most_a_chunk:
                # The caller has changed the limit between two chunks.
                limit, sizes = self.most_a_chunk, self.chunk_sizes(length - start, steps.are_ids)
            size = sizes.pop(0)
            if self.before_chunk is not None:
                self.before_chunk()
            chunk = slice(start, start + size)
            extra = {name: tensor[..., chunk].contiguous() for name, tensor in steps.extra.items()}
            extra |= steps.first if start == 0 else {}
            logits = self.step(steps.fed[:, chunk].contiguous(), extra, rows, lengths=whole.lengths)
            start += size
            if whole.placed is not None:
                # Only images whose tokens were fed, because a later chunk may fail.
                fed = whole.placed.begun(self.state.length)
                self.state = replace(self.state, images=whole.before.followed_by(fed))
            yield logits

    def _whole(self, steps: Steps) -> WholePrompt:
        """Return the facts that the chunks of a prompt from the current position share."""
        before, placed = self.state, steps.placed
        if placed is not None:
            placed = shifted(placed, before.length, before.images.deltas(before.length))
        return WholePrompt(before.images, placed, None if self.rope is None else self._rope_lengths(self._ends(steps)))

    def feed_for_generation(self, steps: Steps, active: torch.Tensor | None = None) -> torch.Tensor:
        """Feed a prompt as transformers' `generate` does: rows that cross a border of RoPE are computed again.

        Args:
            steps: The prompt.
            active: Rows that are still generating, bool [batch] on the host; all by default. Others are not recomputed.

        Returns:
            Logits [batch, vocab] of each row's last token.

        Raises:
            InputError: If the tokens of such a row are not known, or the prompt is more than text.
        """
        if self.rope is None:
            return self.feed(steps)
        again = self._turned(steps, self.crossing(steps.rows.lengths, active))
        return self.feed(self._from_start(steps, again) if again else steps)

    def _turned(self, steps: Steps, rows: list[int]) -> list[int]:
        """Rotate the keys of shifted rows to the factors past a border, and return the other rows of `rows`.

        These cannot be computed again, because their keys follow from tokens that were dropped.
        """
        rope, state = self.rope, self.state
        shifted = [row for row in rows if state.rope is not None and state.rope.shifted[row]]
        if rope is None or state.rope is None or not shifted:
            return rows
        self.check_shifts()
        are_turned = torch.zeros_like(self.all_rows)
        are_turned[shifted] = True
        moved = state.rope.moved(rope, state.length, self._rope_lengths(self._ends(steps)), are_turned)
        self._run_shift(state, replace(state, rope=moved), 0, 0)
        self.moves += 1
        return [row for row in rows if row not in shifted]

    def crossing(self, added: Sequence[int], active: torch.Tensor | None = None) -> list[int]:
        """Return the rows that must be computed again, because they cross a border of RoPE.

        Args:
            added: Number of tokens that each row is about to be fed.
            active: Rows that are still generating, bool [batch] on the host; all by default.
        """
        if self.rope is None or not self.rope.recomputes:
            return []
        # Rows of one length are computed again together.
        counts = self.all_rows if active is None or self.equal_rows else active
        rows = enumerate(zip(self.state.length.tolist(), added, counts.tolist(), strict=True))
        return [row for row, (held, more, counted) in rows if counted and self.rope.crosses(held, held + more)]

    def equal_steps(self, active: torch.Tensor | None = None) -> int:
        """Return the number of tokens that one step may feed with the result of single steps: RoPE must not change.

        0 means that rows must be computed again first, see `decode_for_generation`.

        Args:
            active: See `crossing`.
        """
        if self.rope is None:
            return ANY
        if self.crossing([1] * self.batch_size, active):
            return 0
        assert self.state.rope is not None
        rows = zip(self.state.length.tolist(), self.state.rope.lengths.tolist(), strict=True)
        return min(self.rope.equal_steps(held, before) for held, before in rows)

    def decode_for_generation(self, tokens: torch.Tensor, active: torch.Tensor | None = None) -> torch.Tensor:
        """Feed one token per row, int64 [batch], as transformers' `generate` does, see `feed_for_generation`."""
        fed = tokens[:, None]
        return self.feed_for_generation(Steps(fed, TokenRows.whole(fed)), active)

    def crossed(self, row: int) -> bool:
        """Return True if `decode` fed a row's newest token where `decode_for_generation` would have recomputed it."""
        length = int(self.state.length[row])
        return self.rope is not None and self.rope.crosses(length - 1, length)

    def continues(self, kept: int, length: int) -> bool:
        """Return True if the first tokens of a session of one row are those of a prompt fed at once from position 0.

        They differ where the factors of RoPE change with the length.

        Args:
            kept: Number of tokens that are kept.
            length: Number of tokens in the prompt.
        """
        rule, rope = self.rope, self.state.rope
        if rule is None or rope is None or kept == 0:
            return True
        end = torch.tensor([length])
        wanted = rule.factors(end)
        return bool((rope.factors == wanted) & (rule.factors(rule.after(rope.lengths, end)) == wanted))

    def _from_start(self, steps: Steps, again: list[int]) -> Steps:
        """Put the tokens of rows in front of their prompt, and set these rows to position 0."""
        rope, state = self.rope, self.state
        assert rope is not None and state.rope is not None
        if not steps.are_ids or steps.extra or steps.first:
            raise InputError(
                f"the prompt must be text where a row gets past {rope.border} tokens ({rope}), got more than token "
                "ids; reset(), and pass the whole conversation in one prompt"
            )
        rows = []
        for row, length in enumerate(steps.rows.lengths):
            ids, held = steps.rows.ids[row, -length:], state.rope.tokens[row]
            if row in again:
                if held is None or len(held) < int(state.length[row]):
                    raise InputError(
                        f"row {row} must hold tokens that the session has been fed, got {int(state.length[row])} from "
                        f"elsewhere, to generate past {rope.border} tokens ({rope}): they are computed again there; "
                        "reset(), and pass the whole text in one prompt"
                    )
                ids = torch.cat([held[: int(state.length[row])].to(ids.device), ids])
            rows.append(ids)
        whole = TokenRows.of(rows)
        emptied = torch.zeros_like(self.all_rows)
        emptied[again] = True
        self.move_to(replace(state, length=state.length * ~emptied, rope=state.rope.emptied(emptied)))
        return Steps(whole.ids, whole)

    def _feed_segments(self, steps: Steps) -> torch.Tensor:
        """Feed rows of different length: columns of the prompt, cut where a row begins."""
        whole = self._whole(steps)
        with saved_rows(self, rows_to_save(self, steps.rows)) as saved:
            for segment in steps.rows.segments():
                saved.restore(segment.rows)
                columns = slice(segment.start, segment.end)
                extra = {name: tensor[..., columns] for name, tensor in steps.extra.items()}
                part = Steps(steps.fed[:, columns], TokenRows.whole(steps.rows.ids[:, columns]), extra=extra)
                logits = deque(self.chunks(part, segment.rows, whole), maxlen=1).pop()
        return logits

    # -- steps -------------------------------------------------------------------------------------------------------

    def step(
        self,
        fed: torch.Tensor,
        extra: Mapping[str, torch.Tensor] = _NONE,
        rows: torch.Tensor | None = None,
        scores: bool = False,
        lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run one step of any length.

        Args:
            fed: Token ids int64 [batch, length], or embeddings [batch, length, hidden_size].
            extra: Further inputs of the method, by name.
            rows: Rows that advance, bool [batch] on the host; all by default. The others keep their length, and their
                next step overwrites what was written after it.
            scores: True for logits after every token.
            lengths: Lengths that the factors of RoPE are chosen by, int64 [batch] on the host; by default those after
                the step.

        Returns:
            Logits [batch, vocab], or [batch, length, vocab].
        """
        check_no_autocast(self.device)
        self.guard.check_whole()
        size = fed.shape[1]
        if lengths is None and self.rope is not None:
            lengths = self._rope_lengths(self._ends_after(size))
        method, inputs = self._call(fed, size, extra, scores, lengths)
        start = self.state.common_length
        self._begin(size, rows)
        with starting_at(inputs[1], start):
            logits = self.runner.run(method, *inputs)
        assert isinstance(logits, torch.Tensor)
        self._finish(size, rows, fed, lengths)
        if self.runner.methods[method].scored_tokens and not scores:
            logits = logits[:, -1]
        self._check_size(logits)
        return logits

    def _check_size(self, logits: torch.Tensor) -> None:
        if self.logits_size not in (None, logits.shape[-1]):
            raise BundleError(
                f"the program gives logits of {logits.shape[-1]} tokens, the manifest says {self.logits_size}; "
                "export the model again"
            )

    def score(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Feed a few tokens, int64 [batch, length], and return the logits after each, [batch, length, vocab]."""
        if self.ranks is not None:
            self.ranks.check_same("score", tokens=input_ids, length=self.state.length)
        if input_ids.shape[1] == 1:
            return self.step(input_ids)[:, None]
        return self.step(input_ids.contiguous(), scores=True)

    def draft(self, token: int, link: int) -> torch.Tensor:
        """Return the draft head's logits [1, vocab] after a token that the model has not seen.

        The length stays, because the next step of the model writes the same slots.

        Args:
            token: The token.
            link: Number of proposed tokens before it.
        """
        self.guard.check_whole()
        ids = torch.tensor([[token]], device=self.device)
        places = (self.state.length + link).to(self.device), torch.tensor([link], device=self.device)
        logits = self.runner.run(DRAFT.name, ids, *places)[0]
        self._check_size(logits)
        return logits

    def decode_and_choose(self, tokens: torch.Tensor, chooser: Sampler, steps: int = 1) -> torch.Tensor:
        """Feed one token per row, int64 [batch], choose the next ones and feed those: int64 [batch, steps].

        The caller has checked that every row has room for `steps` tokens.
        """
        fed = tokens[:, None]
        # An eager step gains nothing by the choice, except where ranks would send logits instead of tokens.
        is_apart = self.target == "eager" and self.ranks is None and steps == 1
        if is_apart or not self.chooses_in_graph or not chooser.chooses_in_graph:
            return chooser.choose(self.step(fed))[:, None]
        check_no_autocast(self.device)
        self.guard.check_whole()
        lengths = None if self.rope is None else self._rope_lengths(self._ends_after(steps))
        method, inputs = self._call(fed, steps, lengths=lengths)
        start = self.state.common_length
        self._begin(steps)
        with starting_at(inputs[1], start):
            chosen = cast(ChoosesInGraph, self.runner).run_and_choose(method, chooser, *inputs, steps=steps)
        self._finish(steps, None, torch.cat([fed, chosen[:, :-1]], dim=1), lengths)
        return chosen

    def _call(
        self,
        fed: torch.Tensor,
        tokens: int,
        extra: Mapping[str, torch.Tensor] = _NONE,
        scores: bool = False,
        lengths: torch.Tensor | None = None,
    ) -> tuple[str, list[torch.Tensor]]:
        """Return the name of the method for a step that adds `tokens` tokens, and its inputs; see `step`."""
        by_ids = not fed.is_floating_point()
        state, methods = self.state, self.runner.methods
        if "encode" in methods and state.longest == 0:
            # The first step of a sequence fills the cross-attention layers, even if it is short.
            able = {name: method for name, method in methods.items() if _ENCODED in method.input_names}
        else:
            able = {
                name: method
                for name, method in self._callable(by_ids).items()
                if (ITEM_STATES in method.input_names) is (ITEM_STATES in extra)
            }
        method = methods[method_for(able, fed.shape[1], state.longest + tokens, scores)]
        # A copy, because the state owns its lengths and a runner may keep or write its inputs. It need not wait for
        # earlier steps: CUDA has read memory that is not pinned when the call returns.
        on_gpu = self.device.type == "cuda"
        inputs = [fed, state.length.to(self.device, copy=True, non_blocking=on_gpu)]
        names = method.input_names[2:]
        if lengths is not None:
            extra = {**extra, ROPE_LENGTHS.name: lengths.to(self.device)}
        if _ENCODED in names:
            of_encoder = [name for name in names if name != ROPE_LENGTHS.name]
            extra = {**extra, **dict(zip(of_encoder, state.encoded, strict=True))}
        for spec in method.inputs[2:]:
            if spec.name == ROPE_DELTAS.name:
                inputs.append(state.images.deltas(state.length).to(self.device))
            elif spec.name == ITEMS_SEEN and spec.name not in extra:
                inputs.append(state.seen_tiles(int(spec.shape[1]), fed.shape[1]).to(self.device))
            elif spec.name == ADAPTERS.name:
                inputs.append(
                    torch.tensor([one.slot for one in self.adapters] or [0] * self.batch_size, device=self.device)
                )
            else:
                inputs.append(extra[spec.name])
        return method.name, inputs

    def _callable(self, by_ids: bool) -> dict[str, ProgramMethod]:
        """Return the methods that take ids, or embeddings, and fit whether a row uses an adapter.

        Programs whose steps all take adapters have one method for both.
        """
        is_adapted, found = any(one.slot for one in self.adapters), {}
        for name, method in self.runner.methods.items():
            takes = ADAPTERS.name in method.input_names
            both = takes and not name.startswith(ADAPTED)
            if method.takes_ids is by_ids and (both or takes is is_adapted):
                found[name] = method
        return found

    def _begin(self, tokens: int, rows: torch.Tensor | None = None) -> None:
        """Mark the session as mid-step; cleared when the step finishes."""
        self.state = self.state.reaching(tokens, rows)
        ends = zip((self.state.length + tokens).tolist(), self.state.max_len_ever.tolist(), strict=True)
        # A step may overwrite what cannot be taken back: a state, or slots of a ring.
        self.guard.is_broken = self.least_rollback[1] < tokens and any(
            layer.max_rollback(*end) < tokens for end in ends for layer in self._forgetful
        )
        # Counted before the step, because a generator that is collected during it must not move the session.
        self.moves += 1

    def _finish(
        self, tokens: int, rows: torch.Tensor | None, fed: torch.Tensor | None, lengths: torch.Tensor | None
    ) -> None:
        """Advance the state by a step of `tokens`; see `step` and `RopeState.fed`."""
        state = self.state.fed(tokens, rows)
        if self.rope is not None:
            assert state.rope is not None and lengths is not None
            counts = self.all_rows if rows is None else rows
            state = replace(state, rope=state.rope.fed(self.rope, self.state.length, lengths, fed, counts, tokens))
        self.state = state
        self.guard.is_broken = False

    def _rope_lengths(self, ends: torch.Tensor) -> torch.Tensor:
        """Return the lengths that choose the factors of RoPE in a call after which rows end at `ends`."""
        assert self.rope is not None and self.state.rope is not None
        return self.rope.after(self.state.rope.lengths, ends)

    def _ends_after(self, tokens: int | torch.Tensor) -> torch.Tensor:
        """Return one more than the largest position of each row after `tokens` more, int64 [batch]."""
        length = self.state.length
        return length + tokens + self.state.images.deltas(length)

    def _ends(self, steps: Steps) -> torch.Tensor:
        """Return one more than the largest position of each row after a prompt, int64 [batch]."""
        positions = steps.extra.get(POSITIONS)
        if positions is not None:
            return positions.amax(dim=(0, 2)).cpu() + 1
        return self._ends_after(torch.tensor(steps.rows.lengths))

    def drop(self, first: int, count: int, reaching: int = 0) -> None:
        """Drop tokens of every row from position `first` on, see `Session.shift`.

        A token that was given out and not fed stays pending. It does not count as a move.

        Args:
            first: Number of tokens before them.
            count: Number of tokens to drop.
            reaching: Length of the rows after the prompt that is fed next. If it is greater than the kept length, it
                chooses the factors of RoPE instead.

        Raises:
            InputError, UnsupportedModelError: See `Session.shift`.
        """
        self.guard.check_whole()
        self.check_shifts()
        before, state = self.state, self.state.dropped(first, count, self.layers)
        if self.rope is not None:
            # By the kept length, as in a new sequence of these tokens.
            assert before.rope is not None
            lengths = state.length.clamp(min=reaching)
            rope = before.rope.moved(self.rope, state.length, lengths, torch.ones_like(self.all_rows))
            state = replace(state, rope=rope)
        self._run_shift(before, state, first, count)

    def _run_shift(self, before: SequenceState, after: SequenceState, first: int, count: int) -> None:
        """Run the method `shift` between two states."""
        given = {
            TURN: lambda: before.images.turns(first, count),
            ROPE_BEFORE: lambda: self._rope_of(before),
            ROPE_AFTER: lambda: self._rope_of(after),
        }
        places = [
            before.length,
            torch.full_like(before.length, first),
            torch.full_like(before.length, count),
            *(given[name]() for name in self.runner.methods[SHIFT.name].input_names[3:]),
        ]
        self.guard.is_broken = True
        self.runner.run(SHIFT.name, *(place.to(self.device) for place in places))
        self.state, self.guard.is_broken = after, False

    def _rope_of(self, state: SequenceState) -> torch.Tensor:
        """Return the lengths that chose the factors of RoPE by position, int64 [batch, slots]."""
        assert state.rope is not None and self.max_length is not None
        return state.rope.chosen_by(state.length, self.max_length)

    def check_shifts(self) -> None:
        """Check that the program can drop old tokens; a live runner makes the method first.

        Raises:
            InputError, UnsupportedModelError: If it cannot.
        """
        if isinstance(self.runner, MakesShift):
            self.runner.make_shift()
        if SHIFT.name not in self.runner.methods:
            raise InputError(
                f"this {self.target!r} program has no method shift, which drops old tokens; export it with shift=True, "
                "for the targets 'pt2' and 'executorch'"
            )

    # -- moves -------------------------------------------------------------------------------------------------------

    def shift(self, tokens: int | torch.Tensor) -> None:
        """Change the length by a number of tokens, or by int64 [batch], without checks; the cache must hold them.

        A token that was given out and not fed stays pending. It does not count as a move.
        """
        self.state = replace(self.state, length=self.state.length + tokens)

    def reset(self) -> None:
        """Return to position 0; the buffers are zeroed if the runner gives them out."""
        self.move_to(self.state.emptied())
        for tensor in (state_of(self.runner) or {}).values():
            tensor.zero_()
        self.guard.is_broken = False

    def set_length(self, row: int, length: int, ever: int | None = None) -> None:
        """Set the length of a row, for loops that write a row's cache themselves; see `SequenceState.with_row`."""
        self.move_to(self.state.with_row(row, length, ever))

    def select_rows(self, rows: torch.Tensor) -> None:
        """Reorder the rows, for loops that have reordered the cache: row i becomes row `rows[i]`.

        All rows have the same length.
        """
        if self.state.rope is not None:
            self.state = replace(self.state, rope=self.state.rope.select(rows.tolist()))

    def restore(self, state: SequenceState) -> None:
        """Set the state, for callers that have written all of the cache's tensors."""
        self.move_to(state)
        self.guard.is_broken = False

    def move_to(self, state: SequenceState) -> None:
        """Set the state, and count a move."""
        if self.rope is not None and state.rope is None:
            state = replace(state, rope=RopeState.of(state.length))
        elif self.rope is None and state.rope is not None:
            # Of a larger cache: no step would keep it up to date.
            state = replace(state, rope=None)
        self.state = state
        self.moves += 1


class SavedRows:
    """Copies of rows that would be overwritten while longer rows of the batch are still being prefilled.

    The rows are at position 0 until `restore` puts their copies back.

    Args:
        stepper: Runs the steps.
        rows: Indices of the rows to save.
    """

    def __init__(self, stepper: ProgramStepper, rows: list[int]) -> None:
        self._stepper = stepper
        self._rows = torch.zeros_like(stepper.all_rows)
        self._rows[rows] = True
        self._held = stepper.state
        state = (state_of(stepper.runner) or {}) if rows else {}
        self._copies = {row: {name: tensor[row].clone() for name, tensor in state.items()} for row in rows}
        stepper.state = replace(self._held, length=self._held.length * ~self._rows)

    def restore(self, rows: torch.Tensor) -> None:
        """Restore those of `rows`, bool [batch], that are saved."""
        due = self._rows & rows
        if not bool(due.any()):
            return
        state = state_of(self._stepper.runner) or {}
        for row in due.nonzero()[:, 0].tolist():
            for name, tensor in state.items():
                tensor[row].copy_(self._copies[row][name])
        now = self._stepper.state
        self._stepper.state = replace(now, length=torch.where(due, self._held.length, now.length))
        self._rows = self._rows & ~due


@contextmanager
def saved_rows(stepper: ProgramStepper, rows: list[int]) -> Iterator[SavedRows]:
    """Save rows, and restore at the end of the block those that were not restored inside it."""
    saved = SavedRows(stepper, rows)
    try:
        yield saved
    finally:
        saved.restore(stepper.all_rows)


def rows_to_save(stepper: ProgramStepper, rows: TokenRows) -> list[int]:
    """Return the rows that wait and would lose tokens to the steps of longer rows.

    Args:
        stepper: Runs the steps.
        rows: The prompt to be fed next.

    Raises:
        InputError: If there are any and the runtime does not give out its cache.
    """
    if not stepper.state.has_begun:
        return []
    found = []
    segments = rows.segments()
    for row, held in enumerate(stepper.state.length.tolist()):
        waits = [
            size
            for segment in segments
            if not segment.rows[row]
            for size in stepper.chunk_sizes(segment.end - segment.start)
        ]
        if not held or not waits:
            continue
        longest = max(waits)
        end = held + longest
        ever = max(end, int(stepper.state.max_len_ever[row]))
        loses = [
            f"layer {index} ({layer.label}) cannot take back"
            for index, layer in enumerate(stepper.layers)
            if layer.max_rollback(end, ever) < longest
        ]
        if stepper.max_length is not None and end > stepper.max_length:
            loses.append(f"does not fit after them, of {stepper.max_length} in all")
        if not loses:
            continue
        if state_of(stepper.runner) is None:
            raise InputError(
                f"row {row} holds {held} tokens and waits while a longer row is fed {longest} at once, which "
                f"{loses[0]}, and the {stepper.target!r} runtime does not give out its cache to save the row; feed "
                "every row the same number of tokens, or reset() and prefill whole sequences"
            )
        found.append(row)
    return found
