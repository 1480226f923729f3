"""The oracle of shifts: the eager model over `DynamicCache`, whose kept keys are computed again at their new positions.

They are computed by the model's own attention modules, from the hidden states that these got when the tokens were fed:
nothing of this package's arithmetic is used.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from exportable_cache.common.compat.transformers import cache_argument
from exportable_cache.models.positions import lengths_forgotten, takes_positions


class _Captured(Exception):
    """Ends an attention module after it has passed its keys on."""


class _Catcher(DynamicCache):
    """A cache that keeps what it is given, and ends the module."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.given = key_states, value_states
        raise _Captured


class ShiftOracle:
    """An eager model that is fed tokens, and drops some of the tokens that it holds.

    Args:
        model: The model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        # A copy with the attention of transformers, because a session borrows the model's.
        self.model = model = copy.deepcopy(model)
        model.set_attn_implementation("eager")
        self.cache = DynamicCache()
        # With states of linear attention, of which the config tells, and no windows.
        if set(getattr(model.config, "layer_types", None) or ()) & {"linear_attention", "hybrid", "conv"}:
            self.cache = DynamicCache(config=model.config)
        self.argument, self.follows = cache_argument(model), takes_positions(model)
        self.hidden: dict[nn.Module, torch.Tensor] = {}
        self.calls: dict[nn.Module, dict[str, Any]] = {}
        # Rotary positions of the held tokens, [axes, 1, length], for models with several axes.
        self.axes: torch.Tensor | None = None
        self.rotary: list[tuple[nn.Module, tuple, dict[str, Any], Any]] = []
        for module in model.modules():
            names = inspect.signature(module.forward).parameters
            if "inv_freq" in dict(module.named_buffers(recurse=False)) or "RotaryEmbedding" in type(module).__name__:
                module.register_forward_hook(self._note_rotary, with_kwargs=True)
            elif hasattr(module, "layer_idx") and {"past_key_values", "layer_past"} & set(names) and _attends(module):
                module.register_forward_pre_hook(self._note_call, with_kwargs=True)

    @property
    def length(self) -> int:
        """Number of tokens that are held."""
        return next(iter(self.hidden.values())).shape[1] if self.hidden else 0

    @torch.no_grad()
    def feed(self, ids: torch.Tensor, **items: torch.Tensor) -> torch.Tensor:
        """Feed tokens [1, length], and return the logits [1, vocab] of the last one.

        Args:
            ids: The tokens.
            items: Images of a prompt at position 0, whose positions the model counts.
        """
        start = self.length if self.axes is None else int(self.axes.max()) + 1
        places = torch.arange(start, start + ids.shape[1])[None]
        if self.axes is not None:
            places = places.expand(self.axes.shape[0], 1, -1)
        self.rotary.clear()
        options = {"position_ids": places} if self.follows and not items else items
        return self.model(ids, use_cache=True, **{self.argument: self.cache}, **options).logits[:, -1]

    @torch.no_grad()
    def drop(self, count: int, first: int, reaching: int = 0) -> None:
        """Drop tokens, and compute the keys and values of the others at their new positions.

        Factors of RoPE that change with the length are those of a new sequence of the kept tokens.

        Args:
            count: Number of tokens to drop.
            first: Number of tokens before them.
            reaching: Length of the sequence, if it is greater than the number of kept tokens.
        """
        with lengths_forgotten(self.model):
            self._drop(count, first, reaching)

    def _drop(self, count: int, first: int, reaching: int) -> None:
        if self.axes is not None:
            begin, rest = self.axes[..., :first], self.axes[..., first + count :]
            following = int(begin.max()) + 1 if first else 0
            self.axes = torch.cat([begin, rest - rest[..., :1].max() + following], dim=-1)
        for module, hidden in self.hidden.items():
            if getattr(module, "is_kv_shared_layer", False):
                self.hidden[module] = hidden[:, count:]
                continue
            kept = torch.cat([hidden[:, :first], hidden[:, first + count :]], dim=1)
            self.hidden[module] = kept
            places = torch.arange(kept.shape[1])[None] if self.axes is None else self.axes
            call = {**self.calls[module], "attention_mask": None, "use_cache": True}
            call["hidden_states" if "hidden_states" in call else "x"] = kept
            if "position_ids" in call:
                call["position_ids"] = places
            embeddings = call.get("position_embeddings")
            if embeddings is not None:
                longer = torch.arange(max(reaching, kept.shape[1]))[None] if self.axes is None else places
                found = self._embeddings(embeddings, kept, longer)
                if isinstance(found, tuple) and reaching:
                    found = tuple(one[:, : kept.shape[1]] for one in found)
                call["position_embeddings"] = found
            catcher = _Catcher()
            for name in ("past_key_values", "layer_past"):
                if name in call:
                    call[name] = catcher
            self._ignored = module
            try:
                module(**call)
            except _Captured:
                pass
            self._ignored = None
            keys, values = catcher.given
            layer = self.cache.layers[module.layer_idx]
            layer.keys, layer.values = keys, values
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = kept.shape[1]

    _ignored: nn.Module | None = None

    def _embeddings(self, given: Any, hidden: torch.Tensor, places: torch.Tensor) -> Any:
        for module, args, kwargs, output in self.rotary:
            if output is given or (isinstance(given, tuple) and isinstance(output, tuple) and given[0] is output[0]):
                taken = [places if one.dtype == torch.int64 else hidden for one in args if torch.is_tensor(one)]
                taken += [one for one in args if not torch.is_tensor(one)]
                named = {key: places if key == "position_ids" else one for key, one in kwargs.items()}
                return module.forward(*taken, **named)
        raise AssertionError("no rotary embedding gave these")

    def _note_rotary(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        self.rotary.append((module, args, kwargs, output))
        for given in (*args, *kwargs.values()):
            if torch.is_tensor(given) and given.dtype == torch.int64 and given.dim() == 3 and self._ignored is None:
                self.axes = given if self.axes is None else torch.cat([self.axes, given], dim=-1)

    def _note_call(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if module is self._ignored:
            return
        call = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
        call |= call.pop("kwargs", {})
        hidden = call.get("hidden_states", call.get("x"))
        before = self.hidden.get(module)
        self.hidden[module] = hidden if before is None else torch.cat([before, hidden], dim=1)
        self.calls[module] = dict(call)


def _attends(module: nn.Module) -> bool:
    """Return True for an attention module, False for the layer around it and for other mixers."""
    return "ttention" in type(module).__name__ and "Layer" not in type(module).__name__
