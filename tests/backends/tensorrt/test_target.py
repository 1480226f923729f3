"""The target as users meet it: a bundle written, looked at, verified and refused on a machine without a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from exportable_cache import export, load
from exportable_cache.backends import backend_for
from exportable_cache.backends.tensorrt.engine_io import records_of
from exportable_cache.backends.tensorrt.options import CAPABILITIES, TF32_REMARK, parse_capabilities
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.bundle.files import CheckedBundle
from exportable_cache.cli.app import app
from exportable_cache.errors import BundleError, InputError, VerificationError
from exportable_cache.session.native import NotNative, check_native, open_engines, open_native
from exportable_cache.verification.report import VerifyReport
from exportable_cache.verification.verify import verify

from ...support.models import hybrid_model
from .models import engine_model

pytest.importorskip("exportable_cache.backends.tensorrt.upstream", reason="no tensorrt extra is installed")

from exportable_cache.backends.tensorrt import cuda_engines

from .cpu_cuda import CpuCuda, CpuTensorRT
from .programs import engine_program, network_session

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")

REMARK = f"built for SM 80, 89; network verified on CPU; not executed; {TF32_REMARK}"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A tiny hybrid, one ring and one full layer, as a bundle; made on a machine without a GPU unless there is one."""
    folder = tmp_path_factory.mktemp("bundles") / "hybrid"
    model = hybrid_model()
    return export(model, "tensorrt", 64, folder, prefill_chunk=16, sm="80,89", opt_length=8)


@no_gpu
def test_export_verifies_and_says_what_was_not_run(bundle: Bundle) -> None:
    report = VerifyReport(**bundle.manifest.verification)
    assert report.passed and report.windows == (8,)
    assert report.remark == REMARK and str(report).endswith(REMARK)


def test_the_manifest_records_what_a_plan_does_not_show(bundle: Bundle) -> None:
    files = bundle.manifest.files
    assert [name for name in files if name.endswith(".plan")] == ["engine.plan"]
    decode, record = files["engine.plan"].details["engines"]
    ids, pos, *state = record["inputs"]
    assert ids == {
        "name": "input_ids",
        "dtype": "int64",
        "min_shape": [1, 2],
        "opt_shape": [1, 8],
        "max_shape": [1, 16],
    }
    assert pos["min_shape"] == pos["max_shape"] == [1]
    names = [f"layers.{layer}.{kind}" for layer in (0, 1) for kind in ("keys", "values")]
    assert [tensor["name"] for tensor in state] == [f"cache.{name}" for name in names]
    assert [tensor["name"] for tensor in record["outputs"]] == [
        "logits",
        "next_pos",
        *(f"next.{name}" for name in names),
    ]
    assert record["outputs"][0] == {"name": "logits", "dtype": "float32", "shape": [1, 128]}
    assert record["aliases"] == {f"next.{name}": f"cache.{name}" for name in names[2:]}
    assert record["capabilities"] == [80, 89]
    assert record["layers"]["KV_CACHE_UPDATE"] == 2 and record["layers"]["ATTENTION_INPUT"] == 2
    assert record["builder"].startswith("tensorrt")
    assert (decode["method"], decode["profile"], record["method"], record["profile"]) == ("decode", 0, "prefill", 1)
    assert all(decode["inputs"][0][shape] == [1, 1] for shape in ("min_shape", "opt_shape", "max_shape"))
    assert decode["network"] == record["network"] and decode["products"] == "tf32"
    assert [(layer.policy["kind"], layer.kernel["kind"]) for layer in bundle.manifest.layers] == [
        ("ring", "tensorrt"), ("full", "tensorrt")
    ]  # fmt: skip
    assert bundle.manifest.packages.keys() & {"tensorrt-rtx", "tensorrt"}


def test_inspect_shows_the_engines(bundle: Bundle) -> None:
    from typer.testing import CliRunner

    result = CliRunner().invoke(app, ["inspect", str(bundle.path)])
    assert result.exit_code == 0
    decode, prefill = (
        [line.split() for line in result.stdout.splitlines() if line.startswith(name)][-1]
        for name in ("decode", "prefill")
    )
    assert "80," in decode and "2/8/16" in prefill
    assert all("2 of 4 tensors" in " ".join(line) and "TF32" in line for line in (decode, prefill))


@no_gpu
@pytest.mark.full
def test_verify_rebuilds_the_network_from_the_model(bundle: Bundle) -> None:
    report = verify(bundle, hybrid_model(), prompts=[3, 20])
    assert report.passed and report.remark == REMARK


@no_gpu
# That other weights have another digest, test_networks.py finds out.
@pytest.mark.full
def test_verify_refuses_another_model_of_the_same_shape(bundle: Bundle) -> None:
    other = hybrid_model()
    with torch.no_grad():
        other.model.norm.weight.mul_(1.01)
    with pytest.raises(VerificationError, match="made from this model differs from the plan's"):
        verify(bundle, other, prompts=[3])


@no_gpu
def test_running_without_a_gpu_is_refused_in_a_sentence(bundle: Bundle) -> None:
    with pytest.raises(BundleError, match=r"needs an NVIDIA GPU \(built for SM 80, 89\), and torch finds none"):
        load(bundle.path, trust=True)


def test_a_bundle_runs_without_torch_if_it_is_trusted(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the commands' session over CUDA on the CPU; the plan is replaced by the network that it was built from."""
    _, program, networks = engine_program("gemma3_text")
    runtime = CpuCuda()
    fake = CpuTensorRT([networks["decode"], networks["prefill"]], runtime)
    modules = {"cuda.bindings.runtime": runtime}
    monkeypatch.setattr(cuda_engines, "import_module", lambda name: modules.get(name, fake))
    monkeypatch.setattr(cuda_engines.util, "find_spec", lambda name: True)
    monkeypatch.setenv("EXPORTABLE_CACHE_RUNTIME", "native")
    with pytest.raises(
        BundleError, match=r"holds plans of TensorRT \(code for a GPU\), which can .* load it with trust=True"
    ):
        open_native(bundle.path, text=False)
    session = open_native(bundle.path, trust=True, text=False)
    tokens: list[int] = []
    session.generate([1, 2, 3], tokens.append, max_new_tokens=6)
    other = network_session(engine_model("gemma3_text"), program, networks)
    assert tokens == list(other.generate(torch.tensor([[1, 2, 3]]), 6))
    assert session.longest_chunk == 16 and session.layers[0][1] == 8
    session.close()
    from typer.testing import CliRunner

    result = CliRunner().invoke(app, ["bench", str(bundle.path), "--trust", "--prompt-length", "20", "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout)["runtime"] == "native", result.output


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"batch_size": 2}, "one row runs without torch, and the program has 2"),
        ({"ranks": {"size": 2}}, "a part for each of several processes"),
        ({}, "cuda-bindings is not installed; pip install cuda-bindings"),
    ],
)
def test_what_needs_torch_is_said(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, fields: dict[str, int], said: str
) -> None:
    monkeypatch.setattr(cuda_engines.util, "find_spec", lambda name: None)
    read = CheckedBundle.read(bundle.path)
    changed = {**read.fields, "program": {**read.fields["program"], **fields}, **fields}
    with pytest.raises(NotNative, match=said):
        check_native(CheckedBundle(read.path, changed, read.files), text=True)


def test_rules_of_the_checkpoint_and_unknown_layers_need_torch(bundle: Bundle) -> None:
    read = CheckedBundle.read(bundle.path)
    for changed, said in (
        ({"generation_config": {"no_repeat_ngram_size": 2}}, "rules that transformers follows: no_repeat_ngram_size"),
        ({"layers": [{"policy": {"kind": "later"}}]}, "only torch's runtime knows: 'later'"),
        ({"vocab_size": 99}, r"must give logits of 99 tokens, got \[128\] of decode"),
    ):
        with pytest.raises(NotNative, match=said):
            open_engines(CheckedBundle(read.path, {**read.fields, **changed}, read.files))


def test_inputs_that_are_not_tokens_need_torch(bundle: Bundle) -> None:
    read = CheckedBundle.read(bundle.path)
    file = read.files["engine.plan"]
    decode, prefill = file.details["engines"]
    more = {**decode["inputs"][0], "name": "position_ids"}
    engines = [{**decode, "inputs": [*decode["inputs"], more]}, prefill]
    changed = {**read.files, "engine.plan": replace(file, details={"engines": engines})}
    with pytest.raises(NotNative, match="take input_ids, input_pos, position_ids"):
        open_engines(CheckedBundle(read.path, read.fields, changed))


def test_a_record_that_describes_no_engine_is_refused(bundle: Bundle) -> None:
    description = bundle.manifest.description()
    whole = description.details["engine.plan"]
    for where, change in (
        ("aliases", lambda engine: engine.pop("aliases")),
        ("inputs.0.dtype", lambda engine: engine["inputs"][0].update(dtype="nn")),
    ):
        broken = json.loads(json.dumps(whole))
        change(broken["engines"][0])
        description.details["engine.plan"] = broken
        with pytest.raises(BundleError, match=f"entry of the engine in engine.plan is invalid: {where};"):
            backend_for("tensorrt").open(bundle.path, description)


def test_records_of_earlier_bundles_are_read(bundle: Bundle) -> None:
    """They have a plan for each method, and neither a profile nor a precision of products."""
    details = {}
    for entry in bundle.manifest.files["engine.plan"].details["engines"]:
        old = {name: value for name, value in entry.items() if name not in ("profile", "products")}
        details[f"{entry['method']}.plan"] = {"engines": [old]}
    records = records_of(details)
    assert {method: file for method, (file, _) in records.items()} == {
        "decode": "decode.plan",
        "prefill": "prefill.plan",
    }
    assert all(record.profile is None and record.products is None for _, record in records.values())


def test_the_capabilities_are_those_of_the_installed_tensorrt() -> None:
    from exportable_cache.backends.tensorrt.upstream import trt

    if not hasattr(trt, "ComputeCapability"):
        pytest.skip("regular TensorRT builds for the GPU at hand")
    assert {f"SM{capability}" for capability in CAPABILITIES} == set(trt.ComputeCapability.__members__) - {
        "NONE",
        "CURRENT",
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, ()), ("80,86", (80, 86)), (89, (89,)), ([120, 80], (80, 120)), ("8.6, sm_75", (75, 86))],
)
def test_capabilities_are_read_as_people_write_them(given, expected: tuple[int, ...]) -> None:
    assert parse_capabilities(given) == expected


@pytest.mark.parametrize("given", ["", "90", "80,x", [], 1.5])
def test_other_capabilities_are_refused(given) -> None:
    with pytest.raises(InputError, match="sm must be one or more of 75, 80, 86, 89, 120, 121"):
        parse_capabilities(given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"opt_length": 17}, "opt_length must be 2 to 16 for method 'prefill', got 17"),
        ({"opt_length": 1}, "opt_length must be an int of at least 2"),
        ({"precision": "int8"}, "has no option 'precision'; it knows opt_length, score_length, engines, sm"),
    ],
)
def test_wrong_options_are_refused(options: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        export(engine_model("llama"), "tensorrt", 64, tmp_path / "out", prefill_chunk=16, **options)
    assert not (tmp_path / "out").exists()
