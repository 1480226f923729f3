"""Find how the stored rows of a model's layers depend on their positions: which parts are rotated, and how fast."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from ..cache.attention.functions import ATTENTION
from ..cache.attention.implementation import attention_of
from ..cache.shift import Rotation, rotated, turns
from ..common.compat.transformers import cache_argument
from ..errors import UnsupportedModelError
from .cache_factory import ExportableCache
from .layers.codebooks import codebooks_of
from .positions import lengths_forgotten, takes_positions, text_model_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..cache.layers import CacheLayer
    from .layers.codebooks import Codebooks

#: Positions at which a token's rows are compared, besides the last one of the cache.
_PROBED = (1, 0, 2, 13, 37)
#: Largest difference of a rotated row, as a share of the pair that an element belongs to, by dtype.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def find_rotations(model: PreTrainedModel, cache: ExportableCache) -> tuple[list[Rotation | None], list[torch.Tensor]]:
    """Find how the stored rows of each layer depend on their position, by running one token at several positions.

    A token that sees only itself has the same hidden states at every position, so the rows of every layer differ by
    their rotation alone. It is compared at all positions with each embedding that the model's frequencies allow.

    Args:
        model: The model.
        cache: Its cache, in any layout.

    Returns:
        The rotation of each layer, None for no dependence, and the frequencies that they refer to.

    Raises:
        UnsupportedModelError: If a layer's rows depend on the position in another way.
    """
    follows, last = takes_positions(model), (cache.max_length or 65) - 1
    positions = torch.tensor(sorted({min(one, last) for one in (*_PROBED, last if follows else 0)}))
    keys = _rows_at(model, positions)
    # Of models that count positions themselves, only the first layer is known, which must not be rotated.
    frequencies = list(_frequencies(model)) if follows else []
    tolerance = _TOLERANCE.get(model.dtype, 5e-2)
    rotations: list[Rotation | None] = []
    for index, (kept, stored) in enumerate(zip(cache.layers, keys, strict=True)):
        found: list[Rotation] = []
        for tensor, rows in stored.items():
            if rows.shape[-1] == 0:
                continue
            wide = rows if rows.dtype == torch.float64 else rows.to(torch.float32)
            # No rotation is the first, and wins a tie. The closest is taken, because several can be within tolerance.
            possible = [None, *_candidates(tensor, wide, frequencies)]
            distances = [_distance(one, wide, positions, frequencies) for one in possible]
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


def in_layout(rotation: Rotation, layer: CacheLayer, head_dim: int) -> Rotation:
    """Return the rotation of a layer whose layout may keep values after the `head_dim` elements of keys."""
    if rotation.tensor in layer.state:
        return rotation
    start = rotation.start + head_dim
    return Rotation(rotation.index, rotation.pairs, start, rotation.interleaved, rotation.tensor)


@torch.no_grad()
def _rows_at(model: PreTrainedModel, positions: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Return the stored rows [positions, heads, dim] of one token at each position, by layer and name."""
    follows, options = takes_positions(model), {"use_cache": True}
    codebooks = codebooks_of(model.config)
    with attention_of(model, ATTENTION), lengths_forgotten(model):
        model = text_model_of(model)
        if follows:
            cache = ExportableCache.from_model(model, 1, len(positions), attn_implementation=None)
            ids = _tokens(len(positions), codebooks, cache.device)
            places = positions.to(cache.device)[:, None]
            model(ids, position_ids=places, **{cache_argument(model): cache}, **options)
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


def _candidates(tensor: str, rows: torch.Tensor, frequencies: Sequence[torch.Tensor]) -> Iterator[Rotation]:
    """Yield the rotations of rows [..., dim] that these frequencies allow."""
    size = rows.shape[-1]
    for index, one in enumerate(frequencies):
        pairs = len(one)
        for start in sorted({0, size - 2 * pairs}):
            if start >= 0 and start + 2 * pairs <= size:
                yield Rotation(index, pairs, start, False, tensor)
                yield Rotation(index, pairs, start, True, tensor)


def _distance(
    rotation: Rotation | None, rows: torch.Tensor, positions: torch.Tensor, frequencies: Sequence[torch.Tensor]
) -> float:
    """Return the largest difference of rows [positions, heads, dim] from the first one, rotated to their positions.

    Each element is compared with its own pair, because keys with a large bias in one pair would hide the others. Pairs
    that are far smaller than most count as a quarter of the median, which bounds the share of rounding.
    """
    found, sizes = rows[:1].expand_as(rows), rows.abs()
    if rotation is not None:
        cosine, sine = turns(frequencies[rotation.index], positions[:1].expand_as(positions), positions)
        found = rotated(found, cosine[:, None], sine[:, None], rotation)
        # A quarter of a turn exchanges the elements of each pair.
        sizes = torch.hypot(rows, rotated(rows, torch.zeros(()), torch.ones(()), rotation))
    sizes = sizes.amax(dim=0)
    least = (sizes.median() / 4).clamp(min=torch.finfo(rows.dtype).tiny)
    return float(((found - rows).abs() / sizes.maximum(least)).max())
