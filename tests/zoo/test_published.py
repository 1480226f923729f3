"""Published checkpoints: shrunk without losing a kind of layer, right past every border, and planned to the byte."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedConfig

from exportable_cache import ExportableCache, export
from exportable_cache.models.layers.specs import layer_specs_from_config
from exportable_cache.models.loading.loading import auto_class
from exportable_cache.models.loading.without_weights import model_without_weights
from exportable_cache.pipeline.plan import plan

from ..support.models import among
from .build import LENGTH, encoder_inputs, encoder_options, initialised, tiny_model, tokens, uncached_logits
from .check import check, write_json
from .conditioning import TOLERANCE
from .published import Checkpoint, checkpoint, checkpoints
from .published.table import MOST_RUN, lines_of, lines_of_most_run
from .shrink import BORDER, tiny_config
from .support_table import DOCUMENT as SUPPORT
from .support_table import write_support
from .table import DOCUMENT, write_table
from .test_shrink import kinds_of, without_weights
from .test_sizes import sizes_of_model, sizes_of_plan

#: By what their config sets: blocks of keys, LongRoPE, Llama 3's RoPE, a window, soft-capping, sinks, states, shared keys,
#: an encoder of images.
ALWAYS = (
    "MiniMaxAI/MiniMax-M3",
    "microsoft/Phi-3-mini-128k-instruct",
    "meta-llama/Llama-3.2-1B",
    "mistralai/Mistral-7B-v0.1",
    "google/gemma-2-2b",
    "openai/gpt-oss-20b",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "google/gemma-4-E2B",
    "OpenGVLab/InternVL3-1B-hf",
)
ROWS = [
    pytest.param(row, id=row.checkpoint, marks=[pytest.mark.full] * (row.checkpoint not in ALWAYS))
    for row in checkpoints()
]
# Without the first, whose shapes take seconds to make.
TRUE_ROWS = [
    pytest.param(row, id=row.checkpoint, marks=[pytest.mark.full] * (row.checkpoint not in ALWAYS[1:]))
    for row in checkpoints()
]


def shrunk(row: Checkpoint) -> PreTrainedConfig:
    return tiny_config(row.shrinks, published=row.fields)


@pytest.mark.parametrize("row", ROWS)
def test_a_shrunk_checkpoint_has_every_kind_of_layer(row: Checkpoint) -> None:
    lost = kinds_of(without_weights(row, row.config())) - kinds_of(without_weights(row, shrunk(row)))
    assert not lost


#: Mechanisms whose published size no tiny model reaches: checkpoint, field of the tiny config, and a value that switches
#: the mechanism off.
FELT = (
    ("deepseek-ai/DeepSeek-V3", "topk_group", 4),
    ("deepseek-ai/DeepSeek-V4-Flash", "hc_sinkhorn_iters", 1),
    ("google/gemma-2-2b", "attn_logit_softcapping", None),
    ("google/gemma-2-2b", "final_logit_softcapping", None),
    ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "attn_temperature_tuning", False),
    ("openai/gpt-oss-20b", "swiglu_limit", 1e3),
)


@pytest.mark.parametrize(("name", "field", "off"), FELT)
def test_a_mechanism_of_a_shrunk_checkpoint_changes_its_logits(name: str, field: str, off: object) -> None:
    row = checkpoint(name)
    model, config = tiny_model(row), shrunk(row)
    assert getattr(config, field) not in (off, None)
    setattr(config, field, off)
    ids = tokens(model)
    moved = uncached_logits(model, ids) - uncached_logits(initialised(row, config), ids)
    assert moved.abs().max() > 100 * TOLERANCE


def test_the_bias_of_a_router_changes_what_it_chooses() -> None:
    """It is a buffer, which is zero in a new model."""
    model = tiny_model(checkpoint("zai-org/GLM-4.5-Air"))
    ids = tokens(model)
    before = uncached_logits(model, ids)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.zero_()
    assert (uncached_logits(model, ids) - before).abs().max() > 100 * TOLERANCE


#: One dense model whose full layers have fewer and wider heads than the others.
UNEVEN = "google/gemma-4-31B-it"


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.checkpoint, marks=[pytest.mark.full] * (row.checkpoint != UNEVEN))
        for row in checkpoints()
        if row.sized
    ],
)
def test_layers_of_a_shrunk_checkpoint_differ_as_the_true_ones(row: Checkpoint) -> None:
    """Where a kind of layer has more, fewer or wider heads than another, so it has in the tiny model."""
    config = row.config()
    if config.is_encoder_decoder:
        pytest.skip("the cache of an encoder-decoder is made from its encoder")
    assert relations_of(config) == relations_of(shrunk(row))


def relations_of(config: PreTrainedConfig) -> dict[tuple[str, str, str], int]:
    """Return for two kinds of layers and a size which of them is larger: 1, 0 or -1."""
    found = {layer.layer_type: layer for layer in layer_specs_from_config(config, model_without_weights(config))}
    return {
        (one, other, name): _sign((getattr(found[one], name) or 0) - (getattr(found[other], name) or 0))
        for one, other in itertools.combinations(sorted(found), 2)
        for name in ("num_heads", "head_dim", "value_head_dim")
    }


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


@pytest.mark.parametrize("row", ROWS)
def test_a_session_gives_the_models_logits(row: Checkpoint) -> None:
    facts: dict = {}
    check(row, ["eager"], facts.update)
    assert facts["targets"]["eager"]["status"] == "pass", facts["targets"]["eager"]
    assert facts["unfit"] is None


@pytest.mark.parametrize("row", ROWS)
def test_a_plan_is_what_is_allocated(row: Checkpoint) -> None:
    model = tiny_model(row)
    options = encoder_options(model, encoder_inputs(model))
    assert sizes_of_plan(plan(model.config, LENGTH, **options)) == sizes_of_model(model, **options)


@pytest.mark.usefixtures("fake_backend")
@pytest.mark.parametrize("row", ROWS)
def test_a_dry_run_is_what_is_written(row: Checkpoint, tmp_path: Path) -> None:
    """The bytes that `--dry-run` gives from the config are those of the bundle that is then written."""
    model = tiny_model(row)
    options = {**encoder_options(model, encoder_inputs(model)), "verify": False}
    # LongRoPE and dynamic NTK end at the border, because this target takes no lengths.
    found = export(model, "fake", BORDER, tmp_path / "x", dry_run=True, **options)
    manifest = export(model, "fake", BORDER, tmp_path / "x", **options).manifest
    assert (found.weights_bytes, found.cache_bytes) == (manifest.weights_bytes, manifest.cache_bytes)
    assert found.least_memory_bytes == found.weights_bytes + found.cache_bytes


@pytest.mark.parametrize("row", TRUE_ROWS)
def test_a_plan_at_true_size_is_what_is_allocated(row: Checkpoint) -> None:
    """A cache of the true size has the planned bytes, on the meta device, which allocates nothing."""
    config = row.config()
    if config.is_encoder_decoder:
        pytest.skip("the cache of an encoder-decoder is made from its encoder")
    made = plan(config, LENGTH, dtype="bfloat16")
    cache = ExportableCache.from_config(config, LENGTH, dtype=torch.bfloat16, device="meta")
    assert made.refusal is None and made.cache_bytes == cache.nbytes == sum(layer.bytes for layer in made.layers)


#: Bytes of a cache of 4,096 tokens in bfloat16: layers, keys and values, heads, size of a head, tokens, bytes.
TRUE_SIZES = {
    "meta-llama/Meta-Llama-3.1-8B": 32 * 2 * 8 * 128 * 4096 * 2,
    "google/gemma-2-2b": 26 * 2 * 4 * 256 * 4096 * 2,
    "openai/gpt-oss-20b": 12 * 2 * 8 * 64 * (4096 + 128) * 2,
    # One latent of 512 and one rotated key of 64 a token.
    "deepseek-ai/DeepSeek-V3": 61 * (512 + 64) * 4096 * 2,
    # Without the indexer's keys in the first three layers.
    "MiniMaxAI/MiniMax-M3": (60 * 2 * 4 * 128 + 57 * 128) * 4096 * 2,
}


# The others have hundreds of experts or layers, whose shapes take seconds to make.
@pytest.mark.parametrize("name", among(list(TRUE_SIZES), fast=["google/gemma-2-2b"]))
def test_a_plan_at_true_size(name: str) -> None:
    made = plan(checkpoint(name).config(), 4096, dtype="bfloat16")
    # Of lengths there are 8 bytes a layer.
    assert made.refusal is None and made.cache_bytes == TRUE_SIZES[name] + 8 * len(made.layers)
    found = checkpoint(name).memory()
    assert (found["weights"], found["4096"]) == (made.weights_bytes, made.cache_bytes) and found["32768"] > found[
        "4096"
    ]


def test_borders_are_within_what_is_fed() -> None:
    """LongRoPE and dynamic NTK change their factors after the prompts of the zoo, and before its last token."""
    config = shrunk(checkpoint("microsoft/Phi-3-mini-128k-instruct"))
    assert 11 < config.rope_parameters["original_max_position_embeddings"] == BORDER < LENGTH
    assert config.rope_parameters["short_factor"] != config.rope_parameters["long_factor"]
    assert config.original_max_position_embeddings == BORDER
    # Its window is longer than its positions, and is never reached; that of the first Mistral is.
    assert config.sliding_window > LENGTH > shrunk(checkpoint("mistralai/Mistral-7B-v0.1")).sliding_window
    # The positions of a class's default say nothing of the window.
    assert shrunk(checkpoint("LGAI-EXAONE/K-EXAONE-236B-A23B")).sliding_window < LENGTH


def test_every_fact_has_a_source_and_changes_the_config() -> None:
    rows = checkpoints()
    assert len({row.checkpoint for row in rows}) == len(rows) >= 300
    assert len({row.model_type for row in rows}) >= 250
    assert all(row.source and "/" in row.checkpoint for row in rows)
    for row in rows:
        if not row.fields:
            continue
        default = row.config_class()
        assert row.config().to_dict() != default.to_dict(), row.checkpoint


@pytest.mark.project
def test_every_checkpoint_is_loaded_as_the_class_of_its_row() -> None:
    for row in checkpoints():
        config = row.config()
        kind = auto_class(config)
        if row.model_type in ("evolla", "seamless_m4t"):
            # One is about proteins, which no auto class loads; the other has two classes for one config.
            continue
        assert kind is not None, row.checkpoint
        # Rows of decoders have the decoder alone, as have some models of images that are loaded.
        if config.is_encoder_decoder and row.group != "causal":
            assert kind._model_mapping[type(config)] is row.model_class, row.checkpoint


#: Names whose number is not the count of parameters: of active ones, or of a text model inside.
OTHER_COUNTS = {
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": 108.0,
    "meta-llama/Llama-4-Scout-17B-16E": 108.6,
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": 400.0,
    "OpenGVLab/InternVL3-1B-hf": 0.63,
}


def test_weights_in_the_table_are_those_of_the_name() -> None:
    """A row with the sizes of its class's default in place of the checkpoint's would show another model's memory."""
    known = json.loads(DOCUMENT.with_suffix(".json").read_text())
    checked = 0
    for row in checkpoints():
        weights = known[row.name].get("memory", {}).get("weights")
        counts = re.findall(r"(?<![\w.])(\d+(?:\.\d+)?)([BbM])(?![a-z])", row.checkpoint)
        if weights is None or not counts:
            continue
        named = max(float(count) / (1000 if unit == "M" else 1) for count, unit in counts)
        named = OTHER_COUNTS.get(row.checkpoint, named)
        assert 0.85 < weights / 2e9 / named < 1.33, (row.checkpoint, weights / 2e9)
        checked += 1
    assert checked > 80


def test_the_page_begins_with_the_checkpoints_that_people_run_most() -> None:
    text = DOCUMENT.read_text()
    first, others = text.split("## Published checkpoints")[0], text.split("## Published checkpoints")[1]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in first.splitlines() if line.startswith("| ")]
    assert rows[0] == "checkpoint" and tuple(rows[1:]) == MOST_RUN and len(MOST_RUN) == 50
    assert not any(f"| {name} |" in others for name in MOST_RUN)


def test_what_cannot_be_exported_has_no_size_and_no_recipe() -> None:
    row = checkpoint("openai-community/gpt2")
    memory = row.memory()
    assert set(memory) == {"weights"}
    for outcome, recipe in (
        ({"status": "refused", "reason": "no"}, "-"),
        ({"status": "pass", "difference": 0}, "exact"),
    ):
        lines = lines_of_most_run({row: {"targets": {"executorch": outcome}, "memory": memory}})
        assert next(line for line in lines if row.checkpoint in line).endswith(f"| 249 MB | - | - | {recipe} |")


def test_the_table_counts_what_was_run_on_each_target() -> None:
    outcome = {"status": "pass", "difference": 0, "date": "2026-11-27"}
    lines = lines_of({checkpoint("openai-community/gpt2"): {"targets": {"pt2": outcome}}})
    assert "| pt2 | 1 | 1 | 1 | 0 | 0 | 0 | 2026-11-27 |" in lines
    assert "| compiled | 1 | 0 | 0 | 0 | 0 | 0 |  |" in lines


def test_results_of_another_run_stay_in_the_document(tmp_path: Path) -> None:
    """A run of a few rows does not empty the others, or their other targets."""
    row, passed = checkpoint("openai-community/gpt2"), {"status": "pass", "difference": 0, "seconds": 1.0}
    for target in ("eager", "pt2"):
        folder = tmp_path / target
        write_json(folder / f"{row.name}.json", {"targets": {target: passed}})
        write_table(folder, tmp_path / "table.md")
    assert set(json.loads((tmp_path / "table.json").read_text())[row.name]["targets"]) == {"eager", "pt2"}


def test_rows_of_later_releases_have_a_name_and_a_group() -> None:
    rows = {row.checkpoint: row for row in checkpoints(later=True)}
    assert {row.checkpoint for row in checkpoints()} <= set(rows)
    assert rows["tencent/Hy4"].group == "image" and rows["sarvamai/sarvam-30b"].name == "published-sarvamai--sarvam-30b"


def test_the_support_page_has_the_counts_of_the_tables(tmp_path: Path) -> None:
    """The script writes the section of models again from docs/, and changes nothing."""
    page = tmp_path / "support.md"
    page.write_text(SUPPORT.read_text())
    write_support(page)
    assert page.read_text() == SUPPORT.read_text()
    page.write_text(page.read_text().replace("| 308 | 301 |", "| 308 | 299 |"))
    write_support(page)
    assert page.read_text() == SUPPORT.read_text()


def test_the_readme_has_the_counts_of_the_support_page() -> None:
    """Both give counts of peers and of published checkpoints."""
    readme, support = (SUPPORT.parents[1] / "README.md").read_text(), SUPPORT.read_text()
    for name in ("TorchExportableModuleForDecoderOnlyLM", "DynamoExporter"):
        counted = re.search(rf"`{name}`.* \((\d+) decoders\) \| (\d+) \| (\d+) \| (\d+) \|", readme)
        assert counted and re.search(
            rf"`{name}`[^|]*\| {' . '.join(counted.groups())} \|".replace(" . ", r" \| "), support
        )
    counted = re.search(r"\| `StaticCache`, eager (\|.*\|) \|\n", readme)
    assert counted and f"| `StaticCache`, eager | 308 {counted[1]}\n" in support
    row = next(line for line in support.splitlines() if line.startswith("| [generative architectures]"))
    right, run = row.split("|")[7].split(" of ")
    assert f"of {run.strip()} run, {right.strip()} are right" in readme
    row = next(line for line in support.splitlines() if line.startswith("| [published checkpoints]"))
    models, eager, _, pt2, executorch = (cell.strip() for cell in row.split("|")[2:7])
    assert f"Of {models} published checkpoints, shrunk, {eager} are right in eager mode" in readme
    assert f"{pt2} are right in `pt2`, {executorch} in ExecuTorch" in readme
    shown = re.search(
        r"Core AI gives (.*) right, MLX.* \(evaluated\) (.*), OpenVINO (.*), the static form for NPUs (.*);", readme
    )
    rows = (
        "`coreai`, executed on Linux",
        "`mlx`, evaluated",
        "`openvino`, executed",
        "static form, executed by XNNPACK",
    )
    cells = [next(line for line in support.splitlines() if line.startswith(f"| {row} |")).split("|") for row in rows]
    assert shown and list(shown.groups()) == [f"{cell[3].strip()} of {cell[2].strip()}" for cell in cells]
    assert all(cell[5].strip() == "0" for cell in cells), "no program is wrong"
