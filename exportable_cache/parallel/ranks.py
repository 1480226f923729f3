"""The processes that a model is split over (tensor parallelism): their tensors, and what they send each other.

The model's weights are split by transformers (`from_pretrained(..., distributed_config=DistributedConfig(tp_size=2))`)
or by torch (`parallelize_module`), which add the all-reduces. This file adds what a session needs: that all processes
are asked the same, that all take the same token, and a sentence when one of them is gone.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from ..common.compat.torch_distributed import broadcast_in_graph
from ..common.version import __version__
from ..errors import ExportableCacheError, InputError, RankLostError, UnsupportedModelError, first_line

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class PartOf:
    """A description of a tensor that is a part of one that processes share, kept in its attribute `part_of`.

    Attributes:
        shape: Shape of the whole tensor.
        dim: Dimension along which it is split.
        first: Index of the part's first element in that dimension.
        group: The processes; several may have the same part. None for a part that a program is exported from.
    """

    shape: tuple[int, ...]
    dim: int
    first: int
    group: ProcessGroup | None


def whole_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor, or of the tensor that it is a part of."""
    part = part_of(tensor)
    return tuple(tensor.shape) if part is None else part.shape


def is_split(tensor: torch.Tensor) -> bool:
    """Return True if this process has only a part of a tensor."""
    if part_of(tensor) is not None:
        return True
    split = split_tensor(tensor)
    if split is None or split.device_mesh.size() == 1:
        return False
    return not all(placement.is_replicate() for placement in split.placements)


def name_in_plan(name: str) -> str:
    """Return a name in the form of plans: `model.layers.*.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def part_of(tensor: torch.Tensor) -> PartOf | None:
    """Return the description of a part of a tensor, or None."""
    return getattr(tensor, "part_of", None)


def split_tensor(tensor: torch.Tensor) -> DTensor | None:
    """Return a tensor as a DTensor, or None if it is not one."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    # Imported here because it is slow, and most programs use one process.
    from torch.distributed.tensor import DTensor

    return tensor if isinstance(tensor, DTensor) else None


#: Values that one comparison takes, besides the name of the call.
_MOST_VALUES = 7
#: What communication that failed says of itself, where its class does not: gloo raises plain `RuntimeError`s.
_SIGNS = ("gloo", "NCCL", "ProcessGroup", "process group", "Connection", "connection", "Timed out", "timed out")
#: Seconds between the end of a process's connections and its own end.
_ENDING = 2.0


class Ranks:
    """The processes that share one model, as each of them sees it; every one calls the same methods in the same order.

    Args:
        group: The processes.
        device: Where the model's collectives take their tensors.

    Raises:
        InputError: If packages are of other versions on another rank.

    Attributes:
        rank: This process's number, from 0.
        size: How many there are.
        group: What they talk over.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        self.device = device
        self._first = dist.get_global_rank(self.group, 0)
        self._lost: str | None = None
        found = self._gathered((socket.gethostname(), os.getpid(), versions()))
        self._processes = [one[:2] for one in found]
        _check_versions([one[2] for one in found])

    def __repr__(self) -> str:
        return f"Ranks({self.rank} of {self.size})"

    # Copies of a cache or of a session share it: a group of processes is not copied.
    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self

    # -- agreement -----------------------------------------------------------------------------------------------------

    def check_same(self, call: str, **values: Any) -> None:
        """Refuse a call that is not the same on every rank; one message of 64 bytes.

        Args:
            call: Its name, for the message.
            **values: Its arguments, at most 7: tensors, containers, and what `repr` tells apart.

        Raises:
            InputError: On every rank, if they differ, with the arguments and the ranks.
            RankLostError: If a rank is gone.
        """
        assert len(values) <= _MOST_VALUES
        digests = [_digest(call), *(_digest(value) for value in values.values())]
        mine = torch.zeros(1 + _MOST_VALUES, dtype=torch.int64)
        mine[: len(digests)] = torch.tensor(digests)
        mine = mine.to(self.device)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        with self.watched():
            dist.all_gather(found, mine, group=self.group)
        rows = torch.stack(found).cpu()
        different = rows != rows[0]
        if not bool(different.any()):
            return
        others = different.any(dim=1).nonzero()[:, 0].tolist()
        ranks = f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
        if bool(different[:, 0].any()):
            raise InputError(
                f"{ranks} of {self.size} called another method than rank 0 (this is rank {self.rank}, in {call}); "
                "every rank of a parallel session makes the same calls in the same order"
            )
        names = [name for index, name in enumerate(values, start=1) if bool(different[:, index].any())]
        raise InputError(
            f"{call} got other {' and other '.join(names)} on {ranks} of {self.size} than on rank 0; every rank of a "
            "parallel session takes the same prompt, seed and options"
        )

    def check_all(self, error: Exception | None) -> None:
        """Raise if a rank has an error; all ranks call it instead of raising their own.

        Raises:
            Exception: This rank's own error; or, of another one's, an `InputError` that says so.
        """
        texts = self._gathered(None if error is None else f"{type(error).__name__}: {first_line(error)}")
        if error is not None:
            raise error
        for rank, text in enumerate(texts):
            if text is not None:
                raise InputError(f"rank {rank} of {self.size} refused this, and so all do: {text}")

    def of_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return rank 0's tensor, of the same shape and dtype.

        Sums of floating-point numbers need not agree to the bit between processors, and tokens have to: so what tokens
        follow from is one rank's.
        """
        with self.watched():
            if self.rank != 0:
                tensor = tensor.contiguous()
            # In place, because on rank 0 nothing changes, and elsewhere it is the result of a step without other users.
            sent = tensor if tensor.is_contiguous() else tensor.contiguous()
            dist.broadcast(sent, self._first, group=self.group)
        return sent

    def of_first_in_graph(self, tensor: torch.Tensor) -> torch.Tensor:
        """`of_first` as an operator, which graphs may have inside."""
        return broadcast_in_graph(tensor, self._first, self.group)

    def seed(self) -> int:
        """Return a seed that rank 0 has drawn."""
        return int(self.of_first(torch.randint(2**62, (1,)).to(self.device))[0])

    # -- the state -----------------------------------------------------------------------------------------------------

    def whole(self, part: torch.Tensor, dim: int, parts: int) -> torch.Tensor:
        """Return a tensor of which ranks have equal parts, in the order of ranks.

        Args:
            part: This rank's part.
            dim: Dimension along which the tensor is split.
            parts: Number of parts; neighbours have the same part if there are fewer than ranks.
        """
        if parts == 1:
            return part
        # Offloaded, it is elsewhere than where they talk.
        part = part.to(self.device).contiguous()
        found = [torch.empty_like(part) for _ in range(self.size)]
        with self.watched():
            dist.all_gather(found, part, group=self.group)
        return torch.cat(found[:: self.size // parts], dim)

    def part(self, whole: torch.Tensor, dim: int, parts: int) -> torch.Tensor:
        """Return this rank's part of `whole`, a view."""
        return whole.tensor_split(parts, dim)[self.rank * parts // self.size]

    # -- processes that are gone ---------------------------------------------------------------------------------------

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Run a block that communicates with the other ranks.

        Raises:
            RankLostError: If a rank is gone. The group cannot be used any more.
        """
        if self._lost is not None:
            raise RankLostError(self._lost)
        try:
            yield
        except ExportableCacheError:
            raise
        except RuntimeError as error:
            if not is_of_communication(error):
                raise
            gone = self._gone_soon()
            who = f"rank {', '.join(map(str, gone))} of {self.size} is gone" if gone else "a rank does not answer"
            self._lost = (
                f"{who}, so the step that this is, on rank {self.rank}, cannot be finished ({_said(error)}); "
                "start all ranks again, and load_state() what was saved before"
            )
            raise RankLostError(self._lost) from error

    def _gone_soon(self) -> list[int]:
        """`_gone`, once a process whose connections have just been closed has had the time to end."""
        latest = time.monotonic() + _ENDING
        while not (gone := self._gone()) and time.monotonic() < latest:
            time.sleep(0.01)
        return gone

    def _gone(self) -> list[int]:
        """Return the ranks on this machine whose process has ended."""
        host = socket.gethostname()
        return [rank for rank, (where, pid) in enumerate(self._processes) if where == host and _has_ended(pid)]

    def _gathered(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        with self.watched():
            dist.all_gather_object(found, value, group=self.group)
        return found


def versions() -> dict[str, str]:
    """Return the versions of the packages that a rank's numbers depend on."""
    return {name: metadata.version(name) for name in ("torch", "transformers")} | {"exportable_cache": __version__}


def _check_versions(found: Sequence[Mapping[str, str]]) -> None:
    for rank, mine in enumerate(found):
        for name, version in mine.items():
            if version != found[0][name]:
                raise InputError(
                    f"rank {rank} has {name} {version}, rank 0 {found[0][name]}; install the same version on every rank"
                )


def ranks_of(model: nn.Module) -> Ranks | None:
    """Return the processes that a model is split over, or None if it is whole in each.

    Every one of them has to ask.

    Raises:
        UnsupportedModelError: If it is split in more than one way.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    split = [one for one in map(split_tensor, model.parameters()) if one is not None]
    if not split:
        return None
    meshes = {id(one.device_mesh): one.device_mesh for one in split}
    groups = {tuple(mesh.mesh.flatten().tolist()) for mesh in meshes.values()}
    mesh = next(iter(meshes.values()))
    if len(groups) > 1 or mesh.ndim > 1:
        shapes = sorted({str(tuple(one.mesh.shape)) for one in meshes.values()})
        raise UnsupportedModelError(
            f"the model's weights are split over {len(groups)} groups of processes, in meshes of {', '.join(shapes)}; "
            "a parallel session takes tensor parallelism alone: one mesh of one dimension"
        )
    if mesh.size() == 1:
        return None
    return Ranks(mesh.get_group(), split[0].to_local().device)


def ranks_of_program(size: int, what: str) -> Ranks:
    """Return the processes of a program for `size` ranks: the default group, which torchrun's variables may start.

    Args:
        size: Number of ranks.
        what: The program, for messages.

    Raises:
        InputError: If there is no group, or it is of another size.
    """
    remedy = f"start {size} processes: torchrun --nproc-per-node {size} -m exportable_cache generate {what}"
    if not dist.is_available() or not dist.is_initialized():
        launched = os.environ.get("WORLD_SIZE")
        if not dist.is_available() or launched is None or "RANK" not in os.environ:
            raise InputError(
                f"{what} was exported for {size} ranks, and this is one process without a process group; {remedy}, or "
                "call torch.distributed.init_process_group() first"
            )
        _check_size(size, int(launched), what, remedy)
        # Programs run on the CPU.
        dist.init_process_group("gloo")
    _check_size(size, dist.get_world_size(), what, remedy)
    group = dist.group.WORLD
    assert group is not None
    return Ranks(group, torch.device("cpu"))


def _check_size(size: int, found: int, what: str, remedy: str) -> None:
    if found != size:
        raise InputError(
            f"{what} was exported for {size} ranks, and this group has {found}; {remedy}, or export it again with "
            f"{f'tensor_parallel={found}' if found > 1 else 'no tensor_parallel'}"
        )


def is_of_communication(error: BaseException) -> bool:
    """Return True if an error says that another process was not reached."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)
    )


def _said(error: Exception) -> str:
    """Return what failed, without the source location and the advice."""
    return re.sub(r"^\[\S+\] ", "", first_line(error)).partition(". ")[0]


def _digest(value: Any) -> int:
    """Return a 63-bit digest of a value."""
    digest = hashlib.sha256()
    _add(digest, value)
    return int.from_bytes(digest.digest()[:8], "little") >> 1


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"tensor {value.dtype} {tuple(value.shape)} ".encode())
        raw = value.detach().cpu()
        raw = raw.to_dense() if raw.layout is not torch.strided else raw
        digest.update(raw.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)} ".encode())
        for name, one in value.items():
            _add(digest, name)
            _add(digest, one)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        digest.update(f"sequence {len(value)} ".encode())
        for one in value:
            _add(digest, one)
    else:
        text = repr(value)
        # Without a `repr` of its own an object is represented by its class, because addresses differ between processes.
        digest.update((type(value).__qualname__ if " at 0x" in text else f"{type(value).__name__} {text}").encode())


def _has_ended(pid: int) -> bool:
    """Return True if a process of this machine has ended, even if its parent has not waited for it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0] in ("Z", "X")
    except (OSError, IndexError):
        return False
