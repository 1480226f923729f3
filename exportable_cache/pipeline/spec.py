"""Options of an export and of a plan, each in one frozen value that is checked before a model is read.

Importing this module imports no torch, because the command line makes its options from the fields.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..backends.registry import backend_for
from ..cache.spec import EXPORT_CACHE_LEN, CacheSpec
from ..common.settings import REQUIRED, check_settings, same_setting, setting
from ..errors import InputError
from ..models.quantization.spec import KEEP_SCHEME, check_calibrated, check_schemes
from ..program.inputs.kinds import AUDIO, KINDS, check_kinds
from ..program.spec import ProgramSpec
from ..verification.spec import VerifySpec, check_tolerance
from .recipes import EXACT, RECIPES

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from ..backends.options import TargetOptions
    from ..models.quantization.spec import Quantization

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
#: Targets whose programs may have a draft head.
DRAFT_TARGETS = ("pt2", "executorch")
_NO_OUTPUT = "name the folder to write, such as 'artifacts/model'"


#: What the command line shows as the default length of a cache.
DEFAULT_CACHE_LEN = f"{EXPORT_CACHE_LEN}, or the model's positions"


def cache_len_of(model_or_path: PreTrainedModel | PreTrainedConfig | str | os.PathLike, asked: int | None) -> int:
    """Return the length of an export's cache: the one asked for, or `EXPORT_CACHE_LEN` and at most the positions.

    Raises:
        InputError, UnsupportedModelError: If none is asked for, and there is no config to read.
    """
    if asked is not None:
        return asked
    from ..models.loading.loading import load_config
    from ..models.positions import default_cache_len

    return default_cache_len(load_config(model_or_path), EXPORT_CACHE_LEN)


@dataclass(frozen=True)
class ExportSpec:
    """The options of an export.

    Attributes:
        model_or_path: `demo`, a local folder, a hub id, or a loaded model in eval mode.
        target: One of `backends.TARGETS`.
        output_dir: Folder of the bundle; must not exist, be empty, or be a bundle to overwrite. Kept as a `Path`.
        cache: The program's cache. Its dtype and device are the model's.
        program: Requested chunk of a prompt; other fields are set by the target and `modalities`.
        options: Options of the target.
        quantization: Quantization of the weights, or None.
        dtype: Dtype of the weights; by default the target's best, see `dtypes.choose_dtype`.
        modalities: Further inputs besides text, such as `image`, see `modalities_of`.
        image_size: Height and width of every image in pixels, if the model's config does not fix it.
        audio_seconds: Length of every audio in seconds, if the model's config does not fix it; 30 by default.
        grows: Let the cache be longer if one item needs it, because its length is a default.
        verify: Compare the program with the model.
        tolerance: Largest |logit difference| that passes, see `VerifySpec`; None for the default of the dtype.
        overwrite: Replace an existing bundle.
        tensor_parallel: Number of ranks to split the program over, or None.
        sign: File of the private key to sign the bundle with, see `bundle.signing`, or None.
        push_to_hub: Repository of the hub to upload the bundle to, such as `user/name`, or None.
        tokenizer: Tokenizer to save in the bundle; None for the model's.
        lora: Folder of an adapter to merge into the weights, at most one.
        draft: Draft head of the program, see `Session.from_model`; None for none.
        draft_text: File of a text on which the acceptance of the draft head is measured, or None.
        vocabulary: Token ids whose logits are computed, or a file of them, see `read_vocabulary`; None for
            all. Read when the spec is made, into a tuple.
        rope_length: Sequence length whose RoPE factors are used at every position, see `fix_rope`; None for those of
            each sequence.
        dry_run: Describe the export, and write nothing.
        recipe: Name of the recipe from which `export` filled in other options, for the manifest; None for none. See
            `recipes.fill_options`.
        recipe_changes: Options that were given and differ from the recipe, for the manifest.

    Raises:
        InputError: If a value is out of range, or not supported by the target.
        MissingDependencyError: If the target needs a package that is not installed.
    """

    model_or_path: PreTrainedModel | str | os.PathLike
    target: str = setting(
        "executorch",
        "Runtime.",
        flags=("--target", "-t"),
        metavar="TARGET",
    )
    output_dir: str | os.PathLike | None = setting(
        None, "Folder to write the bundle to.", flags=("--output-dir", "--output", "-o"), metavar="DIR", kind=Path
    )
    recipe: str | None = setting(
        None,
        f"Defaults: {'; '.join(f'{name} is {one.about}' for name, one in RECIPES.items())}.",
        flags=("--recipe",),
        choices=tuple(RECIPES),
        shown_default=EXACT,
    )
    cache: CacheSpec = field(default=REQUIRED, kw_only=True)  # type: ignore[assignment]
    grows: bool = field(default=False, kw_only=True)
    program: ProgramSpec = field(default=ProgramSpec(), kw_only=True)
    options: TargetOptions | None = field(default=None, kw_only=True)
    quantization: Quantization | None = field(default=None, kw_only=True)
    recipe_changes: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    calibrate: str | os.PathLike | None = setting(
        None,
        "Text to calibrate 8da4w, 4w or fp8 on.",
        flags=("--calibrate",),
        metavar="FILE",
        kind=Path,
        shown_default=False,
    )
    dtype: torch.dtype | str | None = same_setting(CacheSpec, "dtype")
    modalities: Sequence[str] | Mapping[str, Any] = setting(
        (),
        "Also take image, video or audio, and export its encoder.",
        flags=("--modalities",),
        metavar="|".join(KINDS),
        repeats=True,
    )
    image_size: int | Sequence[int] | None = setting(
        None,
        "Height and width of images in pixels, if the config has none.",
        flags=("--image-size",),
        metavar="HxW",
        shown_default=False,
    )
    audio_seconds: int | None = setting(
        None,
        "Seconds of audio, if the config has no length (default: 30).",
        flags=("--audio-seconds",),
        metavar="N",
        kind=int,
        least=1,
        shown_default=False,
    )
    verify: bool = setting(
        True,
        "Compare the program with the eager model (the default).",
        flags=("--verify/--no-verify",),
        kind=bool,
        shown_default=False,
    )
    tolerance: float | None = same_setting(VerifySpec, "tolerance")
    overwrite: bool = setting(False, "Replace DIR if it exists.", flags=("--overwrite",), kind=bool)
    tensor_parallel: int | None = setting(
        None,
        "Split the program over N processes, by transformers' plan.",
        flags=("--tensor-parallel",),
        metavar="N",
        kind=int,
        least=2,
        shown_default=False,
    )
    sign: str | os.PathLike | None = setting(
        None,
        "Private Ed25519 key to sign the bundle with.",
        flags=("--sign",),
        metavar="FILE",
        kind=Path,
        shown_default=False,
    )
    push_to_hub: str | None = setting(
        None,
        "Then upload the bundle to this repository of the hub.",
        flags=("--push-to-hub",),
        metavar="USER/NAME",
        shown_default=False,
    )
    tokenizer: PreTrainedTokenizerBase | None = None
    lora: str | os.PathLike | Sequence[str | os.PathLike] = setting(
        (),
        "Folder of a LoRA adapter to merge into the weights.",
        flags=("--lora",),
        metavar="FOLDER",
        repeats=True,
    )
    draft: str | os.PathLike | None = setting(
        None,
        "Also export a draft head: the MTP modules of the checkpoint, or an EAGLE-3 head.",
        flags=("--draft",),
        metavar="mtp|FOLDER",
        shown_default=False,
    )
    draft_text: str | os.PathLike | None = setting(
        None,
        "Text to measure the acceptance of the draft head on.",
        flags=("--draft-text",),
        metavar="FILE",
        kind=Path,
        shown_default=False,
    )
    vocabulary: str | os.PathLike | Sequence[int] | None = setting(
        None,
        "File of the ids of the tokens to keep in the head; the logits of others are minus infinity.",
        flags=("--vocabulary",),
        metavar="FILE",
        kind=Path,
        shown_default="all tokens",
    )
    rope_length: int | None = setting(
        None,
        "Use the RoPE factors of N tokens at every length (LongRoPE, dynamic NTK).",
        flags=("--rope-length",),
        metavar="N",
        kind=int,
        least=1,
        shown_default=False,
    )
    dry_run: bool = setting(
        False,
        "Only check the arguments, and show what would be written.",
        flags=("--dry-run",),
        kind=bool,
    )

    def __post_init__(self) -> None:
        backend = backend_for(self.target)
        check_settings(self)
        if self.cache.offload is not None:
            raise InputError("offload is only for live sessions, because a program contains its cache; leave it out")
        options = backend.options() if self.options is None else self.options
        if not isinstance(options, backend.options):
            raise InputError(
                f"options must be {backend.options.__name__} for target {self.target!r}, got {type(options).__name__}; "
                "pass those"
            )
        # An option may raise the target's limit.
        most, rows = getattr(options, "max_batch_size", backend.max_batch_size), self.cache.batch_size
        if most is not None and rows > most:
            lifted = getattr(options, "rows_by", None)
            raise InputError(
                f"batch_size must be at most {most} for target {self.target!r}, got {rows}; "
                f"reduce it, {f'{lifted}, ' if lifted else ''}or export for target 'pt2'"
            )
        options.check_cache(self.cache)
        if self.tensor_parallel is not None:
            _check_ranks(self, backend)
        if self.program.lora_slots and not (
            getattr(backend, "holds_adapters", False) and getattr(options, "delegate", "xnnpack") == "xnnpack"
        ):
            raise InputError(
                f"lora_slots={self.program.lora_slots} is not supported by target {self.target!r} with these options; "
                "export for target 'pt2', 'tensorrt', or 'executorch' with delegate='xnnpack', or merge one adapter "
                "(lora=, --lora)"
            )
        _check_rope_length(self)
        if self.draft is not None:
            _check_draft(self)
        if self.draft_text is not None:
            _check_draft_text(self)
        if self.calibrate is not None:
            scheme = None if self.quantization is None else self.quantization.linear
            check_calibrated(self.calibrate, scheme, self.recipe)
        if self.quantization is not None:
            # Options may have other schemes than their target.
            linear = getattr(options, "linear_schemes", getattr(backend, "linear_schemes", ()))
            options.check_quantization(self.quantization)
            check_schemes(self.quantization, self.target, linear, getattr(backend, "embedding_schemes", ()))
            if self.lora and self.quantization.linear == KEEP_SCHEME:
                raise InputError(
                    f"lora must be left out with quantize='keep', because an adapter changes the integers, got "
                    f"{self.lora!r}; leave one of them out"
                )
            kept = getattr(backend, "kept_weights", "affine")
            experts = getattr(options, "expert_schemes", getattr(backend, "expert_schemes", ()))
            chosen = self.quantization.for_target(kept, experts, getattr(options, "largest_group", None))
            object.__setattr__(self, "quantization", chosen)
            if getattr(options, "native_linears", False):
                object.__setattr__(self, "quantization", self.quantization.for_native_linears())
        from ..common.tensors import parse_dtype
        from .dtypes import check_dtype

        check_tolerance("tolerance", self.tolerance)
        if self.tolerance is not None and not self.verify:
            raise InputError(f"tolerance={self.tolerance} cannot be combined with verify=False; leave one of them out")
        object.__setattr__(self, "options", options)
        dtype = parse_dtype(self.dtype)
        object.__setattr__(self, "dtype", dtype)
        check_dtype(dtype, self.target, options.to_dict(), self.quantization is not None)
        object.__setattr__(self, "output_dir", _checked_output(self.output_dir))
        if self.sign is not None:
            # Checked early, before a long export.
            from ..bundle.signing import private_key

            private_key(self.sign)
        if self.push_to_hub is not None:
            from ..bundle.hub import check_repository

            check_repository(self.push_to_hub)
        check_kinds(self.modalities)
        if self.audio_seconds is not None and (AUDIO not in self.modalities or isinstance(self.modalities, Mapping)):
            raise InputError(
                f"audio_seconds is only used with modalities=['audio'] (--modalities audio), got {self.audio_seconds}; "
                "leave it out"
            )
        if not isinstance(self.modalities, Mapping):
            object.__setattr__(self, "modalities", tuple(self.modalities))
        object.__setattr__(self, "lora", _checked_lora(self.lora))
        if self.vocabulary is not None:
            from ..models.vocabulary import read_vocabulary

            object.__setattr__(self, "vocabulary", read_vocabulary(self.vocabulary))


def _check_rope_length(spec: ExportSpec) -> None:
    """Check that no position of the cache is past the length whose factors RoPE has."""
    least = spec.cache.max_cache_len
    if spec.rope_length is not None and not least <= spec.rope_length < 2**63:
        raise InputError(
            f"rope_length must be at least max_cache_len={least} and less than 2**63, got {spec.rope_length}; pass "
            f"{least} for the factors of a full cache"
        )


def _check_draft(spec: ExportSpec) -> None:
    """Check that nothing is asked for that a program with a draft head does not have."""
    options = {} if spec.options is None else spec.options.to_dict()
    others = {
        f"target {spec.target!r}, only with {' or '.join(map(repr, DRAFT_TARGETS))}": spec.target not in DRAFT_TARGETS,
        f"delegate={options.get('delegate')!r}": options.get("delegate", "xnnpack") != "xnnpack",
        "form='static'": options.get("form") == "static",
        "llm_runner": bool(options.get("llm_runner")),
        "shift": bool(options.get("shift")),
        "vocabulary": spec.vocabulary is not None,
        "rope_length": spec.rope_length is not None,
        "tensor_parallel": spec.tensor_parallel is not None,
        f"batch_size={spec.cache.batch_size}": spec.cache.batch_size != 1,
        "dry_run": spec.dry_run,
    }
    for what, found in others.items():
        if found:
            raise InputError(f"draft={str(spec.draft)!r} cannot be combined with {what}; leave one of them out")


def _check_draft_text(spec: ExportSpec) -> None:
    """Check that the acceptance of a draft head can be measured."""
    if spec.draft is None:
        raise InputError(f"draft_text={str(spec.draft_text)!r} needs a draft head; pass draft='mtp', or leave it out")
    if not spec.verify:
        raise InputError("draft_text cannot be combined with verify=False; leave one of them out")
    options = {} if spec.options is None else spec.options.to_dict()
    if options.get("score_length", 0) < 2:
        raise InputError("draft_text needs score_length=2 or more, because proposals are scored, got 0; leave it out")
    if not Path(spec.draft_text or "").is_file():
        raise InputError(f"draft_text must be a file of text, got {str(spec.draft_text)!r}; check the path")


def output_of(spec: ExportSpec) -> Path:
    """Return the checked folder of the bundle."""
    assert isinstance(spec.output_dir, Path)
    return spec.output_dir


def options_of(spec: ExportSpec) -> TargetOptions:
    """Return the target's options, with defaults filled in."""
    assert spec.options is not None
    return spec.options


def dtype_of(spec: ExportSpec | CacheSpec) -> torch.dtype | None:
    """Return the requested dtype, with names already parsed."""
    assert not isinstance(spec.dtype, str)
    return spec.dtype


def adapters_of(spec: ExportSpec) -> Sequence[str | os.PathLike]:
    """Return the folders of adapters, already converted to a tuple."""
    assert not isinstance(spec.lora, (str, os.PathLike))
    return spec.lora


def vocabulary_of(spec: ExportSpec) -> Sequence[int] | None:
    """Return the ids of the tokens to keep, already read from their file."""
    assert not isinstance(spec.vocabulary, (str, os.PathLike))
    return spec.vocabulary


def _check_ranks(spec: ExportSpec, backend: Any) -> None:
    """Check that the options support several ranks."""
    if not getattr(backend, "sums_over_ranks", False):
        raise InputError(
            f"tensor_parallel={spec.tensor_parallel} is not supported by target {spec.target!r}, whose programs run in "
            "one process; export for target 'pt2' or 'aoti', or leave it out"
        )
    for name, given in (
        ("quantize", spec.quantization),
        ("modalities", spec.modalities),
        ("vocabulary", spec.vocabulary),
    ):
        if given:
            raise InputError(
                f"tensor_parallel={spec.tensor_parallel} cannot be combined with {name}={given!r}, because programs "
                f"over ranks have float weights and whole heads, and take only text; leave one of them out"
            )


def _checked_lora(lora: str | os.PathLike | Sequence[str | os.PathLike] | None) -> tuple[str, ...]:
    if not lora:
        return ()
    from ..models.loading.adapters import check_adapters

    return check_adapters([lora] if isinstance(lora, (str, os.PathLike)) else lora)


def _checked_output(output_dir: str | os.PathLike | None) -> Path:
    if output_dir is None:
        raise InputError(f"output_dir must be given; {_NO_OUTPUT}")
    output = Path(output_dir).expanduser()
    if not output.name:
        # The export renames a new folder to this path, which "", "." and "/" do not allow.
        raise InputError(f"output_dir must name a new folder, got {os.fspath(output_dir)!r}; {_NO_OUTPUT}")
    return output


@dataclass(frozen=True)
class Split:
    """A division of a model over processes, for a plan.

    Attributes:
        tensor_parallel: Number of ranks that share every layer, or None.
        memory: Bytes that a process may use for weights and cache; text such as "16G" is converted (GiB).

    Raises:
        InputError: If a value is out of range.
    """

    tensor_parallel: int | None = setting(
        None,
        "Also plan for N ranks that share every layer.",
        flags=("--tensor-parallel",),
        metavar="N",
        kind=int,
        shown_default=False,
    )
    memory: int | str | None = setting(
        None,
        "Show how many tokens fit into SIZE per process, such as 16G.",
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
        raise InputError(f"memory must be a number of bytes or a size such as 800M or 16G, got {given!r}")
    return int(float(found[1]) * _UNITS[found[2].upper()])
