"""The steps of an export, in order: resolve, load, quantise, allocate, program, lower, verify, measure, publish.

Each step takes the results of the previous ones and changes none of them. `run` calls all of them; they can also be
called one by one. Programs for tensor parallelism are one per rank, lowered one after the other in this process.
"""

from __future__ import annotations

import errno
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from ..backends import backend_for
from ..backends.base import target_dtypes
from ..bundle import signing
from ..bundle.builder import Provenance, check_free, new_folder, parameter_bytes, write_bundle
from ..bundle.files import rank_folder
from ..bundle.manifest import AppliedRecipe, Calibrated, Drafted, Quantized, RankedProgram, RoundedCache
from ..common.compat.torch_distributed import placeholder_group
from ..common.fs.tensor_files import Scratch
from ..common.process.tuning import few_collections
from ..common.progress import silent
from ..common.tensors import dtype_name
from ..errors import BundleError, InputError, UnsupportedModelError, VerificationError
from ..generation.checkpoint_settings import CheckpointSettings, end_tokens
from ..models.cache_factory import ExportableCache
from ..models.draft_heads import attach_head, draft_head_of
from ..models.layers.specs import (
    codebooks_of,
    layer_specs_from_config,
    layer_specs_from_model,
    layer_types_and_windows,
    vocab_size_of,
)
from ..models.loading.loading import (
    check_checkpoint,
    live_model,
    load_config,
    load_model,
    load_to_quantise,
    stored_dtype,
    with_rope_length,
)
from ..models.loading.without_weights import model_without_weights
from ..models.lora import remove_slots
from ..models.positions import beyond_positions, check_positions, check_rope, position_limit
from ..models.quantization.calibration import Calibration, read_calibration, tokens_of_text
from ..models.quantization.quantize import NOTHING_TO_KEEP, quantize
from ..models.quantization.sizes import Coverage, coverage_of, exact_bytes
from ..models.quantization.spec import KEEP_SCHEME
from ..models.vocabulary import reduced
from ..models.weights import convert
from ..parallel.heads import check_tensor_parallel, parts_of_heads
from ..parallel.rank_model import RankOf, part_of_model
from ..program.inputs.modalities import modalities_of
from ..program.program import Program
from ..session.inputs.prompt import sized_modalities
from ..verification.compare import compare, measure_stored, measure_without_rounding
from ..verification.measures import measure_acceptance, measure_quantization, short_prompts
from ..verification.references import session_to_verify
from ..verification.report import VerifyReport
from ..verification.spec import VerifySpec
from .dtypes import choose_dtype
from .spec import DRAFT_TARGETS, adapters_of, dtype_of, options_of, output_of, vocabulary_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedConfig

    from ..backends.base import Backend, LoweredFile
    from ..bundle.bundle import Bundle
    from ..common.progress import Progress
    from ..models.loading.loading import LoadedModel
    from ..program.inputs.modality import Modality
    from ..program.spec import ProgramSpec
    from ..session.session import Session
    from ..verification.report import FedPrompt
    from .dtypes import DtypeChoice
    from .spec import ExportSpec

    MakeProgram = Callable[[PreTrainedModel], Program]
    Lower = Callable[[Program, Path], list[LoweredFile]]


def check_ranks(config: PreTrainedConfig, size: int) -> None:
    """Check by its config that a model can be split evenly over ranks.

    Raises:
        InputError, UnsupportedModelError: See `check_tensor_parallel`; or if it is an encoder-decoder.
    """
    model = None if getattr(config, "is_encoder_decoder", False) else model_without_weights(config)
    if model is None:
        raise UnsupportedModelError(
            f"tensor_parallel is not supported for {config.model_type!r}, because it is an encoder-decoder or cannot "
            "be built without its weights; leave it out"
        )
    check_tensor_parallel(model, layer_specs_from_config(config, model), size)


def lower_ranks(
    model: PreTrainedModel, size: int, folder: Path, make: MakeProgram, lower: Lower, progress: Progress
) -> tuple[Program, list[LoweredFile], RankedProgram]:
    """Lower the program of every rank into a separate folder.

    Args:
        model: The whole model.
        size: Number of ranks.
        folder: Folder of the bundle.
        make: Makes the program of a rank's part of the model.
        lower: Writes a program into a folder.
        progress: Called for each rank.

    Returns:
        The program of rank 0, the files of all ranks, and their entry in the manifest.
    """
    files: list[LoweredFile] = []
    parts: tuple[int, ...] = ()
    first, most = None, 0
    for rank in range(size):
        progress(f"lowering rank {rank} of {size}", rank, size)
        one = RankOf(rank, size)
        part = part_of_model(model, one)
        if rank == 0:
            parts = parts_of_heads(part, layer_specs_from_model(part)[0], one, layer_specs_from_config)
        made = make(part)
        (folder / rank_folder(rank)).mkdir()
        with placeholder_group(rank, size):
            lowered = lower(made, folder / rank_folder(rank))
        files += [replace(file, name=f"{rank_folder(rank)}/{file.name}") for file in lowered]
        most = max(most, parameter_bytes(part))
        first = made if first is None else first
    assert first is not None
    return first, files, RankedProgram(size=size, parts_of_heads=list(parts), weights_bytes=most)


#: Fewest tokens of a text on which a draft head is measured.
_LEAST_DRAFT_TEXT = 256
#: Fewest tokens of text that a cache of default length has room for next to an item.
_LEAST_TEXT = 256


@dataclass(frozen=True)
class Resolved:
    """An export's options and choices before the weights are read.

    Attributes:
        spec: Options of the export.
        backend: Backend of the target.
        program: Options of the program; modalities are read from the model later.
        dtype: Choice of the dtype; None if the config does not name the stored one.
    """

    spec: ExportSpec
    backend: Backend
    program: ProgramSpec
    dtype: DtypeChoice | None


@dataclass(frozen=True)
class Source:
    """The model that a program is made from.

    Attributes:
        loaded: The loaded model with its tokenizer: in the chosen dtype, or as stored if it is quantized.
        model: The same model, or its quantized copy.
        dtype: Stored and exported dtype of the weights.
        weights_bytes: Bytes of the weights as the target stores them; None if the target keeps them unchanged.
        coverage: Quantized share of the weights; None without quantization.
        calibration: Text that the weights were calibrated on, and its effect; None without one.
        draft_ids: Tokens of the text on which the draft head is measured; None without one.
    """

    loaded: LoadedModel
    model: PreTrainedModel
    dtype: DtypeChoice
    weights_bytes: int | None = None
    coverage: Coverage | None = None
    calibration: Calibration | None = None
    draft_ids: list[int] | None = None


def run(spec: ExportSpec, progress: Progress = silent) -> Bundle:
    """Run all steps. The bundle appears after the last one; a failed step leaves nothing that loads."""
    resolved = resolve(spec)
    loaded = load(resolved, progress)
    resolved = with_examples(resolved, loaded)
    draft_ids = _draft_ids(spec, loaded)
    source = replace(quantise(resolved, loaded, progress), draft_ids=draft_ids)
    del loaded
    resolved, modalities = with_room(resolved, source.model)
    cache = allocate(resolved, source.model)
    made = program(resolved, source.model, cache, modalities)
    output = output_of(spec)
    with new_folder(output, spec.overwrite) as folder, disk_space_for(source, output, folder):
        lowered = lower(resolved, source, made, folder, progress)
        verified, fed = verify(resolved, source, made, lowered, progress)
        remove_slots(source.model)
        # Release the program before `measure` loads the stored weights, so that only one copy is in memory.
        del source, cache, made, lowered
        return publish(resolved, measure(resolved, verified, fed, progress))


def with_examples(resolved: Resolved, loaded: LoadedModel) -> Resolved:
    """Return the options with examples of items that the model's processor makes, where its config gives no size.

    Raises:
        InputError, UnsupportedModelError: See `sized_modalities`; or if there is no processor for `audio_seconds`.
    """
    spec = resolved.spec
    if not spec.modalities or isinstance(spec.modalities, Mapping) or not loaded.processor_files:
        if spec.audio_seconds is not None:
            raise InputError(
                f"audio_seconds needs the model's processor, which {loaded.source} lacks; pass what it makes of one "
                "audio: modalities={'audio': {...}}"
            )
        return resolved
    made, size = sized_modalities(
        loaded.model, spec.modalities, loaded.processor, spec.image_size, seconds=spec.audio_seconds
    )
    return replace(resolved, spec=replace(spec, modalities=made, image_size=size, audio_seconds=None))


def _draft_ids(spec: ExportSpec, loaded: LoadedModel) -> list[int] | None:
    if spec.draft_text is None:
        return None
    return tokens_of_text(spec.draft_text, loaded.tokenizer, "draft_text", _LEAST_DRAFT_TEXT)


@contextmanager
def disk_space_for(source: Source, path: Path, folder: Path) -> Iterator[None]:
    """Check that the disk has room for the weights, and convert errors of a full disk within the block.

    Libraries in C++ end the process on a full disk, so this is checked before they write.

    Args:
        source: Model to export.
        path: Final folder, for messages.
        folder: Temporary folder.

    Raises:
        BundleError: If there is not enough room, now or during the block.
    """
    parameters = {id(parameter): parameter.nbytes for parameter in source.model.parameters()}
    needed = source.weights_bytes or sum(parameters.values())
    full = f"cannot write {path}: no space left on device (needs more than {needed:,} bytes)"
    if shutil.disk_usage(folder).free < needed:
        raise BundleError(f"{full}; free some, or choose another disk")
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise BundleError(f"{full}; free some, or choose another disk") from error


def resolve(spec: ExportSpec) -> Resolved:
    """Check everything that needs no weights, and choose the program and the dtype.

    Raises:
        BundleError: If the folder may not be written.
        InputError: If there is no such model.
        UnsupportedModelError: If the config names a mechanism that the cache does not have, or a quantization that
            cannot be read.
        MissingDependencyError: If the target's options or the checkpoint need a package that is not installed.
    """
    backend = backend_for(spec.target)
    options_of(spec).check_export(spec.program.prefill_chunk, spec.verify)
    program_spec = backend.program_spec(spec.program, options_of(spec))
    check_free(output_of(spec), spec.overwrite)
    config = load_config(spec.model_or_path)
    layer_types_and_windows(config)
    if codebooks_of(config) is not None:
        raise UnsupportedModelError(
            f"a token of a {config.model_type!r} model is several ids, which bundles do not support; run it in a live "
            "session, Session.from_model"
        )
    if spec.tensor_parallel is not None:
        check_ranks(config, spec.tensor_parallel)
    check_checkpoint(spec.model_or_path, config)
    live = live_model(spec.model_or_path)
    # Here, too, because a dry run makes no program.
    if live is not None and draft_head_of(live) is not None and spec.cache.batch_size != 1:
        raise InputError(
            f"batch_size must be 1 for a model with a draft head, got {spec.cache.batch_size}; leave it out, or load "
            "the model again without the head"
        )
    stored = stored_dtype(live or config)
    return Resolved(spec, backend, program_spec, dtype=None if stored is None else _chosen(spec, stored))


def _chosen(spec: ExportSpec, stored: torch.dtype) -> DtypeChoice:
    options = options_of(spec)
    choice = choose_dtype(stored, dtype_of(spec), spec.target, options.to_dict(), spec.quantization is not None)
    options.check_dtype(choice.chosen)
    return choice


def load(resolved: Resolved, progress: Progress = silent) -> LoadedModel:
    """Read the weights and the tokenizer.

    Raises:
        InputError: If they cannot be read, the model is not on the CPU, in training mode or of another dtype, or a
            setting of its generation config is not supported; or if the vocabulary does not fit, see `keep_tokens`.
        UnsupportedModelError: If the model is of an unsupported kind.
    """
    spec = resolved.spec
    given = spec.model_or_path
    live = live_model(given)
    if live is not None and live.device.type not in ("cpu", "meta"):
        raise InputError(
            f"the model must be on the CPU, got {type(given).__name__} on {live.device}; call model.cpu() first"
        )
    if spec.quantization is not None:
        keep = spec.quantization.linear == KEEP_SCHEME
        loaded = load_to_quantise(
            given, lora=adapters_of(spec), progress=progress, keep=keep, whole=bool(spec.modalities)
        )
        if keep and not loaded.integers:
            remarks = "; ".join(loaded.remarks)
            raise InputError(NOTHING_TO_KEEP.format(f"none ({remarks})" if remarks else "none"))
    else:
        wanted = spec.dtype if resolved.dtype is None else resolved.dtype.chosen
        loaded = load_model(given, wanted, lora=adapters_of(spec), progress=progress, whole=bool(spec.modalities))
    if spec.tokenizer is not None:
        loaded = replace(loaded, tokenizer=spec.tokenizer)
    model = loaded.model
    if spec.draft is not None:
        attach_head(model, str(spec.draft))
    elif draft_head_of(model) is not None and spec.target not in DRAFT_TARGETS:
        raise InputError(
            f"a model with a draft head must be exported for target 'pt2' or 'executorch', got {spec.target!r}; load "
            "it again"
        )
    settings = CheckpointSettings.read(model.generation_config, vocab_size_of(model), loaded.tokenizer)
    ends = end_tokens(model.generation_config, vocab_size_of(model), loaded.tokenizer)
    loaded = with_rope_length(reduced(loaded, vocabulary_of(spec), ends), spec.rope_length)
    for remark in settings.remarks():
        progress(remark, 0, None)
    return replace(loaded, remarks=(*loaded.remarks, *settings.remarks()))


def quantise(resolved: Resolved, loaded: LoadedModel, progress: Progress = silent) -> Source:
    """Quantize a copy of the model if requested, and convert the weights to the chosen dtype.

    Raises:
        InputError, UnsupportedModelError: See `quantization.check_quantizable`.
    """
    # If the config names no dtype, use that of the weights.
    choice = resolved.dtype or _chosen(resolved.spec, loaded.model.dtype)
    if choice.stored != choice.chosen:
        progress(str(choice), 0, None)
    quantization = resolved.spec.quantization
    if quantization is None:
        convert(loaded.model, choice.chosen)
        keeps_exact = target_dtypes(resolved.spec.target, options_of(resolved.spec).to_dict()).keeps_exact
        return Source(loaded, loaded.model, choice, exact_bytes(loaded.model) if keeps_exact else None)
    progress(f"quantising to {quantization}", 0, None)
    output, text = output_of(resolved.spec), resolved.spec.calibrate
    calibration = None if text is None else read_calibration(text, loaded.tokenizer)
    try:
        scratch = _scratch_for(loaded.model, output)
        quantized = quantize(loaded.model, quantization, scratch, choice.chosen, loaded.integers, calibration)
    except OSError as error:
        raise BundleError(f"cannot write next to {output}: {error.strerror or error}; choose another disk") from error
    if quantized.remark:
        progress(quantized.remark, 0, None)
        loaded = replace(loaded, remarks=(*loaded.remarks, quantized.remark))
    coverage = coverage_of(loaded.model, quantization, choice.chosen, quantized.kept)
    if coverage.remark:
        warnings.warn(coverage.remark, RuntimeWarning, stacklevel=2)
    return Source(loaded, quantized.model, choice, quantized.weights_bytes, coverage, calibration)


def _calibrated(calibration: Calibration) -> Calibrated:
    before, after, layers = calibration.effect or (None, None, 0)
    return Calibrated(
        tokens=calibration.tokens,
        sha256=calibration.sha256,
        layers=layers,
        distance_before=before,
        distance_after=after,
    )


def _scratch_for(model: PreTrainedModel, output: Path) -> Scratch | None:
    """Return a factory of temporary files for a large model's integers, if the output's disk has room for both."""
    folder = next(folder for folder in output.absolute().parents if folder.is_dir())
    return Scratch.for_weights(folder, model.num_parameters())


def with_room(resolved: Resolved, model: PreTrainedModel) -> tuple[Resolved, tuple[Modality, ...]]:
    """Return the options, with a default length of the cache that has room for one item, and the modalities.

    Raises:
        InputError, UnsupportedModelError: See `modalities_of`.
    """
    spec = resolved.spec
    modalities = modalities_of(model, spec.modalities, spec.image_size)
    # Items of an encoder-decoder are among the text of its encoder.
    if spec.grows and spec.rope_length is None and not model.config.is_encoder_decoder:
        tokens = max((modality.tokens for modality in modalities), default=0)
        wanted = -(-(tokens + _LEAST_TEXT) // _LEAST_TEXT) * _LEAST_TEXT
        length = min(wanted, position_limit(model.config) or wanted)
        if spec.cache.max_cache_len < length and tokens < length:
            spec = replace(spec, cache=replace(spec.cache, max_cache_len=length))
    return replace(resolved, spec=spec), modalities


def allocate(resolved: Resolved, model: PreTrainedModel) -> ExportableCache:
    """Allocate the cache. The model keeps its attention implementation.

    Raises:
        InputError: If the cache holds more tokens than the model has positions for, or than one set of RoPE factors
            covers.
        UnsupportedModelError: If a layer has no storage policy.
    """
    cache = ExportableCache.from_model_spec(model, resolved.spec.cache, attn_implementation=None)
    check_positions(model, cache.max_length)
    check_rope(model, cache.max_length, resolved.program.takes_lengths)
    return cache


def program(
    resolved: Resolved, model: PreTrainedModel, cache: ExportableCache, modalities: Sequence[Modality] | None = None
) -> Program:
    """Combine model and cache into the methods of the target.

    Raises:
        InputError: If the cache does not hold a chunk, or the model does not support a modality.
        UnsupportedModelError: If the model does not fit the target's layout.
    """
    spec = resolved.spec
    if modalities is None:
        modalities = modalities_of(model, spec.modalities, spec.image_size)
    return Program(model, cache, replace(resolved.program, modalities=tuple(modalities)))


def lower(resolved: Resolved, source: Source, made: Program, folder: Path, progress: Progress = silent) -> Bundle:
    """Write the program and all files except the manifest into `folder`, so that nothing loads yet.

    Raises:
        UnsupportedModelError: If the model cannot be traced or lowered.
    """
    spec, options = resolved.spec, options_of(resolved.spec)
    progress(f"lowering to {spec.target}", 0, None)
    ranked: RankedProgram | None = None
    with few_collections():
        if spec.tensor_parallel is None:
            lowered = resolved.backend.lower(made, folder, options)
        else:
            made, lowered, ranked = lower_ranks(
                source.model,
                spec.tensor_parallel,
                folder,
                lambda part: program(resolved, part, allocate(resolved, part)),
                lambda part, inside: resolved.backend.lower(part, inside, options),
                progress,
            )
    provenance = Provenance(
        source.loaded.source,
        spec.target,
        spec.cache.max_cache_len,
        options.to_dict(),
        whole=None if ranked is None else source.model,
    )
    bundle = write_bundle(folder, made, lowered, provenance=provenance, loaded=source.loaded, progress=progress)
    remarks = list(source.loaded.remarks)
    recorded: dict[str, Any] = {
        "stored_dtype": dtype_name(source.dtype.stored),
        "remarks": remarks,
        "ranks": ranked,
    }
    if spec.recipe is not None:
        recorded["recipe"] = AppliedRecipe(name=spec.recipe, changed=dict(spec.recipe_changes))
    beyond = beyond_positions(made.model.config, spec.cache.max_cache_len, spec.cache.sinks is not None)
    remarks += [beyond] if beyond else []
    rounding = target_dtypes(spec.target, options.to_dict()).remarks.get(source.dtype.chosen)
    remarks += [rounding] if rounding else []
    copies = options.copies(spec.program.prefill_chunk)
    recorded["weights_bytes"] = copies * (source.weights_bytes or bundle.manifest.weights_bytes)
    if spec.quantization is not None:
        assert source.coverage is not None
        recorded["quantization"] = Quantized(
            **spec.quantization.to_dict(),
            quantized_bytes=copies * source.coverage.quantized_bytes,
            other_bytes=copies * source.coverage.other_bytes,
            calibration=None if source.calibration is None else _calibrated(source.calibration),
        )
        remarks += [source.coverage.remark] if source.coverage.remark else []
    head = draft_head_of(made.model)
    if head is not None:
        # The name of a folder only, because its path means nothing elsewhere.
        recorded["draft"] = Drafted(head=Path(head.name).resolve().name)
    if spec.cache.kv_dtype is not None:
        exact = replace(spec.cache, kv_dtype=None, device="meta")
        float_bytes = ExportableCache.from_model_spec(made.model, exact, attn_implementation=None).nbytes
        recorded["kv_cache"] = RoundedCache(dtype=spec.cache.kv_dtype, float_bytes=float_bytes)
    return replace(bundle, manifest=bundle.manifest.model_copy(update=recorded))


def verify(
    resolved: Resolved, source: Source, made: Program, bundle: Bundle, progress: Progress = silent
) -> tuple[Bundle, list[FedPrompt]]:
    """Compare the program with the model if requested, and record the report.

    Returns:
        The bundle, and the inputs and outputs of the program if its weights are stored in another 16-bit dtype.

    Raises:
        VerificationError: If they disagree.
    """
    spec, model = resolved.spec, source.model
    if not spec.verify:
        return bundle, []
    session, remark = session_to_verify(bundle, model, made, progress=progress)
    with session:
        return _verified(resolved, source, session, bundle, remark, progress)


def _verified(
    resolved: Resolved, source: Source, session: Session, bundle: Bundle, remark: str, progress: Progress
) -> tuple[Bundle, list[FedPrompt]]:
    spec, model, manifest = resolved.spec, source.model, bundle.manifest
    fed: list[FedPrompt] = []
    rounded = target_dtypes(manifest.target, manifest.options).rounded
    settings = VerifySpec(tolerance=spec.tolerance, rounded=rounded)
    report = compare(session, model, settings, progress, fed)
    report = replace(report, remark=remark)
    _require_agreement(report, output_of(spec))
    recorded: dict[str, Any] = {"verification": report.to_dict()}
    if spec.quantization is not None:
        effect = measure_quantization(session, source.loaded, short_prompts(fed), progress)
        assert manifest.quantization is not None
        recorded["quantization"] = manifest.quantization.model_copy(update=effect)
    if spec.cache.kv_dtype is not None:
        # From the model with the same weights; for quantized ones, the line above measures both effects together.
        distance = measure_without_rounding(model, short_prompts(fed), progress)
        assert manifest.kv_cache is not None
        recorded["kv_cache"] = manifest.kv_cache.model_copy(update=asdict(distance))
    if source.draft_ids is not None:
        assert manifest.draft is not None
        found = measure_acceptance(session, source.draft_ids, progress)
        recorded["draft"] = manifest.draft.model_copy(update={"acceptance": found})
    # For quantized weights, the effect above was measured against the stored model.
    keeps = source.dtype.widened and spec.quantization is None
    return replace(bundle, manifest=manifest.model_copy(update=recorded)), fed if keeps else []


def measure(resolved: Resolved, bundle: Bundle, fed: list[FedPrompt], progress: Progress = silent) -> Bundle:
    """Record how far a verified program is from the model in the stored dtype of its weights.

    Args:
        resolved: Result of `resolve`.
        bundle: The verified bundle.
        fed: Second result of `verify`; if it is empty, nothing is measured.
        progress: Called at each stage.
    """
    if not fed:
        return bundle
    given, lora, manifest = resolved.spec.model_or_path, adapters_of(resolved.spec), bundle.manifest
    assert manifest.stored_dtype is not None
    assert manifest.verification is not None
    if lora or not isinstance(given, PreTrainedModel):
        # Whole, because a decoder without its encoders has another class.
        whole = bool(resolved.spec.modalities)
        dtype = getattr(torch, manifest.stored_dtype)
        loaded = load_model(given, dtype, lora=lora, progress=progress, whole=whole)
    else:
        loaded = load_model(given)
    stored = with_rope_length(reduced(loaded, vocabulary_of(resolved.spec)), resolved.spec.rope_length).model
    report = VerifyReport.recorded(manifest.verification)
    report = replace(report, stored=measure_stored(stored, fed, progress))
    return replace(bundle, manifest=manifest.model_copy(update={"verification": report.to_dict()}))


def publish(resolved: Resolved, bundle: Bundle) -> Bundle:
    """Write the manifest, which makes the folder a bundle. `new_folder` renames it afterwards."""
    content = bundle.manifest.write(bundle.path)
    if resolved.spec.sign is not None:
        signing.sign(bundle.path, content, signing.private_key(resolved.spec.sign))
    return replace(bundle, path=output_of(resolved.spec))


def _require_agreement(report: VerifyReport, output: Path) -> None:
    if report.passed:
        return
    prompts = "; ".join(f"{prompt.length} tokens: {prompt.max_difference:.1e}" for prompt in report.prompts)
    raise VerificationError(
        f"{report} ({prompts}). {output} was not written, because the program differs from the model by more than "
        "rounding; report it with the model type, or accept the difference with tolerance= (--tolerance), or export "
        "with verify=False (--no-verify) to look into it"
    )
