"""What benchmarks/peers.py makes of its processes' answers, and what it hides from them; no peer is run here."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
PROMPTS, ENDS = [128], [100, 4000]


@pytest.fixture(autouse=True)
def beside(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def answer(prompt, near, far, peak=100.0, start=1.0):
    """Of one process: the prompt's seconds, and those of two tokens at each position."""
    return {"prompt": {"128": prompt}, "token": {"100": near, "4000": far}, "peak_mb": peak, "start_s": start}


def test_numbers_are_medians_of_all_rounds_or_the_fastest():
    from peer_results import summary

    rounds = [answer(0.1, [0.01, 0.02], [0.05, 0.07], 90.0, 3.0), answer(0.3, [0.04, 0.03], [0.06, 0.05], 110.0, 1.0)]
    found = summary(rounds, PROMPTS, ENDS, fastest=False)
    assert found == pytest.approx(
        {
            "prompt 128": 640,
            "token 100": 25,
            "token 4000": 55,
            "added": 30,
            "peak_mb": 110,
            "start_s": 2,
        }
    )
    found = summary(rounds, PROMPTS, ENDS, fastest=True)
    assert found == pytest.approx(
        {
            "prompt 128": 1280,
            "token 100": 10,
            "token 4000": 50,
            "added": 40,
            "peak_mb": 110,
            "start_s": 1,
        }
    )


def row(title, bits, ours, speed, token, peak):
    numbers = {"prompt 128": speed, "token 100": token, "token 4000": 2 * token, "added": token, "peak_mb": peak}
    return {"title": title, "bits": bits, "ours": ours, "distance": 1e-6, "numbers": {**numbers, "start_s": 1.0}}


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


@pytest.mark.parametrize(("own", "best"), [(None, 1.0), (1.0, None), (-0.2, 1.0), (1.0, 0.0)])
def test_a_ratio_of_what_is_missing_or_noise_is_none(own, best):
    from peer_results import Column

    assert Column("what tokens add", 1).ratio(own, best) is None


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
    from peer_worker import RUNTIMES

    assert {form.runtime for form in FORMS.values()} == set(RUNTIMES)
    assert {form.runtime for form in FORMS.values() if form.of is None} == set(CONVERTERS)
    assert all(FORMS[form.of].of is None for form in FORMS.values() if form.of is not None)
    assert {form.environment for form in FORMS.values()} | {"llama.cpp-avx2"} == set(ENVIRONMENTS)
    assert {form.bits for form in FORMS.values() if form.is_ours} == {form.bits for form in FORMS.values()} == {4, 32}
    ids = token_ids(4096)
    assert 0 < min(ids) <= max(ids) < VOCABULARY
    assert len(set(ids)) == len(ids)


def test_rotary_rows_are_paired():
    from peer_convert import paired

    # One head of four: half a head apart becomes side by side.
    assert paired(numpy.arange(8).reshape(8, 1), 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_worker_needs_no_package_of_ours_to_be_read():
    """It is run by the environments of others."""
    code = "import peer_worker, peer_convert, json, sys; print(json.dumps([n for n in sys.modules if 'cache' in n]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, check=True, capture_output=True, text=True)
    assert "exportable_cache" not in json.loads(done.stdout)


def test_an_unknown_form_is_refused_with_those_that_there_are():
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "peers.py"), "--form", "teapot"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "teapot" in done.stderr and "onnxruntime-int4" in done.stderr


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
