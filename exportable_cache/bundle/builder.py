"""Write the folder of an export: its files and its manifest."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from transformers import GenerationConfig

from ..backends.registry import backend_for
from ..common.fs.files import LOCK_FILE, PARTIAL, atomic_folder, clear_leftovers
from ..common.method_io import TensorSpec
from ..common.progress import Progress, silent
from ..common.tensors import dtype_name
from ..errors import BundleError
from ..generation.chat_turns import chat_turns
from ..generation.checkpoint_settings import end_tokens
from ..models.layers.layout import layer_types_and_windows, logits_size_of, vocab_size_of
from ..models.positions import rope_rule
from ..models.tokenizers.text import reads_alike
from ..models.weights import fingerprint
from ..program.inputs.multimodal import kinds_taken
from ..program.lengths import needs_equal_rows
from ..program.spec import Form, Logits
from .bundle import PROCESSOR, TOKENIZER_FOLDER, Bundle
from .entries import (
    LOGITS,
    STATE_PREFIX,
    File,
    ItemEntry,
    Layer,
    MethodEntry,
    MethodIO,
    ProgramEntry,
    RopeEntry,
    Tensor,
)
from .files import CHAT_TURNS, READS_ALIKE, TOKENIZER_FILE, digests_of
from .manifest import MANIFEST_FILE, SCHEMA_VERSION, Manifest, installed_versions
from .signing import SIGNATURE_FILE

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..backends.base import LoweredFile
    from ..models.loading.loading import LoadedModel
    from ..program.methods import ProgramMethod
    from ..program.program import Program


@dataclass(frozen=True)
class Provenance:
    """Where a program comes from, as its manifest records it.

    Attributes:
        source: Where the model came from, see `LoadedModel`.
        target: What it was lowered for.
        max_cache_len: As asked for.
        options: Of the target, as given.
        whole: The model that the program's is one rank's part of; None of a program in one part.
    """

    source: str
    target: str
    max_cache_len: int
    options: Mapping[str, Any] = field(default_factory=dict)
    whole: PreTrainedModel | None = None


def describe(
    program: Program,
    provenance: Provenance,
    *,
    packages: tuple[str, ...],
    tokenizer: PreTrainedTokenizerBase | None,
    files: Mapping[str, File],
) -> Manifest:
    """The manifest of a program that has been lowered, not verified yet.

    Args:
        program: What was lowered.
        provenance: Of it.
        packages: Those whose versions decide whether it can be opened.
        tokenizer: None where there is none.
        files: What is in the folder.
    """
    # A rank's part has the same config, and names nobody would find its weights by.
    model, cache = provenance.whole or program.model, program.cache
    layer_types = [layer_type for layer_type, _ in layer_types_and_windows(model.config)]
    layers = [
        Layer(
            layer_type=layer_type,
            **layer.config(),
            tensors={
                name: Tensor(
                    shape=list(tensor.shape),
                    dims=list(layer.state[name].dims),
                    dtype=dtype_name(tensor.dtype),
                    bytes=tensor.nbytes,
                )
                for name, tensor in layer.named_state()
            },
            bytes=layer.nbytes,
        )
        for layer_type, layer in zip(layer_types, cache.layers, strict=True)
    ]
    vocab_size, logits_size = vocab_size_of(model), logits_size_of(model)
    return Manifest(
        schema_version=SCHEMA_VERSION,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        target=provenance.target,
        source=provenance.source,
        model_type=model.config.model_type,
        architecture=type(model).__name__,
        program=ProgramEntry(
            form=Form(program.form),
            logits=Logits(program.logits),
            batch_size=program.batch_size,
            max_cache_len=provenance.max_cache_len,
            methods={name: _method(program, method, logits_size) for name, method in program.methods.items()},
            equal_rows=needs_equal_rows(program.model, cache),
            rope=_rope(program),
        ),
        vocab_size=vocab_size,
        logits_size=None if logits_size == vocab_size else logits_size,
        dtype=dtype_name(model.dtype),
        layers=layers,
        cache_bytes=cache.nbytes,
        weights_bytes=weights_bytes(model),
        fingerprint=fingerprint(model),
        tokenizer=None if tokenizer is None else type(tokenizer).__name__,
        config=config_fields(model),
        generation_config=generation_config_fields(model, tokenizer),
        packages=installed_versions(packages),
        files=dict(files),
        options=json.loads(json.dumps(dict(provenance.options), default=str)),
        verification=None,
    )


def _rope(program: Program) -> RopeEntry | None:
    rule = rope_rule(program.model)
    if rule is None or not rule.is_reached(program.cache.max_length):
        return None
    return RopeEntry(
        kind=cast(Literal["longrope", "dynamic"], rule.kind), borders=list(rule.borders), recomputes=rule.recomputes
    )


def config_fields(model: PreTrainedModel) -> dict[str, Any]:
    """The model's config as JSON, with its class and dtype, without where it was loaded from."""
    fields = json.loads(model.config.to_json_string(use_diff=False))
    fields.pop("_name_or_path", None)
    return {**fields, "architectures": [type(model).__name__], "dtype": dtype_name(model.dtype)}


def generation_config_fields(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> dict[str, Any]:
    """Return what the model's generation config sets, as JSON, with the tokenizer's end token if it names none."""
    config = model.generation_config
    fields = json.loads((config or GenerationConfig()).to_json_string(use_diff=True))
    ends = end_tokens(config, vocab_size_of(model), tokenizer)
    if ends and fields.get("eos_token_id") is None:
        fields["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return fields


def weights_bytes(model: torch.nn.Module) -> int:
    """Bytes of the parameters, tied ones counted once."""
    return sum(parameter.nbytes for parameter in model.parameters())


def _method(program: Program, method: ProgramMethod, logits_size: int) -> MethodEntry:
    inputs, outputs = [_io_entry(spec) for spec in method.inputs], [_io_entry(spec) for spec in method.outputs]
    if method.is_step:
        length = method.inputs[0].shape[1]
        gives_all = method.only_scores or program.logits is Logits.ALL
        shape: tuple[int | str, ...] = ("batch", logits_size)
        if gives_all or method.scored_tokens:
            shape = ("batch", length if gives_all else "scored", logits_size)
        outputs = [_io_entry(TensorSpec(LOGITS, dtype_name(program.model.dtype), shape))]
    if method.is_step and program.form is Form.EXPLICIT:
        state = [
            MethodIO(name=f"{STATE_PREFIX}{name}", dtype=dtype_name(tensor.dtype), shape=["batch", *tensor.shape[1:]])
            for name, tensor in program.cache.named_state()
        ]
        inputs, outputs = inputs + state, outputs + state
    return MethodEntry(
        min_length=method.min_length,
        max_length=method.max_length,
        read_length=method.kv_read_len,
        scored_tokens=method.scored_tokens,
        ranges=dict(method.ranges),
        inputs=inputs,
        outputs=outputs,
        grid=method.grid,
        item=None if method.item is None else ItemEntry.model_validate(method.item.to_dict()),
        multiple=method.multiple,
    )


def _io_entry(spec: TensorSpec) -> MethodIO:
    return MethodIO(name=spec.name, dtype=spec.dtype, shape=list(spec.shape))


def check_free(path: Path, overwrite: bool) -> None:
    """Refuse a folder that exists, unless it is empty, or a bundle that may be overwritten, and one that cannot be
    created.

    A folder is created beside it, or in the nearest parent that exists, and removed again: permissions alone do not
    tell, neither to root nor on file systems that are no storage.

    Raises:
        BundleError: If it may not be written to.
    """
    try:
        _check_unused(path, overwrite)
        # Where a link leads: that is the folder to be replaced.
        real = Path(os.path.realpath(path))
        parent = next(parent for parent in real.parents if parent.exists())
        if not parent.is_dir():
            raise BundleError(f"cannot write {path}: {parent} is no folder one may write to; choose another")
        made = tempfile.mkdtemp(prefix=f".{path.name}.", suffix=PARTIAL, dir=parent)
        with suppress(FileNotFoundError):  # another export has cleared it up
            os.rmdir(made)
    except (OSError, ValueError) as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: Exception) -> BundleError:
    """What is said of a folder that cannot be written."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return BundleError(f"cannot write {path}: {reason}; choose a folder one may write to")


def _check_unused(path: Path, overwrite: bool) -> None:
    if path.is_dir():
        if not any(path.iterdir()):
            return
        if not (path / MANIFEST_FILE).is_file():
            raise BundleError(f"{path} exists and is no bundle, so it is never overwritten; choose another folder")
        if not overwrite:
            raise BundleError(f"{path} exists; choose another folder, or overwrite it (overwrite=True, --overwrite)")
        ours, others = _files_of(path)
        if others or not ours:
            found = f"it holds {others[0]}, which" if others else "its manifest.json is one that"
            raise BundleError(
                f"{path} exists, and {found} no export wrote, so it is not overwritten; choose another folder, or move "
                "that away"
            )
    elif path.exists() or path.is_symlink():
        raise BundleError(f"{path} exists and is no folder; choose another one")


def _files_of(folder: Path) -> tuple[list[Path], list[str]]:
    """Files in a folder that its manifest says an export wrote, and the names of all others.

    There are none of the former where the manifest is not ours, as other programs have files of that name.
    """
    try:
        fields = json.loads((folder / MANIFEST_FILE).read_bytes())
        is_ours = isinstance(fields["schema_version"], int) and all(
            isinstance(fields[name], str) for name in ("target", "fingerprint")
        )
        listed = {*fields["files"], MANIFEST_FILE, SIGNATURE_FILE, LOCK_FILE} if is_ours else set()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        listed = set()
    ours: list[Path] = []
    others: list[str] = []
    for place, folders, files in os.walk(folder):
        for file in [*files, *(name for name in folders if Path(place, name).is_symlink())]:
            path = Path(place, file)
            name = path.relative_to(folder).as_posix()
            if name in listed:
                ours.append(path)
            else:
                others.append(name)
    return ours, sorted(others)


def remove_bundle(folder: Path) -> None:
    """Remove what an export wrote into a folder, and the folder if that is all."""
    # The manifest last, which says what else is ours.
    for path in sorted(_files_of(folder)[0], key=lambda path: path == folder / MANIFEST_FILE):
        path.unlink(missing_ok=True)
    for place, _, _ in sorted(os.walk(folder), reverse=True):
        try:
            os.rmdir(place)
        except OSError:  # something else is in it
            pass


@contextmanager
def new_folder(path: Path, overwrite: bool) -> Iterator[Path]:
    """A temporary folder that becomes `path` when the block ends well, and is removed when it does not.

    Raises:
        BundleError: If `path` may not be written to, see `check_free`, now or at the end of the block, or the temporary
            folder cannot be created.
    """
    # A link is followed first: renaming onto it would replace the link.
    real = Path(os.path.realpath(path))
    try:
        clear_leftovers(real, remove_bundle)
    except OSError as error:
        raise cannot_write(path, error) from error
    check_free(path, overwrite)
    path = real
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(atomic_folder(path, remove_bundle))
        except OSError as error:
            raise cannot_write(path, error) from error
        yield folder
        check_free(path, overwrite)


def write_bundle(
    folder: Path,
    program: Program,
    lowered: Sequence[LoweredFile],
    *,
    provenance: Provenance,
    loaded: LoadedModel,
    progress: Progress = silent,
) -> Bundle:
    """Add configs and tokenizer to the lowered files and describe them all.

    The manifest is not written, so that nothing loads until the caller has checked the bundle: `bundle.manifest.write`.

    Args:
        folder: Where the backend has written `lowered`.
        program: What was lowered.
        provenance: Of it.
        loaded: What it was made from: its tokenizer is saved with the chat template; its processor's files are copied
            beside it, where there is one and the program takes more than text.
        progress: Told about bytes read.
    """
    tokenizer = loaded.tokenizer
    holds = {file.name: file.holds for file in lowered}
    details = {file.name: dict(file.details) for file in lowered}
    configs = {
        "config.json": ("model config", config_fields(program.model)),
        "generation_config.json": ("generation defaults", generation_config_fields(program.model, tokenizer)),
    }
    for name, (what, fields) in configs.items():
        (folder / name).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        holds[name] = what
    if tokenizer is not None:
        tokenizer.save_pretrained(folder / TOKENIZER_FOLDER)
        details[TOKENIZER_FILE] = {READS_ALIKE: reads_alike(folder / TOKENIZER_FOLDER, tokenizer)}
        turns = chat_turns(tokenizer)
        if turns is not None:
            details[TOKENIZER_FILE][CHAT_TURNS] = turns.to_dict()
        for path in loaded.processor_files if set(kinds_taken(program.methods)) != {"text"} else ():
            shutil.copyfile(path, folder / TOKENIZER_FOLDER / path.name)
            holds[f"{TOKENIZER_FOLDER}/{path.name}"] = PROCESSOR
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != LOCK_FILE)
    files = {}
    for path, digest in zip(paths, digests_of(paths, progress), strict=True):
        name = path.relative_to(folder).as_posix()
        files[name] = File(
            sha256=digest,
            bytes=path.stat().st_size,
            holds=holds.get(name, "tokenizer"),
            details=details.get(name, {}),
        )
    manifest = describe(
        program,
        provenance,
        packages=tuple(backend_for(provenance.target).packages),
        tokenizer=tokenizer,
        files=files,
    )
    return Bundle(folder, manifest, trusted=True)
