"""Table of the delegates of target `executorch`: what each wants of a program, and how the result is verified.

Importing this module imports neither torch nor a compiler: the command line makes its options from the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from types import ModuleType

from ....errors import MissingDependencyError


@dataclass(frozen=True)
class Delegate:
    """A delegate.

    Attributes:
        name: Value of the option `delegate`.
        backend_id: Id in a `.pte` and in ExecuTorch's runtime.
        options: Other options of target `executorch` that apply to it.
        lengths: Lengths of a call. `dynamic`: any, see `ExecutorchOptions.methods`. `forward`: any, in one method.
            `fixed`: one token, or exactly as many as a chunk of a prompt has. `one`: one token.
        cache: Location of the cache. `outside`: buffers of the program, which calls read and write. `inside`: state of
            the delegate, which two methods would not share.
        verified: What a verification runs. `executed`: the file, in ExecuTorch's runtime. `evaluated`: the delegate's
            graph in the file, by this package, if the runtime lacks the delegate. `lowered`: another lowering of the
            program only.
        compiler: Packages that lower, with their releases.
        evaluator: Packages that a verification needs besides.
        extra: Extra of this package that installs the packages.
        schemes: Schemes of quantized weights that it takes, of layers, tables and experts; None for the target's.
        groups: Numbers of weights that may share a scale; empty for any. Longer rows repeat their scale.
        copies_weights: True if each method has its own copy of the weights.
    """

    name: str
    backend_id: str
    options: tuple[str, ...] = ()
    lengths: str = "dynamic"
    cache: str = "outside"
    verified: str = "executed"
    compiler: tuple[str, ...] = ()
    evaluator: tuple[str, ...] = ()
    extra: str = "executorch"
    schemes: tuple[str, ...] | None = None
    groups: tuple[int, ...] = ()
    copies_weights: bool = False

    def module(self) -> ModuleType:
        """Return the delegate's module, after a check that its compiler is installed.

        Its `partitioner()` returns the partitioner. If there are any, `rewrites()` returns passes over exported
        programs, and `passes()` those over edge programs.

        Raises:
            MissingDependencyError: If a package is missing, or of another release.
        """
        self.check_installed(self.compiler)
        return import_module(f".{self.name}", __package__)

    def check_installed(self, packages: tuple[str, ...]) -> None:
        """Check that packages are installed in a release that the delegate takes.

        Raises:
            MissingDependencyError: If one is not.
        """
        for wrong in _wrong(packages):
            raise MissingDependencyError(f"delegate {self.name!r} needs {wrong}; {self.install}")

    @property
    def install(self) -> str:
        """Command that installs the extra."""
        return f"pip install 'exportable-cache[{self.extra}]'"

    @property
    def missing(self) -> str:
        """Packages that are missing or of another release, with what is installed; "" if all are there."""
        return ", ".join(_wrong(self.compiler + self.evaluator))

    @property
    def is_lowered_here(self) -> bool:
        """True if the packages of its compiler are installed."""
        return next(_wrong(self.compiler), None) is None

    @property
    def is_evaluated_here(self) -> bool:
        """True if this package evaluates its programs here."""
        return self.verified == "evaluated" and next(_wrong(self.evaluator), None) is None


def _wrong(packages: tuple[str, ...]) -> Iterator[str]:
    """Yield each package that is missing or of another release, with what is installed."""
    if not packages:
        return
    # Not at the top, because the command line starts without it.
    from packaging.requirements import Requirement

    for requirement in map(Requirement, packages):
        try:
            installed = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield f"{requirement}, which is not installed"
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            yield f"{requirement}, and {installed} is installed"


_WEIGHTS_ALONE = ("4w", "8w")

DELEGATES = {
    one.name: one
    for one in (
        Delegate(
            "xnnpack",
            "XnnpackBackend",
            options=("compute", "form", "kernels", "keys", "linears", "llm_runner", "methods", "score_length", "shift"),
        ),
        Delegate(
            "openvino",
            "OpenvinoBackend",
            options=("allow_partial", "form", "keys"),
            lengths="fixed",
            compiler=("openvino<2026,>=2025.1",),
            extra="openvino",
            schemes=_WEIGHTS_ALONE,
            copies_weights=True,
        ),
        Delegate(
            "mlx",
            "MLXBackend",
            options=("allow_partial",),
            lengths="forward",
            cache="inside",
            verified="evaluated",
            evaluator=("mlx<1,>=0.29",),
            extra="mlx",
            schemes=_WEIGHTS_ALONE,
            groups=(32, 64, 128),
        ),
        Delegate(
            "tosa",
            "TOSABackend",
            options=("form", "keys"),
            lengths="fixed",
            verified="evaluated",
            compiler=("tosa-tools>=2026.5",),
            evaluator=("tosa-tools>=2026.5",),
            extra="tosa",
            schemes=(),
        ),
        Delegate("vulkan", "VulkanBackend", lengths="one", verified="lowered"),
        # It depends on coremltools on every system, but builds of ExecuTorch from source do not.
        Delegate(
            "coreml", "CoreMLBackend", lengths="one", cache="inside", verified="lowered", compiler=("coremltools",)
        ),
        Delegate("tensorrt", "TensorRTBackend", options=("opt_length", "sm"), verified="evaluated"),
    )
}
