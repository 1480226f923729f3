"""The cache write as one operator: eager against its oracle, as torch.export and torch.compile see
it, and spelled out.
"""

import pytest
import torch

from exportable_cache.backends.tensorrt.kv_cache import kv_cache_update, scatter_update

CAPACITY = 12


def arguments(
    batch: int, length: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(batch, 2, CAPACITY, 4, generator=generator).to(dtype)
    update = torch.randn(batch, 2, length, 4, generator=generator).to(dtype)
    return cache, update, torch.arange(batch) * 3 + CAPACITY - length - 3 * (batch - 1)


def reference_update(cache: torch.Tensor, update: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Compute `kv_cache_update` row by row."""
    result = cache.clone()
    for row, first in enumerate(start.tolist()):
        result[row, :, first : first + update.shape[2]] = update[row]
    return result


@pytest.mark.parametrize("implementation", [kv_cache_update, scatter_update])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, CAPACITY), (3, 1), (3, 4)])
def test_every_row_is_written_at_its_own_position(implementation, batch: int, length: int, dtype: torch.dtype) -> None:
    cache, update, start = arguments(batch, length, dtype)
    before = cache.clone()
    result = implementation(cache, update, start)
    assert torch.equal(result, reference_update(cache, update, start))
    assert torch.equal(cache, before) and not torch.equal(result, before)


def test_the_operator_is_registered_as_torch_expects() -> None:
    torch.library.opcheck(kv_cache_update, arguments(2, 3))


def test_it_stays_one_node_of_an_exported_graph() -> None:
    class Write(torch.nn.Module):
        def forward(self, cache: torch.Tensor, update: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
            return kv_cache_update(cache, update, start)

    length = torch.export.Dim("length", min=2, max=CAPACITY)
    program = torch.export.export(
        Write(), arguments(1, 5), dynamic_shapes=(None, {2: length}, None)
    ).run_decompositions()
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert targets == [torch.ops.exportable_cache.kv_cache_update.default]
    given = arguments(1, 7)
    assert torch.equal(program.module()(*given), reference_update(*given))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda cache, update, start: (cache, update.half(), start), "got torch.float16"),
        (lambda cache, update, start: (cache, update, start.int()), "start must be int64, got torch.int32"),
        (lambda cache, update, start: (cache, update, start[0]), "got 0 dimensions"),
    ],
)
def test_wrong_arguments_are_refused_when_traced(change, message: str) -> None:
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in change(*arguments(1, 1))]
        with pytest.raises(RuntimeError, match=message):
            kv_cache_update(*fakes)
