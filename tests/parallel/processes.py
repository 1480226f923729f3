"""Processes of a tensor parallel model on this machine: started, timed out, and what each of them found."""

from __future__ import annotations

import datetime
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

from ..support.forked import forkserver

#: Seconds that the processes have together. Loaded machines import slowly.
LIMIT = 300


@dataclass
class Rank:
    """What a check runs with, in its process.

    Attributes:
        rank: Its number.
        size: How many there are.
        folder: Shared by all, and with the test.
    """

    rank: int
    size: int
    folder: Path
    _models: dict[str, PreTrainedModel] = field(default_factory=dict)

    def model(self, name: str) -> PreTrainedModel:
        """The model that the test has saved under this name, split over the ranks by transformers' own plan."""
        if name not in self._models:
            config = DistributedConfig(tp_size=self.size)
            path = str(self.folder / name)
            self._models[name] = AutoModelForCausalLM.from_pretrained(path, distributed_config=config).eval()
        return self._models[name]


Check = Callable[[Rank], Any]


def run_ranks(folder: Path, size: int, checks: Sequence[Check], timeout: float = 60) -> list[dict[str, Any]]:
    """Run checks in `size` processes, one after the other.

    Returns:
        Of each rank, what each check gave by its name: text where it failed.
    """
    store = folder / f"store-{size}-{checks[0].__name__}"
    context = forkserver()
    arguments = [(rank, size, folder, store, list(checks), timeout) for rank in range(size)]
    processes = [context.Process(target=_run, args=one) for one in arguments]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(LIMIT)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
    return [_results(store, rank) for rank in range(size)]


def _results(store: Path, rank: int) -> dict[str, Any]:
    path = Path(f"{store}.{rank}.pt")
    return torch.load(path, weights_only=False) if path.exists() else {}


def _run(rank: int, size: int, folder: Path, store: Path, checks: list[Check], timeout: float) -> None:
    torch.set_num_threads(1)
    # As torchrun says it, which transformers asks for.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group("gloo", f"file://{store}", datetime.timedelta(seconds=timeout), rank=rank, world_size=size)
    me, found = Rank(rank, size, folder), {}
    for check in checks:
        try:
            found[check.__name__] = check(me)
        except Exception:
            found[check.__name__] = traceback.format_exc()
        # After each, as one may end the process.
        torch.save({**found, "processor seconds": sum(os.times()[:2])}, f"{store}.{rank}.pt")
    os._exit(0)
