"""Weight quantisation before export, through torchao."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ...common.process.tuning import one_thread
from ...common.tensors import dtype_name
from ...errors import InputError, UnsupportedModelError
from ..experts import (
    experts_of,
    is_expert_scale,
    parts_of,
    projections,
    rows_of_weight,
    set_quantized,
    use_expert_linears,
)
from ..layers.specs import vocab_size_of
from ..patches.registry import prepare_model
from ..quantized_rows import OrderedLinear, is_quantized
from ..rounding import Float4Linear, Float8Linear, float4_factor, float8_bits, float8_factor, rounded_blocks
from ..weights import keeps_float32
from .calibration import RoundedGroups, products_of, round_groups, round_with_feedback
from .sizes import is_tied, quantizable_linears, token_tables
from .spec import (
    DEFAULT_GROUP_SIZE,
    EMBEDDING_SCHEMES,
    FLOAT4_BLOCK,
    FLOAT4_SCHEME,
    FLOAT8_SCHEME,
    GROUP_MULTIPLE,
    KEEP_SCHEME,
    KEPT_FORMS,
    LINEAR_SCHEMES,
    NATIVE_EXPERTS,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...common.fs.tensor_files import Scratch
    from ..loading.integers import IntegerWeight
    from ..quantized_rows import QuantizedWeight
    from .calibration import Calibration, Products
    from .spec import KeptForm, Quantization

_INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]  # torch's stubs have no dtypes below 8 bits
# Weights quantised at once, so that their float32 values stay in the processor's cache.
_ELEMENTS_AT_ONCE = 1 << 17
NOTHING_TO_KEEP = (
    "quantize='keep' needs a checkpoint whose linear layers are integers that the target stores, got {}; leave it out, "
    "which dequantises them, or use another scheme"
)
#: Sequences and tokens that the inputs of layers in float8 are measured on: random ones, and the same each time.
_CALIBRATION = 4, 64
#: Tokens that show which layers read the same inputs.
_FEW_TOKENS = 1, 2


def check_quantizable(model: PreTrainedModel, quantization: Quantization) -> None:
    """Check that every layer that a quantization names can be quantised.

    Raises:
        InputError: If the group size, or the block of NVFP4, does not divide a row.
        UnsupportedModelError: If the model has no such layers, or a tied table is to have 4 bits.
    """
    name = type(model).__name__
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    linears = {
        path: module for path, module in quantizable_linears(model, quantization.block).items() if module is not head
    }
    if quantization.linear is not None and not linears:
        raise UnsupportedModelError(
            f"{name} has no torch.nn.Linear except its head, so {quantization.linear} would quantise nothing; export "
            "it without quantisation"
        )
    if quantization.embeddings is not None and not isinstance(table, nn.Embedding):
        raise UnsupportedModelError(
            f"{name} has embeddings of type {type(table).__name__}, which cannot be quantised; pass "
            "quantize_embeddings='none'"
        )
    if quantization.embeddings == "4w" and is_tied(model):
        raise UnsupportedModelError(
            f"the head of {name} is tied to its embeddings, and their kernels pack 4 bits differently; use "
            "quantize_embeddings='8w'"
        )
    if quantization.largest_group is not None:
        _check_rows(model, quantization, linears)
    grouped = quantization.block is not None
    rows: dict[str, Any] = dict(linears) if grouped else {}
    if grouped and isinstance(head, nn.Linear) and not is_tied(model):
        rows["its head"] = head
    lengths = {path: module.weight.shape[1] for path, module in rows.items()}
    if quantization.experts is not None and grouped:
        for path, module in experts_of(model):
            lengths |= {f"{path}.{name}": rows_of_weight(module, name).shape[2] for name in projections(module)}
    if quantization.linear == FLOAT4_SCHEME:
        for path, length in lengths.items():
            if length % FLOAT4_BLOCK:
                raise InputError(
                    f"quantize must be a scheme whose blocks divide the rows of {path} of {name}, {length} weights "
                    f"long, got {FLOAT4_SCHEME!r} with blocks of {FLOAT4_BLOCK}; use quantize='8w', which has none"
                )
        rows, lengths = {}, {}
    size = quantization.group_size or DEFAULT_GROUP_SIZE
    if quantization.embeddings == "4w":
        lengths |= _table_rows(model)
    for path, length in lengths.items():
        if length % size:
            # Of all rows, because a size that divides this one's may not divide others.
            common, largest = math.gcd(*lengths.values()), quantization.largest_group
            most = common if largest is None else math.gcd(common, largest)
            fitting = [fit for fit in range(GROUP_MULTIPLE, most + 1, GROUP_MULTIPLE) if most % fit == 0]
            remedy = f"use a group_size of {' or '.join(map(str, fitting))} (--group-size)"
            if not fitting:
                without = [f"quantize='{'8w' if quantization.linear == '4w' else '8da8w'}'"] if rows else []
                without += ["quantize_embeddings='8w'"] if quantization.embeddings == "4w" else []
                remedy = f"use {' and '.join(without)}, which {'has' if len(without) == 1 else 'have'} no groups"
                if quantization.experts == NATIVE_EXPERTS and any(experts_of(model)):
                    remedy += ", and leaves the experts in float"
                if largest is not None:
                    remedy = "leave quantize out, or export for another target"
            raise InputError(
                f"group_size must divide the rows of {path} of {name}, {length} weights long, got {size}; {remedy}"
            )


def _table_rows(model: PreTrainedModel) -> dict[str, int]:
    """Return the lengths of the rows of embedding tables, by a name for messages."""
    names = ("its embeddings", "its embeddings for all layers")
    return {name: _weight(table).shape[1] for name, table in zip(names, token_tables(model), strict=False)}


def _check_rows(model: PreTrainedModel, quantization: Quantization, linears: Mapping[str, nn.Linear]) -> None:
    """Check that rows of 8-bit weights can be stored in groups."""
    lengths = {path: linear.in_features for path, linear in linears.items()} if quantization.linear == "8w" else {}
    if quantization.embeddings == "8w":
        lengths |= _table_rows(model)
    if quantization.experts == "8w":
        for path, module in experts_of(model):
            lengths |= {f"{path}.{name}": rows_of_weight(module, name).shape[2] for name in projections(module)}
    for path, length in lengths.items():
        if length % GROUP_MULTIPLE:
            raise UnsupportedModelError(
                f"the rows of {path} of {type(model).__name__} must be a multiple of {GROUP_MULTIPLE} weights long to "
                f"be stored in groups, got {length}; leave quantize out, or export for another target"
            )


@dataclass(frozen=True)
class QuantizedModel:
    """A quantised copy of a model.

    Attributes:
        model: Model that computes in eager mode with a target's rounding, and exports to integer weights.
        weights_bytes: Bytes of its weights as a target stores them, with scales: tied weights once, two 4-bit weights
            per byte.
        kept: Bytes of each weight that keeps its integers, by name; empty unless they are kept.
        remark: One line about layers whose integers are not kept; empty if all are.
    """

    model: PreTrainedModel
    weights_bytes: int
    kept: Mapping[str, int] = field(default_factory=dict)
    remark: str = ""


@torch.no_grad()
def quantize(
    model: PreTrainedModel,
    quantization: Quantization,
    scratch: Scratch | None = None,
    dtype: torch.dtype = torch.float32,
    stored: Mapping[str, IntegerWeight] | None = None,
    calibration: Calibration | None = None,
) -> QuantizedModel:
    """Quantise a copy of a model; only one weight at a time is converted to float32.

    Args:
        model: A model of any float dtype.
        quantization: The schemes.
        scratch: File storage for the integers, which take a byte each, also with 4 bits; None for memory.
        dtype: Dtype that the quantised model computes in. Scales have it too, except those of "8da4w".
        stored: Integers of the checkpoint by the names of the model's parameters, for "keep".
        calibration: Text for schemes in `CALIBRATED_SCHEMES`, in which the effect is recorded; None for no text.

    Raises:
        OSError: If the disk is full.
        InputError: See `check_quantizable`.
        UnsupportedModelError: See `check_quantizable`; or if inputs or weights of a layer in float8 are not finite.
    """
    check_quantizable(model, quantization)
    prepare_model(model)
    tied = is_tied(model)
    original = model
    model = _copy_with_new_parameters(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.quantization.granularity import PerAxis, PerGroup
        from torchao.quantization.quant_api import Int8DynamicActivationIntxWeightConfig, IntxWeightOnlyConfig
        from torchao.utils import unwrap_tensor_subclass

    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    groups = {4: PerGroup(quantization.group_size or DEFAULT_GROUP_SIZE), 8: PerAxis(0)}
    dtypes = {4: _INT4, 8: torch.int8}
    if quantization.linear == FLOAT8_SCHEME:
        # First, because inputs are measured before other weights are rounded.
        linears = list(quantizable_linears(model, quantization.block).values())
        largest = _largest_inputs(model, linears, calibration)
        _replace(model, largest, lambda linear: Float8Linear(linear, largest[linear], dtype))
    if quantization.linear == FLOAT4_SCHEME:
        factors = _factors(model, list(quantizable_linears(model, quantization.block).values()))
        _replace(model, factors, lambda linear: Float4Linear(linear, factors[linear], FLOAT4_BLOCK, dtype))
    if quantization.embeddings is not None:
        bits = EMBEDDING_SCHEMES[quantization.embeddings]
        for one in token_tables(model):
            # Because encoder-decoders share one table between several modules.
            readers = [each for each in model.modules() if isinstance(each, nn.Embedding) and each.weight is one.weight]
            if bits == 4 and quantization.scales != "absmax":
                # Signed, because the embedding kernel takes scales of either sign.
                rounded = _rounded(_weight(one), quantization, torch.float32, True, scratch)
                _set_groups(one, rounded, quantization, dtype)
            else:
                config = IntxWeightOnlyConfig(weight_dtype=dtypes[bits], granularity=groups[bits])
                _quantize_weight(one, config, dtype, scratch)
            for reader in readers:
                reader.weight = _weight(one)
    kept: Mapping[str, int] = {}
    remark = ""
    if quantization.linear == KEEP_SCHEME:
        kept, remark = _keep(model, KEPT_FORMS[quantization.kept or "affine"], dtype, stored or {})
    if quantization.linear not in (None, FLOAT8_SCHEME, FLOAT4_SCHEME, KEEP_SCHEME):
        bits, dynamic = LINEAR_SCHEMES[quantization.linear or ""]
        if dynamic:
            config = Int8DynamicActivationIntxWeightConfig(
                weight_dtype=dtypes[bits],
                weight_granularity=groups[bits],
                # Because XNNPACK keeps scales of groups in bfloat16, so eager mode computes with the same values.
                weight_scale_dtype=torch.bfloat16 if bits == 4 else None,
            )
        else:
            config = IntxWeightOnlyConfig(weight_dtype=dtypes[bits], granularity=groups[bits])
        fitted = bits == 4 and quantization.scales != "absmax"
        # Of the original, because tables of the copy are quantized by now, and no longer tied.
        paths = list(quantizable_linears(original, quantization.block))
        measured = (
            products_of(original, paths, calibration) if calibration and fitted else ((path, None) for path in paths)
        )
        signed = quantization.scales == "signed_mse"
        # Native operators, which alone take signed scales, store bfloat16 scales in 16 bits.
        scale_dtype = torch.bfloat16 if dynamic or signed else dtype
        for path, products in measured:
            module = model.get_submodule(path)
            if not fitted:
                _quantize_weight(module, config, dtype, scratch)
                continue
            rounded = _rounded(_weight(module), quantization, scale_dtype, signed, scratch)
            if calibration is not None and products is not None:
                rounded = _calibrated(_weight(module), rounded, quantization, signed, (calibration, products))
            _set_groups(module, rounded, quantization, dtype)
    if quantization.experts is not None:
        for path, module in experts_of(model):
            for name in projections(module):
                if quantization.experts in (FLOAT8_SCHEME, FLOAT4_SCHEME):
                    _check_finite(getattr(module, name), f"{path}.{name}", model)
                _quantize_experts(module, name, quantization, dtype, scratch)
        if any(experts_of(model)):
            use_expert_linears(model)
    if tied and is_quantized(weight := _weight(table)):
        head.weight = nn.Parameter(_as_linear(weight, quantization), requires_grad=False)
    _convert_others(model, dtype)
    for config in (model.config, model.config.get_text_config(decoder=True)):
        config.dtype = dtype
    # Before unwrapping, because unwrapped 4-bit weights take a byte each.
    weights_bytes = _stored_bytes(model, quantization)
    return QuantizedModel(unwrap_tensor_subclass(model), weights_bytes, kept, remark)


def _keep(
    model: PreTrainedModel, form: KeptForm, dtype: torch.dtype, stored: Mapping[str, IntegerWeight]
) -> tuple[dict[str, int], str]:
    """Give linear layers the integers of a checkpoint, and return their bytes with a line about other layers.

    Raises:
        InputError: If no layer's integers can be kept.
    """
    from torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor import (
        IntxUnpackedToInt8Tensor,
        IntxUnpackedToInt8TensorActivationQuantization,
    )

    rounding = IntxUnpackedToInt8TensorActivationQuantization.INT8_ASYM_PER_TOKEN if form.rounds else None
    table = model.get_input_embeddings()
    readers = [one for one in model.modules() if isinstance(one, nn.Embedding) and one.weight is table.weight]
    # An encoder looks up rows without a head, by operators that have no zero points.
    is_shared = is_tied(model) and not model.config.is_encoder_decoder
    kept: dict[str, int] = {}
    left: dict[str, list[str]] = {}
    for path, module in list(model.named_modules()):
        name = f"{path}.weight"
        weight = stored.get(name)
        is_table = module is table
        if weight is None or not (is_table or isinstance(module, nn.Linear)):
            continue
        # The kernels of tables have scales in the dtype of their rows.
        of_form = {"bfloat16": torch.bfloat16, "program": dtype}.get(form.scales, weight.scales.dtype)
        scale_dtype = dtype if is_table else of_form
        problem = (_unkept_table(weight, form, is_shared) if is_table else "") or _unkept(
            weight, form, scale_dtype, dtype
        )
        if problem:
            left.setdefault(problem, []).append(path)
            continue
        zeros = torch.zeros_like(weight.scales, dtype=torch.int8) if weight.zero_points is None else weight.zero_points
        zeros = zeros.to(dtype) if zeros.is_floating_point() else zeros
        of = (_INT4 if weight.bits <= 4 else torch.int8, (1, weight.size), dtype, rounding)
        tensor = IntxUnpackedToInt8Tensor(weight.integers.contiguous(), weight.scales.to(scale_dtype), zeros, *of)
        parameter = nn.Parameter(tensor, requires_grad=False)
        for reader in readers if is_table else [module]:
            reader.weight = parameter
        if weight.order is not None:
            parent, _, last = path.rpartition(".")
            setattr(model.get_submodule(parent), last, OrderedLinear(module, weight.order))
        scales = tensor.scale.nbytes + (0 if weight.zero_points is None else zeros.nbytes)
        kept[name] = weight.integers.numel() * (4 if weight.bits <= 4 else 8) // 8 + scales
    reasons = "; ".join(f"{len(paths)} layers, such as {paths[0]}, because {why}" for why, paths in left.items())
    if not kept:
        raise InputError(NOTHING_TO_KEEP.format(reasons or "none"))
    return kept, f"kept the integers of {len(kept)} layers; stored in {dtype_name(dtype)}: {reasons}" if reasons else ""


def _unkept_table(weight: IntegerWeight, form: KeptForm, is_shared: bool) -> str:
    """Return why a target does not store an embedding table in this form, or an empty string."""
    if form.tied and is_shared:
        return ""
    if not form.tables or weight.bits <= 4:
        return f"the target stores no embedding table of {weight.bits} bits in this form"
    return "it is an embedding table with zero points" if weight.zero_points is not None else ""


def _unkept(weight: IntegerWeight, form: KeptForm, scale_dtype: torch.dtype, dtype: torch.dtype) -> str:
    """Return why a target does not store integers in this form, or an empty string."""
    inputs, groups = weight.integers.shape[1], weight.scales.shape[1]
    if weight.bits not in form.bits:
        return f"they have {weight.bits} bits"
    if weight.zero_points is not None and not form.zero_points:
        return "they have zero points"
    if groups * weight.size != inputs:
        return f"groups of {weight.size} do not divide {inputs} inputs"
    if groups > 1 and weight.bits not in form.grouped:
        return f"integers of {weight.bits} bits have several scales a row"
    if weight.size % form.multiple:
        return f"groups of {weight.size} are not a multiple of {form.multiple}"
    # XNNPACK takes positive scales only.
    if form.rounds and not bool((weight.scales > 0).all()):
        return "a scale is not positive"
    if weight.zero_points is not None and weight.zero_points.is_floating_point() and dtype != torch.float32:
        return f"{dtype_name(dtype)} does not hold zero points in float32 exactly"
    if not torch.equal(weight.scales.to(scale_dtype).float(), weight.scales.float()):
        return f"{dtype_name(scale_dtype)} does not hold scales in {dtype_name(weight.scales.dtype)} exactly"
    return ""


def _largest_inputs(
    model: PreTrainedModel, linears: list[nn.Linear], calibration: Calibration | None
) -> dict[nn.Linear, float]:
    """Measure the largest magnitude of the inputs of linear layers, on a text or on random tokens.

    Layers that no token of text passes through are left out.

    Raises:
        UnsupportedModelError: If an input is infinite or not a number, or the model is an encoder-decoder.
    """
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"quantize must not be {FLOAT8_SCHEME!r} for encoder-decoders such as {type(model).__name__}, because the "
            "inputs of their layers are measured on text alone; use quantize='8w'"
        )
    found: dict[nn.Linear, float] = {}
    paths = {module: path for path, module in model.named_modules()}

    def note(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        assert isinstance(module, nn.Linear)
        largest = inputs[0].abs().max().item()
        if not math.isfinite(largest):
            raise UnsupportedModelError(
                f"the inputs of {paths[module]} of {type(model).__name__} must be finite to be rounded to float8, got "
                f"{largest}: the model overflows in {dtype_name(model.dtype)}, or its weights are damaged; load it in "
                "float32, or load the weights again"
            )
        found[module] = max(found.get(module, 0.0), largest)

    _run(model, linears, note, [_random_tokens(model, _CALIBRATION)] if calibration is None else calibration.sequences)
    return found


def _random_tokens(model: PreTrainedModel, size: tuple[int, int]) -> torch.Tensor:
    return torch.randint(vocab_size_of(model), size, generator=torch.Generator().manual_seed(0))


def _run(
    model: PreTrainedModel,
    linears: list[nn.Linear],
    note: Callable[[nn.Module, tuple[torch.Tensor, ...]], None],
    sequences: Sequence[torch.Tensor],
) -> None:
    """Run a model on tokens, and call `note` with each of its linear layers and their inputs."""
    hooks = [module.register_forward_pre_hook(note) for module in linears]
    try:
        for ids in sequences:
            model(input_ids=ids.to(model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()


def _factors(model: PreTrainedModel, linears: list[nn.Linear]) -> dict[nn.Linear, float]:
    """Return the factor of the scales of each layer in NVFP4, by `float4_factor`.

    Layers that read the same inputs, such as those of queries, keys and values, share it, so that they are one product.
    Checkpoints in NVFP4 have it so, too.
    """
    groups: list[list[nn.Linear]] = []
    last: list[torch.Tensor | None] = [None]
    seen: set[nn.Module] = set()

    def note(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if module not in seen:
            assert isinstance(module, nn.Linear)
            groups[-1:] = [*groups[-1:], []] if inputs[0] is not last[0] or not groups else groups[-1:]
            groups[-1].append(module)
            seen.add(module)
        last[0] = inputs[0]

    if not model.config.is_encoder_decoder:
        _run(model, linears, note, [_random_tokens(model, _FEW_TOKENS)])
    groups += [[linear] for linear in linears if linear not in seen]
    return {
        linear: float4_factor(max(_weight(one).abs().max().item() for one in group))
        for group in groups
        for linear in group
    }


def _replace(model: PreTrainedModel, linears: Collection[nn.Linear], make: Callable[[nn.Linear], nn.Linear]) -> None:
    """Replace linear layers of a model."""
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and child in linears:
                _check_finite(_weight(child), f"{path}.{name}".lstrip("."), model)
                setattr(parent, name, make(child))


def _check_finite(weight: torch.Tensor, layer: str, model: nn.Module) -> None:
    if not weight.isfinite().all():
        raise UnsupportedModelError(
            f"the weights of {layer} of {type(model).__name__} must be finite to be rounded to floats of fewer bits; "
            "they are damaged: load them again"
        )


def _copy_with_new_parameters(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model with new parameters that share the memory of the original's."""
    shared = {id(parameter): nn.Parameter(parameter.detach(), requires_grad=False) for parameter in model.parameters()}
    return copy.deepcopy(model, shared)


def _weight(module: nn.Module) -> torch.Tensor:
    """Return the weight of a linear layer or a table."""
    assert isinstance(module.weight, torch.Tensor)
    return module.weight


def _quantize_weight(module: nn.Module, config: Any, dtype: torch.dtype, scratch: Scratch | None) -> None:
    """Replace the weight of a module by integers and scales."""
    weight = _weight(module)
    whole = None if scratch is None else scratch.empty(weight.shape, torch.int8)
    module.weight = nn.Parameter(_quantized_rows(weight, config, dtype, whole), requires_grad=False)


def _quantized_rows(weight: torch.Tensor, config: Any, dtype: torch.dtype, out: torch.Tensor | None) -> QuantizedWeight:
    """Quantise a weight [rows, columns] a few rows at a time, with its integers in `out` if that is given.

    Rows have separate scales, so the result is the same. torchao passes over a weight about twenty times, which takes a
    tenth of the time if the rows stay in the processor's cache (AMD EPYC, AVX-512).
    """
    rows = max(1, _ELEMENTS_AT_ONCE // weight.shape[1])
    integers = torch.empty(weight.shape, dtype=torch.int8) if out is None else out
    scales, zero_points = [], []
    with one_thread():
        for some, into in zip(weight.detach().split(rows), integers.split(rows), strict=True):
            part = _quantized(some.float(), config, dtype)
            into.copy_(part.qdata)
            # Freed at once, because a view would keep the memory, and so would the tensor until cycles are collected.
            part.qdata = part.qdata.new_empty(0)
            scales.append(part.scale)
            zero_points.append(part.zero_point)
    form = (part.target_dtype, part.block_size, dtype, part.activation_quantization)
    return type(part)(integers, torch.cat(scales), torch.cat(zero_points), *form)


def _rounded(
    weight: torch.Tensor, quantization: Quantization, scale_dtype: torch.dtype, signed: bool, scratch: Scratch | None
) -> RoundedGroups:
    return round_groups(weight, quantization.group_size or DEFAULT_GROUP_SIZE, scale_dtype, signed, scratch)


def _calibrated(
    weight: torch.Tensor,
    plain: RoundedGroups,
    quantization: Quantization,
    signed: bool,
    measured: tuple[Calibration, Products],
) -> RoundedGroups:
    """Return a weight rounded with error feedback, or the plain rounding if that is nearer on held-out text."""
    calibration, products = measured
    size, scales = quantization.group_size or DEFAULT_GROUP_SIZE, plain.scales
    fitted = round_with_feedback(weight, size, scales.dtype, signed, products.of_text)
    if fitted is None or calibration.better(weight, products, plain, fitted) is plain:
        return plain
    # Into the same memory, which may be that of a file.
    plain.integers.copy_(fitted.integers)
    return RoundedGroups(plain.integers, fitted.scales)


def _set_groups(module: nn.Module, rounded: RoundedGroups, quantization: Quantization, dtype: torch.dtype) -> None:
    """Replace the weight of a module by torchao's 4-bit weight, which is dequantised to `dtype`."""
    from torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor import (
        IntxUnpackedToInt8Tensor,
        IntxUnpackedToInt8TensorActivationQuantization,
    )

    size = quantization.group_size or DEFAULT_GROUP_SIZE
    integers, scales = rounded
    zeros = torch.zeros(scales.shape, dtype=torch.int8)
    dynamic = isinstance(module, nn.Linear) and quantization.linear is not None
    rounds = dynamic and LINEAR_SCHEMES[quantization.linear or ""][1]
    rounding = IntxUnpackedToInt8TensorActivationQuantization.INT8_ASYM_PER_TOKEN if rounds else None
    form = (_INT4, (1, size), dtype, rounding)
    module.weight = nn.Parameter(IntxUnpackedToInt8Tensor(integers, scales, zeros, *form), requires_grad=False)


def _quantize_experts(
    module: nn.Module, name: str, quantization: Quantization, dtype: torch.dtype, scratch: Scratch | None
) -> None:
    """Replace a weight of experts by quantised ones, one expert at a time, in the scheme of linear layers.

    In float8, all experts of a weight share a factor, because TensorRT stores 16 bits if each row has a scale.
    """
    from torchao.quantization.granularity import PerAxis
    from torchao.quantization.quant_api import IntxWeightOnlyConfig

    scheme, block = quantization.experts, quantization.block
    _, rounds = LINEAR_SCHEMES[scheme or ""]
    weight = rows_of_weight(module, name)
    groups = 1 if block is None else weight.shape[2] // block
    shape, kind, scale_dtype, factor = [*weight.shape], torch.int8, torch.bfloat16 if rounds else dtype, 1.0
    if scheme in (FLOAT8_SCHEME, FLOAT4_SCHEME):
        kind, largest = torch.uint8, weight.abs().max().item()
        factor = float8_factor(largest) if scheme == FLOAT8_SCHEME else float4_factor(largest)
    if scheme == FLOAT4_SCHEME:
        shape[2], scale_dtype = shape[2] // 2, torch.uint8
    integers = (torch.empty if scratch is None else scratch.empty)(shape, dtype=kind)
    scales = None if scheme == FLOAT8_SCHEME else torch.empty(*weight.shape[:2], groups, dtype=scale_dtype)
    by_row = IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0))
    for expert, rows in enumerate(weight):
        if scales is None:
            integers[expert] = float8_bits(rows, factor)
        elif scheme == FLOAT4_SCHEME:
            integers[expert], scales[expert] = rounded_blocks(rows, factor, FLOAT4_BLOCK)
        elif block is not None:
            signed = quantization.scales == "signed_mse"
            integers[expert], scales[expert] = round_groups(rows, block, scale_dtype, signed)
        else:
            found = _quantized_rows(rows, by_row, dtype, integers[expert])
            scales[expert] = found.scale.reshape(-1, 1)
    set_quantized(module, name, integers, scales, rounds, factor)


def _quantized(rows: torch.Tensor, config: Any, dtype: torch.dtype) -> QuantizedWeight:
    """Quantise rows in float32, with scales of a dtype."""
    from torchao.quantization.quant_api import quantize_

    holder = nn.Linear(1, 1, bias=False)
    holder.weight = nn.Parameter(rows, requires_grad=False)
    quantize_(holder, config, lambda *_: True)
    found = cast("QuantizedWeight", holder.weight)
    if dtype != torch.float32 and found.target_dtype == torch.int8:
        # Rounded again, because an integer times the scale before its conversion is another weight.
        found.scale = found.scale.clamp(min=torch.finfo(dtype).smallest_normal).to(dtype)
        least, most = torch.iinfo(torch.int8).min, torch.iinfo(torch.int8).max
        found.qdata = (rows / found.scale.float()).round_().clamp_(least, most).to(torch.int8)
    return found


def _convert_others(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert unquantised parameters and buffers to a dtype; tied parameters stay tied.

    Buffers in float32 keep it, because models compute their frequencies of rotary positions in it.
    """
    converted: dict[int, nn.Parameter] = {}
    keeps = keeps_float32(model, dtype)
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_floating_point() and not is_quantized(parameter) and not is_expert_scale(module, name):
                stays = parameter.dtype == torch.float32 and keeps(f"{path}.{name}")
                wanted = torch.float32 if stays else dtype
                new = converted.setdefault(id(parameter), nn.Parameter(parameter.to(wanted), requires_grad=False))
                setattr(module, name, new)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and buffer.dtype != torch.float32:
                setattr(module, name, buffer.to(dtype))


def _as_linear(table: QuantizedWeight, quantization: Quantization) -> torch.Tensor:
    """Return a table's weight as one of a linear layer that shares its tensors and computes by a quantisation."""
    from torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor import (
        IntxUnpackedToInt8TensorActivationQuantization,
    )

    # If only embeddings are quantised, the head has 8-bit activations too, because devices have no fast kernel for
    # 8-bit weights alone. Neither have the native operators that take signed scales.
    scheme = quantization.linear
    dynamic = scheme is None or LINEAR_SCHEMES[scheme][1] or quantization.scales == "signed_mse"
    activations = IntxUnpackedToInt8TensorActivationQuantization.INT8_ASYM_PER_TOKEN if dynamic else None
    return type(table)(
        table.qdata, table.scale, table.zero_point, table.target_dtype, table.block_size, table.dtype, activations
    )


def _stored_bytes(model: nn.Module, quantization: Quantization) -> int:
    stored: dict[int, int] = {}
    expert_bits, _ = LINEAR_SCHEMES[quantization.experts or "8w"]
    for parameter in model.parameters():
        if is_quantized(parameter):
            bits = 4 if parameter.target_dtype == _INT4 else 8
            zeros = parameter.zero_point
            # Zero points that are all zero are stored by no target.
            parts = parameter.scale.nbytes + (zeros.nbytes if zeros is not None and bool(zeros.any()) else 0)
            if bits == 8:
                parts *= parameter.shape[1] // quantization.stored_group(parameter.shape[1])
            stored[parameter.qdata.data_ptr()] = parameter.qdata.numel() * bits // 8 + parts
        else:
            # Integers of experts, two per byte with 4 bits.
            packed = 8 // expert_bits if parameter.dtype == torch.int8 else 1
            stored[parameter.data_ptr()] = parameter.nbytes // packed
    if quantization.experts is not None and quantization.largest_group is not None:
        for _, module in experts_of(model):
            for integers, scale, *_ in (parts_of(module, name) for name in projections(module)):
                assert scale is not None
                row = integers.shape[2]
                group = row // scale.shape[2] if expert_bits == 4 else quantization.stored_group(row)
                # A bias with each scale.
                stored[scale.data_ptr()] = 2 * integers.numel() // group * scale.itemsize
    return sum(stored.values())
