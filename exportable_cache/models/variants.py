"""Copies of a model with shared weights: with the RoPE of one sequence length, or with a reduced vocabulary.

llama.cpp and vLLM choose the factors of LongRoPE by the length of the context that was asked for, and keep them for
every sequence. A program whose runner does not know the lengths of its rows can then hold more tokens than the
threshold.

With a reduced vocabulary the head computes logits of the kept tokens, and all others are minus infinity. Logits keep
their width, so that samplers, constraints and verification need no other ids.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import InputError, UnsupportedModelError
from .layers.specs import logits_size_of
from .patches.mechanisms.rope import ChangingFrequencies, check_follows, patch_rope
from .positions import changing, prefix, rope_rule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .loading.loading import LoadedModel

#: Line about a model of `fix_rope`.
REMARK = "RoPE has the factors of sequences of {:,} tokens at every length"


def _sharing_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model over the same parameters, because a caller's model keeps its RoPE and its head."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


class _Rotary(nn.Module):
    """A rotary embedding with constant frequencies, for models whose own embedding computes them in every call.

    Args:
        inv_freq: Inverse frequencies, [dim / 2].
        scale: Factor of cosines and sines.
    """

    inv_freq: torch.Tensor

    def __init__(self, inv_freq: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.scale = scale

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [batch, length, dim] of positions [batch, length], in the dtype of `x`."""
        angles = position_ids[..., None].float() * self.inv_freq.float()
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.scale).to(x.dtype), (angles.sin() * self.scale).to(x.dtype)


@torch.no_grad()
def fix_rope(model: PreTrainedModel, length: int) -> PreTrainedModel:
    """Return a copy of a model, with shared weights, whose RoPE has the factors of `length` tokens at every position.

    Args:
        model: A model whose RoPE changes with the length.
        length: Sequence length that chooses the factors.

    Raises:
        InputError: If the factors of its RoPE are the same at every length.
        UnsupportedModelError: If its rotary embedding is not a class of transformers.
    """
    if rope_rule(model) is None:
        raise InputError(
            f"rope_length must be left out for {type(model).__name__}, whose RoPE has the same factors at every "
            f"length, got {length}; remove it"
        )
    model = _sharing_weights(model)
    patch_rope(model)
    check_follows(model)
    names = {module: name for name, module in model.named_modules()}
    for module, layer_type, kind in list(changing(model)):
        found = ChangingFrequencies.of(module, layer_type, kind)
        lengths = torch.tensor([[length]], device=found.short.device)
        inv_freq, scale = found.at(lengths)[0], found.scales[length > found.border]
        if found.longer is found.short:
            # PhiMoE, which computes frequencies from its config in every call; the length chooses only the scale.
            model.set_submodule(names[module], _Rotary(inv_freq, scale))
            continue
        is_one = layer_type is None
        module.rope_type = "default" if is_one else {**module.rope_type, layer_type: "default"}  # type: ignore[assignment,dict-item]
        for name in ("inv_freq", "original_inv_freq"):
            setattr(module, f"{prefix(layer_type)}{name}", inv_freq.clone())
    model.rope_length = length  # type: ignore[assignment]
    return model


def fixed(loaded: LoadedModel, length: int | None) -> LoadedModel:
    """Return a loaded model with the RoPE of a length, see `fix_rope`; the same model for None."""
    if length is None:
        return loaded
    model = fix_rope(loaded.model, length)
    return replace(loaded, model=model, remarks=(*loaded.remarks, REMARK.format(length)))


def rope_length_of(model: nn.Module) -> int | None:
    """Return the length of `fix_rope`, or None."""
    return getattr(model, "rope_length", None)


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
    model = _sharing_weights(model)
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
