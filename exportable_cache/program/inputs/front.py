"""Capture of the inputs that a model passes to its text decoder, by running the model up to that call."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.modeling_outputs import BaseModelOutputWithPast

from ...errors import UnsupportedModelError
from ...models.positions import text_model_of
from ...models.quantized_rows import indexed_tables
from .examples import MAIN_INPUTS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..methods import ExtraFeature


#: Names of arguments with the pixels or samples of items.
_ITEMS = frozenset(name for names in MAIN_INPUTS.values() for name in names)

#: Attributes that models keep between calls, restored after a run.
_KEPT = ("rope_deltas",)


_FEATURE_COUNT = re.compile(r"features?:? (?P<after>\d+)|(?P<before>\d+) feature")


class _Reached(Exception):
    """Signal that ends a run at the call of the decoder."""


class _Nothing(BaseModelOutputWithPast):
    """The output of a decoder that did not run; any other attribute is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Return the text decoder inside a model that takes images, video or audio.

    Raises:
        UnsupportedModelError: If the decoder is not a module of its own.
    """
    decoder = model.get_decoder()
    # Some keep a whole causal LM inside (BLIP-2).
    while hasattr(decoder, "lm_head") and decoder.get_decoder() is not decoder:
        decoder = decoder.get_decoder()
    if decoder is model:
        raise UnsupportedModelError(
            f"the text decoder of {model.config.model_type!r} is not a module of its own; leave out modalities"
        )
    return decoder


class _FirstLayer(nn.Module):
    """A layer in place of a decoder's layers that ends a run, and adds its inputs to `found`."""

    def __init__(self, found: list[dict[str, Any]]) -> None:
        super().__init__()
        self.found = found

    def forward(self, hidden_states: torch.Tensor, **keywords: Any) -> torch.Tensor:
        """Keep the inputs under the names of the decoder's arguments."""
        kept = {name: keywords.get(name) for name in ("attention_mask", "position_ids")}
        self.found.append({"inputs_embeds": hidden_states, **kept})
        if torch.compiler.is_exporting():
            # As in `stop`; with one more dimension, because some models take the first of a layer's outputs.
            return hidden_states[None]
        raise _Reached


def handed_to_decoder(model: PreTrainedModel, **inputs: Any) -> dict[str, Any]:
    """Return the decoder's arguments by name, as the model computes them from `inputs`, without those that are None.

    Args:
        model: The whole model.
        **inputs: The model's arguments, such as input_ids int64 [batch, length] and the outputs of its processor.

    Raises:
        UnsupportedModelError: If the model does not call its decoder.
    """
    decoder = decoder_of(model)
    if _ITEMS.isdisjoint(inputs):
        model = text_model_of(model)
    kept = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    found: list[dict[str, Any]] = []
    with indexed_tables(model), _unchanged(model), _stopping(decoder, found), suppress(_Reached):
        model(**inputs, use_cache=False, **kept)
    if found:
        return {name: value for name, value in found[0].items() if value is not None}
    raise UnsupportedModelError(
        f"{model.config.model_type!r} does not run its text decoder {type(decoder).__name__} on embeddings; leave out "
        "modalities to run the decoder alone"
    )


@contextmanager
def _stopping(decoder: nn.Module, found: list[dict[str, Any]]) -> Iterator[None]:
    """End the runs of a block at the decoder, and add its arguments to `found`."""
    names = [
        name
        for name, parameter in inspect.signature(decoder.forward).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]

    def stop(*arguments: Any, **keywords: Any) -> Any:
        found.append({**dict(zip(names, arguments)), **keywords})
        if torch.compiler.is_exporting():
            # An exception would end the trace. The model's use of this value is dead code.
            return _Nothing(last_hidden_state=keywords["inputs_embeds"])
        raise _Reached

    layers = getattr(decoder, "layers", None)
    if not _ITEMS.isdisjoint(names) and isinstance(layers, nn.ModuleList):
        # The decoder encodes items itself (Chameleon), so its first layer is the first to get embeddings.
        decoder.layers = nn.ModuleList([_FirstLayer(found)])
        try:
            yield
        finally:
            decoder.layers = layers
        return
    before = decoder.__dict__.get("forward")
    decoder.forward = stop
    try:
        yield
    finally:
        if before is None:
            del decoder.forward
        else:
            decoder.forward = before


@contextmanager
def _unchanged(model: PreTrainedModel) -> Iterator[None]:
    kept = [
        (module, name, module.__dict__[name]) for module in model.modules() for name in _KEPT if name in module.__dict__
    ]
    try:
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


class _Counted(Exception):
    def __init__(self, tokens: int) -> None:
        super().__init__(f"{tokens} embeddings")
        self.tokens = tokens


class _CountsScattered(TorchFunctionMode):
    """Ends a run where the model scatters embeddings over placeholders.

    Args:
        shape: Shape of the prompt's embeddings.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.index_put and tuple(args[0].shape) == self.shape:
            raise _Counted(kwargs["values"].numel() // self.shape[-1])
        if function in (torch.Tensor.masked_scatter, torch.Tensor.masked_scatter_, torch.masked_scatter):
            target, _, source = args if len(args) == 3 else (*args, *(kwargs or {}).values())
            if target.dim() == 3 and tuple(target.shape) == self.shape:
                raise _Counted(source.numel() // target.shape[-1])
        return function(*args, **(kwargs or {}))


def count_tokens(model: PreTrainedModel, prompt: Callable[[int], Mapping[str, Any]]) -> int:
    """Return the number of embeddings per item, for a model that scatters them over placeholders.

    Args:
        model: The whole model.
        prompt: Function from a number of placeholders to the model's arguments.

    Raises:
        UnsupportedModelError: If it cannot be found.
    """
    one = prompt(1)
    size = model.config.get_text_config().hidden_size
    with ExitStack() as stack:
        for module in model.modules():
            if hasattr(module, "get_placeholder_mask"):
                stack.enter_context(_counting(module))
        stack.enter_context(_CountsScattered((*one["input_ids"].shape, size)))
        try:
            embeds = handed_to_decoder(model, **one).get("inputs_embeds")
            # Some models expand one placeholder to all embeddings of an item.
            if embeds is not None and embeds.shape[1] >= one["input_ids"].shape[1]:
                return int(embeds.shape[1] - one["input_ids"].shape[1] + 1)
        except _Counted as counted:
            return counted.tokens
        except ValueError as error:
            # Some models give it in an error message only, as a number of embeddings or of elements.
            found = _FEATURE_COUNT.search(str(error))
            if found is None:
                raise
            features = int(found["after"] or found["before"])
            return features // size if features % size == 0 and _fits(model, prompt(features // size)) else features
    raise UnsupportedModelError(
        f"{model.config.model_type!r} does not replace placeholders by embeddings; leave out modalities to run its "
        "text decoder"
    )


def _fits(model: PreTrainedModel, inputs: Mapping[str, Any]) -> bool:
    try:
        handed_to_decoder(model, **inputs)
    except ValueError:
        return False
    except _Counted:
        pass  # the check of numbers has passed
    return True


@contextmanager
def _counting(module: nn.Module) -> Iterator[None]:
    original: Callable[..., Any] = module.get_placeholder_mask  # type: ignore[assignment]
    parameters = list(inspect.signature(original).parameters)

    def count(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(parameters, args)), **kwargs}
        features = next(
            (value for name, value in given.items() if name.endswith("_features") and value is not None), None
        )
        if isinstance(features, torch.Tensor):
            raise _Counted(features.numel() // given["inputs_embeds"].shape[-1])
        return original(*args, **kwargs)

    module.__dict__["get_placeholder_mask"] = count
    try:
        yield
    finally:
        del module.__dict__["get_placeholder_mask"]


class EveryToken:
    """A mask that selects every token, in place of one whose size would depend on data.

    Args:
        stays: True if the model still uses it as a mask after `to`.
    """

    def __init__(self, stays: bool) -> None:
        self.stays = stays

    def to(self, *_: Any) -> EveryToken | slice:
        """Return the mask, or an index that selects everything."""
        return self if self.stays else slice(None)

    def squeeze(self, _: int) -> slice:
        """Return an index that selects everything."""
        return slice(None)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> torch.Tensor:
        if function.__name__ != "masked_scatter":
            raise UnsupportedModelError(
                f"the decoder uses the mask of extra features in {function.__name__}, which is not supported; leave "
                "out modalities"
            )
        target, _, source = args
        return source.view(target.shape)


@contextmanager
def passing_extra_features(
    model: PreTrainedModel, extra_features: Sequence[ExtraFeature], options: dict[str, Any]
) -> Iterator[None]:
    """Split the extra features off `options["inputs_embeds"]` and pass them to the decoder within the block.

    Extra features follow the embedding of each token, in one tensor [batch, length, hidden_size + sizes], zeros for
    text. So each chunk of a prompt has its features, and no size depends on data (Qwen3-VL's deepstack).
    """
    if not extra_features:
        yield
        return
    embeds = options["inputs_embeds"]
    size = embeds.shape[-1] - sum(each.size for each in extra_features)
    options["inputs_embeds"], *further = embeds.split([size, *(each.size for each in extra_features)], dim=-1)
    added: dict[str, Any] = {}
    for each, features in zip(extra_features, further, strict=True):
        if not each.keys:
            # Some models forward this argument, and compute it from the embeddings without it (Gemma 4).
            target = options if each.name in inspect.signature(model.forward).parameters else added
            target[each.name] = features.unflatten(-1, each.shape) if len(each.shape) > 1 else features
            continue
        parts = features.chunk(len(each.keys), dim=-1)
        is_list = each.keys == tuple(range(len(parts))) and each.mask != "vision_mask"
        added[each.name] = list(parts) if is_list else dict(zip(each.keys, parts, strict=True))
        added[each.mask] = EveryToken(stays=each.mask == "vision_mask")

    def add(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return arguments, {**keywords, **added}

    handle = decoder_of(model).register_forward_pre_hook(add, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
