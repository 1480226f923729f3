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

    def shifting(self, stepper: ProgramStepper, on_full: str, protected: int) -> Request:
        """Return the request with a policy for a full cache other than "refuse".

        Args:
            stepper: The session's.
            on_full: See `Session.generate`.
            protected: See `Session.generate`.

        Raises:
            InputError: If an argument is not valid, or the program cannot drop tokens.
            UnsupportedModelError: If the model's keys are not a rotation by their position.
        """
        check_choice("on_full", on_full, ("refuse", "shift"))
        if stepper.max_length is None:
            return self
        check_protected(protected, stepper.max_length)
        if self.draft is not None:
            raise InputError("on_full must be 'refuse' with a draft, got 'shift'; generate without the draft")
        stepper.check_shifts()
        return replace(self, protected=protected)

    def check_room(self, stepper: ProgramStepper, rows: TokenRows, from_start: bool = False) -> None:
        """Check that a prompt fits, see `ProgramStepper.check_room`, if need be after a shift.

        Raises:
            CacheFullError, InputError: If it does not, or leaves no room for a new token of the checkpoint's limit.
        """
        if self.protected is None:
            stepper.check_room(rows, self.ending.limit, from_start)
        else:
            can_drop = 0 if from_start else _most_dropped(stepper, self.protected)
            if not 0 < _end(stepper, rows, from_start) - (stepper.max_length or 0) <= can_drop:
                stepper.check_room(rows, from_start=from_start)
        if self.ending.limit is None:
            self.settings.limit(_end(stepper, rows, from_start))


def _end(stepper: ProgramStepper, rows: TokenRows, from_start: bool = False) -> int:
    """Return the number of tokens in the fullest row after a prompt."""
    held = [0] * len(rows.lengths) if from_start else stepper.state.length.tolist()
    return max(map(sum, zip(held, rows.lengths, strict=True)))


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
    check_one_id_a_token(session.stages.limits.codebooks)
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
    """Yield the tokens after a prompt, int64 [batch] per step, from the session's position.

    Args:
        session: The session.
        request: Options of the generation.
        prompt: The checked prompt.
        texts: Its text, int64 [length] per row, if tokens that are pending at the first step go in front of it.
    """
    if texts:
        prompt = Prompt(TokenRows.of(after_unfed(session, texts)))
    stepper, ending = session.stepper, request.ending
    held = stepper.state.length.tolist()
    if ending.limit is None:
        ending = replace(ending, limit=request.settings.limit(_end(stepper, prompt.rows)))
    if ending.strings and request.continues:
        ending = replace(ending, after=[row.tolist() for row in prompt.rows.texts])
    shifts, first = request.protected is not None, request.protected or 0
    if shifts and (missing := _end(stepper, prompt.rows) - (stepper.max_length or 0)) > 0:
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
    sampler.agree = None if stepper.ranks is None else stepper.ranks.of_first
    if request.draft is None:
        chosen = decode_loop(stepper, logits, sampler, ending, lambda: shifts and _make_room(stepper, first))
    else:
        speculation = Speculation(prompt.rows.ids[0].tolist(), request.draft)
        chosen = speculative_loop(stepper, logits, sampler, ending, speculation)
    yield from _given_out(chosen, stepper, ending)


def _given_out(chosen: Iterator[Chosen], stepper: ProgramStepper, ending: Ending) -> Iterator[torch.Tensor]:
    """Yield the tokens of each step, note those that are not fed yet, and name the position of non-finite logits."""
    # An ended row keeps its newest token if it keeps its length. Otherwise the token was fed, with padding after it.
    keeps = stepper.least_rollback[1] > 0
    unfed: list[int | None] = [None] * stepper.batch_size
    try:
        for tokens, are_padding in chosen:
            for row, (token, is_padding) in enumerate(zip(tokens.tolist(), are_padding.tolist(), strict=True)):
                if not is_padding:
                    unfed[row] = None if token in ending.tokens else token
                elif not keeps:
                    unfed[row] = None
            stepper.state = replace(stepper.state, unfed=tuple(unfed))
            yield tokens
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
        for token, text in zip(session.stepper.state.unfed, texts, strict=True)
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
    if request.draft is not None:
        if inputs:
            raise InputError(
                f"a draft takes token ids, got {', '.join(inputs)} too; prefill them first, or generate without a draft"
            )
        check_draft(session, request.draft, request.ending.strings)
    return stepper.guarded(lambda: token_steps(session, request, prompt))


def generated_text(session: AnySession, prompt: Any, request: Request) -> Iterator[Any]:
    """Check the arguments of `Session.stream_text` now, and return its iterator."""
    tokenizer = require_tokenizer(session, "text")
    prompts, many = prompts_of(session, prompt)
    strings = request.ending.strings
    # The text stream of a single row ends at a stop string; in a batch the decode loop must end the row.
    if not many:
        request = replace(request, ending=replace(request.ending, strings=()))
    after: Sequence[Sequence[int]]
    if session.stages.encoder is not None:
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
    continues, stepper = are_text[0], session.stepper
    ids = [
        encode_prompt(tokenizer, prompt, starts=not continues or length == 0)[0].to(session.device)
        for prompt, length in zip(prompts, stepper.state.length.tolist(), strict=True)
    ]
    if request.draft is not None:
        check_draft(session, request.draft)
    rows = after_unfed(session, ids) if continues else ids
    prompt = session.stages.check(rows, None, {}, stepper.state)
    request.check_room(stepper, prompt.rows, from_start=not continues)
    if not continues:
        session.reset()
    asked, texts = replace(request, continues=continues), ids if continues else ()
    steps = stepper.guarded(lambda: token_steps(session, asked, prompt, texts))
    return steps, [row.tolist() for row in rows] if continues else []


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
    if session.stages.encoder is not None:
        raise InputError("draft must be None for an encoder-decoder; leave it out")
    if session.batch_size != 1:
        raise InputError(f"batch_size must be 1 for a draft, got {session.batch_size}; decode without one")
    if strings:
        raise InputError("stop must be token ids with a draft, got strings; use generate_text, which stops at strings")
    scored = session.stepper.score_length
    if scored == 0:
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
    check_can_rewind(session, min(draft.max_tokens, scored - 1))
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
    if not settings.rules and not settings.processors:
        return Sampler(sampling, rows.ids, session.vocab_size)
    texts, encoded = rows.texts, rows.texts
    if session.stages.encoder is not None:
        # Compared by identity, because the tokens of a loaded state are not known.
        known, encoder = session.encoded_ids, session.stepper.state.encoded
        encoded = known[1] if known is not None and encoder and encoder[0] is known[0] else []
    starts = [
        RowStart(ids, 0 if held is None else held[row], limit, encoded[row] if encoded else None)
        for row, ids in enumerate(texts)
    ]
    rules = settings.row_rules(starts, sampling.repetition_penalty)
    return Sampler(sampling, rows.ids, session.vocab_size, rules=rules)
