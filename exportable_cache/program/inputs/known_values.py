"""Recording of the tensor values that an encoder's code reads, and their replay under a tracer.

Encoders loop over grids and sizes, select by masks and split by lengths, which a tracer cannot evaluate. These values
depend only on the size of an item, which is fixed for a program. Two runs over different pixels verify that: a value
that differs between them is refused.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...errors import UnsupportedModelError
from ...models import quantized_rows

_Site = tuple[str, int, str]
#: Files of modes that calls pass on their way.
_MODES = (__file__, quantized_rows.__file__)
_CHECKS = "transformers/utils/import_utils.py"
# Matched by name, because torch.export replaces some of these methods.
_VALUES = "item __bool__ __int__ __index__ __float__ equal allclose is_nonzero numpy".split()
_TENSORS = "nonzero unique unique_consecutive bincount argwhere".split()
_RANDOM = (
    "rand rand_like randn randn_like randint randint_like randperm normal normal_ uniform_ bernoulli bernoulli_ "
    "multinomial exponential_"
).split()
_FACTORIES = "arange zeros ones full empty linspace tensor as_tensor".split()
_SIZED = (
    "view reshape expand repeat tile unflatten narrow split tensor_split chunk new_zeros new_ones new_full new_empty "
    "interpolate pad roll unfold"
).split()


class KnownValues:
    """Values that one run read, by the line of code that read them."""

    def __init__(self) -> None:
        self.found: dict[_Site, list[Any]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the values that a block reads from real tensors."""
        self.found.clear()
        with _Asked(self._record):
            yield

    @contextmanager
    def handed_out(self) -> Iterator[None]:
        """Replay the recorded values in a block, in the same order at each line of code."""
        asked: Counter[_Site] = Counter()

        def answer(site: _Site, _: Callable[[], Any]) -> Any:
            values = self.found.get(site, [])
            if site[0].endswith(_CHECKS) and not values:
                # Checks of transformers behave differently under a tracer; the recorded run passed them.
                return True
            asked[site] += 1
            if asked[site] > len(values):
                raise UnsupportedModelError(
                    f"the encoder reads a tensor value at {_location(site)} under the tracer only; leave out "
                    "modalities, or run an eager session"
                )
            return values[asked[site] - 1]

        with _Asked(answer):
            yield
        for site, times in asked.items():
            if times < len(self.found.get(site, ())) and not site[0].endswith(_CHECKS):
                raise UnsupportedModelError(
                    f"the encoder reads a tensor value at {_location(site)} {times} times under the tracer but "
                    f"{len(self.found[site])} times without; leave out modalities, or run an eager session"
                )

    def check_same(self, other: KnownValues, model_type: str) -> None:
        """Check that the values of two runs over different pixels or samples are equal.

        Raises:
            UnsupportedModelError: If they differ.
        """
        for site in {**self.found, **other.found}:
            if not _same(self.found.get(site), other.found.get(site)):
                raise UnsupportedModelError(
                    f"the encoder of {model_type!r} branches on the values of pixels or samples at {_location(site)}, "
                    "which an exported program cannot do; leave out modalities"
                )

    def _record(self, site: _Site, compute: Callable[[], Any]) -> Any:
        value = compute()
        self.found.setdefault(site, []).append(value)
        return value


class _Asked(TorchFunctionMode):
    """Routes operations that depend on tensor values through `answer(site, compute)`."""

    def __init__(self, answer: Callable[[_Site, Callable[[], Any]], Any]) -> None:
        super().__init__()
        self._answer = answer

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in _RANDOM:
            raise UnsupportedModelError(
                f"the encoder draws random numbers ({name}), so its output is not reproducible; leave out modalities"
            )
        if name == "tolist":
            # Under a tracer, elements are read one by one.
            return self._elements(args[0])
        if name in _VALUES or name in _TENSORS or (name == "where" and len(args) == 1 and not kwargs):
            what = "value" if name in ("item", "__bool__", "__int__", "__index__", "__float__") else name
            return self._ask(what, lambda: function(*args, **kwargs))
        if name == "__getitem__":
            return args[0][self._index(args[1])]
        if name == "__setitem__":
            target, index, value = args
            if _is_mask(index) and not (isinstance(value, torch.Tensor) and value.dim()):
                # Does not read any value.
                target.masked_fill_(index.reshape(*index.shape, *[1] * (target.dim() - index.dim())), value)
            else:
                target[self._index(index)] = value
            return None
        if name in _FACTORIES:
            args = tuple(self._number(value) for value in args)
            kwargs = {key: self._number(value) for key, value in kwargs.items()}
        elif name in _SIZED:
            args = (*args[:1], *(self._number(value) for value in args[1:]))
            kwargs = {key: self._number(value) for key, value in kwargs.items()}
        elif name in ("masked_scatter", "masked_scatter_"):
            return self._scatter(*args, **kwargs)
        elif name == "masked_select":
            return args[0][self._index(args[1] if len(args) > 1 else kwargs["mask"])]
        elif name == "repeat_interleave":
            repeats = args[1] if len(args) > 1 else kwargs.get("repeats")
            if isinstance(repeats, torch.Tensor):
                return self._repeat(args[0], repeats, args[2] if len(args) > 2 else kwargs.get("dim"))
        return function(*args, **kwargs)

    def _ask(self, what: str, compute: Callable[[], Any]) -> Any:
        frame = inspect.currentframe()
        while frame is not None and (frame.f_code.co_filename in _MODES or "/torch/" in frame.f_code.co_filename):
            frame = frame.f_back
        assert frame is not None
        return self._answer((frame.f_code.co_filename, frame.f_lineno, what), compute)

    def _elements(self, tensor: torch.Tensor) -> Any:
        if tensor.dim() == 0:
            return self._ask("value", tensor.item)
        return [self._elements(element) for element in tensor.unbind()]

    def _number(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            return self._ask("value", value.item)
        if isinstance(value, (list, tuple)) and any(isinstance(one, torch.Tensor) for one in value):
            return type(value)(self._number(one) for one in value)
        return value

    def _index(self, index: Any) -> Any:
        if isinstance(index, slice):
            return slice(*(self._number(part) for part in (index.start, index.stop, index.step)))
        parts = index if isinstance(index, tuple) else (index,)
        found: list[Any] = []
        for part in parts:
            if _is_mask(part):
                found.extend(self._ask("mask", functools.partial(part.nonzero, as_tuple=True)))
            elif isinstance(part, torch.Tensor) and part.dim() == 0 and part.dtype != torch.bool:
                found.append(self._number(part))
            else:
                found.append(self._index(part) if isinstance(part, slice) else part)
        return tuple(found) if isinstance(index, tuple) or len(found) != 1 else found[0]

    def _scatter(self, target: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        indices = self._ask("scatter", lambda: mask.expand(target.shape).flatten().nonzero()[:, 0])
        if indices.shape[0] == target.numel():
            return source.flatten()[: target.numel()].view(target.shape).to(target.dtype)
        flat = target.flatten().index_put((indices,), source.flatten()[: indices.shape[0]])
        return flat.view(target.shape)

    def _repeat(self, tensor: torch.Tensor, repeats: torch.Tensor, dim: int | None) -> torch.Tensor:
        if dim is None:
            tensor, dim = tensor.flatten(), 0
        size = tensor.shape[dim]
        index = self._ask("repeats", lambda: torch.repeat_interleave(repeats.expand(size)))
        return tensor.index_select(dim, index)


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool and index.dim() > 0


def _location(site: _Site) -> str:
    file, line, what = site
    return f"{file.rpartition('/')[2]}:{line} ({what})"


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.shape == right.shape and bool((left == right).all())
    if isinstance(left, (list, tuple)):
        return (
            isinstance(right, (list, tuple))
            and len(left) == len(right)
            and all(_same(one, other) for one, other in zip(left, right))
        )
    return bool(type(left) is type(right) and (left == right if not hasattr(left, "shape") else (left == right).all()))
