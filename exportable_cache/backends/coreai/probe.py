"""Call every function of a program once in another process, because the runtime ends its own where it fails."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...errors import UnsupportedModelError
from ...program.methods import smallest_inputs

if TYPE_CHECKING:
    from ...program.program import Program

#: It imports no torch, so that it starts in a second.
_CHILD = """
import asyncio, json, sys
import ml_dtypes, numpy
from coreai.authoring import AIModelAsset
from coreai.runtime import NDArray

path, calls, states = json.load(sys.stdin)

def zeros(described):
    return {
        name: NDArray(numpy.zeros(shape, getattr(ml_dtypes, dtype, None) or dtype))
        for name, (shape, dtype) in described.items()
    }

async def main():
    async with AIModelAsset.load(path).executable() as model:
        kept = zeros(states)
        for name, inputs in calls:
            print(name, flush=True)
            await model.load_function(name)(zeros(inputs), kept)

asyncio.run(main())
"""
_Described = dict[str, tuple[list[int], str]]


def check_calls(path: Path, program: Program) -> None:
    """Call each method with its smallest inputs and with those it was traced with.

    Args:
        path: The `.aimodel`.
        program: The program that it was made from.

    Raises:
        UnsupportedModelError: If the runtime crashes, or refuses a call.
    """
    calls = []
    for name, method in program.methods.items():
        smallest = smallest_inputs(method, program.batch_size, program.cache.device)
        for inputs in (*smallest, program.example_inputs(method)):
            calls.append((name, _described(zip(method.input_names, inputs, strict=True))))
    module = next(iter(program.modules.values()))
    states = _described((name, tensor) for name, tensor in module.named_buffers() if name.startswith("layers_"))
    done = subprocess.run(
        [sys.executable, "-c", _CHILD],
        input=json.dumps([str(path), calls, states]),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        name = next((line for line in reversed(done.stdout.splitlines()) if line in program.methods), "")
        crash = f"ends with {signal.Signals(-done.returncode).name}" if done.returncode < 0 else _last_line(done.stderr)
        raise UnsupportedModelError(
            f"Core AI's runtime cannot run method {name!r} of {type(program.model).__name__}: {crash}; export for "
            "another target"
        )


def _described(tensors: Iterable[tuple[str, torch.Tensor]]) -> Mapping[str, Any]:
    described: _Described = {}
    for name, tensor in tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        described[name] = list(tensor.shape), "int32" if dtype == "int64" else dtype
    return described


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason"])[-1][:200]
