"""Input stages: each checks what a user gives of its kind and turns it into inputs of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ...errors import InputError
from ..rows import TokenRows
from .encoder import EncoderStage
from .image import ItemPlaces
from .items import CrossItemStage, ItemStage

if TYPE_CHECKING:
    from ...program.methods import ProgramMethod
    from ..checks import ProgramLimits
    from ..state import SequenceState
    from ..stepper import ProgramStepper
    from .image import PlacedImages


@dataclass(frozen=True)
class Prompt:
    """What is fed, checked but for what depends on where the session is.

    Attributes:
        rows: Its token ids.
        items: What encoders are to be given for it, item by item, by name of the method.
    """

    rows: TokenRows
    items: Mapping[str, list[tuple[torch.Tensor, ...]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Steps:
    """A prompt as the steps take it.

    Attributes:
        fed: Token ids int64 [batch, length], or embeddings [batch, length, hidden_size].
        rows: Where each row's tokens are.
        sizes: Tokens of each step, where that is not free.
        further: What steps take besides, by name of the input, [..., length].
        first: What the first step takes besides, by name of the input.
        placed: Where its images are, counted from its first token, their rotary offset from there.
    """

    fed: torch.Tensor
    rows: TokenRows
    sizes: Sequence[int] | None = None
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)
    first: Mapping[str, torch.Tensor] = field(default_factory=dict)
    placed: PlacedImages | None = None

    @property
    def are_ids(self) -> bool:
        """Whether tokens are fed by id."""
        return not self.fed.is_floating_point()


# What processors give beside the main inputs, and says which tokens stand for something else.
_KINDS = ("token_type_ids", "mm_token_type_ids")


class InputStages:
    """Text, which every program takes, and the stages of what else this one does.

    Args:
        methods: Of the program, by name.
        placeholders: Token id by name of the method whose embeddings it stands for, such as `{"encode_image": 32000}`.
        limits: Of the program.

    Attributes:
        encoder: That of an encoder-decoder, None where there is none.
        placeholders: Token ids that stand for something else than text.
    """

    def __init__(
        self, methods: Mapping[str, ProgramMethod], placeholders: Mapping[str, int], limits: ProgramLimits
    ) -> None:
        self.limits = limits
        self.encoder = EncoderStage(methods["encode"], limits) if "encode" in methods else None
        self.placeholders = tuple(placeholders.values())
        self._stages = tuple(_item_stage(methods[name], token, limits) for name, token in placeholders.items())
        self._places = ItemPlaces(self._stages, methods, limits.device)

    def check(self, input_ids: Any, attention_mask: Any, given: Mapping[str, Any], state: SequenceState) -> Prompt:
        """The prompt, with what was given beside its ids.

        Args:
            input_ids, attention_mask: See `TokenRows.checked`.
            given: By name, as a processor gives it.
            state: For which an encoder has to have run, where there is one.

        Raises:
            InputError: If an input is unknown, or not what its stage takes. Nothing has changed then.
        """
        check_names(given)
        rows = TokenRows.checked(input_ids, attention_mask, self.limits)
        if self.encoder is not None:
            self.encoder.check_encoded(state)
            if not rows.are_even:
                # Decoders of encoders ask their cache for one length of all rows, the relative positions of T5 for one.
                raise InputError(
                    f"the rows hold {list(rows.lengths)} tokens, and a decoder behind an encoder takes rows of equal "
                    "length; feed as many tokens in every row"
                )
        if self._stages:
            return self._with_items(rows, given)
        if given:
            raise InputError(
                f"this session takes token ids and their attention_mask only, got {', '.join(given)}; make it, or "
                "export, with modalities="
            )
        return Prompt(rows)

    def check_given(self, encoded: Sequence[torch.Tensor], methods: Mapping[str, ProgramMethod]) -> None:
        """Refuse tensors of a file that no encoder of this program can have given; none at all are right.

        Raises:
            ValueError: Then.
        """
        if not encoded:
            return
        if self.encoder is not None:
            self.encoder.check_given(encoded)
            return
        cross = next((stage for stage in self._stages if isinstance(stage, CrossItemStage)), None)
        if cross is None:
            raise ValueError(f"{len(encoded)} tensors of an encoder, of a program without one")
        cross.check_given(encoded, methods)

    def steps(self, prompt: Prompt, stepper: ProgramStepper) -> Steps:
        """A checked prompt as steps from where the session is; encoders run for what it holds."""
        steps = Steps(prompt.rows.ids, prompt.rows)
        for stage in self._stages:
            steps = stage.extend(steps, prompt, stepper)
        return self._places.extend(steps, prompt, stepper) if self._stages else steps

    def _with_items(self, rows: TokenRows, given: Mapping[str, Any]) -> Prompt:
        is_item = torch.zeros_like(rows.ids, dtype=torch.bool)
        items: dict[str, list[tuple[torch.Tensor, ...]]] = {}
        for stage in self._stages:
            items |= stage.check(rows, {name: given[name] for name in given if name in stage.names})
            is_item |= rows.mask_of(stage.token)
        self._places.check(rows)
        if self._places.sees_prompt and not items and any(name in given for name in _KINDS):
            raise InputError(
                "the tokens of a prompt see each other where it has items, and this one has none; leave out token "
                "types for one whose tokens see what came before"
            )
        names = [name for stage in self._stages for name in stage.names]
        for name in given:
            if name in _KINDS:
                # Zeros say nothing: they mark a prefix that sees itself.
                if rows.are_even and bool((given[name] != 0).any()) and not torch.equal(given[name] != 0, is_item):
                    raise InputError(
                        f"{name} marks other tokens than the prompt's placeholders; pass what the processor gave"
                    )
            elif name not in names:
                taken = ", ".join(stage.names[0] for stage in self._stages)
                raise InputError(f"prefill takes {taken} beside input_ids, got {name!r}; leave it out")
        return Prompt(rows, items)


#: Arguments of transformers' `generate` that have another name here.
_ELSEWHERE = {
    "do_sample": "temperature above 0 samples, 0 is greedy",
    "max_length": "pass max_new_tokens, which counts new tokens only",
    "num_beams": "use exportable_cache.decoding.beam_search",
    "eos_token_id": "pass stop, with token ids or strings",
    "stop_strings": "pass stop, with token ids or strings",
    "tokenizer": "leave it out, the session has its own",
    "past_key_values": "leave it out, the session has its own cache",
    "assistant_model": "pass draft=DraftModel(session)",
    "prompt_lookup_num_tokens": "pass draft=PromptLookup()",
}


def check_names(given: Mapping[str, Any]) -> None:
    """Refuse keywords whose values are no tensors: those are settings, which no stage of an input takes.

    Raises:
        InputError: If there is one; it names the setting that does the same here, if there is one.
    """
    for name, value in given.items():
        if not isinstance(value, (torch.Tensor, list, tuple)) and not hasattr(value, "__array__"):
            remedy = _ELSEWHERE.get(name, "leave it out, or see the arguments of Session.generate")
            raise InputError(f"{name} is {value!r:.60}, and sessions have no such argument; {remedy}")


def _item_stage(method: ProgramMethod, token: int, limits: ProgramLimits) -> ItemStage:
    is_cross = method.item is not None and method.item.tiles > 0
    return (CrossItemStage if is_cross else ItemStage)(method, token, limits.device)
