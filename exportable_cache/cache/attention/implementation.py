"""Switching the attention and experts implementation of a model for a block, and restoring it exactly.

A composite model has a config for each part, and each may name different implementations, so every config is restored.
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
        """Return the implementations that a model's configs name now."""
        return cls(tuple((config, *private.config_implementations(config)) for config in _configs_of(model)))

    def restore(self) -> None:
        """Restore these implementations."""
        for config, attention, experts in self.of_configs:
            private.set_config_implementations(config, attention, experts)


def _configs_of(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return the configs of a model's modules, which may be copies, and their sub-configs, each once."""
    found: dict[int, PreTrainedConfig] = {}
    waiting = [getattr(module, "config", None) for module in model.modules()]
    while waiting:
        config = waiting.pop()
        if isinstance(config, PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            waiting.extend(getattr(config, name, None) for name in config.sub_configs)
    return list(found.values())


def _switch(model: PreTrainedModel, implementation: str) -> None:
    # Set in the config of models that compute attention themselves, which transformers does not switch, because their
    # masks come from the function registered under that name.
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and not private.can_set_attention(module):
            private.set_config_attention(module.config, implementation)
    if private.can_set_attention(model):
        model.set_attn_implementation(implementation)


def set_attention(model: PreTrainedModel, implementation: str) -> None:
    """Switch a model to an attention implementation permanently; open sessions over it restore nothing."""
    with _lock:
        _switch(model, implementation)
        if model in _loans:
            _loans[model].before = Implementations.of(model)


def set_experts(model: PreTrainedModel, implementation: str) -> None:
    """Switch a model and its submodels to an experts implementation permanently."""
    model.set_experts_implementation(implementation)
    # Transformers skips submodels whose config is of the class of the model's, such as MTP modules.
    for config in _configs_of(model):
        if type(config) is type(model.config):
            private.set_config_experts(config, implementation)


@contextmanager
def attention_of(model: PreTrainedModel, implementation: str, experts: str | None = None) -> Iterator[None]:
    """Run a block with another attention implementation, and another experts implementation if it has experts.

    Every config is restored after the block.
    """
    before = Implementations.of(model)
    try:
        _switch(model, implementation)
        if experts is not None and private.experts_implementation(model.config) is not None:
            set_experts(model, experts)
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
        Function that gives it back; a second call does nothing. The model's last holder restores its configs.
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
