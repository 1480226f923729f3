"""Checkpoints with quantised weights: which methods can be read, and how they are dequantised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import util
from typing import TYPE_CHECKING, Any

import torch

from ...errors import MissingDependencyError, UnsupportedModelError
from ..weights import convert
from .location import file_in, json_in

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from .location import Location

#: Methods that transformers reads on a CPU -> the modules that it needs.
READ_WITH = {
    "gptq": (),
    "awq": (),
    "compressed-tensors": (),
    "modelopt": (),
    "torchao": ("torchao",),
    "fp8": ("accelerate",),
    "mxfp4": (),
    "bitsandbytes": ("bitsandbytes", "accelerate"),
}
#: Methods whose integers `quantize="keep"` can store.
KEPT = ("gptq", "awq", "compressed-tensors", "torchao")
#: Methods that transformers dequantises while reading if the config says so.
_AS_READ = ("fp8", "mxfp4")
#: Formats of compressed-tensors that `integers` reads.
_COMPRESSED = (
    "pack-quantized",
    "int-quantized",
    "naive-quantized",
    "float-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
    "dense",
)
#: Algorithms of ModelOpt that `integers` reads -> bits of a weight, and weights that share a scale.
_MODELOPT: dict[str, tuple[int, int | None]] = {"NVFP4": (4, 16), "FP8": (8, None)}
#: Scales of activations, keys and values, which are left out, because these stay in float.
_OF_ACTIVATIONS = (
    "input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point", "k_scale", "v_scale"
)  # fmt: skip
#: File in which ModelOpt describes a checkpoint whose config.json may not.
_MODELOPT_FILE = "hf_quant_config.json"
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
        if self.method in KEPT:
            return f"{text}; quantize='keep' (--quantize keep) stores their integers where the target has the form"
        if scheme is None:
            return text
        # Because the kernels take multiples of 32.
        size = self.group_size if self.bits == 4 and self.group_size and self.group_size % 32 == 0 else None
        also = ", or 'nvfp4' for target tensorrt" if self.method == "modelopt" and self.bits == 4 else ""
        return f"{text}; the nearest option is quantize={scheme!r}{f' with group_size={size}' if size else ''}{also}"


def stored_quantization(config: PreTrainedConfig) -> StoredQuantization | None:
    """Return how a config says that weights are quantised, or None if they are not."""
    fields = quantization_fields(config)
    if fields is None:
        return None
    method = str(getattr(fields.get("quant_method"), "value", fields.get("quant_method") or "an unknown method"))
    if fields.get("load_in_4bit") or fields.get("load_in_8bit"):
        return StoredQuantization("bitsandbytes", 4 if fields.get("load_in_4bit") else 8)
    if method == "compressed-tensors":
        weights = [(one.get("num_bits"), one.get("group_size")) for one in schemes_of(fields)]
        return StoredQuantization(
            method, *(weights[0] if weights and weights.count(weights[0]) == len(weights) else (None, None))
        )
    if method == "torchao":
        return StoredQuantization(method, *_torchao_sizes(fields))
    if method == "modelopt":
        return StoredQuantization(method, *_MODELOPT.get(_algorithm(fields), (None, None)))
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
    fields = quantization_fields(config) or {}
    problem = _unknown_form(stored.method, fields)
    if problem:
        raise UnsupportedModelError(
            f"the weights of {source!r} are quantised by {stored.method} with {problem}; pass the original checkpoint, "
            "and quantise it on export (quantize='8da4w', --quantize 8da4w)"
        )
    missing = [name for name in READ_WITH[stored.method] if util.find_spec(name) is None]
    if missing:
        packages = " and ".join(name.replace("_", "-") for name in missing)
        extra = _EXTRAS.get(stored.method, "quantized")
        raise MissingDependencyError(
            f"the weights of {source!r} are quantised ({stored}), and reading them needs {packages}; "
            f"pip install 'exportable-cache[{extra}]', or pass the original checkpoint"
        )


def _unknown_form(method: str, fields: Mapping[str, Any]) -> str:
    """Return what of a config is not read, with what is; an empty string if all is."""
    bits, size = fields.get("bits"), fields.get("group_size")
    if method in ("gptq", "awq"):
        form = gptq_format(fields) if method == "gptq" else str(fields.get("version") or fields.get("format") or "gemm")
        forms = ["gptq", "gptq_v2"] if method == "gptq" else ["gemm"]
        known = (2, 4, 8) if method == "gptq" else (4,)
        if form.lower() not in forms:
            return f"the packing {form!r}, and only {' and '.join(forms)} are read"
        if bits not in known:
            return f"bits={bits!r}, and only {', '.join(map(str, known))} are read"
        if not isinstance(size, int) or (size < 1 and size != -1):
            return f"group_size={size!r}, which must be -1 or a positive integer"
    if method == "modelopt" and _algorithm(fields) not in _MODELOPT:
        return f"the algorithm {_algorithm(fields)!r}, and only {' and '.join(_MODELOPT)} are read"
    if method == "compressed-tensors":
        sparsity = _mapping(fields.get("sparsity_config")).get("format", "dense")
        forms = [
            str(fields.get("format") or "dense"),
            *(str(one.get("format") or "dense") for one in _groups(fields).values()),
        ]
        odd = [form for form in forms if form not in _COMPRESSED]
        if odd or sparsity != "dense":
            return f"the format {odd[0] if odd else sparsity!r}, and only {', '.join(_COMPRESSED)} are read"
    return ""


def _algorithm(fields: Mapping[str, Any]) -> str:
    return str(fields.get("quant_algo"))


def modelopt_fields(location: Location) -> dict[str, Any] | None:
    """Return the quantization config of a checkpoint of ModelOpt that has it in a file of its own, or None.

    Raises:
        InputError: If the file cannot be read.
    """
    path = file_in(location, _MODELOPT_FILE)
    if path is None:
        return None
    fields = _mapping(_mapping(json_in(path, location)).get("quantization"))
    # Some files describe quantised keys and values alone.
    return {**fields, "quant_method": "modelopt"} if fields.get("quant_algo") else None


def gptq_format(fields: Mapping[str, Any]) -> str:
    """Return how a GPTQ config says that zero points are stored: `gptq`, `gptq_v2`, or the name of another packing."""
    return str(fields.get("checkpoint_format") or fields.get("format") or "gptq").lower()


def schemes_of(fields: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return how the weights of each group of layers of a compressed-tensors config are quantised."""
    return [weights for one in _groups(fields).values() if (weights := _mapping(one.get("weights")))]


def dequantising(config: PreTrainedConfig) -> None:
    """Make `from_pretrained` dequantise weights while reading, if it can; changes `config`."""
    stored, fields = stored_quantization(config), quantization_fields(config)
    if stored is not None and fields is not None and stored.method in _AS_READ:
        fields["dequantize"] = True


def is_of_activations(name: str) -> bool:
    """Return True for a tensor of a quantised checkpoint that only scales activations."""
    return name.rpartition(".")[2] in _OF_ACTIVATIONS


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
        convert(model, dtype)
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


def quantization_fields(config: PreTrainedConfig) -> dict[str, Any] | None:
    """Return the quantization config of a checkpoint, or None."""
    for one in (config, config.get_text_config(decoder=True)):
        found = getattr(one, "quantization_config", None)
        if found is not None:
            return found if isinstance(found, dict) else found.to_dict()
    return None


def _groups(fields: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    groups = fields.get("config_groups") or _mapping(fields.get("quantization_config")).get("config_groups")
    return {name: group for name, group in _mapping(groups).items() if isinstance(group, Mapping)}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


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
