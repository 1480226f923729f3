"""Images and sound from files, as processors take them."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...errors import InputError, MissingDependencyError

if TYPE_CHECKING:
    from PIL.Image import Image


def read_image(path: Path, size: tuple[int, int] | None = None) -> Image:
    """An image in RGB, upright.

    Args:
        size: Height and width in pixels to resize it to; left as it is by default.

    Raises:
        InputError: If there is no such file, or it is no image that Pillow reads.
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


def read_sound(path: Path, sampling_rate: int) -> np.ndarray:
    """Samples of a WAV file from -1 to 1, float32 [samples], the mean of its channels.

    Args:
        sampling_rate: What the file must have; it is not resampled.

    Raises:
        InputError: If there is no such file, it is no WAV file of integer samples, holds none, or has another sampling
            rate.
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
        raise InputError(
            f"audio {str(path)!r} has {rate} samples per second, the model takes {sampling_rate}; {remedy}"
        )
    if not content:
        raise InputError(f"audio {str(path)!r} holds no samples; pass a file with sound")
    return _samples(content, width).reshape(-1, channels).mean(axis=1)


def _samples(content: bytes, width: int) -> np.ndarray:
    """Integers of `width` bytes, little-endian, as float32. Those of one byte are unsigned."""
    if width == 1:
        return (np.frombuffer(content, np.uint8).astype(np.float32) - 128) / 128
    # Into the upper bytes of 32 bits, which keeps the sign.
    whole = np.zeros((len(content) // width, 4), np.uint8)
    whole[:, 4 - width :] = np.frombuffer(content, np.uint8).reshape(-1, width)
    return whole.view("<i4")[:, 0].astype(np.float32) / 2**31


def _check_file(kind: str, path: Path) -> None:
    if not path.is_file():
        raise InputError(f"{kind} {str(path)!r} is {'a folder' if path.is_dir() else 'not there'}; check the path")
