"""Choice of the next token with numpy, and its proposals, for runners without torch.

The rules are those of `sampling.choose`; the random numbers differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Length of the n-gram that prompt lookup searches for; shorter ones are tried next.
NGRAM = 3


def penalised(logits: np.ndarray, seen: np.ndarray, penalty: float) -> np.ndarray:
    """Return logits [vocab] with the repetition penalty for the tokens `seen`, see `sampling.penalise`.

    Finite logits stay finite with any penalty above 0.
    """
    changed = logits.copy()
    # In double, because float32 has no value for a penalty of 1e-300 or 1e39.
    known = logits[seen].astype(np.float64)
    with np.errstate(over="ignore"):
        known = np.where(known < 0, known * penalty, known / penalty)
    most = np.finfo(np.float32).max
    changed[seen] = np.where(np.isfinite(logits[seen]), known.clip(-most, most), logits[seen])
    return changed


def distribution(
    logits: np.ndarray,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens that may be drawn, int64 [candidates], and their weights, float64 [candidates].

    Args:
        logits: [vocab], float32, the largest of which is finite.
        temperature: See `SamplingOptions`; above 0.
        top_k: See `SamplingOptions`; the limits apply in this order.
        top_p: See `SamplingOptions`.
        min_p: See `SamplingOptions`.
    """
    tokens = _most_probable(logits, top_k)
    if top_k is not None or top_p not in (None, 1):
        tokens = tokens[np.argsort(-logits[tokens], kind="stable")]
    # In double, with the largest logit at zero, so that no temperature overflows and the largest keeps a weight of 1.
    below = logits[tokens].astype(np.float64) - np.float64(logits.max())
    with np.errstate(over="ignore"):
        weights = np.exp(np.where(below == 0, 0.0, below / temperature))
    if top_p is not None and top_p != 1:
        # A token stays while those before it have not reached top_p, so the first always stays.
        before = np.cumsum(weights) - weights
        kept = before < top_p * weights.sum()
        kept[0] = True
        tokens, weights = tokens[kept], weights[kept]
    kept = weights >= (min_p or 0.0)
    return tokens[kept], weights[kept]


def draw(tokens: np.ndarray, weights: np.ndarray, uniform: float) -> int:
    """Return the token at a random number in [0, 1) of the cumulative weights."""
    possible = weights > 0
    tokens, cumulative = tokens[possible], np.cumsum(weights[possible])
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    # Rounding may leave a remainder after the last weight.
    return int(tokens[min(index, len(tokens) - 1)])


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """Return the log probabilities of all tokens, float64 [vocab]."""
    exact = logits.astype(np.float64)
    largest = exact.max()
    return exact - (largest + np.log(np.exp(exact - largest).sum()))


def most_probable(scores: np.ndarray, count: int) -> list[int]:
    """Return the `count` tokens of the largest scores [vocab] in order; of equal ones the lower token is first."""
    tokens = _most_probable(scores, count)
    return [int(token) for token in tokens[np.argsort(-scores[tokens], kind="stable")]]


def _most_probable(scores: np.ndarray, count: int | None) -> np.ndarray:
    """Return the tokens of the `count` largest scores in the order of their ids."""
    if count is None or count >= len(scores):
        return np.arange(len(scores))
    if count == 0:
        return np.arange(0)
    # A partition instead of a sort, which takes ten times as long for a large vocabulary.
    least = np.partition(scores, len(scores) - count)[len(scores) - count]
    above, equal = np.flatnonzero(scores > least), np.flatnonzero(scores == least)
    return np.sort(np.concatenate([above, equal[: count - len(above)]]))


def look_up(context: Sequence[int], count: int, ngram: int = NGRAM) -> list[int]:
    """Return at most `count` tokens that followed the text's end where it last occurred before; see `PromptLookup`."""
    backwards = list(context)[::-1]
    most = min(ngram, len(backwards) - 1)
    at, longest, found = 0, 0, list[int]()
    while longest < most:
        try:
            # A search for the last token alone, because a loop that compares slices at all tokens takes far longer.
            at = backwards.index(backwards[0], at + 1)
        except ValueError:
            break
        size = 1
        while size < most and backwards[at + size : at + size + 1] == backwards[size : size + 1]:
            size += 1
        if size > longest:
            longest, found = size, backwards[max(0, at - count) : at][::-1]
    return found
