"""The spec of a program: its methods, where its state lives, and what a target requires of the model.

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
    """Location of a program's cache."""

    RESIDENT = "resident"  # buffers of the module, mutated in place
    EXPLICIT = "explicit"  # a graph input and output, nothing mutated


class Logits(str, Enum):
    """Selection of the logits that a program returns."""

    LAST = "last"  # [batch, vocab], of each row's last token
    ALL = "all"  # [batch, length, vocab]


#: Largest rank of adapters by default, and the most slots for them.
LORA_RANK, MOST_LORA_SLOTS = 16, 1024


@dataclass(frozen=True)
class ProgramSpec:
    """The methods of a program and how they are traced.

    `ProgramSpec(prefill_chunk=128)` takes prompts in chunks of up to 128 tokens.

    Attributes:
        prefill_chunk: Longest chunk of a prompt; longer prompts take several steps. By default `DEFAULT_PREFILL_CHUNK`,
            or the capacity if that is less. At 1 there is no prefill method.
        score_length: If not 0, add a method `score` that takes 2 to this many tokens and returns logits after each, for
            speculative decoding.
        buckets: Read lengths with methods of their own, such as `decode_128` and `prefill_128`; see
            `methods.length_buckets`.
        forward: If True, add a method `forward` that takes one or more tokens; or a function of the adapted cache.
        split: If True, add the methods `decode` for one token and `prefill` for several; or a function of the adapted
            cache. Without them `forward` serves every step.
        fixed_chunk: If True, `prefill` takes exactly `prefill_chunk` tokens, and `decode` the rest of a prompt.
        form: Where the state lives.
        logits: Which logits to return.
        modalities: Inputs other than text.
        attention: Name of an attention function of this package; None for the portable one.
        experts: Implementation of experts for MoE models; None keeps the model's.
        shift: If True, add a method `shift`, which drops old tokens of the cache, see `program.shift`.
        takes_lengths: If True, each step takes the lengths that select RoPE factors, if these change within the
            capacity. Only sessions of this package provide them.
        adapt: Function `(model, cache) -> cache` that converts layers to the layout of a target's operators.
        adapts_items: True if these operators take any mask, so that tokens of an item may see each other.
        lora_slots: Number of LoRA adapters that the program holds at once, see `models.lora`; 0 for none. Each step
            then has a second method, such as `adapted_decode`, which takes the slot of each row.
        lora_inputs: If True, the slots' tensors are inputs of every step, after the cache; for explicit programs. All
            steps take adapters then; slot 0 is the model itself.
        lora_rank: Largest rank of an adapter.
        lora_targets: Names of the linear layers that adapters may change, see `lora.add_slots`; all by default.

    Raises:
        InputError: If a length is out of range, or a name is unknown. Limits of the cache are checked by `Program`.
    """

    prefill_chunk: int | None = setting(
        None,
        "Longest chunk of a prompt.",
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
    fixed_chunk: bool = False
    form: Form | str = Form.RESIDENT
    logits: Logits | str = Logits.LAST
    modalities: Sequence[Modality] = ()
    attention: str | None = None
    experts: str | None = None
    shift: bool = False
    takes_lengths: bool = False
    adapt: Callable[[PreTrainedModel, ExportableCache], ExportableCache] | None = None
    adapts_items: bool = False
    lora_slots: int = setting(
        0,
        "Slots for N LoRA adapters that a session can switch.",
        flags=("--lora-slots",),
        metavar="N",
        kind=int,
        least=0,
        shown_default=False,
    )
    lora_inputs: bool = False
    lora_rank: int = setting(
        LORA_RANK,
        "Largest rank of these adapters.",
        flags=("--lora-rank",),
        metavar="R",
        kind=int,
        least=1,
    )
    lora_targets: Sequence[str] = setting(
        (),
        "Linear layers that these adapters may change, such as q_proj; all of the decoder by default.",
        flags=("--lora-targets",),
        metavar="NAME",
        repeats=True,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        length = self.score_length
        if not isinstance(length, int) or isinstance(length, bool) or length == 1 or length < 0:
            raise InputError(f"score_length must be an int of at least 2, or 0 for no such method, got {length!r}")
        if isinstance(self.buckets, (str, int)) or not isinstance(self.buckets, Sequence):
            raise InputError(f"buckets must be a list of ints of at least 1, such as [128, 512], got {self.buckets!r}")
        for bucket in self.buckets:
            check_count("a length bucket", bucket)
        for name, members in (("form", Form), ("logits", Logits)):
            value = getattr(self, name)
            if value not in tuple(members):
                raise InputError(f"{name} must be one of {', '.join(one.value for one in members)}, got {value!r}")
            object.__setattr__(self, name, members(value))
        object.__setattr__(self, "buckets", tuple(self.buckets))
        # Names separated by commas too, as on a command line, which gives None for an option that was not given.
        if self.lora_targets is not None and not isinstance(self.lora_targets, (str, Sequence)):
            raise InputError(f"lora_targets must be names of linear layers, got {self.lora_targets!r:.100}")
        given = (self.lora_targets,) if isinstance(self.lora_targets, str) else tuple(self.lora_targets or ())
        names = tuple(name.strip() for one in given for name in str(one).split(","))
        if not all(names):
            raise InputError(f"lora_targets must be names of linear layers, got {self.lora_targets!r}")
        if names and not self.lora_slots:
            raise InputError(f"lora_targets requires lora_slots, got {', '.join(names)}; pass lora_slots=1 or more")
        if self.lora_rank != LORA_RANK and not self.lora_slots:
            raise InputError(f"lora_rank requires lora_slots, got {self.lora_rank}; pass lora_slots=1 or more")
        if self.lora_slots > MOST_LORA_SLOTS:
            raise InputError(f"lora_slots must be at most {MOST_LORA_SLOTS}, got {self.lora_slots}; lower it")
        object.__setattr__(self, "lora_targets", names)
        object.__setattr__(self, "modalities", tuple(self.modalities))

    def decided(self, cache: ExportableCache) -> ProgramSpec:
        """Return this spec with `forward` and `split` evaluated for a cache in the target's layout."""
        # Embeddings are fed by the prefill method, so it must exist.
        forward = self.forward(cache) and not self.modalities if callable(self.forward) else self.forward
        split = self.split(cache) or bool(self.modalities) if callable(self.split) else self.split
        return replace(self, forward=forward, split=split)
