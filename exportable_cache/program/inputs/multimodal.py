"""The methods that images and sound add to a text decoder's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...common.tensor_spec import TensorSpec
from ...errors import InputError
from ..methods import ROPE_DELTAS, ProgramMethod, text_inputs
from .modality import AUDIO, IMAGE

if TYPE_CHECKING:
    from .modality import Modality

#: Rotary positions (time, height, width) of each token of a step.
POSITIONS = TensorSpec("position_ids", "int64", (3, "batch", "length"))
#: Which image each token of a step belongs to, -1 on text.
IMAGE_IDS = TensorSpec("image_ids", "int64", ("batch", "length"))


#: What an encoder reads, by the name of its input.
_KINDS = {
    "input_ids": "text",
    "pixel_values": IMAGE,
    "flattened_patches": IMAGE,
    "input_features": AUDIO,
    "input_values": AUDIO,
}


def kinds_taken(methods: Mapping[str, ProgramMethod]) -> tuple[str, ...]:
    """What a program is given from outside: `("text",)`, `("text", "image")`, or `("audio",)` of an encoder-decoder."""
    read = [_KINDS[method.inputs[0].name] for name, method in methods.items() if name.startswith("encode")]
    return tuple(read) if "encode" in methods else ("text", *read)


def multimodal_methods(
    methods: Mapping[str, ProgramMethod], modalities: Sequence[Modality]
) -> dict[str, ProgramMethod]:
    """`encode_image` or `encode_audio`, `embed`, and a `prefill_embeds` for each prefill, beside the text methods.

    Where positions have three axes, `prefill_embeds` takes them, and the text methods take `rope_deltas` [batch]: what
    is added to a position in the cache to get the rotary one. Where images see themselves, `prefill_embeds` takes
    `image_ids`.

    Args:
        methods: Of the text decoder.

    Raises:
        InputError: If a step takes fewer tokens than an item that has to go through as a whole.
    """
    added = {modality.method.name: modality.method for modality in modalities}
    longest = max(method.max_length for method in methods.values() if method.is_step)
    for modality in modalities:
        if modality.sees_itself and longest < modality.tokens:
            raise InputError(
                f"prefill_chunk is {longest}; the {modality.tokens} tokens of an {modality.kind} see each other and "
                f"go through in one step: it must be at least {modality.tokens}"
            )
    has_grid = any(modality.grid is not None for modality in modalities)
    first = modalities[0]
    embeds = TensorSpec("inputs_embeds", first.dtype, ("batch", "length", first.hidden_size))
    ids, position = text_inputs(1, max(2, longest))
    added["embed"] = ProgramMethod("embed", 1, max(2, longest), inputs=(ids,), outputs=(embeds,))
    further = (POSITIONS,) if has_grid else (IMAGE_IDS,) if any(modality.sees_itself for modality in modalities) else ()
    for name, method in methods.items():
        if name.startswith("prefill"):
            added[name.replace("prefill", "prefill_embeds")] = replace(
                method,
                name=name.replace("prefill", "prefill_embeds"),
                min_length=1,
                inputs=(embeds, position, *further),
            )
    if has_grid:
        methods = {name: replace(method, inputs=(*method.inputs, ROPE_DELTAS)) for name, method in methods.items()}
    return {**methods, **added}
