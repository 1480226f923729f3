"""Check this package on a GPU in one command, in parts of decreasing value, within eight minutes.

    make gpu-check                                      # all parts; a table, and JSON in build/gpu-check.json
    python benchmarks/gpu_check.py --only speed --shape llama-8b
    python benchmarks/gpu_check.py --only engines      # what no GPU has shown of TensorRT, in ten minutes

Each part runs in a process of its own, because a forked child of a process that has used CUDA cannot use it. A part is
ended at its limit, and keeps the results that it has written. Without a GPU small shapes run on the CPU, over graphs
without generated code, and what cannot run there says "needs a GPU". It exits with 1 if a result is wrong.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib import metadata, util
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from gpu_sessions import NEEDS_GPU, Checks, sessions
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
#: Name of the row of a part that was ended, or ended with an error.
WHOLE = "the whole part"
#: Seconds of all parts.
TOTAL = 470
#: Largest peak memory, as a share of weights and cache.
MOST_MEMORY = 1.1


@dataclass
class Row:
    """A result.

    Attributes:
        part: Name of the part.
        name: What was run.
        result: What came out, in words.
        passed: True or False for a check, None for a measurement or for something that was not run.
        seconds: Duration.
    """

    part: str
    name: str
    result: str
    passed: bool | None = None
    seconds: float = 0.0


class Part(NamedTuple):
    """A part of the check.

    Attributes:
        run: Yields names and functions; each function returns (passed, result).
        limit: Seconds on a GPU.
        cpu_limit: Seconds on a CPU, which traces graphs more slowly.
        processes: Number of processes that share its checks on a GPU, for parts that mostly compile and time nothing.
    """

    run: Callable[[Setting], Checks]
    limit: int
    cpu_limit: int = 60
    processes: int = 1


class Setting(NamedTuple):
    """Device and sizes for a part.

    Attributes:
        device: `cuda` or `cpu`.
        shape: Shape of `loop.py` for speed.
        length: Slots allocated for speed.
        end: Time (`time.monotonic`) at which the part should have ended.
    """

    device: str
    shape: str
    length: int
    end: float


# -- attention ---------------------------------------------------------------------------------------------------------


def attention(setting: Setting) -> Checks:
    """Compare the operator for few queries with attention in float64, and time it next to torch's in CUDA graphs."""
    import torch

    from tests.support.attention_operands import CASES

    shape = {"rows": 1, "heads": 32, "kv_heads": 8, "dim": 64, "dtype": torch.bfloat16, "mask": "added"}
    for slots, end in ((4096, 100), (4096, 1000), (4096, 4000), (32768, 4000)):
        name = f"1B shape, {end} of {slots} slots"
        if setting.device != "cuda":
            yield name, lambda: (None, NEEDS_GPU)
        else:
            yield name, lambda slots=slots, end=end: _timed_attention({**shape, "slots": slots, "ends": [end]})
    # Few in float32, because each case compiles kernels of its own.
    for name, case in CASES.items():
        yield f"{name}, bfloat16", lambda case=case: _attended({**case, "dtype": torch.bfloat16}, setting.device)
    for name in ("grouped heads, ragged rows", "8 bits", "float16"):
        yield name, lambda name=name: _attended(CASES[name], setting.device)


def _attended(case: dict[str, Any], device: str) -> tuple[bool, str]:
    from exportable_cache.cache.attention.operators import FILLED_ATTENTION
    from tests.support.attention_operands import exact, operands, tolerance

    given = operands(**case)
    difference = float((FILLED_ATTENTION(*_moved(given, device)).cpu().double() - exact(*given)).abs().max())
    # Products of a GPU add in another order.
    allowed = max(1e-5, tolerance(given[0].dtype))
    return difference <= allowed, f"{difference:.1e} from float64, {allowed:.0e} allowed"


def _moved(operands: Any, device: str) -> Any:
    from torch.utils._pytree import tree_map

    return tree_map(lambda one: one.to(device) if hasattr(one, "to") else one, operands)


def _timed_attention(case: dict[str, Any], calls: int = 20) -> tuple[None, str]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from exportable_cache.cache.attention.operators import FILLED_ATTENTION
    from tests.support.attention_operands import operands

    query, (keys, values), ends, mask, *others = _moved(operands(**case), "cuda")
    folded = query.reshape(1, keys.shape[1], -1, query.shape[3])
    forms = {
        "operator": lambda: FILLED_ATTENTION(query, [keys, values], ends, mask, *others),
        "torch, all slots": lambda: scaled_dot_product_attention(folded, keys, values, attn_mask=mask),
    }
    said = []
    for name, call in forms.items():
        for _ in range(3):
            call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()
        times = []
        for _ in range(10):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(1000 * start.elapsed_time(end) / calls)
        said.append(f"{name} {sorted(times)[len(times) // 2]:.1f} us")
    return None, ", ".join(said)


# -- speed -------------------------------------------------------------------------------------------------------------


def speed(setting: Setting) -> Checks:
    """Time decode steps next to gpt-fast's loop and transformers' caches."""
    import loop
    import torch

    dtype = torch.bfloat16 if setting.device == "cuda" else torch.float32
    positions = [position for position in (100, 1000, 4000) if position < setting.length]
    if setting.length > 4096:
        positions.append(setting.length - 8)
    rounds, steps = (4, 8) if setting.device == "cuda" else (1, 1)

    def check() -> tuple[bool, str]:
        wrong: list[str] = []
        with torch.no_grad():
            model = loop.random_model(setting.shape, setting.length, setting.device, dtype)
            console = Console(stderr=True, width=140)
            forms = list(loop.SHORT.values())
            found = loop.measure(setting.shape, model, 1, positions, rounds, steps, console, forms, wrong)
        lines = [
            f"{form}: "
            + ", ".join(
                f"{row.ms:.3f} ms @{row.position} ({100 * row.read_bound_ms / row.ms:.0f} % of reads)"
                for row in found
                if row.form == form
            )
            for form in dict.fromkeys(row.form for row in found)
        ]
        return not wrong, "\n".join([*wrong, *lines])

    yield f"{setting.shape}, {setting.length} slots, {dtype}", check


def answers(setting: Setting) -> Checks:
    """Time whole responses, cold and warm, next to `transformers.generate`."""
    import loop
    import torch

    dtype = torch.bfloat16 if setting.device == "cuda" else torch.float32
    length, count = (setting.length, 128) if setting.device == "cuda" else (256, 8)
    made = loop.time_answers(
        setting.shape, lambda: loop.random_model(setting.shape, length, setting.device, dtype), count
    )
    for form in loop.ANSWERS:
        yield f"{setting.shape} {form}, {count} tokens", lambda: _answer(next(made))


def _answer(found: Any) -> tuple[bool | None, str]:
    """Judge the peak memory of ours, which must be that of weights and cache, and a tenth for steps."""
    passed, peak = None, "" if found.peak_bytes is None else f"; peak {found.peak_bytes / 1e9:.2f} GB"
    if found.peak_bytes is not None and found.needed_bytes is not None:
        share = found.peak_bytes / found.needed_bytes
        passed, peak = share <= MOST_MEMORY, f"{peak}, {share:.2f} of weights and cache"
    cold = "" if found.cold_first_seconds is None else f", its first token after {found.cold_first_seconds:.1f} s"
    return passed, (
        f"first response {found.cold_seconds:.1f} s{cold}; later: first token {found.first_ms:.0f} ms, then "
        f"{found.tokens_per_second:.0f} tokens/s{peak}"
    )


# -- TensorRT ----------------------------------------------------------------------------------------------------------


def tensorrt(setting: Setting) -> Checks:
    """Run `export_scripts/check_tensorrt_on_gpu.py` where TensorRT is installed."""
    if setting.device != "cuda":
        yield "the demo, and a Llama of 110M in float16", lambda: (None, NEEDS_GPU)
    elif util.find_spec("tensorrt_rtx") is None and util.find_spec("tensorrt") is None:
        yield "the demo, and a Llama of 110M in float16", lambda: (None, "TensorRT is not installed")
    else:
        yield "the demo", lambda: _checked_plan("demo", "--rounds", "3")
        shape = ("--shape", "llama-110m", "--dtype", "float16", "--max-cache-len", "1024", "--rounds", "3")
        yield "a Llama of 110M in float16", lambda: _checked_plan(*shape)


#: What no GPU has shown of TensorRT yet, in order of worth: arguments of `check_tensorrt_on_gpu.py`.
_SMALL = ("--shape", "llama-110m", "--max-cache-len", "1024")
_LARGE = ("--shape", "llama-1b", "--max-cache-len", "4096", "--engines-only", "--rounds", "5")
_MIXTURE = ("--shape", "qwen3-moe-400m", "--max-cache-len", "1024", "--engines-only", "--rounds", "5")
OUTSTANDING = {
    "110M, float16": (*_SMALL, "--dtype", "float16", "--rounds", "3"),
    "110M, bfloat16": (*_SMALL, "--dtype", "bfloat16", "--engines-only", "--rounds", "3"),
    "1B, bfloat16": (*_LARGE, "--dtype", "bfloat16"),
    "1B, 4w": (*_LARGE, "--dtype", "bfloat16", "--quantize", "4w"),
    "110M, prompt lookup": (*_SMALL, "--dtype", "bfloat16", "--score-length", "4", "--rounds", "0"),
    "110M, an adapter": (*_SMALL, "--dtype", "bfloat16", "--lora-slots", "1", "--rounds", "0"),
    "1B, 8w": (*_LARGE, "--dtype", "bfloat16", "--quantize", "8w"),
    "a mixture, 4w": (*_MIXTURE, "--dtype", "bfloat16", "--quantize", "4w"),
    "1B, float16": (*_LARGE, "--dtype", "float16"),
    "a mixture, 8w": (*_MIXTURE, "--dtype", "bfloat16", "--quantize", "8w"),
    "1B, nvfp4": (*_LARGE, "--dtype", "bfloat16", "--quantize", "nvfp4"),
    "a mixture, fp8": (*_MIXTURE, "--dtype", "bfloat16", "--quantize", "fp8"),
}
_TINY = {"llama-110m": "llama-tiny", "llama-1b": "llama-tiny", "qwen3-moe-400m": "qwen3-moe-tiny"}
#: Seconds of a build and of a check at most, and builds side by side, which take up to 10 GB of memory each.
BUILD_LIMIT, CHECK_LIMIT, BUILDS = 240, 120, 4


def engines(setting: Setting) -> Checks:
    """Build what no GPU has run yet side by side, and check it in order of worth; a CPU builds small shapes."""
    if util.find_spec("tensorrt_rtx") is None and util.find_spec("tensorrt") is None:
        yield "all of it", lambda: (None, "TensorRT is not installed")
        return
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(min(BUILDS, os.cpu_count() or 1)) as pool:
        built = {}
        for name, arguments in OUTSTANDING.items():
            output = Path(folder) / name.replace(" ", "-")
            if setting.device != "cuda":
                arguments = tuple(_TINY.get(one, one) for one in arguments)
            elif lacking := _lacking(arguments):
                built[name] = (lacking, output, arguments)
                continue
            build = pool.submit(_script, *arguments, "--build-only", "--output", str(output), limit=BUILD_LIMIT)
            built[name] = (build, output, arguments)
        for name, (build, output, arguments) in built.items():

            def check(build: Any = build, output: Path = output, arguments: Any = arguments) -> tuple[bool | None, str]:
                if isinstance(build, str):
                    return None, build
                done = build.result()
                if done.returncode:
                    return False, f"no plan: {_end_of(done)}"
                if setting.device != "cuda":
                    return None, f"{_end_of(done)}; {NEEDS_GPU}"
                return _checked_plan(*arguments, "--built", str(output))

            yield name, check


def _lacking(arguments: Sequence[str]) -> str:
    """Return what the GPU needs for the scheme of these arguments, or an empty string if it has that."""
    import torch

    from exportable_cache.backends.tensorrt.options import least_capability, loads_on

    least = max(least_capability(one) for one in arguments)
    here = 10 * (capability := torch.cuda.get_device_capability())[0] + capability[1] if least else 0
    lacks = least and not loads_on(here, [least])
    return f"needs a plan for SM {least}, which SM {here} does not load" if lacks else ""


def _script(*arguments: str, limit: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run `check_tensorrt_on_gpu.py`; a process that is ended at its limit has the status 124."""
    command = [sys.executable, str(ROOT / "export_scripts" / "check_tensorrt_on_gpu.py"), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"ended at its limit of {limit:.0f} s")


def _end_of(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join((done.stderr if done.returncode else done.stdout).split()[-40:])


def _checked_plan(*arguments: str) -> tuple[bool, str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        done = _script(*arguments, "--json", str(path), limit=CHECK_LIMIT)
        if not path.is_file():
            return False, f"ended with {done.returncode}: {_end_of(done)}"
        record = json.loads(path.read_text())
    lines = [f"{name}: {'' if one['passed'] else 'WRONG, '}{one['detail']}" for name, one in record["checks"].items()]
    for form, times in record.get("milliseconds", {}).items():
        lines.append(f"{form}: " + ", ".join(f"{ms:.3f} ms @{position}" for position, ms in times.items()))
    return all(one["passed"] for one in record["checks"].values()), "\n".join(lines)


# -- zoo ---------------------------------------------------------------------------------------------------------------


def zoo(setting: Setting) -> Checks:
    """Compare tiny decoders of every architecture with themselves, uncompiled and compiled, until the time is up."""
    if setting.device != "cuda":
        yield "decoders, eager and compiled", lambda: (None, NEEDS_GPU)
        return
    import torch

    # References in full float32: convolutions multiply in TF32 by default.
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    middle = time.monotonic() + 0.5 * (setting.end - time.monotonic())
    for compile, end in ((False, middle), ("wait", setting.end - 10)):
        yield (
            "decoders, " + ("compiled" if compile else "eager"),
            lambda compile=compile, end=end: _decoders(compile, end),
        )


def _decoders(compile: bool | str, end: float) -> tuple[bool, str]:
    import torch

    from exportable_cache import ExportableCache, Session
    from exportable_cache.errors import ExportableCacheError, first_line
    from exportable_cache.verification.verify import verify_session
    from tests.zoo.architectures import architectures
    from tests.zoo.build import tiny_model

    rows = [row for row in architectures() if row.group == "causal"]
    # Those that people run most, then all others.
    first = ("llama", "qwen3", "gemma3_text", "mistral", "gpt_oss", "phi3", "deepseek_v3", "qwen3_next", "mamba2")
    rows.sort(key=lambda row: first.index(row.model_type) if row.model_type in first else len(first))
    right, refused, wrong = 0, 0, []
    for row in rows:
        if time.monotonic() > end:
            break
        torch._dynamo.reset()
        try:
            model = tiny_model(row).to("cuda")
            with Session.from_model(model, ExportableCache.from_model(model, 64), compile=compile) as session:
                report = verify_session(session, model, prompts=[20], decode_steps=8)
            if report.passed:
                right += 1
            else:
                wrong.append(f"{row.model_type}: {report.max_difference:.1e}")
        except ExportableCacheError as error:
            refused += 1
            if compile:
                wrong.append(f"{row.model_type}: {first_line(error)[:160]}")
        except Exception as error:  # one of the results that are looked for
            wrong.append(f"{row.model_type}: {type(error).__name__}: {first_line(error)[:160]}")
    reached = right + refused + len(wrong) - (refused if compile else 0)
    return not wrong, "\n".join([f"{right} right, {refused} refused, of {reached} of {len(rows)} reached", *wrong])


# -- running -----------------------------------------------------------------------------------------------------------

PARTS: dict[str, Part] = {
    "sessions": Part(lambda setting: sessions(setting.device), 150, 290, processes=8),
    "attention": Part(attention, 35, 40),
    "speed": Part(speed, 80),
    "answers": Part(answers, 90, 90),
    "tensorrt": Part(tensorrt, 55, 20),
    "zoo": Part(zoo, 60, 20),
}
#: Parts that are run by name alone.
BY_NAME: dict[str, Part] = {"engines": Part(engines, 570, 300)}


def _part(name: str) -> Part:
    return PARTS.get(name) or BY_NAME[name]


def run_part(name: str, setting: Setting, report: Callable[[Row], None], taken: Path | None = None) -> None:
    """Run a part's checks in this process, and report each. An exception is a result.

    Args:
        name: The part.
        setting: Device and sizes.
        report: Called with each result.
        taken: Folder in which processes that share the part mark the checks that they take; None for all of them.
    """
    for index, (label, check) in enumerate(_part(name).run(setting)):
        try:
            if taken is not None:
                (taken / f"{name}-{index}.taken").touch(exist_ok=False)
        except FileExistsError:
            continue
        start = time.perf_counter()
        try:
            passed, result = check()
        except Exception as error:
            said = " ".join(str(error).split())[:300]
            passed, result = False, f"{type(error).__name__}: {said}"
        report(Row(name, label, result, passed, round(time.perf_counter() - start, 1)))


def spawned(command: list[str], limit: float, path: Path, part: str) -> list[Row]:
    """Run a part, or a share, in a process of its own, and return its rows; end it with its children at the limit.

    Args:
        command: The command.
        limit: Seconds.
        path: File of its rows, one JSON object a line.
        part: Name of the part.
    """
    start = time.monotonic()
    process = subprocess.Popen(command, start_new_session=True, env=_environment())
    ending, passed = "", None
    try:
        code = process.wait(timeout=limit)
        if code:
            ending, passed = f"ended with {code}", False
    except subprocess.TimeoutExpired:
        ending = f"killed at its limit of {limit:.0f} s"
    finally:
        # Compilers are children of it.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    lines = path.read_text().splitlines() if path.is_file() else []
    rows = [Row(**json.loads(line)) for line in lines]
    if ending:
        rows.append(Row(part, WHOLE, ending, passed, round(time.monotonic() - start, 1)))
    return rows


def in_processes(name: str, setting: Setting, limit: float, folder: Path) -> list[Row]:
    """Run a part in its processes side by side, and return all rows."""
    count = min(_part(name).processes, max(1, (os.cpu_count() or 1) // 2)) if setting.device == "cuda" else 1
    command = [sys.executable, str(Path(__file__)), "--part", name, "--seconds", str(limit)]
    command += ["--shape", setting.shape, "--length", str(setting.length)]

    def rows_of(index: int) -> list[Row]:
        path = folder / f"{name}-{index}"
        return spawned([*command, "--json", str(path), "--taken", str(folder)], limit, path, name)

    with ThreadPoolExecutor(count) as pool:
        return [row for rows in pool.map(rows_of, range(count)) for row in rows]


def _environment() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def machine(device: str) -> dict[str, str]:
    """Return the date, the GPU or the processor, and the releases of packages."""
    import torch

    found = {"date": datetime.now(timezone.utc).strftime("%Y-%m-%d"), "python": platform.python_version()}
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        found |= {"gpu": torch.cuda.get_device_name(), "sm": f"{major}.{minor}", "cuda": str(torch.version.cuda)}
    for package in ("torch", "triton", "transformers", "tensorrt-rtx"):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def table_of(rows: list[Row]) -> Table:
    """Return the table of all results."""
    table = Table("part", "what", "", "result", "s", show_lines=True)
    for row in rows:
        mark = {True: "[green]ok", False: "[red]WRONG", None: ""}[row.passed]
        table.add_row(row.part, row.name, mark, row.result, f"{row.seconds:.0f}")
    return table


def main(
    only: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(PARTS)}, all by default; or {', '.join(BY_NAME)}.")
    ] = None,
    shape: Annotated[str | None, typer.Option(help="Shape of loop.py; llama-1b by default, small on a CPU.")] = None,
    length: Annotated[int | None, typer.Option(help="Slots for speed; 4096 by default, 256 on a CPU.")] = None,
    total: Annotated[int | None, typer.Option(help=f"Seconds of all parts; {TOTAL}, or those of one by name.")] = None,
    json_path: Annotated[Path, typer.Option("--json", help="Results.")] = Path("build/gpu-check.json"),
    part: Annotated[str | None, typer.Option(hidden=True, help="The part that this process runs.")] = None,
    seconds: Annotated[float, typer.Option(hidden=True, help="Its limit.")] = TOTAL,
    taken: Annotated[Path | None, typer.Option(hidden=True, help="Folder of the checks that were begun.")] = None,
) -> None:
    """Check this package on a GPU, or on a CPU what needs none."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    setting = Setting(
        device,
        shape or ("llama-1b" if device == "cuda" else "llama-tiny"),
        length or (4096 if device == "cuda" else 256),
        time.monotonic() + seconds,
    )
    if part is not None:
        _prepare(device)
        with json_path.open("a") as file:
            run_part(part, setting, lambda row: print(json.dumps(asdict(row)), file=file, flush=True), taken)
        return
    chosen = list(only or PARTS)
    unknown = [name for name in chosen if name not in PARTS | BY_NAME]
    if unknown:
        known = ", ".join(PARTS | BY_NAME)
        raise typer.BadParameter(f"must be one of {known}, got {unknown[0]}", param_hint="'--only'")
    console, record = Console(width=170), {"machine": machine(device)}
    console.print(", ".join(f"{name} {value}" for name, value in record["machine"].items()))
    rows: list[Row] = []
    limits = [BY_NAME[name].limit for name in chosen if name in BY_NAME]
    end = time.monotonic() + (total or max([TOTAL, *limits]))
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            limit = _part(name).limit if device == "cuda" else _part(name).cpu_limit
            limit = min(limit, end - time.monotonic())
            if limit < 10:
                rows.append(Row(name, WHOLE, "not run: no time is left"))
                continue
            found = in_processes(name, setting, limit, Path(folder))
            console.print(table_of(found))
            rows += found
            json_path.parent.mkdir(parents=True, exist_ok=True)
            json_path.write_text(json.dumps({**record, "rows": [asdict(row) for row in rows]}, indent=1))
    wrong = [row for row in rows if row.passed is False]
    right = sum(row.passed is True for row in rows)
    cut = [row for row in rows if row.name == WHOLE and row.passed is None]
    others = len(rows) - right - len(wrong) - len(cut)
    console.print(
        f"{right} right, {len(wrong)} wrong, {others} measured or not run, {len(cut)} parts not finished; {json_path}"
    )
    # Limits are for a GPU, and a CPU may be busy.
    if wrong or (cut and device == "cuda"):
        raise typer.Exit(1)


def _prepare(device: str) -> None:
    """Set up the process of a part."""
    import torch
    import transformers

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    if device == "cpu" and hasattr(torch.compiler, "set_default_backend"):
        # Graphs are traced and guarded as for Inductor, and no code is generated, which takes minutes on a CPU.
        torch.compiler.set_default_backend("aot_eager")


if __name__ == "__main__":
    typer.run(main)
