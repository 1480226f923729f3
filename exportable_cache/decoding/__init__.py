"""From logits to tokens to text: sampling, the decode loop, and streaming detokenisation."""

from .batching import ContinuousBatch, Request
from .beam import Hypothesis, beam_search
from .chooser import Chooser
from .launches import check_steps_per_launch
from .loop import generate_tokens
from .sampling import Sampling, SamplingSettings, check_seed, draw, penalise, sample, sorted_distribution
from .speculative import (
    Draft,
    DraftModel,
    PromptLookup,
    Proposal,
    SpeculationStatistics,
    check_can_rewind,
    generate_speculative,
)
from .text import StopStrings, TextStream, encode_prompt, stream_text

__all__ = [
    "Chooser",
    "ContinuousBatch",
    "Draft",
    "DraftModel",
    "Hypothesis",
    "PromptLookup",
    "Proposal",
    "Request",
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
