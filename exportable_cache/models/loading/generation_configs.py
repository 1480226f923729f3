"""What a checkpoint says of generation: a `generation_config.json` that can be read, and the tokens that end a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig, PreTrainedConfig

from ...errors import InputError, first_line
from .location import Place, file_in

if TYPE_CHECKING:
    from gguf import GGUFReader

FILE = "generation_config.json"
#: What a GGUF's own fields call tokens that end a text, a turn, or a message to a tool.
_GGUF_ENDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
#: Texts by which llama.cpp knows such tokens where no field names them (`llama-vocab.cpp`).
_GGUF_END_TEXTS = frozenset(
    "<|eot_id|> <|eom_id|> <|im_end|> <|end|> <|return|> <|call|> <end_of_turn> <turn|> <|endoftext|> <|end_of_text|> "
    "<EOT> _<EOT> [EOT] <end_of_utterance> <\uff5cend\u2581of\u2581sentence\uff5c>".split()
)
#: Types of tokens in a GGUF that are no text: control tokens and those that a user has added.
_GGUF_CONTROL = (3, 4)


def check_generation_config(place: Place) -> None:
    """Refuse a `generation_config.json` that cannot be read: transformers would go on without it, and say nothing.

    Raises:
        InputError: If it is no JSON object, or transformers refuses a value.
    """
    path = file_in(place, FILE)
    if path is None:
        return
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"cannot read {FILE} of {place.source!r}: {first_line(error)}; download it again, or remove it to go by "
            "config.json"
        ) from error
    if not isinstance(fields, dict):
        raise InputError(
            f"{FILE} of {place.source!r} must be a JSON object, got {json.dumps(fields)[:80]}; correct it, or remove "
            "it to go by config.json"
        )
    # Each for itself first, because errors do not say of which field they are.
    for part in (*({name: value} for name, value in fields.items()), fields):
        try:
            GenerationConfig.from_dict(dict(part))
        except Exception as error:  # fields are checked with errors of several classes
            what = "" if part is fields else f"{next(iter(part))}: "
            reason = f"cannot read {FILE} of {place.source!r}: {what}{first_line(error)}; correct it"
            raise InputError(reason) from error


def named_ends(place: Place, config: GenerationConfig | None) -> Any:
    """Return the end tokens that a checkpoint names elsewhere than in its generation config; None if there are none to
    add.

    A generation config that names some is not added to, except a GGUF file's, which has room for one.
    """
    named = None if config is None else config.eos_token_id
    if place.gguf is not None:
        known = named if isinstance(named, (list, tuple)) else [] if named is None else [named]
        ends = list(dict.fromkeys([*known, *_gguf_ends(Path(place.path) / place.gguf)]))
        return ends[0] if len(ends) == 1 else ends or None
    if named is not None or config is None:
        return None
    fields, _ = PreTrainedConfig.get_config_dict(place.path, **place.options)
    nested = fields.get("text_config")
    for one in (fields, nested if isinstance(nested, dict) else {}):
        if one.get("eos_token_id") is not None:
            return one["eos_token_id"]
    return None


def _gguf_ends(path: Path) -> list[int]:
    """Return the tokens of a GGUF file that end a text or a turn, as llama.cpp finds them."""
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
