"""What the parts of an input have in common: each turns what a user gives of its kind into what steps take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from ..program_stepper import ProgramStepper
    from ..token_rows import TokenRows
    from .image_places import PlacedImages


@dataclass(frozen=True)
class Prompt:
    """What is fed, checked but for what depends on where the session is.

    Attributes:
        rows: Its token ids.
        items: What encoders are to be given for it, [items, ...] by name of the method.
    """

    rows: TokenRows
    items: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Steps:
    """A prompt as the steps take it.

    Attributes:
        fed: Token ids int64 [batch, length], or embeddings [batch, length, hidden_size].
        rows: Where each row's tokens are.
        sizes: Tokens of each step, where that is not free.
        further: What steps take besides, by name of the input, [..., length].
        placed: Where its images are, counted from its first token, their rotary offset from there.
    """

    fed: torch.Tensor
    rows: TokenRows
    sizes: Sequence[int] | None = None
    further: Mapping[str, torch.Tensor] = field(default_factory=dict)
    placed: PlacedImages | None = None

    @property
    def are_ids(self) -> bool:
        """Whether tokens are fed by id."""
        return not self.fed.is_floating_point()


class InputStage(Protocol):
    """One kind of input beside a text decoder's own token ids: an encoder's, images, sound.

    Attributes:
        names: Names under which processors give it beside the token ids.
        token: Id of the token that stands for one in a prompt, None where nothing does.
    """

    names: tuple[str, ...]
    token: int | None

    def check(self, ids: torch.Tensor, given: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        """What encoders are to be given, by name of the method; nothing has changed yet.

        Args:
            ids: int64 [batch, length].
            given: By name, of what is in `names`.

        Raises:
            InputError: If it is not what the program takes, or does not fit the ids.
        """
        ...

    def extend(self, steps: Steps, prompt: Prompt, stepper: ProgramStepper) -> Steps:
        """The steps of a prompt, by the stages before, with this stage's part in them."""
        ...
