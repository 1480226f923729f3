"""One kind of input beside text: which tensor it is, the method that turns it into embeddings, where those go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from ...common.named_forward import name_forward
from ...common.tensor_spec import TensorSpec
from ...errors import InputError, UnsupportedModelError
from ..methods import ProgramMethod
from .grid import BY_GRID, grid_constants, grid_for, patch_values

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IMAGE, AUDIO = "image", "audio"
# Model types whose decoder needs, besides embeddings, at most what `Modality` tells it.
_SUPPORTED = {
    **dict.fromkeys(("llava", "smolvlm", "idefics3", "gemma3", *BY_GRID), IMAGE),
    "voxtral": AUDIO,
}


@dataclass(frozen=True)
class Modality:
    """Images or sound, as a model takes them.

    Attributes:
        kind: `image` or `audio`.
        main_input: One item of what the processor gives, [1, ...] of fixed size, or [patches, values] where it has a
            grid. Any number of them goes through one by one.
        tokens: Embeddings per item.
        hidden_size: Of an embedding, and of the features for further layers that go with it, see `deepstack`.
        token_id: Of the placeholders in a prompt, one per embedding.
        dtype: Of the embeddings, as the name of a torch dtype.
        grid: The `image_grid_thw` of every item, in patches, where the encoder takes patches. Positions have three axes
            then.
        sees_itself: Whether the tokens of an item see each other in both directions.
        constants: What its encoder would compute from the grid's values, see `grid.grid_constants`.
    """

    kind: str
    main_input: TensorSpec
    tokens: int
    hidden_size: int
    token_id: int
    dtype: str
    grid: tuple[int, int, int] | None = None
    sees_itself: bool = False
    constants: dict[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> ProgramMethod:
        """`encode_image` or `encode_audio`: one item to embeddings [tokens, hidden_size]."""
        embeds = TensorSpec(f"{self.kind}_embeds", self.dtype, (self.tokens, self.hidden_size))
        return ProgramMethod(f"encode_{self.kind}", 1, 1, inputs=(self.main_input,), outputs=(embeds,), grid=self.grid)


class FeaturesModule(nn.Module):
    """The method of one modality: its encoder and the projector."""

    def __init__(self, model: PreTrainedModel, modality: Modality) -> None:
        super().__init__()
        # All of it: programs that are packaged together share weights by their names in the whole model.
        self.model = model
        self.kind = modality.kind
        self.constants = {
            name: value for name, value in modality.constants.items() if not isinstance(value, torch.Tensor)
        }
        self.tensors = [name for name in modality.constants if name not in self.constants]
        for name in self.tensors:
            self.register_buffer(f"{self.kind}_{name}", modality.constants[name], persistent=False)
        name_forward(self, (modality.main_input.name,))

    def call(self, **main_input: torch.Tensor) -> tuple[torch.Tensor]:
        """Embeddings [tokens, hidden_size] of one item."""
        tensors = {name: getattr(self, f"{self.kind}_{name}") for name in self.tensors}
        return (features_of(self.model, self.kind, {**self.constants, **tensors}, **main_input),)


class EmbedModule(nn.Module):
    """The method `embed`: what the text decoder makes of token ids.

    Args:
        model: The model.
        size: Of an embedding with the features for further layers, which text has none of: see `deepstack`.
    """

    def __init__(self, model: PreTrainedModel, size: int) -> None:
        super().__init__()
        self.model = model
        self.size = size

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor]:
        """int64 [batch, length] to embeddings [batch, length, size]."""
        embeds = self.model.get_input_embeddings()(input_ids)
        return (embeds if embeds.shape[-1] == self.size else F.pad(embeds, (0, self.size - embeds.shape[-1])),)


def features_of(
    model: PreTrainedModel, kind: str, constants: Mapping[str, Any], **main_input: torch.Tensor
) -> torch.Tensor:
    """Embeddings [tokens, hidden_size] of one image or piece of sound, those of further layers beside them."""
    if model.config.model_type in ("smolvlm", "idefics3"):
        return _idefics_features(model, **main_input)
    if model.config.model_type in BY_GRID:
        # A copy: transformers takes out of it what it has used.
        found = model.model.visual(main_input["pixel_values"], grid_thw=None, **dict(constants))
        return torch.cat([found.pooler_output, *getattr(found, "deepstack_features", ())], dim=-1)
    method = model.get_image_features if kind == IMAGE else model.get_audio_features
    found = method(**main_input, return_dict=True).pooler_output
    found = torch.cat(list(found), dim=0) if isinstance(found, (list, tuple)) else found
    return found.reshape(-1, found.shape[-1])


def _idefics_features(model: PreTrainedModel, pixel_values: torch.Tensor) -> torch.Tensor:
    """The same of Idefics 3 and SmolVLM, whose own method drops images of zeros, a choice that no graph can hold."""
    vision = model.config.vision_config
    side = pixel_values.shape[-1] // vision.patch_size
    real = torch.ones(1, side, side, dtype=torch.bool, device=pixel_values.device)
    hidden = model.model.vision_model(
        pixel_values=pixel_values, patch_attention_mask=real, return_dict=True
    ).last_hidden_state
    features = model.model.connector(hidden)
    return features.reshape(-1, features.shape[-1])


@torch.no_grad()
def modalities_of(
    model: PreTrainedModel, kinds: Sequence[str], image_size: int | Sequence[int] | None = None
) -> tuple[Modality, ...]:
    """What of `kinds` a model takes, from its config and from running its encoders on one item of zeros.

    Args:
        kinds: Any of `image` and `audio`.
        image_size: Height and width of every image in pixels, or one number for both, where the model's config leaves
            it open (Qwen2-VL).

    Raises:
        InputError: If a kind is neither, or the model does not take it.
        UnsupportedModelError: If the model needs more of the cache than embeddings in place of tokens.
    """
    if image_size is not None and IMAGE not in kinds:
        raise InputError(
            f"image_size is {image_size!r}, but no images are taken; pass modalities=['image'] too, or leave it out"
        )
    return tuple(_modality(model, kind, image_size) for kind in kinds)


def _modality(model: PreTrainedModel, kind: str, image_size: int | Sequence[int] | None) -> Modality:
    config = model.config
    if kind not in (IMAGE, AUDIO):
        raise InputError(f"modality is {kind!r}; choose of {IMAGE} and {AUDIO}")
    if config.model_type not in _SUPPORTED:
        raise UnsupportedModelError(
            f"{config.model_type!r} has not been tried with images or sound, only {', '.join(_SUPPORTED)}; "
            "leave out modalities to run its text decoder"
        )
    if _SUPPORTED[config.model_type] != kind:
        raise InputError(f"{config.model_type!r} takes {_SUPPORTED[config.model_type]}, not {kind}")
    dtype = str(model.dtype).removeprefix("torch.")
    grid, constants = None, {}
    if config.model_type in BY_GRID:
        grid = grid_for(config, image_size)
        constants = grid_constants(model, grid)
        patches = grid[0] * grid[1] * grid[2]
        main_input, token_id = TensorSpec("pixel_values", dtype, (patches, patch_values(config))), config.image_token_id
    elif kind == IMAGE:
        vision = config.vision_config
        if image_size is not None:
            raise InputError(
                f"image_size is {image_size!r}, but {config.model_type!r} takes images of {vision.image_size} x "
                f"{vision.image_size} pixels; leave it out"
            )
        shape: tuple[int | str, ...] = (1, getattr(vision, "num_channels", 3), vision.image_size, vision.image_size)
        main_input, token_id = TensorSpec("pixel_values", dtype, shape), config.image_token_id
    else:
        audio = config.audio_config
        shape = (1, audio.num_mel_bins, 2 * audio.max_source_positions)
        main_input, token_id = TensorSpec("input_features", dtype, shape), config.audio_token_id
    example = torch.zeros(main_input.shape, dtype=model.dtype, device=model.device)
    features = features_of(model, kind, constants, **{main_input.name: example})
    return Modality(
        kind,
        main_input,
        features.shape[0],
        features.shape[1],
        token_id,
        str(features.dtype).removeprefix("torch."),
        grid,
        config.model_type == "gemma3",
        constants,
    )
