"""The demo model shipped with the package.

A tiny causal language model with alternating sliding-window and full attention,
trained to recall codes stated far back in its prompt. A cache that loses or
misplaces a key answers with the wrong digits, so it is a quick end-to-end check
of any exported program. The task itself is in :mod:`exportable_cache.demo.task`.

Importing this module loads neither torch nor transformers.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["demo_path"]


def demo_path() -> Path:
    """Return the folder of the demo model, ready for ``from_pretrained``."""
    return Path(__file__).resolve().parent / "model"
