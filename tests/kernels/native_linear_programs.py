"""Programs whose linear layers are our operators, on the compiled kernels; run by `native_programs`."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import torch

from exportable_cache import export, load
from exportable_cache.backends.executorch.dedup.delegates import ClonedSegments
from exportable_cache.backends.executorch.lowering.lower import lower_programs
from exportable_cache.backends.executorch.native.linears import (
    GROUPED_FORMS,
    NAMES,
    ROUNDED,
    pack,
    pack_float,
    pack_groups,
)
from exportable_cache.common.compat.executorch import load_program
from exportable_cache.models.loading.loading import load_model

from ..backends.test_executorch_clones import LAYERS, model_of, programs_of
from ..support import checkpoints
from ..support.models import tiny_model, tokens

#: Of weights, and the types of those that are no whole numbers.
DTYPES = {name: dtype for dtype, name in NAMES.items()} | {ROUNDED: torch.bfloat16}
KINDS = ("4bit", *GROUPED_FORMS, *DTYPES)


def packed_of(kind: str, numbers: torch.Tensor) -> torch.Tensor:
    """Weights [outputs, inputs] as an operator has them, of 4 bits with scales of their own for 32 inputs."""
    if kind in DTYPES:
        return pack_float(numbers.float(), DTYPES[kind])
    generator = torch.Generator().manual_seed(len(numbers))
    integers, scales = numbers.to(torch.int8), torch.rand(len(numbers), numbers.shape[1] // 32, generator=generator)
    if kind in GROUPED_FORMS:
        zeros = torch.randint(-8, 8, scales.shape, generator=generator, dtype=torch.int8)
        if kind.startswith("8bit"):
            integers, scales = 16 * integers + 15, scales / 16
        if kind.endswith("shifted"):
            zeros = zeros + torch.rand(scales.shape, generator=generator)
        return pack_groups(integers, scales, zeros, GROUPED_FORMS[kind])
    return pack(integers, scales)


class Linear(torch.nn.Module):
    """A layer with a bias over numbers that are far from zero, and the same without; or several together."""

    def __init__(self, kind: str, outputs: list[int], inputs: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for index, each in enumerate(outputs):
            integers = torch.randint(-8, 8, (each, inputs), generator=generator)
            self.register_buffer(f"packed_{index}", packed_of(kind, integers))
            self.register_buffer(f"bias_{index}", torch.randn(each, generator=generator))
        self.kind, self.outputs = kind, outputs

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        one, several = (getattr(torch.ops.exportable_cache, f"{each}_{self.kind}") for each in ("linear", "linears"))
        indices = range(len(self.outputs))
        packed, biases = ([getattr(self, f"{name}_{index}") for index in indices] for name in ("packed", "bias"))
        if len(packed) == 1:
            return one(source, packed[0], biases[0], *self.outputs) + one(source, packed[0], None, *self.outputs)
        with_bias, without = (several(source, packed, given, self.outputs) for given in (biases, []))
        return torch.cat([*with_bias, *without], dim=-1)


def check_operator(path: Path, kind: str, outputs: list[int], inputs: int = 160) -> None:
    """The kernel and the plain operators that say what it computes, over rows of many counts."""
    rows = torch.export.Dim("rows", min=1, max=40)
    layer = Linear(kind, outputs, inputs)
    program = torch.export.export(layer, (torch.randn(1, 7, inputs),), dynamic_shapes={"source": {1: rows}})
    path.write_bytes(lower_programs({"forward": program}).buffer)
    method = load_program(path).load_method("forward")
    for count in (1, 2, 3, 8, 13, 40):
        source = torch.randn(1, count, inputs, generator=torch.Generator().manual_seed(count)) + 2
        torch.testing.assert_close(method((source,))[0], layer(source), atol=1e-3, rtol=1e-5)


class Table(torch.nn.Module):
    """Rows of a table, 33 numbers each; 64 in groups."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.dim = 64 if kind in GROUPED_FORMS else 33
        self.register_buffer("packed", packed_of(kind, torch.randint(-8, 8, (50, self.dim))))
        self.look_up = getattr(torch.ops.exportable_cache, f"embedding_{kind}")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.look_up(self.packed, ids, 50, self.dim)


def check_table(path: Path, kind: str) -> None:
    """Rows by the kernel, and its refusal of one that is not there."""
    count = torch.export.Dim("count", min=1, max=40)
    table = Table(kind)
    program = torch.export.export(table, (torch.arange(7)[None],), dynamic_shapes={"ids": {1: count}})
    path.write_bytes(lower_programs({"forward": program}).buffer)
    method = load_program(path).load_method("forward")
    for ids in ([[0]], [[49, 16, 15, 0, 49]]):
        # Zero points in float32 of 4 bits are stored plus 8, which rounds them.
        most = 1e-5 if kind == "4bit_shifted" else 0
        torch.testing.assert_close(method((torch.tensor(ids),))[0], table(torch.tensor(ids)), rtol=0, atol=most)
    for wrong in (50, -1):
        try:
            method((torch.tensor([[0, wrong]]),))
        except RuntimeError:
            continue
        raise AssertionError(f"row {wrong} of 50 was not refused")


def check_bundle(
    folder: Path,
    quantize: str | None,
    operators: list[str],
    dtype: torch.dtype = torch.float32,
    tied: bool = False,
    compute: str = "float32",
) -> int:
    """A whole model, which the export compares with torchao's or its own; how large its file is."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "tie_word_embeddings": tied}
    model = tiny_model("llama", dtype, **sizes)
    options = {"quantize": quantize, "linears": "native", "compute": compute, "prefill_chunk": 13}
    export(model, "executorch", 64, folder, **options)
    found = json.loads((folder / "manifest.json").read_text())["verification"]
    # A sum that is off by its last bit is rounded to the next number of 8 bits at times: no exact bound holds.
    assert found["passed"], found
    manifest, data = json.loads((folder / "manifest.json").read_text()), (folder / "program.pte").read_bytes()
    # Besides the weights, the graph, and 64 bytes for each tensor that is not as long.
    assert manifest["weights_bytes"] <= len(data) < manifest["weights_bytes"] + 40_000, len(data)
    assert all(f"exportable_cache::{operator}".encode() in data for operator in operators), operators
    return len(data)


def check_kept(folder: Path) -> None:
    """Export kept integers of GGUF files and of GPTQ in 8 bits, and compare with the dequantized models."""
    kinds = ["Q4_K", "Q6_K", "Q4_0", "Q5_K", "Q8_0", "Q2_K", "Q4_1"]
    file, gptq = folder.with_name("tiny.gguf"), folder.with_name("gptq")
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}
    checkpoints.write_gguf(file, kinds_of_weights=kinds, kind_of_table="Q6_K", **sizes, tie_word_embeddings=True)
    checkpoints.write_gptq(gptq, bits=8)
    for model, operators in (
        (file, ("4bit_shifted", "8bit_shifted", "embedding_8bit_float", "8bit_float16", "4bit_float16")),
        (gptq, ("8bit_float16",)),
    ):
        out = folder.with_name(f"kept_{model.stem}")
        bundle = export(model, "executorch", 64, out, quantize="keep", linears="native", prefill_chunk=13)
        data = (out / "program.pte").read_bytes()
        assert all(operator.encode() in data for operator in operators)
        # A tied table is stored once: no operator reads it in the order of rows.
        assert b"embedding_byte" not in data
        # Floating-point noise of this model: without `keep` its program is 1.5e-5 from eager mode.
        assert bundle.manifest.quantization.max_difference <= 1e-4
        with load(out) as session:
            expected = load_model(model).model(tokens(9)).logits[:, -1]
            assert (session.prefill(tokens(9)) - expected).abs().max() <= 1e-4


def check_cloned(path: Path) -> None:
    """Layers that are lowered once, and each of them lowered: the same logits, to the bit."""
    inputs = (tokens(7), torch.zeros(1, dtype=torch.int64))
    cloned = lower_programs(programs_of(model_of(LAYERS)), native=True)
    with patch.object(ClonedSegments, "replace", lambda self, program, state: program):
        whole = lower_programs(programs_of(model_of(LAYERS)), native=True)
    assert cloned.buffer != whole.buffer
    results = []
    for program in (cloned, whole):
        path.write_bytes(program.buffer)
        results.append(load_program(path).load_method("forward")(inputs)[0].clone())
    assert torch.equal(*results)


@torch.no_grad()
def check_linears(folder: Path) -> None:
    """The operators by themselves, and models of them."""
    for kind in KINDS:
        for outputs in ([150], [150, 8, 40, 257]):
            check_operator(folder.with_name("linear.pte"), kind, outputs)
    check_operator(folder.with_name("linear.pte"), "bfloat16", [150], inputs=161)
    check_cloned(folder.with_name("cloned.pte"))
    check_kept(folder)
    check_bundle(folder, "8da4w", ["linears_4bit"])
    check_bundle(folder.with_name("4w"), "4w", ["linears_4bit_float16", "linear_4bit_float16"], tied=True)
    whole = check_bundle(folder.with_name("float"), None, ["linears_float"])
    for kind in ("bfloat16", "float16", *GROUPED_FORMS):
        check_table(folder.with_name("table.pte"), kind)
    for kind in ("bfloat16", "float16"):
        operators, dtype = [f"linears_{kind}", f"linear_{kind}"], DTYPES[kind]
        half = check_bundle(folder.with_name(kind), None, operators, dtype)
        tied = check_bundle(folder.with_name(f"tied_{kind}"), None, [*operators, f"embedding_{kind}"], dtype, tied=True)
        assert tied < half < whole
    operators = [f"linears_{ROUNDED}", f"linear_{ROUNDED}", "embedding_bfloat16"]
    rounded = check_bundle(folder.with_name(ROUNDED), None, operators, torch.bfloat16, tied=True, compute="bfloat16")
    manifest = json.loads((folder.with_name(ROUNDED) / "manifest.json").read_text())
    assert rounded < half and manifest["options"]["compute"] == "bfloat16"
    # As far from the model as inputs with 8 bits are, which float32 would not accept.
    assert 1e-4 < manifest["verification"]["max_difference"] <= manifest["verification"]["tolerance"] >= 5e-2
