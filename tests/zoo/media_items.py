"""One picture, film or sound for each architecture, in the shape that its own encoder takes.

By rule, from the config and the names of the model's arguments; `_OWN` holds what the rules do not reach. No processor is
downloaded for it: what one would give beside pixels (grids, sizes, masks) is made here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

#: Patches of a picture, rows and columns.
GRID = (4, 6)
FRAMES = 24

Item = dict[str, torch.Tensor]


def kinds_of(model: PreTrainedModel) -> tuple[str, ...]:
    """Which of image, video and audio a model takes, by its arguments."""
    names = inspect.signature(model.forward).parameters
    found = []
    if hasattr(model.config, "video_token_id") and "pixel_values_videos" not in names:
        # InstructBLIP's pixels are those of frames.
        return ("video",)
    if any(name in names for name in ("pixel_values", "flattened_patches", "image_pixel_values")):
        found.append("image")
    if "pixel_values_videos" in names:
        found.append("video")
    if any(name in names for name in ("input_features", "input_values", "audio_input_features")):
        found.append("audio")
    return tuple(found)


def item(model: PreTrainedModel, kind: str, seed: int = 0) -> Item:
    """What a processor would give for one picture, film or sound: random where it is float, sizes and masks elsewhere."""
    torch.manual_seed(1000 + seed)
    own = _OWN.get((model.config.model_type, kind))
    if own is not None:
        return own(model)
    names = inspect.signature(model.forward).parameters
    if kind == "audio":
        return _sound(model, names)
    if "image_grid_thw" in names:
        return _patches(model, kind)
    return _pixels(model, kind, names)


def _vision(model: PreTrainedModel) -> Any:
    return getattr(model.config, "vision_config", model.config)


def _get(config: Any, *names: str, default: Any = None) -> Any:
    return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), default)


def _patches(model: PreTrainedModel, kind: str, flat: bool = True) -> Item:
    vision = _vision(model)
    size = _get(vision, "patch_size")
    depth = _get(vision, "temporal_patch_size", "patch_temporal", default=1)
    channels = _get(vision, "in_channels", "in_chans", "num_channels", default=3)
    # Films whose frames lie apart in a prompt, each behind its time, go frame by frame.
    frames = 1 if kind == "image" or model.config.model_type in _APART else 2
    count = frames * GRID[0] * GRID[1]
    shape = (count, channels * depth * size * size) if flat else (count, channels, size, size)
    main, grid = ("pixel_values", "image_grid_thw") if kind == "image" else ("pixel_values_videos", "video_grid_thw")
    return {main: torch.randn(shape), grid: torch.tensor([[frames, *GRID]])}


def _square(model: PreTrainedModel) -> tuple[int, int]:
    side = _get(_vision(model), "image_size", default=32)
    return tuple(side) if isinstance(side, (list, tuple)) else (side, side)


def _pixels(model: PreTrainedModel, kind: str, names: Any) -> Item:
    height, width = _square(model)
    channels = _get(_vision(model), "num_channels", "in_channels", default=3)
    if kind == "video":
        return {"pixel_values_videos": torch.randn(1, 2, channels, height, width)}
    given = {"pixel_values": torch.randn(1, channels, height, width)}
    if model.config.model_type in _SIZED:
        given["image_sizes"] = torch.tensor([[height, width]])
    return given


def _sound(model: PreTrainedModel, names: Any) -> Item:
    audio = _get(model.config, "audio_config", "encoder_config", "audio_encoder_config")
    mels = _get(audio, "num_mel_bins", "input_dim", "feature_size", default=80)
    return _frames(names, (1, mels, FRAMES * 2), FRAMES * 2)


def _frames(names: Any, shape: tuple[int, ...], frames: int) -> Item:
    given = {"input_features": torch.randn(shape)}
    for name in ("input_features_mask", "feature_attention_mask"):
        if name in names:
            given[name] = torch.ones(1, frames, dtype=torch.int64)
    return given


def _audio(shape: tuple[int, ...], frames: int) -> Callable[[PreTrainedModel], Item]:
    return lambda model: _frames(inspect.signature(model.forward).parameters, shape, frames)


def _tiles(model: PreTrainedModel, tiles: int, **further: Any) -> Item:
    return {"pixel_values": torch.randn(1, tiles, 3, *_square(model)), **further}


def _by_two_sizes(model: PreTrainedModel) -> Item:
    high = model.config.high_res_vision_config.image_size
    return {"pixel_values": torch.randn(1, 3, *_square(model)), "high_res_pixel_values": torch.randn(1, 3, high, high)}


def _anyres(model: PreTrainedModel) -> Item:
    """Four tiles and the whole, of one picture of two by two tiles."""
    height, width = _square(model)
    return {"pixel_values": torch.randn(1, 5, 3, height, width), "image_sizes": torch.tensor([[2 * height, 2 * width]])}


def _cut(kind: str, flat: bool = False) -> Callable[[PreTrainedModel], Item]:
    return lambda model: _patches(model, kind, flat=flat)


def _unit(*shape: int, **further: list[Any]) -> Callable[[PreTrainedModel], Item]:
    """`pixel_values` of a shape, and what goes with them."""
    return lambda _: {
        "pixel_values": torch.randn(shape),
        **{name: torch.tensor(values) for name, values in further.items()},
    }


def _merged(kind: str) -> Callable[[PreTrainedModel], Item]:
    def make(model: PreTrainedModel) -> Item:
        name = "image_merge_sizes" if kind == "image" else "video_merge_sizes"
        return {**_patches(model, kind), name: torch.tensor([2])}

    return make


_SIZED = ("mistral3", "mistral_large4", "lighton_ocr", "emu3")
_APART = (
    "cohere_compass cosmos3_edge cosmos3_omni qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe qwen4_exp "
    "glm46v glm4v glm4v_moe glm5_next glm_ocr"
).split()


def _timed(model: PreTrainedModel) -> Item:
    return {**_patches(model, "video"), "video_second_per_grid": torch.tensor([1.0])}


_GRID_POSITIONS = [[[x, y] for y in range(4) for x in range(6)]]


def _instructed(*shape: int) -> Item:
    """Return pixels, and the tokens of an instruction that the encoder reads, with its padding."""
    ids = torch.randint(10, 100, (shape[0], 5))
    return {
        "pixel_values": torch.randn(shape),
        "qformer_input_ids": ids,
        "qformer_attention_mask": torch.tensor([[1, 1, 1, 1, 0]]).repeat(shape[0], 1),
    }


def _framed(size: int) -> Callable[[PreTrainedModel], Item]:
    return lambda _: {
        "pixel_values_videos": torch.randn(2, 24, size),
        "video_position_ids": torch.tensor(_GRID_POSITIONS * 2),
        "num_frames_per_video": torch.tensor([2]),
    }


_OWN: dict[tuple[str, str], Callable[[PreTrainedModel], Item]] = {
    ("deepseek_vl_hybrid", "image"): _by_two_sizes,
    ("mllama", "image"): lambda model: {
        "pixel_values": torch.randn(1, 1, 4, 3, *_square(model)),
        "aspect_ratio_ids": torch.tensor([[2]]),
        "aspect_ratio_mask": torch.tensor([[[1, 1, 0, 0]]]),
    },
    **{(name, "image"): _anyres for name in "llava_next llava_next_video llava_onevision granite4_vision".split()},
    **{(name, "image"): lambda model: _tiles(model, 1) for name in "idefics2 idefics3 smolvlm".split()},
    ("granite_docling", "image"): lambda model: _tiles(
        model, 1, pixel_attention_mask=torch.ones(1, 1, dtype=torch.bool)
    ),
    **{(name, kind): _cut(kind) for name in ("kimi_k25", "paddleocr_vl") for kind in ("image", "video")},
    ("lfm2_vl", "image"): _unit(1, 4, 768, spatial_shapes=[[2, 2]], pixel_attention_mask=[[1, 1, 1, 1]]),
    ("inkling2", "image"): _unit(6, 40, 40, 3, image_grid_thw=[[1, 2, 3]]),
    ("inkling_mm_model", "image"): _unit(6, 2, 4, 4, 3),
    ("fuyu", "image"): _unit(1, 4, 2700),
    ("gemma4", "image"): _unit(1, 24, 48, image_position_ids=_GRID_POSITIONS),
    ("gemma4", "video"): _framed(48),
    **{
        (name, "audio"): lambda _: {
            "input_features": torch.randn(1, 48, 16),
            "input_features_mask": torch.ones(1, 48, dtype=torch.bool),
        }
        for name in ("gemma4", "gemma4_unified")
    },
    # Two crops side by side, after the whole image.
    ("phi4_multimodal", "image"): lambda _: {
        "image_pixel_values": torch.randn(1, 3, 3, 32, 32),
        "image_sizes": torch.tensor([[32, 64]]),
        "image_attention_mask": torch.ones(1, 3, 4, 4),
    },
    ("phi4_multimodal", "audio"): lambda _: {
        "audio_input_features": torch.randn(1, 48, 80),
        "audio_embed_sizes": torch.tensor([6]),
    },
    ("instructblip", "image"): lambda _: _instructed(1, 3, 32, 32),
    ("instructblipvideo", "video"): lambda _: _instructed(1, 4, 3, 32, 32),
    **{
        (name, "image"): lambda _: {"flattened_patches": torch.randn(1, 24, 770)}
        for name in ("pix2struct", "kosmos-2.5")
    },
    ("vibevoice_asr", "audio"): lambda _: {
        "input_values": torch.randn(1, 1, 6400),
        "padding_mask": torch.ones(1, 6400, dtype=torch.bool),
    },
    ("muse_spark", "audio"): lambda _: {"input_values": torch.randn(1, 1920)},
    ("gemma4_unified", "video"): _framed(192),
    ("nemotron_h_omni", "video"): lambda _: {"pixel_values_videos": torch.randn(2, 3, 64, 96)},
    ("qwen3_omni_moe_thinker", "audio"): _audio((1, 16, 100), 100),
    ("gemma4_unified", "image"): _unit(1, 24, 192, image_position_ids=_GRID_POSITIONS),
    ("llama4", "image"): _unit(1, 3, 32, 32),
    ("mistral3", "image"): _unit(1, 3, 64, 64, image_sizes=[[64, 64]]),
    ("mistral_large4", "image"): _unit(1, 3, 64, 64, image_sizes=[[64, 64]]),
    ("lighton_ocr", "image"): _unit(1, 3, 64, 64, image_sizes=[[64, 64]]),
    **{("video_llama_3", kind): _merged(kind) for kind in ("image", "video")},
    **{
        (name, "image"): _unit(1, 3, 16, 32 * 16, target_sizes=[[4, 8]])
        for name in "minicpm_ocr minicpmv4_6 minicpmv4_7".split()
    },
    # Frames are packed as images are.
    **{
        (name, "video"): lambda _: {
            "pixel_values_videos": torch.randn(1, 3, 16, 32 * 16),
            "target_sizes_videos": torch.tensor([[4, 8]]),
        }
        for name in "minicpm_ocr minicpmv4_6 minicpmv4_7".split()
    },
    # Six embeddings of four patches each, of 27 by 27 patches.
    ("molmo2", "image"): lambda _: {
        "pixel_values": torch.randn(1, 729, 588),
        "image_token_pooling": torch.arange(24).reshape(6, 4) * 30,
        "image_grids": torch.tensor([[2, 3, 0, 0]]),
    },
    ("nemotron_h_omni", "image"): _unit(24, 768, image_grid_hw=[[4, 6]]),
    ("qwen2_5_omni_thinker", "video"): _timed,
    ("qwen3_omni_moe_thinker", "video"): _timed,
    ("fun_asr_nano", "audio"): _audio((1, 12, 112), 12),
    **{
        (name, "audio"): lambda _: {
            "input_features": torch.randn(1, 60, 40),
            "input_features_mask": torch.ones(1, 12, dtype=torch.bool),
        }
        for name in ("granite_speech", "granite_speech_plus")
    },
    ("nemo_speechlm", "audio"): _audio((1, 64, 16), 64),
    ("qwen3_asr", "audio"): _audio((1, 16, 100), 100),
}


def seen_by(input_ids: torch.Tensor, token_id: int, items: Item) -> Item:
    """What Mllama's processor says of which tiles each token sees, where it says that."""
    if "aspect_ratio_mask" not in items:
        return {}
    sparse = [get_cross_attention_token_mask(input_ids[0].tolist(), token_id)]
    tiles = items["aspect_ratio_mask"].sum(-1).tolist()
    most = items["aspect_ratio_mask"].shape[-1]
    dense = convert_sparse_cross_attention_mask_to_dense(sparse, tiles, most, input_ids.shape[1])
    return {"cross_attention_mask": torch.from_numpy(dense)}


def axis_of(model: PreTrainedModel) -> int:
    """Along which several items are joined, see `joined_items`."""
    return 1 if model.config.model_type in _BY_PROMPT else -1 if "minicpm" in model.config.model_type else 0


_BY_PROMPT = ("idefics2", "idefics3", "smolvlm", "granite_docling", "fuyu", "mllama")
_WINDOWED = {"window_size": 56, "fullatt_block_indexes": [0]}
_TILED = {"image_grid_pinpoints": [[64, 64]]}
_SHORT = {"max_source_positions": 24}
_GEMMA4 = {
    "model_type": "gemma4_vision",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "pooling_kernel_size": 2,
    "patch_size": 4,
    "position_embedding_size": 64,
}
_GEMMA4_AUDIO = {
    "model_type": "gemma4_audio",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "subsampling_conv_channels": [16, 4],
    "output_proj_dims": 64,
}
#: Fields of towers, by model type, which are shrunk apart from what they have to fit.
TOWERS: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {4: 2}, "max_value_projector_patch_to_query_dict": 2},
    "idefics3_vision": {"patch_size": 16},
    "idefics2_vision": {"patch_size": 16},
    "smolvlm_vision": {"patch_size": 16},
    "clip_vision_model": {"patch_size": 8},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "chameleon": {
        "vocabulary_map": {"<image>": 9, **{f"IMGIMG{letter}Z": 10 + i for i, letter in enumerate("ABCDEFGH")}}
    },
    "chameleon_vqgan": {"num_embeddings": 8, "base_channels": 32, "latent_channels": 32},
    "emu3": {
        "vocabulary_map": {
            "<image>": 9,
            "<|extra_200|>": 10,
            **{f"<|visual token {index:06d}|>": 11 + index for index in range(32)},
        }
    },
    "emu3_vqgan": {"base_channels": 32, "channel_multiplier": (1, 2), "hidden_size": 64, "attn_resolutions": []},
    **dict.fromkeys("qwen2_5_vl_vision qwen2_5_omni_vision_encoder".split(), _WINDOWED),
    "exaone4_5_vision": {**_WINDOWED, "num_key_value_heads": 4},
    **{name: {"input_dim": 40} for name in ("granite_speech_encoder", "granite_speech_plus_encoder")},
    "deepseek_vl_hybrid": {},
    # Convolutions end in as many channels as the encoder behind them takes.
    **{
        f"{name}_sam_vision_model": {
            "global_attn_indexes": [1],
            "image_size": 64,
            "patch_size": 4,
            "output_channels": 64,
            "downsample_channels": [64, 64],
        }
        for name in ("deepseek_ocr2", "unlimited_ocr")
    },
    "fast_vlm": {
        "vision_config": {
            "model_type": "convnext",
            "hidden_size": 64,
            "hidden_sizes": [8, 8, 8, 64],
            "depths": [1, 1, 1, 1],
            "image_size": 64,
        }
    },
    "sam_vision_model": {"global_attn_indexes": [1], "output_channels": 64, "patch_size": 8, "image_size": 32},
    "granite_docling_vision": {"scale_factor": 2},
    "granite_docling": {"scale_factor": 2},
    "kimi_k25": {"projection_hidden_size": 64},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 40, "vision_end_token_id": 41},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 40, "vision_end_token_id": 41},
    "muse_glimmer": {"out_hidden_size": 256},
    "muse_spark": {"out_hidden_size": 256},
    "gemma4": {"vision_config": _GEMMA4, "audio_config": _GEMMA4_AUDIO},
    "gemma4_unified": {"vision_config": {**_GEMMA4, "model_type": "gemma4_unified_vision"}},
    "granite_speech": {"window_size": 15},
    "granite_speech_plus": {"window_size": 15},
    "qwen3_omni_moe_audio_encoder": {"output_dim": 64, "n_window": 50, "n_window_infer": 100},
    # Its width is a list, which is not shrunk: the features of 1,024 channels differ from those in float64 by 2e-4.
    "florence_vision": {"depths": [1, 1, 1, 1], "embed_dim": [32, 32, 64, 64]},
    "gemma3": {"mm_tokens_per_image": 4},
    "t5gemma2_encoder": {"mm_tokens_per_image": 4},
    "mllama_vision_model": {"intermediate_layers_indices": [0], "vision_output_dim": 128},
    "llava_next": _TILED,
    "llava_next_video": _TILED,
    "llava_onevision": _TILED,
    "granite4_vision": {
        **_TILED,
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [0, 0, 1, 1],
    },
    "llama4_vision_model": {
        "patch_size": 8,
        "intermediate_size": 256,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
        "vision_output_dim": 64,
    },
    "pixtral": {"image_size": 64},
    "phi4_multimodal_vision": {"crop_size": 32, "patch_size": 8},
    "phi4_multimodal_audio": {
        "num_blocks": 2,
        "nemo_conv_channels": 16,
        "ext_pw_out_channel": 64,
        "depthwise_separable_out_channel": 64,
    },
    **{
        name: {"image_token_id": 9, "video_token_id": 10, "insert_layer_id": 0}
        for name in ("minicpmv4_6", "minicpmv4_7", "minicpm_ocr")
    },
    **{f"{name}_vision": {"insert_layer_id": 0} for name in ("minicpmv4_6", "minicpmv4_7", "minicpm_ocr")},
    "nemotron_h_omni": {
        "image_token_id": 9,
        "video_token_id": 10,
        "audio_token_id": 11,
        "video_temporal_patch_size": 2,
    },
    "molmo2": {"image_patch_id": 9},
    "blip-2": {"image_token_index": 9},
    "instructblip": {"image_token_index": 9},
    "instructblipvideo": {"video_token_index": 9},
    "voxtral": {"audio_token_id": 9},
    "voxtral_encoder": _SHORT,
    "qwen2_audio_encoder": _SHORT,
    "qwen2_5_omni_audio_encoder": {"n_window": 12, "output_dim": 64},
    "moss_transcribe_diarize_audio": _SHORT,
    "audioflamingo3_encoder": _SHORT,
    "nemotron3_5_transcribe_audio": {},
}
