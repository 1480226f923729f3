"""`exportable-cache native build`: what it refuses, what it installs, and when it compiles."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from exportable_cache.backends.executorch.native import build as build_file
from exportable_cache.backends.executorch.native.build import STAMP, NativePackage, build_native, missing_tools
from exportable_cache.cli.app import app
from exportable_cache.common.native.kernels import installed_path
from exportable_cache.errors import InputError, MissingDependencyError
from exportable_cache_runner.installed import executorch_release, installed_library

from ..support.store import REPOSITORY


class Commands:
    """Stands for CMake: writes libraries where they would be installed, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, command: list[str]) -> None:
        self.calls += 1
        if "--install" in command:
            folder = Path(command[-1])
            folder.mkdir()
            for path in (installed_path(), installed_path().with_name(build_file.RUNNER)):
                (folder / path.name).write_bytes(b"library")


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    found = Commands()
    monkeypatch.setattr(build_file, "_run", found)
    monkeypatch.setattr(build_file, "missing_tools", lambda: "")
    monkeypatch.setattr(build_file, "find_cmake", lambda: "cmake")
    return found


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A repository with nothing but the files that name the sources."""
    folder = tmp_path / "repository"
    for name in build_file._FOLDERS:
        path = folder / name
        path = path if path.suffix else path / "source.cpp"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    return folder


def test_every_source_is_in_the_digest() -> None:
    assert all((REPOSITORY / name).exists() for name in build_file._FOLDERS)


def test_it_compiles_only_what_has_changed(commands: Commands, sources: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    first = build_native(sources, folder)
    assert first == NativePackage(folder / installed_path().name, folder / build_file.RUNNER, True)
    assert sorted(path.name for path in folder.iterdir()) == sorted([STAMP, first.kernels.name, first.runner.name])
    assert not build_native(sources, folder).is_new and commands.calls == 3
    (sources / "kernels" / "src" / "source.cpp").write_text("int changed;")
    assert build_native(sources, folder).is_new and commands.calls == 6
    first.runner.unlink()
    assert build_native(sources, folder).is_new and commands.calls == 9
    assert build_native(sources, folder, ["-DOPTION=1"]).is_new and commands.calls == 12


def test_it_is_up_to_date_without_a_compiler(
    commands: Commands, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_native(sources, tmp_path / "made")
    monkeypatch.setattr(build_file, "missing_tools", lambda: "g++")
    assert not build_native(sources, tmp_path / "made").is_new


def test_a_failed_build_leaves_what_was_there(
    commands: Commands, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = build_native(sources, tmp_path / "made")
    (sources / "kernels" / "src" / "source.cpp").write_text("int changed;")

    def fail(command: list[str]) -> None:
        raise MissingDependencyError("no")

    monkeypatch.setattr(build_file, "_run", fail)
    with pytest.raises(MissingDependencyError):
        build_native(sources, tmp_path / "made")
    assert package.kernels.is_file() and package.runner.is_file()


def test_a_folder_that_cannot_be_written_is_named(commands: Commands, sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"file.made cannot be written: .*; choose another folder with --output"):
        build_native(sources, tmp_path / "file" / "made")


def test_sources_are_a_clone(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"sources must be a clone of the repository, got .*--sources DIR"):
        build_native(tmp_path)


def test_what_is_missing_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build_file, "_highway_prefixes", lambda: [str(tmp_path)])
    monkeypatch.setattr(build_file, "find_cmake", lambda: None)
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    wanted = "a C++20 compiler and Google Highway and cmake (apt install g++ libhwy-dev; pip install cmake)"
    assert missing_tools() == wanted
    with pytest.raises(MissingDependencyError, match=r"the native package needs a C\+\+20 compiler and"):
        build_native(output=tmp_path)
    (tmp_path / "include" / "hwy").mkdir(parents=True)
    (tmp_path / "include" / "hwy" / "highway.h").touch()
    monkeypatch.setattr(build_file, "find_cmake", lambda: "cmake")
    assert missing_tools() == "a C++20 compiler (apt install g++)"
    monkeypatch.setenv("CXX", f"{sys.executable} -O2")
    assert missing_tools() == ""


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("Could not find a package configuration file provided by hwy", "apt install libhwy-dev"),
        ("No CMAKE_CXX_COMPILER could be found.", "apt install g++"),
        ("python has no executorch, or none", "pip install 'exportable-cache\\[executorch\\]'"),
        ("a.cpp:1: error: no", "see the compiler's output above"),
    ],
)
def test_the_end_of_the_compilers_output_has_a_remedy(said: str, remedy: str) -> None:
    code = f"import sys; print({said!r}, file=sys.stderr); sys.exit(1)"
    with pytest.raises(MissingDependencyError, match=f"(?s){remedy}"):
        build_file._run([sys.executable, "-c", code])


def test_make_goes_on_without_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build_file, "missing_tools", lambda: "Google Highway (apt install libhwy-dev)")
    result = CliRunner().invoke(app, ["native", "build", "--optional", "-o", str(tmp_path)])
    assert result.exit_code == 0
    assert (
        result.stdout == "native package: not built: the native package needs Google Highway (apt install libhwy-dev)\n"
    )
    assert CliRunner().invoke(app, ["native", "build", "-o", str(tmp_path)]).exit_code == 2


def test_the_runner_finds_what_is_installed_for_its_executorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert executorch_release() is None and installed_library("library.so") is None
    (tmp_path / "executorch-1.5.1.dist-info").mkdir()
    other, wanted = (tmp_path / "exportable_cache_native" / f"executorch-{one}" for one in ("1.4.1", "1.5.1"))
    for folder in (other, wanted):
        assert installed_library("library.so") is None
        folder.mkdir(parents=True)
        (folder / "library.so").touch()
    assert installed_library("library.so") == wanted / "library.so"


def test_the_python_runner_is_imported_without_torch() -> None:
    code = "import sys, exportable_cache_runner; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout == "[]\n", done.stderr
