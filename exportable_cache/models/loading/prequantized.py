"""Checkpoints with quantised weights: which methods can be read, and how they are dequantised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import util
from typing import TYPE_CHECKING, Any

import torch

from ...errors import MissingDependencyError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

#: Methods that transformers reads on a CPU -> the modules that it needs.
READ_WITH = {
    "compressed-tensors": ("compressed_tensors",),
    "torchao": ("torchao",),
    "fp8": ("accelerate",),
    "mxfp4": (),
    "bitsandbytes": ("bitsandbytes", "accelerate"),
}
#: Methods that transformers dequantises while reading if the config says so.
_AS_READ = ("compressed-tensors", "fp8", "mxfp4")
_EXTRAS = {"torchao": "executorch"}
_SCHEMES = {4: "8da4w", 8: "8da8w"}


@dataclass(frozen=True)
class StoredQuantization:
    """A description of how a checkpoint is quantised: `StoredQuantization("compressed-tensors", 4, 128)`.

    Attributes:
        method: Name in the config.
        bits: Bits per weight; None if the config does not say.
        group_size: Weights that share a scale; None for whole rows, blocks, or if the config does not say.
    """

    method: str
    bits: int | None = None
    group_size: int | None = None

    def __str__(self) -> str:
        bits = f", {self.bits} bits" if self.bits else ""
        return f"{self.method}{bits}{f' in groups of {self.group_size}' if self.group_size else ''}"

    @property
    def remark(self) -> str:
        """One line about the dequantised weights and the nearest `quantize` option."""
        scheme = _SCHEMES.get(self.bits or 0)
        text = f"weights are stored quantised ({self}) and were dequantised"
        if scheme is None:
            return text
        # Because the kernels take multiples of 32.
        size = self.group_size if self.bits == 4 and self.group_size and self.group_size % 32 == 0 else None
        return f"{text}; the nearest option is quantize={scheme!r}{f' with group_size={size}' if size else ''}"


def stored_quantization(config: PreTrainedConfig) -> StoredQuantization | None:
    """Return how a config says that weights are quantised, or None if they are not."""
    fields = _fields(config)
    if fields is None:
        return None
    method = str(getattr(fields.get("quant_method"), "value", fields.get("quant_method") or "an unknown method"))
    if fields.get("load_in_4bit") or fields.get("load_in_8bit"):
        return StoredQuantization("bitsandbytes", 4 if fields.get("load_in_4bit") else 8)
    if method == "compressed-tensors":
        weights = [group.get("weights") or {} for group in _groups(fields).values() if isinstance(group, Mapping)]
        first = weights[0] if weights else {}
        return StoredQuantization(method, first.get("num_bits"), first.get("group_size"))
    if method == "torchao":
        return StoredQuantization(method, *_torchao_sizes(fields))
    known = {"fp8": (8, None), "mxfp4": (4, 32)}.get(method, (fields.get("bits"), fields.get("group_size")))
    return StoredQuantization(method, *known)


def check_readable(config: PreTrainedConfig, source: str) -> None:
    """Check that a checkpoint's weights can be dequantised, before they are read.

    Raises:
        UnsupportedModelError: If they cannot be read correctly on a CPU.
        MissingDependencyError: If a package is missing.
    """
    stored = stored_quantization(config)
    if stored is None:
        return
    if stored.method not in READ_WITH:
        raise UnsupportedModelError(
            f"the weights of {source!r} are quantised ({stored}), which is not supported; supported are "
            f"{', '.join(READ_WITH)} and GGUF files: pass the original checkpoint, and quantise it on export "
            "(quantize='8da4w', --quantize 8da4w)"
        )
    fields = _fields(config) or {}
    if stored.method == "compressed-tensors" and len(_groups(fields)) > 1:
        raise UnsupportedModelError(
            f"the weights of {source!r} are quantised in {len(_groups(fields))} groups of layers, each in its own way "
            f"({', '.join(_groups(fields))}), and transformers dequantises all of them as the first; pass the "
            "original checkpoint"
        )
    missing = [name for name in READ_WITH[stored.method] if util.find_spec(name) is None]
    if missing:
        packages = " and ".join(name.replace("_", "-") for name in missing)
        extra = _EXTRAS.get(stored.method, "quantized")
        raise MissingDependencyError(
            f"the weights of {source!r} are quantised ({stored}), and reading them needs {packages}; "
            f"pip install 'exportable-cache[{extra}]', or pass the original checkpoint"
        )


def dequantising(config: PreTrainedConfig) -> None:
    """Make `from_pretrained` dequantise weights while reading, if it can; changes `config`."""
    stored, fields = stored_quantization(config), _fields(config)
    if stored is not None and fields is not None and stored.method in _AS_READ:
        fields["dequantize"] = True


@torch.no_grad()
def dequantised(model: PreTrainedModel, source: str, dtype: torch.dtype) -> PreTrainedModel:
    """Dequantise the weights of a loaded model to one dtype, in place.

    Raises:
        UnsupportedModelError: If some weights are still quantised.
    """
    stored = stored_quantization(model.config)
    if stored is not None and stored.method == "bitsandbytes":
        model = model.dequantize(dtype=dtype)
    elif stored is not None and stored.method == "torchao":
        _dequantise_torchao(model, dtype)
        quantizer: Any = model.hf_quantizer
        quantizer.remove_quantization_config(model)
    if stored_quantization(model.config) is None:
        # Because some methods leave layers in other dtypes.
        model = model.to(dtype)  # type: ignore[arg-type]  # its decorator loses `self`
        model.config.dtype = dtype
        return model
    raise UnsupportedModelError(
        f"transformers left the weights of {source!r} quantised ({stored}); pass the original checkpoint"
    )


def check_plain(model: PreTrainedModel) -> None:
    """Check that the weights of a loaded model are not quantised.

    Raises:
        UnsupportedModelError: If they are.
    """
    stored = stored_quantization(model.config)
    if stored is not None:
        raise UnsupportedModelError(
            f"the weights of {type(model).__name__} must not be quantised, got {stored}; pass its folder, whose "
            "weights are dequantised when they are read, or model.dequantize()"
        )


def _dequantise_torchao(model: PreTrainedModel, dtype: torch.dtype) -> None:
    from torchao.utils import TorchAOBaseTensor

    plain: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter.data, TorchAOBaseTensor) or isinstance(parameter, TorchAOBaseTensor):
                if id(parameter) not in plain:
                    value = parameter.dequantize().to(dtype)
                    plain[id(parameter)] = torch.nn.Parameter(value, requires_grad=False)
                setattr(module, name, plain[id(parameter)])


def _fields(config: PreTrainedConfig) -> dict[str, Any] | None:
    for one in (config, config.get_text_config(decoder=True)):
        found = getattr(one, "quantization_config", None)
        if found is not None:
            return found if isinstance(found, dict) else found.to_dict()
    return None


def _groups(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    return fields.get("config_groups") or (fields.get("quantization_config") or {}).get("config_groups") or {}


def _torchao_sizes(fields: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return bits and group size of the default rule in torchao's config format."""
    rule = ((fields.get("quant_type") or {}) if isinstance(fields.get("quant_type"), Mapping) else {}).get(
        "default", {}
    )
    data = rule.get("_data", {})
    named = str(data.get("weight_dtype", {}).get("_data", "")) or str(rule.get("_type", "")).lower()
    bits = next((bits for bits in (4, 8) if f"int{bits}" in named.split("weight")[0].split("activation")[-1]), None)
    granularity = data.get("weight_granularity") or data.get("granularity") or {}
    size = (granularity.get("_data") or {}).get("group_size")
    return bits, size if isinstance(size, int) else None
