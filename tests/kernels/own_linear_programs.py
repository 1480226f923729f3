"""Programs whose linear layers are our operators, on the compiled kernels; run by `own_programs`."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import torch

from exportable_cache import export
from exportable_cache.backends.executorch.lower import lower_programs
from exportable_cache.backends.executorch.own_linears import pack, pack_float
from exportable_cache.backends.executorch.segment_calls import StampedSegments
from exportable_cache.common.compat.executorch import load_program

from ..backends.test_executorch_stamping import LAYERS, model_of, programs_of
from ..support.models import tiny_model, tokens


class Linear(torch.nn.Module):
    """A layer with a bias over numbers that are far from zero, and the same without; or several together."""

    def __init__(self, is_float: bool, outputs: list[int]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for index, each in enumerate(outputs):
            integers = torch.randint(-8, 8, (each, 160), generator=generator, dtype=torch.int8)
            scales = torch.rand(each, 5, generator=generator)
            self.register_buffer(
                f"packed_{index}", pack_float(integers.float()) if is_float else pack(integers, scales)
            )
            self.register_buffer(f"bias_{index}", torch.randn(each, generator=generator))
        self.is_float, self.outputs = is_float, outputs

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        operators, indices = torch.ops.exportable_cache, range(len(self.outputs))
        packed, biases = ([getattr(self, f"{name}_{index}") for index in indices] for name in ("packed", "bias"))
        if len(packed) == 1:
            one = operators.linear_float if self.is_float else operators.linear_4bit
            return one(source, packed[0], biases[0], *self.outputs) + one(source, packed[0], None, *self.outputs)
        several = operators.linears_float if self.is_float else operators.linears_4bit
        with_bias, without = (several(source, packed, given, self.outputs) for given in (biases, []))
        return torch.cat([*with_bias, *without], dim=-1)


def check_operator(path: Path, is_float: bool, outputs: list[int]) -> None:
    """The kernel and the plain operators that say what it computes, over rows of many counts."""
    rows = torch.export.Dim("rows", min=1, max=40)
    layer = Linear(is_float, outputs)
    program = torch.export.export(layer, (torch.randn(1, 7, 160),), dynamic_shapes={"source": {1: rows}})
    path.write_bytes(lower_programs({"forward": program}).buffer)
    method = load_program(path).load_method("forward")
    for count in (1, 2, 3, 8, 13, 40):
        source = torch.randn(1, count, 160, generator=torch.Generator().manual_seed(count)) + 2
        torch.testing.assert_close(method((source,))[0], layer(source), atol=1e-3, rtol=1e-5)


def check_bundle(folder: Path, quantize: str | None, operator: bytes) -> None:
    """A whole model, which the export compares with torchao's or its own."""
    model = tiny_model("llama", hidden_size=64, intermediate_size=96, num_hidden_layers=1)
    options = {"quantize": quantize, "linears": "own", "prefill_chunk": 13}
    export(model, "executorch", 64, folder, **options)
    found = json.loads((folder / "manifest.json").read_text())["verification"]
    # A sum that is off by its last bit is rounded to the next number of 8 bits at times: no exact bound holds.
    assert found["passed"], found
    assert operator in (folder / "program.pte").read_bytes()


def check_stamped(path: Path) -> None:
    """Layers that are lowered once, and each of them lowered: the same logits, to the bit."""
    inputs = (tokens(7), torch.zeros(1, dtype=torch.int64))
    stamped = lower_programs(programs_of(model_of(LAYERS)), own=True)
    with patch.object(StampedSegments, "take", lambda self, program: program):
        whole = lower_programs(programs_of(model_of(LAYERS)), own=True)
    assert stamped.buffer != whole.buffer
    results = []
    for program in (stamped, whole):
        path.write_bytes(program.buffer)
        results.append(load_program(path).load_method("forward")(inputs)[0].clone())
    assert torch.equal(*results)


@torch.no_grad()
def check_linears(folder: Path) -> None:
    """The operators by themselves, and models of them."""
    for is_float in (False, True):
        for outputs in ([150], [150, 8, 40, 257]):
            check_operator(folder.with_name("linear.pte"), is_float, outputs)
    check_stamped(folder.with_name("stamped.pte"))
    check_bundle(folder, "8da4w", b"linears_4bit")
    check_bundle(folder.with_name("float32"), None, b"linears_float")
