"""How benchmarks/peers.py gives turns, what it makes of answers, and what it hides; no peer is run here."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

pytestmark = pytest.mark.project

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
PROMPTS, ENDS = [128], [100, 4000]


@pytest.fixture(autouse=True)
def beside(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def answer(prompt, near, far, peak=100.0, start=(1.0,)):
    """Of one form: seconds of prompts, and those of each cycle's tokens at each position."""
    return {"prompt": {"128": prompt}, "token": {"100": near, "4000": far}, "peak_mb": [peak], "start_s": list(start)}


def test_numbers_are_medians_of_cycles_or_the_best():
    from peer_results import cycles_of, summary

    # The first cycle's tokens were slow, and one of the second's was.
    tokens = [[0.05, 0.07, 0.09], [0.01, 0.02, 0.09], [0.03, 0.03, 0.02]]
    found = answer([0.1, 0.4, 0.2], tokens, [[0.08] * 3, [0.06] * 3, [0.05] * 3], start=(3.0, 1.0))
    # What tokens add is the median of each cycle's difference: the medians may be of different minutes.
    numbers = summary(cycles_of(found, PROMPTS, ENDS, fastest=False), ENDS, fastest=False)
    assert numbers == pytest.approx(
        {"prompt 128": 640, "token 100": 30, "token 4000": 60, "added": 20, "peak_mb": 100, "start_s": 2}
    )
    numbers = summary(cycles_of(found, PROMPTS, ENDS, fastest=True), ENDS, fastest=True)
    assert numbers == pytest.approx(
        {"prompt 128": 1280, "token 100": 10, "token 4000": 50, "added": 40, "peak_mb": 100, "start_s": 1}
    )


def test_an_answer_that_is_not_complete_yet_has_the_numbers_that_there_are():
    from peer_results import cycles_of, summary

    found = {"start_s": [1.0, 2.0], "peak_mb": [], "prompt": {"128": [0.1]}, "token": {}}
    assert set(summary(cycles_of(found, [128, 1024], ENDS, False), ENDS, False)) == {"prompt 128", "start_s"}


def row(title, bits, ours, speed, token, peak, cycles=1):
    found = answer([128 / speed] * cycles, [[token / 1e3]] * cycles, [[token / 500]] * cycles, peak)
    return {"title": title, "bits": bits, "ours": ours, "distance": 1e-6, "answer": found}


def test_a_table_compares_ours_with_the_best_of_the_others_with_as_many_bits():
    from peer_results import table

    rows = [
        row("**ours**", 32, True, 300, 5.0, 120),
        row("one", 32, False, 100, 4.0, 100),
        row("two", 32, False, 200, 8.0, 60),
        row("ours, 4 bits", 4, True, 300, 5.0, 120),
        row("three", 4, False, 900, 1.0, 10),
    ]
    lines = table(rows, PROMPTS, ENDS).splitlines()
    assert lines[0].startswith("| | prefill 128, tok/s | ms @100 | ms @4000 | what 3,900 tokens add, ms | peak MB |")
    # Speed against the second, time against the first, memory against the second.
    assert lines[5] == "| ours, times as good as the best peer | 1.50x | 0.80x | 0.80x | 0.80x | 0.50x | 1.00x | |"
    assert lines[8].startswith("| ours, 4 bits, times as good as the best peer | 0.33x | 0.20x |")
    assert len({line.count("|") for line in lines}) == 1


def compared(own, others):
    """The cell that compares tokens @100, of seconds of one token a cycle."""
    from peer_results import comparison, cycles_of

    tokens = ([[value] for value in seconds] for seconds in (own, *others))
    forms = [cycles_of(answer([], seconds, seconds), PROMPTS, ENDS, False) for seconds in tokens]
    return comparison(forms[0], forms[1:], PROMPTS, ENDS, fastest=False)[1]


def test_a_ratio_is_the_median_of_those_of_each_cycle():
    # The machine became slow for ours in the third cycle, and for the other in the fourth: medians would say 4.
    own, other = [0.01, 0.01, 0.01, 0.04, 0.04], [0.02, 0.02, 0.08, 0.08, 0.08]
    assert compared(own, [other]).startswith("2.00x")
    # The best of the others is the one that ours is the least ahead of.
    assert compared(own, [other, [1.5 * value for value in own]]).startswith("1.50x")


def test_a_ratio_has_its_spread_beside_it():
    slow, fast = [0.02] * 10, [0.01] * 10
    # What slows both in the same cycles is no difference between them.
    swings = [0.01, 0.02, 0.04, 0.01, 0.03, 0.02, 0.01, 0.05, 0.02, 0.01]
    assert compared(swings, [[2 * value for value in swings]]) == "2.00x (2.00 to 2.00)"
    # Of what swings by itself the ratio is not sure.
    assert compared(fast, [slow[:5] + fast[:5]]) == "1.50x (1.00 to 2.00)"
    # Too few cycles say nothing of it.
    assert compared(fast[:3], [slow[:3]]) == "2.00x"


def test_a_ratio_of_what_is_missing_or_noise_is_none():
    from peer_results import Column, comparison, cycles_of

    assert numpy.isnan(Column("what tokens add", 1).ratio([-0.2, 1.0], [1.0, 0.0])).all()
    faster_later = cycles_of(answer([0.1], [[0.02]], [[0.01]]), PROMPTS, ENDS, False)
    missing = cycles_of({"start_s": [1.0], "peak_mb": [], "prompt": {}, "token": {}}, PROMPTS, ENDS, False)
    assert comparison(faster_later, [faster_later], PROMPTS, ENDS, False)[3] == "-"
    assert comparison(faster_later, [missing], PROMPTS, ENDS, False) == ["-"] * 5 + ["1.00x"]
    assert comparison(faster_later, [missing, faster_later], PROMPTS, ENDS, False)[0] == "1.00x"


def test_the_distance_is_a_share_of_the_spread():
    from peer_results import distance

    reference = numpy.array([[0.0, 2.0], [4.0, 6.0]])
    assert distance(reference, reference) == 0
    assert distance(reference + 0.5, reference) == pytest.approx(0.5 / reference.std())
    with pytest.raises(ValueError, match="shape"):
        distance(reference[:1], reference)


def test_every_form_can_be_made_and_run():
    from peer_convert import CONVERTERS
    from peer_forms import ENVIRONMENTS, FORMS, VOCABULARY, token_ids
    from peer_runtimes import RUNTIMES

    assert {form.runtime for form in FORMS.values()} == set(RUNTIMES)
    assert {form.runtime for form in FORMS.values() if form.of is None} == set(CONVERTERS)
    assert all(FORMS[form.of].of is None for form in FORMS.values() if form.of is not None)
    assert {form.environment for form in FORMS.values()} | {"llama.cpp-avx2"} == set(ENVIRONMENTS)
    assert (
        {form.bits for form in FORMS.values() if form.is_ours} == {4, 16, 32} == {form.bits for form in FORMS.values()}
    )
    # Only what is made of a checkpoint in bfloat16 has another model.
    assert {form.bits for form in FORMS.values() if form.checkpoint(64) != "model-64"} == {16}
    ids = token_ids(4096)
    assert 0 < min(ids) <= max(ids) < VOCABULARY
    assert len(set(ids)) == len(ids)


def test_large_files_of_a_form_are_written_anew(tmp_path):
    from peer_prepare import write_anew

    large, small = tmp_path / "bundle" / "program.pte", tmp_path / "done.txt"
    large.parent.mkdir()
    large.write_bytes(os.urandom(1 << 20))
    small.write_text("done")
    before = {path: (path.stat().st_ino, path.read_bytes()) for path in (large, small)}
    with large.open("rb") as held:
        write_anew(tmp_path)
        assert held.read() == before[large][1]
    assert large.stat().st_ino != before[large][0] and large.read_bytes() == before[large][1]
    assert small.stat().st_ino == before[small][0]
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["done.txt", "program.pte"]


def test_the_runner_is_that_of_the_native_package(tmp_path, monkeypatch):
    """It is not built by the benchmark itself, which once left its kernels out."""
    import peer_prepare
    from peer_turns import Failed

    library = tmp_path / "libexportable_cache.so"
    monkeypatch.delenv("EXPORTABLE_CACHE_RUNNER", raising=False)
    monkeypatch.setattr("exportable_cache_runner.library.found_library", lambda: library if library.exists() else None)
    monkeypatch.setattr(peer_prepare, "environment_python", lambda name, folder: pytest.fail("the runner comes first"))
    with pytest.raises(Failed, match="exportable-cache native build"):
        peer_prepare.prepare("ours-native-runner", tmp_path, 64)
    library.touch()
    with pytest.raises(pytest.fail.Exception, match="the runner comes first"):
        peer_prepare.prepare("ours-native-runner", tmp_path, 64)
    assert "EXPORTABLE_CACHE_RUNNER" not in peer_prepare.form_environment("ours-native-runner")


def test_rotary_rows_are_paired():
    from peer_convert import paired

    # One head of four: half a head apart becomes side by side.
    assert paired(numpy.arange(8).reshape(8, 1), 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_worker_needs_no_package_of_ours_to_be_read():
    """It is run by the environments of others."""
    code = "import peer_worker, peer_runtimes, peer_convert, json, sys\n"
    code += "print(json.dumps([n for n in sys.modules if 'cache' in n]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, check=True, capture_output=True, text=True)
    assert "exportable_cache" not in json.loads(done.stdout)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--form", "teapot"], ["teapot", "onnxruntime-int4"]),
        (["--cycles", "30", "--openings", "1"], ["183 tokens", "fewer cycles"]),
    ],
)
def test_what_cannot_be_measured_is_refused_with_what_can(arguments, words):
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "peers.py"), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 2
    assert all(word in done.stderr for word in words)


ASKS = """
#include <cpuid.h>
#include <stdio.h>
#include <string.h>
int main(int count, char** words) {
  unsigned a, b, c, d;
  __get_cpuid_count(7, 0, &a, &b, &c, &d);
  printf("%d %d %u\\n", !!__builtin_cpu_supports("avx512f"), !!__builtin_cpu_supports("avx2"), b >> 16 & 1);
  fflush(stdout);
  if (count > 1) __builtin_trap();
}
"""


@pytest.mark.skipif(
    not all(shutil.which(tool) for tool in ("cc", "objdump")) or os.uname().machine != "x86_64",
    reason="needs cc and objdump on x86-64",
)
def test_a_process_sees_no_avx512_where_it_is_hidden(tmp_path):
    from without_avx512 import hidden

    program = tmp_path / "asks"
    subprocess.run(["cc", "-O1", "-x", "c", "-", "-o", program], input=ASKS, text=True, check=True)
    plain = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    variables = {**os.environ, **hidden(tmp_path / "hidden")}
    found = subprocess.run([program], env=variables, capture_output=True, text=True, check=True).stdout.split()
    assert found == ["0", plain[1], "0"]
    shown = subprocess.run([program], env={**variables, "HIDE_AVX512": "0"}, capture_output=True, text=True, check=True)
    assert shown.stdout.split() == plain
    # An instruction of the program's own ends it as it would.
    assert subprocess.run([program, "ends"], env=variables, stdout=subprocess.DEVNULL, check=False).returncode == -4
