"""Generation settings of checkpoints: checks of `generation_config.json`, and the end tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig, PreTrainedConfig

from ...errors import InputError, first_line
from .location import Location, file_in

if TYPE_CHECKING:
    from gguf import GGUFReader

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
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"cannot read {FILE} of {location.source!r}: {first_line(error)}; download it again, or remove it to use "
            "config.json"
        ) from error
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
    by_text = [index for index, text in enumerate(texts) if text in _GGUF_END_TEXTS and _is_control(types, index)]
    return list(dict.fromkeys([*ends, *by_text]))


def _strings(reader: GGUFReader, name: str) -> list[Any]:
    field = reader.fields.get(f"tokenizer.ggml.{name}")
    return [] if field is None else list(field.contents())


def _is_control(types: list[Any], index: int) -> bool:
    return index >= len(types) or types[index] in _GGUF_CONTROL
