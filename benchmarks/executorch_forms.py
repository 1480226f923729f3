"""Build what benchmarks/executorch_speed.py compares: two random models, exported to ExecuTorch in several ways.

    python benchmarks/executorch_forms.py FORM MODEL CACHE FOLDER      # run by the benchmark, one process per build

A form writes its files and `run.json`, which says how benchmarks/executorch_worker.py runs them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

LLAMA = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
LLAMA |= {"num_key_value_heads": 4, "vocab_size": 32000, "rms_norm_eps": 1e-6}
GEMMA = {
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
}
GEMMA |= {"head_dim": 256, "vocab_size": 32000, "sliding_window": 512, "query_pre_attn_scalar": 256}
GEMMA |= {"layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2}
#: The smallest models that have every part, for trying the benchmark.
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
TINY |= {"vocab_size": 512, "rms_norm_eps": 1e-6}
TINY_HYBRID = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
TINY_HYBRID |= {"head_dim": 32, "vocab_size": 512, "sliding_window": 64, "query_pre_attn_scalar": 32}
TINY_HYBRID |= {"layer_types": ["sliding_attention", "full_attention"]}

MODELS: dict[str, Callable[[int], PreTrainedModel]] = {
    "llama-110m": lambda cache: LlamaForCausalLM(LlamaConfig(**LLAMA, max_position_embeddings=cache)),
    "gemma3-hybrid": lambda cache: Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA, max_position_embeddings=cache)),
    "llama-tiny": lambda cache: LlamaForCausalLM(LlamaConfig(**TINY, max_position_embeddings=cache)),
    "gemma3-tiny": lambda cache: Gemma3ForCausalLM(Gemma3TextConfig(**TINY_HYBRID, max_position_embeddings=cache)),
}
#: Longest prompt chunk, in the forms that have that setting.
CHUNK = 256


def random_model(name: str, cache: int) -> PreTrainedModel:
    """Return one of `MODELS` in float32, the same at every call."""
    torch.manual_seed(0)
    return MODELS[name](cache).eval()


def ours(name: str, cache: int, folder: Path, **options: str) -> dict:
    """Run `exportable_cache.export` over ExecuTorch's operators, or with more of its options."""
    from exportable_cache import export

    model = random_model(name, cache)
    options = {"prefill_chunk": min(CHUNK, cache), "kernels": "executorch", **options}
    export(model, "executorch", cache, folder / "bundle", verify=False, **options)
    return {"runner": "bundle"}


# Without gradients, because lowering decomposes once more, which torch 2.13 cannot do with them.
@torch.no_grad()
def integration(name: str, cache: int, folder: Path) -> dict:
    """Run transformers' `integrations.executorch`, lowered as its documentation shows, with a dynamic length."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
    from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

    model = random_model(name, cache)
    # Required by it; a model that was not loaded from files has another default.
    model.generation_config.use_cache, model.generation_config.cache_implementation = True, "static"
    module = TorchExportableModuleForDecoderOnlyLM(model, batch_size=1, max_cache_len=cache)
    length = torch.export.Dim("length", max=cache - 1)
    program = module.export(
        input_ids=torch.zeros(1, 3, dtype=torch.int64),
        cache_position=torch.arange(3),
        dynamic_shapes={"input_ids": {1: length}, "cache_position": {0: length}},
    )
    lowered = to_edge_transform_and_lower(
        program, partitioner=[XnnpackPartitioner()], compile_config=EdgeCompileConfig(_check_ir_validity=False)
    )
    with (folder / "program.pte").open("wb") as file:
        lowered.to_executorch().write_to_file(file)
    return {"runner": "stateful", "chunk": min(CHUNK, cache)}


def exporter(name: str, cache: int, folder: Path) -> dict:
    """Run transformers' `ExecutorchExporter`: prefill and decode over a static cache, an input and an output."""
    from transformers import GenerationConfig
    from transformers.exporters.exporter_executorch import ExecutorchConfig, ExecutorchExporter
    from transformers.exporters.utils import decompose_for_generation

    generation = GenerationConfig(cache_implementation="static", max_cache_len=cache, do_sample=False)
    ids = {"input_ids": torch.ones(1, 128, dtype=torch.int64)}
    parts = decompose_for_generation(random_model(name, cache), dict(ids), generation_config=generation)
    torch.save({part: inputs for part, (_, inputs) in parts.items()}, folder / "inputs.pt")
    exported = ExecutorchExporter().export_for_generation(
        random_model(name, cache), dict(ids), ExecutorchConfig(backend="xnnpack"), generation_config=generation
    )
    exported.save_pretrained(folder / "exported")
    return {"runner": "exporter"}


def executorch_llama(name: str, cache: int, folder: Path, *settings: str) -> dict:
    """Run ExecuTorch's Llama export (`executorch.extension.llm.export.export_llm`) with fused operators."""
    sizes = {"llama-110m": LLAMA, "llama-tiny": TINY}[name]
    params = {
        "dim": sizes["hidden_size"],
        "hidden_dim": sizes["intermediate_size"],
        "n_layers": sizes["num_hidden_layers"],
        "n_heads": sizes["num_attention_heads"],
        "n_kv_heads": sizes["num_key_value_heads"],
        "vocab_size": sizes["vocab_size"],
        "norm_eps": sizes["rms_norm_eps"],
        "rope_theta": 10000.0,
        "multiple_of": 1,
    }
    (folder / "params.json").write_text(json.dumps(params))
    command = [sys.executable, "-m", "executorch.extension.llm.export.export_llm", "base.model_class=llama2"]
    command += [f"base.params={folder / 'params.json'}", "model.use_kv_cache=True", "model.use_sdpa_with_kv_cache=True"]
    command += ["backend.xnnpack.enabled=True", "model.dtype_override=fp32", f"export.max_context_length={cache}"]
    # It takes one token less than this at once.
    command += [
        f"export.max_seq_length={min(CHUNK, cache) + 1}",
        "export.output_name=program.pte",
        "hydra.run.dir=.",
        *settings,
    ]
    # The folder's name must not end in "executorch", because the model factory (1.4.1) then imports `examples`, a
    # package that does not exist under that name.
    work = folder / "work"
    work.mkdir()
    subprocess.run(command, cwd=work, check=True)
    (work / "program.pte").rename(folder / "program.pte")
    return {"runner": "forward", "chunk": min(CHUNK, cache)}


def executorch_int8(name: str, cache: int, folder: Path) -> dict:
    """Run ExecuTorch's Llama export with its quantized cache."""
    return executorch_llama(name, cache, folder, "model.quantize_kv_cache=True")


def executorch_8da4w(name: str, cache: int, folder: Path) -> dict:
    """Run ExecuTorch's Llama export with 4-bit weights in groups of 32."""
    return executorch_llama(name, cache, folder, "quantization.qmode=8da4w", "quantization.group_size=32")


def eager(name: str, cache: int, folder: Path) -> dict:
    """Use transformers' eager model with `DynamicCache`, which needs no build."""
    return {"runner": "eager"}


#: Title and builder by name.
FORMS: dict[str, tuple[str, Callable[[str, int, Path], dict]]] = {
    "ours": ("ours", ours),
    "ours-int8": ("ours, int8 cache", partial(ours, kv_dtype="int8")),
    "ours-8da4w": ("ours, 8da4w", partial(ours, quantize="8da4w")),
    "executorch": ("ExecuTorch's own Llama export", executorch_llama),
    "executorch-int8": ("ExecuTorch's own, int8 cache", executorch_int8),
    "executorch-8da4w": ("ExecuTorch's own, 8da4w", executorch_8da4w),
    "integration": ("transformers `integrations.executorch`", integration),
    "exporter": ("transformers `ExecutorchExporter`, static cache", exporter),
    "eager": ("transformers eager, `DynamicCache`", eager),
}


def serves(form: str, name: str) -> bool:
    """Return True if a form can export a model at all."""
    return not form.startswith("executorch") or name.startswith("llama")


def main() -> None:
    """Build one form; output goes to the caller's log."""
    form, name, cache, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    run = FORMS[form][1](name, cache, folder)
    (folder / "run.json").write_text(json.dumps({**run, "model": name, "cache": cache}))


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    main()
