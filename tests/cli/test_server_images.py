"""Images in messages of `exportable-cache serve`: responses are those of a session, and bad images are refused."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchFeature

from exportable_cache import ExportableCache, Session
from exportable_cache.decoding import Completer, CompletionOptions
from exportable_cache.decoding.completion import PromptItems
from exportable_cache.errors import InputError

from ..support.letters import letter_tokenizer
from ..support.multimodal import FAMILIES, PLACEHOLDER, prompt, tiny_multimodal
from .test_generate_files import CHAT, IMAGE, RATE, TinyImageProcessor, write_wav

pytest.importorskip("fastapi", reason="the serve extra is not installed")
pytest.importorskip("openai", reason="the test extra is not installed")
pictures = pytest.importorskip("PIL.Image", reason="pillow is not installed")

from .serving import client_of, post, served  # noqa: E402

CAPACITY = 48


def session_of(family: str) -> Session:
    """Return a session over a tiny model that takes images."""
    kind, _, options = FAMILIES[family]
    model = tiny_multimodal(family)
    cache = ExportableCache.from_model(model, CAPACITY)
    session = Session.from_model(
        model, cache, compile=False, modalities=[kind], tokenizer=letter_tokenizer(CHAT), **options
    )
    session.processor = TinyImageProcessor(letter_tokenizer(CHAT), chat_template=CHAT)
    return session


def image_part(color: Any, size: tuple[int, int] = (16, 16), form: str = "png") -> dict[str, Any]:
    """Return the part of a message with an image of one color."""
    file = io.BytesIO()
    pictures.new("RGB", size, color).save(file, form)
    content = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/{form};base64,{content}"}}


def bomb(width: int, height: int) -> dict[str, Any]:
    """Return the part of a message with a PNG that names a size and has no pixels."""
    content = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(b""))):
        content += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(content).decode()}"}}


def said(*parts: dict[str, Any] | str) -> list[dict[str, Any]]:
    """Return messages with these parts, after a system prompt that is no list of parts."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "system", "content": "b"}, {"role": "user", "content": content}]


RED, BLUE, JPEG = image_part("red"), image_part("blue"), image_part("red", form="jpeg")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served(session_of("llava")) as address:
        yield address


def expected(text: str, *colors: str) -> str:
    """Return the response of a session to a rendered prompt with images."""
    session = session_of("llava")
    assert session.processor is not None
    images = [[pictures.new("RGB", (16, 16), color) for color in colors]]
    inputs = session.processor(text=text, images=images, return_tensors="pt")
    return session.generate_text(dict(inputs), max_new_tokens=6)


def test_a_response_is_that_of_the_session_and_only_the_same_image_is_reused(address: str) -> None:
    client = client_of(address)
    asked = {"model": "demo", "temperature": 0, "max_completion_tokens": 6}
    red = expected(f"b{IMAGE}cda", "red")
    assert red != expected(f"b{IMAGE}cda", "blue")
    for parts, text, colors, cached in (
        ((RED, "cd"), f"b{IMAGE}cda", ["red"], 0),
        ((RED, "cd"), f"b{IMAGE}cda", ["red"], 7),
        ((RED, "ce"), f"b{IMAGE}cea", ["red"], 6),
        ((BLUE, "cd"), f"b{IMAGE}cda", ["blue"], 0),
        ((RED, "c", BLUE), f"b{IMAGE}c{IMAGE}a", ["red", "blue"], 0),
        ((RED, "cd"), f"b{IMAGE}cda", ["red"], 0),
    ):
        answer = client.chat.completions.create(**asked, messages=said(*parts))
        assert answer.choices[0].message.content == expected(text, *colors), (text, colors)
        assert answer.usage.prompt_tokens_details.cached_tokens == cached, (text, colors)
    stream = client.chat.completions.create(**asked, messages=said(RED, "cd"), stream=True, n=2)
    texts = ["", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [red, red]
    items = [{"type": "input_image", "image_url": RED["image_url"]["url"]}, {"type": "input_text", "text": "cd"}]
    given = {"instructions": "b", "input": [{"role": "user", "content": items}]}
    found = client.responses.create(model="demo", temperature=0, max_output_tokens=6, **given)
    assert found.output_text == red
    assert client.chat.completions.create(**asked, messages=said(JPEG, "cd")).choices[0].finish_reason
    assert post(address, "/tokenize", {"messages": said(RED, "cd")})[1]["count"] == 8


@pytest.mark.parametrize(
    ("parts", "field", "says"),
    [
        ([{"type": "image_url", "image_url": "file:///etc/passwd"}], "messages.1.content.0.image_url.url", "data: URL"),
        (
            [{"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}}],
            None,
            "base64 of at least one byte",
        ),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,é"}}], None, "base64 of at least one byte"),
        ([{"type": "image_url", "image_url": {"url": "data:image/svg+xml;base64,AA=="}}], None, "a PNG or JPEG image"),
        (
            ["c", {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
            "messages.1.content.1.image_url",
            "must be a PNG or JPEG image, got 3 bytes that Pillow cannot read",
        ),
        (
            [bomb(8192, 4097)],
            "messages.1.content.0.image_url",
            "must have at most 33554432 pixels (the limit for all images is 33554432), got 33562624",
        ),
        ([RED, bomb(8192, 4096)], "messages.1.content.1.image_url", "must have at most 33554176 pixels"),
        ([bomb(100, 100)], "messages.1.content.0.image_url", "must be a PNG or JPEG image"),
        ([RED] * 13, "messages", "messages must have at most 12 parts of type image, got 13"),
        ([RED] * 12, "messages", "context_length_exceeded"),
        (
            [{"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}],
            "messages",
            "messages must have no parts of type audio, got 1; this server takes only text and image, so",
        ),
        ([RED, "<eos>"], None, "must not spell control tokens, got '<eos>'"),
        ([{"type": "input_audio", "input_audio": {"data": "AA==", "format": "mp3"}}], None, 'with format "wav"'),
        ([RED, IMAGE], None, "the model's processor refuses the prompt: 1 images for 2 places"),
    ],
)
def test_bad_images_are_refused(address: str, parts: list[Any], field: str | None, says: str) -> None:
    status, document = post(address, "/v1/chat/completions", {"model": "demo", "messages": said(*parts)})
    assert status == 400 and says in document["error"]["message"], document
    assert field is None or document["error"]["param"] == field
    good = {"model": "demo", "messages": said(RED, "cd"), "temperature": 0, "max_tokens": 6}
    assert post(address, "/v1/chat/completions", json.dumps(good))[0] == 200


def test_images_are_refused_where_a_full_cache_drops_tokens() -> None:
    completer = Completer(session_of("llava"))
    completer.use("shift")
    part = {"type": "image", "image": b"x"}
    with pytest.raises(InputError, match="use --on-full refuse instead of shift"):
        completer.encode_items([{"role": "user", "content": [part]}])
    completer.rows = 2
    with pytest.raises(InputError, match="this server takes only text with several rows"):
        completer.check_items([{"role": "user", "content": [part]}], {})


@pytest.mark.parametrize(("family", "rewinds"), [("gemma3", False), ("qwen2_5_vl", True)])
def test_tokens_after_an_image_are_reused_as_if_they_were_fed_again(family: str, rewinds: bool) -> None:
    """Types of tokens, grids and rotary positions of several axes come with the images. A ring cannot go back."""
    session = session_of(family)
    completer, options = Completer(session), CompletionOptions(max_new_tokens=4)
    inputs = prompt(tiny_multimodal(family), 1, 9, FAMILIES[family][1], start=3)
    ids = inputs.pop("input_ids")[0].tolist()
    for more, reused in (([], 0), ([5, 6, 7], len(ids))):
        given, long = dict(inputs), [*ids, *more]
        for name in ("token_type_ids", "mm_token_type_ids"):
            if name in given:
                given[name] = torch.nn.functional.pad(given[name], (0, len(more)))
        keys = [-1 if token == PLACEHOLDER else token for token in long]
        completion = completer.complete(long, options, items=PromptItems(given, keys))
        tokens = [piece.token for piece in completion]
        fresh = {**given, "input_ids": torch.tensor([long])}
        assert tokens == list(session_of(family).generate(**fresh, max_new_tokens=4))
        assert completion.reused_tokens == (reused if rewinds else 0)


class TinyAudioProcessor(TinyImageProcessor):
    """Three tokens for each 96 samples of audio."""

    feature_extractor = SimpleNamespace(sampling_rate=RATE)

    def __call__(self, text, audio, return_tensors, images=None, videos=None, sampling_rate=RATE) -> BatchFeature:
        features = torch.tensor(np.stack([one[:96].reshape(8, 12) for one in audio]))
        ids = self.tokenizer(text.replace(IMAGE, 3 * IMAGE))["input_ids"]
        return BatchFeature({"input_ids": [ids], "input_features": features}, tensor_type=return_tensors)


def test_audio_is_taken_by_models_of_audio(tmp_path: Path) -> None:
    samples = np.random.default_rng(0).integers(-20_000, 20_000, 96, dtype=np.int16)
    content = write_wav(tmp_path / "x.wav", samples.tobytes()).read_bytes()
    session, template = session_of("voxtral"), CHAT.replace("'image'", "'audio'")
    processor = session.processor = TinyAudioProcessor(letter_tokenizer(template), chat_template=template)
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(content).decode(), "format": "wav"}}
    with served(session) as address:
        asked = {"model": "demo", "messages": said(part, "cd"), "temperature": 0, "max_tokens": 6}
        status, document = post(address, "/v1/chat/completions", asked)
        assert status == 200, document
        slow = write_wav(tmp_path / "slow.wav", samples.tobytes(), rate=8000).read_bytes()
        part["input_audio"]["data"] = base64.b64encode(slow).decode()
        status, refused = post(address, "/v1/chat/completions", {**asked, "messages": said(part)})
    assert status == 400 and refused["error"]["param"] == "messages.1.content.0.input_audio"
    assert "must have 16000 samples per second, got 8000" in refused["error"]["message"]
    inputs = processor(f"b{IMAGE}cda", [samples.astype(np.float32) / 2**15], "pt")
    text = session_of("voxtral").generate_text(dict(inputs), max_new_tokens=6)
    assert document["choices"][0]["message"]["content"] == text
