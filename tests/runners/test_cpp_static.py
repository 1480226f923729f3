"""The C++ session over programs in the static form: the host keeps the cache, as the Python loop does."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from exportable_cache import load
from exportable_cache.demo import demo_path

from ..support.models import tiny_model
from ..support.sessions import exported_bundle
from .conftest import TOLERANCE, Probe, ids
from .test_cpp import prompt_of, refused

CHUNK = 12


@pytest.fixture(scope="module")
def demo_static() -> Path:
    model = AutoModelForCausalLM.from_pretrained(demo_path())
    return exported_bundle(model, "executorch", 512, form="static", prefill_chunk=32, verify=False)


@pytest.mark.parametrize("keys", ["rows", "transposed"])
def test_logits_are_the_python_loops_past_the_window(keys: str, probe: Probe) -> None:
    # Two rotary tables, and a chunk that is longer than the ring of 8 slots.
    bundle = exported_bundle(
        tiny_model("gemma3_text"), "executorch", 64, form="static", prefill_chunk=CHUNK, keys=keys, verify=False
    )
    session, commands, expected = load(bundle), [("open", bundle)], []
    for count in (1, CHUNK - 1, CHUNK, 2 * CHUNK + 3):
        tokens = [token % 60 for token in prompt_of(count + 20, seed=count)]
        session.reset()
        commands += [("reset",), ("prefill", ids(tokens[:count])), *(("decode", token) for token in tokens[count:])]
        expected += [None, session.prefill(torch.tensor([tokens[:count]]))]
        expected += [session.decode(torch.tensor([token])) for token in tokens[count:]]
    for reply, logits in zip(probe(*commands)[1:], expected, strict=True):
        assert reply.ok, reply
        if logits is not None:
            assert (torch.tensor(reply.numbers()) - logits[0]).abs().max() <= TOLERANCE


def test_learned_positions_are_given(probe: Probe) -> None:
    model = tiny_model("gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=64)
    bundle = exported_bundle(model, "executorch", 64, form="static", prefill_chunk=4, verify=False)
    tokens = [token % 60 for token in prompt_of(7)]
    reply = probe(("open", bundle), ("prefill", ids(tokens)))[1]
    expected = load(bundle).prefill(torch.tensor([tokens]))[0]
    assert (torch.tensor(reply.numbers()) - expected).abs().max() <= TOLERANCE


def test_the_demo_generates_the_same_and_keeps_its_states(demo_static: Path, probe: Probe, tmp_path: Path) -> None:
    session, prompt, state = load(demo_static), prompt_of(70), tmp_path / "state"
    expected = session.generate(torch.tensor([prompt]), max_new_tokens=60)
    opened, first, _, _, taken_back, _, again, other, saved, loaded, after = probe(
        ("open", demo_static),
        ("generate", ids(prompt), "max_new_tokens=60"),
        ("reset",),
        ("prefill", ids(prompt[:10])),
        ("rewind", 4),
        ("prefill", ids(prompt[6:69])),
        ("decode", prompt[69]),
        ("save", state),
        ("prefill", ids(prompt_of(40, seed=3))),
        ("load", state),
        ("decode", 5),
    )  # fmt: skip
    assert opened.tokens() == [512] and first.tokens() == [int(token) for token in expected]
    assert taken_back.ok and other.ok and saved.ok and loaded.ok
    session.reset()
    logits = session.prefill(torch.tensor([prompt]))
    assert (torch.tensor(again.numbers()) - logits[0]).abs().max() <= TOLERANCE
    logits = session.decode(torch.tensor([5]))
    assert (torch.tensor(after.numbers()) - logits[0]).abs().max() <= TOLERANCE


def test_what_does_not_fit_is_refused(demo_static: Path, probe: Probe, tmp_path: Path) -> None:
    def changed(name: str, capacity: int | None = None, **plan: object) -> Path:
        folder = tmp_path / name
        shutil.copytree(demo_static, folder)
        os.chmod(folder / "manifest.json", 0o644)
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"]["program.pte"]["details"]["static"].update(plan)
        for layer in manifest["layers"]:
            layer["policy"] |= {"capacity": capacity} if capacity and "capacity" in layer["policy"] else {}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        return folder

    plan = json.loads((demo_static / "manifest.json").read_text())["files"]["program.pte"]["details"]["static"]
    wider = [{**layer, "slots": 10**9} if layer["window"] is None else layer for layer in plan["layers"]]
    cut = changed("cut")
    rope = cut / "rope.safetensors"
    rope.chmod(0o644)
    rope.write_bytes(rope.read_bytes()[:-8])
    longer = changed("longer")
    (longer / "rope.safetensors").chmod(0o644)
    with (longer / "rope.safetensors").open("ab") as file:
        file.write(b"x")
    cases = [
        (cut, "'rope_0_sin' must be finite [positions, size]"),
        (longer, "bytes, at most"),
        (changed("slots", layers=wider), "is [1, 1, "),
        (changed("turned", transposed=True), "layers_0_keys is [1, 2, 16, 64], not [1, 2, 64, 16]"),
        (changed("positions", positions=True), "inputs and returns 9 outputs, not"),
        (changed("layers", layers=plan["layers"][1:]), "details.static.layers has 3 elements, layers 4"),
        (
            changed("window", layers=[{**plan["layers"][0], "window": 3}, *plan["layers"][1:]]),
            "slots and window differ",
        ),
        (changed("capacity", capacity=1024), "slots and window differ from those of layers."),
        (changed("mask", layers=[{**plan["layers"][0], "mask": "x"}, *plan["layers"][1:]]), "mask is 'x'"),
        (changed("table", tables=["rope_0_cos", "none"]), "'none' must be finite"),
    ]
    for reply, (_, said) in zip(probe(*(("open", folder) for folder, _ in cases)), cases, strict=True):
        refused(reply, "bundle", said)
