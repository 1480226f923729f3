"""Steps of every architecture on a GPU that computes nothing: what they would ask of the host, and of which device.

`python -m tests.zoo.gpu` runs a prompt and a step of each uncompiled, and traces both, over tensors that have shapes
and a device and no values (`tests/support/fake_gpu.py`). Prompts are traced for every length that their graph serves,
as `compile=True` traces them. Numbers are not checked. Results go to a file, which later runs continue, and into
`docs/gpu.md`.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from exportable_cache import ExportableCache, Session
from exportable_cache.backends.live.compile import has_graphs_by_length
from exportable_cache.backends.live.runner import with_min_length
from exportable_cache.cache.step import known_length, starting_at
from exportable_cache.errors import ExportableCacheError
from exportable_cache.models.layers.specs import check_model_type
from exportable_cache.program.methods import ProgramMethod

from ..support.fake_gpu import FakeGpu, nodes_elsewhere, unaligned_masks, waiting_nodes
from .architectures import Architecture, architectures
from .build import encoder_inputs, encoder_options, tiny_model, tokens

RESULTS = Path("build/zoo-gpu.jsonl")
PAGE = Path("docs/gpu.md")
SECONDS = 300
#: As `Row.plain` and `Row.traced` say that there is nothing to say.
CLEAN = "clean"
_TABLE = "<!-- rows -->"


@dataclass
class Row:
    """What was found of an architecture.

    Attributes:
        name: Of it.
        plain: Its steps as they are: `clean`, or what makes the host wait, and where.
        traced: Result of tracing its steps for every length, as they are compiled.
    """

    name: str
    plain: str
    traced: str


@torch.no_grad()
def check(architecture: Architecture) -> Row:
    """Find out of one architecture, in bfloat16, the dtype that its experts want on a GPU."""
    try:
        model = tiny_model(architecture).to(torch.bfloat16)
        check_model_type(model.config)
        inputs = {name: _half(tensor) for name, tensor in encoder_inputs(model).items()}
        options = encoder_options(model, inputs)
        cache = ExportableCache.from_model(model, 64, attn_implementation=None, **options)
        with Session.from_model(model, cache) as session:
            calls = _calls(session, model, inputs)
            gpu = FakeGpu()
            gpu.move(*session.runner.modules.values())
            for layer in cache.layers:
                gpu.move_state(layer)
            return Row(architecture.name, _plain(session, gpu, calls), _traced(session, gpu, calls))
    except ExportableCacheError as error:
        return Row(architecture.name, *[f"refused: {_line(error)}"] * 2)
    except Exception as error:  # any model's code runs here
        return Row(architecture.name, *[f"{type(error).__name__}: {_line(error)}"] * 2)


@dataclass
class Call:
    """What a method of a session is given.

    Attributes:
        inputs: Tensors.
        length: Tokens before, as the session says them.
    """

    inputs: tuple[torch.Tensor, ...]
    length: int | None

    def on(self, gpu: FakeGpu) -> tuple[torch.Tensor, ...]:
        """The inputs, without values, there."""
        return tuple(gpu.moved(tensor) for tensor in self.inputs)


def _calls(session: Session, model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, Call]:
    """The inputs that each method of a session gets for a prompt and a token."""
    calls: dict[str, Call] = {}
    run = session.runner.run

    def noted(method: str, *given: torch.Tensor) -> Any:
        calls.setdefault(method, Call(given, known_length(given[1]) if len(given) > 1 else None))
        return run(method, *given)

    session.runner.run = noted
    ids = tokens(model)
    if inputs:
        session.encode(**inputs)
    session.prefill(ids[:, :6])
    session.decode(ids[:, 6])
    return calls


def _plain(session: Session, gpu: FakeGpu, calls: dict[str, Call]) -> str:
    found = []
    for method, call in calls.items():
        given = call.on(gpu)
        try:
            with gpu, starting_at(given[-1] if len(given) == 1 else given[1], call.length):
                session.runner.modules[method](*given)
        except Exception as error:  # of a model's code
            found.append(f"{method}: {_line(error)} at {_place(error)}")
    return "; ".join(found) or CLEAN


def _traced(session: Session, gpu: FakeGpu, calls: dict[str, Call]) -> str:
    found = []
    for method, call in calls.items():
        try:
            program = _exported(session.runner.modules[method], session.runner.methods[method], call.on(gpu))
            nodes = (*waiting_nodes(program), *nodes_elsewhere(program), *unaligned_masks(program))
            found += [f"{method}: {one}" for one in nodes]
        except Exception as error:  # of a model's code
            found.append(f"{method}: {_line(error)} at {_place(error)}")
    return "; ".join(found) or CLEAN


def _exported(module: torch.nn.Module, method: ProgramMethod, inputs: tuple[torch.Tensor, ...]) -> Any:
    """Export a method for every length that one compiled graph serves, see `live.compile.marked`."""
    sizes = {} if has_graphs_by_length(method) else method.dynamic_sizes
    dims = {name: torch.export.Dim(name, min=max(2, least), max=most) for name, (least, most) in sizes.items()}
    shapes = tuple(
        {index: dims[size] for index, size in enumerate(spec.shape) if size in dims and tensor.shape[index] != 1}
        for spec, tensor in zip(method.inputs, inputs, strict=True)
    )
    try:
        return torch.export.export(module, inputs, strict=False, dynamic_shapes=shapes)
    except torch._dynamo.exc.UserError as error:
        # Raises if the length is not what differs.
        return _exported(module, with_min_length(method, error), inputs)


def _half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


#: What errors of the fake GPU mean.
_MEANINGS = {
    "aten._local_scalar_dense": "waits for a value",
    "aten.nonzero": "waits for a size",
    "aten::empty_strided": "copies numbers of Python there",
}


def _line(error: Exception) -> str:
    for name, meaning in _MEANINGS.items():
        if name in str(error):
            return meaning
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


def _place(error: Exception) -> str:
    """The innermost line of a model's code, or of this package's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/models/" in frame.filename or "exportable_cache" in frame.filename]
    frame = (own or list(frames))[-1]
    return f"`{Path(frame.filename).name}`: `{frame.line}`"


def run(names: list[str]) -> Iterator[Row]:
    """Check those that there is no result of, each in a process of its own."""
    RESULTS.parent.mkdir(exist_ok=True)
    known = {row.name: row for row in _known()}
    context = multiprocessing.get_context("fork")
    for architecture in architectures():
        if names and architecture.name not in names and architecture.model_type not in names:
            continue
        if architecture.name not in known or names:
            with context.Pool(1) as pool:
                try:
                    row = pool.apply_async(check, (architecture,)).get(SECONDS)
                except multiprocessing.TimeoutError:
                    row = Row(architecture.name, *[f"not within {SECONDS} s"] * 2)
            with RESULTS.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
            known[architecture.name] = row
        yield known[architecture.name]


def _known() -> list[Row]:
    return [Row(**json.loads(line)) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def page(rows: list[Row]) -> str:
    """Counts, and a table of those of which there is something to say."""
    asked = [row for row in rows if not row.plain.startswith("refused")]
    counts = [sum(getattr(row, column) == CLEAN for row in asked) for column in ("plain", "traced")]
    lines = [
        f"Of {len(rows)} architectures {len(rows) - len(asked)} are refused. Of the other {len(asked)}, a prompt and a step",
        f"run without a wait and on one device in {counts[0]} eagerly, and in {counts[1]} traced. The rest:",
        "",
        "| architecture | eager | traced |",
        "|---|---|---|",
    ]
    for row in asked:
        if (row.plain, row.traced) != (CLEAN, CLEAN):
            lines.append(f"| {row.name} | {_cell(row.plain)} | {_cell(row.traced)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """What was found, once for the methods that it was found of."""
    methods: dict[str, list[str]] = {}
    for one in text.split("; "):
        method, _, finding = one.rpartition(": ") if " at `" not in one else one.partition(": ")
        methods.setdefault(finding, []).append(method)
    told = (f"{', '.join(dict.fromkeys(names))}: {finding}".removeprefix(": ") for finding, names in methods.items())
    return "; ".join(told).replace("|", "\\|")


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = []
    for each in run(sys.argv[1:]):
        print(each.name, each.plain, "|", each.traced, flush=True)
        found.append(each)
    if not sys.argv[1:]:
        before = PAGE.read_text().split(_TABLE)[0]
        PAGE.write_text(before + _TABLE + "\n\n" + page(found))
