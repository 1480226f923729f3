"""The decode loop, which chooses tokens and feeds them back until every row has ended; with several steps a launch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from ..errors import InputError
from .sampling import SamplingSettings, choose
from .text import TextPieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..models.tokenizers.text import TextTokenizer
    from .sampling import Sampler
    from .stepper import PromptStepper, Stepper


def check_steps_per_launch(session: PromptStepper, steps: int) -> None:
    """Check that the session can run `steps` at once and take them back after a stop.

    Raises:
        InputError: If it is not a positive int, exceeds the capacity, or the runtime or a layer does not support it.
    """
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise InputError(f"steps_per_launch must be an int of at least 1, got {steps!r}")
    if steps == 1:
        return
    if session.max_length is not None and steps > session.max_length:
        raise InputError(
            f"steps_per_launch must be at most {session.max_length}, the tokens a row holds, got {steps}; lower it"
        )
    if not session.stepper.chooses_in_graph:
        raise InputError(
            f"steps_per_launch must be 1 for {session.stepper.target!r} programs, which return logits, got {steps}; "
            "leave it out, or use Session.from_model"
        )
    layer, allowed = session.stepper.least_rollback
    if allowed == 0:
        raise InputError(
            f"steps_per_launch must be 1 for a model with {layer}, whose state cannot be taken back, got {steps}; "
            "leave it out"
        )
    if allowed < steps - 1:
        raise InputError(
            f"steps_per_launch must be at most {allowed + 1}, because {layer} takes back at most {allowed} tokens, got "
            f"{steps}; lower it, or allocate the cache with rollback_slots={steps - 2}"
        )


class Choice(nn.Module):
    """The choice of the next tokens from logits, traceable because it reads no tensor values.

    Args:
        greedy: Take the most probable token, instead of drawing one.
        penalised: Apply the repetition penalty, and count the chosen tokens as seen.
    """

    def __init__(self, greedy: bool, penalised: bool) -> None:
        super().__init__()
        self.greedy = greedy
        self.penalised = penalised

    def forward(self, logits: torch.Tensor, *further: torch.Tensor) -> torch.Tensor:
        """Choose one token per row.

        Args:
            logits: [batch, vocab].
            *further: Random numbers [batch] in [0, 1) unless greedy; seen tokens, bool [batch, vocab], if penalised,
                which is updated in place; and the fields of `SamplingSettings`.

        Returns:
            int64 [batch].
        """
        left = list(further)
        uniform = None if self.greedy else left.pop(0)
        seen = left.pop(0) if self.penalised else None
        settings = SamplingSettings(*left)
        tokens, _ = choose(logits, settings, uniform, seen)
        if seen is not None:
            seen.scatter_(1, tokens[:, None], True)
        return tokens


class ChoosingSteps(nn.Module):
    """One or several decode steps followed by the choice of the next tokens, unrolled into one graph.

    Each further step feeds the tokens chosen by the one before, at the next position.

    Args:
        step: A `ProgramModule` of one token that returns logits [batch, vocab].
        greedy: Take the most probable token, instead of drawing one.
        penalised: Apply the repetition penalty, and count the chosen tokens as seen.
        steps: Number of steps.
        agree: Function that makes the chosen tokens, int64 [batch], equal on all processes of a parallel session.
    """

    def __init__(
        self,
        step: nn.Module,
        greedy: bool,
        penalised: bool,
        steps: int = 1,
        agree: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.agree = agree
        self.step = step
        self.choose = Choice(greedy, penalised)
        self.inputs = len(cast(Any, step).method.inputs)
        self.steps = steps

    def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
        """Run the steps.

        Args:
            *arguments: The step's inputs, and the arguments of `Choice` after the logits, with random numbers
                [steps, batch].

        Returns:
            int64 [batch, steps].
        """
        input_ids, input_pos, *others = arguments[: self.inputs]
        further = arguments[self.inputs :]
        chosen: list[torch.Tensor] = []
        for index in range(self.steps):
            logits = self.step(input_ids, input_pos, *others)
            tokens = self.choose(logits, *of_step(further, index, self.choose.greedy))
            if self.agree is not None:
                tokens = self.agree(tokens)
            chosen.append(tokens)
            input_ids, input_pos = tokens[:, None], input_pos + 1
        return torch.stack(chosen, dim=1)


def of_step(further: Sequence[torch.Tensor], index: int, greedy: bool) -> list[torch.Tensor]:
    """Return the arguments of the choice in one of several steps, with that step's random numbers."""
    return list(further) if greedy else [further[0][index], *further[1:]]


@dataclass(frozen=True)
class Ending:
    """The conditions that end the rows of a generation.

    Attributes:
        limit: Most tokens per row; None for the room in the cache.
        tokens: Tokens that end a row.
        strings: Strings that end a row with the token that completes them.
        pad_token: Token that a row returns after its end while others continue.
        tokenizer: Tokenizer, required if there are strings.
        after: Tokens of each row's prompt, if generated text continues that of the prompt.
    """

    limit: int | None = None
    tokens: Collection[int] = ()
    strings: Sequence[str] = ()
    pad_token: int = 0
    tokenizer: PreTrainedTokenizerBase | TextTokenizer | None = None
    after: Sequence[Sequence[int]] = ()


class Chosen(NamedTuple):
    """The tokens of one step.

    Attributes:
        tokens: int64 [batch], on the session's device.
        are_padding: Rows that had ended before, bool [batch] on the CPU.
    """

    tokens: torch.Tensor
    are_padding: torch.Tensor


def decode_loop(
    session: Stepper,
    logits: torch.Tensor,
    sampler: Sampler,
    ending: Ending,
    make_room: Callable[[], bool] = lambda: False,
) -> Generator[Chosen]:
    """Yield the tokens that follow a prompt which was already fed.

    A token is fed back when the next one is requested, so the newest token is never in the cache. The length of a row
    stays constant after its end while others continue, if every layer can take tokens back; otherwise the row continues
    over padding.

    Args:
        session: The session, positioned after the prompt.
        logits: [batch, vocab] after the prompt.
        sampler: Chooses the tokens.
        ending: The conditions that end rows.
        make_room: Called where the cache is full; the loop ends if it returns False.
    """
    tokens = sampler.choose(logits)
    batch_size = tokens.shape[0]
    ended = torch.zeros(batch_size, dtype=torch.bool)
    texts: list[TextPieces] = []
    if ending.strings and ending.tokenizer is not None:
        rows = ending.after or [()] * batch_size
        texts = [TextPieces(ending.tokenizer, stop_strings=ending.strings, after=row) for row in rows]
    ahead: deque[torch.Tensor] = deque()
    moves, count = session.moves, 0
    while True:
        if ended.any():
            tokens = tokens.masked_fill(ended.to(tokens.device), ending.pad_token)
        chosen = tokens.tolist()
        yield Chosen(tokens, ended.clone())
        count += 1
        for row, token in enumerate(chosen):
            if not ended[row]:
                ended[row] = token in ending.tokens or bool(texts) and _completes(token, texts[row])
        if bool(ended.all()) or count == ending.limit or (session.room == 0 and not make_room()):
            return
        stays = bool(ended.any()) and session.least_rollback[1] > 0 and not session.equal_rows
        on: int | torch.Tensor = (~ended).to(torch.int64) if stays else 1
        if not ahead or session.moves != moves:
            wanted = None if ending.limit is None else ending.limit - count
            ahead = deque(_launch(session, sampler, tokens, wanted, ended, stays))
            moves, on = session.moves, on - len(ahead)
        # Between tokens the length is that of plain decoding.
        if isinstance(on, torch.Tensor) or on != 0:
            session.shift(on)
        tokens = ahead.popleft()


def _launch(
    session: Stepper, sampler: Sampler, tokens: torch.Tensor, wanted: int | None, ended: torch.Tensor, stays: bool
) -> Sequence[torch.Tensor]:
    """Feed the newest tokens, and choose those that follow: of `steps_per_launch` steps, or of one.

    Tokens computed ahead are dropped at no cost if the generation ends or the session is used otherwise.

    Args:
        session: The session.
        sampler: Chooses the tokens.
        tokens: int64 [batch], the newest tokens.
        wanted: Number of tokens still needed; None if there is no limit.
        ended: bool [batch] on the CPU, rows that get padding. They are fed too, because a step has all rows.
        stays: True if rows that ended keep their length; see `decode_loop`.

    Returns:
        int64 [batch] of each step.
    """
    equal = session.equal_steps(~ended)
    if equal == 0:
        return [sampler.choose(session.decode_for_generation(tokens, ~ended))]
    steps = session.steps_per_launch if sampler.chooses_in_graph else 1
    # Single steps near the end, because fewer steps per launch would need another graph. A row that has ended takes
    # back all steps of a launch, one more than a row that ends within it.
    limits = (wanted, session.room, equal, session.least_rollback[1] if stays else None)
    if any(limit is not None and limit < steps for limit in limits):
        steps = 1
    return session.decode_and_choose(tokens, sampler, steps).unbind(1)


def generate_tokens(
    session: PromptStepper,
    input_ids: torch.Tensor,
    limit: int | None,
    chooser: Sampler,
    end_tokens: Collection[int],
    stop_strings: Sequence[str] = (),
    pad_token: int = 0,
    inputs: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Iterator[torch.Tensor]:
    """Prefill a prompt and yield the tokens that follow, see `decode_loop`.

    Args:
        session: The session; it continues from its current position.
        input_ids: int64 [batch, length].
        limit: See `Ending`.
        chooser: Chooses the tokens.
        end_tokens: See `Ending.tokens`.
        stop_strings: See `Ending.strings`.
        pad_token: See `Ending`.
        inputs: Further inputs of the prefill.

    Yields:
        int64 [batch], on the session's device.
    """
    ending = Ending(limit, end_tokens, stop_strings, pad_token, session.tokenizer, input_ids.tolist())
    steps = session.stepper.guarded(
        lambda: decode_loop(session.stepper, session.prefill(input_ids, **inputs), chooser, ending)
    )
    for step in steps:
        yield step.tokens


def _completes(token: int, text: TextPieces) -> bool:
    text.push(token)
    return text.ended
