"""Checks that run on every rank of a program in parts."""

from __future__ import annotations

import os
import shutil
import time
from typing import Any
from unittest import mock

import torch
from typer.testing import CliRunner

from exportable_cache import Session, load
from exportable_cache.bundle import files
from exportable_cache.cli.app import app

from ..support.models import tokens
from .checks import LENGTH, NEW, PROMPT, REPEATED, error_of, logits_of
from .processes import Rank


def of_a_bundle(me: Rank) -> dict[str, Any]:
    """A program whose parts this group's ranks open."""
    running = load(me.folder / "bundle", trust=True)
    found: dict[str, Any] = {
        "logits": logits_of(running, tokens(LENGTH)),
        "heads": [layer["shape"][1] for layer in _keys_of(running)],
        "weights": sum(path.stat().st_size for path in (me.folder / "bundle" / f"rank-{me.rank}").iterdir()),
    }
    running.reset()
    found["tokens"] = list(running.generate(REPEATED, max_new_tokens=NEW))
    running.save_state(me.folder / "by-programs.safetensors")
    running.load_state(me.folder / "by-one.safetensors")
    found["resumed"] = running.decode(tokens(LENGTH)[:, PROMPT])
    other = str(5 + me.rank)
    command = ["generate", str(me.folder / "bundle"), "--prompt", "the code is", "--max-new-tokens"]
    found["printed"] = CliRunner().invoke(app, [*command, "5", "--trust"])
    found["refused"] = CliRunner().invoke(app, [*command, other, "--trust"])
    for name in ("printed", "refused"):
        result = found[name]
        found[name] = (result.exit_code, result.stdout, result.stderr)
    return found


def killed_program(me: Rank) -> str:
    """The last rank ends instead of running the step that the others run."""
    running, opened = load(me.folder / "bundle", trust=True), me.folder / "opened"
    if me.rank == me.size - 1:
        # The others open it together with this one, and may not be done yet.
        while not opened.exists():
            time.sleep(0.01)
        os._exit(1)
    opened.touch()
    return error_of(lambda: running.runner.run("decode", torch.tensor([[3]]), torch.tensor([0])))


def _keys_of(running: Session) -> list[dict[str, Any]]:
    state = running.runner.state
    return [{"shape": list(state[f"layers.{index}.keys"].shape)} for index in range(len(running.layers))]


def files_read(me: Rank) -> dict[str, Any]:
    """Return the files a rank reads, and what it opens: its part alone, and a part that is damaged."""
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
