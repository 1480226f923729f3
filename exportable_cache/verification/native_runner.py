"""Runner of a bundle in the native runner, for verification: in a subprocess, because this one runs the model.

The native runner chooses the method for each chunk itself, by the rules of the session.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file

from ..bundle.files import CheckedBundle
from ..common.process.limited_child import ERROR, receive, send
from ..errors import BundleError
from ..models.lora import WRITE_ADAPTER
from ..session.native import NotNative, check_native

if TYPE_CHECKING:
    from types import TracebackType

    from ..bundle.bundle import Bundle
    from ..program.methods import ProgramMethod

_CHILD = (
    "import sys; sys.path[:] = sys.argv[1:-1]; from exportable_cache.verification.native_process import main; main()"
)
_MOST_BYTES = 1 << 32
#: Inputs of the steps that it runs.
_INPUTS = ("input_ids", "input_pos")


class NativeProcess:
    """A bundle's program in the native runner.

    Args:
        bundle: A bundle that is complete on disk and whose files are checked.

    Raises:
        NotNative: If the native runner does not run it.
    """

    def __init__(self, bundle: Bundle) -> None:
        self.methods: Mapping[str, ProgramMethod] = bundle.manifest.description().methods
        if bundle.manifest.target != "executorch":
            # Engines are verified in torch's runtime, which knows how they multiply.
            raise NotNative
        check_native(CheckedBundle.read(bundle.path), text=False)
        # Attention of ExecuTorch's wheel calls MKL in each of the runtime's threads.
        variables = {"MKL_NUM_THREADS": "1", **os.environ}
        # The inputs of `write_adapter` are two for each layer, and those of no step.
        steps = [method for name, method in self.methods.items() if name != WRITE_ADAPTER]
        names = {one.name for method in steps for one in method.inputs}
        if not names <= set(_INPUTS):
            raise NotNative(f"its methods take {', '.join(sorted(names - set(_INPUTS)))}")
        self._state: dict[str, torch.Tensor] | None = None
        self._vocabulary = bundle.manifest.logits_size or bundle.manifest.vocab_size
        command = [sys.executable, "-c", _CHILD, *sys.path, str(bundle.path)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=variables
        )
        try:
            self._reply()
        except BundleError as error:
            self.close()
            raise NotNative(str(error)) from error

    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor:
        """Feed tokens at their position, see `Runner.run`.

        Raises:
            BundleError: If the native runner fails.
        """
        self._state = None
        ids, position = inputs
        assert self._process.stdin is not None
        send(self._process.stdin, {"position": int(position[0])}, ids[0].contiguous().numpy().tobytes())
        return torch.frombuffer(bytearray(self._reply()), dtype=torch.float32).reshape(1, self._vocabulary)

    def state_tensor(self, name: str) -> torch.Tensor | None:
        """Return the filled slots of a tensor of the cache, see `GivesTensors.state_tensor`."""
        if self._state is None:
            assert self._process.stdin is not None
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "state.safetensors"
                send(self._process.stdin, {"save": str(path)})
                try:
                    self._reply()
                    self._state = load_file(path)
                except BundleError:
                    # It does not save the state of every bundle.
                    self._state = {}
        return self._state.get(name)

    def _reply(self) -> bytes:
        assert self._process.stdout is not None
        try:
            reply, data = receive(self._process.stdout, _MOST_BYTES)
        except (EOFError, OSError, ValueError):
            raise BundleError(
                f"the native runner ended with {self._process.wait()}; verify with EXPORTABLE_CACHE_RUNTIME=torch"
            ) from None
        if ERROR in reply:
            raise BundleError(str(reply[ERROR]))
        return data

    def close(self) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> NativeProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
