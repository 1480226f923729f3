"""Tiny random models with spread, and the logits that everything is compared with."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedConfig, PreTrainedModel

from exportable_cache.common.compat.transformers import cache_name
from exportable_cache.models.layers.encoder import encoder_of
from exportable_cache.models.layers.specs import codebooks_of
from exportable_cache.models.loading.support import RIGHT_BY_TOKEN, encoder_decoder_of
from exportable_cache.program.decoders import encode_method
from exportable_cache.verification.references import encoder_states, random_inputs

from .architectures import Architecture
from .shrink import FIRST_TOKEN, VOCAB, WINDOW, tiny_config

#: Prompts, as the pieces they are fed in: shorter than the window, longer, and longer in two pieces.
PROMPTS = ((6,), (11,), (5, 6))
STEPS = 24
LENGTH = 11 + STEPS
#: Tokens that an encoder is given.
ENCODER_LENGTH = 9
#: Samples, frames or patches that other encoders are given; what they take where it is one number.
ENCODER_LENGTHS = {"input_values": 4000, "input_features": 90, "flattened_patches": 12}
#: Buffers that training changes: biases of routers and of logits, and the scale of a layer (Gemma 4).
_TRAINED = re.compile(r"(e_score_correction_bias|balancing_biases|final_logits_bias|layer_scalar)$")
#: A model is no test if what should move its logits moves them less than this.
LEAST_SPREAD = 1e-2


#: Models that take no text alone, but whose text decoder is a causal LM of its own: where it is.
DECODERS = {
    "blip-2": "language_model",
    "instructblip": "language_model",
    "instructblipvideo": "language_model",
    "kosmos-2": "text_model",
}


def tiny_model(architecture: Architecture, window: int = WINDOW) -> PreTrainedModel:
    """A random model in eval mode, every parameter off its initial zero or one; the same weights for every window."""
    return initialised(architecture, tiny_config(architecture.shrinks, window, architecture.fields))


def made(architecture: Architecture, config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a config as it is made, with eager attention."""
    if architecture.group == "causal":
        # The decoder alone, of types that are an encoder-decoder otherwise.
        config.is_decoder, config.is_encoder_decoder = True, False
    config._attn_implementation = "eager"
    return architecture.model_class(config)


def initialised(architecture: Architecture, config: PreTrainedConfig) -> PreTrainedModel:
    """The random model of a tiny config, see `tiny_model`."""
    torch.manual_seed(0)
    model = encoder_decoder_of(made(architecture, config))
    if architecture.model_type in DECODERS:
        model = getattr(model, DECODERS[architecture.model_type])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if _TRAINED.search(name):
                buffer.add_(0.1 * torch.randn_like(buffer))
    return model.float().eval()


def tokens(model: PreTrainedModel | None = None, seed: int = 0, length: int = LENGTH) -> torch.Tensor:
    """Random token ids clear of the special ones, int64 [1, length], of a model with several codebooks [1, length,
    codebooks].
    """
    codebooks = None if model is None else codebooks_of(model.config)
    shape = (1, length) if codebooks is None else (1, length, codebooks.count)
    return torch.randint(FIRST_TOKEN, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def positions_of(model: PreTrainedModel, start: int, count: int) -> dict[str, Any]:
    """`position_ids` where the model takes them and has no rule of its own, as `generate` passes them."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return {}
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        return {}
    return {"position_ids": torch.arange(start, start + count)[None]}


@torch.no_grad()
def encoder_inputs(model: PreTrainedModel, seed: int = 1) -> dict[str, torch.Tensor]:
    """Random inputs of the encoder, none for a model without one: `ENCODER_LENGTH` tokens, or the
    sound that it takes.
    """
    if not model.config.is_encoder_decoder:
        return {}
    generator = torch.Generator().manual_seed(seed)
    if model.main_input_name == "input_ids":
        ids = torch.randint(FIRST_TOKEN, VOCAB, (1, ENCODER_LENGTH), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    encoder = encoder_of(model)
    length = encoder.max_length if encoder.is_fixed else ENCODER_LENGTHS[model.main_input_name]
    return random_inputs(encode_method(encoder), length, 1, VOCAB, generator)


def encoder_options(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> dict[str, int]:
    """`max_encoder_len`, where there is an encoder and it takes inputs of any length: that of `inputs`."""
    if not inputs or encoder_of(model).is_fixed:
        return {}
    return {"max_encoder_len": inputs[model.main_input_name].shape[1]}


def forward(model: PreTrainedModel, ids: torch.Tensor, encoding: dict[str, Any], **options: Any) -> torch.Tensor:
    """Logits [length, vocab] of `ids` [1, length], the decoder's where there is an encoder; [length, codebooks, vocab]
    of models that give those of each codebook.
    """
    codebooks, name = codebooks_of(model.config), "decoder_input_ids" if encoding else "input_ids"
    if codebooks is None:
        return model(**{name: ids}, **encoding, **options).logits[0]
    return codebooks.given(model(**{name: codebooks.taken(ids)}, **encoding, **options).logits)[0]


@torch.no_grad()
def encoded(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What the decoder is given of the encoder."""
    mask = {name: tensor for name, tensor in inputs.items() if name == "attention_mask"}
    return {"encoder_outputs": encoder_states(model, inputs), **mask} if inputs else {}


@torch.no_grad()
def cached_logits(
    model: PreTrainedModel, ids: torch.Tensor, prompt: int, inputs: dict[str, torch.Tensor] | None = None
) -> torch.Tensor:
    """The reference: eager attention, `DynamicCache`, teacher-forced. [STEPS + 1, vocab], after the prompt and each
    token.

    Args:
        inputs: Of the encoder, where there is one.
    """
    encoding = encoded(model, inputs or {})
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache()) if encoding else DynamicCache(config=model.config)
    first = (1,) * prompt if model.config.model_type in RIGHT_BY_TOKEN else (prompt,)
    return forced_logits(model, ids, first, cache, encoding)


@torch.no_grad()
def forced_logits(
    model: PreTrainedModel, ids: torch.Tensor, pieces: tuple[int, ...], cache: Cache, encoding: dict[str, Any]
) -> torch.Tensor:
    """The model itself over a cache of transformers', teacher-forced: [STEPS + 1, vocab], after the last of the pieces
    and each token.

    Args:
        pieces: Tokens of each call before the single ones.
        encoding: Of `encoded`.

    Raises:
        TypeError: If the model takes no such cache.
    """
    names = [name for name in (cache_name(), "cache_params") if name in inspect.signature(model.forward).parameters]
    if not names:
        raise TypeError(f"{type(model).__name__} takes no transformers cache")
    start, rows = 0, []
    for count in (*pieces, *[1] * STEPS):
        given = {names[0]: cache, **positions_of(model, start, count)}
        rows.append(forward(model, ids[:, start : start + count], encoding, use_cache=True, **given)[-1])
        start += count
    return torch.stack(rows[len(pieces) - 1 :])


@torch.no_grad()
def uncached_logits(
    model: PreTrainedModel, ids: torch.Tensor, inputs: dict[str, torch.Tensor] | None = None
) -> torch.Tensor:
    """All tokens at once, without a cache: [length, vocab]. Says whether the reference itself is right."""
    return forward(model, ids, encoded(model, inputs or {}), use_cache=False, **positions_of(model, 0, ids.shape[1]))


def spread(
    architecture: Architecture, model: PreTrainedModel, ids: torch.Tensor, inputs: dict[str, torch.Tensor]
) -> dict[str, float]:
    """How far the last logits move with the first token of a prompt of 6, the encoder's input, and the window."""
    other = ids.clone()
    other[0, 0] = torch.where(ids[0, 0] != FIRST_TOKEN, FIRST_TOKEN, FIRST_TOKEN + 1)
    expected = uncached_logits(model, ids[:, :6], inputs)[-1]
    moved = {"first token": _gap(expected, uncached_logits(model, other[:, :6], inputs)[-1])}
    if inputs:
        turned = {name: tensor if name == "attention_mask" else tensor.flip(-1) for name, tensor in inputs.items()}
        if "flattened_patches" in inputs:
            # Not the row and column that each patch names.
            turned["flattened_patches"][..., :2] = inputs["flattened_patches"][..., :2]
        moved["encoder input"] = _gap(expected, uncached_logits(model, ids[:, :6], turned)[-1])
    if _has_window(model.config.get_text_config(decoder=True)):
        wide = tiny_model(architecture, window=4 * WINDOW)
        if "reference_sliding_attention" in model.config.get_text_config(decoder=True).layer_types:
            # No window hides a prompt, which all tokens of one call are.
            last = [cached_logits(one, ids, 6, inputs)[-1] for one in (model, wide)]
        else:
            last = [uncached_logits(one, ids, inputs)[-1] for one in (model, wide)]
        moved["window"] = _gap(*last)
    return moved


def _has_window(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None) or []
    return any(word in str(kind) for kind in kinds for word in ("sliding", "chunked"))


def _gap(left: torch.Tensor, right: torch.Tensor) -> float:
    return (left - right).abs().max().item()
