"""Arguments and options of commands: from the fields of specs, shared by several commands, and those of sampling."""

from __future__ import annotations

import os
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..common.settings import REQUIRED, Setting, keyword_of, setting, setting_of

if TYPE_CHECKING:
    from ..generation.checkpoint_settings import CheckpointSettings
    from ..generation.sampling_options import SamplingOptions


def at_least(least: int) -> Callable[[Any], Any]:
    """Return a callback that refuses smaller numbers, also in lists, before anything slow is imported."""

    def check(given: Any) -> Any:
        for value in given if isinstance(given, (list, tuple)) else [given]:
            if value is not None and not value >= least:
                raise typer.BadParameter(f"must be at least {least}, got {value}")
        return given

    return check


def sides_of(text: str) -> tuple[int, ...]:
    """Return height and width: `448x336` is `(448, 336)`, `448` is a square."""
    sides = tuple(int(side) for side in text.split("x"))
    return sides * 2 if len(sides) == 1 else sides


def checked_size(text: str | None) -> str | None:
    """Check the size of images on the command line."""
    if text is not None and not re.fullmatch(r"\d+(x\d+)?", text):
        raise typer.BadParameter(f"must be HEIGHTxWIDTH in pixels such as 448x448, got {text!r}")
    return text


def one_of(*choices: str) -> Callable[[Any], Any]:
    """Return a callback that refuses other values, before anything slow is imported."""

    def check(given: Any) -> Any:
        if given not in choices:
            raise typer.BadParameter(f"must be one of {', '.join(choices)}, got {given!r}")
        return given

    return check


def number(flag: str, help: str, least: int = 1, default: str | bool = True, metavar: str = "N") -> Any:
    """Return an option for a whole number, or for a list of them.

    Args:
        flag: Its spelling.
        help: One sentence.
        least: Smallest number allowed.
        default: Default as the help shows it, if it is computed later; False to show none.
        metavar: Placeholder for the number in the help.
    """
    return typer.Option(flag, metavar=metavar, callback=at_least(least), help=help, show_default=default)


_FROM_FIELD: Any = object()


@dataclass(frozen=True)
class Changes:
    """Changes of a command to an option's field.

    Attributes:
        default: Replaces the field's default; `REQUIRED` if the command line requires the option.
        about: Further arguments of `typer.Option`, such as a completion.
    """

    default: Any = _FROM_FIELD
    about: Mapping[str, Any] = field(default_factory=dict)


def options_of(owners: Iterable[type], changes: Mapping[str, Changes] | None = None) -> Iterator[Parameter]:
    """Yield one parameter per field with a command-line spelling, named like the Python argument.

    Args:
        owners: Dataclasses with fields made by `settings.setting`. If two have the same option, the first counts.
        changes: Changes by argument name.
    """
    seen = set()
    for owner in owners:
        for one in fields(owner):
            found, name = setting_of(one), keyword_of(one)
            if found is not None and found.flags and name not in seen:
                seen.add(name)
                yield _option(one, found, (changes or {}).get(name))


def _option(one: Field, found: Setting, changes: Changes | None) -> Parameter:
    changes = changes or Changes()
    default = one.default if changes.default is _FROM_FIELD else changes.default
    about: dict[str, Any] = {"help": found.help, "metavar": found.metavar, "show_default": found.shown_default}
    if found.least is not None:
        about["callback"] = at_least(found.least)
    if found.spellings:
        about["callback"] = lambda given: found.spellings.get(given, given)
    about.update(changes.about)
    choices = found.choices or found.offered
    kind: Any = Literal[choices] if choices and found.metavar is None else found.kind
    kind = list[kind] if found.repeats else kind
    if default is None or default == ():
        kind, default = kind | None, None
    return _keyword(keyword_of(one), Annotated[kind, typer.Option(*found.flags, **about)], default)


def declared(name: str, annotation: Any, default: Any = REQUIRED) -> Parameter:
    """Return a parameter that is not a field: `declared("json", JsonOption, False)`."""
    return _keyword(name, annotation, default)


def _keyword(name: str, annotation: Any, default: Any) -> Parameter:
    return Parameter(
        name, Parameter.KEYWORD_ONLY, annotation=annotation, default=Parameter.empty if default is REQUIRED else default
    )


def takes(*parameters: Parameter) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command `command(ctx, **given)` these options, which typer reads from its signature."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        context = Parameter("ctx", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
        command.__signature__ = signature(command).replace(parameters=[context, *parameters])  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in (context, *parameters)}
        return command

    return decorate


def targets() -> list[str]:
    """Return the names of all targets, found without importing them."""
    spec = find_spec("exportable_cache")
    roots = [] if spec is None else spec.submodule_search_locations or []
    folders = [os.path.join(folder, "backends") for folder in roots]
    return sorted(module.name for module in pkgutil.iter_modules(folders) if module.ispkg and module.name != "live")


def _complete_targets(incomplete: str) -> Iterator[str]:
    return (target for target in targets() if target.startswith(incomplete))


def _folders(incomplete: str, marker: str) -> Iterator[str]:
    """Yield folders that hold a file named `marker`."""
    parent, _, start = incomplete.rpartition("/")
    root = parent + "/" if "/" in incomplete else ""
    try:
        names = sorted(entry.name for entry in os.scandir(root or ".") if entry.is_dir())
    except OSError:
        return
    for name in names:
        if not name.startswith(start) or (name.startswith(".") and not start.startswith(".")):
            continue
        folder = Path(root + name)
        if (folder / marker).is_file():
            yield root + name
        else:
            # One level ahead, because the shell ends the word after a single candidate.
            for path in sorted(folder.glob(f"*/{marker}")):
                yield root + name + "/" + path.parent.name


def _complete_bundles(incomplete: str) -> Iterator[str]:
    return _folders(incomplete, "manifest.json")


def _complete_models(incomplete: str) -> Iterator[str]:
    if "demo".startswith(incomplete):
        yield "demo"
    # A bundle also has a config, but no weights to load.
    yield from (
        folder for folder in _folders(incomplete, "config.json") if not (Path(folder) / "manifest.json").exists()
    )


def _complete_bundles_and_demo(incomplete: str) -> Iterator[str]:
    if "demo".startswith(incomplete):
        yield "demo"
    yield from _complete_bundles(incomplete)


def _complete_bundles_and_models(incomplete: str) -> Iterator[str]:
    yield from _complete_models(incomplete)
    yield from _complete_bundles(incomplete)


_MODEL = "A hub id, a local folder, a .gguf file, or `demo`."

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help=_MODEL, autocompletion=_complete_models, show_default=False)
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="Eager model to compare with; a bundle needs it.",
        autocompletion=_complete_models,
        show_default="the model itself",
    ),
]
LoraOption = Annotated[
    list[str] | None, typer.Option("--lora", metavar="FOLDER", help="Adapter that was merged into the weights.")
]
AdapterOption = Annotated[
    Path | None,
    typer.Option(
        "--adapter",
        metavar="FILE",
        help="LoRA adapter to use: a file of `adapter`, or the folder that peft saved.",
        show_default=False,
    ),
]
BundleArgument = Annotated[
    Path,
    typer.Argument(metavar="DIR", help="Folder of a bundle, as `export` wrote it.", autocompletion=_complete_bundles),
]
BundleOrModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="DIR|MODEL",
        help="Folder of a bundle, as `export` wrote it, or its id on the hub; or a model: a hub id, a folder, a .gguf "
        "file, or `demo`.",
        autocompletion=_complete_bundles_and_models,
        show_default=False,
    ),
]
BundleOrDemoArgument = Annotated[
    str,
    typer.Argument(
        metavar="DIR|demo",
        help="Folder of a bundle, its id on the hub, or `demo`.",
        autocompletion=_complete_bundles_and_demo,
    ),
]
DraftOption = Annotated[
    str | None,
    typer.Option(
        "--draft",
        metavar="mtp|FOLDER|none",
        help="Propose tokens by the MTP modules of a model or a bundle, or by the EAGLE-3 head in a folder.",
        show_default="that of a bundle, if it pays",
    ),
]
DraftModelOption = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        metavar="MODEL",
        help="Propose tokens by a smaller model with the same vocabulary.",
        autocompletion=_complete_models,
        show_default=False,
    ),
]
#: Changes of the command line to fields of the specs.
_OTHERS = ", ".join(name for name in targets() if name != "executorch")
TARGET = Changes(
    about={
        # The default among them, because both do not fit into a line.
        "help": f"Runtime: executorch (default), {_OTHERS}.",
        "show_default": False,
        "autocompletion": _complete_targets,
    }
)
REQUIRED_OPTION = Changes(default=REQUIRED)

PlanTargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        "-t",
        metavar="TARGET",
        help=f"Plan for its dtype: {', '.join(targets())}.",
        autocompletion=_complete_targets,
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
KeyOption = Annotated[
    Path | None,
    typer.Option("--key", metavar="FILE", help="Public key that must have signed the bundle.", show_default=False),
]
OnFullOption = Annotated[
    str,
    typer.Option(
        "--on-full",
        metavar="POLICY",
        callback=one_of("refuse", "shift", "drop-turns", "restart"),
        help="When the cache is full: refuse, or shift (drop the oldest tokens after the system prompt), drop-turns or "
        "restart (drop all earlier turns).",
    ),
]
SplitSpecialTokensOption = Annotated[
    bool,
    typer.Option(
        "--split-special-tokens/--no-split-special-tokens",
        help="Encode control tokens in messages as plain text, so that they cannot forge a turn.",
        show_default=False,
    ),
]
JsonSchemaOption = Annotated[
    Path | None,
    typer.Option(
        "--json-schema",
        metavar="FILE",
        help="Generate JSON that follows this schema; needs the extra serve.",
    ),
]
RegexOption = Annotated[
    str | None,
    typer.Option("--regex", metavar="PATTERN", help="Generate text that matches this; needs the extra serve."),
]


@dataclass(frozen=True)
class GivenSampling:
    """Options of sampling as a user gave them; None where one is left to the checkpoint.

    Attributes:
        greedy: True to always take the most probable token.

    Raises:
        InputError: If a value is out of range, or greedy choice would ignore it.
    """

    greedy: bool = setting(
        False,
        "Always take the most likely token, also if the checkpoint asks for sampling.",
        flags=("--greedy",),
        kind=bool,
    )
    temperature: float | None = setting(
        None,
        "0 always takes the most likely token. The default is the checkpoint's, as for the options below.",
        flags=("--temperature",),
        metavar="T",
        kind=float,
        least=0,
    )
    top_k: int | None = setting(
        None, "Sample from the K most likely tokens; 0 for all.", flags=("--top-k",), metavar="K", kind=int, least=0
    )
    top_p: float | None = setting(
        None,
        "Sample from the most likely tokens of probability P; 1 for all.",
        flags=("--top-p",),
        metavar="P",
        kind=float,
    )
    min_p: float | None = setting(
        None, "Sample from tokens at least P times as likely as the best.", flags=("--min-p",), metavar="P", kind=float
    )
    repetition_penalty: float | None = setting(
        None, "Above 1, make previous tokens less likely.", flags=("--repetition-penalty",), metavar="X", kind=float
    )

    def __post_init__(self) -> None:
        from ..generation.sampling_options import SamplingOptions

        if self.greedy and self.temperature:
            raise typer.BadParameter("cannot be combined with --temperature; pass one of them", param_hint="'--greedy'")
        # Checked before a model is opened, which may take long.
        self.over(SamplingOptions(1.0))

    def over(self, default: SamplingOptions) -> SamplingOptions:
        """Return the given options, with defaults for the others.

        Raises:
            InputError: If greedy choice would ignore a given option.
        """
        return default.over(**self._given())

    def settings(
        self, checkpoint: CheckpointSettings, max_new_tokens: int | None, default: SamplingOptions | None = None
    ) -> dict[str, Any]:
        """Return the settings that apply, by name; None for those without an effect.

        Args:
            checkpoint: Settings of the checkpoint.
            max_new_tokens: The limit that was given.
            default: Sampling where none is given; the checkpoint's by default.
        """
        found = asdict(self.over(default or checkpoint.sampling))
        if found["repetition_penalty"] is None:
            found["repetition_penalty"] = checkpoint.repetition_penalty
        limit = checkpoint.max_new_tokens if max_new_tokens is None else max_new_tokens
        length = checkpoint.max_length if limit is None else None
        return {**found, "max_new_tokens": limit, "max_length": length}

    def lines(
        self, checkpoint: CheckpointSettings, max_new_tokens: int | None, default: SamplingOptions | None = None
    ) -> list[str]:
        """Return the line that shows the settings that apply; none for greedy choice that nothing changes."""
        given = {**self._given(), "max_new_tokens": max_new_tokens}
        settings = self.settings(checkpoint, max_new_tokens, default)
        of_config = {**vars(checkpoint), **asdict(checkpoint.sampling)}
        of_config["repetition_penalty"] = checkpoint.repetition_penalty
        greedy = settings["temperature"] == 0
        if greedy:
            del settings["temperature"]
        groups: dict[bool, list[str]] = {True: [], False: []}
        for name, value in settings.items():
            if value is not None:
                groups[given.get(name) is None and of_config.get(name) == value].append(f"{name} {value}")
        if greedy and not groups[True]:
            return []
        line = ", ".join(["greedy" if greedy else "sampling", *groups[False]])
        line += f"; from generation_config: {', '.join(groups[True])}" if groups[True] else ""
        return [line if greedy else f"{line}; --greedy takes the most likely token"]

    def _given(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "greedy"}
        return {**given, "temperature": 0} if self.greedy else given


@dataclass(frozen=True)
class SeededSampling(GivenSampling):
    """Options of sampling of a command that generates only one response at a time."""

    seed: int | None = setting(
        None, "Seed of the sampler, for repeatable results.", flags=("--seed",), metavar="N", kind=int
    )
