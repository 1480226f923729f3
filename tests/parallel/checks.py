"""What is run on every rank; the tests look at what it gave."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from exportable_cache import ExportableCache, Session
from exportable_cache.backends.live.compile import StepCompiler
from exportable_cache.decoding import ContinuousBatch, PromptLookup, Sampling
from exportable_cache.parallel import ranks

from ..support.models import tokens
from .processes import Rank

FAMILY = "gemma3_text"
CAPACITY, PROMPT, LENGTH = 64, 11, 24
#: Tokens of a generation.
NEW = 10
#: Repeats itself, so that prompt lookup finds something.
REPEATED = torch.tensor([[5, 9, 7, 11, 5, 9, 7, 11, 5, 9, 7]])


def session(me: Rank, name: str = FAMILY, rows: int = 1, **options: Any) -> Session:
    model = me.model(name)
    cache = ExportableCache.from_model(model, CAPACITY, rows, rollback_slots=options.pop("rollback_slots", 0))
    return Session.from_model(model, cache, **options)


def logits_of(running: Session, ids: torch.Tensor, prompt: int = PROMPT) -> torch.Tensor:
    rows = [running.prefill(ids[:, :prompt])]
    rows += [running.decode(ids[:, position]) for position in range(prompt, ids.shape[1])]
    return torch.stack(rows, dim=1)


def error_of(call: Any) -> str:
    """What it raises, in words."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def logits_past_the_window(me: Rank) -> Any:
    running = session(me)
    cache = running.cache
    return {
        "logits": logits_of(running, tokens(LENGTH)),
        "heads": [layer.keys.shape[1] for layer in cache.layers],
        "bytes": cache.nbytes,
        "fingerprint": running.fingerprint,
    }


def taken_back(me: Rank) -> Any:
    running, ids = session(me, rollback_slots=3), tokens(LENGTH)
    logits_of(running, ids)
    running.rewind(3)
    again = torch.stack([running.decode(ids[:, -3 + index]) for index in range(3)], dim=1)
    running.reset()
    return {"again": again, "anew": logits_of(running, ids)}


def greedy(me: Rank) -> list[int]:
    return list(session(me).generate(REPEATED, max_new_tokens=NEW))


def drawn(me: Rank) -> list[int]:
    torch.manual_seed(me.rank)
    return list(session(me).generate(REPEATED, max_new_tokens=NEW, temperature=1.5))


def speculated(me: Rank) -> Any:
    running = session(me, rollback_slots=8, score_length=5)
    plain = list(running.generate(REPEATED, max_new_tokens=NEW, draft=PromptLookup(4)))
    torch.manual_seed(me.rank)
    running.reset()
    return plain, list(running.generate(REPEATED, max_new_tokens=NEW, temperature=1.5, draft=PromptLookup(4)))


def several_steps(me: Rank) -> list[int]:
    running = session(me, rollback_slots=2, steps_per_launch=3)
    return list(running.generate(REPEATED, max_new_tokens=NEW))


def rows(me: Rank) -> list[list[int]]:
    running = session(me, rows=3)
    prompts = [tokens(5)[0], tokens(14, seed=1)[0], tokens(9, seed=2)[0]]
    return [step.tolist() for step in running.generate(prompts, max_new_tokens=12)]


def continuous(me: Rank) -> list[list[int]]:
    torch.manual_seed(me.rank)
    batch = ContinuousBatch.from_model(me.model(FAMILY), CAPACITY, 2)
    settings = [None, Sampling(1.5), Sampling(1.5, seed=3), None]
    requests = [batch.submit(tokens(4 + 3 * index, seed=index), 8, one) for index, one in enumerate(settings)]
    for _ in batch.run():
        pass
    return [request.tokens for request in requests]


def perturbed(me: Rank) -> Any:
    """As if this rank's processor had summed in another order."""
    model = me.model(FAMILY)
    noise = torch.Generator().manual_seed(me.rank)

    def other_sums(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 0.5 * me.rank * torch.randn(output.shape, generator=noise)

    handle = model.lm_head.register_forward_hook(other_sums)
    try:
        running = session(me, rollback_slots=8, score_length=5)
        found = [list(running.generate(REPEATED, max_new_tokens=NEW))]
        running.reset()
        found.append(list(running.generate(REPEATED, max_new_tokens=NEW, temperature=2.0, draft=PromptLookup(4))))
        running.reset()
        return [*found, running.prefill(REPEATED)]
    finally:
        handle.remove()


def perturbed_apart(me: Rank) -> list[int]:
    """The same where tokens are chosen behind the graph of a step, as they are behind machine code."""
    model = me.model("one_layer")
    noise = 0.5 * me.rank * torch.randn(model.config.vocab_size, generator=torch.Generator().manual_seed(1))
    handle = model.lm_head.register_forward_hook(lambda module, inputs, output: output + noise)
    before = torch.compiler.get_default_backend()
    torch.compiler.set_default_backend("eager")
    try:
        with mock.patch.object(StepCompiler, "chooses_separately", lambda self, penalised: True):
            running = session(me, "one_layer", compile="wait", buckets=False, prefill_chunk=1)
            found = list(running.generate(REPEATED, max_new_tokens=NEW))
            running.close()
    finally:
        handle.remove()
        torch.compiler.set_default_backend(before)
    return found


def saved(me: Rank) -> Any:
    running, ids = session(me), tokens(LENGTH)
    running.prefill(ids[:, :PROMPT])
    running.save_state(me.folder / "by-ranks.safetensors")
    running.reset()
    running.load_state(me.folder / "by-ranks.safetensors")
    same = torch.stack([running.decode(ids[:, position]) for position in range(PROMPT, LENGTH)], dim=1)
    running.load_state(me.folder / "by-one.safetensors")
    other = torch.stack([running.decode(ids[:, position]) for position in range(PROMPT, LENGTH)], dim=1)
    missing = me.folder / ("by-one.safetensors" if me.rank == 0 else "missing.safetensors")
    return {"same": same, "other": other, "missing": error_of(lambda: running.load_state(missing))}


def disagreements(me: Rank) -> dict[str, str]:
    running = session(me)
    other = me.rank == me.size - 1
    ids = tokens(6, seed=int(other))
    return {
        "prompt": error_of(lambda: running.prefill(ids)),
        "length": error_of(lambda: running.prefill(ids[:, : 5 + other])),
        "seed": error_of(lambda: running.generate(tokens(6), temperature=1.0, seed=me.rank)),
        "stop": error_of(lambda: running.generate(tokens(6), stop=[me.rank])),
        "tokens": error_of(lambda: running.decode(torch.tensor([3 + other]))),
        "call": error_of(lambda: running.decode(torch.tensor([3])) if other else running.prefill(tokens(6))),
        "same": error_of(lambda: running.prefill(tokens(6))),
        "bad on all": error_of(lambda: running.prefill(tokens(6) - 200)),
    }


def refusals(me: Rank) -> dict[str, str]:
    model = me.model(FAMILY)
    cache = ExportableCache.from_model(model, CAPACITY)
    whole = ExportableCache.from_config(model.config, CAPACITY)
    with mock.patch.object(ranks, "versions", lambda: {"torch": f"2.13.{me.rank}"}):
        other_versions = error_of(lambda: ExportableCache.from_model(model, CAPACITY))
    return {
        "versions": other_versions,
        "save": error_of(lambda: cache.save(me.folder / "cache.safetensors")),
        "whole": error_of(lambda: Session.from_model(model, whole)),
        "background": error_of(lambda: Session.from_model(model, cache, compile="background")),
        "kept": error_of(lambda: Session.from_model(model, cache, compile="wait", graph_cache=me.folder / "graphs")),
    }


def heads_that_do_not_divide(me: Rank) -> dict[str, Any]:
    running = session(me, "one_head")
    found = {
        "logits": logits_of(running, tokens(LENGTH)),
        "fingerprint": running.fingerprint,
        "heads": [layer.keys.shape[1] for layer in running.cache.layers],
        "parts": running.cache.parts_of_heads,
    }
    running.save_state(me.folder / "one_head.safetensors")
    running.reset()
    running.load_state(me.folder / "one_head.safetensors")
    again = session(me, "one_head")
    return {
        **found,
        "length": running.length.tolist(),
        "again": again.prefill(tokens(LENGTH)),
        "refused": error_of(lambda: session(me, "three_heads")),
    }


def split_by_hand(me: Rank) -> Any:
    """A plan of one's own, by torch; and one that splits queries and leaves keys whole."""
    mesh = init_device_mesh("cpu", (me.size,))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan = dict.fromkeys(columns, ColwiseParallel()) | {
        "self_attn.o_proj": RowwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    found: list[Any] = []
    for left_out in ((), ("self_attn.k_proj", "self_attn.v_proj")):
        model = AutoModelForCausalLM.from_pretrained(str(me.folder / FAMILY)).eval()
        for layer in model.model.layers:
            parallelize_module(layer, mesh, {name: one for name, one in plan.items() if name not in left_out})
        if left_out:
            found.append(error_of(partial(ExportableCache.from_model, model, CAPACITY)))
        else:
            cache = ExportableCache.from_model(model, CAPACITY)
            running = Session.from_model(model, cache)
            found += [logits_of(running, tokens(LENGTH)), cache.parts_of_heads, running.fingerprint]
    return found


def offloaded(me: Rank) -> dict[str, Any]:
    model = me.model(FAMILY)
    cache = ExportableCache.from_model(model, CAPACITY, offload="host")
    running = Session.from_model(model, cache)
    found = {"logits": logits_of(running, tokens(LENGTH)), "bytes": (cache.nbytes, cache.resident_nbytes)}
    running.save_state(me.folder / "offloaded.safetensors")
    return found


def hangs(me: Rank) -> str:
    """The last rank does not come to a step."""
    running = session(me)
    if me.rank == me.size - 1:
        time.sleep(15)
        return ""
    return error_of(lambda: running.prefill(REPEATED))


class Census(TorchDispatchMode):
    """Counts what is sent: by operator, and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(issubclass(one, DTensor) for one in types):
            # Its own sums come here once it has taken its turn.
            return NotImplemented
        if "c10d" in name and "wait" not in name and "wrap" not in name:
            self.counts[name] = self.counts.get(name, 0) + 1
            first = args[0][0] if isinstance(args[0], list) else args[0]
            first = first[0] if isinstance(first, list) else first
            self.bytes += first.nbytes
        return func(*args, **(kwargs or {}))


def sent_by_a_step(running: Session) -> tuple[dict[str, int], int]:
    """What a step of plain decoding sends, by operator, and the bytes handed over."""
    running.reset()
    steps = running.generate(REPEATED, max_new_tokens=8)
    next(steps)
    with Census() as found:
        next(steps)
    steps.close()
    return found.counts, found.bytes


def census(me: Rank) -> Any:
    return sent_by_a_step(session(me))


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@contextmanager
def counted_graphs() -> Iterator[list[list[str]]]:
    """Compiles to graphs as they were traced, and gives what each of them sends; a second graph of one step fails."""
    graphs: list[list[str]] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if "c10d" in str(node.target)])
        return graph.forward

    before = torch.compiler.get_default_backend()
    torch.compiler.set_default_backend(aot_autograd(fw_compiler=counting))
    try:
        with torch._dynamo.config.patch(error_on_recompile=True):
            yield graphs
    finally:
        torch.compiler.set_default_backend(before)


def compiled(me: Rank) -> dict[str, Any]:
    with counted_graphs() as graphs:
        running = session(me, compile="wait")
        found: dict[str, Any] = {"tokens": list(running.generate(REPEATED, max_new_tokens=NEW)), "graphs": graphs}
        running.reset()
        found["logits"] = logits_of(running, tokens(LENGTH))
        running.close()
        running = session(me, compile="wait", rollback_slots=2, steps_per_launch=3)
        found["several"] = list(running.generate(REPEATED, max_new_tokens=NEW))
        running.close()
    return found


def of_each_model(me: Rank, run: Callable[[Path], Any]) -> dict[str, Any]:
    """What a check gives of every model that the test has saved, by its folder's name: text where it failed."""
    found: dict[str, Any] = {}
    for path in sorted(me.folder.iterdir()):
        if path.is_dir():
            try:
                found[path.name] = run(path)
            except Exception:
                found[path.name] = traceback.format_exc()
    return found


def compiled_families(me: Rank) -> dict[str, Any]:
    def compiled_family(path: Path) -> dict[str, Any]:
        with counted_graphs() as graphs:
            running = session(me, path.name, compile="wait", buckets=False)
            found = {"logits": logits_of(running, tokens(LENGTH)), "graphs": graphs}
            running.close()
        return found

    return of_each_model(me, compiled_family)


def killed(me: Rank) -> str:
    """The last rank ends amid a step."""
    running = session(me)
    running.prefill(REPEATED)
    running.save_state(me.folder / "before.safetensors")
    if me.rank == me.size - 1:
        layer = me.model(FAMILY).model.layers[1]
        layer.mlp.register_forward_pre_hook(lambda *inputs: os._exit(1))
    first = error_of(lambda: running.decode(torch.tensor([3])))
    return first + "\n" + error_of(lambda: running.decode(torch.tensor([3])))


def families(me: Rank) -> dict[str, Any]:
    """Of every model that the test has saved."""
    found = {}
    for path in sorted(me.folder.iterdir()):
        if path.is_dir():
            running = session(me, path.name)
            found[path.name] = {
                "logits": logits_of(running, tokens(LENGTH)),
                "bytes": [layer.nbytes for layer in running.cache.layers],
                "parts": running.cache.parts_of_heads,
                "fingerprint": running.fingerprint,
                "weights": sum(_local(one).nbytes for one in me.model(path.name).parameters()),
                "sent": sent_by_a_step(running),
            }
    return found
