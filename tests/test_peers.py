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
    numbers = summary(cycles_of(found, PROMPTS, ENDS, fastest=False), fastest=False)
    assert numbers == pytest.approx(
        {"prompt 128": 640, "token 100": 30, "token 4000": 60, "peak_mb": 100, "start_s": 2}
    )
    numbers = summary(cycles_of(found, PROMPTS, ENDS, fastest=True), fastest=True)
    assert numbers == pytest.approx(
        {"prompt 128": 1280, "token 100": 10, "token 4000": 50, "peak_mb": 100, "start_s": 1}
    )


def test_an_answer_that_is_not_complete_yet_has_the_numbers_that_there_are():
    from peer_results import cycles_of, summary

    found = {"start_s": [1.0, 2.0], "peak_mb": [], "prompt": {"128": [0.1]}, "token": {}}
    assert set(summary(cycles_of(found, [128, 1024], ENDS, False), False)) == {"prompt 128", "start_s"}


def row(title, bits, kind, speed, token, peak, cycles=1, goals=None):
    found = answer([128 / speed] * cycles, [[token / 1e3]] * cycles, [[token / 500]] * cycles, peak)
    kinds = {"ours": kind == "ours", "bound": kind == "bound"}
    return {"title": title, "bits": bits, **kinds, "goals": goals or {}, "distance": 1e-6, "answer": found}


def test_a_table_compares_ours_with_the_best_of_the_others_with_as_many_bits():
    from peer_results import table

    rows = [
        row("**ours**", 32, "ours", 300, 5.0, 120),
        row("one", 32, "peer", 100, 4.0, 100),
        row("two", 32, "peer", 200, 8.0, 60),
        row("ours, 4 bits", 4, "ours", 300, 5.0, 120),
        row("three", 4, "peer", 900, 1.0, 10),
    ]
    lines = table(rows, PROMPTS, ENDS).splitlines()
    assert lines[0].startswith("| | prefill 128, tok/s | ms @100 | ms @4000 | peak MB |")
    # Speed against the second, time against the first, memory against the second.
    assert lines[5] == "| ours, times as good as the best peer | 1.50x | 0.80x | 0.80x | 0.50x | 1.00x | |"
    assert lines[8].startswith("| ours, 4 bits, times as good as the best peer | 0.33x | 0.20x |")
    assert len({line.count("|") for line in lines}) == 1


def test_goals_are_printed_beside_the_ratios():
    """The time to read is no peer, and a token that takes hardly longer meets its goal."""
    from peer_results import table

    goals = {"prompt": 1.3, "first": 1.15, "last": 0.5, "peak_mb": 1.25}
    peer, bound = row("peer", 4, "peer", 200, 4.0, 100), row("reading", 4, "bound", 1e9, 4.8, 1)
    for token, cell in ((5.0, "(96%): met"), (6.0, "(80%): **not met**")):
        lines = table([row("ours", 4, "ours", 300, token, 90, goals=goals), peer, bound], PROMPTS, ENDS).splitlines()
        assert lines[4] == "| reading | - | 4.8 | - | - | - | |"
        assert lines[5].startswith("| ours, times as good as the best peer | 1.50x |")
        near = f"1.15x, or 95% of the time to read {cell}"
        assert lines[6] == f"| ours, goals | 1.30x: met | {near} | 0.50x: met | 1.25x: **not met** | - | |"


def compared(own, others):
    """The cell that compares tokens @100, of seconds of one token a cycle."""
    from peer_results import comparison, cycles_of, ratios

    tokens = ([[value] for value in seconds] for seconds in (own, *others))
    forms = [cycles_of(answer([], seconds, seconds), PROMPTS, ENDS, False) for seconds in tokens]
    return comparison(ratios(forms[0], forms[1:], PROMPTS, ENDS, fastest=False), PROMPTS, ENDS)[1]


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


def test_a_ratio_of_what_is_missing_is_none():
    from peer_results import Column, comparison, cycles_of, ratios

    assert numpy.isnan(Column("ms", 1).ratio([-0.2, 1.0], [1.0, 0.0])).all()
    full = cycles_of(answer([0.1], [[0.02]], [[0.01]]), PROMPTS, ENDS, False)
    missing = cycles_of({"start_s": [1.0], "peak_mb": [], "prompt": {}, "token": {}}, PROMPTS, ENDS, False)
    cells = [
        comparison(ratios(full, peers, PROMPTS, ENDS, False), PROMPTS, ENDS) for peers in ([missing], [missing, full])
    ]
    assert cells == [["-"] * 4 + ["1.00x"], ["1.00x"] * 5]


def test_the_distance_is_a_share_of_the_spread():
    from peer_results import distance

    reference = numpy.array([[0.0, 2.0], [4.0, 6.0]])
    assert distance(reference, reference) == 0
    assert distance(reference + 0.5, reference) == pytest.approx(0.5 / reference.std())
    with pytest.raises(ValueError, match="shape"):
        distance(reference[:1], reference)


def test_every_form_can_be_made_and_run():
    from peer_convert import CONVERTERS
    from peer_forms import ENVIRONMENTS, FORMS, LARGE_MODELS, SMALL_MODEL, VOCABULARY, forms_of, token_ids
    from peer_runtimes import RUNTIMES
    from published_shapes import SHAPES

    assert {form.runtime for form in FORMS.values()} == set(RUNTIMES) == set(CONVERTERS)
    assert {form.environment for form in FORMS.values()} | {"llama.cpp-avx2"} == set(ENVIRONMENTS)
    for has in ("is_ours", "is_bound"):
        assert {form.bits for form in FORMS.values() if getattr(form, has)} == {4, 16, 32}
    assert forms_of(SMALL_MODEL) == list(FORMS)
    # The small model has a checkpoint of each precision, and a published shape has one.
    assert len({form.checkpoint(SMALL_MODEL, 64) for form in FORMS.values()}) == 2
    assert set(LARGE_MODELS) < set(SHAPES)
    for name, shape in SHAPES.items():
        assert {FORMS[form].bits for form in forms_of(name)} == ({4} if name in LARGE_MODELS else {4, 16})
        assert len({FORMS[form].checkpoint(name, 64) for form in forms_of(name)}) == 1
        assert shape.fields["vocab_size"] > VOCABULARY
    ids = token_ids(4096)
    assert 0 < min(ids) <= max(ids) < VOCABULARY
    assert len(set(ids)) == len(ids)


def test_tensors_of_a_checkpoint_are_read_without_torch(tmp_path):
    """Bfloat16 and float32 become float32, and bytes are counted as a token reads them."""
    import torch
    from peer_convert import reading, weights
    from peer_forms import FORMS
    from safetensors.torch import save_file

    tensors = {"model.embed_tokens.weight": torch.randn(4, 6), "lm_head.weight": torch.randn(4, 6).bfloat16()}
    tensors |= {"mlp.experts.0.up_proj.weight": torch.randn(8, 8), "norm.weight": torch.randn(6).bfloat16()}
    save_file(tensors, tmp_path / "model.safetensors")
    found = dict(weights(tmp_path))
    assert {name: value.tolist() for name, value in found.items()} == {
        name: value.float().tolist() for name, value in tensors.items()
    }
    (tmp_path / "config.json").write_text(json.dumps({"num_experts": 4, "num_experts_per_tok": 1}))
    reading(FORMS["reading-bf16"], tmp_path, 64, tmp_path)
    assert int((tmp_path / "bytes.txt").read_text()) == 2 * (24 + 64 // 4)


#: Config of the smallest Llama that the conversion takes.
CONFIG = {"vocab_size": 8, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "rms_norm_eps": 1e-6}
CONFIG |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "sliding_window": 32}
CONFIG |= {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe", "gemma3_text"])
def test_files_for_llama_cpp_have_its_names(kind, tmp_path):
    """Norms of Gemma are one larger, rotary rows of Llama are paired, and experts are one tensor."""
    gguf = pytest.importorskip("gguf")
    import torch
    from peer_convert import llama_cpp
    from peer_forms import FORMS
    from safetensors.torch import save_file

    experts = "mlp.experts.0.", "mlp.experts.1."
    parts = {"self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32), "input_layernorm": (32,)}
    parts |= {f"{one}up_proj": (32, 32) for one in experts} if kind == "qwen3_moe" else {"mlp.up_proj": (64, 32)}
    tensors = {f"model.layers.0.{name}.weight": torch.randn(shape) for name, shape in parts.items()}
    tensors["model.embed_tokens.weight"] = torch.randn(8, 32)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **CONFIG}))
    llama_cpp(FORMS["llama.cpp"], tmp_path, 64, tmp_path)
    found = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    up = "ffn_up_exps" if kind == "qwen3_moe" else "ffn_up"
    names = {f"blk.0.{name}.weight" for name in ("attn_q", "attn_k", "attn_norm", up)}
    assert set(found) == {"token_embd.weight", *names}
    norm, query = (tensors[f"model.layers.0.{name}.weight"].numpy() for name in ("input_layernorm", "self_attn.q_proj"))
    assert numpy.array_equal(found["blk.0.attn_norm.weight"], norm + (kind == "gemma3_text"))
    assert numpy.array_equal(found["blk.0.attn_q.weight"], query) != (kind == "llama")
    if kind == "qwen3_moe":
        assert found["blk.0.ffn_up_exps.weight"].shape == (2, 32, 32)


def test_groups_of_another_run_stay_in_the_results(tmp_path):
    from peers import Results

    file, conditions = tmp_path / "results.json", {"model": "m", "slots": 64}
    Results(file, conditions).keep({"threads": 2, "bits": 16, "load": "1"})
    Results(file, conditions).keep({"threads": 2, "bits": 4, "load": "2"})
    Results(file, conditions).keep({"threads": 2, "bits": 16, "load": "3"})
    loads = [group["load"] for group in json.loads(file.read_text())["groups"]]
    assert loads == ["2", "3"]
    # Another number of slots is another table.
    Results(file, {**conditions, "slots": 32}).keep({"threads": 2, "bits": 4, "load": "4"})
    assert [group["load"] for group in json.loads(file.read_text())["groups"]] == ["4"]


def test_a_report_names_what_was_left_out_and_the_load():
    from peers import report

    group = {"threads": 2, "date": "2026-01-02", "releases": {"ours-fast": "executorch 1"}}
    found = answer([0.1], [[0.02]], [[0.04]])
    why = "KeyError: 'rope_type' (see artifacts/log.txt); delete artifacts to try again"
    groups = [
        {**group, "bits": 4, "load": "0.5", "failed": {"openvino-int4": why}, "distances": {"ours-fast": 0.1}},
        {**group, "bits": 16, "load": "0.7", "failed": {}, "distances": {"ours-bf16": 0.1}},
    ]
    for one, name in zip(groups, ("ours-fast", "ours-bf16"), strict=True):
        one["answers"] = {name: found}
    results = {"model": "m", "processor": "P", "cores": 2, "slots": 64, "prompts": PROMPTS, "ends": ENDS}
    text = report({**results, "fastest": False, "groups": groups})
    assert "**m, 2 threads, 64 slots**" in text
    assert text.index("`exact`") < text.index("`fast`")
    assert (
        "Left out: OpenVINO GenAI, int4 (its defaults: 8-bit keys), which failed with `KeyError: 'rope_type'`." in text
    )
    assert "P, 2 cores; load 0.7 at the start of 16 bits, 0.5 at the start of 4 bits." in text
    # What was measured, which is less than was planned if a run was interrupted.
    method = "Medians of 1 turns of 1 tokens, and of prompts, 1 of 128 tokens, processes opened once."
    assert f"16 bits: {method} 4 bits: {method}" in text
    assert text.endswith("executorch 1. 2026-01-02.")


def test_tables_of_the_page_are_those_of_the_results():
    from peers import PAGE, written_page

    page = PAGE.read_text()
    assert written_page(page) == page, "run `python benchmarks/peers.py --write-docs`"


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


def test_forms_of_ours_need_the_native_package(tmp_path, monkeypatch):
    """The benchmark builds it by the command that users have, and does not measure without it."""
    import peer_prepare
    from peer_turns import Failed

    from exportable_cache.backends.executorch.native import build
    from exportable_cache.errors import MissingDependencyError

    def missing():
        raise MissingDependencyError("there is no compiler")

    monkeypatch.setattr(build, "build_native", missing)
    with pytest.raises(Failed, match="there is no compiler"):
        peer_prepare.native_package()


def test_a_conversion_that_failed_is_not_tried_again(tmp_path, monkeypatch):
    import peer_prepare
    from peer_turns import Failed

    calls = []

    def logged(command, log, environment=None):
        calls.append(command)
        raise Failed("it has no such model")

    (tmp_path / "qwen3-moe" / "checkpoint").mkdir(parents=True)
    (tmp_path / "qwen3-moe" / "checkpoint" / "logits.npy").touch()
    monkeypatch.setattr(peer_prepare, "logged", logged)
    for _ in range(2):
        with pytest.raises(Failed, match="it has no such model"):
            peer_prepare.prepare("ours-fast", tmp_path, "qwen3-moe", 2048)
    assert len(calls) == 1


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
        (["--model", "teapot"], ["teapot", "qwen3-0.6b"]),
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
