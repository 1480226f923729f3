"""Interfaces of what runs steps for decode loops: a session and its stepper."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .sampling import Sampler

Tokens = TypeVar("Tokens")


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
    def most_drafted(self) -> int:
        """Most tokens that the program's draft head proposes at once; 0 without one."""
        ...

    @property
    def least_rollback(self) -> tuple[str, int]:
        """Label of the layer that can take back the fewest tokens, such as `layer 2 (ring)`, and how many."""
        ...

    def draft(self, token: int, link: int) -> torch.Tensor:
        """Return the draft head's logits [1, vocab] after a token that comes `link` proposed ones after the text."""
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


class HasStepper(Protocol):
    """A session whose `stepper` runs steps."""

    @property
    def stepper(self) -> Stepper:
        """Stepper of the session; it does not check token ids."""
        ...


class PromptStepper(HasStepper, Protocol):
    """A session: it takes prompts and checks them, and its `stepper` runs the steps after them."""

    batch_size: int
    vocab_size: int
    device: torch.device
    tokenizer: PreTrainedTokenizerBase | None

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
