"""Quantised programs for ExecuTorch: operators, bytes, and logits against the quantised model."""

import pytest
import torch

from exportable_cache import load
from exportable_cache.models.quantization.spec import Quantization
from exportable_cache.verification.verify import verify_session

from ..support.sessions import lowered, opened, quantized_model, split_bundle

pytest.importorskip("executorch", reason="the executorch extra is not installed")

from executorch.exir._serialize._program import deserialize_pte_binary

from exportable_cache.backends.executorch.lowering.lower import lower_programs
from exportable_cache.backends.executorch.pte.rewrite import deduplicated
from exportable_cache.backends.executorch.quantized import pack_int4


@pytest.mark.parametrize(
    ("scheme", "tied", "operator"),
    [
        (Quantization("8da4w", 32, "8w"), True, "quantized_decomposed::embedding_byte"),
        # Its kernels beside those of the other: a table in 4 bits, whose packing is tested below.
        pytest.param(
            *(Quantization("8da8w", None, "4w"), False, "quantized_decomposed::embedding_4bit"), marks=pytest.mark.full
        ),
    ],
    ids=["8da4w", "8da8w"],
)
def test_programs_equal_the_quantised_model_and_read_integers(scheme: Quantization, tied: bool, operator: str) -> None:
    quantized = quantized_model(scheme, tied)
    found = lowered(quantized.model, "executorch", 64)
    session = opened(quantized.model, found)
    report = verify_session(session, quantized.model, prompts=[3, 9, 20, 40], decode_steps=8)
    assert report.passed
    # Prompts in which no activation was rounded the other way agree to float32 rounding: the lowering is exact.
    assert min(prompt.max_difference for prompt in report.prompts) <= 1e-4
    file = (found.folder / "program.pte").read_bytes()
    plan = deserialize_pte_binary(file).program.execution_plan[0]
    names = {op.name for op in plan.operators}
    assert operator in names
    assert not [
        name for name in names if "dequantize" in name or name in ("aten::embedding", "aten::linear", "aten::mm")
    ]
    rows = quantized.model.get_input_embeddings().weight.qdata
    if tied:
        # The head and the table: one copy.
        assert file.count(rows[:16].numpy().tobytes()) == 1
    else:
        assert file.count(pack_int4(rows)[:16].numpy().tobytes()) == 1
    # The graph of two methods takes some 70 kB whatever the weights.
    assert len(file) < quantized.weights_bytes + 90_000


def test_a_tied_table_in_float32_is_stored_once() -> None:
    model, folder = split_bundle()
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert verify_session(load(folder), model, prompts=[9], decode_steps=4).passed
    file = (folder / "program.pte").read_bytes()
    assert file.count(model.lm_head.weight[:8].detach().numpy().tobytes()) == 1


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(64, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(self.table(ids), self.table.weight)


def test_a_program_is_written_without_a_second_copy() -> None:
    """Weights are most of it: the pieces that hold them lie in the serialised program."""
    lowered = lower_programs({"forward": torch.export.export(Tied(), (torch.zeros(1, 4, dtype=torch.int64),))})
    pieces = deduplicated(data := lowered.buffer)
    views = [piece for piece in pieces if isinstance(piece, memoryview)]
    assert sum(piece.nbytes for piece in views) >= 64 * 64 * 4 and all(piece.obj is data for piece in views)
    assert sum(map(len, pieces)) <= len(data) - 64 * 64 * 4


def test_a_program_that_repeats_nothing_is_left_as_it_was_written() -> None:
    lowered = lower_programs({"forward": torch.export.export(torch.nn.Linear(64, 64), (torch.zeros(1, 64),))})
    assert deduplicated(lowered.buffer) is None


def test_four_bits_are_packed_as_the_kernel_reads_them() -> None:
    assert pack_int4(torch.tensor([[-8, 7, 0, 1]], dtype=torch.int8)).tolist() == [[0x0F, 0x89]]
