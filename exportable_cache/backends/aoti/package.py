"""A package of machine code, and the one file of constants that all of it is given at load time.

AOTInductor keeps a copy of every constant in each compiled model, the cache among them, unless it is told to manage
none: then whoever loads the package hands in tensors, and the same tensor may be handed to several models. Weights are
shared in this way, and so is the cache: the models write it in place, through the pointer they were given. Regions are
given both as inputs, see `RegionalCompiler`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.fx import GraphModule, Node

from ...common.compat.torch import METADATA_ASSERTION, load_machine_code
from ...common.compat.torch_aoti import compile_ahead_of_time, write_package
from ...models.layers.specs import vocab_size_of
from ..live.ops.linear import linears_by_onednn
from ..live.regions import Region, regions_of, value_of
from .runner import VERSION, Call, Method, Table, region_name

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from ...program.program import Program


def compile_methods(path: Path, programs: Mapping[str, ExportedProgram]) -> tuple[Table, dict[str, torch.Tensor]]:
    """Compile every program and write them as one package without constants.

    Args:
        path: The package, ending in `.pt2`.
        programs: By method name.

    Returns:
        What the methods call, and the tensors that they must be given, by name: weights, constants and cache tensors.
    """
    compiler, named = RegionalCompiler(), _Named()
    methods = {name: compiler.method(program, named.of(name, program)) for name, program in programs.items()}
    write_package(path, {region_name(number): files for number, files in enumerate(compiler.files)})
    users = {call.region: name for name, method in methods.items() for call in method.calls}
    regions = []
    for number in range(len(compiler.files)):
        method = users[number]
        stored_name = named.of(method, programs[method])
        held = load_machine_code(path, region_name(number)).get_constant_fqns()
        regions.append({name: stored_name(name) for name in sorted(held)})
    table = Table(version=VERSION, regions=regions, methods=methods)
    return table, {name: named.tensors[name] for name in table.tensors()}


class _Named:
    """Names for the tensors of all methods: a constant that another method has with other values gets one of its own.

    Attributes:
        tensors: By name.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def of(self, method: str, program: ExportedProgram) -> Callable[[str], str]:
        """The names for one method's."""
        own = {**{k: v for k, v in program.constants.items() if isinstance(v, torch.Tensor)}, **program.state_dict}

        def stored_name(name: str) -> str:
            tensor = own[name].detach()
            found = self.tensors.setdefault(name, tensor)
            if found is tensor or _same(found, tensor):
                return name
            self.tensors.setdefault(f"{method}/{name}", tensor)
            return f"{method}/{name}"

        return stored_name


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() or torch.equal(one, other)


def write_constants(path: Path, program: Program, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write what the methods must be given, readable by `torch.load` and by C++'s `torch::pickle_load`.

    The file is a dict: `weights`, tensors by name, tied ones stored once; `state`, the cache tensors by name, each as
    one zero expanded to its shape, so that it takes no room and whoever loads it allocates them; `methods`, per name
    its shortest, longest and read length; and `limits`, the sizes that inputs are checked against.

    Args:
        path: The file.
        program: Of which the methods are.
        tensors: All that they need, the cache's among them.
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
