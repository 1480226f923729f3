"""Generation with a session: text, tokens and scores, over the part of it that these functions use."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from ..common.settings import check_choice
from ..errors import InputError, NonFiniteLogitsError
from ..generation.checkpoint_settings import CheckpointSettings, RowStart
from ..generation.loop import Chosen, Ending, decode_loop
from ..generation.sampling import Sampler, Sampling
from ..generation.speculative import DraftModel, Speculation, check_can_rewind, speculative_loop
from ..generation.text import encode_prompt, stream_text, stream_texts
from .checks import check_max_new_tokens, check_one_id_a_token, check_protected, split_stops
from .inputs.encoder import start_tokens
from .rows import Prompt, TokenRows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..backends.base import Runner
    from ..cache.layers import CacheLayer
    from ..generation.speculative import Draft
    from ..models.tokenizers.text import TextTokenizer
    from .inputs.stages import InputStages
    from .stepper import ProgramStepper


class AnySession(Protocol):
    """The part of a `Session` that these functions use, see there."""

    batch_size: int
    vocab_size: int
    device: torch.device
    target: str
    fingerprint: str | None
    text_tokenizer: PreTrainedTokenizerBase | TextTokenizer | None
    generation_config: GenerationConfig | None
    stepper: ProgramStepper
    stages: InputStages
    parts_of_heads: tuple[int, ...]
    encoded_ids: tuple[torch.Tensor, list[torch.Tensor]] | None

    @property
    def runner(self) -> Runner:
        """Runner of the program."""
        ...

    @property
    def layers(self) -> tuple[CacheLayer, ...]:
        """Layers of the cache."""
        ...

    @property
    def length(self) -> torch.Tensor:
        """Number of tokens in each row, int64 [batch]."""
        ...

    @property
    def unfed(self) -> tuple[int | None, ...]:
        """See `Session.unfed`."""
        ...

    @property
    def max_length(self) -> int | None:
        """Tokens that a row can hold, or None."""
        ...

    @property
    def score_length(self) -> int:
        """Most tokens that `score` takes."""
        ...

    @property
    def codebooks(self) -> int | None:
        """Number of ids in each token, or None."""
        ...

    @property
    def has_encoder(self) -> bool:
        """True for an encoder-decoder."""
        ...

    @property
    def generation_settings(self) -> CheckpointSettings:
        """See `Session.generation_settings`."""
        ...

    def settings_of(self, config: GenerationConfig | None) -> CheckpointSettings:
        """See `Session.settings_of`."""
        ...

    def agreed(self, sampling: Sampling) -> Sampling:
        """See `Session.agreed`."""
        ...

    def reset(self) -> None:
        """Return to position 0."""
        ...

    def encode(self, main_input: torch.Tensor | None = None, **inputs: torch.Tensor) -> torch.Tensor:
        """See `Session.encode`."""
        ...


@dataclass(frozen=True)
class Request:
    """Checked options of a generation.

    Attributes:
        settings: Settings of the checkpoint, or those that the call gave instead.
        sampling: Settings of the sampler.
        ending: Ends of a row, including the model's end tokens. Its limit is the one that was requested.
        draft: Proposes tokens; None for plain decoding.
        continues: True if the text continues that of the prompt; False for a text of its own, such as the response to
            chat messages.
        config: The generation config of the call, which names the token that an encoder-decoder starts with.
        protected: Number of first tokens that stay when a full cache drops others; None to end there.
    """

    settings: CheckpointSettings
    sampling: Sampling
    ending: Ending
    draft: Draft | None = None
    continues: bool = True
    config: GenerationConfig | None = None
    protected: int | None = None

    def shifting(self, session: AnySession, on_full: str, protected: int) -> Request:
        """Return the request with the policy for a full cache.

        Args:
            session: The session.
            on_full: See `Session.generate`.
            protected: See `Session.generate`.

        Raises:
            InputError: If an argument is not valid, or the program cannot drop tokens.
            UnsupportedModelError: If the model's keys are not a rotation by their position.
        """
        check_choice("on_full", on_full, ("refuse", "shift"))
        if on_full == "refuse" or session.max_length is None:
            return self
        check_protected(protected, session.max_length)
        if self.draft is not None:
            raise InputError("on_full must be 'refuse' with a draft, got 'shift'; generate without the draft")
        session.stepper.check_shifts()
        return replace(self, protected=protected)

    def check_room(self, stepper: ProgramStepper, rows: TokenRows, from_start: bool = False) -> None:
        """Check that a prompt fits, see `ProgramStepper.check_room`, if need be after a shift.

        Raises:
            CacheFullError, InputError: If it does not.
        """
        if self.protected is None:
            stepper.check_room(rows, self.ending.limit, from_start)
            return
        can_drop = 0 if from_start else _most_dropped(stepper, self.protected)
        if not 0 < _missing(stepper, rows, from_start) <= can_drop:
            stepper.check_room(rows, from_start=from_start)


def _missing(stepper: ProgramStepper, rows: TokenRows, from_start: bool = False) -> int:
    """Return the number of slots that a prompt lacks."""
    held = [0] * len(rows.lengths) if from_start else stepper.state.length.tolist()
    return max(map(sum, zip(held, rows.lengths, strict=True))) - (stepper.max_length or 0)


def _most_dropped(stepper: ProgramStepper, first: int) -> int:
    return stepper.state.most_dropped(first, stepper.layers)


def _make_room(stepper: ProgramStepper, first: int, least: int = 1) -> bool:
    """Drop half of the tokens after the first ones, and at least `least`; return False if that is not possible."""
    most = _most_dropped(stepper, first)
    if most < least:
        return False
    count = min(most, max(least, (stepper.state.longest - first) // 2))
    count = stepper.state.whole_drop(first, count, most)
    if count < least:
        return False
    stepper.drop(first, count)
    return True


def config_for(
    session: AnySession, asked: GenerationConfig | Literal["model"] | None
) -> tuple[GenerationConfig | None, bool]:
    """Return the generation config of a call, and True if tokens are drawn as it says.

    Settings that a given config leaves open are those of the session's config, as in transformers' `generate`.

    Raises:
        InputError: If it is not a config.
    """
    own = session.generation_config
    if asked is None or asked == "model":
        return own, asked is not None
    if not isinstance(asked, GenerationConfig):
        raise InputError(f"generation_config must be 'model', a GenerationConfig or None, got {asked!r:.100}")
    config = copy.deepcopy(asked)
    for name, value in (own.to_dict() if own is not None else {}).items():
        if getattr(config, name, None) is None:
            setattr(config, name, value)
    return config, True


def make_request(
    session: AnySession,
    max_new_tokens: int | None,
    given: Mapping[str, Any],
    generation_config: GenerationConfig | Literal["model"] | None,
    stop: int | str | Sequence[int | str] | None,
    draft: Draft | None,
) -> Request:
    """Check the arguments of `Session.generate`, and return them as a request.

    Args:
        session: The session.
        max_new_tokens: See `Session.generate`.
        given: Options of sampling, by name; None where they are not given.
        generation_config: See `Session.generate`.
        stop: See `Session.generate`.
        draft: See `Session.generate`.

    Raises:
        InputError: If an argument is not valid.
    """
    config, samples = config_for(session, generation_config)
    settings = session.settings_of(config)
    sampling = session.agreed(Sampling(**asdict(settings.sampling) if samples else {}).over(**given))
    check_one_id_a_token(session.codebooks)
    check_max_new_tokens(max_new_tokens)
    if draft is not None and not callable(getattr(draft, "propose", None)):
        raise InputError(
            f"draft must be PromptLookup(), DraftModel(session) or TrainedDraft(session), got {draft!r:.100}; pass one "
            "of them"
        )
    tokens, strings = ([], []) if stop is None else split_stops(stop, session.vocab_size)
    if strings:
        require_tokenizer(session, "a stop string")
    ends = settings.ends
    pad = None if config is None else config.pad_token_id
    if pad is None or not 0 <= pad < session.vocab_size:
        pad = ends[0] if ends else 0
    ending = Ending(max_new_tokens, frozenset({*ends, *tokens}), tuple(strings), pad, session.text_tokenizer)
    return Request(settings, sampling, ending, draft, config=config)


def token_steps(
    session: AnySession, request: Request, prompt: Prompt, texts: Sequence[torch.Tensor] = ()
) -> Generator[torch.Tensor]:
    """Return the tokens after a prompt, int64 [batch] per step, from the session's position.

    Args:
        session: The session.
        request: Options of the generation.
        prompt: The checked prompt.
        texts: Its text, int64 [length] per row, if tokens that are pending at the first step go in front of it.
    """
    return session.stepper.guarded(lambda: _token_steps(session, request, prompt, texts))


def _token_steps(
    session: AnySession, request: Request, prompt: Prompt, texts: Sequence[torch.Tensor]
) -> Generator[torch.Tensor]:
    if texts:
        prompt = Prompt(TokenRows.of(after_unfed(session, texts)))
    stepper, held = session.stepper, session.length.tolist()
    ending = replace(request.ending, limit=default_limit(request.settings, request.ending.limit, prompt.rows, held))
    if ending.strings and request.continues:
        ending = replace(ending, after=_rows_of(prompt.rows.ids, prompt.rows.lengths))
    agree = None if session.stepper.ranks is None else session.stepper.ranks.of_first
    shifts, first = request.protected is not None, request.protected or 0
    if shifts and (missing := _missing(stepper, prompt.rows)) > 0:
        _make_room(stepper, first, missing)
    stepper.check_room(prompt.rows)
    logits = stepper.feed_for_generation(session.stages.steps(prompt, stepper))
    # The newest token needs no slot, because it is not fed.
    room = None if stepper.room is None else stepper.room + 1
    if shifts and room is not None:
        # A generation has an end: where the cache is full, or after half a cache if that is later.
        room = max(room, (stepper.max_length or 0) // 2) if ending.limit is None else None
        ending = replace(ending, limit=room or ending.limit)
    most = [limit for limit in (ending.limit, room) if limit is not None]
    sampler = sampler_after(session, request.sampling, prompt.rows, min(most, default=None), request.settings, held)
    sampler.agree = agree
    if request.draft is None:
        chosen = decode_loop(stepper, logits, sampler, ending, lambda: shifts and _make_room(stepper, first))
    else:
        speculation = Speculation(prompt.rows.ids[0].tolist(), request.draft)
        chosen = speculative_loop(stepper, logits, sampler, ending, speculation)
    # An ended row keeps its newest token if it keeps its length. Otherwise the token was fed, with padding after it.
    keeps = stepper.least_rollback[1] > 0
    unfed: list[int | None] = [None] * session.batch_size
    for tokens, are_padding in _finite(chosen, stepper):
        for row, (token, is_padding) in enumerate(zip(tokens.tolist(), are_padding.tolist(), strict=True)):
            if not is_padding:
                unfed[row] = None if token in ending.tokens else token
            elif not keeps:
                unfed[row] = None
        stepper.state = replace(stepper.state, unfed=tuple(unfed))
        yield tokens


def _rows_of(ids: torch.Tensor, lengths: Sequence[int]) -> list[list[int]]:
    """Return the token ids of each row, which `TokenRows` keeps at the end of the row."""
    return [row[len(row) - length :] for row, length in zip(ids.tolist(), lengths, strict=True)]


def _finite(chosen: Iterator[Chosen], stepper: ProgramStepper) -> Iterator[Chosen]:
    """Yield the steps, and name the position if logits are not finite."""
    try:
        yield from chosen
    except NonFiniteLogitsError as error:
        # The longest row, because rows that ended may be shorter.
        position = int(stepper.length.max()) - 1
        raise NonFiniteLogitsError(
            f"the logits are not finite at position {position}, so no token can be chosen: the model overflows there, "
            "or its weights or its cache hold infinities or not-a-number; reset(), and run it in float32"
        ) from error


def after_unfed(session: AnySession, texts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return texts, int64 [length] per row, with the token that was given out and not fed in front of each.

    Raises:
        InputError: If a row has no token.
    """
    found = [
        text if token is None else torch.cat([text.new_tensor([token]), text])
        for token, text in zip(session.unfed, texts, strict=True)
    ]
    if any(len(row) == 0 for row in found):
        raise InputError("the prompt is empty; pass at least one token per row")
    return found


def checked_steps(
    session: AnySession, input_ids: Any, inputs: Mapping[str, torch.Tensor], request: Request
) -> Generator[torch.Tensor]:
    """Check a prompt and the further outputs of a processor now, and return the tokens after it, see `token_steps`."""
    extra, stepper = dict(inputs), session.stepper
    prompt = session.stages.check(input_ids, extra.pop("attention_mask", None), extra, stepper.state)
    request.check_room(stepper, prompt.rows)
    default_limit(request.settings, request.ending.limit, prompt.rows, session.length.tolist())
    if request.draft is not None:
        if inputs:
            raise InputError(
                f"a draft takes token ids, got {', '.join(inputs)} too; prefill them first, or generate without a draft"
            )
        check_draft(session, request.draft, request.ending.strings)
    return token_steps(session, request, prompt)


def generated_text(session: AnySession, prompt: Any, request: Request) -> Iterator[Any]:
    """Check the arguments of `Session.stream_text` now, and return its iterator."""
    tokenizer = require_tokenizer(session, "text")
    prompts, many = prompts_of(session, prompt)
    strings = request.ending.strings
    # The text stream of a single row ends at a stop string; in a batch the decode loop must end the row.
    if not many:
        request = replace(request, ending=replace(request.ending, strings=()))
    after: Sequence[Sequence[int]]
    if session.has_encoder:
        steps, after = _encoder_steps(session, tokenizer, prompts, request)
    elif isinstance(prompts, Mapping):
        inputs = dict(prompts)
        ids = inputs.pop("input_ids", None)
        if not isinstance(ids, torch.Tensor):
            raise InputError(
                f"prompt must have a tensor input_ids, as a processor returns it, got a {type(ids).__name__}; pass its "
                'output with return_tensors="pt", or text'
            )
        steps = checked_steps(session, ids, inputs, request)
        # With padding, because it is a special token and gives no text.
        after = ids.tolist()
    else:
        steps, after = _text_steps(session, tokenizer, prompts, request)
    if many:
        return _until_closed(steps, stream_texts(steps, tokenizer, request.ending.tokens, strings, after))
    tokens = (int(step[0]) for step in steps)
    pieces = stream_text(tokens, tokenizer, request.ending.tokens, strings, after[0] if after else ())
    return _until_closed(steps, pieces)


def _until_closed(steps: Generator[torch.Tensor], pieces: Iterator[Any]) -> Iterator[Any]:
    """Yield pieces of text, and close the steps at their end or error, even if the caller keeps the traceback."""
    try:
        yield from pieces
    finally:
        steps.close()


def prompts_of(session: AnySession, prompt: Any) -> tuple[Any, bool]:
    """Return the prompt of each row, or a processor's output; and True if each step gives a list of pieces."""
    if isinstance(prompt, Mapping):
        return prompt, session.batch_size > 1
    if isinstance(prompt, (list, tuple)) and prompt and not isinstance(prompt[0], Mapping):
        if len(prompt) != session.batch_size:
            raise InputError(
                f"a list of prompts must have one per row, {session.batch_size}, got {len(prompt)}; pass "
                f"{session.batch_size} prompts"
            )
        return list(prompt), True
    if session.batch_size != 1:
        raise InputError(
            f"prompt must be a list of {session.batch_size} prompts for {session.batch_size} rows, got one; pass a "
            "list, or use generate with token ids"
        )
    return [prompt], False


def _text_steps(
    session: AnySession, tokenizer: PreTrainedTokenizerBase | TextTokenizer, prompts: Sequence[Any], request: Request
) -> tuple[Generator[torch.Tensor], list[list[int]]]:
    """Return the steps after text prompts, and the token ids of each row that the generated text continues.

    Texts continue from the session's position. Conversations reset it, and each response is a text of its own.
    """
    are_text = [isinstance(prompt, str) for prompt in prompts]
    if any(are_text) != all(are_text):
        raise InputError("a list of prompts must have only texts or only conversations, got both; pass one of the two")
    continues = are_text[0]
    held = session.length.tolist()
    ids = [
        encode_prompt(tokenizer, prompt, starts=not continues or length == 0)[0].to(session.device)
        for prompt, length in zip(prompts, held, strict=True)
    ]
    if request.draft is not None:
        check_draft(session, request.draft)
    rows = after_unfed(session, ids) if continues else ids
    prompt = session.stages.check(rows, None, {}, session.stepper.state)
    request.check_room(session.stepper, prompt.rows, from_start=not continues)
    default_limit(request.settings, request.ending.limit, prompt.rows, held if continues else None)
    if continues:
        return token_steps(session, request, prompt, ids), [row.tolist() for row in rows]
    session.reset()
    return token_steps(session, replace(request, continues=False), prompt), []


def _encoder_steps(
    session: AnySession, tokenizer: PreTrainedTokenizerBase | TextTokenizer, prompts: Any, request: Request
) -> tuple[Generator[torch.Tensor], list[list[int]]]:
    """Encode the prompts, and return the decoder's steps and the token ids that it starts with."""
    if request.draft is not None:
        check_draft(session, request.draft)
    start = start_tokens(request.config, session.batch_size, session.device)
    if isinstance(prompts, Mapping):
        encoded = dict(prompts)
        start = torch.cat([start, encoded.pop("decoder_input_ids", start[:, :0])], dim=1)
        session.encode(**encoded)
    else:
        rows = [encode_prompt(tokenizer, prompt)[0].to(session.device) for prompt in prompts]
        # Padded on the right, because encoders take no padding on the left.
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        masks = {} if bool(mask.all()) else {"attention_mask": mask}
        session.encode(pad_sequence(rows, batch_first=True), **masks)
    return checked_steps(session, start, {}, request), start.tolist()


def check_draft(session: AnySession, draft: Draft, strings: Sequence[str] = ()) -> None:
    """Check that a session can verify the proposals of a draft.

    Args:
        session: The session.
        draft: The draft.
        strings: Stop strings of the generation.

    Raises:
        InputError: If it cannot.
    """
    if session.has_encoder:
        raise InputError("draft must be None for an encoder-decoder; leave it out")
    if session.batch_size != 1:
        raise InputError(f"batch_size must be 1 for a draft, got {session.batch_size}; decode without one")
    if strings:
        raise InputError("stop must be token ids with a draft, got strings; use generate_text, which stops at strings")
    if session.score_length == 0:
        raise InputError(
            f"score_length must be at least 2 for a draft, got 0; make the session, or export, with "
            f"score_length={draft.max_tokens + 1}"
        )
    drafts = draft.session.vocab_size if isinstance(draft, DraftModel) else session.vocab_size
    if drafts != session.vocab_size:
        raise InputError(
            f"the draft model must have the vocabulary of this model, {session.vocab_size} tokens, got {drafts}; use "
            "another draft model"
        )
    check_can_rewind(session, min(draft.max_tokens, session.score_length - 1))
    of_one_process = isinstance(draft, DraftModel) and getattr(draft.session.stepper, "ranks", None) is None
    if session.stepper.ranks is not None and of_one_process:
        raise InputError(
            f"the draft model runs separately on each of {session.stepper.ranks.size} ranks, which may propose other "
            "tokens; split it over the same ranks, or draft by PromptLookup"
        )


def require_tokenizer(session: AnySession, purpose: str) -> PreTrainedTokenizerBase | TextTokenizer:
    """Return the session's tokenizer.

    Raises:
        InputError: If it has none.
    """
    if session.text_tokenizer is None:
        raise InputError(
            f"{purpose} needs a tokenizer and this session has none; pass tokenizer= to Session.from_model or export, "
            "or use generate with token ids"
        )
    return session.text_tokenizer


def sampler_after(
    session: AnySession,
    sampling: Sampling,
    rows: TokenRows,
    limit: int | None,
    settings: CheckpointSettings | None = None,
    held: Sequence[int] | None = None,
) -> Sampler:
    """Return the sampler of a generation, which also follows the settings of the checkpoint.

    Args:
        session: The session.
        sampling: Settings of the caller. Its repetition penalty replaces the checkpoint's.
        rows: Prompts.
        limit: Largest number of new tokens that was requested and fits the cache; None if there is no limit.
        settings: Settings of the checkpoint, those of the session by default.
        held: Number of tokens in each row before its prompt; 0 by default.

    Raises:
        InputError: If a setting of the checkpoint is not valid.
    """
    settings = settings or session.generation_settings
    if sampling.repetition_penalty is None and settings.repetition_penalty is not None:
        sampling = replace(sampling, repetition_penalty=settings.repetition_penalty)
    texts, encoded = rows.texts, rows.texts
    if session.has_encoder:
        # Compared by identity, because the tokens of a loaded state are not known.
        known, encoder = session.encoded_ids, session.stepper.state.encoded
        encoded = known[1] if known is not None and encoder and encoder[0] is known[0] else []
    starts = [
        RowStart(ids, 0 if held is None else held[row], limit, encoded[row] if encoded else None)
        for row, ids in enumerate(texts)
    ]
    rules = settings.row_rules(starts, sampling.repetition_penalty)
    return Sampler(sampling, rows.ids, session.vocab_size, rules=rules)


def default_limit(
    settings: CheckpointSettings, requested: int | None, rows: TokenRows, held: Sequence[int] | None = None
) -> int | None:
    """Return the requested limit of new tokens, or else that of the checkpoint; None if there is neither.

    Raises:
        InputError: If the checkpoint's limit of all tokens leaves no room for a new one.
    """
    if requested is not None:
        return requested
    before = [0] * len(rows.lengths) if held is None else held
    return settings.limit(max(map(sum, zip(before, rows.lengths, strict=True))))
