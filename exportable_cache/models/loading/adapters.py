"""LoRA and other PEFT adapters: merged into the weights, or read for the slots of a program (`models.lora`)."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from ...common.tensors import dtype_name
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


@dataclass(frozen=True)
class LoraWeights:
    """A LoRA adapter as low-rank products.

    Attributes:
        name: Name of the folder that it was read from.
        tensors: For each linear layer [rank, inputs] and [outputs, rank]; the scale is part of the second.
    """

    name: str
    tensors: dict[str, tuple[torch.Tensor, torch.Tensor]]

    @property
    def rank(self) -> int:
        """Largest rank of a layer."""
        return max(a.shape[0] for a, _ in self.tensors.values())


#: Fields of an adapter's config that change more than linear layers, and what each asks for.
_UNSUPPORTED = {
    "use_dora": "DoRA, which scales whole weights",
    "use_qalora": "QA-LoRA, which pools inputs",
    "modules_to_save": "whole layers besides low-rank products",
    "trainable_token_indices": "rows of the embedding table",
    "layer_replication": "copies of layers",
    "target_parameters": "parameters that are not linear layers, such as experts",
    "alora_invocation_tokens": "activation by tokens (aLoRA)",
    "arrow_config": "a choice between adapters for each token (Arrow)",
    "fan_in_fan_out": "transposed weights (Conv1D)",
    "lora_bias": "biases of the products",
}
#: Ways of starting the training that also change the base model's weights.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
#: Dtypes of an adapter's tensors, because torch computes little in others.
LORA_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MERGE = "merge it at export instead (lora=, --lora)"


def read_lora(folder: str | os.PathLike) -> LoraWeights:
    """Read the LoRA adapter in a folder that peft saved; peft itself is not needed.

    Raises:
        InputError: If there is no such adapter, it is stored as a pickle, damaged, or has values that are not finite.
        UnsupportedModelError: If it changes more than linear layers.
    """
    path = Path(folder).expanduser()
    config = _adapter_config(path)
    kind = str(config.get("peft_type"))
    if kind != "LORA":
        raise UnsupportedModelError(f"{path} must hold a LoRA adapter, got {kind}; {_MERGE}, if peft merges it")
    for name, what in _UNSUPPORTED.items():
        if config.get(name):
            raise UnsupportedModelError(f"the adapter in {path} has {name}, {what}, which slots do not hold; {_MERGE}")
    if config.get("bias", "none") != "none":
        raise UnsupportedModelError(f"the adapter in {path} has bias={config['bias']!r}, changed biases; {_MERGE}")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise UnsupportedModelError(
            f"the adapter in {path} has init_lora_weights={start!r}, which changes the base model; save it with peft's "
            "path_initial_model_for_weight_conversion, or merge it"
        )
    stored = _adapter_tensors(path)
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in stored.items():
        layer, _, half = key.removesuffix(".weight").removeprefix("base_model.model.").rpartition(".")
        if half not in ("lora_A", "lora_B") or tensor.dim() != 2:
            what = "embeddings" if "embedding" in half else "other tensors than those of linear layers"
            raise UnsupportedModelError(f"the adapter in {path} has {key!r}, {what}, which slots do not hold; {_MERGE}")
        is_float = tensor.dtype in LORA_DTYPES
        if not is_float or not bool(torch.isfinite(tensor).all()):
            given = "infinities or not-a-number" if is_float else dtype_name(tensor.dtype)
            raise InputError(
                f"the adapter in {path} must have finite values of 16, 32 or 64 bits, got {given} in {key!r}; train it "
                "again, or save it again in one of these types"
            )
        halves.setdefault(layer, {})[half] = tensor
    tensors = {}
    for layer, pair in halves.items():
        if len(pair) < 2 or pair["lora_A"].shape[0] != pair["lora_B"].shape[1]:
            found = {half: list(one.shape) for half, one in pair.items()}
            raise InputError(
                f"the adapter in {path} must have lora_A and lora_B of {layer}, got {found}; copy it again"
            )
        rank = pair["lora_A"].shape[0]
        tensors[layer] = (pair["lora_A"], pair["lora_B"].float() * _scale(path, config, layer, rank))
    if not tensors:
        raise InputError(f"the adapter in {path} has no tensors; save it again")
    return LoraWeights(path.resolve().name, tensors)


def _adapter_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / ADAPTER_CONFIG).read_bytes())
        if isinstance(config, dict):
            return config
        reason = f"it holds a {type(config).__name__}"
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
    raise InputError(f"cannot read {path / ADAPTER_CONFIG}: {reason}; pass the folder that peft saved")


def _adapter_tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError, safe_open

    file = path / "adapter_model.safetensors"
    if not file.is_file() and (path / "adapter_model.bin").is_file():
        raise InputError(
            f"{path / 'adapter_model.bin'} is a pickle, which can run code; save the adapter with safetensors "
            "(save_pretrained(..., safe_serialization=True))"
        )
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read {file}: {first_line(error)}; copy the adapter again") from error


#: Parts of a pattern of layer names. Others are refused, because a regular expression of a stranger can run forever.
_PART = re.compile(r"\\d\+|\.\*|\\?\.|[\w-]")


def _matches(path: Path, pattern: str, layer: str) -> bool:
    r"""Return True if a layer's name, or its end after a dot, matches a pattern as peft matches it.

    Raises:
        InputError: If the pattern has more than names, dots, `\d+` and `.*`.
    """
    parts = _PART.findall(pattern.removeprefix("^"))
    if "".join(parts) != pattern.removeprefix("^"):
        raise InputError(
            f"{path / ADAPTER_CONFIG} must have an alpha_pattern of layer names with at most \\d+ and .*, got "
            f"{pattern!r:.80}; write the names of the layers"
        )
    # Offsets where the parts so far can end, so that the time grows only with the product of both lengths.
    ends = {0} if pattern.startswith("^") else {0, *(at + 1 for at, one in enumerate(layer) if one == ".")}
    for part in parts:
        if not ends:
            return False
        if part == ".*":
            ends = {*range(min(ends), len(layer) + 1)}
        elif part == r"\d+":
            found: set[int] = set()
            for at, one in enumerate(layer):
                if one.isdecimal() and (at in ends or at in found):
                    found.add(at + 1)
            ends = found
        else:
            ends = {at + 1 for at in ends if at < len(layer) and (part == "." or layer[at] == part[-1])}
    return len(layer) in ends


def _scale(path: Path, config: Mapping[str, Any], layer: str, rank: int) -> float:
    """Return the factor of a layer's product, as peft computes it."""
    alpha: Any = config.get("lora_alpha")
    patterns = config.get("alpha_pattern") or {}
    try:
        alpha = next((value for key, value in patterns.items() if _matches(path, key, layer)), alpha)
        scale = float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
    except InputError:
        raise
    except (TypeError, ValueError, AttributeError, ZeroDivisionError, OverflowError) as error:
        raise InputError(
            f"{path / ADAPTER_CONFIG} must have a number as lora_alpha of {layer}, got {alpha!r}; save it again"
        ) from error
    if not math.isfinite(scale):
        raise InputError(
            f"{path / ADAPTER_CONFIG} must have a finite lora_alpha, got {alpha!r}; save the adapter again"
        )
    return scale
