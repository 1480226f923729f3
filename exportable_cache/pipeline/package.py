"""Packages for a device: a bundle with its C++ program and a check, files for other runners, and lists of operators."""

from __future__ import annotations

import itertools
import json
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

from ..backends.executorch.pte.instructions import called_operators, method_names
from ..backends.executorch.pte.kernels import WHOLE_LIBRARIES, KernelSignature, is_in_runtime, signatures_of
from ..backends.executorch.target import FILE as PROGRAM_FILE
from ..bundle.builder import cannot_write
from ..bundle.files import MANIFEST_FILE, TOKENIZER_FILE, TOKENIZER_FOLDER
from ..bundle.signing import SIGNATURE_FILE
from ..common.fs.files import atomic_folder, atomic_path
from ..common.progress import Progress, silent
from ..errors import BundleError, InputError, VerificationError
from ..session.session import Session

if TYPE_CHECKING:
    from ..bundle.bundle import Bundle
    from ..program.methods import ProgramMethod

#: Processor numbers in ELF files, by platform.
PLATFORMS = {"linux-x86_64": 62, "linux-aarch64": 183}
PROGRAM, BUNDLE, RUN, CHECK, CHECK_INPUT = "generate", "bundle", "run.sh", "check.sh", "check-{}.bin"
#: Libraries that only a program built over the Python wheel loads.
_WHEEL_LIBRARIES = ("libpython", "libtorch", "libc10", "_portable_lib")
_SECONDS = 600
#: Namespace of this package's operators, and inputs that ExecuTorch's text runner passes.
_OURS, _RUNNER_INPUTS = "exportable_cache::", ("input_ids", "input_pos")
#: Constant methods with the limits that the runner reads. It takes end tokens from the tokenizer if there are none.
_RUNNER_METHODS = ("get_max_seq_len", "get_max_context_len")
_TOKENIZER_CONFIG = "tokenizer_config.json"
#: First token id (lower ones are often special), numbers of tokens before and after images or audio, length of an
#: encoder's input, and number of new tokens.
_FIRST, _BEFORE, _AFTER, _ENCODED, _NEW = 3, 4, 4, 11, 16
#: A name without special characters of a shell.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_LOAD, _DYNAMIC = 1, 2
_NEEDED, _STRINGS = 1, 5
_HEADER = """\
# Operators that {bundles} call.
# For CMake of runners/cpp: -DEC_OPERATORS=this file. Each line: operator, kernel, number of outputs, argument types;
# only the operator for libraries that are linked whole.
"""

_RUN = """\
#!/bin/sh
# ./run.sh --prompt "Once upon a time"; see ./run.sh --help
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd) || exit 2
exec "$here/{program}" "$here/{bundle}" "$@"
"""
_CHECK = """\
#!/bin/sh
# Check that this device generates the same tokens as the session that made the package: 0 yes, 1 no.
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd) || exit 2
found=$("$here/run.sh" --tokens "{prompt}" --max-new-tokens {count}{inputs}) || exit 2
expected="{expected}"
if [ "$(echo $found)" = "$expected" ]; then echo "the same {count} tokens"; exit 0; fi
echo "other tokens: $found"; echo "expected:     $expected"
exit 1
"""


@dataclass(frozen=True)
class Package:
    """A folder for a device.

    Attributes:
        path: The folder.
        platform: One of `PLATFORMS`.
        files: Bytes by file name.
        libraries: Libraries that the program loads on the device.
        tokens: Token ids that the check expects.
        ran: True if the check was run, which needs the platform of this machine.
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
        bundle: Bundle for ExecuTorch on a CPU. Its encoders are part of the check.
        program: `exportable_cache_generate` of `runners/cpp`, built for the platform with an installed ExecuTorch.
        platform: One of `PLATFORMS`.
        output: Folder to write, which must not exist.
        progress: Called at each stage.

    Raises:
        BundleError: If the bundle has another target, its cache is too short for the check, or the folder exists or
            cannot be written.
        InputError: If the platform is unknown, the program is for another platform or needs the Python wheel, or no
            method takes the check's tokens.
        VerificationError: If the platform is this machine's, and the program fails or generates other tokens; the
            folder is removed.
    """
    program = Path(program)
    libraries = _check_program(program, platform)
    _check_bundle(bundle)
    folder = _new_folder(output)
    progress("generating the expected tokens", 0, None)
    reference = reference_prompt(bundle)
    progress("copying", 0, None)
    try:
        with atomic_folder(folder) as made:
            _copy(made, bundle, program, reference)
            ran = platform == f"{host.system().lower()}-{host.machine()}"
            if ran:
                progress("running the check", 0, None)
                _run_check(made)
            files = {path.relative_to(made).as_posix(): path.stat().st_size for path in _files(made)}
    except OSError as error:
        raise cannot_write(folder, error) from error
    return Package(folder, platform, files, libraries, reference.tokens, ran)


def package_files(bundle: Bundle, output: str | os.PathLike, progress: Progress = silent) -> dict[str, int]:
    """Write `model.pte`, `tokenizer.json` and `tokenizer_config.json` into one folder, for ExecuTorch's runners.

    The chat template is in the tokenizer's config, where react-native-executorch looks for it.

    Args:
        bundle: Bundle for ExecuTorch, whose program calls ExecuTorch's operators only.
        output: Folder to write, which must not exist.
        progress: Called at each stage.

    Returns:
        Bytes by file name.

    Raises:
        BundleError: If the runners cannot run the program, there is no tokenizer, or the folder exists or cannot be
            written.
    """
    folder = _new_folder(output)
    _check_bundle(bundle)
    _check_for_runners(bundle)
    progress("copying", 0, None)
    config = _tokenizer_config(bundle.path / TOKENIZER_FOLDER)
    try:
        with atomic_folder(folder) as made:
            shutil.copyfile(bundle.path / PROGRAM_FILE, made / "model.pte")
            shutil.copyfile(bundle.path / TOKENIZER_FILE, made / Path(TOKENIZER_FILE).name)
            (made / _TOKENIZER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            return {path.name: path.stat().st_size for path in _files(made)}
    except OSError as error:
        raise cannot_write(folder, error) from error


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return the tokenizer's config with the chat template, which transformers saves in a file of its own."""
    path, template = folder / _TOKENIZER_CONFIG, folder / "chat_template.jinja"
    try:
        config = dict(json.loads(path.read_bytes()))
        if template.is_file():
            config["chat_template"] = template.read_text(encoding="utf-8")
    except (OSError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise BundleError(f"cannot read {path}: {error}; export the model again with its tokenizer") from error
    return config


def _new_folder(output: str | os.PathLike) -> Path:
    folder = Path(output)
    if folder.exists() or folder.is_symlink():
        raise BundleError(f"{folder} exists; choose another folder, or remove it")
    return folder


def _check_for_runners(bundle: Bundle) -> None:
    """Check that ExecuTorch's text runner can run a bundle's program with its tokenizer.

    Raises:
        BundleError: If it cannot.
    """
    described = bundle.manifest.description()
    forward = described.methods.get("forward")
    native = sorted(name for name in called_operators(bundle.path / PROGRAM_FILE) if name.startswith(_OURS))
    constants = sorted(set(_RUNNER_METHODS) - method_names(bundle.path / PROGRAM_FILE))
    missing = next(
        (
            what
            for what, is_missing in (
                ("a method forward(input_ids, input_pos)", forward is None or forward.input_names != _RUNNER_INPUTS),
                ("one row", described.batch_size != 1),
                (f"the constant method {constants[0] if constants else ''}", bool(constants)),
                (f"only ExecuTorch's operators, and it calls {native[0] if native else ''}", bool(native)),
                (f"the file {TOKENIZER_FILE}", TOKENIZER_FILE not in bundle.manifest.files),
            )
            if is_missing
        ),
        None,
    )
    if missing is not None:
        raise BundleError(
            f"{bundle.path} must have {missing}, for ExecuTorch's runners; export a text decoder with "
            "-O llm_runner=true"
        )


def _check_program(path: Path, platform: str) -> tuple[str, ...]:
    if platform not in PLATFORMS:
        raise InputError(f"platform must be one of {', '.join(PLATFORMS)}, got {platform!r}")
    found = read_program(path)
    if found.machine != PLATFORMS[platform]:
        names = {machine: name for name, machine in PLATFORMS.items()}
        known = names.get(found.machine, f"processor {found.machine} of the ELF specification")
        raise InputError(f"program must be built for {platform}, got {path} for {known}; build it for {platform}")
    wheel = [name for name in found.libraries if name.startswith(_WHEEL_LIBRARIES)]
    if wheel:
        raise InputError(
            f"program must not need the Python wheel, but {path} loads {wheel[0]}; build it with an installed "
            "ExecuTorch: -DEC_EXECUTORCH=installed (docs/device.md)"
        )
    return found.libraries


def _check_bundle(bundle: Bundle) -> None:
    manifest = bundle.manifest
    if manifest.target != "executorch":
        raise BundleError(
            f"bundle must be for executorch, got {bundle.path} for {manifest.target}; export it with "
            "--target executorch"
        )


def _copy(folder: Path, bundle: Bundle, program: Path, reference: ReferencePrompt) -> None:
    names = [*bundle.manifest.files, MANIFEST_FILE]
    names += [SIGNATURE_FILE] if (bundle.path / SIGNATURE_FILE).is_file() else []
    for name in names:
        target = folder / BUNDLE / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(bundle.path / name, target)
    shutil.copyfile(program, folder / PROGRAM)
    # Only numbers and known names, because text from a manifest must not enter a script.
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
    """Write the inputs of the check and return the program's arguments for them."""
    arguments = f' --encode "{" ".join(map(str, reference.encoded))}"' if reference.encoded else ""
    if reference.values:
        file = CHECK_INPUT.format("input")
        (folder / file).write_bytes(reference.values)
        arguments = f' --encode-file "$here/{file}"'
    for name, content in reference.inputs.items():
        file = CHECK_INPUT.format(name)
        (folder / file).write_bytes(content)
        arguments += f' --input "{name}=$here/{file}"'
    return arguments


def _run_check(folder: Path) -> None:
    done = subprocess.run([folder / CHECK], capture_output=True, text=True, errors="replace", timeout=_SECONDS)
    if done.returncode:
        output = (done.stdout + done.stderr).strip().splitlines()[-3:]
        raise VerificationError("the program generates other tokens: " + "; ".join(output or ["no output"]))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))


@dataclass(frozen=True)
class ReferencePrompt:
    """The input of the check and the session's result.

    Attributes:
        prompt: Token ids.
        tokens: Expected new tokens, by greedy decoding.
        encoded: Token ids for an encoder.
        values: Numbers for an encoder, as the content of a file.
        inputs: Contents of files by the processor's names, one item each.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    encoded: tuple[int, ...] = ()
    values: bytes = b""
    inputs: Mapping[str, bytes] = field(default_factory=dict)


def reference_prompt(bundle: Bundle) -> ReferencePrompt:
    """Generate the expected tokens on this machine.

    Raises:
        BundleError: If the cache is too short.
        InputError: If no method takes an image's tokens, which attend to each other, or a bidirectional prompt.
    """
    session = Session.from_bundle(bundle)
    methods = bundle.manifest.description().methods
    placeholders = {method.item.token_id for method in methods.values() if method.item is not None}
    text = (token for token in itertools.count(_FIRST) if token not in placeholders)
    prompt = list(itertools.islice(text, _BEFORE))
    given: dict[str, Any] = {}
    fixed: dict[str, Any] = {}
    for method in methods.values():
        if method.item is None or method.item.tokens:
            continue
        prompt += [method.item.token_id] * method.outputs[0].sizes({})[0]
        given |= {spec.name: _signal(spec.sizes({})).to(getattr(torch, spec.dtype)) for spec in method.inputs}
        fixed |= {name: one.tensor() for name, one in method.item.fixed.items()}
    prompt += itertools.islice(text, _AFTER)
    room = _NEW if session.max_length is None else min(_NEW, session.max_length - len(prompt))
    if room < 1:
        raise BundleError(
            f"{bundle.path} must hold {len(prompt) + 1} tokens for the check, got {session.max_length}; export it with "
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
    """Return a sine wave, which is neither silence nor noise that differs in each run."""
    count = torch.Size(sizes).numel()
    return (torch.arange(count) * 0.37).sin().reshape(sizes)


def _file(tensor: torch.Tensor) -> bytes:
    """Return a tensor as the C++ program reads it: float32 or int64."""
    return (tensor.float() if tensor.is_floating_point() else tensor.long()).numpy().tobytes()


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise BundleError(f"an input must have a name of letters and digits, got {name[:80]!r}; export the model again")
    return name


@dataclass(frozen=True)
class OperatorList:
    """The operators that the programs of some bundles call.

    Attributes:
        signatures: Kernels that are registered one by one.
        whole: Operators of libraries that are linked whole.
    """

    signatures: tuple[KernelSignature, ...]
    whole: tuple[str, ...]

    @property
    def operators(self) -> list[str]:
        """Names of all operators, sorted."""
        return sorted([*(signature.operator for signature in self.signatures), *self.whole])


def list_operators(bundles: Sequence[Bundle]) -> OperatorList:
    """Return the operators of all these bundles.

    Raises:
        BundleError: If a bundle has another target than ExecuTorch, or its program is damaged.
        InputError: If the installed executorch lacks a kernel for an operator.
    """
    called: set[str] = set()
    for bundle in bundles:
        if bundle.manifest.target != "executorch":
            raise BundleError(
                f"bundle must be for executorch, got {bundle.path} for {bundle.manifest.target}; export it with "
                "--target executorch"
            )
        called |= called_operators(bundle.path / PROGRAM_FILE)
    called = {name for name in called if not is_in_runtime(name)}
    whole = {name for name in called if name.split("::")[0] in WHOLE_LIBRARIES}
    return OperatorList(tuple(signatures_of(sorted(called - whole))), tuple(sorted(whole)))


def write_list(operators: OperatorList, bundles: Sequence[Bundle], path: str | os.PathLike) -> None:
    """Write the file for CMake's `EC_OPERATORS`.

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
    """An ELF program or library: `ElfProgram(62, ("libc.so.6",))`.

    Attributes:
        machine: Number of its processor, `e_machine` of the ELF specification.
        libraries: Names of the libraries that it loads; empty for a static program.
    """

    machine: int
    libraries: tuple[str, ...]


def read_program(path: Path) -> ElfProgram:
    """Read the headers of a 64-bit little-endian ELF file.

    Raises:
        InputError: If it cannot be read or is not such a file.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read the program {path}: {error.strerror}; pass the file that CMake built") from error
    if content[:6] != b"\x7fELF\x02\x01":
        raise InputError(
            f"program must be a 64-bit ELF file, got {path}; pass the file that CMake built for the device"
        )
    try:
        return ElfProgram(*_read(content))
    except (struct.error, ValueError, OverflowError) as error:
        raise InputError(f"{path} is a damaged ELF file ({error}); build it again") from error


def _read(content: bytes) -> tuple[int, tuple[str, ...]]:
    machine = struct.unpack_from("<H", content, 18)[0]
    (offset,) = struct.unpack_from("<Q", content, 32)
    size, count = struct.unpack_from("<HH", content, 54)
    # Type, flags, file offset, address, physical address, bytes in the file, bytes in memory, alignment.
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
        raise ValueError("its table of names is missing")
    start = within[0][2] + strings - within[0][3]
    return machine, tuple(content[start + name : content.index(0, start + name)].decode() for name in names)
