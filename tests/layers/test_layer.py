"""What every layer derives from its declaration."""

import copy
import json
import pickle

import pytest
import torch
from torch.utils import _pytree as pytree

from exportable_cache.cache.layers import layer_from
from exportable_cache.errors import CacheFullError, InputError

from ..support.layers import full_layer, in_step, ring_layer

MAKERS = {
    "full": lambda **options: full_layer(options.pop("batch_size", 2), 2, 4, 12, **options),
    "ring": lambda **options: ring_layer(options.pop("batch_size", 2), 2, 4, window=5, **options),
}


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


def states(count: int, batch_size: int = 2, value_dim: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch_size, 2, count, 4), torch.randn(batch_size, 2, count, value_dim)


def test_state_is_declared_once(make) -> None:
    layer = make(value_head_dim=6)
    names = [name for name, _ in layer.named_state()]
    assert names == list(layer.state) == ["keys", "values", "cumulative_length"]
    assert layer.keys.shape == (2, 2, layer.capacity, 4)
    assert layer.values.shape == (2, 2, layer.capacity, 6)
    assert layer.cumulative_length.dtype == torch.int64 and layer.cumulative_length.shape == (2,)
    assert layer.nbytes == 2 * 2 * layer.capacity * (4 + 6) * 4 + 2 * 8


def test_pytree_children_are_named_and_the_spec_never_changes(make) -> None:
    layer = make()
    leaves, spec = pytree.tree_flatten_with_path(layer)
    assert [pytree.keystr(path) for path, _ in leaves] == [".keys", ".values", ".cumulative_length"]
    assert json.loads(json.dumps(spec.context)) == spec.context == layer.config()
    for count in (3, 1, 1, 4, 1):
        layer.update(*states(count))
        assert pytree.tree_structure(layer) == spec
    rebuilt = pytree.tree_unflatten([leaf for _, leaf in leaves], spec)
    assert type(rebuilt) is type(layer) and rebuilt.config() == layer.config()
    assert rebuilt.keys is layer.keys


def test_functional_update_equals_in_place_and_mutates_nothing(make) -> None:
    for count in (1, 3, 5, 9):
        in_place, functional = make(), make()
        lead = states(2)
        in_place.update(*lead)
        functional.update(*lead)
        before = dict(functional.named_state())
        copies = {name: tensor.clone() for name, tensor in before.items()}
        functional = in_step(functional, in_place=False)
        new = states(count)
        expected, actual = in_place.update(*new), functional.update(*new)
        assert torch.equal(expected[0], actual[0]) and torch.equal(expected[1], actual[1])
        for name, tensor in functional.named_state():
            assert torch.equal(tensor, getattr(in_place, name))
            assert torch.equal(before[name], copies[name])


def test_rows_are_written_at_their_own_length(make) -> None:
    ragged = make()
    singles = [make(batch_size=1), make(batch_size=1)]
    leads = [states(3, 1), states(7, 1)]
    for row, (single, lead) in enumerate(zip(singles, leads, strict=True)):
        single.update(*lead)
        for name, tensor in ragged.named_state():
            tensor[row] = getattr(single, name)[0]
    for count in (1, 2, 1):
        new = states(count)
        ragged.update(*new)
        for row, single in enumerate(singles):
            single.update(new[0][row : row + 1], new[1][row : row + 1])
            for name, tensor in ragged.named_state():
                assert torch.equal(tensor[row], getattr(single, name)[0]), name


def test_reset_and_reorder_keep_addresses(make) -> None:
    layer = make()
    layer.update(*states(4))
    addresses = [tensor.data_ptr() for _, tensor in layer.named_state()]
    first, second = layer.keys[0].clone(), layer.keys[1].clone()
    layer.reorder_cache(torch.tensor([1, 1]))
    assert torch.equal(layer.keys[0], second) and torch.equal(layer.keys[1], second) and not torch.equal(first, second)
    layer.reset()
    assert all(not tensor.any() for _, tensor in layer.named_state())
    assert [tensor.data_ptr() for _, tensor in layer.named_state()] == addresses


def test_full_layer_refuses_what_does_not_fit_and_keeps_its_state() -> None:
    layer = MAKERS["full"]()
    layer.update(*states(10))
    copies = {name: tensor.clone() for name, tensor in layer.named_state()}
    with pytest.raises(CacheFullError, match="holds 10 of at most 12 tokens, 3 more do not fit"):
        layer.update(*states(3))
    assert all(torch.equal(tensor, copies[name]) for name, tensor in layer.named_state())
    layer.update(*states(2))
    assert layer.cumulative_length.tolist() == [12, 12]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda keys, values: (keys[:1], values[:1]), "allocated for"),
        (lambda keys, values: (keys[..., :3], values), "allocated for"),
        (lambda keys, values: (keys[:, :1], values[:, :1]), "allocated for"),
        (lambda keys, values: (keys.double(), values.double()), "torch.float64"),
        (lambda keys, values: (keys, values.half()), "torch.float16"),
        (lambda keys, values: (keys.to("meta"), values.to("meta")), "meta"),
    ],
)
def test_new_states_must_match(make, change, message: str) -> None:
    layer = make()
    with pytest.raises(InputError, match=message):
        layer.update(*change(*states(1)))
    assert layer.cumulative_length.tolist() == [0, 0]


def test_crop_takes_minus_the_count(make) -> None:
    layer = make()
    layer.update(*states(4))
    with pytest.raises(InputError, match="pass -2"):
        layer.crop(2)
    with pytest.raises(InputError, match="at most 4"):
        layer.crop(-5)
    layer.crop(-3)
    assert layer.cumulative_length.tolist() == [1, 1]


@pytest.mark.parametrize("name", ["batch_size", "num_heads", "head_dim", "capacity", "value_head_dim"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4"])
def test_sizes_are_checked_at_construction(name: str, value: object) -> None:
    if (name, value) == ("value_head_dim", 0):
        pytest.skip("a token may have a key alone")
    sizes = {"batch_size": 1, "num_heads": 2, "head_dim": 4, "capacity": 8, "value_head_dim": 4, name: value}
    with pytest.raises(InputError, match=name):
        full_layer(**sizes)


def test_dtype_is_checked_at_construction() -> None:
    with pytest.raises(InputError, match="torch.int64"):
        full_layer(1, 2, 4, 8, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: config["policy"].update(kind="spiral"), "policy is of kind 'spiral', known are .*full.*ring"),
        (lambda config: config["policy"].update(width=3), "policy has .*width, one of kind"),
        (
            lambda config: config["storage"].clear(),
            "storage is of kind None, known are float, float16, bfloat16, int8, int4",
        ),
        (lambda config: config.pop("storage"), "storage of a layer is None, but its policy .* needs one"),
        (lambda config: config.pop("policy"), "it needs a policy"),
        (lambda config: config["storage"].update(dtype="int64"), "dtype of a cache layer must be .* got 'int64'"),
        (lambda config: config.update(colour={}), "colour"),
    ],
)
def test_what_describes_no_layer_is_refused(make, change, message: str) -> None:
    config = json.loads(json.dumps(make().config()))
    assert layer_from(config, {}).config() == make().config()
    change(config)
    with pytest.raises(InputError, match=message):
        layer_from(config, {})


@pytest.mark.parametrize("call", ["offload", "prefetch"])
def test_offloading_is_refused(make, call: str) -> None:
    with pytest.raises(InputError, match="DynamicCache"):
        getattr(make(), call)()


def test_the_batch_is_fixed(make) -> None:
    with pytest.raises(InputError, match="larger batch_size"):
        make().batch_repeat_interleave(2)
    with pytest.raises(InputError, match="cannot keep 1 rows"):
        make().batch_select_indices(torch.tensor([0]))


def test_copies_and_pickles_go_on_alike_and_share_nothing(make) -> None:
    layer = make()
    layer.update(*states(7))
    # What a ring has overwritten is remembered by all.
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    new = states(2)
    expected = layer.update(*new)
    for other in copies:
        assert other.config() == layer.config() and other.cumulative_length.tolist() == [7, 7]
        assert all(torch.equal(*pair) for pair in zip(other.update(*new), expected, strict=True))
        other.crop(-1)
        assert other.cumulative_length.tolist() == [8, 8] and layer.cumulative_length.tolist() == [9, 9]
