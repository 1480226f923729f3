"""Answers of a given form: a model of random weights gives JSON of a schema."""

from __future__ import annotations

import json
import re

import pytest
import torch

pytest.importorskip("llguidance", reason="the serve extra is not installed")

from exportable_cache import ExportableCache, Session
from exportable_cache.decoding import Completer, CompletionOptions, Sampling
from exportable_cache.errors import InputError, MissingDependencyError
from exportable_cache.generation.constraint import Constraint, ConstraintCompiler
from exportable_cache.models.text_tokenizer import TextTokenizer

from ..support.models import tiny_model
from .byte_tokenizer import SIZE, byte_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,6}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
#: Without white space, which a model of random weights goes on with for ever.
TIGHT = {**SCHEMA, "x-guidance": {"whitespace_flexible": False}}


@pytest.fixture(scope="module")
def completer() -> Completer:
    # A head that is wider than the tokenizer, as many models have.
    model = tiny_model("llama", vocab_size=SIZE + 7, max_position_embeddings=512)
    model.generation_config.eos_token_id = SIZE - 1
    cache = ExportableCache.from_model(model, 400)
    return Completer(Session.from_model(model, cache, tokenizer=byte_tokenizer()))


def answer(completer: Completer, constraint: Constraint | None, count: int = 300, **options) -> tuple[str, str | None]:
    given = CompletionOptions(Sampling(**options), count, constraint=constraint)
    completion = completer.complete([5, 6, 7], given)
    return "".join(piece.text for piece in completion), completion.finish_reason


@pytest.mark.parametrize("seed", range(4))
def test_drawn_answers_are_json_of_the_schema(completer: Completer, seed: int) -> None:
    text, reason = answer(completer, Constraint("json_schema", json.dumps(TIGHT)), temperature=1.5, seed=seed)
    found = json.loads(text)
    assert reason == "stop"
    assert list(found) == ["name", "age", "kind", "tags"] and re.fullmatch("[a-z]{1,6}", found["name"])
    assert 0 <= found["age"] <= 150 and found["kind"] in ("cat", "dog") and len(found["tags"]) <= 3


def test_it_ends_where_nothing_may_follow_and_by_the_end_token(completer: Completer) -> None:
    assert answer(completer, Constraint("regex", "yes|no")) in (("yes", "stop"), ("no", "stop"))
    # Digits may go on for ever: the end token is among what may come, and nothing but digits.
    drawn = [answer(completer, Constraint("regex", "[0-9]+"), 80, temperature=1.5, seed=seed) for seed in range(20)]
    assert all(re.fullmatch("[0-9]+", text) for text, _ in drawn) and {reason for _, reason in drawn} >= {"stop"}
    assert answer(completer, Constraint("regex", "[0-9]{50}"), 3)[1] == "length"
    text, _ = answer(completer, Constraint("lark", 'start: ("ab" | "c")~4'), temperature=1.0, seed=0)
    assert re.fullmatch("(ab|c){4}", text)


def test_characters_of_several_tokens(completer: Completer) -> None:
    text, reason = answer(completer, Constraint("regex", "[äöü]{3}"), temperature=1.0, seed=1)
    assert re.fullmatch("[äöü]{3}", text) and reason == "stop"


def test_the_next_answer_is_free_again_and_log_probabilities_are_the_models(completer: Completer) -> None:
    plain, _ = answer(completer, None, 5)
    answer(completer, Constraint("regex", "yes|no"))
    assert answer(completer, None, 5)[0] == plain
    options = CompletionOptions(Sampling(), 3, alternatives=2, constraint=Constraint("regex", "yes"))
    pieces = list(completer.complete([5, 6, 7], options))
    free = list(completer.complete([5, 6, 7], CompletionOptions(Sampling(), 1, alternatives=2)))
    assert pieces[0].alternatives == free[0].alternatives and pieces[0].logprob < free[0].logprob


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("json_schema", "{", "the JSON schema cannot be read"),
        ("json_schema", "[" * 100000, "the JSON schema cannot be read"),
        ("json_schema", "[1]", "the JSON schema is list, not an object"),
        ("json_schema", '{"type": "nothing"}', "cannot be followed"),
        ("json_schema", '{"$ref": "#/definitions/none"}', "cannot be followed"),
        ("json_schema", json.dumps({"type": "string", "pattern": "(a+)+(?=b)"}), "cannot be followed"),
        ("regex", "(", "cannot be followed"),
        ("regex", "(a{1000}){1000}{1000}", "cannot be followed"),
        ("lark", "start: other", "cannot be followed"),
        ("xml", "x", "must be one of json_schema, regex, lark"),
        ("regex", 5, "a constraint is text, got int"),
    ],
)
def test_what_cannot_be_followed_is_one_sentence(completer: Completer, kind, text, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        answer(completer, Constraint(kind, text))
    assert "\n" not in str(caught.value)
    assert answer(completer, Constraint("regex", "yes|no"))[1] == "stop"


def test_a_model_without_the_characters_is_told_so() -> None:
    tokenizer = byte_tokenizer()
    model = tiny_model("llama", vocab_size=40)
    session = Session.from_model(model, ExportableCache.from_model(model, 32), tokenizer=tokenizer)
    with pytest.raises(InputError, match="no token of this model can go on in the form"):
        list(Completer(session).complete([5], CompletionOptions(constraint=Constraint("regex", "ÿ"))))


def test_tokenizers_that_are_read_alone_serve_and_others_are_refused(tmp_path, monkeypatch) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    alone = TextTokenizer(tmp_path, lambda: pytest.fail("the whole tokenizer is not needed"))
    follower = ConstraintCompiler(alone, SIZE, {SIZE - 1}).follow(Constraint("regex", "a"))
    allowed = follower.only_allowed(torch.zeros(1, SIZE)).isfinite().nonzero()[:, 1].tolist()
    assert allowed == byte_tokenizer()("a")["input_ids"]
    with pytest.raises(InputError, match="object is none; export the model with its fast tokenizer"):
        ConstraintCompiler(object(), SIZE, ())
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'exportable-cache\[serve\]'"):
        ConstraintCompiler(alone, SIZE, ())
