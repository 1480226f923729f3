"""The decode loop: choose, feed back, until something ends every row."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from .multi_step import MultiStepDecoder
from .text import TextPieces

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from ..models.tokenizers.text import TextTokenizer
    from .sampling import Sampler


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


class Stepper(Protocol):
    """Rows of tokens that a program goes through, each at a position of its own: what a loop does after the prompt.

    Attributes:
        batch_size: Rows.
        vocab_size: Token ids run from 0 to vocab_size - 1.
        device: Where inputs are expected and logits come back.
        target: What runs the steps, for messages.
    """

    batch_size: int
    vocab_size: int
    device: torch.device
    target: str

    @property
    def steps_per_launch(self) -> int:
        """Decode steps that `decode_and_choose` takes at once where there is room for them."""
        ...

    @property
    def moves(self) -> int:
        """Counts the calls that took it to another place or wrote its cache, but for `shift`."""
        ...

    @property
    def equal_rows(self) -> bool:
        """Whether all rows have to hold as many tokens."""
        ...

    @property
    def chooses_in_graph(self) -> bool:
        """Whether decode steps can choose the next tokens inside their graph."""
        ...

    @property
    def length(self) -> torch.Tensor:
        """Tokens seen per row, int64 [batch] on the host."""
        ...

    @property
    def max_length(self) -> int | None:
        """Tokens a row can hold in all, or None for any number."""
        ...

    @property
    def room(self) -> int | None:
        """Tokens that every row still has room for, or None for any number."""
        ...

    @property
    def score_length(self) -> int:
        """Most tokens that `score` takes, 0 where it takes none."""
        ...

    @property
    def least_rollback(self) -> tuple[str, int]:
        """The layer of which fewest tokens can be taken back at any length, as `layer 2 (ring)`, and how many
        they are.
        """
        ...

    def decode_and_choose(self, tokens: torch.Tensor, chooser: Sampler, steps: int = 1) -> torch.Tensor:
        """Feed one token per row, int64 [batch], then those that were chosen: int64 [batch, steps]."""
        ...

    def equal_steps(self, going: torch.Tensor | None = None) -> int:
        """Return how many tokens can be fed in one step as though one by one; 0 where `go_on` has to feed the next.

        Args:
            going: Rows whose answers go on, bool [batch] on the host; all by default.
        """
        ...

    def go_on(self, tokens: torch.Tensor, going: torch.Tensor | None = None) -> torch.Tensor:
        """Feed one token per row, int64 [batch], and compute rows again where generation has to: logits [batch, vocab].

        Args:
            going: See `equal_steps`.
        """
        ...

    def score(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Feed a few tokens, int64 [batch, length]: logits [batch, length, vocab]."""
        ...

    def shift(self, tokens: int | torch.Tensor) -> None:
        """Go back or on by a number of tokens, or by one per row int64 [batch], which the caller knows to be in the
        cache.
        """
        ...


class PromptStepper(Stepper, Protocol):
    """One that takes prompts as well, and checks them."""

    tokenizer: PreTrainedTokenizerBase | None

    def prefill(self, input_ids: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        """Feed tokens, int64 [batch, length]: logits [batch, vocab] of each row's last one."""
        ...

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Feed one token per row, int64 [batch]: logits [batch, vocab]."""
        ...

    def rewind(self, tokens: int) -> None:
        """Take back the newest tokens of every row, if that can be done."""
        ...

    def reset(self) -> None:
        """Start anew at position 0."""
        ...
