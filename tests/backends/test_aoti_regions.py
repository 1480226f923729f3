"""Machine code by regions: one of each kind in a package, and a table of who calls it."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exportable_cache import ExportableCache, load
from exportable_cache.backends import backend_for
from exportable_cache.backends.aoti import package
from exportable_cache.backends.aoti.runner import Call, Method, Table, read_table
from exportable_cache.backends.aoti.target import CODE, CONSTANTS, TABLE
from exportable_cache.errors import BundleError
from exportable_cache.program.program import Program
from exportable_cache.program.spec import ProgramSpec

from ..support.kinds import KINDS
from ..support.models import tiny_model, tokens
from ..support.oracle import difference, reference_logits
from ..support.sessions import AOTI_CAPACITY, aoti_bundle, regional_aoti_bundle

#: What runs before the layers, and what after them.
AROUND = 2
TOLERANCE = 1e-4


@pytest.fixture
def methods(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, dict[str, Method]]]:
    """Cuts a model's methods and compiles nothing: how many regions there would be, and their calls."""
    monkeypatch.setattr(package, "compile_ahead_of_time", lambda module, inputs: ["a file"])

    def cut(model: Any, names: tuple[str, ...], **options: Any) -> tuple[int, dict[str, Method]]:
        backend = backend_for("aoti")
        spec = backend.program_spec(ProgramSpec(16), backend.options.parse(options))
        program = Program(model, ExportableCache.from_model(model, AOTI_CAPACITY), spec)
        compiler = package.RegionalCompiler()
        calls = {name: compiler.method(program.export(name), lambda name: name) for name in names}
        return len(compiler.files), calls

    return cut


def of(method: Method) -> list[int]:
    return [call.region for call in method.calls]


def test_equal_layers_are_compiled_once(methods) -> None:
    count, found = methods(tiny_model("llama", num_hidden_layers=3), ("decode", "prefill"))
    # A prompt's last layer has one token behind attention.
    calls = {"decode": [0, 1, 1, 1, 2], "prefill": [3, 4, 4, 5, 6]}
    assert {name: of(method) for name, method in found.items()} == calls
    assert count == 2 * (AROUND + 1) + 1
    # Each is given its own weights and cache, and no other's.
    held = dict(enumerate(found["prefill"].tensors, start=2))
    for layer, call in enumerate(found["prefill"].calls[1:-1]):
        names = [held[place] for place in call.sources if place in held]
        assert len(names) == 9 + 2
        assert all(f"layers.{layer}." in name or f"layers_{layer}_" in name for name in names)


@pytest.mark.full
@pytest.mark.parametrize("layers", [3, 6])
def test_there_are_as_many_regions_as_kinds_of_layers(methods, layers: int) -> None:
    model = tiny_model("llama", num_hidden_layers=layers)
    count, found = methods(model, ("decode", "decode_32", "prefill", "prefill_32"), buckets=[32])
    # The head is the same in all steps, and in all prompts, whose last layer is one more.
    assert count == 4 * (AROUND + 1) - 2 + 2
    assert [len(method.calls) for method in found.values()] == [AROUND + layers] * 4
    kinds = ["sliding_attention", "full_attention"] * 3
    model = tiny_model("gemma3_text", num_hidden_layers=layers * 2, layer_types=(kinds * 2)[: layers * 2])
    count, found = methods(model, ("decode", "prefill"))
    assert count == 2 * (AROUND + 2) + 1
    assert of(found["decode"])[1:-1] == [1, 2] * layers


def test_a_method_without_equal_layers_is_compiled_whole(methods) -> None:
    count, found = methods(tiny_model("llama", num_hidden_layers=1), ("decode",))
    assert count == 1
    assert found["decode"] == Method(
        inputs=2, tensors=[], calls=[Call(region=0, sources=[0, 1], results=1)], outputs=[2]
    )


# Each in regions; a hybrid of two layers, compiled whole, is in test_aoti.py.
@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "kinds", "options"),
    [
        ("llama", 1, {"num_hidden_layers": 3}),
        ("gemma3_text", 2, {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}),
        ("deepseek_v3", 1, KINDS["deepseek_v3"][0] | {"first_k_dense_replace": 0, "num_hidden_layers": 3}),
    ],
)
def test_logits_past_the_window(family: str, kinds: int, options: dict) -> None:
    model = tiny_model(family, **options)
    folder = aoti_bundle(model)
    assert worst(load(folder, trust=True), model) <= TOLERANCE
    assert len(json.loads((folder / TABLE).read_text())["regions"]) == 2 * (AROUND + kinds) + 1


@pytest.mark.full
def test_keys_in_8_bits() -> None:
    model = tiny_model("llama")
    session = load(regional_aoti_bundle(model, kv_dtype="int8"), trust=True)
    live = load_live(model)
    ids = tokens(40)
    assert (session.prefill(ids[:, :20]) - live.prefill(ids[:, :20])).abs().max() <= TOLERANCE
    for position in range(20, 40):
        assert (session.decode(ids[:, position]) - live.decode(ids[:, position])).abs().max() <= TOLERANCE


def load_live(model: Any) -> Any:
    from exportable_cache import Session

    return Session.from_model(model, ExportableCache.from_model(model, AOTI_CAPACITY, kv_dtype="int8"))


@pytest.mark.full
def test_more_layers_are_no_more_code() -> None:
    three, six = (regional_aoti_bundle(tiny_model("llama", num_hidden_layers=layers)) for layers in (3, 6))
    assert machine_code(three) == machine_code(six) and len(machine_code(three)) == AROUND + 1
    layer = sum(parameter.nbytes for parameter in tiny_model("llama").model.layers[0].parameters())
    grown = (six / CONSTANTS).stat().st_size - (three / CONSTANTS).stat().st_size
    assert 3 * layer <= grown <= 3 * layer + 16_000
    assert (six / TABLE).stat().st_size - (three / TABLE).stat().st_size <= 3 * 1000


def machine_code(folder: Path) -> list[int]:
    """Sizes of the libraries in a package: beside them are their sources, whose remarks name every layer."""
    with zipfile.ZipFile(folder / CODE) as package:
        return sorted(entry.file_size for entry in package.infolist() if entry.filename.endswith(".so"))


def worst(session: Any, model: Any) -> float:
    found = 0.0
    for prompt in (3, 8, 24):
        ids = tokens(prompt + 30, seed=prompt)
        session.reset()
        reference = reference_logits(model, ids, prompt)
        step = difference(
            lambda p: session.decode(p[:, 0]) if p.shape[1] == 1 else session.prefill(p), reference, ids, prompt
        )
        found = max(found, step)
    return found


TABLES = Table(
    version=1,
    regions=[{}, {"own": "a"}],
    methods={
        "decode": Method(
            inputs=2,
            tensors=["a", "b"],
            calls=[Call(region=0, sources=[0, 2], results=2), Call(region=1, sources=[4, 3], results=1, done=[4])],
            outputs=[6],
        )
    },
)


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    TABLES.write(tmp_path / TABLE)
    assert read_table(tmp_path / TABLE, ["decode"], ["a", "b"]) == TABLES
    assert TABLES.tensors() == {"a", "b"}


def change(*path: Any) -> Callable[[dict], None]:
    def changed(fields: dict) -> None:
        *parents, last, value = path
        for key in parents:
            fields = fields[key]
        fields[last] = value

    return changed


CALLS = ("methods", "decode", "calls")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change("version", 2), "version 2, this release reads 1"),
        (change("methods", "decode", "inputs", -1), r"methods\.decode\.inputs: .*greater than or equal to 0"),
        (change("methods", "decode", "inputs", True), r"methods\.decode\.inputs: .*valid integer"),
        (change("methods", "decode", "tensors", ["a", "c"]), "no tensor of constants.pt is named 'c'"),
        (change("regions", [{}, {"own": "c"}]), "no tensor of constants.pt is named 'c'"),
        (change("regions", [{}]), r"methods\.decode\.calls\.1\.region: is 1, of 1"),
        (change(*CALLS, 0, "sources", [0, 4]), r"calls\.0\.sources: slot 4 is empty"),
        (change(*CALLS, 0, "results", 10**12), r"calls\.0\.results: 1000000000000 values are more than 10000"),
        (change(*CALLS, 1, "done", [9]), r"calls\.1\.done: slot 9 is empty"),
        (change("methods", "decode", "outputs", [4]), "outputs: no call fills slot 4"),
        (change("methods", "decode", "outputs", [0]), "outputs: no call fills slot 0"),
        (change("methods", "decode", "outputs", []), r"methods\.decode\.outputs: .*at least 1 item"),
        (change("methods", {}), r"methods: has \[\], the manifest \['decode'\]"),
        (change("more", 1), "more: Extra inputs are not permitted"),
    ],
)
def test_a_damaged_table_is_refused(tmp_path: Path, damage: Callable[[dict], None], message: str) -> None:
    fields = TABLES.model_dump()
    damage(fields)
    (tmp_path / TABLE).write_text(json.dumps(fields))
    with pytest.raises(BundleError, match=message) as refused:
        read_table(tmp_path / TABLE, ["decode"], ["a", "b"])
    assert "export the model again" in str(refused.value)


@pytest.mark.parametrize("text", [b"", b"[]", b"\xff", b"[" * 100_000, b'{"version": 1'])
def test_what_is_no_table_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / TABLE).write_bytes(text)
    with pytest.raises(BundleError, match="regions.json .*export the model again"):
        read_table(tmp_path / TABLE, [], [])


def test_a_bundle_of_an_earlier_release_is_told(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"has no regions\.json: an earlier release wrote it.*export the model again"):
        read_table(tmp_path / TABLE, [], [])
