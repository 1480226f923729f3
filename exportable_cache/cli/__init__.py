"""The command line. Starting it, asking for help and completing a word import neither torch nor transformers."""

from __future__ import annotations


def main() -> None:
    """Entry point of `exportable-cache`."""
    import os
    import signal
    import sys

    # Before torch starts its threads. ExecuTorch's attention runs on torch's OpenMP threads and everything else on a
    # pool of its own: with the default policy the idle ones spin beside those at work, and a decoded token was measured
    # to take 1.8x as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    from ..common.process.tuning import collect_seldom

    collect_seldom()
    from .app import app
    from .output.streams import output_checked

    if sys.stderr is None:
        # Closed (`2>&-`): remarks that nobody reads are no reason to stop.
        sys.stderr = open(os.devnull, "w")
    if sys.stdout is None:
        # Closed by who started this (`>&-`).
        sys.stderr.write(
            "error: stdout is closed, and there is nowhere to write the output; send it to a file, or to /dev/null\n"
        )
        sys.exit(2)
    # A model may say what the terminal's encoding has no character for; the answer goes on.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    # As an exception, so that half-written files are removed on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with output_checked():
        app(prog_name="exportable-cache")
