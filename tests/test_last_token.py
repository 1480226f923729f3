"""Behind the last attention a prompt's program has the last token alone, and gives the same."""

from __future__ import annotations

import copy
import fnmatch
import importlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional

import exportable_cache
from exportable_cache import ExportableCache
from exportable_cache.backends.tensorrt.experts import chosen_weights, expert_slots, slot_factors, slot_product
from exportable_cache.models.rounding import float8_rounded
from exportable_cache.program import program as module_of_program
from exportable_cache.program.last_token import _RULES_BY_NAME, choose_last_token_early
from exportable_cache.program.program import Program
from exportable_cache.program.spec import Logits, ProgramSpec

from .support.models import FAMILIES, among, tiny_model, tokens

PREFILL = 16
LENGTH, SIZE = 7, 8
#: What layers are made of, of many tokens.
PRODUCTS = {torch.ops.aten.linear.default, torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


def products_of_many(program: ExportedProgram, under: str = "") -> list[str]:
    """Modules, under a name, whose products are of more than one row."""
    found = []
    for node in program.graph.nodes:
        path = list(node.meta.get("nn_module_stack", {"": ("", None)}).values())[-1][0]
        if node.target in PRODUCTS and under in path:
            *_, rows, _ = node.meta["val"].shape
            if not (isinstance(rows, int) and rows == 1):
                found.append(path.rpartition(".")[2])
    return found


def exported_twice(family: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[ExportedProgram, ...]:
    """Return the program of a prompt, and a copy from before the last token was chosen early."""
    copies = []

    def choose(program: ExportedProgram) -> None:
        copies.append(copy.deepcopy(program))
        choose_last_token_early(program)

    monkeypatch.setattr(module_of_program, "choose_last_token_early", choose)
    model = tiny_model(family)
    early = Program(model, ExportableCache.from_model(model, 64), ProgramSpec(PREFILL, **options)).export("prefill")
    return early, *copies


# The pass treats other families like these: norms after attention, attention parallel to the MLP, and experts.
@pytest.mark.parametrize("family", among(FAMILIES, fast=["cohere2", "gpt_oss"]))
def test_the_last_layer_multiplies_the_last_token_behind_attention(family: str, monkeypatch) -> None:
    early, whole = exported_twice(family, monkeypatch)
    ids, start = tokens(LENGTH), torch.zeros(1, dtype=torch.int64)
    torch.testing.assert_close(early.module()(ids, start), whole.module()(ids, start), atol=1e-5, rtol=0)
    layers = [products_of_many(early, f"layers.{index}.") for index in (0, 1)]
    assert layers[0] == products_of_many(whole, "layers.0.")
    kept = {"qkv_proj", "q_proj", "k_proj", "v_proj"}
    if family == "gpt_oss":
        # Experts gather their tokens from among all.
        assert layers[1] == products_of_many(whole, "layers.1.")
    else:
        assert layers[1] and set(layers[1]) <= kept


def test_all_logits_are_of_all_tokens(monkeypatch) -> None:
    # Not handed to the pass.
    (program,) = exported_twice("llama", monkeypatch, logits=Logits.ALL)
    assert "lm_head" in products_of_many(program)


def test_a_head_over_all_tokens_is_of_the_last() -> None:
    """Of a model that cannot be told which logits are wanted."""
    program = _traced(_Head())
    assert products_of_many(program) == ["head"]
    choose_last_token_early(program)
    assert products_of_many(program) == []
    x = torch.randn(2, LENGTH, SIZE)
    torch.testing.assert_close(program.module()(x), _Head()(x))


class _Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(SIZE, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)[:, -1]


class _Then(nn.Module):
    """A linear layer, something, and the last row: `x [batch, LENGTH, SIZE]`."""

    def __init__(self, then: Callable[[torch.Tensor], torch.Tensor], slices: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self._then, self._slices = nn.Linear(SIZE, SIZE), then, slices

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self._then(self.linear(x))
        return (y[:, -1:] if self._slices else y[:, -1]) * 2


def _traced(module: nn.Module, batch: int = 2) -> ExportedProgram:
    example = torch.randn(batch, LENGTH, SIZE)
    return torch.export.export(module.eval(), (example,), dynamic_shapes=({1: Dim("length", min=4, max=64)},))


@dataclass(frozen=True)
class Step:
    """Attributes:
    call: Of [batch, length, SIZE].
    by_row: Whether each row is of that row alone, by operators that are known.
    batch: Rows of tokens.
    """

    call: Callable[[torch.Tensor], torch.Tensor]
    by_row: bool
    batch: int = 2


def mixed(x: torch.Tensor, between: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Compute eight experts by slots, two for each row, with a function of [slots, length, SIZE] between two layers."""
    rows, weights = x[0], torch.arange(8.0 * SIZE * SIZE).view(8, SIZE, SIZE).sin()
    factors, indices = rows.softmax(-1).topk(2)
    slots = expert_slots(indices, 8)
    chosen, biases = (chosen_weights(one, None, slots, 1.0, one.dtype) for one in (weights, weights[:, 0]))
    states = between(slot_product(rows[None], chosen, False) + biases.unsqueeze(1))
    return (slot_product(states, chosen, True) * slot_factors(indices, factors, 8)).sum(0)[None]


STEPS = {
    "experts by slots": Step(lambda x: mixed(x, torch.relu), True, batch=1),
    "experts by slots that are mixed": Step(lambda x: mixed(x, lambda states: states.flip(1)), False, batch=1),
    "rounded to float8": Step(lambda x: float8_rounded(x, 0.5), True),
    "elementwise": Step(lambda x: functional.silu(x) * x + 1, True),
    "normalised": Step(lambda x: functional.layer_norm(x, (SIZE,)), True),
    "normalised with the rows": Step(lambda x: x * x.mean(1, keepdim=True), False),
    "mean of the row": Step(lambda x: x * x.mean(-1, keepdim=True), True),
    "mean of the row without its dimension": Step(lambda x: x.sum(-1)[..., None] + x, True),
    "softmax of the row": Step(lambda x: x.softmax(-1), True),
    "softmax over rows": Step(lambda x: x.softmax(1), False),
    "sums of the rows before": Step(lambda x: x.cumsum(1), False),
    "rows in another order": Step(lambda x: x.flip(1), False),
    "shifted": Step(lambda x: x + functional.pad(x, (0, 0, 1, 0))[:, :-1], False),
    "split": Step(lambda x: torch.cat([part.neg() for part in x.chunk(2, -1)], -1), True),
    "split by sizes": Step(lambda x: x.split([2, 6], -1)[1] * 2, True),
    "heads": Step(
        lambda x: x.view(x.shape[0], x.shape[1], 2, -1).transpose(1, 2).neg().transpose(1, 2).flatten(2), True
    ),
    "rows of one sequence": Step(lambda x: x.view(-1, SIZE).relu().view(1, -1, SIZE), True, batch=1),
    "rows of several sequences": Step(lambda x: x.reshape(-1, SIZE).relu().view(2, -1, SIZE), False),
    "one for all rows": Step(lambda x: x * torch.arange(SIZE), True),
    "one for each row": Step(lambda x: x * torch.arange(x.shape[1])[:, None], True),
    "a product with the row": Step(lambda x: x @ torch.ones(SIZE, SIZE), True),
    "a product of rows": Step(lambda x: (x @ x.transpose(1, 2)) @ x, False),
    "part of the row": Step(lambda x: x[..., 2:5] + x[..., :1], True),
    "in place": Step(lambda x: x.relu_(), False),
    "permuted": Step(lambda x: x.permute(1, 0, 2).exp().permute(1, 0, 2), True),
    "squeezed": Step(lambda x: x.unsqueeze(2).exp().squeeze(2), True),
    "converted": Step(lambda x: x.double().float().clone(), True),
    "dropout": Step(lambda x: functional.dropout(x, 0.5, training=False), True),
}


# The pass walks back from a slice and from a selected row alike: with a step of each answer in the fast lane.
@pytest.mark.parametrize(
    ("name", "slices"),
    [
        *((name, True) for name in STEPS),
        *(
            pytest.param(name, False, marks=[pytest.mark.full] * (name not in ("elementwise", "softmax over rows")))
            for name in STEPS
        ),
    ],
)
def test_rows_that_need_no_other_are_left_out(name: str, slices: bool) -> None:
    step = STEPS[name]
    module = _Then(step.call, slices)
    program = _traced(module, step.batch)
    choose_last_token_early(program)
    assert bool(products_of_many(program)) != step.by_row, program.graph
    for length in (4, LENGTH):
        x = torch.randn(step.batch, length, SIZE)
        torch.testing.assert_close(program.module()(x), module(x))


def test_what_others_read_is_whole() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.first(x)
            return y.sum(1), self.second(y)[:, -1]

    module = Twice()
    program = _traced(module)
    choose_last_token_early(program)
    assert products_of_many(program) == ["first"]
    x = torch.randn(2, LENGTH, SIZE)
    torch.testing.assert_close(program.module()(x), module(x))


@pytest.mark.parametrize(
    "choice",
    [lambda x: x[:, 0], lambda x: x[:, 1:], lambda x: x[:, -2:], lambda x: x[:, -1:, :][:, :, ::2], lambda x: x],
    ids=["first", "but the first", "last two", "every other number", "all"],
)
def test_other_choices_stay(choice: Callable[[torch.Tensor], torch.Tensor]) -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(SIZE, SIZE)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return choice(self.linear(x)) * 1

    module = Chosen()
    program = _traced(module)
    choose_last_token_early(program)
    x = torch.randn(2, LENGTH, SIZE)
    torch.testing.assert_close(program.module()(x), module(x))


def test_saved_programs_are_as_they_were(tmp_path) -> None:
    program = _traced(_Head())
    choose_last_token_early(program)
    torch.export.save(program, tmp_path / "program.pt2")
    x = torch.randn(2, LENGTH, SIZE)
    assert torch.equal(torch.export.load(tmp_path / "program.pt2").module()(x), program.module()(x))
    assert all(node.args[3] == sys.maxsize for node in program.graph.find_nodes(op="call_function", target=SLICE))


SLICE = torch.ops.aten.slice.Tensor


#: Why operators of this package need no rule, with patterns of their names.
WITHOUT_RULE = {
    "They mix tokens.": "attention attention_rounded extended_attention filled_attention fused_attention",
    "They write the cache, for all tokens.": "kv_cache_update quantize write",
    "They choose slots or weights, and are computed again.": "chosen_weights expert_slots",
    "Their operands are weights.": "float4_weight float8_weight",
    "Lowering inserts them, after the pass.": (
        "dequantized_weight embedding_* experts_* gate linear_* linears_* negated_first_half rms_norm rotate rotated "
        "segment shuffled swapped_halves to_bfloat16 to_float16"
    ),
    "Compiled sessions insert them.": "equal_layer few_* layer_begins layer_ends onednn_linear",
}


def test_every_operator_has_a_rule_or_a_reason() -> None:
    """Check that a new operator does not keep a prompt's last layer from computing one token."""
    pytest.importorskip("executorch")
    root = Path(exportable_cache.__file__).parent
    for path in root.rglob("*.py"):
        defines = r'custom_op\(\s*"exportable_cache|Library\("exportable_cache|define_operator\("'
        # Importing torch's code generator takes seconds.
        if path.name != "torch_onednn.py" and re.search(defines, path.read_text()):
            importlib.import_module(".".join(path.relative_to(root.parent).with_suffix("").parts))
    # Overloads for results in given memory come from ExecuTorch's lowering.
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("exportable_cache::")}
    names = {name.removeprefix("exportable_cache::") for name in names if "." not in name}
    patterns = " ".join(WITHOUT_RULE.values()).split()
    lacking = {name for name in names if f"exportable_cache::{name}" not in _RULES_BY_NAME}
    assert {name for name in lacking if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)} == set()
    unused = {pattern for pattern in patterns if not fnmatch.filter(lacking, pattern)}
    # Compiled where they are first used.
    assert unused <= {"few_*", "onednn_linear"}
