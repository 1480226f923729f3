"""Options of weight quantisation, checked before a model or torchao is imported.

This module does not import torch, because the command line builds its options from the fields.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple

from ...common.settings import check_settings, setting
from ...errors import InputError, MissingDependencyError

#: Scheme of weights and activations in float8.
FLOAT8_SCHEME = "fp8"
#: Scheme of weights in 4-bit floats, a float8 scale per block, and a float32 factor; and the weights of a block.
FLOAT4_SCHEME, FLOAT4_BLOCK = "nvfp4", 16
#: Scheme that stores the integers of a checkpoint unchanged.
KEEP_SCHEME = "keep"
#: Schemes of linear layers -> (bits of a weight, True if activations are quantised to 8 bits per token).
LINEAR_SCHEMES = {
    "8da4w": (4, True),
    "8da8w": (8, True),
    "8w": (8, False),
    "4w": (4, False),
    FLOAT8_SCHEME: (8, False),
    FLOAT4_SCHEME: (4, False),
    KEEP_SCHEME: (8, False),
}
#: Schemes whose rounding a text can calibrate: weights in groups, or the scales of inputs.
CALIBRATED_SCHEMES = ("8da4w", "4w", FLOAT8_SCHEME)
#: Schemes of embedding tables -> bits.
EMBEDDING_SCHEMES = {"8w": 8, "4w": 4}
#: Scheme of the table if linear layers are quantised, and the value that leaves it unquantised.
DEFAULT_EMBEDDINGS, NO_EMBEDDINGS = "8w", "none"
#: Schemes of the experts of mixtures; they are those of linear layers. Inputs of experts in float8 are not rounded.
EXPERT_SCHEMES = ("8da4w", "4w", "8w", FLOAT8_SCHEME, FLOAT4_SCHEME)
#: The scheme of experts that native operators compute.
NATIVE_EXPERTS = "8da4w"
DEFAULT_GROUP_SIZE = 32
#: How the scales of 4-bit groups are chosen: `mse` is the candidate of least squared error, see `RoundedGroups`;
#: `signed_mse` also allows negative scales in linear layers, which this package's kernels support and XNNPACK's do not;
#: `absmax` is the largest magnitude divided by 7.5, as in older bundles.
SCALES = ("mse", "signed_mse", "absmax")
#: XNNPACK's kernels for 4-bit weights take group sizes that are multiples of this.
GROUP_MULTIPLE = 32
#: Native operators for float activations take group sizes that are multiples of this.
NATIVE_MULTIPLE = 16


class KeptForm(NamedTuple):
    """Integers of a checkpoint that a target stores unchanged, for linear layers.

    Attributes:
        bits: Bits of an integer.
        zero_points: True if groups may have zero points, in float too if scales are "stored" or "program".
        grouped: Bits with which several groups of a row are stored; others need one scale a row.
        rounds: True if activations are quantised to 8 bits per token.
        scales: Dtype of scales: "bfloat16", "program" for that of the program, or "stored" for the checkpoint's.
        multiple: Divisor of the number of inputs of a group.
        tables: True if embedding tables of 5 to 8 bits without zero points are stored, with the heads that are tied to
            them.
        tied: True if tables of other forms are stored, too, if a head is tied to them.
    """

    bits: tuple[int, ...]
    zero_points: bool
    grouped: tuple[int, ...]
    rounds: bool
    scales: str
    multiple: int = 1
    tables: bool = False
    tied: bool = False


#: Forms by name, which the target chooses and the manifest records. "4w" is that of bundles before "native".
KEPT_FORMS = {
    "affine": KeptForm(
        (1, 2, 3, 4, 5, 6, 7, 8), True, (1, 2, 3, 4, 5, 6, 7, 8), rounds=False, scales="program", tables=True
    ),
    "symmetric": KeptForm((2, 3, 4, 8), False, (2, 3, 4), rounds=False, scales="program"),
    "8da4w": KeptForm((2, 3, 4), False, (2, 3, 4), rounds=True, scales="bfloat16", multiple=GROUP_MULTIPLE),
    "4w": KeptForm((1, 2, 3, 4), True, (1, 2, 3, 4), rounds=False, scales="stored", multiple=GROUP_MULTIPLE),
    "native": KeptForm(
        (1, 2, 3, 4, 5, 6, 7, 8),
        True,
        (1, 2, 3, 4, 5, 6, 7, 8),
        rounds=False,
        scales="stored",
        multiple=NATIVE_MULTIPLE,
        tables=True,
        tied=True,
    ),
}


@dataclass(frozen=True)
class Quantization:
    """A choice of quantised weights and their schemes.

    `Quantization("8da4w", 32, "8w")`: linear layers in 4 bits with one scale per 32 weights of a row and activations in
    8 bits per token; the embedding table in 8 bits with one scale per row. Quantisation is symmetric: zero stays zero.

    Attributes:
        linear: One of `LINEAR_SCHEMES`, or None to leave linear layers unquantised.
        group_size: Number of 4-bit weights that share a scale. With 8 bits a whole row shares one.
        embeddings: One of `EMBEDDING_SCHEMES`; None or "none" to leave the table unquantised. A head that is tied to
            the table is quantised with it, in 8 bits, so that both read the same values.
        scales: One of `SCALES`; None without 4-bit weights. The target chooses it, and the manifest records it.
        experts: One of `EXPERT_SCHEMES`, with the group size of linear layers; None leaves the experts of mixtures
            unquantised. The target chooses it, and the manifest records it.
        kept: One of `KEPT_FORMS` with "keep", else None. The target chooses it, and the manifest records it.
        largest_group: Largest number of weights that share a stored scale, in MLX's form: longer rows store their scale
            several times, and experts store a bias with each. None for other forms. The target chooses it, and the
            manifest records it.

    Raises:
        InputError: If a scheme is unknown, nothing is quantised, or the kernels do not support the group size.
    """

    linear: str | None = setting(
        None,
        "Weights of linear layers: 8da4w is 4 bits with 8-bit activations, 8da8w 8 bits with them, 8w 8 and "
        "4w 4 bits alone, fp8 float8 with float8 activations, nvfp4 4-bit floats alone, keep the stored form.",
        keyword="quantize",
        flags=("--quantize", "--qlinear"),
        choices=tuple(LINEAR_SCHEMES),
        shown_default=False,
    )
    group_size: int | None = setting(
        None,
        "Number of 4-bit weights that share a scale.",
        flags=("--group-size",),
        metavar="N",
        kind=int,
        least=1,
        shown_default=str(DEFAULT_GROUP_SIZE),
    )
    embeddings: str | None = setting(
        None,
        "Weights of the embedding table: 8w is 8 bits, 4w 4 bits, none leaves it unquantised.",
        keyword="quantize_embeddings",
        flags=("--quantize-embeddings", "--qembedding"),
        choices=(*EMBEDDING_SCHEMES, NO_EMBEDDINGS),
        shown_default=f"{DEFAULT_EMBEDDINGS} with --quantize",
    )
    scales: str | None = setting(None, "How the scales of 4-bit groups are chosen.", choices=SCALES)
    experts: str | None = setting(None, "Weights of the experts of mixtures.", choices=EXPERT_SCHEMES)
    kept: str | None = setting(None, "Form of the checkpoint's integers.", choices=tuple(KEPT_FORMS))
    largest_group: int | None = setting(
        None, "Largest number of weights that share a stored scale.", least=GROUP_MULTIPLE
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.embeddings == NO_EMBEDDINGS:
            object.__setattr__(self, "embeddings", None)
        if self.linear is None and self.embeddings is None:
            raise InputError(
                f"group_size must be given with quantize or quantize_embeddings, got {self.group_size}; pass one"
            )
        if self.experts is not None and self.linear != self.experts:
            raise InputError(f"experts must be None unless quantize is {self.experts!r}, got {self.linear!r}; omit it")
        if self.linear == KEEP_SCHEME and (self.group_size is not None or self.embeddings is not None):
            name, value = (
                ("group_size", self.group_size) if self.group_size else ("quantize_embeddings", self.embeddings)
            )
            raise InputError(
                f"{name} must be left out with quantize='keep', which stores the integers of the checkpoint, got "
                f"{value!r}; leave it out, or use quantize='8da4w'"
            )
        grouped = None if self.linear == FLOAT4_SCHEME else self._bits(self.linear, LINEAR_SCHEMES)
        if 4 not in (grouped, self._bits(self.embeddings, EMBEDDING_SCHEMES)):
            if self.group_size is not None:
                form = "8-bit weights, which have one scale per row"
                if self.linear == FLOAT4_SCHEME:
                    form = f"{FLOAT4_SCHEME}, which has one scale per {FLOAT4_BLOCK} weights"
                raise InputError(
                    f"group_size must be left out for {form}, got {self.group_size}; leave it out, or quantize to "
                    "8da4w or 4w"
                )
            object.__setattr__(self, "scales", None)
            return
        size = DEFAULT_GROUP_SIZE if self.group_size is None else self.group_size
        if not isinstance(size, int) or isinstance(size, bool) or size < 1 or size % GROUP_MULTIPLE:
            raise InputError(
                f"group_size must be a multiple of {GROUP_MULTIPLE}, got {size!r}; the 4-bit kernels need it, so pass "
                f"{GROUP_MULTIPLE} or {4 * GROUP_MULTIPLE} (--group-size)"
            )
        object.__setattr__(self, "group_size", size)
        object.__setattr__(self, "scales", self.scales or SCALES[0])

    @property
    def block(self) -> int | None:
        """Number of neighbouring weights of linear layers and experts that share a scale, or None for a whole row."""
        if self.linear == FLOAT4_SCHEME:
            return FLOAT4_BLOCK
        return (self.group_size or DEFAULT_GROUP_SIZE) if self._bits(self.linear, LINEAR_SCHEMES) == 4 else None

    @staticmethod
    def _bits(scheme: str | None, known: dict[str, Any]) -> int | None:
        found = None if scheme is None else known.get(scheme)
        return found[0] if isinstance(found, tuple) else found

    def for_native_linears(self) -> Quantization:
        """Return the quantisation for this package's operators.

        They take scales of either sign, quantised experts, and kept integers with zero points and float activations.
        """
        if self.linear == KEEP_SCHEME:
            return self.for_target("native")
        if self.scales != SCALES[0]:
            return self
        experts = NATIVE_EXPERTS if self.linear == NATIVE_EXPERTS else None
        return replace(self, scales="signed_mse", experts=experts)

    def for_target(self, kept: str, experts: Sequence[str] = (), largest_group: int | None = None) -> Quantization:
        """Return the quantisation with the form of kept integers that a target has, or with the experts of mixtures.

        Args:
            kept: One of `KEPT_FORMS`.
            experts: Schemes of linear layers that the target has for experts too.
            largest_group: See the attribute.
        """
        if self.linear == KEEP_SCHEME:
            return replace(self, kept=kept)
        chosen = self.linear if self.linear in experts else None
        return replace(self, experts=chosen, largest_group=largest_group)

    def stored_group(self, row: int) -> int:
        """Return the number of 8-bit weights that share a stored scale, in rows of a number of weights."""
        return row if self.largest_group is None else math.gcd(row, self.largest_group)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a manifest records them; `Quantization(**recorded)` reads them back."""
        return asdict(self)

    def __str__(self) -> str:
        parts = [
            self.linear,
            self.embeddings and f"embeddings {self.embeddings}",
            self.group_size and f"groups of {self.group_size}",
        ]
        return ", ".join(part for part in parts if part)


def quantization_of(
    quantize: str | None, group_size: int | None, quantize_embeddings: str | None, offered: Sequence[str] = ()
) -> Quantization | None:
    """Return the quantisation for three options, or None if none of them is given.

    With quantised linear layers the table is quantised too, unless `quantize_embeddings` is given, because in float32
    it would be the larger part of a file, and 8 bits change the logits little.

    Args:
        quantize: See `Quantization.linear`.
        group_size: See `Quantization.group_size`.
        quantize_embeddings: See `Quantization.embeddings`.
        offered: Schemes of embedding tables that the target supports.

    Raises:
        InputError: See `Quantization`.
        MissingDependencyError: If torchao is not installed.
    """
    if quantize is None and group_size is None and quantize_embeddings in (None, NO_EMBEDDINGS):
        return None
    if quantize not in (None, KEEP_SCHEME) and quantize_embeddings is None and DEFAULT_EMBEDDINGS in offered:
        quantize_embeddings = DEFAULT_EMBEDDINGS
    quantization = Quantization(quantize, group_size, quantize_embeddings)
    if util.find_spec("torchao") is None:
        raise MissingDependencyError(
            "quantisation needs torchao, which is not installed; pip install 'exportable-cache[executorch]'"
        )
    return quantization


def check_calibrated(path: str | os.PathLike, linear: str | None, recipe: str | None) -> None:
    """Check that a scheme can be calibrated, and that the text is a file.

    Args:
        path: The text.
        linear: Scheme of linear layers, or None.
        recipe: Name of the recipe that chose it, for the message; None for none.

    Raises:
        InputError: If it cannot be, or there is no file.
    """
    if linear not in CALIBRATED_SCHEMES:
        chosen = f"recipe {recipe!r}" if linear is None and recipe else f"quantize={linear!r}"
        raise InputError(
            f"calibrate must be given with quantize {', '.join(CALIBRATED_SCHEMES)}, got {chosen}, in which a text "
            f"changes no rounding; leave it out, or pass quantize='{CALIBRATED_SCHEMES[0]}' (--quantize)"
        )
    if not Path(path).is_file():
        raise InputError(f"calibrate must be a text file, got {str(path)!r}; pass the path of a text in UTF-8")


def check_schemes(quantization: Quantization, target: str, linear: Sequence[str], embeddings: Sequence[str]) -> None:
    """Check that a target has kernels for a quantisation.

    Args:
        quantization: The quantisation to check.
        target: Name of the target.
        linear: Schemes of linear layers that it supports.
        embeddings: Schemes of embedding tables that it supports.

    Raises:
        InputError: If a scheme is not supported.
    """
    for option, value, known in (
        ("quantize", quantization.linear, linear),
        ("quantize_embeddings", quantization.embeddings, embeddings),
    ):
        if value is not None and value not in known:
            remedy = f"use {', '.join(known)}" if known else "export for target 'executorch'"
            raise InputError(
                f"{option} must be a scheme that target {target!r} has fast kernels for, got {value!r}; {remedy}"
            )
