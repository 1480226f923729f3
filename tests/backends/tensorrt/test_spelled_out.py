"""Operators that torch_tensorrt lacks or fails on, or leaves too little known of, in networks of a few layers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("exportable_cache.backends.tensorrt.upstream", reason="no tensorrt extra is installed")

from exportable_cache.backends.tensorrt.converters import broadcast_in_dim, log1p
from exportable_cache.backends.tensorrt.engine_io import EngineIO
from exportable_cache.backends.tensorrt.evaluator import NetworkEvaluator
from exportable_cache.backends.tensorrt.network import build_network

from .toys import evaluate, toy_network


def test_log1p_keeps_what_a_sum_with_one_loses() -> None:
    x = torch.tensor([0.0, 1e-10, -1e-9, 1e-7, 3e-5, 0.5, 40.0, -0.75])
    torch.testing.assert_close(log1p(x), torch.log1p(x), rtol=4e-7, atol=0)
    torch.testing.assert_close(evaluate(toy_network(torch.log1p, [x]), [x]), torch.log1p(x), rtol=4e-7, atol=0)


def test_a_table_is_gathered_from_as_well() -> None:
    # Token types of BERT: a buffer, which torch_tensorrt hands on as a torch tensor.
    index, table = torch.tensor([[2, 0, 2]]), torch.tensor([[5, 6, 7]])
    network = toy_network(lambda index, table: table.gather(1, index), [index], table)
    assert evaluate(network, [index]).tolist() == [[7, 5, 7]]


def test_broadcast_in_dim() -> None:
    x = torch.arange(3.0)
    expected = torch.ops.prims.broadcast_in_dim(x, [2, 3, 4], [1])
    assert torch.equal(broadcast_in_dim(x, [2, 3, 4], [1]), expected)


def test_deviations_are_taken_over_a_dimension() -> None:
    x = torch.tensor([[1.0, 2.0, 6.0], [0.0, 0.5, -1.0]])
    network = toy_network(lambda x: x.std(-1, keepdim=True, unbiased=False), [x])
    torch.testing.assert_close(evaluate(network, [x]), x.std(-1, keepdim=True, unbiased=False))


@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0.5, 2), (0, 1)])
def test_products_are_added_to(beta: float, alpha: float) -> None:
    tensors = [torch.full((1, 2, 4), 3.0), torch.arange(12.0).reshape(2, 2, 3), torch.arange(24.0).reshape(2, 3, 4)]

    def add(x: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.baddbmm(x, left, right, beta=beta, alpha=alpha)

    assert torch.equal(evaluate(toy_network(add, tensors), tensors), add(*tensors))


def test_quotients_of_whole_numbers_are_floats() -> None:
    x, y = torch.tensor([7, -3, 0]), torch.tensor([2, 4, 5])
    assert torch.equal(
        evaluate(toy_network(lambda x: torch.floor(x / 2) + x / 4, [x]), [x]), torch.floor(x / 2) + x / 4
    )
    assert torch.equal(evaluate(toy_network(lambda x, y: x / y + 3 / y, [x, y]), [x, y]), x / y + 3 / y)
    third = torch.tensor([0.5, 3.0, 1.0])
    assert torch.equal(evaluate(toy_network(lambda x, y: y / x, [x, third]), [x, third]), third / x)


def test_largest_values_and_where_they_are() -> None:
    x = torch.tensor([[1.0, 5.0, 2.0], [7.0, -1.0, 6.5]])
    assert torch.equal(
        evaluate(toy_network(lambda x: x.max(-1).values * 10 + x.max(-1).indices, [x]), [x]).cpu(),
        torch.tensor([51.0, 70.0]),
    )


def test_one_value_is_put_where_a_mask_holds() -> None:
    ids, table = torch.tensor([[3, 9, 1], [9, 2, 9]]), torch.arange(12.0).reshape(2, 3, 2)

    def put(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        known, rows = ids.clone(), table.clone()
        known[ids == 9] = 0
        rows[ids == 9] = -1.0
        return known[..., None] + rows

    assert torch.equal(evaluate(toy_network(put, [ids, table]), [ids, table]), put(ids, table))


def test_whether_all_hold() -> None:
    x = torch.tensor([[1.0, 5.0, 2.0], [7.0, -1.0, 6.5]])

    def count(x: torch.Tensor) -> torch.Tensor:
        return (x > 0).all(-1, keepdim=True).float() + 2 * x.all(-1, keepdim=True).float()

    assert torch.equal(evaluate(toy_network(count, [x]), [x]), count(x))


def test_empty_tensors_are_filled_before_they_are_read() -> None:
    x = torch.arange(3.0)
    network = toy_network(lambda x: torch.cat([torch.empty(2).fill_(4.0), x]), [x])
    assert evaluate(network, [x]).tolist() == [4, 4, 0, 1, 2]


def test_whole_numbers_of_which_either_bit_is_set() -> None:
    edge = 2**63 - 1
    x = torch.tensor([[0, 1, -1, edge, -edge - 1, 0x5DEECE66D], [7, -7, edge, edge, 3, -3]])
    y = torch.tensor([0x1234567890ABCDEF, 1, 255, -2, edge, -0x0FEDCBA987654321])
    assert torch.equal(evaluate(toy_network(torch.bitwise_xor, [x, y]), [x, y]), x ^ y)
    x, y = x.to(torch.int32), y.to(torch.int32)
    assert torch.equal(evaluate(toy_network(torch.bitwise_xor, [x, y]), [x, y]), x ^ y)


def test_remainders_of_large_whole_numbers() -> None:
    x, y = torch.tensor([2**62 + 5, -(2**62) - 5, 7, -7, 0]), torch.tensor([509, 511, -4, 4, 3])
    assert torch.equal(evaluate(toy_network(torch.remainder, [x, y]), [x, y]), torch.remainder(x, y))


@pytest.mark.parametrize(("size", "step"), [(4, 1), (3, 2), (1, 3)])
def test_windows_over_a_length(size: int, step: int) -> None:
    x = torch.arange(14.0).reshape(2, 7)
    network = toy_network(lambda x: x.unfold(-1, size, step).flip(-1), [x])
    assert torch.equal(evaluate(network, [x]), x.unfold(-1, size, step).flip(-1))


class NothingRotated(torch.nn.Module):
    """Keys of two parts, the second of which has no size, over a cache that keeps both."""

    def forward(
        self,
        x: torch.Tensor,
        input_pos: torch.Tensor,
        keys: torch.Tensor,
        rotated: torch.Tensor,
        length: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        key, turned = x.split([4, 0], dim=-1)
        keys, rotated = keys.index_copy(1, input_pos, key), rotated.index_copy(1, input_pos, turned)
        whole = torch.zeros_like(keys)
        whole[..., :4] = keys
        whole[..., 4:] = rotated
        return whole, keys, rotated, input_pos + 1


def test_state_that_holds_nothing_stays_outside() -> None:
    position, x = torch.ones(1, dtype=torch.int64), torch.arange(4.0)[None, None]
    given = (x, position, torch.zeros(1, 3, 4), torch.zeros(1, 3, 0), position.clone())
    state = tuple(f"layers.0.{name}" for name in ("keys", "values", "cumulative_length"))
    signature = EngineIO(("x", "input_pos"), state, (1, 1, 1), frozenset({"layers.0.values"}))
    network = build_network(torch.export.export(NothingRotated(), given), signature)
    assert [spec.name for spec in network.inputs] == ["x", "input_pos", "cache.layers.0.keys"]
    result = NetworkEvaluator(network.definition, network.constants).run(
        {"x": x, "input_pos": position, "cache.layers.0.keys": given[2]}
    )
    assert torch.equal(result["logits"][:, 1], x[:, 0]) and result["logits"].sum() == x.sum()
    assert torch.equal(result["next.layers.0.keys"], result["logits"])


class Heads(torch.nn.Module):
    """Heads split off a length that went through a sum, as behind a layer of experts."""

    def forward(
        self, x: torch.Tensor, input_pos: torch.Tensor, length: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch, count, hidden = x.shape
        chosen = x.reshape(-1, 1, hidden).expand(-1, 2, -1).reshape(-1, hidden)
        x = chosen.view(count, 2, hidden).sum(1).view(batch, count, hidden)
        return x.view(batch, count, -1, 4).transpose(1, 2), input_pos + 1


class LastRow(torch.nn.Module):
    """The last row of a table of two lengths, as of a mask."""

    def forward(
        self, x: torch.Tensor, input_pos: torch.Tensor, length: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        table = torch.cat([x, x.new_ones(1, 3)], dim=1)
        return (x[:, :, None] * table[:, None])[:, -1:], input_pos + 1


def test_the_last_place_where_two_dimensions_are_of_any_length() -> None:
    position = torch.zeros(1, dtype=torch.int64)
    length = {"x": {1: torch.export.Dim("length", min=2, max=9)}, "input_pos": None, "length": None}
    program = torch.export.export(LastRow(), (torch.ones(1, 5), position, position.clone()), dynamic_shapes=length)
    network = build_network(program, EngineIO(("x", "input_pos"), ("layers.0.cumulative_length",), (2, 9, 9)))
    x = torch.arange(1.0, 8)[None]
    result = NetworkEvaluator(network.definition, network.constants).run({"x": x, "input_pos": position})
    assert torch.equal(result["logits"], 7 * torch.cat([x, torch.ones(1, 3)], dim=1)[:, None])


def test_heads_are_known_behind_experts() -> None:
    position = torch.zeros(1, dtype=torch.int64)
    length = {"x": {1: torch.export.Dim("length", min=2, max=9)}, "input_pos": None, "length": None}
    program = torch.export.export(Heads(), (torch.ones(1, 5, 12), position, position.clone()), dynamic_shapes=length)
    network = build_network(program, EngineIO(("x", "input_pos"), ("layers.0.cumulative_length",), (2, 9, 9)))
    assert tuple(network.definition.get_output(0).shape) == (1, 3, -1, 4)
    x = torch.arange(7.0 * 12).reshape(1, 7, 12)
    result = NetworkEvaluator(network.definition, network.constants).run({"x": x, "input_pos": position})
    assert torch.equal(result["logits"], (2 * x).view(1, 7, 3, 4).transpose(1, 2))
