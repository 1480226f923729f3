"""The method `shift`, which drops positions of the cache and moves what follows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..cache.layers import CacheLayer, LinearLayer
from ..cache.policies import FullPolicy, NoPolicy, RecurrentPolicy, RingPolicy
from ..cache.shift import Rotation, shift_layer
from ..common.tensors import name_forward
from ..errors import InputError, UnsupportedModelError
from ..models.cache_factory import ExportableCache, ExportableEncoderDecoderCache
from ..models.patches.mechanisms.rope import ChangingFrequencies
from ..models.positions import rope_rule
from ..models.rotations import Frequencies, find_rotations, turns_between
from .methods import ROPE_AFTER, ROPE_BEFORE, SHIFT, TURN, ProgramMethod, shift_method

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..cache.policies import SlotPolicy


class ShiftModule(nn.Module):
    """Module of the method `shift` over a cache's tensors, which are buffers as in `ResidentModule`.

    Args:
        cache: The cache, in the layout of the target.
        rotations: Rotary embedding of each layer, None for layers without one.
        frequencies: By `Rotation.index`, see `models.rotations`.
        method: The method.
    """

    def __init__(
        self,
        cache: ExportableCache,
        rotations: Sequence[Rotation | None],
        frequencies: Sequence[Frequencies],
        method: ProgramMethod = SHIFT,
    ) -> None:
        super().__init__()
        self.layout, self.rotations, self.method = cache, rotations, method
        self.state_buffers = {name: name.replace(".", "_") for name in cache.stored_state()}
        for name, tensor in cache.stored_state().items():
            self.register_buffer(self.state_buffers[name], tensor, persistent=False)
        self.used = sorted({one.index for one in rotations if one is not None})
        self.changing: dict[int, ChangingFrequencies] = {}
        for index in self.used:
            one, name = frequencies[index], f"frequencies_{index}"
            if isinstance(one, ChangingFrequencies):
                self.changing[index] = one
                if one.longer is not None:
                    self.register_buffer(f"{name}_longer", one.longer.to(cache.device), persistent=False)
                one = one.short
            self.register_buffer(name, one.to(cache.device), persistent=False)
        name_forward(self, method.input_names)

    def call(
        self, input_pos: torch.Tensor, first: torch.Tensor, count: torch.Tensor, **further: torch.Tensor
    ) -> tuple[torch.Tensor]:
        """Drop positions of every layer, and return the lengths after that.

        Args:
            input_pos: Number of tokens in each row, int64 [batch].
            first: First dropped position of each row, int64 [batch].
            count: Number of dropped positions of each row, int64 [batch]; 0 rotates keys to other factors of RoPE.
            **further: See `methods.shift_method`.
        """
        found: dict[tuple[int, SlotPolicy], tuple[torch.Tensor, torch.Tensor]] = {}
        tensors = {name: getattr(self, buffer) for name, buffer in self.state_buffers.items()}
        turn = further.get(TURN)
        for index, (kept, rotation) in enumerate(zip(self.layout.layers, self.rotations, strict=True)):
            layer = kept.with_state({name: tensors.get(f"layers.{index}.{name}") for name in kept.state})
            if layer.policy.length_name is not None:
                setattr(layer, layer.policy.length_name, input_pos)
            policy = layer.policy

            def angles(which: int, old: torch.Tensor, new: torch.Tensor, policy: SlotPolicy = policy) -> tuple:
                # Once for the layers of one policy, because their slots hold equal positions.
                if (which, policy) not in found:
                    lengths = [
                        further[name].gather(1, places.clamp(min=0, max=further[name].shape[1] - 1))
                        if name in further
                        else None
                        for name, places in ((ROPE_BEFORE, old), (ROPE_AFTER, new))
                    ]
                    if turn is not None:
                        # Only the distance counts, because rows before the dropped ones do not move.
                        new = torch.where(old == new, new, old - turn[:, None])
                    found[which, policy] = turns_between(self._frequencies(which), old, new, *lengths)
                return found[which, policy]

            shift_layer(layer, rotation, (input_pos, first, count), angles)
        return (input_pos - count,)

    def _frequencies(self, index: int) -> Frequencies:
        """Return frequencies whose tensors are buffers of this module."""
        short, changing = getattr(self, f"frequencies_{index}"), self.changing.get(index)
        if changing is None:
            return short
        return replace(changing, short=short, longer=getattr(self, f"frequencies_{index}_longer", None))


def method_of(model: PreTrainedModel, cache: ExportableCache, images: bool = False) -> ProgramMethod:
    """Return the method `shift` for a model and its cache.

    Args:
        model: The model.
        cache: Its cache.
        images: See `methods.moves_images`.
    """
    rule = rope_rule(model)
    changes = rule is not None and rule.is_reached(cache.max_length)
    return shift_method(cache.max_length if changes else None, images)


def shift_module(model: PreTrainedModel, cache: ExportableCache, images: bool = False) -> ShiftModule:
    """Return the module of `shift` for a model and its cache.

    Args:
        model: The model.
        cache: Its cache, in the layout of the target.
        images: See `methods.moves_images`.

    Raises:
        UnsupportedModelError: If the keys of a layer are not a rotation of their position, or the layer has a policy
            that shifts do not support.
        InputError: If the cache is split over processes or offloaded.
    """
    _check_cache(type(model).__name__, cache)
    rotations, frequencies = find_rotations(model, cache)
    return ShiftModule(cache, rotations, frequencies, method_of(model, cache, images))


def _check_cache(name: str, cache: ExportableCache) -> None:
    if isinstance(cache, ExportableEncoderDecoderCache):
        raise UnsupportedModelError(
            f"{name} must be a text decoder to shift its context, got an encoder-decoder; reset() it when it is full"
        )
    if cache.ranks is not None or cache.offloader is not None:
        what = "split over processes" if cache.ranks is not None else "offloaded"
        raise InputError(f"the cache must be on one device to shift it, got one that is {what}; reset() it when full")
    for index, layer in enumerate(cache.layers):
        if cache.batch_size > 1 and any("capacity" in one.dims[:2] for one in layer.state.values()):
            raise InputError(f"batch_size must be 1 to shift a cache of this target, got {cache.batch_size}; lower it")
        known = isinstance(layer.policy, (FullPolicy, RingPolicy, RecurrentPolicy, NoPolicy))
        slots = layer.storage is None or any({"capacity", "slots"} & set(one.dims) for one in layer.state.values())
        if not known or not slots or type(layer) not in (CacheLayer, LinearLayer):
            raise UnsupportedModelError(
                f"{name} cannot shift its context, because layer {index} ({layer.label}) keeps more than keys and "
                "values by position; reset() the session when its cache is full"
            )
