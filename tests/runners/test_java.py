"""The Java class over the C interface, compiled and run where there is a Java compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from exportable_cache import load
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.common.fs.tensor_files import read_tensors, write_tensors
from exportable_cache.models.loading.adapters import read_lora
from exportable_cache.models.loading.loading import load_model
from exportable_cache.session.adapters import write_adapter_file

from ..support.sessions import exported_bundle
from ..test_adapters import adapted
from .conftest import SOURCES, TOLERANCE, ids, with_python_runner
from .test_c_api import PROMPT, QUESTION, shared_library  # noqa: F401  a fixture
from .test_cpp import CAPACITY, VOCAB
from .test_cpp_bundle import with_a_head
from .test_cpp_settings import with_settings

pytestmark = pytest.mark.full

JAVA = SOURCES.parent / "java"


@pytest.fixture(scope="module")
def classes(shared_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    compiler = shutil.which("javac")
    home = compiler and Path(compiler).resolve().parent.parent
    if home is None or not (home / "include" / "jni.h").is_file():
        pytest.skip("there is no Java development kit")
    folder = tmp_path_factory.mktemp("java")
    calls = [Path(__file__).with_name(f"{name}.java") for name in ("SessionCalls", "OptionCalls")]
    sources = [JAVA / "exportablecache" / "Session.java", *calls]
    for command in (
        [compiler, "-Xlint:all", "-Werror", "-d", folder, *sources],
        ["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", f"-I{home}/include",
         f"-I{home}/include/linux", f"-I{SOURCES}/include", JAVA / "exportable_cache_jni.c",
         f"-L{shared_library.parent}", "-lexportable_cache", f"-Wl,-rpath,{shared_library.parent}",
         "-Wl,--allow-shlib-undefined", "-o", folder / "libexportable_cache_jni.so"],
    ):  # fmt: skip
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_java_answers_as_the_session_in_python(classes: Path, demo_bundle: Path, tmp_path: Path) -> None:
    java = ["java", "-Xcheck:jni", f"-Djava.library.path={classes}", "-cp", classes, "SessionCalls"]
    sampling = with_settings(demo_bundle, tmp_path / "sampling", {"do_sample": True, "temperature": 4.0})
    done = subprocess.run(
        [*java, demo_bundle, tmp_path / "java.state", ids(PROMPT), QUESTION, sampling],
        capture_output=True, text=True, timeout=120, env={**os.environ, "LC_ALL": "C.UTF-8"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if "WARNING" in line] == []  # of -Xcheck:jni
    assert lines.pop(0).startswith("1 threads is 0")
    assert lines.pop(0).startswith("1 threads is 2, but sessions of this process are open that compute in 1")
    session = load(demo_bundle)
    tokens = list(session.generate(torch.tensor([PROMPT]), 8))
    session.reset()
    text = "".join(session.generate_text(QUESTION))
    encoded = session.text_tokenizer(QUESTION, add_special_tokens=True)["input_ids"]
    greedy, drawn, expected = lines[8:11]
    del lines[8:11]
    assert greedy == ids(tokens) != drawn == expected
    stop = "MAX_NEW_TOKENS" if len(tokens) == 8 else "END_TOKEN"
    assert lines[:9] == [
        ids(tokens),
        f"{len(PROMPT)} {len(tokens)} {stop}",
        f"{len(PROMPT)} {CAPACITY} true",
        f"{len(PROMPT)} {VOCAB}",
        text,
        ids(encoded),
        text,
        "2 CANCELLED",
        "from the callback",
    ]
    assert lines[9] == "true 3 WHOLE" and lines[11] == "from the mask"
    assert lines[10].startswith(f"1 allowed_tokens allows none of {VOCAB} tokens after 0 new ones")
    del lines[9:12]
    assert lines[9].startswith("1 tokens[0] is token id 1000000")
    assert lines[10] == lines[11] == "1 this model has no encoder; pass the tokens to prefill"
    assert lines[12].startswith("1 ") and lines[13].startswith("3 ")
    zero = "must have no zero character, where C takes it to end, got one at"
    half = "must be whole characters, got half of a surrogate pair; leave it out"
    assert lines[14:] == [
        "1 tokens must be given, got null",
        f"1 text {zero} 2; leave it out",
        f"1 text {half}",
        f"1 text {half}",
        "1 text must be given, got null",
        "true",
        f"1 prompt {zero} 1; leave it out",
        "1 system must be given, got null",
        "1 options must be given, got null",
        "1 onText must be given, got null",
        "1 prompt must be given, got null",
        "1 onToken must be given, got null",
        f"1 options.stopStrings[1] {half}",
        "1 options.stopStrings[0] must be given, got null",
        "1 options.stopStrings must be given, got null",
        "1 options.stopTokens must be given, got null",
        f"1 path {zero} {len(str(tmp_path / 'java.state'))}; leave it out",
        "1 folder must be given, got null",
        lines[-2],
        "the session is closed",
    ]


#: Shapes that two values do not have.
SHAPES = ([3], [], [0], [2, 2], [-1, -2], [2**62, 4])


def slots_bundle() -> Path:
    """The demo with slots for two adapters, which can drop old tokens."""
    model = load_model("demo").model
    return exported_bundle(model, "executorch", 128, lora_slots=2, lora_rank=4, shift=True, verify=False)


def write_adapters(folder: Path, bundle: Path) -> None:
    """Write two adapters for a bundle, and files that it refuses."""
    manifest = Bundle.open(bundle).manifest
    slots, made_for = manifest.program.lora.described(), manifest.fingerprint
    for seed, name in enumerate(("one", "two")):
        adapted(seed, load_model("demo").model, r=2 + seed).save_pretrained(folder / name)
        write_adapter_file(folder / f"{name}.adapter", read_lora(folder / name), slots, made_for, None)
    shutil.copytree(folder / "one", folder / "peft")
    raw = (folder / "one.adapter").read_bytes()
    (folder / "cut.adapter").write_bytes(raw[: len(raw) // 2])
    (folder / "other.adapter").write_bytes(raw.replace(made_for.encode(), b"f" * 64))
    tensors, metadata = read_tensors(folder / "one.adapter", "an adapter", "exportable_cache.adapter.v1", "")
    next(iter(tensors.values()))[0, 0] = float("nan")
    del metadata["checksum"]
    write_tensors(folder / "nan.adapter", tensors, metadata)
    adapted(0, load_model("demo").model, r=5).save_pretrained(folder / "rank")
    wide = replace(slots, rank=8)
    write_adapter_file(folder / "rank.adapter", read_lora(folder / "rank"), wide, made_for, None)


def test_java_has_adapters_shifts_and_options(classes: Path, shared_library: Path, tmp_path: Path) -> None:  # noqa: F811
    """Compare each call with that of the Python runner over the same library, and what the options change."""
    bundle = slots_bundle()
    write_adapters(tmp_path, bundle)
    given = [bundle, with_a_head(), tmp_path, ids(PROMPT), tmp_path / "java.state"]
    java = ["java", "-Xcheck:jni", f"-Djava.library.path={classes}", "-cp", classes, "OptionCalls"]
    python = [sys.executable, Path(__file__).with_name("option_calls.py"), shared_library]
    environment = {**with_python_runner(), "LC_ALL": "C.UTF-8"}
    found, expected = (
        subprocess.run([*command, *given], capture_output=True, text=True, timeout=120, env=environment)
        for command in (java, python)
    )
    assert found.returncode == expected.returncode == 0, found.stdout + found.stderr + expected.stderr
    lines, others = found.stdout.splitlines(), expected.stdout.splitlines()
    assert [line for line in lines if "WARNING" in line] == []  # of -Xcheck:jni
    of_java = lines[len(others) - 3 : -3]
    assert lines[: len(others) - 3] + lines[-3:] == others

    base, one, two, again, saved, without = lines[:6]
    assert base == again == without and len({base, one, two}) == 3
    session = load(bundle)
    for name, line in (("one", one), ("two", two)):
        session.load_adapter(tmp_path / f"{name}.adapter", name)
        session.use_adapter(name)
        session.reset()
        logits = torch.tensor([int(number) for number in line.split()], dtype=torch.int32).view(torch.float32)
        assert (session.prefill(torch.tensor([PROMPT]))[0] - logits).abs().max() <= TOLERANCE
    says = [
        "with an adapter in use cannot be saved; use_adapter",
        "no adapter is named 'one'; load_adapter first",
        "no adapter is named 'one'; load_adapter first",
        "other weights than those of this program; make it again",
        "must have a rank of at most 4, got 5 in",
        "must have two finite matrices of one rank; copy it again",
        "it is shorter or longer than its tensors; copy it again",
        "cannot read the adapter",
        "is a folder; make its file with `exportable-cache adapter",
        "is of another format than adapters for a program; make its file with",
        "name must be a text of at least one character",
    ]
    for line, text in zip([saved, *lines[6:16]], says, strict=True):
        assert line.startswith("1 ") and text in line, line
    assert len(set(lines[19:26])) == 7  # each option changes the tokens
    assert lines[25].split()[:12] == ["7"] * 12
    without = "1 this program takes token ids only, got"
    sizes = [f"1 shape must have the sizes of the 2 values, got {shape}; pass each size" for shape in SHAPES]
    assert [line.split("; export with")[0] for line in of_java[:2]] == [f"{without} pixel_values", f"{without} grid"]
    assert of_java[2:] == [
        f"from the log probabilities 0 {len(PROMPT)}",
        *sizes,
        "1 shape must have the sizes of the 0 values, got [0]; pass each size",
        "1 values must be given, got null",
        "1 name must be given, got null",
        "1 name must have no zero character, where C takes it to end, got one at 1; leave it out",
        "1 a number of options.logitBias must be given, got null",
        "1 options.logitBias must be given, got null",
        "1 options.countedTokens must be given, got null",
    ]
    greedy, drafted, refused = lines[-3:]
    assert greedy.split()[:12] == drafted.split()[:12] and int(drafted.split()[-1]) > 0 and refused == "3"
