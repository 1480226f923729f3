"""What the check of a package asks: a prompt, and of encoders the input, in files beside the program."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..errors import BundleError
from ..session.session import Session

if TYPE_CHECKING:
    from ..bundle.bundle import Bundle
    from ..program.methods import ProgramMethod

#: Token ids before and behind images or sound, ids of an encoder's input, and how many are generated. The first ids are
#: often special.
_FIRST, _BEFORE, _BEHIND, _ENCODED, _NEW = 3, 4, 4, 11, 16
#: A name that means nothing to a shell.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Question:
    """A prompt and what the session answers.

    Attributes:
        prompt: Token ids.
        tokens: That follow, one by one the likeliest.
        encoded: Ids for the encoder of an encoder-decoder.
        values: Numbers for it instead, as a file's content.
        inputs: Files' contents by the names that a processor gives them, one item of each.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    encoded: tuple[int, ...] = ()
    values: bytes = b""
    inputs: Mapping[str, bytes] = field(default_factory=dict)


def question_of(bundle: Bundle) -> Question:
    """Ask the session of a bundle, on this machine.

    Raises:
        BundleError: If the cache is too short to ask anything.
        InputError: If no step takes an image's tokens, which see each other, or a prompt that sees itself.
    """
    session = Session.from_bundle(bundle)
    methods = bundle.manifest.description().methods
    placeholders = {method.item.token_id for method in methods.values() if method.item is not None}
    text = (token for token in itertools.count(_FIRST) if token not in placeholders)
    prompt = list(itertools.islice(text, _BEFORE))
    given: dict[str, Any] = {}
    fixed: dict[str, Any] = {}
    for method in methods.values():
        if method.item is None:
            continue
        prompt += [method.item.token_id] * method.outputs[0].sizes({})[0]
        given |= {spec.name: _signal(spec.sizes({})).to(getattr(torch, spec.dtype)) for spec in method.inputs}
        fixed |= {name: one.tensor() for name, one in method.item.fixed.items()}
    prompt += itertools.islice(text, _BEHIND)
    room = _NEW if session.max_length is None else min(_NEW, session.max_length - len(prompt))
    if room < 1:
        raise BundleError(
            f"{bundle.path} holds {session.max_length} tokens, and the check takes {len(prompt) + 1}; export it with "
            "a larger max_cache_len"
        )
    encoded: tuple[int, ...] = ()
    values = b""
    if "encode" in methods:
        main = _encoder_input(methods["encode"])
        session.encode(main)
        if main.dtype == torch.int64:
            encoded = tuple(main[0].tolist())
        else:
            values = _file(main)
    found = tuple(int(token) for token in session.generate(torch.tensor([prompt]), room, **given, **fixed))
    return Question(tuple(prompt), found, encoded, values, {_plain(name): _file(given[name]) for name in given})


def _encoder_input(method: ProgramMethod) -> torch.Tensor:
    spec = method.inputs[0]
    least = max(method.min_length, method.multiple)
    length = min(max(least, _ENCODED), method.max_length)
    length -= 0 if method.pads else length % method.multiple
    if spec.dtype == "int64":
        return _FIRST + torch.arange(length)[None] % _ENCODED
    return _signal(spec.sizes({"batch": 1, "length": length})).to(getattr(torch, spec.dtype))


def _signal(sizes: Sequence[int]) -> torch.Tensor:
    """A wave: not silence, and no noise that another run would not make."""
    count = torch.Size(sizes).numel()
    return (torch.arange(count) * 0.37).sin().reshape(sizes)


def _file(tensor: torch.Tensor) -> bytes:
    """As the C++ program reads it: float32, or int64."""
    return (tensor.float() if tensor.is_floating_point() else tensor.long()).numpy().tobytes()


def _plain(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise BundleError(f"an input of the program is named {name[:80]!r}, which no script can hold; export it again")
    return name
