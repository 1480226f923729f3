"""export and inspect on a tiny model, and every bad input they must refuse.

The commands are tested here, most of them over a target whose programs stay in this process.
"""

import inspect
import json
import re

import pytest
import torch

from exportable_cache import export
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.bundle.files import SCHEMA_VERSION
from exportable_cache.cli.inspect import _heads

from ..support.fake_target import FILE
from ..support.models import WINDOW
from .bundles import MAX_CACHE_LEN, edit_manifest, refused

pytestmark = pytest.mark.usefixtures("fake_backend")


# -- export ------------------------------------------------------------------------------------------------------------


def test_export_says_where_what_and_verified(exported):
    lines = exported.stdout.splitlines()
    assert lines[0] == f"{exported.path}: Gemma2ForCausalLM with its cache, for fake"
    assert any(line.split()[0] == FILE for line in lines if line)
    (verified,) = [line for line in lines if line.startswith("verified: ")]
    assert f"past the window of {WINDOW}" in verified and "<= 1e-04" in verified
    assert lines[-3:] == ["", "next:", "  guide: docs/bundles.md"]


def test_export_json_is_the_manifest(run, tiny_folder, tmp_path):
    result = run(
        "export",
        tiny_folder,
        "-t",
        "pt2",
        "-n",
        16,
        "-o",
        tmp_path / "x",
        "--no-verify",
        "--json",
        "--prefill-chunk",
        1,
    )
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document.pop("path") == str(tmp_path / "x")
    assert document == json.loads((tmp_path / "x" / "manifest.json").read_text())
    assert document["verification"] is None and list(document["program"]["methods"]) == ["decode"]


def test_export_without_verification_says_how_to_verify(run, tiny_folder, tmp_path):
    result = run(
        "export", tiny_folder, "-t", "pt2", "-n", 16, "-o", tmp_path / "x", "--no-verify", "--prefill-chunk", 1
    )
    *said, recipe, empty, following, guide = result.stdout.splitlines()
    assert said[-1] == f"not verified; run: exportable-cache verify {tmp_path / 'x'} --model MODEL"
    assert re.fullmatch(r"recipe exact: [0-9.]+ KiB on disk", recipe)
    assert [empty, following, guide] == ["", "next:", "  guide: docs/bundles.md"]


def test_export_refuses_a_folder_that_exists(run, exported, tiny_folder):
    before = (exported.path / "manifest.json").read_bytes()
    arguments = ("export", tiny_folder, "-t", "pt2", "-n", 16, "-o", exported.path)
    refused(run(*arguments), str(exported.path), "exists", "--overwrite")
    assert (exported.path / "manifest.json").read_bytes() == before


def test_export_never_overwrites_what_is_no_bundle(run, tiny_folder, tmp_path):
    (tmp_path / "mine").write_text("precious")
    refused(
        run("export", tiny_folder, "-t", "pt2", "-n", 16, "-o", tmp_path, "--overwrite"),
        str(tmp_path),
        "is not a bundle",
    )
    assert (tmp_path / "mine").read_text() == "precious"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-t", "tpu", "-n", 16], ("'tpu'", "executorch", "pt2")),
        (["-t", "pt2", "-n", 0], ("--max-cache-len", "got 0", "at least 1")),
        (["-t", "pt2", "-n", 16, "-b", 0], ("--batch-size", "got 0", "at least 1")),
        (["-t", "pt2", "-n", 16, "--prefill-chunk", 17], ("prefill_chunk", "17", "16")),
        (["-t", "pt2", "-n", 16, "--dtype", "int8"], ("--dtype", "int8", "float32")),
    ],
)
def test_export_refuses_bad_arguments_and_writes_nothing(run, tiny_folder, tmp_path, arguments, words):
    refused(run("export", tiny_folder, "-o", tmp_path / "x", *arguments), *words)
    assert list(tmp_path.iterdir()) == []


def test_export_refuses_empty_names(run, tiny_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(run("export", tiny_folder, "-t", "pt2", "-n", 16, "-o", ""), "output_dir", "name the folder to write")
    refused(run("export", "", "-t", "pt2", "-n", 16, "-o", "x"), "model must not be an empty string", "pass 'demo'")
    assert list(tmp_path.iterdir()) == []


def test_export_refuses_an_unknown_model_type(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nonsense"}))
    refused(run("export", tmp_path, "-t", "pt2", "-n", 16, "-o", tmp_path / "x"), "nonsense", "does not know")


def test_export_without_the_package_of_its_target_names_the_extra(run, tiny_folder, tmp_path, monkeypatch):
    from exportable_cache.backends import registry

    monkeypatch.setitem(registry.TARGETS, "pt2", ("exportable_cache.backends.pt2", ("not_installed",), "missing"))
    refused(
        run("export", tiny_folder, "-t", "pt2", "-n", 16, "-o", tmp_path / "x"),
        "not_installed",
        "pip install",
        "[missing]",
    )


def test_export_passes_options_to_the_target(run, tiny_folder, tmp_path):
    arguments = ["-t", "pt2", "-n", 16, "-o", tmp_path / "x", "--prefill-chunk", 1, "--no-verify", "--json"]
    result = run("export", tiny_folder, *arguments, "-O", "form=explicit", "--option", "strict=false")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["options"] == {"form": "explicit", "strict": False}
    assert document["program"]["form"] == "explicit"


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("nonsense=1", ("'pt2'", "'nonsense'", "form")),
        ("form", ("'form'", "NAME=VALUE")),
        ("=1", ("'=1'", "NAME=VALUE")),
        ("dtype=float32", ("dtype", "--dtype")),
        ("kv_dtype=int8", ("kv_dtype", "--kv-dtype")),
    ],
)
def test_export_refuses_bad_options(run, tiny_folder, tmp_path, option, words):
    refused(run("export", tiny_folder, "-t", "pt2", "-n", 16, "-o", tmp_path / "x", "-O", option), *words)


def test_every_argument_of_export_is_known_to_the_command():
    from exportable_cache.cli.export import _arguments

    parameters = inspect.signature(export).parameters.values()
    names = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
    assert names == _arguments().keys()


# -- inspect -----------------------------------------------------------------------------------------------------------


def test_inspect_shows_layers_methods_versions_files_and_the_result(run, exported):
    result = run("inspect", exported.path)
    assert result.exit_code == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["0", "sliding_attention", "ring", str(WINDOW), "2", "8", "float32", "1.0", "KiB"] in rows
    assert ["1", "full_attention", "full", str(MAX_CACHE_LEN), "2", "8", "float32", "6.0", "KiB"] in rows
    assert any(row[:4] == ["prefill", "2", "to", "16"] for row in rows)
    assert any(row[:2] == ["decode", "1"] for row in rows)
    assert f"torch {torch.__version__.partition('+')[0]}" in result.stdout
    assert "input_ids int64 [batch, length]" in result.stdout and "logits float32 [batch, 128]" in result.stdout
    assert FILE in result.stdout and "all checksums match" in result.stdout
    verified, recipe = result.stdout.splitlines()[-2:]
    assert verified.startswith("verified: ") and recipe.startswith("recipe exact: ")


def test_inspect_sums_up_the_tensors_of_an_explicit_cache(run, damaged):
    program = json.loads((damaged / "manifest.json").read_text())["program"]
    state = [
        {"name": f"cache.layers.0.{name}", "dtype": "float32", "shape": ["batch", 2]} for name in ("keys", "values")
    ]
    program["form"] = "explicit"
    for method in program["methods"].values():
        method["inputs"] += state
    edit_manifest(damaged, program=program)
    result = run("inspect", damaged)
    assert "input_pos int64 [batch], cache (2 tensors)" in result.stdout and "cache.layers" not in result.stdout


def test_inspect_json_is_the_manifest_and_its_path(run, exported):
    document = json.loads(run("inspect", exported.path, "--json").stdout)
    assert document.pop("path") == str(exported.path)
    assert document == json.loads((exported.path / "manifest.json").read_text())


@pytest.mark.parametrize(
    "changes",
    [
        {"verification": {"a": 1}},
        {"verification": {"passed": True, "max_difference": "x"}},
        {"remarks": ["a\x1b[2J\nall checksums match"], "source": "a\x1b]52;c;eA==\x1b\\b\u202e\nc"},
        {"packages": {"torch\x1b[2J": "1\u2028"}, "created": "\x9b2J", "architecture": "\n\n"},
    ],
)
def test_inspect_shows_or_refuses_what_a_stranger_wrote(run, damaged, changes):
    edit_manifest(damaged, **changes)
    result = run("inspect", str(damaged))
    assert result.exit_code == (2 if "verification" in changes else 0)
    assert (result.stdout + result.stderr).replace("\n", "").isprintable()
    assert "\nall checksums match\n" in result.stdout
    assert result.stdout.count("\nall checksums match") == 1


def test_inspect_refuses_another_max_cache_len_for_a_bundle(run, exported):
    refused(run("inspect", exported.path, "-n", 1024), "1024", str(MAX_CACHE_LEN), "leave it out")


def test_inspect_shows_a_bundle_of_other_versions(run, damaged):
    edit_manifest(
        damaged, packages={"python": "3.10.0", "torch": "1.0", "transformers": "4.0", "exportable-cache": "0.0"}
    )
    result = run("inspect", damaged)
    assert result.exit_code == 0, result.stderr
    assert "torch 1.0" in result.stdout


# -- bad bundles, for every command that opens one ---------------------------------------------------------------------


def opening(command, folder):
    options = {"verify": ["--model", "demo"], "generate": ["--prompt", "x"]}
    return [command, folder, *options.get(command, [])]


@pytest.fixture(params=["inspect", "verify", "generate", "bench"])
def opens(request):
    return request.param


def test_a_folder_that_is_not_there(run, opens, tmp_path):
    refused(run(*opening(opens, tmp_path / "missing")), str(tmp_path / "missing"), "no folder")


def test_a_folder_that_is_no_bundle(run, opens, tmp_path):
    refused(run(*opening(opens, tmp_path)), "manifest.json", "export")


def test_a_truncated_program(run, opens, damaged):
    program = damaged / FILE
    size = program.stat().st_size
    program.write_bytes(program.read_bytes()[: size // 2])
    refused(run(*opening(opens, damaged)), FILE, str(size // 2), str(size), "export")


def test_a_corrupted_program(run, opens, damaged):
    program = damaged / FILE
    content = bytearray(program.read_bytes())
    content[len(content) // 2] ^= 0xFF
    program.write_bytes(content)
    refused(run(*opening(opens, damaged)), FILE, "sha256", "export")


def test_a_missing_file(run, opens, damaged):
    (damaged / FILE).unlink()
    refused(run(*opening(opens, damaged)), FILE, "missing", "export")


def test_a_broken_manifest(run, opens, damaged):
    (damaged / "manifest.json").write_text('{"schema_version": 1, ')
    refused(run(*opening(opens, damaged)), "manifest.json", "export")


def test_an_edited_manifest(run, opens, damaged):
    path = damaged / "manifest.json"
    path.write_text(path.read_text().replace('"form": "resident"', '"form": "explicit"'))
    refused(run(*opening(opens, damaged)), "manifest.json is damaged: checksum", "export")


def test_another_schema_version(run, opens, damaged):
    edit_manifest(damaged, schema_version=SCHEMA_VERSION + 1)
    refused(run(*opening(opens, damaged)), str(SCHEMA_VERSION + 1), str(SCHEMA_VERSION), "export")


@pytest.mark.parametrize("command", ["verify", "generate", "bench"])
def test_other_package_versions(run, command, damaged):
    packages = {**Bundle.open(damaged).manifest.packages, "torch": "1.0"}
    edit_manifest(damaged, packages=packages)
    refused(run(*opening(command, damaged)), "torch 1.0", torch.__version__.partition("+")[0], "export")


def test_other_package_versions_can_be_ignored(run, damaged):
    edit_manifest(damaged, packages={**Bundle.open(damaged).manifest.packages, "torch": "1.0"})
    result = run("bench", damaged, "--ignore-versions", "--steps", 1, "--positions", 0, "--json")
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize(
    ("sizes", "heads"),
    [
        ({"batch_size": 2, "num_heads": 3, "capacity": 16}, 3),
        ({"rows_and_heads": 6, "capacity": 16}, 3),
        ({"rows_heads_and_slots": 96}, 3),
        ({"batch_size": 2}, None),
    ],
)
def test_heads_are_found_in_the_layouts_of_all_targets(sizes, heads):
    assert _heads(sizes, batch_size=2, slots=16) == heads
