"""Compare a session and its encoders with the model: the same tokens through both, logits at every position."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from ..backends.base import products_of
from ..cache.attention.implementation import attention_of
from ..cache.layers import rounding_storage
from ..common.progress import silent
from ..common.tensors import dtype_name, logit_differences
from ..errors import InputError
from ..models.layers.specs import layer_types_and_windows, vocab_size_of
from ..models.quantized_rows import rounds_inputs
from ..program.inputs.kinds import KINDS
from ..program.inputs.modalities import modalities_of
from ..program.inputs.modality import features_of
from .prompts import (
    END_STEPS,
    END_TOKENS,
    kept_sinks,
    longest_chunk,
    most_tokens,
    planned,
    prompt_feeds,
    random_text,
    read_and_placed,
)
from .references import (
    Reference,
    encoder_lengths,
    example_item,
    is_large,
    logits_by_step,
    logits_of_beginnings,
    parameters_of,
    place,
    random_inputs,
    random_item,
    takes_no_cache,
)
from .report import (
    KEPT_STEPS,
    Distance,
    FedPrompt,
    StoredDistance,
    VerifiedEncoder,
    VerifiedPrompt,
    VerifyReport,
    largest,
)
from .spec import VerifySpec
from .tolerance import Roundings, check_finite, default_tolerance

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..common.progress import Progress
    from ..session.session import Session


_ITEMS = 2


@torch.no_grad()
def verify_encoders(
    session: Session,
    model: PreTrainedModel,
    generator: torch.Generator,
    tolerance: float | None = None,
    rounded: torch.dtype | None = None,
) -> tuple[VerifiedEncoder, ...]:
    """Compare each `encode_image` and `encode_audio` of a session with the model's own encoder in eager attention.

    Args:
        session: What to check; nothing in its cache changes.
        model: What it was made from.
        generator: Of the items.
        tolerance: Largest |difference| that passes where that is more than `default_tolerance` for the largest value:
            of quantised weights.
        rounded: Dtype that the session's linear layers round their inputs to; None for the model's dtype.
    """
    verified = []
    for kind in KINDS:
        method = session.runner.methods.get(f"encode_{kind}")
        if method is None:
            continue
        (modality,) = modalities_of(model, {kind: example_item(method)})
        differences, largest, spread = [], 0.0, 0.0
        for _ in range(_ITEMS):
            item = [random_item(spec, generator) for spec in method.inputs]
            with attention_of(model, "eager"):
                given = [tensor.to(model.device) for tensor in item]
                expected = features_of(model, modality, *given).float().clone()
            found = session.runner.run(method.name, *(tensor.to(session.device) for tensor in item))[0]
            differences.append((found.float().to(expected.device) - expected).abs().max())
            largest = max(largest, expected.abs().max().item())
            spread = max(spread, expected.std(-1).max().item())
        limit = max(default_tolerance(rounded or model.dtype, largest, spread), tolerance or 0.0)
        verified.append(VerifiedEncoder(method.name, torch.stack(differences).max().item(), limit))
    return tuple(verified)


# Longest prompt that the model without rounding computes, too, if there are shorter ones.
_MOST_WITHOUT_ROUNDING = 512


def compare(
    session: Session,
    model: PreTrainedModel,
    spec: VerifySpec | None = None,
    progress: Progress = silent,
    fed: list[FedPrompt] | None = None,
) -> VerifyReport:
    """Feed the same random tokens to a session and to the model in eager attention with `DynamicCache`, step by step.

    Encoders of images, video and audio get random items, see `verify_encoders`; that of an encoder-decoder gets its
    input before each prompt.

    If the program rounds activations, or keys and values, and no tolerance is given, the limits follow from the
    logits of the model without rounding, see `Roundings`.

    The session is reset before every prompt and after the last. Prompts run from the longest to the shortest, so that
    the buffers hold stale tokens of a longer prompt. All except the shortest are fed in two parts, so that prefill also
    continues from cached tokens, see `prompt_feeds`.

    Args:
        session: The session to verify.
        model: The model it was made from.
        spec: Prompts, steps and tolerance.
        progress: Called for every step.
        fed: List that gets the prompts with the first `KEPT_STEPS` steps and the program's logits, for
            `measure_distance`.

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
    sinks = kept_sinks(session)
    seen_windows = {window for _, window in layer_types_and_windows(model.config) if window is not None}
    windows = sorted(seen_windows if sinks is None else {*seen_windows, sinks.tokens + sinks.window})
    changes = () if session.stepper.rope is None else session.stepper.rope.borders
    limit = most_tokens(session, model)
    plan = planned(session, spec, limit, sorted({*windows, *changes}))
    storage = None if spec.exact_cache else rounding_storage(session.layers)
    generator = torch.Generator().manual_seed(spec.seed)
    encode = session.runner.methods.get("encode")
    # Logits of the others depend on more than the tokens before them: the prompt's length, or the encoder's input.
    of_prompt = any(layer.policy.keeps_prompt for layer in session.layers) or bool(changes) or encode is not None
    at_once = is_large(model) and not of_prompt and not takes_no_cache(model)
    rounds_layers = rounds_inputs(model)
    longest, ends = max(length + steps for length, steps in plan), list[int]()
    if at_once and not (spec.full or spec.prompts):
        parameters = session.batch_size * parameters_of(model)
        plan, ends = read_and_placed(plan, longest_chunk(session), parameters, limit, session.max_length)
    seen = _Seen(progress, 2 * sum(1 + steps for _, steps in plan) + len(ends) * (1 + 2 * END_STEPS))
    references = [Reference(model, sinks, storage)]
    # If a tolerance is given, it is the only limit.
    if spec.tolerance is None and (storage is not None or rounds_layers):
        references.append(Reference(model, sinks, exact=True))
    rounded = spec.rounded or products_of(session.runner)
    seen.roundings = Roundings(rounded or model.dtype) if len(references) > 1 else None
    # The prompt that fills a long cache would take most of the time.
    shorter = plan if ends else [prompt for prompt in plan if prompt[0] <= _MOST_WITHOUT_ROUNDING] or plan[:1]
    padding = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
    if at_once:
        sequence = random_text(session, max([longest, *ends]), generator, padding)
        progress("running the model", 0, None)
        for reference, beginnings in zip(references, (plan, shorter), strict=False):
            reference.run(sequence, beginnings)
    for index, (length, steps) in enumerate(reversed(plan)):
        ids = sequence[:, : length + steps] if at_once else random_text(session, length + steps, generator, padding)
        encoder_inputs = None
        if encode is not None:
            lengths = encoder_lengths(encode)
            encoder_inputs = random_inputs(
                encode, lengths[index % len(lengths)], session.batch_size, vocab_size, generator
            )
        # The references first: the session may run the very same model, under another attention implementation.
        expected = seen.expect(references[0].logits(ids, length, encoder_inputs))
        if rounds_layers:
            check_finite(model, expected)
        exact: list[torch.Tensor] = []
        if len(references) > 1 and (length, steps) in shorter:
            exact = references[1].logits(ids, length, encoder_inputs)
        if encoder_inputs is not None:
            session.encode(**{name: tensor.to(session.device) for name, tensor in encoder_inputs.items()})
        if at_once and index:
            # Beginnings of one sequence: a write that fails would leave what it should have written.
            session.reset()
            session.prefill(random_text(session, length + steps, generator, padding).to(session.device))
        kept = seen.compare(session, ids.to(session.device), length, expected, exact)
        if seen.roundings is not None and (length, steps) == shorter[-1]:
            seen.roundings.add_layers(session, references[0], references[1])
        # After the longest prompt that is read.
        for end in ends if index == 0 else ():
            seen.compare_end(session, references, sequence, end, longest, generator)
        if fed is not None:
            tokens = ids[:, : length + len(kept) - 1]
            without = torch.stack(exact[: len(kept)]) if exact else None
            fed.append(FedPrompt(length, tokens, sinks, encoder_inputs, torch.stack(kept), at_once, without))
    session.reset()
    usual = default_tolerance(rounded or model.dtype, seen.largest_logit, seen.spread)
    limits = (usual if spec.tolerance is None else spec.tolerance, None, None)
    tolerance, rms_tolerance, rounding = limits if seen.roundings is None else seen.roundings.limits(usual, seen.spread)
    prompts = tuple(sorted(seen.prompts, key=lambda prompt: prompt.length))
    reached = max(prompt.length + prompt.decode_steps for prompt in prompts)
    encoders = verify_encoders(session, model, generator, tolerance if rounds_layers else spec.tolerance, rounded)
    max_difference = largest([prompt.max_difference for prompt in prompts])
    rms_difference = largest([prompt.rms_difference for prompt in prompts if prompt.rms_difference is not None])
    return VerifyReport(
        passed=max_difference <= (math.inf if tolerance is None else tolerance)
        and (rms_tolerance is None or rms_difference <= rms_tolerance)
        and (rounding is None or rounding.passed)
        and all(encoder.passed for encoder in encoders),
        max_difference=max_difference,
        tolerance=tolerance,
        prompts=prompts,
        steps=session.batch_size * seen.positions,
        windows=tuple(window for window in windows if reached > window),
        target=session.target,
        encoders=encoders,
        at_once=at_once,
        rms_tolerance=rms_tolerance,
        spread=seen.spread,
        rounding=rounding,
        unread=0 if spec.prompts or limit is None or session.max_length is None else limit - reached,
    )


class _Differences:
    """Differences of the logits after a prompt, and after each of its steps.

    Args:
        expected: Logits [batch, vocab] of the reference, one per step.
        exact: Logits [batch, vocab] of the model without rounding, one per step; empty if not measured.
        roundings: Gets the logits if they are measured.
    """

    def __init__(
        self, expected: Sequence[torch.Tensor], exact: Sequence[torch.Tensor], roundings: Roundings | None
    ) -> None:
        self._expected, self._exact, self._roundings = expected, exact, roundings
        self.steps = len(expected) - 1
        #: Steps that were compared.
        self.seen: set[int] = set()
        self._largest: list[torch.Tensor] = []
        self._squares: list[torch.Tensor] = []
        self._agreements: list[torch.Tensor] = []

    def add(self, step: int, output: torch.Tensor) -> torch.Tensor:
        """Add logits [batch, vocab] of the session, and return them."""
        reference = self._expected[step]
        logits = output.to(reference.device)
        # torch's maximum propagates NaN, Python's does not.
        difference = logit_differences(logits, reference)
        self._largest.append(difference.abs().max())
        self._squares.append(difference.square().mean(-1).max())
        self._agreements.append((logits.argmax(-1) == reference.argmax(-1)).float().mean())
        if self._exact and self._roundings is not None:
            self._roundings.add(logits, reference, self._exact[step])
        self.seen.add(step)
        return output

    def figures(self) -> tuple[float, float, float]:
        """Return `max_difference`, `argmax_agreement` and `rms_difference` of a `VerifiedPrompt`."""
        return (
            torch.stack(self._largest).max().item(),
            torch.stack(self._agreements).mean().item(),
            torch.stack(self._squares).max().sqrt().item(),
        )


class _Seen:
    """Results of a comparison so far.

    Args:
        progress: Called for every step of both sides.
        total: Total number of steps.
    """

    def __init__(self, progress: Progress, total: int) -> None:
        self.prompts: list[VerifiedPrompt] = []
        self.largest_logit = 0.0
        #: Largest standard deviation of a position's logits over the vocabulary.
        self.spread = 0.0
        #: Effect of rounding; None if no activations, keys or values are rounded.
        self.roundings: Roundings | None = None
        #: Number of positions that were compared.
        self.positions = 0
        self._placed = 0
        self._progress, self._done, self._total = progress, 0, total

    def expect(self, reference: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Collect the logits [batch, vocab] of the reference, one per step."""
        expected = []
        for logits in reference:
            expected.append(logits)
            present = logits.masked_fill(logits.isneginf(), 0.0)
            self.largest_logit = max(self.largest_logit, present.abs().max().item())
            self.spread = max(self.spread, spread_of(logits))
            self._step()
        return expected

    def compare(
        self,
        session: Session,
        ids: torch.Tensor,
        length: int,
        expected: Sequence[torch.Tensor],
        exact: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Feed a session the prompt and the tokens after it, and compare the logits.

        Args:
            session: The session to verify.
            ids: int64 [batch, length + steps].
            length: Length of the prompt.
            expected: Logits [batch, vocab] of the reference, one per step.
            exact: Logits [batch, vocab] of the model without rounding, one per step; empty if not measured.

        Returns:
            The session's logits [batch, vocab] of the prompt and of the first `KEPT_STEPS` steps.
        """
        # If RoPE factors change with the length, several calls differ from one, which uses those of the full prompt.
        feeds = prompt_feeds(length, longest_chunk(session)) if session.stepper.rope is None else [[length]]
        differences, kept = _Differences(expected, exact, self.roundings), []
        for step in range(len(expected)):
            if step == 0:
                for parts in feeds:
                    output = differences.add(0, _feed(session, ids[:, :length], parts))
            else:
                output = differences.add(step, session.decode(ids[:, length + step - 1]))
            if step <= KEPT_STEPS:
                kept.append(output.detach().clone())
            self._step()
        self._add(length, differences, sum(len(session.stepper.chunk_sizes(part)) for part in feeds[-1]))
        return kept

    def compare_end(
        self,
        session: Session,
        references: Sequence[Reference],
        sequence: torch.Tensor,
        end: int,
        longest: int,
        generator: torch.Generator,
    ) -> None:
        """Feed a session the tokens before `end` after those that it holds, and compare the logits.

        Keys and values are placed in the slots between. If the session cannot take them, the tokens between are read,
        by the first reference alone, up to `longest`; a later end is left out.

        A prompt comes first, then steps, then a prompt that ends at the last token. If the session can take tokens
        back, the last ones are fed as steps, too.

        Args:
            session: The session to verify.
            references: The references.
            sequence: Tokens int64 [batch, length]. The session and the references hold the first of them.
            end: Number of tokens that the session holds afterwards.
            longest: Largest end up to which tokens may be read.
            generator: Chooses the keys and values.
        """
        held = int(session.length[0])
        start = max(held, end - END_TOKENS)
        # One that did not read the tokens between is left out from then on.
        references = [reference for reference in references if reference.tokens == held]
        if start > held and not place(session, references, start, generator):
            if end > longest:
                return
            references, start = references[:1], held
        steps = min(END_STEPS, max(0, end - start - 2) // 2)
        first = end - 2 * steps
        for reference in references:
            reference.run(sequence[:, :end], [(first, 2 * steps)])
        expected, *others = (reference.logits(sequence[:, :end], first, None) for reference in references)
        self.expect(expected)
        ids = sequence.to(session.device)
        differences = _Differences(expected, others[0] if others else [], self.roundings)
        differences.add(0, session.prefill(ids[:, start:first]))
        for step in range(1, steps + 1):
            differences.add(step, session.decode(ids[:, first + step - 1]))
        if steps:
            differences.add(2 * steps, session.prefill(ids[:, end - steps : end]))
        if steps and all(layer.max_rollback(end, end) >= steps for layer in session.layers):
            session.rewind(steps)
            for step in range(steps + 1, 2 * steps + 1):
                differences.add(step, session.decode(ids[:, first + step - 1]))
        if self.roundings is not None and others:
            self.roundings.add_layers(session, references[0], references[1], start)
        chunks = sum(len(session.stepper.chunk_sizes(part)) for part in (first - start, steps) if part)
        self._placed += start - held
        self._add(first, differences, chunks, self._placed)

    def _add(self, length: int, differences: _Differences, chunks: int, placed: int = 0) -> None:
        """Add a prompt of `length` tokens and its steps."""
        self.positions += len(differences.seen)
        self.prompts.append(VerifiedPrompt(length, chunks, differences.steps, *differences.figures(), placed))

    def _step(self) -> None:
        self._done += 1
        self._progress("verifying", self._done, self._total)


def spread_of(logits: torch.Tensor) -> float:
    """Return the largest standard deviation of the rows of `logits` [batch, vocab] that are finite.

    Models set the logits of tokens they never choose to minus infinity; these are left out.
    """
    values = logits.double()
    finite = values.isfinite()
    count = finite.sum(-1, keepdim=True).clamp(min=1)
    mean = torch.where(finite, values, 0.0).sum(-1, keepdim=True) / count
    squares = torch.where(finite, (values - mean).square(), 0.0).sum(-1, keepdim=True) / count
    return squares.sqrt().max().item()


def _feed(session: Session, ids: torch.Tensor, parts: Sequence[int]) -> torch.Tensor:
    """Return the logits [batch, vocab] after `ids` [batch, length], fed from position 0 with a prefill per part."""
    session.reset()
    for part in ids.split(list(parts), dim=1):
        logits = session.prefill(part)
    return logits


@torch.no_grad()
def measure_distance(model: PreTrainedModel, fed: Sequence[FedPrompt], progress: Progress = silent) -> Distance:
    """Measure the distance of a program from another model, over an exact cache.

    The program does not run again. The model runs once if the prompts are prefixes of one sequence.

    Args:
        model: The model before quantisation or conversion; or the program's own, to measure the cache alone.
        fed: Prompts and logits collected by `compare`.
        progress: Called once.
    """
    progress(f"comparing with the model in {dtype_name(model.dtype)}", 0, None)
    longest = max(fed, key=lambda prompt: prompt.ids.shape[1])
    if longest.at_once:
        plan = [(prompt.length, prompt.steps) for prompt in fed]
        known = logits_of_beginnings(model, longest.ids, plan, longest.sinks)
    differences, agreements = [], []
    for prompt in fed:
        reference: Iterator[torch.Tensor]
        if prompt.at_once:
            reference = (known[position] for position in range(prompt.length - 1, prompt.ids.shape[1]))
        else:
            reference = logits_by_step(model, prompt.ids, prompt.length, prompt.sinks, prompt.encoder_inputs)
        for found, expected in zip(prompt.logits, reference, strict=True):
            logits = found.to(expected.device)
            differences.append(logit_differences(logits, expected).abs().max())
            agreements.append(logits.argmax(-1) == expected.argmax(-1))
    agreed = torch.cat(agreements)
    return Distance(len(agreed), torch.stack(differences).max().item(), agreed.float().mean().item())


def measure_without_rounding(model: PreTrainedModel, fed: Sequence[FedPrompt], progress: Progress = silent) -> Distance:
    """Measure the distance of a program from its own model without rounding, see `measure_distance`.

    The model does not run if `compare` has run it without rounding.
    """
    known = [(prompt.logits, prompt.without) for prompt in fed if prompt.without is not None]
    if len(known) < len(fed):
        return measure_distance(model, fed, progress)
    pairs = [(found.to(expected.device), expected) for found, expected in known]
    differences = [logit_differences(found, expected).abs().max() for found, expected in pairs]
    agreed = torch.cat([(found.argmax(-1) == expected.argmax(-1)).flatten() for found, expected in pairs])
    return Distance(len(agreed), torch.stack(differences).max().item(), agreed.float().mean().item())


def measure_stored(model: PreTrainedModel, fed: Sequence[FedPrompt], progress: Progress = silent) -> StoredDistance:
    """Measure the distance of a program from the model in the dtype of the stored weights, see `measure_distance`."""
    found = measure_distance(model, fed, progress)
    return StoredDistance(dtype_name(model.dtype), found.positions, found.max_difference)
