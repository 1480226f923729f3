"""Input stages: each checks the inputs of one kind and turns them into inputs of steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ...errors import InputError
from ...program.inputs.multimodal import IMAGE_IDS
from ...program.methods import POSITIONS
from ..images import Pattern, grid_pattern, image_ids, placed_images, rope_positions, runs, whole_chunks
from ..rows import Prompt, Steps, TokenRows
from .encoder import EncoderStage
from .items import CrossItemStage, ItemStage

if TYPE_CHECKING:
    from ...program.methods import ProgramMethod
    from ..checks import ProgramLimits
    from ..state import SequenceState
    from ..stepper import ProgramStepper


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

    @property
    def sees_prompt(self) -> bool:
        """True if all tokens of a prompt with items attend to each other."""
        return self._positions.sees_prompt

    def most_items(self, slots: int | None, methods: Mapping[str, ProgramMethod]) -> dict[str, int | None]:
        """Return the most items of each kind, such as `{"image": 4}`; see `ItemStage.most_items`."""
        stages = {stage.method.name.removeprefix("encode_"): stage for stage in self._stages}
        return {kind: stage.most_items(slots, methods) for kind, stage in stages.items()}

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
        if given:
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
    "cache": "leave it out, the session has its own cache",
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


class ItemPositions:
    """Computes the inputs that the steps of a prompt with items take besides embeddings.

    Args:
        stages: Stages of the items.
        methods: Methods of the program.
        device: Device of the inputs.
    """

    def __init__(
        self, stages: tuple[ItemStage, ...], methods: Mapping[str, ProgramMethod], device: torch.device
    ) -> None:
        steps = [each for each in methods.values() if each.is_step]
        extra = {spec.name: spec for step in steps for spec in step.inputs}
        self.stages = stages
        self.device = device
        self.longest_step = max((step.max_length for step in steps if not step.takes_ids), default=0)
        self.stays_whole = IMAGE_IDS.name in extra
        self.has_axes = POSITIONS in extra
        rules = {one.method.item.sees for one in stages if one.method.item is not None}
        self.sees_prompt, self.sees_items = "prompt" in rules, "items" in rules
        axes = int(extra[POSITIONS].shape[0]) if self.has_axes else 0
        self.patterns = [_pattern(stage, axes) for stage in stages]
        # A method without `item` is from an older bundle, whose items are all seen.
        seen = [stage.method.item is None or stage.method.item.sees for stage in stages]
        self.seen = torch.tensor([index for index, sees in enumerate(seen) if sees])

    def check(self, rows: TokenRows) -> None:
        """Check that each item of a prompt fits one step.

        Raises:
            InputError: If an item is longer than a step, or its rows differ in length and must not.
        """
        if self.has_axes:
            self._check_contiguous(rows)
        if not self.stays_whole or not self._is_seen(rows).any():
            return
        if not rows.are_even:
            raise InputError(
                f"rows must have equal length if the tokens of their items attend to each other, got "
                f"{list(rows.lengths)}; pass rows of equal length"
            )
        self._sizes(rows)

    def extend(self, steps: Steps, prompt: Prompt, stepper: ProgramStepper) -> Steps:
        """Add the image indices, rotary positions and chunk sizes that this program takes with embeddings."""
        if steps.are_ids or not (self.has_axes or self.stays_whole):
            return steps
        rows = prompt.rows
        extra, sizes, placed = {}, None, None
        if self.stays_whole:
            ids = self._ids(rows)
            sizes = self._sizes(rows)
            extra[IMAGE_IDS.name] = ids.to(self.device)
            placed = placed_images(image_ids(self._kinds(rows) >= 0))
        if self.has_axes:
            state = stepper.state
            first = state.length + state.images.deltas(state.length)
            positions, placed = rope_positions(self._kinds(rows), rows.lengths, first, self.patterns)
            extra[POSITIONS] = positions.to(self.device)
        return replace(steps, sizes=sizes, extra=extra, placed=placed)

    def _check_contiguous(self, rows: TokenRows) -> None:
        for index, (stage, pattern) in enumerate(zip(self.stages, self.patterns)):
            for row in (self._kinds(rows) == index).tolist():
                for start, end in runs(row):
                    if (end - start) % pattern.tokens:
                        raise InputError(
                            f"a run of token id {stage.token} must be a multiple of the {pattern.tokens} embeddings "
                            f"that {stage.method.name} gives for an item, got {end - start}; build the prompt with the "
                            "model's own processor"
                        )

    def _kinds(self, rows: TokenRows) -> torch.Tensor:
        """Return the index of the stage of each token's item, -1 on text: int64 [batch, length] on the host."""
        kinds = torch.full(rows.ids.shape, -1, dtype=torch.int64)
        for index, stage in enumerate(self.stages):
            kinds[rows.mask_of(stage.token).cpu()] = index
        return kinds

    def _is_seen(self, rows: TokenRows) -> torch.Tensor:
        return torch.isin(self._kinds(rows), self.seen)

    def _ids(self, rows: TokenRows) -> torch.Tensor:
        """Return equal values for tokens that see each other, -1 for others: int64 [batch, length]."""
        seen = self._is_seen(rows)
        if self.sees_items:
            return torch.where(seen, 0, -1)
        return torch.zeros_like(rows.ids) if self.sees_prompt and seen.any() else image_ids(seen)

    def _sizes(self, rows: TokenRows) -> list[int]:
        """Return the sizes of the steps of a prompt, in which tokens that see each other are in one step."""
        ids = self._ids(rows)
        if self.sees_items and bool((ids >= 0).any()):
            places = (ids >= 0).any(0).nonzero().flatten()
            ids[:, int(places[0]) : int(places[-1]) + 1] = 0
        return whole_chunks(ids, self.longest_step)


def _pattern(stage: ItemStage, axes: int) -> Pattern:
    """Return the rotary positions of an item on `axes` axes."""
    tokens, item, grid = stage.tokens_per_item, stage.method.item, stage.method.grid
    if item is not None and item.positions:
        return Pattern(torch.tensor(item.positions), item.advance)
    if item is None and grid is not None:
        time, height, width = grid
        merged = math.isqrt(time * height * width // tokens)
        return grid_pattern(height // merged, width // merged)
    return Pattern(torch.arange(tokens).expand(max(axes, 1), tokens), tokens)
