"""The folder of compiled graphs: whose they are, which are dropped, and what processes that share it read."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from exportable_cache import ExportableCache, Session
from exportable_cache.backends.live import graph_cache
from exportable_cache.backends.live.graph_cache import GraphCache
from exportable_cache.common.fs.files import PARTIAL
from exportable_cache.errors import InputError

from ..support.models import tiny_model

CAPACITY = 32


@pytest.fixture(scope="module")
def model():
    return tiny_model("mistral", num_hidden_layers=1)


def cache_of(folder: Path, model, limit: int = graph_cache.GRAPH_CACHE_MB) -> GraphCache:
    return GraphCache(folder, model, ExportableCache.from_model(model, CAPACITY), limit)


class Written:
    """Stands for a compiled step: one that can be written takes a compiler."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    def aot_compile(self, inputs: tuple) -> Written:
        return self

    def save_compiled_function(self, path: str, external_data: dict) -> None:
        Path(path).write_bytes(self.name.encode() * 40000)

    def source_info(self) -> SimpleNamespace:
        return SimpleNamespace(inlined_sources=())

    def guard_check(self, *inputs: torch.Tensor) -> bool:
        return True

    def disable_guard_check(self) -> None:
        pass


def written_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda step, **options: Written(step()))
    monkeypatch.setattr(
        torch.compiler, "load_compiled_function", lambda file, **options: Written(file.read(10).decode())
    )


def test_graphs_are_those_of_one_processor_and_gpu(model, tmp_path, monkeypatch) -> None:
    """Graphs contain machine code for both, which others may not be able to run."""
    cache = ExportableCache.from_model(model, CAPACITY)

    def path() -> Path:
        return GraphCache(tmp_path, model, cache)._path("decode")

    here = path()
    assert path() == here
    for name in ("processor_name", "instructions"):
        with monkeypatch.context() as patch:
            patch.setattr(graph_cache, name, lambda: "another")
            assert path() != here
    kinds = []
    for gpu in ("NVIDIA H100", "NVIDIA H200"):
        with monkeypatch.context() as patch:
            patch.setattr(graph_cache, "kind_of_gpu", lambda device, gpu=gpu: (gpu, (9, 0), "13.0"))
            kinds.append(path())
    assert len({here, *kinds}) == 3


def test_what_was_used_longest_ago_is_dropped(model, tmp_path, monkeypatch) -> None:
    """Each file is 0.4 MB."""
    written_graphs(monkeypatch)
    cache = cache_of(tmp_path, model, limit=2)
    names = [f"graph-{index:04}" for index in range(5)]
    for age, name in enumerate(names):
        cache.get(name, lambda name=name: name, {}, [])
        os.utime(cache._path(name), (1000 + age, 1000 + age))
    assert len(list(tmp_path.glob("*.graph"))) == 4 + 1  # its own are never dropped
    other = cache_of(tmp_path, model, limit=2)
    # Loading counts as using.
    assert other.load(names[0], lambda: None, {}, []).name == names[0]
    (tmp_path / f".left{PARTIAL}").touch()
    os.utime(tmp_path / f".left{PARTIAL}", (1000, 1000))
    other.get("graph-more", lambda: "graph-more", {}, [])
    left = [name for name in [*names, "graph-more"] if other._path(name).exists()]
    assert left == [names[0], *names[3:], "graph-more"]
    assert not list(tmp_path.glob(".left*"))


def test_how_much_is_kept_is_checked(model, tmp_path) -> None:
    with pytest.raises(InputError, match="graph_cache_mb must be an int of at least 1, got 0"):
        Session.from_model(
            model, ExportableCache.from_model(model, CAPACITY), compile="wait", graph_cache=tmp_path, graph_cache_mb=0
        )


def test_processes_that_share_a_folder_read_whole_graphs_or_none(model, tmp_path, monkeypatch) -> None:
    """They write, read and drop the same files at the same time."""
    written_graphs(monkeypatch)

    def note(*words: str) -> None:
        # One that another process has dropped a moment ago.
        assert "FileNotFoundError" in words[-1], words

    monkeypatch.setattr(graph_cache.log, "info", note)

    def work() -> None:
        for turn in range(12):
            # Of its own each time, so that every file may be dropped.
            cache, name = cache_of(tmp_path, model, limit=1), f"graph-{turn % 4:04}"
            for _ in range(3):
                assert cache.get(name, lambda name=name: name, {}, []).name == name
            assert cache.last_error == ""

    workers = [multiprocessing.get_context("fork").Process(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2 * 10**6
