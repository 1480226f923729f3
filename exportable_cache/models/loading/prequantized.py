"""Checkpoints whose weights are quantised already: which are read, with what, and what the others are told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import util
from typing import TYPE_CHECKING, Any

import torch

from ...errors import MissingDependencyError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

#: Methods that transformers reads on a CPU: the modules it needs for them.
READ_WITH = {
    "compressed-tensors": ("compressed_tensors",),
    "torchao": ("torchao",),
    "fp8": ("accelerate",),
    "mxfp4": (),
    "bitsandbytes": ("bitsandbytes", "accelerate"),
}
#: Methods that transformers dequantises as it reads, if the config asks for it.
_AS_READ = ("compressed-tensors", "fp8", "mxfp4")
_EXTRAS = {"torchao": "executorch"}
_SCHEMES = {4: "8da4w", 8: "8da8w"}


@dataclass(frozen=True)
class StoredQuantization:
    """How the weights of a checkpoint are quantised: `StoredQuantization("compressed-tensors", 4, 128)`.

    Attributes:
        method: As its config names it.
        bits: Of a weight; None where the config does not say.
        group_size: Weights that share a scale; None for whole rows, blocks, or where the config does not say.
    """

    method: str
    bits: int | None = None
    group_size: int | None = None

    def __str__(self) -> str:
        bits = f", {self.bits} bits" if self.bits else ""
        return f"{self.method}{bits}{f' in groups of {self.group_size}' if self.group_size else ''}"

    @property
    def remark(self) -> str:
        """What becomes of it, in a line."""
        scheme = _SCHEMES.get(self.bits or 0)
        text = f"weights are stored quantised ({self}) and were dequantised"
        if scheme is None:
            return text
        # The kernels take groups of 32 and multiples.
        size = self.group_size if self.bits == 4 and self.group_size and self.group_size % 32 == 0 else None
        return f"{text}; nearest to them is quantize={scheme!r}{f' with group_size={size}' if size else ''}"


def stored_quantization(config: PreTrainedConfig) -> StoredQuantization | None:
    """How a config says that weights are quantised, None where they are not."""
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
    """Refuse a checkpoint whose weights cannot be dequantised here, before they are read.

    Raises:
        UnsupportedModelError: If nothing reads them on a CPU, or not rightly.
        MissingDependencyError: If a package is missing.
    """
    stored = stored_quantization(config)
    if stored is None:
        return
    if stored.method not in READ_WITH:
        raise UnsupportedModelError(
            f"the weights of {source!r} are quantised ({stored}), which is not read here: transformers needs kernels "
            f"for it that no target has (read are {', '.join(READ_WITH)}, and GGUF files); pass the checkpoint they "
            "were made from, and quantise here (quantize='8da4w', --quantize 8da4w)"
        )
    fields = _fields(config) or {}
    if stored.method == "compressed-tensors" and len(_groups(fields)) > 1:
        raise UnsupportedModelError(
            f"the weights of {source!r} are quantised in {len(_groups(fields))} groups of layers, each in its own way "
            f"({', '.join(_groups(fields))}), and transformers dequantises all of them as the first; pass the "
            "checkpoint they were made from"
        )
    missing = [name for name in READ_WITH[stored.method] if util.find_spec(name) is None]
    if missing:
        packages = " and ".join(name.replace("_", "-") for name in missing)
        extra = _EXTRAS.get(stored.method, "quantized")
        raise MissingDependencyError(
            f"the weights of {source!r} are quantised ({stored}), and reading them needs {packages}; "
            f"pip install 'exportable-cache[{extra}]', or pass the checkpoint they were made from"
        )


def dequantising(config: PreTrainedConfig) -> None:
    """Have `from_pretrained` dequantise the weights, where it does so as it reads them; changes `config`."""
    stored, fields = stored_quantization(config), _fields(config)
    if stored is not None and fields is not None and stored.method in _AS_READ:
        fields["dequantize"] = True


@torch.no_grad()
def dequantised(model: PreTrainedModel, source: str, dtype: torch.dtype) -> PreTrainedModel:
    """A model that was read from quantised weights, with plain ones of one dtype; changes `model`.

    Raises:
        UnsupportedModelError: If some are still quantised.
    """
    stored = stored_quantization(model.config)
    if stored is not None and stored.method == "bitsandbytes":
        model = model.dequantize(dtype=dtype)
    elif stored is not None and stored.method == "torchao":
        _dequantise_torchao(model, dtype)
        quantizer: Any = model.hf_quantizer
        quantizer.remove_quantization_config(model)
    if stored_quantization(model.config) is None:
        # Some methods leave the layers that they do not quantise, or the others, in a dtype of their own.
        model = model.to(dtype)  # type: ignore[arg-type]  # its decorator loses `self`
        model.config.dtype = dtype
        return model
    raise UnsupportedModelError(
        f"transformers left the weights of {source!r} quantised ({stored}); pass the checkpoint they were made from"
    )


def check_plain(model: PreTrainedModel) -> None:
    """Refuse a live model whose weights are quantised.

    Raises:
        UnsupportedModelError: Then.
    """
    stored = stored_quantization(model.config)
    if stored is not None:
        raise UnsupportedModelError(
            f"the weights of {type(model).__name__} are quantised ({stored}), and programs are made from plain ones; "
            "pass its folder, which is dequantised as it is read, or model.dequantize()"
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
    """Bits and group size of torchao's default rule, as its configs are written."""
    rule = ((fields.get("quant_type") or {}) if isinstance(fields.get("quant_type"), Mapping) else {}).get(
        "default", {}
    )
    data = rule.get("_data", {})
    named = str(data.get("weight_dtype", {}).get("_data", "")) or str(rule.get("_type", "")).lower()
    bits = next((bits for bits in (4, 8) if f"int{bits}" in named.split("weight")[0].split("activation")[-1]), None)
    granularity = data.get("weight_granularity") or data.get("granularity") or {}
    size = (granularity.get("_data") or {}).get("group_size")
    return bits, size if isinstance(size, int) else None
