"""Compare the bundles that a user gets with ONNX Runtime GenAI, OpenVINO GenAI and llama.cpp.

    python benchmarks/peers.py --prepare                 # environments and files, an hour; failures are left out
    python benchmarks/peers.py                           # checks logits, then measures
    python benchmarks/peers.py --model qwen3-0.6b --bits 4 --threads 2      # a piece of a run; results are added
    python benchmarks/peers.py --model qwen3-0.6b --without-avx512          # see benchmarks/without_avx512.py
    python benchmarks/peers.py --write-docs              # the tables of docs/peers.md, from benchmarks/results

The model is a random Llama of 110M parameters, in float32, as a checkpoint in bfloat16, and with 4-bit weights; or a
published shape with random weights in bfloat16 (benchmarks/published_shapes.py), in 16 bits and with 4-bit weights.
Ours are exported by a recipe and run in the native runner, as the command line does. Environments, made by venv and pip
with pip's settings, and files stay in the folder. Delete a form's folder to make it again, and an environment's to
retry what failed. A converter that refuses a model is reported with its reason.

First every form runs the same tokens, and its logits are compared with transformers' float32 model; a float32 form that
differs is left out. Then forms with the same weight precision are open at once, in separate processes, and run
interleaved in many cycles (benchmarks/peer_turns.py): a few tokens near the end and near the start of the cache, and
prompts on an empty cache. So all of them meet the same minutes of the machine, and ratios are more reliable than
milliseconds. One process of each group only reads as many bytes as a token's weights have, in the same cycles. The
location of memory and files makes some processes of a form faster than others, so each has freshly copied files, and
after a third of the cycles all processes are opened again. The time from the start of a process to its first token,
and the peak memory, are measured per process.

Figures are medians of the cycles, and ratios have their spread next to them. On a machine with other work use
`--fastest`.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy
import typer
from peer_forms import ENVIRONMENTS, FORMS, SMALL_MODEL, forms_of
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
from published_shapes import SHAPES
from without_avx512 import hidden

#: First position at which tokens are timed; the last one is `BEFORE_END` slots before the last.
FIRST, BEFORE_END = 100, 96
PROMPTS = (128, 1024)
SMALL_SLOTS, SLOTS = 4096, 2048
RESULTS, PAGE = HERE / "results", HERE.parent / "docs" / "peers.md"
#: A table of the page, and the file it is made from.
TABLE = re.compile(r"<!-- peers.py: (?P<file>[\w.-]+\.json) -->\n.*?<!-- end -->\n", re.DOTALL)
CHECK_SECONDS = 600


@dataclass(frozen=True)
class Conditions:
    """Conditions of a run.

    Attributes:
        folder: Folder of environments and files.
        model: The model.
        slots: Tokens that a cache holds.
        without_avx512: True if AVX-512 is hidden from the forms.
        variables: Environment variables that hide it.
    """

    folder: Path
    model: str
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
        return place_of(form, self.folder, self.model, self.slots)

    def command(self, form: str, threads: int, **plan: str) -> tuple[list[str], dict[str, str], Path]:
        """Return the command that runs a form, its environment variables, and its log file."""
        place, worker = self.place(form), HERE / "peer_worker.py"
        words = json.dumps({"threads": threads, "slots": self.slots, **plan})
        command = [str(self.python(form)), str(worker), form, str(place.resolve()), words]
        return command, form_environment(form) | self.variables, place / "worker.txt"

    def releases(self, form: str) -> str:
        """Return the releases of the packages that run a form."""
        wanted = ENVIRONMENTS[FORMS[form].environment].releases
        code = f"from importlib.metadata import version\nprint(', '.join(n + ' ' + version(n) for n in {wanted!r}))"
        return subprocess.run(
            [str(self.python(form)), "-c", code], check=True, capture_output=True, text=True
        ).stdout.strip()

    def logits(self, form: str) -> Any:
        """Return the logits of transformers for the checkpoint that a form is made from."""
        return numpy.load(self.folder / self.model / FORMS[form].checkpoint(self.model, self.slots) / "logits.npy")


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
    found = distance(numpy.load(path), conditions.logits(name))
    console.print(f"{name}: {found:.1e} from the float32 model")
    if FORMS[name].bits == 32 and not found < LIMIT:
        raise Failed(f"its logits are not the model's: {found:.1e} of their spread, where {LIMIT:.0e} is the most")
    return found


def described(group: dict[str, Any], fastest: bool) -> str:
    """Return the method of a group in one sentence, by what was measured, because a run may have been interrupted."""
    answers = [answer for name, answer in group["answers"].items() if not FORMS[name].is_bound]
    turns = min(len(cycles) for answer in answers for cycles in answer["token"].values())
    tokens = min(len(turn) for answer in answers for cycles in answer["token"].values() for turn in cycles)
    counts: dict[int, int] = {}
    for answer in answers:
        for length, seconds in answer["prompt"].items():
            counts[int(length)] = min(len(seconds), counts.get(int(length), len(seconds)))
    prompts = " and ".join(f"{count} of {length:,} tokens" for length, count in counts.items())
    opened = min(len(answer["start_s"]) for answer in answers)
    times = f", processes and files opened {opened} times" if opened > 1 else ", processes opened once"
    chosen = "The fastest" if fastest else "Medians"
    return f"{chosen} of {turns} turns of {tokens} tokens, and of prompts, {prompts}{times}."


def report(results: dict[str, Any]) -> str:
    """Return all tables of a results file, with the machine it ran on."""
    prompts, ends, fastest = results["prompts"], results["ends"], results["fastest"]
    parts = []
    for threads in sorted({group["threads"] for group in results["groups"]}, reverse=True):
        groups = [group for group in results["groups"] if group["threads"] == threads]
        groups.sort(key=lambda group: -group["bits"])
        rows = []
        for name in FORMS:
            form = FORMS[name]
            for group in groups:
                if name in group["answers"]:
                    rows.append({"title": form.title, "bits": form.bits, "ours": form.is_ours, "bound": form.is_bound})
                    rows[-1] |= {"goals": form.goals, "answer": group["answers"][name]}
                    rows[-1]["distance"] = group["distances"].get(name, 0.0)
        words = "1 thread" if threads == 1 else f"{threads} threads"
        shown = table(rows, prompts, ends, fastest)
        parts.append(f"**{results['model']}, {words}, {results['slots']} slots**\n\n{shown}")
        for group in groups:
            for name, why in group["failed"].items():
                # Without the log, which stays on the machine.
                reason = re.sub(r" \(see [^)]*\)(; delete .*)?$", "", why)
                parts.append(f"Left out: {FORMS[name].title.replace('*', '')}, which failed with `{reason}`.")
        methods = dict.fromkeys(f"{group['bits']} bits: {described(group, fastest)}" for group in groups)
        loads = ", ".join(f"{group['load']} at the start of {group['bits']} bits" for group in groups)
        parts.append(f"{results['processor']}, {results['cores']} cores; load {loads}. {' '.join(methods)}")
    releases = {release for group in results["groups"] for release in group["releases"].values()}
    parts.append(f"{'; '.join(sorted(releases))}. {', '.join(sorted({group['date'] for group in results['groups']}))}.")
    return "\n\n".join(parts)


def written_page(page: str, results: Path = RESULTS) -> str:
    """Return the page with each of its tables made from its results file."""

    def made(match: re.Match[str]) -> str:
        found = json.loads((results / match["file"]).read_text(encoding="utf-8"))
        return f"<!-- peers.py: {match['file']} -->\n{report(found)}\n<!-- end -->\n"

    return TABLE.sub(made, page)


def rounded(value: Any) -> Any:
    """Return a document whose numbers have six significant digits."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


class Results:
    """The results file of a model: groups of forms with the same number of threads and bits, each from one run.

    Args:
        file: The file; groups that it has of other runs under the same conditions stay.
        conditions: What all groups have in common.
    """

    def __init__(self, file: Path, conditions: dict[str, Any]) -> None:
        self._file = file
        before = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"groups": []}
        groups = before.pop("groups")
        self.document = {**conditions, "groups": groups if before == conditions else []}

    def keep(self, group: dict[str, Any]) -> None:
        """Write a group in place of an earlier one; called after every cycle, because a run may be interrupted."""
        same = [
            one for one in self.document["groups"] if (one["threads"], one["bits"]) != (group["threads"], group["bits"])
        ]
        self.document["groups"] = [*same, group]
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(rounded(self.document), indent=1) + "\n", encoding="utf-8")


def main(
    folder: Annotated[Path, typer.Option(help="Where environments, files and results stay.")] = Path("artifacts/peers"),
    model: Annotated[str, typer.Option(help=f"{SMALL_MODEL}, or one of {', '.join(SHAPES)}.")] = SMALL_MODEL,
    prepare_only: Annotated[bool, typer.Option("--prepare", help="Make what is missing, and stop.")] = False,
    form: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(FORMS)}; may be repeated.")] = None,
    bits: Annotated[list[int] | None, typer.Option(help="Only forms with these bits; may be repeated.")] = None,
    slots: Annotated[int | None, typer.Option(help="Tokens that a cache holds.", min=1024)] = None,
    threads: Annotated[list[int] | None, typer.Option(help="May be repeated; 1 and all cores by default.")] = None,
    length: Annotated[list[int] | None, typer.Option(help="Prompt length; may be repeated.")] = None,
    cycles: Annotated[int, typer.Option(help="Turns of each process; prompts have fewer.", min=1)] = 15,
    steps: Annotated[int, typer.Option(help="Tokens timed in a turn.", min=1)] = 4,
    openings: Annotated[int, typer.Option(help="How often processes and files are opened again.", min=1)] = 3,
    fastest: Annotated[bool, typer.Option("--fastest", help="Show the fastest, not the median.")] = False,
    without_avx512: Annotated[bool, typer.Option("--without-avx512", help="Hide AVX-512 from every form.")] = False,
    results: Annotated[Path | None, typer.Option(help="Results file; by default in the folder.")] = None,
    write_docs: Annotated[
        bool, typer.Option("--write-docs", help="Write the tables of docs/peers.md, and stop.")
    ] = False,
) -> None:
    """Make what is missing, check logits, measure, write the results, and print the tables."""
    if write_docs:
        PAGE.write_text(written_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return
    from exportable_cache.common.native.machine_code import processor_name

    if model not in (SMALL_MODEL, *SHAPES):
        raise typer.BadParameter(f"there is no model {model}; the models are {', '.join((SMALL_MODEL, *SHAPES))}")
    chosen = form or forms_of(model)
    unknown = set(chosen) - set(FORMS)
    if unknown:
        raise typer.BadParameter(f"there is no form {', '.join(sorted(unknown))}; the forms are {', '.join(FORMS)}")
    chosen = [name for name in chosen if bits is None or FORMS[name].bits in bits]
    slots = slots or (SMALL_SLOTS if model == SMALL_MODEL else SLOTS)
    plan = Plan(list(length or PROMPTS), [FIRST, slots - BEFORE_END], cycles, steps, openings)
    if plan.tokens_of_process > BEFORE_END:
        tokens = f"{plan.tokens_of_process} tokens follow @{plan.positions[-1]}"
        raise typer.BadParameter(f"{tokens}, where {BEFORE_END} slots are left; name fewer cycles or more openings")
    counts = threads or sorted({1, os.cpu_count() or 1})
    folder.mkdir(parents=True, exist_ok=True)
    conditions = Conditions(folder, model, slots, without_avx512, hidden(folder / "hidden") if without_avx512 else {})
    failed: dict[str, str] = {}
    distances: dict[str, float] = {}

    def dropped(name: str, why: str) -> None:
        failed[name] = why
        console.print(f"[red]{name} is left out[/red]: {why}")

    try:
        native_package()
    except Failed as error:
        for name in [name for name in chosen if FORMS[name].is_ours]:
            dropped(name, str(error))
            chosen.remove(name)
    for name in chosen:
        try:
            prepare(name, folder, model, slots)
            conditions.python(name)
            if not (prepare_only or FORMS[name].is_bound):
                distances[name] = check(name, counts[-1], conditions)
        except (Failed, subprocess.TimeoutExpired) as error:
            dropped(name, str(error))
    if prepare_only:
        return
    suffix = f"{slots}-without-avx512" if without_avx512 else f"{slots}"
    kept = Results(
        results or folder / model / f"results-{suffix}.json",
        {
            "model": model,
            "processor": processor_name() + (" with AVX-512 hidden" if without_avx512 else ""),
            "cores": os.cpu_count(),
            "slots": slots,
            "prompts": plan.prompts,
            "ends": plan.positions,
            "fastest": fastest,
        },
    )
    for count in counts:
        for size in sorted({FORMS[name].bits for name in chosen}, reverse=True):
            names = [name for name in chosen if FORMS[name].bits == size]
            group: dict[str, Any] = {
                "threads": count,
                "bits": size,
                "date": str(datetime.date.today()),
                "load": f"{os.getloadavg()[0]:.1f}",
                "releases": {name: conditions.releases(name) for name in names if name in distances},
                "distances": {name: distances[name] for name in names if name in distances},
            }

            def record(answers: dict[str, Any], group: dict[str, Any] = group, names: list[str] = names) -> None:
                group["failed"] = {name: why for name, why in failed.items() if name in names}
                kept.keep({**group, "answers": answers})

            def opened(name: str, count: int = count) -> Process:
                write_anew(conditions.place(name))
                return Process(*conditions.command(name, count))

            Group(plan, opened, dropped, record).run([name for name in names if name not in failed])
            console.print(f"threads {count}, {size} bits, done")
    print(report(kept.document))


if __name__ == "__main__":
    typer.run(main)
