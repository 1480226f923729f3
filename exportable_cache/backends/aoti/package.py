"""Compile the methods of a program into one package without constants, and write the constants to one file.

By default AOTInductor copies every constant, the cache included, into each compiled model. This package manages none:
the loader passes tensors, and several models get the same ones. So they share the weights and
one cache.

Methods with equal layers are split into regions, like the graphs of live sessions (`backends/live/regions.py`).
Weights, constants and the cache are inputs of a region, so the code of one layer serves all equal layers of all
methods.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.fx import GraphModule, Node

from ...common.compat.torch import METADATA_ASSERTION, OpOverload, load_machine_code
from ...common.compat.torch_aoti import call_products_in_cpp, compile_ahead_of_time, write_package
from ...errors import UnsupportedModelError
from ...models.layers.specs import vocab_size_of
from ..live.ops.linear import linears_by_onednn
from ..live.regions import Region, regions_of, value_of
from .runner import VERSION, Call, Method, Table, region_name

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from ...program.program import Program


def compile_methods(path: Path, programs: Mapping[str, ExportedProgram]) -> tuple[Table, dict[str, torch.Tensor]]:
    """Compile every program and write one package without constants.

    Args:
        path: Path of the package, ending in `.pt2`.
        programs: Programs by method name.

    Returns:
        The table of calls, and the tensors that they need by name: weights, constants and cache tensors.
    """
    compiler, named = RegionalCompiler(), _Named()
    methods = {name: compiler.method(program, named.of(name, program)) for name, program in programs.items()}
    write_package(path, {region_name(index): files for index, files in enumerate(compiler.files)})
    users = {call.region: name for name, method in methods.items() for call in method.calls}
    regions = []
    for index in range(len(compiler.files)):
        method = users[index]
        stored_name = named.of(method, programs[method])
        held = load_machine_code(path, region_name(index)).get_constant_fqns()
        regions.append({name: stored_name(name) for name in sorted(held)})
    table = Table(version=VERSION, regions=regions, methods=methods)
    return table, {name: named.tensors[name] for name in table.tensors()}


class _Named:
    """Names for the tensors of all methods. A constant whose values differ between methods gets a name for each.

    Attributes:
        tensors: The tensors by name.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def of(self, method: str, program: ExportedProgram) -> Callable[[str], str]:
        """Return the function from a name in one method to the name in all methods."""
        tensors = {**{k: v for k, v in program.constants.items() if isinstance(v, torch.Tensor)}, **program.state_dict}

        def stored_name(name: str) -> str:
            tensor = tensors[name].detach()
            found = self.tensors.setdefault(name, tensor)
            if found is tensor or _same(found, tensor):
                return name
            self.tensors.setdefault(f"{method}/{name}", tensor)
            return f"{method}/{name}"

        return stored_name


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() or torch.equal(one, other)


def write_constants(path: Path, program: Program, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the tensors that the methods need, readable by `torch.load` and by C++'s `torch::pickle_load`.

    The file is a dict. `weights` has tensors by name, tied ones stored once. `state` has the cache tensors by name,
    each as one zero expanded to its shape, so that they take no space; the loader allocates them. `methods` has the
    shortest, longest and read length of each method, and `limits` the limits of the inputs.

    Args:
        path: Path of the file.
        program: The program of the methods.
        tensors: All tensors that the methods need, the cache's included.
    """
    state = {
        f"layers_{name.removeprefix('layers.').replace('.', '_')}": tensor
        for name, tensor in program.cache.named_state()
    }
    torch.save(
        {
            "weights": {name: tensors[name] for name in sorted(tensors) if name not in state},
            "state": {
                name: torch.zeros(1, dtype=tensor.dtype).expand(tensor.shape)
                for name, tensor in state.items()
                if name in tensors
            },
            "methods": {
                name: (method.min_length, method.max_length, method.kv_read_len)
                for name, method in program.methods.items()
            },
            "limits": {
                "batch_size": program.batch_size,
                "vocab_size": vocab_size_of(program.model),
                "max_length": program.cache.max_length,
            },
        },
        path,
    )


#: Namespaces of operators that torch implements in C++.
_OF_TORCH = ("aten", "prims", "mkldnn", "_c10d_functional")
_STORED = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


class RegionalCompiler:
    """Compiles methods, and each region that several methods share once.

    Attributes:
        files: Files written by AOTInductor for each region.
    """

    def __init__(self) -> None:
        self.files: list[list[str]] = []
        # The operators are kept alive, because the texts contain their ids.
        self._indices: dict[str, tuple[int, list[object]]] = {}

    @torch.no_grad()
    def method(self, program: ExportedProgram, stored_name: Callable[[str], str]) -> Method:
        """Compile the regions of a method that are not compiled yet.

        Args:
            program: The method's program.
            stored_name: Maps the name of a weight, constant or cache tensor in the program to its name among the
                tensors of all methods.

        Returns:
            The calls of the method. A method without equal layers, or one that cannot be split, is one call of code
            that holds its tensors.
        """
        # In the program itself, of which a method's regions and a method as a whole are copies.
        call_products_in_cpp(program.graph_module)
        check_operators(program.graph_module)
        names = _names(program)
        module = GraphModule(program.graph_module, copy.deepcopy(program.graph))
        for node in module.graph.find_nodes(op="call_function", target=METADATA_ASSERTION):
            module.graph.erase_node(node)
        regions = regions_of(module, local_sizes=True) if names is not None else []
        # A method that returns an input is compiled whole, because no region computes that output.
        given = any(node.op == "placeholder" for node in _results(module))
        if names is None or not regions or given or not all(map(_takes_tensors, regions)):
            return self._whole(program)
        linears_by_onednn(module)
        return self._in_regions(module, regions, {node: stored_name(name) for node, name in names.items()})

    def _whole(self, program: ExportedProgram) -> Method:
        module = program.module(check_guards=False)
        linears_by_onednn(module)
        self.files.append(compile_ahead_of_time(module, program.example_inputs))
        count = len(program.graph_signature.user_outputs)
        inputs = len(program.graph_signature.user_inputs)
        call = Call(region=len(self.files) - 1, sources=list(range(inputs)), results=count)
        return Method(inputs=inputs, tensors=[], calls=[call], outputs=list(range(inputs, inputs + count)))

    def _in_regions(self, module: GraphModule, regions: Sequence[Region], names: dict[str, str]) -> Method:
        read = {node for region in regions for node in region.inputs}
        placeholders = module.graph.find_nodes(op="placeholder")
        inputs = [node for node in placeholders if node.name not in names]
        held = [node for node in placeholders if node.name in names and node in read]
        tensors = list(dict.fromkeys(names[node.name] for node in held))
        slots = {node: index for index, node in enumerate(inputs)}
        slots.update({node: len(inputs) + tensors.index(names[node.name]) for node in held})
        results = _results(module)
        last = {source: index for index, region in enumerate(regions) for source in region.inputs}
        end, calls = len(inputs) + len(tensors), []
        for index, region in enumerate(regions):
            done = [
                slots[node]
                for node in region.inputs
                if last[node] == index and node.op != "placeholder" and node not in results
            ]
            for node in region.outputs:
                slots[node] = end
                end += 1
            calls.append(
                Call(
                    region=self._compiled_index(module, region),
                    sources=[slots[node] for node in region.inputs],
                    results=len(region.outputs),
                    done=done,
                )
            )
        return Method(inputs=len(inputs), tensors=tensors, calls=calls, outputs=[slots[node] for node in results])

    def _compiled_index(self, module: GraphModule, region: Region) -> int:
        if region.text not in self._indices:
            files = compile_ahead_of_time(region.module(module), (tuple(region.examples()), {}))
            self.files.append(files)
            self._indices[region.text] = len(self.files) - 1, [node.target for node in region.nodes]
        return self._indices[region.text][0]


def _names(program: ExportedProgram) -> dict[str, str] | None:
    """Return the stored tensors' names by placeholder, None for inputs or outputs of another kind."""
    names = {}
    for spec in program.graph_signature.input_specs:
        if not isinstance(spec.arg, TensorArgument) or spec.kind not in (*_STORED, InputKind.USER_INPUT):
            return None
        if spec.kind in _STORED:
            names[spec.arg.name] = str(spec.target)
    specs = program.graph_signature.output_specs
    if any(not isinstance(spec.arg, TensorArgument) or spec.kind != OutputKind.USER_OUTPUT for spec in specs):
        return None
    return names


def check_operators(module: GraphModule) -> None:
    """Refuse operators of packages, whose Python code the machine code would need where it is opened.

    Raises:
        UnsupportedModelError: If there is one.
    """
    for node in module.graph.nodes:
        if isinstance(node.target, OpOverload) and node.target.namespace not in _OF_TORCH:
            raise UnsupportedModelError(
                f"target aoti compiles operators of torch only, and the model calls {node.target.name()}; export for "
                "target executorch or pt2"
            )


def _results(module: GraphModule) -> list[Node]:
    return list(cast(Any, module.graph.output_node().args[0]))


def _takes_tensors(region: Region) -> bool:
    return all(isinstance(value_of(node), torch.Tensor) for node in (*region.inputs, *region.outputs))
