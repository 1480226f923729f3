"""What a model hands its text decoder: found by running the model up to there, whatever its family."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from transformers.modeling_outputs import BaseModelOutputWithPast

from ...errors import UnsupportedModelError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from .probe import Travelling


#: What models keep from one call to the next, beside their weights: restored after a run.
_KEPT = ("rope_deltas",)


_TOLD = re.compile(r"features?:? (?P<behind>\d+)|(?P<before>\d+) feature")


class _Reached(Exception):
    """Ends a run where the decoder would begin."""


class _Nothing(BaseModelOutputWithPast):
    """The output of a decoder that did not run; whatever else is asked of it is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The text decoder inside a model that takes pictures or sound.

    Raises:
        UnsupportedModelError: If there is none apart from the model.
    """
    decoder = model.get_decoder()
    # Some keep a whole causal LM inside (BLIP-2).
    while hasattr(decoder, "lm_head") and decoder.get_decoder() is not decoder:
        decoder = decoder.get_decoder()
    if decoder is model:
        raise UnsupportedModelError(
            f"{model.config.model_type!r} has no text decoder apart from the part that takes pictures or sound; leave "
            "out modalities"
        )
    return decoder


def handed_to_decoder(model: PreTrainedModel, **inputs: Any) -> dict[str, Any]:
    """The decoder's arguments by name, as the model's own code computes them from `inputs`; None is left out.

    Args:
        model: The whole model.
        **inputs: Its own arguments, such as input_ids int64 [batch, length] and what its processor gives.

    Raises:
        UnsupportedModelError: If the model ends without its decoder.
    """
    decoder = decoder_of(model)
    names = [
        name
        for name, parameter in inspect.signature(decoder.forward).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]

    found: list[dict[str, Any]] = []

    def stop(*arguments: Any, **keywords: Any) -> Any:
        found.append({**dict(zip(names, arguments)), **keywords})
        if torch.compiler.is_exporting():
            # A tracer cannot be left by an error. What the model does with this is dead code.
            return _Nothing(last_hidden_state=keywords["inputs_embeds"])
        raise _Reached

    before = decoder.__dict__.get("forward")
    decoder.forward = stop
    kept = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    try:
        with _unchanged(model):
            model(**inputs, use_cache=False, **kept)
    except _Reached:
        pass
    finally:
        if before is None:
            del decoder.forward
        else:
            decoder.forward = before
    if found:
        return {name: value for name, value in found[0].items() if value is not None}
    raise UnsupportedModelError(
        f"{model.config.model_type!r} does not run its text decoder {type(decoder).__name__} on embeddings; leave out "
        "modalities to run the decoder alone"
    )


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
    """Ends a run where embeddings are put at the places of placeholders.

    Args:
        shape: Of the prompt's embeddings.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.Tensor.masked_scatter, torch.Tensor.masked_scatter_, torch.masked_scatter):
            target, _, source = args if len(args) == 3 else (*args, *(kwargs or {}).values())
            if target.dim() == 3 and tuple(target.shape) == self.shape:
                raise _Counted(source.numel() // target.shape[-1])
        return function(*args, **(kwargs or {}))


def count_tokens(model: PreTrainedModel, prompt: Callable[[int], Mapping[str, Any]]) -> int:
    """Embeddings that an item gets, where the model puts them at its placeholders.

    Args:
        model: The whole model.
        prompt: Its arguments with that many placeholders.

    Raises:
        UnsupportedModelError: If the model takes no number of them.
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
            # Some put all of an item where they find one placeholder.
            if embeds is not None and embeds.shape[1] >= one["input_ids"].shape[1]:
                return int(embeds.shape[1] - one["input_ids"].shape[1] + 1)
        except _Counted as counted:
            return counted.tokens
        except ValueError as error:
            # Some say it in words only, in embeddings or in all their numbers.
            told = _TOLD.search(str(error))
            if told is None:
                raise
            features = int(told["behind"] or told["before"])
            return features // size if features % size == 0 and _fits(model, prompt(features // size)) else features
    raise UnsupportedModelError(
        f"{model.config.model_type!r} does not put embeddings at the places of placeholders; leave out modalities to "
        "run its text decoder"
    )


def _fits(model: PreTrainedModel, inputs: Mapping[str, Any]) -> bool:
    try:
        handed_to_decoder(model, **inputs)
    except ValueError:
        return False
    except _Counted:
        # Behind the check of numbers.
        pass
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
    """Stands for a mask by which a decoder picks tokens with a size that depends on data: picks all.

    Args:
        stays: Whether it is used as a mask once more after it was moved.
    """

    def __init__(self, stays: bool) -> None:
        self.stays = stays

    def to(self, *_: Any) -> EveryToken | slice:
        return self if self.stays else slice(None)

    def squeeze(self, _: int) -> slice:
        return slice(None)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> torch.Tensor:
        if function.__name__ != "masked_scatter":
            raise UnsupportedModelError(f"a decoder uses the places of features in {function.__name__}; run it on text")
        target, _, source = args
        return source.view(target.shape)


@contextmanager
def travelling_beside(model: PreTrainedModel, travels: Sequence[Travelling], options: dict[str, Any]) -> Iterator[None]:
    """Run a block in which the decoder is handed what `options["inputs_embeds"]` holds behind the embeddings; they
    alone are left there.
    """
    if not travels:
        yield
        return
    embeds = options["inputs_embeds"]
    size = embeds.shape[-1] - sum(each.size for each in travels)
    options["inputs_embeds"], *further = embeds.split([size, *(each.size for each in travels)], dim=-1)
    beside: dict[str, Any] = {}
    for each, features in zip(travels, further, strict=True):
        if not each.keys:
            # Some models hand on what they are given, and would compute it of the embeddings otherwise (Gemma 4).
            target = options if each.name in inspect.signature(model.forward).parameters else beside
            target[each.name] = features.unflatten(-1, each.shape) if len(each.shape) > 1 else features
            continue
        parts = features.chunk(len(each.keys), dim=-1)
        is_list = each.keys == tuple(range(len(parts))) and each.places != "vision_mask"
        beside[each.name] = list(parts) if is_list else dict(zip(each.keys, parts, strict=True))
        beside[each.places] = EveryToken(stays=each.places == "vision_mask")

    def hand_over(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return arguments, {**keywords, **beside}

    handle = decoder_of(model).register_forward_pre_hook(hand_over, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
