"""What a program is to be: its methods, its form of state, and what a target asks of the model.

Importing this module imports no torch: the command line makes its options from the fields.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from ..common.settings import check_count, check_settings, setting
from ..errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..models.cache_factory import ExportableCache
    from .inputs.modality import Modality


class Form(str, Enum):
    """Where a program keeps its cache."""

    RESIDENT = "resident"  # buffers of the module, mutated in place
    EXPLICIT = "explicit"  # a graph input and output, nothing mutated


class Logits(str, Enum):
    """Which logits a program returns."""

    LAST = "last"  # [batch, vocab], of each row's last token
    ALL = "all"  # [batch, length, vocab]


@dataclass(frozen=True)
class ProgramSpec:
    """What a program is to be: `ProgramSpec(prefill_chunk=128)` takes prompts in chunks of up to 128 tokens.

    Attributes:
        prefill_chunk: Longest chunk of a prompt; longer prompts go through in several. `DEFAULT_PREFILL_CHUNK`, or
            what the cache holds, by default. At 1 there is no prefill.
        score_length: Have a method `score` that takes 2 up to this many tokens and gives logits after each, as
            speculative decoding needs; 0 for none.
        buckets: Read lengths that get methods of their own, `decode_128` and `prefill_128` for 128; see
            `methods.length_buckets`.
        forward: Have a method `forward` that takes any length from 1 on; or what decides it, given the adapted cache.
        split: Have the methods `decode`, of one token, and `prefill`, of several; or what decides it. Without them
            `forward` serves every step.
        form: Where the state lives.
        logits: Which logits to return.
        modalities: What is fed beside text.
        attention: Name of one of our attention functions; None for the one that runs anywhere.
        experts: Experts implementation for models that have experts, or None to leave it.
        takes_lengths: Hand each step the lengths that RoPE's factors are chosen by, where these change before the cache
            is full. Only sessions of this package give them.
        adapt: Puts the layers into another layout, that of a target's own operators: `(model, cache) -> cache`.

    Raises:
        InputError: If a length is out of range, or a name is unknown. What the cache has to hold is checked with the
            cache.
    """

    prefill_chunk: int | None = setting(
        None,
        "Longest chunk of a prompt in one call.",
        flags=("--prefill-chunk",),
        metavar="N",
        kind=int,
        least=1,
        shown_default="256, or what fits",
    )
    score_length: int = 0
    buckets: Sequence[int] = ()
    forward: bool | Callable[[ExportableCache], bool] = False
    split: bool | Callable[[ExportableCache], bool] = True
    form: Form | str = Form.RESIDENT
    logits: Logits | str = Logits.LAST
    modalities: Sequence[Modality] = ()
    attention: str | None = None
    experts: str | None = None
    takes_lengths: bool = False
    adapt: Callable[[PreTrainedModel, ExportableCache], ExportableCache] | None = None

    def __post_init__(self) -> None:
        check_settings(self)
        length = self.score_length
        if not isinstance(length, int) or isinstance(length, bool) or length == 1 or length < 0:
            raise InputError(f"score_length is {length!r}; it must be an int of at least 2, or 0 for no such method")
        if isinstance(self.buckets, (str, int)) or not isinstance(self.buckets, Sequence):
            raise InputError(
                f"buckets is {self.buckets!r}; it must be a list of ints of at least 1, such as [128, 512]"
            )
        for bucket in self.buckets:
            check_count("a length bucket", bucket)
        for name, members in (("form", Form), ("logits", Logits)):
            value = getattr(self, name)
            if value not in tuple(members):
                raise InputError(f"{name} is {value!r}; it must be one of {', '.join(one.value for one in members)}")
            object.__setattr__(self, name, members(value))
        object.__setattr__(self, "buckets", tuple(self.buckets))
        object.__setattr__(self, "modalities", tuple(self.modalities))

    def decided(self, cache: ExportableCache) -> ProgramSpec:
        """The same with `forward` and `split` decided for a cache, which is in the target's layout already."""
        # Embeddings are fed through the prefill: it stays a method of its own with them.
        forward = self.forward(cache) and not self.modalities if callable(self.forward) else self.forward
        split = self.split(cache) or bool(self.modalities) if callable(self.split) else self.split
        return replace(self, forward=forward, split=split)
