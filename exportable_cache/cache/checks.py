"""Host-side checks of a step, for eager use. Compiled and exported programs skip them: their session checks instead.

Only this module of the cache reads lengths back to Python. Nothing here runs inside a traced path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..common.compat.torch import FakeTensor
from ..errors import CacheFullError, InputError

if TYPE_CHECKING:
    from .storage import Storage

    _Pair = tuple[torch.Tensor, torch.Tensor]


def is_traced(tensor: torch.Tensor) -> bool:
    """Return True if values of `tensor` cannot be read: when compiled or exported, or if it is fake or meta."""
    return torch.compiler.is_compiling() or isinstance(tensor, FakeTensor) or tensor.is_meta


def check_room(lengths: torch.Tensor, query_length: int, limit: int | None) -> None:
    """Refuse new tokens that do not fit, before any layer has written.

    Args:
        lengths: Tokens held per row, int64 [batch_size].
        query_length: New tokens.
        limit: Tokens a row can hold, or None for any number.

    Raises:
        CacheFullError: If a row has fewer than `query_length` slots left.
    """
    if limit is None:
        return
    # The lengths cannot be read while tracing: only what is static can be refused there.
    held = 0 if is_traced(lengths) else int(lengths.max())
    if isinstance(query_length, int) and held + query_length > limit:
        raise CacheFullError(
            f"the cache holds {held} of at most {limit} tokens, {query_length} more do not fit; "
            "reset it, crop it, or allocate a larger max_cache_len"
        )


def check_some(lengths: torch.Tensor, query_length: int) -> None:
    """Refuse a step of no tokens: transformers' `generate` takes one where its prompt is no longer than the cache.

    Args:
        lengths: Tokens held per row, int64 [batch_size].
        query_length: New tokens.

    Raises:
        InputError: If there are no new tokens.
    """
    if isinstance(query_length, int) and query_length == 0:
        held = "some" if is_traced(lengths) else int(lengths.max())
        raise InputError(
            f"there are no new tokens, and the cache holds {held}: generate() leaves out of its prompt those that the "
            "cache holds; reset() the cache for a new sequence, or pass the ids of the whole one to continue"
        )


def check_new_states(storage: Storage, held: _Pair, given: _Pair) -> None:
    """Refuse keys and values that do not match those of the cache.

    Args:
        storage: Storage of the layer.
        held: Keys and values of the layer.
        given: New keys [batch_size, num_heads, query_length, head_dim], and values [..., value_head_dim].

    Raises:
        InputError: On another batch size, head count, head size, dtype or device.
    """
    check_rows(held[0].shape[0], given[0].shape[0])
    for name, new, kept in zip(("keys", "values"), given, held, strict=True):
        expected = (kept.shape[0], kept.shape[1], new.shape[2], storage.head_dim(kept.shape[3]))
        if tuple(new.shape) != expected:
            raise InputError(
                f"new {name} are [batch, heads, length, dim] = {list(new.shape)}, the cache was allocated for "
                f"{list(expected)}; allocate it with the model's sizes (ExportableCache.from_model reads them from the "
                "model)"
            )
        if new.dtype != storage.rows_dtype:
            if torch.is_autocast_enabled(new.device.type):
                raise InputError(
                    f"torch.autocast is on, under which this model writes keys in {given[0].dtype} and values in "
                    f"{given[1].dtype}, and the cache holds {storage.rows_dtype}; leave the autocast block, "
                    f"and load the model in {torch.get_autocast_dtype(new.device.type)} instead"
                )
            raise InputError(
                f"new {name} are {new.dtype}, the cache holds {storage.rows_dtype}; allocate it with dtype={new.dtype}"
            )
        if new.device != kept.device:
            raise InputError(
                f"new {name} are on {new.device}, the cache is on {kept.device}; allocate it with "
                f"device={str(new.device)!r}"
            )


def check_rows(held: int, rows: int) -> None:
    """Refuse a batch of another number of rows than the cache has.

    Args:
        held: Rows of the cache.
        rows: Rows of the batch.

    Raises:
        InputError: If they differ.
    """
    if held != rows:
        raise InputError(
            f"the cache was allocated for {held} rows, the model runs {rows}; allocate it with batch_size={rows} (each "
            "of num_beams, or of num_return_sequences, is a row)"
        )


def check_covers(attention_mask: torch.Tensor, start: torch.Tensor, query_length: int) -> None:
    """Refuse a padding mask that ends before the new tokens do: they would count as padding, and see nothing.

    Args:
        attention_mask: [batch_size, tokens], indexed by position.
        start: Position of the first new token, int64 0-D or [batch_size, 1].
        query_length: New tokens.

    Raises:
        InputError: If the mask is too short, outside of traced paths.
    """
    if is_traced(start):
        return
    held, covered = int(start.max()), attention_mask.shape[-1]
    if held + query_length > covered:
        raise InputError(
            f"attention_mask is for {covered} tokens, but the cache holds {held} and {query_length} more are fed; "
            "reset() the cache for a new sequence, or pass the ids and the mask of all "
            f"{held + query_length} tokens to continue"
        )


def row_numbers(indices: torch.Tensor, rows: int) -> torch.Tensor:
    """Check the source row of each row, and return it: int [rows].

    Raises:
        InputError: If `indices` is not such a tensor, or, on a CPU, has a row out of range.
    """
    if not isinstance(indices, torch.Tensor):
        raise InputError(f"indices of rows are a {type(indices).__name__}; pass an int64 tensor [{rows}]")
    if indices.dtype not in (torch.int32, torch.int64) or indices.dim() != 1:
        raise InputError(
            f"indices of rows are {indices.dtype} of shape {list(indices.shape)}; pass an int64 tensor [{rows}]"
        )
    if indices.shape[0] != rows:
        raise InputError(
            f"a static cache of batch size {rows} cannot keep {indices.shape[0]} rows; pass one index per row, or "
            f"allocate another cache with batch_size={indices.shape[0]}"
        )
    # Only on the CPU, because reading the values waits for other devices.
    if not is_traced(indices) and indices.device.type == "cpu" and bool(((indices < 0) | (indices >= rows)).any()):
        raise InputError(f"indices of rows are {indices.tolist()}, of rows 0 to {rows - 1}; name rows that there are")
    return indices


def check_rows_agree(lengths: torch.Tensor) -> None:
    """Refuse to give one length for rows that differ.

    Args:
        lengths: int64 [batch_size].

    Raises:
        InputError: If the rows differ.
    """
    if lengths.shape[0] > 1 and bool((lengths != lengths[0]).any()):
        raise InputError(
            f"rows hold {lengths.tolist()} tokens, there is no one length; pass position_ids and read cumulative_length"
        )
