"""`exportable-cache generate` on a tiny model with a tokenizer of single letters."""

import hashlib
import json
import re

import pytest
from transformers import PreTrainedTokenizerFast

from exportable_cache import export, load
from exportable_cache.bundle.bundle import Bundle

from ..decoding.byte_tokenizer import SIZE, byte_tokenizer
from ..support.letters import letter_tokenizer
from ..support.models import VOCAB, hybrid_model, tiny_model

MAX_CACHE_LEN = 48
PROMPT = "abcdefgh"


# The command is tested here; over programs of real targets it runs in test_bundle_commands.py and test_demo.py.
pytestmark = pytest.mark.usefixtures("fake_backend")


@pytest.fixture(scope="module")
def letters():
    return letter_tokenizer()


@pytest.fixture(scope="module")
def bundle(letters, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundles") / "letters"
    return export(hybrid_model(), "fake", MAX_CACHE_LEN, folder, prefill_chunk=16, verify=False, tokenizer=letters).path


@pytest.fixture(scope="module")
def expected(bundle):
    """The greedy answer to PROMPT, from the Python API."""
    return "".join(load(bundle).stream_text(PROMPT, max_new_tokens=12))


def test_text_goes_to_stdout_and_speed_to_stderr(run, bundle, expected):
    result = run("generate", bundle, "-p", PROMPT, "--max-new-tokens", 12)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == expected + "\n" and len(expected) > 3
    assert f"{len(PROMPT)} prompt tokens, 12 new" in result.stderr and "tokens/s" in result.stderr


def test_json_has_text_and_counts(run, bundle, expected):
    document = json.loads(run("generate", bundle, "-p", PROMPT, "--max-new-tokens", 12, "--json").stdout)
    assert document["text"] == expected
    assert (document["prompt_tokens"], document["new_tokens"]) == (len(PROMPT), 12)
    assert document["tokens_per_second"] > 0 and document["first_seconds"] > 0
    assert document["path"] == str(bundle) and document["prompt"] == PROMPT


def test_prompt_from_stdin(run, bundle, expected):
    result = run("generate", bundle, "-p", "-", "--max-new-tokens", 12, input=PROMPT)
    assert result.stdout == expected + "\n"


def test_the_checkpoints_settings_count_and_those_not_followed_are_named(run, letters, tmp_path):
    model = tiny_model("gemma2")
    model.generation_config.update(max_new_tokens=5, min_new_tokens=5, num_beams=3)
    export(model, "fake", MAX_CACHE_LEN, tmp_path / "x", prefill_chunk=16, verify=False, tokenizer=letters)
    result = run("generate", tmp_path / "x", "-p", PROMPT)
    assert f"{len(PROMPT)} prompt tokens, 5 new" in result.stderr
    assert "generation_config asks for num_beams=3, which is not followed" in result.stderr
    document = json.loads(run("generate", tmp_path / "x", "-p", PROMPT, "--max-new-tokens", 7, "--json").stdout)
    assert 5 <= document["new_tokens"] <= 7


def test_fills_the_cache_by_default_and_no_more(run, bundle):
    document = json.loads(run("generate", bundle, "-p", PROMPT, "--json").stdout)
    # The newest token needs no slot.
    assert document["new_tokens"] <= MAX_CACHE_LEN - len(PROMPT) + 1
    ended_early = document["new_tokens"] < MAX_CACHE_LEN - len(PROMPT) + 1
    assert not ended_early or len(document["text"]) < document["new_tokens"]


def test_stop_ends_the_text_before_it(run, bundle, expected):
    at = next(index for index in range(1, len(expected)) if expected[index] not in expected[:index])
    result = run(
        "generate", bundle, "-p", PROMPT, "--max-new-tokens", 12, "--stop", expected[at], "--stop", "never mind"
    )
    assert result.stdout == expected[:at] + "\n"


def test_seed_repeats_a_draw(run, bundle):
    def draw(seed):
        arguments = ["-p", PROMPT, "--max-new-tokens", 12, "--temperature", 5, "--top-k", 50, "--top-p", 0.99]
        return run("generate", bundle, *arguments, "--seed", seed).stdout

    assert draw(1) == draw(1)
    assert len({draw(seed) for seed in range(4)}) > 1


def test_chat_uses_the_template(run, bundle):
    chat = json.loads(run("generate", bundle, "-p", PROMPT, "--chat", "--max-new-tokens", 4, "--json").stdout)
    plain = json.loads(run("generate", bundle, "-p", f"u{PROMPT}a", "--max-new-tokens", 4, "--json").stdout)
    assert chat["prompt_tokens"] == len(PROMPT) + 2
    assert chat["text"] == plain["text"]


def test_interrupted_answers_end_their_line(run, bundle, monkeypatch):
    from exportable_cache.session.session import Session

    def interrupted(self, *arguments, **options):
        yield "half"
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "stream_text", interrupted)
    result = run("generate", bundle, "-p", PROMPT)
    assert (result.exit_code, result.stdout) == (130, "half\n")
    assert "interrupted" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-p", ""], ("empty",)),
        (["-p", "a" * (MAX_CACHE_LEN + 1)], (str(MAX_CACHE_LEN + 1), str(MAX_CACHE_LEN), "max_cache_len")),
        (["-p", PROMPT, "--max-new-tokens", "100"], ("100", str(MAX_CACHE_LEN), "max_new_tokens", "lower it")),
        (["-p", PROMPT, "--max-new-tokens", "0"], ("--max-new-tokens", "got 0", "at least 1")),
        (["-p", PROMPT, "--temperature", "-1"], ("--temperature", "-1", "at least 0")),
        (["-p", PROMPT, "--temperature", "1", "--top-p", "1.5"], ("top_p", "1.5", "at most 1")),
        (["-p", PROMPT, "--top-k", "5"], ("temperature", "top_k=5")),
        (["-p", PROMPT, "--stop", ""], ("stop", "''")),
        ([], ("--prompt",)),
    ],
)
def test_bad_input(run, bundle, arguments, words):
    result = run("generate", bundle, *arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr, result.stderr


def test_chat_without_a_template(run, letters, tmp_path):
    template, letters.chat_template = letters.chat_template, None
    try:
        path = export(
            tiny_model("llama"), "fake", 16, tmp_path / "x", prefill_chunk=1, verify=False, tokenizer=letters
        ).path
    finally:
        letters.chat_template = template
    result = run("generate", path, "-p", "a", "--chat")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no chat template" in result.stderr


def test_batches_have_no_text(run, letters, tmp_path):
    path = export(
        tiny_model("llama"), "fake", 16, tmp_path / "x", batch_size=2, prefill_chunk=1, verify=False, tokenizer=letters
    ).path
    result = run("generate", path, "-p", "a")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "must be a list of 2 prompts" in result.stderr


def test_tokens_outside_the_vocabulary(run, letters, tmp_path):
    path = export(
        tiny_model("llama"), "fake", 16, tmp_path / "x", prefill_chunk=1, verify=False, tokenizer=letters
    ).path
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path / "tokenizer")
    tokenizer.add_tokens(["@@"])
    bundle = Bundle.open(path)
    tokenizer.save_pretrained(path / "tokenizer")
    files = {name: _described(path / name, file) for name, file in bundle.manifest.files.items()}
    bundle.manifest.model_copy(update={"files": files}).write(path)
    result = run("generate", path, "-p", "ab@@")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"got {VOCAB}" in result.stderr and f"0 to {VOCAB - 1}" in result.stderr


def _described(path, file):
    content = path.read_bytes()
    return file.model_copy(update={"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)})


def test_an_answer_has_the_form_that_was_asked_for(run, bundle, tmp_path):
    pytest.importorskip("llguidance", reason="the serve extra is not installed")
    # What a token of this one is in bytes cannot be told.
    assert "does not support constrained generation" in run("generate", bundle, "-p", PROMPT, "--regex", "a").stderr
    # Of a family that no other bundle of this target has: it keeps one program for each.
    model = tiny_model("olmo3", vocab_size=SIZE)
    options = {"prefill_chunk": 16, "verify": False, "tokenizer": byte_tokenizer()}
    bundle = export(model, "fake", MAX_CACHE_LEN, tmp_path / "bytes", **options).path
    result = run("generate", bundle, "-p", PROMPT, "--regex", "(ab|c){3}", "--temperature", 1, "--seed", 1)
    assert re.fullmatch(r"(ab|c){3}\n", result.stdout) and "8 prompt tokens" in result.stderr
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "nothing"}')
    refused = {
        ("--regex", "("): "unclosed group",
        ("--json-schema", schema): "the constraint cannot be enforced",
        ("--json-schema", tmp_path / "none"): "cannot read the schema",
        ("--json-schema", schema, "--regex", "a"): "cannot be combined with --json-schema; pass one",
        ("--regex", "a", "--prompt-lookup", 2): "cannot be combined with --json-schema or --regex",
    }
    for options, message in refused.items():
        result = run("generate", bundle, "-p", PROMPT, *options)
        assert result.exit_code == 2 and message in " ".join(result.stderr.replace("│", " ").split()), result.stderr
