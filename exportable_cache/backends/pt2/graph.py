"""Build a runnable module from a graph of a `.pt2` file.

torch's loader evaluates expressions, resolves any name, unpickles inputs, and puts names from the file into Python
source that it runs. This reader uses only what computes: nodes and their tensors. It ignores descriptions, such as
symbolic sizes, source positions and guards. Names from the file never reach generated code: every node gets a new name.
"""

from __future__ import annotations

import keyword
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn

from ...common.compat.torch import OpOverload, operator_arguments
from ...errors import BundleError
from .contents import DTYPES, LAYOUTS, MEMORY_FORMATS
from .operators import check_kind, checked, operator_named

#: Devices that a graph may name.
_DEVICES = ("cpu", "cuda", "mps", "xpu")
_MOST_DEVICES = 64
_KEYWORD = 2
_LEAST, _GREATEST = -(2**63), 2**63 - 1
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
#: Field with the tensor name, for kinds of inputs that are tensors of the file.
_STORED = {
    "parameter": "parameter_name",
    "buffer": "buffer_name",
    "tensor_constant": "tensor_constant_name",
}


def build_module(stored: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> fx.GraphModule:
    """Build the module of a program: `module(*user_inputs)` returns a tuple of outputs, caches as flat tensors.

    Args:
        stored: `graph_module` of the file, parsed from JSON.
        tensors: Weights, buffers and constants by their names in the signature.

    Raises:
        BundleError: If it calls a function that is not allowed, or has a part that no program of ours has.
        KeyError, TypeError, ValueError, IndexError: If it is malformed.
    """
    signature, graph = stored["signature"], stored["graph"]
    if not len(signature["input_specs"]) == len(graph["inputs"]):
        raise ValueError("inputs and signature differ in number")
    reader = _GraphReader()
    for given, spec in zip(graph["inputs"], signature["input_specs"], strict=True):
        kind, described = _only(spec)
        name = _name(given)
        if kind in _STORED:
            reader.values[name] = reader.attribute(tensors[described[_STORED[kind]]])
        elif kind == "user_input":
            reader.values[name] = reader.graph.placeholder(f"input_{len(reader.values)}")
        else:
            raise BundleError(f"a graph has an input of kind {kind!r:.40}, which no program of ours has")
    kinds = {_only(spec)[0] for spec in signature["output_specs"]}
    if kinds - {"user_output"}:
        raise BundleError(f"a graph has outputs of kind {sorted(kinds)}; those of ours are of kind 'user_output'")
    return reader.finish(graph, as_tuple=True)


def _only(union: Mapping[str, Any]) -> tuple[str, Any]:
    """Return kind and value of a union, which torch writes as a mapping of one entry."""
    ((kind, value),) = union.items()
    return kind, value


def _name(argument: Mapping[str, Any]) -> str:
    """Return the name of the value that an argument refers to."""
    kind, value = _only(argument)
    if kind == "as_tensor":
        return value["name"]
    if kind in ("as_sym_int", "as_sym_float", "as_sym_bool"):
        return value["as_name"]
    raise BundleError(f"a graph has {kind!r:.40} where a tensor or a size is expected")


class _GraphReader:
    """Builds one graph and the module of its tensors."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.root = nn.Module()
        #: Nodes by their names in the file.
        self.values: dict[str, fx.Node] = {}
        self._attributes = 0

    def attribute(self, value: torch.Tensor | nn.Module) -> fx.Node:
        """Add a tensor or a module to the root and return a node for it."""
        name = f"held_{self._attributes}"
        self._attributes += 1
        if isinstance(value, nn.Module):
            self.root.add_module(name, value)
        else:
            self.root.register_buffer(name, value)
        return self.graph.get_attr(name)

    def finish(self, stored: Mapping[str, Any], as_tuple: bool) -> fx.GraphModule:
        """Read the nodes and outputs of a graph whose inputs are known."""
        for node in stored["nodes"]:
            self._node(node)
        outputs = tuple(self._value(output) for output in stored["outputs"])
        self.graph.output(outputs if as_tuple else outputs[0])
        return fx.GraphModule(self.root, self.graph)

    def _node(self, node: Mapping[str, Any]) -> None:
        target, outputs = node["target"], node["outputs"]
        called = operator_named(target)
        args, kwargs = self._arguments(called, node["inputs"])
        result = self.graph.call_function(checked(called), args, kwargs)
        packed = target.startswith("torch.ops.higher_order.") and node.get("is_hop_single_tensor_return") is False
        if len(outputs) == 1 and not packed and _only(outputs[0])[0] != "as_tensors":
            self._bind(outputs[0], result)
        elif len(outputs) == 1 and not packed:
            self._bind_each(({"as_tensor": item} for item in outputs[0]["as_tensors"]), result)
        else:
            self._bind_each(outputs, result)

    def _bind(self, output: Mapping[str, Any], result: fx.Node) -> None:
        kind, value = _only(output)
        if kind == "as_none":
            return
        if kind == "as_tensors":
            self._bind_each(({"as_tensor": item} for item in value), result)
            return
        name = _name(output)
        if name in self.values:
            raise ValueError(f"two values have the name {name!r:.40}")
        self.values[name] = result

    def _bind_each(self, outputs: Iterable[Mapping[str, Any]], result: fx.Node) -> None:
        for index, output in enumerate(outputs):
            if _only(output)[0] != "as_none":
                self._bind(output, self.graph.call_function(operator.getitem, (result, index)))

    def _arguments(
        self, called: Callable[..., Any], inputs: Iterable[Mapping[str, Any]]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not isinstance(called, OpOverload):
            # Arithmetic on sizes and what takes graphs: by position.
            return tuple(self._value(item["arg"]) for item in inputs), {}
        given = {item["name"]: item for item in inputs}
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        in_order = True
        for argument in operator_arguments(called):
            item = given.pop(argument.name, None)
            if item is None:
                in_order = False
                continue
            check_kind(called, argument, _only(item["arg"])[0])
            if in_order and not argument.kwarg_only and item.get("kind") != _KEYWORD:
                args.append(self._value(item["arg"]))
            elif keyword.iskeyword(argument.name):
                raise ValueError(f"{called} is given {argument.name!r} by name")
            else:
                in_order = False
                kwargs[argument.name] = self._value(item["arg"])
        if given:
            raise ValueError(f"{called} takes no {', '.join(map(repr, given))}")
        return tuple(args), kwargs

    def _value(self, argument: Mapping[str, Any]) -> Any:
        kind, value = _only(argument)
        if kind == "as_none":
            return None
        if kind == "as_tensor":
            return self.values[value["name"]]
        if kind in ("as_sym_int", "as_sym_float", "as_sym_bool"):
            return self._size(value)
        if kind in ("as_sym_ints", "as_sym_floats", "as_sym_bools"):
            return [self._size(item) for item in value]
        if kind == "as_tensors":
            return [self.values[item["name"]] for item in value]
        if kind in ("as_optional_tensors", "as_optional_tensor"):
            return [self._optional(item) for item in value] if kind.endswith("s") else self._optional(value)
        if kind == "as_graph":
            return self._subgraph(value["graph"])
        if kind == "as_device":
            return _device(value)
        if kind in _CODES:
            return _CODES[kind][value]
        if kind in _PLAIN:
            return _plain(value, _PLAIN[kind])
        if kind.endswith("s") and kind[:-1] in _PLAIN:
            return [_plain(item, _PLAIN[kind[:-1]]) for item in value]
        raise BundleError(f"a graph has an argument of kind {kind!r:.40}, which no program of ours has")

    def _optional(self, argument: Mapping[str, Any]) -> fx.Node | None:
        kind, value = _only(argument)
        if kind not in ("as_tensor", "as_none"):
            raise ValueError(f"{kind!r:.40} is not a tensor")
        return None if kind == "as_none" else self.values[value["name"]]

    def _size(self, value: Mapping[str, Any]) -> Any:
        kind, given = _only(value)
        if kind == "as_name":
            return self.values[given]
        return _plain(given, _PLAIN[kind])

    def _subgraph(self, stored: Mapping[str, Any]) -> fx.Node:
        reader = _GraphReader()
        for given in stored["inputs"]:
            reader.values[_name(given)] = reader.graph.placeholder(f"input_{len(reader.values)}")
        return self.attribute(reader.finish(stored, as_tuple=not stored.get("is_single_tensor_return")))


_CODES: dict[str, Mapping[Any, Any]] = {
    "as_scalar_type": DTYPES,
    "as_layout": LAYOUTS,
    "as_memory_format": MEMORY_FORMATS,
}
_PLAIN: dict[str, type] = {"as_int": int, "as_float": float, "as_bool": bool, "as_string": str}


def _plain(value: Any, kind: type) -> Any:
    """Return a number or text after checking that it has exactly this type."""
    if kind is float and isinstance(value, str):
        return _FLOATS[value]
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{value!r:.40} is not of type {kind.__name__}")
    if type(value) is int and not _LEAST <= value <= _GREATEST:
        raise ValueError(f"{value!r:.40} does not fit in 64 bits")
    return value


def _device(value: Mapping[str, Any]) -> torch.device:
    kind, index = value["type"], value.get("index")
    if kind not in _DEVICES or not (index is None or (type(index) is int and 0 <= index < _MOST_DEVICES)):
        raise ValueError(f"a device must be one that a program of ours has, got {value!r:.60}")
    return torch.device(kind) if index is None else torch.device(kind, index)
