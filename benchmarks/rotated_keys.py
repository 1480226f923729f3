"""Compare keys and values in 4 bits, with and without a rotation before they are rounded, with 8 bits.

    python benchmarks/rotated_keys.py

A random rotation (signs, then a Hadamard matrix) spreads large channels over all channels of a head, as QuaRot
(arXiv 2404.00456) and TurboQuant (arXiv 2504.19874) do. Queries are rotated alike, so in exact arithmetic nothing
changes. Here keys and values are rotated, rounded and rotated back before eager attention reads them.

Distance: root mean square difference of the logits, divided by their standard deviation.
"""

from __future__ import annotations

import math

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig, LlamaForCausalLM

from exportable_cache.demo import demo_path

TEXT = "the code of {} is {}. the quiet farmer slept near the garden. it took about 12 days. "
#: Bits, whether rows are rotated, and how many channels share a scale (None: those of a head).
FORMS = {
    "8 bits": (8, False, None),
    "4 bits": (4, False, None),
    "4 bits, rotated": (4, True, None),
    "4 bits, a scale per 16 channels": (4, False, 16),
    "4 bits, rotated, a scale per 16 channels": (4, True, 16),
}


def rotation(size: int) -> torch.Tensor:
    """Return random signs times a Hadamard matrix, [size, size], orthonormal; the size is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.randint(2, (size,), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    return signs[:, None] * matrix / math.sqrt(size)


def rounded(rows: torch.Tensor, bits: int, rotated: bool, group: int | None) -> torch.Tensor:
    """Return keys or values [batch, heads, tokens, head_dim] after they were rounded."""
    size = rows.shape[-1]
    turn = rotation(size) if rotated else torch.eye(size)
    groups = (rows @ turn).unflatten(-1, (-1, group or size))
    most = 2 ** (bits - 1) - 1
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-12) / most
    return ((groups / scale).round() * scale).flatten(-2) @ turn.T


class RoundedCache(DynamicCache):
    """A cache whose keys and values are rounded when they are written."""

    def __init__(self, config: LlamaConfig, form: tuple[int, bool, int | None]) -> None:
        super().__init__(config=config)
        self._form = form

    def update(self, keys: torch.Tensor, values: torch.Tensor, *rest, **more) -> tuple[torch.Tensor, torch.Tensor]:
        """Round, and continue as `DynamicCache` does."""
        return super().update(rounded(keys, *self._form), rounded(values, *self._form), *rest, **more)


@torch.no_grad()
def compare(title: str, model: torch.nn.Module, ids: torch.Tensor) -> None:
    """Print a table of all forms for one model and one prompt, int64 [1, tokens]."""
    exact = model(ids, past_key_values=DynamicCache(config=model.config)).logits
    print(f"\n{title}, {ids.shape[1]} tokens\n\n| keys and values | distance | same choice |\n|---|---|---|")
    for name, form in FORMS.items():
        logits = model(ids, past_key_values=RoundedCache(model.config, form)).logits
        distance = (logits - exact).pow(2).mean().sqrt() / exact.std()
        same = (logits.argmax(-1) == exact.argmax(-1)).float().mean()
        print(f"| {name} | {distance:.1e} | {same:.1%} |")


def main() -> None:
    """Compare with the trained demo model, and with a random Llama whose keys have large channels."""
    demo = AutoModelForCausalLM.from_pretrained(demo_path()).eval()
    text = "".join(
        TEXT.format(word, 1000 + 377 * index) for index, word in enumerate("amber walnut tiger comet".split())
    )
    compare("The demo model", demo, AutoTokenizer.from_pretrained(demo_path())(text, return_tensors="pt").input_ids)
    torch.manual_seed(0)
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=4, head_dim=64, vocab_size=8000)).eval()
    for layer in model.model.layers:
        for projection, factor in ((layer.self_attn.k_proj, 8.0), (layer.self_attn.q_proj, 1 / 8)):
            heads = projection.weight.data.unflatten(0, (-1, 64))
            heads[:, [5, 37]] *= factor
    compare("A random Llama with two large channels in each head's keys", model, torch.randint(8000, (1, 300)))


if __name__ == "__main__":
    main()
