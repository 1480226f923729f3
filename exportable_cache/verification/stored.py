"""How far a program is from the model in the dtype its weights are stored in, where it was exported in another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..cache.spec import Sinks

#: Steps after each prompt whose logits are kept: a checkpoint's model has to run them as well.
KEPT_STEPS = 8


@dataclass(frozen=True)
class FedPrompt:
    """A prompt that was verified, and what the program gave.

    Attributes:
        length: Tokens of the prompt.
        ids: int64 [batch, length + steps], the prompt and the tokens after it.
        sinks: What full-attention layers kept, None where they kept every token.
        encoder_inputs: Of an encoder-decoder, by name.
        logits: [steps + 1, batch, vocab].
    """

    length: int
    ids: torch.Tensor
    sinks: Sinks | None
    encoder_inputs: dict[str, torch.Tensor] | None
    logits: torch.Tensor


@dataclass(frozen=True)
class StoredDistance:
    """A program against the model in the dtype its weights are stored in.

    Attributes:
        dtype: The stored one.
        positions: Compared, over all prompts and rows.
        max_difference: Largest |logit difference|; not a number if either side produced one.
    """

    dtype: str
    positions: int
    max_difference: float

    def __str__(self) -> str:
        return f"{self.max_difference:.1e} from the model as stored in {self.dtype} ({self.positions} positions)"


#: Logits [batch, vocab] of a model after the prompt and after each later token.
Reference = Callable[[FedPrompt], Iterable[torch.Tensor]]


@torch.no_grad()
def distance_from_stored(fed: Sequence[FedPrompt], dtype: str, reference: Reference) -> StoredDistance:
    """Compare what a program gave with the model in its stored dtype.

    Args:
        fed: What the program was fed.
        dtype: The stored one.
        reference: Of that model.
    """
    differences, positions = [], 0
    for prompt in fed:
        for found, expected in zip(prompt.logits, reference(prompt), strict=True):
            differences.append((found.float() - expected.to(found.device).float()).abs().max())
            positions += found.shape[0]
    return StoredDistance(dtype, positions, torch.stack(differences).max().item())
