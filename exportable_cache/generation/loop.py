"""The decode loop, which chooses tokens and feeds them back until every row has ended."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import torch

from .multi_step import MultiStepDecoder
from .text import TextPieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..models.tokenizers.text import TextTokenizer
    from .sampling import Sampler

Tokens = TypeVar("Tokens")


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

    def texts(self, batch_size: int) -> list[TextPieces]:
        """Return a `TextPieces` per row that finds stop strings; empty if there are no strings."""
        if not self.strings or self.tokenizer is None:
            return []
        rows = self.after or [()] * batch_size
        return [TextPieces(self.tokenizer, stop_strings=self.strings, after=row) for row in rows]


class Chosen(NamedTuple):
    """The tokens of one step.

    Attributes:
        tokens: int64 [batch], on the session's device.
        are_padding: Rows that had ended before, bool [batch] on the CPU.
    """

    tokens: torch.Tensor
    are_padding: torch.Tensor


def decode_loop(session: Stepper, logits: torch.Tensor, sampler: Sampler, ending: Ending) -> Generator[Chosen]:
    """Yield the tokens that follow a prompt which was already fed.

    A token is fed back when the next one is requested, so the newest token is never in the cache. The length of a row
    stays constant after its end while others continue, if every layer can take tokens back; otherwise the row continues
    over padding.

    Args:
        session: The session, positioned after the prompt.
        logits: [batch, vocab] after the prompt.
        sampler: Chooses the tokens.
        ending: The conditions that end rows.
    """
    tokens = sampler.choose(logits)
    batch_size = tokens.shape[0]
    ended = torch.zeros(batch_size, dtype=torch.bool)
    texts = ending.texts(batch_size)
    decoder = MultiStepDecoder(session, sampler)
    count = 0
    while True:
        if ended.any():
            tokens = tokens.masked_fill(ended.to(tokens.device), ending.pad_token)
        chosen = tokens.tolist()
        yield Chosen(tokens, ended.clone())
        count += 1
        for row, token in enumerate(chosen):
            if not ended[row]:
                ended[row] = token in ending.tokens or bool(texts) and _completes(token, texts[row])
        if bool(ended.all()) or count == ending.limit or session.room == 0:
            return
        tokens = decoder.next(tokens, None if ending.limit is None else ending.limit - count, ended)


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


class Stepper(Protocol):
    """Runs the steps of a program after the prompt, for rows that each have their own position.

    Attributes:
        batch_size: Number of rows.
        vocab_size: Token ids run from 0 to vocab_size - 1.
        device: Device of the inputs and the logits.
        target: Name of the target, for messages.
    """

    batch_size: int
    vocab_size: int
    device: torch.device
    target: str

    @property
    def steps_per_launch(self) -> int:
        """Number of decode steps that `decode_and_choose` runs at once if there is room for them."""
        ...

    @property
    def moves(self) -> int:
        """Number of calls that changed the state or wrote the cache, except `shift`."""
        ...

    @property
    def equal_rows(self) -> bool:
        """True if all rows must have the same length."""
        ...

    @property
    def chooses_in_graph(self) -> bool:
        """True if decode steps can choose the next tokens inside their graph."""
        ...

    @property
    def length(self) -> torch.Tensor:
        """Number of tokens in each row, int64 [batch] on the host; not to be written."""
        ...

    @property
    def max_length(self) -> int | None:
        """Tokens that a row can hold, or None for any number."""
        ...

    @property
    def room(self) -> int | None:
        """Number of tokens that fit every row, or None for any number."""
        ...

    @property
    def score_length(self) -> int:
        """Most tokens that `score` takes; 0 if the program has no such method."""
        ...

    @property
    def least_rollback(self) -> tuple[str, int]:
        """Label of the layer that can take back the fewest tokens, such as `layer 2 (ring)`, and how many."""
        ...

    def decode_and_choose(self, tokens: torch.Tensor, chooser: Sampler, steps: int = 1) -> torch.Tensor:
        """Feed one token per row, int64 [batch], choose the next ones and feed those: int64 [batch, steps]."""
        ...

    def equal_steps(self, active: torch.Tensor | None = None) -> int:
        """Return the number of tokens that one step may feed with the result of single steps.

        0 means that `decode_for_generation` must feed the next token.

        Args:
            active: Rows that are still generating, bool [batch] on the host; all by default.
        """
        ...

    def decode_for_generation(self, tokens: torch.Tensor, active: torch.Tensor | None = None) -> torch.Tensor:
        """Feed one token per row, int64 [batch], recompute rows if needed, and return logits [batch, vocab].

        Args:
            tokens: int64 [batch].
            active: See `equal_steps`.
        """
        ...

    def score(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Feed a few tokens, int64 [batch, length], and return the logits after each, [batch, length, vocab]."""
        ...

    def shift(self, tokens: int | torch.Tensor) -> None:
        """Change the length by a number of tokens, or by int64 [batch], without checks; the cache must hold them."""
        ...

    def guarded(self, begin: Callable[[], Generator[Tokens]]) -> Generator[Tokens]:
        """Return the items of the generator that `begin` makes, each computed under the session's lock."""
        ...


class PromptStepper(Protocol):
    """A session: it takes prompts and checks them, and its `stepper` runs the steps after them."""

    batch_size: int
    vocab_size: int
    device: torch.device
    tokenizer: PreTrainedTokenizerBase | None

    @property
    def stepper(self) -> Stepper:
        """Stepper of the session; it does not check token ids."""
        ...

    @property
    def length(self) -> torch.Tensor:
        """Number of tokens in each row, int64 [batch] on the host."""
        ...

    @property
    def max_length(self) -> int | None:
        """Tokens that a row can hold, or None for any number."""
        ...

    def prefill(self, input_ids: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        """Feed tokens, int64 [batch, length], and return the logits [batch, vocab] of each row's last one."""
        ...

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Feed one token per row, int64 [batch], and return logits [batch, vocab]."""
        ...

    def rewind(self, tokens: int) -> None:
        """Take back the newest tokens of every row, if every layer allows it."""
        ...

    def reset(self) -> None:
        """Return to position 0."""
        ...
