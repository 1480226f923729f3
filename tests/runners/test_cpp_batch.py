"""Several rows in C++: each does what the Python session's row does, over the same bundle."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from exportable_cache import Session, export, load
from exportable_cache.demo import demo_path
from exportable_cache.demo.task import make_questions
from exportable_cache.errors import InputError

from ..support.models import tiny_model
from ..support.sessions import exported_bundle
from ..support.store import stored
from ..test_ragged import FAMILIES, padded
from .conftest import TOLERANCE, Probe, Program, Reply, hexed, ids
from .test_cpp import WINDOW, prompt_of, refused

ROWS, CAPACITY, CHUNK = 3, 96, 32
#: Of rows: one token beside a prompt of several chunks; about the window; equal; shorter ones last.
LENGTHS = ((1, 70, 17), (WINDOW - 1, WINDOW, WINDOW + 1), (20, 20, 20), (40, 9, 33))


@pytest.fixture(scope="module")
def bundle() -> Path:
    """The first two layers of the demo model, a ring and a full one, with three rows. Read it only."""
    pytest.importorskip("executorch")
    config = AutoConfig.from_pretrained(demo_path())
    config.num_hidden_layers, config.layer_types = 2, config.layer_types[:2]
    model = AutoModelForCausalLM.from_pretrained(demo_path(), config=config).eval()
    tokenizer = AutoTokenizer.from_pretrained(demo_path())
    options = {"target": "executorch", "max_cache_len": CAPACITY, "batch_size": ROWS, "prefill_chunk": CHUNK}
    options["kernels"] = "executorch"  # the runner has no others here
    return stored(
        {"two layers of demo": options}, lambda folder: export(model, output_dir=folder, tokenizer=tokenizer, **options)
    )


@pytest.fixture(scope="module")
def session(bundle: Path) -> Session:
    return load(bundle)


def prompts_of(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    return [prompt_of(count, seed + row) for row, count in enumerate(lengths)]


def fed(session: Session, prompts: list[list[int]]) -> torch.Tensor:
    """Logits [rows, vocab] after the prompts, which Python takes padded."""
    ids, mask = padded([torch.tensor([prompt]) for prompt in prompts], "left")
    return session.prefill(ids, attention_mask=mask)


def rows(prompts: list[list[int]]) -> str:
    """Prompts as a field."""
    return ",".join(ids(prompt) for prompt in prompts)


def answers(reply: Reply) -> list[tuple[list[int], str]]:
    """Tokens of each row and what ended it; what the callback saw is the same."""
    assert reply.ok, reply
    found = [reply.values[start : start + 4] for start in range(0, len(reply.values), 4)]
    assert all(tokens == seen for tokens, _, seen, _ in found)
    return [([int(token) for token in tokens.split()], reason) for tokens, reason, _, _ in found]


def expected_answers(session: Session, prompts: list[list[int]], **options: object) -> list[list[int]]:
    """Tokens of each row up to what ended it, without the padding of rows that had ended."""
    ends = {1, *options.get("stop", [])}
    found: list[list[int]] = [[] for _ in prompts]
    for step in session.generate(prompts, **options):
        for row, token in zip(found, step.tolist(), strict=True):
            if not (row and row[-1] in ends):
                row.append(token)
    return found


def test_logits_are_the_sessions_for_rows_of_any_length(bundle, session, probe: Probe) -> None:
    commands, expected = [], []
    for lengths in LENGTHS:
        prompts = prompts_of(lengths)
        session.reset()
        commands += [("rows_reset",), ("rows_prefill", rows(prompts))]
        expected += [None, fed(session, prompts)]
        for token in prompt_of(WINDOW + 4, seed=9):
            newest = [token, token + 1, 5]
            commands.append(("rows_decode", ids(newest)))
            expected.append(session.decode(torch.tensor(newest)))
        commands.append(("rows_length",))
        expected.append(session.length)
    replies = probe(("open_batch", bundle), *commands)
    assert replies[0].values == [str(ROWS), str(CAPACITY)]
    for reply, wanted in zip(replies[1:], expected, strict=True):
        if wanted is None:
            assert reply.ok
        elif wanted.dim() == 1:
            assert reply.tokens() == wanted.tolist() and reply.tokens(1) == [CAPACITY - max(wanted.tolist())]
        else:
            assert (torch.tensor(reply.numbers()).view_as(wanted) - wanted).abs().max() <= TOLERANCE


def test_greedy_tokens_are_the_sessions_and_each_row_ends_by_itself(bundle, session, probe: Probe) -> None:
    """Afterwards rows that ended early are where they ended, and go on as if nothing had been written behind them."""
    commands, expected = [], []
    for lengths in LENGTHS:
        prompts, stop = prompts_of(lengths, seed=3), [5, 30, 31, 32]
        session.reset()
        expected.append(expected_answers(session, prompts, max_new_tokens=20, stop=stop))
        expected.append((session.length, fed(session, [[7, 8, 9]] * ROWS)))
        commands += [
            ("rows_reset",),
            ("rows_generate", rows(prompts), "max_new_tokens=20", *(f"stop_token={token}" for token in stop)),
            ("rows_length",), ("rows_prefill", rows([[7, 8, 9]] * ROWS)),
        ]  # fmt: skip
    replies = probe(("open_batch", bundle), *commands)[1:]
    counts = set()
    for (tokens, (length, logits)), reply, held, after in zip(
        zip(expected[::2], expected[1::2], strict=True), replies[1::4], replies[2::4], replies[3::4], strict=True
    ):
        found = answers(reply)
        assert [row for row, _ in found] == tokens
        for row, reason in found:
            assert reason == ("end_token" if row[-1] in {1, *stop} else "max_new_tokens")
        assert held.tokens() == length.tolist()
        assert (torch.tensor(after.numbers()).view_as(logits) - logits).abs().max() <= TOLERANCE
        counts |= {len(row) for row in tokens}
    assert len(counts) > 2


def test_a_row_draws_as_if_it_were_the_first(bundle, probe: Probe) -> None:
    prompts = prompts_of((5, 40, 18))
    options = ("temperature=0.8", "top_p=0.9", "max_new_tokens=12")
    _, together, _, *first = probe(
        ("open_batch", bundle),
        ("rows_generate", rows(prompts), *options, "seed=7"),
        ("rows_reset",),
        *(
            command
            for row, prompt in enumerate(prompts)
            for command in (("rows_generate", rows([prompt] * ROWS), *options, f"seed={7 + row}"), ("rows_reset",))
        ),
    )
    assert [row for row, _ in answers(together)] == [answers(reply)[0][0] for reply in first[::2]]
    # A row that is ended draws no more, and the others draw the same.
    _, ended = probe(("open_batch", bundle), ("rows_generate", rows(prompts), *options, "seed=7", "end=1:2"))
    found, whole = answers(ended), answers(together)
    assert (found[0], found[2]) == (whole[0], whole[2])
    assert found[1] == (whole[1][0][:2], "callback")


def texts_of(session: Session, prompts: list[str]) -> list[str]:
    """What the session answers, by rows."""
    session.reset()
    return ["".join(pieces) for pieces in zip(*session.stream_text(prompts), strict=True)]


def test_texts_end_and_go_on_by_themselves(bundle, session, probe: Probe) -> None:
    questions = make_questions(ROWS, seed=78, min_distance=WINDOW, tokens=(30, 60))
    prompts = [question.prompt for question in questions]
    expected = texts_of(session, prompts)
    session.reset()
    first = list(session.stream_text(prompts, max_new_tokens=2))
    second = list(session.stream_text(["", "", ""], max_new_tokens=1))
    pieces = ("rows_text", " ".join(hexed(prompt) for prompt in prompts))
    _, whole, _, *turns, stopped = probe(
        ("open_batch", bundle), pieces, ("rows_reset",), (*pieces, "max_new_tokens=2"),
        ("rows_text", "- - -", "max_new_tokens=1"), ("rows_reset",),
        (*pieces, f"stop={hexed(expected[1][2:4])}"),
    )  # fmt: skip

    def texts(reply: Reply) -> list[str]:
        return [bytes.fromhex(text).decode() for text in reply.values[2::4]]

    assert texts(whole) == expected
    assert whole.values[1::4] == ["end_token"] * ROWS
    for found, wanted in ((turns[0], first), (turns[1], second)):
        assert texts(found) == ["".join(step[row] for step in wanted) for row in range(ROWS)]
    assert turns[1].values[3::4] == ["1"] * ROWS  # the newest token was fed, and nothing else
    assert stopped.values[5] == "stop_string"
    assert texts(stopped)[1] == expected[1][:2] and texts(stopped)[0] == expected[0]


def test_everything_ends_when_it_is_cancelled_or_full(bundle, session, probe: Probe) -> None:
    prompts = prompts_of((4, CAPACITY - 4, 20), seed=5)
    session.reset()
    expected = expected_answers(session, prompts)
    _, cancelled, _, full, held = probe(
        ("open_batch", bundle), ("rows_generate", rows(prompts), "cancel=4"), ("rows_reset",),
        ("rows_generate", rows(prompts)), ("rows_length",),
    )  # fmt: skip
    assert [len(row) for row, _ in answers(cancelled)] == [2] * ROWS
    assert {reason for _, reason in answers(cancelled)} == {"cancelled"}
    assert [row for row, _ in answers(full)] == expected
    assert answers(full)[1][1] == "cache_full" and held.tokens() == session.length.tolist()


def test_refused_before_the_call_with_the_numbers(bundle, session, probe: Probe) -> None:
    session.reset()
    fed(session, [[5] * 70, [6] * 70, [7]])
    with pytest.raises(InputError) as waiting:
        fed(session, [[5], [6], [7] * 20])
    replies = probe(
        ("open_batch", bundle),
        ("rows_prefill", rows([[5] * 70, [6] * 70, [7]])),
        ("rows_prefill", rows([[5], [6]])),
        ("rows_decode", ids([5, 6])),
        ("rows_prefill", "5,,6"),
        ("rows_prefill", rows([[5], [6, 394], [7]])),
        ("rows_prefill", rows([[5] * 27] * 3)),
        ("rows_prefill", rows([[5], [6], [7] * 20])),
        ("rows_prefill", rows([[5], [6], [7] * 29])),
        ("rows_generate", rows([[5]] * 3), "max_new_tokens=27"),
        ("rows_generate", rows([[5]] * 3), "prompt_lookup=2"),
        ("rows_generate", rows([[5]] * 3), "multiples_of=2"),
        ("rows_generate", rows([[5]] * 3), "top_k=2"),
        ("rows_generate", rows([[5]] * 3), "max_new_tokens=0"),
        ("rows_text", hexed("x")),
        ("rows_rewind", -1),
        ("rows_rewind", 2),
        ("rows_length",),
        ("rows_rewind", 1),
        ("rows_length",),
    )
    refused(replies[2], "input", "got 2 prompts", "3 rows", "batch_size=2")
    refused(replies[3], "input", "got 2 tokens", "3 rows")
    refused(replies[4], "input", "prompts[1]: the prompt is empty")
    refused(replies[5], "input", "prompts[1][1] is token id 394", "0 to 393")
    refused(replies[6], "cache_full", "holds 70 of at most 96 tokens, 27 more do not fit")
    assert "row 0 holds 70 tokens and waits" in str(waiting.value)
    refused(replies[7], "input", "row 0 holds 70 tokens and waits while a longer row is fed 19 at once", "lose some")
    refused(
        replies[8],
        "input",
        "row 0 holds 70 tokens and waits while a longer row is fed 28 at once",
        "do not fit after them",
    )
    refused(replies[9], "cache_full", "max_new_tokens may be at most 26, got 27")
    refused(replies[10], "input", "prompt_lookup serves one row", "runs 3", "use a Session")
    refused(replies[11], "input", "allowed_tokens serves one row")
    refused(replies[12], "input", "top_k")
    refused(replies[13], "input", "max_new_tokens is 0")
    refused(replies[14], "input", "got 1 prompts")
    refused(replies[15], "input", "cannot rewind -1 tokens")
    refused(replies[16], "input", "cannot rewind 2 tokens, rows hold 70, 70, 1; rewind at most 1")
    # Nothing of all that moved it.
    assert replies[17].tokens() == [70, 70, 1]
    assert replies[18].ok and replies[19].tokens() == [69, 69, 0]


def test_after_a_rewind_it_is_as_if_never_fed(bundle, probe: Probe) -> None:
    prompts, more = prompts_of((9, 12, 6)), prompts_of((3, 3, 3), seed=8)
    _, _, back, far, found = probe(
        ("open_batch", bundle), ("rows_prefill", rows([row + [7] for row in prompts])), ("rows_rewind", 1),
        ("rows_rewind", 9), ("rows_prefill", rows(more)),
    )  # fmt: skip
    fresh = probe(
        ("open_batch", bundle),
        ("rows_prefill", rows([row + added for row, added in zip(prompts, more, strict=True)])),
    )[1]
    assert back.ok
    refused(far, "input", "rows hold 9, 12, 6")
    assert torch.tensor(found.numbers()).allclose(torch.tensor(fresh.numbers()), atol=TOLERANCE, rtol=0)


def test_sessions_of_one_row_and_of_several_open_their_own(bundle, demo_bundle, probe: Probe) -> None:
    prompt = prompt_of(21)
    drawn = ("max_new_tokens=12", "temperature=0.8", "top_p=0.9", "seed=7")
    wrong, right, together, _, alone = probe(
        ("open", bundle), ("open_batch", demo_bundle), ("rows_generate", ids(prompt), *drawn),
        ("open", demo_bundle), ("generate", ids(prompt), *drawn),
    )  # fmt: skip
    refused(wrong, "bundle", "runs 3 rows at once", "BatchSession", "batch_size=1")
    assert right.values[0] == "1"
    assert answers(together)[0][0] == alone.tokens()


def test_program_answers_several_prompts(bundle, session, program: Program) -> None:
    questions = make_questions(ROWS, seed=79, min_distance=WINDOW, tokens=(30, 60))
    given = [argument for question in questions for argument in ("--prompt", question.prompt)]
    command = [*program("exportable_cache_generate"), str(bundle)]
    done = subprocess.run([*command, *given], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == [*texts_of(session, [question.prompt for question in questions]), ""]
    assert done.stderr.splitlines()[-1].startswith("first tokens after")
    by_ids = ["--tokens", "5 6", "--tokens", "7", "--tokens", "8 9 10", "--max-new-tokens", "2"]
    done = subprocess.run([*command, *by_ids], capture_output=True, text=True, timeout=300)
    assert [len(line.split()) for line in done.stdout.splitlines()] == [2, 2, 2]
    done = subprocess.run([*command, *given[:4]], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "got 2 prompts, this program runs 3 rows" in done.stderr


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "mamba2", "lfm2"])
def test_other_layers(family: str, probe: Probe) -> None:
    """Full layers, and states, whose ended rows go on over tokens that nobody sees."""
    model = tiny_model(family, **FAMILIES[family])
    bundle = exported_bundle(model, "executorch", 64, batch_size=ROWS, prefill_chunk=13, verify=False)
    session, prompts = load(bundle), [[5, 6, 7], [8] * 9 + [9] * 20, [11, 12] * 8]
    stop = fed(session, prompts).argmax(1)[:1].tolist()
    session.reset()
    expected = expected_answers(session, prompts, max_new_tokens=12, stop=stop)
    _, reply, held = probe(
        ("open_batch", bundle),
        ("rows_generate", rows(prompts), "max_new_tokens=12", f"stop_token={stop[0]}"), ("rows_length",),
    )  # fmt: skip
    assert [row for row, _ in answers(reply)] == expected and len(expected[0]) == 1
    assert held.tokens() == session.length.tolist()
