"""Time the first tokens of a compiled session whose graphs are on disk, from the start of the process.

    python benchmarks/warm_start.py                     # the 110M Llama of benchmarks/loop.py, cache of 4096
    python benchmarks/warm_start.py --lean              # as if only this package's requirements were installed

Each start is its own process, after one that compiles. Seconds are since the process started: when torch is imported,
then transformers' auto class and the model's file, which every program that loads the model imports, then this package,
when the model is loaded, and at the first two tokens. Inductor's folder is emptied between two starts.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

PROMPT = 100
STAGES = ("torch", "transformers", "this package", "the model", "1st token", "2nd token", "all graphs")
#: Packages that transformers imports if they are installed, and that this package does not require.
OPTIONAL = (
    "accelerate",
    "bitsandbytes",
    "compressed_tensors",
    "gguf",
    "peft",
    "scipy",
    "sentencepiece",
    "sklearn",
    "torchao",
)


def start(folder: Path, length: int, began: float, lean: bool) -> dict[str, float]:
    """Return the seconds since `began` of this process, by stage."""
    seconds: dict[str, float] = {}

    def done(stage: str) -> None:
        seconds[stage] = time.time() - began

    if lean:
        sys.modules.update(dict.fromkeys(OPTIONAL))
    import torch

    done("torch")
    import transformers.models.llama.modeling_llama  # noqa: F401
    from transformers import AutoModelForCausalLM

    done("transformers")
    from exportable_cache import ExportableCache, Session

    done("this package")
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    done("the model")
    prompt = torch.randint(0, 32000, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    cache = ExportableCache.from_model(model, length)
    with Session.from_model(model, cache, compile=True, graph_cache=folder / "graphs") as session:
        tokens = session.generate(prompt, 2)
        next(tokens)
        done("1st token")
        next(tokens)
        done("2nd token")
        session.reset()
        session.warm_up()
        done("all graphs")
    return seconds


def main(
    model: Annotated[str, typer.Option(help="A Llama of benchmarks/loop.py.")] = "llama-110m",
    length: Annotated[int, typer.Option(help="Slots allocated.")] = 4096,
    starts: Annotated[int, typer.Option(help="Processes.")] = 3,
    lean: Annotated[bool, typer.Option("--lean", help=f"Without {', '.join(OPTIONAL)}.")] = False,
    folder: Annotated[Path | None, typer.Option(help="Keep the model and its graphs here.")] = None,
    began: Annotated[float, typer.Option(hidden=True)] = 0.0,
) -> None:
    """Print the seconds of each start."""
    if began:
        assert folder is not None
        print(json.dumps(start(folder, length, began, lean)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        kept = Path(temporary) if folder is None else folder
        if not (kept / "model").exists():
            from loop import random_model

            saved = random_model(model, length)
            saved.generation_config.eos_token_id = None
            saved.save_pretrained(kept / "model")
        table: list[dict[str, float]] = []
        for _ in range(starts + (not (kept / "graphs").exists())):
            shutil.rmtree(kept / "inductor", ignore_errors=True)
            command = [
                sys.executable,
                __file__,
                "--length",
                str(length),
                "--folder",
                str(kept),
                "--began",
                str(time.time()),
            ]
            environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{kept}/inductor"}
            command += ["--lean"] if lean else []
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr)
            table.append(json.loads(done.stdout.splitlines()[-1]))
        print("stage", *(f"start {index}" for index in range(len(table))), sep="\t")
        for stage in STAGES:
            print(stage, *(f"{one[stage]:.2f}" for one in table), sep="\t")


if __name__ == "__main__":
    typer.run(main)
