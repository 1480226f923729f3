"""Estimate a decode step of large models over 8, 64 and 512 devices: the counts of `plan`, over assumed devices.

    python -m benchmarks.scale

Counts of messages and bytes are those that `benchmarks/parallel.py` found to be sent by tiny models on processes over
gloo. Times are arithmetic: nothing here has run on such devices. See docs/scale.md.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from transformers import AutoConfig

from exportable_cache.parallel.plan import RankPlan
from exportable_cache.parallel.stage_plan import StagePlan
from exportable_cache.pipeline.plan import Plan, plan

#: Assumptions, in bytes, bytes per second and seconds: memory and its bandwidth; devices of one machine, the bandwidth
#: between them, and the least time of a collective; the same between machines.
MEMORY, BANDWIDTH = 80e9, 3.35e12
INSIDE, INSIDE_RATE, INSIDE_LATENCY = 8, 450e9, 8e-6
OUTSIDE_RATE, OUTSIDE_LATENCY = 50e9, 25e-6

_COMMON = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "dtype": "bfloat16"}
LARGE = AutoConfig.for_model(
    "llama",
    **_COMMON,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    max_position_embeddings=131072,
)
SMALL = AutoConfig.for_model(
    "llama",
    **_COMMON,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    max_position_embeddings=1 << 20,
)
#: Rows of a replica's step, and tokens of each row.
ROWS, TOKENS = 32, 8192
#: Ranks and stages of each number of devices; the rest are replicas.
SPLITS = {8: [(8, 1), (4, 2), (1, 8)], 64: [(8, 1), (8, 8), (64, 1)], 512: [(8, 1), (8, 8), (64, 8)]}


@dataclass(frozen=True)
class Step:
    """Time of one decode step in seconds, by cause, and the memory of a device.

    Attributes:
        memory: Reading weights and cache.
        sums: Messages of tensor parallelism.
        stages: Sending hidden states.
        idle: Waiting for other stages.
        held: Bytes on the fullest device.
    """

    memory: float
    sums: float
    stages: float
    idle: float
    held: float

    @property
    def seconds(self) -> float:
        return self.memory + self.sums + self.stages + self.idle


@functools.cache
def planned(ranks: int, stages: int) -> Plan:
    """Return the counts of a split of the large model."""
    asked = {"tensor_parallel": ranks} if ranks > 1 else {}
    return plan(LARGE, TOKENS, ROWS, **asked, **({"pipeline": stages} if stages > 1 else {}))


def step(ranks: int, stages: int) -> Step:
    """Estimate one token of every row, with as many micro-batches as stages."""
    made = planned(ranks, stages)
    each: RankPlan | Plan = made.tensor_parallel or made
    assert made.cache_bytes is not None and each.weights_bytes is not None and each.cache_bytes is not None
    weights, cache = each.weights_bytes, each.cache_bytes
    if made.pipeline is not None:
        fullest: StagePlan = made.pipeline
        weights, cache = fullest.weights_bytes[fullest.fullest], fullest.cache_bytes[fullest.fullest]
    # Each micro-batch reads the weights of its stage again, and its rows of the cache.
    turn = (weights + cache / stages) / BANDWIDTH
    sums = 0.0
    if made.tensor_parallel is not None:
        rate, latency = (INSIDE_RATE, INSIDE_LATENCY) if ranks <= INSIDE else (OUTSIDE_RATE, OUTSIDE_LATENCY)
        of_rank = made.tensor_parallel
        # Sums of one micro-batch, which sends its share of the bytes in as many messages.
        sums = (of_rank.messages * latency + of_rank.sent_bytes / stages / rate) / stages
    hop, last = 0.0, 0.0
    if made.pipeline is not None:
        rate, latency = (INSIDE_RATE, INSIDE_LATENCY) if ranks * stages <= INSIDE else (OUTSIDE_RATE, OUTSIDE_LATENCY)
        hop = latency + made.pipeline.sent_bytes / stages / rate
        # The logits are sent once.
        last = latency + made.pipeline.logits_bytes / rate
    turns, busy = 2 * stages - 1, stages
    return Step(busy * turn, busy * sums, turns * hop + last, (turns - busy) * (turn + sums), weights + cache)


def rows_of_splits() -> Iterator[str]:
    """Return the lines of a table."""
    for devices, splits in SPLITS.items():
        for ranks, stages in splits:
            found, replicas = step(ranks, stages), devices // (ranks * stages)
            fits = "" if found.held <= MEMORY else " (does not fit)"
            yield (
                f"| {devices} | {ranks} | {stages} | {replicas} | {found.held / 1e9:.0f}{fits} "
                f"| {found.memory * 1e3:.1f} | {found.sums * 1e3:.1f} | {found.stages * 1e3:.1f} "
                f"| {found.idle * 1e3:.1f} | {found.seconds * 1e3:.1f} | {replicas * ROWS / found.seconds:,.0f} |"
            )


def rows_of_contexts() -> Iterator[str]:
    """Return one row of the small model, whose slots are split over devices that each have all weights."""
    heads, dim, layers = SMALL.num_attention_heads, SMALL.head_dim, SMALL.num_hidden_layers
    for tokens in (131072, 1 << 20):
        whole = plan(SMALL, tokens)
        assert whole.weights_bytes is not None and whole.cache_bytes is not None
        for devices in (1, 8, 64):
            held = whole.weights_bytes + whole.cache_bytes / devices
            # Per layer: largest scores, then sums and weighted values, in float32; an all-reduce takes twice its bytes.
            sent = 0 if devices == 1 else 2 * layers * heads * (dim + 2) * 4
            rate, latency = (INSIDE_RATE, INSIDE_LATENCY) if devices <= INSIDE else (OUTSIDE_RATE, OUTSIDE_LATENCY)
            merge = 0.0 if devices == 1 else 2 * layers * latency + sent / rate
            fits = "" if held <= MEMORY else " (does not fit)"
            yield (
                f"| {tokens:,} | {devices} | {held / 1e9:.0f}{fits} | {held / BANDWIDTH * 1e3:.1f} "
                f"| {merge * 1e3:.1f} | {(held / BANDWIDTH + merge) * 1e3:.1f} |"
            )


def main() -> None:
    """Print both tables in Markdown."""
    headers = (
        "devices",
        "ranks",
        "stages",
        "replicas",
        "GB stored",
        "memory",
        "sums",
        "sends",
        "idle",
        "step",
        "tokens/s",
    )
    print(f"| {' | '.join(headers)} |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    print(*rows_of_splits(), sep="\n")
    print("\n| tokens | devices | GB stored | memory | merge | step, ms |")
    print("|---|---|---|---|---|---|")
    print(*rows_of_contexts(), sep="\n")


if __name__ == "__main__":
    main()
