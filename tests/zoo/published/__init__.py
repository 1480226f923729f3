"""Published checkpoints: what the `config.json` of each sets that its class's default does not.

One JSON file per family lists checkpoints. `config` has only fields without which the config would be another one, in
the names of `config.json`; `source` says where the facts come from. A number in place of LongRoPE's `short_factor` or
`long_factor` is the number of factors, whose values are not listed, because sizes and kinds do not depend on them.
`"sizes": false` marks a config that has the kinds of the checkpoint, but not its widths or depth.

`class_defaults.json` names one checkpoint for each model type that has no such row: the one in the docstring of its config
class. Those rows have the defaults of the class, whose sizes are often not those of the checkpoint.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from exportable_cache.cache.spec import CacheSpec
from exportable_cache.errors import InputError
from exportable_cache.models.layers.specs import layer_specs_from_config
from exportable_cache.models.loading.without_weights import model_without_weights
from exportable_cache.models.positions import check_positions
from exportable_cache.models.quantization.sizes import float_bytes

from ..architectures import GROUPS, Architecture, architectures

FOLDER = Path(__file__).parent
_CLASS_DEFAULTS = FOLDER / "class_defaults.json"
#: Tokens of the caches whose sizes are told.
LENGTHS = (4096, 32768)


@dataclass(frozen=True)
class Checkpoint(Architecture):
    """A published checkpoint, as a row of the zoo.

    Attributes:
        checkpoint: Its name: `meta-llama/Llama-3.1-8B`.
        source: Where the facts come from.
        fields: Fields of its config, for `config_class`.
        sized: True if the config has the widths and the depth of the checkpoint.
    """

    checkpoint: str = ""
    source: str = ""
    fields: dict[str, Any] = field(default_factory=dict, hash=False)
    sized: bool = True

    @property
    def name(self) -> str:
        """See `Architecture.name`."""
        return f"published-{self.checkpoint.replace('/', '--')}"

    @property
    def shrinks(self) -> type[PreTrainedConfig]:
        """See `Architecture.shrinks`."""
        return self.config_class

    def config(self) -> PreTrainedConfig:
        """Return the config at its true size."""
        return self.config_class(**copy.deepcopy(self.fields))

    def memory(self) -> dict[str, int]:
        """Return the bytes of weights and of caches in bfloat16, as `plan` does.

        Empty for a config without the checkpoint's sizes, and for an encoder-decoder, because its cache depends on the
        longest input of its encoder. A length is left out if the model has fewer positions, because an export refuses it.
        """
        config, dtype = self.config(), torch.bfloat16
        if config.is_encoder_decoder or not self.sized:
            return {}
        model = model_without_weights(config)
        layers = layer_specs_from_config(config, model)
        caches = {
            str(tokens): sum(layer.build(CacheSpec(tokens), dtype, "meta").nbytes for layer in layers)
            for tokens in LENGTHS
            if _fits(model, tokens)
        }
        return {"weights": float_bytes(model, dtype, dtype), **caches}


@functools.cache
def checkpoints(later: bool = False) -> tuple[Checkpoint, ...]:
    """Return all checkpoints whose model type the installed transformers has, by family.

    Args:
        later: Also those of later releases, which have a name and a group only.
    """
    # Of types with several classes the encoder-decoder, which comes last.
    rows = {row.model_type: row for row in architectures()}
    found = []
    for listed in _listed():
        model_type = listed["model_type"]
        if model_type not in CONFIG_MAPPING and not later:
            continue
        row = rows.get(model_type)
        if row is None and model_type in CONFIG_MAPPING:
            row = _of_shared_class(model_type)
        if row is None:
            row = Architecture(model_type, listed.get("group", "causal"), "")
        facts = listed["checkpoint"], listed["source"], _with_factors(listed["config"]), listed.get("sizes", True)
        found.append(Checkpoint(model_type, row.group, row.class_name, *facts))
    return tuple(found)


def _listed() -> Iterator[dict[str, Any]]:
    """Yield what the files list, by family, and then the checkpoints with the defaults of their class."""
    for path in sorted(FOLDER.glob("*.json")):
        if path != _CLASS_DEFAULTS:
            yield from json.loads(path.read_text())
    source = "transformers 5.23, the defaults of the class, whose docstring names the checkpoint"
    for model_type, name in json.loads(_CLASS_DEFAULTS.read_text()).items():
        yield {"checkpoint": name, "model_type": model_type, "source": source, "config": {}, "sizes": False}


def _of_shared_class(model_type: str) -> Architecture:
    """Return the row of a type whose class belongs to another type, such as InternLM 3, which is a Llama."""
    group, class_name = next((group, mapping[model_type]) for group, mapping in GROUPS.items() if model_type in mapping)
    return Architecture(model_type, group, class_name)


def checkpoint(name: str) -> Checkpoint:
    """Return the checkpoint of a name."""
    return next(one for one in checkpoints() if one.checkpoint == name)


def _fits(model: PreTrainedModel, tokens: int) -> bool:
    try:
        check_positions(model, tokens)
    except InputError:
        return False
    return True


def _with_factors(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        name: [1.0] * inner
        if name in ("short_factor", "long_factor") and isinstance(inner, int)
        else _with_factors(inner)
        for name, inner in value.items()
    }
