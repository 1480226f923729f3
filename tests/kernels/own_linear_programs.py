"""A program whose linear layers have 4 bits, on the compiled kernels; run by `own_programs`."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import torch

from exportable_cache import export
from exportable_cache.backends.executorch.lower import lower_programs
from exportable_cache.backends.executorch.own_linears import pack
from exportable_cache.backends.executorch.segment_calls import StampedSegments
from exportable_cache.common.compat.executorch import load_program

from ..backends.test_executorch_stamping import LAYERS, model_of, programs_of
from ..support.models import tiny_model, tokens


class Linear(torch.nn.Module):
    """A layer with a bias over numbers that are far from zero."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        integers = torch.randint(-8, 8, (150, 160), generator=generator, dtype=torch.int8)
        self.register_buffer("packed", pack(integers, torch.rand(150, 5, generator=generator)))
        self.register_buffer("bias", torch.randn(150, generator=generator))

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        return torch.ops.exportable_cache.linear_4bit(source, self.packed, self.bias, 150)


def check_operator(path: Path) -> None:
    """The kernel and the plain operators that say what it computes, over rows of many counts."""
    rows = torch.export.Dim("rows", min=1, max=40)
    layer = Linear()
    program = torch.export.export(layer, (torch.randn(1, 7, 160),), dynamic_shapes={"source": {1: rows}})
    path.write_bytes(lower_programs({"forward": program}).buffer)
    method = load_program(path).load_method("forward")
    for count in (1, 2, 3, 8, 13, 40):
        source = torch.randn(1, count, 160, generator=torch.Generator().manual_seed(count)) + 2
        torch.testing.assert_close(method((source,))[0], layer(source), atol=1e-4, rtol=1e-5)


def check_bundle(folder: Path) -> None:
    """A whole model, which the export compares with torchao's."""
    model = tiny_model("llama", hidden_size=64, intermediate_size=96, num_hidden_layers=1)
    options = {"quantize": "8da4w", "linears": "own", "prefill_chunk": 13}
    export(model, "executorch", 64, folder, **options)
    found = json.loads((folder / "manifest.json").read_text())["verification"]
    # A sum that is off by its last bit is rounded to the next number of 8 bits at times: no exact bound holds.
    assert found["passed"], found
    # Weights of 4 bits, as they are written; no delegate has a copy.
    assert b"linear_4bit" in (folder / "program.pte").read_bytes()


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
    """The operator by itself, and models of it."""
    check_operator(folder.with_name("linear.pte"))
    check_stamped(folder.with_name("stamped.pte"))
    check_bundle(folder)
