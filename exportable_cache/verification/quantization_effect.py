"""Measurement of the effect of quantisation on logits, and on the accuracy of the demo model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch

from ..common.progress import silent
from ..common.tensors import dtype_name
from ..demo.task import accuracy, make_questions
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
