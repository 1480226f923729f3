"""Python code in a process of its own, forked from a server that imported torch and transformers once."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import types
from multiprocessing.context import ForkServerContext
from pathlib import Path

#: Only libraries: code must be able to check that this package is not imported.
PRELOADED = (
    *("torch", "torch.export", "torch._dynamo", "torch.distributed.tensor"),
    "transformers.models.gemma3.modeling_gemma3",
    # What `torch.export.load` imports, which takes half a second.
    "networkx",
)

#: Code of the command line, whose arguments are those of `run_python`.
COMMAND_LINE = "from exportable_cache.cli import main; main()"


def forkserver() -> ForkServerContext:
    """Return the context of the server. A process has one, which keeps the modules that it started with."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def run_python(
    code: str,
    *arguments: object,
    cwd: Path | str | None = None,
    stdout: Path | str | None = None,
    stderr: Path | str | None = None,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run code as `python -c` does, without the time to import torch.

    Not for code that looks at which libraries are imported, that sets variables which these read when they are
    imported, or whose end matters: finalizers of the interpreter do not run.

    Args:
        code: What runs as `__main__`.
        arguments: `sys.argv[1:]`, as text.
        cwd: Working directory, default that of the caller.
        stdout: File to write to, such as /dev/full. The result has no text of it then.
        stderr: The same for stderr.
        timeout: Seconds until the process is killed.

    Returns:
        Exit code, and stdout and stderr as text.

    Raises:
        subprocess.TimeoutExpired: The process was killed.
    """
    argv = ["-c", *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        streams = [str(stdout or Path(folder, "stdout")), str(stderr or Path(folder, "stderr"))]
        arguments = (code, argv, str(cwd or os.getcwd()), dict(os.environ), streams)
        process = forkserver().Process(target=_run, args=arguments)
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(argv, timeout)
        written = [
            Path(stream).read_text(errors="replace") if given is None else ""
            for stream, given in zip(streams, (stdout, stderr), strict=True)
        ]
    return subprocess.CompletedProcess(argv, process.exitcode, *written)


def _run(code: str, argv: list[str], cwd: str, environment: dict[str, str], streams: list[str]) -> None:
    for number, stream in enumerate(streams, start=1):
        file = os.open(stream, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:], sys.path[0] = argv, ""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), main.__dict__)
