"""TensorRT plans inside a `.pte`: built, checked and read back without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from exportable_cache import export, load
from exportable_cache.errors import BundleError, InputError
from exportable_cache.verification.report import VerifyReport

from ..support.models import tiny_model

pytest.importorskip("executorch", reason="the executorch extra is not installed")
pytest.importorskip("exportable_cache.backends.tensorrt.upstream", reason="no tensorrt extra is installed")

from exportable_cache.backends.executorch.lowering.tensorrt import plans_in, takes_aliases
from exportable_cache.backends.tensorrt import network
from exportable_cache.common.compat.executorch import deserialized_program


@pytest.mark.full
def test_the_plans_come_back_byte_for_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = {}
    build_plan = network.Network.build_plan

    def recorded(self, capabilities=()):
        built[len(built)] = build_plan(self, capabilities)
        return built[len(built) - 1]

    monkeypatch.setattr(network.Network, "build_plan", recorded)
    model = tiny_model("llama", num_hidden_layers=1)
    bundle = export(model, "executorch", 64, tmp_path / "out", prefill_chunk=16, delegate="tensorrt", sm="86")

    plans = plans_in(bundle.path / "program.pte")
    assert sorted(plan for plan, _ in plans) == sorted(built.values()) and len(built) == 2
    engines = bundle.manifest.files["program.pte"].details["engines"]
    names = [tensor["name"] for tensor in (*engines[0]["inputs"], *engines[0]["outputs"])]
    assert [bound for _, bound in plans] == [names, names]
    # The delegate of torch_tensorrt 2.13 binds outputs of their own: caches are scattered into, none is aliased.
    layer = "KV_CACHE_UPDATE" if takes_aliases() else "SCATTER"
    assert all((len(engine["aliases"]), engine["layers"][layer]) == (2 * takes_aliases(), 2) for engine in engines)
    program = deserialized_program((bundle.path / "program.pte").read_bytes())
    blobs = [bytes(delegate.data)[:4] for delegate in program.backend_delegate_data]
    assert set(blobs) == {b"TR02" if takes_aliases() else b"TR01"}
    # Copies between the host and the GPU would move the whole cache in each step.
    assert not takes_aliases() or not any(plan.operators for plan in program.execution_plan)

    report = VerifyReport(**bundle.manifest.verification)
    assert report.passed and report.remark.startswith("built for SM 86; network verified on CPU; not executed")
    with pytest.raises(BundleError, match="only in C\\+\\+ with torch-tensorrt's delegate"):
        load(bundle.path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"delegate": "cuda"},
            "delegate must be one of xnnpack, openvino, mlx, tosa, vulkan, coreml, tensorrt, got 'cuda'",
        ),
        ({"delegate": "tensorrt", "llm_runner": True}, "with delegate 'tensorrt' has no option 'llm_runner'"),
        ({"sm": "80"}, "with delegate 'xnnpack' has no option 'sm'"),
        ({"delegate": "tensorrt", "sm": "90"}, "sm must be one or more of .* got '90'"),
    ],
)
def test_wrong_options_are_refused(options: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        export(tiny_model("llama"), "executorch", 64, tmp_path / "out", **options)


def test_batches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must be at most 1"):
        export(tiny_model("llama"), "executorch", 64, tmp_path / "out", batch_size=2, delegate="tensorrt")
