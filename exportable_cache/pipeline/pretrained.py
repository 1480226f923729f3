"""Classes that generate like models of transformers, over bundles and live sessions.

They are for code that calls `from_pretrained`, `generate` and `pipeline`. `Session` does the work.
"""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    AutoConfig,
    AutoModelForSpeechSeq2Seq,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from ..bundle.builder import new_folder
from ..bundle.bundle import MANIFEST_FILE, Bundle
from ..bundle.hub import HubChoice, api_of, bundle_of, is_repository
from ..bundle.signing import SIGNATURE_FILE
from ..errors import BundleError, InputError, UnsupportedModelError, first_line
from ..generation.checkpoint_settings import CheckpointSettings
from ..generation.speculative import DraftModel, PromptLookup
from ..models.loading.loading import auto_class, load_config
from ..models.loading.location import hub_errors
from ..session.generate import checked_steps, config_for, make_request
from ..session.inputs.encoder import start_tokens
from ..session.opening import ModelOptions, Use, open_model
from ..session.session import Session
from .export import export as export_bundle

if TYPE_CHECKING:
    from transformers import LogitsProcessorList, PreTrainedTokenizerBase, StoppingCriteriaList
    from transformers.generation.streamers import BaseStreamer
    from typing_extensions import Self

    from ..generation.loop import Ending
    from ..generation.speculative import Draft
    from ..session.generate import Request

#: Limit of new tokens where nothing states one, as in transformers.
_NEW_TOKENS = 20
#: Tokens that a draft proposes at once.
_PROPOSED = 8
#: Settings that `generate` follows although sessions do not.
_FOLLOWED = ("stop_strings", "max_time", "num_return_sequences")
#: Settings of the output, which is always the tokens.
_OUTPUTS = ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states")
_NOT_SUPPORTED = "which is not supported here; use the model of transformers for it"
_INSTEAD = {"num_beams": "because generate has no beams; use decoding.beam_search over a session with a row per beam"}
#: Inputs with a row per prompt. Others, such as images, belong to the whole batch.
_PER_ROW = ("attention_mask",)


class ExportableModel:
    """A generating model over a session: what the four classes below share.

    Open one with `from_pretrained`.

    Args:
        session: Runs the steps. Its batch size is the number of prompts that are generated together.
        config: Config of the model.
        bundle: The bundle that it runs; None for a live model.

    Attributes:
        name_or_path: Name that was given to `from_pretrained`.

    Raises:
        UnsupportedModelError: If the session takes other inputs than the class is for.
    """

    #: The inputs of the class's models, see `_takes`.
    takes = ""
    #: Modalities of its exports.
    modalities: tuple[str, ...] = ()
    main_input_name = "input_ids"
    input_modalities: tuple[str, ...] = ("text",)
    output_modalities: tuple[str, ...] = ("text",)

    def __init__(self, session: Session, config: PreTrainedConfig, bundle: Bundle | None = None) -> None:
        self.session, self.config, self.bundle = session, config, bundle
        self.name_or_path = "" if bundle is None else str(bundle.path)
        self._assistant: tuple[PreTrainedModel, Session] | None = None
        self._check_takes(_takes(session))

    @classmethod
    def _check_takes(cls, found: Sequence[str]) -> None:
        """Check that the class is for one of the inputs that a model takes."""
        if cls.takes not in found:
            right = next(kind.__name__ for kind in _KINDS if kind.takes == found[0])
            raise UnsupportedModelError(
                f"{cls.__name__} is for models that take {cls.takes}, this one takes {found[0]}; use {right}"
            )

    # -- opening -----------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike,
        export: bool = True,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        target: str | None = None,
        output_dir: str | os.PathLike | None = None,
        **options: Any,
    ) -> Self:
        """Open a bundle, export a checkpoint, or run a checkpoint in this process.

        Args:
            model: Folder of a bundle or of a checkpoint, or an id on the hub of either.
            export: For a checkpoint: True to export it and open the bundle, False to run it over a static cache.
            revision: Branch, tag or commit of a bundle on the hub.
            token: Token of the hub for a bundle; by default that of `hf auth login`. Checkpoints are read with the
                default, or HF_TOKEN.
            target: Target to export for, `executorch` by default; or that of a repository with several bundles.
            output_dir: Folder of the exported bundle; by default a temporary one, which is removed with the model.
            **options: For an export, those of `export`, such as `recipe` and `max_cache_len`. To run a checkpoint,
                those of `ModelOptions`: device, dtype, max_cache_len, kv_dtype, compile. For a bundle, those of
                `load`: trust, key, check, check_versions.

        Raises:
            InputError: If an option does not apply, or as `export`, `load` and `open_model` do.
            UnsupportedModelError: If the model is not of this class's kind.
            BundleError, MissingDependencyError, VerificationError: See `export` and `load`.

        Example:
            >>> model = ExportableModelForCausalLM.from_pretrained("demo", max_cache_len=512)
            >>> model.generate(tokenizer("amber?", return_tensors="pt").input_ids, max_new_tokens=8)
        """
        if not isinstance(model, (str, os.PathLike)):
            raise InputError(f"model must be a folder or an id on the hub, got {model!r:.100}; pass its name")
        name = os.fspath(model)
        found = bundle_of(name, HubChoice(target, revision, token)) if is_repository(name) else name
        if (Path(found) / MANIFEST_FILE).is_file():
            of_hub = (("target", target), ("revision", revision), ("token", token)) if found == name else ()
            for option, value in (*of_hub, ("output_dir", output_dir)):
                if value is not None:
                    raise InputError(f"{option} must be left out for {name!r}, a bundle that runs as it was exported")
            made = cls._opened(Path(found), options)
        elif revision is not None:
            raise InputError(f"revision must be left out for the checkpoint {name!r}; pass a folder with that revision")
        elif token is not None:
            raise InputError(
                f"token must be left out for the checkpoint {name!r}, which is read with the token of `hf auth login` "
                "or HF_TOKEN; set one of them"
            )
        elif export:
            made = cls._exported(name, target, output_dir, options)
        else:
            for option, value in (("target", target), ("output_dir", output_dir)):
                if value is not None:
                    raise InputError(f"{option} must be left out with export=False, which writes no bundle")
            made = cls._live(name, options)
        made.name_or_path = name
        return made

    @classmethod
    def _opened(cls, folder: Path, options: Mapping[str, Any]) -> Self:
        unknown = sorted(set(options) - {"trust", "key", "check", "check_versions"})
        if unknown:
            raise InputError(f"{unknown[0]} must be left out for the bundle {folder}, which runs as it was exported")
        given = dict(options)
        bundle = Bundle.open(folder, known=not given.pop("check", False), to_run=True, **given)
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # configs validate their fields with errors of many classes
            raise BundleError(f"cannot read {folder / 'config.json'}: {first_line(error)}; export it again") from error
        return cls(Session.from_bundle(bundle), config, bundle)

    @classmethod
    def _exported(
        cls, name: str, target: str | None, output_dir: str | os.PathLike | None, options: Mapping[str, Any]
    ) -> Self:
        given: dict[str, Any] = {"modalities": cls.modalities, **options}
        config = load_config(name)
        cls._check_takes(_takes_of(config))
        if given.get("dry_run"):
            raise InputError("dry_run must be False for from_pretrained, got True; use export")
        temporary = None if output_dir is not None else tempfile.mkdtemp(prefix="exportable_cache-")
        try:
            folder = Path(temporary) / "bundle" if temporary is not None else Path(str(output_dir))
            bundle = export_bundle(name, target or "executorch", output_dir=folder, **given)
            # This process made it, so machine code in it may run.
            made = cls(Session.from_bundle(replace(bundle, trusted=True)), config, bundle)
        except BaseException:
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        if temporary is not None:
            weakref.finalize(made, shutil.rmtree, temporary, ignore_errors=True)
        return made

    @classmethod
    def _live(cls, name: str, options: Mapping[str, Any]) -> Self:
        try:
            chosen = ModelOptions(**options)
        except TypeError as error:
            known = ", ".join(one.name for one in fields(ModelOptions))
            raise InputError(
                f"options with export=False must be among {known}, got {', '.join(options)}; leave out the others"
            ) from error
        session, loaded = open_model(name, chosen, Use(kinds=cls.modalities, lookup=_PROPOSED))
        return cls(session, loaded.model.config)

    # -- what transformers reads of a model --------------------------------------------------------------------------

    @property
    def generation_config(self) -> GenerationConfig:
        """Settings of the checkpoint, the defaults of `generate`."""
        if self.session.generation_config is None:
            self.session.generation_config = GenerationConfig()
        return self.session.generation_config

    @generation_config.setter
    def generation_config(self, config: GenerationConfig) -> None:
        self.session.generation_config = config

    @property
    def device(self) -> torch.device:
        """Device of the session."""
        return self.session.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        named = self.config.dtype if self.bundle is None else self.bundle.manifest.dtype
        return named if isinstance(named, torch.dtype) else getattr(torch, str(named), torch.float32)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Tokenizer of transformers; None if the model came without one."""
        return self.session.tokenizer

    def can_generate(self) -> bool:
        """Return True."""
        return True

    def eval(self) -> Self:
        """Return the model, which is always in eval mode."""
        return self

    def to(self, device: torch.device | torch.dtype | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Return the model, which stays on its device and in its dtype.

        Raises:
            InputError: If another one is asked for.
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        try:
            kind = self.device.type if device is None else torch.device(device).type
        except (RuntimeError, TypeError) as error:
            raise InputError(f"device must be {self.device.type}, got {device!r:.100}; pass a torch.device") from error
        if kind != self.device.type:
            raise InputError(
                f"device must be {self.device.type}, where this model runs, got {device}; pass device="
                f"{self.device.type!r} to the pipeline, or open the model there"
            )
        if dtype is not None and dtype != self.dtype:
            raise InputError(f"dtype must be {self.dtype}, which the model has, got {dtype}; open it with another one")
        return self

    def save_pretrained(
        self, save_directory: str | os.PathLike, push_to_hub: bool = False, repo_id: str | None = None, **options: Any
    ) -> None:
        """Copy the bundle to a folder, from which `from_pretrained` and `load` open it.

        Args:
            save_directory: Folder that does not exist, or is empty or a bundle.
            push_to_hub: True to upload it, too.
            repo_id: See `push_to_hub`; by default the name of the folder.
            **options: See `push_to_hub`.

        Raises:
            InputError: If the model runs without a bundle, or there is no such option.
            BundleError: If the folder may not be written.
        """
        _check_upload_options(options)
        source = self._bundle("save").path
        if Path(save_directory).resolve() != source.resolve():
            names = [MANIFEST_FILE, *self._bundle("save").manifest.files]
            with new_folder(Path(save_directory), overwrite=True) as folder:
                for name in (*names, *([SIGNATURE_FILE] if (source / SIGNATURE_FILE).is_file() else [])):
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(source / name, folder / name)
        if push_to_hub:
            self.push_to_hub(repo_id or Path(save_directory).name, **options)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload the bundle with a model card, and return the commit's URL.

        Args:
            repo_id: Id such as `user/name`; a name alone is that of a repository of the token's user.
            **options: Further arguments of `upload.upload`: private, revision, token.

        Raises:
            InputError: If the model runs without a bundle, or as `upload.upload` does.
        """
        from .upload import check_upload, upload

        folder = self._bundle("upload").path
        _check_upload_options(options)
        if isinstance(repo_id, str) and "/" not in repo_id:
            token = options.get("token")
            check_upload(f"user/{repo_id}", token)
            with hub_errors(repo_id):
                repo_id = f"{api_of(token).whoami()['name']}/{repo_id}"
        return upload(folder, repo_id, **options)

    def _bundle(self, use: str) -> Bundle:
        if self.bundle is None:
            raise InputError(f"the model must be a bundle to {use} it, but it runs in this process; export it")
        return self.bundle

    # -- generation --------------------------------------------------------------------------------------------------

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        assistant_model: Any = None,
        streamer: BaseStreamer | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Generate tokens like `generate` of transformers, from an empty cache.

        Prompts are generated together as far as the session has rows, the others after them.

        Args:
            inputs: int64 [prompts, length] token ids, padded on either side; or the encoder's input.
            generation_config: Settings, before those of the checkpoint.
            logits_processor: Processors that run after those of the settings. Each call gets one row.
            stopping_criteria: Criteria that end a row; `scores` is None in their calls.
            assistant_model: A smaller model that proposes tokens: a class like this one, a `Session`, or a model of
                transformers. For one prompt.
            streamer: Receives the prompt and each token, for one prompt.
            **kwargs: Settings of `GenerationConfig`, which come before all others; and further inputs of the model,
                such as `attention_mask`, `pixel_values` or `decoder_input_ids`.

        Returns:
            int64 [prompts, length], the prompts with the new tokens after them; for an encoder-decoder the decoder's
            tokens. Rows that ended earlier are padded with the padding token.

        Raises:
            InputError: If an argument is not valid or not supported.
            CacheFullError: If a prompt with its new tokens does not fit.
        """
        session = self.session
        config, followed, rest = self._settings(generation_config, kwargs)
        tokenizer = rest.pop("tokenizer", None)
        prompts = self._prompts(config, inputs, rest)
        _check_hooks(logits_processor, stopping_criteria, streamer)
        count = prompts.count * _checked_count(followed.pop("num_return_sequences", None))
        if streamer is not None and count > 1:
            raise InputError(f"streamer must be None for {count} prompts; generate them one by one")
        request = make_request(
            session, self._limit(config, prompts), {}, config, None, self._draft(config, assistant_model)
        )
        settings = replace(request.settings, processors=tuple(logits_processor or ()))
        request = replace(request, settings=settings)
        criteria = [*_criteria(followed, tokenizer or session.tokenizer), *(stopping_criteria or ())]
        if streamer is not None:
            streamer.put(prompts.start.cpu())
        made: list[torch.Tensor] = []
        for rows in _groups(prompts, count, session.batch_size):
            steps = self._begin(prompts, rows, request)
            start = prompts.start[torch.tensor(rows)]
            made += _rows(steps, start, criteria, streamer, request.ending)[: count - len(made)]
        if streamer is not None:
            streamer.end()
        new = pad_sequence(made, batch_first=True, padding_value=request.ending.pad_token)
        start = prompts.start.repeat_interleave(count // prompts.count, dim=0)
        return torch.cat([start, new.to(start.device)], dim=1)

    def _settings(
        self, asked: GenerationConfig | None, kwargs: Mapping[str, Any]
    ) -> tuple[GenerationConfig, dict[str, Any], dict[str, Any]]:
        """Return the settings of a call, those that only `generate` follows, and the other arguments.

        Raises:
            InputError: If a setting is not valid, unknown or not supported.
        """
        if asked is not None and not isinstance(asked, GenerationConfig):
            raise InputError(f"generation_config must be a GenerationConfig or None, got {asked!r:.100}")
        merged, _ = config_for(self.session, asked or "model")
        config = GenerationConfig() if merged is None else copy.deepcopy(merged)
        given = {name: value for name, value in kwargs.items() if value is not None}
        try:
            rest = config.update(**given)
        except Exception as error:  # the config's checks raise errors of several classes
            raise InputError(f"generate got settings that do not fit: {first_line(error)}; change them") from error
        named = {*(set(given) - set(rest)), *({} if asked is None else asked.to_diff_dict())}
        read = CheckpointSettings.read(config, self.session.vocab_size, self.session.text_tokenizer)
        for name, value in read.unheeded.items():
            if name in named and name not in _FOLLOWED:
                raise InputError(f"{name} must be left out, got {value!r:.100}, {_INSTEAD.get(name, _NOT_SUPPORTED)}")
        for name in read.unknown:
            if name in named:
                raise InputError(f"generation_config has the unknown setting {name!r}; remove it")
        for name in _OUTPUTS:
            if getattr(config, name, None):
                raise InputError(
                    f"{name} must be False, because generate returns tokens only; use a Session for logits"
                )
        followed = {name: value for name in _FOLLOWED if (value := getattr(config, name, None)) is not None}
        for name in followed:
            setattr(config, name, None)
        return config, followed, rest

    def _prompts(self, config: GenerationConfig, inputs: torch.Tensor | None, rest: dict[str, Any]) -> _Prompts:
        """Return the prompts of a call."""
        encoder = self.session.stages.encoder
        name = "input_ids" if encoder is None else encoder.method.inputs[0].name
        if inputs is None:
            inputs = rest.pop(name, None)
        odd = [other for other, value in rest.items() if not isinstance(value, torch.Tensor)]
        if odd:
            raise InputError(f"{odd[0]!r} is not an argument of generate that is supported here; leave it out")
        if inputs is None and encoder is None:
            if config.bos_token_id is None:
                raise InputError("inputs must be token ids, got None, and the model has no bos_token_id; pass a prompt")
            inputs = torch.tensor([[config.bos_token_id]])
        if not isinstance(inputs, torch.Tensor) or inputs.dim() < 2 or len(inputs) == 0:
            raise InputError(f"inputs must be a tensor of at least one prompt, got {inputs!r:.100}; pass {name}")
        if encoder is not None:
            start = start_tokens(config, len(inputs), inputs.device)
            more = rest.pop("decoder_input_ids", None)
            if more is not None:
                # Some processors give the start token, too.
                begun = bool((more[:, :1] == start).all())
                start = more if begun else torch.cat([start, more], dim=1)
            return _Prompts(start, {name: inputs, **rest}, encodes=True)
        if "attention_mask" not in rest:
            mask = _mask_of(inputs, config)
            rest |= {} if mask is None else {"attention_mask": mask}
        return _Prompts(inputs, rest)

    def _limit(self, config: GenerationConfig, prompts: _Prompts) -> int:
        """Return the limit of new tokens, by the rules of transformers."""
        length = prompts.start.shape[1]
        if config.max_new_tokens is not None:
            return config.max_new_tokens
        if config.max_length is not None:
            if config.max_length <= length:
                raise InputError(
                    f"max_length must be above the {length} tokens of the prompt, got {config.max_length}; pass "
                    "max_new_tokens"
                )
            return config.max_length - length
        most = self.session.max_length
        # The newest token needs no slot.
        return _NEW_TOKENS if most is None else max(min(_NEW_TOKENS, most - length + 1), 1)

    def _draft(self, config: GenerationConfig, assistant: Any) -> Draft | None:
        """Return what proposes tokens, if the call asks for it."""
        lookup = config.prompt_lookup_num_tokens
        if assistant is None:
            if lookup is None:
                return None
            ngram = getattr(config, "max_matching_ngram_size", None)
            return PromptLookup(lookup, **({} if ngram is None else {"ngram": ngram}))
        if lookup is not None:
            raise InputError(f"prompt_lookup_num_tokens must be None with an assistant_model, got {lookup}")
        if isinstance(assistant, ExportableModel):
            session = assistant.session
        elif isinstance(assistant, Session):
            session = assistant
        elif isinstance(assistant, PreTrainedModel):
            if self._assistant is None or self._assistant[0] is not assistant:
                if self._assistant is not None:
                    self._assistant[1].close()
                    self._assistant = None
                made = Session.from_model(assistant.eval(), max_cache_len=self.session.max_length)
                self._assistant = (assistant, made)
            session = self._assistant[1]
        else:
            raise InputError(f"assistant_model must be a model or a session, got a {type(assistant).__name__}")
        return DraftModel(session, getattr(config, "num_assistant_tokens", None) or _PROPOSED)

    def _begin(self, prompts: _Prompts, rows: Sequence[int], request: Request) -> Generator[torch.Tensor]:
        """Feed the prompts of `rows` to the empty cache, and return the tokens of each step."""
        chosen, device = torch.tensor(rows), self.session.device
        inputs = {name: value.to(device) for name, value in prompts.inputs.items()}
        if len(rows) != prompts.count or list(rows) != list(range(prompts.count)):
            odd = [name for name in inputs if name not in _PER_ROW and not prompts.encodes]
            if odd:
                raise InputError(
                    f"{odd[0]} needs one prompt per row of the session, {len(rows)}, got {prompts.count}; pass as many"
                )
            inputs = {name: value[chosen.to(device)] for name, value in inputs.items()}
        start = prompts.start[chosen].to(device)
        self.session.reset()
        if not prompts.encodes:
            return checked_steps(self.session, start, inputs, request)
        self.session.encode(**inputs)
        return checked_steps(self.session, start, {}, request)


@dataclass(frozen=True)
class _Prompts:
    """The prompts of one call.

    Attributes:
        start: Tokens that the new ones follow, int64 [prompts, length], padded.
        inputs: Further inputs by name, or all inputs of an encoder.
        encodes: True if the inputs are the encoder's.
    """

    start: torch.Tensor
    inputs: Mapping[str, torch.Tensor]
    encodes: bool = False

    @property
    def count(self) -> int:
        """Number of prompts."""
        return len(self.start)


def _groups(prompts: _Prompts, count: int, size: int) -> Iterator[list[int]]:
    """Yield the prompts that are generated together, `size` each; the last one fills rows that would be empty."""
    rows = [row for row in range(prompts.count) for _ in range(count // prompts.count)]
    for first in range(0, count, size):
        group = rows[first : first + size]
        yield group + group[-1:] * (size - len(group))


def _rows(
    steps: Generator[torch.Tensor],
    start: torch.Tensor,
    criteria: Sequence[Callable[..., torch.Tensor]],
    streamer: BaseStreamer | None,
    ending: Ending,
) -> list[torch.Tensor]:
    """Return the new tokens of each row, int64 [length]; rows end where a criterion says so."""
    ends = torch.tensor(sorted(ending.tokens), device=start.device)
    sequences, done = start, torch.zeros(len(start), dtype=torch.bool, device=start.device)
    with closing(steps):
        for step in steps:
            tokens = step.to(start.device).masked_fill(done, ending.pad_token)
            sequences = torch.cat([sequences, tokens[:, None]], dim=1)
            if streamer is not None:
                streamer.put(tokens[:1].cpu())
            if criteria:
                done |= torch.isin(tokens, ends)
            for criterion in criteria:
                done |= criterion(sequences, None)
            if bool(done.all()):
                break
    return list(sequences[:, start.shape[1] :])


def _criteria(followed: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> list[Any]:
    """Return the criteria for settings that no session follows."""
    from transformers import MaxTimeCriteria, PreTrainedTokenizerBase, StopStringCriteria

    found: list[Any] = []
    if "max_time" in followed:
        seconds = followed["max_time"]
        if not isinstance(seconds, (int, float)) or isinstance(seconds, bool):
            raise InputError(f"max_time must be a number of seconds, got {seconds!r:.100}; pass one")
        found.append(MaxTimeCriteria(max_time=seconds))
    if "stop_strings" in followed:
        given = followed["stop_strings"]
        strings = [given] if isinstance(given, str) else given
        if not isinstance(strings, (list, tuple)) or not all(isinstance(one, str) and one for one in strings):
            raise InputError(f"stop_strings must be a string or a list of them, got {given!r:.100}; pass text")
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise InputError(f"stop_strings need a tokenizer of transformers, got {tokenizer!r:.100}; pass tokenizer=")
        found.append(StopStringCriteria(tokenizer, list(strings)))
    return found


def _checked_count(count: Any) -> int:
    """Return the number of generations for each prompt, 1 by default."""
    if count is None:
        return 1
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise InputError(f"num_return_sequences must be an int of at least 1, got {count!r:.100}; pass one")
    return count


def _check_hooks(processors: Any, criteria: Any, streamer: Any) -> None:
    """Check the objects that are called in each step.

    Raises:
        InputError: If one cannot be called.
    """
    for name, given in (("logits_processor", processors), ("stopping_criteria", criteria)):
        if given is not None and not (isinstance(given, (list, tuple)) and all(map(callable, given))):
            raise InputError(f"{name} must be a list of functions, got {given!r:.100}; pass a list, or leave it out")
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise InputError(f"streamer must have put and end, got {streamer!r:.100}; pass a TextStreamer")


def _check_upload_options(options: Mapping[str, Any]) -> None:
    """Check the names of the options of an upload.

    Raises:
        InputError: If one is unknown.
    """
    unknown = sorted(set(options) - {"private", "revision", "token"})
    if unknown:
        raise InputError(f"{unknown[0]} must be left out, because bundles are saved and uploaded without it")


def _mask_of(ids: torch.Tensor, config: GenerationConfig) -> torch.Tensor | None:
    """Return the mask of padded prompts as transformers finds it: padding that is not an end token; None without."""
    pad, ends = config.pad_token_id, config.eos_token_id
    ends = ends if isinstance(ends, (list, tuple)) else [ends]
    if pad is None or pad in ends or not bool((ids == pad).any()):
        return None
    return (ids != pad).long()


# -- the classes -------------------------------------------------------------------------------------------------------


class ExportableModelForCausalLM(ExportableModel):
    """A causal language model, see `ExportableModel`."""

    takes = "text"


class ExportableModelForSeq2SeqLM(ExportableModel):
    """An encoder-decoder over text, see `ExportableModel`."""

    takes = "text for an encoder"


class ExportableModelForSpeechSeq2Seq(ExportableModel):
    """An encoder-decoder over audio, see `ExportableModel`."""

    takes = "audio for an encoder"
    main_input_name = "input_features"
    input_modalities = ("audio",)


class ExportableModelForImageTextToText(ExportableModel):
    """A model of images and text, see `ExportableModel`."""

    takes = "images and text"
    modalities = ("image",)
    input_modalities = ("image", "text")


class _Config(PreTrainedConfig):
    """The key under which transformers' pipelines know a class of this module."""

    model_type = "exportable_cache"


#: Classes by what they take, and the mapping in which pipelines look for the names of models.
_KINDS: dict[type[ExportableModel], Any] = {
    ExportableModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
    ExportableModelForSeq2SeqLM: MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    ExportableModelForSpeechSeq2Seq: MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    ExportableModelForImageTextToText: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
}
for _kind, _mapping in _KINDS.items():
    _mapping.register(_Config, _kind, exist_ok=True)


def _takes_of(config: PreTrainedConfig) -> tuple[str, ...]:
    """Return the classes' words for what a model with a config may take; `_takes` decides after the export."""
    if not getattr(config, "is_encoder_decoder", False):
        return ("text", "images and text")
    if auto_class(config) is AutoModelForSpeechSeq2Seq:
        return ("audio for an encoder",)
    return ("text for an encoder", "images and text")


def _takes(session: Session) -> tuple[str, ...]:
    """Return the classes' words for what a session takes."""
    encoder = session.stages.encoder
    if encoder is None:
        return ("text", "images and text") if "encode_image" in session.runner.methods else ("text",)
    name = encoder.method.inputs[0].name
    if name == "pixel_values":
        return ("images and text",)
    return ("text for an encoder",) if name == "input_ids" else ("audio for an encoder",)
