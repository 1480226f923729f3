"""Sizes from a config are those of the model, of every architecture of the zoo; where they cannot be had the plan says so."""

from __future__ import annotations

from typing import Any

import pytest

from exportable_cache import ExportableCache
from exportable_cache.errors import UnsupportedModelError
from exportable_cache.models.loading.without_weights import model_without_weights
from exportable_cache.pipeline.plan import Plan, plan

from .architectures import Architecture, architectures
from .build import LENGTH, encoder_inputs, encoder_options, tiny_model

#: By what they show: rings, keys that layers share, latent keys, indexers, experts that loop, convolutions, states,
#: encoders whose code looks at values, and decoders that are no causal LM of their own.
ALWAYS = (
    "mistral gemma3n_text deepseek_v3 glm_moe_dsa dbrx lfm2_moe mamba2 jamba t5gemma mistral4 jetmoe led "
    "gemma4_unified seamless_m4t"
).split()
#: Known from the model only: their code looks at values, whatever is tried.
FROM_THE_MODEL_ONLY = ("jetmoe", "led", "pix2struct", "glm5_next")
#: Too large to be built beside other tests: its codecs do not shrink.
HUGE = ("vibevoice_asr", "emu3")

ROWS = [
    pytest.param(
        row,
        id=row.name,
        marks=[pytest.mark.full] * (row.model_type not in ALWAYS) + [pytest.mark.zoo] * (row.model_type in HUGE),
    )
    for row in architectures()
]


def sizes_of_model(model: Any, **options: int) -> list[int] | None:
    """Bytes of each layer of a cache, None of a model that is refused."""
    try:
        return [
            layer.nbytes
            for layer in ExportableCache.from_model(model, LENGTH, attn_implementation=None, **options).layers
        ]
    except UnsupportedModelError:
        return None


def sizes_of_plan(made: Plan) -> list[int] | None:
    assert (made.refusal is None) is (len(made.layers) > 0)
    return [layer.bytes for layer in made.layers] or None


@pytest.mark.parametrize("row", ROWS)
def test_sizes_of_a_config_are_those_of_the_model(row: Architecture) -> None:
    model = tiny_model(row)
    has_encoder = getattr(model.config, "is_encoder_decoder", False) and row.model_type != "udop"
    options = encoder_options(model, encoder_inputs(model)) if has_encoder else {}
    expected, made = sizes_of_model(model, **options), plan(model.config, LENGTH, **options)
    if made.refusal is not None and expected is not None:
        assert row.model_type in FROM_THE_MODEL_ONLY and "from_model" in made.refusal
    elif model.config.is_encoder_decoder and type(model) is not type(model_without_weights(model.config)):
        # Of a type that has several models with other encoders, such as one of text and one of speech.
        assert made.refusal is None and len(made.layers) == len(expected)
    else:
        assert sizes_of_plan(made) == expected
    # The model says what a config of its type leaves open.
    assert sizes_of_plan(plan(model, LENGTH, **options)) == expected


def test_the_lists_name_what_there_is() -> None:
    known = {row.model_type for row in architectures()}
    assert known >= {*ALWAYS, *FROM_THE_MODEL_ONLY, *HUGE}
