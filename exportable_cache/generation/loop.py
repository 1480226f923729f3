"""The decode loop: choose, feed back, until something ends every row."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
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
    """What ends the rows of a generation.

    Attributes:
        limit: Most tokens per row; None for as many as the cache has room for.
        tokens: A row ends with any of these.
        strings: A row ends with the token that completes one of these.
        pad_token: What a row that has ended gives while others go on.
        tokenizer: Needed where there are strings.
        after: Tokens of each row's prompt, if the strings are looked for in text that goes on from theirs.
    """

    limit: int | None = None
    tokens: Collection[int] = ()
    strings: Sequence[str] = ()
    pad_token: int = 0
    tokenizer: PreTrainedTokenizerBase | TextTokenizer | None = None
    after: Sequence[Sequence[int]] = ()

    def texts(self, batch_size: int) -> list[TextPieces]:
        """Return the text of each row, which ends with a stop string; none where there are no strings."""
        if not self.strings or self.tokenizer is None:
            return []
        rows = self.after or [()] * batch_size
        return [TextPieces(self.tokenizer, stop_strings=self.strings, after=row) for row in rows]


class Chosen(NamedTuple):
    """The tokens of one step.

    Attributes:
        tokens: int64 [batch], on the session's device.
        are_padding: Rows that had ended before, bool [batch] on the host.
    """

    tokens: torch.Tensor
    are_padding: torch.Tensor


def decode_loop(session: Stepper, logits: torch.Tensor, sampler: Sampler, ending: Ending) -> Iterator[Chosen]:
    """Tokens that follow a prompt which was fed.

    A token is fed back only when the next one is asked for, so the newest token is never in the cache. A row that has
    ended stays at the length it ended with while others go on, as far as every layer can take tokens back; rows of
    models with states that cannot take back any go on over padding.

    Args:
        session: What runs the steps; it continues from where it is.
        logits: After the prompt, [batch, vocab].
        sampler: How to choose.
        ending: What ends it.
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
    """Tokens that follow a prompt: its prefill, then `decode_loop`.

    Args:
        session: What runs the steps; it continues from where it is.
        input_ids: int64 [batch, length].
        chooser: How to choose.
        limit, end_tokens, stop_strings, pad_token: See `Ending`.
        inputs: What the prompt's prefill takes besides.

    Yields:
        int64 [batch], on the session's device.
    """
    ending = Ending(limit, end_tokens, stop_strings, pad_token, session.tokenizer, input_ids.tolist())
    for step in decode_loop(session, session.prefill(input_ids, **inputs), chooser, ending):
        yield step.tokens


def _completes(token: int, text: TextPieces) -> bool:
    text.push(token)
    return text.ended
