"""A layer of a network definition (kind, tensors, attributes, dtypes), and the registry of evaluators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from ....errors import VerificationError

if TYPE_CHECKING:
    import torch


_TORCH = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "INT8": torch.int8,
    # Unpacked, because torch has no arithmetic of 4-bit integers.
    "INT4": torch.int8,
    "UINT8": torch.uint8,
    "FP8": torch.float8_e4m3fn,
    # Unpacked, in the smallest dtype of torch that holds these values and is not another of TensorRT's.
    "FP4": torch.float8_e5m2,
    "BOOL": torch.bool,
}


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a `tensorrt.DataType` by its name.

    Raises:
        VerificationError: If no torch dtype on a CPU corresponds.
    """
    if name not in _TORCH:
        raise VerificationError(
            f"the network has a tensor of type {name}; the reference evaluator knows {', '.join(_TORCH)}"
        )
    return _TORCH[name]


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Convert half-precision tensors to float32, in which TensorRT accumulates; others are unchanged."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


#: Function of a layer: maps its input tensors (None for an absent one) to its output or outputs.
Compute = Callable[..., "torch.Tensor | tuple[torch.Tensor, ...]"]

# Attributes of every layer. Further ones of regular TensorRT matter in weakly typed networks only, which are refused.
_COMMON = frozenset(
    {"metadata", "name", "num_inputs", "num_outputs", "num_ranks", "precision", "precision_is_set", "type"}
)


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape that TensorRT inferred of a tensor.

    Attributes:
        name: Unique name in the network.
        dtype: Element type.
        shape: Sizes; -1 if known at run time only.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def check(self, tensor: torch.Tensor) -> str | None:
        """Return how `tensor` contradicts the spec, as a clause, or None."""
        if tensor.dtype != self.dtype:
            return f"has dtype {tensor.dtype}, TensorRT inferred {self.dtype}"
        if tensor.dim() != len(self.shape) or any(size not in (-1, is_) for size, is_ in zip(self.shape, tensor.shape)):
            return f"has shape {list(tensor.shape)}, TensorRT inferred {list(self.shape)}"
        return None


@dataclass(frozen=True)
class NetworkLayer:
    """A layer with everything that determines what it computes.

    Attributes:
        kind: Name of its `LayerType`, such as `ELEMENTWISE`.
        name: Name in the network.
        inputs: Input tensors; None for an absent optional one.
        outputs: Output tensors.
        attributes: Values by name; enum members are their names, dims are tuples, or None if never set.
        constants: Tensors by layer name that the network cannot show (see `NetworkEvaluator`).
    """

    kind: str
    name: str
    inputs: tuple[TensorSpec | None, ...]
    outputs: tuple[TensorSpec, ...]
    attributes: Mapping[str, Any]
    constants: Mapping[str, torch.Tensor]

    def __str__(self) -> str:
        return f"layer {self.name!r} ({self.kind})"

    def __getitem__(self, attribute: str) -> Any:
        return self.attributes[attribute]

    def has_input(self, index: int) -> bool:
        """Return True if the optional input at `index` is given."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def required(self, index: int) -> TensorSpec:
        """Return the input at `index`, which is not optional."""
        found = self.inputs[index]
        assert found is not None
        return found

    def input_dtypes(self) -> set[torch.dtype]:
        """Return the dtypes of the given inputs."""
        return {found.dtype for found in self.inputs if found is not None}

    def unsupported(self, what: str) -> VerificationError:
        """Return an error for a setting that the evaluator does not model."""
        return VerificationError(
            f"{self} {what}, which the reference evaluator does not model; "
            "extend exportable_cache/backends/tensorrt/evaluator, or verify on a GPU"
        )

    def wrong(self, what: str) -> VerificationError:
        """Return an error for values that TensorRT leaves undefined."""
        return VerificationError(f"{self} {what}")

    def choose(self, attribute: str, choices: Mapping[str, Any]) -> Any:
        """Return the entry of `choices` for an enum attribute.

        Raises:
            VerificationError: If there is none.
        """
        value = self.attributes[attribute]
        if value not in choices:
            raise self.unsupported(f"has {attribute} {value}")
        return choices[value]


@dataclass(frozen=True)
class LayerKind:
    """Evaluation of one kind of layer.

    Attributes:
        class_name: TensorRT's class, whose attributes are read.
        prepare: `layer -> Compute`; checks settings before anything runs.
        honours: Attributes that `prepare` reads.
        expects: Attributes with the value at which they change nothing; other values are refused.
        replaced: Attributes by the index of the input that replaces them; they are None if it is given.
        inputs: Fewest and most inputs.
        same_dtype: Indices of inputs whose dtypes must agree; torch would promote, a strongly typed network may not.
    """

    class_name: str
    prepare: Callable[[NetworkLayer], Compute]
    honours: tuple[str, ...] = ()
    expects: Mapping[str, Any] = field(default_factory=dict)
    replaced: Mapping[str, int] = field(default_factory=dict)
    inputs: tuple[int, int] = (1, 1)
    same_dtype: tuple[int, ...] = ()


#: Layer kind -> how it is evaluated.
KINDS: dict[str, LayerKind] = {}


def layer_kind(kind: str, class_name: str, **options: Any) -> Callable[[Callable], Callable]:
    """Register the decorated `prepare` function for a kind; the options are fields of `LayerKind`."""

    def register(prepare: Callable[[NetworkLayer], Compute]) -> Callable[[NetworkLayer], Compute]:
        KINDS[kind] = LayerKind(class_name, prepare, **options)
        return prepare

    return register


def read_tensor(tensor: Any) -> TensorSpec:
    """Return the spec that TensorRT inferred of an `ITensor`.

    Raises:
        VerificationError: If it could not infer a shape, because the network is invalid.
    """
    try:
        shape = tuple(tensor.shape)
    except ValueError as error:  # dims of rank -1
        raise VerificationError(f"TensorRT could not infer the shape of {tensor.name!r}; see its log") from error
    return TensorSpec(tensor.name, torch_dtype(tensor.dtype.name), shape)


def read_layer(layer: Any, module: ModuleType, constants: Mapping[str, torch.Tensor]) -> NetworkLayer:
    """Read a layer of a network.

    Args:
        layer: Result of `INetworkDefinition.get_layer`.
        module: TensorRT module of the network.
        constants: See `NetworkLayer`.

    Raises:
        VerificationError: If the kind, an attribute or a setting is unknown.
    """
    # From the base class, because `IActivationLayer.type` hides the kind.
    kind = module.ILayer.type.fget(layer).name
    known = KINDS.get(kind)
    if known is None:
        raise VerificationError(
            f"layer {layer.name!r} is of kind {kind}, which the reference evaluator does not know; "
            f"it knows {', '.join(sorted(KINDS))}"
        )
    # TensorRT returns layers as their base class, and shares one object between callers, so the class is restored.
    base = layer.__class__
    layer.__class__ = getattr(module, known.class_name)
    try:
        read = _read(layer, kind, known, constants)
    finally:
        layer.__class__ = base
    if getattr(layer, "num_ranks", 1) != 1:
        raise read.unsupported(f"runs on {layer.num_ranks} devices")
    check_attributes(read, read.attributes, known.honours, known.expects)
    fewest, most = known.inputs
    if not fewest <= len(read.inputs) <= most:
        raise read.unsupported(f"has {len(read.inputs)} inputs")
    dtypes = {read.required(index).dtype for index in known.same_dtype if read.has_input(index)}
    if len(dtypes) > 1:
        raise read.wrong(f"mixes {' and '.join(sorted(map(str, dtypes)))}; a strongly typed network may not")
    return read


def _read(layer: Any, kind: str, known: LayerKind, constants: Mapping[str, torch.Tensor]) -> NetworkLayer:
    tensors = [layer.get_input(index) for index in range(layer.num_inputs)]
    # Not read, because a replaced attribute is stale and TensorRT logs a warning.
    stale = {name for name, index in known.replaced.items() if index < len(tensors) and tensors[index] is not None}
    return NetworkLayer(
        kind=kind,
        name=layer.name,
        inputs=tuple(None if tensor is None else read_tensor(tensor) for tensor in tensors),
        outputs=tuple(read_tensor(layer.get_output(index)) for index in range(layer.num_outputs)),
        attributes={
            name: None if name in stale else _plain(getattr(layer, name))
            for name in attribute_names(type(layer), _COMMON)
        },
        constants=constants,
    )


def check_attributes(
    layer: NetworkLayer, attributes: Mapping[str, Any], honours: Iterable[str], expects: Mapping[str, Any]
) -> None:
    """Refuse attributes that `prepare` does not read, and settings that are not modeled."""
    for name, value in attributes.items():
        if name in expects:
            if value != expects[name]:
                raise layer.unsupported(f"has {name} {value}")
        elif name not in honours:
            raise layer.unsupported(f"has an attribute {name}")


def attribute_names(cls: type, without: Iterable[str] = ()) -> list[str]:
    """Return the public properties of a TensorRT class."""
    hidden = set(without)
    # `IActivationLayer.type` is a separate attribute.
    if "type" in vars(cls):
        hidden.discard("type")
    return [
        name
        for name in dir(cls)
        if not name.startswith("_") and name not in hidden and isinstance(getattr(cls, name), property)
    ]


def _plain(value: Any) -> Any:
    """Convert an attribute from TensorRT types: enum members to names, dims to tuples, unset dims to None."""
    if hasattr(type(value), "__members__"):
        return value.name
    if type(value).__name__ in ("Dims", "Dims2", "Dims3", "Dims4", "DimsHW", "Permutation"):
        try:
            return tuple(value)
        except ValueError:  # rank -1
            return None
    return value
