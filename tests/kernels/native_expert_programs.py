"""Programs whose experts are native operators, on the compiled kernels; run by `native_programs`."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from exportable_cache import export
from exportable_cache.backends.executorch.lowering.lower import lower_programs
from exportable_cache.backends.executorch.native.experts import pack_experts
from exportable_cache.common.compat.executorch import load_program

from ..support.models import tiny_model
from .native_linear_programs import packed_of

#: Of weights.
KINDS = ("4bit", "float", "bfloat16", "float16")
EXPERTS, CHOICES = 5, 3
INPUTS, OUTPUTS = 96, 40
#: Experts, a prompt's count of tokens -> the experts that are chosen.
CHOSEN = {
    "one token": lambda tokens: torch.tensor([[4, 0, 2]]).expand(tokens, -1),
    "any": lambda tokens: torch.randint(EXPERTS, (tokens, CHOICES), generator=torch.Generator().manual_seed(tokens)),
    "never the last": lambda tokens: torch.arange(tokens * CHOICES).view(tokens, CHOICES) % (EXPERTS - 1),
    "one for all": lambda tokens: torch.full((tokens, CHOICES), 3),
}


def weights_of(kind: str, outputs: int, inputs: int) -> torch.Tensor:
    """Weights of all experts, as an operator has them."""
    generator = torch.Generator().manual_seed(outputs)
    integers = torch.randint(-8, 8, (EXPERTS, outputs, inputs), generator=generator)
    return pack_experts(EXPERTS, lambda expert: packed_of(kind, integers[expert]))


class Experts(torch.nn.Module):
    """For each kind a layer of a token for all its experts, with a bias, and one of each expert's result, summed up."""

    def __init__(self) -> None:
        super().__init__()
        for kind in KINDS:
            self.register_buffer(f"first_{kind}", weights_of(kind, OUTPUTS, INPUTS))
            self.register_buffer(f"second_{kind}", weights_of(kind, 33, 32))
        self.bias = torch.nn.Buffer(torch.randn(EXPERTS, OUTPUTS, generator=torch.Generator().manual_seed(0)))

    def forward(self, source: torch.Tensor, indices: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = []
        for kind in KINDS:
            call = getattr(torch.ops.exportable_cache, f"experts_{kind}")
            inner = call(source, getattr(self, f"first_{kind}"), self.bias, indices, None, OUTPUTS)
            rows = inner[..., :32].contiguous()
            results += [inner, call(rows, getattr(self, f"second_{kind}"), None, indices, factors, 33)]
        return tuple(results)


def check_operators(path: Path) -> None:
    """The kernels and the plain operators, over prompts and single tokens; indices of no expert are refused."""
    tokens = torch.export.Dim("tokens", min=1, max=40)
    experts = Experts()
    given = (torch.randn(7, INPUTS), torch.zeros(7, CHOICES, dtype=torch.int64), torch.randn(7, CHOICES))
    program = torch.export.export(experts, given, dynamic_shapes=({0: tokens},) * 3)
    path.write_bytes(lower_programs({"forward": program}).buffer)
    method = load_program(path).load_method("forward")
    for count in (1, 2, 13, 40):
        for chosen in CHOSEN.values():
            generator = torch.Generator().manual_seed(count)
            source, factors = (torch.randn(count, size, generator=generator) for size in (INPUTS, CHOICES))
            given = (source + 1, chosen(count).contiguous(), factors)
            for found, expected in zip(method(given), experts(*given), strict=True):
                # A sum that is off by its last bit is rounded to the next number of 8 bits at times.
                near = (found - expected).abs() <= 1e-3 + 1e-4 * expected.abs()
                assert near.float().mean() > 0.995, (count, (found - expected).abs().max())
    for wrong in (EXPERTS, -1, 2**62, -(2**63)):
        given[1][-1, -1] = wrong
        try:
            method(given)
        except RuntimeError:
            continue
        raise AssertionError(f"expert {wrong} of {EXPERTS} was not refused")


#: Tiny models of the architectures that differ in how experts are stored.
MODELS = {
    "mixtral": {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def check_model(family: str, quantize: str | None, folder: Path, layers: int = 1) -> None:
    """A whole model, which the export compares with the eager model of the same weights, step by step."""
    fields = {**MODELS[family], "num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    model = tiny_model(family, torch.bfloat16, **fields)
    export(model, "executorch", 64, folder, quantize=quantize, linears="native", prefill_chunk=13)
    manifest, data = json.loads((folder / "manifest.json").read_text()), (folder / "program.pte").read_bytes()
    assert manifest["verification"]["passed"]
    kind = "bfloat16" if quantize is None else "4bit"
    assert f"exportable_cache::experts_{kind}".encode() in data
    # Nothing else stores experts: besides the weights, the graph, and the padding of tensors.
    assert manifest["weights_bytes"] <= len(data) < manifest["weights_bytes"] + 40_000 * (1 + layers), len(data)
    if quantize is not None:
        assert manifest["quantization"]["experts"] == quantize and not manifest["remarks"], manifest["remarks"]


@torch.no_grad()
def check_experts(folder: Path) -> None:
    """The operators alone, and one model of 4 bits, whose equal layers are lowered once."""
    check_operators(folder.with_name("experts.pte"))
    check_model("qwen3_moe", "8da4w", folder, layers=4)


@torch.no_grad()
def check_mixtures(folder: Path) -> None:
    """The other models, and 16 bits."""
    check_model("mixtral", "8da4w", folder)
    check_model("gpt_oss", "8da4w", folder.with_name("gpt_oss"))
    check_model("gpt_oss", None, folder.with_name("gpt_oss-16"))
    check_model("qwen3_moe", None, folder.with_name("qwen3_moe-16"))
