"""Images and sound: teacher-forced against the whole model, over live sessions and bundles."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from exportable_cache import ExportableCache, Session, export, load
from exportable_cache.backends import backend_for
from exportable_cache.decoding import PromptLookup
from exportable_cache.errors import InputError
from exportable_cache.program.inputs.modalities import modalities_of
from exportable_cache.program.program import Program
from exportable_cache.program.spec import ProgramSpec
from exportable_cache.verification.report import VerifyReport
from exportable_cache.verification.verify import verify_session

from .support.models import tiny_model, tokens
from .support.multimodal import FAMILIES, PLACEHOLDER, prompt, reference_logits, tiny_multimodal

TOLERANCE = 1e-4
STEPS = 24
# In the fast lane encoders alone are exported: backends/test_executorch_encoders.py.
ALL_PARTS = ("gemma3", "llava", "qwen2_5_vl", "qwen3_vl", "voxtral")


def options_of(family: str) -> dict[str, Any]:
    kind, _, options = FAMILIES[family]
    return {"modalities": [kind], "prefill_chunk": 16, **options}


def live(family: str, slack: int = 0, **options: Any) -> tuple[Session, PreTrainedModel]:
    model = tiny_multimodal(family)
    cache = ExportableCache.from_model(model, 96, rollback_slots=slack)
    return Session.from_model(model, cache, **{**options_of(family), **options}), model


def largest_difference(session: Session, model: PreTrainedModel, family: str) -> float:
    """Over one item and two, at the start and amid text, in prompts of one chunk and of more, each with 24 steps after
    it.
    """
    differences = []
    for items, length, start in ((1, 5, 0), (1, 14, 9), (2, 30, 2)):
        inputs = prompt(model, items, length, FAMILIES[family][1], seed=items + length, start=start, apart=5)
        following = tokens(STEPS, seed=items).clamp(max=100)
        expected = reference_logits(model, inputs, following)
        model.set_attn_implementation("exportable_cache")
        session.reset()
        rows = [session.prefill(**inputs)] + [session.decode(following[:, position]) for position in range(STEPS)]
        differences.append((torch.stack(rows, 1) - expected).abs().max().item())
    return max(differences)


@pytest.mark.parametrize("family", FAMILIES)
def test_eager_sessions_equal_the_whole_model(family: str) -> None:
    session, model = live(family)
    assert largest_difference(session, model, family) <= TOLERANCE


@pytest.mark.parametrize("family", ["llava", "qwen3_vl", "voxtral"])
def test_an_encoder_that_computes_something_else_is_not_verified(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session, model = live(family)
    assert (report := verify_session(session, model, prompts=[3], decode_steps=2)).passed
    method, run = report.encoders[0].method, session.runner.run
    assert VerifyReport(**json.loads(json.dumps(report.to_dict()))) == report

    def off(name: str, *inputs: torch.Tensor) -> Any:
        outputs = run(name, *inputs)
        return (outputs[0] + 1e-3,) if name == method else outputs

    monkeypatch.setattr(session.runner, "run", off)
    report = verify_session(session, model, prompts=[3], decode_steps=2)
    assert not report.passed and report.max_difference <= report.tolerance
    assert f"{method} 1.0e-03 exceeds 1e-04" in str(report)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_sessions_equal_the_whole_model(family: str) -> None:
    session, model = live(family, compile=True, buckets=False)
    assert largest_difference(session, model, family) <= TOLERANCE


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.full if name in ALL_PARTS else pytest.mark.slow) for name in FAMILIES],
)
def test_pt2_bundles_equal_the_whole_model(family: str, tmp_path: Path) -> None:
    model = tiny_multimodal(family)
    kind = FAMILIES[family][0]
    model.save_pretrained(tmp_path / family)
    bundle = export(
        tmp_path / family, target="pt2", max_cache_len=96, output_dir=tmp_path / "bundle", **options_of(family)
    )
    assert bundle.manifest.verification["passed"] is True
    (encoder,) = bundle.manifest.verification["encoders"]
    assert encoder["method"] == f"encode_{kind}" and encoder["max_difference"] <= TOLERANCE
    methods = bundle.manifest.program.methods
    assert set(methods) == {"decode", "prefill", f"encode_{kind}", "embed", "prefill_embeds"}
    # Qwen3-VL's hold what is added behind two layers.
    assert methods["prefill_embeds"].inputs[0].shape == ["batch", "length", 96 if family == "qwen3_vl" else 32]
    assert largest_difference(load(bundle.path), model, family) <= TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_seen_or_heard_matters(family: str) -> None:
    model = tiny_multimodal(family)
    inputs = prompt(model, 1, 5, FAMILIES[family][1])
    name = next(name for name in inputs if name in ("pixel_values", "input_features"))
    other = {**inputs, name: inputs[name].flip(-1)}
    following = tokens(3)
    assert (reference_logits(model, inputs, following) - reference_logits(model, other, following)).abs().amax(
        -1
    ).min() > 0.01


def test_layers_that_see_an_image_once_more_matter() -> None:
    """Without the features behind its first layers Qwen3-VL answers something else, so the tests above would see them
    missing.
    """
    session, model = live("qwen3_vl")
    inputs = prompt(model, 1, 5, 6)
    expected = session.prefill(**inputs)
    (embeds,) = session.runner.run("encode_image", inputs["pixel_values"])
    assert embeds.shape == (6, 3 * 32)
    run = session.runner.run
    without = torch.cat([embeds[:, :32], torch.zeros(6, 64)], dim=1)
    session.runner.run = lambda method, *given: (without,) if method == "encode_image" else run(method, *given)
    session.reset()
    assert (session.prefill(**inputs) - expected).abs().max() > 0.01


def test_what_the_image_processor_gives_is_taken() -> None:
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    kind = getattr(transformers, "Qwen2VLImageProcessorPil", None)
    if kind is None:
        pytest.skip("this transformers release has no image processor on pillow alone")
    processor = kind(patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=10_000)
    session, model = live("qwen2_5_vl")
    ids, following = prompt(model, 1, 5, 6)["input_ids"], tokens(3).clamp(max=100)
    photo = image.frombytes("RGB", (24, 16), bytes(range(256)) * 4 + bytes(128))
    inputs = {"input_ids": ids, **processor(images=[photo], return_tensors="pt")}
    logits = session.prefill(**inputs)
    expected = reference_logits(model, {**inputs, "mm_token_type_ids": (ids == PLACEHOLDER).long()}, following)
    assert (logits - expected[:, 0]).abs().max() <= TOLERANCE
    with pytest.raises(InputError, match=r"image_grid_thw must be .* got \[1, 6, 4\]"):
        session.prefill(ids, **processor(images=[photo.rotate(90, expand=True)], return_tensors="pt"))


def test_generation_from_what_a_processor_gives() -> None:
    session, model = live("qwen2_5_vl")
    inputs = prompt(model, 1, 5, 6)
    found = list(session.generate(**inputs, attention_mask=torch.ones_like(inputs["input_ids"]), max_new_tokens=12))
    assert session.length.tolist() == [5 + 6 + 11]
    expected = reference_logits(model, inputs, torch.tensor([found]))
    assert expected.argmax(-1)[0, :12].tolist() == found
    other, _ = live("llava")
    with pytest.raises(InputError, match=r"pixel_values must have shape .* got \[24, 96\]"):
        other.generate(**inputs)
    with pytest.raises(InputError, match="a draft takes token ids, got pixel_values"):
        session.generate(**inputs, draft=PromptLookup())
    with pytest.raises(InputError, match="encode_image takes image_grid_thw with pixel_values; pass it too"):
        session.generate(inputs["input_ids"], pixel_values=inputs["pixel_values"])


def test_refused_inputs() -> None:
    session, model = live("llava")
    inputs = prompt(model, 1, 5, 4)
    for changed, message in (
        ({"pixel_values": torch.randn(1, 3, 8, 8)}, r"must have shape \[items, 3, 16, 16\]"),
        ({"pixel_values": torch.randn(2, 3, 16, 16)}, "encode_image gives 8 embeddings"),
        ({"pixel_values": inputs["pixel_values"].double()}, "must be torch.float32"),
        ({"input_features": torch.randn(1, 8, 12)}, "got 'input_features'"),
    ):
        with pytest.raises(InputError, match=message):
            session.prefill(**{**inputs, **changed})
    with pytest.raises(InputError, match="the prompt has 4 tokens of id 127, encode_image gives 0"):
        session.prefill(inputs["input_ids"])
    assert session.length.tolist() == [0]


def test_models_that_need_more_are_refused() -> None:
    text = tiny_model("llama")
    with pytest.raises(InputError, match="'llama' takes no image; leave it out"):
        modalities_of(text, ["image"])
    with pytest.raises(InputError, match="make it, or export, with modalities="):
        Session.from_model(text, ExportableCache.from_model(text, 32)).prefill(
            tokens(3), pixel_values=torch.zeros(1, 3, 8, 8)
        )


def test_warm_up_runs_what_embeds_too() -> None:
    session, model = live("qwen2_5_vl")
    session.warm_up()
    assert session.length.tolist() == [0]
    assert largest_difference(session, model, "qwen2_5_vl") <= TOLERANCE


@pytest.mark.parametrize("family", ("gemma3", "qwen2_5_vl"))
def test_a_conversation_equals_its_prompt_at_once(family: str) -> None:
    """An image, text by ids, a second image, text by ids: what follows an image goes on from where it left off."""
    session, model = live(family)
    whole = prompt(model, 2, 20, FAMILIES[family][1], start=3, apart=6)
    following = tokens(12, seed=5).clamp(max=100)
    expected = reference_logits(model, whole, following)
    model.set_attn_implementation("exportable_cache")
    feed(session, whole, first_turn=3 + FAMILIES[family][1] + 2)
    rows = [feed_ids(session, whole, 20 + 2 * FAMILIES[family][1])]
    rows += [session.decode(following[:, position]) for position in range(12)]
    assert (torch.stack(rows, 1) - expected).abs().max() <= TOLERANCE


def feed(session: Session, whole: dict[str, torch.Tensor], first_turn: int) -> None:
    """The first `first_turn` tokens with one image, three tokens of text, and up to behind the second image."""
    names = [name for name in whole if name in ("pixel_values", "image_grid_thw")]
    first, second = ({name: whole[name].chunk(2)[index] for name in names} for index in (0, 1))
    ids = whole["input_ids"]
    end = int((ids[0] == PLACEHOLDER).nonzero()[-1]) + 1
    session.reset()
    session.prefill(ids[:, :first_turn], **first)
    session.prefill(ids[:, first_turn : first_turn + 3])
    session.prefill(ids[:, first_turn + 3 : end], **second)


def feed_ids(session: Session, whole: dict[str, torch.Tensor], end: int) -> torch.Tensor:
    """The rest of the prompt, as text."""
    return session.prefill(whole["input_ids"][:, int(session.length[0]) : end])


@pytest.mark.parametrize("family", ("gemma3", "qwen2_5_vl"))
def test_rewinding_over_and_into_images(family: str) -> None:
    session, model = live(family, slack=30)
    per_item = FAMILIES[family][1]
    inputs, following = prompt(model, 1, 5, per_item), tokens(3)
    session.prefill(**inputs)
    with pytest.raises(InputError, match=f"inside the image at 2 to {per_item + 1}; take back all of it, or none"):
        session.rewind(4)
    assert session.length.tolist() == [5 + per_item]
    session.rewind(3)
    after_image = session.prefill(following)
    session.rewind(3 + per_item)
    after_text = session.prefill(following)
    for end, found in ((2 + per_item, after_image), (2, after_text)):
        session.reset()
        is_token = {"input_ids", "token_type_ids", "mm_token_type_ids"}
        kept = {name: tensor[:, :end] if name in is_token else tensor for name, tensor in inputs.items()}
        session.prefill(**(kept if end > 2 else {"input_ids": kept["input_ids"]}))
        torch.testing.assert_close(found, session.prefill(following), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", ("gemma3", "qwen2_5_vl"))
def test_an_image_whose_step_failed_was_not_seen(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded before its step ran, it would move the positions of the text fed instead, and stand in the way of a
    rewind.
    """
    session, model = live(family, slack=30)
    inputs, text = prompt(model, 1, 5, FAMILIES[family][1]), tokens(12)
    with monkeypatch.context() as patch:
        patch.setattr(session.runner, "run", failing_steps(session.runner.run))
        with pytest.raises(RuntimeError, match="out of memory"):
            session.prefill(**inputs)
    assert session.length.tolist() == [0]
    session.prefill(text)
    session.rewind(8)
    continued = session.prefill(text[:, 4:])
    session.reset()
    torch.testing.assert_close(continued, session.prefill(text), atol=TOLERANCE, rtol=0)


def failing_steps(run: Callable[..., Any]) -> Callable[..., Any]:
    """A runner's `run` whose encoders and embeddings work, and whose steps do not."""

    def failing(method: str, *inputs: torch.Tensor) -> Any:
        if method == "embed" or method.startswith("encode"):
            return run(method, *inputs)
        raise RuntimeError("out of memory")

    return failing


def test_forks_and_saved_states_keep_where_images_were(tmp_path: Path) -> None:
    session, model = live("qwen2_5_vl")
    session.prefill(**prompt(model, 1, 5, 6))
    session.save_state(tmp_path / "state")
    fork, following = session.fork(), tokens(4)
    expected = session.prefill(following)
    torch.testing.assert_close(fork.prefill(following), expected, atol=TOLERANCE, rtol=0)
    session.reset()
    session.load_state(tmp_path / "state")
    torch.testing.assert_close(session.prefill(following), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", ("gemma3", "qwen2_5_vl"))
def test_images_are_held_once_their_step_ran(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session, model = live(family)
    inputs = prompt(model, 1, 5, FAMILIES[family][1])
    run = session.runner.run

    def fail(method: str, *arguments: torch.Tensor) -> torch.Tensor:
        if method.startswith("prefill"):
            raise RuntimeError("out of memory")
        return run(method, *arguments)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        patch.setattr(session.runner, "run", fail)
        session.prefill(**inputs)
    assert session.stepper.state.images.rows == ((),)
    # A ring cannot take back what the step may have written.
    session.reset()
    session.prefill(**inputs)
    assert len(session.stepper.state.images.rows[0]) == 1


def test_refused_grids_and_sizes() -> None:
    session, model = live("qwen2_5_vl")
    inputs = prompt(model, 1, 5, 6)
    with pytest.raises(InputError, match=r"image_grid_thw must be \[1, 4, 6\] for each item .* got \[1, 6, 4\]"):
        session.prefill(**{**inputs, "image_grid_thw": torch.tensor([[1, 6, 4]])})
    with pytest.raises(InputError, match=r"must have shape \[items \* 24, 96\]"):
        session.prefill(**{**inputs, "pixel_values": inputs["pixel_values"][:20]})
    with pytest.raises(InputError, match="must mark the prompt's placeholders"):
        session.prefill(**{**inputs, "mm_token_type_ids": 1 - inputs["mm_token_type_ids"]})
    assert session.length.tolist() == [0]
    anything = "image_size must be given for .*a program takes images of one size"
    for size, message in ((None, anything), (20, "a multiple of 8"), ((8, 8, 8), "height and width in pixels")):
        with pytest.raises(InputError, match=message):
            modalities_of(model, ["image"], size)
    with pytest.raises(InputError, match="image_size must be 16 x 16 pixels"):
        modalities_of(tiny_multimodal("llava"), ["image"], 32)
    with pytest.raises(InputError, match="image_size is only used for images"):
        modalities_of(model, [], 32)


def test_images_that_see_themselves_keep_plain_layers() -> None:
    """A target's own operators would ignore the mask, silently."""
    adapted = []
    for family in ("gemma3", "llava"):
        model = tiny_multimodal(family)
        cache = ExportableCache.from_model(model, 32)
        Program(
            model,
            cache,
            ProgramSpec(
                modalities=modalities_of(model, ["image"]),
                adapt=lambda model, cache: adapted.append(model.config.model_type) or cache,
            ),
        )
    assert adapted == ["llava"]


def test_images_that_see_themselves_go_through_whole() -> None:
    with pytest.raises(InputError, match="prefill_chunk must be at least 16.*got 15"):
        live("gemma3", prefill_chunk=15)
    session, model = live("gemma3")
    with pytest.raises(InputError, match="the image at token 2 of the prompt has 32 tokens, .* attend to each other"):
        session.prefill(**prompt(model, 2, 5, 16))
    assert session.length.tolist() == [0]


def test_nodes_of_a_traced_method_list_all_their_users() -> None:
    """Sizes that embeddings and positions share lacked some, so that the default export of Qwen 2.5 VL failed."""
    model = tiny_multimodal("qwen2_5_vl")
    modalities = modalities_of(model, ["image"], (16, 24))
    pytest.importorskip("executorch")
    backend = backend_for("executorch")
    spec = backend.program_spec(ProgramSpec(16, modalities=modalities), backend.options.parse({}))
    program = Program(model, ExportableCache.from_model(model, 64), spec)
    steps = [name for name, method in program.methods.items() if "position_ids" in method.input_names]
    for graph in (program.export(name).graph for name in steps):
        assert all(node in used.users for node in graph.nodes for used in node.all_input_nodes)


@pytest.mark.full
def test_qwen_2_5_vl_is_lowered_with_a_tower_that_groups_do_not_divide(tmp_path: Path) -> None:
    """Also, a lookup that an encoder does not use was removed before it was read."""
    pytest.importorskip("executorch")
    model = tiny_multimodal("qwen2_5_vl")
    for block in model.model.visual.blocks:
        for name, sizes in (("gate_proj", (32, 60)), ("up_proj", (32, 60)), ("down_proj", (60, 32))):
            setattr(block.mlp, name, torch.nn.Linear(*sizes))
    given = {"modalities": ["image"], "image_size": (16, 24), "prefill_chunk": 16, "quantize": "8da4w"}
    bundle = export(model, "executorch", 64, tmp_path / "x", verify=False, **given)
    assert {"encode_image", "decode", "prefill_embeds"} & {*bundle.manifest.program.methods}
    assert bundle.manifest.quantization.linear == "8da4w"
