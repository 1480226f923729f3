"""The C++ runner over an installed ExecuTorch, as a device has it: `make test-device EXECUTORCH=PREFIX`.

With that option all of tests/runners drive programs that are linked so; here is what only they can do.
"""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from ..support.models import WINDOW, tiny_model, tokens
from ..support.oracle import reference_logits
from ..support.sessions import PREFILL, exported_bundle
from .conftest import Probe, ids


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


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_own_operators_are_linked_in(installed_executorch: str, probe: Probe, monkeypatch, family: str) -> None:
    # Exported without a look at the compiled kernels: Python's are for the wheel, and need not be built here.
    monkeypatch.setattr("exportable_cache.backends.executorch.own_operators.load_own_kernels", lambda: True)
    model = tiny_model(family)
    bundle = exported_bundle(model, "executorch", prefill_chunk=PREFILL, kernels="own", verify=False)
    fed, prompt = tokens(40), 3 * WINDOW
    expected = reference_logits(model, fed, prompt)[0]
    decodes = [("decode", int(token)) for token in fed[0, prompt:]]
    replies = probe(("open", bundle), ("prefill", ids(fed[0, :prompt])), *decodes)[1:]
    for reply, logits in zip(replies, expected, strict=True):
        assert (torch.tensor(reply.numbers()) - logits).abs().max() <= 1e-4
