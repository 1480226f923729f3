"""Bundles without torch: text starts in a fraction of the time.

ExecuTorch bundles run in the C++ runner, `exportable_cache_runner`, over a library that `exportable-cache native build`
compiles. TensorRT bundles run over TensorRT's Python module and cuda-bindings. A bundle that neither runs raises
`NotNative`, and is opened by `Session` instead.
"""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..backends.tensorrt.options import MACHINE_CODE
from ..bundle.files import MANIFEST_FILE, CheckedBundle, untrusted
from ..cache.component import label_of
from ..common.native.kernels import BUILD, TARGET_VARIABLE
from ..common.native.kernels import VARIABLE as KERNELS_VARIABLE
from ..common.process.quiet import native_lines_hidden
from ..common.progress import silent
from ..errors import BundleError, CacheFullError, ExportableCacheError, InputError
from ..generation.checkpoint_settings import CheckpointSettings
from ..generation.sampling_options import SamplingOptions
from ..generation.text import TextPieces
from .checks import check_max_new_tokens, check_stops

if TYPE_CHECKING:
    from exportable_cache_runner import Failure, Options, Statistics
    from exportable_cache_runner import Session as RunnerSession

    from ..backends.tensorrt.engine_io import EngineRecord
    from ..common.progress import Progress
    from ..generation.constraint import Follower
    from ..models.tokenizers.text import TextTokenizer
    from .engine_session import EngineSession

#: Variable that chooses what runs ExecuTorch and TensorRT bundles: `native`, `torch`, or `auto`, which is the native
#: runner where it can run the bundle.
RUNTIME_VARIABLE = "EXPORTABLE_CACHE_RUNTIME"
_RUNTIMES = ("auto", "native", "torch")
#: Targets whose bundles run without torch.
NATIVE_TARGETS = ("executorch", "tensorrt")


GREEDY = SamplingOptions()
#: Name of the method that drops old tokens.
SHIFT = "shift"
#: Method of a program with a draft head, see `program.methods.DRAFT`.
DRAFT = "draft"
#: Tokens that a draft head proposes at once by default, see `cache.layer_spec.DRAFTED`, which imports torch.
DRAFTED = 3
#: Tokens per step that make a draft head worth its steps: three proposals are verified in a step that takes longer.
PAYS = 2


class NotNative(Exception):
    """A bundle that the native runner does not run here.

    Attributes:
        reason: One line for the user; "" if nothing is to be said, because the program is for another target or the
            user chose torch's runtime.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


def open_native(
    path: str | os.PathLike,
    *,
    check_versions: bool = True,
    known: bool = False,
    trust: bool = False,
    key: str | os.PathLike | None = None,
    text: bool = True,
    progress: Progress = silent,
) -> NativeSession:
    """Check a bundle as `Bundle.open` does, and open it in the native runner at position 0, without importing torch.

    Args:
        path: The folder.
        check_versions: See `Bundle.open`.
        known: See `Bundle.open`.
        trust: See `Bundle.open`. A program for ExecuTorch has no machine code.
        key: See `Bundle.open`.
        text: True if the tokenizer is needed.
        progress: Called with the bytes read.

    Raises:
        NotNative: If another runtime has to run it.
        BundleError, InputError, MissingDependencyError: See `Bundle.open`. `InputError` also if the variable
            `EXPORTABLE_CACHE_RUNTIME` is `native` and the runner does not run the bundle.
    """
    with runtime_chosen(path):
        bundle = CheckedBundle.read(path, key)
        check_native(bundle, text)
        if bundle.target == "tensorrt" and not trust:
            raise untrusted(bundle.path, MACHINE_CODE)
        bundle.check(check_versions, known, progress)
        return _opened(bundle, text)


@contextmanager
def runtime_chosen(path: str | os.PathLike) -> Iterator[None]:
    """Follow the variable `EXPORTABLE_CACHE_RUNTIME` within a block that raises `NotNative`.

    Raises:
        NotNative: If the variable is `torch`.
        InputError: If it has an unknown value, or is `native` and the block raises `NotNative`.
    """
    runtime = os.environ.get(RUNTIME_VARIABLE) or "auto"
    if runtime not in _RUNTIMES:
        raise InputError(f"{RUNTIME_VARIABLE} must be one of {', '.join(_RUNTIMES)}, got {runtime!r}")
    if runtime == "torch":
        raise NotNative
    try:
        yield
    except NotNative as found:
        if runtime == "native":
            reason = found.reason or "it is for another target"
            raise InputError(
                f"{RUNTIME_VARIABLE} must not be 'native' for {path}, got it: {reason}; unset it"
            ) from None
        raise


def _opened(bundle: CheckedBundle, text: bool) -> NativeSession:
    session = open_engines(bundle) if bundle.target == "tensorrt" else _open_runner(bundle)
    try:
        return NativeSession.of(bundle, session, text)
    except BaseException:
        session.close()
        raise


def _open_runner(bundle: CheckedBundle) -> RunnerSession:
    from exportable_cache_runner import Failure
    from exportable_cache_runner import Session as RunnerSession

    # Attention of ExecuTorch's wheel calls MKL in each of the runtime's threads.
    os.environ.setdefault("MKL_NUM_THREADS", "1")
    try:
        with native_lines_hidden():
            return RunnerSession(bundle.path)
    except Failure as error:
        raise NotNative(str(error)) from None


def open_engines(bundle: CheckedBundle) -> EngineSession:
    """Open the plans of a checked bundle on a GPU.

    Raises:
        BundleError, DeviceMemoryError: See `open_cuda_engines`.
    """
    from ..backends.tensorrt.cuda_engines import open_cuda_engines
    from ..backends.tensorrt.engine_io import LOGITS
    from ..models.lora_arrays import AdapterSlots
    from .engine_session import CacheLimits, EngineSession, Step

    fields = bundle.fields
    records = _engine_records(bundle)
    kept = [one for _, record in records.values() for one in (*record.state, *record.lora)]
    taken = {one.name for _, record in records.values() for one in record.inputs if one not in kept}
    if taken - {"adapters"} != {"input_ids", "input_pos"}:
        raise NotNative(f"its methods take {', '.join(sorted(taken))}")
    methods = _mapping(_mapping(fields, "program"), "methods")
    try:
        steps = {
            name: Step(*(int(methods[name][field]) for field in ("min_length", "max_length", "scored_tokens")))
            for name in records
        }
        limits = CacheLimits.of(fields["layers"])
        vocab_size = int(fields["vocab_size"])
        slots = AdapterSlots.of(fields)
    except (KeyError, TypeError, ValueError) as error:
        raise NotNative(f"the manifest has a part that only torch's runtime knows: {error}") from None
    settings = CheckpointSettings.read(_Config(**_mapping(fields, "generation_config")), vocab_size)  # type: ignore[arg-type]
    for _, record in records.values():
        sizes = [one.shape[-1] for one in record.outputs if one.name == LOGITS and one.shape]
        if sizes != [vocab_size]:
            raise NotNative(f"its methods must give logits of {vocab_size} tokens, got {sizes} of {record.method}")
    if slots is not None:
        slots.check([tensor.max_shape for tensor in next(iter(records.values()))[1].lora])
    if settings.rules:
        raise NotNative(f"the generation config has rules that transformers follows: {', '.join(settings.rules)}")
    return EngineSession(open_cuda_engines(bundle.path, records), steps, vocab_size, limits, settings, slots=slots)


def _engine_records(bundle: CheckedBundle) -> dict[str, tuple[str, EngineRecord]]:
    from ..backends.tensorrt.engine_io import records_of

    records = records_of({name: file.details for name, file in bundle.files.items()})
    if not records:
        raise BundleError(f"{bundle.path / MANIFEST_FILE} must list an engine, got none; export the model again")
    return records


def check_native(bundle: CheckedBundle, text: bool) -> None:
    """Check that the native runner runs a bundle here. The runner checks the program itself.

    Raises:
        NotNative: If it does not.
    """
    reasons = {"executorch": _why_not, "tensorrt": _why_no_engines}
    if bundle.target not in reasons:
        raise NotNative
    reason = reasons[bundle.target](bundle, text)
    if reason:
        raise NotNative(reason)


def _why_not(bundle: CheckedBundle, text: bool) -> str:
    """Return why the native runner does not run a bundle for ExecuTorch here, or ""."""
    fields = bundle.fields
    program, options = _mapping(fields, "program"), _mapping(fields, "options")
    if fields.get("ranks") is not None:
        return "the program has a part for each of several processes, which the native runner does not run"
    if program.get("batch_size") != 1:
        return f"the native runner runs one row, and the program {program.get('batch_size')}"
    if options.get("delegate") not in (None, "xnnpack"):
        return f"the native runner has no delegate {options.get('delegate')!r}"
    encoder = _mapping(program, "methods").get("encode")
    if encoder is not None and not (text and _takes_ids(encoder)):
        return "text does not go through its encoder"
    if text and fields.get("tokenizer") is not None and not bundle.reads_alike:
        return "the tokenizer needs transformers"
    from exportable_cache_runner.library import VARIABLE, found_library

    if os.environ.get(VARIABLE):
        return ""
    chosen = [name for name in (KERNELS_VARIABLE, TARGET_VARIABLE) if os.environ.get(name)]
    if chosen:
        return f"{chosen[0]} chooses kernels for torch's runtime"
    return "" if found_library() else f"the native runner is not installed; build it: {BUILD}"


def _why_no_engines(bundle: CheckedBundle, text: bool) -> str:
    """Return why a bundle for TensorRT does not run here without torch, or ""."""
    from ..backends.tensorrt.cuda_engines import missing_package

    program = _mapping(bundle.fields, "program")
    if bundle.fields.get("ranks") is not None:
        return "the program has a part for each of several processes, which need torch"
    if program.get("batch_size") != 1:
        return f"one row runs without torch, and the program has {program.get('batch_size')}"
    if text and bundle.fields.get("tokenizer") is not None and not bundle.reads_alike:
        return "the tokenizer needs transformers"
    missing = missing_package(next(iter(_engine_records(bundle).values()))[1].builder)
    return f"{missing} is not installed; pip install {missing}" if missing else ""


@dataclass
class NativeSession:
    """A program that runs without torch, with the tokenizer and the generation settings of its bundle.

    It has one sequence, and is used by one thread at a time, except for `cancel`.

    Attributes:
        path: Folder of the bundle.
        runner: The runner's session.
        vocab_size: Token ids run from 0 to vocab_size - 1.
        settings: Settings of the checkpoint.
        tokenizer: The tokenizer; None if the model was exported without one, or none was asked for.
        fields: The manifest as JSON.
    """

    path: Path
    runner: RunnerSession | EngineSession
    vocab_size: int
    settings: CheckpointSettings
    tokenizer: TextTokenizer | None
    fields: Mapping[str, Any]

    @classmethod
    def of(cls, bundle: CheckedBundle, runner: RunnerSession | EngineSession, text: bool) -> NativeSession:
        """Return the session of an opened bundle.

        Raises:
            NotNative: If the runner does not follow a setting as `Session` does.
            InputError: If a setting of the checkpoint is not valid.
        """
        fields = bundle.fields
        tokenizer = bundle.text_tokenizer() if text and fields.get("tokenizer") is not None else None
        config, vocab_size = _Config(**_mapping(fields, "generation_config")), int(fields["vocab_size"])
        settings = CheckpointSettings.read(config, vocab_size, tokenizer)  # type: ignore[arg-type]
        if config.eos_token_id is None and settings.ends and settings.rules:
            raise NotNative("the generation config has rules for end tokens, and only the tokenizer names one")
        return cls(bundle.path, runner, vocab_size, settings, tokenizer, fields)

    def close(self) -> None:
        """Release the memory; a second call does nothing."""
        self.runner.close()

    @property
    def length(self) -> int:
        """Number of cached tokens."""
        return self.runner.length

    @property
    def max_length(self) -> int | None:
        """The limit of cached tokens; None for no limit."""
        return self.runner.max_length

    @property
    def longest_chunk(self) -> int:
        """Length of the longest prefill chunk."""
        methods = _mapping(_mapping(self.fields, "program"), "methods").values()
        # The runner has checked the lengths of those that return logits.
        return max((one["max_length"] for one in methods if _gives_logits(one)), default=1)

    @property
    def placeholders(self) -> frozenset[int]:
        """Token ids that represent images or audio in a prompt, which this session does not take."""
        methods = _mapping(_mapping(self.fields, "program"), "methods").values()
        items = (_mapping(one, "item") for one in methods if one.get("item") is not None)
        return frozenset(int(item["token_id"]) for item in items if "token_id" in item)

    @property
    def layers(self) -> list[tuple[str, int | None]]:
        """Description and number of slots of each layer; None for a layer without slots."""
        layers = self.fields.get("layers")
        # The runner has checked the policies.
        parts = [_parts(layer) for layer in layers] if isinstance(layers, list) else []
        return [(label_of(part), _slots(_mapping(part, "policy"))) for part in parts]

    @property
    def most_drafted(self) -> int:
        """Tokens that the program's draft head proposes at once by default; 0 without one."""
        methods = _mapping(_mapping(self.fields, "program"), "methods")
        if DRAFT not in methods:
            return 0
        scored = [one.get("scored_tokens") for one in methods.values() if isinstance(one, dict)]
        return max(0, min(DRAFTED, max((one for one in scored if type(one) is int), default=0) - 1))

    @property
    def drafted_by_default(self) -> int:
        """`most_drafted` if a step gave at least `PAYS` tokens when the head was measured at export, else 0."""
        acceptance = _mapping(_mapping(self.fields, "draft"), "acceptance")
        tokens, steps = acceptance.get("tokens"), acceptance.get("steps")
        if type(tokens) is not int or type(steps) is not int or steps < 1:
            return 0
        return self.most_drafted if tokens >= PAYS * steps else 0

    def prefill(self, tokens: Sequence[int]) -> array[float]:
        """Feed tokens after the cached ones, and return the logits of the last one, [vocabulary], float32."""
        with _failures():
            return self.runner.prefill(tokens)

    def rewind(self, tokens: int) -> None:
        """Roll back the newest tokens.

        Raises:
            InputError: If a layer cannot take them back.
        """
        with _failures():
            self.runner.rewind(tokens)

    def most_dropped(self, first: int) -> int:
        """Return the most tokens that `shift` can drop from position `first` on; 0 if the runtime cannot."""
        if not hasattr(self.runner, "shift") or SHIFT not in _mapping(_mapping(self.fields, "program"), "methods"):
            return 0
        policies = [_mapping(layer, "policy") for layer in self.fields.get("layers", ()) if isinstance(layer, dict)]
        # The runner has checked the windows; it knows whether they have wrapped.
        windows = [one["window"] for one in policies if type(one.get("window")) is int]
        return max(0, self.length - first - (max(windows, default=1) - 1 if first else 0))

    def shift(self, count: int, first: int = 0) -> None:
        """Drop `count` tokens from position `first` on, see `Session.shift`.

        Raises:
            InputError: If a number is out of range, or the program has no such method.
        """
        with _failures():
            self.runner.shift(count, first)  # type: ignore[union-attr]

    def reset(self) -> None:
        """Start again at position 0."""
        self.runner.reset()

    def cancel(self) -> None:
        """End the running generation, from any thread."""
        self.runner.cancel()

    @property
    def has_encoder(self) -> bool:
        """True for an encoder-decoder."""
        return "encode" in _mapping(_mapping(self.fields, "program"), "methods")

    @property
    def start_token(self) -> int | None:
        """Token that the decoder of an encoder-decoder starts with; None for a model without an encoder.

        Raises:
            InputError: If the generation config has none.
        """
        if not self.has_encoder:
            return None
        config = _mapping(self.fields, "generation_config")
        for name in ("decoder_start_token_id", "bos_token_id"):
            if type(config.get(name)) is int:
                return int(config[name])
        raise InputError("the model has no decoder_start_token_id; pass the decoder's first tokens to generate")

    def generate(
        self,
        ids: Sequence[int],
        on_token: Callable[[int], object] | None = None,
        *,
        max_new_tokens: int | None = None,
        sampling: SamplingOptions = GREEDY,
        prompt_lookup: int = 0,
        follower: Follower | None = None,
        **further: Any,
    ) -> Statistics:
        """Generate tokens after the cached ones and a prompt.

        Args:
            ids: Token ids of the prompt.
            on_token: Called with each token; False ends the generation.
            max_new_tokens: The limit; None for the checkpoint's, or else as many as fit.
            sampling: Settings of the sampler. A seed draws other numbers than torch's generator.
            prompt_lookup: Most tokens proposed per step from the text itself; 0 for none.
            follower: Follows a constraint of the text; the caller closes it. It has taken a token before `on_token`.
            **further: Further options of the runner, such as `cached_tokens` and `on_logprobs`.

        Raises:
            InputError: If the prompt or an option is out of range.
            CacheFullError: If the prompt, or the prompt with `max_new_tokens`, does not fit.
        """
        check_max_new_tokens(max_new_tokens)
        ends = self.end_tokens

        def take(token: int) -> object:
            if follower is not None and token not in ends:
                follower.take(token)
            return None if on_token is None else on_token(token)

        with _failures():
            options = self._options(max_new_tokens, sampling, prompt_lookup, follower, further)
            return self.runner.generate(ids, options, take)[1]

    def generate_text(
        self,
        ids: Sequence[int],
        on_text: Callable[[str], object],
        *,
        stop: Sequence[str] = (),
        continues: bool = True,
        on_token: Callable[[int], object] | None = None,
        follower: Follower | None = None,
        **options: Any,
    ) -> Statistics:
        """Generate text after the cached tokens and a prompt; pieces are those of `Session.stream_text`.

        Args:
            ids: Token ids of the prompt; of an encoder-decoder, the encoder's input.
            on_text: Called with each piece of text, which never ends inside a character; False ends the generation.
            stop: Texts that end the generation, and are not returned.
            continues: True if the text continues that of the prompt; False for a text of its own, such as the response
                to chat messages.
            on_token: Called with each token, before its text.
            follower: See `generate`.
            **options: Further options of `generate`.

        Raises:
            InputError, CacheFullError: See `generate`.
        """
        check_stops(stop)
        start = self.start_token
        if start is not None:
            if follower is not None:
                raise InputError("a constraint needs a text decoder, got an encoder-decoder; leave it out")
            with _failures():
                self.runner.encode_input(list(ids))
            ids, continues = [start], True
        pieces = TextPieces(self.text_tokenizer, self.end_tokens, stop, ids if continues else ())
        ends, goes_on = self.end_tokens, True

        def give(piece: str) -> None:
            nonlocal goes_on
            if piece and on_text(piece) is False:
                goes_on = False

        def take(token: int) -> bool:
            if on_token is not None and on_token(token) is False:
                return False
            give(pieces.push(token))
            # An end token ends the generation anyway.
            return goes_on and (not pieces.ended or token in ends)

        statistics = self.generate(ids, take, follower=follower, **options)
        if goes_on:
            give(pieces.finish())
        return statistics

    @property
    def text_tokenizer(self) -> TextTokenizer:
        """The tokenizer.

        Raises:
            InputError: If there is none.
        """
        if self.tokenizer is None:
            raise InputError(
                "text needs a tokenizer and this bundle has none; export the model with its own, or use token ids"
            )
        return self.tokenizer

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a generation."""
        return frozenset(self.settings.ends)

    def _options(
        self,
        max_new_tokens: int | None,
        sampling: SamplingOptions,
        prompt_lookup: int,
        follower: Follower | None,
        further: Mapping[str, Any],
    ) -> Options:
        from exportable_cache_runner import Options

        return Options(
            max_new_tokens=max_new_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=1.0 if sampling.top_p is None else sampling.top_p,
            min_p=sampling.min_p or 0.0,
            repetition_penalty=sampling.repetition_penalty,
            # The runner's seeds have no sign.
            seed=None if sampling.seed is None else sampling.seed % 2**64,
            stop_tokens=self.settings.ends,
            prompt_lookup=prompt_lookup,
            allowed_tokens=None if follower is None else _allowed_by(follower),
            **further,
        )


def _allowed_by(follower: Follower) -> Callable[[list[int], array[int]], bool]:
    """Return the runner's callback for the tokens that a constraint allows."""

    def allow(tokens: list[int], mask: array[int]) -> bool:
        if follower.ended:
            return False
        allowed = follower.mask[: len(mask) * mask.itemsize]
        memoryview(mask).cast("B")[: len(allowed)] = allowed
        return True

    return allow


class _failures:
    """Converts failures of the runner to this package's errors within a block."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        # Imported already where there is one of its errors, which this module does without otherwise.
        runner = sys.modules.get("exportable_cache_runner")
        if runner is not None and isinstance(error, runner.Failure):
            raise _error_of(error) from error


def _error_of(failure: Failure) -> ExportableCacheError:
    from exportable_cache_runner import Status

    kinds = {Status.INPUT: InputError, Status.CACHE_FULL: CacheFullError}
    return kinds.get(failure.status, BundleError)(str(failure))


class _Config(SimpleNamespace):
    """The fields of a generation config, None for those that are not set."""

    def __getattr__(self, name: str) -> Any:
        return None


def _takes_ids(encoder: Any) -> bool:
    inputs = encoder.get("inputs") if isinstance(encoder, dict) else None
    first = inputs[0] if isinstance(inputs, list) and inputs else None
    return isinstance(first, dict) and first.get("name") == "input_ids"


def _gives_logits(method: Any) -> bool:
    outputs = method.get("outputs") if isinstance(method, dict) else None
    return isinstance(outputs, list) and any(isinstance(one, dict) and one.get("name") == "logits" for one in outputs)


def _parts(layer: Any) -> dict[str, Any]:
    return {name: part for name, part in layer.items() if isinstance(part, dict)} if isinstance(layer, dict) else {}


def _slots(policy: Mapping[str, Any]) -> int | None:
    sizes = {name: size for name, size in policy.items() if isinstance(size, int)}
    if "window" not in sizes:
        return sizes.get("capacity")
    return sum(sizes.get(name, 0) for name in ("sinks", "window", "rollback_slots"))


def _mapping(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = fields.get(name)
    return found if isinstance(found, dict) else {}
