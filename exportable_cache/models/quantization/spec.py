"""Which weights are quantised, and how: checked where it is asked for, before a model or torchao is imported.

Importing this module imports no torch: the command line makes its options from the fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import util
from typing import Any

from ...common.settings import check_settings, setting
from ...errors import InputError, MissingDependencyError

#: Linear layers: scheme -> (bits of a weight, whether activations are quantised to 8 bits per token as they come).
LINEAR_SCHEMES = {"8da4w": (4, True), "8da8w": (8, True), "8w": (8, False)}
#: Embedding tables: scheme -> bits.
EMBEDDING_SCHEMES = {"8w": 8, "4w": 4}
#: What the table has beside quantised linear layers unless it is said, and how to say that it stays as it is.
DEFAULT_EMBEDDINGS, NO_EMBEDDINGS = "8w", "none"
DEFAULT_GROUP_SIZE = 32
#: How the scales of 4-bit groups are chosen: `mse` has the least squared error of a few, see `group_scales`; in
#: `signed_mse` those of linear layers may be negative, which this package's kernels take and XNNPACK's do not;
#: `absmax`, the largest magnitude over 7.5, is that of bundles before there were others.
SCALES = ("mse", "signed_mse", "absmax")
#: XNNPACK's kernels for groups of 4-bit weights take multiples of this.
GROUP_MULTIPLE = 32


@dataclass(frozen=True)
class Quantization:
    """Which weights become integers, and how.

    `Quantization("8da4w", 32, "8w")`: linear layers in 4 bits, one scale per 32 weights of a row, activations in 8 bits
    per token; the embedding table in 8 bits, one scale per row. Weights are symmetric: zero stays zero.

    Attributes:
        linear: One of `LINEAR_SCHEMES`, or None to leave linear layers as they are.
        group_size: Weights that share a scale, in 4 bits. In 8 bits a scale serves a whole row.
        embeddings: One of `EMBEDDING_SCHEMES`; None or "none" to leave the table as it is. A head that is tied to the
            table is quantised with it, in 8 bits, so that both still read the same numbers.
        scales: One of `SCALES`; None without 4 bits. The target chooses it, and the manifest records it.

    Raises:
        InputError: If a scheme is unknown, nothing is to be quantised, or the group size is not one the kernels take.
    """

    linear: str | None = setting(
        None,
        "Weights of linear layers: 8da4w is 4 bits with 8-bit activations, 8da8w 8 bits with them, 8w 8 bits alone.",
        keyword="quantize",
        flags=("--quantize",),
        choices=tuple(LINEAR_SCHEMES),
        shown_default=False,
    )
    group_size: int | None = setting(
        None,
        "4-bit weights that share a scale.",
        flags=("--group-size",),
        metavar="N",
        kind=int,
        least=1,
        shown_default=str(DEFAULT_GROUP_SIZE),
    )
    embeddings: str | None = setting(
        None,
        "Weights of the embedding table: 8w is 8 bits, 4w 4 bits, none leaves it as it is.",
        keyword="quantize_embeddings",
        flags=("--quantize-embeddings",),
        choices=(*EMBEDDING_SCHEMES, NO_EMBEDDINGS),
        shown_default=f"{DEFAULT_EMBEDDINGS} with --quantize",
    )
    scales: str | None = setting(None, "How the scales of 4-bit groups are chosen.", choices=SCALES)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.embeddings == NO_EMBEDDINGS:
            object.__setattr__(self, "embeddings", None)
        if self.linear is None and self.embeddings is None:
            raise InputError(
                f"group_size is {self.group_size}, but nothing is quantised; pass quantize or quantize_embeddings too"
            )
        if 4 not in (self._bits(self.linear, LINEAR_SCHEMES), self._bits(self.embeddings, EMBEDDING_SCHEMES)):
            if self.group_size is not None:
                raise InputError(
                    f"group_size is {self.group_size}, but 8-bit weights have one scale per row; "
                    "leave it out, or quantize to 8da4w"
                )
            object.__setattr__(self, "scales", None)
            return
        size = DEFAULT_GROUP_SIZE if self.group_size is None else self.group_size
        if not isinstance(size, int) or isinstance(size, bool) or size < 1 or size % GROUP_MULTIPLE:
            raise InputError(
                f"group_size is {size!r}; it must be a multiple of {GROUP_MULTIPLE}, which the 4-bit kernels take"
            )
        object.__setattr__(self, "group_size", size)
        object.__setattr__(self, "scales", self.scales or SCALES[0])

    @staticmethod
    def _bits(scheme: str | None, known: dict[str, Any]) -> int | None:
        found = None if scheme is None else known.get(scheme)
        return found[0] if isinstance(found, tuple) else found

    def to_dict(self) -> dict[str, Any]:
        """JSON, as a manifest records it; `Quantization(**recorded)` reads it back."""
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
    """The quantisation that three options ask for, None for none of them.

    Beside quantised linear layers the table is, too, unless `quantize_embeddings` says otherwise: in float32 it would
    be the larger part of a file, and 8 bits of it move the logits little.

    Args:
        offered: Schemes of embedding tables that the target takes.

    Raises:
        InputError: See `Quantization`.
        MissingDependencyError: If torchao is not installed.
    """
    if quantize is None and group_size is None and quantize_embeddings in (None, NO_EMBEDDINGS):
        return None
    if quantize is not None and quantize_embeddings is None and DEFAULT_EMBEDDINGS in offered:
        quantize_embeddings = DEFAULT_EMBEDDINGS
    quantization = Quantization(quantize, group_size, quantize_embeddings)
    if util.find_spec("torchao") is None:
        raise MissingDependencyError(
            "quantisation needs torchao, which is not installed; pip install 'exportable-cache[executorch]'"
        )
    return quantization


def check_schemes(quantization: Quantization, target: str, linear: Sequence[str], embeddings: Sequence[str]) -> None:
    """Refuse what a target has no kernels for.

    Args:
        linear, embeddings: Schemes that it takes.

    Raises:
        InputError: If one asked for is not among them.
    """
    for option, value, known in (
        ("quantize", quantization.linear, linear),
        ("quantize_embeddings", quantization.embeddings, embeddings),
    ):
        if value is not None and value not in known:
            offered = f"it takes {', '.join(known)}" if known else "export for target 'executorch'"
            raise InputError(
                f"{option} is {value!r}, for which target {target!r} has no kernels worth using; {offered}"
            )
