"""LoRA and other PEFT adapters, merged into the weights because a program has one set of weights."""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Sequence
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from ...errors import InputError, MissingDependencyError, UnsupportedModelError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    class PeftModel(PreTrainedModel):
        """The part of a PEFT wrapper that is used here; other attributes are forwarded to the wrapped model."""

        def get_base_model(self) -> PreTrainedModel:
            """Return the wrapped model."""
            ...


ADAPTER_CONFIG = "adapter_config.json"


def is_peft(model: Any) -> TypeGuard[PeftModel]:
    """Return True if a model is a PEFT wrapper, by the names of its classes, because peft may not be installed."""
    kinds = (kind.__module__.partition(".")[0] for kind in type(model).__mro__)
    return "peft" in kinds and hasattr(model, "get_base_model")


def check_adapters(folders: Sequence[str | os.PathLike]) -> tuple[str, ...]:
    """Return the adapters to merge as paths: none or one.

    Raises:
        InputError: If there are several, or one is not the folder of an adapter.
        MissingDependencyError: If peft is not installed.
    """
    paths = tuple(os.fspath(folder) for folder in folders)
    if len(paths) > 1:
        raise InputError(
            f"lora must name at most one adapter, got {len(paths)} ({', '.join(paths)}), because it is merged into the "
            "weights; export once for each adapter, or combine them first with peft's add_weighted_adapter"
        )
    for path in paths:
        if not (Path(path).expanduser() / ADAPTER_CONFIG).is_file():
            raise InputError(
                f"lora must be a folder with {ADAPTER_CONFIG}, got {path!r}; pass the folder that peft saved"
            )
        if util.find_spec("peft") is None:
            raise MissingDependencyError(
                "merging an adapter needs peft, which is not installed; pip install 'exportable-cache[lora]'"
            )
    return paths


def base_of(folder: Path) -> str:
    """Return the model that an adapter was trained for according to its config, for messages."""
    try:
        return str(json.loads((folder / ADAPTER_CONFIG).read_text()).get("base_model_name_or_path"))
    except (OSError, ValueError, AttributeError):
        return "another model"


@torch.no_grad()
def merged(peft_model: Any) -> PreTrainedModel:
    """Return the model inside a PEFT wrapper with the active adapters merged.

    The original is unchanged; only weights that an adapter changes are copied.

    Raises:
        InputError: If the model is in training mode.
        UnsupportedModelError: If the adapter cannot be merged, such as a learned prompt, or changes one of two tied
            weights.
    """
    name = type(peft_model).__name__
    if peft_model.training:
        raise InputError(f"{name} is in training mode; call model.eval() first")
    if not hasattr(peft_model.base_model, "merge_and_unload"):
        raise UnsupportedModelError(
            f"{name} has an adapter of type {_kinds(peft_model)}, which does not change weights and cannot be merged; "
            "use LoRA, or another adapter that peft merges"
        )
    _check_tied(peft_model)
    model = _copy_sharing_memory(peft_model)
    try:
        # `safe_merge` merges into a copy of the weight, which then replaces the shared one.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return model.merge_and_unload(safe_merge=True)
    except Exception as error:  # adapters raise errors of many classes
        raise UnsupportedModelError(
            f"peft cannot merge the adapter of {name}: {first_line(error)}; merge it yourself and export the result"
        ) from error


def merge_folder(model: PreTrainedModel, folder: str | os.PathLike) -> PreTrainedModel:
    """Return a model with the adapter of a folder merged, see `merged`.

    Raises:
        InputError: If the adapter cannot be read, or was trained for another model.
        UnsupportedModelError: See `merged`.
    """
    from peft import PeftModel

    path = Path(folder).expanduser()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            wrapped = PeftModel.from_pretrained(_copy_sharing_memory(model), str(path)).eval()
        except Exception as error:  # files and shapes are checked with errors of several classes
            raise InputError(
                f"cannot apply the adapter {str(path)!r} to {type(model).__name__}: {first_line(error)}; it was "
                f"trained for {base_of(path)!r}"
            ) from error
    # Because peft only warns about missing weights.
    missing = [str(one.message) for one in caught if "missing adapter keys" in str(one.message)]
    if missing:
        raise InputError(
            f"the adapter {str(path)!r} lacks weights for {type(model).__name__} ({missing[0][:120]}); it was trained "
            f"for {base_of(path)!r}"
        )
    return merged(wrapped)


def merged_line(peft_model: Any) -> str:
    """Return the progress line for merged adapters."""
    names = ", ".join(getattr(peft_model, "active_adapters", ["default"]))
    return f"merged the adapter {names!r} ({_kinds(peft_model)}) into the weights"


def _kinds(peft_model: Any) -> str:
    kinds = {getattr(one.peft_type, "value", str(one.peft_type)) for one in peft_model.peft_config.values()}
    return ", ".join(sorted(kinds))


def _check_tied(peft_model: Any) -> None:
    model = peft_model.get_base_model()
    tuned = [module.get_base_layer().weight for module in model.modules() if hasattr(module, "get_base_layer")]
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    table, head = (getattr(one, "get_base_layer", lambda one=one: one)() for one in (table, head))
    if head is not None and head.weight is table.weight and any(weight is head.weight for weight in tuned):
        raise UnsupportedModelError(
            f"{type(model).__name__} ties its embeddings to its head, and the adapter changes only one of them; load "
            "the model with tie_word_embeddings=False, or leave the embeddings out of the adapter"
        )


def _copy_sharing_memory(model: Any) -> Any:
    """Copy a model with new parameters that share the memory of the original's."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = torch.nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)
