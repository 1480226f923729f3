"""The tokenizer beside a model, read without the model's code."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from transformers import AutoTokenizer

from ..errors import InputError, first_line
from .places import Place, file_in, place_of, quiet

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


def load_tokenizer(path: str | os.PathLike) -> PreTrainedTokenizerBase | None:
    """The tokenizer of `demo`, a local folder or a hub id, or None if it has none.

    Raises:
        InputError: If there is no such folder or hub id, or its tokenizer cannot be read.
    """
    with quiet():
        return tokenizer_of(place_of(path))


def tokenizer_of(place: Place) -> PreTrainedTokenizerBase | None:
    if all(file_in(place, name) is None for name in _TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(place.path, local_files_only=place.local, trust_remote_code=False)
    except Exception as error:  # tokenizer files are read by several libraries, each with errors of its own
        raise InputError(
            f"cannot read the tokenizer of {place.source!r}: {first_line(error)}; "
            "correct its files, or remove them to go without"
        ) from error
