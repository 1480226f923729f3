"""The classes that generate like models of transformers, used as its documentation uses them."""

from __future__ import annotations

import functools
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)

from exportable_cache import (
    ExportableCache,
    ExportableModelForCausalLM,
    ExportableModelForImageTextToText,
    ExportableModelForSeq2SeqLM,
    ExportableModelForSpeechSeq2Seq,
    Session,
    load,
)
from exportable_cache.demo import demo_path
from exportable_cache.errors import CacheFullError, InputError, UnsupportedModelError

from .support.hub import Hub
from .support.multimodal import FAMILIES, prompt, tiny_multimodal
from .support.seq2seq import encoder_inputs, tiny_seq2seq

PROMPTS = ["the code of amber is 4821. amber?", "it took about 12 days."]
LENGTH = 96


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    found = AutoTokenizer.from_pretrained(demo_path(), padding_side="left")
    found.pad_token = found.pad_token or found.eos_token
    return found


@pytest.fixture(scope="module")
def theirs() -> Any:
    return AutoModelForCausalLM.from_pretrained(demo_path()).eval()


@pytest.fixture(scope="module")
def live() -> Any:
    return ExportableModelForCausalLM.from_pretrained("demo", export=False, max_cache_len=LENGTH, compile=False)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("exported") / "demo"
    return ExportableModelForCausalLM.from_pretrained(
        "demo", target="pt2", max_cache_len=LENGTH, batch_size=2, output_dir=folder, verify=False
    )


@pytest.fixture(params=["live", "exported"])
def ours(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.fixture
def batch(tokenizer: Any) -> Any:
    return tokenizer(PROMPTS, return_tensors="pt", padding=True)


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 12},
        {"max_length": 40},
        {},
        {"max_new_tokens": 12, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"max_new_tokens": 12, "min_new_tokens": 8},
        {"max_new_tokens": 12, "num_return_sequences": 1, "eos_token_id": 5},
        {"generation_config": GenerationConfig(max_new_tokens=9, suppress_tokens=[4, 5, 6])},
    ],
    ids=str,
)
def test_padded_prompts_give_the_tokens_of_transformers(
    ours: Any, theirs: Any, batch: Any, options: dict[str, Any]
) -> None:
    options = {"do_sample": False, "pad_token_id": 0, **options} if "generation_config" not in options else options
    expected = theirs.generate(**batch, **options)
    assert torch.equal(ours.generate(**batch, **options), expected)


def test_one_prompt_without_a_mask(ours: Any, theirs: Any, tokenizer: Any) -> None:
    ids = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    assert torch.equal(ours.generate(ids, max_new_tokens=8), theirs.generate(ids, max_new_tokens=8, do_sample=False))


def test_every_door_gives_the_same_text(live: Any, exported: Any, theirs: Any, tokenizer: Any) -> None:
    ids = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    expected = theirs.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    texts = {
        "session": live.session.generate_text,
        "bundle": lambda prompt, most: load(exported.bundle.path).generate_text([prompt] * 2, most)[0],
    }
    live.session.reset()
    for name, generate in texts.items():
        assert generate(PROMPTS[0], 8) == tokenizer.decode(expected, skip_special_tokens=True), name
    for model in (live, exported):
        assert torch.equal(model.generate(ids, max_new_tokens=8)[0, ids.shape[1] :], expected)


def test_a_pipeline_of_transformers(ours: Any, theirs: Any, tokenizer: Any, capfd: Any) -> None:
    made = pipeline("text-generation", model=ours, tokenizer=tokenizer, device="cpu")
    options = {"max_new_tokens": 8, "do_sample": False}
    expected = pipeline("text-generation", model=theirs, tokenizer=tokenizer, device="cpu")(PROMPTS, **options)
    assert made(PROMPTS, **options) == expected
    assert made(PROMPTS, batch_size=2, **options) == expected
    assert "not supported" not in capfd.readouterr().err


def test_streamers(ours: Any, theirs: Any, tokenizer: Any, capsys: Any) -> None:
    inputs = tokenizer(PROMPTS[0], return_tensors="pt")
    printed = []
    for model in (theirs, ours):
        model.generate(**inputs, streamer=TextStreamer(tokenizer), max_new_tokens=8, do_sample=False)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != ""
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    ours.generate(**inputs, streamer=streamer, max_new_tokens=8)
    assert "".join(streamer).strip() in printed[0]


def test_criteria_and_stop_strings_end_single_rows(ours: Any, theirs: Any, batch: Any, tokenizer: Any) -> None:
    def ends(ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
        return torch.tensor([row == 0 and ids.shape[1] >= batch.input_ids.shape[1] + 3 for row in range(len(ids))])

    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    if ours.session.batch_size == 2:
        criteria = StoppingCriteriaList([ends])
        expected = theirs.generate(**batch, stopping_criteria=criteria, **options)
        assert torch.equal(ours.generate(**batch, stopping_criteria=criteria, **options), expected)
        assert (expected[0, -3:] == 0).all()
    text = tokenizer.decode(theirs.generate(**batch, **options)[1, batch.input_ids.shape[1] :])
    options |= {"stop_strings": [text[2:4]], "tokenizer": tokenizer}
    assert torch.equal(ours.generate(**batch, **options), theirs.generate(**batch, **options))


def test_a_criterion_that_ends_all_rows_ends_the_steps(live: Any, tokenizer: Any) -> None:
    ids = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    lengths = []

    def third(sequences: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
        lengths.append(sequences.shape[1])
        return torch.tensor([len(lengths) == 3])

    assert live.generate(ids, stopping_criteria=[third], max_new_tokens=10).shape[1] == ids.shape[1] + 3 == lengths[-1]
    assert live.session.length.tolist() == [ids.shape[1] + 2]


def test_processors_run_after_the_settings(ours: Any, theirs: Any, batch: Any) -> None:
    def no_favourite(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, scores.argmax(dim=-1, keepdim=True), -torch.inf)

    options = {"logits_processor": LogitsProcessorList([no_favourite]), "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(ours.generate(**batch, **options), theirs.generate(**batch, **options))


def test_drafts_need_no_plan(live: Any, theirs: Any, tokenizer: Any) -> None:
    ids = tokenizer(PROMPTS[0] * 2, return_tensors="pt").input_ids
    expected = theirs.generate(ids, max_new_tokens=16, do_sample=False)
    assert torch.equal(live.generate(ids, prompt_lookup_num_tokens=4, max_new_tokens=16), expected)
    assert torch.equal(live.generate(ids, assistant_model=theirs, max_new_tokens=16), expected)


def test_an_assistant_gets_its_attention_back(tokenizer: Any) -> None:
    """It is ours while it drafts: until another one does, or the model is gone."""
    ids = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    ours = ExportableModelForCausalLM.from_pretrained("demo", export=False, max_cache_len=LENGTH, compile=False)
    first, second = (AutoModelForCausalLM.from_pretrained(demo_path()).eval() for _ in range(2))
    own = first.config._attn_implementation
    ours.generate(ids, assistant_model=first, max_new_tokens=4)
    ours.generate(ids, assistant_model=second, max_new_tokens=4)
    assert first.config._attn_implementation == own != second.config._attn_implementation
    del ours
    gc.collect()
    assert second.config._attn_implementation == own


def test_draws_follow_a_seed(ours: Any, tokenizer: Any) -> None:
    ids = tokenizer(PROMPTS[1], return_tensors="pt").input_ids
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append(
            ours.generate(ids, do_sample=True, temperature=2.0, top_k=0, max_new_tokens=12, num_return_sequences=3)
        )
    assert draws[0].shape[0] == 3 and not torch.equal(draws[0][0], draws[0][1])
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_a_bundle_is_saved_and_opened(exported: Any, batch: Any, tmp_path: Path) -> None:
    exported.save_pretrained(tmp_path / "saved")
    again = ExportableModelForCausalLM.from_pretrained(tmp_path / "saved")
    options = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(again.generate(**batch, **options), exported.generate(**batch, **options))
    assert again.dtype == torch.float32 and again.config.model_type == "qwen3" and again.tokenizer is not None
    with pytest.raises(InputError, match="recipe must be left out for the bundle"):
        ExportableModelForCausalLM.from_pretrained(tmp_path / "saved", recipe="fast")
    for option in ("target", "token"):
        with pytest.raises(InputError, match=f"{option} must be left out for '.*saved', a bundle"):
            ExportableModelForCausalLM.from_pretrained(tmp_path / "saved", **{option: "pt2"})
    with pytest.raises(InputError, match="safe_serialization must be left out"):
        exported.save_pretrained(tmp_path / "again", safe_serialization=True)
    assert not (tmp_path / "again").exists()


def test_a_bundle_for_executorch(demo_bundle: Path, theirs: Any, batch: Any) -> None:
    """A bundle of one row runs its prompts one after another."""
    ours = ExportableModelForCausalLM.from_pretrained(demo_bundle)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(ours.generate(**batch, **options), theirs.generate(**batch, **options))


def test_a_bundle_goes_to_the_hub_and_back(exported: Any, batch: Any, hub: Hub) -> None:
    with pytest.raises(InputError, match="commit_message must be left out, because bundles are"):
        exported.push_to_hub("demo", commit_message="first")
    with pytest.raises(InputError, match="repository must be an id like 'user/name', got None"):
        exported.push_to_hub(None)
    exported.push_to_hub("demo")
    assert "pt2/manifest.json" in hub.repositories["user/demo"].files
    again = ExportableModelForCausalLM.from_pretrained("user/demo", target="pt2")
    options = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(again.generate(**batch, **options), exported.generate(**batch, **options))


@pytest.mark.usefixtures("fake_backend")
def test_a_temporary_bundle_is_removed_with_the_model() -> None:
    model = ExportableModelForCausalLM.from_pretrained("demo", target="fake", max_cache_len=16, verify=False)
    folder = model.bundle.path
    assert folder.is_dir()
    del model
    assert not folder.exists()


def test_encoder_decoders(tmp_path: Path) -> None:
    theirs = tiny_seq2seq("t5")
    theirs.save_pretrained(tmp_path / "t5")
    ours = ExportableModelForSeq2SeqLM.from_pretrained(tmp_path / "t5", export=False, max_cache_len=32, compile=False)
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 0]])
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long(), "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(ours.generate(**inputs), theirs.generate(**inputs, use_cache=False))
    with pytest.raises(UnsupportedModelError, match="is for models that take text, .* use ExportableModelForSeq2SeqLM"):
        ExportableModelForCausalLM(ours.session, ours.config)


def test_audio_for_an_encoder() -> None:
    theirs = tiny_seq2seq("moonshine")
    inputs = encoder_inputs(theirs, 2000, batch_size=2)
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = theirs.generate(**inputs, **options, use_cache=False)
    session = Session.from_model(theirs, ExportableCache.from_model(theirs, 32, max_encoder_len=2000))
    assert torch.equal(ExportableModelForSpeechSeq2Seq(session, theirs.config).generate(**inputs, **options), expected)


def test_images_and_text() -> None:
    theirs = tiny_multimodal("llava")
    inputs = prompt(theirs, 1, 14, FAMILIES["llava"][1], seed=1, start=2)
    options = {"max_new_tokens": 8, "do_sample": False}
    expected = theirs.generate(**inputs, **options)
    session = Session.from_model(theirs, max_cache_len=64, modalities=["image"])
    ours = ExportableModelForImageTextToText(session, theirs.config)
    assert torch.equal(ours.generate(**inputs, **options), expected)
    both = {name: torch.cat([value, value]) for name, value in inputs.items()}
    with pytest.raises(InputError, match="pixel_values needs one prompt per row of the session, 1, got 2"):
        ours.generate(**both, **options)


REFUSED = {
    "beams": ({"num_beams": 2}, "num_beams must be left out, got 2, because generate has no beams"),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha must be left out, got 0.6"),
    "guidance": ({"guidance_scale": 1.5}, "guidance_scale must be left out"),
    "typical": ({"do_sample": True, "typical_p": 0.5}, "typical_p must be left out"),
    "unknown": ({"generation_config": GenerationConfig(mood="good")}, "unknown setting 'mood'; remove it"),
    "dictionary": ({"return_dict_in_generate": True}, "return_dict_in_generate must be False"),
    "odd": ({"synced_gpus": True}, "'synced_gpus' is not an argument of generate that is supported"),
    "config": ({"generation_config": {"max_new_tokens": 3}}, "generation_config must be a GenerationConfig or None"),
    "wrong": ({"temperature": "hot", "do_sample": True}, "temperature"),
    "long": ({"max_length": 2}, "max_length must be above the .* tokens of the prompt, got 2"),
    "both": ({"prompt_lookup_num_tokens": 3, "assistant_model": 4}, "prompt_lookup_num_tokens must be None"),
    "assistant": ({"assistant_model": 4}, "assistant_model must be a model or a session, got a int"),
    "count": ({"num_return_sequences": -1}, "num_return_sequences must be an int of at least 1, got -1"),
    "stop": ({"stop_strings": 3}, "stop_strings must be a string or a list of them, got 3"),
    "tokenizer": ({"stop_strings": "a", "tokenizer": 3}, "stop_strings need a tokenizer of transformers, got 3"),
    "time": ({"max_time": "x"}, "max_time must be a number of seconds, got 'x'"),
    "criteria": ({"stopping_criteria": 3}, "stopping_criteria must be a list of functions, got 3"),
    "processor": ({"logits_processor": [3]}, r"logits_processor must be a list of functions, got \[3\]"),
    "streamer": ({"streamer": 3}, "streamer must have put and end, got 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_settings(live: Any, tokenizer: Any, case: str) -> None:
    options, message = REFUSED[case]
    ids = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    with pytest.raises(InputError, match=message) as raised:
        live.generate(ids, **options)
    assert "\n" not in str(raised.value)


def test_the_wrong_class_is_refused_before_the_export(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exportable_cache.pipeline.pretrained.export_bundle", lambda *args, **kwargs: pytest.fail())
    for kind in (ExportableModelForSeq2SeqLM, ExportableModelForSpeechSeq2Seq):
        with pytest.raises(UnsupportedModelError, match=f"{kind.__name__} is for models .*; use .*ForCausalLM"):
            kind.from_pretrained("demo", target="pt2")


def test_other_refusals(live: Any, tokenizer: Any, batch: Any) -> None:
    ids = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    refusals = {
        "streamer must be None for 2 prompts": lambda: live.generate(**batch, streamer=TextStreamer(tokenizer)),
        "inputs must be a tensor of at least one prompt": lambda: live.generate([1, 2]),
        "the model must be a bundle to save it": lambda: live.save_pretrained("x"),
        "device must be cpu, where this model runs, got meta": lambda: live.to("meta"),
        "dtype must be torch.float32": lambda: live.to(dtype=torch.float16),
        "dtype must be torch.float32, which the model has": lambda: live.to(torch.float16),
        "device must be cpu, got 'nonsense'": lambda: live.to("nonsense"),
        "prompt must have a tensor input_ids, .* got a NoneType": lambda: live.session.generate_text({}),
        "stop must be token ids .* got 3.5": lambda: live.session.generate_text("a", stop=3.5),
        "draft must be PromptLookup": lambda: live.session.generate_text("a", draft=3),
        "model must be a transformers model, got NoneType": lambda: Session.from_model(None),
        "model must be a folder or an id on the hub, got None": functools.partial(
            ExportableModelForCausalLM.from_pretrained, None
        ),
        "token must be left out for the checkpoint 'demo', .* or HF_TOKEN": functools.partial(
            ExportableModelForCausalLM.from_pretrained, "demo", token="hf_x"
        ),
        "options with export=False must be among device": functools.partial(
            ExportableModelForCausalLM.from_pretrained, "demo", export=False, recipe="fast"
        ),
        "target must be left out with export=False": functools.partial(
            ExportableModelForCausalLM.from_pretrained, "demo", export=False, target="pt2"
        ),
    }
    for message, call in refusals.items():
        with pytest.raises(InputError, match=message):
            call()
    with pytest.raises(CacheFullError):
        live.generate(ids, max_new_tokens=LENGTH)
    with pytest.raises(UnsupportedModelError, match="images and text, this one takes text; use .*ForCausalLM"):
        ExportableModelForImageTextToText(live.session, live.config)
