"""The C++ session does what the Python session does: logits, tokens, limits, refusals."""

import random
import re
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from exportable_cache import Session, load
from exportable_cache.cache.policies import FullPolicy, NoPolicy, RecurrentPolicy, RingPolicy, SinkPolicy
from exportable_cache.demo import demo_path
from exportable_cache.demo.task import make_questions
from exportable_cache.errors import CacheFullError, InputError

from ..support.sessions import exported_bundle
from .conftest import TOLERANCE, Probe, Program, Reply, hexed, ids

WINDOW, CAPACITY, VOCAB = 16, 512, 394
# Shorter than the window, as long, longer, and longer than one chunk of 256. More chunks are in
# test_cpp_bundle.py and test_cpp_batch.py.
PROMPTS = (1, 3, 15, 16, 17, 80, 259)


def prompt_of(count: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(2, VOCAB) for _ in range(count)]


@pytest.fixture(scope="module")
def session(demo_bundle: Path) -> Session:
    return load(demo_bundle)


# Of a policy, as the probe takes them, with what stands for one that it does not have.
_POLICY_FIELDS = {"capacity": "-", "window": "-", "rollback_slots": 0, "sinks": 0}


def refused(reply: Reply, kind: str, *parts: str) -> None:
    assert not reply.ok and reply.values[0] == kind, reply
    for part in parts:
        assert part in reply.values[1]


# -- the same numbers --------------------------------------------------------------------------------------------------


def test_logits_are_the_sessions_past_the_window(demo_bundle, session, probe: Probe) -> None:
    commands, expected = [], []
    for count in PROMPTS:
        tokens = prompt_of(count + 20)
        session.reset()
        commands += [("reset",), ("prefill", ids(tokens[:count])), *(("decode", token) for token in tokens[count:])]
        expected += [None, session.prefill(torch.tensor([tokens[:count]]))]
        expected += [session.decode(torch.tensor([token])) for token in tokens[count:]]
    replies = probe(("open", demo_bundle), *commands)[1:]
    for reply, logits in zip(replies, expected, strict=True):
        assert reply.ok
        if logits is not None:
            assert (torch.tensor(reply.numbers()) - logits[0]).abs().max() <= TOLERANCE


def test_greedy_tokens_are_the_sessions(demo_bundle, session, probe: Probe) -> None:
    commands, expected = [], []
    for count in PROMPTS:
        session.reset()
        expected.append(list(session.generate(torch.tensor([prompt_of(count, seed=1)]), max_new_tokens=24)))
        commands += [("reset",), ("generate", ids(prompt_of(count, seed=1)), "max_new_tokens=24")]
    replies = probe(("open", demo_bundle), *commands)[2::2]
    assert [reply.tokens() for reply in replies] == expected
    assert {len(tokens) for tokens in expected} != {1}
    for reply, tokens in zip(replies, expected, strict=True):
        assert reply.values[1] == ("max_new_tokens" if len(tokens) == 24 else "end_token")
        assert reply.tokens(2) == tokens  # what the callback saw


@pytest.mark.full
def test_a_quantised_demo_gives_the_same_tokens(probe: Probe) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_path()).eval()
    bundle = exported_bundle(model, "executorch", CAPACITY, quantize="8da4w", verify=False)
    session = load(bundle)
    commands, expected = [], []
    for count in PROMPTS:
        session.reset()
        expected.append(list(session.generate(torch.tensor([prompt_of(count, seed=1)]), max_new_tokens=24)))
        commands += [("reset",), ("generate", ids(prompt_of(count, seed=1)), "max_new_tokens=24")]
    assert [reply.tokens() for reply in probe(("open", bundle), *commands)[2::2]] == expected


def test_questions_are_answered_from_beyond_the_window(demo_bundle, session, probe: Probe) -> None:
    questions = make_questions(5, seed=77, min_distance=WINDOW, tokens=(60, 250))
    commands = [command for question in questions for command in (("reset",), ("text", hexed(question.prompt)))]
    replies = probe(("open", demo_bundle), *commands)[2::2]
    for question, reply in zip(questions, replies, strict=True):
        session.reset()
        assert "".join(Reply(True, reply.values[2].split()).texts()) == "".join(session.generate_text(question.prompt))
        assert "".join(Reply(True, reply.values[2].split()).texts()) == question.answer


def test_text_in_turns_sees_every_token(demo_bundle, probe: Probe) -> None:
    prompt = "the code of amber is 4821. it took about 12 days. amber?"
    whole, _, *turns = probe(
        ("open", demo_bundle), ("text", hexed(prompt), "max_new_tokens=6"), ("reset",),
        ("text", hexed(prompt), "max_new_tokens=2"), ("text", "", "max_new_tokens=2"), ("length",),
    )[1:]  # fmt: skip
    count = whole.tokens(3)[0]
    assert turns[0].tokens() + turns[1].tokens() == whole.tokens()[:4]
    assert turns[1].tokens(3) == [1, 2]  # the newest token was fed, and nothing else
    assert turns[2].tokens() == [count + 3]


# -- rewind and position -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["rewind", "position"])
def test_after_a_rewind_it_is_as_if_never_fed(demo_bundle, probe: Probe, by: str) -> None:
    tokens, other = prompt_of(14), prompt_of(6, seed=5)
    back = [("rewind", 5), ("prefill", ids(other))] if by == "rewind" else [("prefill", ids(other), 9)]
    rewound = probe(("open", demo_bundle), ("prefill", ids(tokens)), *back, ("decode", 7), ("length",))[-2:]
    fresh = probe(("open", demo_bundle), ("prefill", ids(tokens[:9] + other)), ("decode", 7), ("length",))[-2:]
    assert rewound[1].values == fresh[1].values == ["16", str(CAPACITY - 16)]
    assert torch.tensor(rewound[0].numbers()).allclose(torch.tensor(fresh[0].numbers()), atol=TOLERANCE, rtol=0)


def test_rewind_has_the_sessions_limits(demo_bundle, session, probe: Probe) -> None:
    # Within the window everything can be taken back; past it one token, which the ring's last slot still has, or all of
    # them.
    cases = [(length, back) for length in (5, WINDOW, WINDOW + 1, 40) for back in (0, 1, 4, length, length + 1)]
    commands = [
        (("reset",), ("prefill", ids(prompt_of(length))), ("rewind", back), ("length",)) for length, back in cases
    ]
    replies = probe(("open", demo_bundle), *(command for group in commands for command in group))
    refusals = 0
    for (length, back), reply, held in zip(cases, replies[3::4], replies[4::4], strict=True):
        session.reset()
        session.prefill(torch.tensor([prompt_of(length)]))
        try:
            session.rewind(back)
        except InputError as error:
            refused(reply, "input", *re.findall(r"\d+", str(error)))
            assert held.values[0] == str(length)
            refusals += 1
        else:
            assert reply.ok and held.values[0] == str(length - back)
    assert refusals == 4 + 2


@pytest.mark.parametrize("slack", [0, 3])
def test_rollback_rules_are_the_policies(probe: Probe, slack: int) -> None:
    policies = [
        FullPolicy(40), RingPolicy(8, slack), SinkPolicy(3, 8, slack), NoPolicy(), RecurrentPolicy(),
    ]  # fmt: skip
    marks = [(length, high) for high in range(0, 30) for length in range(0, high + 1)]
    commands, expected = [], []
    for policy, has_states in [
        *((policy, False) for policy in policies[:4]),
        *((policy, True) for policy in (*policies[:3], policies[4])),
    ]:
        fields = [policy.to_config().get(name, default) for name, default in _POLICY_FIELDS.items()]
        commands += [("rollback", policy.kind, *fields, int(has_states), *mark) for mark in marks]
        expected += [
            [str(policy.max_length or -1), "0" if has_states else str(policy.max_rollback(*mark))] for mark in marks
        ]
    assert [reply.values for reply in probe(*commands)] == expected


def test_position_zero_starts_anew(demo_bundle, probe: Probe) -> None:
    tokens = prompt_of(9)
    anew, fresh = (
        probe(("open", demo_bundle), *before, ("prefill", ids(tokens), 0), ("rewind", 3), ("length",))
        for before in ([("prefill", ids(prompt_of(60, seed=3)))], [])
    )
    assert anew[-3].values == fresh[-3].values
    assert anew[-2].ok and anew[-1].tokens()[0] == 6


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_refused_before_the_call_with_the_numbers(demo_bundle, session, probe: Probe) -> None:
    session.reset()
    session.prefill(torch.tensor([prompt_of(500)]))
    with pytest.raises(CacheFullError) as full:
        session.prefill(torch.tensor([prompt_of(13)]))
    replies = probe(
        ("open", demo_bundle),
        ("prefill", ids(prompt_of(500))),
        ("prefill", ids(prompt_of(13))),
        ("prefill", ids(prompt_of(600))),
        ("prefill", ""),
        ("decode", VOCAB),
        ("prefill", "5 -1"),
        ("decode", 5, 501),
        ("decode", 5, -1),
        ("rewind", -1),
        ("rewind", 501),
        ("generate", ids(prompt_of(10)), "max_new_tokens=4"),
        ("generate", "5", "max_new_tokens=0"),
        ("generate", "5", f"stop_token={VOCAB}"),
        ("generate", "5", "stop="),
        ("generate", "5", "temperature=-1"),
        ("generate", "5", "top_k=3"),
        ("generate", "5", "temperature=1", "top_p=0"),
        ("generate", "5", "temperature=1", "top_k=-1"),
        ("length",),
        ("prefill", ids(prompt_of(12))),
        ("decode", 5),
    )
    assert str(full.value).split(";")[0] in replies[2].values[1]
    refused(replies[2], "cache_full", "holds 500 of at most 512 tokens, 13 more do not fit", "rewind()")
    refused(replies[3], "cache_full", "holds 500 of at most 512 tokens, 600 more do not fit", "shorten", "1100")
    refused(replies[4], "input", "the prompt is empty")
    refused(replies[5], "input", "tokens[0] is token id 394", "0 to 393")
    refused(replies[6], "input", "tokens[1] is token id -1", "0 to 393")
    refused(replies[7], "input", "position 501 skips ahead", "holds 500", "at most 500")
    refused(replies[8], "input", "position is -1", "0 to 500")
    refused(replies[9], "input", "cannot rewind -1 tokens")
    refused(replies[10], "input", "cannot rewind 501 tokens", "holds 500")
    refused(replies[11], "cache_full", "a prompt of 10 tokens max_new_tokens may be at most 3, got 4")
    refused(replies[12], "input", "max_new_tokens is 0")
    refused(replies[13], "input", "stop token 394", "0 to 393")
    refused(replies[14], "input", "a stop string is empty")
    refused(replies[15], "input", "temperature is -1")
    refused(replies[16], "input", "greedy", "top_k")
    refused(replies[17], "input", "top_p is 0")
    refused(replies[18], "input", "top_k is -1")
    # Nothing of all that moved it.
    assert replies[19].values == ["500", "12"]
    assert replies[20].ok
    refused(replies[21], "cache_full", "holds 512 of at most 512 tokens, 1 more do not fit")


# -- what ends a generation --------------------------------------------------------------------------------------------


def test_every_end(demo_bundle, session, probe: Probe) -> None:
    prompt = "the code of amber is 4821. it took about 12 days. amber?"
    session.reset()
    tokens = list(session.generate_text(prompt, max_new_tokens=8)) and session.tokenizer(prompt).input_ids
    answer = session.tokenizer(" 4821.").input_ids
    replies = probe(
        ("open", demo_bundle),
        ("generate", ids(tokens)), ("reset",),
        ("generate", ids(tokens), "max_new_tokens=3"), ("reset",),
        ("generate", ids(tokens), f"stop_token={answer[2]}"), ("reset",),
        ("generate", ids(tokens), f"stop={hexed('82')}"), ("reset",),
        ("text", hexed(prompt), f"stop={hexed('82')}"), ("reset",),
        ("take", ids(tokens), 2), ("reset",),
        ("prefill", ids(prompt_of(509))), ("generate", "30 31"),
    )  # fmt: skip
    found = [(reply.tokens(), reply.values[1]) for reply in replies[1:-2:2]]
    assert found == [
        ([*answer, 1], "end_token"),
        (answer[:3], "max_new_tokens"),
        (answer[:3], "end_token"),
        (answer[:3], "stop_string"),
        (answer[:3], "stop_string"),
        (answer[:2], "callback"),
    ]
    assert "".join(Reply(True, replies[9].values[2].split()).texts()) == " 4"
    assert replies[-1].values[1] == "cache_full" and len(replies[-1].tokens()) == 2


def test_statistics_are_there(demo_bundle, probe: Probe) -> None:
    reply = probe(
        ("open", demo_bundle), ("generate", ids(prompt_of(40)), "temperature=1", "seed=4", "max_new_tokens=9")
    )[1]
    prompt_tokens, generated = reply.tokens(3)
    first, decode, prefill_rate, decode_rate = reply.numbers(4)
    assert (prompt_tokens, generated) == (40, len(reply.tokens()))
    assert first > 0 and decode > 0
    assert prefill_rate == pytest.approx(40 / first, rel=1e-4)
    assert decode_rate == pytest.approx((generated - 1) / decode, rel=1e-4)


# -- the program -------------------------------------------------------------------------------------------------------


def run(program: Program, *arguments: object) -> subprocess.CompletedProcess:
    command = [*program("exportable_cache_generate"), *(str(argument) for argument in arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_program_answers(demo_bundle, program: Program) -> None:
    done = run(program, demo_bundle, "--prompt", "the code of amber is 4821. it took about 12 days. amber?")
    assert (done.returncode, done.stdout) == (0, " 4821.\n")
    last = done.stderr.splitlines()[-1]
    assert "prompt tokens, 6 new, ended by end_token; first token after" in last and last.endswith("tokens/s")


def test_program_takes_token_ids(demo_bundle, session, program: Program) -> None:
    session.reset()
    expected = list(session.generate(torch.tensor([prompt_of(20)]), max_new_tokens=5))
    done = run(program, demo_bundle, "--tokens", ids(prompt_of(20)), "--max-new-tokens", 5, "--threads", 1)
    assert [int(token) for token in done.stdout.split()] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "x"], "pass one bundle"),
        (["BUNDLE"], "pass one of --prompt, --chat, --messages and --tokens"),
        (["BUNDLE", "--tokens", "1 x"], "--tokens got '1 x'"),
        (["BUNDLE", "--prompt", "x", "--seed", "-1"], "--seed got '-1'"),
        (["BUNDLE", "--tokens", "5", "--threads", "0"], "threads is 0; it must be from 1 to 512"),
        (["BUNDLE", "--tokens", "394"], "token id 394, outside the vocabulary of 0 to 393"),
        (["/nowhere", "--tokens", "5"], "cannot read /nowhere/manifest.json"),
    ],
)
def test_program_refuses_with_code_2(demo_bundle, program: Program, arguments: list[str], message: str) -> None:
    done = run(program, *(demo_bundle if argument == "BUNDLE" else argument for argument in arguments))
    assert done.returncode == 2 and message in done.stderr


def test_text_that_is_no_utf8_is_refused_and_not_left_out(demo_bundle, probe: Probe) -> None:
    _, wrong, right = probe(("open", demo_bundle), ("text", b"am\xffber?".hex()), ("text", b"amber?".hex()))
    refused(wrong, "input", "the text is not valid UTF-8 at byte 2 of 7; pass UTF-8")
    assert right.ok


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="there is no /dev/full")
@pytest.mark.parametrize("given", [["--prompt", "x"], ["--tokens", "5"]])
def test_text_that_cannot_be_written_is_an_error(demo_bundle, program: Program, given: list[str]) -> None:
    command = [*program("exportable_cache_generate"), str(demo_bundle), *given]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 2 and "cannot write all of the output" in done.stderr
