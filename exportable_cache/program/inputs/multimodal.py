"""Methods that images, video and audio add to those of a text decoder."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...common.tensors import TensorSpec
from ...errors import InputError, UnsupportedModelError
from ..methods import POSITIONS, ROPE_DELTAS, ProgramMethod, text_inputs
from .examples import MAIN_INPUTS

if TYPE_CHECKING:
    from .modality import Modality

#: Index of the image that each token of a step belongs to, -1 on text.
IMAGE_IDS = TensorSpec("image_ids", "int64", ("batch", "length"))


#: Name of an encoder's input -> the kind of input.
_KINDS = {
    "input_ids": "text",
    **{name: kind for kind, names in MAIN_INPUTS.items() for name in names},
}


def kinds_taken(methods: Mapping[str, ProgramMethod]) -> tuple[str, ...]:
    """Return the kinds of input of a program: `("text",)`, `("text", "image")`, or `("audio",)` for Whisper."""
    if "encode" in methods:
        return tuple(_KINDS[spec.name] for spec in methods["encode"].inputs if spec.name in _KINDS)
    return ("text", *(name.removeprefix("encode_") for name in methods if name.startswith("encode_")))


def multimodal_methods(
    methods: Mapping[str, ProgramMethod], modalities: Sequence[Modality]
) -> dict[str, ProgramMethod]:
    """Return the text methods, an `encode_*` per modality, `embed`, and a `prefill_embeds` for each prefill.

    If rotary positions have several axes, `prefill_embeds` takes them, and the text methods take `rope_deltas` [batch],
    the offset from cache position to rotary position. If tokens of an item see each other, it takes `image_ids`.

    Args:
        methods: Methods of the text decoder.
        modalities: The modalities of the program.

    Raises:
        InputError: If an item must be fed in one step and has more tokens than a step takes.
        UnsupportedModelError: If modalities share a placeholder, or need different steps.
    """
    added = {modality.method.name: modality.method for modality in modalities}
    longest = max(method.max_length for method in methods.values() if method.is_step)
    for modality in modalities:
        if modality.facts.sees and longest < modality.tokens:
            raise InputError(
                f"prefill_chunk must be at least {modality.tokens}, because the tokens of {modality.kind} input see "
                f"each other, got {longest}; raise it"
            )
    axes = max((len(modality.facts.positions) for modality in modalities), default=0)
    first = modalities[0]
    if any((one.hidden_size, one.extra_features) != (first.hidden_size, first.extra_features) for one in modalities):
        raise UnsupportedModelError(
            f"{' and '.join(one.kind for one in modalities)} have different extra features; choose one of them"
        )
    for one, other in itertools.combinations(modalities, 2):
        if one.token_id == other.token_id:
            raise UnsupportedModelError(
                f"{one.kind} and {other.kind} have the same placeholder token {one.token_id}; choose one of them"
            )
    sees = {one.facts.sees for one in modalities if one.facts.sees}
    if len(sees) > 1:
        raise UnsupportedModelError(
            f"the tokens of {' and '.join(one.kind for one in modalities)} see each other by different rules; choose "
            "one of them"
        )
    embeds = TensorSpec("inputs_embeds", first.dtype, ("batch", "length", first.hidden_size))
    ids, position = text_inputs(1, max(2, longest))
    added["embed"] = ProgramMethod("embed", 1, max(2, longest), inputs=(ids,), outputs=(embeds,))
    further: tuple[TensorSpec, ...] = (TensorSpec(POSITIONS, "int64", (axes, "batch", "length")),) if axes else ()
    further += (IMAGE_IDS,) if sees else ()
    for name, method in methods.items():
        if name.startswith("prefill"):
            added[name.replace("prefill", "prefill_embeds")] = replace(
                method,
                name=name.replace("prefill", "prefill_embeds"),
                min_length=1,
                inputs=(embeds, position, *further),
                extra_features=first.extra_features,
                sees="".join(sees),
            )
    if axes:
        methods = {name: replace(method, inputs=(*method.inputs, ROPE_DELTAS)) for name, method in methods.items()}
    return {**methods, **added}
