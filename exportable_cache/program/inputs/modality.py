"""A kind of input other than text: its tensors, and the method that turns it into embeddings."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from ...cache.attention.implementation import attention_of
from ...common.tensors import TensorSpec, name_forward
from ...errors import InputError, UnsupportedModelError, first_line
from ..methods import ExtraFeature, FixedInput, ItemFacts, ProgramMethod
from .examples import PATCH_INDICES, VIDEO_GRID, checked_example, placeholders_of, shifted_indices
from .front import count_tokens, handed_to_decoder
from .known_values import KnownValues
from .probe import Probed, frames_lie_apart, probe, prompt_with

if TYPE_CHECKING:
    from transformers import PreTrainedModel


__all__ = ["Modality", "features_of", "modality_of"]


@dataclass(frozen=True)
class Modality:
    """Images, video or audio, as a model takes them.

    Attributes:
        kind: `image`, `video` or `audio`.
        inputs: Inputs of the encoder for one item, of fixed size. Items are encoded one by one.
        tokens: Embeddings per item.
        hidden_size: Size of an embedding, extra features included.
        dtype: Name of the torch dtype of the embeddings.
        facts: Facts that a session needs to insert items into a prompt.
        extra_features: Features that the decoder takes in addition to the embedding, in order.
        known: Tensor values that the encoder's code reads.
    """

    kind: str
    inputs: tuple[TensorSpec, ...]
    tokens: int
    hidden_size: int
    dtype: str
    facts: ItemFacts
    extra_features: tuple[ExtraFeature, ...] = ()
    known: KnownValues = field(default_factory=KnownValues, compare=False)

    @property
    def token_id(self) -> int:
        """Id of the placeholder token; a prompt has one per embedding."""
        return self.facts.token_id

    @property
    def has_axes(self) -> bool:
        """True if rotary positions have several axes."""
        return bool(self.facts.positions)

    @property
    def method(self) -> ProgramMethod:
        """The method `encode_image`, `encode_video` or `encode_audio`, to embeddings [tokens, hidden_size]."""
        embeds = TensorSpec(f"{self.kind}_embeds", self.dtype, (self.tokens, self.hidden_size))
        grid = self.facts.fixed.get("image_grid_thw")
        return ProgramMethod(
            f"encode_{self.kind}",
            1,
            1,
            inputs=self.inputs,
            outputs=(embeds,),
            grid=None if grid is None or grid.numel != 3 else tuple(grid.tensor().flatten().tolist()),
            item=self.facts,
        )

    def module(self, model: PreTrainedModel) -> nn.Module:
        """Return the module that runs `method`."""
        return FeaturesModule(model, self)


class FeaturesModule(nn.Module):
    """Module of a modality: the encoder and the projector."""

    def __init__(self, model: PreTrainedModel, modality: Modality) -> None:
        super().__init__()
        # The whole model, because programs that are packaged together share weights by name.
        self.model = model
        self.modality = modality
        self.buffers_of: dict[str, str] = {}
        axes = len(modality.facts.positions)
        prompt = _placeholders(model, modality.kind, modality.tokens, modality.token_id, axes)
        fixed = {name: one.tensor().to(model.device) for name, one in modality.facts.fixed.items()}
        for name, tensor in {**prompt, **fixed}.items():
            self.buffers_of[name] = f"{modality.kind}_{name}"
            self.register_buffer(self.buffers_of[name], tensor, persistent=False)
        name_forward(self, tuple(spec.name for spec in modality.inputs))

    def call(self, **item: torch.Tensor) -> tuple[torch.Tensor]:
        """Return the embeddings [tokens, hidden_size] of one item."""
        given = {name: getattr(self, buffer) for name, buffer in self.buffers_of.items()}
        if torch.compiler.is_exporting():
            with self.modality.known.handed_out():
                return (_encoded(self.model, self.modality.extra_features, {**given, **item}),)
        return (_encoded(self.model, self.modality.extra_features, {**given, **item}),)


class EmbedModule(nn.Module):
    """Module of the method `embed`, from token ids to embeddings.

    Args:
        model: The model.
        size: Size of an embedding, extra features included.
        extra_features: Features in addition to the embedding; zeros for text, unless it has them too.
    """

    def __init__(self, model: PreTrainedModel, size: int, extra_features: Sequence[ExtraFeature] = ()) -> None:
        super().__init__()
        self.model = model
        self.size = size
        self.extra_features = extra_features

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor]:
        """Return the embeddings [batch, length, size] of token ids int64 [batch, length]."""
        embeds = self.model.get_input_embeddings()(input_ids)
        if any(each.of_text for each in self.extra_features):
            handed = handed_to_decoder(self.model, input_ids=input_ids)
            zeros = embeds.new_zeros(*embeds.shape[:2], 1)
            extra = [
                handed[each.name].flatten(2) if each.of_text else zeros.expand(-1, -1, each.size)
                for each in self.extra_features
            ]
            return (torch.cat([embeds, *(part.to(embeds.dtype) for part in extra)], dim=-1),)
        return (embeds if embeds.shape[-1] == self.size else F.pad(embeds, (0, self.size - embeds.shape[-1])),)


def _placeholders(model: PreTrainedModel, kind: str, tokens: int, token_id: int, axes: int) -> dict[str, torch.Tensor]:
    """Return a prompt of one item, with positions, because a graph would keep their computation."""
    prompt = prompt_with(model, kind, (0, 0), tokens, token_id)
    if "position_ids" in inspect.signature(model.forward).parameters:
        positions = torch.arange(tokens, device=model.device)[None]
        prompt["position_ids"] = positions.expand(axes, 1, tokens).contiguous() if axes else positions
    return prompt


def _encoded(model: PreTrainedModel, extra_features: Sequence[ExtraFeature], given: Mapping[str, Any]) -> torch.Tensor:
    """Return the embeddings with extra features that the decoder gets for a prompt of placeholders."""
    handed = handed_to_decoder(model, **given)
    parts = [handed["inputs_embeds"][0]]
    for each in extra_features:
        parts.extend(each.tensors(handed))
    return torch.cat([part.to(parts[0].dtype) for part in parts], dim=-1) if extra_features else parts[0]


def features_of(model: PreTrainedModel, modality: Modality, *inputs: torch.Tensor) -> torch.Tensor:
    """Return the embeddings [tokens, hidden_size] of one item, computed by the uncompiled model."""
    return modality.module(model)(*inputs)[0]


def modality_of(model: PreTrainedModel, kind: str, example: Mapping[str, Any]) -> Modality:
    """Find how a model takes items shaped like `example`, whose embeddings replace placeholder tokens."""
    inputs, fixed = checked_example(model, kind, example)
    token_ids = placeholders_of(model.config, kind)
    generator = torch.Generator().manual_seed(0)
    items = [{**{name: _another(value, generator) for name, value in inputs.items()}, **fixed} for _ in range(2)]
    problem: Exception | None = None
    with attention_of(model, "eager"):
        for token_id in token_ids:
            try:
                tokens = _tokens(model, kind, token_id, example, items[0])
                probed = _probed(model, kind, tokens, token_id, items)
                features, known = _features(model, kind, tokens, token_id, items, probed)
                apart = _frames_apart(model, kind, tokens, token_id, items)
                break
            except Exception as error:  # any model's code runs here
                problem = problem or error
        else:
            assert problem is not None
            raise not_understood(model, kind, problem) from problem
    return Modality(
        kind,
        tuple(TensorSpec.of(key, value) for key, value in inputs.items()),
        tokens,
        features.shape[1],
        str(features.dtype).removeprefix("torch."),
        ItemFacts(
            token_id,
            {key: FixedInput.of(value) for key, value in fixed.items()},
            probed.positions,
            probed.advance,
            probed.sees,
            apart,
        ),
        probed.extra_features,
        known,
    )


def _another(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return other pixels or samples of the same shape; or the same tokens, in another order."""
    if value.is_floating_point():
        return torch.randn(value.shape, generator=generator).to(value)
    return value[:, torch.randperm(value.shape[1], generator=generator)]


def not_understood(model: PreTrainedModel, kind: str, problem: Exception) -> Exception:
    """Return the error for a model whose code fails on one item; `problem` if that is one already."""
    if isinstance(problem, (UnsupportedModelError, InputError)):
        return problem
    return UnsupportedModelError(
        f"{model.config.model_type!r} does not encode {kind} of these shapes ({type(problem).__name__}: "
        f"{first_line(problem)}); pass the output of its processor for one item, modalities={{{kind!r}: {{...}}}}, or "
        "leave them out"
    )


def _tokens(
    model: PreTrainedModel, kind: str, token_id: int, example: Mapping[str, Any], item: Mapping[str, torch.Tensor]
) -> int:
    ids = example.get("input_ids")
    if isinstance(ids, torch.Tensor):
        return int((ids == token_id).sum())
    return count_tokens(model, lambda tokens: {**prompt_with(model, kind, (2, 3), tokens, token_id), **item})


def _probed(
    model: PreTrainedModel, kind: str, tokens: int, token_id: int, items: Sequence[Mapping[str, torch.Tensor]]
) -> Probed:
    """Probe the model with two items, joined in whichever way it takes, see `joined_items`."""
    problem: Exception | None = None
    # `token_type_ids` mark the tokens of items in most models, but a prefix in others (PaliGemma).
    marked: list[dict[str, Any]] = [{}]
    if "token_type_ids" in inspect.signature(model.forward).parameters:
        marked.append({"token_type_ids": None})
    for axis, marks in itertools.product((0, 1, -1), marked):
        pair = joined_items(items, axis)
        if pair is None:
            continue
        try:
            return probe(model, kind, tokens, token_id, [{**given, **marks} for given in (*items, pair)])
        except Exception as error:  # any model's code runs here
            # Errors of ways that the model does not take say nothing about the one that it takes.
            if problem is None or isinstance(error, UnsupportedModelError):
                problem = error
    assert problem is not None
    raise problem


def _frames_apart(
    model: PreTrainedModel, kind: str, tokens: int, token_id: int, items: Sequence[Mapping[str, torch.Tensor]]
) -> bool:
    grid = items[0].get(VIDEO_GRID)
    two = joined_items(items, 0)
    if two is None or grid is None or grid.shape != (1, 3) or int(grid[0, 0]) != 1:
        return False
    one = {**two, VIDEO_GRID: grid.new_tensor([[2, *grid[0, 1:].tolist()]])}
    return frames_lie_apart(model, kind, tokens, token_id, (two, one))


def joined_items(items: Sequence[Mapping[str, torch.Tensor]], axis: int) -> dict[str, torch.Tensor] | None:
    """Join items as entries (axis 0), in a batch of one prompt (axis 1), or as one long sequence (axis -1).

    Other tensors are concatenated along axis 0, or along axis 1 if that is `axis`. None if items lack the axis.
    """
    mains = [value for value in items[0].values() if value.is_floating_point()]
    if axis and any(value.shape[0] != 1 or value.dim() < 3 for value in mains):
        return None
    joined = {
        name: torch.cat(
            [item[name] for item in items],
            dim=axis if value.dim() > 1 and (axis == 1 or value.is_floating_point()) else 0,
        )
        for name, value in items[0].items()
    }
    for name in PATCH_INDICES:
        if name in joined:
            joined[name] = shifted_indices(items[0][name], len(items), mains[0].shape[:2].numel())
    return joined


def _features(
    model: PreTrainedModel,
    kind: str,
    tokens: int,
    token_id: int,
    items: Sequence[Mapping[str, torch.Tensor]],
    probed: Probed,
) -> tuple[torch.Tensor, KnownValues]:
    """Return the embeddings of one item, which are the same in any prompt, and the tensor values this reads."""
    known = (KnownValues(), KnownValues())
    prompt = _placeholders(model, kind, tokens, token_id, len(probed.positions))
    for item, values in zip(items, known):
        with values.recording():
            features = _encoded(model, probed.extra_features, {**prompt, **item})
    known[0].check_same(known[1], model.config.model_type)
    return features, known[1]
