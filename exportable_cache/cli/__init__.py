"""The command line. Starting it, its help and completion import neither torch nor transformers."""

from __future__ import annotations


def main() -> None:
    """Run `exportable-cache`."""
    import os
    import signal
    import sys

    # Before torch starts its threads, because with the default policy idle OpenMP threads spin. ExecuTorch uses them
    # for attention and a second pool for everything else, so a decoded token took 1.8x as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    from ..common.process.tuning import collect_seldom

    collect_seldom()
    from . import app as module
    from .command import output_checked

    if sys.stderr is None:
        # Closed (`2>&-`): run without messages.
        sys.stderr = open(os.devnull, "w")
    if sys.stdout is None:
        # Closed by the caller (`>&-`).
        sys.stderr.write("error: stdout must be open to write the output; redirect it to a file, or to /dev/null\n")
        sys.exit(2)
    # Replace characters that the terminal's encoding lacks, because a model may generate any.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    # As an exception, so that half-written files are removed on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with output_checked():
        named = sys.argv[1] if len(sys.argv) > 1 else ""
        app = module.application(named) if named in module.COMMANDS else module.app
        app(prog_name="exportable-cache")
