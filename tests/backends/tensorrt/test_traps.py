"""Where torch_tensorrt 2.13.0 computes something else than torch without a word: each of these fails once we do."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from exportable_cache.errors import UnsupportedModelError

pytest.importorskip("exportable_cache.backends.tensorrt.upstream", reason="no tensorrt extra is installed")

from exportable_cache.backends.tensorrt import upstream
from exportable_cache.backends.tensorrt.engine_io import EngineIO
from exportable_cache.backends.tensorrt.evaluator import NetworkEvaluator
from exportable_cache.backends.tensorrt.network import build_network, check_nothing_mutated

from .programs import engine_program
from .toys import evaluate, toy_network


class Writes(nn.Module):
    """Writes into a buffer, or into its input."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(4) if buffer else None)

    def forward(self, cache: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        written = cache if self.kept is None else self.kept
        written.index_copy_(0, position, torch.ones(1))
        return written.sum(0, keepdim=True) + cache


@pytest.mark.parametrize(("buffer", "name"), [(True, "kept"), (False, "cache")])
def test_programs_that_mutate_state_are_refused(buffer: bool, name: str) -> None:
    # torch_tensorrt freezes the state as a constant: the first step would be right.
    program = torch.export.export(Writes(buffer), (torch.zeros(4), torch.zeros(1, dtype=torch.int64)))
    program = program.run_decompositions({})
    with pytest.raises(UnsupportedModelError, match=f"mutates {name}"):
        check_nothing_mutated(program)


# Each build checks it too, so that no network of another test would be there.
@pytest.mark.full
def test_our_programs_mutate_nothing() -> None:
    _, program, _ = engine_program("gemma3_text")
    for method in program.methods:
        signature = program.export(method).run_decompositions({}).graph_signature
        assert not signature.buffers_to_mutate and not signature.user_inputs_to_mutate


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([0.5, 8.5, -2.75, 6.5], dtype=torch.bfloat16),
        torch.tensor([0.5, 8.5, -2.75, 6.5], dtype=torch.float16),
        torch.tensor([1, 2**40, -(2**40), 7]),
        torch.tensor([True, False, True, False]),
    ],
    ids=lambda values: str(values.dtype),
)
def test_where_is_computed_in_its_own_dtype(values: torch.Tensor) -> None:
    # torch_tensorrt casts all but float16 and float32 to int32.
    tensors = [torch.tensor([True, True, False, False]), values, values.flip(0).reshape(1, 4)]
    network = toy_network(torch.where, tensors)
    assert torch.equal(evaluate(network, tensors), torch.where(*tensors))


def test_masked_fill_which_becomes_where_keeps_bfloat16() -> None:
    tensors = [torch.tensor([0.5, 8.5, -2.75], dtype=torch.bfloat16), torch.tensor([False, True, False])]
    network = toy_network(lambda x, mask: x.masked_fill(mask, -0.25), tensors)
    assert evaluate(network, tensors).tolist() == [0.5, -0.25, -2.75]


def test_a_scalar_result_is_refused() -> None:
    # It would come out as [1].
    with pytest.raises(UnsupportedModelError, match=r"output 'logits' .* \[1\], traced as \[\]"):
        toy_network(lambda x: x.sum() * 2, [torch.ones(3)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_weights_are_not_freed_copies(dtype: torch.dtype) -> None:
    # torch_tensorrt gives TensorRT the address of a contiguous copy that nobody keeps.
    weight = torch.arange(12.0).reshape(3, 4).to(dtype).t()
    assert not weight.is_contiguous()
    x = torch.ones(2, 4, dtype=dtype)
    network = toy_network(lambda x, weight: x @ weight, [x], weight)
    assert all(constant.is_contiguous() for constant in network.interpreter.ctx.cpu_weights_reference_holder)
    assert torch.equal(evaluate(network, [x]), x @ weight)


def test_scatter_of_a_number() -> None:
    # torch_tensorrt makes the number float64, which TensorRT lacks.
    tensors = [torch.zeros(2, 4), torch.tensor([[1], [3]])]
    network = toy_network(lambda x, index: x.scatter(1, index, 2.5), tensors)
    assert torch.equal(evaluate(network, tensors), torch.zeros(2, 4).scatter(1, tensors[1], 2.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_running_sums_are_one_layer(dtype: torch.dtype) -> None:
    # torch_tensorrt makes a loop of them, for static lengths only.
    tensors = [torch.arange(24).reshape(2, 3, 4).to(dtype)]
    network = toy_network(lambda x: x.cumsum(-2), tensors)
    assert network.layer_counts["CUMULATIVE"] == 1
    assert torch.equal(evaluate(network, tensors), tensors[0].cumsum(1))


class Last(nn.Module):
    """The last position of any number of them."""

    def forward(
        self, x: torch.Tensor, input_pos: torch.Tensor, length: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return x.select(1, -1) + x.select(1, -2), input_pos + 1


def test_select_from_the_end_of_a_dynamic_length_gathers_at_no_negative_index() -> None:
    # torch_tensorrt gathers at -1, which TensorRT leaves undefined; the evaluator refuses it.
    position = torch.zeros(1, dtype=torch.int64)
    length = {"x": {1: torch.export.Dim("length", min=2, max=9)}, "input_pos": None, "length": None}
    program = torch.export.export(Last(), (torch.ones(1, 5, 3), position, position.clone()), dynamic_shapes=length)
    network = build_network(program, EngineIO(("x", "input_pos"), ("layers.0.cumulative_length",), (2, 9, 9)))
    x = torch.arange(21.0).reshape(1, 7, 3)
    result = NetworkEvaluator(network.definition, network.constants).run({"x": x, "input_pos": position})
    assert torch.equal(result["logits"], x[:, -1] + x[:, -2])


def test_an_operator_without_converter_is_named_with_its_layer() -> None:
    class Block(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.special.i0(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Block()])

        def forward(
            self, x: torch.Tensor, input_pos: torch.Tensor, length: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return self.layers[0](x), input_pos + 1

    position = torch.zeros(1, dtype=torch.int64)
    program = torch.export.export(Model(), (torch.ones(1, 3), position, position.clone()))
    signature = EngineIO(("x", "input_pos"), ("layers.0.cumulative_length",), (1, 1, 1))
    with pytest.raises(UnsupportedModelError, match=r"aten\.i0\.default in layers\.0;"):
        build_network(program, signature)


def test_the_import_leaves_nothing_patched() -> None:
    import logging
    import os
    import warnings

    assert os.path.isfile.__module__ == "genericpath"
    assert torch.cuda.get_device_capability.__module__ == torch.cuda.current_device.__module__ == "torch.cuda"
    assert logging.root.manager.disable == 0
    assert "logging" not in getattr(warnings.showwarning, "__module__", "")
    if torch.version.cuda is None:
        assert not hasattr(torch._C, "_CudaDeviceProperties")
    assert upstream.trt.Builder and upstream.torch_tensorrt.__version__.startswith("2.13.")


@pytest.mark.canary
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_torch_tensorrt_still_cannot_be_imported_without_a_gpu() -> None:
    # When this fails, upstream.py need not answer for torch.cuda any longer.
    result = subprocess.run(
        [sys.executable, "-c", "import torch_tensorrt"], capture_output=True, text=True, timeout=300
    )
    assert result.returncode != 0 and "CUDA" in result.stderr
