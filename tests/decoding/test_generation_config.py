"""Sampling as a generation config says: its fields, what overrides them, and the distribution of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from exportable_cache import Session
from exportable_cache.errors import InputError
from exportable_cache.generation.checkpoint_settings import _KNOWN, CheckpointSettings
from exportable_cache.generation.sampling_options import SamplingOptions
from exportable_cache.session.inputs.encoder import start_tokens

from ..support.distributions import SETTINGS, check_draws, expected_probabilities
from ..support.models import VOCAB, tiny_model, tokens
from ..support.seq2seq import tiny_seq2seq
from ..support.sessions import live_session
from .byte_tokenizer import byte_tokenizer

CAPACITY = 32
PROMPT = tokens(6, seed=1)
#: Rows of a session, so that few calls give many draws.
ROWS, CALLS = 500, 20


def read(**fields: Any) -> CheckpointSettings:
    return CheckpointSettings.read(GenerationConfig(**fields), VOCAB)


def configured(**settings: Any) -> PreTrainedModel:
    model = tiny_model("llama")
    model.generation_config = GenerationConfig(pad_token_id=0, **settings)
    return model


def session_of(rows: int = 1, **settings: Any) -> Session:
    return live_session(configured(**settings), False, CAPACITY, batch_size=rows)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, SamplingOptions()),
        ({"temperature": 0.7, "top_k": 5, "top_p": 0.5}, SamplingOptions()),
        ({"do_sample": True}, SamplingOptions(1.0, 50)),
        ({"do_sample": True, "temperature": 0.7, "top_k": 0}, SamplingOptions(0.7)),
        ({"do_sample": True, "top_k": -1, "top_p": 1.0, "min_p": 0.0}, SamplingOptions(1.0)),
        ({"do_sample": True, "top_k": 9, "top_p": 0.8, "min_p": 0.1}, SamplingOptions(1.0, 9, 0.8, 0.1)),
        ({"do_sample": True, "temperature": 0.0, "top_k": 9}, SamplingOptions()),
        ({"do_sample": True, "repetition_penalty": 1.2}, SamplingOptions(1.0, 50)),
    ],
)
def test_fields_count_with_do_sample_and_have_defaults_of_transformers(
    fields: dict[str, Any], expected: SamplingOptions
) -> None:
    config = GenerationConfig()
    for name, value in fields.items():
        setattr(config, name, value)
    assert CheckpointSettings.read(config, VOCAB).sampling == expected


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("do_sample", "yes", "must be true or false, got 'yes'"),
        ("do_sample", 1, "must be true or false, got 1"),
        ("temperature", 10**400, "must be a number of at least 0, got 1000"),
        ("temperature", -1.0, "must be a number of at least 0, got -1.0"),
        ("temperature", "hot", "must be a number of at least 0, got 'hot'"),
        ("top_k", 2.5, "must be an int of at least 1, or 0 for all tokens, got 2.5"),
        ("top_p", 1.5, "must be a number from 0 to 1, got 1.5"),
        ("min_p", float("nan"), "must be a number from 0 to 1, got nan"),
    ],
)
def test_a_wrong_value_is_refused_by_name_if_tokens_are_drawn(field: str, value: Any, message: str) -> None:
    fields = SimpleNamespace(eos_token_id=None, **{field: value})
    if field != "do_sample":
        assert CheckpointSettings.read(fields, VOCAB).sampling == SamplingOptions()  # type: ignore[arg-type]
        fields.do_sample = True
    with pytest.raises(InputError, match=f"{field} of the generation config {message}"):
        CheckpointSettings.read(fields, VOCAB)  # type: ignore[arg-type]


def test_settings_that_are_not_followed_are_named_if_they_count() -> None:
    fields = {"typical_p": 0.9, "epsilon_cutoff": 0.1, "num_beams": 2}
    assert set(read(**fields).unheeded) == {"num_beams"}
    assert set(read(do_sample=True, **fields).unheeded) == {"typical_p", "epsilon_cutoff", "num_beams"}
    assert read(do_sample=True, typical_p=1.0, epsilon_cutoff=0.0).remarks() == []


def test_unknown_settings_are_named_in_one_line() -> None:
    config = GenerationConfig.from_dict({"temprature": 0.7, "chat_format": "x", "do_sample": True, "": 1})
    (line,) = CheckpointSettings.read(config, VOCAB).remarks()
    assert line == (
        "generation_config has settings that transformers' GenerationConfig has not: , chat_format, temprature"
    )


def test_every_setting_of_transformers_is_known() -> None:
    assert {name for name in GenerationConfig().to_dict() if name[0] != "_"} <= _KNOWN


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, SamplingOptions(0.7, 20, 0.8)),
        ({"temperature": 0.5, "seed": 3}, SamplingOptions(0.5, 20, 0.8, seed=3)),
        ({"temperature": 0}, SamplingOptions()),
        ({"top_k": 0, "top_p": 1.0}, SamplingOptions(0.7)),
        ({"min_p": 0.1, "top_k": 3}, SamplingOptions(0.7, 3, 0.8, 0.1)),
    ],
)
def test_given_options_come_before_others(given: dict[str, Any], expected: SamplingOptions) -> None:
    assert SamplingOptions(0.7, 20, 0.8).over(**given) == expected


def test_greedy_choice_with_a_given_limit_is_refused() -> None:
    with pytest.raises(InputError, match="temperature must be above 0 with top_p=0.5"):
        SamplingOptions(0.7, 20, 0.8).over(temperature=0, top_p=0.5)


# -- calls


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(settings))
def test_draws_follow_the_distribution_of_transformers(settings: dict[str, Any]) -> None:
    session = session_of(ROWS, do_sample=True, **settings)
    prompts = PROMPT.repeat(ROWS, 1)
    drawn = []
    for seed in range(CALLS):
        session.reset()
        drawn.append(next(iter(session.generate(prompts, 1, seed=seed, generation_config="model"))))
    session.reset()
    logits = session.prefill(prompts)[:1]
    check_draws(torch.cat(drawn), expected_probabilities(PROMPT, logits, settings))


def test_a_wrong_distribution_is_noticed() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    right = expected_probabilities(PROMPT, logits, SETTINGS[0])
    other = expected_probabilities(PROMPT, logits, {**SETTINGS[0], "temperature": 0.75})
    drawn = torch.multinomial(other, ROWS * CALLS, replacement=True, generator=torch.Generator().manual_seed(1))
    check_draws(drawn, other)
    with pytest.raises(AssertionError):
        check_draws(drawn, right)


def generated(session: Session, **options: Any) -> list[int]:
    session.reset()
    return list(session.generate(PROMPT, 8, **options))


def test_a_call_is_greedy_unless_it_asks_for_the_config() -> None:
    session = session_of(do_sample=True, temperature=2.0)
    greedy = generated(session_of())
    assert generated(session) == greedy
    drawn = generated(session, generation_config="model", seed=1)
    assert drawn != greedy and drawn == generated(session, temperature=2.0, top_k=50, seed=1)
    assert generated(session, generation_config="model", temperature=0) == greedy
    assert generated(session, generation_config="model", top_k=1) == greedy


def test_a_given_config_replaces_settings_and_leaves_the_others() -> None:
    session = session_of(suppress_tokens=generated(session_of())[:2], top_p=0.3)
    expected = session_of(suppress_tokens=generated(session_of())[:2])
    config = GenerationConfig(do_sample=True, temperature=1.5, max_new_tokens=3)
    drawn = generated(session, generation_config=config, seed=2)
    assert drawn == generated(expected, temperature=1.5, top_k=50, top_p=0.3, seed=2)
    session.reset()
    assert list(session.generate(PROMPT, generation_config=config, seed=2)) == drawn[:3]
    config = GenerationConfig(eos_token_id=drawn[0], do_sample=True, temperature=1.5)
    assert generated(session, generation_config=config, seed=2) == drawn[:1]
    assert config.top_p is None and session.generation_config.eos_token_id is None


def test_what_is_no_config_is_refused() -> None:
    with pytest.raises(InputError, match="generation_config must be 'model', a GenerationConfig or None, got 'mine'"):
        session_of().generate(PROMPT, generation_config="mine")


def test_a_given_config_names_the_token_that_a_decoder_starts_with(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_seq2seq("bart")
    session = live_session(model, False, 16, tokenizer=byte_tokenizer())
    seen: list[int] = []

    def start(config: Any, rows: int, device: torch.device) -> torch.Tensor:
        tokens = start_tokens(config, rows, device)
        seen.extend(tokens.flatten().tolist())
        return tokens

    monkeypatch.setattr("exportable_cache.session.generate.start_tokens", start)
    for given in (GenerationConfig(decoder_start_token_id=7), None):
        session.reset()
        list(session.stream_text("ab", 2, generation_config=given))
    assert seen == [7, model.generation_config.decoder_start_token_id]
