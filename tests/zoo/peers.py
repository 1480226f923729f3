"""What transformers' own static caches make of the zoo: the same models, tokens and tolerance, none of this package.

`static_cache`: the model in eager mode over `StaticCache`. `exporter`: `TorchExportableModuleForDecoderOnlyLM`, exported
by `torch.export`, fed token by token, as its own `generate` does.
"""

from __future__ import annotations

import copy

import torch
from transformers import EncoderDecoderCache, PreTrainedModel, StaticCache
from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

from .build import PROMPTS, STEPS, encoded, forced_logits
from .shrink import WINDOW

MAX_CACHE_LEN = 64

References = dict[int, torch.Tensor]


def static_cache(
    model: PreTrainedModel, ids: torch.Tensor, inputs: dict[str, torch.Tensor], references: References
) -> tuple[float, str]:
    """Largest |logit difference| over all prompts, and a remark.

    Args:
        ids: int64 [1, length], or [1, length, codebooks].
        inputs: Of the encoder, where there is one.
        references: By prompt length: [STEPS + 1, vocab].
    """
    gaps = {}
    for pieces in PROMPTS:
        encoding = encoded(model, inputs)
        found = forced_logits(model, ids, pieces, _static_cache(model, encoding), encoding)
        gaps[" + ".join(map(str, pieces))] = _gap(found, references[sum(pieces)])
    return max(gaps.values()), "by prompt: " + ", ".join(f"{name}: {gap:.0e}" for name, gap in gaps.items())


def _static_cache(model: PreTrainedModel, encoding: dict) -> StaticCache | EncoderDecoderCache:
    """As `generate(cache_implementation="static")` makes it."""
    config = model.config.get_text_config(decoder=True)
    cache = StaticCache(config=config, max_cache_len=MAX_CACHE_LEN)
    if not encoding:
        return cache
    length = encoding["encoder_outputs"][0].shape[1]
    return EncoderDecoderCache(cache, StaticCache(config=config, max_cache_len=length))


@torch.no_grad()
def exporter(
    model: PreTrainedModel, ids: torch.Tensor, inputs: dict[str, torch.Tensor], references: References
) -> tuple[float, str]:
    """See `static_cache`; of a decoder."""
    copied = copy.deepcopy(model)
    copied.generation_config.update(cache_implementation="static", use_cache=True)
    made = TorchExportableModuleForDecoderOnlyLM(copied, batch_size=1, max_cache_len=MAX_CACHE_LEN)
    position = torch.zeros(1, dtype=torch.int64)
    program = made.export(input_ids=ids[:, :1], cache_position=position, strict=False).module()
    prompts = sorted(references)
    rows = [
        program(input_ids=ids[:, i : i + 1], cache_position=position + i)[0, -1] for i in range(prompts[-1] + STEPS)
    ]
    found = torch.stack(rows)
    gaps = {prompt: _gap(found[prompt - 1 : prompt + STEPS], references[prompt]) for prompt in prompts}
    within = _gap(found[prompts[0] - 1 : WINDOW], references[prompts[0]][: WINDOW - prompts[0] + 1])
    return max(gaps.values()), f"up to position {WINDOW}: {within:.0e}"


def _gap(found: torch.Tensor, reference: torch.Tensor) -> float:
    difference = (found - reference).abs().max().item()
    return float("inf") if difference != difference else difference
