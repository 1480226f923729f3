"""The tokenizer beside a model, read without the model's code."""

from __future__ import annotations

import os
from importlib import util
from typing import TYPE_CHECKING

from transformers import AutoTokenizer

from ...errors import InputError
from ..tokenizers.text import tokenizer_errors
from .location import Place, file_in, place_of, quiet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Without one of these AutoTokenizer makes up an empty tokenizer of the model's type.
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
    """The tokenizer of `demo`, a local folder or a hub id, or None if it has none.

    Raises:
        InputError: If there is no such folder or hub id, or its tokenizer cannot be read.
    """
    with quiet():
        return tokenizer_of(place_of(path))


def has_tokenizer(path: str | os.PathLike) -> bool:
    """Whether `demo`, a folder, a GGUF file or a hub id has the files of a tokenizer; they are not read."""
    with quiet():
        return _has_files(place_of(path))


def _has_files(place: Place) -> bool:
    return place.gguf is not None or any(file_in(place, name) is not None for name in _TOKENIZER_FILES)


def tokenizer_of(place: Place) -> PreTrainedTokenizerBase | None:
    if not _has_files(place):
        return None
    with tokenizer_errors(
        f"cannot read the tokenizer of {place.source!r}", "correct its files, or remove them to go without"
    ):
        tokenizer = AutoTokenizer.from_pretrained(place.path, **place.options)
        _check_pieces(place, tokenizer)
    return tokenizer


def _check_pieces(place: Place, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that was made from sentencepiece's file alone and cuts otherwise than sentencepiece: without a
    tokenizer_config.json, transformers does not know the class, and takes the model's prefix and marks for another's.
    """
    path = next((found for name in _SENTENCEPIECE_FILES if (found := file_in(place, name)) is not None), None)
    if path is None or file_in(place, "tokenizer.json") is not None or util.find_spec("sentencepiece") is None:
        return
    from sentencepiece import SentencePieceProcessor

    try:
        model = SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError):
        # The same name holds tiktoken's format in some checkpoints.
        return
    ids = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
    pieces, ours = model.encode(_PROBE, out_type=str), tokenizer.convert_ids_to_tokens(ids)
    if pieces != ours:
        raise InputError(
            f"the tokenizer of {place.source!r} was read from {path.name} as a {type(tokenizer).__name__}, which cuts "
            f"{_PROBE!r} into {ours[:4]}... where sentencepiece cuts it into {pieces[:4]}...; add the "
            "tokenizer_config.json or the tokenizer.json that belongs to it, or pass tokenizer="
        )
