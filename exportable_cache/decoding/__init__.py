"""Sampling, decode loops, speculative decoding, continuous batching, beams, and streaming text.

Names are resolved on first use, because completions by the native runner do without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..generation.constraint import Constraint as Constraint
    from ..generation.loop import check_steps_per_launch as check_steps_per_launch
    from ..generation.loop import generate_tokens as generate_tokens
    from ..generation.sampling import Sampler as Sampler
    from ..generation.sampling import Sampling as Sampling
    from ..generation.sampling import SamplingSettings as SamplingSettings
    from ..generation.sampling import draw as draw
    from ..generation.sampling import penalise as penalise
    from ..generation.sampling import sample as sample
    from ..generation.sampling import sorted_distribution as sorted_distribution
    from ..generation.sampling_options import check_seed as check_seed
    from ..generation.speculative import Draft as Draft
    from ..generation.speculative import DraftModel as DraftModel
    from ..generation.speculative import PromptLookup as PromptLookup
    from ..generation.speculative import Proposal as Proposal
    from ..generation.speculative import SpeculationStatistics as SpeculationStatistics
    from ..generation.speculative import TrainedDraft as TrainedDraft
    from ..generation.speculative import check_can_rewind as check_can_rewind
    from ..generation.speculative import generate_speculative as generate_speculative
    from ..generation.text import encode_prompt as encode_prompt
    from ..generation.text import stream_text as stream_text
    from ..generation.token_text import StopStrings as StopStrings
    from ..generation.token_text import TextStream as TextStream
    from .batch_completion import BatchCompleter as BatchCompleter
    from .batching import ContinuousBatch as ContinuousBatch
    from .batching import Request as Request
    from .beam import Hypothesis as Hypothesis
    from .beam import beam_search as beam_search
    from .completion import Completion as Completion
    from .completion import CompletionOptions as CompletionOptions
    from .completion import Piece as Piece
    from .native_completion import NativeCompleter as NativeCompleter
    from .session_completion import Completer as Completer

_MODULES = {
    "generation.constraint": ("Constraint",),
    "generation.loop": ("check_steps_per_launch", "generate_tokens"),
    "generation.sampling": (
        *("Sampler", "Sampling", "SamplingSettings"),
        *("draw", "penalise", "sample", "sorted_distribution"),
    ),
    "generation.sampling_options": ("check_seed",),
    "generation.speculative": (
        *("Draft", "DraftModel", "PromptLookup", "Proposal", "SpeculationStatistics", "TrainedDraft"),
        *("check_can_rewind", "generate_speculative"),
    ),
    "generation.text": ("encode_prompt", "stream_text"),
    "generation.token_text": ("StopStrings", "TextStream"),
    "decoding.batch_completion": ("BatchCompleter",),
    "decoding.batching": ("ContinuousBatch", "Request"),
    "decoding.beam": ("Hypothesis", "beam_search"),
    "decoding.completion": ("Completion", "CompletionOptions", "Piece"),
    "decoding.native_completion": ("NativeCompleter",),
    "decoding.session_completion": ("Completer",),
}
_EXPORTS = {name: f"exportable_cache.{module}" for module, names in _MODULES.items() for name in names}

__all__ = [*_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
