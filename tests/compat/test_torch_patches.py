"""Functions of torch that are replaced for the time of a block: those that were read, put back, and still needed."""

from __future__ import annotations

import functools
import importlib
import inspect
import io
import logging
import re
import threading
from pathlib import Path
from types import MethodType

import pytest
import torch
from packaging.version import Version
from torch._dynamo.guards import GuardsStatePickler
from torch._dynamo.package import SourceInfo
from torch._inductor import codecache
from torch._inductor.async_compile import AsyncCompile
from torch._subclasses.fake_tensor import FakeTensorMode

from exportable_cache.common import patch as patching
from exportable_cache.common.compat import torch as compat
from exportable_cache.common.compat import torch_aoti, torch_compile, torch_loading
from exportable_cache.common.patch import Patch

from ..support.compiling import require_compiler

PATCHES = (
    *compat.PATCHES,
    *torch_aoti.PATCHES,
    *torch_compile.PATCHES,
    *torch_loading.PATCHES,
)


#: Release of torch that does without a patch, by the name of the patch.
MENDED = {"GuardsStatePickler.reducer_override": "2.15"}


def is_mended(name: str) -> bool:
    """Return True if the installed torch does without a patch."""
    return name in MENDED and Version(torch.__version__) >= Version(MENDED[name])


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.label)
def test_the_original_is_the_one_that_the_patch_was_written_for(patch: Patch) -> None:
    """Fails where torch changed it: read it, then add the digest or drop the patch. It is left alone meanwhile."""
    assert (patch.digest() in patch.digests) != is_mended(patch.name)
    assert patch.reason and re.fullmatch(r"https://github.com/pytorch/pytorch/blob/v[\d.]+/torch/.*\.py", patch.link)


def test_those_of_the_import_of_torch_tensorrt() -> None:
    upstream = pytest.importorskip("exportable_cache.backends.tensorrt.upstream", reason="no tensorrt extra")
    for patch in upstream.PATCHES:
        assert patch.digest() in patch.digests
        if not torch.cuda.is_available():
            owner, attribute = patch._owner()
            with pytest.raises((RuntimeError, AssertionError), match="CUDA|NVIDIA"):
                getattr(owner, attribute)()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_products_of_groups_have_the_shape_and_strides_of_the_kernel_s(dtype: torch.dtype) -> None:
    """Fails where torch takes these dtypes: drop the patch."""
    rows, weights = torch.randn(5, 32).to(dtype), torch.randn(3, 24, 32).to(dtype).mT
    offsets = torch.tensor([2, 2, 5], dtype=torch.int32)
    result = torch_aoti._PRODUCTS(rows, weights, offsets)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in (rows, weights, offsets)]
        with pytest.raises(RuntimeError, match="BF16"):
            torch_aoti._PRODUCTS(*fakes)
        with torch_aoti._GROUPED_OUTPUT.during(torch_aoti._of_all_floats):
            fake = torch_aoti._PRODUCTS(*fakes)
    assert (fake.dtype, fake.shape, fake.stride()) == (dtype, result.shape, result.stride())


def first(value: int) -> int:
    return value


class Owner:
    @classmethod
    def second(cls, value: int) -> tuple[type, int]:
        return cls, value

    @staticmethod
    def third(value: int) -> int:
        return value


FIRST = Patch(__name__, "first", None, "tested", (), package="torch", url="")


def known(patch: Patch) -> Patch:
    found = Patch(patch.file, patch.name, None, patch.reason, (patch.digest(),), package="torch", url="")
    patching._is_known.cache_clear()
    return found


def test_a_block_has_the_replacement_and_leaves_the_original() -> None:
    module = importlib.import_module(__name__)
    patch = known(FIRST)
    with patch.during(lambda original: lambda value: 10 * original(value)) as outer:
        with patch.during(lambda original: lambda value: 1 + original(value)):
            assert outer and module.first(2) == 21
        assert module.first(2) == 20
        with pytest.raises(ValueError), patch.during(lambda original: lambda value: value):
            raise ValueError
        assert module.first(2) == 20
    assert module.first is first


def test_a_method_of_the_class_stays_one() -> None:
    patch = known(Patch(__name__, "Owner.second", None, "tested", (), package="torch", url=""))
    with patch.during(lambda original: lambda cls, value: (*original(cls, value), "replaced")):
        assert Owner.second(1) == (Owner, 1, "replaced")
    assert Owner.second(1) == (Owner, 1)
    patch = known(Patch(__name__, "Owner.third", None, "tested", (), package="torch", url=""))
    with patch.during(lambda original: lambda value: (original(value), "replaced")):
        assert Owner.third(1) == Owner().third(1) == (1, "replaced")
    assert Owner.third(1) == Owner().third(1) == 1


def test_blocks_that_overlap_end_in_any_order() -> None:
    """As those of two threads do."""
    module, patch = importlib.import_module(__name__), known(FIRST)
    one = patch.during(lambda original: lambda value: 10 * original(value))
    two = patch.during(lambda original: lambda value: 1 + original(value))
    one.__enter__()
    two.__enter__()
    assert module.first(2) == 21 and patch.digest() in patch.digests
    one.__exit__(None, None, None)
    assert module.first(2) == 3
    one = patch.during(lambda original: lambda value: 10 * original(value))
    one.__enter__()
    assert module.first(2) == 30
    two.__exit__(None, None, None)
    assert module.first(2) == 20
    one.__exit__(None, None, None)
    assert module.first is first


def test_a_block_may_wait_for_a_thread_that_has_one() -> None:
    module, patch, seen = importlib.import_module(__name__), known(FIRST), []

    def other() -> None:
        with patch.during(lambda original: lambda value: 1 + original(value)):
            seen.append(module.first(2))

    with patch.during(lambda original: lambda value: 10 * original(value)):
        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        thread.join(60)
        assert seen == [21] and module.first(2) == 20
    assert module.first is first


def test_a_block_within_somebody_elses_replacement_leaves_that(monkeypatch: pytest.MonkeyPatch) -> None:
    module, patch = importlib.import_module(__name__), known(FIRST)
    with patch.during(lambda original: lambda value: 10 * original(value)):
        with monkeypatch.context() as others:
            others.setattr(module, "first", functools.wraps(module.first)(lambda value: -value))
            with patch.during(lambda original: lambda value: 1 + original(value)):
                assert module.first(2) == -1
            assert module.first(2) == -2
        assert module.first(2) == 20
    assert module.first is first


def test_an_original_that_has_changed_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    patching._is_known.cache_clear()
    with caplog.at_level(logging.INFO, "exportable_cache.common.patch"), FIRST.during(lambda original: len) as replaced:
        assert not replaced and importlib.import_module(__name__).first(3) == 3
    assert "first of torch" in caplog.text and "it stays unpatched (tested)" in caplog.text


# -- whether each is needed: where one of these fails, a patch can go --------------------------------------------------


def test_sources_are_read_again_for_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    original = SourceInfo.add_code.__globals__["_get_module_content"]
    monkeypatch.setitem(
        SourceInfo.add_code.__globals__, "_get_module_content", lambda module: read.append(module) or original(module)
    )
    info = SourceInfo(inlined_sources=set())
    for _ in range(3):
        info.add_code(known.__code__)
    assert len(read) == 3
    with torch_compile.sources_once():
        for _ in range(3):
            info.add_code(first.__code__)
    assert len(read) == 4


class Nameless:
    """As torchao's: it can be called, and has no name."""

    def __call__(self, module: object) -> str:
        return ""


def test_guards_on_methods_without_a_name_cannot_be_written() -> None:
    method = MethodType(Nameless(), Owner())

    def write() -> bytes:
        written = io.BytesIO()
        # The file is the last argument that must be given; their number depends on the release.
        given = inspect.signature(GuardsStatePickler).parameters.values()
        before = [{} for argument in given if argument.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        GuardsStatePickler(*before, written).dump(method)
        return written.getvalue()

    if is_mended("GuardsStatePickler.reducer_override"):
        assert write()
        return
    with pytest.raises(AttributeError, match="__name__"):
        write()
    with torch_compile.nameless_methods_omitted():
        assert b"a method without a name" in write()


def test_each_kernel_is_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    require_compiler()
    started = []
    load = codecache.CppPythonBindingsCodeCache.load_pybinding_async
    monkeypatch.setattr(
        codecache.CppPythonBindingsCodeCache,
        "load_pybinding_async",
        lambda *arguments, **options: started.append(arguments) or load(*arguments, **options),
    )
    source = (
        '#include <torch/csrc/inductor/cpp_prefix.h>\nextern "C"  void  kernel(float* out)\n{\n    out[0] = 1;\n}\n'
    )
    compiler = AsyncCompile()
    scope = {f"kernel_{index}": compiler.cpp_pybinding(["float*"], source) for index in range(2)}
    compiler.wait(scope)
    assert len(started) == 2
    with torch_compile.kernels_in_few_files():
        scope = {f"kernel_{index}": compiler.cpp_pybinding(["float*"], source) for index in range(2)}
        compiler.wait(scope)
    assert len(started) == 2
    out = torch.zeros(1)
    scope["kernel_1"](out)
    assert out.item() == 1


@pytest.mark.full
def test_the_processor_is_tried_and_headers_are_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """What a step from disk is spared, and one that is compiled: of the latter the trial alone."""
    from torch._inductor.cpu_vec_isa import VecISA, valid_vec_isa_list

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch_compile.forget_processor()
    try:
        with torch_compile._CHECK.during(torch_compile._assume_supported):
            assert valid_vec_isa_list() and not list(tmp_path.rglob("*.so"))
        torch_compile.forget_processor()
        tried = []
        with torch_compile._PROBE.during(lambda probe: lambda self, path: tried.append(path) or probe(self, path)):
            assert valid_vec_isa_list()
        assert tried and all(path.startswith(str(tmp_path)) for path in tried)
    finally:
        torch_compile.forget_processor()
    assert VecISA._probe_load is not None


@pytest.mark.full
@pytest.mark.parametrize("known", [True, False])
def test_machine_code_has_its_interface_compiled_once(known: bool, tmp_path: Path, monkeypatch) -> None:
    """Still needed: of two graphs each has it in its source."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    if not known:
        monkeypatch.setattr(torch_aoti, "_REGEX", "#error %(extern)s\n")
    x, packages = torch.randn(3), {}
    with torch._inductor.config.patch({"aot_inductor.precompile_headers": False}):
        for count in (2, 3):
            program = torch.export.export(Multiply(count), (x,))
            packages[str(count)] = torch_aoti.compile_ahead_of_time(program.module(), ((x,), {}))
    torch_aoti.write_package(tmp_path / "code.pt2", packages)
    for name in packages:
        (found,) = compat.load_machine_code(tmp_path / "code.pt2", name).run([x])
        torch.testing.assert_close(found, int(name) * x)
    objects = list((tmp_path / "exportable_cache_interface").iterdir())
    assert len([one for one in objects if one.suffix == ".o"]) == known


class Multiply(torch.nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.count
