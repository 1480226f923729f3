"""The methods that images and sound add to a text decoder's."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...common.method_io import TensorSpec
from ...errors import InputError, UnsupportedModelError
from ..methods import POSITIONS, ROPE_DELTAS, ProgramMethod, text_inputs
from .examples import MAIN_INPUTS

if TYPE_CHECKING:
    from .modality import Modality

#: Which image each token of a step belongs to, -1 on text.
IMAGE_IDS = TensorSpec("image_ids", "int64", ("batch", "length"))


#: What an encoder reads, by the name of its input.
_KINDS = {
    "input_ids": "text",
    **{name: kind for kind, names in MAIN_INPUTS.items() for name in names},
}


def kinds_taken(methods: Mapping[str, ProgramMethod]) -> tuple[str, ...]:
    """What a program is given from outside: `("text",)`, `("text", "image")`, or `("audio",)` of an encoder-decoder."""
    if "encode" in methods:
        return (_KINDS[methods["encode"].inputs[0].name],)
    return ("text", *(name.removeprefix("encode_") for name in methods if name.startswith("encode_")))


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
        UnsupportedModelError: If a prompt would not say which kind of item is meant, or they need different steps.
    """
    added = {modality.method.name: modality.method for modality in modalities}
    longest = max(method.max_length for method in methods.values() if method.is_step)
    for modality in modalities:
        if modality.facts.sees and longest < modality.tokens:
            raise InputError(
                f"prefill_chunk is {longest}; the {modality.tokens} tokens of an {modality.kind} see each other and "
                f"go through in one step: it must be at least {modality.tokens}"
            )
    axes = max((len(modality.facts.positions) for modality in modalities), default=0)
    first = modalities[0]
    if any((one.hidden_size, one.travels) != (first.hidden_size, first.travels) for one in modalities):
        raise UnsupportedModelError(
            f"{' and '.join(one.kind for one in modalities)} have different features beside their embeddings; choose "
            "one of them"
        )
    for one, other in itertools.combinations(modalities, 2):
        if one.token_id == other.token_id:
            raise UnsupportedModelError(
                f"the token of id {one.token_id} stands for {one.kind} and for {other.kind}; choose one of them"
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
                travels=first.travels,
                sees="".join(sees),
            )
    if axes:
        methods = {name: replace(method, inputs=(*method.inputs, ROPE_DELTAS)) for name, method in methods.items()}
    return {**methods, **added}
