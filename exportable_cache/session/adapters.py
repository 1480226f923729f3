"""Adapters of a session: the files that hold them, the slots that they are in, and the rows that use them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..bundle import signing
from ..common.fs.tensor_files import damaged_if_malformed, read_tensors, write_tensors
from ..errors import BundleError, InputError
from ..models.loading.adapters import LORA_DTYPES, LoraWeights, read_lora
from ..models.lora import WRITE_ADAPTER, LoraSlots, check_fits, lora_layers, packed, slots_of
from .state import LoadedAdapter

if TYPE_CHECKING:
    from torch import nn

    from ..backends.base import Runner
    from .stepper import ProgramStepper

_FORMAT = "exportable_cache.adapter.v1"
_WRITER = "`exportable-cache adapter`"


def write_adapter_file(
    path: Path,
    adapter: LoraWeights,
    slots: LoraSlots,
    fingerprint: str | None,
    report: Mapping[str, Any] | None,
    sign: str | os.PathLike | None = None,
) -> None:
    """Write an adapter for the slots of a program, with a checksum, and a signature next to it if asked to.

    Args:
        path: File to write.
        adapter: The adapter.
        slots: The program's slots.
        fingerprint: Fingerprint of the weights of the program.
        report: Result of its verification, or None.
        sign: File of the private key to sign it with; None for no signature.

    Raises:
        InputError: If the adapter does not fit the slots, or the file cannot be written.
    """
    check_fits(slots, adapter.tensors, f"the adapter {adapter.name!r}")
    key = None if sign is None else signing.private_key(sign)
    tensors = {}
    for name, (a, b) in adapter.tensors.items():
        tensors[f"{name}.lora_A"], tensors[f"{name}.lora_B"] = a.contiguous(), b.contiguous()
    metadata = {
        "format": _FORMAT,
        "name": adapter.name.encode("ascii", "backslashreplace").decode(),
        "layers": slots.digest,
        "fingerprint": fingerprint or "",
        "verification": json.dumps(report),
    }
    try:
        # Readable as other files are, because it holds no prompts.
        write_tensors(path, tensors, metadata, mode=0o666)
        if key is not None:
            _, written = read_tensors(path, "an adapter", _FORMAT, _WRITER)
            signing.sign(path.parent, _signed(written), key, f"{path.name}.sig")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}; choose another path") from error


def _signed(metadata: Mapping[str, str]) -> bytes:
    """Return the bytes that the signature of an adapter covers: its checksum, which covers the file."""
    return f"adapter {metadata['checksum']}\n".encode()


def read_adapter(
    path: str | os.PathLike, slots: LoraSlots, fingerprint: str | None, key: str | os.PathLike | None = None
) -> LoraWeights:
    """Read an adapter for the slots of a program, from a file of `write_adapter_file` or a folder that peft saved.

    A folder is compared by names and shapes only, because peft does not record the weights that it was trained for.

    Args:
        path: The file or the folder.
        slots: The program's slots.
        fingerprint: Fingerprint of the weights of the program.
        key: File of the public key that must have signed it; None to skip the check.

    Raises:
        BundleError: If the file is missing, damaged, not such a file, or not signed with the key.
        InputError: If it was made for other weights or does not fit the slots, or see `read_lora`.
        UnsupportedModelError: See `read_lora`.
    """
    given = Path(path).expanduser()
    public = None if key is None else signing.public_key(key)
    if given.is_dir():
        if public is not None:
            raise InputError(
                f"key requires a file of `exportable-cache adapter`, got the folder {given}; make its file"
            )
        adapter = read_lora(given)
        check_fits(slots, adapter.tensors, f"the adapter in {given}")
        return adapter
    if not given.exists():
        raise BundleError(
            f"cannot read an adapter from {given}: there is no such file; pass a folder that peft saved, or a file of "
            f"{_WRITER}"
        )
    if given.name == "adapter_model.safetensors":
        raise InputError(
            f"{given} is a part of an adapter that peft saved; pass its folder, or make a file with {_WRITER}"
        )
    tensors, metadata = read_tensors(given, "an adapter", _FORMAT, _WRITER)
    if public is not None:
        signing.check(given.parent, _signed(metadata), public, f"{given.name}.sig")
    with damaged_if_malformed(given, "an adapter", "make it again"):
        made_for = metadata["fingerprint"]
        if made_for and fingerprint and made_for != fingerprint:
            raise InputError(
                f"{given} was made for other weights than those of this program; make it again with "
                "`exportable-cache adapter FOLDER --for BUNDLE`"
            )
        names = [name.removesuffix(".lora_A") for name in tensors if name.endswith(".lora_A")]
        pairs = {name: (tensors.pop(f"{name}.lora_A"), tensors.pop(f"{name}.lora_B")) for name in names}
        if tensors:
            raise ValueError(f"{min(tensors)!r:.80} is not a tensor of an adapter")
        for name, pair in pairs.items():
            if any(one.dim() != 2 or one.dtype not in LORA_DTYPES for one in pair):
                raise ValueError(f"{name!r:.80} must have two matrices of floats")
            if pair[0].shape[0] != pair[1].shape[1] or not all(bool(torch.isfinite(one).all()) for one in pair):
                raise ValueError(f"{name!r:.80} must have finite matrices of one rank")
        check_fits(slots, pairs, f"the adapter in {given}")
        return LoraWeights(metadata["name"], pairs)


#: The model itself.
_NONE = LoadedAdapter()


@dataclass(eq=False)
class SessionAdapters:
    """The adapters that a program holds, by name. Forks of a session share them.

    Attributes:
        slots: The program's slots; None if it was made without.
        device: Device of the program's inputs.
        names: The adapters that are loaded, by name.
    """

    slots: LoraSlots | None
    device: torch.device | str = "cpu"
    names: dict[str, LoadedAdapter] = field(default_factory=dict)

    @classmethod
    def of_model(cls, model: nn.Module, device: torch.device | str) -> SessionAdapters:
        """Return the adapters in a model's slots, which all sessions over the model share."""
        layers = lora_layers(model)
        if not layers:
            return cls(None)
        tensor = next(iter(layers.values())).lora_a
        if tensor not in _LIVE:
            _LIVE[tensor] = cls(slots_of(model), device)
        return _LIVE[tensor]

    def checked(self) -> LoraSlots:
        """Return the slots.

        Raises:
            InputError: If the program has none.
        """
        if self.slots is None:
            raise InputError(
                "this program has no slots for adapters; export, or make the session, with lora_slots=1 or more "
                "(--lora-slots)"
            )
        return self.slots

    def load(self, runner: Runner, adapter: LoraWeights, name: str) -> None:
        """Write an adapter into a free slot, or in place of the one of the same name.

        Raises:
            InputError: If every slot is used.
        """
        slots = self.checked()
        free = sorted(set(range(1, slots.slots + 1)) - {one.slot for one in self.names.values()})
        if name not in self.names and not free:
            raise InputError(
                f"the program has {slots.slots} slots for adapters, which hold {', '.join(self.names)}; unload one of "
                "them first, or export with more lora_slots (--lora-slots)"
            )
        loaded = self.names.get(name) or LoadedAdapter(free[0])
        self._write(runner, loaded.slot, packed(slots, adapter.tensors))
        loaded.loads, loaded.name, loaded.digest = loaded.loads + 1, name, _digest(adapter.tensors)
        self.names[name] = loaded

    def unload(self, runner: Runner, name: str) -> None:
        """Empty the slot of an adapter. Rows of all sessions that use it continue without an adapter.

        Raises:
            InputError: If there is no adapter of this name.
        """
        loaded = self.named(name)
        self._write(runner, loaded.slot, packed(self.checked(), {}))
        del self.names[name]
        loaded.slot = 0
        loaded.loads += 1

    def _write(self, runner: Runner, slot: int, tensors: list[torch.Tensor]) -> None:
        runner.run(WRITE_ADAPTER, *(tensor.to(self.device) for tensor in (torch.tensor([slot]), *tensors)))

    def named(self, name: str | None) -> LoadedAdapter:
        """Return an adapter by its name; None for the model itself.

        Raises:
            InputError: If there is no adapter of this name.
        """
        if name is None:
            return _NONE
        if name not in self.names:
            known = ", ".join(self.names) or "none"
            raise InputError(
                f"adapter must be one that was loaded ({known}), or None, got {name!r}; load_adapter first"
            )
        return self.names[name]

    def use(self, stepper: ProgramStepper, chosen: str | None | Sequence[str | None]) -> None:
        """Run the next steps with an adapter for all rows, or with one for each row.

        Raises:
            InputError: If there is no adapter of a name, or not one for each row.
        """
        names = [chosen] * stepper.batch_size if chosen is None or isinstance(chosen, str) else chosen
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, (str, type(None))) for name in names):
            raise InputError(
                f"adapter must be a name, None, or a list with one for each row, got {chosen!r:.100}; pass a name of "
                "`adapters`"
            )
        if len(names) != stepper.batch_size:
            raise InputError(
                f"adapter must be one name, or {stepper.batch_size} for the rows, got {len(names)}; pass one a row"
            )
        stepper.adapters = tuple(self.named(name) for name in names)


def _digest(tensors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> str:
    """Return the sha256 of an adapter's tensors."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode())
        for tensor in tensors[name]:
            found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


#: The adapters of live models, by the slots of their first layer.
_LIVE = WeakTensorKeyDictionary()
