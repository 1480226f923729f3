"""Perplexity of a bundle on a text, in windows that slide over its tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..common.progress import silent
from ..common.settings import check_count
from ..errors import InputError, NonFiniteLogitsError
from ..generation.text import encode_prompt
from ..session.generate import require_tokenizer
from ..session.native import NativeSession

if TYPE_CHECKING:
    from ..common.progress import Progress
    from ..session.session import Session

#: Default length of a window, as in llama.cpp and mlx-lm.
WINDOW = 512


@dataclass(frozen=True)
class PerplexityReport:
    """The result of `perplexity`.

    Attributes:
        perplexity: Exponential of the loss.
        error: Standard error of the perplexity, from the spread of the tokens' losses.
        loss: Mean negative log likelihood of a token, in nats.
        scored_tokens: Number of tokens that the loss is of.
        tokens: Number of tokens of the text that were read.
        window: Tokens in a window.
        stride: Tokens from the start of a window to that of the next.
        seconds: Duration of the steps.
    """

    perplexity: float
    error: float
    loss: float
    scored_tokens: int
    tokens: int
    window: int
    stride: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return asdict(self)


def perplexity(
    session: Session | NativeSession,
    text: str,
    *,
    window: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
    progress: Progress | None = None,
) -> PerplexityReport:
    """Return the perplexity of a model on a text.

    Windows start every `stride` tokens. A window scores the tokens that the previous ones did not, with those before
    them in the window as context. The first token of the text is not scored. So the loss is that of transformers over
    the same windows, with labels of -100 for tokens that were scored before.

    Args:
        session: A text decoder at batch size 1 with a tokenizer. It is reset before and after. A `Session` with a
            `score_length` scores that many tokens a step, others one.
        text: The text, encoded as a prompt.
        window: Tokens in a window; 512 by default, or what the cache holds if that is less.
        stride: Tokens from window to window; `window` by default, so that windows do not overlap.
        max_tokens: Number of tokens to read from the start of the text; None for all.
        progress: Called as the work proceeds.

    Raises:
        InputError: If a number is out of range, the text is too short, or the session is another one.
        NonFiniteLogitsError: If logits are not finite.
    """
    window, stride = _sizes(session, window, stride)
    if max_tokens is not None:
        check_count("max_tokens", max_tokens, 2)
    if isinstance(session, NativeSession):
        ids = encode_prompt(session.text_tokenizer, text)[0, :max_tokens]
    else:
        ids = encode_prompt(require_tokenizer(session, "perplexity"), text)[0, :max_tokens].to(session.device)
    if len(ids) < 2:
        raise InputError(f"the text must have at least 2 tokens, got {len(ids)}; pass a longer one")
    report = progress or silent
    losses: list[torch.Tensor] = []
    seconds, end = 0.0, 0
    try:
        for begin in range(0, len(ids), stride):
            report("scoring", end, len(ids))
            part = ids[begin : begin + window]
            session.reset()
            start = time.perf_counter()
            losses += _losses(session, part, max(end - begin, 1))
            seconds += time.perf_counter() - start
            end = begin + len(part)
            if end == len(ids):
                break
    finally:
        session.reset()
    return _report(torch.cat(losses), len(ids), window, stride, seconds)


def check_scorable(session: Session | NativeSession, call: str) -> None:
    """Check that `scored_logits` takes a session.

    Raises:
        InputError: If it is not a text decoder at batch size 1.
    """
    if session.has_encoder:
        raise InputError(f"{call} needs a text decoder, got an encoder-decoder")
    # The native runner has one row.
    rows = 1 if isinstance(session, NativeSession) else session.batch_size
    if rows != 1:
        raise InputError(f"batch_size must be 1 for {call}, got {rows}; export with batch_size=1")


def _sizes(session: Session | NativeSession, window: int | None, stride: int | None) -> tuple[int, int]:
    """Return the checked length of a window and the stride."""
    check_scorable(session, "perplexity")
    most = session.max_length
    if window is None:
        window = WINDOW if most is None else min(WINDOW, most)
    check_count("window", window, 2)
    if most is not None and window > most:
        raise InputError(f"window must be at most {most}, which the cache holds, got {window}; reduce it")
    stride = window if stride is None else stride
    check_count("stride", stride)
    if stride > window:
        raise InputError(f"stride must be at most the window of {window} tokens, got {stride}; reduce it")
    return window, stride


def _losses(session: Session | NativeSession, ids: torch.Tensor, first: int) -> Iterator[torch.Tensor]:
    """Yield the losses of a window's tokens from index `first`, float64 [tokens] a step."""
    for logits in scored_logits(session, ids, first):
        targets = ids[first : first + len(logits), None]
        absent = logits.gather(-1, targets).isneginf()
        if bool(absent.any()) and not bool(logits.isnan().any()):
            token = int(targets[absent][0])
            raise InputError(
                f"the text must have tokens that the program computes logits of, got token {token}; pass another text, "
                "or export with a larger vocabulary"
            )
        yield -logits.float().log_softmax(dim=-1).gather(-1, targets)[:, 0].double().cpu()
        first += len(logits)


def scored_logits(session: Session | NativeSession, ids: torch.Tensor, first: int) -> Iterator[torch.Tensor]:
    """Feed a sequence, and yield the logits of its tokens from index `first`, [tokens, vocab] a step.

    Args:
        session: An empty session, see `check_scorable`.
        ids: Token ids, int64 [length]. The last one is not fed.
        first: Index of the first token to score, at least 1.
    """
    size = 1 if isinstance(session, NativeSession) else max(session.score_length, 1)
    begin, end = 0, first
    # The last token is only a target.
    while end < len(ids):
        yield _logits(session, ids[begin:end], begin > 0)
        begin, end = end, min(end + size, max(end + 1, len(ids) - 1))


def _logits(session: Session | NativeSession, ids: torch.Tensor, all_tokens: bool) -> torch.Tensor:
    """Feed tokens, and return the logits after each or after the last one, [tokens, vocab]."""
    if isinstance(session, NativeSession):
        return torch.frombuffer(session.prefill(ids.tolist()), dtype=torch.float32)[None]
    if all_tokens and len(ids) > 1:
        return session.score(ids[None])[0]
    return session.prefill(ids[None])


def _report(losses: torch.Tensor, tokens: int, window: int, stride: int, seconds: float) -> PerplexityReport:
    if not bool(losses.isfinite().all()):
        raise NonFiniteLogitsError(
            f"the logits are not finite after {int(losses.isfinite().int().argmin()) + 1} tokens: the model overflows "
            "there, or its weights hold infinities or not-a-number; run it in float32"
        )
    mean = losses.mean()
    spread = float(losses.std()) if len(losses) > 1 else 0.0
    # Infinite above a loss of 709, where math.exp would fail.
    value = float(mean.exp())
    error = value * spread / math.sqrt(len(losses))
    return PerplexityReport(value, error, float(mean), len(losses), tokens, window, stride, seconds)
