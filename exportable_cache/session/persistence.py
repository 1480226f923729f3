"""Saves and loads the state of a session, so that a prefix is computed once and continued on any target."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..backends.base import GivesTensors, state_of
from ..common.fs.tensor_files import damaged_if_malformed, read_tensors, write_tensors
from ..errors import ExportableCacheError, InputError
from .images import PlacedImages
from .state import UNKNOWN, RopeState, SequenceState

if TYPE_CHECKING:
    from ..cache.layers import CacheLayer
    from .generate import AnySession

# File format version. v2 describes layers by their parts instead of a class, v3 adds a checksum.
_FORMAT = "exportable_cache.session_state.v3"
#: Prefix of the encoder output, which the next prefill of its session takes.
_ENCODED = "encoded."
#: Names of the tensors of `RopeState`.
_ROPE_LENGTHS, _ROPE_FACTORS, _ROPE_TOKENS = "rope.lengths", "rope.factors", "rope.tokens."
_ROPE_WRITTEN, _ROPE_SHIFTED = "rope.written.", "rope.shifted"


def runner_state(session: AnySession) -> Mapping[str, torch.Tensor]:
    """Return the cache tensors of a session's runner, by names such as `layers.0.keys`.

    Raises:
        InputError: If its runtime does not give them out.
    """
    state = state_of(session.stepper.runner)
    if state is None:
        raise InputError(
            f"the {session.target!r} runtime does not give out its cache row by row, so its state cannot be copied; "
            "use an eager or compiled session, or target pt2 or aoti"
        )
    return state


def _file_state(session: AnySession) -> Mapping[str, torch.Tensor]:
    """Return the tensors that a file of a session's state has, by name, in the layout of the target.

    Raises:
        InputError: If its runtime does not give them out.
    """
    runner = session.stepper.runner
    if state_of(runner) is not None or not isinstance(runner, GivesTensors):
        return runner_state(session)
    found: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(session.stepper.layers):
        for part in layer.state:
            name = f"layers.{index}.{part}"
            if part == layer.policy.length_name:
                continue
            if (tensor := runner.state_tensor(name)) is None:
                raise InputError(
                    f"the program must give out {name} to save or load its state, got none: it is an encoder-decoder, "
                    "an earlier release exported it, or a delegate keeps its cache; export it again for 'executorch' "
                    "with the delegate xnnpack, or use exportable_cache_runner.Session"
                )
            found[name] = tensor
    return found


@dataclass(frozen=True)
class RowCopy:
    """The filled slots of one row, to put into a row of another session over the same layers.

    Attributes:
        tensors: State tensors without their batch dimension, by name.
        length: Number of tokens.
        ever: The most tokens that the row held, see `SequenceState.max_len_ever`.
    """

    tensors: Mapping[str, torch.Tensor]
    length: int
    ever: int

    def cloned(self) -> RowCopy:
        """Return the contents with tensors of their own."""
        return replace(self, tensors={name: tensor.clone() for name, tensor in self.tensors.items()})


def row_of(session: AnySession, row: int, length: int | None = None) -> RowCopy:
    """Return the filled slots of a row; the tensors are views of the session's.

    Args:
        session: The session.
        row: Index of the row.
        length: Number of first tokens to take, if every layer can take back the others; all by default.

    Raises:
        InputError: If its runtime does not give out its cache.
    """
    state = session.stepper.state
    length = int(state.length[row]) if length is None else length
    ever = max(length, int(state.max_len_ever[row]))
    tensors = {}
    for name, tensor in runner_state(session).items():
        # Slots of a full-attention layer are positions, and a ring may need all that were filled.
        most = ever if layer_of(session.stepper.layers, name).max_length is None else length
        tensors[name] = _filled(tensor.detach(), session, name, most)[row]
    return RowCopy(tensors, length, ever)


def put_row(session: AnySession, row: int, held: RowCopy) -> None:
    """Replace a row by the contents of `row_of`; the other rows stay.

    Raises:
        InputError: If the runtime does not give out its cache.
    """
    before = int(session.stepper.state.max_len_ever[row])
    for name, tensor in runner_state(session).items():
        given, dim = held.tensors[name], slots_dim(layer_of(session.stepper.layers, name), name)
        target = tensor[row]
        if dim is not None:
            filled = given.shape[dim - 1]
            # Zero the slots that the row had filled, because a value there may not be finite.
            most = min(max(before, filled), target.shape[dim - 1])
            target.narrow(dim - 1, filled, most - filled).zero_()
            target = target.narrow(dim - 1, 0, filled)
        target.copy_(given)
    session.stepper.set_length(row, held.length, held.ever)


def save_state(session: AnySession, path: Path) -> None:
    """Write the filled slots of a session's cache, its lengths and the pending tokens, atomically.

    Rank 0 of a parallel session writes one file with the heads of all ranks, which equals the file of one process.
    """
    sequence, ranks = session.stepper.state, session.stepper.ranks
    most = int(sequence.max_len_ever.max())
    tensors = {}
    for name, tensor in _file_state(session).items():
        filled = _filled(tensor.detach(), session, name, most)
        if ranks is not None:
            filled = ranks.whole(filled, *_split_of(session, name))
            if ranks.rank != 0:
                continue
        tensors[name] = filled.cpu().contiguous().clone()
    tensors |= {
        f"{_ENCODED}{index}": tensor.detach().cpu().contiguous().clone()
        for index, tensor in enumerate(sequence.encoded)
    }
    tensors |= {} if sequence.rope is None else _rope_tensors(sequence.rope)
    tensors["length"] = sequence.length.clone()
    tensors["high_water"] = sequence.max_len_ever.clone()
    unfed = list(sequence.unfed)
    described = {
        "format": _FORMAT,
        "layers": json.dumps([_describe(layer) for layer in session.stepper.layers]),
        # The token of a single row is not in a list, because earlier releases wrote it so.
        "pending": json.dumps(unfed[0] if len(unfed) == 1 else unfed),
        "fingerprint": session.fingerprint or "",
        "images": json.dumps(sequence.images.to_lists()),
    }
    if any(one.slot for one in session.stepper.adapters):
        described["adapters"] = json.dumps(_adapters(session))
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


def load_state(session: AnySession, path: Path) -> None:
    """Load a state of the same model from any target. Everything is checked before a change.

    Each rank of a parallel session reads its heads from the file, for any number of ranks that wrote it. If one rank
    refuses the file, all do.

    Raises:
        BundleError: If the file is missing, damaged or not a saved state.
        InputError: If it has another model, other layers or another batch size, or is longer than this cache.
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
    for name, tensor in _file_state(session).items():
        tensor.zero_()
        dim = slots_dim(layer_of(session.stepper.layers, name), name)
        part = tensor if dim is None else tensor.narrow(dim, 0, tensors[name].shape[dim])
        part.copy_(tensors[name])
    session.stepper.restore(sequence)


def _read(session: AnySession, path: Path) -> tuple[dict[str, torch.Tensor], SequenceState]:
    """Read and check a file, and return its tensors for this session by name, and its sequence state.

    Raises:
        BundleError, InputError: See `load_state`.
    """
    tensors, metadata = read_tensors(path, "a session's state", _FORMAT, "save_state()")
    with damaged_if_malformed(path, "a session's state"):
        saved_fingerprint = metadata["fingerprint"]
        if saved_fingerprint and session.fingerprint and saved_fingerprint != session.fingerprint:
            raise InputError(
                f"{path} must have the weights of this session's model, got others; save the state again with it"
            )
        saved = json.loads(metadata["layers"])
        ours = json.loads(json.dumps([_describe(layer) for layer in session.stepper.layers]))
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
        _check_adapters(session, path, json.loads(metadata.get("adapters", "[]")))
        if (most := session.stepper.max_length) is not None and int(length.max()) > most:
            raise InputError(
                f"{path} holds {int(length.max())} tokens, this cache at most {most}; use a larger max_cache_len"
            )
        rope = _pop_rope(tensors, length, session.vocab_size)
        unfed = json.loads(metadata["pending"])
        unfed = tuple(unfed) if isinstance(unfed, list) else (unfed,) * len(length)
        _check_rows(session, length, max_len_ever, unfed)
        images = PlacedImages.from_saved(json.loads(metadata["images"]), max_len_ever.tolist())
        encoded = tuple(tensors.pop(f"{_ENCODED}{index}") for index in range(_count_encoded(tensors)))
        session.stages.check_given(encoded, session.stepper.runner.methods)
        state = _file_state(session)
        missing, unknown = set(state) - set(tensors), set(tensors) - set(state)
        if missing:
            raise InputError(
                f"{path} has no {min(missing)}, which a {session.target!r} session keeps; save the state on that target"
            )
        if unknown:
            raise ValueError(f"tensor {min(unknown)!r} belongs to no layer")
        for name, tensor in state.items():
            tensors[name] = _part_for(session, name, tensors[name], tensor, path, (length, max_len_ever))
    encoded_here = tuple(tensor.to(session.device) for tensor in encoded)
    return tensors, SequenceState(length, max_len_ever, unfed, images, encoded_here, rope)


def _adapters(session: AnySession) -> list[list[str]]:
    """Return name and digest of each row's adapter, each empty for the model itself."""
    return [one.described for one in session.stepper.adapters] or [["", ""]] * session.batch_size


def _check_adapters(session: AnySession, path: Path, saved: list[list[str]]) -> None:
    """Check that the rows of a saved state were computed with the adapters that the session uses.

    Raises:
        InputError: If one was not.
    """
    pairs = zip(saved or [["", ""]] * session.batch_size, _adapters(session), strict=True)
    for row, ((name, digest), (own, used)) in enumerate(pairs):
        if digest != used:
            raise InputError(
                f"row {row} of {path} was computed with {_called(name)}, but the session uses {_called(own)}; "
                "use_adapter() the same one before loading the state"
            )


def _called(name: str) -> str:
    return f"the adapter {name[:100]!r}" if name else "no adapter"


def _rope_tensors(rope: RopeState) -> dict[str, torch.Tensor]:
    """Return the tensors of a RoPE state for a file, with the tokens of the rows whose tokens are known."""
    known = {f"{_ROPE_TOKENS}{row}": ids.clone() for row, ids in enumerate(rope.tokens) if ids is not None}
    known |= {_ROPE_SHIFTED: rope.shifted.to(torch.uint8)}
    known |= {f"{_ROPE_WRITTEN}{row}": one.clone() for row, one in enumerate(rope.written) if one is not None}
    return {_ROPE_LENGTHS: rope.lengths.clone(), _ROPE_FACTORS: rope.factors.clone(), **known}


def _pop_rope(tensors: dict[str, torch.Tensor], length: torch.Tensor, vocab_size: int) -> RopeState | None:
    """Pop the RoPE state from the tensors of a file; None for a model without one.

    Raises:
        ValueError: If no session could have saved it.
    """
    lengths, factors = tensors.pop(_ROPE_LENGTHS, None), tensors.pop(_ROPE_FACTORS, None)
    tokens = tuple(tensors.pop(f"{_ROPE_TOKENS}{row}", None) for row in range(len(length)))
    # Files of earlier releases lack them. Rows of such a file are not shifted.
    written = tuple(tensors.pop(f"{_ROPE_WRITTEN}{row}", None) for row in range(len(length)))
    shifted = tensors.pop(_ROPE_SHIFTED, torch.zeros_like(length, dtype=torch.uint8))
    if lengths is None or factors is None:
        return None
    if shifted.dtype != torch.uint8 or shifted.shape != length.shape:
        raise ValueError(f"{_ROPE_SHIFTED} must be uint8 {list(length.shape)}, got {list(shifted.shape)}")
    for name, tensor in ((_ROPE_LENGTHS, lengths), (_ROPE_FACTORS, factors)):
        if tensor.dtype != torch.int64 or tensor.shape != length.shape:
            raise ValueError(f"{name} must be int64 {list(length.shape)}, got {tensor.dtype} {list(tensor.shape)}")
    for ids in tokens:
        if ids is not None and (
            ids.dtype != torch.int64 or ids.dim() != 1 or bool(((ids < 0) | (ids >= vocab_size)).any())
        ):
            raise ValueError(f"tokens of a row must be int64 ids below {vocab_size}, got {ids.dtype} {list(ids.shape)}")
    for one, held in zip(written, length.tolist(), strict=True):
        if one is not None and (
            one.dtype != torch.int64 or one.dim() != 1 or len(one) < held or bool(((one < 1) | (one >= UNKNOWN)).any())
        ):
            raise ValueError(
                f"lengths of a row's keys must be at least {held} int64, got {one.dtype} {list(one.shape)}"
            )
    return RopeState(lengths, factors, tokens, written, shifted.to(torch.bool))


def _part_for(
    session: AnySession,
    name: str,
    saved: torch.Tensor,
    tensor: torch.Tensor,
    path: Path,
    rows: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Return the part of a saved state tensor that fits this session.

    Args:
        session: The session.
        name: Name of the tensor.
        saved: Tensor of the file, for all ranks.
        tensor: Tensor of the session.
        path: The file, for messages.
        rows: Length of each row, and the most that it ever held, int64 [batch] each.

    Raises:
        ValueError: If it has other slots than its rows have filled, or counts more tokens than fit.
        InputError: If its shape or dtype differ from the session's.
    """
    layer = layer_of(session.stepper.layers, name)
    dim = slots_dim(layer, name)
    given = list(saved.shape)
    # Checked first, because the slots are cut to those of this session below.
    if dim is not None:
        _check_slots(layer, name, saved, dim, rows)
    if session.stepper.ranks is not None:
        _check_parts(session, name, saved, tensor, path)
        saved = session.stepper.ranks.part(saved, *_split_of(session, name))
    expected = list(tensor.shape)
    if dim is not None and saved.dim() == tensor.dim():
        # Rows may once have held more tokens than this cache has slots; slots after their length are not needed.
        saved = saved.narrow(dim, 0, min(saved.shape[dim], layer.policy.slot_count))
        expected[dim] = saved.shape[dim]
    if list(saved.shape) != expected or saved.dtype != tensor.dtype:
        raise InputError(
            f"{name} is {saved.dtype} {given} in {path}, this session's is {tensor.dtype} {list(tensor.shape)}; use "
            "the same dtype and model"
        )
    limits = layer.length_limits()
    field = name.split(".")[-1]
    if field in limits:
        most = limits[field]
        if bool((saved < 0).any()) or (most is not None and bool((saved > most).any())):
            raise ValueError(f"{name} must be from 0 to {most or 'any number'}, got {saved.tolist()}")
    return saved


def _check_slots(
    layer: CacheLayer, name: str, saved: torch.Tensor, dim: int, rows: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Check that a tensor has the slots that its rows have filled.

    Raises:
        ValueError: If it has others.
    """
    slots = saved.shape[dim] if dim < saved.dim() else 0
    longest, most = (int(tokens.max()) for tokens in rows)
    if layer.max_length is not None:
        # A range, because slots are positions: a larger cache may have filled more, and one of unknown history may
        # have fewer than `most`.
        least = longest
    else:
        least = most = min(most, layer.policy.slot_count)
    if not least <= slots <= most:
        filled = str(least) if least == most else f"{least} to {most}"
        raise ValueError(f"{name} must have {filled} slots, which its rows have filled, got {slots}")


def _count_encoded(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(name.startswith(_ENCODED) for name in tensors)


def _check_parts(session: AnySession, name: str, whole: torch.Tensor, part: torch.Tensor, path: Path) -> None:
    """Check that a tensor splits into equal parts for the ranks."""
    dim, parts = _split_of(session, name)
    if parts > 1 and (whole.dim() != part.dim() or whole.shape[dim] != part.shape[dim] * parts):
        raise InputError(
            f"{name} is {list(whole.shape)} in {path}, which is not {parts} times this rank's {list(part.shape)} "
            f"in dimension {dim}; use the same model"
        )


def _split_of(session: AnySession, name: str) -> tuple[int, int]:
    """Return the dimension in which ranks split a state tensor, and the number of parts; 1 if each has all of it."""
    # Indexer keys and states are not split, because they do not belong to attention heads.
    dims = layer_of(session.stepper.layers, name).state[name.split(".")[-1]].dims
    if "num_heads" not in dims:
        return 0, 1
    return dims.index("num_heads"), session.parts_of_heads[int(name.split(".")[-2])]


def _check_rows(session: AnySession, length: torch.Tensor, ever: torch.Tensor, unfed: tuple[int | None, ...]) -> None:
    """Check the lengths and pending tokens of a file.

    Raises:
        ValueError: If a value is out of range.
    """
    if length.dtype != torch.int64 or ever.dtype != torch.int64 or ever.shape != length.shape:
        raise ValueError(f"lengths must be int64, one a row, got {length.dtype} and {ever.dtype} {list(ever.shape)}")
    if bool((length < 0).any()) or bool((ever < length).any()):
        raise ValueError(f"lengths must be from 0 to {ever.tolist()}, got {length.tolist()}")
    if len(unfed) != len(length) or any(
        token is not None and (type(token) is not int or not 0 <= token < session.vocab_size) for token in unfed
    ):
        raise ValueError(f"pending tokens must be ids below {session.vocab_size}, got {unfed}")


def _describe(layer: CacheLayer) -> dict:
    """Return the config that must agree. The capacity of a full layer is left out, because its slots are positions."""
    config = layer.config()
    if layer.max_length is None:
        return config
    policy = {name: value for name, value in config["policy"].items() if name != "capacity"}
    return {**config, "policy": policy}


def stored_rows(session: AnySession, index: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return keys and values that a layer holds, as attention reads them.

    Args:
        session: The session.
        index: Index of the layer.
        positions: Positions that every row holds, int64 [tokens].

    Returns:
        Keys [tokens, rows * heads, head_dim] and values [tokens, rows * heads, value_head_dim]; None if the runtime
        does not give them out, or the layer has them in another form.
    """
    layer, parts = session.stepper.layers[index], _parts_by_slot(session, index)
    slots = layer.policy.next_slot(positions)
    if parts is None or any(part.shape[0] <= int(slots.max()) for part in parts):
        return None
    assert layer.storage is not None
    rows = [part.index_select(0, slots.to(part.device)) for part in parts]
    return layer.storage.decode([one.reshape(len(positions), -1, one.shape[-1]) for one in rows])


def put_rows(
    session: AnySession, index: int, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> bool:
    """Write keys and values into the slots of a layer, the inverse of `stored_rows`; lengths stay.

    Args:
        session: The session.
        index: Index of the layer.
        positions: Positions of the tokens, int64 [tokens], each in another slot.
        keys: [tokens, rows * heads, head_dim].
        values: [tokens, rows * heads, value_head_dim].

    Returns:
        False, and nothing is written, if the runtime does not give out its memory, or the layer has keys and values in
        another form.
    """
    layer, parts = session.stepper.layers[index], _parts_by_slot(session, index)
    # Copies of a cache in another process have the filled slots only.
    if parts is None or any(part.shape[0] < layer.policy.slot_count for part in parts):
        return False
    assert layer.storage is not None
    slots, stored = layer.policy.next_slot(positions), layer.storage.encode(keys, values)
    pairs = list(zip(parts, stored, strict=True))
    if any((part[0].numel(), part.shape[-1]) != (rows.shape[1:].numel(), rows.shape[-1]) for part, rows in pairs):
        return False
    for part, rows in pairs:
        part[slots.to(part.device)] = rows.to(part.device).reshape(len(positions), *part.shape[1:])
    return True


def _parts_by_slot(session: AnySession, index: int) -> list[torch.Tensor] | None:
    """Return views of the stored keys and values of a layer in the order of `Storage.parts`, with slots first.

    None if the runtime does not give them out, or the layer has them in another form.
    """
    layer, runner = session.stepper.layers[index], session.stepper.runner
    if layer.storage is None or not set(layer.storage.parts) <= set(layer.state):
        return None
    state, found = state_of(runner), []
    for name in layer.storage.parts:
        tensor, dim = None, slots_dim(layer, name)
        if state is not None:
            tensor = state.get(f"layers.{index}.{name}")
        elif isinstance(runner, GivesTensors):
            tensor = runner.state_tensor(f"layers.{index}.{name}")
        if tensor is None or dim is None:
            return None
        # In every layout, the other dimensions are rows before heads, or one of them is 1.
        found.append(tensor.detach().movedim(dim, 0))
    return found


def layer_of(layers: Sequence[CacheLayer], name: str) -> CacheLayer:
    """Return the layer of a state tensor such as `layers.0.keys`, which engines prefix with another word."""
    return layers[int(name.split(".")[-2])]


def slots_dim(layer: CacheLayer, name: str) -> int | None:
    """Return the dimension of a state tensor of a layer that counts slots of the decoder's tokens, or None."""
    dims = layer.state[name.split(".")[-1]].dims
    # Native layouts of ExecuTorch have further slots, which no token reaches.
    slots = next((dim for dim in ("capacity", "slots") if dim in dims), None)
    return dims.index(slots) if slots is not None and layer.follows_decoder else None


def _filled(tensor: torch.Tensor, session: AnySession, name: str, most: int) -> torch.Tensor:
    dim = slots_dim(layer_of(session.stepper.layers, name), name)
    # A layer may have slots after its capacity, which no token reaches.
    policy = layer_of(session.stepper.layers, name).policy
    return tensor if dim is None else tensor.narrow(dim, 0, min(most, policy.slot_count))
