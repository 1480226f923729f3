"""`exportable-cache plan` and `inspect demo`."""

import io
import json
import shutil
import signal
import sys

import pytest
from transformers import AutoConfig

from exportable_cache.cli import main
from exportable_cache.cli.terminal import LayerRow, layer_table
from exportable_cache.pipeline.plan import plan

from ..support.models import WINDOW


def cells(line):
    return line.split()


def test_plan_prints_one_line_per_layer_and_the_totals(run, tiny_folder):
    result = run("plan", tiny_folder, "--max-cache-len", 64)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == f"{tiny_folder}: Gemma2ForCausalLM, batch size 1, float32, max_cache_len 64"
    assert cells(lines[3]) == ["0", "sliding_attention", "ring", str(WINDOW), "2", "8", "float32", "1.0", "KiB"]
    assert cells(lines[4]) == ["1", "full_attention", "full", "64", "2", "8", "float32", "8.0", "KiB"]
    assert "static cache   9.0 KiB for up to 64 tokens per row" in lines
    assert any(line.startswith("DynamicCache   8.9 KiB at 64 tokens") for line in lines)


def test_plan_json_is_the_plan(run, tiny_folder):
    result = run("plan", tiny_folder, "-n", 64, "-b", 2, "--dtype", "bfloat16", "--json")
    assert json.loads(result.stdout) == plan(str(tiny_folder), 64, 2, "bfloat16").to_dict()


def test_plan_takes_sinks_and_8_bits(run, tiny_folder):
    result = run("plan", tiny_folder, "-n", 64, "--attention-sinks", 2, "--attention-window", 30, "--kv-dtype", "int8")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert cells(lines[3])[2:5] == ["ring", "int8", str(WINDOW)]
    assert cells(lines[4])[2:5] == ["sinks", "int8", "32"] and cells(lines[4])[7] == "int8"
    assert any(line.startswith("static cache") and line.endswith("for any number of tokens per row") for line in lines)


def test_plan_of_several_ranks(run, tiny_folder):
    lines = run("plan", tiny_folder, "-n", 64, "--tensor-parallel", 2).stdout.splitlines()
    assert "each of 2 ranks" in lines
    assert any(line.startswith("cache          4.5 KiB: heads split in 2 layers") for line in lines)
    assert any("7 messages" in line and "5 of them sums" in line for line in lines)
    refused = run("plan", tiny_folder, "-n", 64, "--tensor-parallel", 3)
    assert refused.exit_code == 2 and "use 1 or 2" in refused.output + refused.stderr


def test_plan_in_a_given_memory(run, tiny_folder):
    lines = run("plan", tiny_folder, "-n", 64, "--memory", "1M").stdout.splitlines()
    assert any(line.startswith("in 1.0 MiB a process") and "fits" in line for line in lines)
    refused = run("plan", tiny_folder, "-n", 64, "--memory", "much")
    assert refused.exit_code == 2 and "such as 800M or 16G" in refused.output + refused.stderr


def test_characters_the_terminal_does_not_have_are_replaced(tiny_folder, tmp_path, monkeypatch):
    shutil.copytree(tiny_folder, tmp_path / "modèle")
    written = io.BytesIO()
    terminal = io.TextIOWrapper(written, encoding="ascii")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["exportable-cache", "plan", "modèle", "-n", "64"])
    on_end = signal.getsignal(signal.SIGTERM)
    try:
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setattr(sys, "stdout", terminal)
            main()
    finally:
        signal.signal(signal.SIGTERM, on_end)
    terminal.flush()
    assert not ended.value.code and written.getvalue().startswith(b"mod?le: Gemma2ForCausalLM")


def test_equal_consecutive_layers_share_a_line():
    ring = LayerRow("sliding_attention", "ring", 8, 2, 16, 16, "float32", 1024)
    full = LayerRow("full_attention", "full", 64, 2, 192, 128, "float32", 8192)
    table = layer_table([ring] * 5 + [full] + [ring])
    columns = {column.header: list(column.cells) for column in table.columns}
    assert columns["layer"] == ["0-4", "5", "6"]
    assert columns["bytes"] == ["5 x 1.0 KiB", "8.0 KiB", "1.0 KiB"]
    assert columns["dim"] == ["16", "K 192, V 128", "16"]


def test_plan_refuses_in_one_sentence_and_still_prints_json(run, tmp_path):
    AutoConfig.for_model("qwen3", num_hidden_layers=1, layer_types=["window_attention"]).save_pretrained(tmp_path)
    result = run("plan", tmp_path, "-n", 64)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: layer 0 of this 'qwen3' model") and "full_attention" in result.stderr
    result = run("plan", tmp_path, "-n", 64, "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["refusal"] in result.stderr


@pytest.mark.parametrize(
    ("model_type", "words"), [("nonsense", ("'nonsense'", "does not know")), ("vit", ("'vit'", "neither a causal LM"))]
)
def test_plan_refuses_unknown_model_types(run, tmp_path, model_type, words):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    result = run("plan", tmp_path, "-n", 64)
    assert result.exit_code == 2
    assert all(word in result.stderr for word in words) and "Traceback" not in result.stderr


def test_plan_of_a_model_that_is_nowhere(run, tmp_path):
    result = run("plan", tmp_path / "missing", "-n", 64)
    assert result.exit_code == 2
    assert str(tmp_path / "missing") in result.stderr and "check the path" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "0"], ("--max-cache-len", "got 0", "at least 1")),
        (["-n", "8", "-b", "-1"], ("--batch-size", "got -1", "at least 1")),
        (["-n", "8", "--dtype", "int8"], ("--dtype", "int8", "float32", "bfloat16")),
    ],
)
def test_plan_usage_errors(run, arguments, words):
    result = run("plan", "demo", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    for word in words:
        assert word in result.stderr


def demo_layers(run, max_cache_len):
    result = run("inspect", "demo", "--max-cache-len", max_cache_len, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)["layers"]


def test_inspect_demo_ring_layers_do_not_grow(run):
    short, long = demo_layers(run, 512), demo_layers(run, 4096)
    rings = [index for index, layer in enumerate(short) if layer["policy"] == "ring"]
    assert rings and len(rings) < len(short)
    for index, (before, after) in enumerate(zip(short, long, strict=True)):
        if index in rings:
            assert before["bytes"] == after["bytes"]
        else:
            assert after["bytes"] - 8 == 8 * (before["bytes"] - 8)


def test_inspect_demo_shows_bytes_per_layer(run):
    result = run("inspect", "demo")
    assert result.exit_code == 0
    assert "max_cache_len 512" in result.stdout
    assert "ring" in result.stdout and "full" in result.stdout and "KiB" in result.stdout
