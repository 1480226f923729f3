"""`exportable-cache generate` with images and sound from files."""

import sys
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import (
    AutoProcessor,
    BatchFeature,
    LlavaConfig,
    ProcessorMixin,
    WhisperFeatureExtractor,
    WhisperProcessor,
)
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from exportable_cache import ExportableCache, Session, export, load
from exportable_cache.backends.pt2.target import Pt2Backend
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.cli.export import next_steps
from exportable_cache.common.tensors import TensorSpec
from exportable_cache.decoding import PromptLookup
from exportable_cache.errors import BundleError, InputError, MissingDependencyError
from exportable_cache.program.methods import ProgramMethod
from exportable_cache.session.inputs import prompt as files
from exportable_cache.session.inputs.prompt import prompt_inputs

from ..support.letters import letter_tokenizer
from ..support.models import VOCAB, tiny_model
from ..support.multimodal import PLACEHOLDER, reference_logits, tiny_multimodal
from ..support.seq2seq import reference_logits as seq2seq_logits
from ..support.seq2seq import tiny_seq2seq

IMAGE = chr(ord("0") + PLACEHOLDER - 3)
CHAT = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' "
    "%}" + IMAGE + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}a"
)
RATE = 16_000


class TinyImageProcessor(ProcessorMixin):
    """Four tokens for each image of 16 by 16 pixels."""

    image_token = IMAGE

    def __init__(self, tokenizer, chat_template=None) -> None:
        super().__init__(tokenizer, chat_template=chat_template)

    def __call__(self, text, images, return_tensors, videos=None, audio=None) -> BatchFeature:
        pixels = torch.stack([torch.tensor(np.asarray(image)).permute(2, 0, 1) / 255 for image in images[0]])
        if text.count(IMAGE) != len(pixels):
            raise ValueError(f"{len(pixels)} images for {text.count(IMAGE)} places")
        ids = self.tokenizer(text.replace(IMAGE, 4 * IMAGE))["input_ids"]
        return BatchFeature({"input_ids": [ids], "pixel_values": pixels}, tensor_type=return_tensors)


@pytest.fixture(scope="module", autouse=True)
def opened_once():
    """Every command opens its bundle; here that takes longer than what it answers."""
    opened, open_program = {}, Pt2Backend.open

    def open_once(self, folder, description):
        if folder not in opened:
            opened[folder] = open_program(self, folder, description)
        return opened[folder]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pt2Backend, "open", open_once)
        yield


@pytest.fixture(scope="module")
def image_bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llava"
    tiny_multimodal("llava").save_pretrained(folder)
    TinyImageProcessor(letter_tokenizer(CHAT), chat_template=CHAT).save_pretrained(folder)
    AutoProcessor.register(LlavaConfig, TinyImageProcessor, exist_ok=True)
    yield export(folder, "pt2", 48, folder.parent / "bundle", prefill_chunk=16, modalities=["image"], verify=False).path
    del PROCESSOR_MAPPING._extra_content[LlavaConfig]


@pytest.fixture(scope="module")
def whisper_bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "whisper"
    # A second of sound: 100 frames, which the encoder halves.
    tiny_seq2seq("whisper", max_source_positions=50).save_pretrained(folder)
    WhisperProcessor(WhisperFeatureExtractor(feature_size=8, chunk_length=1), letter_tokenizer()).save_pretrained(
        folder
    )
    return export(folder, "pt2", 24, folder.parent / "bundle", prefill_chunk=16, verify=False).path


@pytest.fixture
def pixels(monkeypatch) -> np.ndarray:
    """What every image file holds: these tests need no Pillow."""
    found = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    monkeypatch.setattr("exportable_cache.session.inputs.prompt.read_image", lambda path, size=None: found)
    return found


@pytest.fixture
def sound(tmp_path) -> Path:
    """Half a second of noise in stereo."""
    samples = np.random.default_rng(0).integers(-20_000, 20_000, (RATE // 2, 2), dtype=np.int16)
    return write_wav(tmp_path / "sound.wav", samples.tobytes(), channels=2)


def write_wav(path: Path, content: bytes, width: int = 2, channels: int = 1, rate: int = RATE) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(content)
    return path


def test_an_export_ends_with_the_files_that_it_takes(image_bundle, whisper_bundle):
    for bundle, options in ((image_bundle, "--prompt TEXT --image FILE"), (whisper_bundle, "--audio FILE")):
        assert next(next_steps(Bundle.open(bundle))) == f"exportable-cache generate {bundle} {options}"


def test_images_go_where_the_prompt_says(run, image_bundle, pixels):
    result = run(
        "generate",
        image_bundle,
        "-p",
        f"ab{IMAGE}cd{IMAGE}e",
        "--image",
        "x.png",
        "--image",
        "y.png",
        "--max-new-tokens",
        8,
    )
    assert result.exit_code == 0, result.stderr
    assert "13 prompt tokens" in result.stderr
    ids = letter_tokenizer()(f"ab{4 * IMAGE}cd{4 * IMAGE}e", return_tensors="pt")["input_ids"]
    pixel_values = torch.tensor(np.stack([pixels, pixels])).permute(0, 3, 1, 2) / 255
    inputs = {"input_ids": ids, "pixel_values": pixel_values}
    tokens = list(load(image_bundle).generate(**inputs, max_new_tokens=8))
    assert result.stdout == letter_tokenizer().decode(tokens, skip_special_tokens=True) + "\n"
    expected = reference_logits(tiny_multimodal("llava"), inputs, torch.tensor([tokens]))
    assert expected.argmax(-1)[0, : len(tokens)].tolist() == tokens


def test_models_take_files_like_their_bundles(run, image_bundle, whisper_bundle, pixels, sound):
    """A live model needs no option for what its bundle was exported with."""
    live = ("--device", "cpu", "--no-compile", "-n", 48, "--max-new-tokens", 6)
    for bundle, folder, arguments in (
        (image_bundle, "llava", ("-p", f"ab{IMAGE}cd", "--image", "x.png")),
        (whisper_bundle, "whisper", ("--audio", sound)),
    ):
        expected = run("generate", bundle, *arguments, "--max-new-tokens", 6)
        found = run("generate", bundle.parent / folder, *arguments, *live)
        assert found.exit_code == expected.exit_code == 0, found.stderr
        assert found.stdout == expected.stdout != ""
    refused = run("generate", "demo", "-p", "a", "--image", "x.png", *live)
    assert refused.exit_code == 2 and "image" in refused.stderr, refused.stderr


def test_images_go_where_the_chat_template_says(run, image_bundle, pixels):
    arguments = ["--image", "x.png", "--max-new-tokens", 6]
    placed = run("generate", image_bundle, "-p", f"{IMAGE}cda", *arguments)
    for chat in ([], ["--chat"]):
        templated = run("generate", image_bundle, "-p", "cd", *arguments, *chat)
        assert templated.exit_code == 0, templated.stderr
        assert templated.stdout == placed.stdout and len(placed.stdout) > 3


def test_sound_is_encoded_and_the_answer_begins_with_the_prompt(run, whisper_bundle, sound):
    samples = files.read_audio(sound, RATE)
    features = WhisperFeatureExtractor(feature_size=8, chunk_length=1)(samples, sampling_rate=RATE, return_tensors="pt")
    inputs = {"input_features": features["input_features"]}
    for prompt, options in (([], []), ([20, 21], ["-p", "AB"])):
        result = run("generate", whisper_bundle, "--audio", sound, "--max-new-tokens", 6, *options)
        assert result.exit_code == 0, result.stderr
        session = load(whisper_bundle)
        session.encode(**inputs)
        ids = torch.tensor([[2, *prompt]])
        tokens = list(session.generate(ids, max_new_tokens=6))
        assert result.stdout.rstrip("\n") == letter_tokenizer().decode(tokens, skip_special_tokens=True) != ""
        assert f"{len(prompt)} prompt tokens, {len(tokens)} new" in result.stderr
        fed = torch.cat([ids, torch.tensor([tokens])], dim=1)
        expected = seq2seq_logits(tiny_seq2seq("whisper", max_source_positions=50), inputs, fed, ids.shape[1])
        assert expected.argmax(-1)[0, : len(tokens)].tolist() == tokens


def test_inspect_says_what_is_taken(run, image_bundle, whisper_bundle):
    assert "takes text, image, with the processor for it" in run("inspect", image_bundle).stdout
    shown = run("inspect", whisper_bundle).stdout
    assert "takes audio, with the processor for it" in shown
    assert [line.split()[-1] for line in shown.splitlines() if "processor_config" in line] == ["processor"]


@pytest.mark.parametrize(
    ("bundle", "arguments", "message"),
    [
        (
            "image_bundle",
            ["-p", "a", "--audio", "x.wav"],
            "--audio x.wav was given, but the program takes only text and image",
        ),
        (
            "image_bundle",
            ["-p", f"{IMAGE}b", "--image", "x.png", "--chat"],
            "must not mark the files if the chat template does",
        ),
        (
            "image_bundle",
            ["-p", f"{IMAGE}b{IMAGE}", "--image", "x.png"],
            "processor refuses the prompt: 1 images for 2 places",
        ),
        ("whisper_bundle", ["-p", "a"], "the model takes audio and not only a prompt; pass --audio FILE"),
        ("whisper_bundle", ["--audio", "x.wav", "--audio", "y.wav"], "the encoder takes one file, got 2"),
        ("whisper_bundle", ["--audio", "gone.wav"], "audio 'gone.wav' does not exist; check the path"),
    ],
)
def test_bad_input(run, request, pixels, bundle, arguments, message):
    result = run("generate", request.getfixturevalue(bundle), *arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert message in " ".join(result.stderr.split())


def test_bundles_of_text_take_no_files(run, tmp_path):
    path = export(
        tiny_model("llama"), "pt2", 16, tmp_path / "x", prefill_chunk=1, verify=False, tokenizer=letter_tokenizer()
    ).path
    result = run("serve", path, "--modalities", "image")
    assert result.exit_code == 2 and "cannot be combined with the bundle" in " ".join(result.stderr.split())
    result = run("generate", path, "-p", "a", "--image", "x.png")
    assert result.exit_code == 2
    assert "but the program takes only text" in " ".join(result.stderr.split())
    with pytest.raises(BundleError, match="holds no processor of images or audio"):
        Bundle.open(path).processor()


def test_a_prompt_without_places_and_template_is_refused(pixels):
    processor = TinyImageProcessor(letter_tokenizer(None))
    with pytest.raises(InputError, match=f"must mark the position of the image, because .*; put {IMAGE} at"):
        prompt_inputs(processor, {}, "what", files={"image": [Path("x.png")]})


def test_encoders_that_read_text_get_the_prompt_with_the_image(pixels):
    """Florence-2's processor puts the image before the prompt, which tells the encoder its task."""
    specs = (TensorSpec("input_ids", "int64", ("batch", "length")), TensorSpec("pixel_values", "float32", ("batch", 3)))
    encode = ProgramMethod("encode", 1, 64, inputs=specs)

    def processor(text, images, return_tensors):
        ids = letter_tokenizer()(IMAGE * len(images) + text, return_tensors=return_tensors)["input_ids"]
        return {"input_ids": ids, "pixel_values": torch.zeros(len(images), 3), "other": torch.zeros(1)}

    inputs = prompt_inputs(processor, {"encode": encode}, "what", files={"image": [Path("x.png")]})
    assert sorted(inputs) == ["input_ids", "pixel_values"]
    assert torch.equal(inputs["input_ids"], letter_tokenizer()(IMAGE + "what", return_tensors="pt")["input_ids"])


def test_a_processor_whose_package_is_missing_says_so(image_bundle, monkeypatch):
    def missing(*arguments, **options):
        raise ImportError("\nSomeImageProcessor requires the PIL library")

    monkeypatch.setattr(TinyImageProcessor, "from_pretrained", missing)
    with pytest.raises(MissingDependencyError, match="needs a package: SomeImageProcessor requires the PIL library"):
        Bundle.open(image_bundle).processor()


def test_drafts_take_no_images(image_bundle, pixels):
    session = load(image_bundle)
    inputs = prompt_inputs(session.processor, session.runner.methods, "ab", files={"image": [Path("x.png")]})
    assert isinstance(session, Session) and inputs["input_ids"].shape == (1, 4 + 3)
    with pytest.raises(InputError, match="a draft takes token ids, got pixel_values"):
        session.stream_text(inputs, draft=PromptLookup())


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_of_every_width(tmp_path, width):
    values = np.array([-0.5, 0.0, 0.25])
    whole = (values * 2 ** (8 * width - 1)).astype(np.int64) + (128 if width == 1 else 0)
    content = b"".join(int(value).to_bytes(width, "little", signed=width > 1) for value in whole)
    assert files.read_audio(write_wav(tmp_path / "x.wav", content, width), RATE).tolist() == values.tolist()


def test_refused_sound(tmp_path):
    slow = write_wav(tmp_path / "slow.wav", bytes(20), rate=8000)
    (tmp_path / "text.wav").write_text("no sound")
    wide = bytearray(write_wav(tmp_path / "wide.wav", bytes(40)).read_bytes())
    # Bits of a sample.
    wide[34:36] = (64).to_bytes(2, "little")
    (tmp_path / "wide.wav").write_bytes(wide)
    for path, message in (
        (slow, "must have 16000 samples per second, got 8000; convert it: ffmpeg"),
        (tmp_path / "text.wav", "must be a WAV file"),
        (tmp_path / "wide.wav", "must be a WAV file of integers, got another"),
        (write_wav(tmp_path / "empty.wav", b""), "must have at least one sample"),
        (tmp_path, "is a folder"),
    ):
        with pytest.raises(InputError, match=message):
            files.read_audio(path, RATE)


def test_images_need_pillow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingDependencyError, match="needs Pillow, which is not installed: pip install pillow"):
        files.read_image(tmp_path / "x.png")


def test_images_are_read_and_resized(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    image.new("RGBA", (6, 4), (255, 0, 0, 255)).save(tmp_path / "x.png")
    read = files.read_image(tmp_path / "x.png")
    assert (read.mode, read.size) == ("RGB", (6, 4))
    assert files.read_image(tmp_path / "x.png", size=(8, 12)).size == (12, 8)
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(InputError, match="cannot read image .*text.png"):
        files.read_image(tmp_path / "text.png")
    with pytest.raises(InputError, match="does not exist"):
        files.read_image(tmp_path / "gone.png")


def test_images_of_a_grid_are_resized_to_it(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    pytest.importorskip(
        "torchvision", reason="transformers 5.23 makes no processor with a part for videos without torchvision"
    )
    kind = getattr(transformers, "Qwen2VLImageProcessorPil", None)
    if kind is None:
        pytest.skip("this transformers release has no image processor on pillow alone")
    model = tiny_multimodal("qwen2_vl")
    image.effect_noise((50, 50), 60).convert("RGB").save(tmp_path / "x.png")
    tokenizer = letter_tokenizer()
    tokenizer.image_token, tokenizer.video_token = IMAGE, chr(ord(IMAGE) - 1)
    tokenizer.image_token_id, tokenizer.video_token_id = VOCAB - 1, VOCAB - 2
    processor = transformers.Qwen2VLProcessor(
        kind(patch_size=4, merge_size=2, min_pixels=64, max_pixels=10_000), tokenizer
    )
    cache = ExportableCache.from_model(model, 48)
    session = Session.from_model(model, cache, prefill_chunk=16, modalities=["image"], image_size=(16, 24))
    inputs = prompt_inputs(processor, session.runner.methods, f"a{IMAGE}b", files={"image": [tmp_path / "x.png"]})
    assert inputs["image_grid_thw"].tolist() == [[1, 4, 6]]
    session.prefill(**inputs)
    assert session.length.tolist() == [8]
