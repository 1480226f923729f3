"""LoRA adapters in the C++ session: the logits of Python's session with each, and files that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exportable_cache import export, load
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.models.loading.adapters import read_lora
from exportable_cache.session.adapters import write_adapter_file

from ..support.models import tiny_model, tokens
from ..test_adapters import adapted
from .conftest import TOLERANCE, Probe, ids

KINDS = {"one": {}, "two": {"r": 2, "target_modules": ["k_proj", "up_proj"], "use_rslora": True}}


@pytest.mark.full
def test_adapters_give_the_logits_of_the_session(tmp_path: Path, probe: Probe) -> None:
    """Switch between two adapters and the model itself, and refuse files that are not for the program."""
    pytest.importorskip("peft")
    path = export(
        tiny_model("llama"),
        "executorch",
        32,
        tmp_path / "x",
        recipe="portable",
        lora_slots=2,
        lora_rank=4,
        verify=False,
    ).path
    opened = Bundle.open(path)
    assert opened.manifest.program.lora is not None
    slots = opened.manifest.program.lora.described()
    session, given = load(path), tokens(13)
    expected = {"": session.prefill(given)[0]}
    for seed, (name, options) in enumerate(KINDS.items()):
        adapted(seed, **options).save_pretrained(tmp_path / name)
        file = tmp_path / f"{name}.adapter"
        write_adapter_file(file, read_lora(tmp_path / name), slots, opened.manifest.fingerprint, None)
        session.load_adapter(file, name)
        session.use_adapter(name)
        session.reset()
        expected[name] = session.prefill(given)[0]
    assert (expected["one"] - expected["two"]).abs().max() > 0.1
    raw = (tmp_path / "one.adapter").read_bytes()
    (tmp_path / "cut.adapter").write_bytes(raw[:-3])
    (tmp_path / "long.adapter").write_bytes(b"\xff" * 8 + raw[8:])
    (tmp_path / "text.adapter").write_text("an adapter")
    (tmp_path / "other.adapter").write_bytes(raw.replace(opened.manifest.fingerprint.encode(), b"f" * 64))
    with open(tmp_path / "huge.adapter", "wb") as file:
        file.truncate(1 << 40)  # it has holes, and takes no space on the disk
    flipped = bytearray(raw)
    flipped[-3] ^= 1
    (tmp_path / "flipped.adapter").write_bytes(flipped)
    files = [f"{name}.adapter" for name in ("flipped", "cut", "long", "text", "other", "missing", "huge")]
    files += ["one", "one/adapter_model.safetensors"]
    bad = [("load_adapter", tmp_path / file, "x") for file in files]
    steps = [
        step
        for name in ("one", "two", "", "one")
        for step in (("use_adapter", name), ("reset",), ("prefill", ids(given[0])))
    ]
    replies = probe(
        ("open", path),
        *(("load_adapter", tmp_path / f"{name}.adapter", name) for name in KINDS),
        ("load_adapter", tmp_path / "one.adapter", "third"),
        ("use_adapter", "third"),
        *steps,
        ("save", tmp_path / "state"),
        ("unload_adapter", "one"),
        ("reset",),
        ("prefill", ids(given[0])),
        *bad,
    )
    assert [reply.ok for reply in replies[:5]] == [True, True, True, False, False]
    assert "2 slots for adapters, which are all used" in replies[3].values[1]
    for index, name in enumerate(("one", "two", "", "one")):
        logits = torch.tensor(replies[5 + 3 * index + 2].numbers())
        assert (logits - expected[name]).abs().max() <= TOLERANCE, name
    assert (torch.tensor(replies[20].numbers()) - expected[""]).abs().max() <= TOLERANCE
    assert "with an adapter in use cannot be saved" in replies[17].values[1]
    messages = [reply.values[1] for reply in replies[21:]]
    expected_parts = (
        "its checksum does not match; copy it again",
        "it is shorter or longer than its tensors",
        "header",
        "header",
        "other weights",
        "cannot read",
        "at most",
        "is a folder; make its file with",
        "is of another format than adapters for a program; make its file with `exportable-cache adapter",
    )
    for message, says in zip(messages, expected_parts, strict=True):
        assert says in message


def test_a_bundle_without_slots_says_so(demo_bundle: Path, probe: Probe) -> None:
    """Check the messages for a program that was exported without slots, and for an unknown name."""
    replies = probe(("open", demo_bundle), ("load_adapter", "x", "one"), ("use_adapter", "one"))
    assert [reply.ok for reply in replies] == [True, False, False]
    assert "export the model with lora_slots" in replies[1].values[1] and "load_adapter first" in replies[2].values[1]
