"""Export a random Llama of 110M parameters and the demo, which has windows, for each device's compiler.

    python benchmarks/devices.py                     # rows of docs/guides/delegates.md, a process per export
    python benchmarks/devices.py --only openvino

Each export verifies what it wrote; the row names what ran, and the largest difference of a logit from the model's.
`exportable-cache bench` times a prompt of one chunk and 64 decoded tokens of what executes here.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
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
CHUNK = 32
MODELS = ("llama-110m", "demo")


def row(model: str, form: str, cache: int) -> str:
    """Return the table's cells for one export: size, what was run, the distance, and tokens a second."""
    from executorch_forms import random_model

    from exportable_cache import export

    target, options = FORMS[form]
    given = "demo" if model == "demo" else random_model(model, cache)
    with tempfile.TemporaryDirectory() as folder:
        try:
            bundle = export(given, target, cache, Path(folder) / "bundle", prefill_chunk=CHUNK, **options)
        except Exception as error:  # compilers raise errors of any class
            return f"refused: {str(error)[:200]}"
        found = bundle.manifest.verification or {}
        size = sum(path.stat().st_size for path in bundle.path.rglob("program.*") if path.is_file())
        size += sum(path.stat().st_size for path in bundle.path.rglob("*.mlirb"))
        ran = "evaluated" if found.get("remark") else "executed"
        speed = tokens_a_second(bundle.path) if ran == "executed" else "| "
        return f"{size / 1e6:.1f} MB | {ran} | {found.get('max_difference'):.1e} | {found.get('steps')} | {speed}"


def tokens_a_second(folder: Path) -> str:
    """Return two cells, of a prompt and of decoding, or the reason that they are not known."""
    command = [
        sys.executable,
        "-m",
        "exportable_cache",
        "bench",
        folder,
        "--pp",
        f"{CHUNK}",
        "--tg",
        "64",
        "--trust",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return f"{(done.stderr.strip().splitlines() or ['no message'])[-1][:120]} | "
    rows = json.loads(done.stdout)["rows"]
    return " | ".join(f"{one['avg_ts']:.0f}" for one in rows)


def _child(connection: Any, *arguments: Any) -> None:
    connection.send(row(*arguments))


def main(
    model: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(MODELS)}.")] = None,
    only: Annotated[list[str] | None, typer.Option(help=f"Of {'; '.join(FORMS)}.")] = None,
    cache: Annotated[int, typer.Option(help="Slots of the cache.")] = 256,
) -> None:
    """Print a row for each model and form."""
    context = multiprocessing.get_context("spawn")
    print(
        "| model | form | program | verified by | largest difference | positions | prompt, tokens/s "
        "| decoding, tokens/s |\n|---|---|---|---|---|---|---|---|"
    )
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
