"""Settings of a checkpoint's `generation_config` that decide which tokens a generation gives.

The settings are checked here. Rules for tokens are run by the logits processors of transformers, in the order in which
its `generate` runs them. Settings of sampling are given to our sampler, and count only with `do_sample`, as there.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import InputError, first_line
from .sampling_options import SamplingOptions

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerBase

    from ..models.tokenizers.text import TextTokenizer

_REMEDY = "correct generation_config.json, or set generation_config.{name} of the model or the session"


@dataclass(frozen=True)
class RowStart:
    """The start of one row's generation.

    Attributes:
        ids: Prompt, int64 [length].
        held: Number of tokens that the cache held before the prompt.
        limit: Largest number of new tokens; None if there is no limit.
        encoder_ids: Tokens that the encoder was given, int64 [length]; the prompt itself for a text decoder; None if
            the encoder was given something else.
    """

    ids: torch.Tensor
    held: int = 0
    limit: int | None = None
    encoder_ids: torch.Tensor | None = None


@dataclass(frozen=True)
class CheckpointSettings:
    """Settings of a `generation_config`, checked; `read` makes them.

    Attributes:
        ends: Tokens that end a generation.
        max_new_tokens: Default limit of new tokens; None if the checkpoint has none.
        max_length: Default limit of all tokens, the prompt included; `max_new_tokens` comes before it.
        repetition_penalty: Default of `Sampling.repetition_penalty`.
        rules: Values of the settings that a logits processor follows, by name, the repetition penalty excluded.
        renormalizes: True if scores are normalised after the processors, which matters to beams only.
        length_penalty: Default of `beam_search`.
        sampling: How tokens are drawn; greedy without `do_sample`. It is the default of the commands, and of calls that
            ask for it by `generation_config`. The repetition penalty is not part of it.
        unheeded: Values of the settings that change which tokens transformers gives, and that are not followed here.
        unknown: Names of the settings that are not in transformers' `GenerationConfig`.
        processors: Further logits processors of a call, which run after the rules.
    """

    ends: tuple[int, ...] = ()
    max_new_tokens: int | None = None
    max_length: int | None = None
    repetition_penalty: float | None = None
    rules: Mapping[str, Any] = field(default_factory=dict)
    renormalizes: bool = False
    length_penalty: float = 1.0
    sampling: SamplingOptions = SamplingOptions()
    unheeded: Mapping[str, Any] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    processors: tuple[Callable[..., torch.Tensor], ...] = ()

    @classmethod
    def read(
        cls,
        config: GenerationConfig | None,
        vocab_size: int,
        tokenizer: PreTrainedTokenizerBase | TextTokenizer | None = None,
    ) -> CheckpointSettings:
        """Read and check a generation config.

        Args:
            config: None for a model without one.
            vocab_size: Token ids run from 0 to vocab_size - 1.
            tokenizer: Its end token is taken where the config names none; `eos_token_id=[]` names that there is none.

        Raises:
            InputError: If a setting is not what it has to be.
        """
        ends = tuple(end_tokens(config, vocab_size, tokenizer))
        if config is None:
            return cls(ends)
        limits = {name: _count(config, name, least=1) for name in ("max_new_tokens", "max_length")}
        rules: dict[str, Any] = {}
        for name, rule in _RULES.items():
            value = getattr(config, name, None)
            if value is not None:
                value = rule.check(name, value, vocab_size)
            if value is not None:
                rules[name] = value
        # As in transformers, where the number of new tokens comes before that of all.
        if getattr(config, "min_new_tokens", None) is not None:
            rules.pop("min_length", None)
        samples = _samples(config)
        neutral_values = _UNHEEDED | _UNHEEDED_LIMITS if samples else _UNHEEDED
        unheeded = {
            name: value
            for name, neutral in neutral_values.items()
            if (value := getattr(config, name, None)) not in (None, False, *neutral)
        }
        return cls(
            ends,
            limits["max_new_tokens"],
            limits["max_length"],
            repetition_penalty=rules.pop("repetition_penalty", None),
            rules=rules,
            renormalizes=getattr(config, "renormalize_logits", None) is True,
            length_penalty=_from(config, "length_penalty", 1.0, -math.inf, math.inf, "a number"),
            sampling=_sampling(config) if samples else SamplingOptions(),
            unheeded=unheeded,
            unknown=tuple(name for name in sorted(_names(config)) if name not in _KNOWN and not name.startswith("_")),
        )

    def limit(self, length: int) -> int | None:
        """Return the default limit of new tokens after `length` tokens, None if the checkpoint has none.

        Raises:
            InputError: If the checkpoint's `max_length` leaves no room for a new token.
        """
        if self.max_new_tokens is not None or self.max_length is None:
            return self.max_new_tokens
        if length >= self.max_length:
            raise InputError(
                f"max_length of the generation config must be above the {length} tokens of the prompt, got "
                f"{self.max_length}; pass max_new_tokens"
            )
        return self.max_length - length

    def remarks(self) -> list[str]:
        """Return a line for each setting that is not followed, and one for all that are unknown."""
        lines = [
            f"generation_config asks for {name}={value!r:.100}, which is not followed: tokens may differ from those of "
            "transformers"
            for name, value in self.unheeded.items()
        ]
        if self.unknown:
            names = ", ".join(self.unknown)
            lines.append(f"generation_config has settings that transformers' GenerationConfig has not: {names:.200}")
        return lines

    def row_rules(self, rows: Sequence[RowStart], repetition_penalty: float | None = None) -> RowRules:
        """Return the rules for the rows of one generation, for settings with `rules` or `processors`.

        Args:
            rows: The start of each row.
            repetition_penalty: See `Sampling`; it becomes one of the rules.

        Raises:
            InputError: If transformers refuses a value.
        """
        rules = dict(self.rules)
        if repetition_penalty not in (None, 1):
            rules["repetition_penalty"] = float(repetition_penalty)
        return RowRules([row.ids for row in rows], [self._processors(rules, row) for row in rows])

    def _processors(self, rules: Mapping[str, Any], row: RowStart) -> LogitsProcessorList:
        from transformers import LogitNormalization, LogitsProcessorList

        processors = LogitsProcessorList()
        for name, rule in _RULES.items():
            if name in rules:
                try:
                    made = rule.make(rules[name], row, self)
                except Exception as error:  # constructors check their arguments with errors of several classes
                    raise InputError(
                        _wrong(name, f"what transformers takes ({first_line(error)})", rules[name])
                    ) from error
                if made is not None:
                    processors.append(made)
        processors.extend(self.processors)
        if self.renormalizes:
            processors.append(LogitNormalization())
        return processors


class RowRules:
    """Logits processors for the rows of one generation, with the tokens of each row so far.

    Each row has its own processors and tokens, so that its result does not depend on other rows.

    Args:
        rows: Prompts, each int64 [length].
        processors: Those of each row.
    """

    def __init__(self, rows: Sequence[torch.Tensor], processors: Sequence[LogitsProcessorList]) -> None:
        self._ids = [row[None] for row in rows]
        self._processors = list(processors)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply the processors to the logits [batch, vocab] and return float32.

        Raises:
            InputError: If a setting names a token that has no logit.
        """
        import torch

        rows = zip(self._ids, self._processors, logits.float().unbind(0), strict=True)
        try:
            return torch.cat([processors(ids, row[None].clone()) for ids, processors, row in rows])  # type: ignore[arg-type]
        except (ValueError, IndexError, RuntimeError) as error:
            raise InputError(
                f"the generation config does not fit a model of {logits.shape[-1]} tokens: {first_line(error)}; "
                "correct generation_config.json"
            ) from error

    def see(self, tokens: torch.Tensor) -> None:
        """Add the chosen tokens, int64 [batch]."""
        import torch

        self._ids = [
            torch.cat([ids, token.reshape(1, 1).to(ids)], dim=1) for ids, token in zip(self._ids, tokens, strict=True)
        ]

    def reorder(self, rows: torch.Tensor) -> None:
        """Replace row i by row `rows[i]`, int64 [batch]; all rows have the same prompt."""
        self._ids = [self._ids[row] for row in rows.tolist()]


def end_tokens(
    config: GenerationConfig | None,
    vocab_size: int,
    tokenizer: PreTrainedTokenizerBase | TextTokenizer | None = None,
) -> list[int]:
    """Return the tokens that end a generation: those of the config, or the tokenizer's if the config names none.

    Raises:
        InputError: If the config names something else than tokens of the vocabulary.
    """
    named = None if config is None else config.eos_token_id
    if named is None:
        end: Any = getattr(tokenizer, "eos_token_id", None)
        return [end] if _is_int(end) and 0 <= end < vocab_size else []
    ends = list(named) if isinstance(named, Iterable) and not isinstance(named, (str, bytes)) else [named]
    for end in ends:
        if not _is_int(end) or not 0 <= end < vocab_size:
            raise InputError(_wrong("eos_token_id", f"token ids from 0 to {vocab_size - 1}", end))
    return ends


# -- the settings that processors follow -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rule:
    """A setting that a logits processor follows.

    Attributes:
        check: Returns the value to keep, None if it changes nothing; given name, value and size of the vocabulary.
        make: Returns the processor, None if it does not apply to the row; given the value, the row and the settings.
    """

    check: Callable[[str, Any, int], Any]
    make: Callable[[Any, RowStart, CheckpointSettings], Any]


def _wrong(name: str, constraint: str, value: object) -> str:
    return f"{name} of the generation config must be {constraint}, got {value!r:.100}; {_REMEDY.format(name=name)}"


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _count(config: GenerationConfig, name: str, least: int) -> int | None:
    value = getattr(config, name, None)
    if value is not None and (not _is_int(value) or value < least):
        raise InputError(_wrong(name, f"an int of at least {least}", value))
    return value


def _from(config: GenerationConfig, name: str, default: float, least: float, most: float, constraint: str) -> float:
    """Return a number of the config that is finite and from `least` to `most`."""
    value = getattr(config, name, None)
    if value is None:
        return default
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not abs(value) <= sys.float_info.max or not least <= value <= most:
        raise InputError(_wrong(name, constraint, value))
    return float(value)


def _samples(config: GenerationConfig) -> bool:
    value = getattr(config, "do_sample", None)
    if value is not None and not isinstance(value, bool):
        raise InputError(_wrong("do_sample", "true or false", value))
    return value is True


def _sampling(config: GenerationConfig) -> SamplingOptions:
    """Return how tokens are drawn with `do_sample`; missing settings have the defaults of transformers' `generate`."""
    top_k = getattr(config, "top_k", None)
    if top_k is None:
        top_k = _TOP_K
    if not _is_int(top_k) or top_k < -1:
        raise InputError(_wrong("top_k", "an int of at least 1, or 0 for all tokens", top_k))
    temperature = _from(config, "temperature", 1.0, 0, math.inf, "a number of at least 0")
    top_p = _from(config, "top_p", 1.0, 0, 1, "a number from 0 to 1")
    min_p = _from(config, "min_p", 0.0, 0, 1, "a number from 0 to 1")
    if temperature == 0 or top_p == 0:
        return SamplingOptions()
    return SamplingOptions(temperature).over(top_k=max(top_k, 0), top_p=top_p, min_p=min_p)


def _names(config: GenerationConfig) -> Iterable[str]:
    """Return the names of the settings that are set."""
    return [name for name, value in vars(config).items() if value is not None]


def _number(name: str, value: Any, vocab_size: int) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
        raise InputError(_wrong(name, "a number above 0", value))
    return None if value == 1 else float(value)


def _size(name: str, value: Any, vocab_size: int) -> int | None:
    if not _is_int(value) or value < 0:
        raise InputError(_wrong(name, "an int of at least 0", value))
    return value or None


def _flag(name: str, value: Any, vocab_size: int) -> bool | None:
    return True if value is True else None


def _token(name: str, value: Any, vocab_size: int) -> int:
    if not _is_int(value) or not 0 <= value < vocab_size:
        raise InputError(_wrong(name, f"a token id from 0 to {vocab_size - 1}", value))
    return value


def _one_or_several(name: str, value: Any, vocab_size: int) -> list[int] | None:
    return [_token(name, one, vocab_size) for one in (value if isinstance(value, (list, tuple)) else [value])] or None


def _suppressed(name: str, value: Any, vocab_size: int) -> list[int] | None:
    if not isinstance(value, (list, tuple)) or not all(_is_int(token) for token in value):
        raise InputError(_wrong(name, "a list of token ids", value))
    # Tokens that the model does not have never come.
    return [token for token in value if 0 <= token < vocab_size] or None


def _sequences(name: str, value: Any, vocab_size: int) -> list[list[int]] | None:
    if not isinstance(value, (list, tuple)) or not all(isinstance(ids, (list, tuple)) and ids for ids in value):
        raise InputError(_wrong(name, "a list of lists of token ids", value))
    return [[_token(name, token, vocab_size) for token in ids] for ids in value] or None


def _biases(name: str, value: Any, vocab_size: int) -> dict[tuple[int, ...], float] | None:
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    try:
        biases = {tuple(ids): float(bias) for ids, bias in pairs}
    except (TypeError, ValueError) as error:
        raise InputError(_wrong(name, "a list of pairs of token ids and a number", value)) from error
    _sequences(name, list(biases), vocab_size)
    if any(math.isnan(bias) for bias in biases.values()):
        raise InputError(_wrong(name, "a list of pairs of token ids and a number", value))
    return biases or None


def _decay(name: str, value: Any, vocab_size: int) -> tuple[int, float]:
    if (
        not isinstance(value, (list, tuple))
        or len(value) != 2
        or not _is_int(value[0])
        or not isinstance(value[1], (int, float))
    ):
        raise InputError(_wrong(name, "a pair of an int and a number", value))
    return value[0], float(value[1])


def _processor(name: str) -> Any:
    # Imported where a checkpoint asks for it, because few do, and transformers loads its processors with the rest of
    # its generation.
    import transformers

    return getattr(transformers, name)


def _ends_of(row: RowStart, settings: CheckpointSettings) -> torch.Tensor | None:
    import torch

    return torch.tensor(settings.ends, device=row.ids.device) if settings.ends else None


def _made(name: str) -> Callable[[Any, RowStart, CheckpointSettings], Any]:
    """Return a maker of a processor that takes the value alone."""
    return lambda value, row, settings: _processor(name)(value)


def _over_encoder(name: str) -> Callable[[Any, RowStart, CheckpointSettings], Any]:
    """Return a maker of a processor over the encoder's tokens, which does not apply where there are none."""
    return lambda value, row, settings: (
        None if row.encoder_ids is None else _processor(name)(value, row.encoder_ids[None])
    )


def _bad_words(value: Any, row: RowStart, settings: CheckpointSettings) -> Any:
    # transformers leaves out ends, and refuses a list of nothing else.
    words = [ids for ids in value if not (len(ids) == 1 and ids[0] in settings.ends)]
    return _processor("NoBadWordsLogitsProcessor")(words) if words else None


def _min_length(value: int, row: RowStart, settings: CheckpointSettings) -> Any:
    least, ends = value - row.held, _ends_of(row, settings)
    if ends is None or least <= 0:
        return None
    return _processor("MinLengthLogitsProcessor")(least, ends, device=row.ids.device)


def _min_new_tokens(value: int, row: RowStart, settings: CheckpointSettings) -> Any:
    ends = _ends_of(row, settings)
    if ends is None:
        return None
    return _processor("MinNewTokensLengthLogitsProcessor")(len(row.ids), value, ends, device=row.ids.device)


def _forced_begin(value: int, row: RowStart, settings: CheckpointSettings) -> Any:
    # It follows the first token of all.
    return None if row.held else _processor("ForcedBOSTokenLogitsProcessor")(value)


def _forced_end(value: list[int], row: RowStart, settings: CheckpointSettings) -> Any:
    if row.limit is None:
        return None
    longest = len(row.ids) + row.limit
    return _processor("ForcedEOSTokenLogitsProcessor")(longest, value, device=row.ids.device)


def _longer_less_likely(value: tuple[int, float], row: RowStart, settings: CheckpointSettings) -> Any:
    ends = _ends_of(row, settings)
    return None if ends is None else _processor("ExponentialDecayLengthPenalty")(value, ends, len(row.ids))


def _suppress(value: list[int], row: RowStart, settings: CheckpointSettings) -> Any:
    return _processor("SuppressTokensLogitsProcessor")(value, device=row.ids.device)


def _suppress_first(value: list[int], row: RowStart, settings: CheckpointSettings) -> Any:
    begin = len(row.ids)
    if begin == 1 and "forced_bos_token_id" in settings.rules:
        begin += 1
    return _processor("SuppressTokensAtBeginLogitsProcessor")(value, begin, device=row.ids.device)


#: In the order in which transformers applies them (`GenerationMixin._get_logits_processor`).
_RULES: dict[str, _Rule] = {
    "sequence_bias": _Rule(_biases, _made("SequenceBiasLogitsProcessor")),
    "encoder_repetition_penalty": _Rule(_number, _over_encoder("EncoderRepetitionPenaltyLogitsProcessor")),
    "repetition_penalty": _Rule(_number, _made("RepetitionPenaltyLogitsProcessor")),
    "no_repeat_ngram_size": _Rule(_size, _made("NoRepeatNGramLogitsProcessor")),
    "encoder_no_repeat_ngram_size": _Rule(_size, _over_encoder("EncoderNoRepeatNGramLogitsProcessor")),
    "bad_words_ids": _Rule(_sequences, _bad_words),
    "min_length": _Rule(_size, _min_length),
    "min_new_tokens": _Rule(_size, _min_new_tokens),
    "forced_bos_token_id": _Rule(_token, _forced_begin),
    "forced_eos_token_id": _Rule(_one_or_several, _forced_end),
    "remove_invalid_values": _Rule(_flag, lambda value, row, settings: _processor("InfNanRemoveLogitsProcessor")()),
    "exponential_decay_length_penalty": _Rule(_decay, _longer_less_likely),
    "suppress_tokens": _Rule(_suppressed, _suppress),
    "begin_suppress_tokens": _Rule(_suppressed, _suppress_first),
}

#: Settings that change which tokens `generate` of transformers gives and that no processor follows, with the values
#: that change nothing. `forced_decoder_ids` was of earlier releases.
_UNHEEDED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0,),
    "num_return_sequences": (1,),
    "guidance_scale": (1,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "constraints": ([],),
    "force_words_ids": ([],),
    "stop_strings": ("", []),
    "max_time": (),
    "token_healing": (),
    "watermarking_config": (),
    "forced_decoder_ids": ([],),
}
#: The same for settings that count only with `do_sample`.
_UNHEEDED_LIMITS: dict[str, tuple[Any, ...]] = {
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
}
#: Default of transformers' `generate` with `do_sample`.
_TOP_K = 50
#: Names of the settings of `GenerationConfig`, in the releases of transformers that write checkpoints.
_KNOWN = frozenset(
    "assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight assistant_lookbehind bad_words_ids "
    "begin_suppress_tokens bos_token_id cache_config cache_implementation compile_config constraints "
    "continuous_batching_config decoder_start_token_id disable_compile diversity_penalty do_sample dola_layers "
    "early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty eos_token_id epsilon_cutoff eta_cutoff "
    "exponential_decay_length_penalty force_words_ids forced_bos_token_id forced_decoder_ids forced_eos_token_id "
    "generation_kwargs guidance_scale is_assistant length_penalty low_memory max_cache_len max_length "
    "max_matching_ngram_size max_new_tokens max_time min_length min_new_tokens min_p no_repeat_ngram_size "
    "num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences "
    "output_attentions output_hidden_states output_logits output_scores pad_token_id penalty_alpha prefill_chunk_size "
    "prompt_lookup_num_tokens remove_invalid_values renormalize_logits repetition_penalty return_dict_in_generate "
    "return_legacy_cache sequence_bias speculation_type stop_strings suppress_tokens target_lookbehind temperature "
    "token_healing top_h top_k top_p transformers_version typical_p use_cache use_mtp watermarking_config".split()
)
