"""A model without its weights: built where tensors have shapes and no values, so that sizes are read off the model."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

from ...common.compat.torch import fake_tensors
from ...common.compat.transformers import experts_implementation, set_attention_implementation
from ...errors import ExportableCacheError
from ..patches.registry import patch_model
from .loading import auto_class

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


def model_without_weights(config: PreTrainedConfig, device: str = "meta") -> PreTrainedModel | None:
    """The text decoder, with the encoder of an encoder-decoder, or None where its code cannot be built.

    A decoder that is no causal LM of its own comes inside the model that it is a part of.

    Args:
        device: "meta", or any inside `fake_tensors`.
    """
    has_encoder = getattr(config, "is_encoder_decoder", False)
    probe = copy.deepcopy(config if has_encoder else config.get_text_config(decoder=True))
    model = _built(auto_class(probe) or AutoModelForCausalLM, probe, device)
    if model is None:
        model = _built(AutoModelForMultimodalLM, copy.deepcopy(config), device)
    if model is None:
        return None
    if experts_implementation(model.config) is not None:
        # On the meta device the grouped kernels take bfloat16 only; batched products take any dtype, and no values are
        # looked at.
        model.set_experts_implementation("batched_mm")
    # Its files are those of the model that the cache is for.
    patch_model(model)
    return model


def ask_without_weights(
    config: PreTrainedConfig, question: Callable[[PreTrainedModel], _T], model: PreTrainedModel | None
) -> _T | None:
    """What `question` gives for a model without weights, None where its code looks at values whatever is tried.

    Tried are the meta device, then fake tensors, which transformers takes for a tracer's and does not look into.

    Args:
        model: On the meta device, see `model_without_weights`; None where it cannot be built there.

    Raises:
        ExportableCacheError: What `question` says of the model.
    """
    if model is None:
        return None
    try:
        return question(model)
    except ExportableCacheError:
        raise
    except Exception as error:  # any model code may run here
        logger.info("could not run %s on the meta device: %s", config.model_type, error)
    try:
        with fake_tensors():
            faked = model_without_weights(config, "cpu")
            return None if faked is None else question(faked)
    except ExportableCacheError:
        raise
    except Exception as error:
        logger.info("could not run %s with fake tensors: %s", config.model_type, error)
        return None


def _built(kind: type, config: PreTrainedConfig, device: str) -> PreTrainedModel | None:
    set_attention_implementation(config, "eager")
    try:
        with torch.device(device):
            return kind.from_config(config)  # type: ignore[attr-defined]
    except Exception as error:  # any model code may run here
        logger.info("could not build %s without weights: %s", config.model_type, error)
        return None
