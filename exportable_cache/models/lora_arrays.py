"""LoRA adapters without torch: checks, and files of `exportable-cache adapter` as arrays for the slots of a program."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import BundleError, InputError


def check_pair(
    what: str,
    name: str,
    shapes: tuple[Sequence[int], Sequence[int]],
    known: Mapping[str, tuple[int, int]],
    most: int,
) -> None:
    """Check that both matrices of an adapter fit a layer of a program.

    Args:
        what: Name of the adapter, for messages.
        name: Name of the layer.
        shapes: [rank, inputs] and [outputs, rank].
        known: Inputs and outputs of the layers that have slots for adapters.
        most: Largest rank that the slots have.

    Raises:
        InputError: If the layer has no slot, the adapter was trained for another model, or its rank is larger.
    """
    if name not in known:
        raise InputError(
            f"{what} changes {name!r:.100}, which has no slot for adapters; export with lora_targets "
            "(--lora-targets) that include it, or pass an adapter of this model"
        )
    (rank, inputs), outputs = shapes[0], shapes[1][0]
    if (inputs, outputs) != known[name]:
        raise InputError(
            f"{what} must have {known[name][0]} inputs and {known[name][1]} outputs in {name}, got {inputs} and "
            f"{outputs}; it was trained for another model, so pass one of this model"
        )
    if rank > most:
        raise InputError(
            f"{what} must have a rank of at most {most}, got {rank} in {name}; export with lora_rank={rank} "
            "(--lora-rank)"
        )


_FORMAT = "exportable_cache.adapter.v1"
_FIRST, _SECOND = ".lora_A", ".lora_B"
#: numpy's dtype and torch's name by the name in a file; bfloat16 is read as integers.
_DTYPES = {
    "F32": ("<f4", "torch.float32"),
    "F16": ("<f2", "torch.float16"),
    "BF16": ("<u2", "torch.bfloat16"),
    "F64": ("<f8", "torch.float64"),
}


@dataclass(frozen=True)
class AdapterSlots:
    """Slots of a program for adapters, as its manifest describes them.

    Attributes:
        slots: Number of adapters that it holds at once; slot 0 is the model itself.
        rank: Largest rank of an adapter.
        dtype: Name of the dtype of their tensors.
        targets: Inputs and outputs of each linear layer by its name, in the order of the slots' tensors.
        fingerprint: Fingerprint of the weights of the program, or "".
    """

    slots: int
    rank: int
    dtype: str
    targets: Mapping[str, tuple[int, int]]
    fingerprint: str = ""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> AdapterSlots | None:
        """Return the slots of a manifest, or None if the program has none.

        Raises:
            KeyError, TypeError, ValueError: If the entry is malformed.
        """
        lora = fields["program"].get("lora")
        if lora is None:
            return None
        targets = {str(one["name"]): (int(one["inputs"]), int(one["outputs"])) for one in lora["targets"]}
        return cls(int(lora["slots"]), int(lora["rank"]), str(lora["dtype"]), targets, fields.get("fingerprint") or "")

    def empty(self) -> list[np.ndarray]:
        """Return arrays that empty a slot: [inputs, rank] and [rank, outputs] of each layer, float32."""
        return [np.zeros(shape, np.float32) for shape in self._shapes]

    @property
    def _shapes(self) -> list[tuple[int, int]]:
        return [
            shape for inputs, outputs in self.targets.values() for shape in ((inputs, self.rank), (self.rank, outputs))
        ]

    def check(self, shapes: Sequence[Sequence[int]]) -> None:
        """Check that the program has these slots, because an adapter is written into its memory.

        Args:
            shapes: Shapes of the program's tensors for adapters, [slots + 1, ...] each.

        Raises:
            BundleError: If it has others.
        """
        expected = [(self.slots + 1, *shape) for shape in self._shapes]
        if [tuple(shape) for shape in shapes] != expected:
            raise BundleError(
                f"the program must have {len(expected)} tensors of {self.slots} slots for adapters, as its manifest "
                f"says, got {str([list(shape) for shape in shapes])[:200]}; export the model again"
            )

    def read(self, path: str | os.PathLike[str]) -> list[np.ndarray]:
        """Return the arrays of an adapter, padded with zeros to the rank of the slots.

        Raises:
            BundleError: If the file is missing, damaged, or not an adapter.
            InputError: If it was made for other weights, or does not fit the slots.
        """
        given = Path(path).expanduser()
        metadata, tensors = _read(given)
        made_for = metadata.get("fingerprint")
        if made_for and self.fingerprint and made_for != self.fingerprint:
            raise InputError(
                f"{given} was made for other weights than those of this program; make it again with "
                "`exportable-cache adapter FOLDER --for BUNDLE`"
            )
        found, indices = self.empty(), {name: 2 * index for index, name in enumerate(self.targets)}
        names = {name.removesuffix(_FIRST).removesuffix(_SECOND) for name in tensors}
        if {*tensors} != {name + end for name in names for end in (_FIRST, _SECOND)} or not names:
            raise _damaged(given, "its tensors are not pairs")
        for name in sorted(names):
            a, b = tensors[name + _FIRST], tensors[name + _SECOND]
            if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
                raise _damaged(given, f"{name!r:.100} must have two matrices of one rank")
            self._check(given, name, a, b)
            rank = a.shape[0]
            found[indices[name]][:, :rank], found[indices[name] + 1][:rank] = a.T, b.T
        return found

    def _check(self, given: Path, name: str, a: np.ndarray, b: np.ndarray) -> None:
        check_pair(str(given), name, (a.shape, b.shape), self.targets, self.rank)
        most = np.finfo(np.float16 if self.dtype == "float16" else np.float32).max
        if not all(bool((np.abs(one) <= most).all()) for one in (a, b)):
            raise InputError(
                f"{given} must have values that {self.dtype} holds, got larger ones in {name} (its scale included); "
                "train it again, or use a model in float32"
            )


def _damaged(path: Path, why: str) -> BundleError:
    return BundleError(f"{path} is not an adapter that `exportable-cache adapter` wrote: {why}; copy or make it again")


def _read(path: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Return the metadata and the tensors of an adapter's file as float32, after comparing its checksum.

    Raises:
        BundleError: If the file is missing, damaged, or of another format.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BundleError(
            f"cannot read the adapter {path}: {error.strerror or error}; pass a file of `exportable-cache adapter`"
        ) from error
    size = int.from_bytes(content[:8], "little")
    try:
        header = json.loads(content[8 : 8 + size])
        metadata = header.pop("__metadata__")
        checksum, kind = metadata.pop("checksum"), metadata["format"]
        digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode("ascii"))
        data, tensors = memoryview(content)[8 + size :], {}
        for name, entry in sorted(header.items()):
            stored, torchs = _DTYPES[entry["dtype"]]
            first, last = entry["data_offsets"]
            digest.update(json.dumps([name, torchs, entry["shape"]]).encode("ascii"))
            digest.update(data[first:last])
            array = np.frombuffer(data[first:last], stored).reshape(entry["shape"])
            tensors[name] = (array.astype("<u4") << 16).view("<f4") if stored == "<u2" else array
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"{type(error).__name__} in its header") from error
    if kind != _FORMAT:
        raise _damaged(path, f"it has format {kind!r:.60}, expected {_FORMAT!r}")
    if digest.hexdigest() != checksum:
        raise _damaged(path, "its checksum differs")
    return metadata, tensors
