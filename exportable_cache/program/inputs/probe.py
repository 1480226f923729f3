"""What pictures or sound do to a model: seen in what it hands its decoder for prompts with one item and with two.

No family is known here. What a prompt with items hands the decoder has to follow, to the number, from embeddings at the
places of placeholders, positions that are the same for every item, masks of a known kind and features that travel
beside the embeddings. What does not is refused, with the name of what was not understood.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ...errors import UnsupportedModelError
from .front import decoder_of, handed_to_decoder, travelling_beside

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

#: What marks a token of each kind where a processor tells them apart.
MARKS = {"image": 1, "video": 2, "audio": 3}
# Of the decoder's arguments, those that are no feature of an item, or are looked at by themselves.
_OWN = ("input_ids", "inputs_embeds", "position_ids", "attention_mask", "past_key_values", "use_cache", "labels")
_PLACES = ("visual_pos_masks", "vision_mask")
_VISION = (("vision_start_token_id", "boi_token_id"), ("vision_end_token_id", "eoi_token_id"))
_AROUND = {
    "image": (("image_start_token_id", *_VISION[0]), ("image_end_token_id", *_VISION[1])),
    "video": (("video_start_token_id", *_VISION[0]), ("video_end_token_id", *_VISION[1])),
    "audio": (("audio_start_token_id", "boa_token_id"), ("audio_end_token_id", "eoa_token_id", "eoa_token_index")),
}
_TEXT = (61, 83, 71, 97)


@dataclass(frozen=True)
class Travelling:
    """Features that a decoder takes beside the embeddings, for each token.

    Attributes:
        name: Of the decoder's argument.
        keys: Of its tensors, where it is a list, or a dict by layer; empty for one tensor.
        size: Numbers per token of all of them.
        places: The argument that says which tokens have them, where not all do.
        shape: Of one token's, where it is one tensor.
        of_text: Whether text has them, too.
    """

    name: str
    keys: tuple[int, ...]
    size: int
    places: str = ""
    shape: tuple[int, ...] = ()
    of_text: bool = False

    def tensors(self, given: Mapping[str, Any]) -> list[torch.Tensor]:
        """Its tensors [tokens, size] in what a decoder was given for one prompt."""
        value = given[self.name]
        if not self.keys:
            return [value[0].flatten(1)]
        return [value[key].reshape(-1, value[key].shape[-1]) for key in self.keys]


@dataclass(frozen=True)
class Probed:
    """What follows for a program.

    Attributes:
        travels: Features beside the embeddings.
        positions, advance, sees: See `ItemFacts`.
    """

    travels: tuple[Travelling, ...]
    positions: tuple[tuple[int, ...], ...]
    advance: int
    sees: str


def prompt_with(
    model: PreTrainedModel, kind: str, pieces: Sequence[int], tokens: int, token_id: int, **given: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Arguments of a model for text with items between: `pieces` tokens of text, an item between one and the next.

    The text before and behind an item ends and begins with the tokens that the config has for that, as some find items
    by them.
    """
    before, behind = (_around(model.config, names) for names in _AROUND[kind])
    ids: list[int] = []
    for index, piece in enumerate(pieces):
        ids += [token_id] * tokens if index else []
        text = [_text_token(model, token_id, len(ids) + offset) for offset in range(piece)]
        if behind is not None and index and text:
            text[0] = behind
        if before is not None and index < len(pieces) - 1 and text:
            text[-1] = before
        ids += text
    input_ids = torch.tensor([ids], device=model.device)
    marks = (input_ids == token_id).to(torch.int64)
    names = inspect.signature(model.forward).parameters
    found = {"input_ids": input_ids, **given}
    if "attention_mask" in names:
        # As a processor gives it: without it some count positions otherwise.
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
    """What items of `kind` do to `model`.

    Args:
        model: In eager attention.
        tokens: Embeddings of an item.
        token_id: Of its placeholder.
        items: What its encoder takes of one, of another, and of both together.

    Raises:
        UnsupportedModelError: If something is not understood.
    """
    single, pair = (2, 3), (3, 2, 4)
    one = handed_to_decoder(model, **prompt_with(model, kind, single, tokens, token_id, **items[0]))
    two = handed_to_decoder(model, **prompt_with(model, kind, pair, tokens, token_id, **items[2]))
    text = handed_to_decoder(model, **prompt_with(model, kind, (5,), tokens, token_id))
    other = handed_to_decoder(model, **prompt_with(model, kind, single, tokens, token_id, **items[1]))
    refuse = _Refusal(model.config.model_type, kind)
    _check_embeddings(model, refuse, [(single, one), (pair, two)], tokens, token_id)
    taken = inspect.signature(decoder_of(model).forward).parameters
    # What a wrapper hands on to whoever takes it, and the decoder does not take.
    passed_on = [name for name in items[0] if name not in taken]
    travels = _travelling(refuse, one, text, passed_on, tokens, single)
    later = [name for name in two if name not in one and name not in passed_on]
    if later:
        refuse(f"its decoder takes {later[0]} where there are several")
    matters = False
    for name, offset in (("inputs_embeds", None), *((each.name, each) for each in travels)):
        features = [_features(given, name, offset)[2 : 2 + tokens] for given in (one, other)]
        matters = matters or not torch.equal(*features)
        both = _features(two, name, offset)
        found = [both[3 : 3 + tokens], both[5 + tokens : 5 + 2 * tokens]]
        if not all(alike(a, b, model.dtype) for a, b in zip(features, found)):
            refuse(f"the {name} of an item depend on what else is in the prompt")
    if not matters:
        refuse("its decoder is given the same for two items of other numbers")
    _check_taken_again(model, refuse, one, travels)
    positions, advance = _positions(model, refuse, one, two, tokens, (single, pair))
    sees = {_seen(refuse, given, pieces, tokens, model) for pieces, given in ((single, one), (pair, two))}
    if len(sees) > 1:
        refuse("its attention mask changes its rule with the prompt")
    return Probed(travels, positions, advance, sees.pop())


def frames_lie_apart(
    model: PreTrainedModel, kind: str, tokens: int, token_id: int, items: Sequence[Mapping[str, torch.Tensor]]
) -> bool:
    """Whether a video of two frames is to the model what two videos of one frame are, in a prompt with text between.

    Args:
        items: Two videos of one frame, and one of two.
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
            f"{self.model_type!r} does more with {self.kind} than a program knows: {why}; leave out modalities to run "
            "its text decoder"
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
            refuse("its decoder is not given one embedding per token")
        is_text = ids[0] != token_id
        if found.shape[-1] != expected.shape[-1] or not torch.allclose(found[0, is_text], expected[0, is_text]):
            refuse("it changes the embeddings of text")


def alike(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether two of [tokens, size] differ by rounding only."""
    limit = 1e-3 if dtype == torch.float32 else 5e-2
    return bool((one - other).norm() <= limit * torch.maximum(one.norm(), other.norm()))


def _check_taken_again(
    model: PreTrainedModel, refuse: _Refusal, given: Mapping[str, Any], travels: Sequence[Travelling]
) -> None:
    """A step gives the whole model what its decoder is to be handed."""
    embeds = given["inputs_embeds"]
    beside = [_features(given, each.name, each)[None].to(embeds.dtype) for each in travels]
    options = {"inputs_embeds": torch.cat([embeds, *beside], dim=-1)}
    if "position_ids" in given and "position_ids" in inspect.signature(model.forward).parameters:
        options["position_ids"] = given["position_ids"]
    with travelling_beside(model, travels, options):
        again = handed_to_decoder(model, **options)
    if not torch.equal(again["inputs_embeds"], embeds):
        refuse("it changes embeddings that it is given")


def _features(given: Mapping[str, Any], name: str, travelling: Travelling | None) -> torch.Tensor:
    """[length, size] of a prompt, zeros for text where only placeholders have them."""
    if travelling is None:
        return given[name][0].float()
    joined = torch.cat(travelling.tensors(given), dim=-1).float()
    if not travelling.places:
        return joined
    places = given[travelling.places].reshape(-1)
    full = joined.new_zeros(places.shape[0], joined.shape[-1])
    full[places] = joined
    return full


def _travelling(
    refuse: _Refusal,
    one: Mapping[str, Any],
    text: Mapping[str, Any],
    passed_on: Sequence[str],
    tokens: int,
    pieces: Sequence[int],
) -> tuple[Travelling, ...]:
    found = []
    length = sum(pieces) + tokens
    for name, value in one.items():
        if name in _OWN or name in passed_on or name in _PLACES:
            continue
        places = next((each for each in _PLACES if each in one), "")
        tensors = dict(value) if isinstance(value, Mapping) else {}
        tensors = dict(enumerate(value)) if isinstance(value, (list, tuple)) else tensors
        if isinstance(value, (list, tuple, Mapping)) and all(
            isinstance(each, torch.Tensor) for each in tensors.values()
        ):
            if not tensors:
                continue
            if not places or any(each.reshape(-1, each.shape[-1]).shape[0] != tokens for each in tensors.values()):
                refuse(f"its decoder takes {name} at no places that are known")
            sizes = sum(each.shape[-1] for each in tensors.values())
            found.append(Travelling(name, tuple(tensors), sizes, places))
        elif isinstance(value, torch.Tensor):
            if not value.is_floating_point() or value.shape[:2] != (1, length):
                refuse(f"its decoder takes {name} {list(value.shape)}")
            rest = torch.cat([value[0, : pieces[0]], value[0, pieces[0] + tokens :]])
            of_text = bool((rest != 0).any())
            found.append(Travelling(name, (), value[0, 0].numel(), "", tuple(value.shape[2:]), of_text))
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
        if given is not None and not _counts_on(given):
            refuse("it numbers positions of tokens itself")
        return (), 0
    if given.dim() == 2:
        if not _counts_on(given):
            refuse("its positions do not count on by one")
        return (), 0
    start = pieces[0][0]
    axes = given[:, 0]
    pattern = axes[:, start : start + tokens] - start
    advances = axes[:, start + tokens] - start
    if len(set(advances.tolist())) != 1:
        refuse("its positions go on differently on each axis")
    advance = int(advances[0])
    for split, run in zip(pieces, (one, two)):
        if not torch.equal(run["position_ids"][:, 0], composed(pattern, advance, split)):
            refuse("the positions of its tokens depend on more than where an item starts")
    if advance == tokens and torch.equal(pattern, torch.arange(tokens, device=pattern.device).expand_as(pattern)):
        # As text counts: every axis alike.
        return (), 0
    return tuple(tuple(axis) for axis in pattern.tolist()), advance


def composed(pattern: torch.Tensor, advance: int, pieces: Sequence[int]) -> torch.Tensor:
    """Positions [axes, length] of text with items between, each with `pattern` [axes, tokens] from its start."""
    axes = pattern.shape[0]
    parts, at = [], 0
    for index, piece in enumerate(pieces):
        if index:
            parts.append(pattern + at)
            at += advance
        parts.append(torch.arange(at, at + piece, device=pattern.device).expand(axes, piece))
        at += piece
    return torch.cat(parts, dim=1)


def _counts_on(positions: torch.Tensor) -> bool:
    # From 0 or 1: rotary positions are compared with each other only.
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
            refuse(f"its decoder takes an attention mask of a kind {type(mask).__name__}")
        seen = mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] == 0
        window = getattr(config, "sliding_window", None) if kind == "sliding_attention" else None
        rules = _rules(seen.shape[0], _spans(pieces, tokens), window)
        name = next((name for name, rule in rules.items() if torch.equal(rule, seen.cpu())), None)
        if name is None:
            refuse(f"its mask of {kind} follows no rule that is known")
        found[kind] = name or ""
    if found == {"full_attention": "", "sliding_attention": "item"}:
        return "sliding item"
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
    return {"": causal & near, "item": (causal | same) & near, "prompt": near}
