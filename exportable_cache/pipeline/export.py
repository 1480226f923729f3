"""The main job: a model goes in, a verified bundle comes out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from ..backends import backend_for
from ..cache.spec import CacheSpec
from ..common.process.quiet import quietly
from ..common.progress import silent
from ..models.quantization.spec import quantization_of
from ..program.spec import ProgramSpec
from .dry_run import dry_run as foresee
from .spec import ExportSpec
from .steps import run

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..bundle.bundle import Bundle
    from ..common.progress import Progress
    from .dry_run import DryRun


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
        return foresee(spec)
    return run(spec, progress or silent)
