"""Reference logits: the eager model with what a cache does computed by other means."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer

from ..backends import backend_for
from ..backends.base import RunsElsewhere, empty_layers
from ..cache.attention.implementation import attention_of
from ..common.progress import silent
from ..errors import UnsupportedModelError
from ..models.cache_factory import ExportableCache
from ..models.layers.layout import cache_argument, vocab_size_of
from ..models.loading.support import RIGHT_BY_TOKEN, WITHOUT_DYNAMIC_CACHE
from ..models.positions import lengths_forgotten, rope_rule
from ..models.quantized_rows import QuantizedRows
from ..program.program import Program, takes_positions
from ..program.spec import ProgramSpec
from ..session.session import Session
from .rank_runner import RankProcesses

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedConfig, PreTrainedModel

    from ..backends.base import Runner
    from ..bundle.bundle import Bundle
    from ..bundle.manifest import Manifest
    from ..cache.spec import Sinks
    from ..cache.storage import Storage
    from ..common.progress import Progress
    from ..program.methods import ProgramMethod


#: Of a model whose reference takes tokens one by one, as the program does.
MOST_PARAMETERS = 100_000_000
# Eager attention keeps heads x length x length scores.
_CHUNK = 1024


def is_large(model: PreTrainedModel) -> bool:
    """Whether a reference by single steps would take minutes."""
    return sum(parameter.numel() for parameter in model.parameters()) > MOST_PARAMETERS


@torch.no_grad()
def logits_of_beginnings(
    model: PreTrainedModel, ids: torch.Tensor, plan: Sequence[tuple[int, int]]
) -> dict[int, torch.Tensor]:
    """Logits [batch, vocab] by position, in eager attention with `DynamicCache`.

    Args:
        model: A text decoder.
        ids: int64 [batch, length].
        plan: Length of each beginning, and steps after it: the positions to keep.
    """
    kept = sorted({position for length, steps in plan for position in range(length - 1, length + steps)})
    cache = DynamicCache(config=model.config)
    found: dict[int, torch.Tensor] = {}
    ids = ids.to(model.device)
    with attention_of(model, "eager"), QuantizedRows():
        chunk = 1 if model.config.model_type in RIGHT_BY_TOKEN else _CHUNK
        for start in range(0, ids.shape[1], chunk):
            end = min(start + chunk, ids.shape[1])
            positions = [position for position in kept if start <= position < end]
            options: dict[str, Any] = {cache_argument(model): cache}
            if takes_positions(model):
                options["position_ids"] = torch.arange(start, end, device=ids.device).expand(ids.shape[0], -1)
            places = torch.tensor([one - start for one in positions], dtype=torch.int64, device=ids.device)
            selects = "logits_to_keep" in inspect.signature(model.forward).parameters
            if selects:
                # A vocabulary is large: logits of every token of a chunk would be a gigabyte.
                options["logits_to_keep"] = places if positions else 1
            logits = model(ids[:, start:end], use_cache=True, **options).logits
            if not selects:
                logits = logits[:, places]
            found |= dict(zip(positions, logits.unbind(1)))
    return found


def random_inputs(
    method: ProgramMethod, length: int, batch_size: int, vocab_size: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Inputs of `encode`, `length` long where that is free, without padding."""
    inputs = {}
    for spec in method.inputs:
        shape = spec.sizes({"batch": batch_size, "length": length})
        if spec.name == "attention_mask":
            inputs[spec.name] = torch.ones(shape, dtype=torch.int64)
        elif spec.dtype == "int64":
            inputs[spec.name] = torch.randint(vocab_size, shape, generator=generator)
        else:
            inputs[spec.name] = torch.randn(shape, generator=generator).to(getattr(torch, spec.dtype))
        if spec.name == "flattened_patches":
            # Row and column of each patch, from 1 on, come before its content.
            inputs[spec.name][..., :2] = torch.arange(1, length + 1).to(inputs[spec.name].dtype)[:, None]
    return inputs


def encoder_lengths(method: ProgramMethod) -> list[int]:
    """Lengths to try: the longest, a short one, and one between."""
    least, most = method.min_length, method.max_length
    lengths = {most, min(most, least + 2 * method.multiple), (least + most) // 2}
    if method.pads:
        return sorted({length - 1 for length in lengths}, reverse=True)
    return sorted({length - length % method.multiple for length in lengths}, reverse=True)


def decoder_of(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The eager model over `inputs` with transformers' own cache: ids [batch, length] to logits [batch, vocab] of the
    last.

    To be called with no gradients, under the model's own attention.
    """
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    common = {
        "encoder_outputs": model.get_encoder()(**inputs),
        "past_key_values": EncoderDecoderCache(DynamicCache(), DynamicCache()),
        **{name: tensor for name, tensor in inputs.items() if name == "attention_mask"},
    }
    return lambda ids: model(decoder_input_ids=ids, use_cache=True, **common).logits[:, -1]


def takes_no_cache(model: PreTrainedModel) -> bool:
    """Whether a model leaves a cache of transformers alone, or refuses it."""
    return model.config.model_type in WITHOUT_DYNAMIC_CACHE


@torch.no_grad()
def logits_of_itself(model: PreTrainedModel, ids: torch.Tensor, prompt: int) -> Iterator[torch.Tensor]:
    """Logits [batch, vocab] after the prompt and after each later token of `ids` [batch, length].

    A model with a state of its own is fed token by token, one without takes all tokens at once.
    """
    name = WITHOUT_DYNAMIC_CACHE[model.config.model_type]
    options: dict[str, Any]
    with attention_of(model, "eager"):
        if name is None:
            # XLM takes a padding token anywhere for the end of the text, unless it is told.
            known = "lengths" in inspect.signature(model.forward).parameters
            options = {"lengths": torch.full(ids.shape[:1], ids.shape[1], device=ids.device)} if known else {}
            yield from model(ids, use_cache=False, **options).logits[:, prompt - 1 :].unbind(1)
            return
        options = {}
        for position in range(ids.shape[1]):
            output = model(ids[:, position : position + 1], use_cache=True, **options)
            options = {name: getattr(output, name)}
            if position >= prompt - 1:
                yield output.logits[:, -1].clone()


def check_plain_cache(model: PreTrainedModel, **asked: Any) -> None:
    """Refuse what its own code cannot be asked to do.

    Args:
        **asked: What is done to the cache, by the name of the option; None for nothing.

    Raises:
        UnsupportedModelError: If something is.
    """
    for name, value in asked.items():
        if value is not None:
            raise UnsupportedModelError(
                f"{model.config.model_type!r} takes no cache of transformers, so there is nothing to compare {name} "
                "with; leave it out, or do not verify (verify=False)"
            )


class RoundingCache(DynamicCache):
    """A `DynamicCache` of what a storage would give out: what a cache of that storage holds, whatever its policy.

    Args:
        storage: What rounds.
        **options: Of `DynamicCache`.
    """

    def __init__(self, storage: Storage, **options: Any) -> None:
        super().__init__(**options)
        self.storage = storage

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        return super().update(*rounded(self.storage, key_states, value_states), *args, **kwargs)


def rounded(storage: Storage, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [..., head_dim] and values [..., value_head_dim] as a layer of this storage gives them out."""
    return storage.decode(storage.encode(keys, values))


class EvictingLayer(DynamicLayer):
    """A `DynamicLayer` fed one token at a time that gives out the first `sinks.tokens` and the newest `sinks.window`
    only.

    What is given out needs no mask, so this shares nothing with what it is a reference for. Positions stay absolute.
    """

    def __init__(self, sinks: Sinks) -> None:
        super().__init__()
        self.sinks = sinks
        self.seen = 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        """Append one token, [batch, heads, 1, dim] each, drop the one that left the window, and return the rest."""
        assert key_states.shape[-2] == 1
        keys, values = super().update(key_states, value_states)
        self.seen += 1
        if keys.shape[-2] > self.sinks.tokens + self.sinks.window:
            first, last = self.sinks.tokens, self.sinks.tokens + 1
            self.keys = torch.cat([keys[:, :, :first], keys[:, :, last:]], dim=-2)
            self.values = torch.cat([values[:, :, :first], values[:, :, last:]], dim=-2)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        kept = min(self.seen + query_length, self.sinks.tokens + self.sinks.window)
        # Positions that end at the query: none of the keys is hidden.
        return kept, self.seen + query_length - kept


def evicting_cache(
    config: PreTrainedConfig, sinks: Sinks, plain: Callable[..., DynamicCache] = DynamicCache
) -> DynamicCache:
    """A cache that `plain` makes for a model whose full-attention layers keep sinks and a window; feed it token by
    token.
    """
    cache = plain(config=config)
    cache.layers = [EvictingLayer(sinks) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


# The reference takes longer prompts in pieces: eager attention keeps heads x length x length scores.
_REFERENCE_CHUNK = 1024


@torch.no_grad()
def logits_by_step(
    model: PreTrainedModel,
    ids: torch.Tensor,
    prompt: int,
    sinks: Sinks | None,
    encoder_inputs: dict[str, torch.Tensor] | None = None,
    storage: Storage | None = None,
) -> Iterator[torch.Tensor]:
    """Logits [batch, vocab] after the prompt and after each later token of `ids` [batch, length]."""
    ids = ids.to(model.device)
    if encoder_inputs is not None:
        with attention_of(model, "eager"), lengths_forgotten(model):
            decoder = decoder_of(model, encoder_inputs)
            for piece in ids[:, :prompt].split(1 if model.config.model_type in RIGHT_BY_TOKEN else prompt, dim=1):
                logits = decoder(piece)
            yield logits.clone()
            for position in range(prompt, ids.shape[1]):
                yield decoder(ids[:, position : position + 1])
        return
    if takes_no_cache(model):
        check_plain_cache(model, attention_sinks=sinks, kv_dtype=storage)
        yield from logits_of_itself(model, ids, prompt)
        return
    plain = DynamicCache if storage is None else partial(RoundingCache, storage)
    cache = plain(config=model.config) if sinks is None else evicting_cache(model.config, sinks, plain)
    for layer in cache.layers:
        if hasattr(layer, "set_prefill_length"):
            # The prompt comes in pieces (Unlimited OCR).
            layer.set_prefill_length(prompt)
    one_by_one = sinks is not None or model.config.model_type in RIGHT_BY_TOKEN
    # The length of a call chooses the factors of such RoPE.
    whole = rope_rule(model) is not None
    chunk = 1 if one_by_one else prompt if whole else _REFERENCE_CHUNK
    argument, explicit = cache_argument(model), takes_positions(model)

    def logits_of(start: int, end: int) -> torch.Tensor:
        options: dict[str, Any] = {argument: cache}
        if explicit:
            options["position_ids"] = torch.arange(start, end, device=ids.device).expand(ids.shape[0], -1)
        return model(ids[:, start:end], use_cache=True, **options).logits[:, -1]

    with attention_of(model, "eager"), lengths_forgotten(model):
        for start in range(0, prompt, chunk):
            last = logits_of(start, min(start + chunk, prompt))
        yield last.clone()
        for position in range(prompt, ids.shape[1]):
            yield logits_of(position, position + 1)


@torch.no_grad()
def rounding_effect(model: PreTrainedModel, length: int, storage: Storage) -> float:
    """Largest |logit difference| that keeping keys and values in `storage` makes over `length` random tokens."""
    ids = torch.randint(vocab_size_of(model), (1, length), generator=torch.Generator().manual_seed(0))
    logits = []
    with attention_of(model, "eager"), lengths_forgotten(model):
        for cache in (DynamicCache(config=model.config), RoundingCache(storage, config=model.config)):
            caches = {cache_argument(model): cache}
            logits.append(model(ids.to(model.device), use_cache=True, **caches).logits.float())
    return (logits[0] - logits[1]).abs().max().item()


def session_to_verify(
    bundle: Bundle, model: PreTrainedModel, program: Program | None = None, *, progress: Progress = silent
) -> tuple[Session, str]:
    """A session over a bundle's program, or over what stands in for it where this machine cannot run it.

    Args:
        model: What the bundle was made from.
        program: What was lowered, if it is at hand; made anew from the model and the manifest otherwise.

    Returns:
        The session, to be closed afterwards, and what verifying it says of the program where that goes without saying
        no longer.

    Raises:
        VerificationError: If the program is not the one that the bundle's files were made from.
    """
    manifest = bundle.manifest
    backend = backend_for(manifest.target)
    description, options = manifest.description(), backend.options.parse(manifest.options)
    if isinstance(backend, RunsElsewhere) and not backend.runs_here(description, options):
        progress(f"reading the {manifest.target} program", 0, None)
        stand_in = backend.stand_in(program or program_of(manifest, model), description, options)
        return Session.from_bundle(bundle, stand_in.runner), stand_in.remark
    if manifest.ranks is not None:
        size = manifest.ranks.size
        progress(f"opening the {manifest.target} program in {size} processes", 0, None)
        return Session.from_bundle(bundle, RankProcesses(bundle)), ""
    progress(f"opening the {manifest.target} program", 0, None)
    # Of a large model the reference comes first: the memory that it needs is given back before the program takes its
    # own. Other runners have more to ask for than steps.
    later = OpenedLater(bundle) if manifest.target == "executorch" and is_large(model) else None
    return Session.from_bundle(bundle, later), ""


class OpenedLater:
    """The runner of a bundle, opened by the first step."""

    def __init__(self, bundle: Bundle) -> None:
        self.methods: Mapping[str, ProgramMethod] = bundle.manifest.description().methods
        self._open = bundle.open_runner

    @cached_property
    def _runner(self) -> Runner:
        return self._open()[0]

    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        return self._runner.run(method, *inputs)


def program_of(manifest: Manifest, model: PreTrainedModel) -> Program:
    """The program that a manifest describes, made anew from its model; its layers are already in the
    target's layout.
    """
    methods = manifest.program.methods
    anywhere = [
        method
        for method in methods.values()
        if method.is_step and method.kv_read_len is None and not method.only_scores
    ]
    backend = backend_for(manifest.target)
    spec = backend.program_spec(
        ProgramSpec(max(method.max_length for method in anywhere)), backend.options.parse(manifest.options)
    )
    spec = replace(spec, forward="forward" in methods, split="decode" in methods)
    return Program(model, ExportableCache(empty_layers(manifest.description())), spec)
