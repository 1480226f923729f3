"""What transformers' own static caches make of the zoo: the same models, tokens and tolerance, none of this package.

`static_cache`: the model in eager mode over `StaticCache`. `exporter`: `TorchExportableModuleForDecoderOnlyLM`, exported
by `torch.export`, fed token by token, as its own `generate` does. `dynamo`: the prefill and decode of `DynamoExporter` in
the loop of the model's own `generate`.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from transformers import (
    EncoderDecoderCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StaticCache,
)
from transformers.exporters.exporter_dynamo import DynamoConfig, DynamoExporter
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


class _Forced(LogitsProcessor):
    """Chooses the tokens of a text whatever the logits are.

    Args:
        ids: int64 [1, length].
    """

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, float("-inf"))
        # Of the token after the last nothing is asked.
        forced[:, self.ids[0, input_ids.shape[1] % self.ids.shape[1]]] = 0
        return forced


def dynamo(
    model: PreTrainedModel, ids: torch.Tensor, inputs: dict[str, torch.Tensor], references: References
) -> tuple[float, str]:
    """See `static_cache`; of a decoder. Its `generate` runs with the exported prefill and decode in the place of its
    forward, after the longest prompt.
    """
    prompt = max(references)
    copied = copy.deepcopy(model)
    asked = GenerationConfig(
        cache_implementation="static", max_cache_len=MAX_CACHE_LEN, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    sample = {"input_ids": ids[:, :prompt], "attention_mask": torch.ones(1, prompt, dtype=torch.int64)}
    made = DynamoExporter().export_for_generation(copied, dict(sample), DynamoConfig(), generation_config=asked)
    asked.update(max_new_tokens=STEPS + 1, output_logits=True, return_dict_in_generate=True)
    original = copied.forward

    @functools.wraps(original)
    def forward(**kwargs: Any) -> Any:
        # Of a model that takes pictures or sound the prefill is cut into pieces; then only decode is the program's.
        runner = made.runners.get("decode" if kwargs["input_ids"].shape[1] == 1 else "prefill")
        if runner is None:
            return original(**kwargs)
        return runner(**{name: given for name, given in kwargs.items() if name in runner.metadata.kwargs})

    copied.forward = forward
    processors = LogitsProcessorList([_Forced(ids)])
    found = copied.generate(**sample, generation_config=asked, logits_processor=processors)
    return _gap(torch.stack([row[0] for row in found.logits]), references[prompt]), f"prompt of {prompt}"


def _gap(found: torch.Tensor, reference: torch.Tensor) -> float:
    difference = (found - reference).abs().max().item()
    return float("inf") if difference != difference else difference
