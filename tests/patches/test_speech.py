"""Masks of what an encoder of sound gave: shortened once more by the model, and left alone inside `short_masks`."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from exportable_cache.common.patch import ORIGINAL
from exportable_cache.models.patches.mechanisms.speech import short_masks
from exportable_cache.models.patches.registry import patch_model

from ..test_encoder_inputs import model_of

LENGTH = 12
OWNERS = {
    "speech-speech_to_text": "_get_feature_vector_attention_mask",
    "speech-speecht5": "_get_feature_vector_attention_mask",
    "speech-seamless_m4t": "_compute_sub_sample_lengths_from_attention_mask",
    "speech-seamless_m4t_v2": "_compute_sub_sample_lengths_from_attention_mask",
}


def shortened(name: str) -> torch.Tensor:
    """How many of LENGTH positions, all real, are left."""
    model = model_of(name)
    method = OWNERS[name]
    module = next(module for module in model.modules() if hasattr(module, method))
    mask = torch.ones(1, LENGTH, dtype=torch.int64)
    found = getattr(module, method)(*((LENGTH, mask) if method == "_get_feature_vector_attention_mask" else (mask,)))
    return found.sum(-1) if found.dim() == 2 else found


@pytest.mark.parametrize("name", OWNERS)
def test_the_models_still_shorten_every_mask(name: str) -> None:
    # Once they take the mask of the encoder's output, this fails and the patch can go.
    assert shortened(name).item() < LENGTH


@pytest.mark.parametrize("name", OWNERS)
def test_short_masks_are_left_alone(name: str) -> None:
    model = model_of(name)
    assert patch_model(model) == [OWNERS[name]] == patch_model(model)
    owner = next(module for module in model.modules() if hasattr(module, OWNERS[name]))
    assert hasattr(getattr(type(owner), OWNERS[name]), ORIGINAL)
    with short_masks():
        assert shortened(name).item() == LENGTH
    assert shortened(name).item() < LENGTH


def test_masks_are_short_in_their_own_thread_only() -> None:
    patch_model(model_of("speech-speech_to_text"))
    with short_masks(), ThreadPoolExecutor(1) as other:
        assert other.submit(shortened, "speech-speech_to_text").result().item() < LENGTH
