"""The lines of Python that open a bundle without this package."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...backends.executorch.options import needs_native_kernels

if TYPE_CHECKING:
    from ...bundle.manifest import Manifest


def opened_elsewhere(manifest: Manifest) -> list[str]:
    """Return lines of Python that open a bundle's program without this package; none where there is no way to.

    They are run in the bundle's folder. docs/bundles.md explains them.
    """
    if manifest.ranks is not None:
        return []
    methods = list(manifest.program.methods)
    if manifest.target == "pt2":
        return [
            *(["import torchao.quantization.quant_primitives"] if manifest.quantization is not None else []),
            "from torch.export.pt2_archive._package import load_pt2",
            'programs = load_pt2("program.pt2").exported_programs',
            'for program in programs.values(): program.constants.update(programs["model"].constants)',
        ]
    # The other delegates are not in ExecuTorch's Python runtime.
    if manifest.target != "executorch" or manifest.options.get("delegate", "xnnpack") != "xnnpack":
        return []
    lines = [
        "from executorch.runtime import Runtime",
        "import executorch.extension.llm.custom_ops.custom_ops, executorch.kernels.quantized",
    ]
    if needs_native_kernels(manifest.options):
        from ...common.native.kernels import installed_path

        lines.append(f"import ctypes; ctypes.CDLL({str(installed_path())!r})")
    return [
        *lines,
        'program = Runtime.get().load_program("program.pte")',
        f"methods = {{name: program.load_method(name) for name in {methods!r}}}",
    ]
