"""An exported method in regions, equal ones compiled once: what `backends/regions.py` does for graphs of live sessions.

Weights, constants and the cache are inputs of a region as hidden states are, so the code of one layer serves all that
are equal to it, in every method that has it with the same sizes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.fx import GraphModule, Node

from ...common.compat.torch import METADATA_ASSERTION
from ...common.compat.torch_aoti import compile_ahead_of_time
from ..live.ops.onednn import linears_by_onednn
from ..regions import Region, regions_of, value_of
from .table import Call, Method

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_STORED = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


class RegionalCompiler:
    """Compiles methods, and each region that several have in common once.

    Attributes:
        files: What AOTInductor wrote for each region.
    """

    def __init__(self) -> None:
        self.files: list[list[str]] = []
        # Operators go along: the texts tell them apart by identity.
        self._numbers: dict[str, tuple[int, list[object]]] = {}

    @torch.no_grad()
    def method(self, program: ExportedProgram, stored_name: Callable[[str], str]) -> Method:
        """Compile what is new of a method.

        Args:
            program: It.
            stored_name: Given the name that a weight, constant or cache tensor has in the program, its name among all
                methods' tensors.

        Returns:
            Its calls. A method that has no equal layers or cannot be cut is one call of code of its own, which is not
            given tensors in every call: it holds them.
        """
        names = _names(program)
        module = GraphModule(program.graph_module, copy.deepcopy(program.graph))
        for node in module.graph.find_nodes(op="call_function", target=METADATA_ASSERTION):
            module.graph.erase_node(node)
        regions = regions_of(module, own_sizes=True) if names is not None else []
        # What a method gives as it came is no region's.
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
        places = {node: index for index, node in enumerate(inputs)}
        places.update({node: len(inputs) + tensors.index(names[node.name]) for node in held})
        results = _results(module)
        last = {source: index for index, region in enumerate(regions) for source in region.inputs}
        end, calls = len(inputs) + len(tensors), []
        for index, region in enumerate(regions):
            done = [
                places[node]
                for node in region.inputs
                if last[node] == index and node.op != "placeholder" and node not in results
            ]
            for node in region.outputs:
                places[node] = end
                end += 1
            calls.append(
                Call(
                    region=self._number(module, region),
                    sources=[places[node] for node in region.inputs],
                    results=len(region.outputs),
                    done=done,
                )
            )
        return Method(inputs=len(inputs), tensors=tensors, calls=calls, outputs=[places[node] for node in results])

    def _number(self, module: GraphModule, region: Region) -> int:
        if region.text not in self._numbers:
            files = compile_ahead_of_time(region.module(module), (tuple(region.examples()), {}))
            self.files.append(files)
            self._numbers[region.text] = len(self.files) - 1, [node.target for node in region.nodes]
        return self._numbers[region.text][0]


def _names(program: ExportedProgram) -> dict[str, str] | None:
    """Placeholder of each weight, constant and cache tensor: its name. None of a program that is given something else,
    or gives it.
    """
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


def _results(module: GraphModule) -> list[Node]:
    return list(cast(Any, module.graph.output_node().args[0]))


def _takes_tensors(region: Region) -> bool:
    return all(isinstance(value_of(node), torch.Tensor) for node in (*region.inputs, *region.outputs))
