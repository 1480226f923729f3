"""The shipped demo model answers from its cache, and only from a correct one."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from exportable_cache.demo import demo_path
from exportable_cache.demo.task import (
    NAMES,
    Question,
    accuracy,
    count_tokens,
    make_filler,
    make_question,
    make_questions,
)

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# Unseen seed; every asked fact ends further back than the window reaches.
HELD_OUT = make_questions(20, seed=777, min_distance=16, tokens=(60, 250))
LONG = make_questions(6, seed=778, facts=(15, 28), min_distance=150, tokens=(270, 330))


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(demo_path())


@pytest.fixture(scope="module")
def model():
    return transformers.AutoModelForCausalLM.from_pretrained(demo_path()).eval()


def answerer(model, tokenizer) -> Callable[[str], str]:
    """Greedy answers with the plain dynamic cache of transformers."""

    @torch.no_grad()
    def answer(prompt: str) -> str:
        inputs = tokenizer(prompt, return_tensors="pt")
        cache = transformers.DynamicCache(config=model.config)
        output = model.generate(**inputs, past_key_values=cache)
        return tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)

    return answer


def test_folder_is_small_and_complete() -> None:
    files = [path for path in demo_path().rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 4_000_000
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= {path.name for path in files}


def test_finding_the_folder_loads_no_torch() -> None:
    code = (
        "import sys, exportable_cache.demo, exportable_cache.demo.task\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    root = demo_path().parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


def test_both_layer_types_are_present(model) -> None:
    assert set(model.config.layer_types) == {"sliding_attention", "full_attention"}
    assert model.config.sliding_window == 16
    windows = [layer.self_attn.sliding_window for layer in model.model.layers]
    assert windows == [16, None, 16, None]


def test_answers_facts_beyond_the_window(model, tokenizer) -> None:
    assert min(question.distance for question in HELD_OUT) >= model.config.sliding_window
    assert accuracy(answerer(model, tokenizer), HELD_OUT) >= 0.95


def test_answers_in_longer_prompts(model, tokenizer) -> None:
    assert accuracy(answerer(model, tokenizer), LONG) >= 0.9


def test_stops_at_the_end_token(model, tokenizer) -> None:
    inputs = tokenizer(HELD_OUT[0].prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=20)[0, inputs.input_ids.shape[1] :]
    assert tokenizer.decode(output) == HELD_OUT[0].answer + tokenizer.eos_token


def test_collapses_without_the_full_layers_memory(tokenizer) -> None:
    config = transformers.AutoConfig.from_pretrained(demo_path())
    config.layer_types = ["sliding_attention"] * config.num_hidden_layers
    blind = transformers.AutoModelForCausalLM.from_pretrained(demo_path(), config=config).eval()
    assert accuracy(answerer(blind, tokenizer), HELD_OUT[:10]) <= 0.1


def test_tokens_round_trip_and_are_counted_without_the_tokenizer(tokenizer) -> None:
    for question in HELD_OUT:
        text = question.prompt + question.answer
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids) == text
        assert len(ids) == count_tokens(text)
        assert len(tokenizer(question.prompt).input_ids) == question.tokens
        assert len(tokenizer(question.answer).input_ids) == 5


@pytest.mark.parametrize("text", ["Hello, Wörld! 12 34\n\t世界 🙂", "ambers' Amber", "", "  x "])
def test_any_text_round_trips(tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_chat_template_passes_user_text_through(tokenizer) -> None:
    def render(messages: list[dict[str, str]]) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    first = HELD_OUT[0]
    turns = [
        {"role": "user", "content": first.prompt},
        {"role": "assistant", "content": first.answer},
        {"role": "user", "content": "amber?"},
    ]
    assert render(turns[:1]) == first.prompt
    assert render(turns) == f"{first.prompt}{first.answer}{tokenizer.eos_token} amber?"


def test_questions_depend_on_the_seed_only() -> None:
    assert make_questions(20, seed=5) == make_questions(20, seed=5)
    assert make_questions(20, seed=5) != make_questions(20, seed=6)


@pytest.mark.parametrize("question", make_questions(20, seed=9, min_distance=16), ids=lambda question: question.name)
def test_answer_and_distance_agree_with_the_prompt(question: Question) -> None:
    fact = f"the code of {question.name} is{question.answer}"
    assert question.prompt.count(fact) == 1
    assert question.prompt.endswith(f" {question.name}?")
    after = question.prompt.partition(fact)[2]
    assert count_tokens(after) == question.distance >= 16
    # The asked name is stated once and asked once: no distractor mentions it.
    assert len(re.findall(rf"\b{question.name}\b", question.prompt)) == 2


def test_fillers_mention_only_the_names_they_are_given() -> None:
    rng = random.Random(0)
    allowed = NAMES[:3]
    text = " ".join(make_filler(rng, allowed) for _ in range(300))
    words = set(text.replace(".", "").split())
    assert words & set(NAMES) == set(allowed)
    assert not set(make_filler(rng, ()).replace(".", "").split()) & set(NAMES)


def test_impossible_bounds_are_refused() -> None:
    with pytest.raises(ValueError):
        make_question(random.Random(0), facts=2, fillers=0, min_distance=1000)
    with pytest.raises(ValueError):
        make_questions(1, tokens=(1, 2))


def test_accuracy_scores_exact_codes() -> None:
    questions = make_questions(10, seed=1)
    answers = {question.prompt: question.answer for question in questions}
    assert accuracy(answers.__getitem__, questions) == 1.0
    assert accuracy(lambda prompt: answers[prompt].strip() + " more", questions) == 1.0
    assert accuracy(lambda prompt: answers[prompt][:-2], questions) == 0.0
    with pytest.raises(ValueError):
        accuracy(answers.__getitem__, [])
