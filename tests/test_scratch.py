"""Weights of large models lie in files beside the bundle while it is made."""

import errno
import os
from pathlib import Path

import pytest
import torch

from exportable_cache import ExportableCache
from exportable_cache.backends import backend_for
from exportable_cache.common.fs import tensor_files
from exportable_cache.common.fs.tensor_files import Scratch
from exportable_cache.errors import BundleError
from exportable_cache.models.quantization.quantize import quantize
from exportable_cache.models.quantization.spec import Quantization
from exportable_cache.pipeline import steps
from exportable_cache.program.program import Program
from exportable_cache.program.spec import ProgramSpec

from .support.models import tiny_model

pytestmark = pytest.mark.skipif(not Scratch.available(), reason="this system cannot take room on a disk beforehand")


def test_a_tensor_lies_in_a_file_that_has_no_name_any_more(tmp_path: Path) -> None:
    tensor = Scratch(tmp_path).empty((300, 1000), torch.int8)
    assert tensor.shape == (300, 1000) and not tensor.any() and not list(tmp_path.iterdir())
    tensor.fill_(7)
    assert tensor.sum() == 7 * 300_000
    maps = Path("/proc/self/maps")
    if maps.exists():
        lines = [line for line in maps.read_text().splitlines() if str(tmp_path) in line]
        assert lines and all(line.endswith("(deleted)") for line in lines)


@pytest.mark.parametrize("scheme", [Quantization("8da4w", 32, "8w"), Quantization("8da8w")])
def test_weights_are_the_same_there(tmp_path: Path, scheme: Quantization) -> None:
    pytest.importorskip("torchao", reason="the executorch extra is not installed")
    model = tiny_model("llama", hidden_size=64, head_dim=16, tie_word_embeddings=True)
    in_memory, in_files = quantize(model, scheme).model, quantize(model, scheme, Scratch(tmp_path)).model
    expected = dict(in_memory.named_parameters())
    found = dict(in_files.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_packed_weights_lie_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower two layers with their weights in memory and in files, which gives the same bytes."""
    pytest.importorskip("executorch", reason="the executorch extra is not installed")
    from exportable_cache.backends.executorch import graph_edits
    from exportable_cache.backends.executorch.lowering.lower import lower_programs
    from exportable_cache.backends.executorch.quantized import FoldedLinears

    model = tiny_model("llama", hidden_size=64, head_dim=16, num_hidden_layers=1)
    mlp = quantize(model, Quantization("8da4w", 32, "8w")).model.model.layers[0].mlp
    layers = torch.nn.Sequential(mlp.up_proj, mlp.down_proj)
    shapes: list[tuple[int, ...]] = []
    empty = Scratch.empty
    monkeypatch.setattr(Scratch, "empty", lambda *args: shapes.append(tuple(args[1])) or empty(*args))

    def lowered() -> bytes:
        with FoldedLinears(layers), torch.no_grad():
            program = torch.export.export(layers, (torch.zeros(1, 3, 64),))
        return lower_programs({"forward": program}, native=True, scratch=Scratch(tmp_path)).buffer

    # None of these weights is large.
    in_memory = lowered()
    assert not shapes
    monkeypatch.setattr(graph_edits, "_MIN_BYTES_IN_FILES", 0)
    assert lowered() == in_memory and len(shapes) == 2


@pytest.mark.full
def test_packed_weights_lie_in_files_and_give_the_same_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("executorch", reason="the executorch extra is not installed")
    from exportable_cache.backends.executorch import graph_edits
    from exportable_cache.backends.executorch.lowering.lower import write_program

    backend = backend_for("executorch")
    spec = backend.program_spec(ProgramSpec(1), backend.options())

    def written(name: str) -> bytes:
        path = tmp_path / name
        write_program(Program(model, ExportableCache.from_model(model, 16), spec), path, compute="float32")
        return path.read_bytes()

    sizes = {"hidden_size": 64, "head_dim": 16, "num_hidden_layers": 1}
    model = quantize(tiny_model("llama", **sizes), Quantization("8da4w", 32, "8w")).model
    shapes: list[tuple[int, ...]] = []
    empty = Scratch.empty
    monkeypatch.setattr(Scratch, "empty", lambda *args: shapes.append(tuple(args[1])) or empty(*args))
    monkeypatch.setattr(tensor_files, "MAX_WEIGHTS_IN_MEMORY", 0)
    # None of these weights is large.
    in_memory = written("in_memory.pte")
    assert not shapes
    monkeypatch.setattr(graph_edits, "_MIN_BYTES_IN_FILES", 0)
    assert written("in_files.pte") == in_memory
    # Seven linear layers, and the head.
    assert len(shapes) == 8


def scratch_of(model: torch.nn.Module, output: Path) -> Scratch | None:
    return steps._scratch_for(model, output)


def test_only_large_models_are_written_out_and_only_where_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    output = tmp_path / "not" / "there" / "yet"
    assert scratch_of(model, output) is None
    monkeypatch.setattr(tensor_files, "MAX_WEIGHTS_IN_MEMORY", 0)
    assert scratch_of(model, output)._folder == tmp_path
    monkeypatch.setattr(tensor_files.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    assert scratch_of(model, output) is None


def test_a_disk_that_fills_up_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao", reason="the executorch extra is not installed")
    pytest.importorskip("executorch", reason="the executorch extra is not installed")
    from exportable_cache import export

    def fill(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tensor_files, "MAX_WEIGHTS_IN_MEMORY", 0)
    monkeypatch.setattr(os, "posix_fallocate", fill)
    model = tiny_model("llama", hidden_size=64, head_dim=16)
    with pytest.raises(BundleError, match=r"cannot write next to .*out: No space left on device; choose another disk"):
        export(model, "executorch", 32, tmp_path / "out", quantize="8da4w", verify=False)
    assert not list(tmp_path.iterdir())
