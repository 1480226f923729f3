"""What a verification feeds: which prompts, how many steps after each, and the random tokens of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..cache.policies import SinkPolicy
from ..cache.spec import Sinks
from ..errors import InputError
from .prompts import default_decode_steps, default_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..session.session import Session
    from .spec import VerifySpec

# A prompt that fills the cache costs as much as the cache is large: tokens over all rows up to which it is tried.
_MOST_TO_FILL = 4096


def random_text(session: Session, length: int, generator: torch.Generator) -> torch.Tensor:
    """Random tokens int64 [batch, length], none of which stands for an image or a sound: it would need one."""
    ids = torch.randint(session.vocab_size, (session.batch_size, length), generator=generator)
    for token in session.placeholders:
        ids[ids == token] = (token + 1) % session.vocab_size
    return ids


def planned(session: Session, spec: VerifySpec, limit: int | None, windows: Sequence[int]) -> list[tuple[int, int]]:
    """Lengths of the prompts, shortest first, each with its decode steps.

    Args:
        limit: Tokens that both sides can hold.
        windows: All that layers attend to, ascending.
    """
    reachable = [window for window in windows if limit is None or window < limit]
    methods = [method for method in session.runner.methods.values() if method.is_step]
    lengths = set(spec.prompts or default_prompts(reachable, limit, longest_chunk(session)))
    filling = None
    if not spec.prompts:
        # One token short of each bucket: the steps that follow are of the next.
        lengths.update(
            method.kv_read_len - 1 for method in methods if method.kv_read_len is not None and method.kv_read_len > 1
        )
        # Rings alone are never full: no limit is theirs.
        if limit is not None and session.max_length is not None and session.batch_size * limit <= _MOST_TO_FILL:
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


def longest_chunk(session: Session) -> int:
    """Longest chunk of a prompt."""
    return max(method.max_length for method in session.runner.methods.values() if method.is_step)


def kept_sinks(session: Session) -> Sinks | None:
    """What the session's full-attention layers keep, None where they keep every token."""
    policies = [layer.policy for layer in session.layers if isinstance(layer.policy, SinkPolicy)]
    found = [Sinks(policy.sinks, policy.window) for policy in policies]
    return found[0] if found else None


def most_tokens(session: Session, model: PreTrainedModel) -> int | None:
    """Tokens that both sides can hold."""
    # Learned position tables end there, and past it even rotary ones are not what the model was trained for.
    config = model.config.get_text_config(decoder=True)
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "max_target_positions", None)
    if session.rope is not None:
        # Dynamic NTK begins there.
        positions = None
    return min((limit for limit in (session.max_length, positions) if limit), default=None)
