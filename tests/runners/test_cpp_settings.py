"""A checkpoint's generation config in C++: the tokens are those of the Python session under the same settings."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from exportable_cache import Session, load

from ..support.distributions import SETTINGS, check_draws, expected_probabilities
from .conftest import Probe, Program, ids
from .test_cpp import prompt_of

LENGTH = 20
PROMPT = prompt_of(9, seed=3)


@pytest.fixture(scope="module")
def session(demo_bundle: Path) -> Session:
    return load(demo_bundle)


def answer(session: Session, settings: dict[str, Any], limit: int | None = LENGTH) -> list[int]:
    """Greedy tokens in Python."""
    kept = session.generation_config
    session.generation_config = type(kept).from_dict({**kept.to_dict(), **settings})
    try:
        session.reset()
        return list(session.generate(torch.tensor([PROMPT]), limit))
    finally:
        session.generation_config = kept


def with_settings(bundle: Path, folder: Path, settings: dict[str, Any]) -> Path:
    """The same bundle under another generation config."""
    folder.mkdir()
    for path in bundle.iterdir():
        if path.name != "manifest.json":
            (folder / path.name).symlink_to(path)
    fields = json.loads((bundle / "manifest.json").read_text())
    fields["generation_config"].update(settings)
    (folder / "manifest.json").write_text(json.dumps(fields))
    return folder


def settings_of(plain: list[int]) -> list[dict[str, Any]]:
    """Settings alone and together, made for the tokens that come without any."""
    alone = [
        {"suppress_tokens": [plain[1], 5000]},
        {"begin_suppress_tokens": [plain[0]]},
        {"bad_words_ids": [[plain[0], plain[1]], [plain[2]]]},
        {"sequence_bias": [[[plain[1]], -20.0], [[plain[0], 77], 30]]},
        {"repetition_penalty": 3},
        {"encoder_repetition_penalty": 4.0},
        {"no_repeat_ngram_size": 1},
        {"encoder_no_repeat_ngram_size": 1, "encoder_repetition_penalty": 4.0},
        {"min_length": 20, "eos_token_id": plain[1]},
        {"min_new_tokens": 6, "eos_token_id": plain[1]},
        {"forced_eos_token_id": 5},
        {"exponential_decay_length_penalty": [2, 1.6], "eos_token_id": 7},
        {"max_new_tokens": 3},
        {"max_length": 15, "forced_eos_token_id": [5, 6]},
    ]
    together = {name: value for one in alone for name, value in one.items()} | {"remove_invalid_values": True}
    return [*alone, together | {"eos_token_id": [1, 7], "no_repeat_ngram_size": 2, "sequence_bias": [[[77], 2.5]]}]


def test_tokens_are_those_of_the_session(demo_bundle: Path, session: Session, probe: Probe, tmp_path: Path) -> None:
    plain = answer(session, {"min_new_tokens": LENGTH})
    assert len(set(plain[:3])) == 3
    commands: list[tuple[object, ...]] = []
    expected = []
    for index, settings in enumerate(settings_of(plain)):
        settings = {"min_new_tokens": LENGTH, **settings} if "min_length" not in settings else settings
        folder = with_settings(demo_bundle, tmp_path / str(index), settings)
        has_limit = "max_new_tokens" in settings or "max_length" in settings
        limit = () if has_limit else (f"max_new_tokens={LENGTH}",)
        commands += [("open", folder), ("generate", ids(PROMPT), *limit)]
        expected.append(answer(session, settings, None if has_limit else LENGTH))
    replies = probe(*commands)[1::2]
    assert [reply.tokens() for reply in replies] == expected


# -- sampling


def test_the_checkpoint_is_asked_for_what_a_call_leaves_open(demo_bundle: Path, probe: Probe, tmp_path: Path) -> None:
    settings = {"do_sample": True, "temperature": 4.0, "top_p": 0.99, "repetition_penalty": 1.2}
    folder = with_settings(demo_bundle, tmp_path / "sampling", settings)
    seed = ("seed=3", f"max_new_tokens={LENGTH}")
    penalty = "repetition_penalty=1.2"
    asked: list[tuple[Path, tuple[str, ...]]] = [
        (folder, ("from_checkpoint=1",)),
        (demo_bundle, ("temperature=4", "top_k=50", "top_p=0.99", penalty)),
        (folder, ("from_checkpoint=1", "temperature=40", "top_k=3")),
        (demo_bundle, ("temperature=40", "top_k=3", "top_p=0.99", penalty)),
        (folder, ("from_checkpoint=1", "temperature=40", "top_k=0")),
        (demo_bundle, ("temperature=40", "top_p=0.99", penalty)),
        (folder, ()),
        (demo_bundle, (penalty,)),
        (demo_bundle, ("from_checkpoint=1", penalty)),
    ]
    commands = [one for bundle, how in asked for one in (("open", bundle), ("generate", ids(PROMPT), *how, *seed))]
    drawn, expected, other, expected_other, unlimited, expected_unlimited, greedy, *expected_greedy = [
        reply.tokens() for reply in probe(*commands)[1::2]
    ]
    assert drawn == expected and other == expected_other and expected_greedy == [greedy, greedy]
    assert unlimited == expected_unlimited
    assert len({tuple(tokens) for tokens in (drawn, other, unlimited, greedy)}) == 4


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(settings))
def test_draws_follow_the_distribution_of_transformers(
    settings: dict[str, Any], demo_bundle: Path, probe: Probe, tmp_path: Path
) -> None:
    # The penalty is a rule for logits, which the test above compares.
    settings = {name: value for name, value in settings.items() if name != "repetition_penalty"}
    logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(1))
    folder = with_settings(demo_bundle, tmp_path / "sampling", {"do_sample": True, **settings})
    draws = ("sample", " ".join(map(repr, logits[0].tolist())), 10_000, "from_checkpoint=1", "seed=5")
    drawn = torch.tensor(probe(("open", folder), draws)[1].tokens())
    check_draws(drawn, expected_probabilities(torch.tensor([[1]]), logits, settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_sample": "yes"}, "generation_config.do_sample must be true or false"),
        ({"do_sample": True, "temperature": -1}, "generation_config.temperature must be a number of at least 0"),
        ({"do_sample": True, "top_p": 2}, "generation_config.top_p must be a number of at least 0 and at most 1"),
        ({"do_sample": True, "top_k": "x"}, "generation_config.top_k must be an integer of at least -1"),
    ],
)
def test_a_wrong_value_is_refused(
    settings: dict[str, Any], message: str, demo_bundle: Path, probe: Probe, tmp_path: Path
) -> None:
    (reply,) = probe(("open", with_settings(demo_bundle, tmp_path / "wrong", settings)))
    assert not reply.ok and reply.values[0] == "bundle" and message in reply.values[1]


def test_the_program_samples_as_the_checkpoint_says(demo_bundle: Path, program: Program, tmp_path: Path) -> None:
    settings = {"do_sample": True, "temperature": 4.0, "top_k": 0, "min_p": 0.001, "typical_p": 0.9}
    folder = with_settings(demo_bundle, tmp_path / "sampling", settings)

    def run(bundle: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*program("exportable_cache_generate"), str(bundle), "--tokens", ids(PROMPT), "--max-new-tokens", "9"]
        return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120)

    drawn = run(folder, "--seed", "4")
    assert drawn.returncode == 0, drawn.stderr
    assert drawn.stdout == run(demo_bundle, "--seed", "4", "--temperature", "4", "--min-p", "0.001").stdout
    assert "sampling, temperature 4, min_p 0.001; --greedy takes the most likely token\n" in drawn.stderr
    assert "generation_config asks for typical_p, which is not supported" in drawn.stderr
    limited = with_settings(demo_bundle, tmp_path / "limited", {"do_sample": True, "temperature": 4.0, "top_k": 2})
    unlimited = run(limited, "--seed", "4", "--top-k", "0", "--min-p", "0.001")
    assert unlimited.stdout == drawn.stdout != run(limited, "--seed", "4", "--min-p", "0.001").stdout
    assert "top_k" not in unlimited.stderr
    greedy = run(demo_bundle)
    assert run(demo_bundle, "--top-k", "0").stdout == greedy.stdout
    assert greedy.stdout != drawn.stdout and "sampling" not in greedy.stderr
    assert {run(folder, *how).stdout for how in (("--greedy",), ("--temperature", "0"))} == {greedy.stdout}
    refused = run(folder, "--greedy", "--temperature", "1")
    assert refused.returncode == 2 and "pass one of --greedy and --temperature" in refused.stderr
