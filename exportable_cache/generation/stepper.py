"""What the loops of this room ask of whatever runs the steps: a session, or anything of the same form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from .sampling import Sampler


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
