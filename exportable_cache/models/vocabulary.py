"""Copies of a model with a reduced vocabulary: files of token ids, and the head.

The head computes logits of the kept tokens, and all others are minus infinity. Logits keep their width, so that
samplers, constraints and verification need no other ids.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import InputError, UnsupportedModelError
from .layers.specs import logits_size_of
from .weights import sharing_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .loading.loading import LoadedModel

#: File of a bundle with the ids of the kept tokens.
VOCABULARY_FILE = "vocabulary.json"
#: Largest file of ids in bytes; the ids of a million tokens take 8 MB.
_MOST_BYTES = 1 << 24
#: Digits of a token id.
_MOST_DIGITS = 9


def read_vocabulary(given: str | os.PathLike | Iterable[int]) -> tuple[int, ...]:
    """Return token ids, sorted.

    Args:
        given: The ids, or a file of ids: a JSON list, or numbers separated by spaces, commas or lines.

    Raises:
        InputError: If the file cannot be read, an id is not a whole number or occurs twice, or there is none.
    """
    wrong: list[object]
    if isinstance(given, (str, os.PathLike)):
        path = Path(given)
        try:
            path = path.expanduser()
            if not path.is_file() or path.stat().st_size > _MOST_BYTES:
                what = f"larger than {_MOST_BYTES:,} bytes" if path.is_file() else "no such file"
                raise InputError(f"vocabulary must be a file of token ids, got {path}: {what}; pass another")
            text = path.read_text(encoding="utf-8", errors="replace").strip()
        except (OSError, RuntimeError) as error:  # a home folder may be unknown
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"vocabulary cannot be read from {path}: {reason}; pass another file") from error
        if text[:1] == "[" and text[-1:] == "]":
            text = text[1:-1]
        words = text.replace(",", " ").split()
        wrong = [one for one in words if not (one.isascii() and one.isdigit() and len(one) <= _MOST_DIGITS)]
        ids = [] if wrong else [int(one) for one in words]
    elif isinstance(given, Iterable) and not isinstance(given, (bytes, bytearray, memoryview)):
        path, ids = None, list(given)
        wrong = [one for one in ids if not isinstance(one, int) or isinstance(one, bool)]
    else:
        path, ids, wrong = None, [], [given]
    where = "" if path is None else f" in {path}"
    if wrong:
        raise InputError(f"vocabulary must be token ids, got {str(wrong[0])[:40]!r}{where}; pass numbers from 0 on")
    if not ids:
        raise InputError(f"vocabulary must have at least one token id, got none{where}; pass the tokens to keep")
    ids.sort()
    twice = next((one for one, other in zip(ids, ids[1:], strict=False) if one == other), None)
    if twice is not None:
        raise InputError(f"vocabulary must have each token id once, got {twice} twice{where}; remove one")
    return tuple(ids)


@torch.no_grad()
def keep_tokens(model: PreTrainedModel, kept: Sequence[int], ends: Collection[int] = ()) -> PreTrainedModel:
    """Return a copy of a model, with shared weights, whose head has the rows of the kept tokens only.

    The embedding table stays whole, so that prompts may have any token. A tied head gets its own weights.

    Args:
        model: A causal LM whose head is a linear layer.
        kept: Token ids in ascending order, see `read_vocabulary`.
        ends: Tokens that end a generation, which must be kept.

    Raises:
        InputError: If an id is out of range, or an end token is missing.
        UnsupportedModelError: If the head is not a linear layer.
    """
    head: Any = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UnsupportedModelError(
            f"vocabulary is not supported for {type(model).__name__}, whose head is not one linear layer; leave it out"
        )
    rows = head.out_features
    out = next((one for one in kept if not 0 <= one < rows), None)
    if out is not None:
        raise InputError(
            f"vocabulary must have token ids from 0 to {rows - 1}, the logits of {type(model).__name__}, got {out}; "
            "use ids of this model's tokenizer"
        )
    missing = sorted(set(ends).difference(kept))
    if missing:
        raise InputError(
            f"vocabulary must have the tokens that end a generation, got ids without {', '.join(map(str, missing))}; "
            "add them"
        )
    model = sharing_weights(model)
    ids, device = torch.tensor(kept), head.weight.device
    fewer = nn.Linear(head.in_features, len(kept), bias=head.bias is not None, device="meta")
    fewer.weight = nn.Parameter(head.weight[ids.to(device)], requires_grad=False)
    if head.bias is not None:
        fewer.bias = nn.Parameter(head.bias[ids.to(device)], requires_grad=False)
    model.set_output_embeddings(fewer.train(head.training))
    row, absent = torch.zeros(rows, dtype=torch.int64), torch.full((rows,), -torch.inf)
    row[ids], absent[ids] = torch.arange(len(ids)), 0.0
    model.register_buffer("row_of_token", row.to(device), persistent=False)
    model.register_buffer("absent_tokens", absent.to(device), persistent=False)
    model.register_forward_hook(_spread)
    return model


def reduced(loaded: LoadedModel, kept: Sequence[int] | None, ends: Collection[int] = ()) -> LoadedModel:
    """Return a loaded model that computes logits of the kept tokens, see `keep_tokens`; the same model for None."""
    if kept is None:
        return loaded
    head = loaded.model.get_output_embeddings()
    weight = next((f"{name}.weight" for name, module in loaded.model.named_modules() if module is head), "")
    model = keep_tokens(loaded.model, kept, ends)
    integers = {name: one for name, one in loaded.integers.items() if name != weight}
    remark = f"kept the logits of {len(kept):,} of {logits_size_of(model):,} tokens"
    return replace(loaded, model=model, integers=integers, remarks=(*loaded.remarks, remark))


def kept_tokens(model: PreTrainedModel) -> list[int] | None:
    """Return the ids whose logits a model computes; None if its vocabulary is not reduced."""
    absent = getattr(model, "absent_tokens", None)
    return None if absent is None else absent.isfinite().nonzero()[:, 0].tolist()


def _spread(model: Any, inputs: Any, output: Any) -> Any:
    """Replace logits of the kept tokens, [..., kept], by those of all, [..., vocab]."""
    logits = output.logits
    # After everything that the model does with its logits, because soft-capping makes minus infinity finite.
    output.logits = logits.index_select(-1, model.row_of_token) + model.absent_tokens.to(logits.dtype)
    return output
