"""Options of an export and of a plan, each in one frozen value that is checked before a model is read.

Importing this module imports no torch: the command line makes its options from the fields.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..backends.registry import backend_for
from ..cache.spec import CacheSpec
from ..common.settings import REQUIRED, check_settings, same_setting, setting
from ..errors import InputError
from ..models.quantization.spec import check_schemes
from ..program.spec import ProgramSpec
from ..verification.spec import VerifySpec, check_tolerance

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..backends.options import TargetOptions
    from ..models.quantization.spec import Quantization

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_NO_OUTPUT = "name the folder to write, such as 'artifacts/model'"


@dataclass(frozen=True)
class ExportSpec:
    """What an export is asked for: a model, a target, and where to write.

    Attributes:
        model_or_path: `demo`, a local folder, a hub id, or a loaded model in eval mode.
        target: One of `backends.TARGETS`.
        output_dir: Folder of the bundle; must not exist, be empty, or be a bundle to overwrite. Kept as a `Path`.
        cache: Of the program. Its dtype and device are the model's.
        program: Of which the chunk of a prompt is asked for here; the rest is the target's, and of `modalities`.
        options: Of the target.
        quantization: Of the weights, None for none.
        dtype: Of the weights; by default what the target computes best in, see `dtypes.choose_dtype`.
        modalities: What is fed beside text, `image` or `audio`, see `modalities.modalities_of`.
        image_size: Height and width of every image in pixels, where the model's config leaves it open, see there.
        verify: Compare with the model.
        tolerance: Largest |logit difference| that passes, see `VerifySpec`; None for the default of the dtype.
        overwrite: Replace a bundle that is there.
        tensor_parallel: Ranks to split the program over, None for a program of one process.
        sign: File of the private key to sign the bundle with, see `bundle.signing`; None for no signature.
        tokenizer: Saved in the bundle; None for the one beside the model.
        lora: Folder of an adapter to merge into the weights, at most one.
        dry_run: Say what would be written, and write nothing.

    Raises:
        InputError: If a value is out of range, or is nothing for this target.
        MissingDependencyError: If the target needs a package that is not installed.
    """

    model_or_path: PreTrainedModel | str | os.PathLike
    target: str = setting(
        "executorch",
        "What to lower to.",
        flags=("--target", "-t"),
        metavar="TARGET",
    )
    output_dir: str | os.PathLike | None = setting(
        None, "Folder to write the bundle to.", flags=("--output", "-o"), metavar="DIR", kind=Path
    )
    cache: CacheSpec = field(default=REQUIRED, kw_only=True)  # type: ignore[assignment]
    program: ProgramSpec = field(default=ProgramSpec(), kw_only=True)
    options: TargetOptions | None = field(default=None, kw_only=True)
    quantization: Quantization | None = field(default=None, kw_only=True)
    dtype: torch.dtype | str | None = same_setting(CacheSpec, "dtype")
    modalities: Sequence[str] | Mapping[str, Any] = setting(
        (),
        "Take image, video or audio beside text; the model's encoder is exported, too.",
        flags=("--modality",),
        metavar="KIND",
        repeats=True,
    )
    image_size: int | Sequence[int] | None = setting(
        None,
        "Height and width of every image in pixels, such as 448x448, where the model's config leaves it open.",
        flags=("--image-size",),
        metavar="HxW",
        shown_default="the model's",
    )
    verify: bool = setting(
        True,
        "Compare with the eager model, past every window.",
        flags=("--verify/--no-verify",),
        kind=bool,
    )
    tolerance: float | None = same_setting(VerifySpec, "tolerance")
    overwrite: bool = setting(False, "Replace DIR if it exists.", flags=("--overwrite",), kind=bool)
    tensor_parallel: int | None = setting(
        None,
        "Split the program over N processes, which run it together, by transformers' plan of the model.",
        flags=("--tensor-parallel",),
        metavar="N",
        kind=int,
        least=2,
        shown_default=False,
    )
    sign: str | os.PathLike | None = setting(
        None,
        "Private Ed25519 key to sign the bundle with, so that others can check who made it.",
        flags=("--sign",),
        metavar="FILE",
        kind=Path,
        shown_default="unsigned",
    )
    tokenizer: PreTrainedTokenizerBase | None = None
    lora: str | os.PathLike | Sequence[str | os.PathLike] = setting(
        (),
        "Folder of a LoRA adapter to merge into the weights.",
        flags=("--lora",),
        metavar="FOLDER",
        repeats=True,
    )
    dry_run: bool = setting(
        False,
        "Check everything that needs no weights, and say what would be written.",
        flags=("--dry-run",),
        kind=bool,
    )

    def __post_init__(self) -> None:
        backend = backend_for(self.target)
        check_settings(self)
        if self.cache.offload is not None:
            raise InputError("offload is for live sessions, a bundle's program keeps its own cache; leave it out")
        options = backend.options() if self.options is None else self.options
        if not isinstance(options, backend.options):
            raise InputError(
                f"options are {type(options).__name__}, target {self.target!r} takes {backend.options.__name__}; "
                "pass these"
            )
        # Options may lift a target's limit.
        most, rows = getattr(options, "max_batch_size", backend.max_batch_size), self.cache.batch_size
        if most is not None and rows > most:
            lifted = getattr(options, "rows_by", None)
            raise InputError(
                f"batch_size is {rows}, target {self.target!r} takes at most {most}; "
                f"export with that, {f'with {lifted}, ' if lifted else ''}or for target 'pt2'"
            )
        if self.tensor_parallel is not None:
            _check_ranks(self, backend)
        if self.quantization is not None:
            linear, embeddings = getattr(backend, "linear_schemes", ()), getattr(backend, "embedding_schemes", ())
            check_schemes(self.quantization, self.target, linear, embeddings)
            if self.quantization.scales == "mse" and getattr(options, "native_linears", False):
                object.__setattr__(self, "quantization", replace(self.quantization, scales="signed_mse"))
        from ..common.tensors import parse_dtype
        from .dtypes import check_dtype

        check_tolerance("tolerance", self.tolerance)
        if self.tolerance is not None and not self.verify:
            raise InputError(
                f"tolerance is {self.tolerance}, but verify is False, so nothing is compared; leave one of them out"
            )
        object.__setattr__(self, "options", options)
        dtype = parse_dtype(self.dtype)
        object.__setattr__(self, "dtype", dtype)
        check_dtype(dtype, self.target, options.to_dict(), self.quantization is not None)
        object.__setattr__(self, "output_dir", _checked_output(self.output_dir))
        if self.sign is not None:
            # Before an hour's work: whether it can be signed.
            from ..bundle.signing import private_key

            private_key(self.sign)
        if not isinstance(self.modalities, Mapping):
            object.__setattr__(self, "modalities", tuple(self.modalities))
        object.__setattr__(self, "lora", _checked_lora(self.lora))


def output_of(spec: ExportSpec) -> Path:
    """Return the folder of the bundle, which `ExportSpec` has checked."""
    assert isinstance(spec.output_dir, Path)
    return spec.output_dir


def options_of(spec: ExportSpec) -> TargetOptions:
    """Return the target's options, where `ExportSpec` has filled in the defaults."""
    assert spec.options is not None
    return spec.options


def dtype_of(spec: ExportSpec | CacheSpec) -> torch.dtype | None:
    """Return the dtype that is asked for, after the spec has replaced names."""
    assert not isinstance(spec.dtype, str)
    return spec.dtype


def adapters_of(spec: ExportSpec) -> Sequence[str | os.PathLike]:
    """Return the folders of adapters, of which `ExportSpec` has made a tuple."""
    assert not isinstance(spec.lora, (str, os.PathLike))
    return spec.lora


def _check_ranks(spec: ExportSpec, backend: Any) -> None:
    """Refuse what programs in parts do not have."""
    if not getattr(backend, "sums_over_ranks", False):
        raise InputError(
            f"tensor_parallel is {spec.tensor_parallel}, and programs of target {spec.target!r} run in one process; "
            "export for target 'pt2' or 'aoti', or leave it out"
        )
    for name, given in (("quantize", spec.quantization), ("modalities", spec.modalities)):
        if given:
            raise InputError(
                f"tensor_parallel is {spec.tensor_parallel} and {name} is {given!r}, but a program over ranks has "
                f"float weights and takes text alone; leave one of them out"
            )


def _checked_lora(lora: str | os.PathLike | Sequence[str | os.PathLike] | None) -> tuple[str, ...]:
    if not lora:
        return ()
    from ..models.loading.adapters import check_adapters

    return check_adapters([lora] if isinstance(lora, (str, os.PathLike)) else lora)


def _checked_output(output_dir: str | os.PathLike | None) -> Path:
    if output_dir is None:
        raise InputError(f"output_dir is missing; {_NO_OUTPUT}")
    output = Path(output_dir).expanduser()
    if not output.name:
        # "" and "." are one path, and "/" has no folder beside it; the export renames a new folder onto its output.
        raise InputError(
            f"output_dir is {os.fspath(output_dir)!r}, which is no name of a folder of its own; {_NO_OUTPUT}"
        )
    return output


@dataclass(frozen=True)
class Split:
    """Ranks, stages, and what each may take.

    Attributes:
        tensor_parallel: Ranks that share every layer, None for one.
        pipeline: Stages that have layers of their own, None for one.
        memory: Bytes that a process may take for weights and cache; a text such as "16G" becomes a number (GiB).

    Raises:
        InputError: If a value is out of range.
    """

    tensor_parallel: int | None = setting(
        None,
        "Also plan for N ranks that share the model, by transformers' own plan of it.",
        flags=("--tensor-parallel",),
        metavar="N",
        kind=int,
        shown_default=False,
    )
    pipeline: int | None = setting(
        None,
        "Also plan for N stages of layers.",
        flags=("--pipeline",),
        metavar="N",
        kind=int,
        least=2,
        shown_default=False,
    )
    memory: int | str | None = setting(
        None,
        "Say how many tokens fit, if a process may take SIZE for weights and cache, such as 16G.",
        flags=("--memory",),
        metavar="SIZE",
        shown_default=False,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.memory is not None:
            object.__setattr__(self, "memory", _bytes(self.memory))


def _bytes(given: int | str) -> int:
    found = _BYTES.fullmatch(str(given).strip())
    if isinstance(given, bool) or found is None or float(found[1]) == 0:
        raise InputError(f"memory is {given!r}; it must be bytes above 0, or a size such as 800M or 16G")
    return int(float(found[1]) * _UNITS[found[2].upper()])
