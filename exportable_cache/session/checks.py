"""What a session refuses, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import CacheFullError, InputError

#: Limits of the strings that end an answer: each token's text is searched for all of them.
MOST_STOPS, MOST_STOP_CHARACTERS = 64, 1024


@dataclass(frozen=True)
class ProgramLimits:
    """What a program's steps take.

    Attributes:
        batch_size: Rows.
        vocab_size: Token ids run from 0 to vocab_size - 1.
        device: Where inputs are expected.
        codebooks: Ids of each token, where these are several.
    """

    batch_size: int
    vocab_size: int
    device: torch.device
    codebooks: int | None = None

    def dims(self, *names: str) -> tuple[str, ...]:
        """Of a tensor of tokens: these, and one more where a token is several ids."""
        return names if self.codebooks is None else (*names, "codebooks")


def check_no_autocast(device: torch.device) -> None:
    """Refuse to run a program under other dtypes than it was made with.

    Raises:
        InputError: Under `torch.autocast`.
    """
    if torch.is_autocast_enabled(device.type):
        raise InputError(
            "torch.autocast is on, but a session computes in the dtypes that its program was made with; leave the "
            f"autocast block, and load or export the model in {torch.get_autocast_dtype(device.type)} instead"
        )


def check_rows_may_differ(equal_rows: bool, found: str) -> None:
    """Refuse rows of different length where the model takes one length for all.

    Args:
        equal_rows: Whether it does, see `program.lengths`.
        found: What would make them differ, for the message.

    Raises:
        InputError: Then.
    """
    if equal_rows:
        raise InputError(
            f"{found}, but this model's own code asks for one length of all rows; feed rows of equal length, or "
            "one row at a time (batch_size=1)"
        )


def check_pieces(sizes: Sequence[int]) -> None:
    """Refuse a prompt that would go through in steps of which one, by having one token, ends it (Unlimited OCR).

    Args:
        sizes: Tokens of each step.

    Raises:
        InputError: Then.
    """
    if len(sizes) > 1 and 1 in sizes:
        raise InputError(
            f"the prompt would go through in steps of {list(sizes)} tokens, and this model takes a step of one token "
            "for the end of its prompt; use a larger prefill_chunk, or another text around the images"
        )


def check_ids(name: str, ids: torch.Tensor, dims: tuple[str, ...], limits: ProgramLimits) -> None:
    """Refuse token ids that a program cannot take.

    Args:
        name: Of the argument, for the message.
        ids: What was passed, to be int64 with these dimensions.
        dims: `("batch", "length")`, `("batch",)` or `("length",)`, with "codebooks" behind where a token is several.
        limits: Of the program.

    Raises:
        InputError: On another type, shape, dtype or device, on no token at all, or on an id outside the vocabulary.
    """
    batch_size, vocab_size, device = limits.batch_size, limits.vocab_size, limits.device
    shape = f"[{', '.join(dims)}]"
    if not isinstance(ids, torch.Tensor):
        raise InputError(
            f"{name} is a {type(ids).__name__}; pass an int64 tensor {shape}, as torch.tensor makes of a list"
        )
    if ids.dim() != len(dims):
        rows = f" with batch {batch_size}" if "batch" in dims else ""
        raise InputError(f"{name} has shape {list(ids.shape)}; it must be {shape}{rows}")
    if "batch" in dims and ids.shape[0] != batch_size:
        raise InputError(
            f"{name} has {ids.shape[0]} rows, this session runs {batch_size}; pass {batch_size} rows, "
            f"or allocate or export with batch_size={ids.shape[0]}"
        )
    if "codebooks" in dims and ids.shape[-1] != limits.codebooks:
        raise InputError(
            f"{name} has {ids.shape[-1]} ids for each token; this model takes {limits.codebooks}: pass {shape}"
        )
    if ids.dtype != torch.int64:
        raise InputError(f"{name} is {ids.dtype}; it must be torch.int64: pass {name}.to(torch.int64)")
    if ids.layout is not torch.strided:
        raise InputError(f"{name} is {ids.layout}; it must be dense: pass {name}.to_dense()")
    if ids.device != device:
        raise InputError(f"{name} is on {ids.device}, the session runs on {device}; pass {name}.to({str(device)!r})")
    if ids.numel() == 0:
        raise InputError(f"{name} has shape {list(ids.shape)}: the prompt is empty; pass at least one token per row")
    wrong = (ids < 0) | (ids >= vocab_size)
    if bool(wrong.any()):
        where = wrong.nonzero()[0].tolist()
        raise InputError(
            f"{name}{where} is token id {int(ids[tuple(where)])}, outside the vocabulary of 0 to {vocab_size - 1}; "
            "tokenize with the model's own tokenizer"
        )


def check_one_id_a_token(codebooks: int | None) -> None:
    """Refuse to choose tokens of several ids.

    Raises:
        InputError: If a token is that.
    """
    if codebooks is not None:
        raise InputError(
            f"a token of this model is {codebooks} ids, each of a codebook, and how they follow each other is the "
            "model's own; feed rows of ids with prefill and decode, and choose from the logits of each codebook"
        )


def check_max_new_tokens(max_new_tokens: int | None) -> None:
    """Refuse a limit that is no positive int.

    Raises:
        InputError: If it is neither that nor None.
    """
    if max_new_tokens is None:
        return
    if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
        raise InputError(
            f"max_new_tokens is {max_new_tokens!r}; it must be an int of at least 1, or None for as many as fit"
        )


def check_room(held: int, limit: int | None, tokens: int, max_new_tokens: int | None = None) -> None:
    """Refuse tokens for which there are no slots.

    Args:
        held: Tokens that the fullest row holds.
        limit: Tokens that a row can hold in all, or None for any number.
        tokens: To be fed to every row.
        max_new_tokens: To be generated after them, if that number was asked for.

    Raises:
        CacheFullError: If they do not fit.
    """
    if limit is None:
        return
    room = limit - held
    holds = f"the cache holds {held} of at most {limit} tokens"
    if tokens > room:
        remedy = "reset() the session, rewind() it, or allocate or export with a larger max_cache_len"
        if tokens > limit:
            remedy = f"shorten the prompt, or allocate or export with max_cache_len of at least {held + tokens}"
        raise CacheFullError(f"{holds}, {tokens} more do not fit; {remedy}")
    # The last new token is not fed back, so it needs no slot.
    if max_new_tokens is not None and tokens + max_new_tokens - 1 > room:
        raise CacheFullError(
            f"{holds}: after a prompt of {tokens} tokens max_new_tokens may be at most {room - tokens + 1}, "
            f"got {max_new_tokens}; lower it, leave it out to stop when the cache is full, "
            "or allocate or export with a larger max_cache_len"
        )


def check_stops(strings: Sequence[str]) -> None:
    """Check the strings that end an answer.

    Raises:
        InputError: If one is empty or not text, or there are more or longer ones than the limits.
    """
    if isinstance(strings, str) or any(not isinstance(text, str) or not text for text in strings):
        raise InputError(f"stop must be texts of at least one character, got {strings!r:.80}; leave out what is empty")
    if len(strings) > MOST_STOPS:
        raise InputError(f"stop must be at most {MOST_STOPS} texts, got {len(strings)}; leave some out")
    longest = max(map(len, strings), default=0)
    if longest > MOST_STOP_CHARACTERS:
        raise InputError(
            f"stop must be texts of at most {MOST_STOP_CHARACTERS} characters, got one of {longest}; shorten it"
        )


def split_stops(stop: int | str | Sequence[int | str] | None, vocab_size: int) -> tuple[list[int], list[str]]:
    """Stop tokens and stop strings, from one, several or none of either.

    Raises:
        InputError: If one is neither a token id of the vocabulary nor a string of at least one character, or strings
            are more or longer than `check_stops` allows.
    """
    given = [] if stop is None else [stop] if isinstance(stop, (int, str)) else list(stop)
    tokens, strings = [], []
    for item in given:
        if isinstance(item, str) and item:
            strings.append(item)
        elif isinstance(item, int) and not isinstance(item, bool) and 0 <= item < vocab_size:
            tokens.append(item)
        else:
            raise InputError(
                f"stop has {item!r}; pass token ids from 0 to {vocab_size - 1}, or strings of at least one character"
            )
    check_stops(strings)
    return tokens, strings
