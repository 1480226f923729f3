"""Options of target `executorch`, which depend on the delegate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ...common.settings import check_choice, setting
from ...errors import InputError
from ...program.spec import ProgramSpec
from ..tensorrt.options import TensorRTOptions

#: Options by delegate.
DELEGATES = {
    "xnnpack": ("kernels", "linears", "llm_runner", "methods", "score_length"),
    "vulkan": (),
    "coreml": (),
    "tensorrt": ("opt_length", "sm"),
}
#: Delegates that no Python runtime on this kind of machine executes.
ELSEWHERE = ("vulkan", "coreml")
METHODS = ("auto", "forward", "split", "both")
KERNELS = ("executorch", "native")
LINEARS = ("delegate", "native")
NATIVE_KERNELS_NEEDED = (
    "it calls operators of this package and runs only with its compiled kernels: `exportable-cache kernels build` for "
    "Python, -DEC_KERNELS=PATH or -DEC_NATIVE_KERNELS=ON for the C++ runner"
)


def needs_native_kernels(options: Mapping[str, Any]) -> bool:
    """Return True if a program of these options runs only where the compiled kernels of this package are.

    Args:
        options: Of any target, as given or as a manifest records them: another release may know more of them.
    """
    return "native" in (options.get("kernels"), options.get("linears"))


@dataclass(frozen=True)
class ExecutorchOptions(TensorRTOptions):
    """
    Attributes:
        delegate: `xnnpack` (default); `vulkan` and `coreml`, see `delegates`; or `tensorrt`: then every method is one
            TensorRT plan, the cache is an input and an output of it, and the options of target `tensorrt` are taken,
            too.
        methods: `forward`: one method `forward(input_ids [1, S], input_pos [1])` for any S from 1 to the longest chunk,
            the one that ExecuTorch's own `TextLLMRunner` calls. `split`: `prefill` and `decode`; each packs the weights
            for itself in memory, unless the C++ runtime shares them. `both`. By default `forward`, or `split` for
            models with rings that the fused operators cannot serve, which write in place only where the length is known
            to be one.
        kernels: `executorch`: the program calls only operators that every build of ExecuTorch has; this package's
            compiled kernels can serve them, too. `native`: it calls this package's operators, and runs only with its
            compiled kernels. They fuse what ExecuTorch's operators do not: soft-capping, sinks, position biases,
            chunks, rings that can be rolled back, 8-bit and 4-bit caches without conversion to float32, several rows.
        linears: `delegate`: XNNPACK computes the linear layers. `native`: float32 and 8da4w layers are operators of
            this package, which run only with its compiled kernels. Scales of 8da4w may then be negative, which reduces
            the error (docs/benchmarks.md). The default is `native` with kernels='native', else `delegate`.
        score_length: Give logits after each of the last so many tokens of a call, for speculative decoding: by
            `forward`, or, where the program is split, by a method `score`, which packs the weights once more.
        llm_runner: Insist on `forward` and on the constant methods that the runner reads, and on operators that every
            build of ExecuTorch has.
    """

    target: ClassVar[str] = "executorch"

    delegate: str = setting(
        "xnnpack",
        "With ExecuTorch: what the program is delegated to: xnnpack, vulkan, coreml or tensorrt.",
        flags=("--delegate",),
        metavar="NAME",
        choices=tuple(DELEGATES),
    )
    methods: str = setting("auto", "Which methods the program has.", choices=METHODS)
    kernels: str = setting("executorch", "Operators that the program may call.", choices=KERNELS)
    linears: str | None = setting(
        None,
        "What computes linear layers in float32 and 8da4w.",
        choices=LINEARS,
        shown_default="native with kernels=native, else delegate",
    )
    score_length: int = 0
    llm_runner: bool = setting(False, "Have what ExecuTorch's text runner calls.", kind=bool)

    #: What lifts the limit of the next, for messages.
    rows_by: ClassVar[str] = "delegate='xnnpack'"

    @property
    def max_batch_size(self) -> int | None:
        """Rows that a program can have. Elsewhere they would all be written at one position."""
        return None if self.delegate == "xnnpack" else 1

    @property
    def native_linears(self) -> bool:
        """Whether this package's operators compute linear layers. Those of 8da4w take negative scales."""
        return (self.linears or self.kernels) == "native"

    @classmethod
    def known(cls, given: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
        delegate = given.get("delegate", "xnnpack")
        check_choice("delegate", delegate, DELEGATES)
        return ("delegate", *DELEGATES[delegate]), f"target {cls.target!r} with delegate {delegate!r}"

    def __post_init__(self) -> None:
        super().__post_init__()
        ProgramSpec(score_length=self.score_length)
        if self.methods == "split" and self.llm_runner:
            raise InputError(
                "methods is 'split', but the llm_runner calls 'forward'; pass methods='both', or leave one of them out"
            )
        if self.llm_runner and needs_native_kernels({"kernels": self.kernels, "linears": self.linears}):
            name = "kernels" if self.kernels == "native" else "linears"
            raise InputError(
                f"{name} is 'native', but ExecuTorch's own runner, for which llm_runner asks, has no kernels for this "
                f"package's operators; leave out {name}, or llm_runner for the runners of this package"
            )
