"""Bundles for a device: a folder with bundle, C++ program and check, and the list of operators to build it with."""

from __future__ import annotations

import itertools
import os
import platform as host
import re
import shutil
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..backends.executorch.pte.instructions import called_operators
from ..backends.executorch.pte.kernels import WHOLE_LIBRARIES, KernelSignature, is_in_runtime, signatures_of
from ..backends.executorch.target import FILE as PROGRAM_FILE
from ..bundle.builder import cannot_write
from ..bundle.manifest import MANIFEST_FILE
from ..bundle.signing import SIGNATURE_FILE
from ..common.fs.files import atomic_folder, atomic_path
from ..common.progress import Progress, silent
from ..errors import BundleError, InputError, VerificationError
from ..session.session import Session

if TYPE_CHECKING:
    from ..bundle.bundle import Bundle
    from ..program.methods import ProgramMethod

#: Numbers of the processors in ELF files, by platform.
PLATFORMS = {"linux-x86_64": 62, "linux-aarch64": 183}
PROGRAM, BUNDLE, RUN, CHECK, CHECK_INPUT = "generate", "bundle", "run.sh", "check.sh", "check-{}.bin"
#: Of the libraries that only the program over the Python wheel loads.
_WHEEL_LIBRARIES = ("libpython", "libtorch", "libc10", "_portable_lib")
_SECONDS = 600
#: Token ids before and behind images or sound, ids of an encoder's input, and how many are generated. The first ids are
#: often special.
_FIRST, _BEFORE, _AFTER, _ENCODED, _NEW = 3, 4, 4, 11, 16
#: A name that means nothing to a shell.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_LOAD, _DYNAMIC = 1, 2
_NEEDED, _STRINGS = 1, 5
_HEADER = """\
# Operators that {bundles} call.
# For CMake of runners/cpp: -DEC_OPERATORS=this file. Each line: operator, kernel, number of outputs, argument types;
# of a library that is linked whole, the operator alone.
"""

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
    reference = reference_prompt(bundle)
    progress("copying", 0, None)
    try:
        with atomic_folder(folder) as made:
            _copy(made, bundle, program, reference)
            ran = platform == _here()
            if ran:
                progress("running the check", 0, None)
                _run_check(made)
            files = {path.relative_to(made).as_posix(): path.stat().st_size for path in _files(made)}
    except OSError as error:
        raise cannot_write(folder, error) from error
    return Package(folder, platform, files, libraries, reference.tokens, ran)


def _check_program(path: Path, platform: str) -> tuple[str, ...]:
    if platform not in PLATFORMS:
        raise InputError(f"the platform is {platform!r}; it must be one of {', '.join(PLATFORMS)}")
    found = read_program(path)
    if found.machine != PLATFORMS[platform]:
        names = {machine: name for name, machine in PLATFORMS.items()}
        known = names.get(found.machine, f"processor {found.machine} of the ELF specification")
        raise InputError(f"{path} is for {known}, not for {platform}; name a program that was built for {platform}")
    wheel = [name for name in found.libraries if name.startswith(_WHEEL_LIBRARIES)]
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


def _copy(folder: Path, bundle: Bundle, program: Path, reference: ReferencePrompt) -> None:
    names = [*bundle.manifest.files, MANIFEST_FILE]
    names += [SIGNATURE_FILE] if (bundle.path / SIGNATURE_FILE).is_file() else []
    for name in names:
        target = folder / BUNDLE / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(bundle.path / name, target)
    shutil.copyfile(program, folder / PROGRAM)
    # Numbers and names of ours alone: what a manifest says goes into no script.
    check = _CHECK.format(
        prompt=" ".join(map(str, reference.prompt)),
        inputs=_write_inputs(folder, reference),
        expected=" ".join(map(str, reference.tokens)),
        count=len(reference.tokens),
    )
    (folder / RUN).write_text(_RUN.format(program=PROGRAM, bundle=BUNDLE), encoding="ascii")
    (folder / CHECK).write_text(check, encoding="ascii")
    for name in (PROGRAM, RUN, CHECK):
        (folder / name).chmod(0o755)


def _write_inputs(folder: Path, reference: ReferencePrompt) -> str:
    """What the program is told of them."""
    said = f' --encode "{" ".join(map(str, reference.encoded))}"' if reference.encoded else ""
    if reference.values:
        file = CHECK_INPUT.format("input")
        (folder / file).write_bytes(reference.values)
        said = f' --encode-file "$here/{file}"'
    for name, content in reference.inputs.items():
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


@dataclass(frozen=True)
class ReferencePrompt:
    """A prompt and what the session answers.

    Attributes:
        prompt: Token ids.
        tokens: That follow, one by one the likeliest.
        encoded: Ids for the encoder of an encoder-decoder.
        values: Numbers for it instead, as a file's content.
        inputs: Files' contents by the names that a processor gives them, one item of each.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    encoded: tuple[int, ...] = ()
    values: bytes = b""
    inputs: Mapping[str, bytes] = field(default_factory=dict)


def reference_prompt(bundle: Bundle) -> ReferencePrompt:
    """Ask the session of a bundle, on this machine.

    Raises:
        BundleError: If the cache is too short to ask anything.
        InputError: If no step takes an image's tokens, which see each other, or a prompt that sees itself.
    """
    session = Session.from_bundle(bundle)
    methods = bundle.manifest.description().methods
    placeholders = {method.item.token_id for method in methods.values() if method.item is not None}
    text = (token for token in itertools.count(_FIRST) if token not in placeholders)
    prompt = list(itertools.islice(text, _BEFORE))
    given: dict[str, Any] = {}
    fixed: dict[str, Any] = {}
    for method in methods.values():
        if method.item is None:
            continue
        prompt += [method.item.token_id] * method.outputs[0].sizes({})[0]
        given |= {spec.name: _signal(spec.sizes({})).to(getattr(torch, spec.dtype)) for spec in method.inputs}
        fixed |= {name: one.tensor() for name, one in method.item.fixed.items()}
    prompt += itertools.islice(text, _AFTER)
    room = _NEW if session.max_length is None else min(_NEW, session.max_length - len(prompt))
    if room < 1:
        raise BundleError(
            f"{bundle.path} holds {session.max_length} tokens, and the check takes {len(prompt) + 1}; export it with "
            "a larger max_cache_len"
        )
    encoded: tuple[int, ...] = ()
    values = b""
    if "encode" in methods:
        main = _encoder_input(methods["encode"])
        session.encode(main)
        if main.dtype == torch.int64:
            encoded = tuple(main[0].tolist())
        else:
            values = _file(main)
    found = tuple(int(token) for token in session.generate(torch.tensor([prompt]), room, **given, **fixed))
    return ReferencePrompt(
        tuple(prompt), found, encoded, values, {_checked_name(name): _file(given[name]) for name in given}
    )


def _encoder_input(method: ProgramMethod) -> torch.Tensor:
    spec = method.inputs[0]
    least = max(method.min_length, method.multiple)
    length = min(max(least, _ENCODED), method.max_length)
    length -= 0 if method.pads else length % method.multiple
    if spec.dtype == "int64":
        return _FIRST + torch.arange(length)[None] % _ENCODED
    return _signal(spec.sizes({"batch": 1, "length": length})).to(getattr(torch, spec.dtype))


def _signal(sizes: Sequence[int]) -> torch.Tensor:
    """A wave: not silence, and no noise that another run would not make."""
    count = torch.Size(sizes).numel()
    return (torch.arange(count) * 0.37).sin().reshape(sizes)


def _file(tensor: torch.Tensor) -> bytes:
    """As the C++ program reads it: float32, or int64."""
    return (tensor.float() if tensor.is_floating_point() else tensor.long()).numpy().tobytes()


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise BundleError(f"an input of the program is named {name[:80]!r}, which no script can hold; export it again")
    return name


@dataclass(frozen=True)
class OperatorList:
    """What the programs of some bundles call.

    Attributes:
        signatures: Of the kernels that are registered one by one, by operator.
        whole: Operators of libraries that are linked whole.
    """

    signatures: tuple[KernelSignature, ...]
    whole: tuple[str, ...]

    @property
    def operators(self) -> list[str]:
        return sorted([*(signature.operator for signature in self.signatures), *self.whole])


def list_operators(bundles: Sequence[Bundle]) -> OperatorList:
    """The operators of all these bundles.

    Raises:
        BundleError: If one is for another target than ExecuTorch, or its program is damaged.
        InputError: If the installed executorch has no kernel for one of the operators.
    """
    called: set[str] = set()
    for bundle in bundles:
        if bundle.manifest.target != "executorch":
            raise BundleError(f"{bundle.path} is for {bundle.manifest.target}; export it with --target executorch")
        called |= called_operators(bundle.path / PROGRAM_FILE)
    called = {name for name in called if not is_in_runtime(name)}
    whole = {name for name in called if name.split("::")[0] in WHOLE_LIBRARIES}
    return OperatorList(tuple(signatures_of(sorted(called - whole))), tuple(sorted(whole)))


def write_list(operators: OperatorList, bundles: Sequence[Bundle], path: str | os.PathLike) -> None:
    """Write the file that `EC_OPERATORS` names.

    Raises:
        BundleError: If it cannot be written.
    """
    lines = [f"{one.operator} {one.kernel} {one.outputs} {', '.join(one.arguments)}" for one in operators.signatures]
    names = ", ".join(bundle.path.resolve().name for bundle in bundles).replace("\n", " ")
    text = _HEADER.format(bundles=names) + "".join(f"{line}\n" for line in sorted([*lines, *operators.whole]))
    try:
        with atomic_path(Path(path)) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise cannot_write(Path(path), error) from error


@dataclass(frozen=True)
class ElfProgram:
    """A program or library: `ElfProgram(62, ("libc.so.6",))`.

    Attributes:
        machine: The number of its processor, `e_machine` of the ELF specification.
        libraries: Names of those that it asks the loader for, none for a static program.
    """

    machine: int
    libraries: tuple[str, ...]


def read_program(path: Path) -> ElfProgram:
    """Read the headers of a 64-bit little-endian ELF file.

    Raises:
        InputError: If it cannot be read, or is another kind of file.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read the program {path}: {error.strerror}; name the file that CMake built") from error
    if content[:6] != b"\x7fELF\x02\x01":
        raise InputError(f"{path} is no 64-bit ELF program; name the file that CMake built for the device")
    try:
        return ElfProgram(*_read(content))
    except (struct.error, ValueError, OverflowError) as error:
        raise InputError(f"{path} is a damaged ELF file ({error}); build it again") from error


def _read(content: bytes) -> tuple[int, tuple[str, ...]]:
    machine = struct.unpack_from("<H", content, 18)[0]
    (offset,) = struct.unpack_from("<Q", content, 32)
    size, count = struct.unpack_from("<HH", content, 54)
    # Type, flags, place in the file, address, physical address, bytes in the file, bytes in memory, alignment.
    segments = [struct.unpack_from("<IIQQQQQQ", content, offset + size * index) for index in range(count)]
    entries: list[tuple[int, int]] = []
    for segment in segments:
        if segment[0] == _DYNAMIC:
            table = content[segment[2] : segment[2] + segment[5]]
            entries += struct.iter_unpack("<QQ", table[: len(table) // 16 * 16])
    names = [value for tag, value in entries if tag == _NEEDED]
    if not names:
        return machine, ()
    strings = next((value for tag, value in entries if tag == _STRINGS), None)
    within = [
        one for one in segments if one[0] == _LOAD and strings is not None and one[3] <= strings < one[3] + one[5]
    ]
    if not within:
        raise ValueError("its table of names lies nowhere in it")
    start = within[0][2] + strings - within[0][3]
    return machine, tuple(content[start + name : content.index(0, start + name)].decode() for name in names)
