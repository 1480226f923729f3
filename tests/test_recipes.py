"""Recipes: what each sets, that given options win, and what a bundle says of its recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from exportable_cache import export
from exportable_cache.cache.spec import CacheSpec
from exportable_cache.cli.app import app
from exportable_cache.common.native.kernels import VARIABLE, chosen_path
from exportable_cache.errors import InputError
from exportable_cache.models.quantization.sizes import float_bytes, quantized_bytes
from exportable_cache.models.quantization.spec import Quantization
from exportable_cache.pipeline.plan import plan, sizes_of_recipes
from exportable_cache.pipeline.recipes import (
    EXACT,
    HALF,
    NO_NATIVE_OPERATORS,
    PORTABLE,
    PRODUCTS_IN_16_BITS,
    RECIPES,
    fill_options,
    remark_of,
)

from .support.models import tiny_model

CAPACITY = 32
NOTHING = {"quantize": None, "group_size": None, "quantize_embeddings": None, "kv_dtype": None}
FOUR_BITS = {**NOTHING, "quantize": "8da4w", "quantize_embeddings": "8w"}


def run(*arguments: Any) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment with a library of native operators, which nothing here loads."""
    library = tmp_path / "library.so"
    library.touch()
    monkeypatch.setenv(VARIABLE, str(library))


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without native operators."""
    monkeypatch.setenv(VARIABLE, "executorch")


# -- what a recipe sets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "settings", "options"),
    [
        (None, NOTHING, {"kernels": "native"}),
        ("exact", NOTHING, {"kernels": "native"}),
        ("half", {**NOTHING, "kv_dtype": "float16"}, {"kernels": "native", "compute": "bfloat16"}),
        ("fast", {**FOUR_BITS, "kv_dtype": "int8"}, {"kernels": "native"}),
        ("small", {**FOUR_BITS, "kv_dtype": "int4"}, {"kernels": "native"}),
        ("portable", NOTHING, {}),
    ],
)
def test_recipes_set_options(
    native: None, recipe: str | None, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    filled = fill_options(recipe, "executorch", {})
    assert (filled.recipe, filled.settings, filled.options) == (recipe or EXACT, settings, options)
    assert filled.changed == {}
    assert remark_of(filled.recipe, "executorch", filled.options, "float32") == ""


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("exact", NOTHING),
        ("half", NOTHING),
        ("fast", FOUR_BITS),
        ("small", {**FOUR_BITS, "kv_dtype": "int8"}),
        ("portable", NOTHING),
    ],
)
def test_recipes_without_native_operators(stock: None, recipe: str, settings: dict[str, Any]) -> None:
    filled = fill_options(recipe, "executorch", {})
    assert (filled.settings, filled.options) == (settings, {})
    remark = "" if recipe == PORTABLE else NO_NATIVE_OPERATORS
    assert remark_of(recipe, "executorch", {}, "float32") == remark
    assert remark_of("of another release", "executorch", {}, "float32") == remark_of(None, "pt2", {}, "float32") == ""


@pytest.mark.parametrize("recipe", ["fast", "small"])
def test_given_options_win(native: None, recipe: str) -> None:
    given = {"quantize": "8da8w", "group_size": None, "quantize_embeddings": "8w", "kv_dtype": "float16"}
    filled = fill_options(recipe, "executorch", {"kernels": "executorch", "linears": "native"}, given)
    assert filled.settings == given
    assert filled.options == {"kernels": "executorch", "linears": "native"}
    # What equals the recipe's is no change.
    assert filled.changed == {"quantize": "8da8w", "kv_dtype": "float16", **filled.options}


def test_layers_that_compute_in_16_bits_get_no_native_operators(native: None) -> None:
    filled = fill_options(None, "executorch", {}, {"dtype": "float16"})
    assert (filled.options, filled.changed) == ({}, {"dtype": "float16"})
    assert fill_options(None, "executorch", {}, {"dtype": "auto"}) == fill_options(None, "executorch", {})
    assert fill_options(None, "executorch", {}, {"dtype": torch.float32}).options == {"kernels": "native"}


def test_rounded_inputs_are_a_change_of_the_recipe(native: None) -> None:
    filled = fill_options(None, "executorch", {"compute": "bfloat16"})
    assert filled.options == {"kernels": "native", "compute": "bfloat16"}
    assert filled.changed == {"compute": "bfloat16"}


def test_a_bfloat16_checkpoint_has_the_choice_of_16_bit_products(native: None) -> None:
    taken = {"kernels": "native"}
    assert remark_of(EXACT, "executorch", taken, "float32", "bfloat16") == PRODUCTS_IN_16_BITS
    for recipe, options, stored in (
        ("fast", taken, "bfloat16"), (EXACT, taken, "float16"), (EXACT, taken, None),
        (HALF, {**taken, "compute": "bfloat16"}, "bfloat16"), (EXACT, {"kernels": "executorch"}, "bfloat16"),
    ):  # fmt: skip
        assert remark_of(recipe, "executorch", options, "float32", stored) == ""


def test_the_official_runner_implies_its_recipe(native: None) -> None:
    filled = fill_options(None, "executorch", {"llm_runner": True}, {"quantize": "8da4w"})
    assert (filled.recipe, filled.options) == (PORTABLE, {"llm_runner": True})
    assert filled.changed == {"quantize": "8da4w"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tiny", "executorch", {}), "recipe must be one of exact, half, fast, small, portable, or None, got 'tiny'"),
        (("fast", "executorch", {"llm_runner": True}), "recipe must be 'portable' with llm_runner, got 'fast'"),
        (("portable", "executorch", {"linears": "native"}), "linears must not be 'native' with recipe='portable'"),
        (("fast", "pt2", {}), "recipe must be 'exact' for target 'pt2', got 'fast'; .* quantize"),
        (("small", "executorch", {"delegate": "vulkan"}), "recipe must be 'exact' for delegate 'vulkan', got 'small'"),
    ],
)
def test_contradictions_are_one_error(native: None, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fill_options(*arguments)


@pytest.mark.parametrize(("target", "options"), [("pt2", {}), ("executorch", {"delegate": "coreml"})])
def test_other_targets_export_as_stored(native: None, target: str, options: dict[str, Any]) -> None:
    filled = fill_options(None, target, options, {"quantize": "8da8w"})
    assert (filled.recipe, filled.options) == (EXACT, options)
    assert filled.settings == {**NOTHING, "quantize": "8da8w"}


# -- sizes -----------------------------------------------------------------------------------------------------------


def test_plan_shows_the_sizes_of_all_recipes(native: None) -> None:
    model = tiny_model("llama", torch.bfloat16)
    model.config.dtype = torch.bfloat16
    made = plan(model.config, CAPACITY, target="executorch")
    assert (made.recipe, tuple(made.recipes)) == (EXACT, tuple(RECIPES))
    sizes = {name: size.weights_bytes for name, size in made.recipes.items()}
    quantized = quantized_bytes(model, Quantization("8da4w", 32, "8w"))
    assert sizes == {
        "exact": float_bytes(model, torch.float32, torch.bfloat16),
        "half": float_bytes(model, torch.float32, torch.bfloat16),
        "fast": quantized,
        "small": quantized,
        "portable": sum(4 * one.numel() for one in model.parameters()),
    }
    assert made.weights_bytes == sizes["exact"] < sizes["portable"]
    assert sizes_of_recipes(model.config, CacheSpec(CAPACITY)) == made.recipes
    for name, kv_dtype in (("exact", None), ("half", "float16"), ("fast", "int8"), ("small", "int4")):
        assert (
            made.recipes[name].cache_bytes
            == plan(model.config, CAPACITY, dtype="float32", kv_dtype=kv_dtype).cache_bytes
        )


def test_plan_follows_a_recipe(native: None) -> None:
    config = tiny_model("llama").config
    made = plan(config, CAPACITY, recipe="fast")
    assert (made.target, made.recipe) == ("executorch", "fast")
    assert (made.weights_bytes, made.cache_bytes) == (
        made.recipes["fast"].weights_bytes, made.recipes["fast"].cache_bytes
    )  # fmt: skip
    assert plan(config, CAPACITY, recipe="fast", kv_dtype="float16").layers[0].dtype == "float16"
    assert plan(config, CAPACITY).recipes == {} and plan(config, CAPACITY, target="pt2").recipes == {}


def test_weights_that_a_recipe_cannot_quantize_have_no_size(stock: None) -> None:
    sizes = sizes_of_recipes(tiny_model("gpt2").config, CacheSpec(CAPACITY))
    assert sizes["fast"].weights_bytes is None and sizes["exact"].weights_bytes


# -- on the command line ---------------------------------------------------------------------------------------------


def test_the_command_exports_with_a_recipe(fake_backend: None, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    arguments = ["export", tmp_path / "model", "-t", "fake", "-n", CAPACITY, "-o", tmp_path / "out"]
    document = json.loads(run(*arguments, "--kv-dtype", "int8", "--json").stdout)
    assert document["recipe"] == {"name": "exact", "changed": {"kv_dtype": "int8"}}
    shown = run(*arguments, "--overwrite", "--no-verify").stdout
    assert "\nrecipe exact: " in shown and " on disk" in shown
    refused = run(*arguments, "--overwrite", "--recipe", "fast")
    assert refused.exit_code == 2 and "recipe must be 'exact' for target 'fake'" in refused.stderr


def test_the_command_plans_a_recipe(stock: None, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    result = run("plan", tmp_path / "model", "-n", CAPACITY, "--recipe", "small")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines if line.split()[:1] in [[name] for name in RECIPES]] == list(RECIPES)
    assert NO_NATIVE_OPERATORS in lines
    assert run("plan", tmp_path / "model", "-n", CAPACITY, "--recipe", "tiny").exit_code == 2


# -- a program with native operators ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.full)])
def test_bfloat16_weights_are_bit_equal_in_the_program(tmp_path: Path, tied: bool) -> None:
    """The default export keeps the bits of a checkpoint's weights, in the order in which the kernels read them."""
    pytest.importorskip("executorch", reason="the executorch extra is not installed")
    if chosen_path() is None:
        pytest.skip("the native operators are not installed here: exportable-cache native build")
    from exportable_cache.backends.executorch.native.linears import pack_float

    model = tiny_model("llama", torch.bfloat16, tie_word_embeddings=tied, num_hidden_layers=1)
    weights = {name: one.clone() for name, one in model.named_parameters() if one.dim() == 2}
    model.save_pretrained(tmp_path / "model")
    bundle = export(tmp_path / "model", "executorch", CAPACITY, tmp_path / "out")
    manifest = bundle.manifest
    assert manifest.recipe is not None and manifest.recipe.name == EXACT
    assert (manifest.options, manifest.stored_dtype) == ({"kernels": "native"}, "bfloat16")
    assert manifest.verification is not None and manifest.verification["passed"]
    content = (bundle.path / "program.pte").read_bytes()
    for name, weight in weights.items():
        is_table = "embed_tokens" in name and not tied
        kept = weight if is_table else pack_float(weight.float(), torch.bfloat16)
        assert kept.contiguous().view(torch.uint8).numpy().tobytes() in content, name
