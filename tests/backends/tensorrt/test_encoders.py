"""Images, audio and encoder-decoders: encoders are engines of their own, and embeddings go into the text engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedModel

from exportable_cache import ExportableCache, Session, export
from exportable_cache.cli.app import app
from exportable_cache.errors import UnsupportedModelError
from exportable_cache.program.inputs.modalities import modalities_of
from exportable_cache.program.program import Program
from exportable_cache.program.spec import ProgramSpec
from exportable_cache.session.native import NotNative, open_engines
from exportable_cache.verification.verify import verify, verify_session

from ...support.models import among
from ...support.multimodal import FAMILIES, tiny_multimodal
from ...support.seq2seq import tiny_seq2seq
from ...test_multimodal import largest_difference, options_of

pytest.importorskip("exportable_cache.backends.tensorrt.upstream", reason="no tensorrt extra is installed")

from exportable_cache.backends.tensorrt.evaluator.evaluator import NetworkRunner
from exportable_cache.backends.tensorrt.options import TensorRTOptions
from exportable_cache.backends.tensorrt.target import backend, engine_networks, methods_by_engine
from exportable_cache.bundle.files import CheckedBundle

from .cpu_engine import cpu_engine_runner

TOLERANCE = 1e-4


def made(model: PreTrainedModel, cache: ExportableCache, chunk: int, **asked: Any) -> SimpleNamespace:
    """The program and the networks of a model."""
    options = TensorRTOptions()
    program = Program(model, cache, backend.program_spec(ProgramSpec(chunk, **asked), options))
    return SimpleNamespace(program=program, networks=engine_networks(program, options))


def session_over(runner: Any, program: Program, model: PreTrainedModel) -> Session:
    placeholders = {modality.method.name: modality.token_id for modality in program.modalities}
    size = model.config.get_text_config().vocab_size
    return Session(runner, program.cache.layers, size, batch_size=1, target="tensorrt", placeholders=placeholders)


# Three axes of positions, and features of later layers; with --full also tokens of an image that see each other, audio.
@pytest.mark.parametrize("family", among(FAMILIES, fast=("qwen3_vl",)))
def test_engines_of_items_equal_the_whole_model(family: str) -> None:
    model, options = tiny_multimodal(family), options_of(family)
    modalities = modalities_of(model, options["modalities"], options.get("image_size"))
    cache = ExportableCache.from_model(model, 96, attn_implementation=None)
    parts = made(model, cache, options["prefill_chunk"], modalities=modalities)
    encoder = f"encode_{FAMILIES[family][0]}"
    assert methods_by_engine(parts.networks) == [["decode", "prefill", "prefill_embeds"], [encoder], ["embed"]]
    networks = session_over(NetworkRunner(parts.program.methods, parts.networks), parts.program, model)
    report = verify_session(networks, model, prompts=[3], decode_steps=2)
    assert report.passed and [one.method for one in report.encoders] == [encoder], str(report)
    engines = session_over(cpu_engine_runner(parts.program, parts.networks), parts.program, model)
    assert largest_difference(engines, model, family) <= TOLERANCE


@pytest.mark.parametrize("family", among(("whisper", "t5", "bart", "moonshine"), fast=("whisper",)))
def test_engines_of_an_encoder_and_a_decoder_equal_the_model(family: str) -> None:
    model = tiny_seq2seq(family)
    longest = {"whisper": {}, "moonshine": {"max_encoder_len": 4000}}.get(family, {"max_encoder_len": 16})
    cache = ExportableCache.from_model(model, 32, attn_implementation=None, **longest)
    parts = made(model, cache, 8)
    assert methods_by_engine(parts.networks) == [["encode"], ["decode"], ["prefill"]]
    # A step reads the keys and values of cross-attention, and does not return them.
    crosses = [name for name in parts.networks["prefill"].outputs if name not in parts.networks["decode"].outputs]
    assert len(crosses) == 3 * 3 and crosses[0] == "next.layers.3.keys"
    # The builder fails at plain products of one query over these.
    assert parts.networks["decode"].build_plan()
    runner = cpu_engine_runner(parts.program, parts.networks)
    for each in (NetworkRunner(parts.program.methods, parts.networks), runner):
        report = verify_session(session_over(each, parts.program, model), model, prompts=[3, 12], decode_steps=6)
        assert report.passed, str(report)


@pytest.mark.full
def test_a_bundle_with_images_is_verified_and_shown(tmp_path: Path) -> None:
    model = tiny_multimodal("llava")
    bundle = export(model, "tensorrt", 64, tmp_path / "out", prefill_chunk=16, modalities=["image"], sm="80")
    plans = {name for name in bundle.manifest.files if name.endswith(".plan")}
    assert plans == {"engine.plan", "encode_image.plan", "embed.plan"}
    (encoder,) = bundle.manifest.verification["encoders"]
    assert encoder["method"] == "encode_image" and encoder["max_difference"] <= TOLERANCE
    # The networks made again from the manifest and the model are those of the plans.
    assert verify(bundle, model, prompts=[3]).encoders
    from typer.testing import CliRunner

    result = CliRunner().invoke(app, ["inspect", str(bundle.path)])
    assert result.exit_code == 0 and "encode_image" in result.stdout
    with pytest.raises(NotNative, match="its methods take .*pixel_values"):
        open_engines(CheckedBundle.read(bundle.path))


def test_a_pte_takes_no_encoders(tmp_path: Path) -> None:
    pytest.importorskip("executorch", reason="the executorch extra is not installed")
    with pytest.raises(
        UnsupportedModelError, match="'tensorrt' takes decoders of text alone, and the program has enco"
    ):
        export(tiny_seq2seq("t5"), "executorch", 32, tmp_path / "out", max_encoder_len=16, delegate="tensorrt")
