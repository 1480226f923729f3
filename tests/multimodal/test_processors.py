"""Processors as transformers has them, made without files: what they give for one item sizes a program, and they
travel in its bundle.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import GlmAsrProcessor, PreTrainedModel, ProcessorMixin, Qwen2AudioProcessor, WhisperFeatureExtractor

from exportable_cache import ExportableCache, Session, export, load
from exportable_cache.errors import InputError

from ..support.letters import letter_tokenizer
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
