"""Processors as transformers has them, made without files: what they give for one item sizes a program, and they
travel in its bundle.
"""

import wave
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import GlmAsrProcessor, PreTrainedModel, ProcessorMixin, Qwen2AudioProcessor, WhisperFeatureExtractor

from exportable_cache import ExportableCache, Session, export, load
from exportable_cache.bundle.manifest import ItemEntry
from exportable_cache.common.tensors import TensorSpec
from exportable_cache.errors import InputError
from exportable_cache.program.inputs.modalities import modalities_of
from exportable_cache.program.methods import ProgramMethod
from exportable_cache.session.inputs.prompt import _size, prompt_inputs, sized_modalities

from ..support.letters import letter_tokenizer
from ..support.multimodal import PLACEHOLDER, tiny_multimodal
from ..zoo.media import STEPS, media_rows, reference, tiny_media_model
from ..zoo.media_items import TOWERS
from ..zoo.shrink import FIRST_TOKEN, VOCAB

RATE = 16_000
PROCESSORS = {"qwen2_audio": Qwen2AudioProcessor, "glmasr": GlmAsrProcessor}


def made(name: str) -> tuple[PreTrainedModel, ProcessorMixin, str]:
    """A model for a second of sound, its processor, and what stands for sound in a prompt."""
    (row,) = (row for row in media_rows() if row.model_type == name)
    with mock.patch.dict(TOWERS, {"qwen2_audio_encoder": {"max_source_positions": 50}}):
        model = tiny_media_model(row)
    tokenizer = letter_tokenizer()
    token = tokenizer.convert_ids_to_tokens(model.config.audio_token_id)
    extractor = WhisperFeatureExtractor(feature_size=model.config.audio_config.num_mel_bins, chunk_length=1)
    return model, PROCESSORS[name](extractor, tokenizer, chat_template="", audio_token=token), token


def heard(processor: ProcessorMixin, text: str, seed: int, seconds: float = 1) -> dict[str, Any]:
    """What a processor gives for a prompt and noise."""
    sound = np.random.default_rng(seed).uniform(-1, 1, int(seconds * RATE)).astype(np.float32)
    return dict(processor(text=[text], audio=[sound], sampling_rate=RATE, return_tensors="pt"))


def check(session: Session, model: PreTrainedModel, inputs: dict[str, Any]) -> None:
    """Teacher-forced against the whole model."""
    following = torch.randint(FIRST_TOKEN, VOCAB, (1, STEPS), generator=torch.Generator().manual_seed(5))
    model.set_attn_implementation("eager")
    expected = reference(model, inputs, following)
    model.set_attn_implementation("exportable_cache")
    rows = [session.prefill(**inputs)] + [session.decode(following[:, step]) for step in range(STEPS)]
    assert (torch.stack(rows, dim=1) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("name", ["qwen2_audio", pytest.param("glmasr", marks=pytest.mark.full)])
def test_what_a_processor_gives_sizes_a_session(name: str) -> None:
    model, processor, token = made(name)
    cache = ExportableCache.from_model(model, 96)
    session = Session.from_model(model, cache, modalities={"audio": heard(processor, f"ab{token}", seed=1)})
    check(session, model, heard(processor, f"xyz{token}w", seed=2))
    with pytest.raises(InputError, match="with sum 100 for each item of encode_audio, got .* with sum 50"):
        session.prefill(**heard(processor, f"ab{token}", seed=3, seconds=0.5))


class GridProcessor:
    """Patches of 4 by 4 pixels and their grid, as Qwen's processor gives them, which needs torchvision."""

    image_token = "<image>"
    image_processor = SimpleNamespace(patch_size=4)

    def __call__(self, text: str, images: list[Any], return_tensors: str) -> dict[str, torch.Tensor]:
        height, width = images[0][0].height // 8 * 2, images[0][0].width // 8 * 2
        placeholders = torch.full((1, height * width // 4), PLACEHOLDER)
        pixels = torch.randn(height * width, 96, generator=torch.Generator().manual_seed(0))
        return {
            "input_ids": torch.cat([torch.tensor([[5, 6]]), placeholders, torch.tensor([[7]])], dim=1),
            "pixel_values": pixels,
            "image_grid_thw": torch.tensor([[1, height, width]]),
            "num_crops": torch.tensor([1]),
        }


def test_a_processor_gives_the_sizes_that_a_config_does_not(tmp_path: Path) -> None:
    """Without it, Qwen's models could not take images on the command line without an export."""
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    image.new("RGB", (26, 18)).save(tmp_path / "x.png")
    model, processor = tiny_multimodal("qwen2_vl"), GridProcessor()
    with pytest.raises(InputError, match=r"image_size must be given .*--image-size 128x128"):
        sized_modalities(model, ["image"], lambda: processor)
    assert sized_modalities(model, ["image"], lambda: processor, (16, 24)) == ({"image": None}, (16, 24))
    found, size = sized_modalities(model, ["image"], lambda: processor, files={"image": [tmp_path / "x.png"]})
    assert size == (18, 26) and found["image"]["image_grid_thw"].tolist() == [[1, 4, 6]]
    cache = ExportableCache.from_model(model, 48)
    session = Session.from_model(model, cache, prefill_chunk=16, modalities=found, image_size=size)
    facts = session.runner.methods["encode_image"].item
    assert ItemEntry.model_validate(facts.to_dict()).described() == facts and facts.size == size
    inputs = processor("", [[image.new("RGB", (26, 18))]], "pt")
    inputs.pop("num_crops")
    session.prefill(**inputs)
    assert session.length.tolist() == [9]
    with pytest.raises(InputError, match=r"image_size must be height and width .* 1 to 16384, got \(4, 99999\)"):
        modalities_of(model, found, (4, 99999))
    with pytest.raises(ValidationError, match="less than or equal to 16384"):
        ItemEntry.model_validate({**facts.to_dict(), "size": [8, 2**40]})


def test_a_processor_gives_no_size_of_an_instruction() -> None:
    """A program of InstructBLIP would take instructions as long as the placeholder alone."""
    pytest.importorskip("PIL.Image", reason="pillow is not installed")

    class Model(SimpleNamespace):
        def forward(self, input_ids: Any, pixel_values: Any, qformer_input_ids: Any) -> None:
            raise NotImplementedError

    vision = SimpleNamespace(image_size=8, num_channels=3)
    config = SimpleNamespace(model_type="instructblip", vision_config=vision, get_text_config=SimpleNamespace)
    model: Any = Model(config=config, dtype=torch.float32, device="cpu")

    def reads(text: str, images: list[Any], return_tensors: str) -> dict[str, torch.Tensor]:
        return {"pixel_values": torch.zeros(1, 3, 8, 8), "qformer_input_ids": torch.zeros(1, len(text) + 2)}

    reader: Any = reads
    assert sized_modalities(model, ["image"], lambda: reader) == ({"image": None}, None)


def test_a_file_gives_the_length_of_audio(tmp_path: Path) -> None:
    """A file of another length than the config's was refused because of its mask."""
    model, processor, _ = made("qwen2_audio")
    with wave.open(str(tmp_path / "x.wav"), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(np.random.default_rng(0).integers(-20_000, 20_000, RATE // 2, dtype=np.int16).tobytes())
    assert sized_modalities(model, ["audio"], lambda: processor) == ({"audio": None}, None)
    found, _ = sized_modalities(model, ["audio"], lambda: processor, files={"audio": [tmp_path / "x.wav"]})
    assert int(found["audio"]["feature_attention_mask"].sum()) == 50


class FramesProcessor:
    """One frame for each of 30 samples a second, as Granite Speech takes them; its own needs torchaudio."""

    audio_token = "<audio>"
    feature_extractor = SimpleNamespace(sampling_rate=30)

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id

    def __call__(self, text: str, audio: list[Any], sampling_rate: int, return_tensors: str) -> dict[str, torch.Tensor]:
        count = -(-len(audio[0]) // 15) * 3
        return {
            "input_ids": torch.tensor([[5, 6, *[self.token_id] * count, 7]]),
            "input_features": torch.from_numpy(audio[0])[None, :, None].repeat(1, 1, 40),
            "input_features_mask": torch.ones(1, count, dtype=torch.bool),
        }


def test_audio_is_padded_where_a_config_gives_no_length(tmp_path: Path) -> None:
    """Granite Speech, Gemma 4 and Phi-4 multimodal needed an example from Python."""
    model = tiny_media_model(next(row for row in media_rows() if row.model_type == "granite_speech"))
    processor = FramesProcessor(model.config.audio_token_id)
    found, _ = sized_modalities(model, ["audio"], lambda: processor)
    assert found["audio"]["input_features"].shape == (1, 900, 40)
    found, _ = sized_modalities(model, ["audio"], lambda: processor, seconds=2)
    session = Session.from_model(model, ExportableCache.from_model(model, 48), modalities=found)
    assert session.runner.methods["encode_audio"].item.samples == 60
    for samples in (20, 61):
        with wave.open(str(tmp_path / f"{samples}.wav"), "wb") as file:
            file.setparams((1, 2, 30, 0, "NONE", ""))
            file.writeframes(np.full(samples, 1000, np.int16).tobytes())
    inputs = prompt_inputs(processor, session.runner.methods, "<audio>", {"audio": [tmp_path / "20.wav"]})
    session.prefill(**inputs)
    assert session.length.tolist() == [15] and (inputs["input_features"][0, :, 0] != 0).sum() == 20
    with pytest.raises(InputError, match=r"must have at most 2.00 seconds, .* got 2.03; cut it, or export with"):
        prompt_inputs(processor, session.runner.methods, "<audio>", {"audio": [tmp_path / "61.wav"]})
    # A live prompt's longest file gives the length of all.
    files = [tmp_path / "20.wav", tmp_path / "61.wav"]
    found, _ = sized_modalities(model, ["audio"], lambda: processor, files={"audio": files})
    assert found["audio"]["samples"] == 61
    model, whisper, _ = made("qwen2_audio")
    with pytest.raises(InputError, match="audio_seconds must be left out for 'qwen2_audio', whose config"):
        sized_modalities(model, ["audio"], lambda: whisper, seconds=3)
    with pytest.raises(InputError, match=r"audio_seconds is only used with modalities=\['audio'\]"):
        export("demo", "pt2", 32, tmp_path / "bundle", audio_seconds=3)


def test_images_are_resized_where_a_processor_keeps_their_shape() -> None:
    """Pixtral's does, and a program takes one shape."""
    pytest.importorskip("PIL.Image", reason="pillow is not installed")

    def keep(images: list[Any], return_tensors: str) -> dict[str, torch.Tensor]:
        return {"pixel_values": torch.zeros(1, 3, images[0].height, images[0].width)}

    def shrink(images: list[Any], return_tensors: str) -> dict[str, torch.Tensor]:
        return {"pixel_values": torch.zeros(1, 3, 16, 24)}

    spec = TensorSpec("pixel_values", "float32", (1, 3, 16, 24))
    methods = {"encode_image": ProgramMethod("encode_image", 1, 1, inputs=(spec,))}
    assert _size(SimpleNamespace(image_processor=keep), methods) == (16, 24)
    assert _size(SimpleNamespace(image_processor=shrink), methods) is None


@pytest.mark.full
@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_travels_in_the_bundle(name: str, tmp_path: Path) -> None:
    model, processor, token = made(name)
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    example = heard(processor, f"ab{token}", seed=1)
    bundle = export(tmp_path / "model", "pt2", 96, tmp_path / "bundle", prefill_chunk=16, modalities={"audio": example})
    session = load(bundle.path)
    check(session, model, heard(session.processor, f"xyz{token}w", seed=2))
