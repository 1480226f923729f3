"""Options of target `executorch`, which depend on the delegate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from ...common.settings import check_choice, setting
from ...errors import InputError
from ...program.spec import ProgramSpec
from ..tensorrt.options import TensorRTOptions
from .delegates.table import DELEGATES, Delegate

if TYPE_CHECKING:
    from ...cache.spec import CacheSpec
    from ...models.quantization.spec import Quantization

METHODS = ("auto", "forward", "split", "both")
KERNELS = ("executorch", "native")
LINEARS = ("delegate", "native")
COMPUTE = ("float32", "bfloat16")
FORMS = ("resident", "static")
KEYS = ("rows", "transposed")
#: Schemes of linear layers, without those of delegates that have their own. Not 8-bit weights alone, because their
#: kernel was 4 times slower than float32 for one token and 80 times for 32. 4-bit weights alone need native operators.
LINEAR_SCHEMES = ("8da4w", "8da8w", "4w", "keep")
#: Schemes inside TensorRT's plans, which are those of target `tensorrt`, except that integers are not kept.
_IN_PLANS = ("8w", "4w", "fp8", "nvfp4")
NATIVE_KERNELS_NEEDED = (
    "the program calls native operators of this package; `exportable-cache native build` installs them (C++ runner: "
    "-DEC_KERNELS=PATH or -DEC_NATIVE_KERNELS=ON), and `exportable-cache export MODEL --recipe portable ...` makes a "
    "bundle without them"
)


def needs_native_kernels(options: Mapping[str, Any]) -> bool:
    """Return True if a program with these options runs only with the compiled kernels of this package.

    Args:
        options: Options of any target, as given or as a manifest records them, possibly by another release.
    """
    return "native" in (options.get("kernels"), options.get("linears"))


def _check_schemes(delegate: Delegate, quantization: Quantization) -> None:
    """Check that a delegate with its own schemes takes a quantization."""
    known = " or ".join(map(repr, delegate.schemes or (None,)))
    remedy = f"{f'use {known}' if delegate.schemes else 'leave it out'}, or use delegate 'xnnpack'"
    for option, value in (("quantize", quantization.linear), ("quantize_embeddings", quantization.embeddings)):
        # A table alone is refused, too, because a head that is tied to it would have rounded activations.
        is_left_out = value is None and (option == "quantize_embeddings" or not delegate.schemes)
        if not is_left_out and value not in (delegate.schemes or ()):
            raise InputError(f"{option} must be {known} for delegate {delegate.name!r}, got {value!r}; {remedy}")
    if delegate.groups and quantization.group_size not in (None, *delegate.groups):
        raise InputError(
            f"group_size must be one of {', '.join(map(str, delegate.groups))} for delegate {delegate.name!r}, got "
            f"{quantization.group_size}; pass one of them (--group-size)"
        )


@dataclass(frozen=True)
class ExecutorchOptions(TensorRTOptions):
    """Options of target `executorch`.

    Attributes:
        delegate: A key of `DELEGATES`; `xnnpack` by default. With `tensorrt` each method is one TensorRT plan with the
            cache as an input and an output, and the options of target `tensorrt` apply, too.
        allow_partial: Accept a program of which the delegate takes several pieces, and the runtime's kernels the rest.
            The file's description has the number of calls.
        methods: `forward`: one method `forward(input_ids [1, S], input_pos [1])` for any S from 1 to the longest chunk,
            which ExecuTorch's `TextLLMRunner` calls. `split`: `prefill` and `decode`; each packs the weights in memory,
            unless the C++ runtime shares them. `both`. The default is `forward`, or `split` for models with rings that
            are not fused, because these write in place only if the length is known to be one.
        kernels: `executorch`: the program calls only operators that every build of ExecuTorch has; this package's
            compiled kernels can serve them, too. `native`: it calls this package's operators, and runs only with its
            compiled kernels. They fuse what ExecuTorch's operators do not: soft-capping, sinks, position biases,
            chunks, rings that can be rolled back, 8-bit and 4-bit caches without conversion to float32, several rows.
        linears: `delegate`: XNNPACK computes the linear layers. `native`: float32 and 8da4w layers are operators of
            this package, which run only with its compiled kernels. Scales of 8da4w may then be negative, which reduces
            the error (docs/benchmarks.md). The default is `native` with kernels='native', else `delegate`.
        compute: `float32`: inputs of linear layers keep all their bits. `bfloat16`: native operators round the inputs
            of layers with bfloat16 weights to bfloat16, and add the products in float32. On processors with AVX512_BF16
            the linear layers and the attention of a prompt then take half the time (kernels/README.md).
        score_length: Number of last tokens of a call for which logits are returned, for speculative decoding: by
            `forward`, or by a method `score` if the program is split, which packs the weights once more.
        shift: Add the method `shift`, which drops old tokens of a full cache, see `Session.shift`.
        form: `resident`: the program holds its cache. `static`: every size is fixed, and the host gives and keeps the
            cache, masks and rotary tables, as NPUs want it, see `static.program`.
        keys: Layout of keys in the static form: `rows` are [1, heads, slots, size], `transposed` [1, heads, size,
            slots].
        llm_runner: Require `forward`, the constant methods that the runner reads, and operators that every build of
            ExecuTorch has.
    """

    target: ClassVar[str] = "executorch"

    delegate: str = setting(
        "xnnpack",
        f"ExecuTorch delegate: {', '.join(DELEGATES)}.",
        flags=("--delegate",),
        metavar="NAME",
        choices=tuple(DELEGATES),
    )
    methods: str = setting("auto", "Methods of the program.", choices=METHODS)
    kernels: str = setting("executorch", "Operators that the program may call.", choices=KERNELS)
    linears: str | None = setting(
        None,
        "Operators for linear layers in float32 and 8da4w.",
        choices=LINEARS,
        shown_default="native with kernels=native, else delegate",
    )
    compute: str = setting("float32", "Type of the inputs of native linear layers.", choices=COMPUTE)
    score_length: int = 0
    shift: bool = setting(False, "Add a method that drops old tokens when the cache is full.", kind=bool)
    allow_partial: bool = setting(
        False, "Accept a program that the delegate takes in pieces.", flags=("--allow-partial",), kind=bool
    )
    form: str = setting("resident", "static: the host keeps the cache.", flags=("--form",), choices=FORMS)
    keys: str = setting("rows", "Layout of keys in the static form.", choices=KEYS)
    llm_runner: bool = setting(False, "Require what ExecuTorch's text runner calls.", kind=bool)

    @property
    def rows_by(self) -> str:
        """Remedy for the limit of rows, for messages."""
        return "pass delegate='xnnpack'" if self.form == "resident" else "leave out form='static'"

    @property
    def facts(self) -> Delegate:
        """Facts about the delegate."""
        return DELEGATES[self.delegate]

    @property
    def max_batch_size(self) -> int | None:
        """Limit of rows, because other delegates would write all rows at one position; None for no limit."""
        return None if self.delegate == "xnnpack" and self.form == "resident" else 1

    @property
    def linear_schemes(self) -> tuple[str, ...]:
        """Schemes of linear layers that the delegate takes."""
        return _IN_PLANS if self.delegate == "tensorrt" else self.facts.schemes or LINEAR_SCHEMES

    @property
    def expert_schemes(self) -> tuple[str, ...]:
        """Schemes of linear layers that the delegate takes for experts, too."""
        return _IN_PLANS if self.delegate == "tensorrt" else self.facts.schemes or ()

    @property
    def largest_group(self) -> int | None:
        """Largest number of weights that share a stored scale, None for whole rows."""
        return max(self.facts.groups, default=None)

    @property
    def native_linears(self) -> bool:
        """True if native operators compute linear layers. Their 8da4w scales may be negative."""
        return (self.linears or self.kernels) == "native"

    @classmethod
    def known(cls, given: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
        """Return the names of the options that apply to the given delegate, and a description of it."""
        delegate = given.get("delegate", "xnnpack")
        check_choice("delegate", delegate, DELEGATES)
        return ("delegate", *DELEGATES[delegate].options), f"target {cls.target!r} with delegate {delegate!r}"

    def check_quantization(self, quantization: Quantization) -> None:
        """See `TargetOptions.check_quantization`."""
        if self.delegate == "tensorrt":
            super().check_quantization(quantization)
        if self.facts.schemes is not None:
            _check_schemes(self.facts, quantization)
        elif quantization.linear == "4w" and self.delegate != "tensorrt" and not self.native_linears:
            raise InputError(
                "linears must be 'native' with quantize='4w', because delegates have no kernel for 4-bit weights with "
                f"float activations, got {self.linears or 'delegate'!r}; pass linears='native' (-O linears=native), or "
                "use '8da4w'"
            )

    def copies(self, prefill_chunk: int | None) -> int:
        """See `TargetOptions.copies`."""
        return 2 if self.facts.copies_weights and prefill_chunk != 1 else 1

    def check_cache(self, cache: CacheSpec) -> None:
        """See `TargetOptions.check_cache`."""
        if self.form == "static":
            for name in ("kv_dtype", "attention_sinks", "attention_window"):
                if (given := getattr(cache, name)) is not None:
                    raise InputError(
                        f"{name} must be left out with form='static', got {given!r}: the host keeps keys and values as "
                        "the model writes them; leave one of them out"
                    )

    def check_export(self, prefill_chunk: int | None, verify: bool) -> None:
        """See `TargetOptions.check_export`."""
        facts = self.facts
        if facts.lengths == "one" and prefill_chunk != 1:
            raise InputError(
                f"prefill_chunk must be 1 for delegate {facts.name!r}, got {prefill_chunk or 'the default'}; pass "
                "prefill_chunk=1 (--prefill-chunk 1), so that prompts are fed token by token"
            )
        facts.check_installed(facts.compiler)
        if verify and facts.evaluator:
            from ...common.compat.executorch import available_backends

            if facts.backend_id not in available_backends():
                facts.check_installed(facts.evaluator)

    def __post_init__(self) -> None:
        super().__post_init__()
        ProgramSpec(score_length=self.score_length)
        if self.keys != "rows" and self.form != "static":
            raise InputError(f"keys must be 'rows' without form='static', got {self.keys!r}; leave it out")
        if self.delegate == "tosa" and self.form != "static":
            raise InputError(
                f"form must be 'static' for delegate 'tosa', got {self.form!r}; pass form='static' (--form static)"
            )
        if self.form == "static":
            names = ("compute", "kernels", "linears", "llm_runner", "methods", "score_length", "shift")
            defaults = {one.name: one.default for one in fields(self)}
            for name in names:
                if getattr(self, name) != defaults[name]:
                    raise InputError(
                        f"{name} must be left out with form='static', got {getattr(self, name)!r}: the host keeps the "
                        "cache and ExecuTorch's operators compute the rest"
                    )
        if self.methods == "split" and self.llm_runner:
            raise InputError(
                "methods must be 'forward' or 'both' with llm_runner, got 'split'; pass 'both', or omit llm_runner"
            )
        if self.llm_runner and needs_native_kernels({"kernels": self.kernels, "linears": self.linears}):
            name = "kernels" if self.kernels == "native" else "linears"
            raise InputError(
                f"{name} must not be 'native' with llm_runner, because ExecuTorch's runner has no native kernels; omit "
                f"{name}, or omit llm_runner and use the runners of this package"
            )
