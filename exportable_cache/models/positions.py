"""Limits of a model's positions: tables of positions, and RoPE whose factors change with the sequence length.

transformers chooses the factors of RoPE by the largest position of a call. LongRoPE has one set for short sequences and
one for long ones; dynamic NTK computes them from the length. All rows of a batch then share them. Here each row has its
own length, which every step gets as a tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch

from ..cache.spec import CACHE_LEN
from ..errors import InputError, UnsupportedModelError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel


LONGROPE, DYNAMIC = "longrope", "dynamic"
#: Value of `RopeRule.factors` for a row whose keys were computed with different factors.
MIXED = -1
#: More steps than fit in any cache.
ANY = 2**62


@dataclass(frozen=True)
class RopeRule:
    """A rule for when the factors of RoPE change: `RopeRule("longrope", (4096,))` changes them at 4,097 tokens.

    Attributes:
        kind: `longrope` or `dynamic` (NTK).
        borders: Longest sequence length before each change, ascending. `dynamic` has one border, and different factors
            for every greater length.
        recomputes: True if transformers' `generate` recomputes the whole sequence when it crosses the border.
    """

    kind: str
    borders: tuple[int, ...]
    recomputes: bool = False

    @property
    def border(self) -> int:
        """Longest sequence length before the first change."""
        return self.borders[0]

    def is_reached(self, max_length: int | None) -> bool:
        """Return True if a row of at most `max_length` tokens (None: no limit) can pass a border."""
        return max_length is None or max_length > self.border

    def after(self, before: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Return the lengths that determine a call's factors, int64 [batch].

        Args:
            before: Result for the previous call, int64 [batch]; 0 at the start of a sequence.
            ends: Tokens that each row holds after the call, int64 [batch].
        """
        if self.kind == LONGROPE:
            return ends
        # As in `dynamic_frequency_update`: the greatest length so far, until a call ends below the border.
        return torch.where(ends < self.border, ends, torch.maximum(before, ends))

    def factors(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return numbers that are equal for lengths with equal factors, int64 [batch]."""
        if self.kind == DYNAMIC:
            return lengths.clamp(min=self.border)
        return (lengths[:, None] > torch.tensor(self.borders)).sum(-1)

    def equal_steps(self, length: int, before: int) -> int:
        """Return how many tokens fed one by one after `length` tokens share their factors.

        Args:
            length: Tokens that the row holds.
            before: See `after`.
        """
        if self.kind == DYNAMIC and before > self.border:
            return 1
        following = (border - length for border in self.borders if border > length)
        return next(following, 1 if self.kind == DYNAMIC else ANY)

    def crosses(self, held: int, end: int) -> bool:
        """Return True if `generate` recomputes a sequence that grows from `held` tokens to `end`."""
        return self.recomputes and 0 < held <= self.border < end

    def __str__(self) -> str:
        name = "LongRoPE" if self.kind == LONGROPE else "dynamic NTK RoPE"
        return f"{name}, whose factors change past {' and '.join(map(str, self.borders))} tokens"


def rope_rule(model: PreTrainedModel) -> RopeRule | None:
    """Return the rule by which a model's RoPE factors change, or None if they are constant.

    Raises:
        UnsupportedModelError: If layers have different kinds of changing RoPE.
    """
    kinds, borders = set(), set()
    for module, layer_type, kind in changing(model):
        kinds.add(kind)
        borders.add(_border(module, layer_type, kind))
    if not kinds:
        return None
    if len(kinds) > 1 or (kinds == {DYNAMIC} and len(borders) > 1):
        raise UnsupportedModelError(
            f"layers of {type(model).__name__} must have one kind of RoPE that changes with the length, got "
            f"{', '.join(sorted(kinds))} past {', '.join(map(str, sorted(borders)))} tokens; use DynamicCache"
        )
    prepare = getattr(type(model), "prepare_inputs_for_generation", None)
    names = getattr(getattr(inspect.unwrap(prepare) if prepare else None, "__code__", None), "co_names", ())
    # The method of Phi 3, which PhiMoE and Phi 4 multimodal copy.
    recomputes = "original_max_position_embeddings" in names and hasattr(
        model.config, "original_max_position_embeddings"
    )
    return RopeRule(kinds.pop(), tuple(sorted(borders)), recomputes)


def text_model_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the module that runs text: the model, or the causal LM inside a model whose calls need pixels (BLIP-2)."""
    pixels = inspect.signature(model.forward).parameters.get("pixel_values")
    if pixels is None or pixels.default is not pixels.empty or model.config.is_encoder_decoder:
        return model
    return cast("PreTrainedModel", getattr(model, "language_model", model))


def takes_positions(model: PreTrainedModel, name: str = "position_ids") -> bool:
    """Return True if the model takes positions as argument `name`, so that they are passed explicitly.

    Without them some models count from 0 in every call (Bamba). The RoBERTa family counts from its padding index, so it
    derives positions from the cache length instead.
    """
    own_rule = any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules())
    return name in inspect.signature(text_model_of(model).forward).parameters and not own_rule


@contextmanager
def lengths_forgotten(model: PreTrainedModel) -> Iterator[None]:
    """Reset the frequencies that a model keeps from longer sequences, before and after the block."""
    _forget_lengths(model)
    try:
        yield
    finally:
        _forget_lengths(model)


def _forget_lengths(model: PreTrainedModel) -> None:
    """Restore the frequencies of short sequences, which dynamic NTK replaces on the module."""
    for module, layer_type, kind in changing(model):
        if kind == DYNAMIC:
            setattr(module, f"{prefix(layer_type)}max_seq_len_cached", module.original_max_seq_len)
            short = getattr(module, f"{prefix(layer_type)}original_inv_freq")
            module.register_buffer(f"{prefix(layer_type)}inv_freq", short.clone(), persistent=False)


def check_rope(model: PreTrainedModel, max_length: int | None, takes_lengths: bool = False) -> None:
    """Check that the rows of a program cannot pass a change of its RoPE factors.

    Args:
        model: The model of the program.
        max_length: Most tokens of a row; None for no limit.
        takes_lengths: True if the program gets the lengths of its rows.

    Raises:
        InputError: If they can.
    """
    rule = rope_rule(model)
    if rule is not None and rule.is_reached(max_length) and not takes_lengths:
        held = "any number of" if max_length is None else max_length
        raise InputError(
            f"max_cache_len must be at most {rule.border} for a program of {type(model).__name__}, got a cache of "
            f"{held} tokens: the model has {rule}, and this target supports only the factors of shorter sequences; "
            f"export with max_cache_len={rule.border}, or with rope_length={max_length or 'N'} (--rope-length) for the "
            "factors of that length at every position, or for target 'pt2' or 'aoti'"
        )


def changing(model: nn.Module) -> Iterator[tuple[nn.Module, str | None, str]]:
    """Yield rotary embeddings that change with the length, with layer type (None for all layers) and kind."""
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        for layer_type, name in (types if isinstance(types, dict) else {None: types}).items():
            kind = DYNAMIC if isinstance(name, str) and DYNAMIC in name else name
            if kind in (LONGROPE, DYNAMIC) and hasattr(module, f"{prefix(layer_type)}original_inv_freq"):
                yield module, layer_type, kind


def prefix(layer_type: str | None) -> str:
    """Return the prefix of the names of a rotary embedding's tensors."""
    return "" if layer_type is None else f"{layer_type}_"


def parameters_of(module: Any, layer_type: str | None) -> dict[str, Any]:
    """Return the RoPE parameters of a rotary embedding."""
    parameters = module.config.rope_parameters
    return parameters if layer_type is None else parameters[layer_type]


def _border(module: Any, layer_type: str | None, kind: str) -> int:
    if kind == DYNAMIC:
        return int(module.original_max_seq_len)
    return int(parameters_of(module, layer_type)["original_max_position_embeddings"])


#: Config fields with a model's number of positions; the last two are those of LED and MPT.
_LIMITS = ("max_position_embeddings", "max_target_positions", "max_decoder_position_embeddings", "max_seq_len")
#: Models whose positions begin after the index of the padding token, so that their table has more rows than positions.
_PADDED = frozenset(
    ("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod")
)
#: Models whose position bias has a fixed number of positions -> the config field of that number.
_FIXED_BIAS = {"mpt": "max_seq_len"}


def position_limit(config: PreTrainedConfig) -> int | None:
    """Return the number of positions that a text decoder was made for; None if its config does not say."""
    config = config.get_text_config(decoder=True)
    found = (getattr(config, name, None) for name in _LIMITS)
    limit = next((limit for limit in found if isinstance(limit, int) and limit > 0), None)
    if limit is None or config.model_type not in _PADDED:
        return limit
    return max(1, limit - (config.pad_token_id or 0) - 1)


def default_cache_len(config: PreTrainedConfig, most: int = CACHE_LEN) -> int:
    """Return the length of a cache where none is given: `most`, or the model's positions if it has fewer."""
    return min(most, position_limit(config) or most)


def check_positions(model: PreTrainedModel, max_length: int | None) -> None:
    """Check that a cache holds at most as many tokens as a model's position table.

    Models with computed positions (rotary, ALiBi) pass, because they run beyond their training length.

    Args:
        model: The model.
        max_length: Most tokens of a row; None for no limit.

    Raises:
        InputError: If a step would read past the table.
    """
    config = model.config.get_text_config(decoder=True)
    biased = getattr(config, _FIXED_BIAS.get(config.model_type, ""), None)
    if biased is not None and (max_length is None or max_length > biased):
        _refuse(model, max_length, biased, "its position bias")
    limit = position_limit(model.config)
    if limit is None or (max_length is not None and max_length <= limit):
        return
    for name, rows in _position_tables(model):
        # Because some tables begin with up to two rows for padding.
        if limit <= rows <= limit + 2:
            _refuse(model, max_length, limit, name)


def _refuse(model: PreTrainedModel, max_length: int | None, limit: int, name: str) -> NoReturn:
    held = "any number of" if max_length is None else max_length
    raise InputError(
        f"the cache must hold at most {limit} tokens, the positions of {type(model).__name__} ({name}), got {held}; "
        f"use a max_cache_len of at most {limit}"
    )


def beyond_positions(config: PreTrainedConfig, max_cache_len: int, is_unbounded: bool = False) -> str:
    """Return a warning if a cache holds more tokens than a model was made for, else an empty string.

    Args:
        config: Config of the model.
        max_cache_len: Tokens that a full-attention layer holds.
        is_unbounded: True if positions in the cache are reused, as with attention sinks.
    """
    limit = position_limit(config)
    if is_unbounded or not limit or max_cache_len <= limit:
        return ""
    return (
        f"max_cache_len is {max_cache_len}, but the model was made for {limit} positions (its config's "
        "max_position_embeddings); later tokens are computed, but their quality is unknown"
    )


def _position_tables(model: PreTrainedModel) -> Iterator[tuple[str, int]]:
    """Yield name and rows of possible position tables of a model's decoder, see `tables_in`."""
    try:
        tokens = model.get_input_embeddings()
    except NotImplementedError:  # see `specs.vocab_size_of`
        tokens = None
    config = model.config
    # Tables of image and audio encoders are not the decoder's: DeepSeek OCR 2 has one of 256 queries.
    is_wrapped = not config.is_encoder_decoder and config.get_text_config(decoder=True) is not config
    decoder = model.get_decoder() if is_wrapped else model
    yield from tables_in(decoder, tokens, model)


def tables_in(
    part: torch.nn.Module, tokens: torch.nn.Module | None, whole: torch.nn.Module | None = None
) -> Iterator[tuple[str, int]]:
    """Yield name and rows of possible position tables: embeddings, and 2-D tensors that are not parameters.

    Args:
        part: Module whose tables are yielded.
        tokens: Embedding of token ids, which is left out.
        whole: Module that names are relative to; `part` by default.
    """
    own = set(part.modules())
    for name, module in (whole or part).named_modules():
        if module not in own:
            continue
        if isinstance(module, torch.nn.Embedding) and module is not tokens:
            yield name, module.num_embeddings
        plain = {key: value for key, value in vars(module).items() if isinstance(value, torch.Tensor)}
        for key, tensor in {**dict(module.named_buffers(recurse=False)), **plain}.items():
            if tensor.dim() == 2:
                yield f"{name}.{key}", tensor.shape[0]
