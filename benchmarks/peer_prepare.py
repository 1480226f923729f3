"""Prepare benchmarks/peers.py: environments, each form's files, our kernels and runner.

Everything is made once and stays in the benchmark's folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
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


def form_environment(name: str, folder: Path, threads: int | None = None) -> dict[str, str]:
    """Return the environment of a process that makes a form, or runs it with `threads` threads."""
    if FORMS[name].environment != "here":
        return plain_environment()
    # ExecuTorch has its own threads, and idle threads of torch must not spin next to them.
    found = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    if threads is not None:
        found |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": "1"}
    kernels = used_kernels(folder)
    if FORMS[name].is_ours and kernels is not None:
        found["EXPORTABLE_CACHE_KERNELS"] = str(kernels)
    if FORMS[name].runtime == "runner":
        found["EXPORTABLE_CACHE_RUNNER"] = str(own_runner(folder))
    return found


def used_kernels(folder: Path) -> Path | None:
    """Return the kernel library that our forms use, in Python and in the runner.

    It is the one that the environment has or names, otherwise the one in the folder. None means the kernels of the
    executorch wheel, because none is compiled or because `EXPORTABLE_CACHE_KERNELS=executorch` asks for them.
    """
    from exportable_cache.common.native.kernels import FILE, VARIABLE, chosen_path

    chosen = chosen_path()
    if chosen is not None or os.environ.get(VARIABLE):
        return None if chosen is None else chosen.resolve()
    compiled = (folder / FILE).resolve()
    return compiled if compiled.is_file() else None


def native_kernels(folder: Path) -> None:
    """Compile the kernels into the folder if they are missing; without a compiler the wheel's are used."""
    from exportable_cache.backends.executorch.native.build import build_kernels
    from exportable_cache.common.native.kernels import FILE, VARIABLE
    from exportable_cache.errors import ExportableCacheError

    if used_kernels(folder) is None and not os.environ.get(VARIABLE):
        console.print("compiling the attention kernels")
        try:
            build_kernels(output=(folder / FILE).resolve())
        except ExportableCacheError as error:
            console.print(f"ours runs on ExecuTorch's kernels: {error}")


def place_of(name: str, folder: Path, slots: int) -> Path:
    """Return the folder of the files that a form runs."""
    return folder / f"{FORMS[name].of or name}-{slots}"


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


def own_runner(folder: Path) -> Path:
    """Return the C++ runner's library over the executorch wheel, with the kernels that our other forms use.

    Raises:
        Failed: If it cannot be compiled.
    """
    from exportable_cache.backends.executorch.native.build import find_cmake

    build, kernels = (folder / "runner").resolve(), used_kernels(folder)
    library, built = build / "libexportable_cache.so", build / "built.txt"
    linked = f"executorch {version('executorch')}, {kernels or 'ExecuTorch kernels'}"
    if not library.is_file() or not built.is_file() or built.read_text() != linked:
        cmake = find_cmake()
        if cmake is None:
            raise Failed("there is no cmake; pip install cmake")
        build.mkdir(parents=True, exist_ok=True)
        console.print("compiling the runner")
        options = ["-DEC_BUILD_SHARED=ON", "-DEC_BUILD_PROGRAMS=OFF", f"-DPython3_EXECUTABLE={sys.executable}"]
        # CMake remembers earlier settings.
        options.append(f"-DEC_KERNELS={kernels or ''}")
        logged([cmake, "-S", str(HERE.parent / "runners" / "cpp"), "-B", str(build), *options], build / "log.txt")
        logged([cmake, "--build", str(build), "--parallel", str(os.cpu_count() or 1)], build / "log.txt")
        built.write_text(linked)
    return library


def prepare(name: str, folder: Path, slots: int) -> Path:
    """Return the folder of a form's files, and make the files if needed.

    Raises:
        Failed: If its environment or its conversion fails.
    """
    form = FORMS[name]
    if form.of is not None:
        own_runner(folder)
        return prepare(form.of, folder, slots)
    python = environment_python(form.environment, folder)
    place = place_of(name, folder, slots)
    done, model = place / "done.txt", folder / form.checkpoint(slots)
    convert = [str(HERE / "peer_convert.py")]
    if not (model / "logits.npy").is_file():
        model.mkdir(parents=True, exist_ok=True)
        logged([sys.executable, *convert, "model", str(model), str(slots), str(form.bits)], model / "log.txt")
    if not done.is_file():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        console.print(f"making {name}")
        arguments = [name, str(model.resolve()), str(slots), str(place.resolve())]
        logged([str(python), *convert, *arguments], place / "log.txt", form_environment(name, folder))
        done.write_text("made\n")
    return place
