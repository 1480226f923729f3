"""What the documents show is what there is: examples, commands, options, files, links."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer
from typer.testing import CliRunner

from exportable_cache import export, load
from exportable_cache.backends import TARGETS, backend_for
from exportable_cache.cli.app import app
from exportable_cache.demo import demo_path
from exportable_cache.errors import InputError, MissingDependencyError

from .support.hub import Hub
from .support.models import tiny_model
from .support.readme import bare

pytestmark = pytest.mark.project

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
#: Written by hand. docs/architectures.md is generated.
DOCUMENTS = sorted(
    path
    for path in (
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "kernels/README.md")),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "runners").rglob("README.md"),
    )
    if path.name != "architectures.md"
)
#: Scripts about other packages, which need not be installed: tests/test_upstream.py runs them.
_REPORTS = ROOT / "docs" / "upstream"
BY_NAME = [pytest.param(path, id=path.relative_to(ROOT).as_posix()) for path in DOCUMENTS]

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
#: Programs of others that the guides call.
_FOREIGN = {"cmake", "git", "adb", "apt", "openssl", "curl", "torchrun", "qemu-aarch64-static", "swift"}
_CLI = typer.main.get_command(app)


def blocks(path: Path, language: str) -> list[str]:
    return [text for found, text in _BLOCK.findall(path.read_text(encoding="utf-8")) if found == language]


def shell_commands(path: Path) -> Iterator[list[str]]:
    """The commands of a document's sh blocks, each as its words."""
    for block in blocks(path, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            # Substitutions are words of their own here: what they run is not looked at.
            line = re.sub(r'"?\$\([^)]*(\([^)]*\)[^)]*)*\)[^\s"]*"?', "SUBSTITUTED", line)
            words: list[str] = []
            for word in shlex.split(line, comments=True):
                if word in ("&&", ";"):
                    yield words
                    words = []
                else:
                    words.append(word)
            if words:
                yield words


# -- the README ------------------------------------------------------------------------------------------------------


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 90


@pytest.mark.full
def test_its_example_runs(tmp_path: Path) -> None:
    """With the demo model, because the model that it names cannot be downloaded here."""
    pytest.importorskip("executorch")
    (code,) = blocks(ROOT / "README.md", "python")
    for old, new in (('"HuggingFaceTB/SmolLM2-135M-Instruct"', repr(str(demo_path()))), ("=2048", "=512")):
        assert old in code
        code = code.replace(old, new)
    assert len(bare("-c", code, cwd=tmp_path).stdout.splitlines()) == 2


# -- from a fine-tune to a phone ---------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_fine_tune_becomes_a_bundle_on_the_hub(hub: Hub, tmp_path: Path) -> None:
    """The page's training and commands, in its order; `package` needs a program that was built for the device."""
    for package in ("peft", "executorch", "torchao"):
        pytest.importorskip(package)
    page = ROOT / "docs" / "guides" / "fine-tune.md"
    (code,), (printed,) = blocks(page, "python"), blocks(page, "text")
    exec(compile(code, page.name, "exec"), {})
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    ran, stdout = [], {}
    for words in shell_commands(page):
        if words[0] == "exportable-cache" and words[1] != "package":
            result = CliRunner().invoke(app, words[1:])
            assert result.exit_code == 0, (words, result.stderr)
            ran.append(words[1])
            stdout[words[1]] = result.stdout
    assert ran == ["export", "inspect", "generate", "verify", "upload"]
    assert stdout["generate"] == printed
    asked = ["generate", "demo", "--no-compile", "--greedy", "--max-new-tokens", "6", "--prompt", "the hungry"]
    assert CliRunner().invoke(app, asked).stdout != printed
    assert "executorch/manifest.json" in hub.repositories["user/tuned"].files


# -- every document --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BY_NAME)
def test_nothing_is_left_to_fill_in(path: Path) -> None:
    assert not re.findall(r"<<\w+>>|TODO|TBD", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", BY_NAME)
def test_every_block_says_what_it_is(path: Path) -> None:
    """An unmarked block would go unchecked."""
    marks = re.findall(r"^```(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(marks[::2]) <= {"python", "sh", "text", "cpp", "swift", "c", "rust", "diff"}
    assert set(marks[1::2]) <= {""}


@pytest.mark.parametrize("path", BY_NAME)
def test_python_blocks_name_what_there_is(path: Path) -> None:
    if path.parent == _REPORTS:
        return
    for code in blocks(path, "python"):
        check_python(code)


@pytest.mark.parametrize("path", BY_NAME)
def test_commands_name_what_there_is(path: Path) -> None:
    for words in shell_commands(path):
        check_command(words)


@pytest.mark.parametrize("path", BY_NAME)
def test_inline_code_names_what_there_is(path: Path) -> None:
    text = _BLOCK.sub("", path.read_text(encoding="utf-8"))
    for span in re.findall(r"`([^`\n]+)`", text):
        words = span.split()
        if words[0] == "exportable-cache" and len(words) > 1:
            assert words[1] in {*_CLI.commands, "COMMAND"}, span
        elif words[0] == "make" and len(words) > 1:
            check_command([words[0], words[1]])
        elif words[0] == "python" and re.search(r"\.py$|^-m$", words[1] if len(words) > 1 else ""):
            check_command(shlex.split(span))
        elif re.fullmatch(r"(exportable_cache|benchmarks|export_scripts|runners|tests|docs)/[\w./-]+", span):
            # A path that ends with NAME is one to be made: its folder is there.
            made = Path(span).stem.endswith("NAME")
            named = Path(span).parent if made else Path(span)
            assert (ROOT / named).exists() or (path.parent / named).exists(), span
        elif words[0].startswith("--"):
            assert words[0] in all_options(), span
        # The runners have a `Session` of their own.
        elif "runners" not in path.parts and (call := re.match(r"(export|load|ExportableCache|Session)\b.*\)$", span)):
            check_python(f"from exportable_cache import {call.group(1)}\n{span}")


@pytest.mark.parametrize("path", BY_NAME)
def test_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\((?!https?://)([^)\s]+)\)", _BLOCK.sub("", path.read_text(encoding="utf-8"))):
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_python_blocks_of_live_models_run(tmp_path: Path) -> None:
    """In a process of their own, because some register classes. Those that export or compile take minutes."""
    pages = [path for path in DOCUMENTS if path.parent == ROOT / "docs" / "guides"]
    found = {
        f"{path.stem} {index}": code
        for path in pages
        for index, code in enumerate(blocks(path, "python"))
        if not re.search(
            r"\bexport\(|artifacts/|compile=True\)|compile=True, |NotImplementedError|openai|openvino|peft|pipeline\(",
            code,
        )
    }
    assert {"add-a-layer 0", "batch 2", "parallel 0", "prefixes 0", "pytree 0", "speculate 0"} <= set(found)
    script = tmp_path / "run.py"
    runs = "exec(compile(code, name, 'exec'), {'__name__': '__main__'})"
    script.write_text(f"for name, code in {found!r}.items():\n    print(name, flush=True)\n    {runs}\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, (done.stdout.splitlines()[-3:], done.stderr[-3000:])


def test_the_target_of_the_guide_can_be_lowered_and_opened(tmp_path: Path) -> None:
    (code,) = blocks(ROOT / "docs" / "guides" / "add-a-target.md", "python")
    module = types.ModuleType("target_of_the_guide")
    with mock.patch.dict(sys.modules, {module.__name__: module}):
        exec(code, vars(module))  # dataclasses look for their module
        with mock.patch.dict(TARGETS, mine=(module.__name__, (), None)):
            export(tiny_model("llama"), "mine", 16, tmp_path / "x", prefill_chunk=4, fast=True, verify=False)
            # `open` is what is left to be written.
            with pytest.raises(NotImplementedError):
                load(tmp_path / "x")


# -- what is checked -------------------------------------------------------------------------------------------------


def check_python(code: str) -> None:
    """Fail if it does not parse, imports what is not there, or passes a keyword that a function does not take."""
    tree = ast.parse(code)
    names: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if importlib.util.find_spec(node.module.split(".")[0]) is None:
                continue  # a package of an extra
            try:
                module = importlib.import_module(node.module)
            except ModuleNotFoundError as error:
                if error.name is None or error.name.split(".")[0] == node.module.split(".")[0]:
                    raise
                continue  # it needs a package of an extra itself
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"
                names[alias.asname or alias.name] = getattr(module, alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = resolve(node.func, names)
            if called is not None and getattr(called, "__module__", "").startswith("exportable_cache"):
                check_keywords(called, {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg})


def resolve(node: ast.expr, names: dict[str, Any]) -> Any:
    """The object that `Name` or `Name.attribute` stands for, or None for what only running it would tell."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
        assert hasattr(names[node.value.id], node.attr), f"{node.value.id} has no {node.attr}"
        return getattr(names[node.value.id], node.attr)
    return None


def check_keywords(called: Any, keywords: dict[str, ast.expr]) -> None:
    try:
        parameters = inspect.signature(called).parameters
    except ValueError:  # a class without a constructor of its own, such as an error
        parameters = {}
    others = {name: value for name, value in keywords.items() if name not in parameters}
    if called is export:
        target = keywords.get("target", ast.Constant("executorch"))
        refuse_options(ast.literal_eval(target), {name: ast.literal_eval(value) for name, value in others.items()})
    elif not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        assert not others, f"{called.__qualname__} takes no {', '.join(others)}"


def check_command(words: list[str]) -> None:
    """Fail if it names a command, a file, an option or an extra that there is not."""
    program, *arguments = words
    if program == "make":
        target = next(word for word in arguments if "=" not in word)
        assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
    elif program == "exportable-cache":
        check_our_command(arguments)
    elif program == "python":
        check_script(arguments)
    elif program == "pip":
        check_pip(arguments)
    elif program.startswith("build/"):
        name = program.removeprefix("build/")
        assert any(name in file.read_text() for file in (ROOT / "runners").rglob("CMakeLists.txt")), words
    else:
        assert program in _FOREIGN, words
        if "-S" in arguments:
            assert (ROOT / arguments[arguments.index("-S") + 1] / "CMakeLists.txt").is_file(), words


def check_pip(arguments: list[str]) -> None:
    """Fail if it installs an extra, a folder or constraints that there are not, or this package without constraints."""
    if arguments[0] != "install":
        return
    for word in arguments[1:]:
        if word.startswith("./"):
            assert (ROOT / word / "pyproject.toml").is_file(), arguments
        for extras in re.findall(r"^\.\[([\w,-]+)\]$", word):
            known = (ROOT / "pyproject.toml").read_text()
            assert all(re.search(rf"^{extra} = \[", known, re.MULTILINE) for extra in extras.split(",")), arguments
            # Without them pip takes other releases than `make`.
            assert "-c" in arguments, arguments
    if "-c" in arguments:
        assert (ROOT / arguments[arguments.index("-c") + 1]).is_file(), arguments


def check_our_command(arguments: list[str]) -> None:
    name, *rest = arguments
    assert name in _CLI.commands, f"there is no command {name}"
    # Typer's own errors name the option that is unknown, missing or of another type.
    parameters = _CLI.commands[name].make_context(name, list(rest)).params
    if name == "export":
        check_target_options(parameters)


def check_target_options(parameters: dict[str, Any]) -> None:
    options = {}
    for text in parameters["option"] or ():
        option, _, value = text.partition("=")
        try:
            options[option] = json.loads(value)
        except ValueError:
            options[option] = value
    options |= {name: parameters[name] for name in ("sm", "delegate") if parameters[name] is not None}
    refuse_options(parameters["target"], options)


def refuse_options(target: str, options: dict[str, Any]) -> None:
    """InputError for an option that a target does not take; nothing for a target that is not installed."""
    with contextlib.suppress(MissingDependencyError):
        backend_for(target).options.parse(options)


def check_script(arguments: list[str]) -> None:
    if arguments[0] == "-c":
        compile(arguments[1], "a document", "exec")
        return
    if arguments[0] == "-m":
        path, rest = ROOT / (arguments[1].replace(".", "/") + ".py"), arguments[2:]
    else:
        path, rest = ROOT / arguments[0], arguments[1:]
    assert path.is_file(), f"there is no {path.relative_to(ROOT)}"
    text = path.read_text(encoding="utf-8")
    for option in rest:
        # Typer makes an option of a parameter's name, argparse is given it.
        if option.startswith("--"):
            name = option.removeprefix("--").replace("-", "_")
            assert f'"{option}"' in text or re.search(rf"\b{name}: Annotated", text), f"{path.name} has no {option}"


def all_options() -> set[str]:
    """Every option of the command line, of benchmarks, and of the C++ runner's program."""
    parameters = [parameter for command in (_CLI, *_CLI.commands.values()) for parameter in command.params]
    options = {name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)}
    for path in (ROOT / "benchmarks").glob("*.py"):
        options.update(re.findall(r'"(--[\w-]+)"', path.read_text(encoding="utf-8")))
        names = re.findall(r"\b(\w+): Annotated", path.read_text(encoding="utf-8"))
        options.update("--" + name.replace("_", "-") for name in names)
    usage = (ROOT / "runners" / "cpp" / "apps" / "generate.cpp").read_text(encoding="utf-8")
    options.update(re.findall(r'"\s*(--[\w-]+)', usage))
    return options | {"--help"}


def anchors(path: Path) -> set[str]:
    """What links into a document may end with: its headings in lower case, words joined by hyphens."""
    headings = re.findall(r"^#+ (.*)$", _BLOCK.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower())).strip("-") for heading in headings}


# -- the checks fail where they should -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "def f(:",
        "from exportable_cache import exporter_of_cakes",
        "from exportable_cache import export\nexport('demo', max_cash_len=3)",
        "from exportable_cache import export\nexport('demo', target='pt2', llm_runner=True)",
        "from exportable_cache import ExportableCache\nExportableCache.from_model(model, max_cash_len=512)",
        "from exportable_cache import Session\nSession.from_nothing(model)",
    ],
)
def test_wrong_python_is_found(code: str) -> None:
    with pytest.raises((AssertionError, InputError, SyntaxError)):
        check_python(code)


@pytest.mark.parametrize(
    "command",
    [
        "make coffee",
        "exportable-cache exprot demo",
        "exportable-cache export demo -n 512 -o x --quantise 8da4w",
        "exportable-cache export demo -n 64",
        "exportable-cache export demo -n 512 -o x -t pt2 -O score_len=9",
        "exportable-cache generate x --temperature warm",
        "python benchmarks/loop.py --plod docs/loop.svg",
        "python benchmarks/lop.py",
        "pip install -e '.[tensorflow]'",
        "pip install -c constraints/default.txt -e '.[executorch,tensorflow]'",
        "pip install -c constraints/other.txt -e '.[executorch]'",
        "pip install -e '.[executorch]'",
        "pip install --no-build-isolation ./runners/rust",
        "build/generate_cakes x",
        "cmake -S runners/rust -B build",
        "wget x",
    ],
)
def test_a_wrong_command_is_found(command: str) -> None:
    from typer._click.exceptions import ClickException

    with pytest.raises((AssertionError, InputError, ClickException)):
        check_command(shlex.split(command))
