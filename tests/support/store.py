"""A content-addressed store of what is slow to make: exported programs, bundles, compiled C++.

Workers, files and runs share it. An entry is named by what it is made from, and by the sources and packages that make
it: a change of any of these makes a new entry, and entries of other sources are dropped when a run starts. Entries are
read only: a test that spoils one takes a copy.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from exportable_cache.common.native.kernels import chosen_path

REPOSITORY = Path(__file__).parents[2]
#: What takes part in making an entry, besides what its key says.
SOURCES = ("exportable_cache", "tests/support", "runners")
PACKAGES = ("torch", "transformers", "executorch", "torchao", "safetensors")
#: Sources whose entries are kept: those of this run, and of the checkouts before it.
KEPT_GENERATIONS = 3


def root() -> Path:
    """Folder of the store: `EXPORTABLE_CACHE_TEST_STORE`, or one beside pytest's own cache."""
    return Path(os.environ.get("EXPORTABLE_CACHE_TEST_STORE") or REPOSITORY / ".pytest_cache" / "artefacts")


@functools.cache
def generation() -> str:
    """Digest of the sources, the packages and the processor that entries depend on."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((REPOSITORY / folder).rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                digest.update(path.relative_to(REPOSITORY).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    for package in PACKAGES:
        try:
            digest.update(f"{package} {importlib.metadata.version(package)}\0".encode())
        except importlib.metadata.PackageNotFoundError:
            digest.update(f"no {package}\0".encode())
    # Exports use native operators by default, if they are installed.
    library = chosen_path()
    digest.update(str(None if library is None else (library, library.stat().st_mtime_ns)).encode())
    digest.update(
        f"{platform.python_version()} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}".encode()
    )
    return digest.hexdigest()[:16]


def stored(key: Mapping[str, Any], make: Callable[[Path], Any]) -> Path:
    """The entry of a key, made if there is none, by one process while others that want it wait.

    Args:
        key: What the entry is made from; values that JSON can write.
        make: Called with the path of a file or folder to write, which does not exist yet.

    Returns:
        Path of what was written. Do not change it.
    """
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    folder = root() / generation()
    folder.mkdir(parents=True, exist_ok=True)
    entry = folder / name
    with FileLock(folder / f"{name}.lock"):
        if not entry.exists():
            with tempfile.TemporaryDirectory(dir=folder, prefix="making-") as temporary:
                made = Path(temporary) / "entry"
                made.mkdir()
                make(made / "made")
                (made / "key.json").write_text(json.dumps(key, sort_keys=True, indent=1))
                made.rename(entry)
    return entry / "made"


def drop_other_generations() -> None:
    """Delete the entries of sources that are not those of now, but for the newest few."""
    if not root().is_dir():
        return
    (root() / generation()).mkdir(exist_ok=True)
    os.utime(root() / generation())
    by_age = sorted((path for path in root().iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for path in by_age[:-KEPT_GENERATIONS]:
        shutil.rmtree(path, ignore_errors=True)


def model_key(model: torch.nn.Module) -> str:
    """Digest of a model's class, config and tensors."""
    digest = hashlib.sha256(f"{type(model).__name__} {model.config.to_json_string(use_diff=False)}".encode())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(_contents(tensor))
    return digest.hexdigest()


def _contents(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach()
    if hasattr(tensor, "__tensor_flatten__"):
        # A quantised weight: integers and scales.
        names, options = tensor.__tensor_flatten__()
        return repr(options).encode() + b"".join(_contents(getattr(tensor, name)) for name in names)
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
