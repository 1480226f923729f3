"""Loading of a model's tokenizer, without the model's code."""

from __future__ import annotations

import os
from importlib import util
from typing import TYPE_CHECKING

from transformers import AutoTokenizer

from ...errors import InputError
from ..tokenizers.text import tokenizer_errors
from .location import Location, file_in, locate, quiet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Without one of these files AutoTokenizer creates an empty tokenizer of the model's type.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)
_SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_PROBE = "the code of amber is 4821"


def load_tokenizer(path: str | os.PathLike) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of `demo`, a local folder or a hub id; None if it has no tokenizer.

    Raises:
        InputError: If there is no such folder or hub id, or its tokenizer cannot be read.
    """
    with quiet():
        return tokenizer_of(locate(path))


def has_tokenizer(path: str | os.PathLike) -> bool:
    """Return True if `demo`, a folder, a GGUF file or a hub id has tokenizer files; they are not read."""
    with quiet():
        return _has_files(locate(path))


def _has_files(location: Location) -> bool:
    return location.gguf is not None or any(file_in(location, name) is not None for name in _TOKENIZER_FILES)


def tokenizer_of(location: Location) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer at a location; None if there is no tokenizer."""
    if not _has_files(location):
        return None
    with tokenizer_errors(
        f"cannot read the tokenizer of {location.source!r}", "correct its files, or remove them to continue without it"
    ):
        tokenizer = AutoTokenizer.from_pretrained(location.path, **location.options)
        _check_pieces(location, tokenizer)
    return tokenizer


def _check_pieces(location: Location, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a tokenizer made from sentencepiece's file alone splits text as sentencepiece does.

    Without a tokenizer_config.json transformers does not know the class, and may assume another model's settings.
    """
    path = next((found for name in _SENTENCEPIECE_FILES if (found := file_in(location, name)) is not None), None)
    if path is None or file_in(location, "tokenizer.json") is not None or util.find_spec("sentencepiece") is None:
        return
    from sentencepiece import SentencePieceProcessor

    try:
        model = SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError):
        # Because some checkpoints use the same file name for tiktoken's format.
        return
    ids = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
    pieces, ours = model.encode(_PROBE, out_type=str), tokenizer.convert_ids_to_tokens(ids)
    if pieces != ours:
        raise InputError(
            f"the tokenizer of {location.source!r} was read from {path.name} as a {type(tokenizer).__name__}, which "
            f"splits {_PROBE!r} into {ours[:4]}..., while sentencepiece splits it into {pieces[:4]}...; add its "
            "tokenizer_config.json or tokenizer.json, or pass tokenizer="
        )
