"""ExecuTorch's own `TextLLMRunner` generates from our file with our tokenizer, as our session does."""

import subprocess
import sys

import pytest
import torch

from exportable_cache import ExportableCache, load
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.demo.task import make_questions
from exportable_cache.errors import InputError
from exportable_cache.program.inputs.modalities import modalities_of
from exportable_cache.program.program import Program
from exportable_cache.program.spec import ProgramSpec

from ..support.models import tokens
from ..support.multimodal import tiny_multimodal
from ..support.oracle import difference, reference_logits
from ..support.sessions import folded_bundle

pytest.importorskip("executorch", reason="the executorch extra is not installed")
from exportable_cache.backends.executorch.lowering.lower import runner_metadata

RUNNER = """
import sys
import executorch.extension.llm.custom_ops.custom_ops
from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner

runner = TextLLMRunner(sys.argv[1] + "/program.pte", sys.argv[1] + "/tokenizer/tokenizer.json")
for prompt in sys.argv[2:]:
    pieces = []
    runner.generate(prompt, GenerationConfig(echo=False, max_new_tokens=12, temperature=0.0), pieces.append)
    runner.reset()
    print("ANSWER", "".join(pieces), file=sys.stderr)
"""


def test_the_official_runner_answers_as_the_session_does(demo_bundle) -> None:
    # The runner takes each prompt in two chunks.
    bundle = Bundle.open(demo_bundle)
    assert set(bundle.manifest.program.methods) == {"forward"}
    session = load(bundle.path)
    questions = make_questions(3, seed=77, min_distance=16, tokens=(260, 400))
    ran = subprocess.run(
        [sys.executable, "-c", RUNNER, str(bundle.path), *(question.prompt for question in questions)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    answers = [line.removeprefix("ANSWER") for line in ran.stderr.splitlines() if line.startswith("ANSWER")]
    assert len(answers) == 3, ran.stderr[-2000:]
    for question, answer in zip(questions, answers, strict=True):
        session.reset()
        ours = "".join(session.stream_text(question.prompt, max_new_tokens=12))
        assert ours == question.answer
        # The runner gives out the end token as well.
        assert answer.strip().removesuffix("<eos>") == ours.strip()


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
