"""Checking a program against its model: the same tokens through both, logits compared at every step."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from ..cache.attention.implementation import attention_of
from ..cache.layers import rounding_storage
from ..cache.policies import SinkPolicy
from ..cache.spec import Sinks
from ..common.dtypes import dtype_name
from ..common.progress import silent
from ..errors import InputError
from ..models.layout import cache_argument, layer_types_and_windows, vocab_size_of
from ..program.program import takes_positions
from .encoders import VerifiedEncoder, verify_encoders
from .prompts import default_decode_steps, default_prompts, prompt_feeds
from .references.at_once import is_large, logits_of_beginnings
from .references.encoder_decoder import decoder_of, encoder_lengths, random_inputs
from .references.rounding import RoundingCache
from .references.sinks import evicting_cache
from .spec import VerifySpec
from .stored import KEPT_STEPS, FedPrompt, StoredDistance, distance_from_stored
from .tolerance import default_tolerance

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..bundle.bundle import Bundle
    from ..cache.storage import Storage
    from ..common.progress import Progress
    from ..session.session import Session

# A prompt that fills the cache costs as much as the cache is large: tokens over all rows up to which it is tried.
_MOST_TO_FILL = 4096
# Tokens over which the effect of a rounded cache is found, for the tolerance.
_ROUNDED_TOKENS = 64
# The reference takes longer prompts in pieces: eager attention keeps heads x length x length scores.
_REFERENCE_CHUNK = 1024


@dataclass(frozen=True)
class VerifiedPrompt:
    """One prompt and the steps after it.

    Attributes:
        length: Tokens of the prompt.
        chunks: Steps that the program took for them, over both parts where they were fed in two.
        decode_steps: Single tokens fed after it.
        max_difference: Largest |logit difference|; not a number if either side produced one.
        argmax_agreement: Share of positions whose most probable token is the same. Reported, not judged: ties flip.
        rms_difference: Root mean square of the logit differences of a position, of the one where it is largest; None in
            reports of before.
    """

    length: int
    chunks: int
    decode_steps: int
    max_difference: float
    argmax_agreement: float
    rms_difference: float | None = None


@dataclass(frozen=True)
class VerifyReport:
    """What a verification saw.

    Attributes:
        passed: Whether every difference is a number and at most `tolerance`, every position's root mean square at most
            `rms_tolerance`, and every encoder's difference at most its own.
        max_difference: Largest |logit difference| of all; not a number if any is not.
        tolerance: The limit.
        prompts: One entry per prompt, shortest first.
        steps: Positions compared, over all prompts and rows.
        windows: Sliding windows that were passed; of layers with attention sinks, all that they keep.
        target: What was verified.
        remark: What the result does not cover, where the program itself was not run.
        encoders: Of images and sound, one entry each.
        stored: How far the model in the dtype its weights are stored in is, where the program is in another. Not
            judged.
        at_once: Whether all prompts began one sequence, which the reference took as a whole, as it does for large
            models.
        rms_tolerance: The limit of each position's root mean square, where activations are quantised.
    """

    passed: bool
    max_difference: float
    tolerance: float
    prompts: tuple[VerifiedPrompt, ...]
    steps: int
    windows: tuple[int, ...]
    target: str
    remark: str = ""
    encoders: tuple[VerifiedEncoder, ...] = ()
    stored: StoredDistance | None = None
    at_once: bool = False
    rms_tolerance: float | None = None

    @property
    def rms_difference(self) -> float | None:
        """Largest of the prompts'; None in reports of before."""
        found = [prompt.rms_difference for prompt in self.prompts if prompt.rms_difference is not None]
        return _largest(found) if found else None

    def __post_init__(self) -> None:
        # As `to_dict` gives them, so that a recorded report can be read back: `VerifyReport(**recorded)`.
        prompts = (VerifiedPrompt(**prompt) if isinstance(prompt, Mapping) else prompt for prompt in self.prompts)
        object.__setattr__(self, "prompts", tuple(prompts))
        object.__setattr__(self, "windows", tuple(self.windows))
        encoders = (
            VerifiedEncoder(**encoder) if isinstance(encoder, Mapping) else encoder for encoder in self.encoders
        )
        object.__setattr__(self, "encoders", tuple(encoders))
        if isinstance(self.stored, Mapping):
            object.__setattr__(self, "stored", StoredDistance(**self.stored))

    def to_dict(self) -> dict[str, Any]:
        """JSON; a difference that is not a number is null."""
        return _jsonable(asdict(self))

    def __str__(self) -> str:
        lengths = ", ".join(str(prompt.length) for prompt in self.prompts)
        windows = f", past the window of {' and '.join(map(str, self.windows))}" if self.windows else ""
        sign = "<=" if self.max_difference <= self.tolerance else "exceeds"
        return (
            f"{'verified' if self.passed else 'NOT verified'}: {self.steps} positions, prompts of {lengths} "
            f"tokens{windows}, max |logit difference| {self.max_difference:.1e} {sign} {self.tolerance:.0e}"
            + self._root_mean_square()
            + "".join(f", {encoder}" for encoder in self.encoders)
            + (f"; {self.stored}" if self.stored is not None else "")
            + (", beginnings of one sequence" if self.at_once else "")
            + (f"; {self.remark}" if self.remark and self.passed else "")
        )

    def _root_mean_square(self) -> str:
        difference, limit = self.rms_difference, self.rms_tolerance
        if difference is None or limit is None:
            return ""
        return f", root mean square {difference:.1e} {'<=' if difference <= limit else 'exceeds'} {limit:.0e}"


def verify_session(
    session: Session, model: PreTrainedModel, *, progress: Progress = silent, **asked: Any
) -> VerifyReport:
    """`compare` with the fields of a `VerifySpec` as keywords: `verify_session(session, model, prompts=[40])`."""
    return compare(session, model, VerifySpec(**asked), progress)


def compare(
    session: Session,
    model: PreTrainedModel,
    spec: VerifySpec | None = None,
    progress: Progress = silent,
    fed: list[FedPrompt] | None = None,
) -> VerifyReport:
    """Feed the same random tokens to a session and to the model in eager attention with `DynamicCache`, step by step.

    Encoders of images and sound get items of random numbers, see `verify_encoders`; an encoder-decoder's gets its input
    before each prompt.

    The session is reset before every prompt and after the last. Prompts run from the longest to the shortest, so that
    each but the first finds the leftovers of a longer one in the buffers. All but the shortest are fed in two parts, so
    that prefill is seen to go on from tokens that the cache holds, see `prompt_feeds`.

    Args:
        session: What to check.
        model: What it was made from.
        spec: Prompts, steps and tolerance.
        progress: Told about every step.
        fed: Gets the prompts, each with the first `KEPT_STEPS` of its steps and the program's logits, for
            `measure_stored`.

    Raises:
        InputError: If a length does not fit, or the model has another vocabulary than the session.
    """
    spec = VerifySpec() if spec is None else spec
    vocab_size = vocab_size_of(model)
    if vocab_size != session.vocab_size:
        raise InputError(
            f"the program has a vocabulary of {session.vocab_size} tokens, the model of {vocab_size}; "
            "verify with the model it was made from"
        )
    sinks = _sinks(session)
    windows = {window for _, window in layer_types_and_windows(model.config) if window is not None}
    windows = sorted(windows if sinks is None else {*windows, sinks.tokens + sinks.window})
    plan = _planned(session, spec, _limit(session, model), windows)
    storage = None if spec.exact_cache else rounding_storage(session.layers)
    generator = torch.Generator().manual_seed(spec.seed)
    encode = session.runner.methods.get("encode")
    seen = _Seen(progress, 2 * sum(1 + steps for _, steps in plan))
    # Of the others, a reference is one of single steps.
    at_once = is_large(model) and sinks is None and storage is None and encode is None
    if at_once:
        sequence = _text(session, max(length + steps for length, steps in plan), generator)
        known = logits_of_beginnings(model, sequence, plan)
    for index, (length, steps) in enumerate(reversed(plan)):
        ids = sequence[:, : length + steps] if at_once else _text(session, length + steps, generator)
        encoder_inputs = None
        if encode is not None:
            lengths = encoder_lengths(encode)
            encoder_inputs = random_inputs(
                encode, lengths[index % len(lengths)], session.batch_size, vocab_size, generator
            )
        # All of the reference first: the session may run the very same model, under another attention implementation.
        if at_once:
            reference = (known[position] for position in range(length - 1, length + steps))
        else:
            reference = _reference(model, ids, length, sinks, encoder_inputs, storage)
        expected = seen.expect(reference)
        if encoder_inputs is not None:
            session.encode(**{name: tensor.to(session.device) for name, tensor in encoder_inputs.items()})
        if at_once and index:
            # Beginnings of one sequence: a write that fails would leave what it should have written.
            session.reset()
            session.prefill(_text(session, length + steps, generator).to(session.device))
        kept = seen.compare(session, ids.to(session.device), length, expected)
        if fed is not None:
            fed.append(FedPrompt(length, ids[:, : length + len(kept) - 1], sinks, encoder_inputs, torch.stack(kept)))
    session.reset()
    prompts = tuple(reversed(seen.prompts))
    encoders = verify_encoders(session, model, generator, spec.tolerance)
    max_difference = _largest([prompt.max_difference for prompt in prompts])
    rms_difference = _largest([prompt.rms_difference for prompt in prompts])
    tolerance = spec.tolerance
    if tolerance is None:
        tolerance = default_tolerance(model.dtype, seen.largest_logit)
        if storage is not None:
            tolerance = max(tolerance, rounding_effect(model, min(plan[-1][0], _ROUNDED_TOKENS), storage) / 4)
    return VerifyReport(
        passed=max_difference <= tolerance
        and (spec.rms_tolerance is None or rms_difference <= spec.rms_tolerance)
        and all(encoder.passed for encoder in encoders),
        max_difference=max_difference,
        tolerance=tolerance,
        prompts=prompts,
        steps=session.batch_size * sum(1 + steps for _, steps in plan),
        windows=tuple(window for window in windows if any(length + steps > window for length, steps in plan)),
        target=session.target,
        encoders=encoders,
        at_once=at_once,
        rms_tolerance=spec.rms_tolerance,
    )


def _largest(values: Sequence[float]) -> float:
    """Not a number if any is not, which Python's `max` does not keep."""
    return torch.tensor(values, dtype=torch.float64).max().item()


def _text(session: Session, length: int, generator: torch.Generator) -> torch.Tensor:
    """Random tokens int64 [batch, length], none of which stands for an image or a sound: it would need one."""
    ids = torch.randint(session.vocab_size, (session.batch_size, length), generator=generator)
    for token in session.placeholders:
        ids[ids == token] = (token + 1) % session.vocab_size
    return ids


def _planned(session: Session, spec: VerifySpec, limit: int | None, windows: Sequence[int]) -> list[tuple[int, int]]:
    """Lengths of the prompts, shortest first, each with its decode steps.

    Args:
        limit: Tokens that both sides can hold.
        windows: All that layers attend to, ascending.
    """
    reachable = [window for window in windows if limit is None or window < limit]
    methods = [method for method in session.runner.methods.values() if method.is_step]
    lengths = set(spec.prompts or default_prompts(reachable, limit, _chunk(session)))
    filling = None
    if not spec.prompts:
        # One token short of each bucket: the steps that follow are of the next.
        lengths.update(
            method.read_length - 1 for method in methods if method.read_length is not None and method.read_length > 1
        )
        # Rings alone are never full: no limit is theirs.
        if session.max_length is not None and session.batch_size * limit <= _MOST_TO_FILL:
            filling = limit
            lengths.add(filling)
    plan = []
    for length in sorted(lengths):
        if length == filling:
            steps = 0
        elif spec.decode_steps is None:
            steps = default_decode_steps(length, reachable, limit)
        else:
            steps = spec.decode_steps
        if length < 1 or steps < 0 or (limit is not None and length + steps > limit):
            raise InputError(
                f"a prompt of {length} tokens and {steps} decode steps do not fit: "
                f"{'any number' if limit is None else limit} tokens can be held, "
                "of which the prompt takes at least 1; pass fewer"
            )
        plan.append((length, steps))
    return plan


def _chunk(session: Session) -> int:
    """Longest chunk of a prompt."""
    return max(method.max_length for method in session.runner.methods.values() if method.is_step)


class _Seen:
    """What a comparison has seen so far.

    Args:
        progress: Told about every step of both sides.
        total: Steps in all.
    """

    def __init__(self, progress: Progress, total: int) -> None:
        self.prompts: list[VerifiedPrompt] = []
        self.largest_logit = 0.0
        self._progress, self._done, self._total = progress, 0, total

    def expect(self, reference: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The logits [batch, vocab] of the reference, one per step."""
        expected = []
        for logits in reference:
            expected.append(logits)
            self.largest_logit = max(self.largest_logit, logits.abs().max().item())
            self._step()
        return expected

    def compare(
        self, session: Session, ids: torch.Tensor, length: int, expected: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Feed a session the prompt and the tokens after it.

        Args:
            ids: int64 [batch, length + steps].
            length: Of the prompt.
            expected: Of the reference.

        Returns:
            The session's logits [batch, vocab] of the prompt and of the first `KEPT_STEPS` steps.
        """
        feeds = prompt_feeds(length, _chunk(session))
        differences, squares, agreements, kept = [], [], [], []
        for step, reference in enumerate(expected):
            if step == 0:
                outputs = [_feed(session, ids[:, :length], parts) for parts in feeds]
            else:
                outputs = [session.decode(ids[:, length + step - 1])]
            for output in outputs:
                logits = output.to(reference.device)
                # A maximum over tensors keeps not-a-number, Python's does not.
                difference = logits.float() - reference.float()
                differences.append(difference.abs().max())
                squares.append(difference.square().mean(-1).max())
                agreements.append((logits.argmax(-1) == reference.argmax(-1)).float().mean())
            if step <= KEPT_STEPS:
                kept.append(outputs[-1].detach().clone())
            self._step()
        self.prompts.append(
            VerifiedPrompt(
                length,
                sum(len(session.chunk_sizes(part)) for part in feeds[-1]),
                len(expected) - 1,
                torch.stack(differences).max().item(),
                torch.stack(agreements).mean().item(),
                torch.stack(squares).max().sqrt().item(),
            )
        )
        return kept

    def _step(self) -> None:
        self._done += 1
        self._progress("verifying", self._done, self._total)


def verify(
    path_or_bundle: str | os.PathLike | Bundle,
    model_or_path: PreTrainedModel | str | os.PathLike,
    *,
    lora: Sequence[str | os.PathLike] = (),
    trust: bool = False,
    key: str | os.PathLike | None = None,
    progress: Progress = silent,
    **asked: Any,
) -> VerifyReport:
    """Verify a bundle against the model it was made from; see `compare`. A mismatch is reported, not raised.

    A quantised program is compared with the model quantised the same way.

    Args:
        path_or_bundle: The bundle, or its folder.
        model_or_path: `demo`, a local folder, a hub id, or a loaded model.
        lora: Folder of the adapter that was merged, if one was.
        trust, key: Where it is a folder, see `load`.
        progress: Told about each stage.
        **asked: Fields of `VerifySpec`: tolerance, prompts, decode_steps, seed.

    Raises:
        BundleError: If the bundle cannot be opened.
        InputError: If the model cannot be loaded, or is of another type or vocabulary, or a value is out of range.
    """
    from ..bundle.bundle import Bundle
    from ..models.loading import load_model, load_to_quantise
    from .reference_runner import session_to_verify

    # Before the model is loaded, which takes long.
    spec = VerifySpec(**asked)
    bundle = (
        path_or_bundle
        if isinstance(path_or_bundle, Bundle)
        else Bundle.open(path_or_bundle, trust=trust, key=key, progress=progress)
    )
    manifest = bundle.manifest
    if manifest.quantization is None:
        model = load_model(model_or_path, manifest.dtype, lora=lora, progress=progress).model
    else:
        model = load_to_quantise(model_or_path, lora=lora, progress=progress).model
    if model.config.model_type != manifest.model_type:
        raise InputError(
            f"{bundle.path.name} was made from a {manifest.model_type!r} model, this one is "
            f"{model.config.model_type!r}; verify with the model it was made from"
        )
    if manifest.quantization is not None:
        from ..models.quantization import quantize
        from ..models.quantization_spec import Quantization
        from .tolerance import tolerances_of

        recorded = manifest.quantization
        quantization = Quantization(recorded.linear, recorded.group_size, recorded.embeddings)
        progress(f"quantising to {quantization}", 0, None)
        model = quantize(model, quantization).model
        if spec.tolerance is None:
            largest, rms = tolerances_of(model, quantization)
            spec = replace(spec, tolerance=largest, rms_tolerance=rms)
    session, remark = session_to_verify(bundle, model, progress=progress)
    report = compare(session, model, spec, progress)
    return replace(report, remark=remark)


def _feed(session: Session, ids: torch.Tensor, parts: Sequence[int]) -> torch.Tensor:
    """Logits [batch, vocab] after `ids` [batch, length], fed from position 0 in one prefill call per part."""
    session.reset()
    for part in ids.split(list(parts), dim=1):
        logits = session.prefill(part)
    return logits


def measure_stored(model: PreTrainedModel, fed: Sequence[FedPrompt], progress: Progress = silent) -> StoredDistance:
    """How far a program is from its model in the dtype that the weights are stored in, over an exact cache.

    Args:
        model: In that dtype.
        fed: What `compare` gave the program.
    """

    def reference(prompt: FedPrompt) -> Iterator[torch.Tensor]:
        return _reference(model, prompt.ids, prompt.length, prompt.sinks, prompt.encoder_inputs)

    progress(f"comparing with the model in {dtype_name(model.dtype)}", 0, None)
    return distance_from_stored(fed, dtype_name(model.dtype), reference)


@torch.no_grad()
def rounding_effect(model: PreTrainedModel, length: int, storage: Storage) -> float:
    """Largest |logit difference| that keeping keys and values in `storage` makes over `length` random tokens."""
    ids = torch.randint(vocab_size_of(model), (1, length), generator=torch.Generator().manual_seed(0))
    logits = []
    with attention_of(model, "eager"):
        for cache in (DynamicCache(config=model.config), RoundingCache(storage, config=model.config)):
            caches = {cache_argument(model): cache}
            logits.append(model(ids.to(model.device), use_cache=True, **caches).logits.float())
    return (logits[0] - logits[1]).abs().max().item()


@torch.no_grad()
def _reference(
    model: PreTrainedModel,
    ids: torch.Tensor,
    prompt: int,
    sinks: Sinks | None,
    encoder_inputs: dict[str, torch.Tensor] | None = None,
    storage: Storage | None = None,
) -> Iterator[torch.Tensor]:
    """Logits [batch, vocab] after the prompt and after each later token of `ids` [batch, length]."""
    ids = ids.to(model.device)
    if encoder_inputs is not None:
        with attention_of(model, "eager"):
            decoder = decoder_of(model, encoder_inputs)
            yield decoder(ids[:, :prompt]).clone()
            for position in range(prompt, ids.shape[1]):
                yield decoder(ids[:, position : position + 1])
        return
    plain = DynamicCache if storage is None else partial(RoundingCache, storage)
    cache = plain(config=model.config) if sinks is None else evicting_cache(model.config, sinks, plain)
    chunk = _REFERENCE_CHUNK if sinks is None else 1
    argument, explicit = cache_argument(model), takes_positions(model)

    def logits(start: int, end: int) -> torch.Tensor:
        options: dict[str, Any] = {argument: cache}
        if explicit:
            options["position_ids"] = torch.arange(start, end, device=ids.device).expand(ids.shape[0], -1)
        return model(ids[:, start:end], use_cache=True, **options).logits[:, -1]

    with attention_of(model, "eager"):
        for start in range(0, prompt, chunk):
            last = logits(start, min(start + chunk, prompt))
        yield last.clone()
        for position in range(prompt, ids.shape[1]):
            yield logits(position, position + 1)


def _sinks(session: Session) -> Sinks | None:
    """What the session's full-attention layers keep, None where they keep every token."""
    policies = [layer.policy for layer in session.layers if isinstance(layer.policy, SinkPolicy)]
    found = [Sinks(policy.sinks, policy.window) for policy in policies]
    return found[0] if found else None


def _limit(session: Session, model: PreTrainedModel) -> int | None:
    """Tokens that both sides can hold."""
    # Learned position tables end there, and past it even rotary ones are not what the model was trained for.
    config = model.config.get_text_config(decoder=True)
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "max_target_positions", None)
    return min((limit for limit in (session.max_length, positions) if limit), default=None)


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
