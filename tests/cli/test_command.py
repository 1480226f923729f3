"""What every command shares: which stream gets what, and which error gives which exit code."""

import json
import logging
import signal
import subprocess
import sys
import warnings

import pytest
import typer
from typer.testing import CliRunner

from exportable_cache.cli.command import Command
from exportable_cache.errors import BundleError, InputError, VerificationError


def invoke(body, **options):
    """Run `body(terminal)` as a command."""
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.callback()
    def root(ctx: typer.Context, debug: bool = False) -> None:
        ctx.obj = {"debug": debug}

    @app.command(cls=Command)
    def command(ctx: typer.Context) -> None:
        body(ctx.obj)

    debug = options.pop("debug", False)
    return CliRunner().invoke(app, [*(["--debug"] if debug else []), "command"], **options)


def raising(error):
    def body(terminal):
        raise error

    return body


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("x is 3; at most 2"), 2),
        (BundleError("x is 3; at most 2"), 2),
        (VerificationError("x is 3; at most 2"), 1),
    ],
)
def test_our_errors_are_one_line_and_a_code(error, code):
    result = invoke(raising(error))
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", "error: x is 3; at most 2\n")


def test_long_errors_are_not_wrapped():
    message = "a long " * 100 + "message [with brackets] :smile:"
    assert invoke(raising(InputError(message))).stderr == f"error: {message}\n"


def test_unexpected_errors_are_two_lines_and_70():
    result = invoke(raising(ZeroDivisionError("by\nzero")))
    assert result.exit_code == 70
    assert result.stdout == ""
    assert result.stderr == (
        "error: unexpected ZeroDivisionError: by zero\nfor the traceback, run it again with EXPORTABLE_CACHE_DEBUG=1\n"
    )


@pytest.mark.parametrize(("error", "code"), [(ZeroDivisionError("by zero"), 70), (InputError("x is 3"), 2)])
def test_debug_shows_the_traceback(error, code):
    result = invoke(raising(error), debug=True)
    assert result.exit_code == code
    assert "Traceback (most recent call last)" in result.stderr
    assert str(error) in result.stderr


def test_interrupt_is_one_line_and_130():
    result = invoke(raising(KeyboardInterrupt()))
    assert result.exit_code == 130
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1 and "interrupted" in result.stderr


def test_only_the_terminal_reaches_stdout():
    def body(terminal):
        print("a library talks")
        terminal.json({"a": 1})

    result = invoke(body)
    assert json.loads(result.stdout) == {"a": 1}
    assert "a library talks" in result.stderr


def test_other_libraries_are_quiet_unless_debugging():
    seen = []

    def body(terminal):
        with warnings.catch_warnings(record=True) as caught:
            warnings.warn("deprecated", stacklevel=1)
        logger = logging.getLogger("torchao")
        seen.append((len(caught), logger.isEnabledFor(logging.WARNING), logger.isEnabledFor(logging.ERROR)))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        invoke(body)
        invoke(body, debug=True)
    assert seen == [(0, False, True), (1, True, True)]
    assert logging.getLogger("torchao").level == logging.NOTSET


@pytest.mark.parametrize("debug", [False, True])
def test_what_the_package_logs_is_shown_to_who_looks_for_a_fault(debug):
    logger = logging.getLogger("exportable_cache.backends")
    shown = invoke(lambda terminal: logger.info("lowered one by one"), debug=debug).output
    assert ("exportable_cache.backends: lowered one by one" in shown) is debug
    assert not logging.getLogger("exportable_cache").handlers


def test_exit_inside_a_command_keeps_its_code():
    assert invoke(raising(typer.Exit(1))).exit_code == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_killed_commands_leave_nothing_half_written(tmp_path, number, code):
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, sys, time\n"
        "from pathlib import Path\n"
        "import typer\n"
        # Where the tests run in the background of a shell without job control, they are told to ignore it.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import exportable_cache.cli.app as module\n"
        "from exportable_cache.cli import main\n"
        "from exportable_cache.cli.command import Command\n"
        "from exportable_cache.common.fs.files import atomic_folder\n"
        "@module.app.command(cls=Command)\n"
        "def wait(ctx: typer.Context, target: Path) -> None:\n"
        "    with atomic_folder(target) as folder:\n"
        "        (folder / 'half').write_text('written')\n"
        "        print('ready', flush=True)\n"
        "        time.sleep(60)\n"
        "main()\n"
    )
    work = tmp_path / "work"
    process = subprocess.Popen(
        [sys.executable, script, "wait", work / "bundle"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr.readline() == "ready\n"
        assert len(list(work.iterdir())) == 1
        process.send_signal(number)
        _, complaint = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == code
    assert list(work.iterdir()) == []
    assert "Traceback" not in complaint
    assert ("interrupted" in complaint) == (number == signal.SIGINT)


def test_a_reader_that_goes_away_is_no_error():
    code = (
        "import sys, typer\n"
        "import exportable_cache.cli.app as module\n"
        "from exportable_cache.cli import main\n"
        "from exportable_cache.cli.command import Command\n"
        "@module.app.command(cls=Command)\n"
        "def talk(ctx: typer.Context) -> None:\n"
        "    while True: ctx.obj.write('x' * 4096)\n"
        "sys.argv[1:] = ['talk']\n"
        "main()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.read(10)
    process.stdout.close()
    complaint = process.stderr.read()
    process.stderr.close()
    # As of a process that SIGPIPE ends; 1 is a mismatch.
    assert process.wait(timeout=300) == 141
    assert complaint == ""
