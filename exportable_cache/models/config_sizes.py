"""Sizes that a config states, looked at before a model of them is built: none is zero, and layers can be counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: The deepest that is built; published models have up to about 130.
MOST_LAYERS = 2048
_DEPTHS = (
    "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers"
).split()
_WIDTHS = (
    "hidden_size n_embd d_model vocab_size num_attention_heads n_head n_heads num_heads num_key_value_heads "
    "max_position_embeddings"
).split()


#: 0 stands for none given.
_OPTIONAL = ("head_dim",)


def check_sizes(config: PreTrainedConfig | Mapping[str, Any], source: str) -> None:
    """Refuse a config, or the fields of one, of sizes that no model has.

    Raises:
        InputError: If one is less than 1, or there are more layers than `MOST_LAYERS`.
    """
    for path, fields in _parts(config if isinstance(config, Mapping) else vars(config), ""):
        for name in (*_DEPTHS, *_WIDTHS, *_OPTIONAL):
            value = fields.get(name)
            if not isinstance(value, int) or isinstance(value, bool):
                continue
            if value < (0 if name in _OPTIONAL else 1):
                raise InputError(
                    f"the config of {source!r} says {path}{name} = {value}; it must be at least 1: correct it"
                )
            if name in _DEPTHS and value > MOST_LAYERS:
                raise InputError(
                    f"the config of {source!r} says {path}{name} = {value}; at most {MOST_LAYERS} are taken: correct it"
                )


def _parts(fields: Mapping[str, Any], path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The fields, and those of configs inside: a text decoder's, an encoder's."""
    yield path, fields
    for name, value in fields.items():
        if name.endswith("config") and (isinstance(value, Mapping) or hasattr(value, "model_type")):
            yield from _parts(value if isinstance(value, Mapping) else vars(value), f"{path}{name}.")
