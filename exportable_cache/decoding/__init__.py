"""Sampling, decode loops, speculative decoding, continuous batching, beams, and streaming text."""

from ..generation.constraint import Constraint
from ..generation.loop import generate_tokens
from ..generation.multi_step import check_steps_per_launch
from ..generation.sampling import (
    Sampler,
    Sampling,
    SamplingSettings,
    draw,
    penalise,
    sample,
    sorted_distribution,
)
from ..generation.sampling_options import check_seed
from ..generation.speculative import (
    Draft,
    DraftModel,
    PromptLookup,
    Proposal,
    SpeculationStatistics,
    check_can_rewind,
    generate_speculative,
)
from ..generation.text import encode_prompt, stream_text
from ..generation.token_text import StopStrings, TextStream
from .batching import ContinuousBatch, Request
from .beam import Hypothesis, beam_search
from .completion import Completer, Completion, CompletionOptions, Piece

__all__ = [
    "Completer",
    "Completion",
    "CompletionOptions",
    "Constraint",
    "ContinuousBatch",
    "Draft",
    "DraftModel",
    "Hypothesis",
    "Piece",
    "PromptLookup",
    "Proposal",
    "Request",
    "Sampler",
    "Sampling",
    "StopStrings",
    "TextStream",
    "SamplingSettings",
    "SpeculationStatistics",
    "beam_search",
    "check_can_rewind",
    "check_seed",
    "check_steps_per_launch",
    "draw",
    "encode_prompt",
    "generate_speculative",
    "generate_tokens",
    "penalise",
    "sample",
    "sorted_distribution",
    "stream_text",
]
