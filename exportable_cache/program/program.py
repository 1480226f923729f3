"""A model with its cache as traceable modules: two forms of state, one module per method."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn
from torch.export import Dim, ShapesCollection

from ..cache.attention.functions import ATTENTION
from ..cache.attention.implementation import attention_of
from ..cache.step import StepContext, known_length
from ..common.method_io import name_forward
from ..errors import InputError, UnsupportedModelError
from ..models.cache_factory import ExportableEncoderDecoderCache
from ..models.layers.codebooks import codebooks_of
from ..models.layers.layout import cache_argument
from ..models.patches.mechanisms.rope import check_follows, rope_by
from ..models.patches.mechanisms.speech import short_masks
from ..models.patches.registry import patch_model
from ..models.positions import check_rope, rope_rule
from ..models.scans import longest_step
from .inputs.cross_items import CrossModality, cross_methods, without_items
from .inputs.encoder_decoder import EncodeModule, decoder_arguments, seq2seq_methods
from .inputs.front import travelling_beside
from .inputs.image_masks import image_masks
from .inputs.modality import EmbedModule
from .inputs.multimodal import multimodal_methods
from .items import ITEM_STATES, ITEMS_SEEN
from .last_token import choose_last_token_early
from .methods import KV_SLOTS, ROPE_LENGTHS, checked_prefill_chunk, methods_for
from .spec import Form, Logits, ProgramSpec
from .tracing import told_by

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from transformers import PreTrainedModel

    from ..models.cache_factory import ExportableCache
    from ..models.layers.encoder import Encoder
    from .inputs.modality import Modality
    from .methods import ProgramMethod


def takes_positions(model: PreTrainedModel, name: str = "position_ids") -> bool:
    """Whether positions are handed to the model explicitly, as argument `name`. Without them some count from 0 in every
    call (Bamba).

    The RoBERTa family counts from its padding index, and some models take none: those ask the cache.
    """
    own_rule = any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules())
    return name in inspect.signature(model.forward).parameters and not own_rule


class ProgramModule(nn.Module):
    """One method over a cache; `forward` takes the method's inputs, by name or in order. See the two forms below.

    Args:
        model: The model.
        cache: Its cache.
        method: Which inputs to take.
        logits: Which logits to give.
    """

    def __init__(
        self, model: PreTrainedModel, cache: ExportableCache, method: ProgramMethod, logits: Logits = Logits.LAST
    ) -> None:
        super().__init__()
        self.model = model
        self.layout = cache
        patch_model(model)
        self.method = method
        self.codebooks = codebooks_of(model.config)
        self.logits = Logits.ALL if method.only_scores else logits
        self.scored = method.scored_tokens if self.logits is Logits.LAST else 0
        name_forward(self, (*method.input_names, *self.further_arguments))
        # Most models can leave out the head's work for all but the last token; the others are sliced after it.
        parameters = inspect.signature(model.forward).parameters
        self.keeps_last = self.logits is Logits.LAST and "logits_to_keep" in parameters
        self.positions_name = (
            "decoder_position_ids" if isinstance(cache, ExportableEncoderDecoderCache) else "position_ids"
        )
        self.cache_argument = cache_argument(model)
        self.takes_positions = takes_positions(model, self.positions_name)
        self.has_changing_rope = rope_rule(model) is not None

    #: What `forward` takes after the method's inputs.
    further_arguments: ClassVar[tuple[str, ...]] = ()

    def run(
        self,
        cache: ExportableCache,
        input_pos: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **further: torch.Tensor,
    ) -> torch.Tensor:
        """Logits [batch, vocab] or [batch, length, vocab] of tokens at `input_pos` [batch], or of the last few, see
        `ProgramMethod.scored_tokens`.

        They come as `input_ids` [batch, length], of several codebooks [batch, length, codebooks] with logits of each
        where the model gives them, [batch, codebooks, vocab], or as `inputs_embeds` [batch, length, hidden_size], wider
        where features for further layers go with them (`multimodal.deepstack`). Their rotary positions are those in the
        cache, or `rope_deltas` [batch] more, or `position_ids` [3, batch, length]. Tokens of one number in `image_ids`
        [batch, length] see each other; -1 is text. Where the factors of RoPE change with the length, they are chosen by
        `rope_lengths` [batch], or are those of short sequences.
        """
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        assert tokens is not None
        if self.codebooks is not None:
            assert input_ids is not None
            input_ids = self.codebooks.taken(input_ids)
        position_ids, rope_deltas = further.pop("position_ids", None), further.pop("rope_deltas", None)
        image_ids, rope_lengths = further.pop("image_ids", None), further.pop(ROPE_LENGTHS.name, None)
        seen, states = further.pop(ITEMS_SEEN, None), further.pop(ITEM_STATES, None)
        if isinstance(cache, ExportableEncoderDecoderCache):
            assert input_ids is not None
            options = decoder_arguments(_encoder_of(self.layout), cache, input_ids, **further)
        else:
            options = {"input_ids": input_ids} if inputs_embeds is None else {"inputs_embeds": inputs_embeds}
        if self.takes_positions:
            if position_ids is None:
                first = input_pos if rope_deltas is None else input_pos + rope_deltas
                position_ids = first[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
            options[self.positions_name] = position_ids
        if image_ids is not None:
            options["attention_mask"] = image_masks(
                self.model.config.get_text_config(), tokens, cache, image_ids, input_pos, self.method.sees
            )
        if seen is not None:
            options |= {"cross_attention_mask": seen.transpose(1, 2), "cross_attention_states": states}
        options[self.cache_argument] = cache
        with longest_step(self.method.max_length), short_masks():
            kept = {"logits_to_keep": self._kept(tokens)} if self.keeps_last else {}
            rope = rope_by(rope_lengths) if self.has_changing_rope else nullcontext()
            with travelling_beside(self.model, self.method.travels, options), rope:
                logits = self.model(use_cache=True, **options, **kept).logits
        if self.codebooks is not None:
            logits = self.codebooks.given(logits)
        if self.scored:
            return logits if self.keeps_last else logits[:, self._kept(tokens)]
        return logits[:, -1] if self.logits is Logits.LAST else logits

    def _kept(self, tokens: torch.Tensor) -> int | torch.Tensor:
        """Which tokens logits are wanted of, as `logits_to_keep` takes it: how many of the last, or their indices."""
        if not self.scored:
            return 1
        length = tokens.shape[1]
        number = torch.sym_min(length, self.scored)
        return torch.arange(number, device=tokens.device) + (length - number)


class ResidentModule(ProgramModule):
    """The cache tensors are buffers, mutated in place. Positions are an input, so the length is no state.

    Position 0 starts a sequence anew without touching the buffers, and an earlier position takes tokens back.
    """

    def __init__(
        self, model: PreTrainedModel, cache: ExportableCache, method: ProgramMethod, logits: Logits = Logits.LAST
    ) -> None:
        super().__init__(model, cache, method, logits)
        self.state_buffers = {
            name: name.replace(".", "_") for name, _ in cache.named_state() if not name.endswith(".cumulative_length")
        }
        for name, tensor in cache.named_state():
            if name in self.state_buffers:
                self.register_buffer(self.state_buffers[name], tensor, persistent=False)

    def call(self, **inputs: torch.Tensor) -> torch.Tensor:
        """
        Args:
            **inputs: The method's, such as input_ids int64 [batch, length] and input_pos int64 [batch], the position of
                each row's first token.

        Returns:
            Logits [batch, vocab], or [batch, length, vocab] if all were asked for.
        """
        tensors = {name: getattr(self, buffer) for name, buffer in self.state_buffers.items()}
        slots = inputs.pop(KV_SLOTS.name, None)
        context = StepContext(
            inputs["input_pos"],
            self.method.kv_read_len,
            kv_slots=None if slots is None else slots.shape[0],
            sees_items=ITEMS_SEEN in inputs,
            length=known_length(inputs["input_pos"]),
        )
        cache = self.layout.with_state(tensors, context)
        residence = self.layout.residence
        if residence is None:
            return self.run(cache, **inputs)
        residence.forget()
        logits = self.run(cache, **inputs)
        residence.finish()
        return logits


class ExplicitModule(ProgramModule):
    """The cache is an input and an output, in its registered pytree form; no input is mutated."""

    further_arguments = ("cache",)

    def call(self, cache: ExportableCache, **inputs: torch.Tensor) -> tuple[torch.Tensor, ExportableCache]:
        """
        Args:
            cache: State before the step; the lengths inside are not read.
            **inputs: See `ResidentModule`.

        Returns:
            Logits as in `ResidentModule`, and the cache after the step.
        """
        context = StepContext(
            inputs["input_pos"], self.method.kv_read_len, in_place=False, sees_items=ITEMS_SEEN in inputs
        )
        cache = cache.with_state(dict(cache.named_state()), context)
        return self.run(cache, **inputs), cache


def program_methods(model: PreTrainedModel, cache: ExportableCache, spec: ProgramSpec) -> dict[str, ProgramMethod]:
    """The methods of a program over `cache`: of a text decoder, or of an encoder and its decoder.

    Args:
        model: Which may take several ids for each token.
        cache: In the layout of the target.
        spec: Of the program, decided for this cache.

    Raises:
        InputError: If a length is more than the cache holds, or an encoder-decoder is asked for what it does not have.
        UnsupportedModelError: If rows get past a change of its RoPE's factors, and it is of code that does not follow.
    """
    methods, codebooks, rule = _program_methods(cache, spec), codebooks_of(model.config), rope_rule(model)
    if codebooks is not None:
        methods = {name: method.of_codebooks(codebooks.count) for name, method in methods.items()}
    if rule is not None and rule.is_reached(cache.max_length):
        patch_model(model)
        check_follows(model)
        methods = {
            name: replace(method, inputs=(*method.inputs, ROPE_LENGTHS)) if method.is_step else method
            for name, method in methods.items()
        }
    return methods


def _program_methods(cache: ExportableCache, spec: ProgramSpec) -> dict[str, ProgramMethod]:
    if not isinstance(cache, ExportableEncoderDecoderCache):
        methods = methods_for(cache, spec)
        crossing = [one for one in spec.modalities if isinstance(one, CrossModality)]
        if crossing:
            return cross_methods(methods, crossing[0], cache)
        return multimodal_methods(methods, spec.modalities) if spec.modalities else methods
    if spec.modalities:
        raise InputError(
            f"modalities are {', '.join(m.kind for m in spec.modalities)}; an encoder-decoder's go through encode: "
            "leave them out"
        )
    if spec.score_length:
        raise InputError(f"score_length is {spec.score_length}; drafts are scored by text decoders only: leave it out")
    if spec.forward:
        raise InputError("a method 'forward' feeds a text decoder; an encoder-decoder has none: export without it")
    return seq2seq_methods(cache, spec)


def front_module(
    model: PreTrainedModel, cache: ExportableCache, method: ProgramMethod, modalities: Sequence[Modality]
) -> nn.Module:
    """The module of a method that is no step: an encoder, or the embedding table."""
    if method.name == "embed":
        size = method.outputs[0].shape[-1]
        assert isinstance(size, int)
        return EmbedModule(model, size, modalities[0].travels)
    for modality in modalities:
        if method.name == modality.method.name:
            return modality.module(model)
    return EncodeModule(model, _encoder_of(cache))


def _encoder_of(cache: ExportableCache) -> Encoder:
    """Return the encoder that the cache of an encoder-decoder knows."""
    assert isinstance(cache, ExportableEncoderDecoderCache)
    assert cache.encoder is not None
    return cache.encoder


class Program:
    """A model, its cache, and the methods to export.

    Args:
        model: A transformers causal LM, in eval mode.
        cache: Its cache. The exported programs start from zeros, whatever it holds.
        spec: What the program is to be.

    Raises:
        InputError: If the model is in training mode, or the cache does not hold what the spec asks for, or is part of a
            cache.
    """

    def __init__(self, model: PreTrainedModel, cache: ExportableCache, spec: ProgramSpec | None = None) -> None:
        if model.training:
            raise InputError(f"{type(model).__name__} is in training mode; call model.eval() before exporting it")
        if cache.residence is not None or cache.ranks is not None:
            what = "offloaded layers" if cache.residence is not None else "the heads of one rank"
            raise InputError(f"a program on disk keeps its own cache, and this one has {what}; allocate another one")
        spec = ProgramSpec() if spec is None else spec
        self.model = model
        self.form = Form(spec.form)
        self.logits = Logits(spec.logits)
        self.attention = spec.attention or ATTENTION
        self.experts = spec.experts
        self.modalities = spec.modalities
        check_rope(model, cache.max_length, spec.takes_lengths)
        # Before the model is run to adapt the cache to it.
        checked_prefill_chunk(cache, spec.prefill_chunk)
        if not any(isinstance(modality, CrossModality) for modality in self.modalities):
            cache = without_items(cache)
        # A target's own operators know causal attention, not images that see themselves.
        if spec.adapt is not None and not any(modality.facts.sees for modality in self.modalities):
            cache = spec.adapt(model, cache)
        self.methods = program_methods(model, cache, spec.decided(cache))
        zeros = {name: torch.zeros_like(tensor) for name, tensor in cache.named_state()}
        self.cache = cache.with_state(zeros)
        module_class = ResidentModule if self.form is Form.RESIDENT else ExplicitModule
        self.modules = {
            name: module_class(model, self.cache, method, self.logits)
            if method.is_step
            else front_module(model, self.cache, method, self.modalities)
            for name, method in self.methods.items()
        }

    @property
    def batch_size(self) -> int:
        """Rows."""
        return self.cache.batch_size

    def example_inputs(self, method: ProgramMethod) -> tuple:
        """Inputs of the right shapes for one method; of an explicit program also the cache."""
        sizes = {"batch": self.batch_size}
        for name, (least, most) in method.dynamic_sizes.items():
            # Away from both ends of the range, so that no bound is taken for the size itself.
            # An encoder may shorten its input so much that little more than the least gives a single position, which is
            # a size of its own.
            further = 5 if method.is_step else (most - least) // 2
            sizes[name] = min(max(2, least, min(most - 1, least + further)), most)
        if "length" in sizes:
            sizes["length"] -= sizes["length"] % method.multiple
        inputs = tuple(
            torch.zeros(
                spec.sizes(sizes),
                dtype=getattr(torch, spec.dtype),
                device=self.cache.device,
            )
            for spec in method.inputs
        )
        if self.form is Form.RESIDENT or not method.is_step:
            return inputs
        # The example is pickled with the program, and read back only if torch knows all it refers to.
        return (*inputs, type(self.cache).from_layers(self.cache.layers))

    def export(self, name: str, strict: bool = False) -> ExportedProgram:
        """Trace one method with torch.export; sizes that the method has a range for are dynamic.

        Where the model's code holds from some length on only, the method's `min_length` is raised to it.

        Args:
            name: Of the method.
            strict: Trace through TorchDynamo instead of running the Python code.

        Raises:
            UnsupportedModelError: If the model's code cannot be traced.
        """
        method = self.methods[name]
        inputs = self.example_inputs(method)
        dynamic = ShapesCollection()
        sizes = {name: Dim(name, min=least, max=most) for name, (least, most) in method.dynamic_sizes.items()}
        if "length" in sizes and method.multiple > 1:
            pieces = Dim(
                "_length", min=-(-method.min_length // method.multiple), max=method.max_length // method.multiple
            )
            sizes["length"] = method.multiple * pieces
        for spec, example in zip(method.inputs, inputs):
            named = {index: sizes[size] for index, size in enumerate(spec.shape) if size in sizes}
            if named:
                dynamic[example] = named
        with torch.no_grad(), attention_of(self.model, self.attention, self.experts):
            # The range starts at 2 while strides are compared for every length: such guards become runtime asserts.
            try:
                program = torch.export.export(
                    self.modules[name],
                    inputs,
                    dynamic_shapes=dynamic if sizes else None,  # type: ignore[arg-type]  # missing in torch's types
                    strict=strict,
                    prefer_deferred_runtime_asserts_over_guards=True,
                )
                if method.is_step and self.logits is Logits.LAST:
                    choose_last_token_early(program)
                return program
            except Exception as error:  # any model code runs here, under any of the tracer's own errors
                least = _least_length(error)
                if least is not None and 1 < method.min_length < least < method.max_length:
                    # Some code compares the length with a kernel or a small constant; shorter chunks go token by token.
                    self.methods[name] = replace(method, min_length=least)
                    return self.export(name, strict)
                raise UnsupportedModelError(
                    f"{type(self.model).__name__} cannot be traced ({name}: {told_by(error)}); "
                    "run it in a session, Session.from_model, instead of exporting it"
                ) from error


def _least_length(error: Exception) -> int | None:
    """The lower bound of the length that torch.export suggests or has found in a constraint violation, None if there is
    none.
    """
    found = re.search(
        r"^\s*length = Dim\('length', min=(\d+)|range \d+ <= length <= \d+ satisfy the generated guard (\d+) <= L\[",
        str(error),
        re.M,
    )
    return None if found is None else int(found[1] or found[2])
