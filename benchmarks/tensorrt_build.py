"""Measure the time and memory that TensorRT takes to build both methods of a model, on a machine without a GPU.

python benchmarks/tensorrt_build.py --layers 12 --hidden 896
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from exportable_cache import export


def main() -> None:
    """Print the time and memory of each build."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--max-cache-len", type=int, default=2048)
    parser.add_argument("--sm", default=None, help="compute capabilities, such as 80,89")
    parser.add_argument("--quantize", default=None, help="8w, 4w or fp8; float16 by default")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=arguments.hidden,
        intermediate_size=3 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=2,
        max_position_embeddings=arguments.max_cache_len,
        dtype=torch.float16,
    )
    model = LlamaForCausalLM(config).half().eval()
    size = sum(parameter.nbytes for parameter in model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        start, used = time.perf_counter(), time.process_time()
        options = {name: getattr(arguments, name) for name in ("sm", "quantize") if getattr(arguments, name)}
        bundle = export(
            model, "tensorrt", arguments.max_cache_len, os.path.join(folder, "bundle"), verify=False, **options
        )
        wall, cpu = time.perf_counter() - start, time.process_time() - used
        stored = bundle.manifest.weights_bytes
        plans = {name: file.bytes for name, file in bundle.manifest.files.items() if name.endswith(".plan")}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"weights {size / 1e6:.0f} MB in float16, {stored / 1e6:.0f} MB stored, {arguments.layers} layers")
    print(f"{', '.join(f'{name} {size / 1e6:.0f} MB' for name, size in plans.items())}")
    print(
        f"built in {wall:.0f} s ({cpu:.0f} s of processor time), peak memory {peak / 1e9:.1f} GB, of it the "
        f"model {size / 1e9:.1f}"
    )


if __name__ == "__main__":
    main()
