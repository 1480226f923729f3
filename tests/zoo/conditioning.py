"""How far the reference itself moves where only sums are ordered anew, and models without choices that could tie.

A router or an indexer picks the best few of many. Where two are as good as each other, the order of a sum decides, and
so does anything else that computes the same: no program can be compared with such a reference.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from exportable_cache.models.quantized_rows import is_quantized

from .architectures import Architecture
from .build import initialised
from .shrink import tiny_config

#: In float32: the tolerance of every target.
TOLERANCE = 1e-4
#: Roundings (half an epsilon) of its largest logit by which a sound reference in half precision moves at most, where
#: every weight moves by one. Most models move by about 10; a tie that breaks the other way makes it 50 to 1000.
MOST_MOVED = 40
#: Of a model that chooses nothing, and so cannot tie: Gemma 4's decoder and Zamba 2 move by 40 to 80.
MOST_MOVED_SMOOTHLY = 100
#: Ways to nudge the weights: a tie that one leaves alone shows in another. Near ties are rare in float32.
NUDGES = {torch.float32: 2, torch.bfloat16: 6, torch.float16: 6}
#: Config fields that say how many are chosen, and those that say of how many.
CHOSEN = "num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k top_k_experts expert_top_k".split()
CHOICES = "num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts".split()
#: Keys that an indexer chooses, or the blocks it does; more than any test feeds, so that it chooses all.
INDEXED = "index_topk indexer_budget index_topk_blocks".split()
ALL_KEYS = 64


def tolerance(dtype: torch.dtype, moved: float) -> float:
    """Largest |logit difference| to a reference that was computed in `dtype` and moves by `moved` under `nudged`
    weights: in half precision as much as that, as two ways to sum differ by the rounding of every sum.
    """
    return TOLERANCE if dtype == torch.float32 else moved


def is_sound(dtype: torch.dtype, reference: torch.Tensor, moved: float, chooses: bool = True) -> bool:
    """Whether a reference, float32 [rows, vocab], that moves this far can be compared with.

    Args:
        chooses: Whether the model has a router or an indexer.
    """
    if dtype == torch.float32:
        return moved <= TOLERANCE
    most = MOST_MOVED if chooses else MOST_MOVED_SMOOTHLY
    return moved <= most * torch.finfo(dtype).eps / 2 * float(reference.abs().max())


@torch.no_grad()
def movement(model: PreTrainedModel, reference_of: Callable[[PreTrainedModel], torch.Tensor]) -> float:
    """Largest |logit difference| of a model to itself with `nudged` weights, of `NUDGES` ways to nudge them."""
    reference = reference_of(model)
    gaps = [(reference_of(nudged(model, seed)) - reference).abs().max().item() for seed in range(NUDGES[model.dtype])]
    return max(gap if gap == gap else float("inf") for gap in gaps)


@torch.no_grad()
def nudged(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """A copy, each weight one unit in its last place larger or smaller, except quantised ones: what rounding alone may
    make of a sum.
    """
    copied, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for parameter in copied.parameters():
        if parameter.is_floating_point() and not is_quantized(parameter):
            # A little more than the largest rounding, which is never rounded away.
            change = 1.01 * torch.finfo(parameter.dtype).eps / 2
            signs = torch.randint(0, 2, parameter.shape, generator=generator).double() * 2 - 1
            parameter.copy_((parameter.double() * (1 + change * signs)).to(parameter.dtype))
    return copied


def model_without_choices(architecture: Architecture) -> PreTrainedModel:
    """The tiny model whose router takes every expert, and whose indexer every key: its margin is not to be had larger.

    Raises:
        ValueError: If its config says of no number how many are chosen.
    """
    config = tiny_config(architecture.shrinks, published=architecture.fields)
    if not _choose_all(config):
        raise ValueError(f"{architecture.name}: no field of its config says how many experts or keys are chosen")
    return initialised(architecture, config)


def has_choices(architecture: Architecture) -> bool:
    """Whether `model_without_choices` has one of this architecture."""
    return _choose_all(tiny_config(architecture.shrinks, published=architecture.fields))


def _choose_all(config: PreTrainedConfig) -> bool:
    """Whether a field was found, here or in a config inside."""
    inner = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    found = [_choose_all(one) for one in inner]
    choices = [value for name in CHOICES if isinstance(value := getattr(config, name, None), int)]
    zeros = getattr(config, "zero_expert_num", None) or 0
    for name in CHOSEN:
        if choices and isinstance(getattr(config, name, None), int):
            setattr(config, name, max(choices) + zeros)
            found.append(True)
    for name in INDEXED:
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, ALL_KEYS)
            found.append(True)
    return any(found)
