"""The main job: a model goes in, a verified bundle comes out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from ..backends import backend_for
from ..backends.executorch.options import NATIVE_KERNELS_NEEDED, needs_native_kernels
from ..cache.spec import CacheSpec
from ..common.process.quiet import quietly
from ..common.progress import silent
from ..common.tensors import dtype_name
from ..errors import UnsupportedModelError
from ..models.loading.loading import live_model, load_config
from ..models.loading.prequantized import stored_quantization
from ..models.loading.tokenizer import has_tokenizer
from ..models.loading.without_weights import model_without_weights
from ..models.positions import check_positions, check_rope
from ..models.quantization.quantize import check_quantizable
from ..models.quantization.sizes import coverage_of, exact_bytes, quantized_bytes
from ..models.quantization.spec import quantization_of
from ..program.spec import ProgramSpec
from .plan import plan_cache
from .spec import ExportSpec, Split
from .steps import resolve, run

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..bundle.bundle import Bundle
    from ..common.progress import Progress
    from .spec import ExportSpec


# What it gives, by `dry_run`; the arguments are those below.
@overload
def export(*args: Any, dry_run: Literal[True], **options: Any) -> DryRun: ...


@overload
def export(*args: Any, dry_run: Literal[False] = False, **options: Any) -> Bundle: ...


@quietly  # type: ignore[misc]
def export(
    model_or_path: PreTrainedModel | str | os.PathLike,
    target: str = "executorch",
    max_cache_len: int = 1024,
    output_dir: str | os.PathLike | None = None,
    *,
    batch_size: int = 1,
    dtype: torch.dtype | str | None = None,
    prefill_chunk: int | None = None,
    quantize: str | None = None,
    group_size: int | None = None,
    quantize_embeddings: str | None = None,
    attention_sinks: int | None = None,
    attention_window: int | None = None,
    max_encoder_len: int | None = None,
    modalities: Sequence[str] | Mapping[str, Any] = (),
    image_size: int | Sequence[int] | None = None,
    kv_dtype: str | None = None,
    rollback_slots: int = 0,
    tensor_parallel: int | None = None,
    verify: bool = True,
    tolerance: float | None = None,
    overwrite: bool = False,
    sign: str | os.PathLike | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    lora: str | os.PathLike | Sequence[str | os.PathLike] = (),
    dry_run: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Bundle | DryRun:
    """Export a causal LM with its static cache, verify the result against the model, and write a bundle.

    The bundle appears under `output_dir` when everything has succeeded; whatever stops the export before leaves nothing
    that loads. What can be checked without the weights is checked before they are loaded.

    Args:
        model_or_path: `demo`, a local folder or GGUF file, a hub id, or a loaded model in eval mode; the adapters of a
            PEFT model are merged, in a copy of the weights that they change.
        target: One of `backends.TARGETS`.
        max_cache_len: Tokens a full-attention layer can hold.
        output_dir: Folder of the bundle; must not exist, be empty, or be a bundle to overwrite.
        batch_size: Rows.
        dtype: Of the weights; by default the one that the target computes best in: float32 for ExecuTorch and for
            quantised weights, as stored for the others. See `dtypes.choose_dtype`.
        prefill_chunk: Longest chunk of a prompt, see `ProgramSpec`.
        quantize: Scheme of the linear layers' weights, such as "8da4w", see `Quantization`; None for none. The program
            is then verified against the quantised model, and its distance from the float one is recorded.
        group_size: Weights that share a scale in 4-bit schemes.
        quantize_embeddings: Scheme of the embedding table, "8w" or "4w", or "none" to leave it as it is; by default
            "8w" with `quantize`, where the target takes it.
        attention_sinks, attention_window: Have full-attention layers keep the first and the newest tokens only, and run
            without end, see `ExportableCache.from_config`.
        max_encoder_len: Longest input of an encoder-decoder's encoder, in tokens, frames or samples, see
            `ExportableCache.from_model`.
        modalities: What is fed beside text, of `image`, `video` and `audio`; or by kind what the model's processor
            gives for one item, see `modalities_of`. The processor beside the model goes into the bundle then, or with
            an encoder of images or sound. Encoders are verified on random numbers, see `verify_encoders`.
        image_size: Height and width of every image in pixels, where the model's config leaves it open, see there.
        kv_dtype: `float16`, `bfloat16`, `int8` or `int4` to keep keys and values in fewer bits, see
            `ExportableCache.from_config`. The program is then verified against the model with the same rounding, and
            its distance from the model without it is recorded.
        rollback_slots: Extra slots of each ring, so that `rollback_slots + 1` tokens can be taken back past the window,
            as drafts need it.
        tensor_parallel: Ranks to split the program over, by transformers' plan of the model (targets `pt2` and `aoti`):
            the bundle has a program for each, with its weights only, and as many processes open it together.
        verify: Compare with the model, see `verify_session`; the report is recorded in the manifest.
        tolerance: Largest |logit difference| that `verify` accepts; by default one that follows from the dtype and from
            the spread of the model's logits, see `VerifySpec`.
        overwrite: Replace a bundle that is there.
        sign: File of the private Ed25519 key to sign the bundle with, for `load(..., key=)`; needs the extra `sign`.
        tokenizer: Saved in the bundle; by default the one beside the model, if there is one.
        lora: Folder of a LoRA adapter (PEFT) to merge into the weights.
        dry_run: Read no weights and write nothing; give a `DryRun`, which says what would be written.
        progress: Told about each stage.
        **options: Of the target.

    Raises:
        InputError: If an argument is out of range or unknown, or the model cannot be loaded.
        UnsupportedModelError: If the model is no causal LM, or needs a mechanism the cache does not have.
        MissingDependencyError: If the target needs a package that is not installed.
        BundleError: If `output_dir` may not be written.
        VerificationError: If the program disagrees with the model; no bundle is left then.

    Example:
        >>> bundle = export("demo", target="executorch", max_cache_len=512, output_dir="artifacts/demo")
        >>> session = load(bundle.path)
    """
    backend = backend_for(target)
    spec = ExportSpec(
        model_or_path,
        target,
        output_dir,
        # First of all, so that an unknown target or option is what is complained about.
        options=backend.options.parse(options),
        cache=CacheSpec(
            max_cache_len,
            batch_size,
            rollback_slots=rollback_slots,
            attention_sinks=attention_sinks,
            attention_window=attention_window,
            kv_dtype=kv_dtype,
            max_encoder_len=max_encoder_len,
        ),
        program=ProgramSpec(prefill_chunk),
        quantization=quantization_of(
            quantize, group_size, quantize_embeddings, getattr(backend, "embedding_schemes", ())
        ),
        dtype=dtype,
        modalities=modalities,
        image_size=image_size,
        tensor_parallel=tensor_parallel,
        verify=verify,
        tolerance=tolerance,
        overwrite=overwrite,
        sign=sign,
        tokenizer=tokenizer,
        lora=lora,
        dry_run=dry_run,
    )
    if dry_run:
        return preview(spec)
    return run(spec, progress or silent)


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


def preview(spec: ExportSpec) -> DryRun:
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
