"""What a session generates: tokens and text, by the loops of `decoding`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..errors import InputError
from ..generation.chooser import Chooser
from ..generation.loop import generate_tokens
from ..generation.sampling import Sampling
from ..generation.speculative import Draft, check_can_rewind, generate_speculative
from ..generation.text import encode_prompt, stream_text
from .checks import check_max_new_tokens, split_stops
from .inputs.encoder import start_tokens


class Generation:
    """The part of `Session` that generates; see there for its attributes."""

    def generate(
        self,
        input_ids: torch.Tensor,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        stop: int | str | Sequence[int | str] | None = None,
        draft: Draft | None = None,
        **inputs: torch.Tensor,
    ) -> Iterator[Any]:
        """Tokens that follow a prompt, one step each. Arguments are checked now, steps run as the iterator is consumed.

        It continues from where the session is: `reset()` first for a new sequence. The newest token given out is not in the
        cache yet; to continue after the end, start the next prompt with it. (`generate_text` does so by itself.)

        Args:
            input_ids: int64 [batch, length].
            max_new_tokens: Most tokens per row; as many as fit by default.
            temperature, top_k, top_p, min_p, repetition_penalty, seed: See `decoding.Sampling`; greedy by default.
            stop: Token ids that end a row, besides the model's end tokens, or strings where there is a tokenizer. The token
                that ends a row is given out too.
            draft: Speculative decoding, at batch size 1: `PromptLookup()` or `DraftModel(session)`. The tokens are those of
                plain decoding, or follow the same distribution; several are judged per step.
            **inputs: What a processor gives beside input_ids, as `prefill` takes it: `generate(**processor(...))`.

        Yields:
            A token id (int) at batch size 1, otherwise int64 [batch], where ended rows give the padding token.

        Raises:
            InputError: If an argument is wrong.
            CacheFullError: If the prompt, or the prompt with `max_new_tokens`, does not fit.
        """
        tokens, strings = self._stops(stop)
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
        steps = self._generate(input_ids, max_new_tokens, sampling, tokens, strings, draft=draft, inputs=inputs)
        return (int(step[0]) for step in steps) if self.batch_size == 1 else steps

    def generate_text(
        self,
        prompt: str | Sequence[Mapping[str, Any]] | Mapping[str, torch.Tensor],
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        stop: int | str | Sequence[int | str] | None = None,
        draft: Draft | None = None,
    ) -> Iterator[str]:
        """Text that follows a prompt, in pieces that never split a character and join to the whole.

        An encoder-decoder encodes the prompt, and its decoder starts anew with the model's start token.

        Text continues from where the session is, and so from all that was generated before: the newest token given out,
        which is not in the cache yet, is fed in front of the prompt and takes one token of room. It is left out if it is an
        end or a stop token, or if the session was reset, rewound or fed something else since. Chat messages are a whole
        conversation: with them the session starts anew. What ends the text (an end token, a stop token or a stop string) is
        not part of it; the tokens that made up a stop string are seen by text that continues.

        Args:
            prompt: Text, or chat messages such as `[{"role": "user", "content": "hello"}]`. Empty text goes on from the
                newest token, where one is left to be fed. Or what a processor gives, `processor(...)`, fed as `generate` does; with
                an encoder-decoder as `encode` does, and the answer begins with `decoder_input_ids` [1, length] behind the
                start token, if they are in it.
            max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, stop, draft: See `generate`.

        Raises:
            InputError: If there is no tokenizer, the batch size is not 1, or an argument is wrong.
            CacheFullError: See `generate`.
        """
        tokenizer = self._require_tokenizer("text")
        if self.batch_size != 1:
            raise InputError(
                f"text is generated at batch size 1, this session has {self.batch_size}; use generate with token ids"
            )
        tokens, strings = self._stops(stop)
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
        ends = {*end_tokens(self.generation_config), *tokens}
        if self._encoder is not None:
            if draft is not None:
                self._check_draft(draft, ())
            check_max_new_tokens(max_new_tokens)
            start = start_tokens(self.generation_config, 1, self.device)
            if isinstance(prompt, Mapping):
                encoded = dict(prompt)
                start = torch.cat([start, encoded.pop("decoder_input_ids", start[:, :0])], dim=1)
                self.encode(**encoded)
            else:
                self.encode(encode_prompt(tokenizer, prompt).to(self.device))
            steps = self._generate(start, max_new_tokens, sampling, tokens, ())
            return stream_text((int(step[0]) for step in steps), tokenizer, ends, strings)
        if isinstance(prompt, Mapping):
            inputs = dict(prompt)
            steps = self._generate(
                inputs.pop("input_ids"), max_new_tokens, sampling, tokens, (), draft=draft, inputs=inputs
            )
            return stream_text((int(step[0]) for step in steps), tokenizer, ends, strings)
        is_text = isinstance(prompt, str)
        starts = not is_text or int(self._length[0]) == 0
        input_ids = encode_prompt(tokenizer, prompt, starts=starts).to(self.device)
        steps = self._generate(
            input_ids, max_new_tokens, sampling, tokens, (), continues=is_text, anew=not is_text, draft=draft
        )
        return stream_text((int(step[0]) for step in steps), tokenizer, ends, strings)

    def _generate(
        self,
        input_ids: torch.Tensor,
        max_new_tokens: int | None,
        sampling: Sampling,
        stop_tokens: Sequence[int],
        stop_strings: Sequence[str],
        continues: bool = False,
        anew: bool = False,
        draft: Draft | None = None,
        inputs: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> Iterator[torch.Tensor]:
        self._check_prompt(self._after_pending(input_ids) if continues else input_ids, max_new_tokens, anew)
        self._check_inputs(input_ids, inputs)
        if draft is not None:
            if inputs:
                raise InputError(
                    f"a draft takes token ids, got {', '.join(inputs)} too; prefill them first, or generate without a draft"
                )
            self._check_draft(draft, stop_strings)
        if anew:
            self.reset()
        ends = end_tokens(self.generation_config)
        pad = getattr(self.generation_config, "pad_token_id", None)
        if pad is None or not 0 <= pad < self.vocab_size:
            pad = ends[0] if ends else 0
        enders = {*ends, *stop_tokens}

        def steps() -> Iterator[torch.Tensor]:
            # Not before the first step: what is pending may change between the call and then.
            prompt = self._after_pending(input_ids) if continues else input_ids
            chooser = Chooser(sampling, prompt, self.vocab_size)
            if draft is None:
                chosen = generate_tokens(self, prompt, max_new_tokens, chooser, enders, stop_strings, pad, inputs)
            else:
                chosen = (
                    torch.tensor([token])
                    for token in generate_speculative(self, prompt, max_new_tokens, chooser, enders, draft)
                )
            for tokens in chosen:
                if self.batch_size == 1:
                    token = int(tokens[0])
                    self._pending = None if token in enders else token
                yield tokens

        return steps()

    def _after_pending(self, input_ids: torch.Tensor) -> torch.Tensor:
        """`input_ids` [1, length] behind the token that was given out and not fed yet, if there is one."""
        return (
            input_ids
            if self._pending is None
            else torch.cat([input_ids.new_tensor([[self._pending]]), input_ids], dim=1)
        )

    def _check_draft(self, draft: Draft, stop_strings: Sequence[str]) -> None:
        if self._encoder is not None:
            raise InputError("drafts are for text decoders; leave out draft with an encoder-decoder")
        if self.batch_size != 1:
            raise InputError(f"a draft serves batch size 1, this session has {self.batch_size}; decode without one")
        if stop_strings:
            raise InputError("a draft takes stop tokens, not stop strings; use generate_text, which stops at strings")
        if self.score_length == 0:
            raise InputError(
                f"a draft needs a program that judges several tokens at once; make the session, or export, with "
                f"score_length={draft.max_tokens + 1}"
            )
        drafts = getattr(getattr(draft, "session", self), "vocab_size", self.vocab_size)
        if drafts != self.vocab_size:
            raise InputError(
                f"the draft model has {drafts} tokens, this model {self.vocab_size}; use a draft model with the same vocabulary"
            )
        check_can_rewind(self, min(draft.max_tokens, self.score_length - 1))

    def _stops(self, stop: int | str | Sequence[int | str] | None) -> tuple[list[int], list[str]]:
        tokens, strings = split_stops(stop, self.vocab_size)
        if strings:
            self._require_tokenizer("a stop string")
        return tokens, strings

    def _require_tokenizer(self, purpose: str) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise InputError(
                f"{purpose} needs a tokenizer and this session has none; pass tokenizer= to Session.from_model or export, "
                "or use generate with token ids"
            )
        return self.tokenizer


def end_tokens(generation_config: GenerationConfig | None) -> list[int]:
    """The tokens that end an answer, by the model's generation config."""
    ends = getattr(generation_config, "eos_token_id", None)
    if ends is None:
        return []
    return [int(end) for end in ends] if isinstance(ends, (list, tuple)) else [int(ends)]
