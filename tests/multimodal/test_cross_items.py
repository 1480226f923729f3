"""Layers of cross-attention between others: text through them, and pictures, against the whole model (Mllama)."""

from __future__ import annotations

import functools
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import (
    DynamicCache,
    MllamaConfig,
    MllamaForCausalLM,
    MllamaForConditionalGeneration,
    PreTrainedModel,
)
from transformers.models.mllama import modeling_mllama

from exportable_cache import ExportableCache, Session, export
from exportable_cache.backends.tensorrt.kv_cache import engine_layers
from exportable_cache.cache.attention.implementation import attention_of
from exportable_cache.cache.spec import CacheSpec
from exportable_cache.common.patch import ORIGINAL
from exportable_cache.errors import InputError, UnsupportedModelError
from exportable_cache.pipeline.spec import ExportSpec
from exportable_cache.pipeline.steps import load, resolve
from exportable_cache.program.program import Program
from exportable_cache.session.opening import ModelOptions, Use, open_model

from ..support.models import tokens
from ..zoo.media_items import seen_by

TOLERANCE = 1e-4
PICTURE, STEPS = 121, 4
#: Of one picture: two tiles of four patches and one more each.
SLOTS = 10
Inputs = dict[str, torch.Tensor]


@functools.cache
def model(crossing: tuple[int, ...] = (1,)) -> PreTrainedModel:
    config = MllamaConfig(
        vision_config={
            "hidden_size": 32,
            "attention_heads": 4,
            "num_hidden_layers": 2,
            "num_global_layers": 1,
            "intermediate_size": 64,
            "vision_output_dim": 64,
            "image_size": 16,
            "patch_size": 8,
            "max_num_tiles": 2,
            "intermediate_layers_indices": [0],
            "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
        },
        text_config={
            "vocab_size": 120,
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 64,
            "cross_attention_layers": list(crossing),
            "max_position_embeddings": 256,
            # The defaults are outside of this vocabulary.
            **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        image_token_index=PICTURE,
    )
    torch.manual_seed(0)
    made = MllamaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return made


def prompt(pieces: tuple[int, ...], tiles: tuple[int, ...], seed: int = 0) -> Inputs:
    """Text with a picture between one piece and the next, of so many tiles each, as the processor gives it."""
    ids = tokens(sum(pieces), seed=seed).clamp(max=100)[0].split(pieces)
    joined = torch.cat([ids[0], *(torch.cat([torch.tensor([PICTURE]), piece]) for piece in ids[1:])])[None]
    given = {
        "pixel_values": torch.randn(1, len(tiles), 2, 3, 16, 16, generator=torch.Generator().manual_seed(seed)),
        "aspect_ratio_ids": torch.tensor([tiles]),
        "aspect_ratio_mask": torch.tensor([[[1, int(count > 1)] for count in tiles]]),
    }
    return {"input_ids": joined, **given, **seen_by(joined, PICTURE, given)}


@torch.no_grad()
def expected(inputs: Inputs, following: torch.Tensor, cache: DynamicCache | None = None) -> torch.Tensor:
    """Logits after a prompt and each later token, [1, STEPS + 1, vocab], of the whole model in eager attention."""
    cache = DynamicCache(config=model().config.get_text_config()) if cache is None else cache
    last = {name: inputs[name][:, -1:] for name in ("cross_attention_mask",) if name in inputs}
    with attention_of(model(), "eager"):
        rows = [model()(**inputs, past_key_values=cache).logits[:, -1]]
        for token in following.T[:, :, None]:
            rows.append(model()(input_ids=token, **last, past_key_values=cache).logits[:, -1])
    return torch.stack(rows, dim=1)


def found(session: Session, inputs: Inputs, following: torch.Tensor) -> torch.Tensor:
    rows = [session.prefill(**inputs)] + [session.decode(token) for token in following.T]
    return torch.stack(rows, dim=1)


def opened(max_encoder_len: int | None = None, **options: object) -> Session:
    cache = ExportableCache.from_model(model(), 96, max_encoder_len=max_encoder_len)
    return Session.from_model(model(), cache, **{"modalities": ["image"], "prefill_chunk": 6, **options})


def test_text_goes_past_layers_of_cross_attention() -> None:
    ids = tokens(9).clamp(max=100)
    # The first layer counts no tokens then.
    whole = model((0, 2))
    for one in (whole, MllamaForCausalLM(whole.config.get_text_config()).eval()):
        with torch.no_grad():
            wanted = one(input_ids=ids).logits
            cache = ExportableCache.from_model(one, 16)
            torch.testing.assert_close(one(input_ids=ids, past_key_values=cache).logits, wanted)
        cache.reset()
        with Session.from_model(one, cache) as session:
            torch.testing.assert_close(session.prefill(ids), wanted[:, -1])
    caches = ExportableCache.from_config(whole.config, 16), ExportableCache.from_model(whole, 16)
    # A program without pictures keeps nothing for them.
    assert [layer.label for layer in Program(whole, caches[1]).cache.layers] == ["none", "full", "none"]
    described = [[layer.config() for layer in cache.layers] for cache in caches]
    assert described[0] == described[1] and described[0][0]["policy"] == {"kind": "items", "item_slots": 10, "items": 2}


@pytest.mark.parametrize("options", [{}, {"buckets": [16, 32], "prefill_chunk": 32}])
def test_pictures_equal_the_whole_model(options: dict[str, object]) -> None:
    following = tokens(STEPS, seed=9).clamp(max=100)
    with opened(**options) as session:
        # At the start, amid text, two apart, two together, behind a chunk of text; of one tile and of two.
        for pieces, tiles in (
            ((0, 4), (2,)),
            ((2, 3), (1,)),
            ((3, 2, 5), (1, 2)),
            ((3, 0, 4), (2, 1)),
            ((18, 2, 0), (2, 2)),
        ):
            inputs = prompt(pieces, tiles, seed=sum(pieces))
            wanted = expected(inputs, following)
            turned = expected({**inputs, "pixel_values": inputs["pixel_values"].flip(-1)}, following)
            assert (turned - wanted).abs().max() > 1e-2
            session.reset()
            assert (found(session, inputs, following) - wanted).abs().max() < TOLERANCE, pieces


@torch.no_grad()
def test_pictures_come_in_any_turn_and_are_taken_back() -> None:
    none, following = tokens(0), tokens(STEPS, seed=9).clamp(max=100)
    text, first, second = {"input_ids": tokens(9).clamp(max=100)}, prompt((2, 4), (2,), 7), prompt((2, 3), (1,), 8)
    cache = DynamicCache(config=model().config.get_text_config())
    with opened() as session:
        assert (session.prefill(**text) - expected(text, none, cache)[:, 0]).abs().max() < TOLERANCE
        assert (session.prefill(**first) - expected(first, none, cache)[:, 0]).abs().max() < TOLERANCE
        session.prefill(**prompt((1, 2), (1,), 20))
        session.rewind(4)
        saved = session.fork()
        # Of the first picture, which tokens before the second see, and of the second.
        mask = second["cross_attention_mask"]
        earlier = first["cross_attention_mask"][:, -1:] * torch.tensor([1, 1, 0, 0, 0, 0])[:, None, None]
        both = {**second, "cross_attention_mask": torch.cat([earlier, mask], dim=2)}
        wanted = expected(both, following, cache)
        assert (found(session, second, following) - wanted).abs().max() < TOLERANCE
        with pytest.raises(InputError, match=f"holds 2 images, the prompt has 1.* max_encoder_len={3 * SLOTS}"):
            session.prefill(**second)
        assert (found(saved, second, following) - wanted).abs().max() < TOLERANCE


def test_the_first_step_of_a_prompt_alone_takes_pictures() -> None:
    with opened() as session, mock.patch.object(session.runner, "run", wraps=session.runner.run) as run:
        session.prefill(**prompt((9, 2, 2), (1, 2)))
    called = [call.args[0] for call in run.call_args_list]
    assert called == ["encode_image", "encode_image", "prefill_items", "prefill", "prefill"]


def test_what_is_refused_names_the_remedy() -> None:
    inputs = prompt((2, 3, 1), (2, 1))
    with opened(2 * SLOTS + 3) as session:
        with pytest.raises(InputError, match=r"must have shape \[batch, length, items, tiles\] = \[1, 8, 2, 2\]"):
            session.prefill(**{name: one for name, one in inputs.items() if name != "cross_attention_mask"})
        with pytest.raises(InputError, match="each token attend to the nearest run of images before it"):
            session.prefill(**{**inputs, "cross_attention_mask": torch.ones_like(inputs["cross_attention_mask"])})
        assert session.prefill(**inputs).isfinite().all()
    with opened(SLOTS) as session, pytest.raises(InputError, match=f"the cache keeps 1; .*max_encoder_len={2 * SLOTS}"):
        session.prefill(**inputs)
    with pytest.raises(InputError, match=f"max_encoder_len must be at least {SLOTS}.*got {SLOTS - 1}"):
        opened(SLOTS - 1)
    with pytest.raises(
        UnsupportedModelError, match="`aspect_ratio_ids` must be provided.* pass the output of its processor"
    ):
        opened(modalities={"image": {"pixel_values": inputs["pixel_values"][:, :1]}})
    with pytest.raises(InputError, match="takes no video"):
        opened(modalities=["video"])
    with pytest.raises(InputError, match="takes images only in a session"):
        model()(**inputs, past_key_values=ExportableCache.from_model(model(), 16))
    with pytest.raises(UnsupportedModelError, match="leave out offload"):
        ExportableCache.from_model(model(), 16, offload="host")
    with pytest.raises(UnsupportedModelError, match="keeps images in cross-attention layers"):
        engine_layers(model(), ExportableCache.from_model(model(), 16))
    rows = {name: torch.cat([one, one]) for name, one in inputs.items()}
    cache = ExportableCache.from_model(model(), 16, batch_size=2)
    with Session.from_model(model(), cache, modalities=["image"]) as session:
        with pytest.raises(InputError, match="got a prompt of 2 rows.*use batch_size=1"):
            session.prefill(**rows)
        torch.testing.assert_close(*session.prefill(rows["input_ids"][:, 3:4]))


def test_the_mask_over_slots_still_needs_its_patch() -> None:
    """Fails once upstream takes which tiles are seen as a mask over slots: then the patch can go."""
    ExportableCache.from_model(model(), 16)
    patched = modeling_mllama._prepare_cross_attention_mask
    seen = torch.tensor([[[1, 0], [0, 0], [-1, -1]]])
    mask, rows = patched(seen, 2, torch.float32)
    assert (mask == 0).int().tolist() == [[[[1, 1, 0, 0, 0], [0, 0, 0, 0, 1], [1, 1, 1, 1, 0]]]]
    assert rows.flatten().tolist() == [1, 0, 0]
    with pytest.raises(IndexError):
        getattr(patched, ORIGINAL)(seen, 2, torch.float32)


def test_a_folder_is_loaded_with_its_encoder_if_images_are_asked_for(tmp_path: Path) -> None:
    """transformers lists the text decoder alone as its causal LM, so `--modalities image` was refused."""
    folder = str(tmp_path / "model")
    model().save_pretrained(folder)
    options = ModelOptions(device="cpu", max_cache_len=24, compile=False)
    session, loaded = open_model(folder, options, Use(("image",)))
    assert "encode_image" in session.runner.methods
    assert type(open_model(folder, options)[1].model) is MllamaForCausalLM
    spec = ExportSpec(folder, "pt2", tmp_path / "bundle", cache=CacheSpec(24), modalities=["image"])
    assert type(load(resolve(spec)).model) is MllamaForConditionalGeneration
    size = sum(one.nbytes for one in loaded.model.parameters())
    written = export(folder, "pt2", 24, tmp_path / "bundle", modalities=["image"], dry_run=True)
    assert written.weights_bytes == size
