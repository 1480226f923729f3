"""Export a random Llama of 110M parameters and the demo, which has windows, for each device's compiler.

    python benchmarks/devices.py                     # rows of docs/guides/delegates.md, a process per export
    python benchmarks/devices.py --only openvino

Each export verifies what it wrote; the row names what ran, and the largest difference of a logit from the model's.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).parent))

#: Title, target and options.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "xnnpack": ("executorch", {}),
    "openvino": ("executorch", {"delegate": "openvino"}),
    "mlx": ("executorch", {"delegate": "mlx"}),
    "coreai": ("coreai", {}),
    "static, xnnpack": ("executorch", {"form": "static"}),
    "static, openvino": ("executorch", {"form": "static", "delegate": "openvino"}),
    "static, tosa": ("executorch", {"form": "static", "delegate": "tosa"}),
}
MODELS = ("llama-110m", "demo")


def row(model: str, form: str, cache: int) -> str:
    """Return the table's cells for one export: size, what was run, and the distance."""
    from executorch_forms import random_model

    from exportable_cache import export

    target, options = FORMS[form]
    given = "demo" if model == "demo" else random_model(model, cache)
    with tempfile.TemporaryDirectory() as folder:
        try:
            bundle = export(given, target, cache, Path(folder) / "bundle", prefill_chunk=32, **options)
        except Exception as error:  # compilers raise errors of any class
            return f"refused: {str(error)[:200]}"
        found = bundle.manifest.verification or {}
        size = sum(path.stat().st_size for path in bundle.path.rglob("program.*") if path.is_file())
        size += sum(path.stat().st_size for path in bundle.path.rglob("*.mlirb"))
        ran = "evaluated" if found.get("remark") else "executed"
        return f"{size / 1e6:.1f} MB | {ran} | {found.get('max_difference'):.1e} | {found.get('steps')}"


def _child(connection: Any, *arguments: Any) -> None:
    connection.send(row(*arguments))


def main(
    model: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(MODELS)}.")] = None,
    only: Annotated[list[str] | None, typer.Option(help=f"Of {'; '.join(FORMS)}.")] = None,
    cache: Annotated[int, typer.Option(help="Slots of the cache.")] = 256,
) -> None:
    """Print a row for each model and form."""
    context = multiprocessing.get_context("spawn")
    print("| model | form | program | verified by | largest difference | positions |\n|---|---|---|---|---|---|")
    for name in model or MODELS:
        for form in only or FORMS:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(sender, name, form, cache))
            process.start()
            # The child has the other end, so that its crash ends the wait.
            sender.close()
            try:
                cells = receiver.recv()
            except EOFError:
                cells = "the process ended"
            process.join()
            print(f"| {name} | `{form}` | {cells} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
