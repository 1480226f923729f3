"""How encoders of sound shorten a padding mask, for masks that are short already.

A decoder's step has the encoder's output and its mask, [batch, encoder_length], but these models take the mask of the
encoder's *input* at every step and shorten it there, once more:

| method | models | upstream (v5.23.0, src/transformers/models) |
|---|---|---|
| `_get_feature_vector_attention_mask` | Speech2Text, SpeechT5 | speech_to_text/modeling_speech_to_text.py, speecht5/... |
| `_compute_sub_sample_lengths_from_attention_mask` | Seamless M4T and v2 | seamless_m4t/modeling_seamless_m4t.py, seamless_m4t_v2/... |

Inside `short_masks` these methods leave the mask as it is; elsewhere they do what they did. A test fails once the models
take the mask of what the encoder gave (tests/patches/test_transformers_encoders.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .marked import marked


class _Masks(threading.local):
    """Of this thread's step. TorchDynamo (2.13) traces the attributes of a `threading.local`, and no `ContextVar`."""

    are_short = False


_masks = _Masks()


@contextmanager
def short_masks() -> Iterator[None]:
    """Run a block in which every mask of an encoder's positions is that of its output."""
    before = _masks.are_short
    _masks.are_short = True
    try:
        yield
    finally:
        _masks.are_short = before


def patch_encoders(model: nn.Module) -> list[str]:
    """Replace the methods of the table in the classes that this model is made of. Calling it again changes nothing.

    Returns:
        Names of the patched methods that the model has need of, sorted.
    """
    found = set()
    for module in model.modules():
        for name, when_short in SHORTENING.items():
            original = getattr(type(module), name, None)
            if original is None or not original.__module__.startswith("transformers."):
                continue
            found.add(name)
            owner = next(kind for kind in type(module).__mro__ if name in vars(kind))
            setattr(
                owner,
                name,
                marked(lambda original, when_short=when_short: _unless_short(original, when_short), original),
            )
    return sorted(found)


def shortened_lengths(model: nn.Module, attention_mask: torch.Tensor) -> torch.Tensor:
    """How many positions an encoder of sound gives for the real part of its input: as many, where the model has no rule.

    Args:
        attention_mask: int64 [batch, length].

    Returns:
        int64 [batch].
    """
    for module in model.modules():
        if hasattr(module, "_get_feat_extract_output_lengths"):
            return module._get_feat_extract_output_lengths(attention_mask.sum(-1)).to(torch.int64)
        if hasattr(module, "_compute_sub_sample_lengths_from_attention_mask"):
            return module._compute_sub_sample_lengths_from_attention_mask(attention_mask).to(torch.int64)
    return attention_mask.sum(-1)


def _unless_short(original: Callable, when_short: Callable) -> Callable:
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        return when_short(*args, **kwargs) if _masks.are_short else original(self, *args, **kwargs)

    return method


SHORTENING: dict[str, Callable] = {
    "_get_feature_vector_attention_mask": lambda feature_vector_length, attention_mask: attention_mask,
    "_compute_sub_sample_lengths_from_attention_mask": lambda attention_mask: attention_mask.sum(-1),
}
