"""Reference logits of the eager model, with caches that share no code with this package's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer

from ..backends import backend_for
from ..backends.base import GivesTensors, RunsElsewhere, empty_layers, products_of
from ..backends.tensorrt.options import TF32_REMARK
from ..cache.attention.implementation import attention_of
from ..cache.layers import CacheLayer, LinearLayer
from ..cache.policies import FullPolicy, NoPolicy, RecurrentPolicy, RingPolicy
from ..common.compat.transformers import cache_argument
from ..common.progress import silent
from ..errors import UnsupportedModelError
from ..models.cache_factory import ExportableCache, ExportableEncoderDecoderCache
from ..models.layers.encoder import EncoderStates, encoder_of
from ..models.loading.support import RIGHT_BY_TOKEN, WITHOUT_DYNAMIC_CACHE
from ..models.positions import lengths_forgotten, rope_rule, takes_positions, text_model_of
from ..models.quantized_rows import ExactActivations, QuantizedRows
from ..program.inputs.kinds import KINDS
from ..program.inputs.modalities import modalities_of
from ..program.inputs.multimodal import kinds_taken
from ..program.program import Program
from ..program.spec import ProgramSpec
from ..session.persistence import put_rows
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
    from ..common.tensors import TensorSpec
    from ..program.methods import ProgramMethod


#: Parameters up to which the reference feeds tokens one by one, like the program.
MOST_PARAMETERS = 100_000_000
# Tokens per call. Eager attention computes and allocates heads x tokens x length scores, and each call dequantises all
# weights: for 2,048 tokens of Qwen3-0.6B's shape, 256 to 512 take equal processor time, and 1,024 take 17 % more.
_CHUNK = 512


def is_large(model: PreTrainedModel) -> bool:
    """Return True if a reference in single steps would take minutes."""
    return parameters_of(model) > MOST_PARAMETERS


def parameters_of(model: PreTrainedModel) -> int:
    """Return the number of parameters, also of quantised weights."""
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def logits_of_beginnings(
    model: PreTrainedModel,
    ids: torch.Tensor,
    plan: Sequence[tuple[int, int]],
    sinks: Sinks | None = None,
    cache: DynamicCache | None = None,
    start: int = 0,
) -> dict[int, torch.Tensor]:
    """Compute logits [batch, vocab] by position in one pass over the tokens, with eager attention.

    Args:
        model: A text decoder.
        ids: int64 [batch, length].
        plan: Length and number of steps of each prompt, all prefixes of `ids`; logits of these positions are kept.
        sinks: Attention sinks of the full-attention layers; None if they keep every token.
        cache: Cache by `plain_cache` to fill; an empty one that rounds nothing by default.
        start: Number of tokens that the cache holds.
    """
    kept = sorted({position for length, steps in plan for position in range(length - 1, length + steps)})
    cache = plain_cache(model, sinks) if cache is None else cache
    found: dict[int, torch.Tensor] = {}
    ids = ids.to(model.device)
    with attention_of(model, "eager"), lengths_forgotten(model):
        for first, end in _calls(model, ids.shape[1], sinks, start):
            positions = [position for position in kept if first <= position < end]
            indices = torch.tensor([one - first for one in positions], dtype=torch.int64, device=ids.device)
            logits = _logits(model, cache, ids, first, end, indices if positions else None)
            found |= dict(zip(positions, logits.unbind(1)))
    return found


def _calls(model: PreTrainedModel, length: int, sinks: Sinks | None, start: int = 0) -> Iterator[tuple[int, int]]:
    """Yield the first and the last position, exclusive, of each call of a reference from `start` to `length` tokens."""
    chunk = 1 if model.config.model_type in RIGHT_BY_TOKEN else _CHUNK
    # Layers that evict tokens take one token per call once they hold all they keep.
    full = length if sinks is None else min(length, sinks.tokens + sinks.window)
    while start < length:
        end = min(start + chunk, full) if start < full else start + 1
        yield start, end
        start = end


def _logits(
    model: PreTrainedModel,
    cache: Any,
    ids: torch.Tensor,
    start: int,
    end: int,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run a call of the model over `ids[:, start:end]`, and return logits [batch, kept, vocab].

    Only logits of `indices` into the call, or of its last token, are computed where the model can choose, because
    logits of every token of a chunk may take a gigabyte.
    """
    model = text_model_of(model)
    options: dict[str, Any] = {cache_argument(model): cache}
    if takes_positions(model):
        options["position_ids"] = torch.arange(start, end, device=ids.device).expand(ids.shape[0], -1)
    selects = "logits_to_keep" in inspect.signature(model.forward).parameters
    if selects:
        options["logits_to_keep"] = 1 if indices is None else indices
    with _rows():
        logits = model(ids[:, start:end], use_cache=True, **options).logits
    if selects:
        return logits
    return logits[:, -1:] if indices is None else logits[:, indices]


# True while a reference runs whose quantised layers do not round their inputs.
_EXACT: ContextVar[bool] = ContextVar("exact", default=False)


def _rows() -> QuantizedRows:
    """Return the mode in which quantised layers are computed."""
    return ExactActivations() if _EXACT.get() else QuantizedRows()


@contextmanager
def _exactly(exact: bool) -> Iterator[None]:
    """Let quantised layers of references in this block round their inputs or not."""
    token = _EXACT.set(exact)
    try:
        yield
    finally:
        _EXACT.reset(token)


def random_inputs(
    method: ProgramMethod, length: int, batch_size: int, vocab_size: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Return random inputs of `encode` without padding, of the given length if it is dynamic."""
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
            # The first two values of a patch are its row and column, starting at 1.
            inputs[spec.name][..., :2] = torch.arange(1, length + 1).to(inputs[spec.name].dtype)[:, None]
    if method.item is not None:
        ids, token = inputs["input_ids"], method.item.token_id
        ids[ids == token] = (token + 1) % vocab_size
        if length < method.item.tokens:
            # Text alone, because an item does not fit.
            return {name: inputs[name] for name in inputs if name in ("input_ids", "attention_mask")}
        ids[:, : method.item.tokens] = token
    return inputs


def encoder_states(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> Any:
    """Return the encoder's output, computed by the whole model if there are items among its text."""
    if "input_ids" not in inputs or set(inputs) <= {"input_ids", "attention_mask"}:
        return model.get_encoder()(**inputs)
    whole = model(**inputs, decoder_input_ids=inputs["input_ids"][:, :1], use_cache=False)
    return EncoderStates.of(whole.encoder_last_hidden_state)


def encoder_lengths(method: ProgramMethod) -> list[int]:
    """Return the lengths to try: the longest, a short one, and one between."""
    least, most = method.min_length, method.max_length
    lengths = {most, min(most, least + 2 * method.multiple), (least + most) // 2}
    if method.pads:
        return sorted({length - 1 for length in lengths}, reverse=True)
    return sorted({length - length % method.multiple for length in lengths}, reverse=True)


def decoder_of(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], storage: Storage | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Encode `inputs` and return a function from decoder ids [batch, length] to the last logits [batch, vocab].

    It uses the eager model with transformers' cache, which rounds keys and values of self-attention like a storage.
    Call it without gradients.
    """
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    with _rows():
        states = encoder_states(model, inputs)
    own = DynamicCache() if storage is None else RoundingCache(storage)
    common = {
        "encoder_outputs": states,
        cache_argument(model): EncoderDecoderCache(own, DynamicCache()),
        **{name: tensor for name, tensor in inputs.items() if name == "attention_mask"},
    }

    def logits_of(ids: torch.Tensor) -> torch.Tensor:
        with _rows():
            return model(decoder_input_ids=ids, use_cache=True, **common).logits[:, -1]

    return logits_of


def takes_no_cache(model: PreTrainedModel) -> bool:
    """Return True if a model ignores or refuses a cache of transformers."""
    return model.config.model_type in WITHOUT_DYNAMIC_CACHE


@torch.no_grad()
def logits_of_itself(model: PreTrainedModel, ids: torch.Tensor, prompt: int) -> Iterator[torch.Tensor]:
    """Yield logits [batch, vocab] after the prompt and after each later token of `ids` [batch, length].

    Models with a custom state are fed token by token, others take all tokens at once.
    """
    name = WITHOUT_DYNAMIC_CACHE[model.config.model_type]
    options: dict[str, Any]
    with attention_of(model, "eager"):
        if name is None:
            # Without lengths, XLM ends the text at the first padding token.
            known = "lengths" in inspect.signature(model.forward).parameters
            options = {"lengths": torch.full(ids.shape[:1], ids.shape[1], device=ids.device)} if known else {}
            with _rows():
                logits = model(ids, use_cache=False, **options).logits
            yield from logits[:, prompt - 1 :].unbind(1)
            return
        options = {}
        state = cache_argument(model) if name == "cache" else name
        for position in range(ids.shape[1]):
            with _rows():
                output = model(ids[:, position : position + 1], use_cache=True, **options)
            options = {state: getattr(output, state)}
            if position >= prompt - 1:
                yield output.logits[:, -1].clone()


def check_plain_cache(model: PreTrainedModel, **asked: Any) -> None:
    """Check that no cache options are verified for a model without a cache of transformers.

    Args:
        model: The model.
        **asked: Cache options by name; None if not used.

    Raises:
        UnsupportedModelError: If one is used.
    """
    for name, value in asked.items():
        if value is not None:
            raise UnsupportedModelError(
                f"{model.config.model_type!r} takes no cache of transformers, so there is nothing to compare {name} "
                "with; leave it out, and a recipe that sets it (quantize='8da4w' and quantize_embeddings='8w' have the "
                "weights of 'fast'), or do not verify (verify=False)"
            )


class RoundingCache(DynamicCache):
    """A `DynamicCache` that rounds keys and values like a storage.

    Args:
        storage: The storage, such as int8.
        **options: Options of `DynamicCache`.
    """

    def __init__(self, storage: Storage, **options: Any) -> None:
        super().__init__(**options)
        self.storage = storage

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        """Round and append keys and values [batch, heads, length, dim]."""
        return super().update(*rounded(self.storage, key_states, value_states), *args, **kwargs)


def rounded(storage: Storage, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode and decode keys [..., head_dim] and values [..., value_head_dim] with a storage."""
    return storage.decode(storage.encode(keys, values))


class EvictingLayer(DynamicLayer):
    """A `DynamicLayer` that keeps the first `sinks.tokens` and the newest `sinks.window` tokens.

    A call may have several tokens as long as none is evicted. The kept tokens need no mask, so it shares no code with
    the layers it is a reference for. Positions stay absolute.
    """

    def __init__(self, sinks: Sinks) -> None:
        super().__init__()
        self.sinks = sinks
        self.seen = 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        """Append tokens, [batch, heads, length, dim] each, drop one that left the window, and return the rest."""
        keys, values = super().update(key_states, value_states)
        self.seen += key_states.shape[-2]
        if keys.shape[-2] > self.sinks.tokens + self.sinks.window:
            assert key_states.shape[-2] == 1
            first, last = self.sinks.tokens, self.sinks.tokens + 1
            self.keys = torch.cat([keys[:, :, :first], keys[:, :, last:]], dim=-2)
            self.values = torch.cat([values[:, :, :first], values[:, :, last:]], dim=-2)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Return the number of tokens seen."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys and their first position, such that no key is masked."""
        kept = min(self.seen + query_length, self.sinks.tokens + self.sinks.window)
        return kept, self.seen + query_length - kept


def evicting_cache(
    config: PreTrainedConfig, sinks: Sinks, plain: Callable[..., DynamicCache] = DynamicCache
) -> DynamicCache:
    """Return a cache made by `plain` whose full-attention layers evict tokens, see `EvictingLayer`."""
    cache = plain(config=config)
    cache.layers = [EvictingLayer(sinks) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def plain_cache(model: PreTrainedModel, sinks: Sinks | None = None, storage: Storage | None = None) -> DynamicCache:
    """Return an empty cache of transformers that evicts and rounds like the session's layers."""
    plain = DynamicCache if storage is None else partial(RoundingCache, storage)
    return plain(config=model.config) if sinks is None else evicting_cache(model.config, sinks, plain)


@torch.no_grad()
def logits_by_step(
    model: PreTrainedModel,
    ids: torch.Tensor,
    prompt: int,
    sinks: Sinks | None,
    encoder_inputs: dict[str, torch.Tensor] | None = None,
    storage: Storage | None = None,
) -> Iterator[torch.Tensor]:
    """Yield logits [batch, vocab] after the prompt and after each later token of `ids` [batch, length]."""
    ids = ids.to(model.device)
    if encoder_inputs is not None:
        with attention_of(model, "eager"), lengths_forgotten(model):
            decoder = decoder_of(model, encoder_inputs, storage)
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
    yield from logits_over(model, ids, prompt, plain_cache(model, sinks, storage), sinks)


@torch.no_grad()
def logits_over(
    model: PreTrainedModel, ids: torch.Tensor, prompt: int, cache: DynamicCache, sinks: Sinks | None
) -> Iterator[torch.Tensor]:
    """Yield what `logits_by_step` does, of a text decoder over an empty cache, which is filled."""
    ids = ids.to(model.device)
    for layer in cache.layers:
        if hasattr(layer, "set_prefill_length"):
            # The prompt comes in pieces (Unlimited OCR).
            layer.set_prefill_length(prompt)
    # The length of a call chooses the factors of such RoPE.
    calls = _calls(model, prompt, sinks) if rope_rule(model) is None else [(0, prompt)]
    with attention_of(model, "eager"), lengths_forgotten(model):
        for start, end in calls:
            last = _logits(model, cache, ids, start, end)[:, -1]
        yield last.clone()
        for position in range(prompt, ids.shape[1]):
            yield _logits(model, cache, ids, position, position + 1)[:, -1]


class Reference:
    """Logits of the model for each prompt, and its cache after the last of them.

    Args:
        model: The model.
        sinks: Attention sinks of the full-attention layers; None if they keep every token.
        storage: Storage that keys and values are rounded like; None for an exact cache.
        exact: True if quantised layers do not round their inputs.

    Attributes:
        tokens: Number of tokens that its cache holds.
    """

    def __init__(
        self, model: PreTrainedModel, sinks: Sinks | None, storage: Storage | None = None, exact: bool = False
    ) -> None:
        self._model, self._sinks, self._storage, self._exact = model, sinks, storage, exact
        self._known: dict[int, torch.Tensor] | None = None
        self._cache: DynamicCache | None = None
        self.tokens = 0

    def run(self, sequence: torch.Tensor, plan: Sequence[tuple[int, int]]) -> None:
        """Compute the logits of prompts, which are prefixes of `sequence` [batch, length], in one pass.

        The pass continues after the tokens that the reference holds from earlier calls.
        """
        start, self.tokens = self.tokens, max(length + steps for length, steps in plan)
        if self._cache is None:
            self._cache = plain_cache(self._model, self._sinks, self._storage)
        ids, how = sequence[:, : self.tokens], (self._sinks, self._cache, start)
        with _exactly(self._exact):
            self._known = {**(self._known or {}), **logits_of_beginnings(self._model, ids, plan, *how)}

    def logits(
        self, ids: torch.Tensor, length: int, encoder_inputs: dict[str, torch.Tensor] | None
    ) -> list[torch.Tensor]:
        """Return logits [batch, vocab] after `length` tokens of `ids` [batch, tokens], and after each later one."""
        if self._known is not None:
            return [self._known[position] for position in range(length - 1, ids.shape[1])]
        if encoder_inputs is None and not takes_no_cache(self._model):
            self.tokens, self._cache = ids.shape[1], plain_cache(self._model, self._sinks, self._storage)
            steps = logits_over(self._model, ids, length, self._cache, self._sinks)
        else:
            steps = logits_by_step(self._model, ids, length, self._sinks, encoder_inputs, self._storage)
        with _exactly(self._exact):
            return list(steps)

    def first_position(self, index: int) -> int | None:
        """Return the first position that a layer of the cache holds; None if it has no such layer."""
        layer = self.layer(index)
        keys = getattr(layer, "keys", None)
        if not isinstance(keys, torch.Tensor) or keys.dim() != 4:
            return None
        held = keys.shape[2]
        # Layers with sinks hold other tokens.
        return self.tokens - held if held == self.tokens or getattr(layer, "is_sliding", False) else None

    def layer(self, index: int) -> Any:
        """Return a layer of the cache; None if there is none with this index."""
        layers = [] if self._cache is None else self._cache.layers
        return layers[index] if index < len(layers) else None

    def tensors(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of a layer, [batch, heads, tokens, dim]."""
        layer = self.layer(index)
        return layer.keys, layer.values

    def append(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append keys and values [batch, heads, tokens, dim] to a layer without rounding, and do not count them."""
        assert self._cache is not None
        # Not the method of `RoundingCache`, because they are rounded.
        DynamicCache.update(self._cache, keys, values, index)

    def rows(self, index: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of a layer at positions int64 [tokens], each [tokens, batch * heads, dim]."""
        layer, first = self.layer(index), self.first_position(index)
        assert first is not None
        found = []
        for tensor in (layer.keys, layer.values):
            rows = tensor.index_select(2, (positions - first).to(tensor.device)).movedim(2, 0)
            found.append(rows.reshape(len(positions), -1, rows.shape[-1]))
        return found[0], found[1]


# Largest size of the keys and values that are placed in a reference, because it has room for a small cache only.
_MOST_PLACED_BYTES = 1 << 30


def place(session: Session, references: Sequence[Reference], end: int, generator: torch.Generator) -> bool:
    """Fill the caches of a session and of its references up to position `end`, with the same keys and values in all.

    Those of each position are a random earlier token's, so that they are of the size that the model computes. A step
    after them sees every slot, and costs no pass over the tokens between.

    Args:
        session: The session. It holds the same tokens as the references.
        references: The references. The keys and values come from the first.
        end: Number of tokens that they hold afterwards.
        generator: Chooses the tokens.

    Returns:
        False, and nothing changes, if the runtime does not give out its memory, a layer keeps anything else of each
        token than the keys and values of the reference, or these would take more than `_MOST_PLACED_BYTES`.
    """
    start = int(session.length[0])
    # Layers of a draft head come after the model's, and the reference has none.
    found = [(index, layer) for index, layer in enumerate(session.layers) if references[0].layer(index) is not None]
    holding = [(index, layer) for index, layer in found if layer.storage is not None]
    if not holding or not all(_may_be_placed(session, index, references) for index, _ in found):
        return False
    tokens = sum(one.nbytes / one.shape[2] for index, _ in holding for one in references[0].tensors(index))
    if tokens * (end - start) > _MOST_PLACED_BYTES:
        return False
    for index, layer in holding:
        keys, values = references[0].tensors(index)
        sources = (torch.rand(end - start, generator=generator) * keys.shape[2]).long().to(keys.device)
        rows = [tensor.index_select(2, sources) for tensor in (keys, values)]
        assert layer.storage is not None
        # Rounded here, because each side would round them in its own way.
        wide = [one.to(layer.storage.rows_dtype) for one in rows]
        placed = [one.to(keys.dtype) for one in layer.storage.decode(layer.storage.encode(*wide))]
        held = layer.policy.positions(torch.tensor([[end]]))[0]
        positions = held[(held >= start) & (held < end)]
        of_session = [one[:, :, positions - start].movedim(2, 0).flatten(1, 2) for one in placed]
        put_rows(session, index, positions, *(one.to(layer.storage.rows_dtype) for one in of_session))
        for reference in references:
            reference.append(index, *placed)
    for reference in references:
        reference.tokens = end
    for row in range(session.batch_size):
        session.stepper.set_length(row, end)
    return True


def _may_be_placed(session: Session, index: int, references: Sequence[Reference]) -> bool:
    """Return True if a layer keeps the keys and values that its references keep, or a state without positions."""
    layer = session.layers[index]
    if type(layer) not in (CacheLayer, LinearLayer):
        return False
    if layer.storage is None:
        return isinstance(layer.policy, (NoPolicy, RecurrentPolicy))
    if not isinstance(layer.policy, (FullPolicy, RingPolicy)):
        return False
    if any(reference.first_position(index) is None for reference in references):
        return False
    none = torch.zeros(0, dtype=torch.int64)
    rows = (one[:, :, :0].movedim(2, 0).flatten(1, 2) for one in references[0].tensors(index))
    return put_rows(session, index, none, *(one.to(layer.storage.rows_dtype) for one in rows))


def session_to_verify(
    bundle: Bundle, model: PreTrainedModel, program: Program | None = None, *, progress: Progress = silent
) -> tuple[Session, str]:
    """Open a session of a bundle's program, or of a substitute if this machine cannot run it.

    Args:
        bundle: The bundle.
        model: The model it was made from.
        program: The program that was lowered; made again from the model and the manifest if None.
        progress: Called for each stage.

    Returns:
        The session, to be closed by the caller, and a remark on what the result does not cover.

    Raises:
        VerificationError: If the program is not the one that the bundle's files were made from.
    """
    manifest = bundle.manifest
    backend = backend_for(manifest.target)
    description, options = manifest.description(), backend.options.parse(manifest.options)
    if isinstance(backend, RunsElsewhere) and not backend.runs_here(description, options):
        progress(f"reading the {manifest.target} program", 0, None)
        stand_in = backend.stand_in(program or program_of(manifest, model), description, options, bundle.path)
        return Session.from_bundle(bundle, stand_in.runner), stand_in.remark
    if manifest.ranks is not None:
        size = manifest.ranks.size
        progress(f"opening the {manifest.target} program in {size} processes", 0, None)
        return Session.from_bundle(bundle, RankProcesses(bundle)), ""
    progress(f"opening the {manifest.target} program", 0, None)
    # A large model's program is opened after the reference has run, so that their memory is not needed at once. Runners
    # of other targets are used before the first step.
    later = OpenedLater(bundle) if manifest.target == "executorch" and is_large(model) else None
    session = Session.from_bundle(bundle, later)
    return session, remark_of(session.runner)


def remark_of(runner: Runner) -> str:
    """Return a remark on how exactly an executed program computes, or an empty string."""
    return "" if products_of(runner) is None else TF32_REMARK


class OpenedLater:
    """A runner of a bundle that is opened by the first step."""

    def __init__(self, bundle: Bundle) -> None:
        self.methods: Mapping[str, ProgramMethod] = bundle.manifest.description().methods
        self._open = bundle.open_runner

    @cached_property
    def _runner(self) -> Runner:
        return self._open()[0]

    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run a method, see `Runner.run`."""
        return self._runner.run(method, *inputs)

    def state_tensor(self, name: str) -> torch.Tensor | None:
        """Return a tensor of the cache, see `GivesTensors.state_tensor`."""
        return self._runner.state_tensor(name) if isinstance(self._runner, GivesTensors) else None


def example_item(method: ProgramMethod) -> dict[str, torch.Tensor]:
    """Return a random item of the sizes of a method that encodes images, video or audio, among text or alone."""
    fixed = {} if method.item is None else {name: one.tensor() for name, one in method.item.fixed.items()}
    if method.grid is not None:
        # Older bundles record only the grid.
        fixed.setdefault("image_grid_thw", torch.tensor([method.grid]))
    specs = (spec for spec in method.inputs if spec.name not in ("input_ids", "attention_mask"))
    return {**{spec.name: random_item(spec) for spec in specs}, **fixed}


def random_item(spec: TensorSpec, generator: torch.Generator | None = None) -> torch.Tensor:
    """Return random pixels or samples; ones for integer inputs, because 0 means none."""
    dtype = getattr(torch, spec.dtype)
    if not dtype.is_floating_point:
        return torch.ones(spec.sizes({"batch": 1}), dtype=dtype)
    return torch.randn(spec.sizes({"batch": 1}), generator=generator).to(dtype)


def program_of(manifest: Manifest, model: PreTrainedModel) -> Program:
    """Make the program that a manifest describes from its model, with layers in the target's layout."""
    description = manifest.description()
    methods = description.methods
    anywhere = [
        method
        for method in methods.values()
        if method.is_step and method.kv_read_len is None and not method.only_scores
    ]
    backend = backend_for(manifest.target)
    encoders = {kind: methods[f"encode_{kind}"] for kind in KINDS if f"encode_{kind}" in methods}
    if "encode" in methods and methods["encode"].item is not None:
        encoders = {kind: methods["encode"] for kind in kinds_taken(methods) if kind in KINDS}
    items = {kind: example_item(encoder) for kind, encoder in encoders.items()}
    asked = ProgramSpec(
        max(method.max_length for method in anywhere), modalities=modalities_of(model, items) if items else ()
    )
    if manifest.program.lora is not None:
        slots = manifest.program.lora.described()
        names = tuple(one.name for one in slots.targets)
        asked = replace(asked, lora_slots=slots.slots, lora_rank=slots.rank, lora_targets=names)
    spec = backend.program_spec(asked, backend.options.parse(manifest.options))
    spec = replace(spec, forward="forward" in methods, split="decode" in methods)
    layers = empty_layers(description)
    if "encode" not in methods:
        return Program(model, ExportableCache(layers), spec)
    cache = ExportableEncoderDecoderCache(layers)
    cache.encoder = encoder_of(model, methods["encode"].max_length, description.batch_size)
    return Program(model, cache, spec)
