"""Description of a program in the static form, for its host; importing it imports no transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ....errors import BundleError

#: Names of the masks: of layers without a window, and with one.
MASKS = ("full_attention", "sliding_attention")
#: Dtypes of keys and values.
_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class StaticLayer:
    """A layer's cache, which the host keeps.

    Attributes:
        mask: Name of its mask, `full_attention` or `sliding_attention`.
        slots: Number of slots, each of one token.
        window: Number of tokens that a query sees, itself included; None for all.
        heads: Number of key heads.
        key_size: Size of a key.
        value_size: Size of a value.
    """

    mask: str
    slots: int
    window: int | None
    heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True)
class StaticPlan:
    """Describes a program to the host's loop; part of the manifest.

    Attributes:
        layers: Layers in order.
        tables: Names of the rotary tables, `rope_0_cos`, `rope_0_sin`, in the order of the inputs.
        positions: True if the methods take the positions, as learned embeddings do.
        transposed: True if keys are [1, heads, key size, slots], else [1, heads, slots, key size].
    """

    layers: list[StaticLayer]
    tables: list[str]
    positions: bool
    transposed: bool

    @property
    def masks(self) -> list[str]:
        """Names of the masks, in the order of the inputs."""
        return sorted({layer.mask for layer in self.layers})

    @property
    def inputs(self) -> list[str]:
        """Names of a method's inputs, in order."""
        caches = [f"layers_{index}_{kind}" for index in range(len(self.layers)) for kind in ("keys", "values")]
        return ["input_ids", *(["positions"] if self.positions else []), *self.masks, *self.tables, *caches]

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)


def check_plan(plan: StaticPlan, layers: Sequence[Mapping[str, Any]], tables: Mapping[str, Any]) -> None:
    """Check that a plan is complete and fits the other parts of its bundle, which may be damaged.

    Args:
        plan: The plan.
        layers: Layers of the cache, as the manifest describes them.
        tables: Rotary tables by name, [positions, size].

    Raises:
        BundleError: If it does not fit.
    """
    names = plan.tables
    if tables.keys() != set(names) or len(set(names)) < len(names) or len(plan.layers) != len(layers) or not layers:
        raise BundleError("the plan of the static form has other tables or layers than the bundle; export again")
    for index, (layer, recorded) in enumerate(zip(plan.layers, layers, strict=True)):
        sizes = (layer.slots, layer.heads, layer.key_size, layer.value_size)
        if min(*sizes, 1 if layer.window is None else layer.window) < 1 or layer.mask not in MASKS:
            raise BundleError(
                f"layer {index} in the plan of the static form must have positive sizes and a mask of "
                f"{' or '.join(MASKS)}, got {str(layer)[:200]}; export the model again"
            )
        tensors = recorded.get("tensors")
        for kind, size in (("keys", layer.key_size), ("values", layer.value_size)):
            found = tensors.get(kind) if isinstance(tensors, Mapping) else None
            found = found if isinstance(found, Mapping) else {}
            shape, dtype = [1, layer.heads, layer.slots, size], found.get("dtype")
            if found.get("shape") not in (shape, tuple(shape)) or dtype not in _DTYPES:
                raise BundleError(
                    f"{kind} of layer {index} must be {shape} in {', '.join(_DTYPES)}, as the plan of the static form "
                    f"says, got {found.get('shape')} in {dtype} in the bundle's layers; export the model again"
                )
