"""The decode loop: prefill, choose, feed back, until something ends it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from .chooser import Chooser
from .multi_step import Launches
from .text import StopStrings, TextStream

if TYPE_CHECKING:
    from ..session.session import Session


def generate_tokens(
    session: Session,
    input_ids: torch.Tensor,
    limit: int | None,
    chooser: Chooser,
    end_tokens: Collection[int],
    stop_strings: Sequence[str] = (),
    pad_token: int = 0,
    inputs: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Iterator[torch.Tensor]:
    """Tokens that follow a prompt.

    A token is fed back only when the next one is asked for, so the newest token is never in the cache.

    Args:
        session: What runs the steps; it continues from where it is.
        input_ids: int64 [batch, length].
        limit: Most tokens per row; None for as many as the cache has room for.
        chooser: How to choose.
        end_tokens: A row ends with any of these.
        stop_strings: A row ends with the token that completes one of these; the session needs a tokenizer then.
        pad_token: What a row that has ended gives while others go on.
        inputs: What the prompt's prefill takes besides.

    Yields:
        int64 [batch], on the session's device.
    """
    batch_size = input_ids.shape[0]
    ended = torch.zeros(batch_size, dtype=torch.bool)
    texts = [
        (TextStream(session.tokenizer), StopStrings(stop_strings)) for _ in range(batch_size if stop_strings else 0)
    ]
    tokens = chooser.choose(session.prefill(input_ids, **inputs))
    launches = Launches(session, chooser)
    count = 0
    while True:
        if ended.any():
            tokens = tokens.masked_fill(ended.to(tokens.device), pad_token)
        chosen = tokens.tolist()
        yield tokens
        count += 1
        for row, token in enumerate(chosen):
            if not ended[row]:
                ended[row] = token in end_tokens or bool(texts) and _completes(token, *texts[row])
        if bool(ended.all()) or count == limit or session.room == 0:
            return
        tokens = launches.next(tokens, None if limit is None else limit - count)


def _completes(token: int, stream: TextStream, stops: StopStrings) -> bool:
    stops.push(stream.push(token))
    return stops.stopped
