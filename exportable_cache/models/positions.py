"""RoPE whose factors change with the length of the sequence: where they do, and which a step has to use.

transformers chooses the factors by the largest position of a call. LongRoPE has one set for short sequences and one for
long ones; dynamic NTK computes them from the length. So the length is a property of a call and not of a token, and all
rows of a batch share it there. Here each row has a length of its own, which every step is handed as a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ..errors import InputError, UnsupportedModelError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel


LONGROPE, DYNAMIC = "longrope", "dynamic"
#: Factors of a row whose keys were computed with several of them, see `RopeRule.factors`.
MIXED = -1
#: A number of steps that no cache has room for.
ANY = 2**62


@dataclass(frozen=True)
class RopeRule:
    """When the factors of a model's RoPE change: `RopeRule("longrope", (4096,))` has others from 4,097 tokens on.

    Attributes:
        kind: `longrope` or `dynamic` (NTK).
        borders: The longest sequences with the factors before each change, ascending. Those of `dynamic` have one, past
            which every length has factors of its own.
        recomputes: True if transformers' `generate` computes the whole sequence again when it crosses the border.
    """

    kind: str
    borders: tuple[int, ...]
    recomputes: bool = False

    @property
    def border(self) -> int:
        """The longest sequence before any change."""
        return self.borders[0]

    def is_reached(self, max_length: int | None) -> bool:
        """Return True if a row of at most `max_length` tokens, None for any number, gets past a border."""
        return max_length is None or max_length > self.border

    def after(self, before: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Return the length that a call's factors are chosen by, int64 [batch].

        Args:
            before: The same of the last call, int64 [batch]; 0 at the start of a sequence.
            ends: Tokens that each row holds after the call, int64 [batch].
        """
        if self.kind == LONGROPE:
            return ends
        # As `dynamic_frequency_update`: the longest length so far counts, until a call ends below the border.
        return torch.where(ends < self.border, ends, torch.maximum(before, ends))

    def factors(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return numbers that are equal where two lengths have equal factors, int64 [batch]."""
        if self.kind == DYNAMIC:
            return lengths.clamp(min=self.border)
        return (lengths[:, None] > torch.tensor(self.borders)).sum(-1)

    def equal_steps(self, length: int, before: int) -> int:
        """Return how many tokens fed one by one after `length` tokens have the same factors as the first of them.

        Args:
            length: Tokens that the row holds.
            before: See `after`.
        """
        if self.kind == DYNAMIC and before > self.border:
            return 1
        following = (border - length for border in self.borders if border > length)
        return next(following, 1 if self.kind == DYNAMIC else ANY)

    def crosses(self, held: int, end: int) -> bool:
        """Return True if `generate` computes a sequence again that goes on from `held` tokens to `end`."""
        return self.recomputes and 0 < held <= self.border < end

    def __str__(self) -> str:
        name = "LongRoPE" if self.kind == LONGROPE else "dynamic NTK RoPE"
        return f"{name}, whose factors change past {' and '.join(map(str, self.borders))} tokens"


def rope_rule(model: PreTrainedModel) -> RopeRule | None:
    """Return when the factors of a model's RoPE change, None for one that has the same at every length.

    Raises:
        UnsupportedModelError: If some of its layers have LongRoPE and some dynamic NTK.
    """
    kinds, borders = set(), set()
    for module, layer_type, kind in changing(model):
        kinds.add(kind)
        borders.add(_border(module, layer_type, kind))
    if not kinds:
        return None
    if len(kinds) > 1 or (kinds == {DYNAMIC} and len(borders) > 1):
        raise UnsupportedModelError(
            f"{type(model).__name__} has several kinds of RoPE that change with the length ({', '.join(sorted(kinds))} "
            f"past {', '.join(map(str, sorted(borders)))} tokens); use DynamicCache"
        )
    prepare = getattr(type(model), "prepare_inputs_for_generation", None)
    names = getattr(getattr(prepare, "__code__", None), "co_names", ())
    # Phi 3's, which PhiMoE and Phi 4 multimodal have copies of.
    recomputes = "original_max_position_embeddings" in names and hasattr(
        model.config, "original_max_position_embeddings"
    )
    return RopeRule(kinds.pop(), tuple(sorted(borders)), recomputes)


@contextmanager
def lengths_forgotten(model: PreTrainedModel) -> Iterator[None]:
    """Run a block in which a model has seen no sequence yet, and leave it so."""
    _forget_lengths(model)
    try:
        yield
    finally:
        _forget_lengths(model)


def _forget_lengths(model: PreTrainedModel) -> None:
    """Put back the frequencies of short sequences, which dynamic NTK replaces on the module by those of the longest."""
    for module, layer_type, kind in changing(model):
        if kind == DYNAMIC:
            setattr(module, f"{prefix(layer_type)}max_seq_len_cached", module.original_max_seq_len)
            short = getattr(module, f"{prefix(layer_type)}original_inv_freq")
            module.register_buffer(f"{prefix(layer_type)}inv_freq", short.clone(), persistent=False)


def check_rope(model: PreTrainedModel, max_length: int | None, takes_lengths: bool = False) -> None:
    """Refuse a program whose rows could get past a change of its RoPE's factors.

    Args:
        max_length: Tokens a row can hold in all, None for any number.
        takes_lengths: True if the program is handed the lengths of its rows.

    Raises:
        InputError: If they could.
    """
    rule = rope_rule(model)
    if rule is not None and rule.is_reached(max_length) and not takes_lengths:
        held = "any number of" if max_length is None else max_length
        raise InputError(
            f"max_cache_len must be at most {rule.border} for a program of {type(model).__name__}, got a cache of "
            f"{held} tokens: the model has {rule}, and programs of this target have those of shorter sequences; export "
            f"with max_cache_len={rule.border}, or for longer sequences with target='pt2' or 'aoti'"
        )


def changing(model: nn.Module) -> Iterator[tuple[nn.Module, str | None, str]]:
    """Give the rotary embeddings that change with the length, each with the layer type (None for all) and the kind."""
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        for layer_type, name in (types if isinstance(types, dict) else {None: types}).items():
            kind = DYNAMIC if isinstance(name, str) and DYNAMIC in name else name
            if kind in (LONGROPE, DYNAMIC) and hasattr(module, f"{prefix(layer_type)}original_inv_freq"):
                yield module, layer_type, kind


def prefix(layer_type: str | None) -> str:
    """Return what the names of a rotary embedding's tensors begin with."""
    return "" if layer_type is None else f"{layer_type}_"


def parameters_of(module: Any, layer_type: str | None) -> dict[str, Any]:
    """Return the RoPE parameters of a rotary embedding."""
    parameters = module.config.rope_parameters
    return parameters if layer_type is None else parameters[layer_type]


def _border(module: Any, layer_type: str | None, kind: str) -> int:
    if kind == DYNAMIC:
        return int(module.original_max_seq_len)
    return int(parameters_of(module, layer_type)["original_max_position_embeddings"])


#: Where configs say how many positions a model has; the last ones are LED's and MPT's.
_LIMITS = ("max_position_embeddings", "max_target_positions", "max_decoder_position_embeddings", "max_seq_len")
#: Models that compute a bias of a fixed number of positions in every step, and slice it: where their config has it.
_FIXED_BIAS = {"mpt": "max_seq_len"}


def check_positions(model: PreTrainedModel, max_length: int | None) -> None:
    """Refuse a cache that holds more tokens than the model has positions for, where it looks them up in a table.

    Models with computed positions (rotary, ALiBi) pass: they run past what they were trained for.

    Args:
        max_length: Tokens a row can hold in all, None for any number.

    Raises:
        InputError: If a step would read past the table.
    """
    config = model.config.get_text_config(decoder=True)
    biased = getattr(config, _FIXED_BIAS.get(config.model_type, ""), None)
    if biased is not None and (max_length is None or max_length > biased):
        _refuse(model, max_length, biased, "its position bias")
    limit = next((found for found in (getattr(config, name, None) for name in _LIMITS) if found), None)
    if not isinstance(limit, int) or (max_length is not None and max_length <= limit):
        return
    for name, rows in _position_tables(model):
        # Some tables have up to two extra rows in front, for padding.
        if limit <= rows <= limit + 2:
            _refuse(model, max_length, limit, name)


def _refuse(model: PreTrainedModel, max_length: int | None, limit: int, name: str) -> NoReturn:
    held = "any number of" if max_length is None else max_length
    raise InputError(
        f"the cache can hold {held} tokens, but {type(model).__name__} has positions for {limit} ({name}); "
        f"use a max_cache_len of at most {limit}"
    )


def beyond_positions(config: PreTrainedConfig, max_cache_len: int, goes_on: bool = False) -> str:
    """Return one line that says that a cache holds more tokens than a model was made for; empty if it does not.

    Args:
        config: Of the model.
        max_cache_len: Tokens that a full-attention layer holds.
        goes_on: Whether positions in the cache start again, as with attention sinks.
    """
    config = config.get_text_config(decoder=True)
    limit = next((getattr(config, name) for name in _LIMITS if isinstance(getattr(config, name, None), int)), None)
    if goes_on or not limit or max_cache_len <= limit:
        return ""
    return (
        f"max_cache_len is {max_cache_len}, but the model was made for {limit} positions (its config's "
        "max_position_embeddings); tokens behind these are computed, and their quality is unknown"
    )


def _position_tables(model: PreTrainedModel) -> Iterator[tuple[str, int]]:
    """Name and rows of what may be a table of positions: embeddings, and 2-D tensors that are no parameters (GPT-J,
    CTRL).
    """
    try:
        tokens = model.get_input_embeddings()
    except NotImplementedError:  # see `layout.vocab_size_of`
        tokens = None
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) and module is not tokens:
            yield name, module.num_embeddings
        plain = {key: value for key, value in vars(module).items() if isinstance(value, torch.Tensor)}
        for key, tensor in {**dict(module.named_buffers(recurse=False)), **plain}.items():
            if tensor.dim() == 2:
                yield f"{name}.{key}", tensor.shape[0]
