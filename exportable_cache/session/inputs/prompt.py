"""Prompts with images and audio from files, built by the model's own processor."""

from __future__ import annotations

import functools
import inspect
import io
import wave
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch

from ...errors import BundleError, InputError, MissingDependencyError, UnsupportedModelError
from ...generation.control_tokens import ControlTokens
from ...generation.templates import apply_chat_template, render_chat
from ...generation.text import encode_prompt
from ...models.layers.specs import item_slots_of
from ...models.tokenizers.text import tokenizer_errors
from ...program.inputs.examples import MAIN_INPUTS, SAMPLES, example_of
from ...program.inputs.kinds import AUDIO, IMAGE, MOST_SAMPLES, image_sides

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedModel, ProcessorMixin

    from ...program.methods import ProgramMethod

# Attributes of processors that hold the text of one item in a prompt.
_MARKERS = {IMAGE: ("boi_token", "image_token"), AUDIO: ("audio_token",)}
#: Limit of the pixels of all images in one conversation, because small files may be huge images.
MOST_PIXELS = 2**25
#: Formats of images in messages. Pillow's decoders of others are used less.
_FORMATS = ("PNG", "JPEG")
#: Fields of messages in the API of `serve`, by kind of the part.
_FIELDS = {IMAGE: "image_url", AUDIO: "input_audio"}
#: Roles whose texts no chat template shortens or encodes.
_SAID = ("system", "user")
#: Bytes of the widest sample of audio.
_WIDEST = 4


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
    options = {"sampling_rate": _sampling_rate(processor)} if audio else {}
    items: dict[str, Sequence[Any]] = {
        IMAGE: [read_image(path, _size(processor, methods)) for path in images],
        AUDIO: [_padded(read_audio(path, **options), methods, f"audio {str(path)!r}", **options) for path in audio],
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
    _check_control_tokens(processor, [{"role": "user", "content": text}], split_special_tokens)
    content = [{"type": kind, kind: item} for kind, given in items.items() for item in given]
    message = {"role": "user", "content": [*content, {"type": "text", "text": text}]}
    return _of_template(processor, [message], (), options)


def message_inputs(
    processor: ProcessorMixin,
    methods: Mapping[str, ProgramMethod],
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    split_special_tokens: bool = True,
) -> dict[str, torch.Tensor]:
    """Return what the model's processor makes of chat messages with images and audio.

    Args:
        processor: Processor of the model.
        methods: Methods of the program that takes the result.
        messages: Their contents are texts or lists of parts. A part with the content of a PNG, JPEG or WAV file is
            `{"type": "image", "image": content}` or `{"type": "audio", "audio": content}`.
        tools: See `render_chat`.
        split_special_tokens: See `prompt_inputs`.

    Raises:
        InputError: If a file cannot be read, the images have more than `MOST_PIXELS` pixels, there is no chat template,
            or it or the processor refuses the messages.
        MissingDependencyError: If a package that reads a file is not installed.
    """
    if processor.chat_template is None:
        raise InputError("messages with images or audio need a chat template, and the model's processor has none")
    _check_control_tokens(processor, [*messages, {"tools": list(tools)}], split_special_tokens)
    size, pixels, options = _size(processor, methods), MOST_PIXELS, dict[str, Any]()
    said: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        content = message.get("content")
        parts = [dict(part) for part in content] if isinstance(content, list) else content
        for number, part in enumerate(parts if isinstance(parts, list) else ()):
            kind = part["type"]
            name = f"messages.{index}.content.{number}.{_FIELDS.get(kind)}"
            if kind == IMAGE:
                part[kind], used = decoded_image(part[kind], name, size, pixels)
                pixels -= used
            elif kind == AUDIO:
                options = {"sampling_rate": _sampling_rate(processor)}
                part[kind] = _padded(decoded_audio(part[kind], name, **options), methods, name, **options)
        said.append({**message, "content": parts} if "content" in message else dict(message))
    return _of_dtypes(_of_template(processor, _form(processor, said, tools), tools, options), methods)


def _form(
    processor: ProcessorMixin, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return messages with the texts as parts if the template leaves out texts that are not in a part."""

    def keeps(one: list[dict[str, Any]]) -> bool:
        rendered = render_chat(processor.tokenizer, one, processor.chat_template, tools)
        return all(
            message["content"].strip() in rendered
            for message in messages
            if isinstance(message.get("content"), str) and message["role"] in _SAID
        )

    if any(isinstance(message.get("content"), str) for message in messages) and not keeps(messages):
        return [
            {**one, "content": [{"type": "text", "text": one["content"]}]}
            if isinstance(one.get("content"), str)
            else one
            for one in messages
        ]
    return messages


def _check_control_tokens(
    processor: ProcessorMixin, messages: Sequence[Mapping[str, Any]], split_special_tokens: bool
) -> None:
    """Check that messages spell no control tokens, because processors cannot encode these as text."""
    spelled = ControlTokens(processor.tokenizer).marked(messages).found if split_special_tokens else None
    if spelled is not None:
        raise InputError(
            f"the prompt must not spell control tokens, got {spelled!r}; remove it, or pass "
            "split_special_tokens=False (--no-split-special-tokens)"
        )


def _of_template(
    processor: ProcessorMixin,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
) -> Any:
    return _processed(
        apply_chat_template,
        processor,
        messages,
        tools,
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
    # Encoders such as Florence-2's read the prompt together with the image.
    reads_text = encode.inputs[0].name == "input_ids"
    if reads_text:
        given["text"] = text
    found = _of_dtypes(_processed(processor, return_tensors="pt", **given, **options), {"encode": encode})
    inputs = {name: tensor for name, tensor in found.items() if name in (*encode.input_names, "attention_mask")}
    if text and not reads_text:
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


def _sampling_rate(processor: ProcessorMixin) -> int:
    """Return the samples per second that a processor of audio takes."""
    # Granite Speech and Phi-4 have another name for it.
    found = getattr(processor, "feature_extractor", None) or getattr(processor, "audio_processor", None)
    rate = getattr(found, "sampling_rate", None) or getattr(found, "melspec_kwargs", {}).get("sample_rate")
    if not isinstance(rate, int):
        raise InputError(
            f"the sampling rate of {type(processor).__name__} is not known; use the processor in Python, and pass its "
            "output to the session"
        )
    return rate


def _size(processor: ProcessorMixin, methods: Mapping[str, ProgramMethod]) -> tuple[int, int] | None:
    """Return height and width in pixels of a program's images, or None if the processor chooses them."""
    recorded = (method.item.size for method in methods.values() if method.item is not None)
    if (size := next((one for one in recorded if one is not None), None)) is not None:
        return size
    grid = next((method.grid for method in methods.values() if method.grid is not None), None)
    if grid is None:
        encoder = methods.get(f"encode_{IMAGE}")
        return None if encoder is None else _kept_size(processor, encoder)
    patch = processor.image_processor.patch_size
    return grid[1] * patch, grid[2] * patch


def _padded(samples: np.ndarray, methods: Mapping[str, ProgramMethod], name: str, sampling_rate: int) -> np.ndarray:
    """Append silence to audio, float32 [samples], if a program takes one length that the processor does not make."""
    encoder = methods.get(f"encode_{AUDIO}")
    length = 0 if encoder is None or encoder.item is None else encoder.item.samples
    if not length:
        return samples
    if len(samples) > length:
        raise InputError(
            f"{name} must have at most {length / sampling_rate:.2f} seconds, the length that the program was made "
            f"for, got {len(samples) / sampling_rate:.2f}; cut it, or export with a larger --audio-seconds"
        )
    return np.pad(samples, (0, length - len(samples)))


def _kept_size(processor: ProcessorMixin, encoder: ProgramMethod) -> tuple[int, int] | None:
    """Return the size of an encoder's images if the processor keeps the shape of an image, as Pixtral's does."""
    shape = encoder.inputs[0].shape
    if len(shape) != 4:
        return None
    try:
        height, width = int(shape[2]), int(shape[3])
        made = processor.image_processor([_blank((height // 2, width))], return_tensors="pt")["pixel_values"]
        return None if tuple(made.shape[-2:]) == (height, width) else (height, width)
    except Exception:  # processors raise errors of many classes, and this one may be refused later
        return None


def _blank(size: tuple[int, int]) -> Image:
    """Return a gray image of a height and width."""
    _check_pillow("images")
    from PIL import Image

    return Image.new("RGB", (size[1], size[0]), (128, 128, 128))


#: Sizes of the images that are tried to find whether a processor makes the same of all.
_TRIED = ((448, 448), (336, 700))
#: Length of audio where neither config nor user gives it, as for encoders of encoder-decoders.
_SECONDS = 30


def sized_modalities(
    model: PreTrainedModel,
    kinds: Sequence[str],
    processor: Callable[[], ProcessorMixin],
    image_size: int | Sequence[int] | None = None,
    files: Mapping[str, Sequence[Path]] | None = None,
    seconds: int | None = None,
) -> tuple[dict[str, Mapping[str, torch.Tensor] | None], int | Sequence[int] | None]:
    """Return an example of each kind for `modalities_of`, and the size of images.

    Examples are made by the processor where the config does not give the size of an item, or the processor makes
    another one of a file. Otherwise the example is None.

    Args:
        model: The model.
        kinds: Kinds of inputs besides text.
        processor: Returns the model's processor.
        image_size: Height and width of images in pixels.
        files: Files by kind. The first image gives the size, and the longest audio the length.
        seconds: Length of audio in seconds, 30 by default.

    Raises:
        InputError: If a file cannot be read, the size of images must be given, or the config gives the length of audio.
        UnsupportedModelError: If neither config nor processor gives the size.
    """
    # Once, because it reads the tokenizer's files.
    processor = functools.cache(processor)
    found: dict[str, Mapping[str, torch.Tensor] | None] = dict.fromkeys(kinds)
    names = inspect.signature(model.forward).parameters
    for kind in kinds:
        if item_slots_of(model.config) or kind not in _MARKERS or not any(name in names for name in MAIN_INPUTS[kind]):
            continue
        given = (files or {}).get(kind, ())
        example, problem = None, None
        try:
            example = example_of(model, kind, image_size if kind == IMAGE else None)
        except (InputError, UnsupportedModelError) as error:
            problem = error
        if given:
            item: Any = read_image(given[0]) if kind == IMAGE else _longest(given, _sampling_rate(processor()))
            made = _example(model, processor(), kind, item)
            if example is None or not _fits(example, made):
                found[kind] = made
                image_size = (item.height, item.width) if kind == IMAGE else image_size
        elif problem is not None:
            if kind == IMAGE:
                found[kind] = _image_example(model, processor, image_size, problem)
            else:
                found[kind] = _audio_example(model, processor, seconds or _SECONDS, problem)
        elif kind == AUDIO and seconds is not None:
            raise InputError(
                f"audio_seconds must be left out for {model.config.model_type!r}, whose config gives the length of "
                f"audio, got {seconds}; leave it out (--audio-seconds)"
            )
        elif kind == IMAGE and example is not None and (pixels := next(iter(example.values()))).dim() == 4:
            # Processors such as Pixtral's give the sizes of images, too.
            size = int(pixels.shape[2]), int(pixels.shape[3])
            with suppress(BundleError, InputError, MissingDependencyError):
                made = _example(model, processor(), IMAGE, _blank(size))
                if not _fits(example, made):
                    found[kind], image_size = made, size
    return found, image_size


def _longest(files: Sequence[Path], sampling_rate: int) -> np.ndarray:
    """Return the longest audio of files, float32 [samples]."""
    return max((read_audio(path, sampling_rate) for path in files), key=len)


def _audio_example(
    model: PreTrainedModel, processor: Callable[[], ProcessorMixin], seconds: int, problem: Exception
) -> dict[str, Any]:
    """Return what the processor makes of silence; `problem` is the error without it."""
    try:
        samples = seconds * _sampling_rate(processor())
        if samples > MOST_SAMPLES:
            problem = InputError(f"audio_seconds must give at most {MOST_SAMPLES} samples, got {samples}; lower it")
            raise problem
        return _example(model, processor(), AUDIO, np.zeros(samples, np.float32))
    except (BundleError, InputError):
        raise problem from None


def _image_example(
    model: PreTrainedModel,
    processor: Callable[[], ProcessorMixin],
    image_size: int | Sequence[int] | None,
    problem: Exception,
) -> dict[str, torch.Tensor]:
    """Return what the processor makes of a blank image; `problem` is the error without it."""
    sizes: Sequence[tuple[int, int]] = _TRIED
    if image_size is not None:
        sizes = (image_sides(image_size),)
    try:
        made = [_example(model, processor(), IMAGE, _blank(size)) for size in sizes]
    except (BundleError, InputError):
        raise problem from None
    if not all(_fits(made[0], one) for one in made):
        if isinstance(problem, InputError):
            raise problem
        raise InputError(
            f"image_size must be given for {model.config.model_type!r}, because a program takes images of one size; "
            f"pass height and width in pixels, such as image_size={_TRIED[0]} (--image-size 448x448)"
        )
    if image_size is not None and isinstance(problem, InputError):
        # Refused because the config has a size, unless the processor keeps that of the image.
        try:
            fixed = example_of(model, IMAGE)
        except InputError:
            raise problem from None
        if _fits(fixed, made[0]):
            raise problem
    return made[0]


def _example(model: PreTrainedModel, processor: ProcessorMixin, kind: str, item: Any) -> dict[str, Any]:
    """Return what a processor makes of one item, as far as the model takes it, and the `SAMPLES` of audio.

    Raises:
        InputError: If the processor refuses the item, or its output depends on the text of a prompt.
    """
    options: dict[str, Any] = {"images": [[item]]} if kind == IMAGE else {"audio": [item]}
    if kind == AUDIO:
        options["sampling_rate"] = _sampling_rate(processor)
    names = inspect.signature(model.forward).parameters
    # Florence-2's processor puts the marker in itself. Gemma 4's counts its last one.
    markers = [*reversed(_markers(processor, kind)), ""]
    for marker in markers:
        try:
            made = _processed(processor, text=marker, return_tensors="pt", **options)
            break
        except InputError:
            if marker == markers[-1]:
                raise
    if any(name.endswith("_input_ids") and name in names for name in made):
        # InstructBLIP, whose program would take instructions of the marker's length only.
        raise InputError(
            f"the {kind} encoder of {model.config.model_type!r} reads an instruction, whose length a program fixes; "
            f"pass the processor's output for one item in Python: modalities={{{kind!r}: {{...}}}}"
        )
    tensors = {name: value for name, value in made.items() if isinstance(value, torch.Tensor) and name in names}
    return tensors if kind == IMAGE else {**tensors, SAMPLES: len(item)}


def _is_of_text(name: str) -> bool:
    """Return True for outputs of a processor that a program needs no constant for."""
    return name in ("input_ids", "attention_mask", "pixel_attention_mask", SAMPLES) or "token_type_ids" in name


def _fits(example: Mapping[str, torch.Tensor], made: Mapping[str, torch.Tensor]) -> bool:
    """Return True if items of one example have the sizes, grids and masks of another."""
    if any(name not in example and not _is_of_text(name) for name in made):
        return False
    for name, value in example.items():
        if _is_of_text(name):
            continue
        other = made.get(name)
        if other is None:
            return False
        if value.is_floating_point():
            # The dimensions of one image; several tiles are several items.
            axes = min(3, value.dim() - 1)
            if value.shape[-axes:] != other.shape[-axes:]:
                return False
        elif value.shape != other.shape or not torch.equal(value.cpu(), other.cpu()):
            return False
    return True


def read_image(path: Path, size: tuple[int, int] | None = None) -> Image:
    """Read an image, convert it to RGB and turn it upright.

    Args:
        path: File of the image.
        size: Height and width in pixels to resize it to; unchanged by default.

    Raises:
        InputError: If there is no such file, or Pillow cannot read it.
        MissingDependencyError: If Pillow is not installed.
    """
    _check_pillow(f"reading image {str(path)!r}")
    from PIL import Image, ImageOps

    _check_file("image", path)
    try:
        with Image.open(path) as opened:
            image = ImageOps.exif_transpose(opened).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(f"cannot read image {str(path)!r} ({error}); pass a file such as PNG or JPEG") from error
    return _resized(image, size)


def decoded_image(
    content: bytes, name: str, size: tuple[int, int] | None = None, most_pixels: int = MOST_PIXELS
) -> tuple[Image, int]:
    """Decode a PNG or JPEG image of a stranger like `read_image`, and return it with its number of pixels.

    Args:
        content: Content of the file.
        name: Name of the image in errors.
        size: See `read_image`.
        most_pixels: Limit of its pixels, which are counted before they are decoded.

    Raises:
        InputError: If Pillow cannot read it, or it has more pixels.
        MissingDependencyError: If Pillow is not installed.
    """
    _check_pillow(f"reading {name}")
    from PIL import Image, ImageOps

    pixels = 0
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as opened:
            pixels = opened.width * opened.height
            image = None if pixels > most_pixels else ImageOps.exif_transpose(opened).convert("RGB")
    except Exception as error:  # decoders raise errors of many classes, also struct.error and IndexError
        raise InputError(
            f"{name} must be a PNG or JPEG image, got {len(content)} bytes that Pillow cannot read as one "
            f"({str(error)[:100]}); send another"
        ) from error
    if image is None:
        raise InputError(
            f"{name} must have at most {most_pixels} pixels (the limit for all images is {MOST_PIXELS}), got {pixels}; "
            "send smaller images"
        )
    return _resized(image, size), pixels


def _check_pillow(what: str) -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(f"{what} needs Pillow, which is not installed: pip install pillow") from error


def _resized(image: Image, size: tuple[int, int] | None) -> Image:
    from PIL import Image

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
    with path.open("rb") as file:
        return _audio(file, f"audio {str(path)!r}", sampling_rate, str(path))


def decoded_audio(content: bytes, name: str, sampling_rate: int) -> np.ndarray:
    """Decode a WAV file of a stranger like `read_audio`.

    Args:
        content: Content of the file.
        name: Name of the audio in errors.
        sampling_rate: See `read_audio`.

    Raises:
        InputError: See `read_audio`.
    """
    return _audio(io.BytesIO(content), name, sampling_rate, "FILE")


def _audio(opened: IO[bytes], name: str, sampling_rate: int, path: str) -> np.ndarray:
    remedy = f"convert it: ffmpeg -i {path} -ar {sampling_rate} -c:a pcm_s16le {Path(path).stem}-{sampling_rate}.wav"
    try:
        with wave.open(opened, "rb") as file:
            rate, channels, width = file.getframerate(), file.getnchannels(), file.getsampwidth()
            content = file.readframes(file.getnframes())
        if width > _WIDEST:
            raise wave.Error(f"samples of {width} bytes")
    except (OSError, EOFError, ValueError, wave.Error) as error:
        raise InputError(f"{name} must be a WAV file of integers, got another ({error}); {remedy}") from error
    if rate != sampling_rate:
        raise InputError(f"{name} must have {sampling_rate} samples per second, got {rate}; {remedy}")
    # A file that was cut off may end within a sample.
    content = content[: len(content) // (width * channels) * width * channels]
    if not content:
        raise InputError(f"{name} must have at least one sample, got none; pass another file")
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
