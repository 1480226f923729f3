"""Private names of transformers, seen in 5.20.2, 5.23.0 and 5.24.0, and the name of the cache argument.

| name | without it |
|---|---|
| `PreTrainedConfig._attn_implementation` | the attention of a config without a model cannot be chosen |
| `PreTrainedConfig._attn_implementation_internal` | one config's attention cannot be set and restored |
| `PreTrainedConfig._experts_implementation_internal` | the same for experts |
| `PreTrainedModel._can_set_attn_implementation` | models with custom attention code do not get this package's masks |
| `_get_feat_extract_output_lengths` of audio encoders | the mask of an encoder's output cannot be computed |
| `_compute_sub_sample_lengths_from_attention_mask` of the same | the same |
| `PreTrainedModel._hf_peft_config_loaded` | a model with adapters inside fails when it is traced |
| `_layer_type` of cache layers | the state of DeepSeek V4's compressed layers is not found |
| `PreTrainedModel._get_dtype_plan` | tensors that models compute with in float32 are rounded in exports in 16 bits |
| `PreTrainedModel._pp_stage` | a model whose layers are split over stages seems to lack layers |
| `transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS` | experts cannot be native operators |
| `_apply_gate` of experts | the same |
| `_is_expert_parallel` of experts | experts split over processes would get indices of others |
| `_is_hooked` of modules | fewer key and value heads than ranks are refused, not repeated |
| `cached_file(_raise_exceptions_for_missing_entries=..., _raise_exceptions_for_connection_errors=...)` | see below |

Without these arguments, which `cached_file` passes to `cached_files`, a missing file of a repository is an error.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel


@functools.cache
def cache_name() -> str:
    """Return what modeling code calls a cache: `cache`, or `past_key_values` before transformers 5.24.

    It is the name of arguments, and of the field of outputs.
    """
    from transformers.masking_utils import create_causal_mask

    return "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name of the cache argument of `model.forward`.

    Code from a repository may have another name than transformers, and the Mamba family has `cache_params` before 5.24.
    """
    parameters = inspect.signature(model.forward).parameters
    names = ("past_key_values", "cache", "cache_params")
    return next((name for name in names if name in parameters), cache_name())


def attention_implementation(config: PreTrainedConfig) -> str | None:
    """Return the name of a config's attention implementation."""
    return config._attn_implementation


def set_attention_implementation(config: PreTrainedConfig, name: str | None) -> None:
    """Set the attention implementation of a config and its sub-configs."""
    config._attn_implementation = name


def float32_names(model: PreTrainedModel, dtype: torch.dtype) -> list[str]:
    """Return patterns of the names of tensors that `from_pretrained` keeps in float32 for a dtype."""
    plan = getattr(model, "_get_dtype_plan", None)
    return [] if plan is None else list(plan(dtype))


def config_implementations(config: PreTrainedConfig) -> tuple[str | None, str | None]:
    """Return the attention and experts implementation of this config only; None for experts if it has no such field."""
    return config._attn_implementation_internal, getattr(config, "_experts_implementation_internal", None)


def set_config_implementations(config: PreTrainedConfig, attention: str | None, experts: str | None) -> None:
    """Set the attention and experts implementation of this config only."""
    config._attn_implementation_internal = attention
    if hasattr(config, "_experts_implementation_internal"):
        config._experts_implementation_internal = experts


def set_config_attention(config: PreTrainedConfig, attention: str | None) -> None:
    """Set the attention implementation of this config only, without checking that the model supports it."""
    config._attn_implementation_internal = attention


def set_config_experts(config: PreTrainedConfig, experts: str) -> None:
    """Set the experts implementation of this config only."""
    config._experts_implementation_internal = experts


def experts_implementation(config: PreTrainedConfig) -> str | None:
    """Return the name of the experts implementation, or None if the config has none."""
    return getattr(config, "_experts_implementation", None)


def register_experts_implementation(name: str, function: Callable) -> None:
    """Add a function that computes experts, under a name for `set_experts_implementation`.

    Args:
        name: Name of the implementation.
        function: Function `(module, hidden_states, top_k_index, top_k_weights)`.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(name, function)


def batched_experts() -> Callable:
    """Return transformers' function that computes experts by batched products."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    return ALL_EXPERTS_FUNCTIONS["batched_mm"]


def gated(module: Any, states: torch.Tensor) -> torch.Tensor:
    """Return what experts compute between their two layers: the gate times the rest, or an activation function."""
    return module._apply_gate(states) if module.has_gate else module.act_fn(states)


def is_split_by_experts(module: nn.Module) -> bool:
    """Return True if a module has only some of its experts, and others are in other processes."""
    return getattr(module, "_is_expert_parallel", False)


def can_set_attention(model: PreTrainedModel) -> bool:
    """Return True if the model uses transformers' `AttentionInterface`."""
    return model._can_set_attn_implementation()


def has_adapters(model: PreTrainedModel) -> bool:
    """Return True if adapters were added to the model by `add_adapter` or `load_adapter`."""
    return getattr(model, "_hf_peft_config_loaded", False)


def is_split_by_transformers(module: nn.Module) -> bool:
    """Return True if transformers' tensor parallel plan has split a module and wrapped its forward."""
    return getattr(module, "_is_hooked", False)


def pipeline_stage(model: PreTrainedModel) -> Any | None:
    """Return the stage of a model whose layers are split, or None if it has all of its layers.

    The stage has `pp_rank`, `pp_size`, `pp_group` and `layer_range_for_rank`.
    """
    return getattr(model, "_pp_stage", None)


def output_lengths_of_samples(module: nn.Module) -> Callable | None:
    """Return a module's function from input lengths [batch] to output lengths, or None."""
    return getattr(module, "_get_feat_extract_output_lengths", None)


def output_lengths_of_mask(module: nn.Module) -> Callable | None:
    """Return a module's function from an input mask [batch, length] to output lengths, or None."""
    return getattr(module, "_compute_sub_sample_lengths_from_attention_mask", None)


def type_of_layer(layer: object) -> str | None:
    """Return the type that a cache layer was made for, or None if the layer does not state it."""
    return getattr(layer, "_layer_type", None)


def file_or_none(repository: str, name: str, *, local_files_only: bool) -> str | None:
    """Return the path of a file of a hub repository, or None if it is missing or cannot be reached."""
    from transformers.utils import cached_file

    return cached_file(
        repository,
        name,
        local_files_only=local_files_only,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
