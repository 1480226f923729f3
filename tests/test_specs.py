"""Specs: what each refuses where it is made, that defaults and help stand once, and an export taken step by step."""

from __future__ import annotations

import inspect
import json
from dataclasses import MISSING, FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from exportable_cache import ExportableCache, export, load
from exportable_cache.backends import backend_for
from exportable_cache.backends.executorch.options import ExecutorchOptions
from exportable_cache.backends.options import TargetOptions
from exportable_cache.backends.pt2.target import Pt2Options
from exportable_cache.backends.tensorrt.options import TensorRTOptions
from exportable_cache.bundle.builder import new_folder
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.cache.spec import CacheSpec, Sinks
from exportable_cache.cli.app import app
from exportable_cache.common.settings import keyword_of, setting_of
from exportable_cache.errors import BundleError, InputError, UnsupportedModelError
from exportable_cache.models.quantization.spec import Quantization
from exportable_cache.pipeline import steps
from exportable_cache.pipeline.plan import plan, plan_cache
from exportable_cache.pipeline.spec import ExportSpec
from exportable_cache.program.spec import Form, ProgramSpec
from exportable_cache.verification.spec import VerifySpec

from .support import fake_target
from .support.models import tiny_model, tokens
from .support.multimodal import tiny_multimodal

pytestmark = pytest.mark.usefixtures("fake_backend")


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_cache_len": 0}, "max_cache_len must be an int of at least 1, got 0"),
        ({"max_cache_len": None}, "max_cache_len must be an int of at least 1, got None"),
        ({"max_cache_len": 64.0}, "max_cache_len must be .*got 64.0"),
        ({"batch_size": True}, "batch_size must be an int of at least 1, got True"),
        ({"rollback_slots": -1}, "rollback_slots must be an int of at least 0, got -1"),
        ({"rollback_slots": None}, "rollback_slots must be .*got None"),
        ({"max_encoder_len": 0}, "max_encoder_len must be an int of at least 1, got 0"),
        ({"attention_sinks": 0}, "attention_sinks must be an int of at least 1, got 0"),
        ({"attention_sinks": "4"}, "attention_sinks must be .*got .4."),
        ({"attention_window": 8}, "attention_window is 8, but there are no attention_sinks; pass them too"),
        ({"attention_sinks": 4, "attention_window": 61}, "take 65 slots, max_cache_len is 64; raise max_cache_len, or"),
        ({"attention_sinks": 64}, "take 65 slots, max_cache_len is 64"),
        ({"kv_dtype": "int3"}, "kv_dtype must be .*int8.*, or None, got 'int3'"),
        ({"kv_dtype": torch.int8}, "kv_dtype must be .*, got torch.int8"),
        ({"dtype": "int8"}, "dtype must be 'float32', 'float16', 'bfloat16', or None for the stored dtype, got 'int8'"),
        ({"dtype": torch.int32}, "dtype must be .*, got torch.int32"),
    ],
)
def test_a_cache_spec_is_checked_where_it_is_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        CacheSpec(**{"max_cache_len": 64, **options})


def test_a_cache_spec_holds_what_it_was_checked_for() -> None:
    spec = CacheSpec(64, dtype="float16", attention_sinks=4)
    assert (spec.dtype, spec.sinks) == (torch.float16, Sinks(4, 60))
    assert replace(spec, attention_sinks=None).sinks is None
    assert replace(spec, attention_window=10).sinks == Sinks(4, 10)
    with pytest.raises(FrozenInstanceError):
        spec.batch_size = 0
    with pytest.raises(InputError, match="batch_size must be .*, got 0"):
        replace(spec, batch_size=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill_chunk": 0}, "prefill_chunk must be an int of at least 1, got 0"),
        ({"score_length": 1}, "score_length must be an int of at least 2, or 0 for no such method, got 1"),
        ({"score_length": "8"}, "score_length must be an int of at least 2, or 0 for no such method, got '8'"),
        ({"buckets": 128}, "buckets must be a list of ints of at least 1, .*got 128"),
        ({"buckets": [128, 0]}, "a length bucket must be an int of at least 1, got 0"),
        ({"form": "other"}, "form must be one of resident, explicit, got 'other'"),
        ({"logits": "none"}, "logits must be one of last, all, got 'none'"),
    ],
)
def test_a_program_spec_is_checked_where_it_is_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ProgramSpec(**options)


def test_a_target_decides_methods_by_the_cache() -> None:
    spec = ProgramSpec(forward=lambda cache: cache == "one", split=lambda cache: cache != "one")
    assert [(one.forward, one.split) for one in map(spec.decided, ("one", "two"))] == [(True, False), (False, True)]
    assert (ProgramSpec(form="explicit").form, ProgramSpec().decided("any")) == (Form.EXPLICIT, ProgramSpec())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": 0.0}, "tolerance must be above 0, got 0.0"),
        ({"tolerance": float("nan")}, "tolerance must be above 0, got nan"),
        ({"seed": 2**64}, "seed must be an int from .*, got 18446744073709551616"),
    ],
)
def test_a_verify_spec_is_checked_where_it_is_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        VerifySpec(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verify": "no"}, "verify must be True or False, got 'no'"),
        ({"overwrite": 1}, "overwrite must be True or False, got 1"),
        ({"dtype": "int8"}, "dtype must be .*got 'int8'"),
        ({"output_dir": None}, "output_dir must be given; name the folder to write"),
        ({"quantization": Quantization("8w")}, "quantize must be a scheme that target 'fake' has fast kernels for"),
        ({"rope_length": 63}, "rope_length must be at least max_cache_len=64 and less than .*, got 63; pass 64"),
        ({"rope_length": 2**63}, "rope_length must be at least .* and less than .*, got 9223372036854775808"),
        ({"options": Pt2Options()}, "options must be FakeOptions for target 'fake', got Pt2Options"),
    ],
)
def test_an_export_spec_is_checked_where_it_is_made(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ExportSpec("no such model", **{"target": "fake", "output_dir": tmp_path, "cache": CacheSpec(64), **options})


def test_rows_that_a_target_does_not_take_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_target.FakeBackend, "max_batch_size", 2)
    with pytest.raises(InputError, match="batch_size must be at most 2 for target 'fake', got 3; reduce it"):
        ExportSpec("no such model", "fake", tmp_path / "out", cache=CacheSpec(64, 3))


# -- options of targets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["pt2", "aoti", "executorch", "tensorrt", "coreai"])
def test_every_target_has_options_that_refuse_others_by_name(target: str) -> None:
    options = backend_for(target).options
    assert options.target == target and options.parse({}) == options() and options().to_dict() == {}
    known, whose = options.known({})
    with pytest.raises(InputError) as caught:
        options.parse({"colour": "red"})
    assert str(caught.value) == f"{whose} has no option 'colour'; it knows {', '.join(known)}" and target in whose


def test_options_are_recorded_as_given() -> None:
    given = {"strict": False, "buckets": [8, 16]}
    assert Pt2Options.parse(given).to_dict() == given
    assert Pt2Options(strict=True).to_dict() == {"strict": True}
    assert TensorRTOptions(sm="86,80").capabilities == (80, 86)
    assert ExecutorchOptions.parse({"delegate": "tensorrt", "opt_length": 8}).opt_length == 8


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pt2Options(strict="no"), "strict must be True or False, got 'no'"),
        (lambda: Pt2Options(form="other"), "form must be .*got .other."),
        (lambda: Pt2Options(buckets=[0]), "a length bucket must be .*got 0"),
        (lambda: Quantization("8w", largest_group=0), "largest_group must be an int of at least 32, got 0"),
        (lambda: TensorRTOptions(opt_length=1), "opt_length must be an int of at least 2"),
        (lambda: TensorRTOptions(sm="81"), "sm must be one or more of .* got '81'"),
        (lambda: ExecutorchOptions(methods="two"), "methods must be one of auto, forward, split, both, got 'two'"),
        (
            lambda: ExecutorchOptions(methods="split", llm_runner=True),
            "methods must be 'forward' or 'both' with llm_runner",
        ),
        (
            lambda: ExecutorchOptions(kernels="native", llm_runner=True),
            "kernels must not be 'native' with llm_runner, because",
        ),
        (
            lambda: ExecutorchOptions(linears="native", llm_runner=True),
            "omit linears, or omit llm_runner and use the runners",
        ),
        (
            lambda: ExecutorchOptions(compute="float16"),
            "compute must be one of float32, bfloat16, got 'float16'",
        ),
        (
            lambda: ExecutorchOptions.parse({"delegate": "vulkan", "compute": "bfloat16"}),
            "target 'executorch' with delegate 'vulkan' has no option 'compute'",
        ),
    ],
)
def test_options_are_checked_where_they_are_made(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


# -- written once ----------------------------------------------------------------------------------------------------

SPECS = (CacheSpec, ProgramSpec, Quantization, ExportSpec)
#: Names that a function gives another default than the spec, and why.
OTHER_DEFAULTS = {
    ("export", "max_cache_len"): None,  # the spec insists
    ("plan", "max_cache_len"): None,
    ("plan", "target"): None,  # sizes in the dtype of the weights
    ("from_config", "device"): "cpu",  # there is no model whose device it could be
}


@pytest.mark.parametrize(
    "function", [export, ExportableCache.from_config, ExportableCache.from_model, plan], ids=lambda one: one.__name__
)
def test_the_keywords_of_users_have_the_defaults_of_the_fields(function: Any) -> None:
    defaults = {keyword_of(one): one.default for spec in SPECS for one in fields(spec) if one.init}
    shared = 0
    for name, parameter in inspect.signature(function).parameters.items():
        if name in defaults and parameter.kind is not parameter.VAR_KEYWORD:
            expected = OTHER_DEFAULTS.get((function.__name__, name), defaults[name])
            assert parameter.default == (inspect.Parameter.empty if expected is MISSING else expected), name
            shared += 1
    assert shared >= 3


@pytest.mark.parametrize(("command", "specs"), [("export", SPECS), ("plan", (CacheSpec,)), ("verify", (VerifySpec,))])
def test_the_options_of_a_command_are_the_fields(command: str, specs: tuple[type, ...]) -> None:
    options = {name: one for one in typer.main.get_command(app).commands[command].params for name in one.opts}
    flags = 0
    for one in (one for spec in specs for one in fields(spec)):
        setting = setting_of(one)
        for flag in setting.flags if setting is not None else ():
            option = options[flag.partition("/")[0]]
            assert option.name == keyword_of(one)
            assert setting.help.rstrip(".") in option.help
            if one.default is not MISSING and not option.required:
                assert option.default == (None if one.default == () else one.default)
            flags += 1
    assert flags >= 3


def test_a_config_alone_does_not_tell_of_an_encoder() -> None:
    with pytest.raises(InputError, match="max_encoder_len must be left out, because a config .* got 8"):
        ExportableCache.from_config_spec(tiny_model("llama").config, CacheSpec(64, max_encoder_len=8))


def test_the_command_takes_slots_and_chunk(tmp_path: Path) -> None:
    tiny_model("mistral").save_pretrained(tmp_path / "model")
    arguments = ["export", str(tmp_path / "model"), "-t", "fake", "-n", "64", "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(
        app, [*arguments, "--rollback-slots", "3", "--prefill-chunk", "5", "--no-verify", "--json"]
    )
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["layers"][0]["policy"]["rollback_slots"] == 3 and document["verification"] is None
    assert document["program"]["methods"]["prefill"]["max_length"] == 5


def test_plan_counts_the_slots_to_roll_back() -> None:
    model = tiny_model("mistral")
    spec = CacheSpec(64, 2, rollback_slots=3)
    assert plan_cache(model, spec).cache_bytes == ExportableCache.from_model_spec(model, spec).nbytes
    assert plan(model, 64, 2, rollback_slots=3) == plan_cache(model, spec) != plan(model, 64, 2)


# -- the steps -------------------------------------------------------------------------------------------------------


def test_an_export_can_be_taken_step_by_step(tmp_path: Path) -> None:
    spec = ExportSpec(tiny_model("gemma3_text"), "fake", tmp_path / "out", cache=CacheSpec(64), program=ProgramSpec(13))
    resolved = steps.resolve(spec)
    assert resolved.program.prefill_chunk == 13 and resolved.program.attention is not None
    loaded = steps.load(resolved)
    source = steps.quantise(resolved, loaded)
    assert source.model is loaded.model and source.weights_bytes is None
    cache = steps.allocate(resolved, source.model)
    assert [layer.max_length for layer in cache.layers] == [None, 64]
    made = steps.program(resolved, source.model, cache)
    assert made.methods["prefill"].max_length == 13
    with new_folder(spec.output_dir, spec.overwrite) as folder:
        lowered = steps.lower(resolved, source, made, folder)
        assert lowered.manifest.verification is None
        verified, fed = steps.verify(resolved, source, made, lowered)
        # In the dtype it is stored in: there is no other model to measure.
        assert fed == [] and steps.measure(resolved, verified, fed) is verified
        assert verified.manifest.verification["passed"]
        # Until the last step there is nothing to load.
        with pytest.raises(BundleError, match="has no manifest.json"):
            Bundle.open(folder)
        bundle = steps.publish(resolved, verified)
    assert bundle.path == tmp_path / "out" and Bundle.open(bundle.path).manifest == bundle.manifest
    assert load(bundle.path).prefill(tokens(20)).shape == (1, 128)


def test_the_default_length_has_room_for_one_item(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image of Mistral 3 takes up to 3,025 tokens, so that an export without --max-cache-len was refused."""
    model = tiny_multimodal("llava")
    limit = model.config.get_text_config().max_position_embeddings
    spec = ExportSpec(model, "fake", tmp_path / "out", cache=CacheSpec(2), modalities=["image"])
    for grows, length in ((False, 2), (True, min(limit, 512))):
        resolved, modalities = steps.with_room(steps.resolve(replace(spec, grows=grows)), model)
        assert resolved.spec.cache.max_cache_len == length and modalities[0].tokens == 4
    seen: list[ExportSpec] = []
    monkeypatch.setattr("exportable_cache.pipeline.export.run", lambda spec, progress: seen.append(spec))
    for given in (None, 64):
        export(model, "fake", given, tmp_path / "out")
    assert [one.grows for one in seen] == [True, False]


def test_what_needs_no_weights_is_seen_without_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "load_model", lambda *_, **__: pytest.fail("the weights were read"))
    config = tiny_model("llama").config
    config.dtype = torch.bfloat16
    config.save_pretrained(tmp_path / "model")
    spec = ExportSpec(tmp_path / "model", "fake", tmp_path / "out", cache=CacheSpec(64), dtype="float16")
    found = steps.resolve(spec).dtype
    assert (found.stored, found.chosen) == (torch.bfloat16, torch.float16)
    (tmp_path / "reformer").mkdir()
    (tmp_path / "reformer" / "config.json").write_text('{"model_type": "reformer"}')
    with pytest.raises(UnsupportedModelError):
        steps.resolve(replace(spec, model_or_path=tmp_path / "reformer"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(BundleError, match="never overwritten"):
        steps.resolve(spec)


def test_targets_share_one_form_of_options() -> None:
    for target in ("pt2", "aoti", "fake"):
        assert issubclass(backend_for(target).options, TargetOptions)
