"""Sizes of weights as a target stores them."""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import nn

from ...common.tensors import dtype_name, exact_dtype
from ..experts import experts_of, projections, rows_of_weight
from ..weights import keeps_float32
from .spec import (
    DEFAULT_GROUP_SIZE,
    EMBEDDING_SCHEMES,
    FLOAT4_SCHEME,
    FLOAT8_SCHEME,
    KEEP_SCHEME,
    LINEAR_SCHEMES,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .spec import Quantization


_BFLOAT16 = 2
_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")
#: A product with a weight (Mamba), a copy of it (LongCat's router), and a copy of its layer (NLLB-MoE's router).
_DIRECTLY = re.compile(r"self\.(\w+)\.weight(?:\s*@|\.type\()|self\.(\w+) = self\.\w+\.to\(")
#: Share of quantised weights below which `Coverage.remark` names the others.
LEAST_SHARE = 0.8
#: Number of modules that a message names.
_NAMED = 3


class _Form(NamedTuple):
    """Storage of one weight: bits of an integer, bytes of a scale, and weights that share one."""

    bits: int
    scale: int
    group: int = 1


@functools.cache
def _multiplied_directly(kind: Hashable) -> frozenset[str]:
    """Return the names of submodules whose weight a class multiplies itself, or converts in each call."""
    if issubclass(cast("type[nn.Module]", kind), nn.MultiheadAttention):
        return frozenset({"out_proj"})
    try:
        found = _DIRECTLY.findall(inspect.getsource(cast("type[nn.Module]", kind)))
    except (OSError, TypeError):
        return frozenset()
    return frozenset(name for names in found for name in names if name)


@functools.cache
def _reshapes_weight(kind: Hashable) -> bool:
    """Return True if a class of linear layers reshapes its weight before the product, such as DeepSeek V4's."""
    try:
        return (
            re.search(r"self\.weight\.(view|reshape)\(", inspect.getsource(cast("type[nn.Module]", kind))) is not None
        )
    except (OSError, TypeError):
        return False


def is_tied(model: PreTrainedModel) -> bool:
    """Return True if the head is tied to the embedding table."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


#: Attribute of a second table of token ids, which has embeddings for all layers (Gemma 3n and 4).
_TABLE_OF_LAYERS = "embed_tokens_per_layer"


def token_tables(model: PreTrainedModel) -> list[nn.Module]:
    """Return the embedding tables of token ids, which a scheme quantizes: the input's first, each weight once."""
    tables = [
        module
        for path, module in model.named_modules()
        if path.rpartition(".")[2] == _TABLE_OF_LAYERS and isinstance(module, nn.Embedding)
    ]
    return [model.get_input_embeddings(), *tables]


#: Inputs of a layer that is worth a scale for each output.
_SHORTEST_ROW = 16


def quantizable_linears(model: PreTrainedModel, block: int | None = None) -> dict[str, nn.Linear]:
    """Return the linear layers that a scheme quantizes, by path; a tied head belongs to the embedding table.

    Layers whose weight their module multiplies itself are left out, such as `dt_proj` of Mamba and the output of
    torch's `MultiheadAttention`, because quantized weights are only computed by their layers. So are layers that
    reshape their weight, and those with short rows, such as the 4 weights of Gemma 3n's `correction_coefs`, because
    scales would take what integers save.

    Args:
        model: The model.
        block: Number of weights that share a scale, see `Quantization.block`. It must divide the rows of the decoder.
            Layers outside it, such as those of Qwen 2.5 VL's vision tower with 3,420 inputs, stay in float otherwise.
    """
    tied_head = model.get_output_embeddings() if is_tied(model) else None
    inside = set() if block is None else {*(model.get_decoder() or model).modules(), model.get_output_embeddings()}
    left = {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name in _multiplied_directly(cast("Hashable", type(module)))
    }
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module.in_features >= _SHORTEST_ROW
        and not _reshapes_weight(cast("Hashable", type(module)))
        and path not in left
        and (block is None or module.in_features % block == 0 or module in inside)
        and module is not tied_head
    }


def _forms(model: PreTrainedModel, quantization: Quantization, dtype: torch.dtype) -> dict[int, _Form]:
    """Return the storage of each quantised weight, by the id of its parameter."""
    forms = {}
    if quantization.linear not in (None, KEEP_SCHEME):
        bits, _ = LINEAR_SCHEMES[quantization.linear or ""]
        # Because XNNPACK and native operators keep scales of groups in 16 bits, and others in the program's dtype.
        is_16_bits = quantization.linear == "8da4w" or quantization.scales == "signed_mse"
        scale = _BFLOAT16 if bits == 4 and is_16_bits else dtype.itemsize
        if quantization.linear == FLOAT4_SCHEME:
            scale = torch.uint8.itemsize
        for linear in quantizable_linears(model, quantization.block).values():
            row = linear.weight.shape[1]
            forms[id(linear.weight)] = _Form(bits, scale, quantization.block or quantization.stored_group(row))
        if quantization.experts is not None:
            for module in (module for _, module in experts_of(model)):
                for name in projections(module):
                    row = quantization.stored_group(rows_of_weight(module, name).shape[2])
                    # MLX's form stores a bias with each scale, and experts in float8 have a factor alone.
                    pair = scale if quantization.largest_group is None else 2 * scale
                    pair = 0 if quantization.experts == FLOAT8_SCHEME else pair
                    forms[id(getattr(module, name))] = _Form(bits, pair, quantization.block or row)
    if quantization.embeddings is not None:
        bits, size = EMBEDDING_SCHEMES[quantization.embeddings], quantization.group_size or DEFAULT_GROUP_SIZE
        for weight in (table.weight for table in token_tables(model)):
            assert isinstance(weight, torch.Tensor)
            row = quantization.stored_group(weight.shape[1])
            forms[id(weight)] = _Form(bits, dtype.itemsize, size if bits == 4 else row)
    return forms


def _layer_weights(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the weights that native operators store in 16 bits if these are exact."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            yield module.weight
    for _, experts in experts_of(model):
        yield from (getattr(experts, name) for name in projections(experts))


def quantized_bytes(model: PreTrainedModel, quantization: Quantization, dtype: torch.dtype = torch.float32) -> int:
    """Return `quantize(model, quantization, dtype=dtype).weights_bytes`, from shapes alone.

    Args:
        model: A model on any device, including the meta device.
        quantization: The schemes.
        dtype: Dtype that the quantised model computes in.
    """
    return sum(_bytes(model, quantization, dtype).values())


def _bytes(model: PreTrainedModel, quantization: Quantization, dtype: torch.dtype) -> dict[int, int]:
    forms = _forms(model, quantization, dtype)
    keeps, sizes = keeps_float32(model, dtype), {}
    for name, one in model.named_parameters():
        form = forms.get(id(one))
        if form is None:
            wanted = torch.float32 if keeps(name) else dtype
            sizes[id(one)] = one.numel() * wanted.itemsize if one.is_floating_point() else one.nbytes
        else:
            sizes[id(one)] = one.numel() * form.bits // 8 + one.numel() // form.group * form.scale
    return sizes


@dataclass(frozen=True)
class Coverage:
    """The weights that a quantization covers, and those that stay in float32.

    Attributes:
        quantized_weights: Number of weights that become integers.
        other_weights: Number of weights that are not quantised, without an embedding table left out on purpose.
        quantized_bytes: Bytes of the integers and their scales.
        other_bytes: Bytes of all weights that are not quantised.
        left: Module paths, with layer indices as `*`, and their numbers of such weights, largest first.
        dtype: Dtype of the weights that are not quantised.
    """

    quantized_weights: int
    other_weights: int
    quantized_bytes: int
    other_bytes: int
    left: tuple[tuple[str, int], ...]
    dtype: torch.dtype = torch.float32

    @property
    def share(self) -> float:
        """Share of the weights that become integers, from 0 to 1."""
        return self.quantized_weights / max(1, self.quantized_weights + self.other_weights)

    @property
    def remark(self) -> str:
        """One line about the weights that are not quantised if they are many, else an empty string."""
        if self.share >= LEAST_SHARE:
            return ""
        names = ", ".join(f"{name} ({count:,})" for name, count in self.left[:_NAMED])
        return (
            f"only {self.share:.0%} of the weights are quantised: {self.quantized_bytes:,} bytes, and "
            f"{self.other_bytes:,} bytes stay in {dtype_name(self.dtype)}, most of them in {names}; the program may be "
            "larger than the checkpoint, so consider dtype='float16' or 'bfloat16' without quantisation"
        )


def coverage_of(
    model: PreTrainedModel,
    quantization: Quantization,
    dtype: torch.dtype = torch.float32,
    kept: Mapping[str, int] | None = None,
) -> Coverage:
    """Count the weights that a quantization covers, from shapes alone.

    Args:
        model: An unquantised model on any device, including the meta device.
        quantization: The schemes.
        dtype: Dtype that the quantised model computes in.
        kept: See `QuantizedModel.kept`.
    """
    forms, sizes = _forms(model, quantization, dtype), _bytes(model, quantization, dtype)
    for name, parameter in model.named_parameters():
        if kept and name in kept:
            forms[id(parameter)], sizes[id(parameter)] = _Form(8, 0), kept[name]
    # Weights that the options leave out on purpose do not count as left.
    chosen = set() if quantization.embeddings is not None else {id(table.weight) for table in token_tables(model)}
    if quantization.linear is None:
        chosen |= {id(one) for one in model.parameters()} - forms.keys()
    left: Counter[str] = Counter()
    seen: set[int] = set()
    for path, module in model.named_modules():
        for one in module.parameters(recurse=False):
            if id(one) not in seen and id(one) not in forms and id(one) not in chosen:
                left[_INDEX.sub("*", path)] += one.numel()
            seen.add(id(one))
    quantized = {id(one): one.numel() for one in model.parameters() if id(one) in forms}
    return Coverage(
        sum(quantized.values()),
        sum(left.values()),
        sum(sizes[one] for one in quantized),
        sum(size for one, size in sizes.items() if one not in quantized),
        tuple(left.most_common()),
        dtype,
    )


def exact_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters, with layers, experts and tables in the smallest exact dtype.

    Tied parameters count once.
    """
    sizes = {id(parameter): parameter.nbytes for parameter in model.parameters()}
    for weight in _layer_weights(model):
        if weight.dtype == torch.float32:
            sizes[id(weight)] = weight.numel() * exact_dtype(weight).itemsize
    return sum(sizes.values())


def float_bytes(model: PreTrainedModel, dtype: torch.dtype, stored: torch.dtype) -> int:
    """Return the bytes of all parameters from their shapes; tied ones count once.

    Args:
        model: A model on any device.
        dtype: Dtype of parameters.
        stored: Dtype of the weights of linear layers, experts and tables.
    """
    weights, keeps = {id(weight) for weight in _layer_weights(model)}, keeps_float32(model, dtype)
    return sum(
        one.numel() * (torch.float32 if keeps(name) else stored if id(one) in weights else dtype).itemsize
        for name, one in model.named_parameters()
    )
