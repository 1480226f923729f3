"""Rotary embeddings: frequencies that depend on the length of each row, and real instead of complex numbers.

| function | models | upstream (v5.23.0, src/transformers) |
|---|---|---|
| `dynamic_rope_update` around the `forward` of a rotary embedding | 177 modeling files | modeling_rope_utils.py |
| `PhimoeRotaryEmbedding.forward` | PhiMoE | models/phimoe/modeling_phimoe.py |

The original uses the largest position of a call over all rows, and keeps the result on the module. So the frequencies
of a row depend on other rows, on the chunks of its prompt, and on earlier sequences. Dynamic NTK also branches on
data, which tracers reject. Inside `rope_by` the original gets frequencies, [batch, 1, dim / 2], computed from the
lengths of the rows. Outside, it is unchanged.

`Llama4TextRotaryEmbedding` and `DeepseekV2RotaryEmbedding` use complex numbers, for which ExecuTorch and Inductor's C++
have no operators. When traced, they return cosines and sines, and `apply_rotary_emb(xq, xk, freqs_cis)` of the same
file rotates by them; otherwise both are the originals (tests/patches/test_rotary.py).

`fix_rope` keeps the factors of one length for every sequence, as llama.cpp and vLLM do. A program whose runner does not
know the lengths of its rows can then hold more tokens than the threshold.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ....common.patch import Patch
from ....errors import InputError, UnsupportedModelError
from ...positions import LONGROPE, changing, parameters_of, prefix, rope_rule
from ...weights import sharing_weights

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2RotaryEmbedding
    from transformers.models.llama4.modeling_llama4 import Llama4TextRotaryEmbedding

    _Rotary: TypeAlias = DeepseekV2RotaryEmbedding | Llama4TextRotaryEmbedding


#: Line about a model of `fix_rope`.
ROPE_REMARK = "RoPE has the factors of sequences of {:,} tokens at every length"
#: Of transformers 5.20, which replaces the buffer of frequencies by the long ones, in float32.
_REPLACES = "09d51d7a784c1bb7"
#: Of later releases, which copy the long frequencies to the buffer, in its dtype.
_COPIES = "08325dbe8de5e5f0"
_PHIMOE_NAME = "PhimoeRotaryEmbedding"
_PHIMOE = ("b9c85539c82b68e8", "abfb30d6df52d9eb")
_REASON = "it selects frequencies by the largest position of a call, for all rows, and keeps them for later calls"
#: Attribute of a replacement that supports `rope_by`.
_FOLLOWS = "_exportable_cache_rope_by"
#: Attribute of a rotary embedding with frequencies from its config, computed once instead of in every step.
_KEPT = "_exportable_cache_{}frequencies"
#: Attribute of a rotary embedding: True if long frequencies have the dtype of its buffer.
_IS_CAST = "_exportable_cache_is_cast"


class _Lengths(threading.local):
    """Thread-local lengths of a step, see `scans._Longest`.

    Attributes:
        is_step: True inside `rope_by`.
        lengths: int64 [batch]; None if no row can pass a border.
    """

    def __init__(self) -> None:
        self.is_step = False
        self.lengths: torch.Tensor | None = None


_step = _Lengths()


@contextmanager
def rope_by(lengths: torch.Tensor | None) -> Iterator[None]:
    """Select the frequencies of RoPE by the length of each row inside the block.

    Args:
        lengths: int64 [batch], see `RopeRule.after`; None if no row can pass a border.
    """
    before = _step.is_step, _step.lengths
    _step.is_step, _step.lengths = True, lengths
    try:
        yield
    finally:
        _step.is_step, _step.lengths = before


class _Static:
    """A view of a rotary embedding with other, constant frequencies, for its `forward`.

    Args:
        module: The rotary embedding.
        layer_type: Layer type of the frequencies; None for all layers.
        inv_freq: [batch, 1, dim / 2].
    """

    def __init__(self, module: nn.Module, layer_type: str | None, inv_freq: torch.Tensor) -> None:
        self._module = module
        self.rope_type = "default" if layer_type is None else {layer_type: "default"}
        setattr(self, f"{prefix(layer_type)}inv_freq", inv_freq)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def by_lengths(original: Callable) -> Callable:
    """Create a `forward` that supports `rope_by`; it is the original outside it, and for constant layers."""

    def forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        further = {} if layer_type is None else {"layer_type": layer_type}
        kind = self.rope_type if layer_type is None else self.rope_type[layer_type]
        if not _step.is_step or not ("dynamic" in kind or kind == LONGROPE):
            return original(self, x, position_ids, **further)
        return original(_Static(self, layer_type, _inv_freq(self, kind, layer_type)), x, position_ids, **further)

    forward = torch.no_grad()(forward)
    setattr(forward, _FOLLOWS, True)
    return forward


@dataclass(frozen=True)
class ChangingFrequencies:
    """Inverse frequencies and scale of a rotary embedding by the length of a sequence.

    Attributes:
        border: Longest length with the frequencies of short sequences.
        short: Frequencies up to the border, [dim / 2].
        longer: Frequencies past it, [dim / 2]; None for dynamic NTK, which computes them from the length.
        theta: Base of dynamic NTK.
        factor: Factor of dynamic NTK.
        scales: Factor of the rotated rows up to the border, and past it.
    """

    border: int
    short: torch.Tensor
    longer: torch.Tensor | None = None
    theta: float = 1.0
    factor: float = 1.0
    scales: tuple[float, float] = (1.0, 1.0)

    @classmethod
    def of(cls, module: Any, layer_type: str | None, kind: str) -> ChangingFrequencies:
        """Return those of a patched rotary embedding, see `changing`."""
        short, parameters = getattr(module, f"{prefix(layer_type)}original_inv_freq"), parameters_of(module, layer_type)
        if kind != LONGROPE:
            return cls(module.original_max_seq_len, short, None, parameters["rope_theta"], parameters["factor"])
        border = parameters["original_max_position_embeddings"]
        if type(module).__name__ == _PHIMOE_NAME:
            # Its frequencies are constant: the length chooses the scale only.
            always = getattr(module, _KEPT.format("short_"))
            return cls(border, always, always, scales=(parameters["short_mscale"], parameters["long_mscale"]))
        longer = getattr(module, _KEPT.format(f"{prefix(layer_type)}long_"))
        return cls(border, short, longer.to(short.dtype) if getattr(module, _IS_CAST) else longer)

    def to(self, device: torch.device) -> ChangingFrequencies:
        """Return the same frequencies on a device."""
        longer = None if self.longer is None else self.longer.to(device)
        return replace(self, short=self.short.to(device), longer=longer)

    def at(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return the frequencies for lengths int64 [..., 1], [..., dim / 2]."""
        if self.longer is not None:
            return torch.where(lengths > self.border, self.longer, self.short)
        # As `_compute_dynamic_ntk_parameters`, for several lengths.
        border, half = self.border, self.short.shape[-1]
        grown = (self.factor * lengths.clamp(min=border) / border) - (self.factor - 1)
        base = self.theta * grown ** (2 * half / (2 * half - 2))
        exponents = torch.arange(0, 2 * half, 2, dtype=torch.int64, device=self.short.device).float() / (2 * half)
        return torch.where(lengths > border, 1.0 / (base**exponents), self.short.float())

    def scale(self, lengths: torch.Tensor) -> torch.Tensor | float:
        """Return the scale for lengths int64 [...]."""
        below, above = map(float, self.scales)
        return below if below == above else torch.where(lengths > self.border, above, below)


def _inv_freq(module: Any, kind: str, layer_type: str | None) -> torch.Tensor:
    """Return inverse frequencies, [dim / 2] or [batch, 1, dim / 2]."""
    if _step.lengths is None:
        return getattr(module, f"{prefix(layer_type)}original_inv_freq")
    return ChangingFrequencies.of(module, layer_type, kind).at(_step.lengths[:, None, None])


def phimoe_by_lengths(original: Callable) -> Callable:
    """Create PhiMoE's `forward`: frequencies of short sequences for every length, and a scale per row."""

    def forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not _step.is_step or self.rope_type != LONGROPE:
            return original(self, x, position_ids)
        frequencies, lengths = ChangingFrequencies.of(self, None, LONGROPE), _step.lengths
        angles = position_ids[..., None].float() * frequencies.short
        angles = torch.cat((angles, angles), dim=-1)
        scale = frequencies.scales[0] if lengths is None else frequencies.scale(lengths[:, None, None])
        return (angles.cos() * scale).to(x.dtype), (angles.sin() * scale).to(x.dtype)

    forward = torch.no_grad()(forward)
    setattr(forward, _FOLLOWS, True)
    return forward


def patch_rope(model: nn.Module) -> set[str]:
    """Patch the rotary embeddings of a model that change with the length.

    Embeddings of custom code are left unchanged, see `check_follows`.

    Returns:
        Labels of the patches.

    Raises:
        UnsupportedModelError: If the original has changed.
    """
    labels = set()
    for module, layer_type, kind in changing(model):
        if not _is_from_transformers(type(module)):
            continue
        patch = _patch_of(type(module))
        if not hasattr(type(module).forward, _FOLLOWS):
            patch.apply()
        if kind == LONGROPE:
            _keep(module, layer_type)
            setattr(module, _IS_CAST, patch.digest() != _REPLACES)
        labels.add(patch.label)
    return labels


def check_follows(model: nn.Module) -> None:
    """Check that all changing rotary embeddings of a model support `rope_by`.

    Raises:
        UnsupportedModelError: If one does not.
    """
    for module, _, kind in changing(model):
        if not hasattr(type(module).forward, _FOLLOWS):
            raise UnsupportedModelError(
                f"{type(module).__module__}.{type(module).__name__} is not a class of transformers, and its RoPE "
                f"({kind}) changes with the largest position of a call; use transformers' class "
                "(trust_remote_code=False), a max_cache_len before the change, or DynamicCache"
            )


def _is_from_transformers(rotary: type) -> bool:
    file = sys.modules[rotary.__module__]
    return rotary.__module__.startswith("transformers.models.") and hasattr(file, "dynamic_rope_update")


def _patch_of(rotary: type) -> Patch:
    file, name = rotary.__module__.removeprefix("transformers.models."), f"{rotary.__name__}.forward"
    if rotary.__name__ == _PHIMOE_NAME:
        return Patch(file, name, phimoe_by_lengths, _REASON, _PHIMOE)
    return Patch(file, name, by_lengths, _REASON, (_COPIES, _REPLACES), source="dynamic_rope_update")


def _keep(module: Any, layer_type: str | None) -> None:
    """Keep the frequencies of both sides of the border, on the device of the module."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    device = getattr(module, f"{prefix(layer_type)}original_inv_freq").device
    border = parameters_of(module, layer_type)["original_max_position_embeddings"]
    for side, length in (("short_", border), ("long_", border + 1)):
        name = _KEPT.format(f"{prefix(layer_type)}{side}")
        if getattr(module, name, None) is None or getattr(module, name).device != device:
            further = {} if layer_type is None else {"layer_type": layer_type}
            found, _ = ROPE_INIT_FUNCTIONS[LONGROPE](module.config, device, seq_len=length, **further)
            setattr(module, name, found)


def _cosines_and_sines(original: Callable) -> Callable:
    def forward(self: _Rotary, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        # Embeddings that change with the length are constant here inside `rope_by`.
        if not torch.compiler.is_compiling() or "dynamic" in (self.rope_type or "") or self.rope_type == "longrope":
            return original(self, x, position_ids)
        angles = position_ids[..., None].float() * self.inv_freq.float()
        return torch.stack([torch.cos(angles), torch.sin(angles)], dim=-1) * self.attention_scaling

    return forward


def _by_lengths(original: Callable) -> Callable:
    return by_lengths(_cosines_and_sines(original))


def _rotated_by(heads: int) -> Callable[[Callable], Callable]:
    def patch(original: Callable) -> Callable:
        def apply_rotary_emb(xq: torch.Tensor, xk: torch.Tensor, freqs_cis: torch.Tensor, **kwargs: Any) -> tuple:
            if freqs_cis.is_complex():
                return original(xq, xk, freqs_cis, **kwargs)
            cos, sin = freqs_cis.unsqueeze(heads).unbind(-1)
            return _rotated(xq, cos, sin), _rotated(xk, cos, sin)

        return apply_rotary_emb

    return patch


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate neighbours in the last dimension of `x` [batch, _, _, dim] by angles [batch, _, _, dim // 2]."""
    even, odd = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(3).type_as(x)


_COMPLEX_REASON = (
    "its rotary embeddings are complex numbers, for which ExecuTorch and Inductor's code have no operators"
)


def _of_file(
    model: str, name: str, heads: int, of_class: tuple[str, ...], of_function: tuple[str, ...]
) -> tuple[Patch, ...]:
    """Create the patches of a file; `heads` is the dimension of heads in queries and keys."""
    file = f"{model}.modeling_{model}"
    return (
        Patch(file, f"{name}.forward", _by_lengths, _COMPLEX_REASON, of_class, source=name),
        Patch(file, "apply_rotary_emb", _rotated_by(heads), _COMPLEX_REASON, of_function),
    )


_LLAMA = _of_file(
    "llama4",
    "Llama4TextRotaryEmbedding",
    2,
    ("8ef5ce218b1c39f6", "5853a4b4bbed2d4a"),
    ("6449c30f36c9d1f4",),
)
_DEEPSEEK = _of_file(
    "deepseek_v2",
    "DeepseekV2RotaryEmbedding",
    1,
    ("b3340f5c8a939cad", "afca3c9f519b93a5"),
    ("e0760ae8e20f4090",),
)

PATCHES = {"llama4": _LLAMA, "llama4_text": _LLAMA, "deepseek_v2": _DEEPSEEK}


class _ConstantRotary(torch.nn.Module):
    """A rotary embedding with constant frequencies, for models whose own embedding computes them in every call.

    Args:
        inv_freq: Inverse frequencies, [dim / 2].
        scale: Factor of cosines and sines.
    """

    inv_freq: torch.Tensor

    def __init__(self, inv_freq: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.scale = scale

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [batch, length, dim] of positions [batch, length], in the dtype of `x`."""
        angles = position_ids[..., None].float() * self.inv_freq.float()
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.scale).to(x.dtype), (angles.sin() * self.scale).to(x.dtype)


@torch.no_grad()
def fix_rope(model: PreTrainedModel, length: int) -> PreTrainedModel:
    """Return a copy of a model, with shared weights, whose RoPE has the factors of `length` tokens at every position.

    Args:
        model: A model whose RoPE changes with the length.
        length: Sequence length that chooses the factors.

    Raises:
        InputError: If the factors of its RoPE are the same at every length.
        UnsupportedModelError: If its rotary embedding is not a class of transformers.
    """
    if rope_rule(model) is None:
        raise InputError(
            f"rope_length must be left out for {type(model).__name__}, whose RoPE has the same factors at every "
            f"length, got {length}; remove it"
        )
    model = sharing_weights(model)
    patch_rope(model)
    check_follows(model)
    names = {module: name for name, module in model.named_modules()}
    for module, layer_type, kind in list(changing(model)):
        found = ChangingFrequencies.of(module, layer_type, kind)
        lengths = torch.tensor([[length]], device=found.short.device)
        inv_freq, scale = found.at(lengths)[0], found.scales[length > found.border]
        if found.longer is found.short:
            # PhiMoE, which computes frequencies from its config in every call; the length chooses only the scale.
            model.set_submodule(names[module], _ConstantRotary(inv_freq, scale))
            continue
        is_one = layer_type is None
        module.rope_type = "default" if is_one else {**module.rope_type, layer_type: "default"}  # type: ignore[assignment,dict-item]
        for name in ("inv_freq", "original_inv_freq"):
            setattr(module, f"{prefix(layer_type)}{name}", inv_freq.clone())
    model.rope_length = length  # type: ignore[assignment]
    return model


def rope_length_of(model: nn.Module) -> int | None:
    """Return the length of `fix_rope`, or None."""
    return getattr(model, "rope_length", None)
