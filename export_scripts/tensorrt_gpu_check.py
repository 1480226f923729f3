"""On a machine with an NVIDIA GPU: build a TensorRT bundle, run it, compare every step with the model, look at the aliasing, time it.

python export_scripts/tensorrt_gpu_check.py demo artifacts/demo-tensorrt
python export_scripts/tensorrt_gpu_check.py Qwen/Qwen3-0.6B artifacts/qwen-tensorrt --dtype float16 --max-cache-len 4096

It ends with "all checks passed", or with the first check that failed and exit code 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from importlib import metadata

import torch
from transformers import DynamicCache, PreTrainedModel

from exportable_cache import ExportableCache, Session, export, load
from exportable_cache.backends.tensorrt.capabilities import CAPABILITIES
from exportable_cache.backends.tensorrt.engine_runner import EngineRunner
from exportable_cache.models import load_model
from exportable_cache.verify import verify_session

WARM_UP = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="demo, a local folder, or a hub id")
    parser.add_argument("output", help="folder of the bundle")
    parser.add_argument("--dtype", default=None, choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--max-cache-len", type=int, default=512)
    parser.add_argument("--prompt-length", type=int, default=64, help="tokens before the timed ones")
    parser.add_argument("--tokens", type=int, default=128, help="decode steps to time")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no NVIDIA GPU here; on a machine without one, export and verify check the networks on the CPU")

    major, minor = torch.cuda.get_device_capability()
    capability = 10 * major + minor
    versions = [f"torch {torch.__version__}"]
    for name in ("torch-tensorrt-rtx", "tensorrt-rtx", "torch-tensorrt", "tensorrt"):
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    print(f"{torch.cuda.get_device_name()}, SM {capability}; {', '.join(versions)}")

    # For this GPU where TensorRT names it, portable otherwise: whether that loads here is then one of the answers.
    options = {"sm": capability} if capability in CAPABILITIES else {}
    model = load_model(arguments.model, arguments.dtype).model
    export(model, "tensorrt", arguments.max_cache_len, arguments.output, dtype=None, overwrite=True, verify=False, **options)
    session = load(arguments.output)
    runner = session.runner
    assert isinstance(runner, EngineRunner)
    model = model.cuda()

    report = verify_session(session, model)
    print(f"step by step against eager: {report}")
    _check(report.passed, "the engines compute what the model computes")
    _check_aliases(session, runner)

    ids = torch.randint(model.config.vocab_size, (1, arguments.prompt_length + arguments.tokens + WARM_UP), device="cuda")
    print(f"\ndecode after {arguments.prompt_length} tokens, batch 1, {str(model.dtype).removeprefix('torch.')}:")
    cache = lambda: ExportableCache.from_model(model, arguments.max_cache_len)  # noqa: E731  a fresh one per way
    ways: dict[str, Callable[[], Callable[[torch.Tensor], object]]] = {
        "eager, DynamicCache": lambda: _eager(model, ids[:, : arguments.prompt_length]),
        "torch.compile": lambda: _prefilled(
            Session.from_model(model, cache(), compile=True, mode="default"), ids, arguments.prompt_length
        ),
        "torch.compile, CUDA graph": lambda: _prefilled(
            Session.from_model(model, cache(), compile=True, mode="reduce-overhead"), ids, arguments.prompt_length
        ),
        "TensorRT, CUDA graph": lambda: _prefilled(session, ids, arguments.prompt_length),
    }
    for name, make in ways.items():
        print(f"  {name:28s} {_tokens_per_second(make(), ids[0, arguments.prompt_length :]):8.1f} tokens/s")
    print("\nall checks passed")


def _check(holds: bool, what: str) -> None:
    print(f"{'ok' if holds else 'FAILED'}: {what}")
    if not holds:
        sys.exit(1)


def _check_aliases(session: Session, runner: EngineRunner) -> None:
    """The engine says that outputs alias inputs, and a step writes one slot of each cache and nothing else."""
    for method, record in runner.records.items():
        engine = runner._contexts[method].engine
        said = {output: engine.get_aliased_input_tensor(output) for output in record.aliases}
        _check(said == record.aliases, f"the engine of {method!r} aliases what the manifest says ({len(said)} tensors)")
    session.reset()
    session.prefill(torch.tensor([[1, 2, 3]], device=session.device))
    addresses = {name: tensor.data_ptr() for name, tensor in runner.state.items()}
    before = {name: tensor.clone() for name, tensor in runner.state.items()}
    session.decode(torch.tensor([4], device=session.device))
    torch.cuda.synchronize()
    changed = {name: (tensor != before[name]).any(-1).any(1)[0].nonzero().flatten().tolist() for name, tensor in runner.state.items()}
    _check(all(slots == [3] for slots in changed.values()), "a decode step wrote slot 3 of every cache, and nothing else")
    _check(addresses == {name: tensor.data_ptr() for name, tensor in runner.state.items()}, "the caches stayed where they were")
    session.reset()


def _eager(model: PreTrainedModel, prompt: torch.Tensor) -> Callable[[torch.Tensor], object]:
    cache = DynamicCache(config=model.config)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        model(prompt, past_key_values=cache)

    @torch.no_grad()
    def step(token: torch.Tensor) -> object:
        return model(token[:, None], past_key_values=cache).logits

    return step


def _prefilled(session: Session, ids: torch.Tensor, length: int) -> Callable[[torch.Tensor], object]:
    session.reset()
    session.prefill(ids[:, :length])
    return session.decode


def _tokens_per_second(step: Callable[[torch.Tensor], object], tokens: torch.Tensor) -> float:
    for token in tokens[:WARM_UP]:
        step(token[None])
    torch.cuda.synchronize()
    start = time.perf_counter()
    for token in tokens[WARM_UP:]:
        step(token[None])
    torch.cuda.synchronize()
    return (len(tokens) - WARM_UP) / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
