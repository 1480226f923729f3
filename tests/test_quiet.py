"""What reaches the screen of someone who runs the examples: our lines and the text, and nothing of other libraries."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest

from exportable_cache.common.process.quiet import all_messages_shown, known_messages_hidden, quietly

from .support.readme import bare, example, run_example

#: A progress bar that the example's own call of `from_pretrained` draws: it is transformers', and no call of ours.
THEIRS = re.compile(r"\r?Loading weights: +\d+%\|.*?\|[^\r\n]*")


def test_the_example_of_the_quick_start_prints_its_own_lines(tmp_path: Path) -> None:
    pytest.importorskip("executorch")
    done = run_example()
    assert done.stdout == re.search(r'# -> "(.*)"', example())[1] + "\n"
    assert THEIRS.sub("", done.stderr).strip() == ""
    # The bundle is there: what `make demo` runs next, in a process that opens it and does nothing else.
    generate = ("-m", "exportable_cache", "generate", str(done.bundle), "--max-new-tokens", "4", "--prompt", "amber?")
    # One line of ours, and stages of what takes longer than two seconds.
    lines = [line for line in bare(*generate, cwd=tmp_path).stderr.splitlines() if not line.endswith("...")]
    assert len(lines) == 1 and re.match(r"\d+ prompt tokens, \d+ new; first text after", lines[0]), lines


@pytest.mark.full
def test_exporting_prints_the_stages_and_the_report(tmp_path: Path) -> None:
    pytest.importorskip("executorch")
    target = ("--target", "executorch", "--max-cache-len", "64", "--output", "demo")
    stage = re.compile(r"[a-z][\w ,-]* \.\.\.( \d+/\d+)?")
    for more in ((), ("--quantize", "8da4w", "--overwrite")):
        done = bare("-m", "exportable_cache", "export", "demo", *target, *more, cwd=tmp_path)
        assert done.stdout.startswith("demo: Qwen3ForCausalLM with its cache, for executorch\n")
        assert [line for line in done.stderr.splitlines() if not stage.fullmatch(line)] == []


def chatter() -> None:
    logging.getLogger("torchao").warning("Failed to load /site-packages/torchao/_C_mxfp8.so: no such library")
    logging.getLogger("torch.utils._pytree").warning(
        "%s is an Enum subclass. Calling register_constant() on Enum subclasses is deprecated and will be an error", "A"
    )
    warnings.warn("Mutation on a buffer in the model is detected. ExecuTorch assumes ...", UserWarning, stacklevel=1)
    sys.stderr.write("[cpuinfo_utils.cpp:71] Reading file /sys/devices/soc0/image_version\n")


def other() -> None:
    logging.getLogger("torchao").warning("your GPU is too old")
    logging.getLogger("torch.utils._pytree").warning("something else")
    warnings.warn("Mutation of something else", UserWarning, stacklevel=1)
    sys.stderr.write("[cpuinfo_utils.cpp:71] Cannot continue\n")


def said(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture, call: object) -> list[str]:
    caplog.clear()
    with ExitStack() as stack:
        # Whatever was done to them in this process: torch's passes nothing up once its compiler was used.
        for name in ("torchao", "torch.utils._pytree"):
            caplog.set_level(logging.WARNING, name)
            stack.enter_context(mock.patch.object(logging.getLogger(name), "handlers", [caplog.handler]))
            stack.enter_context(mock.patch.object(logging.getLogger(name), "propagate", False))
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        call()
    return [*caplog.messages, *(str(one.message) for one in caught), *capsys.readouterr().err.splitlines()]


def test_known_messages_are_dropped_and_no_others(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture
) -> None:
    assert said(caplog, capsys, quietly(chatter)) == []
    assert len(said(caplog, capsys, quietly(other))) == 4
    # Only for the length of the call.
    assert len(said(caplog, capsys, chatter)) == 4


def test_who_looks_for_a_fault_sees_everything(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture) -> None:
    with all_messages_shown():
        assert len(said(caplog, capsys, quietly(chatter))) == 4
    with pytest.raises(ValueError), known_messages_hidden():
        raise ValueError
    assert len(said(caplog, capsys, chatter)) == 4
