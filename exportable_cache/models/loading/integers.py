"""Weights of GPTQ, AWQ, compressed-tensors and ModelOpt checkpoints, read by arithmetic alone, and torchao's integers.

transformers reads these with packages that need a GPU, or with none of several schemes. `IntegerQuantizer` is a
quantizer of transformers, so its loader finds the shards and renames tensors, and merges experts after they are
dequantised. Formats:

- GPTQ: `qweight` int32 [inputs * bits / 32, outputs], `qzeros` int32 [groups, outputs * bits / 32], `scales` [groups,
  outputs], `g_idx` int32 [inputs]. `gptq` stores zero points less one, `gptq_v2` stores them unchanged
  (https://github.com/AutoGPTQ/AutoGPTQ, https://github.com/ModelCloud/GPTQModel).
- AWQ, packing `gemm`: `qweight` int32 [inputs, outputs / 8], `qzeros` int32 [groups, outputs / 8], `scales` [groups,
  outputs]; the halves of a word belong to outputs 0, 2, 4, 6, 1, 3, 5, 7 (https://github.com/casper-hansen/AutoAWQ).
- compressed-tensors: `weight_packed` or `weight` [outputs, ...], `weight_scale` [outputs, groups], and perhaps
  `weight_zero_point`, `weight_shape`, `weight_g_idx`, `weight_global_scale`
  (https://github.com/vllm-project/compressed-tensors).
- ModelOpt: `weight` in float8 with one `weight_scale`, or in NVFP4 with one of each block and one `weight_scale_2`.
- torchao: tensors that transformers loads. Those of `IntxWeightOnlyConfig`, `Int8DynamicActivationIntxWeightConfig`
  (8da4w), `Int8WeightOnlyConfig` and `Int8DynamicActivationInt8WeightConfig` hold integers in int8, also of fewer bits.
  Others, such as those of `Int4WeightOnlyConfig`, are packed for GPUs and are dequantised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...errors import ExportableCacheError, InputError, first_line
from ..rounding import float4_values
from .location import header_of, shards
from .prequantized import gptq_format, quantization_fields, schemes_of, stored_quantization

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedConfig, PreTrainedModel

    from .location import Location

#: Name of the quantizer in transformers' registry.
METHOD = "exportable_cache"
#: Tensors of a linear layer, by method.
NAMES = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "compressed-tensors": (
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
        "weight_global_scale",
        "weight",
    ),
    "modelopt": ("weight_scale_2", "weight_scale", "weight"),
}
#: Index in a word of AWQ, by output.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_WORD = 32
#: Prefix of the patterns of tensors of any layer.
_ANY = r"\."
_REMEDY = "config.json and the shards do not belong together, or one is damaged: download the checkpoint again"


class IntegerWeight(NamedTuple):
    """A weight [outputs, inputs] as integers in groups of inputs: `(integers - zero_points) * scales`.

    Attributes:
        integers: int8 [outputs, inputs], at least -2^(bits - 1).
        scales: [outputs, groups], in the checkpoint's dtype.
        zero_points: int8, or float32 if minimums give them, [outputs, groups]; None if all are zero.
        order: int64 [inputs], the input of each column (GPTQ's act-order), or None if they are in order.
        bits: Bits of an integer.
        size: Inputs of a group.
    """

    integers: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None
    order: torch.Tensor | None
    bits: int
    size: int

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight [outputs, inputs] in the order of its inputs; it is rounded once, to `dtype`."""
        inputs = self.integers.shape[1]
        weight = self.integers.float()
        if self.zero_points is not None:
            weight -= _spread(self.zero_points.float(), self.size, inputs)
        weight *= _spread(self.scales.float(), self.size, inputs)
        if self.order is not None:
            weight = torch.empty_like(weight).index_copy_(1, self.order, weight)
        return weight.to(dtype)


def _spread(groups: torch.Tensor, size: int, inputs: int) -> torch.Tensor:
    return groups.repeat_interleave(size, 1)[:, :inputs]


class _Layer:
    """The tensors of a quantised layer, or their shapes on the meta device.

    Args:
        name: Name of the layer, for messages.
        tensors: Tensors by their names in `NAMES`.
    """

    def __init__(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self.name = name
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def get(self, name: str, *dtypes: torch.dtype) -> torch.Tensor:
        """Return a matrix, after checking that it is there and of one of some dtypes; any float dtype by default."""
        found = self._tensors.get(name)
        if found is None:
            raise self.error(f"{name} is missing")
        fits = found.dtype in dtypes if dtypes else found.is_floating_point()
        if found.dim() != 2 or not fits or not found.numel():
            kinds = " or ".join(str(one).removeprefix("torch.") for one in dtypes) or "a float dtype"
            raise self.error(f"{name} must be a matrix of {kinds}, got {_described(found)}")
        return found

    def optional(self, name: str) -> torch.Tensor | None:
        """Return a tensor of any shape, or None."""
        return self._tensors.get(name)

    def finite(self, scales: torch.Tensor) -> torch.Tensor:
        """Return scales, after checking that they are finite."""
        if not scales.is_floating_point():
            raise self.error(f"scales must be of a float dtype, got {_described(scales)}")
        if not scales.float().isfinite().all():
            raise self.error("scales must be finite, got infinities or not-a-number")
        return scales

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Check a tensor's shape, if it is there."""
        found = self._tensors.get(name)
        if found is not None and tuple(found.shape) != shape:
            raise self.error(f"{name} must be {list(shape)}, got {list(found.shape)}")

    def error(self, problem: str) -> InputError:
        """Return the error of a layer whose tensors do not fit together."""
        return InputError(f"the weights of {self.name}: {problem}; {_REMEDY}")


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


class _Form(NamedTuple):
    """Bits, group size and shape of a layer, from the shapes of its tensors."""

    bits: int
    size: int
    inputs: int
    outputs: int


def unpack(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return unsigned integers that lie one after the other in words, from the lowest bits.

    Args:
        words: int32 [rows, words].
        bits: Bits of an integer, 1 to 8.
        count: Integers of a row.

    Returns:
        uint8 [rows, count].
    """
    bytes_ = words.contiguous().view(torch.uint8)
    if 8 % bits == 0:
        each = torch.arange(0, 8, bits, dtype=torch.uint8)
        return ((bytes_[..., None] >> each) & (2**bits - 1)).flatten(1)[:, :count]
    single = ((bytes_[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(1)[:, : count * bits]
    weights = 2 ** torch.arange(bits, dtype=torch.uint8)
    return (single.view(len(words), count, bits) * weights).sum(-1, dtype=torch.uint8)


def _signed(integers: torch.Tensor, bits: int) -> torch.Tensor:
    return (integers.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)


def _zero_points(zeros: torch.Tensor) -> torch.Tensor | None:
    return zeros.contiguous() if bool(zeros.any()) else None


def _as_int8(layer: _Layer, zeros: torch.Tensor, bits: int) -> torch.Tensor:
    """Return zero points as int8, after checking that they are signed integers of some bits."""
    end = 2 ** (bits - 1)
    is_integer = zeros.dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
    if not is_integer or bool(((zeros.long() < -end) | (zeros.long() >= end)).any()):
        raise layer.error(
            f"weight_zero_point must be integers from {-end} to {end - 1}, got others ({_described(zeros)})"
        )
    return zeros.to(torch.int8)


def _ordered(layer: _Layer, integers: torch.Tensor, groups: torch.Tensor | None, form: _Form) -> tuple:
    """Return integers sorted by group, and the input of each column or None."""
    plain = torch.arange(form.inputs) // form.size
    if groups is None or torch.equal(groups.long(), plain):
        return integers, None
    order = groups.long().argsort(stable=True)
    if not torch.equal(groups.long()[order], plain):
        raise layer.error(f"the group index must have each of {int(plain[-1]) + 1} groups {form.size} times")
    return integers[:, order], order


def _check_form(layer: _Layer, fields: Mapping[str, Any], form: _Form, groups: int) -> None:
    """Compare what the shapes say with what the config says of all layers."""
    if not form.inputs or -(-form.inputs // form.size) != groups:
        raise layer.error(f"{groups} groups of scales do not divide {form.inputs} inputs in groups of {form.size}")
    # GPTQModel's `dynamic` gives some layers other bits and groups.
    if not fields.get("dynamic") and fields.get("bits") != form.bits:
        raise layer.error(f"their shapes are those of {form.bits} bits, and config.json says bits={fields.get('bits')}")


def _group_size(fields: Mapping[str, Any], inputs: int, groups: int) -> int:
    said = fields.get("group_size")
    if fields.get("dynamic"):
        return -(-inputs // groups)
    # At most the inputs, because scales are spread over the whole of each group.
    return min(said if isinstance(said, int) and said > 0 else inputs, max(1, inputs)) or 1


def gptq_form(layer: _Layer, fields: Mapping[str, Any]) -> _Form:
    """Check the shapes of a GPTQ layer, and return its form."""
    packed, zeros = (layer.get(name, torch.int32) for name in ("qweight", "qzeros"))
    groups, outputs = layer.get("scales").shape
    bits, rest = divmod(_WORD * zeros.shape[1], outputs)
    if rest or bits not in (2, 4, 8):
        raise layer.error(f"bits must be 2, 4 or 8, and qzeros {list(zeros.shape)} are not of {outputs} outputs")
    inputs = _WORD * packed.shape[0] // bits
    form = _Form(bits, _group_size(fields, inputs, groups), inputs, outputs)
    _check_form(layer, fields, form, groups)
    layer.check("qweight", (inputs * bits // _WORD, outputs))
    layer.check("qzeros", (groups, outputs * bits // _WORD))
    if fields.get("desc_act") and "g_idx" not in layer:
        raise layer.error("g_idx is missing, and config.json says desc_act")
    layer.check("g_idx", (inputs,))
    return form


def read_gptq(layer: _Layer, fields: Mapping[str, Any]) -> IntegerWeight:
    """Read a GPTQ layer."""
    form = gptq_form(layer, fields)
    integers = _signed(unpack(layer.get("qweight", torch.int32).T, form.bits, form.inputs), form.bits)
    stored = unpack(layer.get("qzeros", torch.int32), form.bits, form.outputs)
    is_v2 = gptq_format(fields) == "gptq_v2"
    # Masked, because the zero point 0 is stored as the largest integer.
    zeros = stored if is_v2 else (stored + 1) & (2**form.bits - 1)
    zeros = _signed(zeros, form.bits).T
    beside = -1 if is_v2 else 1
    # A config without `sym` is checked, too, because random zero points are never all the same.
    if fields.get("sym") is not False and bool((zeros == beside).all()):
        named, other = ("gptq_v2", "gptq") if is_v2 else ("gptq", "gptq_v2")
        raise InputError(
            f"the zero points of {layer.name} are those of checkpoint_format {other!r} for symmetric weights, and "
            f"config.json says {named!r}: every weight would be off by one step; set checkpoint_format to {other!r}"
        )
    integers, order = _ordered(layer, integers, layer.optional("g_idx"), form)
    scales = layer.finite(layer.get("scales")).T.contiguous()
    return IntegerWeight(integers, scales, _zero_points(zeros), order, form.bits, form.size)


def awq_form(layer: _Layer, fields: Mapping[str, Any]) -> _Form:
    """Check the shapes of an AWQ layer, and return its form."""
    packed = layer.get("qweight", torch.int32)
    groups, outputs = layer.get("scales").shape
    inputs, bits = len(packed), _WORD * packed.shape[1] / outputs
    if bits != 4:
        raise layer.error(f"qweight {list(packed.shape)} must be 4 bits of {outputs} outputs")
    form = _Form(4, _group_size(fields, inputs, groups), inputs, outputs)
    _check_form(layer, fields, form, groups)
    layer.get("qzeros", torch.int32)
    layer.check("qzeros", (groups, packed.shape[1]))
    return form


def read_awq(layer: _Layer, fields: Mapping[str, Any]) -> IntegerWeight:
    """Read an AWQ layer."""
    form = awq_form(layer, fields)

    def columns(words: torch.Tensor) -> torch.Tensor:
        halves = unpack(words, form.bits, form.outputs).view(len(words), -1, len(_AWQ_ORDER))
        return _signed(halves[..., list(_AWQ_ORDER)].flatten(1), form.bits).T

    integers = columns(layer.get("qweight", torch.int32)).contiguous()
    zeros = _zero_points(columns(layer.get("qzeros", torch.int32)))
    return IntegerWeight(integers, layer.finite(layer.get("scales")).T.contiguous(), zeros, None, form.bits, form.size)


def _check_scheme(layer: _Layer, fields: Mapping[str, Any], bits: int, size: int | None) -> None:
    """Check that the config has a scheme of some bits, and of a group size unless it is None."""
    said = [(one.get("num_bits"), one.get("group_size")) for one in schemes_of(fields)]
    sizes = (None, -1, 0) if size is None else (size,)
    fitting = [one for one in schemes_of(fields) if one.get("num_bits") == bits and one.get("group_size") in sizes]
    if fitting and "weight_zero_point" not in layer and all(one.get("symmetric") is False for one in fitting):
        raise layer.error("weight_zero_point is missing, and config.json says that weights are not symmetric")
    if said and not fitting:
        found = f"{bits} bits" + (f" in groups of {size}" if size else "")
        schemes = ", ".join(f"{of} bits in groups of {group}" for of, group in said)
        raise layer.error(f"their shapes are those of {found}, and config.json says {schemes}")


def read_compressed(layer: _Layer, fields: Mapping[str, Any]) -> IntegerWeight | torch.Tensor:
    """Read a layer of compressed-tensors; floats of 4 and 8 bits are returned as float32."""
    if "weight_packed" not in layer:
        return _read_unpacked(layer, fields)
    packed = layer.get("weight_packed", torch.int32, torch.uint8)
    if packed.dtype == torch.uint8:
        return _read_float4(layer, packed)
    form = compressed_form(layer, fields)
    integers = _signed(unpack(packed, form.bits, form.inputs), form.bits)
    scales = layer.finite(layer.get("weight_scale")).contiguous()
    zeros = layer.optional("weight_zero_point")
    if zeros is not None and zeros.dtype == torch.int32:
        zeros = _signed(unpack(zeros.T, form.bits, form.outputs), form.bits).T
    integers, order = _ordered(layer, integers, layer.optional("weight_g_idx"), form)
    found = None if zeros is None else _zero_points(_as_int8(layer, zeros, form.bits))
    return IntegerWeight(integers, scales, found, order, form.bits, form.size)


def check_compressed(layer: _Layer, fields: Mapping[str, Any]) -> None:
    """Check the shapes of a layer of compressed-tensors, as far as headers show them."""
    scale = layer.optional("weight_scale")
    if scale is None:
        raise layer.error("weight_scale is missing")
    if "weight_packed" in layer:
        packed = layer.get("weight_packed", torch.int32, torch.uint8)
        if scale.dim() != 2 or len(packed) != len(scale):
            raise layer.error(f"weight_scale {list(scale.shape)} does not fit weight_packed {list(packed.shape)}")


def compressed_form(layer: _Layer, fields: Mapping[str, Any]) -> _Form:
    """Check the shapes of a layer of packed integers, and return its form."""
    check_compressed(layer, fields)
    packed, (outputs, groups) = layer.get("weight_packed", torch.int32), layer.get("weight_scale").shape
    shape = layer.optional("weight_shape")
    if shape is None or shape.numel() != 2 or shape.is_floating_point():
        raise layer.error("weight_shape must be two integers")
    inputs = int(shape.flatten()[1])
    known = [one.get("num_bits") for one in schemes_of(fields)] or range(1, 9)
    fitting = (of for of in known if isinstance(of, int) and -(-inputs * of // _WORD) == packed.shape[1])
    bits = next(fitting, 0)
    if int(shape.flatten()[0]) != outputs or inputs < 1 or not 1 <= bits <= 8:
        raise layer.error(f"weight_packed {list(packed.shape)} is not the weight_shape {shape.flatten().tolist()}")
    form = _Form(bits, -(-inputs // groups), inputs, outputs)
    _check_scheme(layer, fields, bits, None if groups == 1 else form.size)
    layer.check("weight_g_idx", (inputs,))
    zeros = layer.optional("weight_zero_point")
    if zeros is not None:
        rows = -(-outputs * bits // _WORD) if zeros.dtype == torch.int32 else outputs
        layer.check("weight_zero_point", (rows, groups))
    return form


def _read_unpacked(layer: _Layer, fields: Mapping[str, Any]) -> IntegerWeight | torch.Tensor:
    weight, scale = layer.optional("weight"), layer.optional("weight_scale")
    if weight is None or scale is None or weight.dim() != 2:
        raise layer.error("weight must be a matrix, with a weight_scale")
    scale = layer.finite(scale)
    scale = scale.reshape(1, 1) if scale.numel() == 1 else scale[:, None] if scale.dim() == 1 else scale
    if scale.dim() != 2 or not scale.numel():
        raise layer.error(f"weight_scale must be a matrix, got {_described(scale)}")
    (outputs, inputs), zeros = weight.shape, layer.optional("weight_zero_point")
    if weight.dtype != torch.int8:
        blocks = next((one["block_structure"] for one in schemes_of(fields) if one.get("block_structure")), None)
        if not weight.is_floating_point() or (not blocks and scale.shape[0] not in (1, outputs)):
            raise layer.error(f"weight_scale {list(scale.shape)} does not fit a weight {_described(weight)}")
        rows, columns = (
            _block(layer, blocks, weight) if blocks else (-(-outputs // scale.shape[0]), -(-inputs // scale.shape[1]))
        )
        # Before they are spread, because a damaged scale would take any amount of memory.
        if (-(-outputs // max(1, rows)), -(-inputs // max(1, columns))) != tuple(scale.shape):
            raise layer.error(f"weight_scale {list(scale.shape)} does not fit a weight {list(weight.shape)}")
        spread = scale.float().repeat_interleave(rows, 0)[:outputs].repeat_interleave(columns, 1)[:, :inputs]
        return weight.float() * spread
    if scale.shape[0] not in (1, outputs) or inputs % scale.shape[1]:
        raise layer.error(f"weight_scale {list(scale.shape)} does not fit a weight {list(weight.shape)}")
    shape = (outputs, scale.shape[1])
    if zeros is not None and zeros.numel() not in (1, shape[0] * shape[1]):
        raise layer.error(f"weight_zero_point {list(zeros.shape)} does not fit scales {list(shape)}")
    found = (
        None
        if zeros is None
        else _zero_points(_as_int8(layer, zeros, 8).reshape(-1, 1 if zeros.numel() == 1 else shape[1]).expand(shape))
    )
    return IntegerWeight(weight, scale.expand(shape).contiguous(), found, None, 8, inputs // shape[1])


def _block(layer: _Layer, said: Any, weight: torch.Tensor) -> list[int]:
    """Return rows and columns of a block, at most those of the weight."""
    if not isinstance(said, (list, tuple)) or len(said) != 2 or not all(isinstance(of, int) and of > 0 for of in said):
        raise layer.error(f"block_structure must be two positive integers, got {said!r:.100}")
    return [min(of, max(1, size)) for of, size in zip(said, weight.shape, strict=True)]


def read_modelopt(layer: _Layer, fields: Mapping[str, Any]) -> IntegerWeight | torch.Tensor:
    """Read a layer of ModelOpt in float8 or NVFP4."""
    check_modelopt(layer, fields)
    factor, weight = layer.optional("weight_scale_2"), layer.get("weight", torch.uint8, torch.float8_e4m3fn)
    if factor is None:
        return _read_unpacked(layer, {})
    return _read_float4(layer, weight) * layer.finite(factor).float()


def check_modelopt(layer: _Layer, fields: Mapping[str, Any]) -> None:
    """Check the shapes of a layer of ModelOpt."""
    weight = layer.get("weight", torch.uint8, torch.float8_e4m3fn)
    scale, factor = layer.optional("weight_scale"), layer.optional("weight_scale_2")
    if scale is None:
        raise layer.error("weight_scale is missing")
    if (factor is not None and factor.numel() != 1) or (factor is None) is (weight.dtype == torch.uint8):
        raise layer.error(f"weight_scale_2 must be one number for a weight in 4 bits alone, got {_described(weight)}")
    if factor is not None and (scale.dim() != 2 or scale.dtype != torch.float8_e4m3fn or len(scale) != len(weight)):
        raise layer.error(f"weight_scale {_described(scale)} does not fit weight {list(weight.shape)}")


def _read_float4(layer: _Layer, packed: torch.Tensor) -> torch.Tensor:
    """Read 4-bit floats: NVFP4 with a scale in float8 and one of the layer, MXFP4 with powers of two."""
    scale, whole = (
        layer.get("weight_scale", torch.uint8, torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32),
        layer.optional("weight_global_scale"),
    )
    values = float4_values(packed)
    if len(scale) != len(packed) or values.shape[1] % scale.shape[1]:
        raise layer.error(f"weight_scale {list(scale.shape)} does not fit weight_packed {list(packed.shape)}")
    if scale.dtype == torch.float8_e4m3fn and "weight_scale_2" not in layer and (whole is None or whole.numel() != 1):
        raise layer.error("weight_global_scale must be one number")
    factors = (scale.float() - 127).exp2() if scale.dtype == torch.uint8 else layer.finite(scale).float()
    if whole is not None:
        factors = factors / layer.finite(whole).float()
    return values * factors.repeat_interleave(values.shape[1] // scale.shape[1], 1)


_READERS: dict[str, Callable[[_Layer, Mapping[str, Any]], IntegerWeight | torch.Tensor]] = {
    "gptq": read_gptq,
    "awq": read_awq,
    "compressed-tensors": read_compressed,
    "modelopt": read_modelopt,
}
_FORMS: dict[str, Callable[[_Layer, Mapping[str, Any]], object]] = {
    "gptq": gptq_form,
    "awq": awq_form,
    "compressed-tensors": check_compressed,
    "modelopt": check_modelopt,
}


def check_shards(shards: Iterable[Path], method: str, fields: Mapping[str, Any]) -> None:
    """Check names, dtypes and shapes of all quantised layers by the headers of safetensors files.

    Raises:
        InputError: If a file is truncated or is not a safetensors file, or the tensors of a layer do not fit together
            or the config.
    """
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for path in shards:
        for name, tensor in header_of(path):
            layer, _, last = name.rpartition(".")
            if last in NAMES[method]:
                layers.setdefault(layer, {})[last] = tensor
    for name, tensors in layers.items():
        if set(tensors) != {"weight"} or not _is_plain(tensors["weight"]):
            _FORMS[method](_Layer(name, tensors), fields)


def _is_plain(weight: torch.Tensor) -> bool:
    return weight.is_floating_point() and weight.element_size() > 1


@dataclass
class Reading:
    """A record of what a load of quantised weights found.

    Attributes:
        weights: Integers of linear layers that are not merged with others, by the name of the model's parameter.
        problem: The first error, because transformers reports errors of conversions as tracebacks.
    """

    weights: dict[str, IntegerWeight] = field(default_factory=dict)
    problem: ExportableCacheError | None = None

    def __deepcopy__(self, memo: dict) -> Reading:
        # Because transformers copies configs, and the caller reads this one.
        return self


@register_quantization_config(METHOD)
class IntegerConfig(QuantizationConfigMixin):
    """A config that makes transformers read a checkpoint by this module; see `dequantised_by_us`."""

    def __init__(
        self, method: str, fields: Mapping[str, Any], reading: Reading, keep: bool, quant_method: str = METHOD
    ) -> None:
        self.quant_method: Any = quant_method
        self.method, self.fields, self.reading, self.keep = method, fields, reading, keep
        self.dequantize = True


def dequantised_by_us(config: PreTrainedConfig, location: Location, keep: bool = False) -> Reading | None:
    """Make `from_pretrained` read quantised weights by this module, if it can; changes `config`.

    Args:
        config: Config of the checkpoint.
        location: Its files; the headers of quantised weights are checked against the config.
        keep: True to keep integers in addition to the dequantised weights.

    Returns:
        The record of what the load will find; None for other methods.

    Raises:
        InputError: If the shapes of quantised weights do not fit the config, or a file is damaged.
    """
    stored, fields = stored_quantization(config), quantization_fields(config)
    if stored is None or fields is None or stored.method not in NAMES:
        return None
    check_shards(shards(location), stored.method, fields)
    reading = Reading()
    config.quantization_config = {
        "quant_method": METHOD, "method": stored.method, "fields": fields, "reading": reading, "keep": keep
    }  # fmt: skip
    return reading


@register_quantizer(METHOD)
class IntegerQuantizer(HfQuantizer):
    """A quantizer that dequantises every layer while it is loaded."""

    requires_calibration = True
    quantization_config: Any

    @property
    def is_trainable(self) -> bool:
        """True, because the loaded model is a float model."""
        return True

    def is_serializable(self) -> bool:
        """Return True, because the loaded model is a float model."""
        return True

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """Return None for tensors of quantised layers, which are read in their stored dtype."""
        operations = getattr(converter, "operations", ())
        return None if any(isinstance(one, _Dequantize) for one in operations) else dtype

    def update_weight_conversions(self, weight_conversions: list, *model: Any) -> list:
        """Make the model's conversions of weights, such as merges of experts, read quantised ones first."""
        config = self.quantization_config
        names = NAMES[config.method]
        updated = []
        for one in weight_conversions:
            sources = getattr(one, "source_patterns", [])
            weights = [re.fullmatch(r"(.*\.)weight\$?", source) for source in sources]
            if isinstance(one, WeightConverter) and all(weights):
                every = [match[1] + name for match in weights if match for name in dict.fromkeys((*names, "weight"))]
                changed = WeightConverter(every, one.target_patterns, [_Dequantize(config), *one.operations])
                for name in ("scope_prefix", "base_model_prefix"):
                    if hasattr(one, name):
                        setattr(changed, name, getattr(one, name))
                one = changed
            updated.append(one)
        plain = [rf"{_ANY}{name}$" for name in names]
        return [*updated, WeightConverter(plain, ".weight", [_Dequantize(config)])]


class _Dequantize(ConversionOps):
    """The conversion of a layer's tensors to its weight."""

    def __init__(self, config: IntegerConfig) -> None:
        self._config = config

    def __deepcopy__(self, memo: dict) -> _Dequantize:
        return self

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str | None = None,
        model: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the weights by their patterns; of a layer that is not merged with others, by its parameter's name."""
        try:
            return self._converted(input_dict, full_layer_name or "", model)
        except ExportableCacheError as error:
            self._config.reading.problem = self._config.reading.problem or error
            raise
        except (RuntimeError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
            layer = _Layer(full_layer_name or "", {})
            self._config.reading.problem = self._config.reading.problem or layer.error(first_line(error))
            raise

    def _converted(self, given: dict[str, Any], target: str, model: Any) -> dict[str, Any]:
        names = dict.fromkeys((*NAMES[self._config.method], "weight"))
        layers: dict[str, dict[str, list[torch.Tensor]]] = {}
        for pattern, tensors in given.items():
            whole = pattern.removesuffix("$")
            name = next(name for name in names if whole.endswith(f".{name}"))
            found = tensors if isinstance(tensors, list) else [tensors]
            layers.setdefault(whole.removesuffix(name), {})[name] = found
        dtype = _parameter(model, target).dtype
        if set(layers) == {_ANY}:
            parts = {name: tensors[0] for name, tensors in layers[_ANY].items()}
            return {target: self._weight(target.removesuffix(".weight"), parts, dtype, target)}
        result = {}
        for prefix, several in layers.items():
            counts = {len(one) for one in several.values()}
            if len(counts) > 1:
                raise _Layer(target, {}).error(f"some of the {max(counts)} parts of {prefix} are missing")
            result[f"{prefix}weight"] = [
                self._weight(f"{target} {index}", {name: one[index] for name, one in several.items()}, dtype)
                for index in range(counts.pop())
            ]
        return result

    def _weight(
        self, name: str, tensors: dict[str, torch.Tensor], dtype: torch.dtype, target: str | None = None
    ) -> torch.Tensor:
        config = self._config
        if set(tensors) == {"weight"} and _is_plain(tensors["weight"]):
            return tensors["weight"].to(dtype)
        found = _READERS[config.method](_Layer(name, tensors), config.fields)
        if isinstance(found, IntegerWeight) and config.keep and target is not None:
            config.reading.weights[target] = found
        weight = found.to(dtype) if isinstance(found, torch.Tensor) else found.dequantize(dtype)
        # By the extremes, because a mask of each weight would take memory.
        if weight.numel() and not torch.stack(weight.aminmax()).isfinite().all():
            raise _Layer(name, {}).error(f"weights must be finite in {dtype}, got infinities or not-a-number")
        return weight


def _parameter(model: Any, name: str) -> torch.Tensor:
    module, _, last = name.rpartition(".")
    return getattr(model.get_submodule(module), last)


#: Largest relative difference of a weight from torchao's, which rounds to the dtype of the checkpoint.
_ROUNDING = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


@torch.no_grad()
def kept_tensors(model: PreTrainedModel) -> dict[str, IntegerWeight]:
    """Return the integers of linear layers of a model whose weights are torchao's, by the names of its parameters.

    Activations stay in float: how the checkpoint rounds them is left out.
    """
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    kept = {}
    for path, module in model.named_modules():
        is_tied = module is head and head.weight is table.weight
        if isinstance(module, nn.Linear) and not is_tied:
            found = _integers(module.weight)
            if found is not None:
                kept[f"{path}.weight"] = found
    return kept


def _integers(weight: Any) -> IntegerWeight | None:
    """Return the integers of a weight, or None if it has another form."""
    integers, scales, block = (getattr(weight, name, None) for name in ("qdata", "scale", "block_size"))
    if integers is None or scales is None or block is None or getattr(weight, "act_pre_scale", None) is not None:
        return None
    if integers.dtype != torch.int8 or integers.dim() != 2 or integers.shape != weight.shape or len(block) != 2:
        return None
    (outputs, inputs), (rows, size) = integers.shape, block
    if rows not in (1, outputs) or inputs % size or scales.numel() != outputs // rows * (inputs // size):
        return None

    def spread(values: torch.Tensor) -> torch.Tensor:
        return values.reshape(-1, inputs // size).expand(outputs, -1).contiguous()

    zeros = getattr(weight, "zero_point", None)
    if zeros is not None and not zeros.any():
        zeros = None
    if zeros is not None:
        zeros = spread(zeros.float() if zeros.is_floating_point() else zeros.to(torch.int8))
    named = re.fullmatch(r"torch\.int([1-8])", str(getattr(weight, "target_dtype", torch.int8)))
    bits = int(named[1]) if named else 8
    # A damaged file may hold others, which would not fit into the stored bits.
    if integers.numel() and not -(2 ** (bits - 1)) <= int(integers.min()) <= int(integers.max()) < 2 ** (bits - 1):
        return None
    found = IntegerWeight(integers, spread(scales), zeros, None, bits, size)
    # By the values, because releases of torchao store other forms by the same names.
    expected = weight.dequantize().float()
    apart = (found.dequantize(torch.float32) - expected).abs().max()
    return found if apart <= _ROUNDING.get(weight.dtype, 0.0) * expected.abs().max() else None
