"""Recipes: named sets of defaults for the options of an export.

A recipe only fills in options that were not given. Importing this module imports no torch, because the command line
makes its options from the fields of specs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..backends.executorch.options import needs_native_kernels
from ..common.native.kernels import chosen_path
from ..common.settings import check_choice
from ..errors import InputError
from ..models.quantization.spec import Quantization

#: Options of an export that a recipe may set, besides those of the target.
SETTINGS = ("quantize", "group_size", "quantize_embeddings", "kv_dtype")
#: Options of target `executorch` that a recipe may set.
_OPERATORS = ("kernels", "linears")
#: Options of target `executorch` that are named as changes of a recipe.
_CHANGES = (*_OPERATORS, "compute")
_TARGET, _DELEGATE = "executorch", "xnnpack"


@dataclass(frozen=True)
class Recipe:
    """Defaults for an export to ExecuTorch with its XNNPACK delegate.

    Attributes:
        about: What the recipe is for, in a few words.
        quantize: See `export`.
        quantize_embeddings: See `export`.
        kv_dtype: See `export`; for programs that call native operators.
        stock_kv_dtype: The same for other programs. ExecuTorch's operators convert 8-bit keys to float32 in each step,
            which takes twice the time on a full cache, and do not read 4-bit keys (docs/guides/quantize.md).
        native: Call native operators, if their library is installed.
        compute: Option `compute` of programs that call native operators.
    """

    about: str
    quantize: str | None = None
    quantize_embeddings: str | None = None
    kv_dtype: str | None = None
    stock_kv_dtype: str | None = None
    native: bool = True
    compute: str | None = None

    def settings(self, native: bool) -> dict[str, Any]:
        """Return the values of `SETTINGS`.

        Args:
            native: True if the program calls native operators.
        """
        values = {name: getattr(self, name, None) for name in SETTINGS}
        return values if native else {**values, "kv_dtype": self.stock_kv_dtype}


#: The default.
EXACT = "exact"
#: The recipe that rounds what `exact` keeps, as other runtimes do by default.
HALF = "half"
#: The only recipe that ExecuTorch's own runner can open, which has no native operators.
PORTABLE = "portable"
RECIPES: dict[str, Recipe] = {
    EXACT: Recipe("weights as the checkpoint has them"),
    HALF: Recipe("products, keys and values in 16 bits", kv_dtype="float16", compute="bfloat16"),
    "fast": Recipe("4-bit weights, 8-bit tables, keys and values", "8da4w", "8w", "int8"),
    "small": Recipe("4-bit weights, 8-bit tables, 4-bit keys and values", "8da4w", "8w", "int4", "int8"),
    PORTABLE: Recipe("float32 by ExecuTorch's operators only", native=False),
}
NO_NATIVE_OPERATORS = (
    "the native operators of this package are not installed here, so the program calls ExecuTorch's; "
    "`exportable-cache native build` installs them, and exports are then faster, with 16-bit weights as stored and "
    "keys and values in 8 bits where the recipe says so"
)
#: What a user of `exact` may choose instead, with figures of docs/peers.md.
PRODUCTS_IN_16_BITS = (
    f"`--recipe {HALF}` also rounds products and keys to 16 bits, as other runtimes do: logits "
    "are then about 6e-03 of their spread from the model instead of 2e-06, and with AVX512_BF16 prompts take half to "
    "six tenths of the time (Qwen3-0.6B)"
)


@dataclass(frozen=True)
class FilledOptions:
    """The options of an export, filled in from a recipe.

    Attributes:
        recipe: Name of the recipe.
        changed: Options that were given and differ from the recipe.
        settings: Values of `SETTINGS`.
        options: Options of the target.
    """

    recipe: str
    changed: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def quantization(self) -> Quantization | None:
        """Quantization of linear layers, tables and experts, or None."""
        scheme = self.settings.get("quantize")
        if scheme is None:
            return None
        found = Quantization(scheme, self.settings["group_size"], self.settings["quantize_embeddings"])
        is_native = (self.options.get("linears") or self.options.get("kernels")) == "native"
        return found.for_native_linears() if is_native else found


def fill_options(
    recipe: str | None, target: str, options: Mapping[str, Any], given: Mapping[str, Any] | None = None
) -> FilledOptions:
    """Fill in the options of an export from a recipe; options that were given win.

    Args:
        recipe: Name of a recipe; None for `portable` with `llm_runner`, else `exact`.
        target: Target of the export.
        options: Options of the target, as given and already checked.
        given: Values of `SETTINGS`, and `dtype`; None for those that were not given.

    Raises:
        InputError: If the recipe is unknown, is not for this target, or contradicts the options.
        MissingDependencyError: If `EXPORTABLE_CACHE_KERNELS` names a missing file.
    """
    given = {name: value for name, value in (given or {}).items() if value not in (None, "auto")}
    if recipe is not None:
        check_choice("recipe", recipe, RECIPES, optional=True)
    if not has_recipes(target, options):
        if recipe not in (None, EXACT):
            raise InputError(
                f"recipe must be {EXACT!r} for {_described(target, options)}, got {recipe!r}; leave it out and set "
                "quantize or kv_dtype instead, or export for target 'executorch' with its default delegate and form"
            )
        return FilledOptions(EXACT, given, {name: given.get(name) for name in SETTINGS}, dict(options))
    name = _checked(recipe, options)
    chosen = RECIPES[name]
    # Layers that compute in 16 bits have no native operators.
    fits = chosen.native and str(given.get("dtype", "float32")).removeprefix("torch.") == "float32"
    filled = dict(options)
    if fits and "kernels" not in options and chosen_path() is not None:
        filled["kernels"] = "native"
    if chosen.compute is not None and filled.get("kernels") == "native":
        filled.setdefault("compute", chosen.compute)
    settings = chosen.settings(filled.get("kernels") == "native")
    changed = {one: value for one, value in given.items() if settings.get(one) != value}
    changed |= {one: options[one] for one in _CHANGES if one in options}
    return FilledOptions(name, changed, {one: given.get(one, settings[one]) for one in SETTINGS}, filled)


def remark_of(
    recipe: str | None, target: str, options: Mapping[str, Any], dtype: str, stored_dtype: str | None = None
) -> str:
    """Return what an export lacks because no native operators are installed here, or the choice it has, or "".

    Args:
        recipe: Name of its recipe, also one of another release, or None.
        target: Its target.
        options: Its options.
        dtype: Name of the dtype of its weights.
        stored_dtype: Name of the dtype of the checkpoint; None if it is not known.
    """
    known = RECIPES.get(recipe or "")
    if known is None or not known.native or not has_recipes(target, options) or dtype != "float32":
        return ""
    if "kernels" not in options and chosen_path() is None:
        return NO_NATIVE_OPERATORS
    is_native, is_rounded = options.get("kernels") == "native", "compute" in options
    has_choice = recipe == EXACT and is_native and not is_rounded and stored_dtype == "bfloat16"
    return PRODUCTS_IN_16_BITS if has_choice else ""


def has_recipes(target: str, options: Mapping[str, Any]) -> bool:
    """Return True if an export for a target with these options can have another recipe than `exact`."""
    return (
        target == _TARGET
        and options.get("delegate", _DELEGATE) == _DELEGATE
        and options.get("form", "resident") == "resident"
    )


def _checked(recipe: str | None, options: Mapping[str, Any]) -> str:
    """Return the name of the recipe, after a check that the options do not contradict it."""
    llm_runner = bool(options.get("llm_runner"))
    name = recipe or (PORTABLE if llm_runner else EXACT)
    if llm_runner and name != PORTABLE:
        raise InputError(
            f"recipe must be {PORTABLE!r} with llm_runner, got {name!r}, because ExecuTorch's runner has no native "
            "operators; leave recipe out, and set quantize for quantized weights"
        )
    if recipe == PORTABLE and needs_native_kernels(options):
        of = next(one for one in _OPERATORS if options.get(one) == "native")
        raise InputError(
            f"{of} must not be 'native' with recipe={PORTABLE!r}, which calls ExecuTorch's operators only; leave one "
            "of them out"
        )
    return name


def _described(target: str, options: Mapping[str, Any]) -> str:
    if target != _TARGET:
        return f"target {target!r}"
    delegate = options.get("delegate", _DELEGATE)
    return f"delegate {delegate!r}" if delegate != _DELEGATE else f"form {options['form']!r}"
