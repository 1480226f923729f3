"""Export a model to a verified bundle, or preview an export."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from ..backends import backend_for
from ..backends.base import target_dtypes
from ..backends.executorch.options import NATIVE_KERNELS_NEEDED, needs_native_kernels
from ..cache.layer_spec import DRAFTED
from ..cache.spec import CacheSpec
from ..common.process.quiet import quietly
from ..common.progress import silent
from ..common.tensors import dtype_name
from ..errors import InputError, UnsupportedModelError
from ..generation.checkpoint_settings import end_tokens
from ..models.layers.specs import vocab_size_of
from ..models.loading.loading import live_model, load_config
from ..models.loading.location import locate
from ..models.loading.prequantized import stored_quantization
from ..models.loading.tokenizer import has_tokenizer, stored_generation_config, tokenizer_of
from ..models.loading.without_weights import model_without_weights
from ..models.lora import add_slots, remove_slots
from ..models.patches.mechanisms.rope import ROPE_REMARK, fix_rope
from ..models.positions import check_rope
from ..models.quantization.quantize import NOTHING_TO_KEEP
from ..models.quantization.sizes import coverage_of
from ..models.quantization.spec import KEEP_SCHEME, quantization_of
from ..models.vocabulary import keep_tokens
from ..program.spec import ProgramSpec
from .dtypes import DtypeChoice
from .plan import RecipeSize, plan_cache, sizes_of_recipes, weights_bytes
from .recipes import fill_options, has_recipes, remark_of
from .spec import DRAFT_TARGETS, ExportSpec, Split, cache_len_of, options_of, vocabulary_of
from .steps import resolve, run

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..bundle.bundle import Bundle
    from ..common.progress import Progress
    from .spec import ExportSpec


# The result depends on `dry_run`; the arguments are those below.
@overload
def export(*args: Any, dry_run: Literal[True], **options: Any) -> DryRun: ...


@overload
def export(*args: Any, dry_run: Literal[False] = False, **options: Any) -> Bundle: ...


@quietly  # type: ignore[misc]
def export(
    model_or_path: PreTrainedModel | str | os.PathLike,
    target: str = "executorch",
    max_cache_len: int | None = None,
    output_dir: str | os.PathLike | None = None,
    *,
    recipe: str | None = None,
    batch_size: int = 1,
    dtype: torch.dtype | str | None = None,
    prefill_chunk: int | None = None,
    quantize: str | None = None,
    group_size: int | None = None,
    quantize_embeddings: str | None = None,
    calibrate: str | os.PathLike | None = None,
    attention_sinks: int | None = None,
    attention_window: int | None = None,
    max_encoder_len: int | None = None,
    modalities: Sequence[str] | Mapping[str, Any] = (),
    image_size: int | Sequence[int] | None = None,
    audio_seconds: int | None = None,
    kv_dtype: str | None = None,
    rollback_slots: int = 0,
    tensor_parallel: int | None = None,
    verify: bool = True,
    tolerance: float | None = None,
    overwrite: bool = False,
    sign: str | os.PathLike | None = None,
    push_to_hub: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    lora: str | os.PathLike | Sequence[str | os.PathLike] = (),
    lora_slots: int = 0,
    lora_rank: int = 16,
    lora_targets: Sequence[str] = (),
    draft: str | os.PathLike | None = None,
    draft_text: str | os.PathLike | None = None,
    vocabulary: str | os.PathLike | Sequence[int] | None = None,
    rope_length: int | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Bundle | DryRun:
    """Export a causal LM with its static cache, verify the result against the model, and write a bundle.

    The bundle appears under `output_dir` when everything has succeeded; a failed export leaves nothing that loads.
    Checks that need no weights run before the weights are loaded.

    Args:
        model_or_path: `demo`, a local folder or GGUF file, a hub id, or a loaded model in eval mode. The adapters of a
            PEFT model are merged into a copy of the weights that they change.
        target: One of `backends.TARGETS`.
        max_cache_len: Tokens that a full-attention layer can hold; by default 1024, or more if one image or audio
            needs it, and at most the model's positions.
        output_dir: Folder of the bundle; must not exist, be empty, or be a bundle to overwrite.
        recipe: Name of a recipe, which sets the options below that are not given: `exact` (the default) keeps weights
            as the checkpoint has them, `fast`, `small`, or `portable`, which calls ExecuTorch's operators only and is
            the default with `llm_runner`; see `recipes.RECIPES`. Other targets than `executorch` only have `exact`.
        batch_size: Number of rows.
        dtype: Dtype of the weights. By default float32 for ExecuTorch and quantized weights, and the stored dtype for
            other targets, see `dtypes.choose_dtype`.
        prefill_chunk: Longest chunk of a prompt, see `ProgramSpec`.
        quantize: Scheme of the linear layers' weights, such as "8da4w", see `Quantization`; None for none. The program
            is then verified against the quantized model, and its distance from the float model is recorded.
        group_size: Number of weights that share a scale in 4-bit schemes.
        quantize_embeddings: Scheme of the embedding table: "8w", "4w", or "none". By default "8w" with `quantize`, if
            the target supports it.
        calibrate: Text file to calibrate `8da4w`, `4w` or `fp8` on, of at least 512 tokens. Rounding then makes up for
            its errors on the inputs that layers have on this text (GPTQ), see docs/guides/quantize.md.
        attention_sinks: First tokens that full-attention layers keep, see `ExportableCache.from_config`.
        attention_window: Newest tokens that full-attention layers keep, so that generation has no end.
        max_encoder_len: Longest input of an encoder-decoder's encoder in tokens, frames or samples, see
            `ExportableCache.from_model`.
        modalities: Further inputs besides text: `image`, `video`, `audio`; or a dict from kind to the processor's
            output for one item, see `modalities_of`. The model's processor is then saved in the bundle. Encoders are
            verified on random numbers, see `verify_encoders`.
        image_size: Height and width of every image in pixels, if the model's config does not fix it.
        audio_seconds: Length of every audio in seconds, if the model's config does not fix it; 30 by default. The
            command line and `serve` pad shorter audio with silence.
        kv_dtype: `float16`, `bfloat16`, `int8` or `int4` to store keys and values in fewer bits, see
            `ExportableCache.from_config`. The program is then verified against the model with the same rounding, and
            its distance from the model without rounding is recorded.
        rollback_slots: Extra slots of each ring, so that `rollback_slots + 1` tokens can be taken back past the window,
            for speculative decoding.
        tensor_parallel: Number of ranks to split the program over, by transformers' plan of the model (targets `pt2`
            and `aoti`). The bundle has one program with part of the weights per rank, and that many processes open it
            together.
        verify: Compare the program with the model, see `verify_session`; the report is recorded in the manifest.
        tolerance: Largest |logit difference| that `verify` accepts. The default depends on the dtype and the spread of
            the model's logits, see `VerifySpec`.
        overwrite: Replace an existing bundle.
        sign: File of the private Ed25519 key to sign the bundle with, for `load(..., key=)`; needs the extra `sign`.
        push_to_hub: Repository of the hub to upload the bundle to, such as `user/name`, see `upload.upload`.
        tokenizer: Tokenizer to save in the bundle; by default the model's, if it has one.
        lora: Folder of a LoRA adapter (PEFT) to merge into the weights.
        lora_slots: Number of LoRA adapters that the program holds at once, see `Session.load_adapter`; 0 for none.
            Targets `pt2`, `executorch` and `tensorrt`.
        lora_rank: Largest rank of these adapters.
        lora_targets: Names of the linear layers that they may change; all of the decoder by default.
        draft: "mtp" or the folder of an EAGLE-3 head to export with the model, for `TrainedDraft`. It stays attached to
            a loaded model. Targets `pt2` and `executorch`. `score_length` is then 4 by default, and `rollback_slots`
            allows to take back as many tokens.
        draft_text: Text file of at least 256 tokens on which the acceptance of the draft head is measured, for the
            manifest: greedy generations after eight pieces of it.
        vocabulary: Token ids, or a file of them, whose logits the program computes; those of other tokens are minus
            infinity. They must include the end tokens. All by default.
        rope_length: Sequence length whose factors LongRoPE and dynamic NTK have at every position. With it, targets
            whose programs know no lengths can hold more tokens than the threshold. By default a sequence's own length.
        dry_run: Read no weights, write nothing, and return a `DryRun` that describes the export.
        progress: Called at each stage.
        **options: Options of the target.

    Returns:
        The bundle, or a `DryRun` with `dry_run=True`.

    Raises:
        InputError: If an argument is out of range or unknown, or the model cannot be loaded.
        UnsupportedModelError: If the model is not a causal LM, or needs a mechanism that the cache does not have.
        MissingDependencyError: If the target needs a package that is not installed.
        BundleError: If `output_dir` may not be written.
        VerificationError: If the program disagrees with the model; no bundle is written.

    Example:
        >>> bundle = export("demo", target="executorch", max_cache_len=512, output_dir="artifacts/demo")
        >>> session = load(bundle.path)
    """
    backend = backend_for(target)
    # Parsed first, so that an unknown target or option is reported before anything else.
    backend.options.parse(options)
    filled = fill_options(
        recipe,
        target,
        options,
        {
            "quantize": quantize,
            "group_size": group_size,
            "quantize_embeddings": quantize_embeddings,
            "kv_dtype": kv_dtype,
            "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        },
    )
    settings = filled.settings
    # Other delegates and the static form refuse it by name later.
    resident = options.get("delegate", "xnnpack") == "xnnpack" and options.get("form") != "static"
    if draft is not None and target in DRAFT_TARGETS and resident:
        # A head is of no use where its proposals cannot be scored and taken back.
        scored = filled.options.setdefault("score_length", DRAFTED + 1)
        rollback_slots = max(rollback_slots, scored - 2) if isinstance(scored, int) else rollback_slots
    spec = ExportSpec(
        model_or_path,
        target,
        output_dir,
        recipe=filled.recipe,
        recipe_changes=filled.changed,
        options=backend.options.parse(filled.options),
        cache=CacheSpec(
            cache_len_of(model_or_path, max_cache_len),
            batch_size,
            rollback_slots=rollback_slots,
            attention_sinks=attention_sinks,
            attention_window=attention_window,
            kv_dtype=settings["kv_dtype"],
            max_encoder_len=max_encoder_len,
        ),
        program=ProgramSpec(prefill_chunk, lora_slots=lora_slots, lora_rank=lora_rank, lora_targets=lora_targets),
        quantization=quantization_of(
            settings["quantize"],
            settings["group_size"],
            settings["quantize_embeddings"],
            getattr(backend, "embedding_schemes", ()),
        ),
        calibrate=calibrate,
        dtype=dtype,
        modalities=modalities,
        image_size=image_size,
        grows=max_cache_len is None,
        audio_seconds=audio_seconds,
        tensor_parallel=tensor_parallel,
        verify=verify,
        tolerance=tolerance,
        overwrite=overwrite,
        sign=sign,
        push_to_hub=push_to_hub,
        tokenizer=tokenizer,
        lora=lora,
        draft=draft,
        draft_text=draft_text,
        vocabulary=vocabulary,
        rope_length=rope_length,
        dry_run=dry_run,
    )
    if dry_run:
        return preview(spec)
    if spec.push_to_hub is None:
        return run(spec, progress or silent)
    from .upload import check_upload, upload

    # Checked before the export, which takes long.
    check_upload(spec.push_to_hub)
    bundle = run(spec, progress or silent)
    try:
        upload(bundle.path, spec.push_to_hub, progress=progress or silent)
    except InputError as error:
        raise InputError(
            f"{error}; the bundle is in {bundle.path}: exportable-cache upload {bundle.path} {spec.push_to_hub}"
        ) from error
    return bundle


@dataclass(frozen=True)
class DryRun:
    """A preview of an export.

    Attributes:
        output_dir: Folder of the bundle.
        target: Target of the export.
        architecture: Class of the model, if it is known.
        dtype: Dtype of the weights that are exported, or that are quantized.
        quantization: Quantization of the weights, as in the manifest.
        files: Content of each file, by name.
        weights_bytes: Bytes of the weights in the files; None if the model cannot be built without its weights.
        cache_bytes: Bytes of the cache, which the opened program allocates.
        max_cache_len: Tokens that a full-attention layer can hold.
        least_memory_bytes: Bytes of the weights, one cache and slots for adapters: the minimum for the export and for
            the opened program. What a target needs beyond that is unknown.
        recipe: Recipe of the export, or None.
        recipes: Sizes with each recipe, by name; empty for programs without recipes.
        remarks: Changes to the weights and requirements of the program, one per line.
    """

    output_dir: str
    target: str
    architecture: str | None
    dtype: str
    quantization: dict[str, Any] | None
    files: dict[str, str]
    weights_bytes: int | None
    cache_bytes: int
    max_cache_len: int
    least_memory_bytes: int | None
    recipe: str | None = None
    recipes: dict[str, RecipeSize] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the preview as JSON values."""
        return {**asdict(self), "remarks": list(self.remarks)}


def preview(spec: ExportSpec) -> DryRun:
    """Check an export and describe its result, without reading weights, lowering or writing.

    This cannot detect missing tensors of a checkpoint, models that cannot be traced or lowered, or a program that
    disagrees with the model.

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
    # Shapes only, also for a live model, so that no tensor is copied. An export writes the encoders of images, too.
    model: Any = model_without_weights(config, whole=True, items=bool(spec.modalities))
    kept = vocabulary_of(spec)
    if kept is not None and model is not None:
        model = keep_tokens(model, kept, _ends_of(spec, vocab_size_of(model)))
    weights = made.weights_bytes
    coverage = None
    if model is not None and spec.rope_length is not None:
        model = fix_rope(model, spec.rope_length)
    if model is not None:
        check_rope(model, made.max_length, resolved.program.takes_lengths)
    copies = options_of(spec).copies(spec.program.prefill_chunk)
    if spec.quantization is not None and spec.quantization.linear == KEEP_SCHEME:
        # The integers that are kept are known once the weights are read.
        weights = None
    elif model is not None:
        weights = weights_bytes(model, resolved.dtype or DtypeChoice(dtype, dtype), spec.quantization)
        if spec.quantization is not None:
            coverage = coverage_of(model, spec.quantization, dtype)
    weights = None if weights is None else copies * weights
    stored = stored_quantization(config)
    if weights is None and stored is None and live is None and not str(spec.model_or_path).endswith(".gguf"):
        raise InputError(NOTHING_TO_KEEP.format("none"))
    slots = 0
    if model is not None and spec.program.lora_slots:
        program = spec.program
        found = add_slots(model, program.lora_slots, program.lora_rank, program.lora_targets)
        slots = replace(found, dtype=dtype_name(dtype)).nbytes
        remove_slots(model)
    remarks = [] if stored is None else [stored.remark.replace("were dequantised", "would be dequantised")]
    remarks += [made.positions] if made.positions else []
    remarks += [] if spec.rope_length is None else [ROPE_REMARK.format(spec.rope_length)]
    if slots:
        remarks.append(f"{spec.program.lora_slots} slots for adapters would take {slots:,} bytes of memory")
    remarks += [coverage.remark] if coverage is not None and coverage.remark else []
    # A tuple of paths, because `ExportSpec` has converted it.
    remarks += [f"the adapter in {folder} would be merged into the weights" for folder in tuple(spec.lora)]  # type: ignore[arg-type]
    if made.tensor_parallel is not None:
        each = made.tensor_parallel
        remarks.append(
            f"each of {each.ranks} ranks would have at most {each.weights_bytes:,} bytes of the weights, and "
            f"{each.cache_bytes:,} of cache"
        )
    if resolved.dtype is not None and resolved.dtype.stored != resolved.dtype.chosen:
        remarks.append(str(resolved.dtype))
    rounding = target_dtypes(spec.target, options_of(spec).to_dict()).remarks.get(dtype)
    remarks += [rounding] if rounding else []
    if spec.options is not None and needs_native_kernels(spec.options.to_dict()):
        remarks.append(NATIVE_KERNELS_NEEDED)
    lacking = remark_of(spec.recipe, spec.target, options_of(spec).to_dict(), dtype_name(dtype))
    remarks += [lacking] if lacking else []
    return DryRun(
        output_dir=str(spec.output_dir),
        target=spec.target,
        architecture=made.architecture,
        dtype=dtype_name(dtype),
        quantization=None if spec.quantization is None else spec.quantization.to_dict(),
        files=_files(spec),
        weights_bytes=weights,
        cache_bytes=made.cache_bytes,
        max_cache_len=spec.cache.max_cache_len,
        least_memory_bytes=None if weights is None else weights + made.cache_bytes + slots,
        recipe=spec.recipe,
        recipes=(
            sizes_of_recipes(live or config, spec.cache) if has_recipes(spec.target, options_of(spec).to_dict()) else {}
        ),
        remarks=tuple(remarks),
    )


def _ends_of(spec: ExportSpec, vocab_size: int) -> list[int]:
    """Return the tokens that end a generation of the exported program, without reading weights."""
    live, tokenizer = live_model(spec.model_or_path), spec.tokenizer
    if live is not None:
        return end_tokens(live.generation_config, vocab_size, tokenizer)
    location = locate(str(spec.model_or_path))
    return end_tokens(stored_generation_config(location), vocab_size, tokenizer or tokenizer_of(location))


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
