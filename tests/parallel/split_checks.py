"""What is run on every rank of a split context, of stages and of a program in parts."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from typer.testing import CliRunner

from exportable_cache import ExportableCache, Session, load
from exportable_cache.cli.app import app
from exportable_cache.decoding import PromptLookup

from ..support.models import tokens
from .checks import CAPACITY, FAMILY, LENGTH, PROMPT, REPEATED, counted_graphs, error_of, logits_of, of_each_model
from .processes import Rank


def context(me: Rank) -> dict[str, Any]:
    """One sequence over the slots of all ranks, longer than those of one."""
    return of_each_model(me, _over_context)


def _over_context(path: Path) -> dict[str, Any]:
    model, ids = AutoModelForCausalLM.from_pretrained(str(path)).eval(), tokens(LENGTH)
    # Every slot is filled at the end.
    cache = ExportableCache.from_model(model, LENGTH, split_context=True)
    running = Session.from_model(model, cache)
    found: dict[str, Any] = {"logits": logits_of(running, ids), "bytes": cache.nbytes, "layers": repr(cache.layers)}
    found["full"] = error_of(lambda: running.decode(ids[:, 0]))
    if running.stepper.least_rollback[1] >= 3:
        running.rewind(3)
        found["again"] = torch.stack([running.decode(ids[:, -3 + index]) for index in range(3)], dim=1)
    running.reset()
    found["tokens"] = list(running.generate(REPEATED, max_new_tokens=16))
    running.save_state(path / "by-ranks.safetensors")
    running.reset()
    running.load_state(path / "by-one.safetensors")
    found["resumed"] = torch.stack([running.decode(ids[:, position]) for position in range(PROMPT, LENGTH)], dim=1)
    running.close()
    found["other attention"] = error_of(
        lambda: model(tokens(4), past_key_values=cache) if not model.set_attn_implementation("sdpa") else None
    )
    rows = Session.from_model(model, ExportableCache.from_model(model, LENGTH, 2, split_context=True))
    prompts = [tokens(5)[0], tokens(14, seed=1)[0]]
    found["rows"] = [step.tolist() for step in rows.generate(prompts, max_new_tokens=8)]
    return found


def compiled_context(me: Rank) -> Any:
    model = AutoModelForCausalLM.from_pretrained(str(me.folder / FAMILY)).eval()
    with counted_graphs() as graphs:
        cache = ExportableCache.from_model(model, LENGTH, split_context=True)
        running = Session.from_model(model, cache, compile="wait", buckets=False)
        found = {"logits": logits_of(running, tokens(LENGTH)), "graphs": graphs}
        running.close()
    return found


def staged(me: Rank) -> dict[str, Any]:
    """Layers split over the ranks."""
    return of_each_model(me, lambda path: _over_stages(me, path))


def _over_stages(me: Rank, path: Path) -> dict[str, Any]:
    split = DistributedConfig(pp_size=me.size)
    model, ids = AutoModelForCausalLM.from_pretrained(str(path), distributed_config=split).eval(), tokens(LENGTH)
    theirs = model.forward
    cache = ExportableCache.from_model(model, CAPACITY, rollback_slots=3)
    running = Session.from_model(model, cache, score_length=4)
    found: dict[str, Any] = {
        "logits": logits_of(running, ids),
        "bytes": cache.nbytes,
        "kept": [not layer.is_dummy for layer in cache.layers],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "saved": error_of(lambda: running.save_state(path / "state.safetensors")),
        "prompt": error_of(lambda: running.decode(torch.tensor([3 + me.rank]))),
    }
    running.reset()
    found["tokens"] = list(running.generate(REPEATED, max_new_tokens=16))
    running.reset()
    if running.stepper.least_rollback[1] > 1:
        found["drafted"] = list(running.generate(REPEATED, max_new_tokens=16, draft=PromptLookup(3)))
    running.close()
    found["compiled"] = error_of(lambda: Session.from_model(model, cache, compile="wait"))
    found["given back"] = model.forward is theirs
    rows = Session.from_model(model, ExportableCache.from_model(model, CAPACITY, 3))
    sizes = []
    with mock.patch.object(dist, "isend", lambda hidden, **to: sizes.append(hidden.shape[0]) or _isend(hidden, **to)):
        prompts = [tokens(5)[0], tokens(14, seed=1)[0], tokens(9, seed=2)[0]]
        found["rows"] = [step.tolist() for step in rows.generate(prompts, max_new_tokens=12)]
    return {**found, "sent": sizes}


_isend = dist.isend


def of_a_bundle(me: Rank) -> dict[str, Any]:
    """A program whose parts this group's ranks open."""
    running = load(me.folder / "bundle", trust=True)
    found: dict[str, Any] = {
        "logits": logits_of(running, tokens(LENGTH)),
        "heads": [layer["shape"][1] for layer in _keys_of(running)],
        "weights": sum(path.stat().st_size for path in (me.folder / "bundle" / f"rank-{me.rank}").iterdir()),
    }
    running.reset()
    found["tokens"] = list(running.generate(REPEATED, max_new_tokens=16))
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
