"""GIT: it branches on the cache's length to extend a mask over its image."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers.masking_utils import create_causal_mask

from ....common.patch import Patch
from ..conditions import CACHE, only_traced

if TYPE_CHECKING:
    import torch
    from transformers.models.git.modeling_git import GitModel


def _git_text(
    self: GitModel,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    pixel_values: torch.Tensor | None = None,
    cache: Any = None,
    inputs_embeds: torch.Tensor | None = None,
    *,
    original: Callable,
    **kwargs: Any,
) -> Any:
    if pixel_values is not None:
        return original(self, input_ids, attention_mask, position_ids, pixel_values, cache, inputs_embeds, **kwargs)
    hidden_states = self.embeddings(input_ids=input_ids, position_ids=position_ids, inputs_embeds=inputs_embeds)
    mask = create_causal_mask(self.config.get_text_config(), hidden_states, attention_mask, cache, position_ids)
    return self.encoder(hidden_states, attention_mask=mask, **{CACHE: cache}, **kwargs)


PATCHES = {
    "git": (
        Patch(
            "git.modeling_git",
            "GitModel.forward",
            only_traced(_git_text),
            "it branches on the length of the cache",
            digests=("81037dcd8b02a326", "76cb5c52b9b3dccd", "c162859e6021ae6a"),
        ),
    )
}
