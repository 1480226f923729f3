"""Trained draft heads as a part of a model: multi-token-prediction (MTP) modules of its checkpoint, or EAGLE-3.

A head is a few decoder layers that predict the tokens after the next one. Each takes the embedding of a token and a
hidden state of the position before it: the first layer that of the model, each further layer that of the layer before.

Its layers follow those of the model in the cache. Every step of the model also runs the head over the same tokens, so
that both hold the same positions and are rolled back by the same length. The states of the newest positions stay in a
buffer, from which the method `draft` continues without a step of the model.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ..cache.cache import LayeredCache
from ..cache.layer_spec import HYBRID_TYPES, KEPT_POSITIONS, STATE_TYPES
from ..errors import InputError, UnsupportedModelError, first_line
from .layers.specs import DRAFT_HEAD, ProbeCache, layer_spec_of, layer_types_and_windows

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.modeling_layers import MtpModel

    from ..cache.layer_spec import LayerSpec
    from .eagle import EagleModel

#: A position after every query, which causal masks hide.
_HIDDEN = 2**31


class _Step(threading.local):
    """The hidden states of a step that is running or traced in this thread, by layer; -1 for the last ones."""

    def __init__(self) -> None:
        self.hidden: dict[int, torch.Tensor] | None = None


_step = _Step()


class _HeadCache(LayeredCache):
    """The layers of a head in the cache of a step. Layer i has no state of position i or before, which it hides."""

    def get_mask_sizes(  # type: ignore[override]
        self, query_length: int, layer_idx: int
    ) -> tuple[int, int | torch.Tensor]:
        """Return the mask's key length and offset, see `LayeredCache.get_mask_sizes`."""
        kv_length, offset = super().get_mask_sizes(query_length, layer_idx)
        slots = torch.arange(kv_length, device=self.device)
        return kv_length, torch.where(slots + offset > layer_idx, slots * 0 + offset, _HIDDEN - slots)


class DraftHead(nn.Module):
    """A draft head that is attached to a model.

    Args:
        model: The model.
        predictor: Its MTP modules, or an EAGLE-3 head.

    Attributes:
        sources: The layers of the model whose inputs the head takes; -1 for the last hidden states.
        handed: [1, KEPT_POSITIONS, layers, hidden_size], the states that each layer takes next, by position.
        end: Position after the newest of them, int64 [1].
    """

    name = "mtp"
    handed: torch.Tensor
    end: torch.Tensor

    def __init__(self, model: PreTrainedModel, predictor: MtpModel | EagleModel) -> None:
        super().__init__()
        self.predictor: Any = predictor
        self.sources: tuple[int, ...] = getattr(predictor, "sources", (-1,))
        self.is_mtp = self.sources == (-1,)
        self.layer_count = len(predictor.layers)
        config = model.config.get_text_config(decoder=True)
        size, self.vocab_size = config.hidden_size, config.vocab_size
        zeros = torch.zeros(1, KEPT_POSITIONS, self.layer_count, size, dtype=model.dtype, device=model.device)
        self.register_buffer("handed", zeros, persistent=False)
        self.register_buffer("end", torch.zeros(1, dtype=torch.int64, device=model.device), persistent=False)

    @property
    def config(self) -> PreTrainedConfig:
        """Config of its layers."""
        return self.predictor.config

    def tie(self, model: PreTrainedModel) -> None:
        """Use the model's embeddings, head and rotary embedding, which stay modules of the model only."""
        shared = {
            "embed_tokens": model.get_input_embeddings(),
            "shared_head": model.get_output_embeddings(),
            "rotary_emb": getattr(model.get_decoder(), "rotary_emb", None),
        }
        for name, module in shared.items():
            if hasattr(self.predictor, name):
                delattr(self.predictor, name)
            object.__setattr__(self.predictor, name, module)

    def follow(
        self, input_ids: torch.Tensor, input_pos: torch.Tensor, cache: LayeredCache, hidden: dict[int, torch.Tensor]
    ) -> None:
        """Run the head over the tokens of a step of the model.

        Args:
            input_ids: int64 [1, length].
            input_pos: Position of the first token, int64 [1].
            cache: The state in the step.
            hidden: Hidden states of the model by layer, each [1, length, hidden_size], see `collecting_hidden`.
        """
        fused = torch.cat([hidden[index] for index in self.sources], dim=-1)
        self._run(input_ids, input_pos, cache, fused if self.is_mtp else self.predictor.fc(fused), None)

    def draft(
        self, input_ids: torch.Tensor, input_pos: torch.Tensor, cache: LayeredCache, link: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits [1, vocab] of the token after one that the model has not seen.

        Args:
            input_ids: The token, int64 [1, 1].
            input_pos: Its position, int64 [1].
            cache: The state in the step.
            link: Number of proposed tokens before it, int64 [1]. Layer i predicts the token after i proposed ones, and
                the last layer all further ones from its own states.
        """
        hidden = self._run(input_ids, input_pos, cache, None, link)[:, -1]
        return self.predictor.shared_head(hidden) if self.is_mtp else self.predictor.logits(hidden, self.vocab_size)

    def write_rows(self, input_ids: torch.Tensor, positions: torch.Tensor, cache: LayeredCache) -> None:
        """Write the keys and values of one token at several positions, for callers that compare them.

        Args:
            input_ids: The token, int64 [positions, 1].
            positions: int64 [positions, 1].
            cache: A cache with a row for each position, whose last layers are those of the head.
        """
        layers = LayeredCache.from_layers(cache.layers[-self.layer_count :])
        layers.model_types = cache.model_types
        embeddings = self.predictor.embed_tokens(input_ids)
        for index in range(self.layer_count):
            # The state before the token may be any that is the same at all positions.
            self.predictor.forward_layer(index, embeddings, positions, cast(Any, layers), inputs_embeds=embeddings)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the states of the newest positions after the block."""
        before = self.handed.clone(), self.end.clone()
        try:
            yield
        finally:
            self.handed.copy_(before[0])
            self.end.copy_(before[1])

    def _run(
        self,
        input_ids: torch.Tensor,
        input_pos: torch.Tensor,
        cache: LayeredCache,
        hidden: torch.Tensor | None,
        link: torch.Tensor | None,
    ) -> torch.Tensor:
        length = input_ids.shape[1]
        # The states of the positions before this step. After a rollback they are not the newest ones.
        kept = torch.arange(KEPT_POSITIONS, device=input_ids.device)
        window = self.handed.index_select(1, (kept + (input_pos - self.end)).clamp(0, KEPT_POSITIONS - 1))
        new_tokens = torch.arange(length, device=input_ids.device)
        positions = input_pos[:, None] + new_tokens
        layers = _HeadCache.from_layers(cache.layers[-self.layer_count :])
        layers.model_types = cache.model_types
        embeddings = self.predictor.embed_tokens(input_ids)
        states, outputs = [] if hidden is None else [hidden], []
        for index in range(self.layer_count):
            before = window[:, -1:, index]
            if hidden is not None:
                # Not a slice, because its size would be 1 for a length of 2, and tracing guards against that.
                before = torch.cat([before, states[index]], dim=1).index_select(1, new_tokens)
            outputs.append(
                self.predictor.forward_layer(index, before, positions, cast(Any, layers), inputs_embeds=embeddings)
            )
            states.append(outputs[-1])
        result = outputs[-1]
        if hidden is None:
            assert link is not None
            chosen = link.clamp(max=self.layer_count - 1)
            result = torch.stack(outputs).index_select(0, chosen)[0]
            states.insert(0, result)
        new = torch.stack(states[: self.layer_count], dim=2)
        self.handed.copy_(torch.cat([window, new], dim=1).index_select(1, kept + length))
        self.end.copy_(input_pos + length)
        return result


def draft_head_of(model: nn.Module) -> DraftHead | None:
    """Return the draft head that is attached to a model, or None."""
    return getattr(model, DRAFT_HEAD, None)


def _keep_output(module: nn.Module, arguments: Any, output: Any) -> None:
    """Keep the last hidden states of a decoder inside `collecting_hidden`."""
    if _step.hidden is not None:
        _step.hidden[-1] = output[0]


def _keep_input(index: int, module: nn.Module, arguments: tuple, named: dict[str, Any]) -> None:
    """Keep the hidden states that a layer gets inside `collecting_hidden`."""
    if _step.hidden is not None:
        _step.hidden[index] = arguments[0] if arguments else named["hidden_states"]


@contextmanager
def collecting_hidden() -> Iterator[dict[int, torch.Tensor]]:
    """Collect the hidden states that a draft head takes, by layer, inside the block."""
    found: dict[int, torch.Tensor] = {}
    _step.hidden = found
    try:
        yield found
    finally:
        _step.hidden = None


def attach_head(model: PreTrainedModel, draft: str | Path) -> DraftHead:
    """Attach a draft head to a model, or return the one that is attached.

    Args:
        model: A causal LM in eval mode. Its weights stay the same.
        draft: "mtp" for the multi-token-prediction modules of its checkpoint, or the folder of an EAGLE-3 head.

    Raises:
        InputError: If `draft` has another value, or the head does not fit the model.
        UnsupportedModelError: If the checkpoint has no such modules, or they cannot be used.
    """
    head = draft_head_of(model)
    if head is not None:
        if head.name != str(draft):
            raise InputError(f"draft must be {head.name!r}, which the model has, got {str(draft)!r}; load it again")
        return head
    if draft == "mtp":
        return attach_predictor(model, _load_mtp(model))
    from .eagle import load_eagle

    return attach_predictor(model, load_eagle(model, Path(draft)), str(draft))


def check_head_name(draft: str | Path) -> None:
    """Check the name of a draft head, for callers that load its model next.

    Raises:
        InputError: If it is neither "mtp" nor the folder of an EAGLE-3 head.
        UnsupportedModelError: If the folder has a head of another kind.
    """
    if draft != "mtp":
        from .eagle import read_config

        read_config(Path(draft))


def attach_predictor(model: PreTrainedModel, predictor: MtpModel | EagleModel, name: str = "mtp") -> DraftHead:
    """Attach MTP modules or an EAGLE-3 head to a model.

    Raises:
        UnsupportedModelError: If a layer of them keeps a state that cannot be rolled back.
    """
    head = DraftHead(model, predictor)
    head.name = name
    head.tie(model)
    nn.Module.to(predictor, device=model.device).eval().requires_grad_(False)
    for parameter in predictor.parameters():
        # Not buffers, because frequencies of RoPE in 16 bits are wrong at large positions.
        parameter.data = parameter.data.to(model.dtype)
    for index, (layer_type, _) in enumerate(layer_types_and_windows(head.config)):
        if layer_type in (*STATE_TYPES, *HYBRID_TYPES):
            raise UnsupportedModelError(
                f"draft must be left out for {type(model).__name__}: MTP layer {index} is of type {layer_type!r}, "
                "whose state cannot take back tokens; decode without it"
            )
    model.add_module(DRAFT_HEAD, head)
    decoder = model.get_decoder()
    for index in head.sources:
        if index == -1:
            decoder.register_forward_hook(_keep_output)
        else:
            decoder.layers[index].register_forward_pre_hook(partial(_keep_input, index), with_kwargs=True)
    return head


def _load_mtp(model: PreTrainedModel) -> MtpModel:
    from transformers import modeling_layers

    name = type(model).__name__
    # It is missing in transformers before 5.23.
    MtpModel = getattr(modeling_layers, "MtpModel", None)
    if MtpModel is None or not getattr(model.config.get_text_config(), "num_mtp_layers", None):
        raise UnsupportedModelError(
            f"draft='mtp' needs a model with multi-token-prediction modules that transformers can load, got {name}, "
            "whose config has no num_mtp_layers; use PromptLookup() or DraftModel(session)"
        )
    # It has the same name and module, by which transformers finds the renamings of a checkpoint.
    kind: Any = type(
        MtpModel.__name__,
        (MtpModel,),
        {"get_mtp_weights_regex": staticmethod(_names_of_mtp), "__module__": MtpModel.__module__},
    )
    try:
        mtp = kind.from_pretrained(model)
        # The class of transformers, because a compiling subprocess gets a pickled copy.
        mtp.__class__ = MtpModel
        return mtp
    except Exception as error:  # any file of the checkpoint may be missing or damaged
        raise UnsupportedModelError(
            f"the MTP modules of {name} cannot be loaded from {model.config.name_or_path!r} ({first_line(error)}); "
            "use a checkpoint with them, or leave out draft"
        ) from error


def _names_of_mtp(model: PreTrainedModel) -> re.Pattern:
    """Return the pattern of the names of MTP weights. That of transformers has the indices of released models only."""
    config = model.config.get_text_config()
    first = config.num_hidden_layers
    further = "|".join(str(index) for index in range(first, first + config.num_mtp_layers))
    return re.compile(rf"(^|\.)(layers\.({further})|mtp)\.")


def head_layer_specs(model: PreTrainedModel) -> Sequence[LayerSpec]:
    """Return the specs of the cache layers of a model's draft head; empty without one."""
    head = draft_head_of(model)
    if head is None:
        return ()
    probe = ProbeCache(config=head.config)
    zeros = torch.zeros(1, 1, head.handed.shape[-1], dtype=model.dtype, device=model.device)
    position = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with torch.no_grad():
        for index in range(head.layer_count):
            head.predictor.forward_layer(index, zeros, position, cast(Any, probe), inputs_embeds=zeros)
    kinds = layer_types_and_windows(head.config)
    return [
        layer_spec_of(index, model, layer, *kind)
        for index, (kind, layer) in enumerate(zip(kinds, probe.layers, strict=True))
    ]
