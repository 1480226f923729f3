"""One function or method of another package that is replaced: where it is, why, by what, and the digest of it."""

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

#: Attribute of a replacement: the function that it stands for.
ORIGINAL = "_exportable_cache_original"
_MODELS = "transformers.models."


@dataclass(frozen=True)
class Patch:
    """A replacement for one function or method of a modeling file, or of another package.

    Attributes:
        file: Below `transformers.models`, as `gpt_neo.modeling_gpt_neo`; of another package, the whole module name.
        name: `function`, or `Class.method`.
        replace: Makes the replacement from the original. It acts where a cache of ours is stepped, or a step is traced,
            and hands everything else to the original. None where it is replaced for the time of a block, see `during`.
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
    replace: Callable[[Callable], Callable] | None
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

    @contextmanager
    def during(self, replace: Callable[[Callable], Callable]) -> Iterator[bool]:
        """Replace it for the time of a block, where its source is one that the replacement was written for.

        Blocks of several threads may overlap: each replacement is there as long as its block, for all threads.

        Args:
            replace: Makes the replacement from the original, which may be one of another block that began before, and
                again when that one ends.

        Yields:
            Whether it is replaced; where not, the block runs with the original.
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
        if inspect.isbuiltin(found):
            # Written in C: the signature, which its documentation begins with.
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
            return f"without its patch it is as it was ({self.reason})"
        return (
            f"without its patch the model is wrong, or cannot be traced, with a static cache ({self.reason}); install "
            "a release of transformers that this package is tested with, or use DynamicCache"
        )


def torch_patch(file: str, name: str, reason: str, *digests: str) -> Patch:
    """A function of torch that is replaced for the time of a block.

    Args:
        file: Below `torch`.
        name: See `Patch`.
        reason: What it does that is replaced.
        digests: In 2.13, and in 2.14 where it is another.
    """
    url = f"https://github.com/pytorch/pytorch/blob/v2.13.0/torch/{file.replace('.', '/')}.py"
    return Patch(f"torch.{file}", name, None, reason, digests, package="torch", url=url, needed=False)


#: Held while blocks begin and end, and never while one runs: that may wait for another thread, which has blocks, too.
_CHANGING = threading.Lock()
#: Attribute of a replacement: the blocks that it is of.
_BLOCKS = "_exportable_cache_blocks"


@dataclass(eq=False)
class _Blocks:
    """Blocks of any threads in which a function is replaced.

    Attributes:
        owner, attribute: Where the function is.
        stored: What is there without them.
        replacements: What makes the replacement of each, those that began first first.
        installed: What is there now.
    """

    owner: Any
    attribute: str
    stored: Any
    replacements: dict[object, Callable[[Callable], Callable]] = field(default_factory=dict)
    installed: Any = None

    @classmethod
    def of(cls, owner: Any, attribute: str) -> _Blocks:
        """Those that run, or none yet: also where somebody else has put a function in the place of theirs."""
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
    """What is called, of a function as a class has it."""
    return getattr(stored, "__func__", stored)


@functools.cache
def _is_known(patch: Patch) -> bool:
    """Whether the installed source is one that a replacement was written for; said in the log where it is not."""
    try:
        patch._check_digest()
    except UnsupportedModelError as error:
        log.info("%s; it is left as it is (%s)", error, patch.reason)
        return False
    return True
