"""A completer that gives scripted texts, and the chat templates of some families, for tests of the server."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from exportable_cache.decoding.completion import AnyCompleter, Choice, Completion, FinishReason, Piece
from exportable_cache.generation.checkpoint_settings import CheckpointSettings
from exportable_cache.models.tokenizers.text import TextTokenizer

END = "<eos>"
#: Templates that write what the families' own do around calls, in short. The prompt ends with `>`.
_TOOLS = "{% if tools %}[tools {{ tools | tojson }}]{% endif %}"
_SAID = "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
_RESULT = "{% if m.tool_call_id %}({{ m.tool_call_id }}, {{ m.name }}){% endif %}"
HERMES = (
    f"{_TOOLS}{_SAID}{_RESULT}"
    "{% for call in m.tool_calls %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% endfor %}>"
)
THINKING = HERMES + "<think>\n"
DEEPSEEK = (
    f"{_TOOLS}{_SAID}{_RESULT}"
    "{% for call in m.tool_calls %}{{ '<｜tool▁calls▁begin｜>function' + call.function.arguments }}{% endfor %}"
    "{% endfor %}>"
)
HARMONY = f"{_TOOLS}{_SAID}{_RESULT}{{% endfor %}}{{% if false %}}<|channel|><|message|>{{% endif %}}>"
PLAIN = f"{_SAID}{{% endfor %}}>"


def byte_level_tokenizer(special: Sequence[str] = ()) -> Tokenizer:
    """Return a tokenizer with a token for each byte, and some special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (END, *special)])
    return tokenizer


def scripted_tokenizer(
    folder: Path, template: str, special: Sequence[str] = (), response_template: dict[str, Any] | None = None
) -> TextTokenizer:
    """Return the tokenizer of a bundle with a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_level_tokenizer(special).save(str(folder / "tokenizer.json"))
    more = {} if response_template is None else {"response_template": response_template}
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, **more}))
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")

    def whole() -> Any:
        raise AssertionError("the whole tokenizer was needed")

    return TextTokenizer(folder, whole)


class Scripted(AnyCompleter):
    """Completes prompts with scripted texts.

    Args:
        tokenizer: The tokenizer.
        reply: Function that returns the text for a prompt's text.

    Attributes:
        prompts: Texts of the prompts so far.
        before: Function that is called before each token.
    """

    def __init__(self, tokenizer: TextTokenizer, reply: Callable[[str], str]) -> None:
        size = tokenizer.backend_tokenizer.get_vocab_size()
        super().__init__(tokenizer, size, True)
        self._reply, self._length = reply, 0
        self.prompts: list[str] = []
        self.before: Callable[[], None] = lambda: None

    @property
    def settings(self) -> CheckpointSettings:
        """Settings with an end token."""
        return CheckpointSettings(ends=(self.tokenizer.backend_tokenizer.token_to_id(END),))

    @property
    def length(self) -> int:
        """Number of tokens held."""
        return self._length

    @property
    def max_length(self) -> int | None:
        """The limit of tokens."""
        return 20_000

    def most_dropped(self, first: int) -> int:
        """Return 0, because nothing is dropped."""
        return 0

    def _drop(self, count: int, first: int, reaching: int = 0) -> None:
        raise AssertionError

    def _keep(self, count: int) -> int:
        return 0

    @property
    def layers(self) -> list[tuple[str, int | None]]:
        """One layer."""
        return [("full", 20_000)]

    def score(self, completion: Completion) -> Iterator[tuple[float, tuple[tuple[int, float], ...]]]:
        """Yield the same for each token."""
        for token in completion.ids[1:]:
            yield -0.5, ((token, -0.5),)

    def pieces(self, completion: Completion) -> Generator[tuple[Piece, FinishReason | None]]:
        """Yield the pieces of the scripted text. A constraint replaces tokens that it forbids."""
        backend = self.tokenizer.backend_tokenizer
        prompt = backend.decode(completion.ids, skip_special_tokens=False)
        self.prompts.append(prompt)
        wanted = backend.encode(self._reply(prompt), add_special_tokens=False).ids + list(self.settings.ends)
        chosen, draw = 0, random.Random(0)
        while not completion.is_given_up:
            self.before()
            token = wanted[min(chosen, len(wanted) - 1)]
            if completion.follower is not None:
                mask = completion.follower.mask
                allowed = [index for index in range(self._vocab_size) if mask[index // 8] >> index % 8 & 1]
                if token not in allowed:
                    closing = [index for index in allowed if backend.id_to_token(index) in ('"', "}", *"abcdefg 0123")]
                    token = draw.choice(closing or allowed)
                if token not in self.settings.ends:
                    completion.follower.take(token)
            chosen += 1
            self._length = len(completion.ids) + chosen
            completes = completion.follower is not None and completion.follower.ended
            logprob = None if completion.options.alternatives is None else -0.5
            found = completion.take(Choice(token, completes, logprob, () if logprob is None else ((token, -0.5),)))
            yield found
            if found[1] is not None:
                return
