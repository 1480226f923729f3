"""Options of sampling that commands share: checks, defaults from the checkpoint, and the line that shows the result."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from ..generation.checkpoint_settings import CheckpointSettings
    from ..generation.sampling_options import SamplingOptions


@dataclass(frozen=True)
class GivenSampling:
    """Options of sampling as a user gave them; None where one is left to the checkpoint.

    Attributes:
        greedy: True to always take the most probable token.

    Raises:
        InputError: If a value is out of range, or greedy choice would ignore it.
    """

    greedy: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        from ..generation.sampling_options import SamplingOptions

        if self.greedy and self.temperature:
            raise typer.BadParameter("cannot be combined with --temperature; pass one of them", param_hint="'--greedy'")
        # Checked before a model is opened, which may take long.
        self.over(SamplingOptions(1.0))

    def over(self, default: SamplingOptions) -> SamplingOptions:
        """Return the given options, with defaults for the others.

        Raises:
            InputError: If greedy choice would ignore a given option.
        """
        return default.over(**self._given())

    def settings(
        self, checkpoint: CheckpointSettings, max_new_tokens: int | None, default: SamplingOptions | None = None
    ) -> dict[str, Any]:
        """Return the settings that apply, by name; None for those without an effect.

        Args:
            checkpoint: Settings of the checkpoint.
            max_new_tokens: The limit that was given.
            default: Sampling where none is given; the checkpoint's by default.
        """
        found = asdict(self.over(default or checkpoint.sampling))
        if found["repetition_penalty"] is None:
            found["repetition_penalty"] = checkpoint.repetition_penalty
        limit = checkpoint.max_new_tokens if max_new_tokens is None else max_new_tokens
        length = checkpoint.max_length if limit is None else None
        return {**found, "max_new_tokens": limit, "max_length": length}

    def lines(
        self, checkpoint: CheckpointSettings, max_new_tokens: int | None, default: SamplingOptions | None = None
    ) -> list[str]:
        """Return the line that shows the settings that apply; none for greedy choice that nothing changes."""
        given = {**self._given(), "max_new_tokens": max_new_tokens}
        settings = self.settings(checkpoint, max_new_tokens, default)
        of_config = {**vars(checkpoint), **asdict(checkpoint.sampling)}
        of_config["repetition_penalty"] = checkpoint.repetition_penalty
        greedy = settings["temperature"] == 0
        if greedy:
            del settings["temperature"]
        groups: dict[bool, list[str]] = {True: [], False: []}
        for name, value in settings.items():
            if value is not None:
                groups[given.get(name) is None and of_config.get(name) == value].append(f"{name} {value}")
        if greedy and not groups[True]:
            return []
        line = ", ".join(["greedy" if greedy else "sampling", *groups[False]])
        line += f"; from generation_config: {', '.join(groups[True])}" if groups[True] else ""
        return [line if greedy else f"{line}; --greedy takes the most likely token"]

    def _given(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "greedy"}
        return {**given, "temperature": 0} if self.greedy else given
