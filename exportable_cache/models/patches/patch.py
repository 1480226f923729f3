"""One function or method of another package that is replaced: where it is, why, by what, and the digest of it."""

from __future__ import annotations

import hashlib
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from importlib import import_module, metadata
from types import ModuleType
from typing import Any

from ...errors import UnsupportedModelError

#: Attribute of a replacement: the function that it stands for.
ORIGINAL = "_exportable_cache_original"
_MODELS = "transformers.models."


@dataclass(frozen=True)
class Patch:
    """A replacement for one function or method of a modeling file.

    Attributes:
        file: Below `transformers.models`, as `gpt_neo.modeling_gpt_neo`; of another package, the whole module name.
        name: `function`, or `Class.method`.
        replace: Makes the replacement from the original. It acts where a cache of ours is stepped, or a step is traced,
            and hands everything else to the original.
        reason: What the original does that a static cache, or a traced step, cannot use.
        digests: Of the sources that the replacement was written for, one for each release that has a source of its own.
        source: Name of what the digest is taken of, `name` by default: the whole class where the replacement stands for
            several of its methods, and several names, apart by spaces, where it stands for several classes.
        package: Whose function it is.
        url: Of the original, where that is not a modeling file.
        needed: Whether a model is wrong without it. Where it is not, an original that has changed is left alone.
    """

    file: str
    name: str
    replace: Callable[[Callable], Callable]
    reason: str
    digests: tuple[str, ...]
    source: str | None = None
    package: str = "transformers"
    url: str | None = None
    needed: bool = True

    @property
    def label(self) -> str:
        """What reports call it: the class for a `forward`, the function's or method's own name otherwise."""
        return self.name.removesuffix(".forward").rsplit(".", 1)[-1]

    @property
    def module_name(self) -> str:
        """Of the module that has the name."""
        return _MODELS + self.file if self.package == "transformers" else self.file

    @property
    def link(self) -> str:
        """The original in its repository."""
        if self.url is not None:
            return self.url
        path = self.module_name.replace(".", "/")
        return f"https://github.com/huggingface/transformers/blob/v5.23.0/src/{path}.py"

    def apply(self) -> bool:
        """Replace it for the whole process, unless that was done before.

        Returns:
            Whether it is replaced: always, if that is needed.

        Raises:
            UnsupportedModelError: If there is no such function, or the replacement was written for another one.
        """
        try:
            self._apply()
        except UnsupportedModelError:
            if self.needed:
                raise
            return False
        return True

    def _apply(self) -> None:
        owner, attribute = self._owner()
        current = getattr(owner, attribute, None)
        if current is None:
            raise UnsupportedModelError(f"{self._where()} does not exist, and {self._remedy()}")
        if hasattr(current, ORIGINAL):
            return
        found = self.digest()
        if found not in self.digests:
            raise UnsupportedModelError(
                f"{self._where()} changed: its digest is {found}, the patch is for {' or '.join(self.digests)}; "
                f"{self._remedy()}"
            )
        replacement = wraps(current)(self.replace(current))
        setattr(replacement, ORIGINAL, current)
        setattr(owner, attribute, replacement)

    def digest(self) -> str:
        """Of the installed source, 16 hex digits: comments count, indentation and the ends of lines do not.

        Raises:
            UnsupportedModelError: If it does not exist, or its source cannot be read.
        """
        sources = [self._source_of(name) for name in (self.source or self.name).split()]
        lines = [line.rstrip() for source in sources for line in textwrap.dedent(source).strip().splitlines()]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def _source_of(self, name: str) -> str:
        found: Any = self._module()
        for part in name.split("."):
            found = getattr(found, part, None)
        while hasattr(found, ORIGINAL):
            found = getattr(found, ORIGINAL)
        try:
            return inspect.getsource(found if inspect.isclass(found) else inspect.unwrap(found))
        except (OSError, TypeError) as error:
            raise UnsupportedModelError(
                f"the source of {self._where()} cannot be read ({error}), and {self._remedy()}"
            ) from error

    def _module(self) -> ModuleType:
        try:
            return import_module(self.module_name)
        except ImportError as error:
            raise UnsupportedModelError(
                f"{self._where()} cannot be imported ({error}), and {self._remedy()}"
            ) from error

    def _owner(self) -> tuple[Any, str]:
        module, (*path, attribute) = self._module(), self.name.split(".")
        return (getattr(module, path[0], None) if path else module), attribute

    def _where(self) -> str:
        return f"{self.module_name}.{self.name} of {self.package} {metadata.version(self.package)}"

    def _remedy(self) -> str:
        if self.package != "transformers":
            return f"without its patch it is as it was ({self.reason})"
        return (
            f"without its patch the model is wrong, or cannot be traced, with a static cache ({self.reason}); install "
            "a release of transformers that this package is tested with, or use DynamicCache"
        )
