"""Rows of different length in a session: each row equals its prompt alone, in every kind of layer, form and target."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import exportable_cache
from exportable_cache import ExportableCache, Session, export, load
from exportable_cache.decoding import ContinuousBatch
from exportable_cache.errors import CacheFullError, InputError

from .decoding.byte_tokenizer import SIZE, byte_tokenizer
from .support.models import WINDOW, among, tiny_model, tokens
from .support.oracle import reference_logits
from .support.seq2seq import encoder_inputs, tiny_seq2seq
from .support.sessions import lowered_session

TOLERANCE = 1e-4
#: Shorter than the window, as long, and longer than it and than a chunk.
LENGTHS = (3, WINDOW, 29)
STEPS = 12
CHUNK = 13
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "gemma3_text": {},
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
}


def model_of(family: str) -> Any:
    model = tiny_model(family, **FAMILIES[family])
    model.generation_config.eos_token_id = None
    return model


def session_of(model: Any, rows: int = len(LENGTHS), length: int = 64, **options: Any) -> Session:
    slack = options.pop("slack", 0)
    return Session.from_model(
        model, ExportableCache.from_model(model, length, rows, rollback_slots=slack), prefill_chunk=CHUNK, **options
    )


def sequences(lengths: Sequence[int] = LENGTHS, more: int = STEPS, seed: int = 0) -> list[torch.Tensor]:
    return [tokens(length + more, seed=seed + row) for row, length in enumerate(lengths)]


def padded(rows: Sequence[torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch [rows, longest] and its mask, as a tokenizer pads it; the padding is a token that would change
    everything.
    """
    longest = max(row.shape[1] for row in rows)
    ids, mask = torch.full((len(rows), longest), 7), torch.zeros(len(rows), longest, dtype=torch.int64)
    for index, row in enumerate(rows):
        part = slice(longest - row.shape[1], None) if side == "left" else slice(row.shape[1])
        ids[index, part], mask[index, part] = row[0], 1
    return ids, mask


def check_rows(session: Session, model: Any, lengths: Sequence[int], side: str) -> None:
    """Prefill of the padded batch, then decode steps, against each row alone in a `DynamicCache`."""
    rows = sequences(lengths)
    ids, mask = padded([row[:, :length] for row, length in zip(rows, lengths, strict=True)], side)
    references = [reference_logits(model, row, length)[0] for row, length in zip(rows, lengths, strict=True)]
    logits = session.prefill(ids, attention_mask=mask)
    assert session.length.tolist() == list(lengths)
    for step in range(STEPS):
        for row, reference in enumerate(references):
            assert (logits[row] - reference[step]).abs().max() <= TOLERANCE, (row, step)
        logits = session.decode(torch.stack([row[0, n + step] for row, n in zip(rows, lengths, strict=True)]))
    assert session.length.tolist() == [length + STEPS for length in lengths]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_rows_equal_each_row_alone(family: str, side: str) -> None:
    model = model_of(family)
    session = session_of(model)
    check_rows(session, model, LENGTHS, side)
    session.reset()
    check_rows(session, model, (1, 20, 2), side)


def test_padded_rows_of_attention_sinks_equal_each_row_alone() -> None:
    model = model_of("llama")
    cache = ExportableCache.from_model(model, 64, 3, attention_sinks=2, attention_window=6)
    session = Session.from_model(model, cache, prefill_chunk=CHUNK)
    rows = sequences()
    ids, mask = padded([row[:, :length] for row, length in zip(rows, LENGTHS, strict=True)], "right")
    together = [session.prefill(ids, attention_mask=mask)]
    together += [
        session.decode(torch.stack([row[0, n + step] for row, n in zip(rows, LENGTHS, strict=True)]))
        for step in range(5)
    ]
    for index, (row, length) in enumerate(zip(rows, LENGTHS, strict=True)):
        cache = ExportableCache.from_model(model, 64, attention_sinks=2, attention_window=6)
        alone = Session.from_model(model, cache, prefill_chunk=CHUNK)
        logits = [alone.prefill(row[:, :length])]
        logits += [alone.decode(row[:, length + step]) for step in range(5)]
        for one, other in zip(logits, together, strict=True):
            assert (one[0] - other[index]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("family", among(["gemma3_text", "mamba2"], fast=()))  # fast: decoding/test_batching.py
def test_compiled_rows_equal_each_row_alone_in_the_graphs_of_even_ones(family: str) -> None:
    model = model_of(family)
    session = session_of(model, compile=True, buckets=False)
    session.warm_up()
    with torch._dynamo.config.patch(error_on_recompile=True):
        check_rows(session, model, LENGTHS, "left")


@pytest.mark.parametrize(
    ("family", "target", "form"),
    [
        ("gemma3_text", "pt2", "resident"),
        ("lfm2", "pt2", "explicit"),
        pytest.param("gemma3_text", "aoti", None, marks=pytest.mark.full),
    ],
)
def test_programs_on_disk_take_rows_of_different_length(family: str, target: str, form: str | None) -> None:
    model = model_of(family)
    options = {} if form is None else {"form": form}
    session = lowered_session(model, target, 64, batch_size=3, **options)
    check_rows(session, model, LENGTHS, "left")
    check_turns(session, model)


def check_turns(session: Session, model: Any) -> None:
    """A second prompt of other lengths behind the first: rows that hold tokens wait, and lose none."""
    session.reset()
    first, second = (20, 4, 11), (2, 19, 7)
    rows = sequences(first, more=30)
    ids, mask = padded([row[:, :length] for row, length in zip(rows, first, strict=True)], "right")
    session.prefill(ids, attention_mask=mask)
    parts = [row[:, start : start + more] for row, start, more in zip(rows, first, second, strict=True)]
    ids, mask = padded(parts, "left")
    logits = session.prefill(ids, attention_mask=mask)
    assert session.length.tolist() == [22, 23, 18]
    for step in range(3):
        for row, end in enumerate((22, 23, 18)):
            reference = reference_logits(model, rows[row][:, : end + step], end + step)[0, 0]
            assert (logits[row] - reference).abs().max() <= TOLERANCE, (row, step)
        logits = session.decode(torch.stack([row[0, end + step] for row, end in zip(rows, (22, 23, 18), strict=True)]))


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_wait_lose_nothing(family: str) -> None:
    model = model_of(family)
    check_turns(session_of(model), model)


def test_a_full_row_waits_at_the_end_of_the_cache() -> None:
    """There is no room behind it for what the other row is fed."""
    model = model_of("llama")
    session = session_of(model, 2, length=24)
    rows = sequences((22, 2), more=20)
    session.prefill(*padded([rows[0][:, :22], rows[1][:, :2]], "left"))
    logits = session.prefill(*padded([rows[0][:, 22:23], rows[1][:, 2:20]], "left"))
    for row, end in enumerate((23, 20)):
        assert (logits[row] - reference_logits(model, rows[row][:, :end], end)[0, 0]).abs().max() <= TOLERANCE
    with pytest.raises(CacheFullError, match="holds 23 of at most 24 tokens, 2 more do not fit"):
        session.prefill(*padded([rows[0][:, :2], rows[1][:, :3]], "left"))


def test_a_row_that_cannot_be_kept_apart_is_refused_by_its_layer() -> None:
    model = model_of("gemma3_text")
    session = session_of(model, 2)
    session.prefill(tokens(20, 2))
    session.runner.state = None
    session.target = "executorch"
    with pytest.raises(InputError, match=r"row 0 holds 20 tokens and waits .* layer 0 \(ring\) cannot take back"):
        session.prefill(*padded([tokens(2), tokens(9)], "left"))
    assert session.length.tolist() == [20, 20]


def test_a_step_that_fails_puts_the_rows_that_wait_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("lfm2")
    session = session_of(model, 2)
    rows = sequences((20, 4))
    session.prefill(*padded([rows[0][:, :20], rows[1][:, :4]], "left"))

    def fail(*arguments: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        patch.setattr(session.runner, "run", fail)
        session.prefill(*padded([tokens(2), tokens(9)], "left"))
    assert session.length.tolist() == [20, 4]
    # Its states may be half-written.
    with pytest.raises(InputError, match="did not finish"):
        session.decode(torch.stack([rows[0][0, 20], rows[1][0, 4]]))
    # Here they are not, as the step failed before it began.
    session.stepper.restore(session.stepper.state)
    logits = session.decode(torch.stack([rows[0][0, 20], rows[1][0, 4]]))
    for row, end in enumerate((21, 5)):
        assert (logits[row] - reference_logits(model, rows[row][:, :end], end)[0, 0]).abs().max() <= TOLERANCE


def test_rows_that_began_later_are_rewound_by_their_own_tokens() -> None:
    """What was written for them while they waited at position 0 is no past of theirs."""
    model = model_of("mistral")
    session = session_of(model, 2, length=64)
    rows = sequences((29, 5))
    session.prefill(*padded([rows[0][:, :29], rows[1][:, :5]], "left"))
    assert session.stepper.state.max_len_ever.tolist() == [29, 5]


# -- generation
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.7}])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mamba2"])
def test_a_list_of_prompts_is_answered_as_each_alone(family: str, options: dict[str, float]) -> None:
    model = model_of(family)
    prompts = [tokens(length, seed=length)[0] for length in LENGTHS]
    expected = [list(session_of(model, 1).generate(prompt[None], 10, **options)) for prompt in prompts]
    for given in (prompts, [prompt.tolist() for prompt in prompts]):
        found = torch.stack(list(session_of(model).generate(given, 10, **options)), dim=1)
        assert found.tolist() == expected
    ids, mask = padded([prompt[None] for prompt in prompts], "left")
    found = session_of(model).generate(input_ids=ids, attention_mask=mask, max_new_tokens=10, **options)
    assert torch.stack(list(found), dim=1).tolist() == expected


@pytest.mark.parametrize("steps", [1, 4])
def test_rows_that_ended_stay_as_they_ended(steps: int) -> None:
    """Their next prompt follows their own answer, not the padding that was fed while others went on."""
    model = model_of("gemma3_text")
    prompts = [tokens(length, seed=length)[0] for length in LENGTHS]
    free = [list(session_of(model, 1).generate(prompt[None], 14)) for prompt in prompts]
    stop = next(token for token in free[0][1:] if token not in free[1] and token not in free[2])
    session = session_of(model, slack=2, steps_per_launch=steps)
    list(session.generate(prompts, 14, stop=stop))
    count = free[0].index(stop) + 1
    assert session.length.tolist() == [LENGTHS[0] + count - 1, LENGTHS[1] + 13, LENGTHS[2] + 13]
    assert session.unfed == (None, free[1][-1], free[2][-1])
    further = [torch.tensor([*given, 5, 6, 9]) for given in ([stop], free[1][-1:], free[2][-1:])]
    ids, mask = padded([row[None] for row in further], "right")
    logits = session.prefill(ids, attention_mask=mask)
    answers = [free[0][: count - 1], free[1][:-1], free[2][:-1]]
    for row, answer in enumerate(answers):
        whole = torch.cat([prompts[row], torch.tensor(answer, dtype=torch.int64), further[row]])[None]
        assert (logits[row] - reference_logits(model, whole, whole.shape[1])[0, 0]).abs().max() <= TOLERANCE


def test_texts_of_different_length_are_answered_and_go_on() -> None:
    model = tiny_model("llama", vocab_size=SIZE, eos_token_id=SIZE - 1)

    def text_session(rows: int) -> Session:
        return session_of(model, rows, tokenizer=byte_tokenizer())

    prompts, further = ["hello", "a", "something longer"], ["", " and more", "b"]
    batch, alone = text_session(3), [text_session(1) for _ in prompts]
    for turn in (prompts, further):
        pieces = list(batch.stream_text(turn, 6))
        assert all(len(step) == 3 for step in pieces)
        together = ["".join(rows) for rows in zip(*pieces, strict=True)]
        assert together == [
            "".join(session.stream_text(prompt, 6)) for session, prompt in zip(alone, turn, strict=True)
        ]
    assert batch.length.tolist() == [int(session.length[0]) for session in alone]
    with pytest.raises(InputError, match="one per row, 3, got 2"):
        batch.stream_text(["a", "b"])


def test_answers_end_at_stop_strings_row_by_row() -> None:
    model = tiny_model("llama", vocab_size=SIZE, eos_token_id=SIZE - 1)
    options = {"max_new_tokens": 20, "temperature": 1.0, "seed": 0}

    def texts(**more: Any) -> list[str]:
        session = session_of(model, 2, tokenizer=byte_tokenizer())
        return ["".join(rows) for rows in zip(*session.stream_text(["hello", "é"], **options, **more), strict=True)]

    whole = texts()
    assert session_of(model, 2, tokenizer=byte_tokenizer()).generate_text(["hello", "é"], **options) == whole
    stop = next(whole[0][i : i + 2] for i in range(4, 12) if whole[0][i : i + 2] not in whole[1])
    assert texts(stop=stop) == [whole[0][: whole[0].index(stop)], whole[1]]


def test_decoders_of_an_encoder_take_rows_of_one_length() -> None:
    model = tiny_seq2seq("t5")
    cache = ExportableCache.from_model(model, 32, batch_size=2, max_encoder_len=20)
    session = Session.from_model(model, cache, prefill_chunk=CHUNK)
    session.encode(**encoder_inputs(model, 9, 2))
    with pytest.raises(InputError, match=r"rows must have equal length for an encoder-decoder, got \[6, 2\]"):
        session.prefill(*padded([tokens(6), tokens(2, seed=1)], "left"))
    assert session.length.tolist() == [0, 0]


# -- refusals
# -----------------------------------------------------------------------------------------------------------


def test_models_that_take_one_length_for_all_rows_are_refused_before_a_step() -> None:
    """A compiled step of theirs would take the first row's length for every row, silently."""
    model = tiny_model("opt")
    session = session_of(model, rows=2, compile=True)
    ids, mask = padded([tokens(3), tokens(5, seed=1)], "right")
    with pytest.raises(InputError, match=r"have \[3, 5\] tokens.*one length of all rows.*batch_size=1"):
        session.prefill(ids, attention_mask=mask)
    with pytest.raises(InputError, match="one length of all rows"):
        next(session.generate([[3, 4, 5], [3, 4, 5, 6, 7]]))
    assert session.length.tolist() == [0, 0] and session.stepper.equal_rows
    with pytest.raises(InputError, match="rows of a continuous batch differ in length"):
        ContinuousBatch.from_model(model, 32, 2)
    assert not session_of(tiny_model("llama"), rows=2).stepper.equal_rows
    assert not session_of(model, rows=1).stepper.equal_rows


def test_rows_of_one_length_go_on_together_after_one_has_ended() -> None:
    model = tiny_model("opt")
    ids = torch.cat([tokens(5), tokens(5, seed=1)])
    alone = [list(session_of(model, rows=1).generate(row[None], 6)) for row in ids]
    end = alone[0][1]
    session = session_of(model, rows=2)
    steps = torch.stack(list(session.generate(ids, 6, stop=[end])), dim=1)
    assert steps[1, : len(alone[1])].tolist() == (
        alone[1] if end not in alone[1] else alone[1][: alone[1].index(end) + 1]
    )
    assert len(set(session.length.tolist())) == 1


def test_a_bundle_says_that_its_rows_have_to_be_of_one_length(tmp_path: Path) -> None:
    bundle = export(tiny_model("opt"), "pt2", 32, tmp_path / "out", batch_size=2, prefill_chunk=8, verify=False)
    assert bundle.manifest.program.equal_rows
    with pytest.raises(InputError, match="one length of all rows"):
        next(load(bundle.path).generate([[3, 4, 5], [3, 4, 5, 6, 7]]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            lambda s: s.prefill(tokens(4, 2), attention_mask=torch.ones(2, 3)),
            r"shape of input_ids, \[2, 4\], got \[2, 3\]",
        ),
        (lambda s: s.prefill(tokens(3, 2), torch.tensor([[1, 0, 1], [1, 1, 1]])), "a gap in row 0"),
        (
            lambda s: s.prefill(tokens(3, 2), torch.tensor([[1, 1, 1], [0, 0, 0]])),
            "at least one token in each row, got none in row 1",
        ),
        (lambda s: s.prefill(tokens(3, 2), [1]), "attention_mask must have .* got list"),
        (lambda s: s.generate([[3, 4]]), "one per row, 2, got 1"),
        (lambda s: s.generate([[3, 4], []]), "prompt 1 of the list must have .* got shape .0.: the prompt is empty"),
        (lambda s: s.generate([[3, 4], [3.0]]), r"prompt 1 of the list must be an int64 tensor .* got \[3.0\]"),
        (lambda s: s.generate([[3, 4], [999]]), r"prompt 1 of the list\[0\] must be a token id from 0 to \d+, got 999"),
        (lambda s: s.generate([[3], [4]], attention_mask=torch.ones(2, 1)), "a list of prompts, which have no padding"),
    ],
)
def test_what_is_no_batch_is_refused(given: Any, message: str) -> None:
    session = session_of(model_of("llama"), 2)
    with pytest.raises(InputError, match=message):
        given(session)
    assert session.length.tolist() == [0, 0] and not any(tensor.any() for tensor in session.runner.state.values())


def test_the_longest_row_decides_what_fits() -> None:
    session = session_of(model_of("llama"), 2, length=16)
    with pytest.raises(CacheFullError, match="after a prompt of 10 tokens max_new_tokens may be at most 7, got 8"):
        session.generate([tokens(3)[0], tokens(10)[0]], 8)
    assert len(list(session.generate([tokens(3)[0], tokens(10)[0]], 7))) == 7


# -- the seam
# -----------------------------------------------------------------------------------------------------------


def private_names(tree: ast.AST) -> set[str]:
    """Names with one underscore that classes of a module give their own attributes, methods and fields."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    } | {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


_SESSION = ("session",)


@pytest.mark.project
def test_nothing_outside_the_room_touches_a_private_attribute_of_a_session() -> None:
    package = Path(exportable_cache.__file__).parent
    tests = Path(__file__).parent
    own = set().union(*(private_names(ast.parse((package / f"session/{one}.py").read_text())) for one in _SESSION))
    own = {name for name in own if name.startswith("_") and not name.startswith("__")} | {"_length"}
    assert {"_warned", "_cache"} <= own
    found = []
    for path in (*package.rglob("*.py"), *tests.rglob("*.py")):
        if (package / "session") in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
                continue
            owner = node.value
            named = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
            is_session = "session" in named.lower() or named in ("prefill", "decode")
            if is_session or (node.attr in {"_warned", "_length"} and named != "self"):
                found.append(f"{path.name}:{node.lineno} {named}.{node.attr}")
    assert found == []
