"""Answers of a given form: a model of random weights gives JSON of a schema."""

from __future__ import annotations

import gc
import json
import re
import time

import pytest
import torch

pytest.importorskip("llguidance", reason="the serve extra is not installed")

from exportable_cache import ExportableCache, Session
from exportable_cache.decoding import Completer, CompletionOptions, Sampling
from exportable_cache.errors import InputError, MissingDependencyError
from exportable_cache.generation import constraint as constraint_module
from exportable_cache.generation.constraint import Constraint, ConstraintCompiler, exact_schema
from exportable_cache.models.tokenizers.text import TextTokenizer

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
        ("json_schema", "[1]", "the JSON schema must be an object, got list"),
        ("json_schema", '{"const": NaN}', "the JSON schema cannot be read: NaN is not JSON"),
        ("json_schema", '{"type": "string", "pattern": "\\ud83d"}', "cannot be enforced"),
        ("json_schema", '{"type": "string", "pattern": "\ud83d"}', "got .* at character 31"),
        ("regex", "a\ud83d", r"got '\\ud83d' at character 1; correct it"),
        ("json_schema", '{"type": "nothing"}', "cannot be enforced"),
        ("json_schema", '{"$ref": "#/definitions/none"}', "cannot be enforced"),
        ("json_schema", json.dumps({"type": "string", "pattern": "(a+)+(?=b)"}), "cannot be enforced"),
        ("regex", "(", "cannot be enforced"),
        ("regex", "(a{1000}){1000}{1000}", "cannot be enforced"),
        ("lark", "start: other", "cannot be enforced"),
        ("xml", "x", "must be one of json_schema, regex, lark"),
        ("regex", 5, "a constraint must be text, got int"),
    ],
)
def test_what_cannot_be_followed_is_one_sentence(completer: Completer, kind, text, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        answer(completer, Constraint(kind, text))
    assert "\n" not in str(caught.value)
    assert answer(completer, Constraint("regex", "yes|no"))[1] == "stop"


#: These keep llguidance busy for hours.
ENDLESS = {"allOf": [{"type": "string", "pattern": f"a{index}"} for index in range(30)]}
#: This ends its process. A number as large is refused before it gets there.
CRASHING = '{"type": "integer", "minimum": -9223372036854775808, "maximum": -9223372036854775808}'


def test_a_form_without_end_is_ended_and_the_next_is_followed(
    completer: Completer, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(completer, Constraint("regex", "yes|no"))
    monkeypatch.setattr(constraint_module, "MOST_SECONDS", 0.5)
    start = time.monotonic()
    with pytest.raises(InputError, match="cannot be enforced: it runs longer than 0.5 s; pass a simpler one"):
        answer(completer, Constraint("json_schema", json.dumps(ENDLESS)))
    assert time.monotonic() - start < 4
    monkeypatch.undo()
    assert answer(completer, Constraint("regex", "yes|no"))[0] in ("yes", "no")


def test_a_form_that_crashes_takes_no_other_along(completer: Completer, monkeypatch: pytest.MonkeyPatch) -> None:
    options = CompletionOptions(constraint=Constraint("regex", "yes|no"))
    other = completer.complete([5, 6, 7], options)
    monkeypatch.setattr(constraint_module, "exact_schema", lambda text: text)
    with pytest.raises(InputError, match="cannot be enforced: its process was ended by SIG(SEGV|ABRT)"):
        answer(completer, Constraint("json_schema", CRASHING))
    assert "".join(piece.text for piece in other) in ("yes", "no")


def test_a_process_that_is_gone_amid_an_answer_is_one_sentence(completer: Completer) -> None:
    given = completer.complete([5, 6, 7], CompletionOptions(constraint=Constraint("regex", "[0-9]{9}")))
    next(given)
    completer.close()
    with pytest.raises(InputError, match="ended by SIGKILL|constraint of this generation is closed"):
        list(given)
    assert answer(completer, Constraint("regex", "yes|no"))[1] == "stop"


def test_a_slow_form_has_a_tenth_of_a_second_a_token_on_average(completer: Completer) -> None:
    follower = completer.follow(Constraint("regex", "[0-9]{9}"))
    follower._seconds = -1.0  # as after slow tokens
    seconds = []
    follower._process.call = lambda limit, *_: seconds.append(limit) or ({"ended": False}, b"")
    for _ in range(20):
        follower.take(5)
    assert seconds[0] == constraint_module.TOKEN_SECONDS and seconds[-1] > constraint_module.TOKEN_SECONDS


def test_answers_that_are_given_up_leave_no_process_taken(completer: Completer) -> None:
    options = CompletionOptions(constraint=Constraint("regex", "[0-9]{9}"))
    answers = [completer.complete([5, 6, 7], options) for _ in range(4)]
    compiler = completer._constraints
    compiler._free.clear()
    processes = {one.follower._process for one in answers}
    assert len(processes) == 4 and not processes & set(compiler._free)
    answers[0].close()
    assert compiler._free == [answers[0].follower._process]
    del answers
    gc.collect()
    # Two are kept; the others end.
    assert len(compiler._free) == 2 and sum(process.is_alive for process in processes) <= 2


NUMBER = {"type": "number"}


@pytest.mark.parametrize(
    ("schema", "exact"),
    [
        ({"type": "integer", "minimum": -(2**63)}, {"type": "integer", "minimum": -(2**53)}),
        ({"type": "integer", "maximum": 2**64 - 1}, {"type": "integer", "maximum": 2**53}),
        ({"exclusiveMaximum": 2**63, "exclusiveMinimum": 1.5}, {"exclusiveMaximum": 2**53, "exclusiveMinimum": 1.5}),
        ({"type": "integer", "maximum": 1e19}, {"type": "integer", "maximum": 2**53}),
        ({"type": "number", "minimum": -1e20, "maximum": 1e20}, None),
        ({"const": 2**53, "default": 2**60, "examples": [0.12345678901234567]}, {"const": 2**53}),
        # Names of properties are no keywords.
        ({"properties": {"default": NUMBER, "minimum": NUMBER}}, None),
        ({"enum": [0.1, -1e22, 123456.789012345, "9007199254740993"]}, None),
    ],
)
def test_numbers_of_a_schema_that_are_followed(schema, exact) -> None:
    assert json.loads(exact_schema(json.dumps(schema))) == (exact or schema)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ('{"const": 9007199254740993}', "const must be a whole number of at most 2[*][*]53 .*, got 9007199254740993; "),
        ('{"enum": [{"a": [-9007199254740993]}]}', "enum must be .*, got -9007199254740993"),
        ('{"minimum": 9223372036854775808}', "minimum must be .*, got 9223372036854775808"),
        ('{"type": "integer", "minimum": 1e19}', r"minimum must be .*, got 1E\+19"),
        ('{"maximum": -9223372036854775809}', "maximum must be .*, got -9223372036854775809"),
        ('{"properties": {"const": {"const": 1234567890123456789}}}', "const must be .*, got 1234567890123456789"),
        (
            '{"anyOf": [{"multipleOf": 0.12345678901234567}]}',
            "multipleOf must be .*, got 0.12345678901234567; round it",
        ),
        ('{"const": 123456789.12345679}', "const must be a number of at most 15 digits .*, got 123456789.12345679"),
        ('{"const": 1e400}', r"got 1E\+400"),
        ('{"const": 1e-400}', "got 1E-400"),
        ('{"maxItems": 1' + "0" * 5000 + "}", "maxItems must be|cannot be read"),
    ],
)
def test_numbers_of_a_schema_that_would_come_out_otherwise_are_refused(schema: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Constraint("json_schema", schema)


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        (("x" * 1025,), "stop must be texts of at most 1024 characters, got one of 1025; shorten it"),
        (tuple("x" * index for index in range(1, 66)), "stop must be at most 64 texts, got 65; leave some out"),
        (("",), "stop must be texts of at least one character"),
        ("END", "stop must be texts of at least one character, got 'END'"),
    ],
)
def test_stops_that_would_slow_each_token_are_refused(stop, message: str, completer: Completer) -> None:
    with pytest.raises(InputError, match=message):
        CompletionOptions(stop=stop)
    if isinstance(stop, tuple) and stop[0]:
        with pytest.raises(InputError, match=message):
            next(completer.session.stream_text("a", stop=list(stop)))


def test_a_model_without_the_characters_is_told_so() -> None:
    tokenizer = byte_tokenizer()
    model = tiny_model("llama", vocab_size=40)
    session = Session.from_model(model, ExportableCache.from_model(model, 32), tokenizer=tokenizer)
    with pytest.raises(InputError, match="the constraint allows no token of this model"):
        list(Completer(session).complete([5], CompletionOptions(constraint=Constraint("regex", "ÿ"))))


def test_tokenizers_that_are_read_alone_serve_and_others_are_refused(tmp_path, monkeypatch) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    alone = TextTokenizer(tmp_path, lambda: pytest.fail("the whole tokenizer is not needed"))
    follower = ConstraintCompiler(alone, SIZE, {SIZE - 1}).follow(Constraint("regex", "a"))
    allowed = follower.only_allowed(torch.zeros(1, SIZE)).isfinite().nonzero()[:, 1].tolist()
    assert allowed == byte_tokenizer()("a")["input_ids"]
    with pytest.raises(InputError, match="got object; export the model with its fast tokenizer"):
        ConstraintCompiler(object(), SIZE, ())
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'exportable-cache\[serve\]'"):
        ConstraintCompiler(alone, SIZE, ())
