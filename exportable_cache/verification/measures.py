"""Measurements that an export records: the effect of quantisation on logits and accuracy, and accepted draft tokens."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch

from ..bundle.manifest import Acceptance
from ..cache.layer_spec import DRAFTED
from ..common.progress import silent
from ..common.tensors import dtype_name
from ..demo.task import accuracy, make_questions
from ..generation.sampling import Sampler, Sampling
from ..generation.speculative import SpeculationStatistics, TrainedDraft, generate_speculative
from ..models.cache_factory import ExportableCache
from ..models.loading.loading import MOST_WIDENED_BYTES
from ..models.positions import position_limit
from ..models.weights import converted
from ..session.session import Session
from .compare import measure_distance

if TYPE_CHECKING:
    from ..common.progress import Progress
    from ..models.loading.loading import LoadedModel
    from .report import FedPrompt

# Tokens of the longest prompt over which effects of rounding are measured.
_ENOUGH_TOKENS = 40
_QUESTIONS, _QUESTIONS_SEED = 50, 20_000
_ANSWER_TOKENS = 6


def measure_quantization(
    session: Session, float_model: LoadedModel, fed: Sequence[FedPrompt], progress: Progress = silent
) -> dict[str, Any]:
    """Compare a quantised program with the model before quantisation, and return fields of `manifest.Quantized`.

    The model is converted to float32 if that takes at most `MOST_WIDENED_BYTES`.

    Args:
        session: The session of the quantised program.
        float_model: The model it was made from, in its stored dtype.
        fed: Prompts and logits of the program, collected by `compare`.
        progress: Called for every step.
    """
    model = float_model.model
    if model.dtype != torch.float32 and 4 * model.num_parameters() <= MOST_WIDENED_BYTES:
        float_model = replace(float_model, model=converted(model, torch.float32))
    effect: dict[str, Any] = asdict(measure_distance(float_model.model, fed, progress))
    effect["compared_in"] = dtype_name(float_model.model.dtype)
    longest = min(session.max_length or math.inf, position_limit(float_model.model.config) or math.inf)
    if float_model.source == "demo" and session.tokenizer is not None and longest > 128:
        effect |= _demo_accuracy(session, float_model, longest, progress)
    return effect


def short_prompts(fed: Sequence[FedPrompt]) -> list[FedPrompt]:
    """Return the prompts up to the first of at least `_ENOUGH_TOKENS`, with which effects of rounding are measured.

    Longer ones would cost a pass of another model over all of their tokens.
    """
    ascending = sorted(fed, key=lambda prompt: prompt.length)
    enough = next((prompt.length for prompt in ascending if prompt.length >= _ENOUGH_TOKENS), math.inf)
    return [prompt for prompt in ascending if prompt.length <= enough]


def _demo_accuracy(session: Session, float_model: LoadedModel, longest: float, progress: Progress) -> dict[str, Any]:
    model = float_model.model
    window = max(window for window in [getattr(model.config, "sliding_window", 0)] if window)
    questions = make_questions(
        _QUESTIONS, seed=_QUESTIONS_SEED, min_distance=window, tokens=(40, min(300, int(longest) - _ANSWER_TOKENS))
    )
    before = Session.from_model(
        model,
        ExportableCache.from_model(model, int(longest), attn_implementation=None),
        tokenizer=session.tokenizer,
        buckets=False,
    )
    shares = {}
    for name, answering in (("accuracy_before", before), ("accuracy_after", session)):
        done = 0

        def answer(prompt: str, answering: Session = answering) -> str:
            nonlocal done
            answering.reset()
            done += 1
            progress("asking the demo's questions", done, len(questions))
            return "".join(answering.stream_text(prompt, max_new_tokens=_ANSWER_TOKENS))

        shares[name] = accuracy(answer, questions)
    before.close()
    session.reset()
    return {"questions": len(questions), **shares}


#: Most generations, and most tokens of the prompt and of the generation of each.
_PIECES, _PROMPT, _GENERATED = 8, 64, 64


def measure_acceptance(session: Session, ids: list[int], progress: Progress = silent) -> Acceptance:
    """Generate greedily after pieces of a text with the draft head, and return the shares of accepted proposals.

    Args:
        session: A session with a draft head and a method that scores proposals; it is reset.
        ids: Tokens of the text.
        progress: Called with each piece.

    Raises:
        InputError: If the session has no draft head, or cannot take proposals back.
    """
    room = session.max_length or 2 * (_PROMPT + _GENERATED)
    length = min(_PROMPT, room // 2, len(ids))
    count = min(_GENERATED, room - length)
    pieces = min(_PIECES, len(ids) // length)
    draft = TrainedDraft(session, min(DRAFTED, session.score_length - 1))
    statistics, tokens = SpeculationStatistics(), 0
    for index in range(pieces):
        progress("measuring the acceptance of the draft head", index, pieces)
        start = index * (len(ids) // pieces)
        prompt = torch.tensor([ids[start : start + length]], device=session.device)
        session.reset()
        sampler = Sampler(Sampling(), prompt, session.vocab_size)
        tokens += sum(1 for _ in generate_speculative(session, prompt, count, sampler, (), draft, statistics))
    session.reset()
    return Acceptance(
        text_tokens=len(ids),
        sha256=hashlib.sha256(torch.tensor(ids).numpy().tobytes()).hexdigest(),
        # The first token of each generation comes from the prompt.
        tokens=tokens - pieces,
        steps=statistics.steps,
        proposed=statistics.proposed_at,
        accepted=statistics.accepted_at,
    )
