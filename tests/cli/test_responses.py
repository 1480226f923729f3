"""Log probabilities in the API's form: tokens that are part of a character, or have the text of another one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tokenizers import decoders

from exportable_cache.cli.server.responses import Response
from exportable_cache.decoding import Piece
from exportable_cache.generation.token_text import TokenTexts
from tests.decoding.byte_tokenizer import byte_tokenizer
from tests.decoding.test_token_text import LLAMA, with_decoder

COUNTS = {"prompt_tokens": 1, "new_tokens": 1, "reused_tokens": 0, "dropped_tokens": 0, "dropped_turns": 0}
ASKED = SimpleNamespace(finish_reason="length", ids=[1], **COUNTS)


def logprobs(tokenizer: Any, chat: bool, *pieces: Piece) -> Any:
    answer = Response("m", chat, TokenTexts(tokenizer))
    for piece in pieces:
        answer.add(piece)
    return answer.whole([ASKED])["choices"][0]["logprobs"]


def test_parts_of_characters_have_their_own_bytes() -> None:
    tokenizer = byte_tokenizer()
    first, last = tokenizer("é")["input_ids"]
    pieces = [Piece("", first, -0.1, ((first, -0.1), (last, -2.0))), Piece("é", last, -0.2, ((last, -0.2),))]
    content = logprobs(tokenizer, True, *pieces)["content"]
    assert [token["bytes"] for token in content] == [[0xC3], [0xA9]]
    assert [token["bytes"] for token in content[0]["top_logprobs"]] == [[0xC3], [0xA9]]
    found = logprobs(tokenizer, False, *pieces)
    assert found["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert found["top_logprobs"] == [{"bytes:\\xc3": -0.1, "bytes:\\xa9": -2.0}, {"bytes:\\xa9": -0.2}]


def test_no_alternative_is_lost_and_the_token_itself_is_among_them() -> None:
    tokenizer = with_decoder(decoders.Sequence([*LLAMA, decoders.Strip(" ", 1, 0)]), ["▁true", "true", "<0x61>", "a"])
    spaced, bare, byte, letter = tokenizer.convert_tokens_to_ids(["▁true", "true", "<0x61>", "a"])
    alternatives = ((byte, -0.5), (spaced, -1.0), (bare, -2.0), (letter, -3.0))
    found = logprobs(tokenizer, False, Piece(" true", spaced, -1.0, alternatives))
    assert found["tokens"] == [" true"]
    assert found["top_logprobs"] == [{"a": -0.5, " true": -1.0, "true": -2.0, f"token_id:{letter}": -3.0}]
    # Its own text is its own, and it is there where it is none of the most probable.
    found = logprobs(tokenizer, False, Piece("a", letter, -3.0, alternatives[:1]))
    assert found["top_logprobs"] == [{f"token_id:{byte}": -0.5, "a": -3.0}]
    assert logprobs(tokenizer, False, Piece("a", letter, -3.0))["top_logprobs"] == [{}]
