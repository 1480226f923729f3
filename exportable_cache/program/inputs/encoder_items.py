"""Items among the text of an encoder-decoder's encoder (Florence-2): embeddings that replace placeholders."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...cache.attention.implementation import attention_of
from ...common.tensors import TensorSpec
from ...errors import InputError, UnsupportedModelError
from ...models.layers.encoder import run_encoder
from ..methods import ItemFacts
from .examples import checked_example, example_of, placeholders_of
from .known_values import KnownValues
from .modality import Modality, not_understood
from .probe import alike

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

#: Token of the prompts that the probe runs; any id that is not the placeholder would do.
_TEXT = 3


@dataclass(frozen=True)
class EncoderModality(Modality):
    """Images, video or audio that the method `encode` takes next to its tokens, one item per row."""

    @property
    def batched_inputs(self) -> tuple[TensorSpec, ...]:
        """Inputs of `encode`, with one item per row."""
        return tuple(TensorSpec(spec.name, spec.dtype, ("batch", *spec.shape[1:])) for spec in self.inputs)

    def embedded(
        self, model: PreTrainedModel, input_ids: torch.Tensor, items: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return the embeddings [batch, length, hidden_size] of token ids and of the items at their placeholders."""
        with self.known.handed_out() if torch.compiler.is_exporting() else nullcontext():
            features = _features(model, self.kind, items)
        return _placed(model, input_ids, features, self.token_id)


def takes_encoder_items(model: PreTrainedModel) -> bool:
    """Return True if the encoder of an encoder-decoder takes text, so that items are among its tokens."""
    return bool(model.config.is_encoder_decoder) and model.main_input_name == "input_ids"


def encoder_modality(
    model: PreTrainedModel,
    kind: str,
    given: Mapping[str, Any] | None,
    image_size: int | Sequence[int] | None = None,
) -> EncoderModality:
    """Find the items of an encoder by running it on two random ones, and compare with the whole model.

    Args:
        model: The encoder-decoder, whose encoder takes text.
        kind: `image`, `video` or `audio`.
        given: Output of its processor for one item; if None, it is made from the config.
        image_size: See `example_of`.

    Raises:
        InputError: If the example has several items, or the model takes no such item.
        UnsupportedModelError: If the model does not replace placeholders by the embeddings of `get_*_features`.
    """
    inputs, fixed = checked_example(model, kind, example_of(model, kind, image_size) if given is None else given)
    many = next((value.shape[0] for value in inputs.values() if value.shape[0] != 1), 1)
    if many != 1:
        raise InputError(
            f"the example of {kind} must have one item, because encode takes one per row, got {many}; pass one"
        )
    fixed |= {name: value for name, value in inputs.items() if not value.is_floating_point()}
    if fixed or not hasattr(model, f"get_{kind}_features"):
        what = f"reads {sorted(fixed)[0]}" if fixed else f"has no get_{kind}_features"
        raise UnsupportedModelError(
            f"{model.config.model_type!r} {what}, which is not supported for the encoder of an encoder-decoder; leave "
            "out modalities to run it on text"
        )
    token_id = placeholders_of(model.config, kind)[0]
    generator = torch.Generator().manual_seed(0)
    known = (KnownValues(), KnownValues())
    with attention_of(model, "eager"):
        try:
            for values in known:
                item = {name: torch.randn(value.shape, generator=generator).to(value) for name, value in inputs.items()}
                with values.recording():
                    features = _features(model, kind, item)
                _check_encoder(model, kind, features, token_id, item)
            known[0].check_same(known[1], model.config.model_type)
        except Exception as error:  # any model's code runs here
            raise not_understood(model, kind, error) from error
    return EncoderModality(
        kind,
        tuple(TensorSpec.of(name, value) for name, value in inputs.items()),
        features.shape[1],
        features.shape[2],
        str(features.dtype).removeprefix("torch."),
        ItemFacts(token_id, tokens=features.shape[1]),
        known=known[1],
    )


def _features(model: PreTrainedModel, kind: str, items: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the embeddings [batch, tokens, hidden_size] of one item per row."""
    found = getattr(model, f"get_{kind}_features")(**items)
    features = getattr(found, "pooler_output", found)
    if not isinstance(features, torch.Tensor) or features.dim() != 3:
        raise UnsupportedModelError(
            f"get_{kind}_features of {model.config.model_type!r} must return [items, tokens, hidden_size], got another "
            "result; leave out modalities to run it on text"
        )
    return features


def _placed(model: PreTrainedModel, input_ids: torch.Tensor, features: torch.Tensor, token_id: int) -> torch.Tensor:
    embeds = model.get_input_embeddings()(input_ids)
    is_item = input_ids == token_id
    # Row by row, because a scatter over the batch would move the items of all rows after one without placeholders.
    index = (is_item.cumsum(-1) - 1).clamp(0, features.shape[1] - 1)
    found = features.gather(1, index[..., None].expand(-1, -1, features.shape[2]))
    return torch.where(is_item[..., None], found.to(embeds.dtype), embeds)


def _check_encoder(
    model: PreTrainedModel, kind: str, features: torch.Tensor, token_id: int, item: Mapping[str, torch.Tensor]
) -> None:
    """Check that the encoder computes the same states from our embeddings as in the whole model."""
    text = torch.full((1, 2), _TEXT if token_id != _TEXT else _TEXT + 1, device=model.device)
    placeholders = torch.full((1, features.shape[1]), token_id, device=model.device)
    ids = torch.cat([text, placeholders, text], dim=1)
    mask = torch.ones_like(ids)
    whole = model(input_ids=ids, attention_mask=mask, decoder_input_ids=text, use_cache=False, **item)
    expected = whole.encoder_last_hidden_state
    hidden, _ = run_encoder(model, mask, inputs_embeds=_placed(model, ids, features, token_id))
    if expected is None or not alike(hidden[0], expected[0], hidden.dtype):
        raise UnsupportedModelError(
            f"the encoder of {model.config.model_type!r} processes {kind} in a way that is not supported: its states "
            "do not follow from embeddings at placeholders; leave out modalities to run it on text"
        )
