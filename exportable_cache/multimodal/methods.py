"""The methods that images and sound add to a text decoder's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..methods import Method, TensorSpec, text_inputs
from .modality import Modality


def multimodal_methods(methods: Mapping[str, Method], modalities: Sequence[Modality]) -> dict[str, Method]:
    """`encode_image` or `encode_audio`, `embed`, and a `prefill_embeds` for each prefill, beside the text methods.

    Args:
        methods: Of the text decoder.
    """
    added = {modality.method.name: modality.method for modality in modalities}
    longest = max(method.max_length for method in methods.values() if method.is_step)
    first = modalities[0]
    embeds = TensorSpec("inputs_embeds", first.dtype, ("batch", "length", first.hidden_size))
    ids, position = text_inputs(1, max(2, longest))
    added["embed"] = Method("embed", 1, max(2, longest), inputs=(ids,), outputs=(embeds,))
    for name, method in methods.items():
        if name.startswith("prefill"):
            added[name.replace("prefill", "prefill_embeds")] = replace(
                method, name=name.replace("prefill", "prefill_embeds"), min_length=1, inputs=(embeds, position)
            )
    return {**methods, **added}
