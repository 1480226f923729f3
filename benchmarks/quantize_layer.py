"""Time the rounding of a decoder layer of Llama 3.1 8B to 4 bits: scales of least squared error, and torchao's.

    python benchmarks/quantize_layer.py                # interleaved

Weights are random, in bfloat16. Nanoseconds are per weight: on the clock, and of processors.
"""

from __future__ import annotations

import statistics
import time
from typing import Annotated

import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM

from exportable_cache.models.quantization.quantize import quantize
from exportable_cache.models.quantization.spec import SCALES, Quantization

LAYER = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}


def main(
    repeats: Annotated[int, typer.Option(help="Interleaved rounds.")] = 3,
    threads: Annotated[int, typer.Option(help="Threads of torch; 0 for its default.")] = 0,
) -> None:
    """Time each kind of scales."""
    if threads:
        torch.set_num_threads(threads)
    config = LlamaConfig(**LAYER, num_hidden_layers=1, vocab_size=256, tie_word_embeddings=True)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu").eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.02)
    weights = sum(parameter.numel() for parameter in model.model.layers.parameters() if parameter.dim() == 2)
    found: dict[str, list[tuple[float, float]]] = {scales: [] for scales in SCALES}
    for _ in range(repeats):
        for scales, times in found.items():
            clock, processors = time.perf_counter(), time.process_time()
            quantize(model, Quantization("8da4w", scales=scales))
            times.append((time.perf_counter() - clock, time.process_time() - processors))
    print(f"{weights / 1e6:.0f} million weights, {torch.get_num_threads()} threads, medians of {repeats}")
    for scales, times in found.items():
        clock, processors = (statistics.median(one) / weights * 1e9 for one in zip(*times, strict=True))
        print(f"{scales:12} {clock:5.2f} ns on the clock, {processors:5.2f} ns of processors")


if __name__ == "__main__":
    typer.run(main)
