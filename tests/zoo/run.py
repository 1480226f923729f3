"""The zoo: every architecture on every target, each in a process of its own. `make zoo`, or `python -m tests.zoo.run
--help`.

Results are one JSON file per architecture in `artifacts/zoo/`; what is there is not run again.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import datetime
import functools
import gc
import json
import multiprocessing
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch
import transformers

from exportable_cache.common.process.tuning import collect_seldom

from .architectures import Architecture, architectures
from .check import (
    COLUMNS,
    DEVICES,
    PEER_DEVICES,
    RECIPES,
    check,
    is_asked,
    lower_only,
    read_result,
    target_of,
    write_json,
)
from .peers import load_exporters
from .published import Checkpoint, checkpoints
from .sample import sample
from .table import DOCUMENT, write_table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "artifacts" / "zoo"
LIMITS = {
    "model": 240,
    "static_cache": 120,
    "exporter": 240,
    "dynamo": 240,
    "extended": 480,
    "eager": 240,
    "compiled": 900,
    "pt2": 900,
    "executorch": 1200,
    "executorch-native": 600,
    "executorch-fast": 600,
    "tensorrt": 900,
    "coreai": 600,
    "static": 600,
    "openvino": 600,
    "mlx": 600,
    "openvino_exporter": 300,
    "mlx_exporter": 300,
    "tensorrt-4w": 900,
    "tensorrt-8w": 900,
    "mlx-4w": 600,
    "mlx-8w": 600,
    "openvino-4w": 600,
    "openvino-8w": 600,
}


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.table:
        write_table(RESULTS)
        return
    rows = _selected(arguments)
    targets = arguments.targets.split(",")
    if arguments.keep or arguments.published:
        _take_up_document()
    queue = []
    for row in rows:
        missing = [target for target in targets if _needs(row, target, arguments.status, arguments.redo)]
        if missing:
            queue.append((row, missing))
    print(f"{len(queue)} of {len(rows)} architectures to run, {arguments.jobs} at a time", flush=True)
    torch.set_num_threads(1)
    _preload(targets)
    _run_all(queue, arguments.jobs)
    write_table(RESULTS)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo.run", description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="model types, comma-separated")
    parser.add_argument("--published", action="store_true", help="published checkpoints in place of default configs")
    parser.add_argument("--groups", help="causal, image, audio, seq2seq, speech")
    parser.add_argument(
        "--sample", type=int, metavar="N", help="only N causal language models of each kind (see tests/zoo/sample.py)"
    )
    parser.add_argument("--targets", default=",".join(COLUMNS), help="columns of the table, comma-separated")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--redo", action="store_true", help="run again what has a result")
    parser.add_argument(
        "--status", help="run again what has one of these results, comma-separated (error,wrong,refused)"
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="begin with what docs/architectures.json has: run only what is missing there",
    )
    parser.add_argument(
        "--table", action="store_true", help="only write docs/architectures.md from the results there are"
    )
    return parser


def _selected(arguments: argparse.Namespace) -> list[Architecture]:
    rows: list[Architecture] = list(checkpoints()) if arguments.published else architectures()
    if arguments.groups:
        rows = [row for row in rows if row.group in arguments.groups.split(",")]
    if arguments.only:
        wanted = arguments.only.split(",")
        rows = [row for row in rows if row.model_type in wanted or row.name in wanted]
        unknown = set(wanted) - {row.model_type for row in rows} - {row.name for row in rows}
        if unknown:
            sys.exit(f"no architecture {', '.join(sorted(unknown))}; see tests/zoo/architectures.py")
    return sample([row for row in rows if row.group == "causal"], arguments.sample) if arguments.sample else rows


def _take_up_document() -> None:
    """The committed results, for what this clone has not run itself."""
    for name, facts in json.loads(DOCUMENT.with_suffix(".json").read_text()).items():
        path = RESULTS / f"{name}.json"
        if not path.exists():
            write_json(path, facts)


def _needs(row: Architecture, target: str, statuses: str | None, redo: bool) -> bool:
    if not is_asked(row, target):
        return False
    known = read_result(RESULTS, row)["targets"].get(target)
    return redo or known is None or (statuses is not None and known["status"] in statuses.split(","))


def _preload(targets: list[str]) -> None:
    """Import and compute once what every process needs, as they are forked: what a target imports and caches for itself
    as it takes its first model is up to two thirds of the time that a small one takes.
    """
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    collect_seldom()
    first = next(row for row in architectures() if row.name == "causal-llama")
    # The runtimes of ExecuTorch and Core AI start threads, and threads do not come along into a fork.
    threaded = {"executorch", "coreai", *RECIPES, *DEVICES, *PEER_DEVICES}
    check(first, [target for target in targets if target_of(target) not in threaded], lambda facts: None)
    for target in threaded & {target if target in RECIPES else target_of(target) for target in targets}:
        if target in PEER_DEVICES:
            load_exporters(target)
        else:
            # OpenVINO's compiler starts threads, too.
            lower_only(first, "static" if target == "openvino" else target)
    gc.freeze()


def _run_all(queue: list[tuple[Architecture, list[str]]], jobs: int) -> None:
    context = multiprocessing.get_context("fork")
    running: list[dict] = []
    done, total, begun = 0, len(queue), time.monotonic()
    waiting = list(queue)
    while waiting or running:
        while waiting and len(running) < jobs:
            row, targets = waiting.pop(0)
            part = RESULTS / f"{row.name}.part"
            part.unlink(missing_ok=True)
            process = context.Process(target=_child, args=(row, targets, part), daemon=True)
            process.start()
            running.append(
                {
                    "row": row,
                    "targets": targets,
                    "part": part,
                    "process": process,
                    "stage": None,
                    "since": time.monotonic(),
                }
            )
        time.sleep(0.05)
        for job in list(running):
            facts = json.loads(job["part"].read_text()) if job["part"].exists() else {"running": "model"}
            if facts["running"] != job["stage"]:
                job["stage"], job["since"] = facts["running"], time.monotonic()
            limit = LIMITS.get(job["stage"] or "model", 60)
            late = time.monotonic() - job["since"] > limit
            if job["process"].is_alive() and not late:
                continue
            if late:
                job["process"].kill()
            job["process"].join()
            facts = json.loads(job["part"].read_text()) if job["part"].exists() else facts
            running.remove(job)
            left = _finish(
                job, facts, f"no result within {limit} s" if late else f"the process died ({job['process'].exitcode})"
            )
            if left:
                waiting.insert(0, (job["row"], left))
            else:
                done += 1
                told = " ".join(
                    f"{name}:{outcome['status']}"
                    for name, outcome in read_result(RESULTS, job["row"])["targets"].items()
                    if name in job["targets"]
                )
                print(f"[{done}/{total} {time.monotonic() - begun:.0f}s] {job['row'].name} {told}", flush=True)


def run_apart(row: Architecture, targets: list[str]) -> dict:
    """One architecture in a process of its own; its results, which are kept."""
    _run_all([(row, targets)], 1)
    return read_result(RESULTS, row)


def _child(row: Architecture, targets: list[str], part: Path) -> None:
    # Native code prints to the descriptors; the results are in the file.
    log = os.open(os.devnull, os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # Rather an error of one model than the machine's memory.
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
    known = {}
    if isinstance(row, Checkpoint) and "memory" not in read_result(RESULTS, row):
        known = {"memory": row.memory()}
    check(row, targets, lambda facts: write_json(part, facts | known))


@functools.cache
def _commit() -> str:
    """That this clone is at, `-dirty` if files differ from it; nothing outside of one."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip()


def _finish(job: dict, facts: dict, why: str) -> list[str]:
    """Merge what a process left into the results; the targets it did not come to, if it ended early."""
    left: list[str] = []
    outcomes = facts.pop("targets", {})
    commit = _commit()
    stage = facts.pop("running")
    if stage is not None:
        broken = job["targets"] if stage == "model" else [stage]
        for target in broken:
            outcomes[target] = {"status": "error", "difference": None, "reason": why, "where": [], "seconds": 0.0}
        left = [target for target in job["targets"] if target not in outcomes]
    for outcome in outcomes.values():
        outcome["commit"], outcome["date"] = commit, datetime.date.today().isoformat()
    merged = read_result(RESULTS, job["row"])
    merged.update(facts)
    merged["targets"].update(outcomes)
    write_json(RESULTS / f"{job['row'].name}.json", merged)
    job["part"].unlink(missing_ok=True)
    return left


if __name__ == "__main__":
    main()
