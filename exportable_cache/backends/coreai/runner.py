"""Run a program in Core AI's runtime, which its package has for Macs and Linux, and try its calls beforehand.

A trial is another process, because the runtime ends its own where it fails.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...errors import BundleError, UnsupportedModelError, first_line
from ...program.methods import smallest_inputs
from .convert import output_names

if TYPE_CHECKING:
    from ...program.program import Program
    from ..base import ProgramDescription

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
        for name, inputs, has_state in calls:
            print(name, flush=True)
            await model.load_function(name)(zeros(inputs), *([kept] if has_state else []))

asyncio.run(main())
"""
_Described = dict[str, tuple[list[int], str]]


class CoreAIRunner:
    """Runs the functions of a program, all over the same states.

    The runtime's calls are coroutines. They run in an event loop of this runner's own thread, because callers may have
    an event loop themselves, as notebooks do.

    Args:
        path: The `.aimodel`.
        description: What it contains.

    Raises:
        BundleError: If the runtime refuses the file, or it lacks a method.
    """

    def __init__(self, path: Path, description: ProgramDescription) -> None:
        from coreai.authoring import AIModelAsset
        from coreai.runtime import NDArray

        # The runtime crashes without it.
        if not (path / "main.mlirb").is_file():
            raise BundleError(f"{path} must have a file main.mlirb, and has none; export the model again")
        self.methods = description.methods
        self._array = NDArray
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=_serve, args=(self._loop,), daemon=True, name="Core AI").start()
        # Off Macs, the runtime's form of the program is in a temporary folder for as long as the model is open.
        opened = AsyncExitStack()
        self._end = weakref.finalize(self, _close, self._loop, opened)
        try:
            model = self._wait(opened.enter_async_context(AIModelAsset.load(path).executable()))
            self._functions = {name: model.load_function(name) for name in self.methods}
        except Exception as error:  # the runtime raises many classes
            raise BundleError(
                f"Core AI's runtime cannot load {path}: {first_line(error)}; export the model again"
            ) from error
        #: Name of a cache tensor -> its array, which steps write in place.
        self._states: dict[str, Any] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        #: Copies of the states that were given out since the last step. The next step begins with their contents.
        self._given: dict[str, torch.Tensor] | None = None
        for index, layer in enumerate(description.layers):
            for name, tensor in layer["tensors"].items():
                if name == "cumulative_length":
                    continue
                zeros = torch.zeros(tensor["shape"], dtype=getattr(torch, tensor["dtype"]))
                self._states[f"layers.{index}.{name}"] = NDArray(_numpy(zeros))
                self._dtypes[f"layers.{index}.{name}"] = zeros.dtype

    @property
    def state(self) -> Mapping[str, torch.Tensor]:
        """See `HasState.state`. The tensors are copies, because the runtime moves its arrays and shares no memory."""
        if self._given is None:
            # Lengths of encoders are int32 in a program.
            self._given = {name: _tensor(array).clone().to(self._dtypes[name]) for name, array in self._states.items()}
        return self._given

    @torch.no_grad()
    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run a method, see `Runner.run`."""
        specs = self.methods[method].inputs
        arrays = {spec.name: self._array(_numpy(tensor)) for spec, tensor in zip(specs, inputs, strict=True)}
        if self._given is not None:
            self._states = {name: self._array(_numpy(tensor)) for name, tensor in self._given.items()}
            self._given = None
        # The runtime refuses states that a function does not have, such as that of an encoder.
        states = {name.replace(".", "_"): array for name, array in self._states.items()}
        given = (arrays, states) if self.methods[method].is_step else (arrays,)
        try:
            results = self._wait(self._functions[method](*given))
        except RuntimeError as error:
            raise BundleError(
                f"Core AI's runtime cannot run {method!r}: {first_line(error)}; export for another target"
            ) from error
        outputs = tuple(_tensor(results[name]).clone() for name in output_names(self.methods[method]))
        return outputs[0] if self.methods[method].is_step else outputs

    def close(self) -> None:
        """Release the program, its temporary folder and the thread. Calling it again has no effect."""
        self._end()

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run an event loop until it is stopped."""
    loop.run_forever()
    loop.close()


def _close(loop: asyncio.AbstractEventLoop, opened: AsyncExitStack) -> None:
    """Release a model, and end the thread of its event loop."""
    try:
        asyncio.run_coroutine_threadsafe(opened.aclose(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)


def _numpy(tensor: torch.Tensor) -> Any:
    """Return an array over the same memory; int64 becomes int32, which is what the converter makes of such inputs."""
    if tensor.dtype == torch.int64:
        tensor = tensor.to(torch.int32)
    tensor = tensor.contiguous()
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    import ml_dtypes

    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def _tensor(array: Any) -> torch.Tensor:
    """Return a tensor with the contents of a `coreai.runtime.NDArray`; off Macs it has memory of its own."""
    if array.dtype == "bfloat16":
        return torch.from_numpy(array.numpy().view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array.numpy())


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
            calls.append((name, _described(zip(method.input_names, inputs, strict=True)), method.is_step))
    module = next(program.modules[name] for name, method in program.methods.items() if method.is_step)
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
