"""Commands over models that run in this process, instead of bundles."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from exportable_cache import ExportableCache, Session
from exportable_cache.cache.spec import CACHE_LEN
from exportable_cache.cli.app import COMMANDS, app
from exportable_cache.cli.runtime import names_model
from exportable_cache.common import devices
from exportable_cache.decoding import Completer, CompletionOptions
from exportable_cache.errors import DeviceMemoryError, InputError
from exportable_cache.generation import speculative
from exportable_cache.models.loading.loading import load_model
from exportable_cache.session.opening import ModelOptions, Use, _can_compile, open_model

from ..support.drafts import eagle_folder
from ..support.models import tiny_model
from ..support.seq2seq import tiny_seq2seq
from .bundles import refused

OPENING = ("generate", "chat", "serve", "bench", "verify", "perplexity")
PROMPT = "the code of amber is 4821. amber?"
SMALL = ("--device", "cpu", "--no-compile", "-n", 48)


def arguments_of(command: str, name: object) -> list[object]:
    """Return a command's arguments, with the ones that it requires."""
    if command == "serve":
        pytest.importorskip("fastapi", reason="the serve extra is not installed")
    further = {"generate": ["-p", "x"], "verify": ["--model", "demo"], "perplexity": ["--text", __file__]}
    return [command, name, *further.get(command, [])]


def test_text_is_that_of_a_session(run: Any) -> None:
    """A command generates what `Session.stream_text` does, as text and as JSON."""
    loaded = load_model("demo")
    session = Session.from_model(loaded.model, ExportableCache.from_model(loaded.model, 48), tokenizer=loaded.tokenizer)
    expected = "".join(session.stream_text(PROMPT, 8))
    done = run("generate", "demo", "-p", PROMPT, "--max-new-tokens", 8, *SMALL)
    assert done.exit_code == 0, done.stderr
    assert done.stdout == expected + "\n" == " 4821.\n"
    assert "demo on cpu, float32, not compiled, a cache of 48 tokens" in done.stderr
    done = run("generate", "demo", "-p", PROMPT, "--prompt-lookup", 3, "--json", *SMALL)
    document = json.loads(done.stdout)
    assert document["path"] == "demo" and document["text"] == expected


def test_sizes_and_dtype_are_those_of_the_options(tiny_folder: Path) -> None:
    options = ModelOptions(device="cpu", dtype="bfloat16", max_cache_len=24, kv_dtype="int8", compile=False)
    session, loaded = open_model(str(tiny_folder), options, Use(lookup=2))
    assert loaded.model.dtype == torch.bfloat16 and session.max_length == 24 and session.score_length == 3
    assert all(layer.storage.kind == "int8" for layer in session.layers)
    positions = loaded.model.config.max_position_embeddings
    session, _ = open_model(str(tiny_folder), ModelOptions(device="cpu", compile=False))
    assert session.max_length == min(CACHE_LEN, positions)


def test_the_default_length_is_the_number_of_positions(tmp_path: Path) -> None:
    """Speech decoders name their positions differently, and score no proposals."""
    model = tiny_seq2seq("whisper")
    del model.config.max_position_embeddings
    model.save_pretrained(tmp_path)
    session, _ = open_model(str(tmp_path), ModelOptions(device="cpu", compile=False), Use(lookup=2))
    assert session.max_length == 128 and session.score_length == 0


@pytest.mark.parametrize(
    ("compile", "waits", "expected"), [(True, False, True), (True, True, "wait"), (False, False, False)]
)
def test_a_compiled_session_keeps_its_graphs(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compile: bool, waits: bool, expected: object
) -> None:
    """Graphs are kept in the user's folder, or not at all if others can write there."""
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(Session, "from_model", lambda *arguments, **options: made.append(options))
    monkeypatch.setattr("exportable_cache.common.devices.cpp_compiler", lambda: "g++")
    monkeypatch.setenv("EXPORTABLE_CACHE_HOME", str(tmp_path))
    options = ModelOptions(device="cpu", max_cache_len=24, compile=compile)
    open_model(str(tiny_folder), options, Use(waits=waits))
    assert made[0]["compile"] == expected
    assert made[0]["graph_cache"] == (tmp_path / "graphs" if compile else None)
    tmp_path.chmod(0o777)
    open_model(str(tiny_folder), options, Use(waits=waits))
    assert made[1]["graph_cache"] is None
    tmp_path.chmod(0o700)


def test_a_machine_without_a_compiler_runs_uncompiled(
    run: Any, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exportable_cache.common.compat.torch.default_backend", lambda: "inductor")
    monkeypatch.setattr("exportable_cache.common.devices.cpp_compiler", lambda: "")
    done = run("generate", "demo", "-p", PROMPT, "--device", "cpu", "-n", 48)
    assert done.exit_code == 0 and done.stdout == " 4821.\n", done.stderr
    assert "not compiled (no C++ compiler was found; install g++), a cache of 48 tokens" in done.stderr
    refused(run("bench", "demo", "--device", "cpu"), "compiled steps need a C++ compiler", "--no-compile")


@pytest.mark.parametrize(
    ("kind", "variable", "missing"), [("cpu", "CXX", ("C++", "g++")), ("cuda", "CC", ("C", "gcc")), ("mps", "", None)]
)
def test_each_device_needs_its_compiler(
    kind: str, variable: str, missing: tuple[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU's steps are compiled from C++; Triton builds what launches a GPU's kernels from C."""
    monkeypatch.setattr("exportable_cache.common.compat.torch.default_backend", lambda: "inductor")
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    found: set[str] = set()
    monkeypatch.setattr(devices.shutil, "which", lambda name: name if name in found else None)
    assert devices.missing_compiler(kind) == missing
    if missing is None:
        return
    assert not _can_compile(torch.device(kind), False)
    with pytest.raises(InputError, match=f"install {re.escape(missing[1])}, or pass --no-compile"):
        _can_compile(torch.device(kind), True)
    monkeypatch.setenv(variable, "mine")
    found.add("mine")
    assert _can_compile(torch.device(kind), True)


def test_verify_compares_a_model_with_itself(run: Any, tiny_folder: Path, tmp_path: Path) -> None:
    arguments = ("--decode-steps", 4, *SMALL)
    done = run("verify", tiny_folder, *arguments)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("verified: ")
    model = tiny_model("gemma2")
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    model.save_pretrained(tmp_path)
    done = run("verify", tiny_folder, "--model", tmp_path, *arguments)
    assert done.exit_code == 1 and "NOT verified" in done.stdout
    for option in (["--record"], ["--sign", "key"], ["--lora", "x"]):
        refused(run("verify", tiny_folder, *option, *SMALL), f"{option[0]} cannot be combined with the model")


def test_bench_times_a_model(run: Any, tiny_folder: Path) -> None:
    done = run("bench", tiny_folder, "--steps", 2, "--positions", 5, "--prompt-length", 8, "--json", *SMALL)
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert [row["position"] for row in document["decode"]] == [5]
    assert document["runtime"] == "torch" and document["peak_device_bytes"] is None


def test_chat_needs_a_template(run: Any, tiny_folder: Path) -> None:
    refused(run("chat", tiny_folder, *SMALL), "tokenizer")
    done = run("chat", "demo", "--max-new-tokens", 3, *SMALL, input="hello\n")
    assert done.exit_code == 0, done.stderr
    assert len(done.stdout.strip()) > 0


@pytest.mark.parametrize("command", OPENING)
def test_a_folder_that_is_neither_is_refused(run: Any, tmp_path: Path, command: str) -> None:
    refused(run(*arguments_of(command, tmp_path)), "is not a bundle", "manifest.json", "not a model", "config.json")


@pytest.mark.parametrize("command", OPENING)
def test_options_of_the_other_kind_are_refused(run: Any, exported: Any, command: str) -> None:
    bundle, model = arguments_of(command, exported.path), arguments_of(command, "demo")
    for option in (["--device", "cpu"], ["--no-compile"], ["-n", 8], ["--dtype", "float32"]):
        flag = "--max-cache-len" if option[0] == "-n" else option[0]
        refused(run(*bundle, *option), f"{flag} cannot be combined with the bundle", "leave it out")
    for option in (["--trust"], ["--key", "x"], ["--ignore-versions"], ["--check"]):
        refused(run(*model, *option), f"{option[0]} cannot be combined with the model demo", "no signature")


@pytest.mark.parametrize("command", OPENING)
def test_a_device_that_is_not_there_is_one_sentence(run: Any, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    arguments = arguments_of(command, "demo")
    refused(run(*arguments, "--device", "cuda"), "device must be one that torch finds here, got 'cuda'", "pass cpu")
    refused(run(*arguments, "--device", "tpu"), "device must be one of cpu, cuda, mps", "got 'tpu'")


def test_a_bundle_is_verified_with_a_named_model(run: Any, exported: Any) -> None:
    refused(run("verify", exported.path), "--model", "must be given for a bundle")


@pytest.mark.parametrize(
    ("name", "is_model"),
    [
        ("demo", True),
        ("org/name", True),
        ("model/tiny", True),
        ("bundle", False),
        ("./missing", False),
        ("/missing/folder", False),
        ("a/b/c", False),
        ("retired", False),
    ],
)
def test_names_of_models_and_of_bundles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_model: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, file in (("bundle", "manifest.json"), ("bundle", "config.json"), ("model/tiny", "config.json")):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / file).touch()
    (tmp_path / ".retired.x.old").mkdir()
    monkeypatch.setattr(
        "exportable_cache.cli.runtime.retired_folder", lambda path: tmp_path if path.name == "retired" else None
    )
    assert names_model(name) is is_model
    # A bundle of that name in this folder counts, not the model of the package.
    (tmp_path / "demo").mkdir()
    with pytest.raises(InputError, match="is not a bundle"):
        names_model("demo")


def test_every_command_that_opens_has_the_options() -> None:
    assert set(OPENING) <= set(COMMANDS)
    for command in OPENING:
        text = CliRunner().invoke(app, [command, "--help"]).stdout
        for option in (
            "--device",
            "--dtype",
            "--max-cache-len",
            "--kv-dtype",
            "--no-compile",
            "--trust",
            "--key",
        ):
            assert option in text, (command, option)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device `meta` in place of a GPU, with 1,000 bytes of 4,000 free."""
    monkeypatch.setattr("exportable_cache.common.devices.chosen_device", lambda name: torch.device("meta"))
    monkeypatch.setattr("exportable_cache.common.devices.free_and_total", lambda device: (1000, 4000))


@pytest.mark.usefixtures("small_gpu")
def test_a_model_that_does_not_fit_is_refused_before_it_is_moved(run: Any, tiny_folder: Path) -> None:
    model = load_model(tiny_folder).model
    weights = sum(parameter.nbytes for parameter in model.parameters()) / 1024
    cache = ExportableCache.from_model(model, 48).nbytes / 1024
    moved: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "to", lambda self, device: moved.append(device))
        done = run("generate", tiny_folder, "-p", "x", "-n", 48)
    refused(done, "meta must have memory for the weights (", f"and the cache ({cache:.1f} KiB)", "1000 B of 3.9 KiB")
    assert moved == []
    # Buffers, such as the frequencies of RoPE, count too.
    assert weights <= float(done.stderr.partition("weights (")[2].partition(" KiB")[0]) <= 1.1 * weights


def test_steps_without_memory_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    session = Session.from_model(model, ExportableCache.from_model(model, 32))
    session.prefill(torch.tensor([[5, 6, 7]]))

    def fail(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(type(model.lm_head), "forward", fail)
    with pytest.raises(
        DeviceMemoryError, match=r"cpu must have memory for the weights \(.*\) and the cache \(.*\)"
    ) as said:
        session.decode(torch.tensor([5]))
    assert "and for a step" in str(said.value) and "\n" not in str(said.value)
    assert isinstance(said.value, MemoryError)


def test_a_cache_without_memory_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    model, zeros = tiny_model("llama"), torch.zeros
    expected = ExportableCache.from_model(model, 32).nbytes / 1024

    def fail(*arguments: Any, **options: Any) -> torch.Tensor:
        if (
            str(options.get("device")) == "cpu"
            and arguments
            and 32 in (arguments[0] if isinstance(arguments[0], list) else ())
        ):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return zeros(*arguments, **options)

    monkeypatch.setattr("torch.zeros", fail)
    for make in (ExportableCache.from_model, lambda model, length: ExportableCache.from_config(model.config, length)):
        with pytest.raises(DeviceMemoryError, match=rf"cpu must have memory for the cache \({expected:.1f} KiB\)"):
            make(model, 32)


def test_a_server_without_memory_says_so_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi", reason="the serve extra is not installed")
    pytest.importorskip("openai", reason="the test extra is not installed")
    from .serving import post, served

    session, loaded = open_model("demo", ModelOptions(device="cpu", max_cache_len=48, compile=False))
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 6}

    def fail(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with served(session) as address:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(loaded.model.model), "forward", fail)
            status, document = post(address, "/v1/completions", body)
        assert status == 503 and document["error"]["message"].startswith("cpu must have memory for the weights")
        status, document = post(address, "/v1/completions", body)
        assert status == 200 and document["choices"][0]["text"] == " 4821."


@pytest.mark.parametrize("option", ["--draft", "--draft-model"])
def test_drafts_change_no_text(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    """In `generate`, `chat` and `serve`, with a random EAGLE-3 head, and with the demo as its own smaller model."""
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}
    eagle_folder(tmp_path, load_model("demo").model, eagle_config=layers)
    given = (option, tmp_path if option == "--draft" else "demo")
    proposed: list[int] = []
    loop = speculative.speculative_loop

    def counting(*arguments: Any) -> Any:
        try:
            yield from loop(*arguments)
        finally:
            proposed.append(arguments[-1].statistics.proposed)

    for module in ("exportable_cache.generation.speculative", "exportable_cache.session.generate"):
        monkeypatch.setattr(f"{module}.speculative_loop", counting)
    asked = ("generate", "demo", "-p", PROMPT, "--max-new-tokens", 8, *SMALL)
    assert run(*asked, *given).stdout == run(*asked).stdout == " 4821.\n"
    asked = ("chat", "demo", "--max-new-tokens", 8, *SMALL)
    expected, done = (run(*asked, *more, input=f"{PROMPT}\namber?\n") for more in ((), given))
    assert done.exit_code == 0 and done.stdout == expected.stdout, done.stderr
    pytest.importorskip("fastapi", reason="the serve extra is not installed")
    made: list[Completer] = []
    monkeypatch.setattr("exportable_cache.cli.server.app.make_app", lambda completer, options: made.append(completer))
    monkeypatch.setattr("exportable_cache.cli.server.app.run", lambda *arguments: None)
    done = run("serve", "demo", *given, *SMALL)
    assert done.exit_code == 0, done.stderr
    pieces = made[0].complete(made[0].encode(PROMPT), CompletionOptions(max_new_tokens=8))
    assert "".join(piece.text for piece in pieces) == " 4821."
    assert len(proposed) == 4 and all(proposed)
    refused(run("serve", "demo", *given, "--rows", 2), f"{option} cannot be combined with --rows 2, because")
    both = (
        "Qwen3ForCausalLM, whose config has no num_mtp_layers" if option == "--draft" else "--draft-model demo; leave"
    )
    refused(run("chat", "demo", *given, "--draft", "mtp", *SMALL), both)


def test_a_draft_head_that_is_no_folder_is_refused_before_the_model_is_read(run: Any) -> None:
    for command in ("generate", "chat", "serve"):
        done = run(*arguments_of(command, "demo"), "--draft", "nowhere", *SMALL)
        refused(done, "draft must be 'mtp' or the folder of an EAGLE-3 head", "'nowhere'", "check the folder")


def test_a_draft_model_is_checked_before_the_model_is_read(run: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    for name, says in ((tmp_path, "config.json"), ("x/y/z", "got 'x/y/z', which does not exist; check")):
        done = run("generate", "demo", "-p", PROMPT, "--draft-model", name, *SMALL)
        refused(done, says)
        assert "demo on cpu" not in done.stderr
