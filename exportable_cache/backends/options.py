"""Base classes of the options of a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from ..common.settings import check_settings
from ..errors import InputError
from ..program.spec import Form, ProgramSpec

if TYPE_CHECKING:
    import torch

    from ..cache.spec import CacheSpec
    from ..models.quantization.spec import Quantization

Options = TypeVar("Options", bound="TargetOptions")


@dataclass(frozen=True)
class TargetOptions:
    """Checked options of a target. Each target has a subclass whose fields are its options.

    Raises:
        InputError: If a value is out of range, or two values conflict.
    """

    #: Name of the target.
    target: ClassVar[str]
    #: Options that were given by name, also those with their default value.
    _named: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def parse(cls: type[Options], given: Mapping[str, Any]) -> Options:
        """Parse the options of a call, a command line or a manifest.

        Raises:
            InputError: If an option is unknown, or its value is invalid.
        """
        known, whose = cls.known(given)
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise InputError(f"{whose} has no option {unknown[0]!r}; it knows {', '.join(known)}")
        options = cls(**given)
        object.__setattr__(options, "_named", frozenset(given))
        return options

    @classmethod
    def known(cls, given: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
        """Return the names of the options that can be combined with `given`, and their owner for messages."""
        return tuple(one.name for one in fields(cls)), f"target {cls.target!r}"

    def __post_init__(self) -> None:
        check_settings(self)

    def check_quantization(self, quantization: Quantization) -> None:
        """Check that these options support a quantisation whose schemes the target has.

        Raises:
            InputError: If they do not.
        """

    def copies(self, prefill_chunk: int | None) -> int:
        """Return the number of copies of the weights in a program's files.

        Args:
            prefill_chunk: Requested chunk of a prompt, None for the default.
        """
        return 1

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Check that a program with these options can have a dtype, before a model is loaded if its config names one.

        Raises:
            InputError: If it cannot.
        """

    def check_cache(self, cache: CacheSpec) -> None:
        """Check that a program with these options can have a cache.

        Raises:
            InputError: If it cannot.
        """

    def check_export(self, prefill_chunk: int | None, verify: bool) -> None:
        """Check what an export with these options needs, before a model is loaded.

        Args:
            prefill_chunk: Requested chunk of a prompt, None for the default.
            verify: True if the program is verified.

        Raises:
            InputError: If the options do not support the chunk.
            MissingDependencyError: If a package is missing.
        """

    def to_dict(self) -> dict[str, Any]:
        """Return the options that were given, for the manifest."""
        return {
            one.name: getattr(self, one.name)
            for one in fields(self)
            if one.name in self._named or one.default is MISSING or getattr(self, one.name) != one.default
        }


@dataclass(frozen=True)
class ResidentOptions(TargetOptions):
    """Options of a target whose programs contain their cache and update it in place.

    Attributes:
        buckets: Read lengths with a separate method, see `ProgramSpec`. Each adds code to the file, and no weights.
        score_length: If not 0, add a method that returns logits after each of up to this many tokens, for speculative
            decoding.
    """

    buckets: Sequence[int] = ()
    score_length: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.program_spec(ProgramSpec())

    def program_spec(self, asked: ProgramSpec) -> ProgramSpec:
        """Return the program for these options."""
        return replace(asked, form=Form.RESIDENT, buckets=self.buckets, score_length=self.score_length)
