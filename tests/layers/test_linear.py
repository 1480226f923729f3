"""Linear layers: the protocol of transformers' linear caches, with tensors only."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from exportable_cache import ExportableCache
from exportable_cache.cache.layers import LinearLayer, RowSizes, StateShape
from exportable_cache.cache.layers.linear import take_carried
from exportable_cache.cache.policies import FullPolicy
from exportable_cache.cache.step import StepContext
from exportable_cache.errors import InputError

from ..support.layers import dummy_layer, full_layer, linear_layer

CHANNELS, KERNEL = 3, 4


def layer(batch_size: int = 1, states: int = 1) -> LinearLayer:
    return linear_layer(batch_size, [StateShape((CHANNELS, KERNEL))] * states, [StateShape((2, 5))] * states)


def inputs(length: int, batch_size: int = 1) -> torch.Tensor:
    return 1.0 + torch.arange(batch_size * CHANNELS * length, dtype=torch.float32).reshape(batch_size, CHANNELS, length)


def test_state_is_declared_from_the_shapes() -> None:
    kept = layer(2)
    assert {name: list(tensor.shape) for name, tensor in kept.named_state()} == {
        "conv_state_0": [2, CHANNELS, KERNEL],
        "recurrent_state_0": [2, 2, 5],
        "cumulative_length": [2],
    }
    assert kept.state["conv_state_0"].dims == ("batch_size", "conv_state_0_channels", "conv_state_0_kernel_size")
    assert kept.nbytes == 4 * 2 * (CHANNELS * KERNEL + 10) + 16


@pytest.mark.parametrize("length", [1, 3, 4, 5, 11])
def test_convolution_sees_what_came_before(length: int) -> None:
    kept, whole = layer(), inputs(length + 6)
    kept.update_conv_state(whole[..., :6])
    joined = kept.update_conv_state(whole[..., 6:])
    assert torch.equal(joined, whole[..., 6 - KERNEL :])
    assert torch.equal(kept.get_conv_state(), whole[..., -KERNEL:])


def test_no_state_is_a_state_of_zeros() -> None:
    kept = layer()
    assert kept.has_previous_state == {0: True}
    assert not kept.get_conv_state().any() and not kept.get_recurrent_state().any()
    assert kept.get_conv_state(1) is None


def test_tokens_are_counted_in_plain_use() -> None:
    kept = layer(2)
    for length in (5, 1, 1, 3):
        state = kept.get_conv_state()
        if length > 1:
            kept.update_conv_state(inputs(length, 2))
        else:
            state.copy_(state.roll(-1, -1))
    assert kept.cumulative_length.tolist() == [10, 10]


def test_rows_at_position_0_start_anew_in_a_program() -> None:
    cache = ExportableCache([layer(2)])
    cache.layers[0].conv_state_0.fill_(float("inf"))
    cache.layers[0].recurrent_state_0.fill_(7.0)
    stepped = cache.with_state(dict(cache.named_state()), StepContext(torch.tensor([0, 3]))).layers[0]
    assert stepped.get_recurrent_state().amax((1, 2)).tolist() == [0.0, 7.0]
    assert stepped.update_conv_state(inputs(2, 2))[:, 0, 0].tolist() == [0.0, float("inf")]
    # What this step wrote is not wiped when it is read again.
    assert stepped.get_conv_state()[0].any()
    assert cache.layers[0].recurrent_state_0[0].any().item() is False, "in place: the buffers are the cache's own"


def test_explicit_steps_mutate_nothing() -> None:
    cache = ExportableCache([layer()])
    before = {name: tensor.clone() for name, tensor in cache.named_state()}
    stepped = cache.with_state(dict(cache.named_state()), StepContext(torch.tensor([2]), in_place=False)).layers[0]
    stepped.get_conv_state().copy_(torch.ones(1, CHANNELS, KERNEL))
    stepped.update_conv_state(inputs(3))
    stepped.update_recurrent_state(torch.ones(1, 2, 5))
    assert all(torch.equal(tensor, before[name]) for name, tensor in cache.named_state())
    assert torch.equal(stepped.recurrent_state_0, torch.ones(1, 2, 5))


def test_states_cannot_be_taken_back() -> None:
    cache = ExportableCache([full_layer(1, 1, 2, 8), layer()])
    for kept in cache.layers:
        kept.cumulative_length.fill_(4)
    with pytest.raises(InputError, match="state sums up all"):
        cache.crop(-1)
    assert not cache.layers[1].is_croppable


def test_saved_and_loaded(tmp_path) -> None:
    cache = ExportableCache([dummy_layer(), layer(states=2), full_layer(1, 1, 2, 8)])
    cache.layers[1].conv_state_1.fill_(3.0)
    cache.save(tmp_path / "cache.safetensors")
    loaded = ExportableCache.load(tmp_path / "cache.safetensors")
    assert [kept.label for kept in loaded.layers] == ["none", "recurrent", "full"]
    assert torch.equal(loaded.layers[1].conv_state_1, cache.layers[1].conv_state_1)


def test_masks_and_lengths_come_from_the_first_layer_with_keys() -> None:
    cache = ExportableCache([dummy_layer(), layer(), full_layer(1, 1, 2, 8)])
    cache.layers[2].cumulative_length.fill_(3)
    assert (cache.is_dummy, cache.is_linear) == ([True, False, False], [False, True, False])
    assert cache.get_mask_sizes(2, 0) == (8, 0)
    assert int(cache.get_seq_length()) == 3 and cache.max_length == 8


def test_layers_of_both_kinds() -> None:
    both = linear_layer(1, [StateShape((CHANNELS, KERNEL))], [None], FullPolicy(8), RowSizes(1, 2, 4))
    assert [name for name, _ in both.named_state()] == ["keys", "values", "cumulative_length", "conv_state_0"]
    keys, _ = both.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    both.update_conv_state(inputs(3))
    assert keys.shape == (1, 2, 8, 4) and both.cumulative_length.tolist() == [3]
    assert not both.is_linear and both.max_rollback(3, 3) == 0


@pytest.mark.parametrize(
    ("conv", "recurrent", "message"),
    [([None], [None], "at least one"), ([StateShape((0, 4))], [], "at least 1"), ([], [], "at least one")],
)
def test_wrong_shapes(conv: list, recurrent: list, message: str) -> None:
    with pytest.raises(InputError, match=message):
        linear_layer(1, conv, recurrent)


def test_models_that_write_elsewhere_are_told() -> None:
    keys = torch.ones(1, 1, 1, 2)
    for kept in (layer(), dummy_layer()):
        with pytest.raises(InputError, match="from_model"):
            kept.update(keys, keys)
    with pytest.raises(InputError, match="keeps a linear state"):
        ExportableCache([full_layer(1, 1, 2, 8)]).update_conv_state(inputs(1), 0)


def test_the_state_that_a_scan_starts_from_is_that_of_its_thread() -> None:
    """Between the two updates of a step, another thread's scan must not take it, whether over a cache
    of ours or not.
    """
    kept = linear_layer(1, [StateShape((CHANNELS, KERNEL))], [StateShape((CHANNELS, 5))])
    kept.update_conv_state(inputs(4))
    with ThreadPoolExecutor(1) as other:
        assert other.submit(take_carried).result() is None
    assert take_carried() is kept.recurrent_state_0


def test_a_scan_takes_its_state_once() -> None:
    """What is left over would be the start of a later scan over a cache that is not ours."""
    kept = linear_layer(1, [StateShape((CHANNELS, KERNEL))], [StateShape((CHANNELS, 5))])
    kept.update_conv_state(inputs(4))
    assert take_carried() is not None and take_carried() is None
    by_head = linear_layer(1, [StateShape((CHANNELS, KERNEL))], [StateShape((2, CHANNELS, 5))])
    by_head.update_conv_state(inputs(4))
    assert [take_carried() is not None for _ in range(3)] == [True, True, False]
