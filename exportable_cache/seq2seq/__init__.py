"""Encoder-decoder models: the encoder as a method, cross-attention layers that are written once per sequence."""

from .cache import ExportableEncoderDecoderCache
from .encoder import EncodeModule, Encoder, encoder_of
from .layout import encoder_decoder_layers
from .step import decoder_arguments, seq2seq_methods

__all__ = [
    "EncodeModule",
    "Encoder",
    "ExportableEncoderDecoderCache",
    "decoder_arguments",
    "encoder_decoder_layers",
    "encoder_of",
    "seq2seq_methods",
]
