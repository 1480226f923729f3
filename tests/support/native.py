"""The native runner in tests: where its library is, and code in a process that has not loaded ExecuTorch's bindings."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from exportable_cache_runner.library import VARIABLE, found_library


def require_native() -> None:
    """Skip the test where the library of the native runner is not installed."""
    if not os.environ.get(VARIABLE) and found_library() is None:
        pytest.skip("the library of the native runner is not installed; exportable-cache native build")


def run_native(code: str, runtime: str = "native", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in another process, with the native runner."""
    environment = {**os.environ, "EXPORTABLE_CACHE_RUNTIME": runtime, **variables}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
