"""Encoders of sound, features, patches and pixels: what they take, at several lengths, alone and padded, against the
model.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DonutSwinConfig,
    GPT2Config,
    PreTrainedConfig,
    PreTrainedModel,
    SpeechEncoderDecoderConfig,
    SpeechEncoderDecoderModel,
    TrOCRConfig,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
    Wav2Vec2Config,
)

from exportable_cache import ExportableCache, Session
from exportable_cache.errors import InputError, UnsupportedModelError
from exportable_cache.models.layers.encoder import encoder_of
from exportable_cache.models.loading.loading import load_config, load_model
from exportable_cache.program.decoders import encode_method
from exportable_cache.verification.references import random_inputs

from .support.seq2seq import reference_logits
from .support.sessions import lowered_session
from .zoo.architectures import architectures
from .zoo.build import made, tiny_model, tokens
from .zoo.check import graphs_without_code
from .zoo.shrink import VOCAB, tiny_config

TOLERANCE = 1e-4
MAX_CACHE_LEN = 32
PROMPT = 4
#: Longest input, and the lengths tried; None where the encoder takes one length.
LENGTHS: dict[str, tuple[int | None, tuple[int, ...]]] = {
    "speech-canary": (90, (90, 33, 17)),
    "speech-cohere_asr": (90, (90, 33, 17)),
    "speech-seamless_m4t": (90, (90, 33, 17)),
    "speech-seamless_m4t_v2": (90, (90, 33, 17)),
    "speech-speech_to_text": (90, (90, 33, 17)),
    "speech-speecht5": (4000, (4000, 1500)),
    "speech-encoder-decoder": (4000, (4000, 1500)),
    "speech-moonshine_streaming": (4000, (4000, 2080)),
    "image-pix2struct": (12, (12, 5, 1)),
    "image-pp_formulanet": (None, (128,)),
    "image-encoder-decoder": (None, (32,)),
    "image-blip": (None, (32,)),
}
SHAPES = {
    "speech-canary": ("batch", "length", 16),
    "speech-seamless_m4t": ("batch", "length", 160),
    "speech-speech_to_text": ("batch", "length", 80),
    "image-pix2struct": ("batch", "length", 770),
    "image-pp_formulanet": ("batch", 3, 128, 128),
    "image-encoder-decoder": ("batch", 3, 64, 32),
}


def model_of(name: str) -> PreTrainedModel:
    if name.endswith("-encoder-decoder"):
        return glued_model() if name.startswith("speech") else reading_model()
    return tiny_model(next(row for row in architectures() if row.name == name))


def glued_model() -> PreTrainedModel:
    """A `SpeechEncoderDecoderModel` of Wav2Vec2 and GPT-2, with hidden sizes that differ."""
    torch.manual_seed(0)
    encoder = Wav2Vec2Config(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=32,
        conv_dim=(16, 16),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
    )
    decoder = GPT2Config(vocab_size=VOCAB, n_embd=48, n_layer=2, n_head=4, is_decoder=True, add_cross_attention=True)
    config = SpeechEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    model = SpeechEncoderDecoderModel(config=config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


#: Encoder of Donut, whose images are higher than wide.
SWIN = DonutSwinConfig(
    image_size=[64, 32], embed_dim=16, depths=[1, 2], num_heads=[2, 2], window_size=4, drop_path_rate=0.0
)


def reading_model(encoder: PreTrainedConfig = SWIN) -> PreTrainedModel:
    """A `VisionEncoderDecoderModel` of an encoder and TrOCR, which is wider."""
    torch.manual_seed(0)
    decoder = TrOCRConfig(
        vocab_size=VOCAB,
        d_model=48,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=32,
        max_position_embeddings=64,
        cross_attention_hidden_size=32,
    )
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    model = VisionEncoderDecoderModel(config=config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def inputs_of(model: PreTrainedModel, name: str, length: int, batch_size: int = 1) -> dict[str, torch.Tensor]:
    method = encode_method(encoder_of(model, LENGTHS[name][0], batch_size))
    return random_inputs(method, length, batch_size, 128, torch.Generator().manual_seed(length))


def session_logits(session: Session, inputs: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    session.encode(**inputs)
    rows = [session.prefill(ids[:, :PROMPT])] + [session.decode(ids[:, at]) for at in range(PROMPT, ids.shape[1])]
    return torch.stack(rows, 1)


def largest_difference(session: Session, model: PreTrainedModel, name: str) -> float:
    ids = tokens()[:, :20]
    differences = []
    for length in LENGTHS[name][1]:
        inputs = inputs_of(model, name, length)
        expected = reference_logits(model, inputs, ids, PROMPT)
        differences.append((session_logits(session, inputs, ids) - expected).abs().max().item())
    return max(differences)


def live(model: PreTrainedModel, name: str, batch_size: int = 1) -> Session:
    cache = ExportableCache.from_model(model, MAX_CACHE_LEN, batch_size, max_encoder_len=LENGTHS[name][0])
    return Session.from_model(model, cache, prefill_chunk=16)


@pytest.mark.parametrize("name", LENGTHS)
def test_eager_sessions_equal_the_model_at_every_length(name: str) -> None:
    model = model_of(name)
    assert largest_difference(live(model, name), model, name) <= TOLERANCE


# Sound as samples, with masks of its own; images. Features: test_seq2seq_bundle.py.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("speech-canary", marks=pytest.mark.full),
        pytest.param("speech-encoder-decoder", marks=pytest.mark.full),
        "speech-moonshine_streaming",
        "image-encoder-decoder",
        "image-blip",
        pytest.param("image-pix2struct", marks=pytest.mark.full),
    ],
)
def test_one_program_serves_every_length(name: str) -> None:
    model = model_of(name)
    session = lowered_session(model, "pt2", MAX_CACHE_LEN, max_encoder_len=LENGTHS[name][0])
    assert largest_difference(session, model, name) <= TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("keeps_graphs", [False, True])
def test_compiled_sessions_equal_the_model_at_every_length(keeps_graphs: bool, tmp_path: Path) -> None:
    name = "speech-speech_to_text"
    model = model_of(name)
    # A convolution's guards split the lengths of sound: its encoder has a graph for each range of them.
    with graphs_without_code(), torch._dynamo.config.patch(error_on_recompile=False):
        cache = ExportableCache.from_model(model, MAX_CACHE_LEN, max_encoder_len=LENGTHS[name][0])
        session = Session.from_model(
            model, cache, prefill_chunk=16, compile=True, graph_cache=tmp_path if keeps_graphs else None
        )
        assert largest_difference(session, model, name) <= TOLERANCE


@pytest.mark.parametrize(
    "name",
    [
        "speech-canary",
        "speech-seamless_m4t",
        "speech-speech_to_text",
        "speech-speecht5",
        "speech-encoder-decoder",
        "image-pix2struct",
    ],
)
def test_padded_rows_equal_the_models_own(name: str) -> None:
    model = model_of(name)
    longest, lengths = LENGTHS[name]
    inputs = inputs_of(model, name, longest, 2)
    inputs["attention_mask"][1, lengths[1] :] = 0
    ids = tokens()[:, :12].expand(2, 12)
    expected = reference_logits(model, inputs, ids, PROMPT)
    unpadded = reference_logits(
        model, {**inputs, "attention_mask": torch.ones_like(inputs["attention_mask"])}, ids, PROMPT
    )
    assert (expected[1] - unpadded[1]).abs().max() > 100 * TOLERANCE
    assert (session_logits(live(model, name, 2), inputs, ids) - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", SHAPES)
def test_the_input_is_described_from_the_config(name: str) -> None:
    assert encoder_of(model_of(name), LENGTHS[name][0]).main_input.shape == SHAPES[name]


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("speech-canary", (1, 91, 16), "must have a length of 16 to 90, got 91"),
        ("speech-canary", (1, 90, 15), r"must have shape \[1, length, 16\], got \[1, 90, 15\]"),
        ("speech-moonshine_streaming", (1, 2001), "must have a length that is a multiple of 80, got 2001"),
        ("image-pp_formulanet", (1, 3, 64, 64), r"must have shape \[1, 3, 128, 128\]"),
        ("image-encoder-decoder", (1, 3, 32, 64), r"must have shape \[1, 3, 64, 32\]"),
    ],
)
def test_other_shapes_are_refused(name: str, shape: tuple[int, ...], message: str) -> None:
    model = model_of(name)
    with pytest.raises(InputError, match=message):
        live(model, name).encode(**{model.main_input_name: torch.zeros(shape)})


def test_part_of_a_frame_is_refused() -> None:
    with pytest.raises(
        InputError, match="max_encoder_len must be a multiple of 80, the samples of a frame of .*, got 4001"
    ):
        ExportableCache.from_model(model_of("speech-moonshine_streaming"), 16, max_encoder_len=4001)


def test_another_number_of_pixels_is_refused() -> None:
    with pytest.raises(InputError, match="must be 128, the pixels a side that the encoder of .*, got 64"):
        ExportableCache.from_model(model_of("image-pp_formulanet"), 16, max_encoder_len=64)


def test_another_width_is_refused() -> None:
    with pytest.raises(InputError, match="must be 32, the pixels of width that the encoder of .*, got 64"):
        ExportableCache.from_model(model_of("image-encoder-decoder"), 16, max_encoder_len=64)


def test_a_reading_model_is_loaded_from_its_folder(tmp_path: Path) -> None:
    """TrOCR and Donut are encoder-decoders that transformers lists among the models of images only."""
    model = model_of("image-encoder-decoder")
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path).model
    assert type(loaded) is VisionEncoderDecoderModel
    assert largest_difference(live(loaded, "image-encoder-decoder"), model, "image-encoder-decoder") <= TOLERANCE


def test_a_checkpoint_of_trocr_lacks_the_pooler_of_its_encoder(tmp_path: Path) -> None:
    sizes = {"image_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = reading_model(ViTConfig(**sizes, intermediate_size=32))
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    kept = {name: weight for name, weight in weights.items() if ".pooler." not in name}
    assert len(kept) == len(weights) - 2
    save_file(kept, path, {"format": "pt"})
    ids, pixels = tokens()[:, :6], torch.randn(1, 3, 32, 32)
    assert torch.equal(load_model(tmp_path).model(pixels, ids).logits, model(pixels, ids).logits)


@torch.no_grad()
def test_blip_is_loaded_as_an_encoder_decoder_with_its_logits(tmp_path: Path) -> None:
    row = next(row for row in architectures() if row.name == "image-blip")
    torch.manual_seed(0)
    model = made(row, tiny_config(row.shrinks)).eval()
    model.save_pretrained(tmp_path)
    ids, pixels = tokens()[:, :6], torch.randn(1, 3, 32, 32)
    loaded = load_model(tmp_path).model
    assert type(loaded) is VisionEncoderDecoderModel
    assert load_config(tmp_path).model_type == loaded.config.model_type == "vision-encoder-decoder"
    assert torch.equal(loaded(pixels, ids).logits, model(pixels, ids).logits)
    text = model.config.text_config
    assert loaded.generation_config.decoder_start_token_id == text.bos_token_id
    assert loaded.generation_config.eos_token_id == text.sep_token_id
    with pytest.raises(
        UnsupportedModelError, match="'blip' cannot use a static cache: .* load it by its name or folder"
    ):
        ExportableCache.from_model(model, MAX_CACHE_LEN)
