"""Attention as one operator in captured graphs: over the filled slots of a layer, with soft-capping or sinks.

A backend that can compute `EXTENDED_ATTENTION` as a whole finds it in the graph; every other one gets the plain
operators that `functions.py` decomposes it into. Running a bundle imports this file, without transformers' models.

`FILLED_ATTENTION` is attention of few queries over the filled slots, and reads stored keys and values.
`scaled_dot_product_attention` reads every slot that it is given. On a GPU, its kernels for few queries also use few
multiprocessors, and keys in 8 bits are converted before they are read. The operator takes the number of filled slots as
a tensor, and the keys in their stored dtype. Its kernel is in `filled_triton.py`.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...common.devices import c_compiler
from .latents import has_latents

if TYPE_CHECKING:
    from ..storage import Storage

library = torch.library.Library("exportable_cache", "FRAGMENT")
library.define(
    "extended_attention(Tensor query, Tensor key, Tensor value, Tensor mask, float? scale, float? softcap, "
    "Tensor? sinks) -> Tensor"
)
#: Takes queries [batch, heads, q_length, head_dim], keys and values [batch, kv_heads, kv_length, dim], a mask [batch or
#: 1, heads or 1, q_length, kv_length], and sinks [batch or 1, heads, q_length or 1, 1]; returns what
#: `torch.nn.functional.scaled_dot_product_attention` returns.
EXTENDED_ATTENTION = torch.ops.exportable_cache.extended_attention.default
#: Arguments of models that the operator computes, see `matmul_attention`.
EXTENSIONS = {"softcap", "s_aux", "sinks"}


def is_captured() -> bool:
    """Return True if TorchDynamo captures a graph that is not exported."""
    return torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting()


log = logging.getLogger(__name__)

library.define(
    "filled_attention(Tensor query, Tensor[] stored, Tensor? ends, Tensor? mask, float? scale, float? softcap, "
    "Tensor? sinks) -> Tensor"
)
#: Takes queries [batch, heads, q_length, head_dim]; keys [batch, kv_heads, slots, head_dim] and values [...,
#: value_head_dim] in any floating dtype, or integers followed by the scales of both, float32 [..., 1]; the number of
#: slots to read of each row, int64 [batch], or None for all; a mask [batch or 1, heads or 1, q_length or 1, slots],
#: bool or additive; a factor of the scores, `head_dim ** -0.5` by default; a soft cap; and sinks [batch or 1, heads or
#: 1, q_length or 1, 1]. Returns [batch, q_length, heads, value_head_dim].
#:
#: Latent attention (MLA) takes latents and rotated parts in place of keys and values, and queries of both sizes, see
#: `latents.py`. The keys are latents followed by rotated parts, and the values are the latents, which are read once.
FILLED_ATTENTION = torch.ops.exportable_cache.filled_attention.default
#: Dtypes of keys and values that it reads.
_STORED = (torch.float32, torch.float16, torch.bfloat16, torch.int8)
#: Most query tokens of a step that it computes. Longer steps compute more than they read.
MOST_QUERIES = 16
#: Largest head dimension of keys and of values.
MOST_DIM = 256
#: Largest latent, and largest rotated part of a key, of latent attention.
MOST_LATENT, MOST_ROTATED = 512, 64
#: Compute capability of the oldest GPU that it is used on, which has the instructions for bfloat16.
LEAST_CAPABILITY = (8, 0)
#: `EXPORTABLE_CACHE_ATTENTION=torch` disables it, as it does the kernel for CPUs.
_VARIABLE = "EXPORTABLE_CACHE_ATTENTION"


def _plainly(
    query: torch.Tensor,
    stored: Sequence[torch.Tensor],
    ends: torch.Tensor | None,
    mask: torch.Tensor | None,
    scale: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute `FILLED_ATTENTION` in plain operators and float32."""
    batch, heads, queries, dim = query.shape
    parts = [part.to(torch.float32) for part in stored]
    keys, values = parts if len(parts) == 2 else (parts[0] * parts[2], parts[1] * parts[3])
    if has_latents(query, stored):
        keys, values = torch.cat([keys, values], dim=-1), keys
    kv_heads, slots = keys.shape[1:3]
    grouped = query.to(torch.float32).reshape(batch, kv_heads, -1, dim)
    scores = (grouped @ keys.transpose(2, 3)).reshape(batch, heads, queries, slots)
    scores = scores * (dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if ends is not None:
        is_read = torch.arange(slots, device=query.device) < ends[:, None]
        scores = scores.masked_fill(~is_read[:, None, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(torch.float32).expand(batch, heads, queries, 1)], dim=-1)
    # A query that sees no slot gets zeros.
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)[..., :slots]
    output = weights.reshape(batch, kv_heads, -1, slots) @ values
    output = output.reshape(batch, heads, queries, values.shape[-1]).transpose(1, 2)
    # A copy, because `contiguous` leaves the strides of dimensions of one element.
    return output.to(query.dtype).clone(memory_format=torch.contiguous_format)


def _by_kernel(*arguments: Any) -> torch.Tensor:
    # Imported here, because Triton is installed with torch for CUDA only.
    from .filled_triton import filled_attention

    return filled_attention(*arguments)


def _shape_of(query: torch.Tensor, stored: Sequence[torch.Tensor], *others: Any) -> torch.Tensor:
    batch, heads, queries, _ = query.shape
    return query.new_empty(batch, queries, heads, stored[0 if has_latents(query, stored) else 1].shape[-1])


library.impl("filled_attention", _plainly, "CPU")
library.impl("filled_attention", _by_kernel, "CUDA")
torch.library.register_fake("exportable_cache::filled_attention", _shape_of, lib=library)


def unsupported(device: torch.device) -> str | None:
    """Return why steps on a device do not use the operator, or None if they do."""
    if device.type != "cuda":
        return f"it is for CUDA, and the cache is on {device.type}"
    if os.environ.get(_VARIABLE, "") == "torch":
        return f"{_VARIABLE} is torch"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not c_compiler():
        return "triton needs a C compiler, and none was found; install gcc"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        found, needed = (".".join(map(str, one)) for one in (capability, LEAST_CAPABILITY))
        return f"the GPU has compute capability {found}, and the kernel needs {needed}"
    return None


def reads_filled(device: torch.device) -> bool:
    """Return True if steps on a device use the operator. On a GPU that cannot, the reason is logged."""
    reason = unsupported(device)
    if reason is not None and device.type == "cuda":
        log.warning("attention reads all slots of a step's method, by torch's kernels: %s", reason)
    return reason is None


def can_store(storage: Storage | None) -> bool:
    """Return True if the operator can read keys and values of this storage."""
    return storage is not None and all(part.dtype in _STORED for part in list(storage.parts.values())[:2])


def can_compute(dim: int, value_dim: int, of_latents: bool = False) -> bool:
    """Return True if the operator computes attention over heads of these sizes, or latents and rotated parts."""
    most, most_values = (MOST_LATENT, MOST_ROTATED) if of_latents else (MOST_DIM, MOST_DIM)
    return 0 < dim <= most and 0 < value_dim <= most_values


@dataclass(frozen=True, eq=False)
class FilledKeys:
    """The keys and values that a layer returned in a step, and how they are stored.

    Attributes:
        keys: Keys that `update` returned.
        values: Values that `update` returned.
        stored: The same keys and values as `FILLED_ATTENTION` takes them.
        ends: Number of slots to read of each row, int64 [batch]; None for all.
    """

    keys: torch.Tensor
    values: torch.Tensor
    stored: tuple[torch.Tensor, ...]
    ends: torch.Tensor | None

    def are_supported(self, query: torch.Tensor, mask: torch.Tensor | None, of_latents: bool = False) -> bool:
        """Return True if the operator computes attention of these queries [batch, heads, q_length, head_dim].

        Args:
            query: Queries of the model.
            mask: Mask of the model.
            of_latents: True if the keys and values are latents and rotated parts.
        """
        # Not compared with a number if there is a mask, because the length of a traced step may be dynamic.
        has_order = mask is not None or query.shape[2] == 1
        can = can_compute(self.keys.shape[3], self.values.shape[3], of_latents)
        return has_order and can and not query.requires_grad


class _Returned(threading.local):
    """The keys that layers returned in this thread's step. TorchDynamo traces it, unlike a `ContextVar`."""

    def __init__(self) -> None:
        self.keys: list[FilledKeys] | None = None
        #: Masks that were folded in this step: the mask, key heads, query heads of each, and the result.
        self.masks: list[tuple[torch.Tensor, int, int, torch.Tensor]] | None = None


_returned = _Returned()


@contextmanager
def finding_filled(keys: list[FilledKeys] | None) -> Iterator[None]:
    """Let attention find the stored form of keys inside the block, because transformers passes only tensors to it.

    Args:
        keys: `StepContext.filled` of the step; None if attention reads what layers return.
    """
    before = _returned.keys, _returned.masks
    _returned.keys, _returned.masks = keys, []
    try:
        yield
    finally:
        _returned.keys, _returned.masks = before


def folded_once(mask: torch.Tensor, kv_heads: int, groups: int, fold: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return a mask folded for grouped heads, once for all layers of a step that have the same.

    Args:
        mask: The mask that the model made.
        kv_heads: Key heads.
        groups: Query heads of each.
        fold: Function that returns the folded mask.
    """
    for known, heads, group, folded in _returned.masks or ():
        if known is mask and (heads, group) == (kv_heads, groups):
            return folded
    result = fold()
    if _returned.masks is not None:
        _returned.masks.append((mask, kv_heads, groups, result))
    return result


def note_filled(
    filled: list[FilledKeys],
    storage: Storage,
    returned: tuple[torch.Tensor, torch.Tensor],
    stored: Sequence[torch.Tensor],
    ends: torch.Tensor | None,
) -> None:
    """Add the keys that a layer returns to those that `filled_keys` finds, if the operator can read them.

    Args:
        filled: `StepContext.filled` of the step.
        storage: Storage of the layer.
        returned: Keys and values that the layer returns.
        stored: The same in the order of `Storage.parts`.
        ends: See `FilledKeys.ends`.
    """
    # Rows that are decoded for nothing would cost an eager step more than the operator saves.
    if storage.rounds and not torch.compiler.is_compiling():
        return
    if can_store(storage):
        filled.append(FilledKeys(*returned, tuple(stored), ends))


def takes_latents(latents: torch.Tensor) -> bool:
    """Return True if attention computes over these latents [batch, 1, slots, dim], which a layer of the step returned.

    Otherwise, keys and values are expanded from them first.
    """
    found = [one for one in _returned.keys or () if one.keys is latents]
    # TorchDynamo of torch 2.11 traces no `bool` of a list.
    return len(found) > 0 and can_compute(latents.shape[3], found[-1].values.shape[3], of_latents=True)


def filled_keys(keys: torch.Tensor, values: torch.Tensor) -> FilledKeys | None:
    """Return how these keys and values are stored, or None if no layer of the step returned them unchanged."""
    for found in reversed(_returned.keys or ()):
        if found.keys is keys and found.values is values:
            return found
    return None
