"""Input stages: each checks the inputs of one kind and turns them into inputs of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ...errors import InputError
from ..rows import TokenRows
from .encoder import EncoderStage
from .image import ItemPositions
from .items import CrossItemStage, ItemStage

if TYPE_CHECKING:
    from ...program.methods import ProgramMethod
    from ..checks import ProgramLimits
    from ..state import SequenceState
    from ..stepper import ProgramStepper
    from .image import PlacedImages


@dataclass(frozen=True)
class Prompt:
    """A checked prompt, independent of the session's position.

    Attributes:
        rows: Token ids.
        items: Inputs of the encoders for each item, by name of the method.
    """

    rows: TokenRows
    items: Mapping[str, list[tuple[torch.Tensor, ...]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Steps:
    """The inputs of the steps that feed a prompt.

    Attributes:
        fed: Token ids int64 [batch, length], or embeddings [batch, length, hidden_size].
        rows: Token ids and lengths of the rows.
        sizes: Number of tokens in each step; None if it is free.
        extra: Further inputs of all steps by name, [..., length].
        first: Further inputs of the first step by name.
        placed: Images, with positions and rotary offsets counted from the first token.
    """

    fed: torch.Tensor
    rows: TokenRows
    sizes: Sequence[int] | None = None
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)
    first: Mapping[str, torch.Tensor] = field(default_factory=dict)
    placed: PlacedImages | None = None

    @property
    def are_ids(self) -> bool:
        """True if tokens are fed by id."""
        return not self.fed.is_floating_point()


# Outputs of processors that mark the tokens which represent items.
_KINDS = ("token_type_ids", "mm_token_type_ids")


class InputStages:
    """Checks the text of a prompt, and runs the stages of the program's other inputs.

    Args:
        methods: Methods of the program by name.
        placeholders: Placeholder token of each method that encodes items, such as `{"encode_image": 32000}`.
        limits: Limits of the program.

    Attributes:
        encoder: Stage of an encoder-decoder's encoder; None without one.
        placeholders: Token ids that represent items.
    """

    def __init__(
        self, methods: Mapping[str, ProgramMethod], placeholders: Mapping[str, int], limits: ProgramLimits
    ) -> None:
        self.limits = limits
        self.encoder = EncoderStage(methods["encode"], limits) if "encode" in methods else None
        self.placeholders = tuple(placeholders.values())
        self._stages = tuple(_item_stage(methods[name], token, limits) for name, token in placeholders.items())
        self._positions = ItemPositions(self._stages, methods, limits.device)

    def check(self, input_ids: Any, attention_mask: Any, given: Mapping[str, Any], state: SequenceState) -> Prompt:
        """Check the inputs of a prompt.

        Args:
            input_ids: See `TokenRows.checked`.
            attention_mask: See `TokenRows.checked`.
            given: Further outputs of a processor, by name.
            state: State of the session. Its encoder must have run, if it has one.

        Raises:
            InputError: If an input is unknown, or its stage refuses it. Nothing has changed then.
        """
        check_names(given)
        rows = TokenRows.checked(input_ids, attention_mask, self.limits)
        if self.encoder is not None:
            self.encoder.check_encoded(state)
            if not rows.are_even:
                # Decoders ask the cache for one length of all rows, for example for the relative positions of T5.
                raise InputError(
                    f"rows must have equal length for an encoder-decoder, got {list(rows.lengths)}; feed the same "
                    "number of tokens in every row"
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
        """Check the encoder output of a file; it may be empty.

        Args:
            encoded: Tensors of the file.
            methods: Methods of the program.

        Raises:
            ValueError: If no encoder of this program can have computed it.
        """
        if not encoded:
            return
        if self.encoder is not None:
            self.encoder.check_given(encoded)
            return
        cross = next((stage for stage in self._stages if isinstance(stage, CrossItemStage)), None)
        if cross is None:
            raise ValueError(f"a program without an encoder must have no encoder output, got {len(encoded)} tensors")
        cross.check_given(encoded, methods)

    def steps(self, prompt: Prompt, stepper: ProgramStepper) -> Steps:
        """Return the steps of a checked prompt from the session's position. This runs the encoders of its items."""
        steps = Steps(prompt.rows.ids, prompt.rows)
        for stage in self._stages:
            steps = stage.extend(steps, prompt, stepper)
        return self._positions.extend(steps, prompt, stepper) if self._stages else steps

    def _with_items(self, rows: TokenRows, given: Mapping[str, Any]) -> Prompt:
        is_item = torch.zeros_like(rows.ids, dtype=torch.bool)
        items: dict[str, list[tuple[torch.Tensor, ...]]] = {}
        for stage in self._stages:
            items |= stage.check(rows, {name: given[name] for name in given if name in stage.names})
            is_item |= rows.mask_of(stage.token)
        self._positions.check(rows)
        if self._positions.sees_prompt and not items and any(name in given for name in _KINDS):
            raise InputError(
                "token types must be left out for a prompt without items, because they make its tokens attend to each "
                "other"
            )
        names = [name for stage in self._stages for name in stage.names]
        for name in given:
            if name in _KINDS:
                # Zeros are ignored, because they only mark a prefix that attends to itself.
                if rows.are_even and bool((given[name] != 0).any()) and not torch.equal(given[name] != 0, is_item):
                    raise InputError(
                        f"{name} must mark the prompt's placeholders, got other tokens; pass the processor's outputs"
                    )
            elif name not in names:
                taken = ", ".join(stage.names[0] for stage in self._stages)
                raise InputError(f"prefill takes {taken} besides input_ids, got {name!r}; leave it out")
        return Prompt(rows, items)


#: Arguments of transformers' `generate` that have another name here, with the remedy.
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
    """Check that all keywords are tensors, because others are settings that no stage takes.

    Raises:
        InputError: If one is a setting; the message names the argument for it, if there is one.
    """
    for name, value in given.items():
        if not isinstance(value, (torch.Tensor, list, tuple)) and not hasattr(value, "__array__"):
            remedy = _ELSEWHERE.get(name, "leave it out, or see the arguments of Session.generate")
            raise InputError(f"{name} is not an argument of sessions, got {value!r:.60}; {remedy}")


def _item_stage(method: ProgramMethod, token: int, limits: ProgramLimits) -> ItemStage:
    is_cross = method.item is not None and method.item.tiles > 0
    return (CrossItemStage if is_cross else ItemStage)(method, token, limits.device)
