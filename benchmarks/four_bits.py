"""Measure what 4-bit weights do to a trained model, by the method that chooses the scales of their groups.

    python benchmarks/four_bits.py                         # the demo model, on questions of its task
    python benchmarks/four_bits.py --encoder FOLDER        # a trained encoder, on sentences
    python benchmarks/four_bits.py --calibrate             # the demo model with GPTQ, calibrated on other questions
    python benchmarks/four_bits.py --parts FOLDER          # what each part of 8da4w does to a causal model, alone

One model gives one number, which chance moves by a third. So columns are permuted randomly before they are grouped, and
back after it: each draw is another grouping of the same weights. Linear layers except the head are rounded. Activations
are not, because that has almost no effect (see `--parts`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from exportable_cache.demo import demo_path
from exportable_cache.demo.task import make_question
from exportable_cache.models.quantization.calibration import round_groups, round_with_feedback
from exportable_cache.models.rounding import rounded_activations

GROUP = 32
SENTENCES = (
    "The cache holds keys and values of every token.",
    "A quick brown fox jumps over the lazy dog near the river bank.",
    "Stock prices fell sharply after the central bank raised rates.",
    "How do I bake bread at home?",
    "He went to the doctor because of a persistent cough.",
    "It rained all day in the mountains, and the roads were closed.",
)
Way = Callable[[torch.Tensor], torch.Tensor]


def absmax(weight: torch.Tensor) -> torch.Tensor:
    """Scale by the largest magnitude over 7.5."""
    grouped = weight.reshape(-1, GROUP)
    scales = (grouped.abs().amax(-1, keepdim=True) / 7.5).bfloat16().float()
    return ((grouped / scales).round().clamp(-8, 7) * scales).view(weight.shape)


def hqq(weight: torch.Tensor) -> torch.Tensor:
    """Scale by torchao's `hqq_scale_only`, as ExecuTorch's export does."""
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.quant_api import Int8DynamicActivationIntxWeightConfig, quantize_

    layer = nn.Linear(1, 1, bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    config = Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4,
        weight_granularity=PerGroup(GROUP),
        weight_scale_dtype=torch.bfloat16,
        intx_choose_qparams_algorithm="hqq_scale_only",
    )
    quantize_(layer, config, lambda *_: True)
    return layer.weight.dequantize()


def mse(weight: torch.Tensor, signed: bool = False) -> torch.Tensor:
    """Scale by the squared error, as this package does."""
    integers, scales = round_groups(weight, GROUP, torch.bfloat16, signed)
    return integers * scales.float().repeat_interleave(GROUP, 1)


WAYS: dict[str, Way] = {
    "absmax": absmax,
    "hqq_scale_only": hqq,
    "mse": mse,
    "signed_mse": lambda weight: mse(weight, True),
}


class Distance(NamedTuple):
    """Difference of outputs [tokens, features] from the float model's."""

    rms: float
    divergence: float
    agreement: float

    @classmethod
    def of(cls, found: torch.Tensor, exact: torch.Tensor) -> Distance:
        rms = (found - exact).square().mean().sqrt() / exact.std()
        p, q = exact.log_softmax(-1), found.log_softmax(-1)
        divergence = (p.exp() * (p - q)).sum(-1).mean()
        return cls(rms.item(), divergence.item(), (p.argmax(-1) == q.argmax(-1)).double().mean().item())


def demo() -> tuple[PreTrainedModel, Callable[[], torch.Tensor]]:
    """Return the demo model, and logits of questions with their responses."""
    model, tokenizer = (kind.from_pretrained(demo_path()) for kind in (AutoModelForCausalLM, AutoTokenizer))
    rng = random.Random(5)
    questions = [make_question(rng) for _ in range(24)]
    ids = [tokenizer(one.prompt + one.answer, return_tensors="pt").input_ids for one in questions]
    return model.eval(), lambda: torch.cat([model(one).logits[0] for one in ids]).double()


def encoder(folder: Path) -> tuple[PreTrainedModel, Callable[[], torch.Tensor]]:
    """Return the encoder, and the last hidden states of sentences."""
    model, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModel, AutoTokenizer))
    inputs = tokenizer(list(SENTENCES), return_tensors="pt", padding=True)
    there = inputs.attention_mask.bool()
    return model.eval(), lambda: model(**inputs).last_hidden_state[there].double()


def rounded_layers(model: PreTrainedModel) -> list[nn.Linear]:
    """Return the linear layers that are rounded, without the head."""
    head = model.get_output_embeddings()
    return [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]


def in_another_order(weight: torch.Tensor, way: Way, generator: torch.Generator) -> torch.Tensor:
    """Round a weight with its columns permuted, and permute them back."""
    order = torch.randperm(weight.shape[1], generator=generator)
    result = torch.empty_like(weight)
    result[:, order] = way(weight[:, order].contiguous())
    return result


@torch.no_grad()
def compare(model: PreTrainedModel, outputs: Callable[[], torch.Tensor], draws: int) -> None:
    """Print a row per method: means over the draws, and the standard error of each."""
    layers = rounded_layers(model)
    weights = [layer.weight.data.clone() for layer in layers]
    exact, all_squares = outputs(), sum(weight.square().sum() for weight in weights)
    print("| scales | error of the weights | distance | KL divergence | same argmax |\n|---|---|---|---|---|")
    for name, way in WAYS.items():
        rows = []
        for draw in range(draws):
            generator, squares = torch.Generator().manual_seed(draw), torch.zeros(())
            for layer, weight in zip(layers, weights, strict=True):
                layer.weight.data = in_another_order(weight, way, generator)
                squares += (layer.weight.data - weight).square().sum()
            rows.append([(squares / all_squares).sqrt().item(), *Distance.of(outputs(), exact)])
        means, errors = torch.tensor(rows).mean(0), torch.tensor(rows).std(0) / draws**0.5
        cells = [f"{mean:.2g} ± {error:.1g}" for mean, error in zip(means[1:3], errors[1:3], strict=True)]
        print(f"| `{name}` | {means[0]:.2%} | {' | '.join(cells)} | {means[3]:.1%} |")


def gptq(weight: torch.Tensor, products: torch.Tensor, signed: bool) -> torch.Tensor:
    """Round with error feedback, as `--calibrate` does."""
    rounded = round_with_feedback(weight, GROUP, torch.bfloat16, signed, products)
    assert rounded is not None
    return rounded.integers * rounded.scales.float().repeat_interleave(GROUP, 1)


@torch.no_grad()
def calibrated() -> None:
    """Print a row for each method with and without GPTQ, for the demo model and its own order of columns."""
    (model, outputs), tokenizer = demo(), AutoTokenizer.from_pretrained(demo_path())
    layers = rounded_layers(model)
    weights, exact, rng = [layer.weight.data.clone() for layer in layers], outputs(), random.Random(77)
    products = {layer: torch.zeros(2 * layer.weight.shape[1:], dtype=torch.double) for layer in layers}

    def note(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        rows = inputs[0].flatten(0, -2).double()
        products[layer] += rows.T @ rows

    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    for question in (make_question(rng) for _ in range(64)):
        model(tokenizer(question.prompt + question.answer, return_tensors="pt").input_ids)
    for hook in hooks:
        hook.remove()
    print("| scales | distance | KL divergence | same argmax |\n|---|---|---|---|")
    for signed in (False, True):
        for name in ("`signed_mse`" if signed else "`mse`", "with GPTQ"):
            for layer, weight in zip(layers, weights, strict=True):
                rounded = gptq(weight, products[layer], signed) if name == "with GPTQ" else mse(weight, signed)
                layer.weight.data = rounded
            found = Distance.of(outputs(), exact)
            print(f"| {name} | {found.rms:.3f} | {found.divergence:.5f} | {found.agreement:.1%} |", flush=True)


@torch.no_grad()
def parts(folder: Path) -> None:
    """Print what each part of 8da4w with 8-bit embeddings does alone to a causal model, on random tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (2, 48), generator=generator)
    head, table, layers = model.get_output_embeddings(), model.get_input_embeddings(), rounded_layers(model)
    exact = model(ids).logits.double()

    def row(name: str, changed: list[tuple[nn.Module, Way]], activations: bool = False) -> None:
        before = [module.weight.data for module, _ in changed]
        for module, way in changed:
            module.weight.data = way(module.weight.data)
        rounded = [layer for layer in model.modules() if activations and isinstance(layer, nn.Linear)]
        hooks = [
            layer.register_forward_pre_hook(lambda _, given: (rounded_activations(given[0]),)) for layer in rounded
        ]
        distance = Distance.of(model(ids).logits.double(), exact)
        for hook in hooks:
            hook.remove()
        for (module, _), weight in zip(changed, before, strict=True):
            module.weight.data = weight
        print(f"| {name} | {distance.rms:.3f} |")

    def in_8_bits(weight: torch.Tensor) -> torch.Tensor:
        scales = weight.abs().amax(-1, keepdim=True) / 127.5
        return (weight / scales).round().clamp(-128, 127) * scales

    print("| part | distance |\n|---|---|")
    row("activations in 8 bits", [], activations=True)
    row("table in 8 bits", [(table, in_8_bits)])
    for name, way in WAYS.items():
        of_head = [] if head is None or head.weight is table.weight else [(head, way)]
        row(f"head in 4 bits, `{name}`", of_head)
        row(f"layers in 4 bits, `{name}`", [(layer, way) for layer in layers])
        everything = [(table, in_8_bits), *of_head, *((layer, way) for layer in layers)]
        row(f"all of it, `{name}`", everything, activations=True)


def main(
    draws: Annotated[int, typer.Option(help="Orders of the columns.", min=2)] = 12,
    encoder_folder: Annotated[Path | None, typer.Option("--encoder", help="Folder of a trained encoder.")] = None,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Compare with GPTQ on the demo model.")] = False,
    parts_folder: Annotated[Path | None, typer.Option("--parts", help="Folder of a causal model.")] = None,
) -> None:
    """Print a table."""
    if calibrate:
        calibrated()
    elif parts_folder is not None:
        parts(parts_folder)
    else:
        compare(*(demo() if encoder_folder is None else encoder(encoder_folder)), draws)


if __name__ == "__main__":
    typer.run(main)
