"""ExecuTorch's own `TextLLMRunner` generates from our file with our tokenizer, as our session does."""

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from exportable_cache import ExportableCache, load
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.cli.app import app
from exportable_cache.demo.task import make_questions
from exportable_cache.errors import BundleError, InputError
from exportable_cache.pipeline.package import package_files
from exportable_cache.program.inputs.modalities import modalities_of
from exportable_cache.program.program import Program
from exportable_cache.program.spec import ProgramSpec

from ..support.forked import run_python
from ..support.models import tokens
from ..support.multimodal import tiny_multimodal
from ..support.oracle import difference, reference_logits
from ..support.sessions import folded_bundle

pytest.importorskip("executorch", reason="the executorch extra is not installed")
from exportable_cache.backends.executorch.lowering.lower import runner_metadata
from exportable_cache.backends.executorch.pte.instructions import method_names

RUNNER = """
import sys
import executorch.extension.llm.custom_ops.custom_ops
from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner

runner = TextLLMRunner(sys.argv[1] + "/model.pte", sys.argv[1] + "/tokenizer.json")
for prompt in sys.argv[2:]:
    pieces = []
    runner.generate(prompt, GenerationConfig(echo=False, max_new_tokens=12, temperature=0.0), pieces.append)
    runner.reset()
    print("ANSWER", "".join(pieces), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def files(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that `package --layout executorch` writes."""
    folder = tmp_path_factory.mktemp("files") / "device"
    made = CliRunner().invoke(app, ["package", str(demo_bundle), "--layout", "executorch", "-o", str(folder), "--json"])
    assert made.exit_code == 0, made.stderr
    assert json.loads(made.stdout)["files"] == {path.name: path.stat().st_size for path in folder.iterdir()}
    return folder


def test_the_official_runner_answers_as_the_session_does(demo_bundle: Path, files: Path) -> None:
    # The runner takes each prompt in two chunks.
    bundle = Bundle.open(demo_bundle)
    assert set(bundle.manifest.program.methods) == {"forward"}
    session = load(bundle.path)
    questions = make_questions(3, seed=77, min_distance=16, tokens=(260, 400))
    ran = run_python(RUNNER, files, *(question.prompt for question in questions))
    answers = [line.removeprefix("ANSWER") for line in ran.stderr.splitlines() if line.startswith("ANSWER")]
    assert len(answers) == 3, ran.stderr[-2000:]
    for question, answer in zip(questions, answers, strict=True):
        session.reset()
        ours = "".join(session.stream_text(question.prompt, max_new_tokens=12))
        assert ours == question.answer
        # The runner gives out the end token as well.
        assert answer.strip().removesuffix("<eos>") == ours.strip()


def test_files_for_other_runners_are_side_by_side(demo_bundle: Path, files: Path) -> None:
    """react-native-executorch renders the chat template of the tokenizer's config."""
    assert sorted(path.name for path in files.iterdir()) == ["model.pte", "tokenizer.json", "tokenizer_config.json"]
    config = json.loads((files / "tokenizer_config.json").read_text())
    tokenizer = load(demo_bundle).tokenizer
    assert config["chat_template"] == tokenizer.chat_template and config["eos_token"] == tokenizer.eos_token


def test_bundles_that_other_runners_cannot_run_are_not_packaged(demo_bundle: Path, tmp_path: Path) -> None:
    bundle = Bundle.open(demo_bundle)
    (tmp_path / "there").mkdir()
    with pytest.raises(BundleError, match="exists; choose another folder"):
        package_files(bundle, tmp_path / "there")
    batch = bundle.manifest.program.model_copy(update={"batch_size": 2})
    split = bundle.manifest.program.model_copy(update={"methods": {}})
    for changes, message in (
        ({"target": "pt2"}, "must be for executorch"),
        ({"program": batch}, "must have one row"),
        ({"program": split}, r"must have a method forward\(input_ids, input_pos\)"),
        ({"files": {}}, "must have the file tokenizer/tokenizer.json"),
    ):
        changed = replace(bundle, manifest=bundle.manifest.model_copy(update=changes))
        with pytest.raises(BundleError, match=message):
            package_files(changed, tmp_path / "new")
    native = mock.patch(
        "exportable_cache.pipeline.package.called_operators", return_value={"exportable_cache::write.out"}
    )
    with native, pytest.raises(BundleError, match="only ExecuTorch's operators, and it calls exportable_cache::write"):
        package_files(bundle, tmp_path / "new")
    unlimited = mock.patch("exportable_cache.pipeline.package.method_names", return_value={"forward"})
    with unlimited, pytest.raises(BundleError, match="must have the constant method get_max_context_len, for Exec"):
        package_files(bundle, tmp_path / "new")
    constants = {"forward", "get_max_seq_len", "get_max_context_len", "get_eos_ids"}
    assert constants <= method_names(bundle.path / "program.pte")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    for arguments, message in (
        (["--layout", "executorch", "--for", "linux-x86_64"], "--layout executorch does not take --for"),
        (["--for", "linux-x86_64"], "--layout bundle needs --program"),
    ):
        refused = CliRunner().invoke(app, ["package", str(demo_bundle), "-o", str(tmp_path / "new"), *arguments])
        assert refused.exit_code == 2 and message in refused.stderr


def test_forward_takes_any_length_from_one_on() -> None:
    model, folder = folded_bundle(llm_runner=True)
    session = load(folder)
    ids = tokens(50)
    for prompt in (1, 2, 7, 9, 16):
        position = 0

        def step(piece: torch.Tensor) -> torch.Tensor:
            nonlocal position
            logits = session.runner.run("forward", piece, torch.tensor([position]))
            position += piece.shape[1]
            return logits

        reference = reference_logits(model, ids[:, : prompt + 20], prompt)
        assert difference(step, reference, ids[:, : prompt + 20], prompt) <= 1e-4


def test_programs_that_the_runner_could_not_run_are_refused() -> None:
    model = tiny_multimodal("qwen2_5_vl")
    program = Program(
        model,
        ExportableCache.from_model(model, 32),
        ProgramSpec(forward=True, modalities=modalities_of(model, ["image"], (16, 24))),
    )
    assert runner_metadata(program, required=False) == {}
    with pytest.raises(InputError, match="got inputs input_ids, input_pos, rope_deltas; export without llm_runner"):
        runner_metadata(program)
