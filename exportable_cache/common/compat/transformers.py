"""Private names of transformers, seen in 5.20.2 and 5.23.0.

| name | without it |
|---|---|
| `PreTrainedConfig._attn_implementation` | the attention of a config without a model cannot be chosen |
| `PreTrainedConfig._attn_implementation_internal` | that of one config cannot be set, and so not put back |
| `PreTrainedConfig._experts_implementation_internal` | the same of experts |
| `PreTrainedModel._can_set_attn_implementation` | models with attention code of their own get no masks of ours |
| `_get_feat_extract_output_lengths` of encoders of sound | the mask of an encoder's output cannot be computed |
| `_compute_sub_sample_lengths_from_attention_mask` of the same | the same |
| `PreTrainedModel._hf_peft_config_loaded` | a model with adapters inside fails when it is traced |
| `_layer_type` of layers of caches | what DeepSeek V4 keeps of compressed layers is not seen |
| `PreTrainedModel._pp_stage` | a model whose layers are split over stages is taken for one that lacks layers |
| `_is_hooked` of modules | key and value heads fewer than ranks are refused, not repeated |
| `cached_file(_raise_exceptions_for_missing_entries=..., _raise_exceptions_for_connection_errors=...)` | as below |

Without those of `cached_file`, which hands them to `cached_files`, a file that a repository lacks is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel


def attention_implementation(config: PreTrainedConfig) -> str | None:
    """Name of the attention implementation of a config."""
    return config._attn_implementation


def set_attention_implementation(config: PreTrainedConfig, name: str | None) -> None:
    """Set it, on the configs inside as well."""
    config._attn_implementation = name


def config_implementations(config: PreTrainedConfig) -> tuple[str | None, str | None]:
    """Attention and experts implementation of this config alone; None for experts where it has no such field."""
    return config._attn_implementation_internal, getattr(config, "_experts_implementation_internal", None)


def set_config_implementations(config: PreTrainedConfig, attention: str | None, experts: str | None) -> None:
    """Set both, on this config alone."""
    config._attn_implementation_internal = attention
    if hasattr(config, "_experts_implementation_internal"):
        config._experts_implementation_internal = experts


def set_config_attention(config: PreTrainedConfig, attention: str | None) -> None:
    """Set the attention implementation, on this config alone, whatever its model can be switched to."""
    config._attn_implementation_internal = attention


def experts_implementation(config: PreTrainedConfig) -> str | None:
    """Name of the experts implementation, None where the config has none."""
    return getattr(config, "_experts_implementation", None)


def can_set_attention(model: PreTrainedModel) -> bool:
    """Whether the model takes its attention from transformers' `AttentionInterface`."""
    return model._can_set_attn_implementation()


def has_adapters(model: PreTrainedModel) -> bool:
    """Whether adapters were put into a model itself, by `add_adapter` or `load_adapter`."""
    return getattr(model, "_hf_peft_config_loaded", False)


def is_split_by_transformers(module: nn.Module) -> bool:
    """Whether transformers' tensor parallel plan has split a module, and wrapped its forward."""
    return getattr(module, "_is_hooked", False)


def pipeline_stage(model: PreTrainedModel) -> Any | None:
    """What transformers knows of this process's layers: `pp_rank`, `pp_size`, `pp_group`, `layer_range_for_rank`. None
    of a model that has all of its layers.
    """
    return getattr(model, "_pp_stage", None)


def output_lengths_of_samples(module: nn.Module) -> Callable | None:
    """A module's rule from input lengths [batch] to output lengths, None where it has none."""
    return getattr(module, "_get_feat_extract_output_lengths", None)


def output_lengths_of_mask(module: nn.Module) -> Callable | None:
    """A module's rule from an input mask [batch, length] to output lengths, None where it has none."""
    return getattr(module, "_compute_sub_sample_lengths_from_attention_mask", None)


def type_of_layer(layer: object) -> str | None:
    """The type that a layer of a cache was made for, None of one that does not say it."""
    return getattr(layer, "_layer_type", None)


def file_or_none(repository: str, name: str, *, local_files_only: bool) -> str | None:
    """Path of a file of a repository on the hub, None where it has none or cannot be reached."""
    from transformers.utils import cached_file

    return cached_file(
        repository,
        name,
        local_files_only=local_files_only,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
