"""The C++ runner over an installed ExecuTorch, as a device has it: `make test-device EXECUTORCH=PREFIX`.

With that option all of tests/runners drive programs that are linked so; here is what only they can do.
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from exportable_cache.bundle.bundle import Bundle
from exportable_cache.common.native.kernels import VARIABLE
from exportable_cache.pipeline.package import list_operators, write_list
from exportable_cache.session.session import load

from ..kernels.conftest import kernels_build, native_library  # noqa: F401
from ..support.kinds import kind_model
from ..support.models import WINDOW, tiny_model, tokens
from ..support.oracle import reference_logits
from ..support.sessions import PREFILL, exported_bundle
from .conftest import SOURCES, Probe, cmake_program, ids, over_installed


def test_programs_load_nothing_but_what_every_system_has(installed_executorch: str, cpp_build: Path) -> None:
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("there is no readelf, which binutils has")
    done = subprocess.run(
        [readelf, "--dynamic", "--wide", cpp_build / "exportable_cache_generate"], capture_output=True
    )
    assert done.returncode == 0
    names = [line.split("[")[1].rstrip("]") for line in done.stdout.decode().splitlines() if "(NEEDED)" in line]
    system = ("libc.", "libm.", "libstdc++.", "libgcc_s.", "libdl.", "libpthread.", "librt.", "ld-linux", "libhwy.")
    assert names and [name for name in names if not name.startswith(system)] == []


EXPORT = """
import sys
from exportable_cache import export
from tests.support.models import tiny_model
export(tiny_model(sys.argv[1]), "executorch", 64, sys.argv[2], prefill_chunk=16, kernels="native", verify=False)
"""


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_own_operators_are_linked_in(
    installed_executorch: str,
    native_library: Path,  # noqa: F811
    probe: Probe,
    tmp_path: Path,
    family: str,
) -> None:
    # In a process of its own, which loads the kernels that are compiled for the wheel.
    done = subprocess.run(
        [sys.executable, "-c", EXPORT, family, tmp_path / "bundle"],
        capture_output=True, text=True, timeout=600, env={**os.environ, VARIABLE: str(native_library)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    fed, prompt = tokens(40), 3 * WINDOW
    expected = reference_logits(tiny_model(family), fed, prompt)[0]
    decodes = [("decode", int(token)) for token in fed[0, prompt:]]
    replies = probe(("open", tmp_path / "bundle"), ("prefill", ids(fed[0, :prompt])), *decodes)[1:]
    for reply, logits in zip(replies, expected, strict=True):
        assert (torch.tensor(reply.numbers()) - logits).abs().max() <= 1e-4


def test_a_program_with_the_kernels_of_one_bundle_alone(
    request: pytest.FixtureRequest, installed_executorch: str, cpp_build: Path, demo_bundle: Path, tmp_path: Path
) -> None:
    """It is smaller, gives the same tokens, and names what another bundle needs."""
    bundle, listed, folder = Bundle.open(demo_bundle), tmp_path / "listed.txt", tmp_path / "build"
    write_list(list_operators([bundle]), [bundle], listed)
    over = over_installed(installed_executorch, request.config.getoption("--toolchain"))
    options = [*over, f"-DEC_OPERATORS={listed}", "-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_CXX_FLAGS_RELEASE=-O0"]
    for command in (["-S", SOURCES, "-B", folder, *options], ["--build", folder, "--parallel"]):
        done = subprocess.run([cmake_program(), *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    program = folder / "exportable_cache_generate"
    assert program.stat().st_size < (cpp_build / program.name).stat().st_size - 10**6
    command = [*shlex.split(request.config.getoption("--emulator")), program]
    prompt = list(range(3, 40))
    expected = list(load(demo_bundle).generate(torch.tensor([prompt]), 20))
    done = subprocess.run(
        [*command, demo_bundle, "--tokens", ids(prompt), "--max-new-tokens", "20"], capture_output=True, text=True
    )
    assert [int(token) for token in done.stdout.split()] == expected, done.stderr
    other = exported_bundle(kind_model("lfm2"), "executorch", prefill_chunk=PREFILL, verify=False)
    done = subprocess.run([*command, other, "--tokens", "5"], capture_output=True, text=True)
    assert done.returncode == 2 and ", which this program was built without; build it with" in done.stderr, done.stderr
