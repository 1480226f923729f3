"""Trained draft heads as a part of a model: multi-token-prediction (MTP) modules of its checkpoint.

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

#: A position after every query, which causal masks hide.
_HIDDEN = 2**31


class _Step(threading.local):
    """The hidden states of a step that is running or traced in this thread."""

    def __init__(self) -> None:
        self.is_collecting = False
        self.hidden: torch.Tensor | None = None


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
        mtp: Its MTP modules.

    Attributes:
        handed: [1, KEPT_POSITIONS, layers, hidden_size], the states that each layer takes next, by position.
        end: Position after the newest of them, int64 [1].
    """

    handed: torch.Tensor
    end: torch.Tensor

    def __init__(self, model: PreTrainedModel, mtp: MtpModel) -> None:
        super().__init__()
        self.mtp = mtp
        self.layer_count = len(mtp.layers)
        size = model.config.get_text_config(decoder=True).hidden_size
        zeros = torch.zeros(1, KEPT_POSITIONS, self.layer_count, size, dtype=model.dtype, device=model.device)
        self.register_buffer("handed", zeros, persistent=False)
        self.register_buffer("end", torch.zeros(1, dtype=torch.int64, device=model.device), persistent=False)

    @property
    def config(self) -> PreTrainedConfig:
        """Config of its layers."""
        return self.mtp.config

    def tie(self, model: PreTrainedModel) -> None:
        """Use the model's embeddings, head and rotary embedding, which stay modules of the model only."""
        shared = {
            "embed_tokens": model.get_input_embeddings(),
            "shared_head": model.get_output_embeddings(),
            "rotary_emb": getattr(model.get_decoder(), "rotary_emb", None),
        }
        for name, module in shared.items():
            if hasattr(self.mtp, name):
                delattr(self.mtp, name)
            object.__setattr__(self.mtp, name, module)

    def follow(
        self, input_ids: torch.Tensor, input_pos: torch.Tensor, cache: LayeredCache, hidden: torch.Tensor
    ) -> None:
        """Run the head over the tokens of a step of the model.

        Args:
            input_ids: int64 [1, length].
            input_pos: Position of the first token, int64 [1].
            cache: The state in the step.
            hidden: [1, length, hidden_size], the last hidden states of the model.
        """
        self._run(input_ids, input_pos, cache, hidden, None)

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
        return self.mtp.shared_head(self._run(input_ids, input_pos, cache, None, link))[:, -1]

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
        embeddings = self.mtp.embed_tokens(input_ids)
        states, outputs = [] if hidden is None else [hidden], []
        for index in range(self.layer_count):
            before = window[:, -1:, index]
            if hidden is not None:
                # Not a slice, because its size would be 1 for a length of 2, and tracing guards against that.
                before = torch.cat([before, states[index]], dim=1).index_select(1, new_tokens)
            outputs.append(
                self.mtp.forward_layer(index, before, positions, cast(Any, layers), inputs_embeds=embeddings)
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


def _keep_hidden(module: nn.Module, arguments: Any, output: Any) -> None:
    """Keep the last hidden states of a decoder inside `collecting_hidden`."""
    if _step.is_collecting:
        _step.hidden = output[0]


@contextmanager
def collecting_hidden() -> Iterator[_Step]:
    """Collect the last hidden states of a model with a draft head inside the block."""
    _step.is_collecting = True
    try:
        yield _step
    finally:
        _step.is_collecting, _step.hidden = False, None


def attach_head(model: PreTrainedModel, draft: str) -> DraftHead:
    """Attach the draft head that a model's checkpoint has, or return the one that is attached.

    Args:
        model: A causal LM in eval mode. Its weights stay the same.
        draft: "mtp" for the multi-token-prediction modules.

    Raises:
        InputError: If `draft` has another value.
        UnsupportedModelError: If the checkpoint has no such modules, or they cannot be used.
    """
    if draft != "mtp":
        raise InputError(f"draft must be 'mtp', got {draft!r:.100}; leave it out for other drafts")
    head = draft_head_of(model)
    if head is None:
        head = attach_mtp(model, _load_mtp(model))
    return head


def attach_mtp(model: PreTrainedModel, mtp: MtpModel) -> DraftHead:
    """Attach MTP modules to a model.

    Raises:
        UnsupportedModelError: If a layer of them keeps a state that cannot be rolled back.
    """
    nn.Module.to(mtp, device=model.device, dtype=model.dtype).eval().requires_grad_(False)
    head = DraftHead(model, mtp)
    head.tie(model)
    for index, (layer_type, _) in enumerate(layer_types_and_windows(head.config)):
        if layer_type in (*STATE_TYPES, *HYBRID_TYPES):
            raise UnsupportedModelError(
                f"draft must be left out for {type(model).__name__}: MTP layer {index} is of type {layer_type!r}, "
                "whose state cannot take back tokens; decode without it"
            )
    model.add_module(DRAFT_HEAD, head)
    model.get_decoder().register_forward_hook(_keep_hidden)
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
            head.mtp.forward_layer(index, zeros, position, cast(Any, probe), inputs_embeds=zeros)
    kinds = layer_types_and_windows(head.config)
    return [
        layer_spec_of(index, model, layer, *kind)
        for index, (kind, layer) in enumerate(zip(kinds, probe.layers, strict=True))
    ]
