"""Static KV caches for torch.export and torch.compile, and exporters that take a model and its cache to a device.

Names are resolved on first use, so importing the package is fast and needs no backend. If it is imported before torch,
it sets `OMP_WAIT_POLICY=PASSIVE`, unless the variable is set.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .common.version import __version__

_EXPORTS = {
    "ExportableCache": "exportable_cache.models.cache_factory",
    "ExportableModelForCausalLM": "exportable_cache.pipeline.pretrained",
    "ExportableModelForImageTextToText": "exportable_cache.pipeline.pretrained",
    "ExportableModelForSeq2SeqLM": "exportable_cache.pipeline.pretrained",
    "ExportableModelForSpeechSeq2Seq": "exportable_cache.pipeline.pretrained",
    "Session": "exportable_cache.session.session",
    "export": "exportable_cache.pipeline.export",
    "load": "exportable_cache.session.session",
}

__all__ = ["__version__", *_EXPORTS]

# Before torch loads OpenMP, because OpenMP reads it once. By default, waiting threads spin, and next to one busy
# process a compiled step took up to 20 times as long.
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if TYPE_CHECKING:
    from .models.cache_factory import ExportableCache as ExportableCache
    from .pipeline.export import export as export
    from .pipeline.pretrained import ExportableModelForCausalLM as ExportableModelForCausalLM
    from .pipeline.pretrained import ExportableModelForImageTextToText as ExportableModelForImageTextToText
    from .pipeline.pretrained import ExportableModelForSeq2SeqLM as ExportableModelForSeq2SeqLM
    from .pipeline.pretrained import ExportableModelForSpeechSeq2Seq as ExportableModelForSpeechSeq2Seq
    from .session.session import Session as Session
    from .session.session import load as load


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .common.process.quiet import known_messages_hidden

    # Hide messages of torchao, which some of these modules import.
    with known_messages_hidden():
        return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
