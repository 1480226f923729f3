"""Write a bundle: the files of an export and their manifest."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from transformers import GenerationConfig

from ..backends.registry import backend_for
from ..common.fs.files import LOCK_FILE, PARTIAL, atomic_folder, clear_leftovers
from ..common.progress import Progress, silent
from ..common.tensors import TensorSpec, dtype_name
from ..errors import BundleError
from ..generation.checkpoint_settings import end_tokens
from ..generation.templates import chat_turns
from ..models.layers.specs import cached_layers, logits_size_of, vocab_size_of
from ..models.patches.mechanisms.rope import rope_length_of
from ..models.positions import rope_rule
from ..models.tokenizers.text import reads_alike
from ..models.vocabulary import VOCABULARY_FILE, kept_tokens
from ..models.weights import fingerprint
from ..program.inputs.multimodal import kinds_taken
from ..program.lengths import needs_equal_rows
from ..program.spec import Form, Logits
from .bundle import PROCESSOR, TOKENIZER_FOLDER, Bundle
from .files import (
    CHAT_TURNS,
    MANIFEST_FILE,
    READS_ALIKE,
    SCHEMA_VERSION,
    TOKENIZER_FILE,
    digests_of,
    installed_versions,
)
from .manifest import (
    LOGITS,
    STATE_PREFIX,
    File,
    ItemEntry,
    Layer,
    LoraEntry,
    Manifest,
    MethodEntry,
    MethodIO,
    ProgramEntry,
    RopeEntry,
    Tensor,
)
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
    """The origin of a program, as its manifest records it.

    Attributes:
        source: Origin of the model, see `LoadedModel`.
        target: Target that the program was lowered for.
        max_cache_len: Requested length of the cache in tokens.
        options: Options of the target, as given.
        whole: The whole model, if the program has one rank's part of it; otherwise None.
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
    """Return the manifest of a lowered program, without a verification report.

    Args:
        program: The lowered program.
        provenance: Its origin.
        packages: Packages whose versions must match when it is opened.
        tokenizer: The tokenizer, or None.
        files: Files in the folder.
    """
    # The whole model, because a rank's part has other weight names.
    model, cache = provenance.whole or program.model, program.cache
    layer_types = [layer_type for layer_type, _ in cached_layers(model)]
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
            rope_length=rope_length_of(model),
            lora=None if program.lora is None else LoraEntry.model_validate(asdict(program.lora)),
        ),
        vocab_size=vocab_size,
        logits_size=None if logits_size == vocab_size else logits_size,
        dtype=dtype_name(model.dtype),
        layers=layers,
        cache_bytes=cache.nbytes,
        weights_bytes=parameter_bytes(model),
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
    """Return the model's config as JSON, with its class and dtype, but without the path it was loaded from."""
    fields = json.loads(model.config.to_json_string(use_diff=False))
    fields.pop("_name_or_path", None)
    return {**fields, "architectures": [type(model).__name__], "dtype": dtype_name(model.dtype)}


def generation_config_fields(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> dict[str, Any]:
    """Return the settings of the model's generation config as JSON.

    If it names no end token, the tokenizer's is added.
    """
    config = model.generation_config
    fields = json.loads((config or GenerationConfig()).to_json_string(use_diff=True))
    ends = end_tokens(config, vocab_size_of(model), tokenizer)
    if ends and fields.get("eos_token_id") is None:
        fields["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return fields


def parameter_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of the parameters, counting tied ones once."""
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
    """Check that a bundle can be written to a folder: it is missing, empty, or a bundle that may be overwritten.

    A folder is created next to it, or in the nearest existing parent, and removed again, because permissions alone do
    not tell whether it can be written.

    Args:
        path: Folder of the bundle.
        overwrite: True if an existing bundle may be replaced.

    Raises:
        BundleError: If it may not be written.
    """
    try:
        _check_unused(path, overwrite)
        # Resolve links, because the target of a link is the folder to replace.
        real = Path(os.path.realpath(path))
        parent = next(parent for parent in real.parents if parent.exists())
        if not parent.is_dir():
            raise BundleError(f"cannot write {path}: {parent} is not a folder; choose another folder")
        made = tempfile.mkdtemp(prefix=f".{path.name}.", suffix=PARTIAL, dir=parent)
        with suppress(FileNotFoundError):  # another export has removed it
            os.rmdir(made)
    except (OSError, ValueError) as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: Exception) -> BundleError:
    """Return the error for a folder that cannot be written."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return BundleError(f"cannot write {path}: {reason}; choose a folder that you can write to")


def _check_unused(path: Path, overwrite: bool) -> None:
    if path.is_dir():
        if not any(path.iterdir()):
            return
        if not (path / MANIFEST_FILE).is_file():
            raise BundleError(f"{path} exists and is not a bundle, so it is never overwritten; choose another folder")
        if not overwrite:
            raise BundleError(f"{path} exists; choose another folder, or overwrite it (overwrite=True, --overwrite)")
        listed_files, others = _files_of(path)
        if others or not listed_files:
            found = f"it holds {others[0]}, which" if others else "it has a manifest.json that"
            raise BundleError(
                f"{path} exists, and {found} no export wrote, so it is not overwritten; choose another folder, or move "
                "that file"
            )
    elif path.exists() or path.is_symlink():
        raise BundleError(f"{path} exists and is not a folder; choose another path")


def _files_of(folder: Path) -> tuple[list[Path], list[str]]:
    """Return the files in a folder that its manifest lists, and the names of all other files.

    The first list is empty if the manifest was not written by this package.
    """
    try:
        fields = json.loads((folder / MANIFEST_FILE).read_bytes())
        is_ours = isinstance(fields["schema_version"], int) and all(
            isinstance(fields[name], str) for name in ("target", "fingerprint")
        )
        listed = {*fields["files"], MANIFEST_FILE, SIGNATURE_FILE, LOCK_FILE} if is_ours else set()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        listed = set()
    listed_files: list[Path] = []
    others: list[str] = []
    for root, folders, files in os.walk(folder):
        for file in [*files, *(name for name in folders if Path(root, name).is_symlink())]:
            path = Path(root, file)
            name = path.relative_to(folder).as_posix()
            if name in listed:
                listed_files.append(path)
            else:
                others.append(name)
    return listed_files, sorted(others)


def remove_bundle(folder: Path) -> None:
    """Remove the files of an export from a folder, and the folder if nothing else is in it."""
    # The manifest last, because it lists the other files.
    for path in sorted(_files_of(folder)[0], key=lambda path: path == folder / MANIFEST_FILE):
        path.unlink(missing_ok=True)
    for root, _, _ in sorted(os.walk(folder), reverse=True):
        try:
            os.rmdir(root)
        except OSError:  # something else is in it
            pass


@contextmanager
def new_folder(path: Path, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary folder, which becomes `path` if the block succeeds and is removed otherwise.

    Args:
        path: Folder of the bundle.
        overwrite: True if an existing bundle may be replaced.

    Raises:
        BundleError: If `path` may not be written at the start or the end of the block, see `check_free`, or the
            temporary folder cannot be created.
    """
    # Follow links first, because renaming onto a link would replace it.
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
    """Add configs and tokenizer to the lowered files, and describe them all.

    The manifest is not written, so that nothing loads until the caller has checked the bundle, see `Manifest.write`.

    Args:
        folder: Folder with the lowered files.
        program: The lowered program.
        lowered: Files that the backend has written.
        provenance: Origin of the program.
        loaded: Model that the program was made from. Its tokenizer is saved with the chat template; files of its
            processor are copied if the program takes more than text.
        progress: Called with the bytes read.
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
    kept = kept_tokens(program.model)
    if kept is not None:
        (folder / VOCABULARY_FILE).write_text(f"{json.dumps(kept)}\n", encoding="utf-8")
        holds[VOCABULARY_FILE] = "ids of the tokens that have logits"
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
