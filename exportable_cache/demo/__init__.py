"""The demo model that ships with the package.

It is a tiny causal language model with alternating sliding-window and full attention, trained to recall codes from far
back in its prompt. A cache that loses or misplaces a key gives wrong digits, so the model is a quick end-to-end check
of an exported program. The task is in `exportable_cache.demo.task`.

Importing this module loads neither torch nor transformers.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["demo_path"]


def demo_path() -> Path:
    """Return the folder of the demo model, for `from_pretrained`."""
    return Path(__file__).resolve().parent / "model"
