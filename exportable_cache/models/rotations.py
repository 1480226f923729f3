"""Find how the stored rows of a model's layers depend on their positions: which parts are rotated, and how fast."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeAlias

import torch

from ..cache.attention.functions import ATTENTION
from ..cache.attention.implementation import attention_of
from ..cache.shift import Rotation, rotated, turns
from ..common.compat.transformers import cache_argument
from ..errors import UnsupportedModelError
from .cache_factory import ExportableCache
from .draft_heads import draft_head_of
from .layers.specs import codebooks_of
from .patches.mechanisms.rope import ChangingFrequencies, rope_by
from .positions import DYNAMIC, changing, lengths_forgotten, rope_rule, takes_positions, text_model_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..cache.layers import CacheLayer
    from .layers.specs import Codebooks

#: Frequencies of a rotary embedding, float32 [pairs], or those that change with the length.
Frequencies: TypeAlias = torch.Tensor | ChangingFrequencies

#: Positions at which a token's rows are compared, besides the last one of the cache.
_PROBED = (1, 0, 2, 13, 37)
#: Largest difference of a rotated row, as a share of the pair that an element belongs to, by dtype.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def find_rotations(model: PreTrainedModel, cache: ExportableCache) -> tuple[list[Rotation | None], list[Frequencies]]:
    """Find how the stored rows of each layer depend on their position, by running one token at several positions.

    A token that sees only itself has the same hidden states at every position, so the rows of every layer differ by
    their rotation alone. It is compared at all positions with each embedding that the model's frequencies allow, and
    on both sides of a border where the frequencies change with the length.

    Args:
        model: The model, prepared for its cache if the cache passes such a border.
        cache: Its cache, in any layout.

    Returns:
        The rotation of each layer, None for no dependence, and the frequencies that they refer to.

    Raises:
        UnsupportedModelError: If a layer's rows depend on the position in another way.
    """
    follows, last = takes_positions(model), (cache.max_length or 65) - 1
    places = torch.tensor(sorted({min(one, last) for one in (*_PROBED, last if follows else 0)}))
    sides = _sides(model, cache.max_length)
    found_at = [_rows_at(model, places, side) for side in sides]
    keys = [
        {name: torch.cat([one[name] for one in layer]) for name in layer[0]} for layer in zip(*found_at, strict=True)
    ]
    positions = places.repeat(len(sides))
    lengths = torch.tensor([side or 0 for side in sides]).repeat_interleave(len(places))
    # Of models that count positions themselves, only the first layer is known, which must not be rotated.
    frequencies: list[Frequencies] = list(_frequencies(model)) if follows else []
    if sides != [None]:
        frequencies += [ChangingFrequencies.of(*one) for one in changing(model)]
    tolerance = _TOLERANCE.get(model.dtype, 5e-2)
    rotations: list[Rotation | None] = []
    # Without the layers of a draft head that was attached after the cache was made.
    for index, (kept, stored) in enumerate(zip(cache.layers, keys[: len(cache.layers)], strict=True)):
        found: list[Rotation] = []
        for tensor, rows in stored.items():
            if rows.shape[-1] == 0:
                continue
            wide = rows if rows.dtype == torch.float64 else rows.to(torch.float32)
            # No rotation is the first, and wins a tie. The closest is taken, because several can be within tolerance.
            possible = [None, *_candidates(tensor, wide, frequencies)]
            distances = [_distance(one, wide, (positions, lengths), frequencies) for one in possible]
            best = min(distances)
            chosen = possible[distances.index(best)]
            if chosen is None and best <= tolerance:
                continue
            if chosen is None or not best <= tolerance or found:
                raise UnsupportedModelError(
                    f"{type(model).__name__} cannot shift its context, because {tensor} of layer {index} are not a "
                    "rotation by their position (learned positions, for example); reset() the session when its cache "
                    "is full"
                )
            found.append(in_layout(chosen, kept, stored["keys"].shape[-1]))
        rotations.append(found[0] if found else None)
    return rotations, frequencies


def turns_between(
    frequencies: Frequencies,
    old: torch.Tensor,
    new: torch.Tensor,
    before: torch.Tensor | None,
    after: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of the rotation from old positions to new ones, see `cache.shift.turns`.

    Args:
        frequencies: The frequencies.
        old: Position that each row was rotated for, int64 [...].
        new: Position that it moves to, int64 [...].
        before: Length that chose the frequencies of each row, int64 [...]; unused where they are constant.
        after: Length that chooses those of the new position, int64 [...].
    """
    if isinstance(frequencies, torch.Tensor):
        return turns(frequencies, old, new)
    assert before is not None and after is not None
    of_old, of_new = (frequencies.at(lengths[..., None]).to(torch.float32) for lengths in (before, after))
    cosine, sine = turns(of_old, old, new, of_new)
    earlier, later = frequencies.scale(before), frequencies.scale(after)
    if isinstance(earlier, float) or isinstance(later, float):
        return cosine, sine
    return cosine * (later / earlier)[..., None], sine * (later / earlier)[..., None]


def _sides(model: PreTrainedModel, max_length: int | None) -> list[int | None]:
    """Return a length on each side of the border that rows of the cache can pass; None alone if there is none.

    Raises:
        UnsupportedModelError: If the rows are not limited, or the model counts positions itself.
    """
    rule = rope_rule(model)
    if rule is None or not rule.is_reached(max_length):
        return [None]
    if max_length is None or not takes_positions(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot shift its context past {rule.border} tokens, because it has {rule}, and "
            f"{'its rows have no limit' if max_length is None else 'it counts positions itself'}; "
            f"use a max_cache_len of at most {rule.border}, or on_full='restart'"
        )
    border = max(rule.borders)
    return [rule.border, 2 * border + 1 if rule.kind == DYNAMIC else border + 1]


def in_layout(rotation: Rotation, layer: CacheLayer, head_dim: int) -> Rotation:
    """Return the rotation of a layer whose layout may keep values after the `head_dim` elements of keys."""
    if rotation.tensor in layer.state:
        return rotation
    start = rotation.start + head_dim
    return Rotation(rotation.index, rotation.pairs, start, rotation.interleaved, rotation.tensor)


@torch.no_grad()
def _rows_at(model: PreTrainedModel, positions: torch.Tensor, length: int | None) -> list[dict[str, torch.Tensor]]:
    """Return the stored rows [positions, heads, dim] of one token at each position, by layer and name.

    Args:
        model: The model.
        positions: int64 [positions].
        length: Length that chooses the frequencies; None if they are constant.
    """
    follows, options = takes_positions(model), {"use_cache": True}
    codebooks, head = codebooks_of(model.config), draft_head_of(model)
    with attention_of(model, ATTENTION), lengths_forgotten(model):
        model = text_model_of(model)
        if follows:
            cache = ExportableCache.from_model(model, 1, len(positions), attn_implementation=None)
            ids = _tokens(len(positions), codebooks, cache.device)
            places = positions.to(cache.device)[:, None]
            lengths = None if length is None else torch.full((len(positions),), length, device=cache.device)
            with nullcontext() if lengths is None else rope_by(lengths):
                model(ids, position_ids=places, **{cache_argument(model): cache}, **options)
                if head is not None:
                    head.write_rows(ids, places, cache)
            return [{name: getattr(layer, name)[:, :, 0].cpu() for name in _names(layer)} for layer in cache.layers]
        # The model counts positions itself. A later step sees empty slots, so only the first layer is compared.
        cache = ExportableCache.from_model(model, int(positions.max()) + 1, attn_implementation=None)
        found: list[dict[str, torch.Tensor]] = [{} for _ in cache.layers]
        first = next(index for index, layer in enumerate(cache.layers) if _names(layer))
        rows = []
        for place in positions.tolist():
            cache.reset()
            for layer in cache.layers:
                if not layer.is_dummy:
                    layer.cumulative_length.fill_(place)
            model(_tokens(1, codebooks, cache.device), **{cache_argument(model): cache}, **options)
            kept = cache.layers[first]
            slot = place % (kept.capacity or 1)
            rows.append({name: getattr(kept, name)[:, :, slot].clone().cpu() for name in _names(kept)})
        found[first] = {name: torch.cat([one[name] for one in rows]) for name in rows[0]}
        return found


def _tokens(rows: int, codebooks: Codebooks | None, device: torch.device) -> torch.Tensor:
    """Return the same token in each row, int64 [rows, 1], or as the model's codebooks take it."""
    if codebooks is None:
        return torch.full((rows, 1), 5, device=device)
    return codebooks.taken(torch.full((rows, 1, codebooks.count), 5, device=device))


def _names(layer: CacheLayer) -> tuple[str, ...]:
    return () if layer.storage is None else ("keys", "values")


def _frequencies(model: PreTrainedModel) -> Iterator[torch.Tensor]:
    """Yield the frequencies that the model's rotary embeddings may have, float32 [pairs], each once."""
    found: list[torch.Tensor] = []
    for module in model.modules():
        for name, tensor in {**dict(module.named_buffers(recurse=False)), **vars(module)}.items():
            if isinstance(tensor, torch.Tensor) and name.endswith("inv_freq") and tensor.dim() == 1:
                found.append(tensor.detach().to("cpu", torch.float32))
    config = model.config.get_text_config(decoder=True)
    # Of models that keep tables of cosines (GPT-J, CodeGen).
    size = getattr(config, "rotary_dim", None)
    if isinstance(size, int) and size > 1:
        found.append(1.0 / (10000.0 ** (torch.arange(0, size, 2, dtype=torch.float32) / size)))
    kept: list[torch.Tensor] = []
    for one in found:
        for either in (one, -one):
            if not any(torch.equal(either, other) for other in kept):
                kept.append(either)
                yield either


def _candidates(tensor: str, rows: torch.Tensor, frequencies: Sequence[Frequencies]) -> Iterator[Rotation]:
    """Yield the rotations of rows [..., dim] that these frequencies allow."""
    size = rows.shape[-1]
    for index, one in enumerate(frequencies):
        pairs = len(one if isinstance(one, torch.Tensor) else one.short)
        for start in sorted({0, size - 2 * pairs}):
            if start >= 0 and start + 2 * pairs <= size:
                yield Rotation(index, pairs, start, False, tensor)
                yield Rotation(index, pairs, start, True, tensor)


def _distance(
    rotation: Rotation | None,
    rows: torch.Tensor,
    probed: tuple[torch.Tensor, torch.Tensor],
    frequencies: Sequence[Frequencies],
) -> float:
    """Return the largest difference of rows [positions, heads, dim] from the first one, rotated to their positions.

    Each element is compared with its own pair, because keys with a large bias in one pair would hide the others. Pairs
    that are far smaller than most count as a quarter of the median, which bounds the share of rounding.

    Args:
        rotation: The rotation; None for rows that do not depend on their positions.
        rows: The rows.
        probed: Position of each row, and the length that chose its frequencies, int64 [positions].
        frequencies: By `Rotation.index`.
    """
    found, sizes = rows[:1].expand_as(rows), rows.abs()
    if rotation is not None:
        (old, before), (new, after) = ([one[:1].expand_as(one) for one in probed], probed)
        used = frequencies[rotation.index]
        used = used if isinstance(used, torch.Tensor) else used.to(rows.device)
        cosine, sine = turns_between(used, old, new, before, after)
        found = rotated(found, cosine[:, None], sine[:, None], rotation)
        # A quarter of a turn exchanges the elements of each pair.
        sizes = torch.hypot(rows, rotated(rows, torch.zeros(()), torch.ones(()), rotation))
    sizes = sizes.amax(dim=0)
    least = (sizes.median() / 4).clamp(min=torch.finfo(rows.dtype).tiny)
    return float(((found - rows).abs() / sizes.maximum(least)).max())
