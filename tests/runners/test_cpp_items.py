"""Images and sound in the C++ session: what a processor gives takes its places in the prompt, as in Python."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from exportable_cache import load

from ..support.models import tokens
from ..support.multimodal import FAMILIES, PLACEHOLDER, prompt, tiny_multimodal
from ..support.sessions import exported_bundle
from .conftest import TOLERANCE, Probe, Program, ids
from .test_cpp_bundle import edited
from .test_cpp_state import sealed

pytestmark = pytest.mark.full

CAPACITY, STEPS = 96, 6
#: What a processor gives beside what the programs take.
_BESIDE = {"input_ids", "token_type_ids", "mm_token_type_ids"}
#: Families whose steps take rotary positions of several axes, or which image a token is of.
PLACED = ("gemma3", "qwen2_5_vl")


def bundle_of(family: str) -> Path:
    kind, _, options = FAMILIES[family]
    sizes = {"modalities": [kind], "prefill_chunk": 16, **options}
    return exported_bundle(tiny_multimodal(family), "executorch", CAPACITY, verify=False, **sizes)


def added(inputs: dict[str, torch.Tensor]) -> list[tuple[str, ...]]:
    """How the probe is given what a processor gave."""
    return [add(name, tensor) for name, tensor in inputs.items() if name not in _BESIDE]


def add(name: str, tensor: torch.Tensor) -> tuple[str, ...]:
    kind = "float32" if tensor.is_floating_point() else "int64"
    return ("add", name, kind, ids(tensor.shape), " ".join(map(repr, tensor.flatten().tolist())))


def conversation(family: str) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """A prompt with two items, and the same in pieces: each item with text around it, and text by ids between."""
    _, per_item, _ = FAMILIES[family]
    whole = prompt(tiny_multimodal(family), 2, 20, per_item, start=3, apart=6)
    tensors = {name: whole[name] for name in whole if name not in _BESIDE}
    row = whole["input_ids"]
    cuts = [0, 5 + per_item, 8 + per_item, row.shape[1]]
    first, text, second = ({"input_ids": row[:, start:end]} for start, end in zip(cuts, cuts[1:]))
    for index, turn in enumerate((first, second)):
        turn |= {name: tensor.chunk(2)[index] for name, tensor in tensors.items()}
    return whole, [first, text, second]


def check_equal(replies: list, expected: list[torch.Tensor | None]) -> None:
    for reply, logits in zip(replies, expected, strict=True):
        assert reply.ok, reply
        if logits is not None:
            assert (torch.tensor(reply.numbers()) - logits[0]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("family", ["llava", "voxtral", "gemma3", "qwen2_5_vl", "qwen3_vl"])
def test_what_is_seen_or_heard_answers_as_in_python(probe: Probe, family: str) -> None:
    """One item and two, at the start and amid text, in prompts of one chunk and of more."""
    bundle, model = bundle_of(family), tiny_multimodal(family)
    session = load(bundle)
    commands: list[tuple[object, ...]] = [("open", bundle)]
    expected: list[torch.Tensor | None] = [None]
    for items, length, start in ((1, 5, 0), (1, 14, 9), (2, 30, 2)):
        inputs = prompt(model, items, length, FAMILIES[family][1], seed=items + length, start=start, apart=5)
        following = tokens(STEPS, seed=items).clamp(max=100)
        session.reset()
        given = added(inputs)
        commands += [("reset",), *given, ("prefill", ids(inputs["input_ids"][0]))]
        expected += [None, *(None for _ in given), session.prefill(**inputs)]
        # Of several tokens, then of one at a time.
        commands += [("prefill", ids(following[0, :3])), *(("decode", int(token)) for token in following[0, 3:])]
        expected += [session.prefill(following[:, :3]), *(session.decode(token[None]) for token in following[0, 3:])]
    check_equal(probe(*commands), expected)


@pytest.mark.parametrize("family", ["llava", *PLACED])
def test_a_conversation_goes_on_from_what_it_holds(probe: Probe, tmp_path: Path, family: str) -> None:
    """An image, text by ids, a second image: at once, in turns, and by another process from a saved state."""
    bundle, (whole, turns) = bundle_of(family), conversation(family)
    session, state = load(bundle), tmp_path / "talk.state"
    following = tokens(4, seed=5).clamp(max=100)[0].tolist()
    last = [session.prefill(**whole), *(session.decode(torch.tensor([token])) for token in following)]
    steps = [("decode", token) for token in following]
    at_once = probe(("open", bundle), *added(whole), ("prefill", ids(whole["input_ids"][0])), *steps)
    check_equal(at_once[-5:], last)
    fed = [command for turn in turns for command in (*added(turn), ("prefill", ids(turn["input_ids"][0])))]
    in_turns = probe(("open", bundle), *fed, ("save", state), *steps)
    check_equal(in_turns[-6:], [last[0], None, *last[1:]])
    check_equal(probe(("open", bundle), ("load", state), *steps), [None, None, *last[1:]])


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_a_rewind_takes_back_all_of_an_image_or_none(probe: Probe, family: str) -> None:
    """Where images count as other positions than tokens; where they do not, an image's tokens are like any others."""
    bundle, model = bundle_of(family), tiny_multimodal(family)
    per_item, session, following = FAMILIES[family][1], load(bundle), tokens(3)
    inputs = prompt(model, 1, 5, per_item)
    after = ("prefill", ids(following[0]))
    replies = probe(
        ("open", bundle), *added(inputs), ("prefill", ids(inputs["input_ids"][0])), ("rewind", 4), ("length",),
        ("decode", 5, 1 + per_item), ("rewind", 3), after, ("rewind", 3 + per_item), after,
    )[1:]  # fmt: skip
    *_, inside, length, decoded_inside, whole, after_image, gone, after_text = replies
    if family == "llava":
        assert inside.ok and length.tokens()[0] == 1 + per_item and decoded_inside.ok
        return
    message = f"inside the image at 2 to {per_item + 1}; take back all of it, or none"
    assert not inside.ok and message in inside.values[1] and length.tokens()[0] == 5 + per_item
    assert not decoded_inside.ok and message in decoded_inside.values[1]
    assert whole.ok and gone.ok
    session.prefill(**inputs)
    session.rewind(3)
    check_equal([after_image], [session.prefill(following)])
    session.reset()
    session.prefill(inputs["input_ids"][:, :2])
    check_equal([after_text], [session.prefill(following)])


def test_a_refused_prompt_changes_nothing_and_leaves_what_was_added(probe: Probe) -> None:
    bundle, model = bundle_of("llava"), tiny_multimodal("llava")
    inputs = prompt(model, 2, 9, 4, apart=2)
    one, other = inputs["pixel_values"].chunk(2)
    row = inputs["input_ids"][0]
    good = ("prefill", ids(row))
    refused: list[tuple[tuple[object, ...], str]] = [
        (good, "has 8 tokens of id 127, encode_image gives 0 embeddings"),
        (add("pixels", one), "takes pixel_values in addition to token ids, got pixels"),
        (add("pixel_values", one[..., :12]), "has shape [1, 3, 16, 12]; it must be [items, 3, 16, 16]"),
        (add("pixel_values", one.long()), "is int64; it must be float32"),
        (("add", "pixel_values", "float32", "1 3 16 16", "1 2"), "and 2 values"),
        (("add", "pixel_values", "float32", f"{2**62} 4 16 16", "1 2"), "and 2 values"),
        (("add", "pixel_values", "float32", "", ""), "has shape []"),
        (add("pixel_attention_mask", torch.zeros(1, 16, 16)), "has padding"),
    ]
    replies = probe(
        ("open", bundle), *(command for command, _ in refused), add("pixel_values", one), good,
        ("prefill", "5 6"), ("decode", 5), ("generate", "5 6"), ("prefill", ids([*row, *([5] * 90)])), ("length",),
        add("pixel_values", other), add("pixel_attention_mask", torch.ones(2, 16, 16)), good,
        add("pixel_values", one), ("reset",), ("prefill", "5 6"),
    )[1:]  # fmt: skip
    for reply, (_, message) in zip(replies, refused):
        assert not reply.ok and message in reply.values[1], reply
    held, half, none, decoded, generated, full, length, second, mask, answer, *_, text = replies[len(refused) :]
    assert held.ok and second.ok and mask.ok
    for reply, places in ((half, 8), (none, 0), (decoded, 0), (generated, 0)):
        assert not reply.ok and f"the prompt has {places} tokens of id 127, encode_image gives 4" in reply.values[1]
    assert full.values[0] == "cache_full" and length.tokens()[0] == 0
    session = load(bundle)
    expected = session.prefill(**inputs)
    session.reset()
    check_equal([answer, text], [expected, session.prefill(torch.tensor([[5, 6]]))])


def test_other_grids_and_items_in_pieces_are_refused(probe: Probe) -> None:
    bundle, model = bundle_of("qwen2_5_vl"), tiny_multimodal("qwen2_5_vl")
    inputs = prompt(model, 1, 5, 6)
    pixels, row = inputs["pixel_values"], inputs["input_ids"][0]
    grid = inputs["image_grid_thw"]
    two = torch.cat([pixels, pixels])
    apart = [5, *([PLACEHOLDER] * 5), 6, *([PLACEHOLDER] * 7)]
    grids, cut, twice, dropped, held, answer = probe(
        ("open", bundle), add("image_grid_thw", torch.tensor([[1, 6, 4]])), add("pixel_values", pixels[:20]),
        add("image_grid_thw", torch.cat([grid, grid])), ("reset",), add("pixel_values", pixels), ("prefill", ids(row)),
    )[1:]  # fmt: skip
    assert not grids.ok and "image_grid_thw has [1, 6, 4], encode_image was made for [1, 4, 6]" in grids.values[1]
    assert not cut.ok and "must be [items * 24, 96]" in cut.values[1]
    assert twice.ok and dropped.ok and held.ok
    check_equal([answer], [load(bundle).prefill(**inputs)])
    replies = probe(
        ("open", bundle), add("pixel_values", two), ("prefill", ids(apart)), add("image_grid_thw", grid),
        ("prefill", ids([*row, *row])),
    )  # fmt: skip
    assert not replies[2].ok and "5 tokens of id 127 follow each other" in replies[2].values[1]
    assert not replies[4].ok and "image_grid_thw is of 1 items, pixel_values of 2" in replies[4].values[1]


def test_an_image_whose_tokens_see_each_other_goes_through_whole(probe: Probe) -> None:
    bundle, model = bundle_of("gemma3"), tiny_multimodal("gemma3")
    pixels = prompt(model, 2, 5, 16)["pixel_values"]
    replies = probe(
        ("open", bundle), add("pixel_values", pixels), ("prefill", ids([5, *([PLACEHOLDER] * 32)])), ("length",)
    )
    assert not replies[2].ok and "the image at token 1 of the prompt takes 32 tokens" in replies[2].values[1]
    assert "export with prefill_chunk=32" in replies[2].values[1] and replies[3].tokens()[0] == 0


def test_places_of_images_that_cannot_be_are_refused(probe: Probe, tmp_path: Path) -> None:
    bundle, model = bundle_of("qwen2_5_vl"), tiny_multimodal("qwen2_5_vl")
    inputs, path = prompt(model, 1, 5, 6), tmp_path / "good.state"
    fed = (*added(inputs), ("prefill", ids(inputs["input_ids"][0])))
    assert all(reply.ok for reply in probe(("open", bundle), *fed, ("save", path)))
    good = path.read_bytes()
    assert struct.unpack_from("<Qqqq", good, 112) == (1, 2, 8, -3)
    loads = []
    for index, place in enumerate([(2, 8, -2), (2, 9, -3), (8, 2, -3), (-1, 5, -3), (60, 66, -3), (2, 2**62, -3)]):
        edit = tmp_path / f"{index}.state"
        edit.write_bytes(sealed(good[:120] + struct.pack("<qqq", *place) + good[144:]))
        loads.append(("load", edit))
    again = tmp_path / "again.state"
    again.write_bytes(sealed(good))
    *refused, loaded = probe(("open", bundle), *loads, ("load", again))[1:]
    assert loaded.ok
    for reply in refused:
        assert not reply.ok and "its lengths are invalid" in reply.values[1], reply


def _item(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["program"]["methods"]["encode_image"]["item"].update(fields)


def _method(name: str, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["program"]["methods"][name].update(fields)


def _without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["program"]["methods"].pop(name)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_item(positions=[[0] * 6] * 2), "positions has 2 axes, steps take 3"),
        (_item(positions=[[0] * 5] * 3), "positions is not of each of its tokens"),
        (_item(positions=[[2**40] * 6] * 3), "more than anything is"),
        (_item(sees="item"), "sees is 'item', and steps take no image_ids"),
        (_item(sees="all"), "sees is 'all', this library knows"),
        (_method("encode_image", item=None), "does not say what its items are"),
        (_method("encode_image", inputs=[]), "inputs must be a list of at least one element"),
        (_method("encode_image", outputs=[{"name": "image_embeds", "shape": [6]}]), "is not [tokens, hidden_size]"),
        (
            _method(
                "encode_image", outputs=[{"name": "image_embeds", "shape": [3, 32]}], item={"token_id": 1, "sees": ""}
            ),
            "returns not floating [3, 32]",
        ),
        (
            _method("encode_image", inputs=[{"name": "pixel_values", "dtype": "float32", "shape": [24, 90]}]),
            "takes another pixel_values than the manifest says",
        ),
        (_method("embed", max_length=8), "takes tokens [1, 16], not int64 [1, 8]"),
        (_without("embed"), "no embed or no prefill_embeds"),
        (_without("prefill_embeds"), "no embed or no prefill_embeds"),
        (_without("encode_image"), "takes embeddings, which no method gives"),
    ],
)
def test_a_manifest_that_is_not_of_its_encoders_is_refused(probe: Probe, tmp_path: Path, edit, message: str) -> None:
    (reply,) = probe(("open", edited(bundle_of("qwen2_5_vl"), tmp_path / "bundle", edit)))
    assert not reply.ok and reply.values[0] == "bundle" and message in reply.values[1], reply


def test_the_program_takes_images_from_files(program: Program, tmp_path: Path) -> None:
    bundle, model = bundle_of("qwen2_5_vl"), tiny_multimodal("qwen2_5_vl")
    inputs = prompt(model, 2, 9, 6, apart=2)
    files = []
    for name in ("pixel_values", "image_grid_thw"):
        inputs[name].numpy().tofile(tmp_path / name)
        files += ["--input", f"{name}={tmp_path / name}"]
    expected = list(load(bundle).generate(inputs["input_ids"], 6, **{n: inputs[n] for n in inputs if n != "input_ids"}))
    command = [*program("exportable_cache_generate"), str(bundle), "--tokens", ids(inputs["input_ids"][0])]
    command += ["--max-new-tokens", "6"]
    done = subprocess.run([*command, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [int(token) for token in done.stdout.split()] == expected
    other = tmp_path / "image_grid_thw"
    for given, message in (
        ("pixels=x", "got pixels"),
        ("pixel_values", "pass NAME=FILE"),
        (f"pixel_values={tmp_path / 'none'}", "cannot be read"),
        (f"pixel_values={other}", "one item of pixel_values takes 2304"),
    ):
        done = subprocess.run([*command, "--input", given], capture_output=True, text=True)
        assert done.returncode == 2 and message in done.stderr, done.stderr
