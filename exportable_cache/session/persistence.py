"""A session's state as a file, and as a copy: prefixes computed once and continued many times, on any target."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..backends.base import state_of
from ..common.fs.tensor_files import damaged_if_malformed, read_tensors, write_tensors
from ..errors import ExportableCacheError, InputError
from .inputs.image import PlacedImages
from .state import RopeState, SequenceState

if TYPE_CHECKING:
    from ..cache.layers import CacheLayer
    from .session import Session

# File format version. v2 describes layers by their parts instead of a class, v3 adds a checksum.
_FORMAT = "exportable_cache.session_state.v3"
#: Names of what an encoder gave, which the next prefill of its session takes.
_ENCODED = "encoded."
#: Names of what rows remember of RoPE whose factors change with the length, see `RopeState`.
_ROPE_LENGTHS, _ROPE_FACTORS, _ROPE_TOKENS = "rope.lengths", "rope.factors", "rope.tokens."


def runner_state(session: Session) -> Mapping[str, torch.Tensor]:
    """The cache tensors that a session's runner steps on, by name as `layers.0.keys`.

    Raises:
        InputError: If its runtime keeps them to itself.
    """
    state = state_of(session.runner)
    if state is None:
        raise InputError(
            f"the {session.target!r} runtime does not give out its cache, so its state cannot be copied; "
            "use an eager or compiled session, or target pt2 or aoti"
        )
    return state


def save_state(session: Session, path: Path) -> None:
    """Write the filled part of a session's cache, its lengths and the token still to be fed, atomically.

    Slots that no row has reached are left out, so the file is as large as what it holds. Of a parallel session rank 0
    writes one file, of the heads of all ranks: the same as one process writes.
    """
    sequence, ranks = session.stepper.state, session.stepper.ranks
    most = int(sequence.max_len_ever.max())
    tensors = {}
    for name, tensor in runner_state(session).items():
        filled = _filled(tensor.detach(), session, name, most)
        if ranks is not None:
            filled = ranks.whole(filled, *_cut(session, name))
            if ranks.rank != 0:
                continue
        tensors[name] = filled.cpu().contiguous().clone()
    tensors |= {
        f"{_ENCODED}{index}": tensor.detach().cpu().contiguous().clone()
        for index, tensor in enumerate(sequence.encoded)
    }
    tensors |= {} if sequence.rope is None else _of_rope(sequence.rope)
    tensors["length"] = sequence.length.clone()
    tensors["high_water"] = sequence.max_len_ever.clone()
    unfed = list(sequence.unfed)
    described = {
        "format": _FORMAT,
        "layers": json.dumps([_describe(layer) for layer in session.layers]),
        # One row's alone stands for itself, as earlier releases wrote it.
        "pending": json.dumps(unfed[0] if len(unfed) == 1 else unfed),
        "fingerprint": session.fingerprint or "",
        "images": json.dumps(sequence.images.to_lists()),
    }
    error: Exception | None = None
    if ranks is None or ranks.rank == 0:
        try:
            write_tensors(path, tensors, described)
        except Exception as failed:
            if ranks is None:
                raise
            error = failed
    if ranks is not None:
        ranks.check_all(error)


def load_state(session: Session, path: Path) -> None:
    """Continue where `save_state` was called, with the same model on any target. Everything is checked before a change.

    Each rank of a parallel session reads its own heads out of the file, whatever number of ranks has written it; if one
    refuses it, all do.

    Raises:
        BundleError: If the file is missing, damaged or not a saved state.
        InputError: If it is of another model, of other layers or another batch size, or longer than this cache.
    """
    ranks = session.stepper.ranks
    if ranks is None:
        tensors, sequence = _read(session, path)
    else:
        error: Exception | None = None
        try:
            tensors, sequence = _read(session, path)
        except ExportableCacheError as refused:
            error = refused
        ranks.check_all(error)
        ranks.check_same("load_state", tokens=(sequence.length, sequence.max_len_ever, sequence.unfed))
    for name, tensor in runner_state(session).items():
        tensor.zero_()
        dim = _capacity_dim(session, name)
        part = tensor if dim is None else tensor.narrow(dim, 0, tensors[name].shape[dim])
        part.copy_(tensors[name])
    session.stepper.restore(sequence)


def _read(session: Session, path: Path) -> tuple[dict[str, torch.Tensor], SequenceState]:
    """What a file holds of the tensors of this session, by name, and where its rows are.

    Raises:
        BundleError, InputError: See `load_state`.
    """
    tensors, metadata = read_tensors(path, "a session's state", _FORMAT, "save_state()")
    with damaged_if_malformed(path, "a session's state"):
        saved_print = metadata["fingerprint"]
        if saved_print and session.fingerprint and saved_print != session.fingerprint:
            raise InputError(
                f"{path} was computed with other weights than this session's model; save the state again with this one"
            )
        saved = json.loads(metadata["layers"])
        ours = json.loads(json.dumps([_describe(layer) for layer in session.layers]))
        if saved != ours:
            index = next((i for i, (a, b) in enumerate(zip(saved, ours)) if a != b), min(len(saved), len(ours)))
            theirs = saved[index] if index < len(saved) else "missing"
            raise InputError(
                f"{path} has other layers than this session: layer {index} is {theirs} there, "
                f"{ours[index] if index < len(ours) else 'missing'} here; allocate or export with the same "
                "rollback_slots and layer options"
            )
        length, max_len_ever = tensors.pop("length"), tensors.pop("high_water")
        if length.dim() != 1 or len(length) != session.batch_size:
            raise InputError(
                f"{path} has {length.shape[0]} rows, this session {session.batch_size}; use the same batch_size"
            )
        if session.max_length is not None and int(length.max()) > session.max_length:
            raise InputError(
                f"{path} holds {int(length.max())} tokens, this cache at most {session.max_length}; use a larger "
                "max_cache_len"
            )
        rope = _rope_of(tensors, length, session.vocab_size)
        unfed = json.loads(metadata["pending"])
        unfed = tuple(unfed) if isinstance(unfed, list) else (unfed,) * len(length)
        _check_rows(session, length, max_len_ever, unfed)
        images = PlacedImages.from_saved(json.loads(metadata["images"]), max_len_ever.tolist())
        encoded = tuple(tensors.pop(f"{_ENCODED}{index}") for index in range(_count_encoded(tensors)))
        session.stages.check_given(encoded, session.runner.methods)
        state = runner_state(session)
        missing, unknown = set(state) - set(tensors), set(tensors) - set(state)
        if missing:
            raise InputError(
                f"{path} has no {min(missing)}, which a {session.target!r} session keeps; save the state on that target"
            )
        if unknown:
            raise ValueError(f"a tensor {min(unknown)!r}, which no layer has")
        for name, tensor in state.items():
            tensors[name] = _fitting(session, name, tensors[name], tensor, path, (length, max_len_ever))
    encoded_here = tuple(tensor.to(session.device) for tensor in encoded)
    return tensors, SequenceState(length, max_len_ever, unfed, images, encoded_here, rope)


def _of_rope(rope: RopeState) -> dict[str, torch.Tensor]:
    """Return the tensors of a file for what rows remember of RoPE; tokens of the rows whose tokens are known."""
    known = {f"{_ROPE_TOKENS}{row}": ids.clone() for row, ids in enumerate(rope.tokens) if ids is not None}
    return {_ROPE_LENGTHS: rope.lengths.clone(), _ROPE_FACTORS: rope.factors.clone(), **known}


def _rope_of(tensors: dict[str, torch.Tensor], length: torch.Tensor, vocab_size: int) -> RopeState | None:
    """Take what rows remember of RoPE out of the tensors of a file, None of a model without.

    Raises:
        ValueError: If no session could have saved it.
    """
    lengths, factors = tensors.pop(_ROPE_LENGTHS, None), tensors.pop(_ROPE_FACTORS, None)
    tokens = tuple(tensors.pop(f"{_ROPE_TOKENS}{row}", None) for row in range(len(length)))
    if lengths is None or factors is None:
        return None
    for name, tensor in ((_ROPE_LENGTHS, lengths), (_ROPE_FACTORS, factors)):
        if tensor.dtype != torch.int64 or tensor.shape != length.shape:
            raise ValueError(f"{name} of {tensor.dtype} {list(tensor.shape)}")
    for ids in tokens:
        if ids is not None and (
            ids.dtype != torch.int64 or ids.dim() != 1 or bool(((ids < 0) | (ids >= vocab_size)).any())
        ):
            raise ValueError(f"tokens that rows hold of {ids.dtype} {list(ids.shape)}, of a vocabulary of {vocab_size}")
    return RopeState(lengths, factors, tokens)


def _fitting(
    session: Session,
    name: str,
    saved: torch.Tensor,
    tensor: torch.Tensor,
    path: Path,
    rows: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Return the part of a saved state tensor that this session's has room for.

    Args:
        saved: The tensor of the file, of all ranks.
        tensor: The session's own.
        rows: Tokens that each row holds, and the most that it ever held, int64 [batch] each.

    Raises:
        ValueError: If it has other slots than its rows have filled, or counts more tokens than fit.
        InputError: If shape or dtype are not those of the session's.
    """
    layer, dim = _layer_of(session, name), _capacity_dim(session, name)
    given = list(saved.shape)
    # Before slots are cut to what this session has.
    if dim is not None:
        _check_slots(layer, name, saved, dim, rows)
    if session.stepper.ranks is not None:
        _check_parts(session, name, saved, tensor, path)
        saved = session.stepper.ranks.part(saved, *_cut(session, name))
    expected = list(tensor.shape)
    if dim is not None and saved.dim() == tensor.dim():
        # More tokens once than this cache has slots: the slots after its length are no longer wanted.
        saved = saved.narrow(dim, 0, min(saved.shape[dim], layer.policy.slot_count))
        expected[dim] = saved.shape[dim]
    if list(saved.shape) != expected or saved.dtype != tensor.dtype:
        raise InputError(
            f"{name} is {saved.dtype} {given} in {path}, this session's is {tensor.dtype} {list(tensor.shape)}; use "
            "the same dtype and model"
        )
    limits = layer.length_limits()
    kept = name.split(".")[-1]
    if kept in limits:
        most = limits[kept]
        if bool((saved < 0).any()) or (most is not None and bool((saved > most).any())):
            raise ValueError(f"{name} of {saved.tolist()} tokens, of 0 to {most or 'any number'}")
    return saved


def _check_slots(
    layer: CacheLayer, name: str, saved: torch.Tensor, dim: int, rows: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Refuse a tensor that has other slots than its rows have filled.

    Raises:
        ValueError: Then.
    """
    slots = saved.shape[dim] if dim < saved.dim() else 0
    longest, most = (int(tokens.max()) for tokens in rows)
    if layer.max_length is not None:
        # Slots are positions. A cache that was larger than this one may have filled more, or have fewer than `most`
        # says where its history is unknown.
        least = longest
    else:
        least = most = min(most, layer.policy.slot_count)
    if not least <= slots <= most:
        filled = str(least) if least == most else f"{least} to {most}"
        raise ValueError(f"{name} of {slots} slots, where rows have filled {filled}")


def _count_encoded(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(name.startswith(_ENCODED) for name in tensors)


def _check_parts(session: Session, name: str, whole: torch.Tensor, part: torch.Tensor, path: Path) -> None:
    """Refuse a tensor of which ranks have no equal parts."""
    dim, parts = _cut(session, name)
    if parts > 1 and (whole.dim() != part.dim() or whole.shape[dim] != part.shape[dim] * parts):
        raise InputError(
            f"{name} is {list(whole.shape)} in {path}, which is not {parts} times this rank's {list(part.shape)} "
            f"in dimension {dim}; use the same model"
        )


def _cut(session: Session, name: str) -> tuple[int, int]:
    """Along which dimension ranks have parts of a state tensor, and how many different ones: 1 where each has all."""
    # Indexer keys and states are of no head that attention has.
    dims = _layer_of(session, name).state[name.split(".")[-1]].dims
    if "num_heads" not in dims:
        return 0, 1
    return dims.index("num_heads"), session.parts_of_heads[int(name.split(".")[-2])]


def _check_rows(session: Session, length: torch.Tensor, ever: torch.Tensor, unfed: tuple[int | None, ...]) -> None:
    """Refuse rows that no session could have saved.

    Raises:
        ValueError: If a number is out of range.
    """
    if length.dtype != torch.int64 or ever.dtype != torch.int64 or ever.shape != length.shape:
        raise ValueError(f"lengths of {length.dtype} and {ever.dtype}, {list(ever.shape)}")
    if bool((length < 0).any()) or bool((ever < length).any()):
        raise ValueError(f"lengths {length.tolist()}, at most {ever.tolist()}")
    if len(unfed) != len(length) or any(
        token is not None and (type(token) is not int or not 0 <= token < session.vocab_size) for token in unfed
    ):
        raise ValueError(f"tokens to be fed {unfed}, of a vocabulary of {session.vocab_size}")


def _describe(layer: CacheLayer) -> dict:
    """What must agree. How many tokens a full layer can hold need not: its slots are positions."""
    config = layer.config()
    if layer.max_length is None:
        return config
    policy = {name: value for name, value in config["policy"].items() if name != "capacity"}
    return {**config, "policy": policy}


def _layer_of(session: Session, name: str) -> CacheLayer:
    """The layer of a state tensor `layers.0.keys`. Engines put a word of their own in front."""
    return session.layers[int(name.split(".")[-2])]


def _capacity_dim(session: Session, name: str) -> int | None:
    """Which dimension of a state tensor `layers.0.keys` counts slots of the decoder's tokens."""
    layer = _layer_of(session, name)
    dims = layer.state[name.split(".")[-1]].dims
    return dims.index("capacity") if "capacity" in dims and layer.follows_decoder else None


def _filled(tensor: torch.Tensor, session: Session, name: str, most: int) -> torch.Tensor:
    dim = _capacity_dim(session, name)
    # A layer may have slots behind its capacity, which no token ever reaches.
    return tensor if dim is None else tensor.narrow(dim, 0, min(most, _layer_of(session, name).policy.slot_count))
