"""Prepare benchmarks/peers.py: environments, the native package, checkpoints, and each form's files.

Everything is made once and stays in the benchmark's folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from peer_forms import ENVIRONMENTS, FORMS
from peer_turns import Failed, last_words
from rich.console import Console

HERE = Path(__file__).parent
#: A package without a wheel compiles for most of an hour on two cores.
PREPARE_SECONDS = 7200
#: Least size in bytes of a file that a token reads from.
_LARGE = 1 << 20
console = Console(stderr=True)


def logged(command: list[str], log: Path, environment: dict[str, str] | None = None) -> None:
    """Run a command; on failure raise the last line of its output and the log's path."""
    with log.open("ab") as file:
        done = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, timeout=PREPARE_SECONDS, check=False
        )
    if done.returncode:
        raise Failed(last_words(log, "it failed"))


def environment_python(name: str, folder: Path) -> Path:
    """Return the Python of an environment, and make the environment if needed.

    Raises:
        Failed: If it cannot be made, or could not before.
    """
    wanted = ENVIRONMENTS[name]
    if not wanted.packages:
        return Path(sys.executable)
    place = folder / "environments" / name
    python, failed, done = place / "bin" / "python", place / "failed.txt", place / "installed.txt"
    if done.is_file():
        return python
    if failed.is_file():
        raise Failed(f"{failed.read_text().strip()}; delete {place} to try again")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    console.print(f"making the environment of {name}")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install"]
    # pip's cache was compiled with other settings.
    fresh, variables = (["--no-cache-dir"] if wanted.settings else []), plain_environment() | wanted.settings
    try:
        logged([sys.executable, "-m", "venv", str(place)], place / "log.txt")
        for packages in (wanted.first, wanted.packages):
            if packages:
                logged([*pip, *fresh, *packages], place / "log.txt", variables)
        if wanted.without:
            logged([*pip[:-1], "uninstall", "--yes", *wanted.without], place / "log.txt", plain_environment())
    except (Failed, subprocess.TimeoutExpired) as error:
        failed.write_text(f"{error}\n")
        raise Failed(str(error)) from error
    done.write_text("\n".join(wanted.packages))
    return python


def plain_environment() -> dict[str, str]:
    """Return the process's environment without variables that point Python at this checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def form_environment(name: str) -> dict[str, str]:
    """Return the environment of a process that makes or runs a form."""
    return {**os.environ} if FORMS[name].environment == "here" else plain_environment()


def native_package() -> None:
    """Build the native package into this environment if it is not up to date; every form of ours runs in it.

    Raises:
        Failed: If it cannot be built, because then no figure would be that of the package.
    """
    from exportable_cache.backends.executorch.native.build import build_native
    from exportable_cache.errors import ExportableCacheError

    console.print("compiling the native package, if its sources have changed")
    try:
        build_native()
    except ExportableCacheError as error:
        raise Failed(str(error)) from error


def place_of(name: str, folder: Path, model: str, slots: int) -> Path:
    """Return the folder of the files that a form runs."""
    return folder / model / f"{name}-{slots}"


def write_anew(place: Path) -> None:
    """Replace the large files of a form by copies.

    The location of a file in the system's file cache changes the time of a token by up to 8 %, so the files of all
    forms should be equally new.
    """
    for path in sorted(place.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.stat().st_size >= _LARGE:
            copy = path.with_name(f"{path.name}.new")
            shutil.copyfile(path, copy)
            with copy.open("rb") as file:
                # Written out now, and not while others are timed.
                os.fsync(file.fileno())
            copy.replace(path)


def prepare(name: str, folder: Path, model: str, slots: int) -> Path:
    """Return the folder of a form's files, and make the files if needed.

    Raises:
        Failed: If its environment or its conversion fails, or its conversion failed before.
    """
    form = FORMS[name]
    python = environment_python(form.environment, folder)
    place = place_of(name, folder, model, slots)
    checkpoint = folder / model / form.checkpoint(model, slots)
    done, failed = place / "done.txt", place / "failed.txt"
    convert = [str(HERE / "peer_convert.py")]
    if failed.is_file():
        raise Failed(f"{failed.read_text().strip()}; delete {place} to try again")
    if done.is_file():
        return place
    if not (checkpoint / "logits.npy").is_file():
        console.print(f"making the checkpoint {checkpoint}")
        checkpoint.mkdir(parents=True, exist_ok=True)
        arguments = ["model", model, str(checkpoint), str(slots), str(form.bits)]
        logged([sys.executable, *convert, *arguments], checkpoint / "log.txt")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    console.print(f"making {name}")
    arguments = [name, str(checkpoint.resolve()), str(slots), str(place.resolve())]
    try:
        logged([str(python), *convert, *arguments], place / "log.txt", form_environment(name))
    except (Failed, subprocess.TimeoutExpired) as error:
        failed.write_text(f"{error}\n")
        raise Failed(str(error)) from error
    done.write_text("made\n")
    # What the converters downloaded or unpacked.
    shutil.rmtree(place / "cache", ignore_errors=True)
    return place
