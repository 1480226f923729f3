"""One object to prefill, decode and generate with, over any target: eager, compiled, or a bundle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..backends.base import Runner
from ..cache.layers import CacheLayer
from ..common.progress import Progress, silent
from ..errors import InputError
from ..generation.chooser import Chooser
from ..generation.multi_step import check_steps_per_launch
from ..generation.sampling import Sampling
from ..models.cache_factory import ExportableCache
from ..models.fingerprint import fingerprint
from ..models.layout import check_layers, vocab_size_of
from ..program.entry_points import ROPE_DELTAS, Method, chunk_sizes, length_buckets, method_for, smallest_inputs
from ..program.inputs.modality import modalities_of
from ..program.spec import ProgramSpec
from .checks import check_ids, check_max_new_tokens, check_room, split_stops
from .generate import Generation, end_tokens
from .inputs.encoder import SessionEncoder
from .inputs.image_places import PlacedImages, shifted
from .inputs.modalities import SessionModalities, recorded_placeholders
from .position import Position, known_high_water

if TYPE_CHECKING:
    from ..bundle.bundle import Bundle


class Session(Position, Generation):
    """A running program and the position of each row.

    Every call checks its arguments and the room in the cache before anything runs: a refused call changes nothing.

    Args:
        runner: What runs the steps.
        layers: The cache's layers; only their limits are asked for, so they need no tensors.
        vocab_size: Token ids run from 0 to vocab_size - 1.
        batch_size: Rows.
        tokenizer: For text.
        generation_config: Its `eos_token_id` and `pad_token_id` end and fill rows in `generate`.
        device: Where inputs are expected and logits come back.
        target: What the runner is, for reports.
        fingerprint: Of the model's weights, see `fingerprint.fingerprint`; saved states are refused to other models by it.
        placeholders: Token ids that stand for images or sound, by the method that encodes those.
        steps_per_launch: Decode steps that `generate` runs at once, see `from_model`.

    Raises:
        InputError: If `steps_per_launch` is none that this cache or this runtime allows.

    Example:
        >>> session = load("artifacts/demo")
        >>> "".join(session.generate_text("the code of amber is 4821. amber?", max_new_tokens=6))
    """

    def __init__(
        self,
        runner: Runner,
        layers: Sequence[CacheLayer],
        vocab_size: int,
        *,
        batch_size: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
        generation_config: GenerationConfig | None = None,
        device: torch.device | str = "cpu",
        target: str = "eager",
        fingerprint: str | None = None,
        placeholders: Mapping[str, int] | None = None,
        steps_per_launch: int = 1,
    ) -> None:
        self.runner = runner
        self.layers = tuple(layers)
        self.vocab_size = vocab_size
        self.batch_size = batch_size
        self.tokenizer = tokenizer
        self.generation_config = generation_config
        self.device = torch.device(device)
        self.target = target
        self.fingerprint = fingerprint
        self._encoder = None
        self._modalities = SessionModalities(runner, placeholders, self.device) if placeholders else None
        if "encode" in runner.methods:
            self._encoder = SessionEncoder(runner, vocab_size, batch_size, self.device)
        self._cache: ExportableCache | None = None
        self._length = torch.zeros(batch_size, dtype=torch.int64)
        # The most tokens each row ever held since position 0: what a rewind leaves behind in a ring depends on it.
        self._high_water = torch.zeros(batch_size, dtype=torch.int64)
        # The newest token given out by `generate` or `generate_text`, while nothing was fed since and it ended nothing. Only
        # at batch size 1: the one reader is text.
        self._pending: int | None = None
        # Images that rewinding may not cut, or after which rotary positions are not those in the cache.
        self._images = PlacedImages.none(batch_size)
        #: Counts the calls that took it to another place or wrote its cache, but for `shift`.
        self.moves = 0
        check_steps_per_launch(self, steps_per_launch)
        self.steps_per_launch = steps_per_launch

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        cache: ExportableCache,
        *,
        compile: bool = False,
        mode: str | None = None,
        prefill_length: int | None = None,
        buckets: bool | Sequence[int] = True,
        score_length: int = 0,
        steps_per_launch: int = 1,
        modalities: Sequence[str] = (),
        image_size: int | Sequence[int] | None = None,
        graph_cache: str | Path | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> Session:
        """Run a live model over a cache, which may hold tokens already: the session goes on from there.

        The session owns the cache: its keys and values are written in place, and steps taken with it elsewhere go unseen.
        The model's attention implementation is switched to ours until `close`, or the end of a `with` block.

        Args:
            model: A transformers causal LM in eval mode.
            cache: Allocated for it.
            compile: Run through torch.compile, one graph per method, each compiled once, when it is first needed.
            mode: Of torch.compile; `reduce-overhead` (CUDA graphs) by default on a GPU.
            prefill_length: Longest chunk of a prompt, see `methods.methods_for`.
            buckets: Read lengths with methods of their own, so that a step costs what the filled part of the cache costs,
                not what is allocated. True for powers of two, see `methods.length_buckets`; False for none.
            score_length: Most tokens that `score` takes, as speculative decoding needs it; 0 for no such method.
            steps_per_launch: Decode steps that `generate` runs at once, each choosing the tokens for the next inside the graph:
                the same tokens, at less cost per step outside of it. Those behind a stop are dropped, and taken back by length.
                Each method for decoding gets a second graph, as many times as large. Drafts judge several tokens as it is.
            modalities: What is fed beside text, `image` or `audio`: see `multimodal.modalities_of`.
            image_size: Of every image, in pixels, where the model's config leaves it open: see there.
            graph_cache: Folder that keeps compiled graphs, so that a later process neither traces nor compiles them, see
                `backends.graph_cache.GraphCache`; only with `compile`.
            tokenizer: For text.

        Raises:
            InputError: If the model is in training mode, or the cache is not one for this model, or holds more tokens than
                the model has positions for; or if an argument is out of range, such as more steps per launch than a ring with
                this slack, or a state of fixed size, can take back.
        """
        from ..backends.module import ModuleRunner
        from ..models.loading import check_positions

        if model.training:
            raise InputError(f"{type(model).__name__} is in training mode; call model.eval() first")
        if not isinstance(cache, ExportableCache):
            raise InputError(
                f"cache is a {type(cache).__name__}; allocate one with ExportableCache.from_model(model, max_cache_len=...)"
            )
        check_layers(model, cache)
        device = cache.device
        if device != model.device:
            raise InputError(
                f"the cache is on {device}, the model on {model.device}; allocate the cache with device={str(model.device)!r}"
            )
        check_positions(model, cache.max_length)
        if graph_cache is not None and not compile:
            raise InputError(
                f"graph_cache is {str(graph_cache)!r}, but there are no compiled graphs to keep without compile=True"
            )
        found = modalities_of(model, modalities, image_size)
        session = cls(
            ModuleRunner(
                model,
                cache,
                ProgramSpec(
                    prefill_length,
                    score_length,
                    buckets=length_buckets(cache) if buckets is True else buckets or (),
                    modalities=found,
                ),
                compiled=compile,
                mode=mode,
                graph_cache=graph_cache,
            ),
            cache.layers,
            vocab_size_of(model),
            batch_size=cache.batch_size,
            tokenizer=tokenizer,
            generation_config=model.generation_config,
            device=device,
            target="compiled" if compile else "eager",
            fingerprint=fingerprint(model),
            placeholders={modality.method.name: modality.token_id for modality in found},
            steps_per_launch=steps_per_launch,
        )
        session._cache = cache
        session._length = cache.cumulative_length.detach().cpu().clone()
        session._high_water = torch.maximum(
            session._length, torch.tensor(known_high_water(cache.layers, session._length))
        )
        return session

    @classmethod
    def from_bundle(cls, bundle: Bundle, runner: Runner | None = None) -> Session:
        """Open the program of a bundle and start at position 0.

        Args:
            runner: What runs the steps instead of the bundle's own program.
        """
        if runner is None:
            runner, layers = bundle.open_runner()
        else:
            layers = bundle.layers()
        manifest = bundle.manifest
        return cls(
            runner,
            layers,
            manifest.vocab_size,
            batch_size=manifest.program.batch_size,
            tokenizer=bundle.tokenizer(),
            generation_config=GenerationConfig.from_dict(dict(manifest.generation_config)),
            device=getattr(runner, "device", "cpu"),
            target=manifest.target,
            fingerprint=manifest.fingerprint,
            placeholders=recorded_placeholders(manifest.program.methods, manifest.config),
        )

    def warm_up(self, progress: Progress = silent) -> None:
        """Run every method, so that no later step waits for a compilation; then start anew at position 0.

        Only the repetition penalty, whose choice of tokens has a graph of its own, is compiled when it is first used.

        Args:
            progress: Told about each method.

        Raises:
            InputError: If tokens were fed already, which this would overwrite.
        """
        if bool(self._length.any()):
            raise InputError(
                f"warm_up overwrites the cache, which holds {self._length.tolist()} tokens; call it first, or reset()"
            )
        methods = list(self.runner.methods.values())
        for done, method in enumerate(methods):
            progress(f"warming up {method.name}", done, len(methods))
            for inputs in smallest_inputs(method, self.batch_size, self.device):
                self.runner.run(method.name, *inputs)
            if self.runner.methods[method.name] != method:
                # Compiling it found that it takes longer steps only.
                for inputs in smallest_inputs(self.runner.methods[method.name], self.batch_size, self.device):
                    self.runner.run(method.name, *inputs)
            feeds = (
                {"input_ids", "input_pos"} <= set(method.input_names) <= {"input_ids", "input_pos", ROPE_DELTAS.name}
            )
            if feeds and method.max_length == 1 and hasattr(self.runner, "run_and_choose"):
                for sampling, steps in product((Sampling(), Sampling(temperature=1.0)), {1, self.steps_per_launch}):
                    if method.serves(1, steps):
                        chooser = Chooser(sampling, inputs[0], self.vocab_size)
                        self.runner.run_and_choose(method.name, chooser, *inputs, steps=steps)
        self.reset()

    def close(self) -> None:
        """Put back the attention implementation that a live model had before its first session, with the last of them.

        A session that is no longer referred to is closed as well. Over a bundle there is nothing to put back.
        """
        if hasattr(self.runner, "close"):
            self.runner.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def check_request(self, input_ids: torch.Tensor, max_new_tokens: int | None, stop: Sequence[int]) -> list[int]:
        """Refuse a prompt that could not be answered from an empty cache; nothing changes.

        Returns:
            The tokens that end an answer: the model's own and `stop`.
        """
        self._check_prompt(input_ids, max_new_tokens, anew=True)
        tokens, strings = split_stops(stop, self.vocab_size)
        if strings:
            raise InputError(f"stop has {strings[0]!r}; rows of a batch stop at token ids only")
        return [*end_tokens(self.generation_config), *tokens]

    # -- encoder ----------------------------------------------------------------------------------------------------

    @property
    def has_encoder(self) -> bool:
        """Whether it runs an encoder-decoder, whose input goes through `encode`."""
        return self._encoder is not None

    @property
    def encoded(self) -> tuple[torch.Tensor, ...]:
        """What the newest `encode` gave, hidden states and their number per row; nothing without one."""
        return () if self._encoder is None else self._encoder.outputs or ()

    def go_on_from(self, encoded: Sequence[torch.Tensor]) -> None:
        """Have the next prefill attend to what another session's encoder gave, its `encoded`; to nothing yet, where that is empty."""
        self._encoder.outputs = tuple(tensor.to(self.device) for tensor in encoded) or None

    def encode(self, main_input: torch.Tensor | None = None, **inputs: torch.Tensor) -> torch.Tensor:
        """Run an encoder-decoder's encoder, and start anew at position 0: the next prefill attends to what it gave.

        `reset()` starts another answer to the same input.

        Args:
            main_input: int64 [batch, length] token ids, or what else the encoder reads.
            **inputs: The same by name, as the tokenizer or processor gives it (input_ids, input_features or input_values), and
                `attention_mask` [batch, length], 0 on the padding behind each row.

        Returns:
            Hidden states [batch, encoder_length, hidden_size].

        Raises:
            InputError: If the model has no encoder, or an input is not what it takes; nothing has changed then.
        """
        if self._encoder is None:
            raise InputError(f"this {self.target!r} session runs a text decoder, which has no encoder; use prefill")
        if main_input is not None:
            inputs = {self._encoder.method.inputs[0].name: main_input, **inputs}
        hidden = self._encoder.encode(inputs)
        self.reset()
        return hidden

    # -- steps ------------------------------------------------------------------------------------------------------

    def prefill(self, input_ids: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        """Feed a prompt of any length, after whatever was fed before. Long ones go through in chunks.

        Args:
            input_ids: int64 [batch, length], length at least 1.
            **inputs: What a processor gives beside them (pixel_values, input_features), where the session has modalities.

        Returns:
            Logits [batch, vocab] of each row's last token.

        Raises:
            InputError: If shape, dtype, device or a token id is wrong, or there is no token.
            CacheFullError: If the prompt does not fit.
        """
        self._check_prompt(input_ids)
        items = self._check_inputs(input_ids, inputs)
        if self._modalities is None or not (inputs or self._has_placeholder(input_ids)):
            return self._prefill(input_ids, self.chunk_sizes(input_ids.shape[1]), {})
        deltas = self._images.deltas(self._length)
        prompt = self._modalities.embed(input_ids, items, self._length + deltas)
        placed = None if prompt.placed is None else shifted(prompt.placed, self._length, deltas)
        try:
            return self._prefill(prompt.embeds, prompt.sizes, prompt.further)
        finally:
            # Should a step fail, the rows hold what the steps before it fed.
            if placed is not None:
                self._images = self._images.followed_by(placed.begun(self._length))

    def _prefill(self, fed: torch.Tensor, sizes: Sequence[int], further: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Feed token ids [batch, length] or embeddings [batch, length, hidden_size] in chunks."""
        position = 0
        for size in sizes:
            chunk = slice(position, position + size)
            part = {name: tensor[..., chunk].contiguous() for name, tensor in further.items()}
            logits = self._step(fed[:, chunk].contiguous(), further=part)
            position += size
        return logits

    def chunk_sizes(self, length: int) -> list[int]:
        """How many tokens of a prompt of `length` go through each step."""
        return chunk_sizes({name: method for name, method in self.runner.methods.items() if method.takes_ids}, length)

    @property
    def placeholders(self) -> tuple[int, ...]:
        """Token ids that stand for images or sound in a prompt, none where the session takes text only."""
        return () if self._modalities is None else tuple(self._modalities.placeholders.values())

    def _has_placeholder(self, input_ids: torch.Tensor) -> bool:
        return any(bool((input_ids == token).any()) for token in self.placeholders)

    @property
    def score_length(self) -> int:
        """Most tokens that `score` takes, or 0 if the program has no such method."""
        return max((method.max_length for method in self.runner.methods.values() if method.scores), default=0)

    def score(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Feed a few tokens and judge each: like `prefill`, with the logits after every token.

        Args:
            input_ids: int64 [batch, length], length 1 to `score_length`.

        Returns:
            Logits [batch, length, vocab].

        Raises:
            InputError: If the program has no `score` method, or as `prefill` does.
            CacheFullError: If the tokens do not fit.
        """
        if self.score_length == 0:
            raise InputError(
                "this program gives the logits of the last token only; make the session, or export, with score_length=8 or more"
            )
        self._check_prompt(input_ids)
        if input_ids.shape[1] > self.score_length:
            raise InputError(f"score takes up to {self.score_length} tokens at once, got {input_ids.shape[1]}")
        if input_ids.shape[1] == 1:
            return self._step(input_ids)[:, None]
        return self._step(input_ids.contiguous(), scores=True)

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Feed one token per row.

        Args:
            tokens: int64 [batch].

        Returns:
            Logits [batch, vocab].

        Raises:
            InputError: If shape, dtype, device or a token id is wrong.
            CacheFullError: If a row has no slot left.
        """
        self._check_ids("tokens", tokens, ("batch",))
        if self._encoder is not None:
            self._encoder.required()
        check_room(int(self._length.max()), self.max_length, 1)
        return self._step(tokens[:, None])

    def decode_and_choose(self, tokens: torch.Tensor, chooser: Chooser, steps: int = 1) -> torch.Tensor:
        """Feed one token per row and choose the next ones: inside the graph where the target can. Then feed those, and so on.

        Args:
            tokens: int64 [batch].
            chooser: How to choose.
            steps: 1, or `steps_per_launch`.

        Returns:
            int64 [batch, steps]; all but the last of each row are in the cache.

        Raises:
            InputError, CacheFullError: See `decode`.
        """
        if not hasattr(self.runner, "run_and_choose"):
            return chooser.choose(self.decode(tokens))[:, None]
        self._check_ids("tokens", tokens, ("batch",))
        check_room(int(self._length.max()), self.max_length, steps)
        return self._step(tokens[:, None], chooser=chooser, steps=steps)

    def _step(
        self,
        input_ids: torch.Tensor,
        scores: bool = False,
        chooser: Chooser | None = None,
        steps: int = 1,
        further: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> torch.Tensor:
        size = input_ids.shape[1]
        fed = size * steps
        # Before the run: should it fail halfway, slots may have been written.
        self._high_water = torch.maximum(self._high_water, self._length + fed)
        by_ids = not input_ids.is_floating_point()
        methods = {name: method for name, method in self.runner.methods.items() if method.takes_ids is by_ids}
        if self._encoder is not None and not bool(self._length.any()):
            # The first step of a sequence, however short, is the one that fills the cross-attention layers.
            methods = {name: method for name, method in methods.items() if self._takes_encoding(method)}
        method = method_for(methods, size, int(self._length.max()) + fed, scores)
        if self._encoder is not None and self._takes_encoding(methods[method]):
            more = self._encoder.required()
        else:
            more = tuple(
                self._images.deltas(self._length).to(self.device) if name == ROPE_DELTAS.name else further[name]
                for name in methods[method].input_names[2:]
            )
        inputs = (input_ids, self._length.to(self.device, copy=True), *more)
        if chooser is None:
            result = self.runner.run(method, *inputs)
        else:
            result = self.runner.run_and_choose(method, chooser, *inputs, steps=steps)
        self._length += fed
        self._pending = None
        self.moves += 1
        return result

    @staticmethod
    def _takes_encoding(method: Method) -> bool:
        return "encoder_hidden_states" in method.input_names

    # -- checks -----------------------------------------------------------------------------------------------------

    def _check_prompt(self, input_ids: torch.Tensor, max_new_tokens: int | None = None, anew: bool = False) -> None:
        self._check_ids("input_ids", input_ids, ("batch", "length"))
        check_max_new_tokens(max_new_tokens)
        if self._encoder is not None:
            self._encoder.required()
        held = 0 if anew else int(self._length.max())
        check_room(held, self.max_length, input_ids.shape[1], max_new_tokens)

    def _check_inputs(self, input_ids: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What encoders are to be given of what a processor gave beside the ids."""
        if self._modalities is not None:
            return self._modalities.check(input_ids, inputs)
        # A tokenizer's mask over one prompt says nothing.
        if inputs.keys() - {"attention_mask"} or not all(bool(mask.all()) for mask in inputs.values()):
            raise InputError(
                f"this session takes token ids without padding only, got {', '.join(inputs)}; make it, or export, with modalities="
            )
        return {}

    def _check_ids(self, name: str, ids: torch.Tensor, dims: tuple[str, ...]) -> None:
        check_ids(name, ids, dims, self.batch_size, self.vocab_size, self.device)


def load(path: str | Path, *, check_versions: bool = True, progress: Progress = silent) -> Session:
    """Open a bundle that `export` wrote, ready to run.

    Args:
        path: The folder.
        check_versions: Refuse a bundle made with other versions of the packages its target depends on.
        progress: Told about bytes checked.

    Raises:
        BundleError: If it is missing, damaged, of another schema version or of other package versions.
        MissingDependencyError: If its target needs a package that is not installed.
    """
    from ..bundle.bundle import Bundle

    return Session.from_bundle(Bundle.open(path, check_versions=check_versions, progress=progress))
