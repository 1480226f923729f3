"""What the C++ session opens: bundles of either set of methods; and what it refuses, before it runs anything."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from exportable_cache import load

from ..decoding.test_trained_drafts import sometimes_right_model
from ..support.kinds import kind_model
from ..support.models import VOCAB, among, tiny_model, tokens
from ..support.sessions import BOTH_PREFILL, PREFILL, bundle_of_both, exported_bundle, folded_bundle, sinks_bundle
from .conftest import TOLERANCE, Probe, Program, ids


@pytest.fixture(scope="module")
def both() -> Path:
    """A bundle whose program has `forward` besides `prefill` and `decode`."""
    pytest.importorskip("executorch", reason="the executorch extra is not installed")
    return bundle_of_both()[1]


def edited(folder: Path, copy: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a bundle with another manifest. C++ compares no checksum of it."""
    shutil.copytree(folder, copy)
    path = copy / "manifest.json"
    fields = json.loads(path.read_text())
    edit(fields)
    path.write_text(json.dumps(fields))
    return copy


@pytest.mark.parametrize("names", [["forward"], ["decode", "prefill"], ["decode"], ["decode", "prefill", "forward"]])
def test_any_set_of_methods_gives_the_same(both, tmp_path, probe: Probe, names: list[str]) -> None:
    def keep(fields: dict[str, Any]) -> None:
        methods = fields["program"]["methods"]
        fields["program"]["methods"] = {name: methods[name] for name in names}

    bundle = edited(both, tmp_path / "bundle", keep)
    session = load(both)
    prompt = torch.randint(2, 394, (1, 60), generator=torch.Generator().manual_seed(0))
    expected = [session.prefill(prompt), *(session.decode(torch.tensor([token])) for token in range(20, 30))]
    commands = [("prefill", ids(prompt[0])), *(("decode", token) for token in range(20, 30))]
    replies = probe(("open", bundle), *commands)[1:]
    for reply, logits in zip(replies, expected, strict=True):
        assert (torch.tensor(reply.numbers()) - logits[0]).abs().max() <= TOLERANCE


def wider_than_its_logits() -> Path:
    """A model that looks up more ids than it gives logits of, and gives those of several tokens."""
    model = tiny_model("llama", num_hidden_layers=1)
    model.resize_token_embeddings(VOCAB + 8)
    model.lm_head = torch.nn.Linear(model.config.hidden_size, VOCAB, bias=False)
    return exported_bundle(model, "executorch", prefill_chunk=PREFILL, score_length=5, verify=False)


_BUNDLES: dict[str, Callable[[], Path]] = {
    "int8": lambda: folded_bundle(kv_dtype="int8", verify=False)[1],
    "sinks": lambda: sinks_bundle()[1],
    "mamba2": lambda: exported_bundle(kind_model("mamba2"), "executorch", prefill_chunk=PREFILL, verify=False),
    "lfm2": lambda: exported_bundle(kind_model("lfm2"), "executorch", prefill_chunk=PREFILL, verify=False),
    "wide": wider_than_its_logits,
}


@pytest.mark.parametrize("kind", among(_BUNDLES, ["int8", "sinks", "wide"]))
def test_other_caches_give_the_sessions_logits(probe: Probe, kind: str) -> None:
    bundle = _BUNDLES[kind]()
    session = load(bundle)
    # Past the window of the rings, a whole chunk and more; with sinks also past what the full layers have slots for.
    tokens = torch.randint(2, VOCAB, (1, 80), generator=torch.Generator().manual_seed(1))
    prompt = tokens.shape[1] - 10
    expected = [
        session.prefill(tokens[:, :prompt]),
        *(session.decode(tokens[:, position]) for position in range(prompt, prompt + 10)),
    ]
    commands = [("prefill", ids(tokens[0, :prompt])), *(("decode", int(token)) for token in tokens[0, prompt:])]
    replies = probe(("open", bundle), *commands)[1:]
    for reply, logits in zip(replies, expected, strict=True):
        assert (torch.tensor(reply.numbers()) - logits[0]).abs().max() <= TOLERANCE


def test_prompt_lookup_gives_the_same_tokens_in_fewer_steps(probe: Probe) -> None:
    bundle = wider_than_its_logits()
    prompt = torch.randint(2, VOCAB, (1, 6), generator=torch.Generator().manual_seed(2)).repeat(1, 5)
    asked = ("generate", ids(prompt[0]), "max_new_tokens=50")
    drawn = (*asked, "temperature=1.1", "seed=3")
    greedy, length, *_, looked_up, length_then, _, sampled, _, looked_up_sampled, refused = probe(
        ("open", bundle), asked, ("length",), ("reset",), (*asked, "prompt_lookup=4"), ("length",), ("reset",), drawn,
        ("reset",), (*drawn, "prompt_lookup=2"), (*asked, "prompt_lookup=-1"),
    )[1:]  # fmt: skip
    assert greedy.tokens() == list(load(bundle).generate(prompt, 50)) == looked_up.tokens()
    # The newest token was not fed, with either.
    assert length.values == length_then.values and length.tokens() == [prompt.shape[1] + 49]
    proposed, accepted = looked_up.tokens(5)
    assert greedy.tokens(5) == [0, 0] and 10 < accepted <= proposed
    assert looked_up_sampled.tokens() == sampled.tokens() != greedy.tokens()
    assert not refused.ok and "prompt_lookup is -1" in refused.values[1]


def test_prompt_lookup_proposes_what_the_caller_may_not_allow(probe: Probe) -> None:
    bundle = wider_than_its_logits()
    prompt = torch.randint(2, VOCAB, (1, 6), generator=torch.Generator().manual_seed(2)).repeat(1, 5)
    asked = ("generate", ids(prompt[0]), "max_new_tokens=50", "multiples_of=3", "temperature=1.1", "seed=3")
    found, _, looked_up, length = probe(
        ("open", bundle), asked, ("reset",), (*asked, "prompt_lookup=4"), ("length",)
    )[1:]  # fmt: skip
    assert looked_up.tokens() == found.tokens() and len(found.tokens()) == 50
    assert all(token % 3 == 0 and token < VOCAB for token in found.tokens()) and len(set(found.tokens())) > 5
    assert looked_up.tokens(5)[0] > looked_up.tokens(5)[1] and length.tokens() == [prompt.shape[1] + 49]


def test_prompt_lookup_that_cannot_be_is_refused(both, tmp_path, probe: Probe) -> None:
    asked = ("generate", "5 6 7", "max_new_tokens=5", "prompt_lookup=3")
    (reply,) = probe(("open", both), asked)[1:]
    assert not reply.ok and "export with -O score_length=4" in reply.values[1]
    ring = _set("layers", 0, "policy", value={"kind": "ring", "window": 16})
    window = edited(wider_than_its_logits(), tmp_path / "bundle", ring)
    (reply,) = probe(("open", window), asked)[1:]
    assert not reply.ok and "rollback_slots of at least 2" in reply.values[1]


def with_a_head() -> Path:
    """A model whose draft head proposes right tokens sometimes."""
    model = sometimes_right_model("deepseek_v3", first_k_dense_replace=9)
    return exported_bundle(model, "executorch", 96, draft="mtp", verify=False)


def test_a_draft_head_gives_the_same_tokens_in_fewer_steps(probe: Probe, program: Program) -> None:
    bundle, prompt = with_a_head(), ids(tokens(20)[0])
    asked = ("generate", prompt, "max_new_tokens=60")
    drawn = (*asked, "temperature=1.1", "seed=3")
    greedy, length, _, drafted, length_then, _, sampled, _, sampled_drafted = probe(
        ("open", bundle), asked, ("length",), ("reset",), (*asked, "draft_tokens=3"), ("length",), ("reset",), drawn,
        ("reset",), (*drawn, "draft_tokens=15"),
    )[1:]  # fmt: skip
    proposed, accepted = drafted.tokens(5)
    assert drafted.tokens() == greedy.tokens() and len(greedy.tokens()) == 60 and 20 < accepted < proposed
    assert length.values == length_then.values and length.tokens() == [79]
    assert sampled_drafted.tokens() == sampled.tokens() != greedy.tokens()
    command = [*program("exportable_cache_generate"), str(bundle), "--tokens", prompt, "--max-new-tokens", "60"]
    done = subprocess.run([*command, "--draft", "3"], capture_output=True, text=True)
    assert done.stdout.split() == [str(token) for token in greedy.tokens()], done.stderr
    assert f"{proposed} tokens proposed, {accepted} accepted" in done.stderr


def test_drafts_that_cannot_be_are_refused(both, tmp_path, probe: Probe) -> None:
    asked, bundle = ("generate", "5 6 7", "max_new_tokens=5"), with_a_head()
    *_, many, negative, twice = probe(
        ("open", bundle), (*asked, "draft_tokens=16"), (*asked, "draft_tokens=-1"),
        (*asked, "draft_tokens=2", "prompt_lookup=2"),
    )  # fmt: skip
    assert not many.ok and "draft_tokens must be from 0 to 15, got 16" in many.values[1]
    assert not negative.ok and "got -1" in negative.values[1]
    assert not twice.ok and "cannot be combined with prompt_lookup" in twice.values[1]
    (without,) = probe(("open", both), (*asked, "draft_tokens=2"))[1:]
    assert not without.ok and "a program without a draft head, got 2" in without.values[1]
    taken = [{"name": name} for name in ("input_ids", "input_pos", "link")]
    added = _set("program", "methods", "draft", value={"inputs": taken})
    (opened,) = probe(("open", edited(both, tmp_path / "bundle", added)))
    assert not opened.ok and "draft" in opened.values[1]


def _set(*path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(fields: dict[str, Any]) -> None:
        for name in path[:-1]:
            fields = fields[name]
        fields[path[-1]] = value

    return edit


def _only(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def edit(fields: dict[str, Any]) -> None:
        fields["program"]["methods"] = {new: fields["program"]["methods"][old]}

    return edit


def _rename(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def edit(fields: dict[str, Any]) -> None:
        methods = fields["program"]["methods"]
        methods[new] = methods.pop(old)

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_set("schema_version", value=7), "schema_version is 7, this library reads 2"),
        (_set("target", value="pt2"), "target is 'pt2', this library supports 'executorch'"),
        (_set("program", "form", value="explicit"), "program.form is 'explicit'"),
        (_set("program", "logits", value="all"), "program.logits is 'all'"),
        (_set("program", "batch_size", value=2), "runs 2 rows at once, and this session one"),
        (_set("vocab_size", value=0), "vocab_size must be an integer of at least 1"),
        (_set("layers", value=[]), "layers must be a list of at least one element"),
        (_set("layers", 0, "policy", value={"kind": "clever"}), "layer 0 has the policy clever, this library knows"),
        (_set("layers", 0, "policy", value={"kind": "ring"}), "layer 0 has the policy ring without its window"),
        (_set("layers", 0, "policy", value={"kind": "full"}), "layer 0 has the policy full without its capacity"),
        (_set("files", "program.pte", "bytes", value=17), "bytes, the manifest says 17"),
        # Another program than the one described.
        (_rename("prefill", "fill"), "has no method 'fill' but"),
        (_set("vocab_size", value=400), "returns [1, 4096], not floating [1, 400]"),
        (_set("logits_size", value=400), "returns [1, 4096], not floating [1, 400]"),
        (_set("logits_size", value=0), "logits_size must be an integer of at least 1"),
        (
            _set("program", "methods", "prefill", "max_length", value=BOTH_PREFILL + 1),
            f"takes tokens [1, {BOTH_PREFILL}], not int64 [1, {BOTH_PREFILL + 1}]",
        ),
        (_only("decode", "get_vocab_size"), "takes 0 inputs and returns 1"),
        (_set("program", "methods", value={}), "has no method that takes one token"),
    ],
)
def test_what_is_no_bundle_of_ours_is_refused(both, tmp_path, probe: Probe, edit, message: str) -> None:
    (reply,) = probe(("open", edited(both, tmp_path / "bundle", edit)))
    assert (reply.ok, reply.values[0]) == (False, "bundle")
    assert message in reply.values[1]


def test_missing_and_broken_files_are_refused(both, tmp_path, probe: Probe) -> None:
    paths = {name: edited(both, tmp_path / name, lambda fields: None) for name in ("missing", "broken", "junk")}
    (paths["missing"] / "program.pte").unlink()
    (paths["broken"] / "manifest.json").write_text('{"schema_version": 1,')
    size = (paths["junk"] / "program.pte").stat().st_size
    (paths["junk"] / "program.pte").write_bytes(b"x" * size)
    replies = probe(("open", tmp_path), *(("open", path) for path in paths.values()))
    for reply, part in zip(replies, ("cannot read", "is missing", "at byte", "ExecuTorch cannot load"), strict=True):
        assert reply.values[0] == "bundle" and part in reply.values[1]


def test_text_needs_a_tokenizer_and_ids_do_not(both, tmp_path, probe: Probe) -> None:
    bundle = edited(both, tmp_path / "bundle", _set("tokenizer", value=None))
    replies = probe(
        ("open", bundle), ("text", "61"), ("generate", "5 6", "max_new_tokens=2"), ("generate", "5", "stop=61")
    )
    assert "without a tokenizer" in replies[1].values[1] and "without a tokenizer" in replies[3].values[1]
    assert replies[2].ok


def peak_mb(program: list[str], bundle: Path) -> float:
    """Most memory that a process has which answers a few tokens."""
    arguments = [*program, bundle, "--tokens", "5 6 7", "--max-new-tokens", "3"]
    done = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(done.pid, 0)
    done.returncode = os.waitstatus_to_exitcode(status)
    assert done.returncode == 0
    return usage.ru_maxrss / 1024


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is in KiB on Linux")
def test_neither_packed_weights_nor_empty_slots_are_held_twice(demo_bundle, program: Program) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 16384, "head_dim": 64}
    model = tiny_model("llama", **sizes, num_key_value_heads=4)
    large = exported_bundle(model, "executorch", 50_000, verify=False)
    weights = sum(parameter.nbytes for parameter in model.parameters()) / 2**20
    cache = 50_000 * 2 * 4 * 64 * 4 / 2**20
    assert weights > 45 and cache > 90
    command = program("exportable_cache_generate")
    # Beside the file's pages, and with every slot, it is their sum and the weights once more.
    assert peak_mb(command, large) - peak_mb(command, demo_bundle) < 1.3 * weights + 20
