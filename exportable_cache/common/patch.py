"""Replacements of functions and methods of other packages, each with a reason, a link and a digest of the original."""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module, metadata
from types import ModuleType
from typing import Any

from ..errors import UnsupportedModelError

log = logging.getLogger(__name__)

#: Attribute of a replacement: the original function.
ORIGINAL = "_exportable_cache_original"
_MODELS = "transformers.models."


@dataclass(frozen=True)
class Patch:
    """A replacement for one function or method of a modeling file, or of another package.

    Attributes:
        file: Module below `transformers.models`, such as `gpt_neo.modeling_gpt_neo`; for another package, the full
            module name.
        name: `function`, or `Class.method`.
        replace: Makes the replacement from the original. The replacement acts on this package's caches or under a
            tracer, and forwards everything else to the original. None if the patch is only used with `during`.
        reason: Why the original does not work with a static cache or a traced step.
        digests: Digests of the sources that the replacement was written for, one per distinct upstream source.
        source: Names whose source is digested, separated by spaces; `name` by default. A whole class if several of its
            methods are replaced.
        package: Distribution that has the function.
        url: Link to the original, unless it is a modeling file.
        needed: True if a model is wrong without the patch. Otherwise a changed original is left unpatched.
    """

    file: str
    name: str
    replace: Callable[[Callable], Callable] | None
    reason: str
    digests: tuple[str, ...]
    source: str | None = None
    package: str = "transformers"
    url: str | None = None
    needed: bool = True

    @property
    def label(self) -> str:
        """Name in reports: the class for a `forward`, otherwise the function or method."""
        return self.name.removesuffix(".forward").rsplit(".", 1)[-1]

    @property
    def module_name(self) -> str:
        """Full name of the patched module."""
        return _MODELS + self.file if self.package == "transformers" else self.file

    @property
    def link(self) -> str:
        """Link to the original in its repository."""
        if self.url is not None:
            return self.url
        path = self.module_name.replace(".", "/")
        return f"https://github.com/huggingface/transformers/blob/v5.23.0/src/{path}.py"

    def apply(self) -> bool:
        """Replace the function for the whole process, once.

        Returns:
            True if the function is replaced; always True if the patch is needed.

        Raises:
            UnsupportedModelError: If the function does not exist, or its source differs from the one the patch was
                written for.
        """
        try:
            self._apply()
        except UnsupportedModelError:
            if self.needed:
                raise
            return False
        return True

    @contextmanager
    def during(self, replace: Callable[[Callable], Callable]) -> Iterator[bool]:
        """Replace the function within a block, if its source is known.

        Blocks of several threads may overlap: each replacement lasts as long as its block and is seen by all threads.

        Args:
            replace: Makes the replacement from the original, which may be the replacement of an earlier block. It is
                called again when that block ends.

        Yields:
            True if the function is replaced, False if the block runs with the original.
        """
        if not _is_known(self):
            yield False
            return
        block = object()
        with _CHANGING:
            blocks = _Blocks.of(*self._owner())
            blocks.begin(block, replace)
        try:
            yield True
        finally:
            with _CHANGING:
                blocks.end(block)

    def _apply(self) -> None:
        owner, attribute = self._owner()
        current = getattr(owner, attribute, None)
        if current is None:
            raise UnsupportedModelError(f"{self._where()} does not exist, and {self._remedy()}")
        if hasattr(current, ORIGINAL):
            return
        self._check_digest()
        assert self.replace is not None
        replacement = functools.wraps(current)(self.replace(current))
        setattr(replacement, ORIGINAL, current)
        setattr(owner, attribute, replacement)

    def _check_digest(self) -> None:
        found = self.digest()
        if found not in self.digests:
            raise UnsupportedModelError(
                f"{self._where()} changed: its digest is {found}, the patch is for {' or '.join(self.digests)}; "
                f"{self._remedy()}"
            )

    def digest(self) -> str:
        """Return the digest of the installed source, 16 hex digits.

        Indentation and line ends do not count, comments do.

        Raises:
            UnsupportedModelError: If the source does not exist or cannot be read.
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
        if inspect.isbuiltin(found):
            # Written in C: use the signature at the start of the docstring.
            return (found.__doc__ or "").partition("\n\n")[0]
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
            return f"it stays unpatched ({self.reason})"
        return (
            f"without its patch the model is wrong, or cannot be traced, with a static cache ({self.reason}); install "
            "a release of transformers that this package is tested with, or use DynamicCache"
        )


def torch_patch(file: str, name: str, reason: str, *digests: str) -> Patch:
    """Return a patch of a torch function, for use with `Patch.during`.

    Args:
        file: Module below `torch`.
        name: See `Patch`.
        reason: See `Patch`.
        digests: Digests in torch 2.13 and later releases, where they differ.
    """
    url = f"https://github.com/pytorch/pytorch/blob/v2.13.0/torch/{file.replace('.', '/')}.py"
    return Patch(f"torch.{file}", name, None, reason, digests, package="torch", url=url, needed=False)


#: Held while blocks begin and end, but not while they run, because a block may wait for another thread's block.
_CHANGING = threading.Lock()
#: Attribute of a replacement: its `_Blocks`.
_BLOCKS = "_exportable_cache_blocks"


@dataclass(eq=False)
class _Blocks:
    """The active blocks of all threads that replace one function.

    Attributes:
        owner, attribute: Location of the function.
        stored: Original, without the blocks' replacements.
        replacements: Makers of the replacements by block, oldest first.
        installed: Current value of the attribute.
    """

    owner: Any
    attribute: str
    stored: Any
    replacements: dict[object, Callable[[Callable], Callable]] = field(default_factory=dict)
    installed: Any = None

    @classmethod
    def of(cls, owner: Any, attribute: str) -> _Blocks:
        """Return the active blocks of a function, or new ones if another package has replaced it since."""
        stored = inspect.getattr_static(owner, attribute)
        running = getattr(_function(stored), _BLOCKS, None)
        return running if running is not None and running.installed is stored else cls(owner, attribute, stored)

    def begin(self, block: object, replace: Callable[[Callable], Callable]) -> None:
        self.replacements[block] = replace
        self._install()

    def end(self, block: object) -> None:
        del self.replacements[block]
        self._install()

    def _install(self) -> None:
        function = _function(self.stored)
        for replace in self.replacements.values():
            original, function = function, replace(function)
            setattr(function, ORIGINAL, original)
        if not self.replacements:
            self.installed = self.stored
        else:
            setattr(function, _BLOCKS, self)
            kinds: tuple[Any, ...] = (classmethod, staticmethod)
            kind = next((kind for kind in kinds if isinstance(self.stored, kind)), None)
            self.installed = function if kind is None else kind(function)
        setattr(self.owner, self.attribute, self.installed)


def _function(stored: Any) -> Any:
    return getattr(stored, "__func__", stored)


@functools.cache
def _is_known(patch: Patch) -> bool:
    """Return True if the installed source has a known digest; log it otherwise."""
    try:
        patch._check_digest()
    except UnsupportedModelError as error:
        log.info("%s", error)
        return False
    return True
