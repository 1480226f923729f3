"""The wheel that is built from the source distribution: all files of the package, and its metadata."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path

import pytest

pytestmark = pytest.mark.project

ROOT = Path(__file__).parents[1]
PACKAGES = ("exportable_cache", "exportable_cache_runner")
#: Both, by the functions that pip and build call, without their environments, which are downloaded.
BUILD = """
import os, sys, tarfile
from setuptools import build_meta
out = sys.argv[1]
name = build_meta.build_sdist(out)
with tarfile.open(os.path.join(out, name)) as archive:
    archive.extractall(out, filter="data")
os.chdir(os.path.join(out, name.removesuffix(".tar.gz")))
build_meta.build_wheel(out)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    if int(version("setuptools").split(".")[0]) < 77:
        pytest.skip("the build needs setuptools 77")
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    done = subprocess.run([sys.executable, "-c", BUILD, built], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not re.findall(r".*(?:SetuptoolsDeprecationWarning|_Warning).*", done.stdout + done.stderr)
    return zipfile.ZipFile(next(built.glob("*.whl")))


def test_it_has_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    expected = {
        path.relative_to(ROOT).as_posix()
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }
    found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == expected
    kinds = {path.rpartition(".")[2] for path in found}
    assert {"py", "typed", "cpp", "h", "html", "safetensors", "json", "jinja"} <= kinds


def test_its_metadata_name_what_pyproject_promises(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    fields = Parser().parsestr(wheel.read(name).decode())
    oldest, newest = sorted(map(int, re.findall(r"3\.(\d+)", fields["Requires-Python"])))
    classified = re.findall(r"Python :: 3\.(\d+)", "\n".join(fields.get_all("Classifier", [])))
    assert [int(minor) for minor in classified] == list(range(oldest, newest))
    assert fields["License-Expression"] == "Apache-2.0" and "Typing :: Typed" in fields.get_all("Classifier", [])
    assert fields["Description-Content-Type"] == "text/markdown" and "# exportable_cache" in fields.get_payload()
    assert {"executorch", "serve", "eval"} <= set(fields.get_all("Provides-Extra", []))
