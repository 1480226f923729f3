"""Settings of a checkpoint's generation config: tokens are those of transformers' `generate`, or a setting is named."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from exportable_cache import Session, export, load
from exportable_cache.decoding import (
    Completer,
    CompletionOptions,
    Constraint,
    ContinuousBatch,
    PromptLookup,
    beam_search,
)
from exportable_cache.decoding.completion import Completion
from exportable_cache.errors import InputError
from exportable_cache.generation.checkpoint_settings import CheckpointSettings, RowStart
from exportable_cache.generation.sampling import Sampler, Sampling

from ..support.models import VOCAB, tiny_model, tokens
from ..support.seq2seq import encoder_inputs, tiny_seq2seq
from ..support.sessions import live_session
from .byte_tokenizer import byte_tokenizer

CAPACITY, LENGTH = 64, 16
PROMPT = tokens(9, seed=1)


def configured(**settings: Any) -> PreTrainedModel:
    model = tiny_model("llama")
    model.generation_config = GenerationConfig(**{"pad_token_id": 0, **settings})
    return model


def upstream(settings: dict[str, Any], prompt: torch.Tensor = PROMPT, limit: int | None = LENGTH) -> list[int]:
    """Greedy tokens of transformers."""
    asked = {} if limit is None else {"max_new_tokens": limit}
    return configured(**settings).generate(prompt, do_sample=False, **asked)[0, prompt.shape[1] :].tolist()


PLAIN = upstream({})
#: A token that comes early, taken for an end.
END = PLAIN[3]
ALONE: dict[str, dict[str, Any]] = {
    "suppress_tokens": {"suppress_tokens": [PLAIN[2]]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [PLAIN[0]]},
    "bad_words_ids": {"bad_words_ids": [[PLAIN[1], PLAIN[2]], [PLAIN[5]]]},
    "sequence_bias": {"sequence_bias": [[[PLAIN[1]], -20.0], [[PLAIN[0], 77], 9.0]]},
    "repetition_penalty": {"repetition_penalty": 3.0},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 4.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1, "encoder_repetition_penalty": 4.0},
    "min_length": {"min_length": 15, "eos_token_id": END},
    "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": END},
    "forced_eos_token_id": {"forced_eos_token_id": 5},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 1.6), "eos_token_id": 7},
}
TOGETHER = {
    "suppress_tokens": [PLAIN[2], VOCAB + 5],
    "begin_suppress_tokens": [PLAIN[0]],
    "bad_words_ids": [[PLAIN[5]], [END]],
    "sequence_bias": [[[PLAIN[1]], 2.0]],
    "repetition_penalty": 1.3,
    "encoder_repetition_penalty": 1.5,
    "no_repeat_ngram_size": 2,
    "min_new_tokens": 4,
    "forced_eos_token_id": [5, 6],
    "exponential_decay_length_penalty": (8, 1.05),
    "eos_token_id": [END, 5, 6],
    "remove_invalid_values": True,
    "renormalize_logits": True,
}
EACH = [pytest.param(settings, id=name) for name, settings in ALONE.items()] + [pytest.param(TOGETHER, id="together")]


# -- the same tokens as transformers


@pytest.mark.parametrize("settings", EACH)
def test_greedy_tokens_are_those_of_transformers(settings: dict[str, Any]) -> None:
    expected = upstream(settings)
    ends = {"eos_token_id": settings["eos_token_id"]} if "eos_token_id" in settings else {}
    assert expected != upstream(ends), "the setting has to change something"
    session = live_session(configured(**settings), False, CAPACITY)
    assert list(session.generate(PROMPT, LENGTH)) == expected


@pytest.mark.parametrize("settings", [ALONE["forced_eos_token_id"], ALONE["repetition_penalty"], TOGETHER])
def test_rows_of_a_batch_give_what_they_give_alone(settings: dict[str, Any]) -> None:
    prompts = [tokens(length, seed=length)[0] for length in (3, 9, 6)]
    session = live_session(configured(**settings), False, CAPACITY, batch_size=3)
    steps = torch.stack(list(session.generate(prompts, LENGTH)), dim=1).tolist()
    for prompt, row in zip(prompts, steps, strict=True):
        expected = upstream(settings, prompt[None])
        assert row[: len(expected)] == expected and not any(row[len(expected) :])


@pytest.mark.parametrize("settings", [ALONE["no_repeat_ngram_size"], TOGETHER])
def test_speculation_gives_the_tokens_of_plain_decoding(settings: dict[str, Any]) -> None:
    prompt = PROMPT.repeat(1, 2)
    session = live_session(configured(**settings), False, CAPACITY, score_length=5)
    assert list(session.generate(prompt, LENGTH, draft=PromptLookup(4))) == upstream(settings, prompt)


def test_steps_that_would_choose_in_a_graph_choose_outside_of_it() -> None:
    session = live_session(configured(**TOGETHER), False, CAPACITY, steps_per_launch=4)
    assert session.stepper.chooses_in_graph
    assert list(session.generate(PROMPT, LENGTH)) == upstream(TOGETHER)


def test_requests_of_a_continuous_batch_follow_the_settings() -> None:
    batch = ContinuousBatch.from_model(configured(**TOGETHER), CAPACITY, 2)
    prompts = [tokens(length, seed=length) for length in (3, 9, 6)]
    requests = [batch.submit(prompt, LENGTH) for prompt in prompts]
    list(batch.run())
    assert [request.tokens for request in requests] == [upstream(TOGETHER, prompt) for prompt in prompts]


def completion(session: Session, **options: Any) -> Completion:
    return Completer(session).complete(PROMPT[0].tolist(), CompletionOptions(**options))


def test_completions_follow_the_settings() -> None:
    session = live_session(configured(**TOGETHER), False, CAPACITY, tokenizer=byte_tokenizer())
    assert [piece.token for piece in completion(session, max_new_tokens=LENGTH)] == upstream(TOGETHER)


@pytest.mark.parametrize("settings", [{}, ALONE["repetition_penalty"], {**TOGETHER, "length_penalty": 2.0}])
def test_beams_are_those_of_transformers(settings: dict[str, Any]) -> None:
    model = configured(**{"eos_token_id": END, **settings})
    found = model.generate(PROMPT, num_beams=3, num_return_sequences=3, max_new_tokens=LENGTH, early_stopping=True)
    session = live_session(configured(**{"eos_token_id": END, **settings}), False, CAPACITY, batch_size=3)
    for hypothesis, row in zip(beam_search(session, PROMPT, LENGTH), found[:, PROMPT.shape[1] :].tolist(), strict=True):
        # Ended rows are filled up with the end token, as 0 is no padding there.
        assert hypothesis.tokens == row[: len(hypothesis.tokens)] and {*row[len(hypothesis.tokens) :]} <= {END}


def test_a_prompt_in_two_parts_is_as_long_as_both() -> None:
    settings = {"min_length": 15, "max_length": 20, "forced_eos_token_id": 5, "eos_token_id": [END, 5]}
    session = live_session(configured(**settings), False, CAPACITY)
    session.prefill(PROMPT[:, :4])
    assert list(session.generate(PROMPT[:, 4:])) == upstream(settings, limit=None)


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_encoder_decoders_follow_the_settings(family: str) -> None:
    def made() -> PreTrainedModel:
        # transformers' own cache of T5 has as many layers as the encoder.
        model = tiny_seq2seq(family, **({"num_decoder_layers": 2} if family == "t5" else {}))
        model.generation_config.update(**settings)
        return model

    settings = {
        "forced_bos_token_id": 9,
        "forced_eos_token_id": 2,
        "begin_suppress_tokens": [11],
        "encoder_no_repeat_ngram_size": 2,
        "encoder_repetition_penalty": 2.0,
        "no_repeat_ngram_size": 2,
        "min_length": 8,
        "max_length": 15,
    }
    inputs = [encoder_inputs(made(), length, seed=length) for length in (5, 8)]
    expected = [made().generate(**one, do_sample=False)[0, 1:].tolist() for one in inputs]
    model = made()
    start = torch.tensor([[model.generation_config.decoder_start_token_id]])
    session = live_session(model, False, CAPACITY)
    for one, tokens_of in zip(inputs, expected, strict=True):
        session.encode(**one)
        assert list(session.generate(start)) == tokens_of
    # Padding is not of what the encoder was given.
    padded = {
        name: torch.stack([torch.nn.functional.pad(one[name][0], (0, 8 - one[name].shape[1])) for one in inputs])
        for name in inputs[0]
    }
    session = live_session(made(), False, CAPACITY, batch_size=2)
    session.encode(**padded)
    rows = torch.stack(list(session.generate(start.expand(2, 1).contiguous())), dim=1).tolist()
    assert [row[: len(one)] for row, one in zip(rows, expected, strict=True)] == expected


@pytest.mark.usefixtures("fake_backend")
def test_a_bundle_follows_the_settings(tmp_path: Path) -> None:
    settings = {**TOGETHER, "max_new_tokens": LENGTH}
    configured(**settings).save_pretrained(tmp_path / "model")
    export(tmp_path / "model", "fake", CAPACITY, tmp_path / "out", verify=False)
    assert list(load(tmp_path / "out").generate(PROMPT)) == upstream(settings, limit=None)


def test_drawn_tokens_follow_the_settings() -> None:
    session = live_session(configured(suppress_tokens=PLAIN[:4], min_new_tokens=12, eos_token_id=7), False, CAPACITY)
    drawn = list(session.generate(PROMPT, 12, temperature=1.5, seed=3))
    assert len(drawn) == 12 and not {*drawn} & {*PLAIN[:4], 7}


# -- limits, and what a call asks for


@pytest.mark.parametrize(("settings", "count"), [({"max_new_tokens": 3}, 3), ({"max_length": 13}, 4), ({}, 40)])
def test_the_limit_is_the_checkpoints_unless_the_call_has_one(settings: dict[str, Any], count: int) -> None:
    session = live_session(configured(**settings), False, 48, tokenizer=byte_tokenizer())
    assert len(list(session.generate(PROMPT))) == count
    session.reset()
    assert len(list(session.generate(PROMPT, 5))) == 5
    assert len(list(completion(session))) == count
    assert len(list(completion(session, max_new_tokens=5))) == 5
    batch = ContinuousBatch.from_model(configured(**settings), 48, 1)
    requests = [batch.submit(PROMPT), batch.submit(PROMPT, 5)]
    list(batch.run())
    assert [len(request.tokens) for request in requests] == [count, 5]


def test_a_default_limit_is_no_more_than_what_fits() -> None:
    settings = {"max_new_tokens": 1000, "forced_eos_token_id": 5}
    session = live_session(configured(**settings), False, 16)
    answer = list(session.generate(PROMPT))
    # The newest token takes no slot, and is the last, so it is the one that is forced.
    assert len(answer) == 16 - 9 + 1 and answer[-1] == 5


def test_a_prompt_beyond_the_checkpoints_length_is_refused() -> None:
    session = live_session(configured(max_length=9), False, CAPACITY)
    with pytest.raises(InputError, match="max_length .* must be above the 9 tokens .*, got 9; pass max_new_tokens"):
        session.generate(PROMPT)
    assert session.length.tolist() == [0] and len(list(session.generate(PROMPT, 2))) == 2


def test_arguments_and_set_fields_come_before_the_checkpoint() -> None:
    session = live_session(configured(repetition_penalty=3.0, suppress_tokens=[PLAIN[2]]), False, CAPACITY)
    session.generation_config.suppress_tokens = None
    assert list(session.generate(PROMPT, LENGTH, repetition_penalty=1.0)) == PLAIN
    session.reset()
    session.generation_config.suppress_tokens = [PLAIN[2]]
    expected = upstream({"repetition_penalty": 1.5, "suppress_tokens": [PLAIN[2]]})
    assert list(session.generate(PROMPT, LENGTH, repetition_penalty=1.5)) == expected


def test_a_form_that_was_asked_for_comes_before_the_checkpoint() -> None:
    pytest.importorskip("llguidance")
    tokenizer = byte_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer))
    model.generation_config = GenerationConfig(
        suppress_tokens=tokenizer.convert_tokens_to_ids(["y", "o"]),
        forced_eos_token_id=tokenizer.eos_token_id,
        max_new_tokens=3,
    )
    session = live_session(model, False, CAPACITY, tokenizer=tokenizer)
    assert "".join(piece.text for piece in completion(session, constraint=Constraint("regex", "yes|na"))) == "na"
    assert "".join(piece.text for piece in completion(session, constraint=Constraint("regex", "yo"))) == "yo"


# -- what is refused, and what is named


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("eos_token_id", VOCAB, "must be token ids from 0 to 127, got 128; correct generation_config.json"),
        ("eos_token_id", [3, -7], "must be token ids from 0 to 127, got -7"),
        ("eos_token_id", "x", "must be token ids from 0 to 127, got 'x'"),
        ("eos_token_id", True, "must be token ids from 0 to 127, got True"),
        ("forced_eos_token_id", 500, "must be a token id from 0 to 127, got 500"),
        ("forced_bos_token_id", "x", "must be a token id from 0 to 127, got 'x'"),
        ("suppress_tokens", 5, "must be a list of token ids, got 5"),
        ("bad_words_ids", [5], "must be a list of lists of token ids"),
        ("bad_words_ids", [[500]], "must be a token id from 0 to 127, got 500"),
        ("sequence_bias", [[5, 1.0]], "must be a list of pairs of token ids and a number"),
        ("sequence_bias", [[[5], "x"]], "must be a list of pairs of token ids and a number"),
        ("repetition_penalty", -1.0, "must be a number above 0, got -1.0"),
        ("no_repeat_ngram_size", -2, "must be an int of at least 0, got -2"),
        ("min_new_tokens", "3", "must be an int of at least 0, got '3'"),
        ("max_new_tokens", "3", "must be an int of at least 1, got '3'"),
        ("max_length", 0, "must be an int of at least 1, got 0"),
        ("exponential_decay_length_penalty", [1], "must be a pair of an int and a number"),
        ("length_penalty", "x", "must be a number, got 'x'"),
    ],
)
def test_a_value_that_is_none_is_refused_by_name(field: str, value: Any, message: str) -> None:
    config = GenerationConfig()
    setattr(config, field, value)
    found = message if field == "bad_words_ids" else f"{field} of the generation config {message}"
    with pytest.raises(InputError, match=found.replace("[", r"\[")):
        CheckpointSettings.read(config, VOCAB)


def test_settings_that_leave_no_token_are_refused() -> None:
    session = live_session(configured(suppress_tokens=list(range(VOCAB))), False, CAPACITY)
    with pytest.raises(InputError, match="excludes every token; correct generation_config.json"):
        list(session.generate(PROMPT, 2))


@pytest.mark.usefixtures("fake_backend")
def test_a_setting_that_is_not_followed_is_warned_of_once_and_recorded(tmp_path: Path) -> None:
    model = configured(num_beams=4, guidance_scale=1.5, do_sample=True, temperature=0.7, top_k=1)
    session = live_session(model, False, CAPACITY)
    with pytest.warns(UserWarning, match="which is not followed") as warned:
        list(session.generate(PROMPT, 2))
    assert sorted(str(one.message).split("=")[0].split()[-1] for one in warned) == ["guidance_scale", "num_beams"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(session.generate(PROMPT, 2))
    bundle = export(model, "fake", CAPACITY, tmp_path / "out", verify=False)
    assert [remark.split("=")[0].split()[-1] for remark in bundle.manifest.remarks] == ["num_beams", "guidance_scale"]


def test_a_token_without_a_logit_is_refused_where_it_is_biased() -> None:
    rules = CheckpointSettings(rules={"sequence_bias": {(100,): 1.0}}).row_rules([RowStart(PROMPT[0])])
    sampler = Sampler(Sampling(), PROMPT, VOCAB, rules=rules)
    with pytest.raises(InputError, match="does not fit a model of 64 tokens"):
        sampler.choose(torch.zeros(1, 64))


# -- the tokens that end


@pytest.fixture
def tokenized() -> tuple[PreTrainedModel, Any]:
    """A model whose third token is the end of its tokenizer, which no config names."""
    tokenizer = byte_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer), eos_token_id=None)
    model.generation_config = GenerationConfig(pad_token_id=0)
    answer = model.generate(PROMPT, max_new_tokens=LENGTH, do_sample=False)[0, PROMPT.shape[1] :].tolist()
    assert answer[2] not in answer[:2]
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(answer[2])
    return model, tokenizer


@pytest.mark.usefixtures("fake_backend")
def test_the_tokenizers_end_counts_where_no_config_names_one(tokenized: Any, tmp_path: Path) -> None:
    model, tokenizer = tokenized
    session = live_session(model, False, CAPACITY, tokenizer=tokenizer)
    answer = list(session.generate(PROMPT, LENGTH))
    assert len(answer) == 3 and answer[-1] == tokenizer.eos_token_id
    session.reset()
    session.generation_config.eos_token_id = []
    assert len(list(session.generate(PROMPT, LENGTH))) == LENGTH
    session.generation_config.eos_token_id.append(answer[0])
    session.reset()
    assert list(session.generate(PROMPT, LENGTH)) == answer[:1]
    session.generation_config.eos_token_id = None
    bundle = export(model, "fake", CAPACITY, tmp_path / "out", tokenizer=tokenizer, verify=False)
    assert bundle.manifest.generation_config["eos_token_id"] == answer[-1]
    assert model.generation_config.eos_token_id is None
    assert list(load(bundle.path).generate(PROMPT, LENGTH)) == answer
    # A bundle of an earlier release has it in its tokenizer alone.
    session = load(bundle.path)
    session.generation_config.eos_token_id = None
    assert list(session.generate(PROMPT, LENGTH)) == answer
