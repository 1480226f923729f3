"""Ours beside ONNX Runtime GenAI, OpenVINO GenAI, ExecuTorch's own export and llama.cpp, each from its package.

    python benchmarks/peers.py --prepare       # environments and files, minutes; what fails is said, and left out
    python benchmarks/peers.py                 # checks logits, then measures
    python benchmarks/peers.py --slots 16384 --form ours --form onnxruntime
    python benchmarks/peers.py --without-avx512    # benchmarks/without_avx512.py says how

A random Llama of 110M parameters, float32 and weights of 4 bits. Environments, made by venv and pip with pip's own
settings, files and results stay in the folder. Delete a form's folder to make it again, and an environment's to try
again what failed.

First every form is fed the same tokens and its logits are compared with transformers' float32 model: a form in float32
that differs is left out. Then each round starts each form in turn, alone on the machine: seconds from the start of the
process to a first token, prompts on an empty cache, tokens after a prompt, and the most memory. On a machine that has
other work take `--fastest`, or `--by` with a command that waits for its turn.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy
import typer
from peer_forms import ENVIRONMENTS, FORMS
from peer_results import LIMIT, distance, summary, table
from rich.console import Console
from without_avx512 import hidden

HERE = Path(__file__).parent
#: Positions that tokens are timed at: this one, and `BEFORE_END` short of the last slot.
FIRST, BEFORE_END = 100, 96
PROMPTS = (128, 1024)
#: What one process may take; a package without a wheel compiles for most of an hour on two cores.
CHECK_SECONDS, ROUND_SECONDS, PREPARE_SECONDS = 600, 1800, 7200
console = Console(stderr=True)


class Failed(Exception):
    """What a form or an environment is left out for."""


@dataclass(frozen=True)
class Conditions:
    """What forms run under.

    Attributes:
        by: A command that runs each measured process.
        without_avx512: Whether that is hidden from them.
        variables: Of the environment, which do that.
    """

    by: Sequence[str] = ()
    without_avx512: bool = False
    variables: dict[str, str] = field(default_factory=dict)

    def python(self, form: str, folder: Path) -> Path:
        """Of a form's environment, which is another where it is compiled for the processor."""
        name = FORMS[form].environment
        older = f"{name}-avx2"
        return environment_python(older if self.without_avx512 and older in ENVIRONMENTS else name, folder)


def logged(command: list[str], log: Path, environment: dict[str, str] | None = None) -> None:
    """Run a command; where it fails say the last line of its output, and where the rest is."""
    with log.open("ab") as file:
        done = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, timeout=PREPARE_SECONDS, check=False
        )
    if done.returncode:
        words = log.read_text(errors="replace").strip().splitlines()
        raise Failed(f"{words[-1][:200] if words else 'it failed'} (see {log})")


def environment_python(name: str, folder: Path) -> Path:
    """Python of an environment, which is made unless it is there.

    Raises:
        Failed: If it cannot be made, or could not before.
    """
    wanted = ENVIRONMENTS[name]
    if not wanted.packages:
        return Path(sys.executable)
    place = folder / "environments" / name
    python, failed, done = place / "bin" / "python", place / "failed.txt", place / "installed.txt"
    if done.is_file():
        return python
    if failed.is_file():
        raise Failed(f"{failed.read_text().strip()}; delete {place} to try again")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    console.print(f"making the environment of {name}")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install"]
    # What pip keeps was compiled with other settings.
    fresh, variables = (["--no-cache-dir"] if wanted.settings else []), plain_environment() | wanted.settings
    try:
        logged([sys.executable, "-m", "venv", str(place)], place / "log.txt")
        for packages in (wanted.first, wanted.packages):
            if packages:
                logged([*pip, *fresh, *packages], place / "log.txt", variables)
        if wanted.without:
            logged([*pip[:-1], "uninstall", "--yes", *wanted.without], place / "log.txt", plain_environment())
    except (Failed, subprocess.TimeoutExpired) as error:
        failed.write_text(f"{error}\n")
        raise Failed(str(error)) from error
    done.write_text("\n".join(wanted.packages))
    return python


def plain_environment() -> dict[str, str]:
    """Of the process, without what points its Python at this checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def form_environment(name: str, folder: Path, threads: int | None = None) -> dict[str, str]:
    """Of a process that makes a form, or runs it in so many threads."""
    if FORMS[name].environment != "here":
        return plain_environment()
    # ExecuTorch has threads of its own, and idle ones of torch must not spin beside them.
    found = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    if threads is not None:
        found |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": "1"}
    kernels = (folder / "libexportable_cache_kernels.so").resolve()
    if FORMS[name].is_ours and kernels.is_file():
        found.setdefault("EXPORTABLE_CACHE_KERNELS", str(kernels))
    if FORMS[name].runtime == "runner":
        found["EXPORTABLE_CACHE_RUNNER"] = str(own_runner(folder))
    return found


def own_kernels(folder: Path) -> None:
    """Compile them into the folder, where the environment has none; without a compiler the wheel's serve."""
    from exportable_cache.backends.executorch.build_kernels import build_kernels
    from exportable_cache.common.own_kernels import FILE, chosen_path
    from exportable_cache.errors import ExportableCacheError

    if chosen_path() is None and not (folder / FILE).is_file():
        console.print("compiling the attention kernels")
        try:
            build_kernels(output=(folder / FILE).resolve())
        except ExportableCacheError as error:
            console.print(f"ours runs on ExecuTorch's kernels: {error}")


def place_of(name: str, folder: Path, slots: int) -> Path:
    """The folder of the files that a form runs."""
    return folder / f"{FORMS[name].of or name}-{slots}"


def own_runner(folder: Path) -> Path:
    """The C++ runner's library over the executorch wheel, with our kernels where they were compiled.

    Raises:
        Failed: If it cannot be compiled.
    """
    from exportable_cache.backends.executorch.build_kernels import find_cmake

    build, kernels = (folder / "runner").resolve(), (folder / "libexportable_cache_kernels.so").resolve()
    library = build / "libexportable_cache.so"
    if not library.is_file():
        cmake = find_cmake()
        if cmake is None:
            raise Failed("there is no cmake; pip install cmake")
        build.mkdir(parents=True, exist_ok=True)
        console.print("compiling the runner")
        options = ["-DEC_BUILD_SHARED=ON", "-DEC_BUILD_PROGRAMS=OFF", f"-DPython3_EXECUTABLE={sys.executable}"]
        options += [f"-DEC_KERNELS={kernels}"] if kernels.is_file() else []
        logged([cmake, "-S", str(HERE.parent / "runners" / "cpp"), "-B", str(build), *options], build / "log.txt")
        logged([cmake, "--build", str(build), "--parallel", str(os.cpu_count() or 1)], build / "log.txt")
    return library


def prepare(name: str, folder: Path, slots: int) -> Path:
    """The folder of a form's files, which are made unless they are there.

    Raises:
        Failed: If its environment or its conversion fails.
    """
    form = FORMS[name]
    if form.of is not None:
        own_runner(folder)
        return prepare(form.of, folder, slots)
    python = environment_python(form.environment, folder)
    place = place_of(name, folder, slots)
    done, model = place / "done.txt", folder / f"model-{slots}"
    convert = [str(HERE / "peer_convert.py")]
    if not (model / "logits.npy").is_file():
        model.mkdir(parents=True, exist_ok=True)
        logged([sys.executable, *convert, "model", str(model), str(slots), "-"], model / "log.txt")
    if not done.is_file():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        console.print(f"making {name}")
        arguments = [name, str(model.resolve()), str(slots), str(place.resolve())]
        logged([str(python), *convert, *arguments], place / "log.txt", form_environment(name, folder))
        done.write_text("made\n")
    return place


def ask(name: str, folder: Path, plan: dict[str, Any], conditions: Conditions) -> dict[str, Any]:
    """What a form's process answers.

    Raises:
        Failed: If it ends early or takes too long.
    """
    place = place_of(name, folder, plan["slots"])
    python = conditions.python(name, folder)
    log, limit = place / "worker.txt", CHECK_SECONDS if "logits" in plan else ROUND_SECONDS
    command = [str(python), str(HERE / "peer_worker.py"), name, str(place.resolve()), json.dumps(plan)]
    with log.open("ab") as file:
        try:
            done = subprocess.run(
                command if "logits" in plan else [*conditions.by, *command],
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=form_environment(name, folder, plan["threads"]) | conditions.variables,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise Failed(f"it took more than {limit} s (see {log})") from error
    if not done.stdout or done.returncode:
        words = log.read_text(errors="replace").strip().splitlines()
        raise Failed(f"{words[-1][:200] if words else 'it ended early'} (see {log})")
    return json.loads(done.stdout.splitlines()[-1])


def check(name: str, folder: Path, slots: int, threads: int, conditions: Conditions) -> float:
    """A form's distance from transformers' model.

    Raises:
        Failed: If it runs in float32 and its logits are others.
    """
    path = place_of(name, folder, slots) / f"{name}.npy"
    ask(name, folder, {"threads": threads, "slots": slots, "logits": str(path.resolve())}, conditions)
    found = distance(numpy.load(path), numpy.load(folder / f"model-{slots}" / "logits.npy"))
    console.print(f"{name}: {found:.1e} from the float32 model")
    if FORMS[name].bits == 32 and not found < LIMIT:
        raise Failed(f"its logits are not the model's: {found:.1e} of their spread, where {LIMIT:.0e} is the most")
    return found


def releases(name: str, folder: Path, conditions: Conditions) -> str:
    """Of what runs a form."""
    wanted = ENVIRONMENTS[FORMS[name].environment].releases
    code = f"from importlib.metadata import version\nprint(', '.join(n + ' ' + version(n) for n in {wanted!r}))"
    python = conditions.python(name, folder)
    return subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def report(results: dict[str, Any], fastest: bool) -> str:
    """Every table of a run, with what it ran on."""
    prompts, ends = results["prompts"], results["ends"]
    parts = [f"{results['processor']}, {results['cores']} cores, load {results['load']} at the start. {results['of']}"]
    for threads, answers in results["answers"].items():
        rows = []
        for name, rounds in answers.items():
            form = FORMS[name]
            numbers = summary(rounds, prompts, ends, fastest)
            rows.append({"title": form.title, "bits": form.bits, "ours": form.is_ours, "numbers": numbers})
            rows[-1]["distance"] = results["distances"][name]
        if rows:
            words = "1 thread" if int(threads) == 1 else f"{threads} threads"
            parts.append(f"**{words}, {results['slots']} slots**\n\n{table(rows, prompts, ends)}")
    parts += [f"Left out: {FORMS[name].title.replace('*', '')}: {why}" for name, why in results["failed"].items()]
    parts.append(
        "Distance: root mean square from the float32 model's logits, as a share of their spread. "
        f"Above 1x ours is better. {'; '.join(dict.fromkeys(results['releases'].values()))}."
    )
    return "\n\n".join(parts)


def main(
    folder: Annotated[Path, typer.Option(help="Where environments, files and results stay.")] = Path("artifacts/peers"),
    prepare_only: Annotated[bool, typer.Option("--prepare", help="Make what is missing, and stop.")] = False,
    form: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(FORMS)}; may be repeated.")] = None,
    slots: Annotated[int, typer.Option(help="Tokens that a cache holds.", min=1024)] = 4096,
    threads: Annotated[list[int] | None, typer.Option(help="May be repeated; 1 and all cores by default.")] = None,
    length: Annotated[list[int] | None, typer.Option(help="Of prompts; may be repeated.")] = None,
    rounds: Annotated[int, typer.Option(help="Times that every form is started.", min=1)] = 2,
    steps: Annotated[int, typer.Option(help="Tokens timed at each position.", min=1, max=BEFORE_END - 8)] = 16,
    fastest: Annotated[bool, typer.Option("--fastest", help="Show the fastest, not the median.")] = False,
    without_avx512: Annotated[bool, typer.Option("--without-avx512", help="Hide AVX-512 from every form.")] = False,
    by: Annotated[str, typer.Option(help="A command that runs each measured process, as `chrt -f 1`.")] = "",
) -> None:
    """Make what is missing, check logits, measure, write both kinds of results, and print the tables."""
    from exportable_cache.common.processor import processor_name

    chosen = form or list(FORMS)
    unknown = set(chosen) - set(FORMS)
    if unknown:
        raise typer.BadParameter(f"there is no form {', '.join(sorted(unknown))}; the forms are {', '.join(FORMS)}")
    prompts, ends = list(length or PROMPTS), [FIRST, slots - BEFORE_END]
    counts = threads or sorted({1, os.cpu_count() or 1})
    folder.mkdir(parents=True, exist_ok=True)
    own_kernels(folder)
    conditions = Conditions(shlex.split(by), without_avx512, hidden(folder / "hidden") if without_avx512 else {})
    failed: dict[str, str] = {}
    distances: dict[str, float] = {}
    for name in chosen:
        try:
            prepare(name, folder, slots)
            conditions.python(name, folder)
            if not prepare_only:
                distances[name] = check(name, folder, slots, counts[-1], conditions)
        except (Failed, subprocess.TimeoutExpired) as error:
            failed[name] = str(error)
            console.print(f"[red]{name} is left out[/red]: {error}")
    if prepare_only:
        return
    results: dict[str, Any] = {
        "processor": processor_name() + (" with AVX-512 hidden" if without_avx512 else ""),
        "cores": os.cpu_count(),
        "load": f"{os.getloadavg()[0]:.1f}",
        "of": "The fastest." if fastest else f"Medians of {rounds} rounds.",
        "slots": slots,
        "prompts": prompts,
        "ends": ends,
        "distances": distances,
        "failed": failed,
        "releases": {name: releases(name, folder, conditions) for name in distances},
        "answers": {str(count): {} for count in counts},
    }
    file = folder / f"results-{slots}{'-without-avx512' if without_avx512 else ''}.json"
    plan = {"slots": slots, "prompts": prompts, "ends": ends, "steps": steps}
    for done in range(rounds):
        for count in counts:
            for name in [name for name in distances if name not in failed]:
                try:
                    answer = ask(name, folder, {**plan, "threads": count}, conditions)
                except Failed as error:
                    failed[name] = str(error)
                    continue
                results["answers"][str(count)].setdefault(name, []).append(answer)
                # After every process, so that what was measured outlives an interruption.
                file.write_text(json.dumps(results, indent=2))
                file.with_suffix(".md").write_text(report(results, fastest) + "\n")
            console.print(f"round {done + 1} of {rounds}, threads {count}, done")
    print(report(results, fastest))


if __name__ == "__main__":
    typer.run(main)
