"""A folder to copy to a device: a bundle, the C++ program that runs it there, and a check that it answers the same."""

from __future__ import annotations

import os
import platform as host
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..bundle.builder import cannot_write
from ..bundle.manifest import MANIFEST_FILE
from ..bundle.signature import SIGNATURE_FILE
from ..common.fs.files import atomic_folder
from ..common.native.elf import read_program
from ..common.progress import Progress, silent
from ..errors import BundleError, InputError, VerificationError
from .package_check import Question, question_of

if TYPE_CHECKING:
    from ..bundle.bundle import Bundle

#: Numbers of the processors in ELF files, by platform.
PLATFORMS = {"linux-x86_64": 62, "linux-aarch64": 183}
PROGRAM, BUNDLE, RUN, CHECK, CHECK_INPUT = "generate", "bundle", "run.sh", "check.sh", "check-{}.bin"
#: Of the libraries that only the program over the Python wheel loads.
_OF_THE_WHEEL = ("libpython", "libtorch", "libc10", "_portable_lib")
_SECONDS = 600

_RUN = """\
#!/bin/sh
# ./run.sh --prompt "Once upon a time"; see ./run.sh --help
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd) || exit 2
exec "$here/{program}" "$here/{bundle}" "$@"
"""
_CHECK = """\
#!/bin/sh
# Whether this device answers as the session did that made the package: 0 yes, 1 no.
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd) || exit 2
found=$("$here/run.sh" --tokens "{prompt}" --max-new-tokens {count}{inputs}) || exit 2
expected="{expected}"
if [ "$(echo $found)" = "$expected" ]; then echo "the same {count} tokens"; exit 0; fi
echo "other tokens: $found"; echo "expected:     $expected"
exit 1
"""


@dataclass(frozen=True)
class Package:
    """What was packaged.

    Attributes:
        path: The folder.
        platform: Of `PLATFORMS`.
        files: Bytes by name.
        libraries: What the program asks the device's loader for.
        tokens: That the check expects, int64.
        ran: Whether the check was run here: only where the platform is this machine's.
    """

    path: Path
    platform: str
    files: dict[str, int]
    libraries: tuple[str, ...]
    tokens: tuple[int, ...]
    ran: bool


def package(
    bundle: Bundle, program: str | os.PathLike, platform: str, output: str | os.PathLike, progress: Progress = silent
) -> Package:
    """Write a folder with a bundle, a program, `run.sh`, and `check.sh`, which compares tokens.

    Args:
        bundle: For ExecuTorch on the processor; where it has encoders, they are part of the check.
        program: `exportable_cache_generate` of `runners/cpp`, built for the platform over an installed ExecuTorch.
        platform: One of `PLATFORMS`.
        output: The folder, which does not exist.
        progress: Told about stages.

    Raises:
        BundleError: If the bundle is of another target, its cache is too short for the check, or the folder exists or
            cannot be written.
        InputError: If the platform is unknown, the program is for another one, or needs the Python wheel; if no step
            takes what the check shows to the bundle's encoders.
        VerificationError: If the platform is this machine's, and the program fails or gives other tokens; nothing is
            left of the folder.
    """
    folder, program = Path(output), Path(program)
    libraries = _check_program(program, platform)
    _check_bundle(bundle)
    if folder.exists() or folder.is_symlink():
        raise BundleError(f"{folder} exists; choose another folder, or remove it")
    progress("asking the session for the expected tokens", 0, None)
    question = question_of(bundle)
    progress("copying", 0, None)
    try:
        with atomic_folder(folder) as made:
            _fill(made, bundle, program, question)
            ran = platform == _here()
            if ran:
                progress("running the check", 0, None)
                _run_check(made)
            files = {path.relative_to(made).as_posix(): path.stat().st_size for path in _files(made)}
    except OSError as error:
        raise cannot_write(folder, error) from error
    return Package(folder, platform, files, libraries, question.tokens, ran)


def _check_program(path: Path, platform: str) -> tuple[str, ...]:
    if platform not in PLATFORMS:
        raise InputError(f"the platform is {platform!r}; it must be one of {', '.join(PLATFORMS)}")
    found = read_program(path)
    if found.machine != PLATFORMS[platform]:
        names = {machine: name for name, machine in PLATFORMS.items()}
        known = names.get(found.machine, f"processor {found.machine} of the ELF specification")
        raise InputError(f"{path} is for {known}, not for {platform}; name a program that was built for {platform}")
    wheel = [name for name in found.libraries if name.startswith(_OF_THE_WHEEL)]
    if wheel:
        raise InputError(
            f"{path} loads {wheel[0]} of the Python wheel, which a device does not have; build it over an installed "
            "ExecuTorch: -DEC_EXECUTORCH=installed (docs/device.md)"
        )
    return found.libraries


def _check_bundle(bundle: Bundle) -> None:
    manifest = bundle.manifest
    if manifest.target != "executorch":
        raise BundleError(f"{bundle.path} is for {manifest.target}; export it with --target executorch for a device")


def _fill(folder: Path, bundle: Bundle, program: Path, question: Question) -> None:
    names = [*bundle.manifest.files, MANIFEST_FILE]
    names += [SIGNATURE_FILE] if (bundle.path / SIGNATURE_FILE).is_file() else []
    for name in names:
        target = folder / BUNDLE / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(bundle.path / name, target)
    shutil.copyfile(program, folder / PROGRAM)
    # Numbers and names of ours alone: what a manifest says goes into no script.
    check = _CHECK.format(
        prompt=" ".join(map(str, question.prompt)),
        inputs=_write_inputs(folder, question),
        expected=" ".join(map(str, question.tokens)),
        count=len(question.tokens),
    )
    (folder / RUN).write_text(_RUN.format(program=PROGRAM, bundle=BUNDLE), encoding="ascii")
    (folder / CHECK).write_text(check, encoding="ascii")
    for name in (PROGRAM, RUN, CHECK):
        (folder / name).chmod(0o755)


def _write_inputs(folder: Path, question: Question) -> str:
    """What the program is told of them."""
    said = f' --encode "{" ".join(map(str, question.encoded))}"' if question.encoded else ""
    if question.values:
        file = CHECK_INPUT.format("input")
        (folder / file).write_bytes(question.values)
        said = f' --encode-file "$here/{file}"'
    for name, content in question.inputs.items():
        file = CHECK_INPUT.format(name)
        (folder / file).write_bytes(content)
        said += f' --input "{name}=$here/{file}"'
    return said


def _here() -> str:
    return f"{host.system().lower()}-{host.machine()}"


def _run_check(folder: Path) -> None:
    done = subprocess.run([folder / CHECK], capture_output=True, text=True, errors="replace", timeout=_SECONDS)
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()[-3:]
        raise VerificationError("the program does not answer as the session does: " + "; ".join(said or ["no output"]))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
