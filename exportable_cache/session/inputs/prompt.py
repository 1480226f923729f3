"""Prompts with images and audio from files, built by the model's own processor."""

from __future__ import annotations

import wave
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...errors import InputError, MissingDependencyError
from ...generation.control_tokens import ControlTokens
from ...generation.templates import apply_chat_template
from ...generation.text import encode_prompt
from ...models.tokenizers.text import tokenizer_errors
from ...program.inputs.kinds import AUDIO, IMAGE

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import ProcessorMixin

    from ...program.methods import ProgramMethod

# Attributes of processors that hold the text of one item in a prompt.
_MARKERS = {IMAGE: ("boi_token", "image_token"), AUDIO: ("audio_token",)}


def prompt_inputs(
    processor: ProcessorMixin,
    methods: Mapping[str, ProgramMethod],
    text: str,
    files: Mapping[str, Sequence[Path]],
    chat: bool = False,
    split_special_tokens: bool = True,
) -> dict[str, torch.Tensor]:
    """Build the input of `Session.stream_text` from a prompt and files with the model's processor.

    Text that marks the positions of the files, such as `"What is <image>?"`, is used unchanged. Other text becomes the
    user's message of the chat template, after the files. For an encoder-decoder it is the start of the response.

    Args:
        processor: Processor of the model.
        methods: Methods of the program that takes the result.
        text: The prompt. It may be empty for an encoder-decoder, which takes one file.
        files: Files by kind, `image` and `audio`.
        chat: Require the chat template.
        split_special_tokens: False to encode control tokens that are spelled in a chat message as control tokens. By
            default they are refused, because processors cannot encode them as text.

    Raises:
        InputError: If a file cannot be read, the text does not mark the files and there is no chat template, a chat is
            not possible, or the processor refuses the prompt.
        MissingDependencyError: If a package that reads a file is not installed.
    """
    images, audio = files.get(IMAGE, ()), files.get(AUDIO, ())
    options = {"sampling_rate": processor.feature_extractor.sampling_rate} if audio else {}
    items: dict[str, Sequence[Any]] = {
        IMAGE: [read_image(path, _size(processor, methods)) for path in images],
        AUDIO: [read_audio(path, **options) for path in audio],
    }
    if "encode" in methods:
        if chat:
            raise InputError("chat must be False for an encoder-decoder, which takes the file only; leave it out")
        return _encoder_inputs(processor, methods["encode"], text, items, options)
    if all(any(marker in text for marker in _markers(processor, kind)) for kind, given in items.items() if given):
        if chat:
            raise InputError(
                f"the prompt must not mark the files if the chat template does, got {text!r:.80}; leave one out"
            )
        images_of_prompt = [items[IMAGE]] if images else None
        found = _processed(
            processor, text=text, images=images_of_prompt, audio=items[AUDIO] or None, return_tensors="pt", **options
        )
    else:
        found = _chat_inputs(processor, text, items, options, split_special_tokens)
    return _of_dtypes(found, methods)


def _chat_inputs(
    processor: ProcessorMixin,
    text: str,
    items: Mapping[str, Sequence[Any]],
    options: Mapping[str, Any],
    split_special_tokens: bool,
) -> Any:
    if processor.chat_template is None:
        kind = next(kind for kind, given in items.items() if given)
        marker = next(iter(_markers(processor, kind)), None)
        remedy = f"put {marker} at the position of each" if marker else "use its processor in Python"
        raise InputError(
            f"the prompt must mark the position of the {kind}, because the model has no chat template, got "
            f"{text!r:.80}; {remedy}"
        )
    spelled = ControlTokens(processor.tokenizer).marked([{"role": "user", "content": text}]).found
    if split_special_tokens and spelled is not None:
        raise InputError(
            f"the prompt must not spell control tokens, got {spelled!r} in {text!r:.80}; remove it, or pass "
            "split_special_tokens=False (--no-split-special-tokens)"
        )
    content = [{"type": kind, kind: item} for kind, given in items.items() for item in given]
    message = {"role": "user", "content": [*content, {"type": "text", "text": text}]}
    return _processed(
        apply_chat_template,
        processor,
        [message],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs=dict(options),
    )


def _encoder_inputs(
    processor: ProcessorMixin,
    encode: ProgramMethod,
    text: str,
    items: Mapping[str, Sequence[Any]],
    options: Mapping[str, Any],
) -> dict[str, torch.Tensor]:
    given: dict[str, Any] = {"images": items[IMAGE]} if items[IMAGE] else {"audio": items[AUDIO][0]}
    found = _of_dtypes(_processed(processor, return_tensors="pt", **given, **options), {"encode": encode})
    inputs = {name: tensor for name, tensor in found.items() if name in (encode.inputs[0].name, "attention_mask")}
    if text:
        inputs["decoder_input_ids"] = encode_prompt(processor.tokenizer, text, starts=False)
    return inputs


def _processed(call: Any, *arguments: Any, **options: Any) -> Any:
    # Wrapped, because each processor raises errors of other classes.
    with tokenizer_errors("the model's processor refuses the prompt", "change it, or use the processor in Python"):
        return call(*arguments, **{name: value for name, value in options.items() if value is not None})


def _of_dtypes(found: Mapping[str, torch.Tensor], methods: Mapping[str, ProgramMethod]) -> dict[str, torch.Tensor]:
    """Convert tensors to the dtypes of the program, which may have lower precision than those of processors."""
    dtypes = {spec.name: getattr(torch, spec.dtype) for method in methods.values() for spec in method.inputs}
    return {name: tensor.to(dtypes.get(name, tensor.dtype)) for name, tensor in found.items()}


def _markers(processor: ProcessorMixin, kind: str) -> list[str]:
    return [marker for name in _MARKERS[kind] if (marker := getattr(processor, name, None))]


def _size(processor: ProcessorMixin, methods: Mapping[str, ProgramMethod]) -> tuple[int, int] | None:
    """Return height and width in pixels of a program's images, or None if the processor chooses them."""
    grid = next((method.grid for method in methods.values() if method.grid is not None), None)
    if grid is None:
        return None
    patch = processor.image_processor.patch_size
    return grid[1] * patch, grid[2] * patch


def read_image(path: Path, size: tuple[int, int] | None = None) -> Image:
    """Read an image, convert it to RGB and turn it upright.

    Args:
        path: File of the image.
        size: Height and width in pixels to resize it to; unchanged by default.

    Raises:
        InputError: If there is no such file, or Pillow cannot read it.
        MissingDependencyError: If Pillow is not installed.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise MissingDependencyError(
            f"reading image {str(path)!r} needs Pillow, which is not installed: pip install pillow"
        ) from error
    _check_file("image", path)
    try:
        with Image.open(path) as opened:
            image = ImageOps.exif_transpose(opened).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(f"cannot read image {str(path)!r} ({error}); pass a file such as PNG or JPEG") from error
    return image if size is None else image.resize((size[1], size[0]), Image.Resampling.BICUBIC)


def read_audio(path: Path, sampling_rate: int) -> np.ndarray:
    """Read a WAV file, and return the mean of its channels from -1 to 1, float32 [samples].

    Args:
        path: File of the audio.
        sampling_rate: Required samples per second; the file is not resampled.

    Raises:
        InputError: If there is no such file, it has no integer samples in WAV format, or another sampling rate.
    """
    _check_file("audio", path)
    remedy = f"convert it: ffmpeg -i {path} -ar {sampling_rate} -c:a pcm_s16le {path.stem}-{sampling_rate}.wav"
    try:
        with wave.open(str(path), "rb") as file:
            rate, channels, width = file.getframerate(), file.getnchannels(), file.getsampwidth()
            content = file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise InputError(f"cannot read audio {str(path)!r} as WAV ({error}); {remedy}") from error
    if rate != sampling_rate:
        raise InputError(f"audio {str(path)!r} must have {sampling_rate} samples per second, got {rate}; {remedy}")
    if not content:
        raise InputError(f"audio {str(path)!r} must have at least one sample, got none; pass another file")
    return _samples(content, width).reshape(-1, channels).mean(axis=1)


def _samples(content: bytes, width: int) -> np.ndarray:
    """Convert little-endian integers of `width` bytes to float32. Integers of one byte are unsigned."""
    if width == 1:
        return (np.frombuffer(content, np.uint8).astype(np.float32) - 128) / 128
    # Copied to the upper bytes of 32 bits, because that keeps the sign.
    padded = np.zeros((len(content) // width, 4), np.uint8)
    padded[:, 4 - width :] = np.frombuffer(content, np.uint8).reshape(-1, width)
    return padded.view("<i4")[:, 0].astype(np.float32) / 2**31


def _check_file(kind: str, path: Path) -> None:
    if not path.is_file():
        raise InputError(f"{kind} {str(path)!r} {'is a folder' if path.is_dir() else 'does not exist'}; check the path")
