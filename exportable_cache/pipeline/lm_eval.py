"""A model class for lm-evaluation-harness, over bundles of any target and live models.

`python -m exportable_cache.pipeline.lm_eval` is the command `lm_eval` with this class registered.
"""

from __future__ import annotations

import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from ..bundle.files import MANIFEST_FILE
from ..bundle.hub import HubChoice, bundle_of
from ..common.settings import check_count
from ..errors import ExportableCacheError, InputError, MissingDependencyError
from ..generation.templates import render_chat
from ..session.generate import require_tokenizer
from ..session.opening import SCORING, ModelOptions, open_model
from ..session.session import Session, load
from .perplexity import check_scorable, scored_logits

try:
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
    from tqdm import tqdm
except ImportError as error:
    raise MissingDependencyError(
        "evaluation needs lm_eval, which is not installed; pip install 'exportable-cache[eval]'"
    ) from error

NAME = "exportable_cache"
#: Longest sequence for caches without a limit, as in lm_eval's own classes.
_LENGTH = 2048
_OF_HUB = ("target", "revision", "token")
_OF_BUNDLES = ("check", "check_versions", "key", "trust")
_OF_MODELS = tuple(one.name for one in fields(ModelOptions))
#: Settings that greedy decoding ignores.
_OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p")


@register_model(NAME)
class ExportableCacheLM(TemplateLM):
    """Scores and continues texts by a session, with the tokens and windows of lm_eval's class `hf`.

    Args:
        pretrained: Bundle (a folder, or a repository of the hub), name of a model, or an open session; a text decoder
            at batch size 1.
        max_length: Longest sequence; by default what the cache holds.
        add_bos_token: Whether texts begin with the tokenizer's first token; None for the tokenizer's default.
        max_gen_toks: Most new tokens of a generation, if a task does not say.
        batch_size: Must be 1 or "auto", because sequences run one after another.
        **options: `trust`, `key`, `check_versions` and `check` of `load` for a bundle, and `target`, `revision` and
            `token` for the hub; for a model, the fields of `ModelOptions`, such as `device`. `max_batch_size` is
            ignored.

    Raises:
        InputError: If an option does not apply, or the model is not a text decoder with a tokenizer.
    """

    def __init__(
        self,
        pretrained: str | os.PathLike | Session = "",
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        max_gen_toks: int = 256,
        batch_size: int | str = 1,
        **options: Any,
    ) -> None:
        super().__init__()
        if str(batch_size) not in ("1", "auto"):
            raise InputError(f"batch_size must be 1 or 'auto', got {batch_size!r}; leave it out")
        options.pop("max_batch_size", None)
        self.session = _opened(pretrained, options)
        check_scorable(self.session, "lm_eval")
        require_tokenizer(self.session, "lm_eval")
        # lm_eval calls methods of transformers' class.
        self.tokenizer: Any = self.session.tokenizer
        if self.eot_token_id is None:
            raise InputError(
                "the tokenizer must have an end token for lm_eval, got eos_token=None; add one, and export again"
            )
        most = self.session.max_length or _LENGTH
        if max_length is not None:
            check_count("max_length", max_length, 2)
            if max_length > most:
                raise InputError(f"max_length must be from 2 to {most}, which the cache holds, got {max_length}")
        check_count("max_gen_toks", max_gen_toks)
        self.max_length, self.max_gen_toks = max_length or most, max_gen_toks
        self.add_bos_token = add_bos_token
        self._device = self.session.device

    @property
    def eot_token_id(self) -> int:
        """Token that ends texts."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Token before texts without a context."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else first

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, for caches of requests."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the prompt of a chat.

        Raises:
            InputError: If the last message is to be continued, or there is no template.
        """
        if not add_generation_prompt:
            raise InputError("add_generation_prompt must be True, got False; do not continue the assistant's message")
        return render_chat(self.tokenizer, chat_history)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the token ids of a text."""
        if add_special_tokens is None:
            has_first = string.startswith(self.tokenizer.decode([self.prefix_token_id]))
            add_special_tokens = False if has_first else self.add_bos_token
        given = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer.encode(string, **given)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return the log likelihood of each continuation, and True if it is the greedy one."""
        found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        # Choices of one token share all tokens that are fed.
        order = sorted(range(len(requests)), key=lambda index: (requests[index][1] + requests[index][2])[:-1])
        fed: list[int] = []
        logprobs = torch.empty(0)
        for index in tqdm(order, desc="Running loglikelihood requests", disable=disable_tqdm):
            texts, context, continuation = requests[index]
            ids = (context + continuation)[-(self.max_length + 1) :]
            first = len(ids) - len(continuation)
            if first < 1:
                raise InputError(
                    f"a continuation must have at most {self.max_length} tokens, got {len(continuation)}; export with "
                    "a larger max_cache_len"
                )
            if ids[:-1] != fed or len(logprobs) < len(continuation):
                self.session.reset()
                every = torch.tensor(ids, device=self.session.device)
                logprobs = torch.cat(
                    [step.float().log_softmax(-1) for step in scored_logits(self.session, every, first)]
                )
                fed = ids[:-1]
            scored = logprobs[-len(continuation) :]
            targets = torch.tensor(continuation, device=scored.device)
            is_greedy = bool((scored.argmax(-1) == targets).all())
            found[index] = (float(scored.gather(-1, targets[:, None]).sum()), is_greedy)
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, found[index])
        self.session.reset()
        return found

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the log likelihood of each whole text, in windows of `max_length` tokens."""
        found = []
        for (text,) in tqdm([one.args for one in requests], disable=disable_tqdm):
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            parts = [(None, *utils.make_disjoint_window(window)) for window in windows]
            total = sum(loss for loss, _ in self._loglikelihood_tokens(parts, disable_tqdm=True))
            found.append(total)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return found

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Return the text that follows each context, up to a stop string."""
        found = []
        for context, given in tqdm([one.args for one in requests], disable=disable_tqdm):
            try:
                settings = dict(normalize_gen_kwargs(given, self.max_gen_toks))
            except (TypeError, ValueError) as error:
                raise InputError(
                    f"generation settings must be what lm_eval takes, got {given!r:.200} ({error}); correct "
                    "--gen_kwargs"
                ) from error
            text = self._generated(context, settings)
            found.append(text)
            self.cache_hook.add_partial("generate_until", (context, given), text)
        return found

    def _generated(self, context: str, settings: dict[str, Any]) -> str:
        end = self.tokenizer.decode([self.eot_token_id], skip_special_tokens=False)
        stops = [one for one in handle_stop_sequences(settings.pop("until", None), eos=end) if one]
        limit = settings.pop("max_gen_toks")
        if not 0 < limit < self.max_length:
            raise InputError(
                f"max_gen_toks must be from 1 to {self.max_length - 1} with a max_length of {self.max_length}, got "
                f"{limit}; pass --gen_kwargs max_gen_toks=N, or export with a larger max_cache_len"
            )
        if not settings["do_sample"]:
            settings = {name: value for name, value in settings.items() if name not in _OF_SAMPLING}
        ids = torch.tensor([self.tok_encode(context)[limit - self.max_length :]], device=self.session.device)
        self.session.reset()
        tokens = list(self.session.generate(ids, limit, stop=stops, generation_config=GenerationConfig(**settings)))
        self.session.reset()
        return postprocess_generated_text(self.tokenizer.decode(tokens, skip_special_tokens=True), stops, None)


def _opened(pretrained: str | os.PathLike | Session, options: dict[str, Any]) -> Session:
    """Return the session over a bundle or a model.

    Raises:
        InputError: If an option does not apply to it.
    """
    known: tuple[str, ...] = ()
    if not isinstance(pretrained, Session):
        if not isinstance(pretrained, (str, os.PathLike)) or not str(pretrained):
            raise InputError(
                f"pretrained must be a bundle, the name of a model or a Session, got {pretrained!r}; pass "
                "--model_args pretrained=X"
            )
        pretrained = bundle_of(str(pretrained), HubChoice(**{name: options.pop(name, None) for name in _OF_HUB}))
    if isinstance(pretrained, Session):
        kind = "an open session"
    elif (Path(pretrained) / MANIFEST_FILE).is_file():
        kind, known = "a bundle", _OF_BUNDLES
    else:
        kind, known = "a model", _OF_MODELS
    device = None if known is _OF_MODELS else options.pop("device", None)
    for name in options:
        if name not in known:
            takes = f"it takes {', '.join(known)}" if known else "leave it out"
            raise InputError(f"{name} is not an option of {kind}; {takes}")
    if known is _OF_MODELS:
        return open_model(str(pretrained), ModelOptions(**options), SCORING)[0]
    session = pretrained if isinstance(pretrained, Session) else load(pretrained, **options)
    # Compared by type, because an index depends on what this process sees.
    if device is not None and str(device).split(":")[0] != session.device.type:
        raise InputError(f"device must be {session.device.type!r} for {kind}, got {device!r}; leave it out")
    return session


def main() -> None:
    """Run the command `lm_eval`, with errors of this package as one line."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except ExportableCacheError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
