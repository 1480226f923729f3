"""Write and read one `.pt2` archive of several exported programs that share their weights and their cache.

It has torch's format, so torch's loader can open it; see `README.txt` inside. It is not written by torch's writer,
which repeats weights, pickles sample inputs, records paths of source files and aborts the process on a full disk. It is
not read by torch's loader, which can run code from the file (docs/security.md).
"""

from __future__ import annotations

import json
import re
import sys
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.compat.torch import serialized_program
from ...errors import BundleError, first_line
from ...pytree.registry import plain_spec, takes_own_classes
from .contents import SCHEMA_MAJOR, EntryReader, EntryWriter, TensorReader, TensorWriter, is_state
from .graph import build_module

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

_FOLDER = "program"
#: The name that `torch.export.load` looks for.
_DEFAULT = "model"
_FIXED = {"archive_format": "pt2", "archive_version": "0", "byteorder": sys.byteorder, ".data/version": "6\n"}
_README = "extra/README.txt"
_KNOWN = re.compile(
    r"models/\w+\.json|data/weights/(weight_\d+|\w+_weights_config\.json)|data/sample_inputs/\w+\.pt|"
    r"data/constants/(tensor_\d+|\w+_constants_config\.json)"
)
_README_TEXT = """\
A program of torch.export with its key-value cache, written by exportable_cache. The method `{default}` also has
the name `model`, so torch.export.load opens it. For all methods, over one cache:

    from torch.export.pt2_archive._package import load_pt2
    programs = load_pt2(path).exported_programs
    for program in programs.values(): program.constants.update(programs["model"].constants)

Import torchao.quantization.quant_primitives first if weights are quantised. torch's loader can run code from
the file; exportable_cache.load does not use it.
"""
_README_OF_EXPLICIT = """
The cache is the last input of a step, and the output after the logits. The other inputs are listed in manifest.json
for the method: input_ids int64 [batch, length] and input_pos int64 [batch], which starts at 0. The cache begins
as zeros:

    import json, torch
    layers = json.load(open("manifest.json"))["layers"]
    zeros = lambda tensor: torch.zeros(tensor["shape"], dtype=getattr(torch, tensor["dtype"]))
    cache = {"layers": [{name: zeros(tensor) for name, tensor in layer["tensors"].items()} for layer in layers]}
    logits, cache = programs["model"].module()(input_ids, input_pos, cache)
"""


@dataclass(frozen=True)
class StoredProgram:
    """A program of an archive.

    Attributes:
        module: Module that maps the inputs, with caches as flat tensors, to a tuple of outputs.
        state: Cache tensors by their names in the program.
        weights: The other tensors.
    """

    module: torch.nn.Module
    state: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def write_archive(path: Path, programs: Mapping[str, ExportedProgram], default: str | None = None) -> None:
    """Write programs exported from one module.

    Args:
        path: Path of the archive.
        programs: Programs by method name.
        default: Name of the program that `torch.export.load` returns; the first by default.

    Raises:
        OSError: If the disk is full, or the file cannot be written.
    """
    default = next(iter(programs)) if default is None else default
    with EntryWriter(path, _FOLDER) as entries:
        weights = TensorWriter(entries, "data/weights", "weight_")
        constants = TensorWriter(entries, "data/constants", "tensor_")
        for name, program in programs.items():
            texts = {
                "data/weights/{}_weights_config.json": json.dumps(weights.table(program.state_dict)),
                "data/constants/{}_constants_config.json": json.dumps(constants.table(program.constants)),
                "models/{}.json": json.dumps(_to_be_kept(serialized_program(program)), separators=(",", ":")),
                # Empty, because torch's loader unpickles this entry and accepts none.
                "data/sample_inputs/{}.pt": "",
            }
            for entry, text in texts.items():
                for method in (name, _DEFAULT) if name == default else (name,):
                    entries.write(entry.format(method), text.encode())
        explicit = _README_OF_EXPLICIT if any(takes_own_classes(program) for program in programs.values()) else ""
        entries.write(_README, (_README_TEXT.format(default=default) + explicit).encode())
        for entry, text in _FIXED.items():
            entries.write(entry, text.encode())


def _to_be_kept(stored: dict[str, Any]) -> dict[str, Any]:
    """Return a program without descriptions: source positions, guards and submodules.

    A cache among its inputs or outputs consists of dicts and lists, because torch's loader knows no class of this
    package.
    """
    module = stored["graph_module"]
    _forget_notes(module["graph"])
    module["module_call_graph"] = [entry for entry in module["module_call_graph"] if entry["fqn"] == ""]
    for entry in module["module_call_graph"]:
        for name in ("in_spec", "out_spec"):
            entry["signature"][name] = plain_spec(entry["signature"][name])
    return {**stored, "guards_code": []}


def _forget_notes(graph: dict[str, Any]) -> None:
    for node in graph["nodes"]:
        node["metadata"] = {}
        for item in node["inputs"]:
            if "as_graph" in item["arg"]:
                _forget_notes(item["arg"]["as_graph"]["graph"])


def read_archive(path: Path, declared: Collection[str] | None = None) -> dict[str, StoredProgram]:
    """Read what `write_archive` wrote: all programs over one set of weights and one zeroed cache.

    Args:
        path: Path of the archive.
        declared: Allowed names of cache tensors, such as `layers_0_keys`; any name by default.

    Raises:
        BundleError: If the file is not such an archive.
    """
    try:
        with EntryReader(path, _is_known) as entries:
            return _read(entries, declared)
    except BundleError as error:
        raise BundleError(f"cannot read the programs in {path.name}: {error}") from error
    except (OSError, zipfile.BadZipFile, RecursionError, MemoryError) as error:
        raise BundleError(f"cannot read the programs in {path.name}: {error}; export the model again") from error
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        RuntimeError,
        SyntaxError,
        TypeError,
        ValueError,
    ) as error:
        raise BundleError(
            f"cannot read the programs in {path.name}: {type(error).__name__}: {first_line(error)[:200]}; "
            "export the model again"
        ) from error


def _is_known(name: str) -> bool:
    return name in _FIXED or name == _README or _KNOWN.fullmatch(name) is not None


def _read(entries: EntryReader, declared: Collection[str] | None) -> dict[str, StoredProgram]:
    for name, text in _FIXED.items():
        if entries.text(name) != text:
            raise ValueError(f"{name} is {entries.text(name)!r:.20}, not {text!r}")
    methods = [name[len("models/") : -len(".json")] for name in entries.names if name.startswith("models/")]
    for name in entries.names:
        if name.startswith("data/sample_inputs/") and entries.size(name):
            raise BundleError(f"{name} holds a pickle, which can run code; do not trust this file, or export again")
    weights, constants = (TensorReader(entries, folder, declared) for folder in ("data/weights", "data/constants"))
    programs = {}
    for method in methods:
        if method == _DEFAULT and len(methods) > 1:
            continue  # a second name of one of the programs
        stored = json.loads(entries.text(f"models/{method}.json"))
        if stored["schema_version"]["major"] != SCHEMA_MAJOR:
            raise ValueError(f"schema {stored['schema_version']}, this release reads {SCHEMA_MAJOR}")
        tensors = {
            **weights.tensors(json.loads(entries.text(f"data/weights/{method}_weights_config.json"))),
            **constants.tensors(json.loads(entries.text(f"data/constants/{method}_constants_config.json"))),
        }
        programs[method] = StoredProgram(
            build_module(stored["graph_module"], tensors),
            {name: tensor for name, tensor in tensors.items() if is_state(name)},
            {name: tensor for name, tensor in tensors.items() if not is_state(name)},
        )
    return programs
