"""Saved states and caches whose parts do not fit are refused, and nothing changes, whoever made the checksum."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from exportable_cache import ExportableCache, Session
from exportable_cache.common.fs import files
from exportable_cache.common.fs.files import LOCK_FILE, PARTIAL, atomic_path, clear_partials
from exportable_cache.common.fs.tensor_files import write_tensors
from exportable_cache.errors import BundleError, InputError

from ..support.models import tiny_model, tokens
from ..support.sessions import lowered_session

Change = Callable[[dict[str, torch.Tensor], dict[str, str]], Any]


def parts_of(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata()


def changed(path: Path, change: Change) -> Path:
    """Change a file, and make its checksum right again, as anybody can."""
    tensors, metadata = parts_of(path)
    change(tensors, metadata)
    metadata.pop("checksum", None)
    write_tensors(path, {name: tensor.contiguous() for name, tensor in tensors.items()}, metadata)
    return path


def in_layers(change: Callable[[list], Any]) -> Change:
    def of_file(tensors: dict, metadata: dict) -> None:
        layers = json.loads(metadata["layers"])
        change(layers)
        metadata["layers"] = json.dumps(layers)

    return of_file


def narrowed(name: str, slots: int) -> Change:
    return lambda tensors, metadata: tensors.update({name: tensors[name][:, :, :slots].contiguous()})


#: Layer 0 of this model is a ring of 8 slots, layer 1 is full.
RING, FULL = "layers.0.keys", "layers.1.values"


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("gemma3_text")


def filled(model: Any, length: int = 20) -> Session:
    session = Session.from_model(model, ExportableCache.from_model(model, 48))
    session.prefill(tokens(length))
    return session


STATES: dict[str, Change] = {
    "negative length": lambda tensors, metadata: tensors["length"].fill_(-1),
    "high water below the length": lambda tensors, metadata: tensors["high_water"].fill_(0),
    "lengths in float32": lambda tensors, metadata: tensors.update(length=tensors["length"].float()),
    "one length for all rows": lambda tensors, metadata: tensors.update(length=tensors["length"][0].clone()),
    "no high water": lambda tensors, metadata: tensors.pop("high_water"),
    "a token outside the vocabulary": lambda tensors, metadata: metadata.update(pending="[999999]"),
    "a token that is text": lambda tensors, metadata: metadata.update(pending='"x"'),
    "images that are a number": lambda tensors, metadata: metadata.update(images="3"),
    "images of other rows": lambda tensors, metadata: metadata.update(images="[[], []]"),
    "an image past the end": lambda tensors, metadata: metadata.update(images="[[[18, 25, 0]]]"),
    "an image that ends before it starts": lambda tensors, metadata: metadata.update(images="[[[8, 5, 0]]]"),
    "an image of another shift": lambda tensors, metadata: metadata.update(images=f"[[[2, 5, {10**30}]]]"),
    "no layers": lambda tensors, metadata: metadata.pop("layers"),
    "layers that are cut off": lambda tensors, metadata: metadata.update(layers="{"),
    "fewer slots of a full layer than tokens": narrowed(FULL, 7),
    "fewer slots of a ring than it has filled": narrowed(RING, 7),
    "more tokens than slots": lambda tensors, metadata: (tensors["length"].fill_(40), tensors["high_water"].fill_(40)),
    "more slots than were ever filled": lambda tensors, metadata: tensors.update(
        {FULL: torch.cat([tensors[FULL]] * 2, dim=2)}
    ),
    "other heads": lambda tensors, metadata: tensors.update({FULL: torch.cat([tensors[FULL]] * 2, dim=1)}),
    "a tensor of fewer dimensions": lambda tensors, metadata: tensors.update({FULL: tensors[FULL][0, 0]}),
    "a scalar": lambda tensors, metadata: tensors.update({FULL: tensors[FULL].sum()}),
    "another dtype": lambda tensors, metadata: tensors.update({FULL: tensors[FULL].half()}),
    "a tensor of no layer": lambda tensors, metadata: tensors.update({"layers.9.keys": torch.zeros(1)}),
    "what an encoder gave": lambda tensors, metadata: tensors.update({"encoded.0": torch.zeros(1, 3, 8)}),
    "another layer": in_layers(lambda layers: layers[0]["policy"].update(window=99)),
}


@pytest.mark.parametrize("change", STATES.values(), ids=STATES)
def test_a_changed_state_is_refused_and_changes_nothing(model: Any, change: Change, tmp_path: Path) -> None:
    session = filled(model)
    session.save_state(tmp_path / "state")
    before = {name: tensor.clone() for name, tensor in session.cache.named_state()}
    with pytest.raises((BundleError, InputError)) as caught:
        session.load_state(changed(tmp_path / "state", change))
    assert "\n" not in str(caught.value) and "checksum" not in str(caught.value)
    assert session.length.tolist() == [20]
    assert all(torch.equal(tensor, before[name]) for name, tensor in session.cache.named_state())


def test_programs_refuse_it_as_live_models_do(tmp_path: Path) -> None:
    model = tiny_model("llama")
    session = lowered_session(model, "pt2")
    session.prefill(tokens(9))
    session.save_state(tmp_path / "state")
    with pytest.raises(BundleError, match=r"layers.1.keys must have 9 slots, .* got 7"):
        session.load_state(changed(tmp_path / "state", narrowed("layers.1.keys", 7)))


def test_states_of_a_larger_cache_and_of_one_in_use_are_whole(model: Any, tmp_path: Path) -> None:
    """A row that was longer once leaves slots that a smaller cache has not; a cache in use does not know its own."""
    session = filled(model, 40)
    session.rewind(0)
    session.save_state(tmp_path / "state")
    # Slots after the length of a full layer are of no use.
    changed(tmp_path / "state", lambda tensors, metadata: tensors["length"].fill_(24))
    smaller = Session.from_model(model, ExportableCache.from_model(model, 32))
    smaller.load_state(tmp_path / "state")
    assert smaller.length.tolist() == [24]
    cache = session.cache
    session.close()
    for layer in cache.layers:
        layer._max_len_ever = None
    again = Session.from_model(model, cache)
    again.save_state(tmp_path / "state")
    other = Session.from_model(model, ExportableCache.from_model(model, 48))
    other.load_state(tmp_path / "state")
    assert torch.equal(other.decode(torch.tensor([3])), again.decode(torch.tensor([3])))


def test_what_an_encoder_gave_has_to_be_its(tmp_path: Path) -> None:
    from ..support.seq2seq import encoder_inputs, tiny_seq2seq

    model = tiny_seq2seq("t5")
    session = Session.from_model(model, ExportableCache.from_model(model, 24, max_encoder_len=16))
    session.encode(**encoder_inputs(model, 7))
    session.save_state(tmp_path / "state")
    whole = (tmp_path / "state").read_bytes()
    session.load_state(tmp_path / "state")
    changes: list[Change] = [
        lambda tensors, metadata: tensors.pop("encoded.1"),
        lambda tensors, metadata: tensors.update({"encoded.0": tensors["encoded.0"][:, :, 1:]}),
        lambda tensors, metadata: tensors.update({"encoded.0": tensors["encoded.0"].half()}),
        lambda tensors, metadata: tensors["encoded.1"].fill_(99),
        lambda tensors, metadata: [t.fill_(17) for name, t in tensors.items() if name.endswith("encoder_length")],
        lambda tensors, metadata: tensors.update({"encoded.7": tensors.pop("encoded.1")}),
    ]
    for change in changes:
        (tmp_path / "state").write_bytes(whole)
        with pytest.raises(BundleError):
            session.load_state(changed(tmp_path / "state", change))


def test_a_byte_that_changed_is_seen(model: Any, tmp_path: Path) -> None:
    session = filled(model)
    session.save_state(tmp_path / "state")
    session.cache.save(tmp_path / "cache")
    for path, read in ((tmp_path / "state", session.load_state), (tmp_path / "cache", ExportableCache.load)):
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
        with pytest.raises(BundleError, match="checksum: its content has sha256"):
            read(path)


def test_files_of_earlier_releases_have_to_be_saved_again(model: Any, tmp_path: Path) -> None:
    session = filled(model)
    session.save_state(tmp_path / "state")
    session.cache.save(tmp_path / "cache")
    for path, read in ((tmp_path / "state", session.load_state), (tmp_path / "cache", ExportableCache.load)):
        tensors, metadata = parts_of(path)
        metadata.pop("checksum")
        save_file(tensors, path, metadata)
        with pytest.raises(BundleError, match="it records none"):
            read(path)
        save_file(tensors, path, {**metadata, "format": metadata["format"].replace("v3", "v2")})
        with pytest.raises(BundleError, match="v2', expected .*v3'.* save it again"):
            read(path)


CACHES: dict[str, Change] = {
    "negative high water": in_layers(lambda layers: layers[0].update(high_water=-1)),
    "a high water that is text": in_layers(lambda layers: layers[0].update(high_water="x")),
    "no description": in_layers(lambda layers: layers[0].pop("config")),
    "no layers": in_layers(lambda layers: layers.clear()),
    "fewer layers than tensors": in_layers(lambda layers: layers.pop()),
    "more layers than tensors": in_layers(lambda layers: layers.append(layers[0])),
    "a policy of no kind": in_layers(lambda layers: layers[0]["config"]["policy"].update(kind="unknown")),
    "a policy whose kind is a list": in_layers(lambda layers: layers[0]["config"]["policy"].update(kind=[])),
    "half a character": in_layers(lambda layers: layers[0]["config"]["storage"].update(dtype="\ud800")),
    "a list as a description": in_layers(lambda layers: layers[0].update(config=[])),
    "twice the capacity": in_layers(lambda layers: layers[1]["config"]["policy"].update(capacity=96)),
    "a huge capacity": in_layers(lambda layers: layers[1]["config"]["policy"].update(capacity=10**12)),
    "another window": in_layers(lambda layers: layers[0]["config"]["policy"].update(window=15)),
    "another storage": in_layers(lambda layers: layers[1]["config"]["storage"].update(kind="int8")),
    "another dtype": in_layers(lambda layers: layers[1]["config"]["storage"].update(dtype="float16")),
    "a kernel of a program": in_layers(lambda layers: layers[1]["config"].update(kernel={"kind": "split"})),
    "values of another head": lambda tensors, metadata: tensors.update({FULL: tensors[FULL][:, :1]}),
    "no rows": lambda tensors, metadata: tensors.update({name: tensor[:0] for name, tensor in tensors.items()}),
    "a missing tensor": lambda tensors, metadata: tensors.pop(FULL),
    "a tensor of no layer": lambda tensors, metadata: tensors.update({"layers.9.keys": torch.zeros(1)}),
    "more tokens than slots": lambda tensors, metadata: tensors["layers.1.cumulative_length"].fill_(49),
    "model types that are lists": lambda tensors, metadata: metadata.update(model_types="[[]]"),
    "model types that are a name": lambda tensors, metadata: metadata.update(model_types='"llama"'),
    "another class": lambda tensors, metadata: metadata.update(cache="Path"),
}


@pytest.mark.parametrize("change", CACHES.values(), ids=CACHES)
def test_a_changed_cache_is_refused(model: Any, change: Change, tmp_path: Path) -> None:
    cache = ExportableCache.from_model(model, 48)
    cache.save(tmp_path / "cache")
    with pytest.raises(BundleError) as caught:
        ExportableCache.load(changed(tmp_path / "cache", change))
    assert "\n" not in str(caught.value) and "checksum" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "options", "other"),
    [
        ("llama", {}, {"num_key_value_heads": 1}),
        ("llama", {}, {"head_dim": 16}),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, {"hidden_size": 96}),
    ],
)
def test_a_cache_of_another_model_is_refused_by_its_first_step(
    family: str, options: dict, other: dict, tmp_path: Path
) -> None:
    model, another = tiny_model(family, **options), tiny_model(family, **options, **other)
    ExportableCache.from_model(another, 32).save(tmp_path / "cache")
    with pytest.raises(InputError, match="allocate"):
        model(tokens(5), past_key_values=ExportableCache.load(tmp_path / "cache"))
    with Session.from_model(model, ExportableCache.load(tmp_path / "cache")) as session:
        with pytest.raises(InputError, match="allocate"):
            session.prefill(tokens(5))


def test_a_device_that_there_is_not(model: Any, tmp_path: Path) -> None:
    ExportableCache.from_model(model, 48).save(tmp_path / "cache")
    with pytest.raises(InputError, match="device must be one that torch has here, got 'nowhere'"):
        ExportableCache.load(tmp_path / "cache", device="nowhere")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks this process")
def test_the_next_save_removes_what_killed_ones_left(tmp_path: Path) -> None:
    path = tmp_path / "state"
    tensors = {"a": torch.zeros(1 << 20)}
    for _ in range(3):
        child = os.fork()
        if child == 0:
            with atomic_path(path) as temporary:
                temporary.write_bytes(b"half")
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
    # Each save removes what the one before it left.
    assert len([name for name in os.listdir(tmp_path) if name.endswith(PARTIAL)]) == 1
    write_tensors(path, tensors, {"format": "x"})
    assert os.listdir(tmp_path) == ["state"]


def test_what_others_are_writing_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "state"
    with atomic_path(path) as one, atomic_path(path) as other:
        one.write_text("one")
        other.write_text("other")
        clear_partials(tmp_path)
        assert one.read_text() == "one"
    assert path.read_text() == "one" and os.listdir(tmp_path) == ["state"]


def test_only_what_was_left_behind_is_removed(tmp_path: Path) -> None:
    """A file of an earlier release, a folder without a lock, a link: judged by age, or not touched."""
    victim = tmp_path / "victim"
    victim.mkdir()
    for name in (LOCK_FILE, "precious"):
        (victim / name).touch()
    (tmp_path / f".state.link{PARTIAL}").symlink_to(victim)
    (tmp_path / f".state.young{PARTIAL}").touch()
    (tmp_path / f".state.old{PARTIAL}").touch()
    os.utime(tmp_path / f".state.old{PARTIAL}", (1000, 1000))
    (tmp_path / f".state.mine{PARTIAL}").mkdir()
    (tmp_path / f".state.mine{PARTIAL}" / "notes").touch()
    (tmp_path / f".other.old{PARTIAL}").mkdir()
    with atomic_path(tmp_path / "state") as temporary:
        temporary.write_text("x")
    left = {path.name.removesuffix(PARTIAL) for path in tmp_path.iterdir()}
    assert left == {"state", "victim", ".state.link", ".state.young", ".state.mine", ".other.old"}
    files.clear_leftovers(tmp_path / "state")
    assert sorted(os.listdir(victim)) == [LOCK_FILE, "precious"]
