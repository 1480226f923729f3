"""Starting up: help, version and completion, without the cost of importing torch."""

import re
import subprocess
import sys

import pytest
import typer

import exportable_cache
from exportable_cache.backends.registry import TARGETS
from exportable_cache.cli.app import app

from ..support.sessions import PREFILL, exported_bundle, layer_for_aoti, regional_aoti_bundle

COMMANDS = ("plan", "export", "inspect", "verify", "generate", "bench", "doctor")
_CLI = typer.main.get_command(app)
HEAVY = ("torch", "transformers", "numpy", "executorch")


def test_help_lists_every_command_in_one_line_each(run):
    result = run("--help")
    assert result.exit_code == 0
    for command in COMMANDS:
        assert re.search(rf"^  {command} +[A-Z].*[^.]\.$", result.stdout, re.MULTILINE), command
    assert "exportable-cache export demo -o artifacts/demo" in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(run, command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize("command", [_CLI, *_CLI.commands.values(), _CLI.commands["native"].commands["build"]])
def test_help_fits_100_columns_without_lines_of_one_word(command):
    # On a terminal of 100 columns the text has 98.
    text = command.get_help(typer.Context(command, info_name=command.name, terminal_width=98))
    assert max(map(len, text.splitlines())) <= 98
    assert not re.findall(r"^ {12,}\S+$", text, re.MULTILINE)


def test_no_arguments_show_five_tasks(run):
    result = run()
    assert result.exit_code == 0
    for command in ("export", "generate", "serve", "verify", "bench"):
        assert re.search(rf"^  [A-Z][a-z ]+ {{2,}}exportable-cache {command} ", result.stdout, re.MULTILINE), command


def test_version(run):
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"exportable-cache {exportable_cache.__version__}\n")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["export", "--help"], ["plan", "demo", "-n", "0"], ["nonsense"]]
)
def test_starting_imports_nothing_heavy(arguments):
    code = (
        "import sys\n"
        "from exportable_cache.cli import main\n"
        f"sys.argv = ['exportable-cache', *{arguments!r}]\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        f"    print('imported:', *[name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1] == "imported:"


#: What makes programs: the exporter, torch's compiler, transformers' model code; and transformers' tokenizers.
MAKERS = (
    *("executorch.exir", "torch._dynamo", "torch._inductor", "transformers.modeling_utils", "torchao"),
    *("transformers.tokenization_utils_base", "transformers.models.auto.tokenization_auto"),
)


def test_running_a_bundle_imports_nothing_that_makes_one(demo_bundle):
    """Bundles of three targets in one process: for ExecuTorch, `pt2` and `aoti`."""
    # As in test_aoti.py.
    model = layer_for_aoti()
    folders = [exported_bundle(model, "pt2", prefill_chunk=PREFILL), regional_aoti_bundle(model)]
    code = (
        "import sys\n"
        "from exportable_cache import load\n"
        # For `inspect`, which shows what a verification saw.
        "import exportable_cache.verification.report\n"
        f"text = ''.join(load({str(demo_bundle)!r}).stream_text('the code of amber is 4821. amber?', 3))\n"
        f"print(repr(text), *[name for name in {MAKERS!r} if name in sys.modules])\n"
        f"for folder in {[str(folder) for folder in folders]!r}:\n"
        "    list(load(folder, trust=True).generate([[5, 6, 7]], 3))\n"
        f"    print(*[name for name in {MAKERS!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "' 482'\n\n\n"), done.stderr


def test_completion_imports_nothing_heavy_and_knows_targets(shell):
    environment = {
        "_EXPORTABLE_CACHE_COMPLETE": "complete_bash",
        "COMP_WORDS": "exportable-cache export demo --target ",
        "COMP_CWORD": "4",
        "PYTHONPROFILEIMPORTTIME": "1",
    }
    done = shell(env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == sorted(TARGETS)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "exportable_cache.cli.app" in imported
    assert imported.isdisjoint(HEAVY)


def test_completion_script_names_the_command(shell):
    done = shell("--show-completion", "bash", env={"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", "PATH": ""})
    assert "_EXPORTABLE_CACHE_COMPLETE=complete_bash" in done.stdout


def test_unknown_command_suggests_the_right_one(run):
    result = run("exprt")
    assert result.exit_code == 2
    assert "export" in result.stderr and result.stdout == ""
