"""What every test shares: no network, one thread, and the exported demo model."""

from __future__ import annotations

import gc
import logging
import os

# Before anything imports torch or huggingface_hub, which read them once. Tiny models are fastest on one thread.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
# The package sets it when it comes before torch, which it does not here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# What AOTInductor writes around its kernels takes longer to compile than to run; the kernels are as users have them.
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")
# Tests run side by side already: workers of the compiler would only be started, and import torch, for each process.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Whether the compiler knows the processor's instructions is tried in `test_graph_cache` alone: it takes six
# compilations and as many processes that import torch, in each folder and each process.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Tables and help as wide as the assertions about them expect, whatever terminal the tests run in.
os.environ["COLUMNS"] = "160"
# What was checked before is noted beside pytest's own cache, not in the user's.
os.environ["EXPORTABLE_CACHE_HOME"] = os.path.join(os.path.dirname(__file__), "..", ".pytest_cache", "home")
# Commands in this process would load the native runner, which cannot be loaded after ExecuTorch's bindings. Tests of it
# choose it.
os.environ["EXPORTABLE_CACHE_RUNTIME"] = "torch"
for _name in ("EXPORTABLE_CACHE_DEBUG", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(_name, None)

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

if TYPE_CHECKING:
    from .support.hub import Hub

#: What the quick start's example exports with.
DEMO_MAX_CACHE_LEN = 512

#: Marker of a lane that is not part of every run, and how to run it.
_ON_REQUEST = {
    "cpp": "compiles C++: run it with --cpp, --full, make test-cpp, or by its path",
    "project": "checks documents, benchmarks and sources: run it with --project, --full, make check, or by its path",
    "zoo": "the whole zoo takes an hour or more: run it with -m zoo, or make zoo",
    "slow": "takes more than a minute: run it with -m slow",
    "full": "one of a full product of families, targets and forms: run it with --full, -m full, or make test-full",
    "canary": "shows that upstream still needs a workaround: run it with --full, -m canary, or make test-canary",
}
_IN_FULL = ("full", "canary", "cpp", "project")
#: Lanes with an option of their own. They also run if a path is named on the command line.
_LANES = ("cpp", "project")
#: Objects between two collections in a file: some 200 MiB. Most of a trace is freed without one.
_MANY_OBJECTS = 1_000_000
#: Fixtures that compile C++ programs: tests that use one are in lane "cpp".
_COMPILING = {"cpp_build", "kernels_build", "render_build"}

# Files that take longest, the longest first: a worker that is given one late works on when the others are done.
# Files that share an exported bundle are apart, because a worker that wants it waits while another one makes it.
_LONG_FIRST = (
    "test_native_operators test_cpp_bundle test_cpp test_cpp_batch test_networks test_elsewhere test_demo "
    "test_sessions test_programs test_graph_cache test_coreai test_aoti test_filled_attention "
    "test_executorch_clones test_trained_drafts test_rope test_exporter test_seq2seq test_layered test_verify "
    "test_kinds test_program test_rounding test_executorch test_rows test_ragged test_shift test_methods test_start "
    "test_lora_slots test_verify_large test_published test_traced_methods test_one_sentence test_gpu_steps "
    "test_module test_speculative test_pretrained test_chat test_equal_layers test_executorch_static "
    "test_generate_files test_checkpoint_settings test_bundle_commands test_equality test_pt2 test_few_rows "
    "test_last_token test_launches test_generate_native test_executorch_mlx test_verify_and_bench test_media "
    "test_dtypes test_kept_weights test_executorch_encoders test_fuzz test_executorch_load_order "
    "test_encoder_inputs test_full_cache test_session test_generate test_server test_seq2seq_bundle test_operators "
    "test_package test_executorch_llm_runner test_multimodal test_cache_export"
).split()

#: Beginnings of paths -> group of files that one worker runs: networks that several of them ask for are made once for a
#: process, and a process has its own server of forks (`support/forked.py`), which imports torch.
_ON_ONE_WORKER = {
    "tests/backends/tensorrt/": "networks",
    **dict.fromkeys(
        (
            "tests/parallel/",
            *(f"tests/cli/test_{name}.py" for name in ("elsewhere", "verify_and_bench")),
            *(f"tests/security/test_{name}.py" for name in ("one_sentence", "opened_by_others")),
            "tests/backends/test_executorch_llm_runner.py",
            "tests/backends/test_pt2.py",
            "tests/bundle/test_recorded.py",
            "tests/decoding/test_trained_drafts.py",
            "tests/patches/test_registry.py",
        ),
        "forks",
    ),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help=f"also run tests marked {', '.join(_IN_FULL)}")
    for lane in _LANES:
        parser.addoption(f"--{lane}", action="store_true", help=f"also run tests marked {lane}")
    parser.addoption(
        "--executorch", metavar="PREFIX",
        help="build the C++ runner against ExecuTorch installed there, in place of the wheel's (several with ;)",
    )  # fmt: skip
    parser.addoption(
        "--toolchain", metavar="FILE", help="CMake's toolchain file of the C++ runner, for another processor"
    )
    parser.addoption(
        "--sanitize", action="store_true", help="the C++ runner under address and undefined behaviour sanitizers"
    )
    parser.addoption("--emulator", metavar="COMMAND", default="", help="what runs programs of that processor")


def pytest_configure(config: pytest.Config) -> None:
    # Until everything is imported there is nothing to be collected.
    gc.disable()
    if not config.getoption("--full"):
        # No test takes the power away, and each file of a bundle would wait for the disk.
        os.fsync = lambda handle: None
    if not config.getoption("numprocesses", None):
        _set_up_torch(config)
    if _names_paths(config):
        for lane in _LANES:
            setattr(config.option, lane, True)


def _set_up_torch(config: pytest.Config) -> None:
    """Import torch with the settings of tests. The process that starts workers does not, because they would wait."""
    import torch
    import torch.fx.config

    from .support.compiling import set_default_backend
    from .support.store import drop_other_generations

    torch.set_num_threads(1)
    # pytest listens to loggers that do not propagate. To torch's structured trace nobody may listen: every trace and
    # every compilation then writes what it does, with graphs and stacks, which takes as long again.
    logging.getLogger("torch.__trace").propagate = True
    set_default_backend(config.getoption("--full"))
    # To find where each operator of a graph was called, under pytest's own frames, takes a tenth of the time of a trace
    # or a lowering. Not every release has the setting.
    if hasattr(torch.fx.config, "do_not_emit_stack_traces"):
        torch.fx.config.do_not_emit_stack_traces = not config.getoption("--full")
    if getattr(config, "workerinput", {"workerid": "gw0"})["workerid"] == "gw0":
        drop_other_generations()


def _names_paths(config: pytest.Config) -> bool:
    """Return True if the command line names paths. A worker's always does, so the process that started it tells."""
    if hasattr(config, "workerinput"):
        return config.workerinput["names_paths"]
    return config.args_source is pytest.Config.ArgsSource.ARGS


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker what `_names_paths` cannot know there, because it parses options of its own."""
    node.workerinput["names_paths"] = _names_paths(node.config)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort long files first. Leave out tests of lanes that were not asked for.

    If the command line names paths, they are skipped with the reason. In a whole run there are thousands of them, and
    to report each takes seconds.
    """
    order = {name: index for index, name in enumerate(_LONG_FIRST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    for item in items:
        if _COMPILING.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("cpp")
    left_out = {}
    for marker, reason in _ON_REQUEST.items():
        wanted = marker in (config.option.markexpr or "") or (config.getoption("--full") and marker in _IN_FULL)
        if not wanted and not config.getoption(marker, False):
            left_out |= {item: reason for item in items if item.get_closest_marker(marker)}
    if _names_paths(config):
        for item, reason in left_out.items():
            item.add_marker(pytest.mark.skip(reason=reason))
    elif left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))


def pytest_collection_finish() -> None:
    """Let the garbage collector look seldom, and no more at what is imported, which it would go over each time."""
    gc.freeze()
    gc.set_threshold(_MANY_OBJECTS, 20, 50)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Collect the garbage of a file that left much, and freeze what it imported.

    Each export to ExecuTorch collects all garbage, which takes as long as there are objects that are not frozen.
    """
    yield
    if (nextitem is None or nextitem.path != item.path) and gc.get_count()[0] > _MANY_OBJECTS // 20:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="module")
def fake_backend() -> Iterator[None]:
    """Target "fake", whose programs stay in this process, among the package's own for the tests of a file."""
    from exportable_cache.backends import TARGETS

    from .support import fake_target

    with mock.patch.dict(TARGETS, fake=fake_target.ENTRY):
        yield


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A local server with the API of the Hugging Face hub that this process asks, with its owner's token."""
    from .support.hub import TOKEN, running_hub, use_hub

    monkeypatch.chdir(tmp_path)
    with running_hub() as hub:
        use_hub(monkeypatch, hub, tmp_path, TOKEN)
        yield hub


@pytest.fixture(scope="session")
def demo_bundle() -> Path:
    """Return the folder of the ExecuTorch bundle that the quick start exports. Read it only."""
    from .support.readme import run_example

    pytest.importorskip("executorch")
    return run_example().bundle


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With `--dist loadfile`, files that share what is slow to make go to one worker, too."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFileOrFolder(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return next((group for path, group in _ON_ONE_WORKER.items() if file.startswith(path)), file)

    return ByFileOrFolder(config, log)
