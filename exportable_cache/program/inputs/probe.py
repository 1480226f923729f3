"""Detection of how images, video or audio change the inputs of a model's decoder, for any architecture.

The model runs up to its decoder on prompts with one item and with two. The decoder's inputs must follow exactly from
embeddings at the placeholders, positions that are equal for every item, a known attention mask, and extra features.
Otherwise the model is refused, with the name of the input that was not understood.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ...errors import UnsupportedModelError
from ..methods import ExtraFeature
from .front import decoder_of, handed_to_decoder, passing_extra_features

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

#: Values of `mm_token_type_ids` by kind.
MARKS = {"image": 1, "video": 2, "audio": 3}
# Arguments of the decoder that are not features of an item, or are checked separately.
_STANDARD = (
    "input_ids",
    "inputs_embeds",
    "position_ids",
    "attention_mask",
    "cache",
    "past_key_values",
    "use_cache",
    "labels",
)
_MASKS = ("visual_pos_masks", "vision_mask")
_VISION = (("vision_start_token_id", "boi_token_id"), ("vision_end_token_id", "eoi_token_id"))
_AROUND = {
    "image": (("image_start_token_id", *_VISION[0]), ("image_end_token_id", *_VISION[1])),
    "video": (("video_start_token_id", *_VISION[0]), ("video_end_token_id", *_VISION[1])),
    "audio": (("audio_start_token_id", "boa_token_id"), ("audio_end_token_id", "eoa_token_id", "eoa_token_index")),
}
_TEXT = (61, 83, 71, 97)
#: Names of rules of full and of sliding attention (see `_rules`) -> the value of `ItemFacts.sees` for both.
_BY_LAYERS = {("", "item"): "sliding item", ("item", "whole item"): "whole item"}


@dataclass(frozen=True)
class Probed:
    """Result of `probe`.

    Attributes:
        extra_features: Features that the decoder takes in addition to the embeddings.
        positions: See `ItemFacts`.
        advance: See `ItemFacts`.
        sees: See `ItemFacts`.
    """

    extra_features: tuple[ExtraFeature, ...]
    positions: tuple[tuple[int, ...], ...]
    advance: int
    sees: str


def prompt_with(
    model: PreTrainedModel, kind: str, pieces: Sequence[int], tokens: int, token_id: int, **given: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return a model's arguments for a prompt with an item between each two pieces of text of the given lengths.

    Items are enclosed in the config's start and end tokens, because some models find items by them.
    """
    before, after = (_around(model.config, names) for names in _AROUND[kind])
    ids: list[int] = []
    for index, piece in enumerate(pieces):
        ids += [token_id] * tokens if index else []
        text = [_text_token(model, token_id, len(ids) + offset) for offset in range(piece)]
        if after is not None and index and text:
            text[0] = after
        if before is not None and index < len(pieces) - 1 and text:
            text[-1] = before
        ids += text
    input_ids = torch.tensor([ids], device=model.device)
    marks = (input_ids == token_id).to(torch.int64)
    names = inspect.signature(model.forward).parameters
    found = {"input_ids": input_ids, **given}
    if "attention_mask" in names:
        # Processors pass it, and some models compute other positions without it.
        found["attention_mask"] = torch.ones_like(input_ids)
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in names:
            found[name] = marks * (MARKS[kind] if name.startswith("mm") else name not in given)
    return found


def _around(config: PreTrainedConfig, names: Sequence[str]) -> int | None:
    tokens = (getattr(config, name, None) for name in names)
    words = config.get_text_config().vocab_size
    return next((token for token in tokens if isinstance(token, int) and 0 <= token < words), None)


def _text_token(model: PreTrainedModel, token_id: int, index: int) -> int:
    token = _TEXT[index % len(_TEXT)] + index
    return token % max(2, model.config.get_text_config().vocab_size) if token != token_id else token_id + 1


def probe(
    model: PreTrainedModel, kind: str, tokens: int, token_id: int, items: Sequence[Mapping[str, torch.Tensor]]
) -> Probed:
    """Find how items of `kind` change the inputs of the decoder of `model`.

    Args:
        model: The model, with eager attention.
        kind: Kind of the items.
        tokens: Embeddings per item.
        token_id: Id of the placeholder token.
        items: Inputs of the encoder for one item, for another, and for both together.

    Raises:
        UnsupportedModelError: If the model processes items in an unknown way.
    """
    single, pair = (2, 3), (3, 2, 4)
    one = handed_to_decoder(model, **prompt_with(model, kind, single, tokens, token_id, **items[0]))
    two = handed_to_decoder(model, **prompt_with(model, kind, pair, tokens, token_id, **items[2]))
    text = handed_to_decoder(model, **prompt_with(model, kind, (5,), tokens, token_id))
    other = handed_to_decoder(model, **prompt_with(model, kind, single, tokens, token_id, **items[1]))
    refuse = _Refusal(model.config.model_type, kind)
    _check_embeddings(model, refuse, [(single, one), (pair, two)], tokens, token_id)
    taken = inspect.signature(decoder_of(model).forward).parameters
    # Arguments that a wrapper forwards and the decoder ignores.
    passed_on = [name for name in items[0] if name not in taken]
    extra_features = _extra_features(refuse, one, text, passed_on, tokens, single)
    later = [name for name in two if name not in one and name not in passed_on]
    if later:
        refuse(f"its decoder takes {later[0]} if there are several items")
    matters = False
    for name, offset in (("inputs_embeds", None), *((each.name, each) for each in extra_features)):
        features = [_features(given, name, offset)[2 : 2 + tokens] for given in (one, other)]
        matters = matters or not torch.equal(*features)
        both = _features(two, name, offset)
        found = [both[3 : 3 + tokens], both[5 + tokens : 5 + 2 * tokens]]
        if not all(alike(a, b, model.dtype) for a, b in zip(features, found)):
            refuse(f"the {name} of an item depend on what else is in the prompt")
    if not matters:
        refuse("its decoder gets the same embeddings for two different items")
    _check_taken_again(model, refuse, one, extra_features)
    positions, advance = _positions(model, refuse, one, two, tokens, (single, pair))
    sees = {_seen(refuse, given, pieces, tokens, model) for pieces, given in ((single, one), (pair, two))}
    if sees == {"item", "items"}:
        # One item follows both rules.
        sees = {"items"}
    if len(sees) > 1:
        refuse("its attention mask changes its rule with the prompt")
    return Probed(extra_features, positions, advance, sees.pop())


def frames_lie_apart(
    model: PreTrainedModel, kind: str, tokens: int, token_id: int, items: Sequence[Mapping[str, torch.Tensor]]
) -> bool:
    """Return True if the model treats a video of two frames like two videos of one frame with text between.

    Args:
        model: The model, with eager attention.
        kind: Kind of the items.
        tokens: Embeddings per frame.
        token_id: Id of the placeholder token.
        items: Inputs of the encoder for two videos of one frame, and for one of two frames.
    """
    try:
        two, one = (
            handed_to_decoder(model, **prompt_with(model, kind, (3, 2, 4), tokens, token_id, **item)) for item in items
        )
    except Exception:  # any model's code runs here
        return False
    return two.keys() == one.keys() and all(_same(two[name], one[name], model.dtype) for name in two)


def _same(one: Any, other: Any, dtype: torch.dtype) -> bool:
    if isinstance(one, Mapping):
        one, other = list(one.values()), list(other.values())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(_same(*each, dtype) for each in zip(one, other))
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and alike(one.float(), other.float(), dtype)
    return bool(one == other)


class _Refusal:
    def __init__(self, model_type: str, kind: str) -> None:
        self.model_type, self.kind = model_type, kind

    def __call__(self, why: str) -> NoReturn:
        raise UnsupportedModelError(
            f"{self.model_type!r} processes {self.kind} in a way that is not supported: {why}; leave out modalities to "
            "run its text decoder"
        )


def _spans(pieces: Sequence[int], tokens: int) -> list[tuple[int, int]]:
    found, at = [], pieces[0]
    for piece in pieces[1:]:
        found.append((at, at + tokens))
        at += tokens + piece
    return found


def _check_embeddings(
    model: PreTrainedModel, refuse: _Refusal, runs: Sequence[tuple[Any, Any]], tokens: int, token_id: int
) -> None:
    for pieces, given in runs:
        ids = prompt_with(model, refuse.kind, pieces, tokens, token_id)["input_ids"]
        expected = model.get_input_embeddings()(ids)
        found = given.get("inputs_embeds")
        if found is None or found.shape[:2] != ids.shape:
            refuse("its decoder does not get one embedding per token")
        is_text = ids[0] != token_id
        if found.shape[-1] != expected.shape[-1] or not torch.allclose(found[0, is_text], expected[0, is_text]):
            refuse("it changes the embeddings of text")


def alike(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return True if two tensors [tokens, size] differ only by rounding."""
    limit = 1e-3 if dtype == torch.float32 else 5e-2
    return bool((one - other).norm() <= limit * torch.maximum(one.norm(), other.norm()))


def _check_taken_again(
    model: PreTrainedModel, refuse: _Refusal, given: Mapping[str, Any], extra_features: Sequence[ExtraFeature]
) -> None:
    """Check that the model passes the embeddings it is given to its decoder unchanged."""
    embeds = given["inputs_embeds"]
    extra = [_features(given, each.name, each)[None].to(embeds.dtype) for each in extra_features]
    options = {"inputs_embeds": torch.cat([embeds, *extra], dim=-1)}
    if "position_ids" in given and "position_ids" in inspect.signature(model.forward).parameters:
        options["position_ids"] = given["position_ids"]
    with passing_extra_features(model, extra_features, options):
        again = handed_to_decoder(model, **options)
    if not torch.equal(again["inputs_embeds"], embeds):
        refuse("it changes embeddings that it is given")


def _features(given: Mapping[str, Any], name: str, feature: ExtraFeature | None) -> torch.Tensor:
    """Return a prompt's features [length, size], with zeros for text if only placeholders have them."""
    if feature is None:
        return given[name][0].float()
    joined = torch.cat(feature.tensors(given), dim=-1).float()
    if not feature.mask:
        return joined
    mask = given[feature.mask].reshape(-1)
    full = joined.new_zeros(mask.shape[0], joined.shape[-1])
    full[mask] = joined
    return full


def _extra_features(
    refuse: _Refusal,
    one: Mapping[str, Any],
    text: Mapping[str, Any],
    passed_on: Sequence[str],
    tokens: int,
    pieces: Sequence[int],
) -> tuple[ExtraFeature, ...]:
    found = []
    length = sum(pieces) + tokens
    for name, value in one.items():
        if name in _STANDARD or name in passed_on or name in _MASKS:
            continue
        mask = next((each for each in _MASKS if each in one), "")
        tensors = dict(value) if isinstance(value, Mapping) else {}
        tensors = dict(enumerate(value)) if isinstance(value, (list, tuple)) else tensors
        if isinstance(value, (list, tuple, Mapping)) and all(
            isinstance(each, torch.Tensor) for each in tensors.values()
        ):
            if not tensors:
                continue
            if not mask or any(each.reshape(-1, each.shape[-1]).shape[0] != tokens for each in tensors.values()):
                refuse(f"its decoder takes {name} without a known mask")
            sizes = sum(each.shape[-1] for each in tensors.values())
            found.append(ExtraFeature(name, tuple(tensors), sizes, mask))
        elif isinstance(value, torch.Tensor):
            if not value.is_floating_point() or value.shape[:2] != (1, length):
                refuse(f"its decoder takes {name} {list(value.shape)}")
            rest = torch.cat([value[0, : pieces[0]], value[0, pieces[0] + tokens :]])
            of_text = bool((rest != 0).any())
            found.append(ExtraFeature(name, (), value[0, 0].numel(), "", tuple(value.shape[2:]), of_text))
        elif not isinstance(value, (bool, int, float, str)) or text.get(name) != value:
            refuse(f"its decoder takes {name}, a {type(value).__name__}")
    return tuple(found)


def _positions(
    model: PreTrainedModel,
    refuse: _Refusal,
    one: Mapping[str, Any],
    two: Mapping[str, Any],
    tokens: int,
    pieces: tuple[Sequence[int], Sequence[int]],
) -> tuple[tuple[tuple[int, ...], ...], int]:
    given = one.get("position_ids")
    if given is None or "position_ids" not in inspect.signature(model.forward).parameters:
        if given is not None and not _is_consecutive(given):
            refuse("it computes positions that are not consecutive and cannot be passed")
        return (), 0
    if given.dim() == 2:
        if not _is_consecutive(given):
            refuse("its positions are not consecutive")
        return (), 0
    start = pieces[0][0]
    axes = given[:, 0]
    pattern = axes[:, start : start + tokens] - start
    advances = axes[:, start + tokens] - start
    if len(set(advances.tolist())) != 1:
        refuse("the position after an item differs between axes")
    advance = int(advances[0])
    for split, run in zip(pieces, (one, two)):
        if not torch.equal(run["position_ids"][:, 0], composed(pattern, advance, split)):
            refuse("the positions of an item's tokens depend on more than its start")
    if advance == tokens and torch.equal(pattern, torch.arange(tokens, device=pattern.device).expand_as(pattern)):
        # Consecutive on every axis, like text.
        return (), 0
    return tuple(tuple(axis) for axis in pattern.tolist()), advance


def composed(pattern: torch.Tensor, advance: int, pieces: Sequence[int]) -> torch.Tensor:
    """Return the positions [axes, length] of text with items between, each with `pattern` [axes, tokens]."""
    axes = pattern.shape[0]
    parts, at = [], 0
    for index, piece in enumerate(pieces):
        if index:
            parts.append(pattern + at)
            at += advance
        parts.append(torch.arange(at, at + piece, device=pattern.device).expand(axes, piece))
        at += piece
    return torch.cat(parts, dim=1)


def _is_consecutive(positions: torch.Tensor) -> bool:
    # Starting at 0 or 1, because only differences of rotary positions matter.
    first = positions[..., :1]
    steps = torch.arange(positions.shape[-1], device=positions.device)
    return bool((first <= 1).all()) and bool((positions - first == steps).all())


def _seen(
    refuse: _Refusal, given: Mapping[str, Any], pieces: Sequence[int], tokens: int, model: PreTrainedModel
) -> str:
    masks = given.get("attention_mask")
    if masks is None:
        return ""
    config = model.config.get_text_config()
    by_type = masks if isinstance(masks, Mapping) else {"full_attention": masks}
    found: dict[str, str] = {}
    for kind, mask in by_type.items():
        if mask is None or (isinstance(mask, torch.Tensor) and mask.dim() == 2 and bool((mask == 1).all())):
            found[kind] = ""
            continue
        if not isinstance(mask, torch.Tensor) or mask.dim() != 4:
            refuse(f"its decoder takes an attention mask of type {type(mask).__name__}")
        seen = mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] == 0
        window = getattr(config, "sliding_window", None) if kind == "sliding_attention" else None
        rules = _rules(seen.shape[0], _spans(pieces, tokens), window)
        name = next((name for name, rule in rules.items() if torch.equal(rule, seen.cpu())), None)
        if name is None:
            refuse(f"its mask of {kind} follows an unknown rule")
        found[kind] = name or ""
    named = _BY_LAYERS.get((found.get("full_attention", "-"), found.get("sliding_attention", "-")))
    if named is not None and len(found) == 2:
        return named
    if len(set(found.values())) > 1:
        refuse(f"its masks of {', '.join(by_type)} follow different rules")
    return next(iter(found.values()))


def _rules(length: int, spans: Sequence[tuple[int, int]], window: int | None) -> dict[str, torch.Tensor]:
    query, key = torch.arange(length)[:, None], torch.arange(length)[None]
    near = torch.ones(length, length, dtype=torch.bool) if window is None else query - key < window
    causal = key <= query
    same = torch.zeros(length, length, dtype=torch.bool)
    for start, end in spans:
        same[start:end, start:end] = True
    is_item = same.any(-1)
    return {
        "": causal & near,
        "item": (causal | same) & near,
        "whole item": causal & near | same,
        "items": (causal | is_item[:, None] & is_item) & near,
        "prompt": near,
    }
