"""What an export would write, before any weights are read: every check that needs none, the files, and their bytes."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..backends.executorch.options import NATIVE_KERNELS_NEEDED, needs_native_kernels
from ..common.tensors import dtype_name
from ..errors import UnsupportedModelError
from ..models.loading.loading import live_model, load_config
from ..models.loading.prequantized import stored_quantization
from ..models.loading.tokenizer import has_tokenizer
from ..models.loading.without_weights import model_without_weights
from ..models.positions import check_positions, check_rope
from ..models.quantization.quantize import check_quantizable
from ..models.quantization.sizes import coverage_of, exact_bytes, quantized_bytes
from .sizing import plan_cache
from .split import Split
from .steps import resolve

if TYPE_CHECKING:
    from .spec import ExportSpec


@dataclass(frozen=True)
class DryRun:
    """What `export` would do.

    Attributes:
        output_dir: Where the bundle would be.
        target: It would be for.
        architecture: Class of the model, where it could be told.
        dtype: Of the weights that are exported, or that are quantised.
        quantization: Of the weights, as the manifest would record it.
        files: That would be written, with what they hold.
        weights_bytes: Of the weights in them; None where the model cannot be built without its weights.
        cache_bytes: Of the cache, which the program allocates when it is opened.
        least_memory_bytes: The weights as written and one cache: the export holds these at least, and the opened
            program does. What it takes beyond depends on the target and is not foreseen.
        remarks: What would be done to the weights as they are, and what the program needs to run, a line each.
    """

    output_dir: str
    target: str
    architecture: str | None
    dtype: str
    quantization: dict[str, Any] | None
    files: dict[str, str]
    weights_bytes: int | None
    cache_bytes: int
    least_memory_bytes: int | None
    remarks: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {**asdict(self), "remarks": list(self.remarks)}


def dry_run(spec: ExportSpec) -> DryRun:
    """Check an export and say what it would write. No weights are read, nothing is lowered or written.

    What it cannot see: tensors that a checkpoint lacks, models that cannot be traced or lowered, and whether the
    program agrees with the model.

    Raises:
        BundleError, InputError, UnsupportedModelError, MissingDependencyError: As the export would.
    """
    resolved = resolve(spec)
    config = load_config(spec.model_or_path)
    dtype = torch.float32 if resolved.dtype is None else resolved.dtype.chosen
    live = live_model(spec.model_or_path)
    split = Split(tensor_parallel=spec.tensor_parallel)
    made = plan_cache(live or config, replace(spec.cache, dtype=dtype), split=split)
    if made.cache_bytes is None:
        raise UnsupportedModelError(made.refusal)
    # Of a live model, too: its shapes alone, and no tensor is copied.
    model: Any = model_without_weights(config)
    weights = made.weights_bytes
    if model is not None:
        check_positions(model, made.max_length)
        check_rope(model, made.max_length, resolved.program.takes_lengths)
    coverage = None
    if spec.quantization is not None:
        weights = None
        if model is not None:
            model = model.to(torch.float32)
            check_quantizable(model, spec.quantization)
            weights = quantized_bytes(model, spec.quantization)
            coverage = coverage_of(model, spec.quantization)
    elif model is not None and resolved.dtype is not None and resolved.dtype.kept:
        weights = exact_bytes(model.to(dtype), resolved.dtype.stored)
    stored = stored_quantization(config)
    remarks = [] if stored is None else [stored.remark.replace("were dequantised", "would be dequantised")]
    remarks += [made.positions] if made.positions else []
    remarks += [coverage.remark] if coverage is not None and coverage.remark else []
    # A tuple of paths, since the spec was made.
    remarks += [f"the adapter in {folder} would be merged into the weights" for folder in tuple(spec.lora)]  # type: ignore[arg-type]
    if made.tensor_parallel is not None:
        each = made.tensor_parallel
        remarks.append(
            f"each of {each.ranks} ranks would have at most {each.weights_bytes:,} bytes of the weights, and "
            f"{each.cache_bytes:,} of cache"
        )
    if resolved.dtype is not None and resolved.dtype.stored != resolved.dtype.chosen:
        remarks.append(str(resolved.dtype))
    if spec.options is not None and needs_native_kernels(spec.options.to_dict()):
        remarks.append(NATIVE_KERNELS_NEEDED)
    return DryRun(
        output_dir=str(spec.output_dir),
        target=spec.target,
        architecture=made.architecture,
        dtype=dtype_name(dtype),
        quantization=None if spec.quantization is None else spec.quantization.to_dict(),
        files=_files(spec),
        weights_bytes=weights,
        cache_bytes=made.cache_bytes,
        least_memory_bytes=None if weights is None else weights + made.cache_bytes,
        remarks=tuple(remarks),
    )


def _files(spec: ExportSpec) -> dict[str, str]:
    ranks = spec.tensor_parallel
    where, holds = ("", "weights") if ranks is None else (f" in rank-0 to rank-{ranks - 1}", "its rank's weights")
    files = {
        f"the program for {spec.target}{where}": f"{holds}, one cache",
        "config.json": "model config",
        "generation_config.json": "generation defaults",
        "manifest.json": "what the bundle is, with checksums",
    }
    given = spec.model_or_path
    if spec.tokenizer is not None or (isinstance(given, (str, os.PathLike)) and has_tokenizer(given)):
        files["tokenizer/"] = "tokenizer"
    return files
