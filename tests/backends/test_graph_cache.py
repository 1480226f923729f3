"""Compiled graphs that a later session takes from disk."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import codecache, cpp_builder, cpu_vec_isa
from torch._inductor import config as inductor
from transformers.models.mistral import modeling_mistral

from exportable_cache import ExportableCache, Session
from exportable_cache.backends.live import graph_cache
from exportable_cache.common.compat import torch_compile as private
from exportable_cache.common.patch import ORIGINAL
from exportable_cache.common.process.tuning import torch_threads
from exportable_cache.errors import InputError

from ..support.compiling import compiling_with
from ..support.models import among, tiny_model, tokens
from ..support.oracle import difference, reference_logits
from ..support.waiting import wait_until

CAPACITY = 32


def session_of(model, folder: Path, **options) -> Session:
    torch._dynamo.reset()
    counters.clear()
    return Session.from_model(
        model,
        ExportableCache.from_model(model, CAPACITY),
        compile=options.pop("compile", "wait"),
        prefill_chunk=1,
        graph_cache=folder,
        **options,
    )


def worst(session: Session, model) -> float:
    """Largest |logit difference| to the eager model, token by token, so that there is one graph: of several, those of
    prompts among them, in test_layered.py.
    """
    ids, found = tokens(CAPACITY), 0.0
    for prompt in (1, 3, 8, 19):
        session.reset()

        def step(piece: torch.Tensor, session: Session = session) -> torch.Tensor:
            return session.decode(piece[:, 0]) if piece.shape[1] == 1 else session.prefill(piece)

        found = max(found, difference(step, reference_logits(model, ids, prompt), ids, prompt))
    return found


def counts(session: Session) -> tuple[int, int]:
    return session.runner.graph_cache.loaded, session.runner.graph_cache.compiled


@pytest.fixture(scope="module", autouse=True)
def generated_code() -> Iterator[None]:
    """Inductor tries what the processor knows where nobody says that it need not, but for the processes that load what
    it tries it by.
    """
    with (
        compiling_with("inductor"),
        inductor.patch({"cpp.vec_isa_ok": None}),
        private._PROBE.during(private._assume_supported),
    ):
        yield


def forget_code() -> None:
    """What Inductor keeps in memory, with the folder that it was in."""
    codecache.CppPythonBindingsCodeCache.cache_clear()
    codecache.PyCodeCache.cache_clear()
    private.forget_processor()


def in_an_empty_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process whose Inductor finds no code, and may compile none."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    forget_code()
    monkeypatch.setattr(cpp_builder.CppBuilder, "build", lambda self: pytest.fail("code is compiled"))


class MistralRMSNorm(modeling_mistral.MistralRMSNorm):
    """Of the same name, so that a model of it reads as one of the other."""


def ring_model(scale: float = 1.0):
    model = tiny_model("mistral", num_hidden_layers=1)
    model.model.layers[0].self_attn.scaling *= scale
    return model


@pytest.fixture(scope="module")
def model():
    return ring_model()


def trial(answer: Callable[[], bool]) -> Callable[..., bool]:
    """In the place of Inductor's, and known as the one that is replaced."""

    def check_build(self: cpu_vec_isa.VecISA, code: str) -> bool:
        return answer()

    setattr(check_build, ORIGINAL, cpu_vec_isa.VecISA.check_build)
    return check_build


@pytest.fixture
def own_folder(folder: Path, tmp_path: Path) -> Path:
    """A copy, for tests that compile other graphs of the same names."""
    shutil.copytree(folder, tmp_path / "graphs")
    return tmp_path / "graphs"


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("graphs")
    session = session_of(model, folder, buckets=False)
    with mock.patch.object(cpu_vec_isa.VecISA, "check_build", trial(lambda: pytest.fail("the processor is tried"))):
        assert worst(session, model) <= 1e-4
    # Of some ten kernels.
    assert len(session.runner.graph_cache._libraries) == 1
    assert counts(session) == (0, 1) and len(list(folder.glob("*.graph"))) == 1
    return folder


class Uncompiled:
    """A step in place of its graph, which cannot be written."""

    def __init__(self, step: Callable[..., object]) -> None:
        self.step = step

    def __call__(self, *inputs: torch.Tensor) -> object:
        return self.step(*inputs)

    def disable_guard_check(self) -> None:
        pass

    def guard_check(self, *inputs: torch.Tensor) -> bool:
        return True

    def save_compiled_function(self, *arguments: object, **options: object) -> None:
        raise OSError("it is not compiled")


@pytest.fixture
def nothing_compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps stay uncompiled where tests count compilations, which take 3 s each. With `--full` they are compiled."""
    if not request.config.getoption("--full"):
        monkeypatch.setattr(graph_cache.GraphCache, "_compiled", lambda self, step, inputs, options: Uncompiled(step))


def test_a_later_session_traces_and_compiles_nothing(model, folder) -> None:
    session = session_of(model, folder, buckets=False)
    assert worst(session, model) <= 1e-4
    assert counts(session) == (1, 0)
    assert not counters["frames"] and not counters["stats"]["unique_graphs"]


def test_layers_are_the_same_when_they_are_pickled() -> None:
    """As guards of a graph are, with the layers that they look at."""
    cache = ExportableCache.from_model(tiny_model("llama", num_hidden_layers=3), CAPACITY)
    for layer in cache.layers:
        other = pickle.loads(pickle.dumps(layer))
        assert vars(other).keys() == vars(layer).keys()


def test_a_later_session_needs_nothing_of_inductors_own_folder(model, folder, tmp_path, monkeypatch) -> None:
    """Which lies among temporary files: machine code is in the graph's file."""
    in_an_empty_folder(tmp_path, monkeypatch)
    session = session_of(model, folder, buckets=False)
    assert worst(session, model) <= 1e-4
    assert counts(session) == (1, 0) and list(tmp_path.rglob("*.main.so"))


@pytest.mark.full
def test_what_the_processor_was_tried_by_is_in_the_file_too(model, tmp_path, monkeypatch) -> None:
    """Where a kernel could not be compiled without; also in a process that had tried it before."""
    forget_code()
    monkeypatch.setattr(private, "_takes_short_cuts", False)
    assert cpu_vec_isa.pick_vec_isa()
    session_of(model, tmp_path / "graphs", buckets=False).prefill(tokens(3))
    in_an_empty_folder(tmp_path / "code", monkeypatch)
    session = session_of(model, tmp_path / "graphs", buckets=False)
    assert session.prefill(tokens(3)).isfinite().all() and counts(session) == (1, 0)


def test_what_cannot_be_compiled_without_a_trial_of_the_processor_is_compiled_with_one(monkeypatch) -> None:
    """The compiler may know fewer instructions than the processor."""
    monkeypatch.setattr(private, "_takes_short_cuts", True)
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", trial(lambda: False))
    found = []

    def compile_region() -> bool:
        private.forget_processor()
        found.append(bool(cpu_vec_isa.VecAVX2()))
        if found[-1]:
            raise RuntimeError("unrecognized command-line option")
        return found[-1]

    assert private.with_short_cuts(compile_region) is False and found == [True, False]
    assert not private.takes_short_cuts()
    assert private.with_short_cuts(compile_region) is False and found == [True, False, False]
    private.forget_processor()


def test_graphs_hold_no_weights(model, folder) -> None:
    torch.manual_seed(1)
    other = ring_model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    session = session_of(other, folder, buckets=False)
    assert worst(session, other) <= 1e-4 and counts(session) == (1, 0)
    assert reference_logits(other, tokens(4), 4).sub(reference_logits(model, tokens(4), 4)).abs().max() > 1e-2


@pytest.mark.usefixtures("nothing_compiled")
def test_what_the_file_name_does_not_know_is_guarded(own_folder) -> None:
    other = ring_model(scale=4)
    session = session_of(other, own_folder, buckets=False)
    session.prefill(tokens(3))
    assert counts(session) == (0, 1)


@pytest.mark.parametrize(
    "change", among(["source", "file", "threads", "layout", "hook", "class"], fast=["source", "hook", "class"])
)
def test_graphs_of_something_else_are_compiled_again(change: str, model, folder, monkeypatch, request) -> None:
    options = {"buckets": False}
    if change != "class":
        request.getfixturevalue("nothing_compiled")
    if change == "source":
        lines = graph_cache._lines
        monkeypatch.setattr(
            graph_cache, "_lines", lambda module: [line.replace("return", "return ") for line in lines(module)]
        )
    elif change == "file":
        for path in folder.glob("*.graph"):
            path.write_bytes(path.read_bytes()[:1000])
    elif change == "hook":
        hook = model.model.norm.register_forward_hook(lambda module, inputs, output: 2 * output)
    elif change == "class":
        model.model.norm.__class__ = MistralRMSNorm
    else:
        options = {"buckets": [4]}
    try:
        with torch_threads(3) if change == "threads" else nullcontext():
            session = session_of(model, folder, **options)
        ids = tokens(3)
        torch.testing.assert_close(session.prefill(ids), reference_logits(model, ids, 3)[:, -1], atol=1e-4, rtol=0)
    finally:
        if change == "hook":
            hook.remove()
        elif change == "class":
            model.model.norm.__class__ = modeling_mistral.MistralRMSNorm
    assert counts(session) == (0, 1)


def test_the_choice_of_tokens_is_kept_too(model, folder) -> None:
    expected = list(session_of(model, folder, buckets=False).generate(tokens(5), 6, temperature=0.7, seed=1))
    session = session_of(model, folder, buckets=False)
    assert list(session.generate(tokens(5), 6, temperature=0.7, seed=1)) == expected
    assert counts(session) == (2, 0)


def test_a_later_session_goes_on_while_graphs_are_loaded_and_starts_no_process(model, folder) -> None:
    """`compile=True`: greedy and drawn tokens are those of eager steps, before and after the graphs are there."""
    for settings in ({}, {"temperature": 0.7, "seed": 1}):
        expected = list(session_of(model, folder, buckets=False).generate(tokens(5), 9, **settings))
        told: list[tuple[str, int, int]] = []
        session = session_of(
            model, folder, buckets=False, compile=True, progress=lambda *stage, told=told: told.append(stage)
        )
        assert session.runner.background is not None
        found = []
        for token in session.generate(tokens(5), 9, **settings):
            found.append(token)
            wait_until(lambda session=session: not session.pending_graphs)
        assert found == expected
        assert "decode" in {key.step.method for key in session.runner._calls}
        assert session.runner.background._worker._process is None and told[-1][1] == told[-1][2]


@pytest.mark.parametrize("how", ["wait", "background"])
@pytest.mark.usefixtures("nothing_compiled")
def test_a_graph_that_does_not_fit_any_more_is_not_called(how: str, model, own_folder) -> None:
    """The model, or torch's settings, change amid a session."""
    attention, ids = model.model.layers[0].self_attn, tokens(6)
    scaling = attention.scaling

    def check(session: Session) -> None:
        torch.testing.assert_close(session.prefill(ids), reference_logits(model, ids, 6)[:, -1], atol=1e-4, rtol=0)
        session.reset()

    with session_of(model, own_folder, buckets=False, compile=how) as session:
        if how == "background":
            session.warm_up()
        check(session)
        before = counts(session)
        assert before[1] == 0 and "decode" in {key.step.method for key in session.runner._calls}
        attention.scaling = scaling * 3
        try:
            if how == "wait":
                check(session)
                # Once, and the graph for this model as it was is replaced by that for it as it is.
                check(session)
                assert counts(session) == (before[0], 1)
            else:
                with pytest.warns(RuntimeWarning, match="the model or torch's settings have changed"):
                    check(session)
                assert "decode" not in {key.step.method for key in session.runner._calls}
        finally:
            attention.scaling = scaling


@pytest.mark.parametrize("how", ["wait", "background"])
def test_graphs_run_on_as_many_threads_as_when_the_session_was_made(how: str, model, folder) -> None:
    with session_of(model, folder, buckets=False, compile=how) as session:
        if how == "background":
            session.warm_up()
        with torch_threads(3):
            ids = tokens(6)
            torch.testing.assert_close(session.prefill(ids), reference_logits(model, ids, 6)[:, -1], atol=1e-4, rtol=0)
            assert torch.get_num_threads() == 3
        assert "decode" in {key.step.method for key in session.runner._calls} and counts(session)[1] == 0


def test_nothing_is_kept_of_a_session_that_compiles_nothing(model, tmp_path) -> None:
    with pytest.raises(InputError, match="graph_cache needs compile=True, got .*; set both"):
        Session.from_model(model, ExportableCache.from_model(model, CAPACITY), graph_cache=tmp_path)


@pytest.mark.usefixtures("nothing_compiled")
def test_a_graph_that_cannot_be_written_runs_all_the_same(model, tmp_path, monkeypatch, caplog) -> None:
    """And is not compiled twice."""
    monkeypatch.setattr(
        graph_cache, "atomic_path", lambda path: (_ for _ in ()).throw(OSError("no space left on device"))
    )
    session, ids = session_of(model, tmp_path, buckets=False), tokens(6)
    for _ in range(2):
        session.reset()
        torch.testing.assert_close(session.prefill(ids), reference_logits(model, ids, 6)[:, -1], atol=1e-4, rtol=0)
    assert counts(session) == (0, 1) and not list(tmp_path.iterdir()) and "no space left" in caplog.text
    assert counters["stats"]["unique_graphs"] <= 1
