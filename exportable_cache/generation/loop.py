"""The decode loop, which chooses tokens and feeds them back until every row has ended."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch

from .multi_step import MultiStepDecoder
from .text import TextPieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..models.tokenizers.text import TextTokenizer
    from .sampling import Sampler
    from .stepper import PromptStepper, Stepper


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
        if bool(ended.all()) or count == ending.limit or (session.room == 0 and not make_room()):
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
