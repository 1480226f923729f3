"""Rows padded on the left over a cache, continued with the mask of all tokens, by models whose code misreads it."""

import sys

import pytest
import torch

from exportable_cache import ExportableCache
from exportable_cache.common.patch import ORIGINAL
from exportable_cache.errors import InputError
from exportable_cache.models.patches.registry import PATCHES, patch_model

from ..support.models import tiny_model, tokens

#: Model type -> what its code calls the cache, and the patched function.
FAMILIES = {
    "bloom": ("past_key_values", "BloomModel.forward"),
    "falcon_mamba": ("cache_params", "apply_mask_to_padding_states"),
    "mamba": ("cache_params", "apply_mask_to_padding_states"),
}
LONG, SHORT, SLOTS = 9, 4, 32


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [2, LONG] with a short second row, and their mask."""
    ids, mask = tokens(LONG, 2), torch.ones(2, LONG, dtype=torch.int64)
    ids[1, : LONG - SHORT] = 0
    mask[1, : LONG - SHORT] = 0
    return ids, mask


@torch.no_grad()
def continued(model, name: str, new: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [2, vocab] after a padded prompt and `new` tokens with the whole mask, and those of each row alone."""
    ids, mask = rows()
    more = tokens(new, 2, seed=7)
    cache = ExportableCache.from_model(model, SLOTS, batch_size=2)
    model(ids, attention_mask=mask, **{name: cache})
    whole = torch.cat([mask, torch.ones(2, new, dtype=torch.int64)], dim=1)
    found = model(more, attention_mask=whole, **{name: cache}).logits[:, -1]
    both = torch.cat([ids, more], dim=1)
    alone = (model(both[row : row + 1, first:], use_cache=False) for row, first in enumerate((0, LONG - SHORT)))
    return found, torch.cat([one.logits[:, -1] for one in alone])


@pytest.mark.parametrize("new", [1, 6])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_row_goes_on_as_it_does_alone(family: str, new: int) -> None:
    found, alone = continued(tiny_model(family), FAMILIES[family][0], new)
    torch.testing.assert_close(found, alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("new", [1, 6])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_original_still_does_not(family: str, new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails once upstream is right: then the patch can go."""
    model, (cache, name) = tiny_model(family), FAMILIES[family]
    patch_model(model)
    owner = sys.modules[type(model).__module__]
    *path, attribute = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    monkeypatch.setattr(owner, attribute, getattr(getattr(owner, attribute), ORIGINAL))
    monkeypatch.setitem(PATCHES, family, tuple(one for one in PATCHES[family] if one.name != name))
    try:
        found, alone = continued(model, cache, new)
    except RuntimeError:
        return
    assert (found - alone).abs().max() > 1e-2


def test_a_mask_that_does_not_cover_the_new_tokens_is_refused() -> None:
    model, (ids, mask) = tiny_model("bloom"), rows()
    cache = ExportableCache.from_model(model, SLOTS, batch_size=2)
    model(ids, attention_mask=mask, past_key_values=cache)
    with pytest.raises(InputError, match="attention_mask is for 9 tokens, but the cache holds 9 and 6 more are fed"):
        model(tokens(6, 2), attention_mask=mask, past_key_values=cache)
