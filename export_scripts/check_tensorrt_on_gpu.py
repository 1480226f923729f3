"""Build, run, verify and time a TensorRT program on a machine with an NVIDIA GPU.

    python export_scripts/check_tensorrt_on_gpu.py                                  # the demo model
    python export_scripts/check_tensorrt_on_gpu.py Qwen/Qwen3-0.6B --dtype float16 --max-cache-len 4096 --json gpu.json
    python export_scripts/check_tensorrt_on_gpu.py --shape llama-1b --dtype float16 --max-cache-len 4096 # random
    python export_scripts/check_tensorrt_on_gpu.py --shape llama-1b --dtype float16 --quantize 4w --engines-only
    python benchmarks/gpu_check.py --only engines                        # what no GPU has shown yet, in ten minutes

It needs one of the extras `tensorrt` and `tensorrt-rtx`, and torch with CUDA. It prints PASSED or FAILED for each of

- load: the plans load on this GPU;
- logits: prefill and decode equal the eager model's, token by token, past every sliding window; where TensorRT
  multiplies float32 in TF32, the limit is that of 10 bits, and the line says so;
- aliases: the engine names the same pairs of inputs and outputs as the manifest, bound to one address;
- in place: a decode step changes the expected slot of each cache, and no other byte;
- without torch: a process that imports no torch generates the same tokens over cuda-bindings, where that is installed,
  with `--score-length` again by prompt lookup, and with `--lora-slots` again with a random adapter;

and then, whether these failed or not, tokens per second, compared with eager, `torch.compile` and CUDA graphs of the
model in float; `--engines-only` leaves those out. Logits of quantised weights are compared with the model that has the
same ones. It exits with 1 if anything failed, and with 2 without a GPU. Shapes are those of `benchmarks/loop.py`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, PreTrainedModel

from exportable_cache import ExportableCache, Session, export
from exportable_cache.backends.live.compile import CompileOptions
from exportable_cache.backends.live.runner import ModuleRunner
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.errors import ExportableCacheError, MissingDependencyError
from exportable_cache.models.loading.loading import load_model
from exportable_cache.verification.references import remark_of
from exportable_cache.verification.verify import verify_session

Step = Callable[[int], object]


class Checks:
    """Results, printed as they come and kept for the record."""

    def __init__(self, console: Console) -> None:
        self.results: dict[str, dict[str, Any]] = {}
        self._console = console

    def add(self, name: str, passed: bool, detail: str) -> None:
        """Note one result."""
        self.results[name] = {"passed": passed, "detail": detail}
        self._console.print(f"[{'green' if passed else 'red'}]{'PASSED' if passed else 'FAILED'}[/] {name}: {detail}")

    @property
    def passed(self) -> bool:
        """True if all checks passed."""
        return all(result["passed"] for result in self.results.values())


def _wait() -> None:
    """Wait for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def machine() -> dict[str, str]:
    """Return the names of GPU, driver and packages."""
    found = {"gpu": torch.cuda.get_device_name(), "sm": str(compute_capability()), "cuda": str(torch.version.cuda)}
    for package in ("torch", "transformers", "torch-tensorrt-rtx", "tensorrt-rtx", "torch-tensorrt", "tensorrt"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def compute_capability() -> int:
    """Return the compute capability, 89 for SM 8.9."""
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def build(
    model: PreTrainedModel, max_cache_len: int, folder: Path, quantize: str | None = None, **further: int
) -> Bundle:
    """Export for this GPU, or portably if plans cannot be built for it by name and the scheme allows it."""
    from exportable_cache.backends.tensorrt.options import CAPABILITIES, least_capability

    here, least = compute_capability() if torch.cuda.is_available() else 0, least_capability(quantize)
    options = {"sm": str(here)} if here in CAPABILITIES and here >= least else {"sm": str(least)} if least else {}
    return export(model, "tensorrt", max_cache_len, folder, verify=False, quantize=quantize, **options, **further)


def quantized_like(bundle: Bundle, model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the model with the weights that the bundle has."""
    from exportable_cache.models.quantization.quantize import quantize
    from exportable_cache.models.quantization.spec import Quantization

    made = bundle.manifest.quantization
    assert made is not None
    spec = Quantization(made.linear, made.group_size, made.embeddings, made.scales or "absmax", made.experts)
    return quantize(model, spec, dtype=getattr(torch, bundle.manifest.dtype)).model.to("cuda")


def check_aliases(runner: Any, checks: Checks) -> None:
    """Compare the engines' aliases with the manifest, and with the bound addresses."""
    for method, record in runner.records.items():
        context = runner._contexts[method]
        said = {output.name: context.engine.get_aliased_input_tensor(output.name) for output in record.outputs}
        said = {output: source for output, source in said.items() if source}
        apart = [
            output
            for output, source in said.items()
            if context.get_tensor_address(output) != context.get_tensor_address(source)
        ]
        detail = f"{len(said)} outputs share memory with an input"
        if said != record.aliases:
            detail = f"the engine says {said}, the manifest {record.aliases}"
        elif apart:
            detail = f"{', '.join(apart)} are bound to other addresses than their inputs"
        checks.add(f"aliases of {method}", said == record.aliases and not apart, detail)


def check_in_place(session: Session, checks: Checks) -> None:
    """Feed a prompt, copy every cache, decode one token, and compare the slots."""
    session.reset()
    generator = torch.Generator().manual_seed(0)
    length = min(5, (session.max_length or 8) - 1)
    tokens = torch.randint(session.vocab_size, (session.batch_size, length + 1), generator=generator).to(session.device)
    session.prefill(tokens[:, :length])
    _wait()
    state = session.runner.state
    before = {name: tensor.clone() for name, tensor in state.items()}
    session.decode(tokens[:, length])
    _wait()
    wrong = []
    for name, tensor in state.items():
        # [batch, heads, slots, dim]: a full layer writes slot `length`, a ring slot `length` modulo its capacity.
        # Null slots are never written.
        changed = (tensor != before[name]).any(-1).any(1).any(0).nonzero().flatten().tolist()
        capacity = session.layers[int(name.split(".")[-2])].capacity
        if changed != [length % capacity]:
            wrong.append(f"{name} changed in slots {changed}")
    detail = "; ".join(wrong) or f"slot {length} of {len(state)} tensors changed, nothing else"
    checks.add("in place", not wrong, detail)
    session.reset()


#: Tokens that `check_without_torch` generates, and the most seconds that its process may take.
_GENERATED, _MOST_SECONDS = 32, 120
#: Arguments: bundle, prompt, tokens to generate, tokens that prompt lookup proposes, file of an adapter.
_WITHOUT_TORCH = """
import json, sys
from exportable_cache.session.native import NotNative, open_native
path, prompt, count, proposed, adapter = sys.argv[1], *map(json.loads, sys.argv[2:])
def free():
    try:
        from cuda.bindings import runtime
    except ImportError:
        return 0
    return int(runtime.cudaMemGetInfo()[1])
before = free()
try:
    session = open_native(path, trust=True, text=False)
except NotNative as left:
    print(json.dumps({"left": left.reason}))
    sys.exit()
found = {"bytes": before - free()}
def generated(**options):
    session.reset()
    tokens = []
    return session.generate(prompt, tokens.append, max_new_tokens=count, **options), tokens
generated()
statistics, found["tokens"] = generated()
found["milliseconds"] = 1e3 * statistics.decode_seconds / max(1, statistics.generated_tokens - 1)
found["first"] = 1e3 * statistics.time_to_first_token
if proposed:
    statistics, found["looked_up"] = generated(prompt_lookup=proposed)
    found["accepted"] = statistics.accepted_tokens
if adapter:
    session.runner.load_adapter(adapter, "a")
    session.runner.use_adapter("a")
    _, found["adapted"] = generated()
session.close()
print(json.dumps({**found, "torch": "torch" in sys.modules}))
"""


def check_without_torch(
    path: Path, session: Session, checks: Checks, proposed: int = 0, adapter: Path | None = None
) -> None:
    """Generate the same tokens in a process without torch, and note the time of a token with its choice on the host.

    Args:
        path: Folder of the bundle.
        session: Torch's session over it.
        checks: Takes the result.
        proposed: Tokens that prompt lookup proposes in a further generation, whose tokens are the same; 0 for none.
        adapter: File of an adapter for a further generation in both; None for none.
    """
    prompt = [1 + index % (session.vocab_size - 1) for index in range(min(9, (session.max_length or 64) // 2))]

    def generated() -> list[int]:
        session.reset()
        return [int(token) for token in session.generate(torch.tensor([prompt], device=session.device), _GENERATED)]

    expected = {"tokens": generated()}
    if proposed:
        expected["looked_up"] = expected["tokens"]
    if adapter is not None:
        session.use_adapter(session.load_adapter(adapter, "a"))
        expected["adapted"] = generated()
        session.use_adapter(None)
        checks.add("adapter", expected["adapted"] != expected["tokens"], "its tokens are others than the model's")
    session.reset()
    given = (prompt, _GENERATED, proposed, "" if adapter is None else str(adapter))
    command = [sys.executable, "-c", _WITHOUT_TORCH, str(path), *map(json.dumps, given)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_MOST_SECONDS)
    except subprocess.TimeoutExpired:
        checks.add("without torch", False, f"no tokens within {_MOST_SECONDS} s")
        return
    if done.returncode:
        checks.add("without torch", False, (done.stderr.strip().splitlines() or ["no message"])[-1])
        return
    found = json.loads(done.stdout)
    if "left" in found:
        checks.add("without torch", True, f"not run: {found['left']}")
        return
    details = [
        f"{len(found['tokens'])} tokens, {found['milliseconds']:.3f} ms each, the first after {found['first']:.1f} ms",
        f"{found['bytes'] / 2**20:.1f} MiB of the GPU",
        *([f"{found['accepted']} proposals of prompt lookup accepted"] if proposed else []),
    ]
    others = [what for what, tokens in expected.items() if found[what] != tokens]
    wrong = [f"{what} {found[what]}, and {expected[what]} with torch" for what in others]
    checks.add("without torch", not wrong and not found["torch"], "; ".join(wrong or details))


def random_adapter(bundle: Bundle, path: Path) -> Path:
    """Write a random adapter of all layers that have slots, and return its file."""
    from exportable_cache.models.loading.adapters import LoraWeights
    from exportable_cache.session.adapters import write_adapter_file

    entry = bundle.manifest.program.lora
    assert entry is not None
    slots = entry.described()
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, columns: int) -> torch.Tensor:
        return 0.3 * torch.randn(rows, columns, generator=generator)

    tensors = {one.name: (draw(slots.rank, one.inputs), draw(one.outputs, slots.rank)) for one in slots.targets}
    write_adapter_file(path, LoraWeights("random", tensors), slots, bundle.manifest.fingerprint, None)
    return path


def dynamic_step(model: PreTrainedModel) -> Step:
    """Step transformers eagerly with `DynamicCache`, filled up to a position once; growing layers are cropped again."""
    filled: dict[int, DynamicCache] = {}
    token = torch.ones(1, 1, dtype=torch.int64, device=model.device)

    def step(position: int) -> object:
        if position not in filled:
            filled.clear()
            filled[position] = DynamicCache(config=model.config)
            model(token.expand(1, position), past_key_values=filled[position], logits_to_keep=1)
        logits = model(token, past_key_values=filled[position]).logits
        for layer in filled[position].layers:
            # A sliding layer holds at most its window and is not cropped.
            if not layer.is_sliding:
                layer.crop(-1)
        return logits

    return step


def runner_step(runner: Any, device: torch.device | str) -> Step:
    """Run one decode step of a runner at a position."""
    token = torch.ones(1, 1, dtype=torch.int64, device=device)
    positions: dict[int, torch.Tensor] = {}

    def step(position: int) -> object:
        if position not in positions:
            positions[position] = torch.tensor([position], device=device)
        return runner.run("decode", token, positions[position])

    return step


def random_shape(name: str, dtype: str, max_cache_len: int) -> PreTrainedModel:
    """Return a model of a shape of `benchmarks/loop.py` with random weights, the same ones each time."""
    sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
    from loop import MODELS, random_model

    if name not in MODELS:
        raise typer.BadParameter(f"must be one of {', '.join(MODELS)}, got {name}", param_hint="'--shape'")
    return random_model(name, max_cache_len, dtype=getattr(torch, dtype))


def graphed_step(model: PreTrainedModel, max_cache_len: int) -> Step:
    """Run the eager step over a static cache, captured as one CUDA graph."""
    runner = ModuleRunner(model, ExportableCache.from_model(model, max_cache_len))
    token = torch.ones(1, 1, dtype=torch.int64, device=model.device)
    place = torch.zeros(1, dtype=torch.int64, device=model.device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            runner.run("decode", token, place)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = runner.run("decode", token, place)

    # The graph is replayed at the addresses of these tensors, which must stay alive with the step.
    kept = (runner, token, place, logits)

    def step(position: int) -> object:
        assert kept[0].is_open
        place.fill_(position)
        graph.replay()
        return logits

    return step


def compiled_step(model: PreTrainedModel, max_cache_len: int, mode: str) -> Step:
    """Run our compiled decode in a mode of torch.compile; `reduce-overhead` captures CUDA graphs."""
    cache = ExportableCache.from_model(model, max_cache_len)
    return runner_step(ModuleRunner(model, cache, options=CompileOptions("wait", mode)), model.device)


def engine_step(runner: Any, captured: bool) -> Step:
    """Run the engine's decode, replayed as a CUDA graph or launched each time."""
    decode, step = runner.steps["decode"], runner_step(runner, "cpu")

    def run(position: int) -> object:
        decode._captures = captured
        return step(position)

    return run


def forms_of(
    make: Callable[[], PreTrainedModel], max_cache_len: int, engines: Any | None, compared: bool = True
) -> dict[str, Step]:
    """Return each way of decoding, over two copies of the model on the GPU.

    A runner of ours keeps the copy whose attention it switched.

    Args:
        make: Returns a copy of the model.
        max_cache_len: Slots of a full-attention layer.
        engines: Runner of the TensorRT program; None if it was not opened.
        compared: False leaves out the ways without TensorRT.
    """
    forms = {}
    if compared:
        theirs, ours = (make().to("cuda") for _ in range(2))
        forms = {
            "transformers eager, DynamicCache": dynamic_step(theirs),
            "torch.compile": compiled_step(ours, max_cache_len, "default"),
            "torch.compile, reduce-overhead": compiled_step(ours, max_cache_len, "reduce-overhead"),
            "eager step as a CUDA graph": graphed_step(ours, max_cache_len),
        }
    if engines is not None:
        forms["TensorRT, launched"] = engine_step(engines, captured=False)
        forms["TensorRT, CUDA graph"] = engine_step(engines, captured=True)
    return forms


def timed(forms: dict[str, Step], positions: list[int], rounds: int, steps: int) -> dict[str, dict[int, float]]:
    """Return the median milliseconds per decode step, by form and position, with interleaved rounds."""
    times: dict[tuple[str, int], list[float]] = {}
    for position in positions:
        for step in forms.values():
            for _ in range(5):
                step(position)
        for _ in range(rounds):
            for name, step in forms.items():
                _wait()
                start = time.perf_counter()
                for _ in range(steps):
                    step(position)
                _wait()
                times.setdefault((name, position), []).append(1e3 * (time.perf_counter() - start) / steps)
    return {name: {position: statistics.median(times[name, position]) for position in positions} for name in forms}


def speed_table(medians: dict[str, dict[int, float]], title: str) -> Table:
    """Return a table of tokens per second, and of each form's speed relative to the first."""
    base = next(iter(medians.values()))
    table = Table(title=title)
    table.add_column("decode")
    for position in base:
        table.add_column(f"tokens/s @{position}", justify="right")
        table.add_column("speed", justify="right")
    for name, by_position in medians.items():
        cells = ((f"{1e3 / ms:.1f}", f"{base[position] / ms:.2f}x") for position, ms in by_position.items())
        table.add_row(name, *(cell for pair in cells for cell in pair))
    return table


def _size_of(bundle: Bundle, seconds: float) -> str:
    size = sum(path.stat().st_size for path in bundle.path.glob("*.plan"))
    return f"built {', '.join(bundle.manifest.files)} in {seconds:.1f} s, {size / 2**20:.1f} MiB of plans"


@torch.no_grad()
def main(
    model: Annotated[str, typer.Argument(help="demo, a local folder, or a hub id.")] = "demo",
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16; as stored by default.")] = None,
    shape: Annotated[
        str | None, typer.Option(help="Random weights of this shape, such as llama-1b, not MODEL.")
    ] = None,
    max_cache_len: Annotated[int, typer.Option(help="Slots of a full-attention layer.")] = 512,
    output: Annotated[Path | None, typer.Option(help="Folder to keep the bundle in.")] = None,
    quantize: Annotated[str | None, typer.Option(help="Scheme of the weights: 4w, 8w, fp8 or nvfp4.")] = None,
    engines_only: Annotated[bool, typer.Option("--engines-only", help="Time only TensorRT.")] = False,
    score_length: Annotated[int, typer.Option(help="Score this many tokens in a step, for prompt lookup.")] = 0,
    lora_slots: Annotated[int, typer.Option(help="Slots for adapters, one of which is then used.")] = 0,
    build_only: Annotated[bool, typer.Option("--build-only", help="Build into --output; no GPU is needed.")] = False,
    built: Annotated[Path | None, typer.Option(help="Check what --build-only built here.")] = None,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds of the timing; 0 for none.")] = 10,
    steps: Annotated[int, typer.Option(help="Decode steps of each form per round.")] = 32,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write everything here.")] = None,
) -> None:
    """Build, run, verify and time a TensorRT program on the GPU of this machine."""
    console = Console()
    further = {name: n for name, n in (("score_length", score_length), ("lora_slots", lora_slots)) if n}
    if build_only and output is None:
        raise typer.BadParameter("must be given with --build-only, got none", param_hint="'--output'")
    if not build_only and not torch.cuda.is_available():
        console.print(
            "torch finds no NVIDIA GPU here. Without one, `exportable-cache verify` checks the network on the CPU."
        )
        raise typer.Exit(2)

    def make() -> PreTrainedModel:
        if shape is None:
            return load_model(model, dtype).model
        return random_shape(shape, dtype or "float16", max_cache_len)

    if build_only:
        start = time.perf_counter()
        bundle = build(make(), max_cache_len, output, quantize, **further)
        console.print(_size_of(bundle, time.perf_counter() - start))
        return
    name = shape or model
    record: dict[str, Any] = {"model": name, "max_cache_len": max_cache_len, "machine": machine()}
    console.print(", ".join(f"{name} {value}" for name, value in record["machine"].items()))
    checks = Checks(console)
    reference, session = make(), None
    record["dtype"] = str(reference.dtype).removeprefix("torch.")
    with tempfile.TemporaryDirectory() as temporary:
        try:
            start = time.perf_counter()
            if built is None:
                bundle = build(reference, max_cache_len, output or Path(temporary) / "bundle", quantize, **further)
            else:
                bundle = Bundle.open(built, trust=True)
            record["build_seconds"] = time.perf_counter() - start
            record["plan_bytes"] = sum(path.stat().st_size for path in bundle.path.glob("*.plan"))
            console.print(_size_of(bundle, record["build_seconds"]))
            if quantize is not None:
                reference = quantized_like(bundle, reference)
            before = torch.cuda.mem_get_info()[0]
            session = Session.from_bundle(bundle)
            record["gpu_bytes"] = before - torch.cuda.mem_get_info()[0]
            checks.add("load", True, f"{len(session.runner.methods)} engines, {record['gpu_bytes'] / 2**20:.1f} MiB")
            if reference.dtype != torch.float32:
                # A CPU takes minutes for a prompt in 16 bits, and a GPU in float32 may multiply in TF32.
                reference.to("cuda")
            report = replace(verify_session(session, reference), remark=remark_of(session.runner))
            record["verification"] = report.to_dict()
            checks.add("logits", report.passed, str(report))
            check_aliases(session.runner, checks)
            check_in_place(session, checks)
            adapter = random_adapter(bundle, Path(temporary) / "adapter") if lora_slots else None
            check_without_torch(bundle.path, session, checks, max(0, score_length - 1), adapter)
        except MissingDependencyError:
            raise
        except ExportableCacheError as error:
            checks.add("load" if "load" not in checks.results else "run", False, str(error))
        # Timed even if a check failed: the difference of a dtype says nothing of its speed.
        if rounds and (session is not None or not engines_only):
            positions = sorted({min(100, max_cache_len // 2), max_cache_len - 2})
            engines = None if session is None else session.runner
            forms = forms_of(make, max_cache_len, engines, compared=not engines_only)
            record["milliseconds"] = timed(forms, positions, rounds, steps)
            weights, gpu = quantize or record["dtype"], record["machine"]["gpu"]
            title = f"{name}, {weights}, cache {max_cache_len}, one row, {gpu}: median"
            console.print(speed_table(record["milliseconds"], title))
    record["checks"] = checks.results
    if json_path is not None:
        json_path.write_text(json.dumps(record, indent=2))
    if not checks.passed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
