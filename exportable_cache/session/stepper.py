"""Steps of a program over its cache: which method, which inputs, and what they make of the state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

import torch

from ..backends.base import ChoosesInGraph, OverlapsSteps, state_of
from ..cache.step import starting_at
from ..errors import BundleError, InputError
from ..models.positions import ANY
from ..program.items import ITEM_STATES, ITEMS_SEEN
from ..program.methods import POSITIONS, ROPE_DELTAS, ROPE_LENGTHS, chunk_sizes, method_for
from .checks import check_no_autocast, check_pieces, check_room, check_rows_may_differ
from .guard import StepGuard
from .inputs.image import shifted
from .inputs.items import seen_by_next
from .inputs.stages import Steps
from .rows import TokenRows, rows_to_set_aside, set_aside
from .state import RopeState, SequenceState

if TYPE_CHECKING:
    from ..backends.base import BegunStep, Runner
    from ..cache.layers import CacheLayer
    from ..generation.sampling import Sampler
    from ..models.parallel.ranks import Ranks
    from ..models.positions import RopeRule
    from .checks import ProgramLimits
    from .inputs.image import PlacedImages

_NONE: Mapping[str, torch.Tensor] = MappingProxyType({})


class ProgramStepper:
    """Moves a `SequenceState` along by running steps. It trusts its caller with token ids.

    Args:
        runner: What runs the steps.
        layers: The cache's layers; only their limits are asked for, so they need no tensors.
        limits: Of the program.
        target: What the runner is, for messages.

    Attributes:
        state: Where each row is.
        needs_equal_rows: Finds out whether all rows have to hold as many tokens; asked when it is first of interest.
        most_a_chunk: Longest chunk of a prompt; None for the program's own.
        before_chunk: Called before each chunk of a prompt. What it raises ends the prompt after a whole chunk.
        logits_size: Tokens that each step's logits are of, None if no file says it.
        moves: Counts what took it to another place or wrote its cache, but for `shift`.
        steps_per_launch: Decode steps that the loops take at once.
        ranks: The processes that its model is split over, None of a program of one process.
        rope: When the factors of its RoPE change; None where no row gets that far.
        max_length: Tokens a row can hold in all, or None where only rings keep state.
        least_rollback: The layer of which fewest tokens can be taken back at any length, as `layer 2 (ring)`, and
            how many they are.
        chooses_in_graph: Whether decode steps can choose the next tokens inside their graph.
    """

    def __init__(self, runner: Runner, layers: Sequence[CacheLayer], limits: ProgramLimits, target: str) -> None:
        self.use(runner)
        self.layers = tuple(layers)
        self.limits = limits
        self.batch_size, self.vocab_size, self.device = limits.batch_size, limits.vocab_size, limits.device
        self.target = target
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
        self.max_length = min((layer.max_length for layer in layers if layer.max_length is not None), default=None)
        far = 2**40
        self.least_rollback = min(
            ((f"layer {index} ({layer.label})", layer.max_rollback(far, far)) for index, layer in enumerate(layers)),
            key=lambda found: found[1],
            default=("no layer", far),
        )
        self.all_rows = torch.ones(limits.batch_size, dtype=torch.bool)

    def use(self, runner: Runner) -> None:
        """Run the steps by another runner of the same program."""
        self.runner = runner
        self.chooses_in_graph = isinstance(runner, ChoosesInGraph)

    @property
    def equal_rows(self) -> bool:
        """Whether all rows have to hold as many tokens."""
        return self.needs_equal_rows()

    @property
    def length(self) -> torch.Tensor:
        """Tokens seen per row, int64 [batch] on the host."""
        return self.state.length.clone()

    @property
    def room(self) -> int | None:
        """Tokens that every row still has room for, or None for any number."""
        return None if self.max_length is None else self.max_length - int(self.state.length.max())

    @property
    def score_length(self) -> int:
        """Most tokens that `score` takes, or 0 if no method of the program does that."""
        return max((method.scored_tokens for method in self.runner.methods.values()), default=0)

    def chunk_sizes(self, length: int, by_ids: bool = True) -> list[int]:
        """How many tokens of a prompt of `length` go through each step."""
        methods = self.runner.methods
        methods = {name: methods[name] for name in methods if methods[name].takes_ids is by_ids}
        return chunk_sizes(methods, length, self.keeps_prompt, self.most_a_chunk)

    @property
    def keeps_prompt(self) -> bool:
        """Whether a step of one token ends the prompt, see `SlotPolicy.keeps_prompt`."""
        return any(layer.policy.keeps_prompt for layer in self.layers)

    def check_room(self, rows: TokenRows, max_new_tokens: int | None = None, anew: bool = False) -> None:
        """Refuse a prompt that does not fit, or not with what is to be generated after it.

        Args:
            rows: The prompt.
            max_new_tokens: Tokens that follow it, if that number was asked for.
            anew: Whether rows are to be at position 0 then.

        Raises:
            CacheFullError: If there are no slots for them.
            InputError: If a row has to wait for longer ones and would lose what it holds.
        """
        held = [0] * self.batch_size if anew else self.state.length.tolist()
        ends = [before + length for before, length in zip(held, rows.lengths, strict=True)]
        fullest = ends.index(max(ends))
        check_room(held[fullest], self.max_length, rows.lengths[fullest], max_new_tokens)
        if not rows.are_even:
            check_rows_may_differ(self.equal_rows, f"the rows of the prompt have {list(rows.lengths)} tokens")
        if not (anew or rows.are_even):
            rows_to_set_aside(self, rows)

    # -- steps -------------------------------------------------------------------------------------------------------

    def feed(self, steps: Steps, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Feed a prompt in chunks, rows that are shorter than others beginning later.

        Args:
            steps: The prompt.
            rows: Whose tokens count, see `step`.

        Returns:
            Logits [batch, vocab] of each row's last token.
        """
        before, placed = self.state, steps.placed
        if placed is not None:
            placed = shifted(placed, before.length, before.images.deltas(before.length))
        # Of the whole prompt, so that its chunks give what it gives at once.
        lengths = None if self.rope is None else self._rope_lengths(self._ends(steps))
        if not steps.rows.are_even:
            return self._feed_apart(steps, placed, lengths)
        return self._feed_even(steps, rows, before.images, placed, lengths)

    def feed_for_generation(self, steps: Steps, going: torch.Tensor | None = None) -> torch.Tensor:
        """Feed a prompt as transformers' `generate` does: rows that get past a border of RoPE are computed again.

        Args:
            steps: The prompt.
            going: Rows whose answers go on, bool [batch] on the host; all by default. No others are computed again.

        Returns:
            Logits [batch, vocab] of each row's last token.

        Raises:
            InputError: If the tokens that a row holds are not known, or the prompt is more than text.
        """
        again = self.crossing(steps.rows.lengths, going)
        return self.feed(self._from_start(steps, again) if again else steps)

    def crossing(self, added: Sequence[int], going: torch.Tensor | None = None) -> list[int]:
        """Return the rows that generation computes again, because they get past a border of RoPE.

        Args:
            added: Tokens that are to be fed to each row.
            going: Rows whose answers go on, bool [batch] on the host; all by default.
        """
        if self.rope is None or not self.rope.recomputes:
            return []
        # Rows of one length are computed again together.
        counts = self.all_rows if going is None or self.equal_rows else going
        rows = enumerate(zip(self.state.length.tolist(), added, counts.tolist(), strict=True))
        return [row for row, (held, more, goes) in rows if goes and self.rope.crosses(held, held + more)]

    def equal_steps(self, going: torch.Tensor | None = None) -> int:
        """Return how many tokens can be fed in one step as though one by one, because RoPE has the same factors.

        0 means that rows have to be computed again first, see `go_on`.

        Args:
            going: See `crossing`.
        """
        if self.rope is None:
            return ANY
        if self.crossing([1] * self.batch_size, going):
            return 0
        assert self.state.rope is not None
        rows = zip(self.state.length.tolist(), self.state.rope.lengths.tolist(), strict=True)
        return min(self.rope.equal_steps(held, before) for held, before in rows)

    def go_on(self, tokens: torch.Tensor, going: torch.Tensor | None = None) -> torch.Tensor:
        """Feed one token per row, int64 [batch], as transformers' `generate` does, see `feed_for_generation`."""
        fed = tokens[:, None]
        return self.feed_for_generation(Steps(fed, TokenRows.whole(fed)), going)

    def _from_start(self, steps: Steps, again: list[int]) -> Steps:
        """Return a prompt with what rows hold in front of it, and go to position 0 in those rows."""
        rope, state = self.rope, self.state
        assert rope is not None and state.rope is not None
        if not steps.are_ids or steps.further or steps.first:
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
        mine = torch.zeros_like(self.all_rows)
        mine[again] = True
        self.move_to(replace(state, length=state.length * ~mine, rope=state.rope.emptied(mine)))
        return Steps(whole.ids, whole)

    def _feed_even(
        self,
        steps: Steps,
        rows: torch.Tensor | None,
        before: PlacedImages,
        placed: PlacedImages | None,
        lengths: torch.Tensor | None,
    ) -> torch.Tensor:
        """The same for rows of equal length; `placed` are the items of the whole prompt, behind those of `before`."""
        start = 0
        sizes = steps.sizes or self.chunk_sizes(steps.fed.shape[1], not steps.fed.is_floating_point())
        if self.keeps_prompt:
            check_pieces(sizes)
        for size in sizes:
            if self.before_chunk is not None:
                self.before_chunk()
            chunk = slice(start, start + size)
            further = {name: tensor[..., chunk].contiguous() for name, tensor in steps.further.items()}
            further |= steps.first if start == 0 else {}
            logits = self.step(steps.fed[:, chunk].contiguous(), further, rows, lengths=lengths)
            start += size
            if placed is not None:
                self._place(before, placed)
        return logits

    def _feed_apart(self, steps: Steps, placed: PlacedImages | None, lengths: torch.Tensor | None) -> torch.Tensor:
        before = self.state.images
        with set_aside(self, rows_to_set_aside(self, steps.rows)) as aside:
            for segment in steps.rows.segments():
                aside.restore(segment.rows)
                columns = slice(segment.start, segment.end)
                further = {name: tensor[..., columns] for name, tensor in steps.further.items()}
                part = Steps(steps.fed[:, columns], TokenRows.whole(steps.rows.ids[:, columns]), further=further)
                logits = self._feed_even(part, segment.rows, before, placed, lengths)
        return logits

    def _place(self, before: PlacedImages, placed: PlacedImages) -> None:
        # Those whose tokens were fed, and no others: a step may fail.
        self.state = replace(self.state, images=before.followed_by(placed.begun(self.state.length)))

    def step(
        self,
        fed: torch.Tensor,
        further: Mapping[str, torch.Tensor] = _NONE,
        rows: torch.Tensor | None = None,
        scores: bool = False,
        lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One step of any length.

        Args:
            fed: Token ids int64 [batch, length], or embeddings [batch, length, hidden_size].
            further: What the method takes besides, by name.
            rows: Whose tokens count, bool [batch] on the host; all by default. The others stay where they are, and find
                what was written behind them overwritten by their next step.
            scores: Whether logits after every token are wanted.
            lengths: Those that the factors of RoPE are chosen by, int64 [batch] on the host, where they change; those
                after the step by default.

        Returns:
            Logits [batch, vocab], or [batch, length, vocab].
        """
        check_no_autocast(self.device)
        size = fed.shape[1]
        with self.guard:
            self.guard.check_whole()
            if lengths is None and self.rope is not None:
                lengths = self._rope_lengths(self._ends_after(size))
            method, inputs = self._call(fed, size, further, scores, lengths)
            before = self.state.length
            self._reach(size, rows)
            with starting_at(inputs[1], _common(before)):
                logits = self.runner.run(method, *inputs)
            assert isinstance(logits, torch.Tensor)
            if self.runner.methods[method].scored_tokens and not scores:
                logits = logits[:, -1]
            self._move_on(size, rows, fed, lengths)
            self.guard.is_broken = False
        if self.logits_size not in (None, logits.shape[-1]):
            raise BundleError(
                f"the program gives logits of {logits.shape[-1]} tokens, the manifest says {self.logits_size}; "
                "export the model again"
            )
        return logits

    def begin(self, tokens: torch.Tensor, rows: range) -> BegunStep:
        """A decode step of some rows, whose logits `runner.finish` gives; the state is that of after it at once.

        Args:
            tokens: int64 [len(rows)].
            rows: One of the runner's `row_groups`.
        """
        check_no_autocast(self.device)
        runner, mine = self.runner, torch.zeros(self.batch_size, dtype=torch.bool)
        assert isinstance(runner, OverlapsSteps)
        mine[rows.start : rows.stop] = True
        with self.guard:
            self.guard.check_whole()
            lengths = None if self.rope is None else self._rope_lengths(self._ends_after(1))
            # The inputs are those of all rows, and the tokens those of the group.
            method, inputs = self._call(tokens[:, None], 1, lengths=lengths)
            self._reach(1, mine)
            begun = runner.begin(method, rows, inputs[0], *(one[rows.start : rows.stop] for one in inputs[1:]))
            # Which tokens the rows hold is for the loop to know.
            self._move_on(1, mine, None, lengths)
            self.guard.is_broken = False
        return begun

    def finish(self, begun: BegunStep) -> torch.Tensor:
        """Logits [len(rows), vocab] of a step that was begun."""
        runner = self.runner
        assert isinstance(runner, OverlapsSteps)
        with self.guard:
            return runner.finish(begun)

    def _move_on(
        self, tokens: int, rows: torch.Tensor | None, fed: torch.Tensor | None, lengths: torch.Tensor | None
    ) -> None:
        """Go to where a step of `tokens` ends, see `step` and `RopeState.fed`."""
        state = self.state.fed(tokens, rows)
        if self.rope is not None:
            assert state.rope is not None and lengths is not None
            counts = self.all_rows if rows is None else rows
            state = replace(state, rope=state.rope.fed(self.rope, self.state.length, lengths, fed, counts))
        self.state = state

    def _rope_lengths(self, ends: torch.Tensor) -> torch.Tensor:
        """Return the lengths that the factors of RoPE are chosen by in a call after which rows are at `ends`."""
        assert self.rope is not None and self.state.rope is not None
        return self.rope.after(self.state.rope.lengths, ends)

    def _ends_after(self, tokens: int | torch.Tensor) -> torch.Tensor:
        """Return the positions that rows have reached after `tokens` more, one more than the largest, int64 [batch]."""
        length = self.state.length
        return length + tokens + self.state.images.deltas(length)

    def _ends(self, steps: Steps) -> torch.Tensor:
        """Return the positions that rows have reached after a prompt, one more than the largest, int64 [batch]."""
        positions = steps.further.get(POSITIONS)
        if positions is not None:
            return positions.amax(dim=(0, 2)).cpu() + 1
        return self._ends_after(torch.tensor(steps.rows.lengths))

    def _reach(self, tokens: int, rows: torch.Tensor | None = None) -> None:
        """About to run a step of `tokens`: until it has finished, what it may write stands against the session."""
        self.state = self.state.reaching(tokens, rows)
        self.guard.is_broken = self._is_lost_if_cut_off(tokens)
        # Counted now: a generator that is collected during the step must leave the session where it is.
        self.moves += 1

    def _is_lost_if_cut_off(self, tokens: int) -> bool:
        """Whether a step of `tokens` may write what cannot be taken back: a state, or slots of a ring still needed."""
        allowed = self.least_rollback[1]
        if allowed >= tokens:
            return False
        ends = zip((self.state.length + tokens).tolist(), self.state.max_len_ever.tolist(), strict=True)
        return any(layer.max_rollback(*end) < tokens for end in ends for layer in self.layers)

    def score(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Feed a few tokens, int64 [batch, length], and judge each: logits [batch, length, vocab]."""
        if self.ranks is not None:
            self.ranks.check_same("score", tokens=input_ids, length=self.state.length)
        if input_ids.shape[1] == 1:
            return self.step(input_ids)[:, None]
        return self.step(input_ids.contiguous(), scores=True)

    def decode_and_choose(self, tokens: torch.Tensor, chooser: Sampler, steps: int = 1) -> torch.Tensor:
        """Feed one token per row, int64 [batch], choose the next ones and feed those, and so on: int64 [batch, steps].

        Raises:
            CacheFullError: If a row has no slots left for them.
        """
        check_no_autocast(self.device)
        check_room(int(self.state.length.max()), self.max_length, steps)
        fed = tokens[:, None]
        if not self.chooses_in_graph or not chooser.chooses_in_graph:
            return chooser.choose(self.step(fed))[:, None]
        with self.guard:
            self.guard.check_whole()
            lengths = None if self.rope is None else self._rope_lengths(self._ends_after(steps))
            method, inputs = self._call(fed, steps, lengths=lengths)
            before = self.state.length
            self._reach(steps)
            with starting_at(inputs[1], _common(before)):
                chosen = cast(ChoosesInGraph, self.runner).run_and_choose(method, chooser, *inputs, steps=steps)
            self._move_on(steps, None, torch.cat([fed, chosen[:, :-1]], dim=1), lengths)
            self.guard.is_broken = False
        return chosen

    def _call(
        self,
        fed: torch.Tensor,
        tokens: int,
        further: Mapping[str, torch.Tensor] = _NONE,
        scores: bool = False,
        lengths: torch.Tensor | None = None,
    ) -> tuple[str, list[torch.Tensor]]:
        """The method that serves a step, after which rows hold `tokens` more, and what it takes.

        Args:
            fed: See `step`.
            tokens: Those fed, and those that it chooses itself.
            further, scores, lengths: See `step`.
        """
        by_ids = not fed.is_floating_point()
        longest = int(self.state.length.max())
        methods = self.runner.methods
        if "encode" in methods and longest == 0:
            # The first step of a sequence, however short, is the one that fills the cross-attention layers.
            able = {name: method for name, method in methods.items() if _ENCODED in method.input_names}
        else:
            able = {
                name: method
                for name, method in methods.items()
                if method.takes_ids is by_ids and (ITEM_STATES in method.input_names) is (ITEM_STATES in further)
            }
        method = methods[method_for(able, fed.shape[1], longest + tokens, scores)]
        inputs = [fed, self.state.length.to(self.device, copy=True)]
        names = method.input_names[2:]
        if lengths is not None:
            further = {**further, ROPE_LENGTHS.name: lengths.to(self.device)}
        if _ENCODED in names:
            of_encoder = [name for name in names if name != ROPE_LENGTHS.name]
            further = {**further, **dict(zip(of_encoder, self.state.encoded, strict=True))}
        for spec in method.inputs[2:]:
            if spec.name == ROPE_DELTAS.name:
                inputs.append(self.state.images.deltas(self.state.length).to(self.device))
            elif spec.name == ITEMS_SEEN and spec.name not in further:
                inputs.append(seen_by_next(self.state, int(spec.shape[1]), fed.shape[1]).to(self.device))
            else:
                inputs.append(further[spec.name])
        return method.name, inputs

    # -- other places ------------------------------------------------------------------------------------------------

    def shift(self, tokens: int | torch.Tensor) -> None:
        """Go back or on by a number of tokens, or by one per row int64 [batch], that the cache holds; no move."""
        self.state = replace(self.state, length=self.state.length + tokens)

    def reset(self) -> None:
        """Start anew at position 0; the buffers are zeroed where the runner gives them out."""
        with self.guard:
            self._empty()

    def _empty(self) -> None:
        self.move_to(self.state.emptied())
        for tensor in (state_of(self.runner) or {}).values():
            tensor.zero_()
        self.guard.is_broken = False

    def move_to(self, state: SequenceState) -> None:
        """Go to another place, and count that."""
        if self.rope is not None and state.rope is None:
            state = replace(state, rope=RopeState.of(state.length))
        self.state = state
        self.moves += 1


#: An input of those methods that compute the cross-attention's keys and values.
_ENCODED = "encoder_hidden_states"


def _common(lengths: torch.Tensor) -> int | None:
    """The one number of int64 [batch] on the host, None where rows differ."""
    first, *others = lengths.tolist()
    return first if all(length == first for length in others) else None


class RowGroups:
    """The groups of a session, each a range of rows; none where all rows take a step together. For decoding loops.

    Args:
        stepper: Of the session.
    """

    def __init__(self, stepper: ProgramStepper) -> None:
        self._stepper = stepper

    def __iter__(self) -> Iterator[range]:
        runner = self._stepper.runner
        return iter(runner.row_groups if isinstance(runner, OverlapsSteps) else ())

    def begin(self, tokens: torch.Tensor, rows: range) -> BegunStep:
        """`decode` of one group, as far as this process's part of it goes.

        Ranks compare nothing here, which would have each wait for all: the tokens follow from logits that all got.

        Args:
            tokens: int64 [len(rows)], taken as they are.
            rows: The group, of which no other step is under way.

        Raises:
            CacheFullError: If a row has no slot left.
        """
        stepper = self._stepper
        check_room(int(stepper.state.length[rows.start : rows.stop].max()), stepper.max_length, 1)
        return stepper.begin(tokens, rows)

    def finish(self, begun: BegunStep) -> torch.Tensor:
        """Logits [len(rows), vocab] of the step that was begun first."""
        return self._stepper.finish(begun)
