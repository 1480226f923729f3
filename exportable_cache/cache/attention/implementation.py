"""Which attention and experts implementation a model runs with: switched for a while, and put back exactly.

A composite model has a config for each part, and each may name implementations of its own, so what is put back is the
state of every config and not one name for all.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from transformers import PreTrainedConfig, PreTrainedModel

from ...common.compat import transformers as private


@dataclass(frozen=True)
class Implementations:
    """The implementations that every config of a model names."""

    of_configs: tuple[tuple[PreTrainedConfig, str | None, str | None], ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Implementations:
        """Those that it names now."""
        return cls(tuple((config, *private.config_implementations(config)) for config in _configs_of(model)))

    def restore(self) -> None:
        """Put them back."""
        for config, attention, experts in self.of_configs:
            private.set_config_implementations(config, attention, experts)


def _configs_of(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Those of its modules, some of which keep a copy, and those inside them, each once."""
    found: dict[int, PreTrainedConfig] = {}
    waiting = [getattr(module, "config", None) for module in model.modules()]
    while waiting:
        config = waiting.pop()
        if isinstance(config, PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            waiting.extend(getattr(config, name, None) for name in config.sub_configs)
    return list(found.values())


def _switch(model: PreTrainedModel, implementation: str) -> None:
    # Some models compute attention in code of their own, and transformers will not switch them. Their masks still
    # come from the function registered under the name in their config: with our name there, they see the slots of a
    # static cache as they are.
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and not private.can_set_attention(module):
            private.set_config_attention(module.config, implementation)
    if private.can_set_attention(model):
        model.set_attn_implementation(implementation)


def set_attention(model: PreTrainedModel, implementation: str) -> None:
    """Switch a model to an attention implementation for good, its own code's limits aside.

    Sessions that are open over the model then put nothing back.
    """
    with _lock:
        _switch(model, implementation)
        if model in _loans:
            _loans[model].before = Implementations.of(model)


@contextmanager
def attention_of(model: PreTrainedModel, implementation: str, experts: str | None = None) -> Iterator[None]:
    """Run a block with the model switched to an attention implementation, and to an experts implementation where it has
    experts. What each of its configs named before is put back after it.
    """
    before = Implementations.of(model)
    try:
        _switch(model, implementation)
        if experts is not None and private.experts_implementation(model.config) is not None:
            model.set_experts_implementation(experts)
        yield
    finally:
        before.restore()


@dataclass
class _Loan:
    before: Implementations
    holders: int = 0


_lock = threading.RLock()
_loans: weakref.WeakKeyDictionary[PreTrainedModel, _Loan] = weakref.WeakKeyDictionary()


def borrow_attention(model: PreTrainedModel, implementation: str) -> Callable[[], None]:
    """Switch a model to an attention implementation until every holder has given it back.

    Returns:
        Gives it back; a second call does nothing. The last of the model's holders puts back what its configs named
        before the first.
    """
    with _lock:
        loan = _loans.setdefault(model, _Loan(Implementations.of(model)))
        loan.holders += 1
        _switch(model, implementation)
    borrowed = [model]

    def give_back() -> None:
        with _lock:
            if not borrowed:
                return
            loan.holders -= 1
            if loan.holders == 0:
                loan.before.restore()
                _loans.pop(borrowed[0], None)
            borrowed.clear()

    return give_back
