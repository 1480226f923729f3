"""Opening of what a command is given: a bundle, in the native runner or in torch's, or a model, which runs live."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

from ..bundle.files import MANIFEST_FILE, other_export
from ..common.fs.files import retired_folder
from ..common.process.tuning import no_collections
from ..common.settings import setting, setting_of
from ..errors import InputError
from ..session.opening import MODEL_DRAFTED, ModelOptions, Use
from .options import options_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, ProcessorMixin

    from ..decoding.completion import AnyCompleter
    from ..generation.speculative import Draft
    from ..session.native import NativeSession
    from ..session.session import Session
    from .terminal import Terminal

#: Files of which a model's folder has one.
_CONFIGS = ("config.json", "adapter_config.json")
#: Files with weights, which may lie next to an export of another package.
_WEIGHTS = ("*.safetensors", "*.bin")


@dataclass(frozen=True)
class BundleChecks:
    """Options of commands for the checks of a bundle that is opened; see `load`."""

    trust: bool = setting(
        False, "Run machine code in the bundle, which can do anything you can.", flags=("--trust",), kind=bool
    )
    key: Path | None = setting(
        None,
        "Public key that must have signed the bundle.",
        flags=("--key",),
        metavar="FILE",
        kind=Path,
        shown_default=False,
    )
    ignore_versions: bool = setting(
        False, "Open bundles made with other package versions.", flags=("--ignore-versions",), kind=bool
    )
    check: bool = setting(
        False, "Check every file, also unchanged ones that were checked before.", flags=("--check",), kind=bool
    )
    revision: str | None = setting(
        None,
        "Branch, tag or commit of a bundle on the hub.",
        flags=("--revision",),
        metavar="NAME",
        shown_default="main",
    )
    from_target: str | None = setting(
        None,
        "Target of the bundle, where a hub repository has several.",
        flags=("--from-target",),
        metavar="TARGET",
        shown_default=False,
    )

    def arguments(self) -> dict[str, Any]:
        """Return the checks as arguments of `Bundle.open` and `open_native`."""
        return {
            "check_versions": not self.ignore_versions,
            "known": not self.check,
            "trust": self.trust,
            "key": self.key,
        }


@dataclass(frozen=True)
class Opening:
    """Options for opening the bundle or the model that a command is given.

    Attributes:
        checks: Options for a bundle.
        model: Options for a model.
    """

    checks: BundleChecks = BundleChecks()
    model: ModelOptions = ModelOptions()

    def is_model(self, name: str) -> bool:
        """Return True for the name of a model, False for that of a bundle.

        Raises:
            InputError: If a folder is neither, or an option does not apply to it.
        """
        found = names_model(name)
        _check_unset(self.checks if found else self.model, name, "model" if found else "bundle")
        return found


def opens(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of its arguments that are dataclasses of settings, and those of its `opening`.

    Options of `opening`, which are `BundleChecks` and `ModelOptions`, come last. The values are checked before a bundle
    is looked for.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type] = {}
    own: list[Parameter] = []
    for one in signature(command).parameters.values():
        if one.name == "opening":
            continue
        if is_dataclass(hints[one.name]):
            groups[one.name] = hints[one.name]
            own += options_of([hints[one.name]])
        else:
            own.append(one.replace(annotation=hints[one.name]))
    added = list(options_of([BundleChecks, ModelOptions]))
    # Before the format of the output, which every command has last.
    index = next((index for index, one in enumerate(own) if one.name == "json"), len(own))
    parameters = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in (*own[:index], *added, *own[index:])]

    @wraps(command)
    def run(**given: Any) -> None:
        def taken(group: type) -> Any:
            return group(**{one.name: given.pop(one.name) for one in fields(group)})

        opening = Opening(taken(BundleChecks), taken(ModelOptions))
        given |= {name: taken(group) for name, group in groups.items()}
        given["folder"] = _fetched(given["ctx"].obj, given["folder"], opening.checks)
        command(opening=opening, **given)

    run.__signature__ = signature(command).replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _fetched(terminal: Terminal, name: str, checks: BundleChecks) -> str:
    """Return the folder of a bundle on the hub, which is downloaded; other names unchanged."""
    from ..bundle.hub import HubChoice, bundle_of

    with terminal.progress(f"looking for {name}") as progress:
        return bundle_of(name, HubChoice(checks.from_target, checks.revision), progress)


def names_model(name: str) -> bool:
    """Return True for the name of a model (a folder, a .gguf file, a hub id, or `demo`), False for that of a bundle.

    Raises:
        InputError: If it is the folder of neither.
    """
    folder = Path(name)
    # Not by pathlib, which raises an error for a name that is too long.
    if os.path.isfile(folder / MANIFEST_FILE):
        return False
    if os.path.isdir(folder):
        other = other_export(folder)
        has_config = any((folder / config).is_file() for config in _CONFIGS)
        if has_config and (other is None or any(any(folder.glob(weights)) for weights in _WEIGHTS)):
            return True
        raise InputError(
            other
            or f"{folder} is not a bundle, because it has no {MANIFEST_FILE}, and not a model, because it has no "
            f"{_CONFIGS[0]}; pass a folder that export wrote, or a model"
        )
    # Opening a missing bundle says so, and what a killed export left.
    return _may_be_on_the_hub(name) or (folder.suffix == ".gguf" and os.path.isfile(folder))


def _may_be_on_the_hub(name: str) -> bool:
    """Return True for `demo` and names like `org/name`, unless they are paths of this machine."""
    folder = Path(name)
    is_here = os.path.exists(name) or retired_folder(folder) is not None
    return name.count("/") <= 1 and name[:1] not in "./~" and not is_here


def _check_unset(options: Any, name: str, kind: str) -> None:
    """Check that all options have their defaults.

    Raises:
        InputError: If one does not.
    """
    given = [one for one in fields(options) if getattr(options, one.name) != one.default]
    if not given:
        return
    found = setting_of(given[0])
    assert found is not None
    # The second spelling of a flag that is on by default.
    flag = found.flags[0].split("/")[-1]
    reason = (
        "a bundle runs as it was exported; leave it out, or pass the model"
        if kind == "bundle"
        else "which has no manifest and no signature; leave it out"
    )
    raise InputError(f"{flag} cannot be combined with the {kind} {name}, {reason}")


def open_natively(terminal: Terminal, folder: str, checks: BundleChecks, text: bool = True) -> NativeSession | None:
    """Return the bundle's session in the native runner; None if torch's runtime has to run it, with a note why.

    Raises:
        BundleError, InputError: See `open_native`.
    """
    with terminal.progress(f"opening {folder}") as progress, no_collections():
        from ..session.native import NotNative, open_native

        try:
            return open_native(folder, text=text, progress=progress, **checks.arguments())
        except NotNative as left:
            reason = left.reason
    _note(terminal, reason)
    return None


def leave_to_torch(terminal: Terminal, folder: str, reason: str) -> None:
    """Note why torch's runtime runs a bundle that the native runner runs otherwise.

    Raises:
        BundleError: If the folder is not a bundle.
        InputError: If the user chose the native runner.
    """
    from ..bundle.files import CheckedBundle
    from ..session.native import NATIVE_TARGETS, NotNative, runtime_chosen

    try:
        with runtime_chosen(folder):
            raise NotNative(reason if CheckedBundle.read(folder).target in NATIVE_TARGETS else "")
    except NotNative as left:
        _note(terminal, left.reason)


def _note(terminal: Terminal, reason: str) -> None:
    if reason:
        terminal.note(f"using torch's runtime, which starts more slowly: {reason}")


class Opened(NamedTuple):
    """An opened bundle or model.

    Attributes:
        session: A `Session`, or a `NativeSession` for a bundle that the native runner runs.
        processor: Returns the processor of images or audio.
        model: The model; None for a bundle.
        draft: Proposes tokens to a `Session`; None for none.
        draft_tokens: Tokens that the draft head of a `NativeSession` proposes at once; 0 for none.
    """

    session: Any
    processor: Callable[[], ProcessorMixin]
    model: PreTrainedModel | None = None
    draft: Draft | None = None
    draft_tokens: int = 0


def open_session(terminal: Terminal, name: str, opening: Opening, use: Use | None = None, text: bool = True) -> Opened:
    """Open a bundle or a model.

    Args:
        terminal: Shows progress and notes.
        name: Folder of a bundle, or name of a model.
        opening: How it is opened.
        use: What the session is used for.
        text: True if the tokenizer is needed.

    Raises:
        InputError: If a folder is neither, or an option does not apply to it.
        BundleError, MissingDependencyError: See `load` and `open_model`.
    """
    use = use or Use()
    if use.draft_model is not None:
        _check_names_model(use.draft_model)
    if opening.is_model(name):
        opened = _open_live(terminal, name, opening.model, use, text)
        return opened._replace(draft=_draft_over(terminal, opened.session, name, opening.model, use))
    native = None
    if use.adapter is not None or use.adapters:
        leave_to_torch(terminal, name, "the native runner has no adapters")
    elif use.kinds:
        leave_to_torch(terminal, name, "images and audio need the model's processor")
    elif use.draft_model is not None:
        leave_to_torch(terminal, name, "the native runner has no draft models")
    else:
        native = open_natively(terminal, name, opening.checks, text)
    if native is not None:
        check_head(use, native.fields.get("draft"))
        return Opened(native, _no_processor, draft_tokens=_drafted(native, use))
    with terminal.opening(name):
        from ..bundle.bundle import Bundle
        from ..session.native import PAYS
        from ..session.session import Session

        bundle = Bundle.open(name, to_run=True, **opening.checks.arguments())
        recorded = bundle.manifest.draft
        check_head(use, None if recorded is None else recorded.model_dump())
        session = Session.from_bundle(bundle)
        use.load_adapters(session, opening.checks.key)
        if session.stepper.ranks is not None:
            terminal.set_rank(session.stepper.ranks.rank)
    measured = None if recorded is None else recorded.acceptance
    pays = measured is not None and measured.tokens >= PAYS * max(1, measured.steps)
    options = ModelOptions(device=str(session.device))
    return Opened(session, bundle.processor, draft=_draft_over(terminal, session, name, options, use, pays))


def _check_names_model(name: str) -> None:
    """Check the name of a draft model, before a larger model is read, which takes long.

    Raises:
        InputError: If there is no such model.
    """
    if names_model(name):
        from ..models.loading.loading import load_config

        load_config(name)
    elif os.path.isdir(name):
        raise InputError(f"--draft-model must be a model, got the bundle {name}; pass the model of its export")
    else:
        raise InputError(f"--draft-model must be a model, got {name!r}, which does not exist; check the path")


def check_head(use: Use, recorded: object) -> None:
    """Check that a bundle has the draft head that is asked for, if its manifest names one.

    Raises:
        InputError: If it has another one.
    """
    head = recorded.get("head") if isinstance(recorded, dict) else None
    if use.head is None or head is None or Path(use.head).resolve().name in ("mtp", head):
        return
    names = "'mtp'" if head == "mtp" else f"'mtp' or {head!r}"
    raise InputError(f"--draft must be {names}, the draft head of this bundle, got {use.head!r}; leave it out")


def _check_has_head(most_drafted: int, draft: str) -> None:
    """Check that a bundle has a draft head that can propose tokens."""
    if most_drafted == 0:
        raise InputError(
            f"--draft must be left out for a bundle without a draft head, got {draft!r}; export the model with --draft"
        )


def _drafted(session: NativeSession, use: Use) -> int:
    """Return the number of tokens that the draft head of a bundle proposes at once."""
    if use.head is None:
        return session.drafted_by_default if use.draft is None else 0
    _check_has_head(session.most_drafted, use.head)
    return session.most_drafted


def _draft_over(
    terminal: Terminal, session: Session, name: str, options: ModelOptions, use: Use, pays: bool = False
) -> Draft | None:
    """Return the draft of a session: its draft head, or a smaller model, which is opened.

    Args:
        terminal: Shows progress and notes.
        session: The session.
        name: Name of its bundle or model.
        options: Options of the smaller model.
        use: What the session is used for.
        pays: True if its head is used without being asked for.
    """
    from ..cache.layer_spec import DRAFTED
    from ..generation.speculative import DraftModel, TrainedDraft
    from ..session.generate import check_draft

    if use.draft_model is not None:
        if session.batch_size != 1:
            raise InputError(
                f"--draft-model cannot be combined with the {session.batch_size} rows of {name}, because proposals are "
                "verified for one row; leave it out, or export with --batch-size 1"
            )
        small = _open_live(terminal, use.draft_model, options, Use(lookup=MODEL_DRAFTED), text=False)
        draft = DraftModel(small.session, MODEL_DRAFTED)
        check_draft(session, draft)
        return draft
    if use.head is None and (use.draft is not None or not pays):
        return None
    if use.head is not None:
        _check_has_head(session.stepper.most_drafted, use.head)
    return TrainedDraft(session, max(1, min(DRAFTED, session.score_length - 1)))


def _open_live(terminal: Terminal, name: str, options: ModelOptions, use: Use, text: bool) -> Opened:
    with terminal.progress(f"opening {name}") as progress, no_collections():
        from ..common.devices import missing_compiler
        from ..common.tensors import dtype_name
        from ..session.opening import open_model

        session, loaded = open_model(name, options, use, progress)
    if text and loaded.tokenizer is None:
        raise InputError(f"{name} must have a tokenizer, because text is read and written with it; add its files")
    terminal.note_all(loaded.remarks)
    holds = "" if session.max_length is None else f", a cache of {session.max_length} tokens"
    compiled = "compiled" if session.target == "compiled" else "not compiled"
    missing = missing_compiler(session.device.type) if options.compile and session.target != "compiled" else None
    if missing is not None:
        compiled += f" (no {missing[0]} compiler was found; install {missing[1]})"
    terminal.note(f"{loaded.source} on {session.device}, {dtype_name(loaded.model.dtype)}, {compiled}{holds}")
    return Opened(session, loaded.processor, loaded.model)


def _no_processor() -> ProcessorMixin:
    raise AssertionError("the native runner takes no files")


class Batching(NamedTuple):
    """Limits of completions that run at a time.

    Attributes:
        rows: Number of completions of a model. A bundle has the rows of its export.
        prefix_bytes: See `ContinuousBatch`.
    """

    rows: int = 1
    prefix_bytes: int = 0


def open_completer(
    terminal: Terminal,
    name: str,
    opening: Opening,
    split_special_tokens: bool,
    use: Use | None = None,
    batching: Batching | None = None,
) -> AnyCompleter:
    """Open a bundle or a model, and return what completes prompts over it; settings that are not followed are noted.

    Args:
        terminal: Shows progress and notes.
        name: See `open_session`.
        opening: See `open_session`.
        split_special_tokens: See `AnyCompleter`.
        use: See `open_session`.
        batching: Limits of completions that run at a time; one by default.

    Raises:
        BundleError, InputError, MissingDependencyError: See `open_session` and `Completer`.
    """
    from ..session.native import NativeSession

    rows, prefix_bytes = batching or Batching()
    use = use or Use()
    drafts = {"--draft": use.head, "--draft-model": use.draft_model}
    flag = next((flag for flag, given in drafts.items() if given is not None), None)
    if flag is not None and rows != 1:
        raise InputError(
            f"{flag} cannot be combined with --rows {rows}, because proposals are verified for one row; leave one out"
        )
    if rows != 1 and not opening.is_model(name):
        raise InputError(
            f"--rows cannot be combined with the bundle {name}, which has the rows that it was exported with; leave it "
            f"out, or export the model with --batch-size {rows}"
        )
    completer: AnyCompleter
    opened = open_session(terminal, name, opening, use)
    session = opened.session
    if isinstance(session, NativeSession):
        from ..decoding.native_completion import NativeCompleter

        completer = NativeCompleter(session, split_special_tokens, opened.draft_tokens)
    elif rows == 1 and session.batch_size == 1:
        from ..decoding.session_completion import Completer

        completer = Completer(session, split_special_tokens, opened.draft)
    else:
        from ..decoding.batch_completion import BatchCompleter
        from ..decoding.batching import ContinuousBatch
        from ..session.opening import open_rows

        if opened.model is None:
            batch = ContinuousBatch(None, session, prefix_bytes)
        else:
            decode = open_rows(session, opened.model, opening.model, rows)
            batch = ContinuousBatch(session, decode, prefix_bytes)
        completer = BatchCompleter(batch, split_special_tokens)
        with terminal.progress("measuring how long prompts take"):
            chunk = batch.pace()
        terminal.note(
            f"{completer.rows} responses at a time, and prompts in chunks of {chunk} tokens between their steps"
        )
    terminal.note_all(completer.settings.remarks())
    return completer
