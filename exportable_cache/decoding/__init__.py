"""From logits to tokens to text: sampling, the decode loop, and streaming detokenisation."""

from .loop import generate_tokens
from .sampling import Sampling, check_seed, keep_top_k, keep_top_p, sample
from .text import StopStrings, TextStream, encode_prompt, stream_text

__all__ = [
    "Sampling",
    "StopStrings",
    "TextStream",
    "check_seed",
    "encode_prompt",
    "generate_tokens",
    "keep_top_k",
    "keep_top_p",
    "sample",
    "stream_text",
]
