"""What is run on every rank of a continuous batch over stages, and of a bundle whose files each reads for itself."""

from __future__ import annotations

import shutil
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from exportable_cache import load
from exportable_cache.bundle import files
from exportable_cache.decoding import ContinuousBatch, Sampling

from ..support.models import tokens
from .checks import CAPACITY, PROMPT, error_of, logits_of
from .processes import Rank

#: Of the requests, in their order.
SETTINGS = (None, Sampling(1.5, seed=3), None, None, Sampling(1.5, seed=4), None)


def submit_all(batch: ContinuousBatch) -> Any:
    """Requests of different length, more than there are rows."""
    return [batch.submit(tokens(4 + 3 * index, seed=index), 8, one) for index, one in enumerate(SETTINGS)]


def continuous_over_stages(me: Rank) -> dict[str, Any]:
    """Of every model that the test has saved."""
    split = DistributedConfig(pp_size=me.size)
    paths = sorted(path for path in me.folder.iterdir() if path.is_dir())
    return {
        path.name: _over_stages(AutoModelForCausalLM.from_pretrained(str(path), distributed_config=split).eval())
        for path in paths
    }


def _over_stages(model: Any) -> dict[str, Any]:
    """Requests that start and finish on their own, and in which order their steps were begun and finished."""
    theirs = model.forward
    batch = ContinuousBatch.from_model(model, CAPACITY, 4)
    calls: list[tuple[str, int]] = []

    def noting(kind: str, step: Any) -> Any:
        def noted(*given: Any) -> Any:
            begun = step(*given)
            calls.append((kind, (given[1] if kind == "begin" else given[0].rows).start))
            return begun

        return noted

    runner = batch.decode.runner
    with (
        mock.patch.object(runner, "begin", noting("begin", runner.begin)),
        mock.patch.object(runner, "finish", noting("finish", runner.finish)),
    ):
        requests = submit_all(batch)
        batch.step()
        refused = error_of(lambda: batch.decode.decode(torch.tensor([3, 3, 3, 3])))
        for _ in batch.run():
            pass
    batch.prefill.close()
    after_one = model.forward is theirs
    batch.decode.close()
    return {
        "continuous": [one.tokens for one in requests],
        "calls": calls,
        "under way": refused,
        "forward": (after_one, model.forward is theirs),
    }


def files_read(me: Rank) -> dict[str, Any]:
    """What a rank reads of a bundle, whole; where it has its own part alone; and where the last rank's is damaged."""
    read: list[str] = []
    digests_of = files.digests_of

    def noting(paths: Any, *more: Any) -> Any:
        read.extend(path.relative_to(me.folder / "bundle").as_posix() for path in paths)
        return digests_of(paths, *more)

    with mock.patch.object(files, "digests_of", noting):
        load(me.folder / "bundle", trust=True, check=True)
    found: dict[str, Any] = {"read": read}
    own = me.folder / f"own-{me.rank}"
    others = shutil.ignore_patterns(*(f"rank-{rank}" for rank in range(me.size) if rank != me.rank))
    shutil.copytree(me.folder / "bundle", own, ignore=others)
    found["own"] = logits_of(load(own, trust=True, check=True), tokens(PROMPT + 1))
    if me.rank == me.size - 1:
        path = own / f"rank-{me.rank}" / "program.pt2"
        path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    found["damaged"] = error_of(lambda: load(own, trust=True, check=True))
    return found
