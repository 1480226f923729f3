"""A backend of transformers' exporters: importing this module registers the format `exportable_cache` with them."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..bundle.files import EXPORTERS_FORMAT as FORMAT
from ..common.tensors import dtype_name
from ..common.version import __version__
from ..errors import BundleError, InputError, MissingDependencyError
from ..models.loading.tokenizer import load_tokenizer
from ..session.checks import check_ids
from ..session.session import Session, load
from .export import export
from .perplexity import check_scorable, scored_logits

try:
    from transformers.exporters import ExportConfigMixin, ExportedModel, ExportMetadata, HfExporter, register_backend
    from transformers.exporters.runners import ModelRunner
except ImportError as error:
    raise MissingDependencyError(
        "transformers' exporters take other backends from transformers 5.23 on, and "
        f"{transformers.__version__} is installed; update it, or call exportable_cache.export"
    ) from error


#: Keywords of `export` that the exporter sets.
_FIELDS = {"model_or_path", "target", "max_cache_len", "output_dir", "tokenizer", "dry_run", "progress"}
#: Inputs of a call. The program has a causal mask and positions from 0 on, so others are refused.
_INPUTS = ("input_ids", "attention_mask", "position_ids")


@dataclass
class ExportableCacheConfig(ExportConfigMixin):
    """The options of an export by `ExportableCacheExporter`.

    Attributes:
        export_format: Name of the format.
        target: Target of the program, see `export`.
        max_cache_len: Tokens that a full-attention layer can hold; None for the default of `export`.
        tokenizer: Folder or hub id of the tokenizer to save in the bundle; None for none.
        options: Further options of `export`: `{"recipe": "fast"}`.
    """

    export_format: str = FORMAT
    target: str = "executorch"
    max_cache_len: int | None = None
    tokenizer: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def _text_of(inputs: Mapping[str, Any]) -> torch.Tensor:
    """Return the token ids among sample inputs, int64 [batch, length]. A cache among them is replaced by ours.

    Raises:
        InputError: If there are none, or inputs of images or audio.
    """
    others = sorted(name for name, one in inputs.items() if isinstance(one, torch.Tensor) and one.is_floating_point())
    ids = inputs.get("input_ids")
    if others or not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        raise InputError(
            "sample_inputs must be those of text, with input_ids [batch, length], got "
            f"{', '.join(others or inputs) or 'none'}; call exportable_cache.export, which takes images and audio"
        )
    return ids


def _checked_ids(inputs: Mapping[str, Any], session: Session) -> torch.Tensor:
    """Return the token ids of a call, int64 [1, length].

    Raises:
        InputError: If they are missing or not valid, or another input would change the logits.
    """
    others = sorted(inputs.keys() - set(_INPUTS))
    if others or "input_ids" not in inputs:
        raise InputError(
            f"a call must have input_ids and no other input than {', '.join(_INPUTS[1:])}, all by name, got "
            f"{', '.join(others or inputs) or 'none'}; call it with input_ids=ids"
        )
    ids = inputs["input_ids"]
    limits = session.stages.limits
    check_ids("input_ids", ids, ("batch", "length"), limits)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    defaults = {"attention_mask": ("all ones", torch.ones_like(ids)), "position_ids": ("0, 1, 2, ...", positions)}
    for name, (description, default) in defaults.items():
        given = inputs.get(name)
        if given is None:
            continue
        tensor = given.to(ids.device) if isinstance(given, torch.Tensor) else None
        if tensor is None or tensor.shape != ids.shape or not bool((tensor == default).all()):
            what = type(given).__name__ if tensor is None else f"other values, of shape {list(tensor.shape)}"
            raise InputError(
                f"{name} must be {description}, of shape {list(ids.shape)}, got {what}; pass each sequence without "
                "padding, and leave it out"
            )
    return ids


class BundleProgram:
    """A bundle in a temporary folder, which is removed with this object.

    Attributes:
        path: Folder of the bundle.
    """

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="exportable-cache-exporter-")
        self.path = Path(self._folder.name) / "bundle"


class ExportableCacheExporter(HfExporter):
    """Exports a model with its cache to a verified bundle: one component for all stages of generation.

    A saved program is the bundle's folder in a .zip file without compression.
    """

    export_format = FORMAT
    config_class = ExportableCacheConfig
    program_suffix = ".bundle.zip"

    def export_program(
        self, model: PreTrainedModel, sample_inputs: Any, config: ExportConfigMixin
    ) -> tuple[BundleProgram, ExportMetadata]:
        """Export a model with its cache, see `export`.

        Args:
            model: A model in eval mode.
            sample_inputs: Inputs of the model's forward. The program has as many rows as `input_ids` has.
            config: An `ExportableCacheConfig`.

        Raises:
            InputError: If the model takes other inputs than text, or an option is wrong.
            VerificationError: If the program disagrees with the model.
        """
        assert isinstance(config, ExportableCacheConfig)  # `export` has checked it
        ids = _text_of(sample_inputs)
        taken = sorted(_FIELDS & set(config.options))
        if taken:
            raise InputError(
                f"options must not have {', '.join(taken)}, got {taken[0]}={config.options[taken[0]]!r}; set the field "
                "of the config if there is one, and leave it out otherwise"
            )
        program = BundleProgram()
        given = {"batch_size": len(ids), **config.options}
        if config.tokenizer is not None:
            # Checked before the tokenizer is downloaded.
            export(model, config.target, config.max_cache_len, program.path, **given, dry_run=True)
            given["tokenizer"] = load_tokenizer(config.tokenizer)
            if given["tokenizer"] is None:
                raise InputError(
                    f"tokenizer must be a folder or hub id with a tokenizer, got {config.tokenizer!r}; pass the one of "
                    "the model, or None"
                )
        export(model, config.target, config.max_cache_len, program.path, **given)
        return program, ExportMetadata(
            architecture=type(model).__name__,
            packages={"transformers": transformers.__version__, "torch": torch.__version__, FORMAT: __version__},
            export_dtype=dtype_name(model.dtype),
            export_device="cpu",
            # transformers drops what is not listed, so the runner could not refuse it.
            kwargs={
                name: {"rank": ids.dim(), "shape": list(ids.shape), "dtype": dtype_name(ids.dtype)} for name in _INPUTS
            },
        )

    def export_for_generation(
        self,
        model: PreTrainedModel,
        sample_inputs: Any,
        config: ExportConfigMixin | dict[str, Any],
        *,
        generation_config: GenerationConfig | None = None,
        multi_token_decode: bool = False,
    ) -> ExportedModel:
        """Export one component, because its program runs all stages, with prompts and steps of any length."""
        exported = self.export(model, sample_inputs, config)
        exported.generation_config = generation_config or model.generation_config
        return exported

    @classmethod
    def save_program(cls, program: BundleProgram, path: str | Path) -> None:
        """Write the bundle's files to one .zip file."""
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            for file in sorted(program.path.rglob("*")):
                archive.write(file, file.relative_to(program.path))

    @classmethod
    def load_program(cls, path: str | Path) -> BundleProgram:
        """Unpack a saved bundle.

        Raises:
            BundleError: If it is not a .zip file without compression.
        """
        program = BundleProgram()
        try:
            with zipfile.ZipFile(path) as archive:
                # Without compression, so that a small file cannot fill the memory or the disk. Claimed sizes do not
                # limit the memory, because bz2 and LZMA expand a whole block of the file at once.
                files = archive.infolist()
                compressed = any(one.compress_type != zipfile.ZIP_STORED for one in files)
                if compressed or sum(one.file_size for one in files) > Path(path).stat().st_size:
                    raise BundleError(f"{path} must hold its files without compression; save the program again")
                archive.extractall(program.path)
        # The last ones are for damaged files: a file that is too short, and a name that is empty.
        except (zipfile.BadZipFile, ValueError, OSError, RuntimeError, EOFError, LookupError) as error:
            raise BundleError(f"{path} cannot be unpacked: {error}; save the program again") from error
        return program


class ExportableCacheRunner(ModelRunner):
    """Runs a bundle by a session.

    Attributes:
        session: The session: `session.generate(ids)`.
    """

    def __init__(self, program: BundleProgram, metadata: ExportMetadata, session: Session) -> None:
        # Without the base class's, which reads the structure of outputs that are traced.
        self.metadata = metadata
        self.session = session
        self._program = program

    @property
    def device(self) -> torch.device:
        """Device of the session."""
        return self.session.device

    @classmethod
    def from_program(
        cls,
        program: BundleProgram,
        metadata: ExportMetadata,
        device: str | torch.device | None = None,
        trust: bool = False,
        key: str | None = None,
    ) -> ExportableCacheRunner:
        """Open a session over a bundle.

        Args:
            program: The bundle.
            metadata: What the exporter recorded.
            device: Must be the device that the program was exported for, or None.
            trust: See `load`.
            key: See `load`.

        Raises:
            InputError: If the device is another one.
            BundleError: See `load`.
        """
        session = load(program.path, trust=trust, key=key)
        if device is not None and torch.device(device).type != session.device.type:
            raise InputError(
                f"device must be {session.device.type!r} for this program, got {str(device)!r}; leave it out"
            )
        return cls(program, metadata, session)

    def __call__(self, share_inputs: bool = True, share_outputs: bool = False, **kwargs: Any) -> CausalLMOutputWithPast:
        """Return the logits of all tokens of a new sequence, as the source model does.

        Args:
            share_inputs: Ignored.
            share_outputs: Ignored.
            **kwargs: `input_ids`, int64 [1, length]. An `attention_mask` and `position_ids` of the same shape are
                ignored if they are the model's defaults, all ones and 0, 1, 2, ...

        Raises:
            InputError: If the program has several rows, or an input is not valid.
            CacheFullError: If the tokens do not fit.
        """
        check_scorable(self.session, "calling an export")
        ids = _checked_ids(kwargs, self.session)
        self.session.reset()
        # The last of the tokens is only a target, which is not fed.
        logits = scored_logits(self.session, torch.nn.functional.pad(ids[0], (0, 1)), 1)
        return CausalLMOutputWithPast(logits=torch.cat(list(logits))[None])


register_backend(ExportableCacheExporter, ExportableCacheRunner)
