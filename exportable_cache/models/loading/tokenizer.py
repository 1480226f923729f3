"""Loading of a model's tokenizer and of its generation settings with the end tokens, without the model's code."""

from __future__ import annotations

import json
import os
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig

from ...errors import InputError, first_line
from ..tokenizers.text import tokenizer_errors
from .location import Location, file_in, json_in, locate, quiet

if TYPE_CHECKING:
    from gguf import GGUFReader
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


FILE = "generation_config.json"
#: GGUF fields of the tokens that end a text, a turn, or a message to a tool.
_GGUF_ENDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
#: Texts of end tokens that llama.cpp recognises without a field (`llama-vocab.cpp`).
_GGUF_END_TEXTS = frozenset(
    "<|eot_id|> <|eom_id|> <|im_end|> <|end|> <|return|> <|call|> <end_of_turn> <turn|> <|endoftext|> <|end_of_text|> "
    "<EOT> _<EOT> [EOT] <end_of_utterance> <\uff5cend\u2581of\u2581sentence\uff5c>".split()
)
#: GGUF token types of control tokens and of tokens that a user added.
_GGUF_CONTROL = (3, 4)


def check_generation_config(location: Location) -> None:
    """Check that `generation_config.json` can be read, because transformers silently ignores one that cannot.

    Raises:
        InputError: If it is not a JSON object, or transformers rejects a value.
    """
    path = file_in(location, FILE)
    if path is None:
        return
    fields = json_in(path, location, "download it again, or remove it to use config.json")
    if not isinstance(fields, dict):
        raise InputError(
            f"{FILE} of {location.source!r} must be a JSON object, got {json.dumps(fields)[:80]}; correct it, or "
            "remove it to use config.json"
        )
    # Each field is tried alone first, because errors do not name their field.
    for part in (*({name: value} for name, value in fields.items()), fields):
        try:
            GenerationConfig.from_dict(dict(part))
        except Exception as error:  # fields are checked with errors of several classes
            what = "" if part is fields else f"{next(iter(part))}: "
            reason = f"cannot read {FILE} of {location.source!r}: {what}{first_line(error)}; correct it"
            raise InputError(reason) from error


def stored_generation_config(location: Location) -> GenerationConfig:
    """Return the generation config that the model of a checkpoint gets, as far as it names end tokens.

    Raises:
        InputError: See `check_generation_config`.
    """
    check_generation_config(location)
    path = file_in(location, FILE)
    fields = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
    config = GenerationConfig.from_dict(fields)
    ends = eos_tokens_of(location, config)
    if ends is not None:
        config.eos_token_id = ends
    return config


def eos_tokens_of(location: Location, config: GenerationConfig | None) -> Any:
    """Return end tokens that are missing from a checkpoint's generation config, or None if none are missing.

    A generation config that names end tokens is complete, except that of a GGUF file, which holds only one.
    """
    named = None if config is None else config.eos_token_id
    if location.gguf is not None:
        known = named if isinstance(named, (list, tuple)) else [] if named is None else [named]
        ends = list(dict.fromkeys([*known, *_gguf_eos_tokens(Path(location.path) / location.gguf)]))
        return ends[0] if len(ends) == 1 else ends or None
    if named is not None or config is None:
        return None
    fields, _ = PreTrainedConfig.get_config_dict(location.path, **location.options)
    nested = fields.get("text_config")
    for one in (fields, nested if isinstance(nested, dict) else {}):
        if one.get("eos_token_id") is not None:
            return one["eos_token_id"]
    return None


def _gguf_eos_tokens(path: Path) -> list[int]:
    """Return the end tokens of a GGUF file, found as llama.cpp finds them."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    ends = [int(reader.fields[name].contents()) for name in _GGUF_ENDS if name in reader.fields]
    texts, types = (_strings(reader, "tokens"), _strings(reader, "token_type"))
    by_text = [
        index
        for index, text in enumerate(texts)
        if text in _GGUF_END_TEXTS and (index >= len(types) or types[index] in _GGUF_CONTROL)
    ]
    return list(dict.fromkeys([*ends, *by_text]))


def _strings(reader: GGUFReader, name: str) -> list[Any]:
    field = reader.fields.get(f"tokenizer.ggml.{name}")
    return [] if field is None else list(field.contents())
