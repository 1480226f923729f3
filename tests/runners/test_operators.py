"""A program with the kernels of listed operators only: the list, the declarations made of it, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest
from typer.testing import CliRunner

from exportable_cache.backends.executorch.pte.instructions import called_operators
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.cli.app import app
from exportable_cache.common.compat.executorch import deserialized_program, operator_names
from exportable_cache.errors import BundleError, InputError
from exportable_cache.pipeline.package import list_operators, write_list

from ..security.conftest import reseal
from ..support.models import tiny_model
from ..support.sessions import CAPACITY, exported_bundle, folded_bundle
from .conftest import SOURCES, Probe, cmake_program

signatures = pytest.importorskip(
    "exportable_cache.backends.executorch.pte.kernels", reason="the executorch extra is not installed"
)
PACKAGE = Path(util.find_spec("executorch").submodule_search_locations[0]) if util.find_spec("executorch") else Path()
FLAGS = [
    "-std=c++20", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-DC10_USING_CUSTOM_GENERATED_MACROS",
    f"-I{PACKAGE}/include", f"-I{PACKAGE}/include/executorch/runtime/core/portable_type/c10",
]  # fmt: skip
pytestmark = pytest.mark.skipif(not PACKAGE.parts, reason="the executorch extra is not installed")


@pytest.fixture(scope="module")
def hybrid() -> Bundle:
    return Bundle.open(folded_bundle(llm_runner=True)[1])


def libraries() -> list[Path]:
    """The wheel's, in which kernels are."""
    return [
        *PACKAGE.glob("extension/pybindings/_portable_lib*.so"),
        *PACKAGE.glob("kernels/quantized/libquantized*.so"),
    ]


def declared(listed: Path, folder: Path, searched: list[Path]) -> subprocess.CompletedProcess:
    """What CMake makes of a list, in `folder`."""
    if shutil.which("nm") is None:
        pytest.skip("there is no nm, which binutils has")
    symbols, script = folder / "nm", folder / "script.cmake"
    # Of shared libraries, and not of archives, names are found with -D.
    symbols.write_text('#!/bin/sh\nexec nm -D "$@"\n')
    symbols.chmod(0o755)
    found = ";".join(map(str, searched))
    script.write_text(
        f'include("{SOURCES}/cmake/listed_operators.cmake")\nset(CMAKE_NM "{symbols}")\n'
        f'ec_list_operators("{listed}" "{folder}" "{found}" whole)\nmessage(STATUS "whole: ${{whole}}")\n'
    )
    return subprocess.run([cmake_program(), "-P", script], capture_output=True, text=True)


def compiled(folder: Path) -> Path:
    """`src/operators.cpp` over these declarations, linked to the wheel, where a kernel of other types is not found."""
    compiler, library = shutil.which("g++") or shutil.which("clang++"), folder / "listed.so"
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    options = ["-Wl,--no-undefined", "-Wl,--allow-shlib-undefined", *map(str, libraries())]
    command = [compiler, *FLAGS, f"-I{folder}", str(SOURCES / "src" / "operators.cpp"), "-o", str(library), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr[-3000:]
    return library


def listed_in(path: Path) -> list[str]:
    return [line.split(" ")[0] for line in path.read_text().splitlines() if not line.startswith("#")]


def test_the_operators_of_a_program_are_those_of_its_plans(hybrid: Bundle) -> None:
    path = hybrid.path / "program.pte"
    plans = deserialized_program(path.read_bytes()).execution_plan
    expected = {f"{one.name}.{one.overload}".rstrip(".") for plan in plans for one in plan.operators}
    assert called_operators(path) == expected and expected <= operator_names()


def test_a_list_has_what_bundles_call_and_the_runtime_has_not(hybrid: Bundle, tmp_path: Path) -> None:
    found = list_operators([hybrid])
    write_list(found, [hybrid], tmp_path / "listed.txt")
    named = listed_in(tmp_path / "listed.txt")
    assert named == found.operators and "llama::custom_sdpa.out" in found.whole
    rest = called_operators(hybrid.path / "program.pte") - set(named)
    assert all(signatures.is_in_runtime(name) for name in rest) and rest
    with pytest.raises(BundleError, match="must be for executorch, got .* for pt2; export it with --target executorch"):
        list_operators([Bundle.open(exported_bundle(tiny_model("llama"), "pt2", prefill_chunk=16))])
    with pytest.raises(BundleError, match="cannot write"):
        write_list(found, [hybrid], tmp_path / "listed.txt" / "listed.txt")
    with pytest.raises(InputError, match="no kernel for aten::magic.out; build with all kernels"):
        signatures.signatures_of(["aten::magic.out", "aten::add.out"])


def test_every_kernel_is_declared_as_it_is(tmp_path: Path) -> None:
    """231 operators of 1.4.1: a name or a type that is not the kernel's does not link."""
    names = sorted(signatures._kernels())
    lines = [
        f"{one.operator} {one.kernel} {one.outputs} {', '.join(one.arguments)}\n"
        for one in signatures.signatures_of(names)
    ]
    (tmp_path / "all.txt").write_text("# all\n" + "".join(lines) + "llama::custom_sdpa.out\n")
    done = declared(tmp_path / "all.txt", tmp_path, libraries())
    assert done.returncode == 0 and "whole: llama\n" in done.stdout, done
    text = (tmp_path / "listed_operators.inc").read_text()
    assert len(names) > 200 and text.count("EC_KERNEL(") == len(names)
    # The optimised one where there is one.
    assert ", opt_add_out, Outputs1, const Tensor&, const Tensor&, const Scalar&, Tensor&)" in text
    assert ", cat_out, Outputs1, TensorList, int64_t, Tensor&)" in text
    compiled(tmp_path)


RUN = """
import ctypes, json, sys, torch
from exportable_cache.common.compat.executorch import runtime
runtime()
if sys.argv[2]:
    ctypes.CDLL(sys.argv[2], ctypes.RTLD_GLOBAL)
from exportable_cache.session.session import load
print(json.dumps([int(token) for token in load(sys.argv[1]).generate(torch.tensor([list(range(3, 30))]), 24)]))
"""


def run(bundle: Path, library: Path | str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", RUN, bundle, str(library)], capture_output=True, text=True)


@pytest.mark.full
@pytest.mark.parametrize("quantize", [None, "8da4w"])
def test_kernels_that_are_registered_by_a_list_give_the_same_tokens(tmp_path: Path, quantize: str | None) -> None:
    """Beside the wheel's own, under other names: the program is changed to call those."""
    quantized = {} if quantize is None else {"quantize": quantize}
    model = tiny_model("gemma3_text", num_attention_heads=16)
    source = exported_bundle(model, "executorch", CAPACITY, prefill_chunk=16, verify=False, **quantized)
    bundle = Bundle.open(source)
    found = list_operators([bundle])
    write_list(found, [bundle], tmp_path / "listed.txt")
    done = declared(tmp_path / "listed.txt", tmp_path, libraries())
    assert done.returncode == 0, done.stderr
    inc = tmp_path / "listed_operators.inc"
    inc.write_text(re.sub(r'EC_KERNEL\("\w', 'EC_KERNEL("z', inc.read_text()))
    library = compiled(tmp_path)
    changed = Path(shutil.copytree(source, tmp_path / "bundle"))
    program = (changed / "program.pte").read_bytes()
    for name in {one.operator.split(".")[0].encode() for one in found.signatures}:
        assert name + b"\0" in program
        program = program.replace(name + b"\0", b"z" + name[1:] + b"\0")
    (changed / "program.pte").write_bytes(program)
    reseal(changed)
    alone, beside, expected = run(changed, ""), run(changed, library), run(source, "")
    assert alone.returncode != 0
    assert beside.returncode == 0, beside.stderr[-2000:]
    assert json.loads(beside.stdout) == json.loads(expected.stdout)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("aten::add.out add_out 1 const Tensor&; exec(1)\n", "because of this line: 'aten::add.out add_out 1 const"),
        ("aten::add.out add_out 9 Tensor&\n", "is not a list of operators"),
        ("aten::add.out add_out 1 Tensor&, $ENV{HOME}\n", "is not a list of operators"),
        ("aten::a.out a_out 1 Tensor&\naten::add.out add_out 1 Tensor&\naten::b.out b_out 1 Tensor&\n",
         "no kernel for aten::a.out, aten::b.out, which"),
        (None, "there is no such file; write it with: exportable-cache operators BUNDLE -o FILE"),
    ],
)  # fmt: skip
def test_lists_that_are_none_are_refused(tmp_path: Path, text: str | None, message: str) -> None:
    listed = tmp_path / "listed.txt"
    if text is not None:
        listed.write_text(text)
    done = declared(listed, tmp_path, libraries()[:1])
    assert done.returncode and message in " ".join(done.stderr.split()), done.stderr
    assert not (tmp_path / "listed_operators.inc").exists()


@pytest.mark.full
def test_a_program_without_an_operator_names_it(probe: Probe, hybrid: Bundle, tmp_path: Path) -> None:
    for old, new, message in (
        (b"aten::clamp\0", b"aten::clomp\0", "calls aten::clomp.out, which this program was built without; build it"),
        (b"XnnpackBackend\0", b"XnnpickBackend\0", "is for XnnpickBackend, which this program was built without"),
    ):
        bundle = Path(shutil.copytree(hybrid.path, tmp_path / new.decode().rstrip("\0").replace(":", "")))
        program = (bundle / "program.pte").read_bytes()
        assert old in program
        (bundle / "program.pte").write_bytes(program.replace(old, new))
        (reply,) = probe(("open", bundle))
        assert not reply.ok and reply.values[0] == "bundle" and message in reply.values[1], reply


def test_a_program_of_own_operators_says_which_kernels_to_build_with(
    request: pytest.FixtureRequest, probe: Probe, hybrid: Bundle, tmp_path: Path
) -> None:
    bundle = Path(shutil.copytree(hybrid.path, tmp_path / "own"))
    program = (bundle / "program.pte").read_bytes()
    (bundle / "program.pte").write_bytes(program.replace(b"llama::update_cache\0", b"exportable_cache::x\0"))
    (reply,) = probe(("open", bundle))
    wanted = "-DEC_NATIVE_KERNELS=ON" if request.config.getoption("--executorch") else "-DEC_KERNELS=PATH"
    assert not reply.ok and "calls exportable_cache::x.out, which this program was built without" in reply.values[1]
    assert f"build it with {wanted}" in reply.values[1] and "EC_OPERATORS" not in reply.values[1], reply


def test_the_command_writes_the_list(hybrid: Bundle, tmp_path: Path) -> None:
    command = ["operators", str(hybrid.path), "-o", str(tmp_path / "listed.txt"), "--json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["operators"] == listed_in(tmp_path / "listed.txt") and said["path"] == str(tmp_path / "listed.txt")
