"""Compare our programs with ONNX Runtime GenAI, OpenVINO GenAI, ExecuTorch's Llama export and llama.cpp.

    python benchmarks/peers.py --prepare       # environments and files, minutes; failures are reported and left out
    python benchmarks/peers.py                 # checks logits, then measures
    python benchmarks/peers.py --slots 16384 --form ours --form onnxruntime
    python benchmarks/peers.py --without-avx512    # see benchmarks/without_avx512.py

The model is a random Llama of 110M parameters: in float32, with 4-bit weights, and as a checkpoint in bfloat16.
Environments, made by venv and pip with pip's settings, files and results stay in the folder. Delete a form's folder to
make it again, and an environment's folder to retry what failed.

First every form runs the same tokens, and its logits are compared with transformers' float32 model; a float32 form that
differs is left out. Then forms with the same weight precision are open at once, in separate processes, and run
interleaved in many cycles (benchmarks/peer_turns.py): prompts on an empty cache, and a few tokens near the start and
near the end of the cache. So all of them meet the same minutes of the machine, and ratios are more reliable than
milliseconds. The location of memory and files makes some processes of a form faster than others, so each has freshly
copied files, and after a third of the cycles all processes are opened again. The time from the start of a process to
its first token, and the peak memory, are measured per process.

Figures are medians of the cycles, and ratios have their spread next to them. On a machine with other work use
`--fastest`.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy
import typer
from peer_forms import ENVIRONMENTS, FORMS
from peer_prepare import (
    HERE,
    console,
    environment_python,
    form_environment,
    native_package,
    place_of,
    prepare,
    write_anew,
)
from peer_results import LIMIT, distance, table
from peer_turns import Failed, Group, Plan, Process, last_words
from without_avx512 import hidden

#: First position at which tokens are timed; the last one is `BEFORE_END` slots before the last.
FIRST, BEFORE_END = 100, 96
PROMPTS = (128, 1024)
CHECK_SECONDS = 600


@dataclass(frozen=True)
class Conditions:
    """Conditions of a run.

    Attributes:
        folder: Folder of environments and files.
        slots: Tokens that a cache holds.
        without_avx512: True if AVX-512 is hidden from the forms.
        variables: Environment variables that hide it.
    """

    folder: Path
    slots: int
    without_avx512: bool = False
    variables: dict[str, str] = field(default_factory=dict)

    def python(self, form: str) -> Path:
        """Return the Python of a form's environment, which depends on the processor if the form is compiled for it."""
        name = FORMS[form].environment
        older = f"{name}-avx2"
        return environment_python(older if self.without_avx512 and older in ENVIRONMENTS else name, self.folder)

    def place(self, form: str) -> Path:
        """Return the folder of a form's files."""
        return place_of(form, self.folder, self.slots)

    def command(self, form: str, threads: int, **plan: str) -> tuple[list[str], dict[str, str], Path]:
        """Return the command that runs a form, its environment variables, and its log file."""
        place, worker = self.place(form), HERE / "peer_worker.py"
        words = json.dumps({"threads": threads, "slots": self.slots, **plan})
        command = [str(self.python(form)), str(worker), form, str(place.resolve()), words]
        return command, form_environment(form, threads) | self.variables, place / "worker.txt"

    def releases(self, form: str) -> str:
        """Return the releases of the packages that run a form."""
        wanted = ENVIRONMENTS[FORMS[form].environment].releases
        code = f"from importlib.metadata import version\nprint(', '.join(n + ' ' + version(n) for n in {wanted!r}))"
        return subprocess.run(
            [str(self.python(form)), "-c", code], check=True, capture_output=True, text=True
        ).stdout.strip()


def check(name: str, threads: int, conditions: Conditions) -> float:
    """Return a form's error relative to transformers' model.

    Raises:
        Failed: If the form ends early, takes too long, or is in float32 and has other logits.
    """
    path = conditions.place(name) / f"{name}.npy"
    command, environment, log = conditions.command(name, threads, logits=str(path.resolve()))
    path.unlink(missing_ok=True)
    with log.open("ab") as file:
        try:
            subprocess.run(command, stderr=file, env=environment, timeout=CHECK_SECONDS, check=False)
        except subprocess.TimeoutExpired as error:
            raise Failed(f"it took more than {CHECK_SECONDS} s (see {log})") from error
    if not path.is_file():
        raise Failed(last_words(log, "it ended early"))
    found = distance(
        numpy.load(path), numpy.load(conditions.folder / FORMS[name].checkpoint(conditions.slots) / "logits.npy")
    )
    console.print(f"{name}: {found:.1e} from the float32 model")
    if FORMS[name].bits == 32 and not found < LIMIT:
        raise Failed(f"its logits are not the model's: {found:.1e} of their spread, where {LIMIT:.0e} is the most")
    return found


def report(results: dict[str, Any], fastest: bool) -> str:
    """Return all tables of a run, with the machine it ran on."""
    prompts, ends = results["prompts"], results["ends"]
    parts = [f"{results['processor']}, {results['cores']} cores, load {results['load']} at the start. {results['of']}"]
    for threads, answers in results["answers"].items():
        rows = []
        for name, answer in answers.items():
            form = FORMS[name]
            rows.append({"title": form.title, "bits": form.bits, "ours": form.is_ours, "answer": answer})
            rows[-1]["distance"] = results["distances"][name]
        if rows:
            words = "1 thread" if int(threads) == 1 else f"{threads} threads"
            shown = table(rows, prompts, ends, fastest)
            parts.append(f"**{words}, {results['slots']} slots**\n\n{shown}")
    parts += [f"Left out: {FORMS[name].title.replace('*', '')}: {why}" for name, why in results["failed"].items()]
    parts.append(
        "Distance: root mean square from the float32 model's logits, as a share of their spread. "
        "Above 1x ours is better: the median of each cycle's ratio, and what nine of ten draws of cycles lie between. "
        f"{'; '.join(dict.fromkeys(results['releases'].values()))}."
    )
    return "\n\n".join(parts)


def main(
    folder: Annotated[Path, typer.Option(help="Where environments, files and results stay.")] = Path("artifacts/peers"),
    prepare_only: Annotated[bool, typer.Option("--prepare", help="Make what is missing, and stop.")] = False,
    form: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(FORMS)}; may be repeated.")] = None,
    slots: Annotated[int, typer.Option(help="Tokens that a cache holds.", min=1024)] = 4096,
    threads: Annotated[list[int] | None, typer.Option(help="May be repeated; 1 and all cores by default.")] = None,
    length: Annotated[list[int] | None, typer.Option(help="Prompt length; may be repeated.")] = None,
    cycles: Annotated[int, typer.Option(help="Turns of each process; prompts have fewer.", min=1)] = 15,
    steps: Annotated[int, typer.Option(help="Tokens timed in a turn.", min=1)] = 4,
    openings: Annotated[int, typer.Option(help="How often processes and files are opened again.", min=1)] = 3,
    fastest: Annotated[bool, typer.Option("--fastest", help="Show the fastest, not the median.")] = False,
    without_avx512: Annotated[bool, typer.Option("--without-avx512", help="Hide AVX-512 from every form.")] = False,
) -> None:
    """Make what is missing, check logits, measure, write both kinds of results, and print the tables."""
    from exportable_cache.common.native.machine_code import processor_name

    chosen = form or list(FORMS)
    unknown = set(chosen) - set(FORMS)
    if unknown:
        raise typer.BadParameter(f"there is no form {', '.join(sorted(unknown))}; the forms are {', '.join(FORMS)}")
    plan = Plan(list(length or PROMPTS), [FIRST, slots - BEFORE_END], cycles, steps, openings)
    if plan.tokens_of_process > BEFORE_END:
        tokens = f"{plan.tokens_of_process} tokens follow @{plan.positions[-1]}"
        raise typer.BadParameter(f"{tokens}, where {BEFORE_END} slots are left; name fewer cycles or more openings")
    counts = threads or sorted({1, os.cpu_count() or 1})
    folder.mkdir(parents=True, exist_ok=True)
    native_package()
    conditions = Conditions(folder, slots, without_avx512, hidden(folder / "hidden") if without_avx512 else {})
    failed: dict[str, str] = {}
    distances: dict[str, float] = {}

    def dropped(name: str, why: str) -> None:
        failed[name] = why
        console.print(f"[red]{name} is left out[/red]: {why}")

    for name in chosen:
        try:
            prepare(name, folder, slots)
            conditions.python(name)
            if not prepare_only:
                distances[name] = check(name, counts[-1], conditions)
        except (Failed, subprocess.TimeoutExpired) as error:
            dropped(name, str(error))
    if prepare_only:
        return
    results: dict[str, Any] = {
        "processor": processor_name() + (" with AVX-512 hidden" if without_avx512 else ""),
        "cores": os.cpu_count(),
        "load": f"{os.getloadavg()[0]:.1f}",
        "of": plan.described(fastest),
        "slots": slots,
        "prompts": plan.prompts,
        "ends": plan.positions,
        "distances": distances,
        "failed": failed,
        "releases": {name: conditions.releases(name) for name in distances},
        "answers": {str(count): {} for count in counts},
    }
    file = folder / f"results-{slots}{'-without-avx512' if without_avx512 else ''}.json"
    for count in counts:
        for bits in sorted({FORMS[name].bits for name in distances}, reverse=True):
            before = results["answers"][str(count)]

            def kept(answers: dict[str, Any], key: str = str(count), before: dict[str, Any] = before) -> None:
                # Written after every cycle, so that results survive an interruption.
                results["answers"][key] = {**before, **answers}
                file.write_text(json.dumps(results, indent=2))
                file.with_suffix(".md").write_text(report(results, fastest) + "\n")

            def opened(name: str, count: int = count) -> Process:
                write_anew(conditions.place(name))
                return Process(*conditions.command(name, count))

            group = Group(plan, opened, dropped, kept)
            group.run([name for name in distances if name not in failed and FORMS[name].bits == bits])
            console.print(f"threads {count}, {bits} bits, done")
    print(report(results, fastest))


if __name__ == "__main__":
    typer.run(main)
