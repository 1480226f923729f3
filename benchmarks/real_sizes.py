"""Export models of published sizes: seconds by stage, peak memory, file size, and the speed of the bundle.

    python benchmarks/real_sizes.py qwen3-0.6b llama-3.2-1b          # or all of them, without names
    python benchmarks/real_sizes.py qwen3-0.6b --recipe fast         # native operators, 8-bit keys and values

Checkpoints are written first: random weights in bfloat16 with the published shapes, one tensor at a time, in shards as
on the hub. Each is exported in its own process, to ExecuTorch with 4-bit weights, 8-bit embeddings and a cache of 2048
tokens, including verification; another process opens the bundle and times it. Results go into a JSON file, one entry
per model, and `--table` prints a Markdown table of it.

Memory is the process's anonymous memory (`RssAnon` in /proc, Linux only), because the system may drop mapped pages of
the checkpoint at any time. The peak resident memory, which includes them, is given as well.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

CACHE = 2048
QUANTIZED = {"quantize": "8da4w"}
#: Bytes of a shard, as on the hub.
SHARD = 5_000_000_000

_QWEN3 = {"model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rope_theta": 1e6}
_LLAMA3 = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 5e5}
#: Fields of each config: the published shapes.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **_QWEN3,
        **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
        "tie_word_embeddings": True,
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text",
        **{"hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4},
        **{"num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "sliding_window": 512},
        **{"query_pre_attn_scalar": 256, "tie_word_embeddings": True},
    },
    "llama-3.2-1b": {
        **_LLAMA3,
        **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
        "tie_word_embeddings": True,
    },
    "qwen3-4b": {
        **_QWEN3,
        **{"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        **_LLAMA3,
        **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
        "tie_word_embeddings": False,
    },
}


def write_checkpoint(name: str, folder: Path) -> None:
    """Write random weights in bfloat16, with the usual initial spread, unless the folder exists."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    if (folder / "model.safetensors.index.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    fields = dict(MODELS[name])
    config = AutoConfig.for_model(fields.pop("model_type"), max_position_embeddings=32768, **fields)
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if config.tie_word_embeddings else set()
    shards: list[dict[str, Any]] = [{}]
    index, size = {}, 0
    for key, tensor in model.state_dict().items():
        if key in tied:
            continue
        if size + tensor.nbytes > SHARD:
            save_file(shards[-1], folder / f"model-{len(shards):05}.safetensors", {"format": "pt"})
            shards[-1].clear()
            shards.append({})
            size = 0
        is_norm = tensor.dim() == 1
        values = torch.empty(tensor.shape, dtype=torch.bfloat16)
        values.fill_(0.0 if "gemma" in name else 1.0) if is_norm else values.normal_(0.0, 0.02, generator=generator)
        shards[-1][key], index[key] = values, f"model-{len(shards):05}.safetensors"
        size += tensor.nbytes
    save_file(shards[-1], folder / f"model-{len(shards):05}.safetensors", {"format": "pt"})
    document = {"metadata": {}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


class Stages:
    """Seconds and peak memory of each stage of an export."""

    def __init__(self) -> None:
        self.stages: list[dict[str, Any]] = []
        self._since = time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        if not self.stages or self.stages[-1]["stage"] != stage:
            self._close()
            self.stages.append({"stage": stage, "peak_bytes": anonymous_bytes()})

    def closed(self) -> list[dict[str, Any]]:
        self._close()
        return self.stages

    def _close(self) -> None:
        now = time.monotonic()
        if self.stages:
            self.stages[-1]["seconds"] = now - self._since
        self._since = now

    def _watch(self) -> None:
        while True:
            if self.stages:
                self.stages[-1]["peak_bytes"] = max(self.stages[-1]["peak_bytes"], anonymous_bytes())
            time.sleep(0.1)


def export_one(checkpoint: Path, bundle: Path, recipe: str = "") -> dict[str, Any]:
    """Export a model by a recipe, or to 4 bits without one, in a process of its own; the import is included."""
    start = time.monotonic()
    from exportable_cache import export

    stages = Stages()
    options = {"recipe": recipe} if recipe else QUANTIZED
    made = export(checkpoint, max_cache_len=CACHE, output_dir=bundle, overwrite=True, progress=stages, **options)
    found = stages.closed()
    return {
        "seconds": time.monotonic() - start,
        "processor_seconds": time.process_time(),
        "stages": found,
        "peak_bytes": max(stage["peak_bytes"] for stage in found),
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "file_bytes": (bundle / "program.pte").stat().st_size,
        "cache_bytes": made.manifest.cache_bytes,
        "verification": {key: made.manifest.verification[key] for key in ("max_difference", "tolerance", "steps")},
    }


def run_one(bundle: Path) -> dict[str, Any]:
    """Open a bundle in a process of its own: seconds to the first token, and speeds."""
    import torch

    imported = time.process_time()
    from exportable_cache import load
    from exportable_cache.pipeline.bench import bench

    session = load(bundle)
    session.prefill(torch.randint(3, 1000, (1, 16)))
    first = time.process_time()
    report = bench(session, positions=[100, CACHE - 64], steps=16, prompt_length=128)
    return {
        "import_torch_seconds": imported,
        "first_token_seconds": first,
        "prefill_tokens_per_second": report.prefill_tokens_per_second,
        "decode_ms": {timing.position: timing.median_ms for timing in report.decode},
        "peak_bytes": anonymous_bytes(),
    }


def processor() -> str:
    """Return the processor's name, and whether it has AVX-512."""
    from exportable_cache.common.native.machine_code import instructions, processor_name

    return f"{processor_name()}, {'AVX-512' if 'avx512f' in instructions() else 'no AVX-512'}"


def table(results: dict[str, Any]) -> Iterator[str]:
    """Return the results as a Markdown table."""
    yield "| model | export, s | quantise / lower / verify | peak, GB | file, MB | cache, MB | prefill | ms @100 |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, result in results.items():
        export, run = result["export"], result["run"]
        seconds = [
            sum(stage["seconds"] for stage in export["stages"] if stage["stage"].startswith(word))
            for word in ("quantising", "lowering", "verifying")
        ]
        sizes = [export[key] / 1e6 for key in ("file_bytes", "cache_bytes")]
        yield (
            f"| {name} | {export['seconds']:.0f} | {' / '.join(f'{one:.0f}' for one in seconds)} "
            f"| {export['peak_bytes'] / 1e9:.1f} | {sizes[0]:.0f} | {sizes[1]:.0f} "
            f"| {run['prefill_tokens_per_second']:.0f} | {run['decode_ms']['100']:.0f} |"
        )


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Model names; all by default.")] = None,
    folder: Annotated[Path, typer.Option(help="Folder of checkpoints and bundles.")] = Path("artifacts/real-sizes"),
    results: Annotated[Path, typer.Option(help="JSON, added to.")] = Path("docs/real_sizes.json"),
    show: Annotated[bool, typer.Option("--table", help="Print the table and measure nothing.")] = False,
    recipe: Annotated[str, typer.Option(help="Recipe of the exports; 8da4w without one.")] = "",
    child: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Export, open and time models of true size."""
    if child:
        (name,) = names
        places = (folder / name / "checkpoint", folder / name / "bundle")
        print(json.dumps(export_one(*places, recipe) if child == "export" else run_one(places[1])))
        return
    found = json.loads(results.read_text()) if results.is_file() else {}
    if not show:
        for name in names or MODELS:
            write_checkpoint(name, folder / name / "checkpoint")
            measured: dict[str, Any] = {"processor": processor()}
            for what in ("export", "run"):
                command = [sys.executable, __file__, name, "--folder", str(folder), "--child", what]
                command += ["--recipe", recipe]
                printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                measured[what] = json.loads(printed.splitlines()[-1])
            found[f"{name} {recipe}".strip()] = measured
            results.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(table(json.loads(json.dumps(found)))))


if __name__ == "__main__":
    typer.run(main)
