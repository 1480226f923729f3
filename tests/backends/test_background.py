"""Graphs that come while steps go on: from a folder, or from another process.

What that process compiles takes long, so most tests have another program in its place, or a folder that holds all.
"""

from __future__ import annotations

import contextvars
import io
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._inductor import config as inductor

from exportable_cache.backends.live import background as background_worker
from exportable_cache.backends.live.background_process import _runner
from exportable_cache.backends.live.compile import CompileOptions, check_background
from exportable_cache.backends.live.graph_cache import GRAPH, OutdatedGraph
from exportable_cache.backends.live.model_snapshot import _Reader, from_snapshot, snapshot
from exportable_cache.common.compat.torch import allow_cuda_graphs, inductor_config
from exportable_cache.common.process.tuning import torch_threads
from exportable_cache.decoding import ContinuousBatch
from exportable_cache.errors import InputError
from exportable_cache.program.spec import ProgramSpec

from ..support.background import FAILS, SLEEPS, in_its_place, model_of, session_of
from ..support.compiling import compiling_with
from ..support.models import tiny_model, tokens
from ..support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("inductor")


@pytest.mark.full
def test_tokens_are_the_same_before_and_after_the_graphs_are_there(tmp_path: Path) -> None:
    """Greedy and drawn, by the process itself: an answer that begins as it is goes on in a graph, with the same random
    numbers.
    """
    model, prompt, told = model_of(), tokens(5), []
    settings = {"temperature": 0.9, "seed": 7}
    expected = list(session_of(model, False).generate(prompt, 40, **settings))
    session = session_of(model, True, graph_cache=tmp_path, progress=lambda *stage: told.append(stage))
    answer = session.generate(prompt, 40, **settings)
    found = [next(answer) for _ in range(9)]
    assert session.pending_graphs == 3 and not session.runner._calls
    wait_until(lambda: session.pending_graphs == 0, 1800)
    found += answer
    assert found == expected
    assert sorted(key.step.method for key in session.runner._calls) == ["choice", "decode"]
    assert told[0] == ("compiling decode", 0, 1) and told[-1][1:] == (3, 3)
    logits = session_of(model, False).prefill(prompt)
    session.reset()
    torch.testing.assert_close(session.prefill(prompt), logits, atol=1e-4, rtol=0)
    assert sorted(key.step.method for key in session.runner._calls) == ["choice", "decode", "prefill"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session.reset()
        session.warm_up()
    assert len(session.runner._calls) == 3
    # A later session finds all of them in the folder.
    session.close()
    later = session_of(model, True, graph_cache=tmp_path)
    later.warm_up()
    assert later.runner.graph_cache.loaded == 3 and later.runner.background._worker._process is None


def test_the_graph_of_a_token_is_asked_for_with_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    in_its_place(monkeypatch, SLEEPS)
    with session_of(model_of()) as session:
        session.prefill(tokens(3))
        assert [graph.method.name for graph in session.runner.background._status.waiting.values()] == [
            "decode",
            "prefill",
        ]


def test_a_graph_that_does_not_fit_any_more_is_not_handed_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    in_its_place(monkeypatch, SLEEPS)
    model, ids, asked = model_of(), tokens(3), []

    def outdated(*_: torch.Tensor) -> None:
        asked.append(1)
        raise OutdatedGraph

    with session_of(model) as session:
        expected = session.prefill(ids)
        status = session.runner.background._status
        status.ready |= dict.fromkeys([graph.key for graph in status.waiting.values()], outdated)
        for _ in range(2):
            session.reset()
            with warnings.catch_warnings():
                # The graph is given up, and that is said.
                warnings.simplefilter("ignore", RuntimeWarning)
                assert torch.equal(session.prefill(ids), expected)
    assert asked == [1]


#: Writes the settings that it is sent to the file that they are of.
NOTES = """
import json, pickle, sys, time
folder, _, settings, _ = pickle.load(sys.stdin.buffer)
open(f"{folder}/settings.part", "w").write(json.dumps(settings["inductor"]["cpp.min_chunk_size"]))
__import__("os").rename(f"{folder}/settings.part", f"{folder}/settings")
time.sleep(600)
"""


def test_settings_of_the_compiler_go_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the thread that made the session, which no other thread and no other process has."""
    in_its_place(monkeypatch, NOTES)
    with inductor.patch({"cpp.min_chunk_size": 777}), session_of(model_of(), graph_cache=tmp_path) as session:
        written = session.runner.background._worker._snapshot
        settings = background_worker.torch_settings()
        session.prefill(tokens(3))
        wait_until(lambda: (tmp_path / "settings").exists())
    assert (tmp_path / "settings").read_text() == "777"
    assert inductor_config()["cpp.min_chunk_size"] != 777

    def taken_over() -> dict:
        _runner(str(tmp_path), 1, settings, written)
        return inductor_config()

    assert contextvars.copy_context().run(taken_over) == settings["inductor"]


def test_what_aotinductor_notes_in_its_settings_makes_no_other_graphs() -> None:
    before = inductor_config()
    with inductor.patch({"aot_inductor.metadata": {"AOTI_CPU_ISA": "AVX2"}}):
        assert inductor_config() == before


def test_graphs_are_loaded_with_the_threads_that_they_were_compiled_for(tmp_path: Path, monkeypatch) -> None:
    """Though a step runs with fewer when the thread that loads them first asks."""
    in_its_place(monkeypatch, SLEEPS)
    (tmp_path / f"other{GRAPH}").touch()
    tmp_path.chmod(0o700)
    model, found, stepping, noted = model_of(), [], threading.Event(), threading.Event()

    def note(*_: object) -> None:
        assert stepping.wait(60)
        found.append(torch.get_num_threads())
        noted.set()

    def wait(*_: object) -> None:
        stepping.set()
        assert noted.wait(60)

    with torch_threads(2):
        session = session_of(model, graph_cache=tmp_path)
        monkeypatch.setattr(session.runner.compiler, "load", note)
        model.model.norm.register_forward_hook(wait)
        session.prefill(tokens(3))
        session.close()
    assert found == [2]


@pytest.mark.parametrize(
    ("program", "reason"),
    [("pass", "the compiling process has ended"), (FAILS, "no compiler was found")],
    ids=["dies", "fails"],
)
def test_what_is_never_compiled_is_one_warning_and_steps_go_on(program: str, reason: str, monkeypatch) -> None:
    in_its_place(monkeypatch, program)
    model, prompt = model_of(), tokens(5)
    expected = list(session_of(model, False).generate(prompt, 12))
    session = session_of(model)
    answer = session.generate(prompt, 12)
    found = [next(answer)]
    status = session.runner.background._status
    wait_until(lambda: status.stop_reason or status.failed)
    with pytest.warns(RuntimeWarning, match=f"steps continue without compiled graphs: {reason}") as warned:
        found += answer
    assert found == expected and len(warned) == 1
    # And whoever waits does not do so for ever.
    session.reset()
    session.warm_up()


def test_what_cannot_be_compiled_elsewhere_is_refused_by_name_only(caplog) -> None:
    """`compile=True` is then "wait"."""
    model = model_of()
    with pytest.raises(InputError, match="mode is 'max-autotune'.*pass compile=True"):
        session_of(model, mode="max-autotune")
    with pytest.raises(InputError, match="compile must be True, False, 'background' or 'wait', got 'later'"):
        session_of(model, "later")
    assert session_of(model, True).runner.background is not None
    assert session_of(model, "wait").runner.background is None
    assert session_of(model, True, mode="max-autotune").runner.background is None
    model.model.norm.hook = lambda: None
    with pytest.raises(InputError, match='cannot be pickled .*pass compile="wait"'):
        session_of(model)
    with caplog.at_level("INFO", "exportable_cache.backends.live.background"):
        assert session_of(model, True).runner.background is None
    assert "graphs are compiled when they are needed: this model cannot be" in caplog.text
    with compiling_with("eager"), pytest.raises(InputError, match="backend is 'eager'"):
        session_of(model_of())


def test_a_gpu_is_compiled_for_in_the_background() -> None:
    """Check the decision alone, which needs no GPU."""
    check_background(torch.device("cuda", 0), None)
    with pytest.raises(InputError, match="a CPU or a CUDA GPU and Inductor's default mode, but the cache is on mps"):
        check_background(torch.device("mps"), None)
    with pytest.raises(InputError, match="but mode is 'max-autotune'"):
        check_background(torch.device("cuda"), "max-autotune")
    with compiling_with("eager"), pytest.raises(InputError, match="backend is 'eager'"):
        check_background(torch.device("cuda"), None)


@pytest.mark.parametrize(("device", "compiled"), [("cpu", []), ("cuda", ["decode"])])
def test_a_gpu_compiles_here_what_the_other_process_could_not(device: str, compiled: list[str], monkeypatch) -> None:
    """Check that steps on a CPU stay eager, and that other methods are still compiled in the background."""
    runner = session_of(model_of(), True).runner
    background = runner.background
    background._device = torch.device(device)
    requested = []
    monkeypatch.setattr(background._worker, "request", lambda index, graph, *more: requested.append(graph))
    here = []

    def compiled_here(module, method, key, inputs):
        here.append(method.name)
        return module

    monkeypatch.setattr(runner.compiler, "compile", compiled_here)
    runner._shared = {}
    step = torch.tensor([[5]]), torch.tensor([0])
    runner.run("decode", *step)
    assert not here and requested[0].key.step.method == "decode"
    background._status.failed[requested[0].key] = "it cannot be pickled"
    if device == "cpu":
        with pytest.warns(RuntimeWarning, match="steps continue without compiled graphs"):
            runner.run("decode", *step)
    else:
        runner.run("decode", *step)
    assert here == compiled
    runner.run("prefill", torch.tensor([[5, 6, 7]]), torch.tensor([0]))
    assert here == compiled


@pytest.mark.parametrize(("device", "compiled"), [("cpu", []), ("cuda", ["decode", "choice"])])
def test_warm_up_on_a_gpu_ends_with_graphs(device: str, compiled: list[str], monkeypatch) -> None:
    """A call that waits for the subprocess compiles in this process, at once, if the subprocess gives up meanwhile."""
    model = model_of()
    runner = session_of(model, True).runner
    background, here = runner.background, []
    background._device = torch.device(device)

    def fails(index, graph, *more) -> None:
        background._status.failed[graph.key] = "no compiler was found"

    def compiled_here(module, method, key, inputs):
        here.append(getattr(method, "name", "choice"))
        return module

    monkeypatch.setattr(background._worker, "request", fails)
    monkeypatch.setattr(runner.compiler, "compile", compiled_here)
    runner._shared = {}
    with runner.waiting(), pytest.warns(RuntimeWarning, match="no compiler was found"):
        runner.run("decode", torch.tensor([[5]]), torch.tensor([0]))
        logits = torch.zeros(1, model.config.vocab_size)
        numbers = [torch.tensor(number) for number in (0.8, 40, 0.9, 0.1, 1.2)]
        runner._choose(runner._choices[False, False], [logits, torch.rand(1), *numbers])
    assert here == compiled


def test_a_gpu_with_little_memory_is_compiled_for_when_it_is_needed(caplog, monkeypatch) -> None:
    """The subprocess would need memory for a second cache and a context."""
    cache = SimpleNamespace(
        device=torch.device("cuda", 0), ranks=None, offloader=None, resident_nbytes=3 * 10**9, stored_state=dict
    )
    made = []
    monkeypatch.setattr(background_worker, "BackgroundCompiler", lambda *arguments: made.append(arguments) or arguments)
    free = [6 * 10**9]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 10**11))
    model, spec = torch.nn.Identity(), ProgramSpec()
    with caplog.at_level("INFO", "exportable_cache.backends.live.background"):
        assert background_worker.background_compiler(model, cache, spec, CompileOptions(True)) is None
    assert not made and "another cache, and 5.6 GiB are free" in caplog.text
    with pytest.raises(InputError, match="needs 6.5 GiB of free memory on cuda:0"):
        background_worker.background_compiler(model, cache, spec, CompileOptions("background"))
    free[0] = 7 * 10**9
    assert background_worker.background_compiler(model, cache, spec, CompileOptions(True)) is not None


def test_weights_on_a_gpu_share_the_memory_of_the_largest() -> None:
    reader = _Reader(io.BytesIO())
    made = [
        reader._over_shared(torch.Size(shape), stride, dtype, torch.device("cpu"))
        for shape, stride, dtype in (
            ((3, 2), (2, 1), torch.float32),
            ((4, 8), (1, 4), torch.float32),
            ((5,), (1,), torch.int8),
        )
    ]
    assert [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in made] == [
        ((3, 2), (2, 1), torch.float32),
        ((4, 8), (1, 4), torch.float32),
        ((5,), (1,), torch.int8),
    ]
    assert len({tensor.untyped_storage()._cdata for tensor in made}) == 1
    assert made[0].untyped_storage().nbytes() == 4 * 8 * 4


def test_every_thread_may_capture_cuda_graphs(monkeypatch) -> None:
    """Torch 2.11 prepares the thread that imports the module; a worker thread does, if it loads the first graph."""
    trees = SimpleNamespace(local=threading.local())
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    found = []

    def step() -> None:
        allow_cuda_graphs()
        containers = trees.local.tree_manager_containers
        allow_cuda_graphs()
        found.append(trees.local.tree_manager_containers is containers)
        found.append(trees.local.tree_manager_locks[0].acquire(blocking=False))

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    assert found == [True, True]


def test_a_model_that_the_script_defines_is_not_handed_over(monkeypatch) -> None:
    """The other process has another main module."""
    model = model_of()

    class Norm(type(model.model.norm)):
        pass

    Norm.__module__, Norm.__qualname__ = "__main__", "Norm"
    monkeypatch.setattr(sys.modules["__main__"], "Norm", Norm, raising=False)
    model.model.norm.__class__ = Norm
    with pytest.raises(InputError, match="defined in the running script or notebook"):
        session_of(model)


def test_both_sessions_of_a_batch_are_compiled_in_the_background() -> None:
    batch = ContinuousBatch.from_model(model_of(), 32, 2, compile=True)
    assert all(session.runner.background is not None for session in (batch.prefill, batch.decode))


def test_a_skeleton_has_no_large_values_and_keeps_what_is_tied() -> None:
    model = tiny_model("llama", tie_word_embeddings=True, vocab_size=4096)
    written = snapshot(model)
    assert len(written) < model.lm_head.weight.nbytes / 2
    other = from_snapshot(written)
    assert other.lm_head.weight is other.model.embed_tokens.weight
    for (name, one), (_, two) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert (one.shape, one.stride(), one.dtype) == (two.shape, two.stride(), two.dtype), name
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, other.model.rotary_emb.inv_freq)
