"""Bundles with a program for each of several processes, against one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist
from typer.testing import CliRunner

from exportable_cache import ExportableCache, Session, export, load
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.cli.app import app
from exportable_cache.decoding import Completer
from exportable_cache.errors import BundleError, InputError, RankLostError, UnsupportedModelError
from exportable_cache.models.weights import fingerprint
from exportable_cache.parallel.rank_model import RankOf, part_of_model
from exportable_cache.parallel.ranks import Ranks
from exportable_cache.verification.verify import verify

from ..decoding.byte_tokenizer import SIZE, byte_tokenizer
from ..support.models import hybrid_model, tiny_model, tokens
from ..support.oracle import reference_logits
from . import split_checks
from .checks import CAPACITY, FAMILY, LENGTH, NEW, PROMPT, REPEATED
from .processes import run_ranks
from .split_checks import files_read
from .test_families import FAMILIES, family


def model() -> Any:
    """Of 257 tokens: the second of two ranks has one fewer."""
    return tiny_model(FAMILY, vocab_size=SIZE)


def one_process() -> Session:
    whole = model()
    return Session.from_model(whole, ExportableCache.from_model(whole, CAPACITY))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs")
    export(
        model(),
        target="pt2",
        max_cache_len=CAPACITY,
        prefill_chunk=16,
        output_dir=path / "bundle",
        tensor_parallel=2,
        tokenizer=byte_tokenizer(),
        verify=False,
    )
    session = one_process()
    session.prefill(tokens(LENGTH)[:, :PROMPT])
    session.save_state(path / "by-one.safetensors")
    return path


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    ran = run_ranks(folder, 2, (split_checks.of_a_bundle, split_checks.killed_program))
    assert not any(isinstance(one["of_a_bundle"], str) for one in ran), ran
    results = [{**one["of_a_bundle"], "killed": one.get("killed_program")} for one in ran]
    return results


def test_logits_are_those_of_one_process_past_the_window(found: list[dict[str, Any]]) -> None:
    expected = reference_logits(model(), tokens(LENGTH), PROMPT)
    for one in found:
        assert (one["logits"] - expected).abs().max() < 1e-4
    assert torch.equal(found[0]["logits"], found[1]["logits"])


def test_each_rank_has_its_heads_and_its_weights(found: list[dict[str, Any]], folder: Path) -> None:
    manifest = Bundle.open(folder / "bundle").manifest
    assert manifest.ranks is not None and manifest.ranks.size == 2
    assert manifest.ranks.parts_of_heads == [2, 2]
    whole = ExportableCache.from_model(model(), CAPACITY)
    lengths = sum(layer.cumulative_length.nbytes for layer in whole.layers)
    assert manifest.cache_bytes - lengths == (whole.nbytes - lengths) // 2
    # Norms are on both.
    assert manifest.weights_bytes // 2 < manifest.ranks.weights_bytes < 0.55 * manifest.weights_bytes
    assert manifest.fingerprint == fingerprint(model())
    for one in found:
        assert one["heads"] == [1, 1]


def test_a_step_has_two_sums_a_layer_inside(folder: Path) -> None:
    with zipfile.ZipFile(folder / "bundle" / "rank-0" / "program.pt2") as archive:
        name = next(name for name in archive.namelist() if name.endswith("models/decode.json"))
        graph = json.loads(archive.read(name))["graph_module"]["graph"]
    sums = [node for node in graph["nodes"] if "all_reduce" in node["target"]]
    # Beside those of the layers one of the embedding, and one that puts the logits together.
    assert len(sums) == 2 * model().config.num_hidden_layers + 2


def test_tokens_and_states_are_those_of_one_process(found: list[dict[str, Any]], folder: Path) -> None:
    session = one_process()
    expected = list(session.generate(REPEATED, max_new_tokens=NEW))
    assert [one["tokens"] for one in found] == [expected] * 2
    session.load_state(folder / "by-programs.safetensors")
    assert session.length.tolist() == [REPEATED.shape[1] + NEW - 1]
    logits = reference_logits(model(), tokens(LENGTH), PROMPT)
    for one in found:
        assert (one["resumed"] - logits[:, 1]).abs().max() < 1e-4


def test_the_first_rank_alone_prints(found: list[dict[str, Any]]) -> None:
    code, printed, remarks = found[0]["printed"]
    assert code == 0 and printed and "prompt tokens" in remarks
    assert found[1]["printed"] == (0, "", "")
    for rank, one in enumerate(found):
        code, printed, complaint = one["refused"]
        assert code == 2 and not printed
        assert "stream_text got other options on rank 1 of 2" in complaint
        assert ("rank 1: " in complaint) is bool(rank)


def test_a_rank_that_dies_amid_a_step(found: list[dict[str, Any]]) -> None:
    assert found[0]["killed"].startswith("RankLostError: rank 1 of 2 is gone")
    assert found[1]["killed"] is None


def test_one_process_is_refused_with_the_numbers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"for 2 ranks, and this is one process.*torchrun --nproc-per-node 2"):
        load(folder / "bundle")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(InputError, match=r"for 2 ranks, and this group has 4.*tensor_parallel=4"):
        load(folder / "bundle")


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_a_group_of_another_size_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match=r"for 2 ranks, and this group has 1.*with no tensor_parallel"):
        load(folder / "bundle")


@pytest.mark.usefixtures("group_of_one")
def test_a_process_may_end_after_its_connections() -> None:
    ranks = Ranks(dist.group.WORLD, torch.device("cpu"))
    with subprocess.Popen(["sleep", "60"]) as other:
        ranks._processes = [(socket.gethostname(), other.pid)]
        threading.Timer(0.2, other.kill).start()
        with pytest.raises(RankLostError, match="rank 0 of 1 is gone"), ranks.watched():
            raise RuntimeError("Connection reset by peer")


def test_inspect_says_how_it_is_run(folder: Path) -> None:
    printed = CliRunner().invoke(app, ["inspect", str(folder / "bundle")]).stdout
    assert "2 ranks" in printed and "torchrun --nproc-per-node 2" in printed
    assert "rank-1/program.pt2" in printed and "load_pt2" not in printed


def test_files_of_a_rank_are_checked(folder: Path, tmp_path: Path) -> None:
    stray = folder / "bundle" / "rank-1" / "more.pt2"
    stray.write_bytes(b"")
    try:
        with pytest.raises(BundleError, match="does not list it"):
            Bundle.open(folder / "bundle")
    finally:
        stray.unlink()
    path = folder / "bundle" / "rank-1" / "program.pt2"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    try:
        with pytest.raises(BundleError, match=r"rank-1/program\.pt2 is damaged"):
            Bundle.open(folder / "bundle")
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"target": "executorch"}, InputError, "run in one process; export for target 'pt2' or 'aoti'"),
        ({"target": "pt2", "quantize": "8w"}, InputError, "float weights"),
        ({"target": "pt2", "tensor_parallel": 3}, InputError, "3 ranks cannot have equal parts of 2 and 4 heads"),
        ({"target": "pt2", "tensor_parallel": 1}, InputError, "must be an int of at least 2"),
    ],
)
def test_what_cannot_be_split_is_refused(options: Any, error: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=said):
        export(model(), max_cache_len=32, output_dir=tmp_path / "x", **{"tensor_parallel": 2, **options})


@pytest.mark.parametrize("ranks", [2, 4])
def test_biases_are_cut_like_their_weights(ranks: int) -> None:
    """Two of four ranks each keep the same one of the two key and value heads."""
    whole = hybrid_model()
    attention, size = whole.model.layers[0].self_attn, whole.config.head_dim
    for rank in range(ranks):
        part = part_of_model(whole, RankOf(rank, ranks)).model.layers[0].self_attn
        head = slice(rank * 2 // ranks * size, (rank * 2 // ranks + 1) * size)
        for own, of_all in ((part.k_proj, attention.k_proj), (part.v_proj, attention.v_proj)):
            assert torch.equal(own.weight, of_all.weight[head])
            assert torch.equal(own.bias, of_all.bias[head])


def test_a_model_without_a_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="no tensor parallel plan"):
        export(tiny_model("gpt2"), target="pt2", max_cache_len=32, output_dir=tmp_path / "x", tensor_parallel=2)


def test_a_dry_run_says_what_each_rank_would_have(folder: Path, tmp_path: Path) -> None:
    options = {"max_cache_len": CAPACITY, "output_dir": tmp_path / "x", "tensor_parallel": 2, "dry_run": True}
    found = export(model(), target="pt2", **options)
    manifest = Bundle.open(folder / "bundle").manifest
    assert "the program for pt2 in rank-0 to rank-1" in found.files
    (remark,) = found.remarks
    assert f"{manifest.ranks.weights_bytes:,} bytes" in remark and f"{manifest.cache_bytes:,} of cache" in remark


def test_completions_are_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    session = one_process()
    monkeypatch.setattr(session.stepper, "ranks", SimpleNamespace(size=2))
    with pytest.raises(InputError, match="this session runs on 2 ranks"):
        Completer(session)


@pytest.mark.full
def test_a_rank_reads_its_own_files_and_what_all_share(folder: Path) -> None:
    listed = set(Bundle.open(folder / "bundle").manifest.files)
    of_ranks = {rank: {name for name in listed if name.startswith(f"rank-{rank}/")} for rank in range(2)}
    found = [one["files_read"] for one in run_ranks(folder, 2, (files_read,))]
    assert not any(isinstance(one, str) for one in found), found
    for rank, one in enumerate(found):
        assert sorted(one["read"]) == sorted(listed - of_ranks[1 - rank]) and of_ranks[rank]
    expected = reference_logits(model(), tokens(PROMPT + 1), PROMPT)
    assert (found[0]["own"] - expected).abs().max() < 1e-4
    assert "rank-1/program.pt2 is damaged" in found[1]["damaged"]
    assert "rank 1 of 2 refused this" in found[0]["damaged"] and "is damaged" in found[0]["damaged"]


@pytest.mark.full
def test_verify_starts_the_ranks_itself(folder: Path) -> None:
    report = verify(folder / "bundle", model())
    assert report.passed and report.max_difference < 1e-4
    other = tiny_model(FAMILY, vocab_size=SIZE, initializer_range=0.2)
    assert not verify(folder / "bundle", other).passed


@pytest.mark.full
def test_torchrun(folder: Path) -> None:
    torchrun = Path(sys.executable).parent / "torchrun"
    command = [str(torchrun), "--nproc-per-node", "2", "-m", "exportable_cache", "generate", str(folder / "bundle")]
    done = subprocess.run(
        [*command, "--prompt", "the code is", "--max-new-tokens", "5", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["new_tokens"] == 5


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_programs_of_a_family(name: str, ranks: int, tmp_path: Path) -> None:
    options = {"max_cache_len": CAPACITY, "prefill_chunk": 16, "tensor_parallel": ranks}
    bundle = export(family(name), target="pt2", output_dir=tmp_path / "bundle", **options)
    assert bundle.manifest.verification["max_difference"] < 1e-4


@pytest.mark.full
def test_machine_code(tmp_path: Path) -> None:
    # Equal layers: sums within regions. Those of a method compiled whole are in test_machine_code.py.
    whole = tiny_model("llama", vocab_size=SIZE)
    options = {"max_cache_len": CAPACITY, "prefill_chunk": 16, "tensor_parallel": 2, "tokenizer": byte_tokenizer()}
    bundle = export(whole, target="aoti", output_dir=tmp_path / "bundle", **options)
    assert bundle.manifest.verification["max_difference"] < 1e-4
    whole.save_pretrained(tmp_path / "model")
    command = ("verify", tmp_path / "bundle", "--model", tmp_path / "model", "--trust")
    subprocess.run([sys.executable, "-m", "exportable_cache", *command], check=True, timeout=500)
    session = Session.from_model(whole, ExportableCache.from_model(whole, CAPACITY))
    session.prefill(tokens(LENGTH)[:, :PROMPT])
    session.save_state(tmp_path / "by-one.safetensors")
    expected = reference_logits(whole, tokens(LENGTH), PROMPT)
    for one in run_ranks(tmp_path, 2, (split_checks.of_a_bundle,)):
        result = one["of_a_bundle"]
        assert isinstance(result, dict), result
        assert (result["logits"] - expected).abs().max() < 1e-4
        assert (result["resumed"] - expected[:, 1]).abs().max() < 1e-4
        assert result["printed"][0] == 0
