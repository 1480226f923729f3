"""Models without weights, built on the meta device or with fake tensors to read sizes from them."""

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
from .support import encoder_decoder_of, original_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


def model_without_weights(
    config: PreTrainedConfig, device: str = "meta", whole: bool = False, items: bool = False
) -> PreTrainedModel | None:
    """Build the text decoder of a config without weights, together with the encoder of an encoder-decoder.

    A decoder without a causal LM class is built inside its multimodal model.

    Args:
        config: The model's config.
        device: "meta", or any device inside `fake_tensors`.
        whole: Build the model that a checkpoint is loaded as, with the encoders of images, video and audio.
        items: With `whole`, build these encoders also where a checkpoint is loaded as its text decoder by default.

    Returns:
        The model, or None if its code cannot be built so.
    """
    whole = whole or getattr(config, "is_encoder_decoder", False)
    probe = copy.deepcopy(config if whole else config.get_text_config(decoder=True))
    model = _built(auto_class(probe, items) or AutoModelForCausalLM, probe, device)
    if model is None:
        model = _built(AutoModelForMultimodalLM, copy.deepcopy(config), device)
    if model is None:
        return None
    if experts_implementation(model.config) is not None:
        # Because grouped kernels take bfloat16 only on the meta device; batched products take any dtype.
        model.set_experts_implementation("batched_mm")
    patch_model(model)
    return model


def ask_without_weights(
    config: PreTrainedConfig, question: Callable[[PreTrainedModel], _T], model: PreTrainedModel | None
) -> _T | None:
    """Call `question` with a model without weights: on the meta device, then with fake tensors.

    The second try helps because transformers takes fake tensors for a tracer's and does not read their values.

    Args:
        config: The model's config.
        question: Called with the model.
        model: A model on the meta device, see `model_without_weights`; None if it cannot be built.

    Returns:
        The result of `question`, or None if the model's code reads values in both cases.

    Raises:
        ExportableCacheError: If `question` raises one.
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
            original = original_config(config)
            if original is not None:
                return encoder_decoder_of(AutoModelForMultimodalLM.from_config(original))
            return kind.from_config(config)  # type: ignore[attr-defined]
    except Exception as error:  # any model code may run here
        logger.info("could not build %s without weights: %s", config.model_type, error)
        return None
