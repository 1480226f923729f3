"""`package`: a folder for a device, with a check that finds a program that answers otherwise."""

import platform
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from exportable_cache.bundle.bundle import Bundle
from exportable_cache.errors import BundleError, InputError, VerificationError
from exportable_cache.pipeline.package import CHECK, PLATFORMS, PROGRAM, package, read_program
from exportable_cache.session.session import Session, load

from ..support.models import tiny_model
from ..support.sessions import exported_bundle
from .test_cpp_encoders import bundle_of as encoder_bundle
from .test_cpp_items import bundle_of as items_bundle
from .test_cpp_media import bundle_of as media_bundle

HERE = f"linux-{platform.machine()}"
OTHER = next(name for name in PLATFORMS if name != HERE)

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux" or HERE not in PLATFORMS, reason="programs of Linux are packaged"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler"),
]


@pytest.fixture(scope="module")
def bundle(demo_bundle: Path) -> Bundle:
    return Bundle.open(demo_bundle)


def compiled(folder: Path, said: str) -> Path:
    """A program that prints this, whatever it is asked."""
    source, program = folder / "says.c", folder / "says"
    source.write_text(f'#include <stdio.h>\nint main(void) {{ puts("{said}"); return 0; }}\n')
    subprocess.run(["cc", str(source), "-o", str(program)], check=True)
    return program


def for_machine(program: Path, machine: int) -> Path:
    changed = program.with_name(f"for-{machine}")
    content = bytearray(program.read_bytes())
    struct.pack_into("<H", content, 18, machine)
    changed.write_bytes(content)
    return changed


def test_a_package_runs_its_check_where_it_can(bundle: Bundle, tmp_path: Path) -> None:
    import torch

    tokens = list(load(bundle.path).generate(torch.tensor([list(range(3, 11))]), 16))
    right = compiled(tmp_path, " ".join(map(str, tokens)) + " ")
    made = package(bundle, right, HERE, tmp_path / "device")
    assert made.ran and list(made.tokens) == tokens and made.libraries[0].startswith("libc.")
    # A bundle as it was, and everything in the list.
    assert Bundle.open(made.path / "bundle").manifest == bundle.manifest
    assert {"run.sh", CHECK, PROGRAM, "bundle/program.pte", "bundle/manifest.json"} <= set(made.files)
    assert sorted(path.name for path in made.path.iterdir()) == ["bundle", CHECK, PROGRAM, "run.sh"]
    # On another device: the same script finds what is not the same.
    moved = made.path.rename(tmp_path / "moved there")
    assert subprocess.run([moved / CHECK], capture_output=True).returncode == 0
    shutil.copy(compiled(tmp_path, "5 5 5"), moved / PROGRAM)
    done = subprocess.run([moved / CHECK], capture_output=True, text=True)
    assert done.returncode == 1 and "other tokens: 5 5 5" in done.stdout
    with pytest.raises(BundleError, match="exists; choose another folder"):
        package(bundle, right, HERE, moved)


def test_a_program_with_other_tokens_leaves_nothing(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match="other tokens: 1 2 3"):
        package(bundle, compiled(tmp_path, "1 2 3"), HERE, tmp_path / "device")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["says", "says.c"]


def test_what_is_for_another_processor_is_packaged_for_that(bundle: Bundle, tmp_path: Path) -> None:
    program = for_machine(compiled(tmp_path, "1 2 3"), PLATFORMS[OTHER])
    assert not package(bundle, program, OTHER, tmp_path / "device").ran
    with pytest.raises(InputError, match=f"program must be built for {HERE}, got .* for {OTHER}"):
        package(bundle, program, HERE, tmp_path / "other")
    with pytest.raises(InputError, match="got .* for processor 8 of the ELF specification"):
        package(bundle, for_machine(program, 8), HERE, tmp_path / "other")
    with pytest.raises(InputError, match="platform must be one of linux-x86_64, linux-aarch64, got 'android'"):
        package(bundle, program, "android", tmp_path / "other")


def test_a_program_of_the_wheel_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    source, library = tmp_path / "one.c", tmp_path / "libpython3.so"
    source.write_text("int one(void) { return 1; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libpython3.so", source, "-o", library], check=True)
    source.write_text("int one(void); int main(void) { return one(); }\n")
    subprocess.run(["cc", source, library, "-o", tmp_path / "program"], check=True)
    with pytest.raises(InputError, match="must not need the Python wheel, but .* loads libpython3.so"):
        package(bundle, tmp_path / "program", HERE, tmp_path / "device")


def test_files_that_are_no_programs_are_one_sentence(tmp_path: Path) -> None:
    whole = compiled(tmp_path, "x").read_bytes()
    cut = tmp_path / "cut"
    for size in [*range(0, 1200, 7), *range(1200, len(whole), 997)]:
        cut.write_bytes(whole[:size])
        try:
            read_program(cut)
        except InputError as error:
            assert "\n" not in str(error)
    for at in range(6, 800):
        cut.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
        try:
            read_program(cut)
        except InputError:
            pass
    with pytest.raises(InputError, match="cannot read the program .*: No such file"):
        read_program(tmp_path / "none")


def test_other_bundles_are_refused(tmp_path: Path) -> None:
    program = compiled(tmp_path, "1")
    pt2 = Bundle.open(exported_bundle(tiny_model("llama"), "pt2", prefill_chunk=16))
    with pytest.raises(BundleError, match="must be for executorch, got .* for pt2; export it with --target executorch"):
        package(pt2, program, HERE, tmp_path / "device")


@pytest.mark.full
@pytest.mark.parametrize("family", ["t5", "whisper", "llava", "qwen2_5_vl", "paligemma"])
def test_the_check_gives_an_encoder_its_input(cpp_build: Path, tmp_path: Path, family: str) -> None:
    of_family = {"t5": encoder_bundle, "whisper": encoder_bundle, "paligemma": media_bundle}.get(family, items_bundle)
    bundle = Bundle.open(of_family(family))
    made = package(bundle, for_machine(compiled(tmp_path, ""), PLATFORMS[OTHER]), OTHER, tmp_path / "device")
    assert len(made.tokens) > 3
    # That over the wheel, which is no device's: another name for it.
    program = cpp_build / "exportable_cache_generate"
    (made.path / PROGRAM).write_text(f'#!/bin/sh\nexec "{program}" "$@"\n')
    done = subprocess.run([made.path / CHECK], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == f"the same {len(made.tokens)} tokens\n", done
    files = sorted(path.name for path in made.path.glob("check-*"))
    name = {"whisper": "input", "t5": None}.get(family, "pixel_values")
    assert files == ([f"check-{name}.bin"] if name else [])
    if name is None:
        script = (made.path / CHECK).read_text()
        (made.path / CHECK).write_text(re.sub('--encode "[0-9 ]+"', '--encode ""', script))
    else:
        content = (made.path / files[0]).read_bytes()
        (made.path / files[0]).write_bytes(content[:-8])
    done = subprocess.run([made.path / CHECK], capture_output=True, text=True)
    assert done.returncode == 2 and ("is empty" if name is None else "numbers") in done.stderr


def test_a_cache_that_is_too_short_for_the_check_is_refused(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "max_length", 8)
    program = for_machine(compiled(tmp_path, ""), PLATFORMS[OTHER])
    with pytest.raises(BundleError, match="must hold 9 tokens for the check, got 8"):
        package(bundle, program, OTHER, tmp_path / "device")


def test_the_program_over_an_installed_executorch(
    installed_executorch: str, cpp_build: Path, bundle: Bundle, tmp_path: Path
) -> None:
    program = cpp_build / "exportable_cache_generate"
    machine = read_program(program).machine
    target = next(name for name, number in PLATFORMS.items() if number == machine)
    assert package(bundle, program, target, tmp_path / "device").ran == (target == HERE)
