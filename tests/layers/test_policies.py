"""Slot policies as what they are: functions of a length, against a list that is written token by token."""

import json

import pytest
import torch

from exportable_cache.cache.policies import (
    CrossPolicy,
    FullPolicy,
    NoPolicy,
    PromptPolicy,
    RecurrentPolicy,
    RingPolicy,
    SinkPolicy,
    SlotPolicy,
)
from exportable_cache.cache.step import StepContext
from exportable_cache.errors import InputError

SLOTTED = [FullPolicy(40), RingPolicy(8), RingPolicy(8, 3), RingPolicy(1), SinkPolicy(3, 8), SinkPolicy(1, 1, 2)]
ALL = [*SLOTTED, PromptPolicy(40, 8), CrossPolicy(6), NoPolicy(), RecurrentPolicy()]


@pytest.mark.parametrize("policy", SLOTTED, ids=repr)
def test_positions_are_those_of_slots_written_one_by_one(policy: SlotPolicy) -> None:
    slots = [-1] * policy.capacity
    for position in range(40):
        # Any negative position is none.
        assert policy.positions(torch.tensor([[position]])).clamp(min=-1).tolist() == [slots]
        slots[int(policy.next_slot(torch.tensor([position])))] = position


@pytest.mark.parametrize("policy", SLOTTED, ids=repr)
def test_rows_of_different_length_are_told_apart(policy: SlotPolicy) -> None:
    lengths = torch.tensor([0, 3, 17, 39])
    for row, length in enumerate(lengths.tolist()):
        single = torch.tensor([length])
        assert torch.equal(policy.positions(lengths[:, None])[row], policy.positions(single[:, None])[0])
        assert policy.next_slot(lengths)[row] == policy.next_slot(single)[0]


@pytest.mark.parametrize("policy", SLOTTED, ids=repr)
def test_until_it_wraps_every_slot_holds_its_position(policy: SlotPolicy) -> None:
    for reach in range(1, 41):
        if not policy.wraps(reach):
            positions = policy.positions(torch.tensor([[reach]]))[0, : policy.slots_read(reach)]
            assert positions.tolist() == list(range(min(reach, policy.capacity)))
            assert policy.mask_positions(torch.tensor([reach - 1]), 1, reach) is None
    assert policy.wraps(None) is not isinstance(policy, FullPolicy) and policy.slots_read(None) == policy.capacity


@pytest.mark.parametrize("policy", SLOTTED[1:], ids=repr)
def test_what_can_be_taken_back_is_what_was_not_overwritten(policy: SlotPolicy) -> None:
    for ever in range(1, 40):
        held = set(policy.positions(torch.tensor([[ever]]))[0].tolist())
        for length in range(ever + 1):
            allowed = policy.max_rollback(length, ever)
            assert 0 <= allowed <= length
            # The query that follows needs its window, itself included, and the sinks.
            query = length - allowed
            first = max(0, query - policy.window + 1)
            if allowed or ever == length:
                assert held.issuperset(range(first, query)), (ever, length)
            sinks = getattr(policy, "sinks", 0)
            assert held.issuperset(range(min(sinks, ever)))


@pytest.mark.parametrize("policy", ALL, ids=repr)
def test_a_policy_is_its_json(policy: SlotPolicy) -> None:
    assert SlotPolicy.from_config(json.loads(json.dumps(policy.to_config()))) == policy
    assert policy.to_config()["kind"] == policy.kind and SlotPolicy.kinds[policy.kind] is type(policy)
    with pytest.raises(AttributeError):
        policy.capacity = 3


@pytest.mark.parametrize(
    "config",
    [
        {"kind": "full", "capacity": 0},
        {"kind": "full", "capacity": True},
        {"kind": "ring", "window": 8, "rollback_slots": -1},
        {"kind": "ring", "window": 2.0, "rollback_slots": 0},
        {"kind": "sinks", "sinks": 0, "window": 8, "rollback_slots": 0},
        {"kind": "cross", "capacity": "6"},
        {"kind": "prompt", "capacity": 6, "window": 0},
    ],
)
def test_sizes_are_checked_where_a_policy_is_made(config: dict) -> None:
    with pytest.raises(InputError, match="must be an int of at least"):
        SlotPolicy.from_config(config)


def test_a_step_counts_unless_its_length_is_an_input_that_it_may_not_change() -> None:
    start = torch.tensor([3])
    contexts = StepContext(), StepContext(start), StepContext(start, in_place=False), StepContext(in_place=False)
    assert [context.counts for context in contexts] == [True, False, True, True]


def test_what_is_shared_in_a_step_is_computed_once() -> None:
    asked = []
    first, second = StepContext(), StepContext()
    for context in (first, first, second):
        context.once("start", lambda context=context: asked.append(context))
    assert asked == [first, second]
