"""Programs for other delegates: what is in the file, what verification says of them, and what is not offered."""

from pathlib import Path

import pytest

from exportable_cache import export, load
from exportable_cache.backends import backend_for
from exportable_cache.errors import BundleError, InputError, UnsupportedModelError

from ..support.models import tiny_model

pytest.importorskip("executorch", reason="the executorch extra is not installed")

from executorch.exir._serialize._program import deserialize_pte_binary

from exportable_cache.backends.executorch.lowering.delegates import delegate_ids


def plans(path: Path) -> dict:
    program = deserialize_pte_binary(path.read_bytes()).program
    return {plan.name: plan for plan in program.execution_plan}


# In the fast lane delegate "tensorrt" stands for programs that are not run here: test_executorch_tensorrt.
@pytest.mark.full
@pytest.mark.parametrize(
    ("delegate", "backend", "calls", "cache_outside"),
    [("coreml", "CoreMLBackend", 1, False), ("vulkan", "VulkanBackend", 3, True)],
)
def test_programs_for_devices_are_compiled_and_not_claimed_to_have_run(
    delegate: str, backend: str, calls: int, cache_outside: bool, tmp_path: Path
) -> None:
    if delegate == "coreml":
        pytest.importorskip("coremltools")
    model = tiny_model("llama", num_hidden_layers=1)
    bundle = export(model, "executorch", 32, tmp_path / "out", delegate=delegate, prefill_chunk=1)
    path = bundle.path / "program.pte"
    assert delegate_ids(path) == {backend}
    plan = plans(path)["decode"]
    assert len(plan.delegates) == calls
    # The cache: written in place by a portable kernel, or state inside the one model.
    assert sum(plan.non_const_buffer_sizes[2:]) == (bundle.manifest.cache_bytes - 8 if cache_outside else 0)
    assert [operator.name for operator in plan.operators].count("aten::index_put_") == (1 if cache_outside else 0)
    assert bundle.manifest.files["program.pte"].holds.endswith(f"calls of {backend}: {calls} in decode")
    recorded = bundle.manifest.verification
    assert recorded["passed"]
    assert recorded["remark"].startswith(
        f"the XNNPACK lowering of the same exported program was run; the program for {backend} is not executed here"
    )
    with pytest.raises(
        BundleError, match=f"program.pte is for {backend}, which the ExecuTorch runtime of this machine lacks"
    ):
        load(bundle.path)


@pytest.mark.parametrize("delegate", ["coreml", "vulkan"])
def test_methods_that_a_delegate_cannot_share_a_cache_among_are_refused(delegate: str, tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModelError, match=f"methods must be decode only for delegate {delegate!r}.*prefill_chunk=1"
    ):
        export(tiny_model("llama", num_hidden_layers=1), "executorch", 32, tmp_path / "out", delegate=delegate)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["none", "qnn", "mlx", "openvino", "XNNPACK", ""])
def test_other_names_are_refused_with_what_is_offered(name: str) -> None:
    with pytest.raises(InputError, match=f"delegate must be one of xnnpack, vulkan, coreml, tensorrt, got '{name}'"):
        backend_for("executorch").options.parse({"delegate": name})


def test_options_of_one_delegate_are_not_those_of_another() -> None:
    with pytest.raises(InputError, match="delegate 'vulkan' has no option 'llm_runner'; it knows delegate$"):
        backend_for("executorch").options.parse({"delegate": "vulkan", "llm_runner": True})
