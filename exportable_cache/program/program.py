"""A model with its cache as traceable modules: two forms of state, one module per method."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.export import Dim, ShapesCollection

from ..cache.attention.functions import ATTENTION
from ..cache.attention.implementation import attention_of
from ..cache.attention.operators import MOST_QUERIES, finding_filled
from ..cache.layers import LinearLayer
from ..cache.step import StepContext, known_length
from ..common.compat.transformers import cache_argument
from ..common.tensors import TensorSpec, name_forward
from ..errors import InputError, UnsupportedModelError, describe_trace_error
from ..models.cache_factory import ExportableEncoderDecoderCache
from ..models.draft_heads import collecting_hidden, draft_head_of
from ..models.joined_linears import joined_products, separate_linears
from ..models.layers.specs import codebooks_of
from ..models.lora import (
    ADAPTED,
    ADAPTERS,
    WRITE_ADAPTER,
    LoraSlots,
    WriteAdapter,
    adapting,
    add_slots,
    reading_slots,
    remove_slots,
    slot_tensors,
    slots_of,
)
from ..models.patches.mechanisms.rope import check_follows, rope_by
from ..models.patches.mechanisms.speech import short_masks
from ..models.patches.registry import patch_model
from ..models.positions import check_rope, rope_rule, takes_positions, text_model_of
from ..models.quantized_rows import indexed_tables
from ..models.scans import longest_step
from .decoders import EncodeModule, checked_prefill_chunk, decoder_arguments, methods_for, seq2seq_methods
from .inputs.front import passing_extra_features
from .inputs.image_masks import image_masks
from .inputs.modalities import CrossModality, EncoderModality, cross_methods, without_items
from .inputs.modality import EmbedModule
from .inputs.multimodal import multimodal_methods
from .last_token import choose_last_token_early
from .methods import DRAFT, ITEM_STATES, ITEMS_SEEN, KV_SLOTS, ROPE_LENGTHS, SHIFT, ProgramMethod
from .shift import method_of, shift_module
from .spec import Form, Logits, ProgramSpec

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Graph
    from transformers import PreTrainedModel

    from ..models.cache_factory import ExportableCache
    from ..models.layers.encoder import Encoder
    from .inputs.modality import Modality


class ProgramModule(nn.Module):
    """Base class of a method over a cache; `forward` takes the method's inputs, by name or in order.

    Args:
        model: The model.
        cache: Its cache.
        method: The method, which determines the inputs.
        logits: Which logits to return.
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
        # Most models can compute the head for the last token only; logits of the others are sliced.
        text_model = text_model_of(model)
        # A step calls it by its path, because compiled layers are found by the paths of their modules.
        self.has_inner_text_model = text_model is not model
        parameters = inspect.signature(text_model.forward).parameters
        self.keeps_last = self.logits is Logits.LAST and "logits_to_keep" in parameters
        self.positions_name = (
            "decoder_position_ids" if isinstance(cache, ExportableEncoderDecoderCache) else "position_ids"
        )
        self.cache_argument = cache_argument(text_model)
        self.takes_positions = takes_positions(model, self.positions_name)
        self.has_changing_rope = rope_rule(model) is not None
        self.has_states = any(isinstance(layer, LinearLayer) for layer in cache.layers)
        # One that is attached later has no layers in this cache.
        self.has_draft_head = draft_head_of(model) is not None

    @property
    def further_arguments(self) -> tuple[str, ...]:
        """Arguments of `forward` after the method's inputs."""
        return ()

    def run(
        self,
        cache: ExportableCache,
        input_pos: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **further: torch.Tensor,
    ) -> torch.Tensor:
        """Compute the logits of new tokens.

        Args:
            cache: The state before the step.
            input_pos: int64 [batch], cache position of each row's first token.
            input_ids: int64 [batch, length], or [batch, length, codebooks].
            inputs_embeds: [batch, length, hidden_size] instead of ids; wider if it includes extra features.
            **further: Optional inputs of the method. `rope_deltas` [batch] is added to cache positions to give rotary
                ones; `position_ids` [axes, batch, length] replaces them. Tokens with the same index in `image_ids`
                [batch, length] attend to each other, -1 is text. `rope_lengths` [batch] selects RoPE factors that
                depend on the length; without it those of short sequences are used. `adapters` [batch] are the slots of
                the rows' adapters, 0 for none.

        Returns:
            [batch, vocab], [batch, length, vocab], or those of the last tokens, see `ProgramMethod.scored_tokens`;
            [batch, codebooks, vocab] for models with codebooks.
        """
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        assert tokens is not None
        if self.codebooks is not None:
            assert input_ids is not None
            input_ids = self.codebooks.taken(input_ids)
        position_ids, rope_deltas = further.pop("position_ids", None), further.pop("rope_deltas", None)
        image_ids, rope_lengths = further.pop("image_ids", None), further.pop(ROPE_LENGTHS.name, None)
        seen, states = further.pop(ITEMS_SEEN, None), further.pop(ITEM_STATES, None)
        slots = further.pop(ADAPTERS.name, None)
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
        if self.keeps_last:
            options["logits_to_keep"] = self._kept(tokens) if self.scored else 1
        features = self.method.extra_features
        with (
            longest_step(self.method.max_length) if self.has_states else nullcontext(),
            short_masks() if isinstance(cache, ExportableEncoderDecoderCache) else nullcontext(),
            adapting(slots) if slots is not None else nullcontext(),
            rope_by(rope_lengths) if self.has_changing_rope else nullcontext(),
            passing_extra_features(self.model, features, options) if features else nullcontext(),
        ):
            logits = self._logits(input_pos, cache, options)
        if self.codebooks is not None:
            logits = self.codebooks.given(logits)
        if self.scored:
            return logits if self.keeps_last else logits[:, self._kept(tokens)]
        return logits[:, -1] if self.logits is Logits.LAST else logits

    def _logits(self, input_pos: torch.Tensor, cache: ExportableCache, options: dict[str, Any]) -> torch.Tensor:
        """Run the model, and its draft head over the same tokens if it has one."""
        model: Any = self.model.language_model if self.has_inner_text_model else self.model
        head = draft_head_of(self.model) if self.has_draft_head else None
        if head is None:
            return model(use_cache=True, **options).logits
        with collecting_hidden() as hidden:
            logits = model(use_cache=True, **options).logits
            head.follow(options["input_ids"], input_pos, cache, hidden)
        return logits

    def _kept(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the indices of the scored tokens."""
        length = tokens.shape[1]
        number = torch.sym_min(length, self.scored)
        return torch.arange(number, device=tokens.device) + (length - number)


class ResidentModule(ProgramModule):
    """A method whose cache tensors are buffers, mutated in place. Positions are an input, so the length is not state.

    Position 0 starts a new sequence without clearing the buffers; an earlier position discards the tokens after it.

    Args:
        model: See `ProgramModule`.
        cache: See `ProgramModule`.
        method: See `ProgramModule`.
        logits: See `ProgramModule`.
        on_gpu: True if attention of few tokens reads the filled slots, see `cache.attention.operators`, and linear
            layers that `join_linears` has joined are one product.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: ExportableCache,
        method: ProgramMethod,
        logits: Logits = Logits.LAST,
        on_gpu: bool = False,
    ) -> None:
        super().__init__(model, cache, method, logits)
        self.on_gpu = on_gpu
        self.state_buffers = {
            name: name.replace(".", "_") for name, _ in cache.named_state() if not name.endswith(".cumulative_length")
        }
        for name, tensor in cache.named_state():
            if name in self.state_buffers:
                self.register_buffer(self.state_buffers[name], tensor, persistent=False)

    def call(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Run one step and update the buffers.

        The caller checks that the tokens fit, because lengths cannot be read while a step is traced.

        Args:
            **inputs: The method's inputs, such as input_ids int64 [batch, length] and input_pos int64 [batch], the
                position of each row's first token.

        Returns:
            Logits [batch, vocab], or [batch, length, vocab] for `Logits.ALL`.
        """
        tensors = {name: getattr(self, buffer) for name, buffer in self.state_buffers.items()}
        slots = inputs.pop(KV_SLOTS.name, None)
        context = StepContext(
            inputs["input_pos"],
            self.method.kv_read_len,
            kv_slots=None if slots is None else slots.shape[0],
            sees_items=ITEMS_SEEN in inputs,
            length=known_length(inputs["input_pos"]),
            # By the method, because the length of a step may be dynamic.
            filled=[] if self.on_gpu and self.method.max_length <= MOST_QUERIES else None,
        )
        cache = self.layout.with_state(tensors, context)
        offloader = self.layout.offloader
        if offloader is None:
            if not self.on_gpu:
                return self.run(cache, **inputs)
            with finding_filled(context.filled), joined_products():
                return self.run(cache, **inputs)
        offloader.forget()
        logits = self.run(cache, **inputs)
        offloader.finish()
        return logits


class DraftModule(ResidentModule):
    """Module of the method `draft`."""

    def run(
        self,
        cache: ExportableCache,
        input_pos: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **further: torch.Tensor,
    ) -> Any:
        """Return the logits of the draft head, see `DraftHead.draft`."""
        head = draft_head_of(self.model)
        assert head is not None and input_ids is not None
        return (head.draft(input_ids, input_pos, cache, further["link"]),)


class ExplicitModule(ProgramModule):
    """A method that takes and returns the cache, in its registered pytree form; no input is mutated."""

    @property
    def further_arguments(self) -> tuple[str, ...]:
        """See `ProgramModule.further_arguments`."""
        return ("cache", "lora") if ADAPTERS in self.method.inputs else ("cache",)

    def call(
        self, cache: ExportableCache, lora: Sequence[torch.Tensor] = (), **inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ExportableCache]:
        """Run one step and return the new state.

        Args:
            cache: State before the step; its lengths are not read.
            lora: Tensors of the slots for adapters, if the method takes them, see `slot_tensors`.
            **inputs: See `ResidentModule.call`.

        Returns:
            Logits as in `ResidentModule`, and the cache after the step.
        """
        context = StepContext(
            inputs["input_pos"], self.method.kv_read_len, in_place=False, sees_items=ITEMS_SEEN in inputs
        )
        cache = cache.with_state(dict(cache.named_state()), context)
        with reading_slots(self.model, lora) if lora else nullcontext():
            return self.run(cache, **inputs), cache


def program_methods(model: PreTrainedModel, cache: ExportableCache, spec: ProgramSpec) -> dict[str, ProgramMethod]:
    """Return the methods of a program over `cache`, for a text decoder or an encoder-decoder.

    Args:
        model: The model.
        cache: The cache, in the layout of the target.
        spec: The program's spec, after `ProgramSpec.decided`.

    Raises:
        InputError: If a length exceeds the capacity of the cache, or an encoder-decoder lacks what the spec asks for.
        UnsupportedModelError: If RoPE factors change within the capacity and the model's code cannot switch them.
    """
    slots = _slots_for(model, cache, spec)
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
    if spec.shift:
        if spec.form is Form.EXPLICIT or spec.modalities:
            what = "takes images or audio" if spec.modalities else "has its cache as an input"
            raise InputError(f"shift must be False for a program that {what}, got True; leave it out")
        methods = {**methods, SHIFT.name: method_of(model, cache)}
    if (head := draft_head_of(model)) is not None:
        several = {f"a batch of {cache.batch_size} rows": cache.batch_size != 1, "shift": spec.shift}
        _check_alone("a draft head", cache, spec, **several, **{_EXPLICIT: Form(spec.form) is Form.EXPLICIT})
        head.tie(model)
        methods = {**methods, DRAFT.name: DRAFT}
    return methods if slots is None else _adapted_methods(methods, slots, spec.lora_inputs)


_EXPLICIT = "a cache that is an input and an output"


def _check_alone(what: str, cache: ExportableCache, spec: ProgramSpec, **further: bool) -> None:
    """Check that a program has none of the parts with which `what` cannot be combined."""
    others = {
        "an encoder-decoder": isinstance(cache, ExportableEncoderDecoderCache),
        f"modalities {', '.join(one.kind for one in spec.modalities)}": bool(spec.modalities),
        "offloaded layers": cache.offloader is not None,
        "a model that is split over processes": cache.ranks is not None,
        **further,
    }
    for other, found in others.items():
        if found:
            raise InputError(f"{what} cannot be combined with {other}; leave one of them out")


def _slots_for(model: PreTrainedModel, cache: ExportableCache, spec: ProgramSpec) -> LoraSlots | None:
    """Give the model the slots for adapters that a spec asks for; those of another session stay."""
    if not spec.lora_slots:
        return None
    explicit = Form(spec.form) is Form.EXPLICIT and not spec.lora_inputs
    _check_alone(f"lora_slots={spec.lora_slots}", cache, spec, **{_EXPLICIT: explicit})
    return add_slots(model, spec.lora_slots, spec.lora_rank, spec.lora_targets)


def _adapted_methods(
    methods: Mapping[str, ProgramMethod], slots: LoraSlots, replaces: bool
) -> dict[str, ProgramMethod]:
    """Add the steps that also take the slot of each row, and the method that writes an adapter.

    The others stay, so that a step without an adapter costs nothing more, unless the adapted ones are to replace them.
    """
    prefix = "" if replaces else ADAPTED
    adapted = {
        f"{prefix}{name}": replace(method, name=f"{prefix}{name}", inputs=(*method.inputs, ADAPTERS))
        for name, method in methods.items()
        if method.is_step
    }
    written = (TensorSpec("next_slot", "int64", (1,)),)
    return {
        **methods,
        **adapted,
        WRITE_ADAPTER: ProgramMethod(WRITE_ADAPTER, 1, 1, inputs=slots.inputs, outputs=written),
    }


def _program_methods(cache: ExportableCache, spec: ProgramSpec) -> dict[str, ProgramMethod]:
    if not isinstance(cache, ExportableEncoderDecoderCache):
        for modality in spec.modalities:
            if cache.max_length is not None and modality.tokens > cache.max_length:
                raise InputError(
                    f"max_cache_len must be at least {modality.tokens}, the embeddings of one {modality.kind} of this "
                    f"size, got {cache.max_length}; raise it, or pass a smaller example, image_size or "
                    "audio_seconds"
                )
        methods = methods_for(cache, spec)
        crossing = [one for one in spec.modalities if isinstance(one, CrossModality)]
        if crossing:
            return cross_methods(methods, crossing[0], cache)
        return multimodal_methods(methods, spec.modalities) if spec.modalities else methods
    if spec.score_length:
        raise InputError(f"score_length must be 0 for an encoder-decoder, got {spec.score_length}; leave it out")
    if spec.forward:
        raise InputError("forward must be False for an encoder-decoder, got True; leave it out")
    return seq2seq_methods(cache, spec)


def front_module(
    model: PreTrainedModel, cache: ExportableCache, method: ProgramMethod, modalities: Sequence[Modality]
) -> nn.Module:
    """Return the module of a method that is not a decoder step: an encoder, the embedding table, or a writer."""
    if method.name == WRITE_ADAPTER:
        slots = slots_of(model)
        assert slots is not None
        return WriteAdapter(model, slots)
    if method.name == DRAFT.name:
        return DraftModule(model, cache, method)
    if method.name == "embed":
        size = method.outputs[0].shape[-1]
        assert isinstance(size, int)
        return EmbedModule(model, size, modalities[0].extra_features)
    for modality in modalities:
        if method.name == modality.method.name:
            return modality.module(model)
    items = next((one for one in modalities if isinstance(one, EncoderModality)), None)
    return EncodeModule(model, _encoder_of(cache), items)


def _encoder_of(cache: ExportableCache) -> Encoder:
    """Return the encoder stored in the cache of an encoder-decoder."""
    assert isinstance(cache, ExportableEncoderDecoderCache)
    assert cache.encoder is not None
    return cache.encoder


class Program:
    """A model, its cache, and the methods to export.

    Args:
        model: A transformers causal LM, in eval mode.
        cache: Its cache. Exported programs start from zeros, so its contents do not matter.
        spec: Which methods to make and how; the defaults of `ProgramSpec` if None.

    Raises:
        InputError: If the model is in training mode, or the cache is too small for the spec, offloaded, or split.
    """

    def __init__(self, model: PreTrainedModel, cache: ExportableCache, spec: ProgramSpec | None = None) -> None:
        if model.training:
            raise InputError(f"{type(model).__name__} is in training mode; call model.eval() before exporting it")
        if cache.offloader is not None or cache.ranks is not None:
            what = "offloaded layers" if cache.offloader is not None else "the heads of one rank"
            raise InputError(f"a program on disk keeps its own cache, and this one has {what}; allocate another one")
        spec = ProgramSpec() if spec is None else spec
        separate_linears(model)
        if not spec.lora_slots:
            # Programs on disk would otherwise contain them.
            remove_slots(model)
        self.model = model
        self.form = Form(spec.form)
        self.logits = Logits(spec.logits)
        self.attention = spec.attention or ATTENTION
        self.experts = spec.experts
        self.modalities = spec.modalities
        check_rope(model, cache.max_length, spec.takes_lengths)
        # Checked first, because adapting the cache may run the model.
        checked_prefill_chunk(cache, spec.prefill_chunk)
        if not any(isinstance(modality, CrossModality) for modality in self.modalities):
            cache = without_items(cache)
        # Other operators support causal attention only, not images whose tokens see each other.
        sees = any(modality.facts.sees for modality in self.modalities)
        if spec.adapt is not None and (spec.adapts_items or not sees):
            cache = spec.adapt(model, cache)
        self.methods = program_methods(model, cache, spec.decided(cache))
        self.lora = slots_of(model)
        zeros = {name: torch.zeros_like(tensor) for name, tensor in cache.named_state()}
        self.cache = cache.with_state(zeros)
        module_class = ResidentModule if self.form is Form.RESIDENT else ExplicitModule
        self.modules = {
            name: module_class(model, self.cache, method, self.logits)
            if method.is_step
            else shift_module(model, self.cache)
            if name == SHIFT.name
            else front_module(model, self.cache, method, self.modalities)
            for name, method in self.methods.items()
        }

    @property
    def batch_size(self) -> int:
        """Batch size."""
        return self.cache.batch_size

    def example_inputs(self, method: ProgramMethod) -> tuple:
        """Return example inputs of one method for tracing; those of an explicit program include the cache."""
        sizes = {"batch": self.batch_size}
        for name, (least, most) in method.dynamic_sizes.items():
            # Away from both ends, because torch.export specialises on sizes at a bound. Encoders get a middle size,
            # because they may shorten their input to a single position otherwise.
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
        # A plain cache, because the example is pickled with the program and must only refer to registered types.
        slots = [slot_tensors(self.model)] if ADAPTERS in method.inputs else []
        return (*inputs, type(self.cache).from_layers(self.cache.layers), *slots)

    def export(self, name: str, strict: bool = False) -> ExportedProgram:
        """Trace one method with torch.export; sizes for which the method has a range are dynamic.

        If the model's code only works from some length on, the method's `min_length` is raised to it.

        Args:
            name: Name of the method.
            strict: Trace with TorchDynamo instead of running the Python code.

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
        attention = attention_of(self.model, self.attention, self.experts)
        with torch.no_grad(), attention, indexed_tables(self.model):
            # Strides are compared for every length although the range starts at 2, so guards become runtime asserts.
            try:
                program = torch.export.export(
                    self.modules[name],
                    inputs,
                    dynamic_shapes=dynamic if sizes else None,  # type: ignore[arg-type]  # missing in torch's types
                    strict=strict,
                    prefer_deferred_runtime_asserts_over_guards=True,
                )
                _list_all_users(program.graph)
                if method.is_step and self.logits is Logits.LAST:
                    choose_last_token_early(program)
                return program
            except Exception as error:  # any model code runs here, under any of the tracer's own errors
                least = _least_length(error)
                if least is not None and 1 < method.min_length < least < method.max_length:
                    # Some code compares the length with a kernel size; shorter chunks are fed token by token.
                    self.methods[name] = replace(method, min_length=least)
                    return self.export(name, strict)
                raise UnsupportedModelError(
                    f"{type(self.model).__name__} cannot be traced ({name}: {describe_trace_error(error)}); "
                    "run it in a session, Session.from_model, instead of exporting it"
                ) from error


def _list_all_users(graph: Graph) -> None:
    """Complete the users of each node.

    torch.export 2.13 leaves some out where inputs share a size, such as embeddings and positions of Qwen 2.5 VL, and
    torch.fx cannot remove such a user.
    """
    for node in graph.nodes:
        for used in node.all_input_nodes:
            used.users.setdefault(node)


def _least_length(error: Exception) -> int | None:
    """Return the minimum length that a constraint violation of torch.export suggests, or None."""
    found = re.search(
        r"^\s*length = Dim\('length', min=(\d+)|range \d+ <= length <= \d+ satisfy the generated guard (\d+) <= L\[",
        str(error),
        re.M,
    )
    return None if found is None else int(found[1] or found[2])
