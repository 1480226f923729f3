"""Which methods one compiled graph serves, and how far it is told to read."""

from __future__ import annotations

from exportable_cache import ExportableCache
from exportable_cache.program.decoders import methods_for
from exportable_cache.program.lengths import READ_STEP, shared_methods, slots_to_read
from exportable_cache.program.methods import KV_SLOTS
from exportable_cache.program.spec import ProgramSpec

from .support.models import tiny_model


def shared_of(family: str, buckets: tuple[int, ...], capacity: int = 1024, **options):
    cache = ExportableCache.from_model(tiny_model(family, **options), capacity)
    return shared_methods(cache, methods_for(cache, ProgramSpec(min(256, capacity), buckets=buckets)))


def test_full_layers_share_one_method_for_steps_and_one_for_prompts() -> None:
    shared = shared_of("llama", (128, 256, 512))
    assert len(shared) == 8 and len(set(map(id, shared.values()))) == 2
    assert shared["decode_128"] is shared["decode"] and shared["prefill_128"] is shared["prefill"]
    assert shared["prefill_128"].dynamic_sizes == {"length": (2, 256), KV_SLOTS.name: (2, 1023)}
    assert shared["decode"].kv_read_len == 1024


def test_what_runs_before_a_rings_first_turn_and_after_it_are_two() -> None:
    shared = shared_of("mistral", (4, 8, 16, 32), sliding_window=8)
    # A ring alone: past its first turn all of it is read, whatever is asked for.
    assert set(shared) == {"decode_4", "decode_8", "prefill_4", "prefill_8"}
    assert shared["decode_4"].dynamic_sizes == {KV_SLOTS.name: (2, 7)}
    types = ["sliding_attention", "full_attention"]
    shared = shared_of("gemma3_text", (4, 8, 16), sliding_window=8, num_hidden_layers=2, layer_types=types)
    assert shared["decode_4"] is shared["decode_8"] is not shared["decode_16"]
    assert shared["decode_16"] is shared["decode"]


def test_a_method_alone_is_not_shared() -> None:
    assert shared_of("llama", ()) == {}


def test_slots_are_read_as_far_as_needed_and_never_all() -> None:
    method = shared_of("llama", (128,))["decode"]
    assert [slots_to_read(method, end, None) for end in (1, READ_STEP, READ_STEP + 1, 1000, 1023)] == [
        READ_STEP,
        READ_STEP,
        2 * READ_STEP,
        1023,
        1023,
    ]
    assert slots_to_read(method, 1024, None) is None


def test_sizes_that_are_equal_by_chance_are_not_when_a_graph_is_compiled() -> None:
    method = shared_of("llama", (128,))["prefill"]
    assert slots_to_read(method, READ_STEP, READ_STEP) == READ_STEP + 1
    assert slots_to_read(method, READ_STEP, 5) == READ_STEP
    small = shared_of("llama", (4,), capacity=17)["prefill"]
    assert slots_to_read(small, 16, 16) is None
    assert slots_to_read(small, 15, 16) == 15
