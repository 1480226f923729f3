"""Distance of a program from the model in the dtype of its stored weights, if it was exported in another dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..cache.spec import Sinks

#: Steps after each prompt whose logits are kept, few because the stored model must run them too.
KEPT_STEPS = 8


@dataclass(frozen=True)
class FedPrompt:
    """A prompt that was verified, with the program's logits.

    Attributes:
        length: Tokens of the prompt.
        ids: int64 [batch, length + steps], the prompt and the tokens after it.
        sinks: Attention sinks of the full-attention layers; None if they kept every token.
        encoder_inputs: Inputs of the encoder by name, for an encoder-decoder.
        logits: Logits of the program, [steps + 1, batch, vocab].
    """

    length: int
    ids: torch.Tensor
    sinks: Sinks | None
    encoder_inputs: dict[str, torch.Tensor] | None
    logits: torch.Tensor


@dataclass(frozen=True)
class StoredDistance:
    """Distance of a program from the model in the dtype of its stored weights.

    Attributes:
        dtype: The stored dtype.
        positions: Positions compared, over all prompts and rows.
        max_difference: Largest |logit difference|; NaN if either side produced one.
    """

    dtype: str
    positions: int
    max_difference: float

    def __str__(self) -> str:
        return f"{self.max_difference:.1e} from the model as stored in {self.dtype} ({self.positions} positions)"


#: Function that yields a model's logits [batch, vocab] after the prompt and after each later token.
Reference = Callable[[FedPrompt], Iterable[torch.Tensor]]


@torch.no_grad()
def distance_from_stored(fed: Sequence[FedPrompt], dtype: str, reference: Reference) -> StoredDistance:
    """Compare a program's logits with those of the model in its stored dtype.

    Args:
        fed: Prompts with the program's logits.
        dtype: The stored dtype.
        reference: Logits of the model in that dtype.
    """
    differences, positions = [], 0
    for prompt in fed:
        for found, expected in zip(prompt.logits, reference(prompt), strict=True):
            differences.append((found.float() - expected.to(found.device).float()).abs().max())
            positions += found.shape[0]
    return StoredDistance(dtype, positions, torch.stack(differences).max().item())
