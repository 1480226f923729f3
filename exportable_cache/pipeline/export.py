"""The main job: a model goes in, a verified bundle comes out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..backends import backend_for
from ..bundle.bundle import Bundle, check_free, new_folder, write_bundle
from ..bundle.manifest import Quantized, RoundedCache
from ..cache.layout import Sinks
from ..common.progress import Progress, silent
from ..errors import InputError, VerificationError
from ..models.cache_factory import ExportableCache
from ..models.layout import layer_types_and_windows
from ..models.loading import check_positions, load_config, load_model, parse_dtype
from ..models.quantization import check_schemes, quantization_of
from ..models.quantization import quantize as quantize_model
from ..program.inputs.modality import modalities_of
from ..program.program import Program
from ..verification.quantization_effect import measure_distance, measure_quantization
from ..verification.reference_runner import session_to_verify
from ..verification.tolerance import tolerance_of
from ..verification.verify import VerifyReport, verify_session


def export(
    model_or_path: PreTrainedModel | str | os.PathLike,
    target: str = "executorch",
    max_cache_len: int = 1024,
    output_dir: str | os.PathLike | None = None,
    *,
    batch_size: int = 1,
    dtype: torch.dtype | str | None = None,
    prefill_length: int | None = None,
    quantize: str | None = None,
    group_size: int | None = None,
    quantize_embeddings: str | None = None,
    attention_sinks: int | None = None,
    attention_window: int | None = None,
    max_encoder_len: int | None = None,
    modalities: Sequence[str] = (),
    image_size: int | Sequence[int] | None = None,
    kv_dtype: str | None = None,
    slack: int = 0,
    verify: bool = True,
    overwrite: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Bundle:
    """Export a causal LM with its static cache, verify the result against the model, and write a bundle.

    The bundle appears under `output_dir` when everything has succeeded; whatever stops the export before leaves nothing
    that loads. What can be checked without the weights is checked before they are loaded.

    Args:
        model_or_path: `demo`, a local folder, a hub id, or a loaded model in eval mode.
        target: One of `backends.TARGETS`.
        max_cache_len: Tokens a full-attention layer can hold.
        output_dir: Folder of the bundle; must not exist, be empty, or be a bundle to overwrite.
        batch_size: Rows.
        dtype: Of the weights; as stored by default.
        prefill_length: Longest chunk of a prompt, see `methods.methods_for`.
        quantize: Scheme of the linear layers' weights, such as "8da4w", see `quantize.Quantization`; None for none. The program
            is then verified against the quantised model, and its distance from the float one is recorded.
        group_size: Weights that share a scale in 4-bit schemes.
        quantize_embeddings: Scheme of the embedding table, "8w" or "4w".
        attention_sinks, attention_window: Have full-attention layers keep the first and the newest tokens only, and run
            without end, see `ExportableCache.from_config`.
        max_encoder_len: Longest input of an encoder-decoder's encoder, in tokens, frames or samples, see
            `ExportableCache.from_model`.
        modalities: What is fed beside text, `image` or `audio`, see `multimodal.modalities_of`. The processor beside the model
            goes into the bundle then, or with an encoder of images or sound. Encoders are verified on random numbers, see
            `verify_encoders`.
        image_size: Height and width of every image in pixels, where the model's config leaves it open, see there.
        kv_dtype: `int8` or `int4` to keep keys and values in 8 or 4 bits, see `ExportableCache.from_config`. The program is then verified against
            the model with the same rounding, and its distance from the model without it is recorded.
        slack: Extra slots of each ring, so that `slack + 1` tokens can be taken back past the window, as drafts need it.
        verify: Compare with the model, see `verify_session`; the report is recorded in the manifest.
        overwrite: Replace a bundle that is there.
        tokenizer: Saved in the bundle; by default the one beside the model, if there is one.
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
    progress = progress or silent
    backend = backend_for(target)
    program_options = backend.program_options(options)
    for name, value in (
        ("max_cache_len", max_cache_len),
        ("batch_size", batch_size),
        ("prefill_length", prefill_length),
    ):
        _check_size(name, value, optional=name == "prefill_length")
    if backend.max_batch_size is not None and batch_size > backend.max_batch_size:
        raise InputError(
            f"batch_size is {batch_size}, target {target!r} takes at most {backend.max_batch_size}; "
            "export with that, or for target 'pt2'"
        )
    if not isinstance(slack, int) or isinstance(slack, bool) or slack < 0:
        raise InputError(f"slack is {slack!r}; it must be an int of at least 0")
    Sinks.within(max_cache_len, attention_sinks, attention_window)
    quantization = quantization_of(quantize, group_size, quantize_embeddings)
    if quantization is not None:
        check_schemes(
            quantization, target, getattr(backend, "linear_schemes", ()), getattr(backend, "embedding_schemes", ())
        )
    parse_dtype(dtype)
    if output_dir is None:
        raise InputError("output_dir is missing; name the folder to write, such as 'artifacts/model'")
    output = Path(output_dir).expanduser()
    if not output.name:
        # "" and "." are one path, and "/" has no folder beside it; the export renames a new folder onto its output.
        raise InputError(
            f"output_dir is {os.fspath(output_dir)!r}, which is no name of a folder of its own; "
            "name the folder to write, such as 'artifacts/model'"
        )
    check_free(output, overwrite)
    layer_types_and_windows(load_config(model_or_path))
    loaded = load_model(model_or_path, dtype, progress=progress)
    _check_on_cpu(loaded.model)
    tokenizer = tokenizer if tokenizer is not None else loaded.tokenizer
    model, weights_bytes = loaded.model, None
    if quantization is not None:
        progress(f"quantising to {quantization}", 0, None)
        quantized = quantize_model(loaded.model, quantization)
        model, weights_bytes = quantized.model, quantized.weights_bytes
    cache = ExportableCache.from_model(
        model,
        max_cache_len,
        batch_size,
        attention_sinks=attention_sinks,
        attention_window=attention_window,
        max_encoder_len=max_encoder_len,
        kv_dtype=kv_dtype,
        slack=slack,
        attn_implementation=None,
    )
    check_positions(model, cache.max_length)
    program = Program(
        model,
        cache,
        prefill_length=prefill_length,
        modalities=modalities_of(model, modalities, image_size),
        **program_options,
    )
    with new_folder(output, overwrite) as folder:
        progress(f"lowering to {target}", 0, None)
        lowered = backend.lower(program, folder, options)
        bundle = write_bundle(
            folder,
            program,
            lowered,
            target=target,
            source=loaded.source,
            max_cache_len=max_cache_len,
            tokenizer=tokenizer,
            processor_files=loaded.processor_files,
            options=options,
            progress=progress,
        )
        manifest = bundle.manifest
        if quantization is not None:
            manifest = manifest.model_copy(
                update={"weights_bytes": weights_bytes, "quantization": Quantized(**quantization.to_dict())}
            )
        if kv_dtype is not None:
            exact = ExportableCache.from_model(
                model,
                max_cache_len,
                batch_size,
                attention_sinks=attention_sinks,
                attention_window=attention_window,
                slack=slack,
                attn_implementation=None,
                device="meta",
            )
            manifest = manifest.model_copy(update={"kv_cache": RoundedCache(dtype=kv_dtype, float_bytes=exact.nbytes)})
        if verify:
            session, remark = session_to_verify(Bundle(folder, manifest), model, program, progress=progress)
            report = verify_session(session, model, tolerance=tolerance_of(model, quantization), progress=progress)
            report = replace(report, remark=remark)
            _require_agreement(report, output)
            manifest = manifest.model_copy(update={"verification": report.to_dict()})
            if quantization is not None:
                effect = measure_quantization(session, loaded, progress)
                manifest = manifest.model_copy(update={"quantization": manifest.quantization.model_copy(update=effect)})
            if kv_dtype is not None:
                # From the model with the same weights: of quantised ones, the line above has the share of both.
                effect = measure_distance(session, model, progress)
                manifest = manifest.model_copy(update={"kv_cache": manifest.kv_cache.model_copy(update=effect)})
        manifest.write(folder)
    return Bundle(output, manifest)


def _check_size(name: str, value: Any, optional: bool) -> None:
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name} is {value!r}; it must be an int of at least 1")


def _check_on_cpu(model: PreTrainedModel) -> None:
    if model.device.type != "cpu":
        raise InputError(
            f"{type(model).__name__} is on {model.device}; programs are exported for the CPU: call model.cpu() first"
        )


def _require_agreement(report: VerifyReport, output: Path) -> None:
    if report.passed:
        return
    prompts = "; ".join(f"{prompt.length} tokens: {prompt.max_difference:.1e}" for prompt in report.prompts)
    raise VerificationError(
        f"{report} ({prompts}). {output} was not written; the target computes something else than the model: "
        "report it with the model type, or export with verify=False (--no-verify) to look into it"
    )
