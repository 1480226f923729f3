"""The tokenizer of a bundle without transformers' tokenizers, whose import takes half a second, and its checks.

A tokenizer comes with a bundle: its config may name files, and its regular expressions may take unbounded time on some
texts. The library `tokenizers` stops a match after 10 million steps, but starts a match at each character. So a text is
first split in a subprocess that is killed at a deadline, unless every pattern has a form that is known to be fast.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ContextDecorator
from functools import cached_property, lru_cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ...common.process.limited import LimitedProcess, WorkFailed
from ...errors import BundleError, ExportableCacheError, InputError, first_line

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase

#: Limit in seconds for splitting a text.
MOST_SECONDS = 10.0
_SPLITTER = LimitedProcess("exportable_cache.models.tokenizers.pattern_child", 2 << 30, 1 << 16)
#: Alternatives with more than one quantifier in the patterns of GPT-4, Llama 3, Qwen 2 and others. They are fast
#: because the characters after the first quantifier are optional, or ones that it does not match.
_KNOWN = frozenset(
    (
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s*[\r\n]",
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    )
)
_ESCAPED = re.compile(r"\\[pP]\{\^?\w+\}|\\.|\[\^?\]?(?:[^\]\\]|\\.)*\]", re.DOTALL)
_REPEATED = re.compile(r"[*+{]")


def check_cost(tokenizer: PreTrainedTokenizerBase | TextTokenizer, text: str) -> None:
    """Check that a tokenizer's patterns can split a text in time.

    Raises:
        InputError: If splitting takes too long, or the library fails.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return
    try:
        parts = {
            name: json.loads(part.__getstate__())
            for name in ("normalizer", "pre_tokenizer")
            if (part := getattr(backend, name, None)) is not None
        }
    except Exception:  # a part in Python is the caller's code, and does not come from a file
        return
    if all(is_plain(pattern) for pattern in _patterns(parts)):
        return
    try:
        _SPLITTER.call(MOST_SECONDS, {"parts": parts}, text.encode())
    except WorkFailed as error:
        raise InputError(
            f"the tokenizer cannot encode the prompt: {str(error)[:300]}; shorten it, or export the model with another "
            "tokenizer"
        ) from error


@lru_cache(64)
def is_plain(pattern: str) -> bool:
    """Return True if each alternative of a pattern has at most one quantifier, or is known to be fast."""
    # Masks classes and escapes with text of equal length, because their characters have no special meaning.
    masked = _ESCAPED.sub(lambda found: "x" * len(found[0]), pattern)
    start = depth = 0
    for index, character in enumerate(masked + "|"):
        depth += (character == "(") - (character == ")")
        if character == "|" and depth == 0:
            if not _is_plain_alternative(pattern[start:index], masked[start:index]):
                return False
            start = index + 1
    return depth == 0


def _is_plain_alternative(text: str, masked: str) -> bool:
    if text in _KNOWN:
        return True
    return len(_REPEATED.findall(masked)) <= 1 and masked.count("?") <= 4 and not re.search(r"\)[*+{]", masked)


def _patterns(part: Any) -> list[str]:
    if isinstance(part, dict):
        patterns = [part["Regex"]] if isinstance(part.get("Regex"), str) else []
        return patterns + [pattern for value in part.values() for pattern in _patterns(value)]
    return [pattern for value in part for pattern in _patterns(value)] if isinstance(part, list) else []


def check_tokenizer_config(folder: Path) -> None:
    """Check that the tokenizer config of a bundle names no files, because transformers would read them from anywhere.

    Raises:
        BundleError: If it names a file, or cannot be read.
    """
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return
    try:
        named = next(_named_files(json.loads(path.read_bytes()), folder), None)
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise BundleError(f"cannot read {path}: {first_line(error)[:200]}; export the model again") from error
    if named is not None:
        raise BundleError(
            f"{path} must not name files, got {named[0]} = {named[1]!r:.100}; do not trust this bundle, or remove the "
            "entry"
        )


def _named_files(value: Any, folder: Path, key: str = "", in_list: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the keys and values that transformers would open as files."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _named_files(item, folder, name)
    elif isinstance(value, list):
        for item in value:
            yield from _named_files(item, folder, key, in_list=True)
    elif isinstance(value, str) and key in ("vocab", "merges") and not in_list:
        yield key, value
    elif isinstance(value, str) and key.endswith(("_file", "_path")) and key != "name_or_path":
        path = Path(value)
        if path.is_absolute() or ".." in path.parts or (os.path.exists(value) and not (folder / value).is_file()):
            yield key, value


_SHOWN = 300


class tokenizer_errors(ContextDecorator):
    """A context manager and decorator that converts exceptions of tokenizer libraries to `InputError`.

    The library `tokenizers` is written in Rust. If it panics, Python gets an exception that is not an `Exception`, so
    ordinary handlers do not catch it.

    Args:
        problem: Beginning of the message, such as "the tokenizer cannot encode the prompt".
        remedy: End of the message: what the user can do.
    """

    def __init__(
        self, problem: str, remedy: str = "correct its files, or export the model with another tokenizer"
    ) -> None:
        self._problem, self._remedy = problem, remedy

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, (ExportableCacheError, MemoryError)):
            return
        if isinstance(error, Exception) or is_panic(error):
            raise InputError(f"{self._problem}: {first_line(error)[:_SHOWN]}; {self._remedy}") from error


def is_panic(error: BaseException) -> bool:
    """Return True if an error is the panic of a Rust library, each of which has its own exception class."""
    return type(error).__name__ == "PanicException" and type(error).__module__ == "pyo3_runtime"


#: File name of the tokenizer in a bundle's folder, of its chat template, and the folder of further templates.
FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
_TEMPLATES_FOLDER = "additional_chat_templates"
#: The special tokens that have a name in every tokenizer.
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Texts in which tokenizers differ: leading, trailing and repeated spaces, new lines, digits, composed and decomposed
# accents, scripts without spaces, joined emoji, a byte order mark, and the empty text.
_PROBES = (
    "",
    " ",
    "the code of amber is 4821",
    "  Two  spaces,\ttabs\r\nand\n\nlines. ",
    "1234567 3.14 -0.5e10 x=y+z; don't {'a': [1, 2]}",
    "caf\u00e9 cafe\u0301 \u00c5ngstr\u00f6m \u0130stanbul stra\u00dfe",
    "\u4f60\u597d\uff0c\u4e16\u754c \u3053\u3093\u306b\u3061\u306f \u0645\u0631\u062d\u0628\u0627 \u0928\u092e\u0938",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7 \u00a0\u2009\ufeffx",
)
_DRAWS, _DRAWN_TOKENS = 64, 12


class TextTokenizer:
    """A tokenizer that uses `tokenizer.json` alone, and creates transformers' tokenizer for all other methods.

    Args:
        folder: Folder with the file.
        make_whole: Function that creates transformers' tokenizer of the same folder.

    Raises:
        InputError: If the file cannot be read.
    """

    def __init__(self, folder: Path, make_whole: Callable[[], PreTrainedTokenizerBase]) -> None:
        self._folder, self._tokenizer = folder, _read(folder)
        self._make_whole = make_whole

    def __call__(self, text: str, *, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        """Return the ids of a text under `input_ids`; `verbose` is that of transformers, and has no effect."""
        with tokenizer_errors("the tokenizer cannot encode the text"):
            return {"input_ids": encoded(self._tokenizer, text, add_special_tokens=add_special_tokens).ids}

    def decode(
        self, tokens: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """Return the text of tokens; spaces are kept unless `clean_up_tokenization_spaces`."""
        if clean_up_tokenization_spaces:
            decoded = self.whole.decode(
                list(tokens), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=True
            )
            assert isinstance(decoded, str)
            return decoded
        with tokenizer_errors("the tokenizer cannot decode tokens"):
            return self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    @property
    def backend_tokenizer(self) -> Tokenizer:
        """Tokenizer of the library `tokenizers`, under the name that transformers' fast tokenizers use."""
        return self._tokenizer

    @cached_property
    def eos_token_id(self) -> int | None:
        """Id of the end token in `tokenizer_config.json`, or None."""
        return self._id_of("eos_token")

    @cached_property
    def unk_token_id(self) -> int | None:
        """Id of the token for unknown text, or None."""
        return self._id_of("unk_token")

    def _id_of(self, name: str) -> int | None:
        text = _content(self._config.get(name))
        return None if text is None else self._tokenizer.token_to_id(text)

    @cached_property
    def special_tokens_map(self) -> dict[str, str]:
        """Named special tokens, such as `eos_token`, by their name."""
        others = [name for name in self._config if name.endswith("_token") and name not in _NAMED_TOKENS]
        if any(_content(self._config[name]) is not None for name in others) or isinstance(
            self._config.get("extra_special_tokens"), dict
        ):
            # Names of the model's own.
            return self.whole.special_tokens_map
        named = {name: _content(self._config.get(name)) for name in _NAMED_TOKENS}
        return {name: text for name, text in named.items() if text is not None}

    @cached_property
    def chat_template(self) -> str | dict[str, str] | None:
        """The chat template, several by name, or None."""
        path = self._folder / TEMPLATE_FILE
        if (self._folder / _TEMPLATES_FOLDER).exists() or (not path.is_file() and "chat_template" in self._config):
            return self.whole.chat_template
        try:
            return path.read_text(encoding="utf-8") if path.is_file() else None
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read {path}: {first_line(error)}; export the model again") from error

    @cached_property
    def response_template(self) -> dict[str, Any] | None:
        """The description of responses for transformers' `parse_response`, if the tokenizer has one."""
        found = self._config.get("response_template")
        return found if isinstance(found, dict) else None

    @cached_property
    def chat_control_tokens(self) -> list[str] | None:
        """The added tokens that the template writes, if the tokenizer lists them."""
        return self._config.get("chat_control_tokens")

    @cached_property
    def _config(self) -> dict[str, Any]:
        """Content of `tokenizer_config.json`; empty if there is none."""
        try:
            found = json.loads((self._folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    @cached_property
    def whole(self) -> PreTrainedTokenizerBase:
        """Transformers' tokenizer."""
        return self._make_whole()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)


def encoded(backend: Tokenizer, text: str, add_special_tokens: bool = False, offsets: bool = False) -> Encoding:
    """Encode a text, and let other threads of Python run during that of a long one.

    Args:
        backend: The tokenizer.
        text: The text.
        add_special_tokens: True to add the special tokens of a sequence.
        offsets: True if the offsets of tokens in the text are needed.
    """
    if len(text) < LONG_TEXT:
        return backend.encode(text, add_special_tokens=add_special_tokens)
    # `encode` holds Python's lock: 2 s for 2 million characters. Short texts do without the pool of `encode_batch`,
    # because a process that has used it prints a warning when it is forked.
    encode = backend.encode_batch if offsets else backend.encode_batch_fast
    return encode([text], add_special_tokens=add_special_tokens)[0]


def most_characters(tokenizer: PreTrainedTokenizerBase | TextTokenizer) -> int | None:
    """Return the most characters of a text that become one token; None if there is no limit, or it is not known."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    vocab = backend.get_vocab(with_added_tokens=True)
    try:
        parts = [
            json.loads(part.__getstate__()) for part in (backend.normalizer, backend.pre_tokenizer) if part is not None
        ]
    except Exception:  # a part in Python, see `check_cost`
        return None
    kinds = [kind for part in parts for kind in _kinds(part)]
    # Bytes that are not in the vocabulary could be dropped, or joined to one unknown token.
    has_bytes = all(one in vocab for one in (_byte_characters() if "ByteLevel" in kinds else _BYTE_TOKENS))
    strips = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    if not has_bytes or strips or not all(kind in _KEEPING for kind in kinds):
        return None
    return max(map(len, vocab)) * (_COMPOSED if "NFC" in kinds else 1)


#: Length of a text from which on other threads run while it is encoded, in characters.
LONG_TEXT = 20_000
#: Parts of a tokenizer that keep each character of a text.
_KEEPING = ("Sequence", "NFC", "Prepend", "Replace", "ByteLevel", "Split", "Digits", "Metaspace")
#: The most characters that NFC composes to one.
_COMPOSED = 4
_BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def _byte_characters() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel.alphabet()


def _kinds(part: dict[str, Any]) -> Iterator[str]:
    """Yield the types of a tokenizer's part and of its own parts; a part that drops characters is called "dropping"."""
    pattern = part.get("pattern", {})
    is_shorter = part["type"] == "Replace" and len(pattern.get("String", part["content"] + " ")) > len(part["content"])
    yield "dropping" if is_shorter or part.get("behavior") == "Removed" else part["type"]
    for one in (*part.get("normalizers", ()), *part.get("pretokenizers", ())):
        yield from _kinds(one)


def plain_backend(tokenizer: PreTrainedTokenizerBase | TextTokenizer, *methods: str) -> Tokenizer | None:
    """Return the backend of the library `tokenizers` if it alone implements the given methods, else None.

    Args:
        tokenizer: Any tokenizer.
        methods: Names of methods that neither the class nor the object may override.
    """
    if isinstance(tokenizer, TextTokenizer):
        return tokenizer.backend_tokenizer
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    known = all(getattr(type(tokenizer), name) is getattr(PreTrainedTokenizerFast, name) for name in methods)
    return tokenizer.backend_tokenizer if known and not any(name in vars(tokenizer) for name in methods) else None


def reads_alike(folder: Path, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if the folder's files alone give the same as transformers' tokenizer of the folder.

    Tokens and texts are compared on various texts that contain every special token, and on random tokens, because
    options of transformers' classes, such as one that adds a first token, are not in the file.
    """
    if not (folder / FILE).is_file():
        return False
    try:
        with tokenizer_errors("the tokenizer cannot be used"):
            alone = TextTokenizer(folder, lambda: tokenizer)
            named = (alone.special_tokens_map, alone.chat_template)
            if named != (tokenizer.special_tokens_map, tokenizer.chat_template):
                return False
            return _gives_the_same(alone.backend_tokenizer, tokenizer)
    except InputError:
        return False


def _gives_the_same(alone: Tokenizer, tokenizer: PreTrainedTokenizerBase) -> bool:
    specials = [str(token) for token in tokenizer.all_special_tokens]
    probes = [*_PROBES, *(f"one {special}two {special} three" for special in specials), "".join(specials)]
    for text in probes:
        for adds in (True, False):
            if alone.encode(text, add_special_tokens=adds).ids != tokenizer(text, add_special_tokens=adds)["input_ids"]:
                return False
    draw = random.Random(0)
    known = sorted(tokenizer.get_vocab().values())
    drawn = [[draw.choice(known) for _ in range(_DRAWN_TOKENS)] for _ in range(_DRAWS)]
    drawn += [tokenizer(text)["input_ids"] for text in probes]
    return all(
        alone.decode(tokens, skip_special_tokens=skips)
        == tokenizer.decode(tokens, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
        for tokens in drawn
        for skips in (True, False)
    )


def _content(named: Any) -> str | None:
    """Return the text of a special token in `tokenizer_config.json`, or None."""
    text = named.get("content") if isinstance(named, dict) else named
    return text if isinstance(text, str) else None


def _read(folder: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    with tokenizer_errors(f"cannot read {folder / FILE}", "export the model again"):
        tokenizer = Tokenizer.from_file(str(folder / FILE))
    # Because the file may have been saved during training; transformers uses its own options.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
