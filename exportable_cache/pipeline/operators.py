"""Operators that bundles need, as a list that the C++ runner is built from: `-DEC_OPERATORS=FILE` of `runners/cpp`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..backends.executorch.pte.instructions import called_operators
from ..backends.executorch.pte.kernels import WHOLE_LIBRARIES, KernelSignature, is_in_runtime, signatures_of
from ..backends.executorch.target import FILE as PROGRAM_FILE
from ..bundle.builder import cannot_write
from ..common.fs.files import atomic_path
from ..errors import BundleError

if TYPE_CHECKING:
    from ..bundle.bundle import Bundle

_HEADER = """\
# Operators that {bundles} call.
# For CMake of runners/cpp: -DEC_OPERATORS=this file. Each line: operator, kernel, number of outputs, argument types;
# of a library that is linked whole, the operator alone.
"""


@dataclass(frozen=True)
class OperatorList:
    """What the programs of some bundles call.

    Attributes:
        signatures: Of the kernels that are registered one by one, by operator.
        whole: Operators of libraries that are linked whole.
    """

    signatures: tuple[KernelSignature, ...]
    whole: tuple[str, ...]

    @property
    def operators(self) -> list[str]:
        return sorted([*(signature.operator for signature in self.signatures), *self.whole])


def list_operators(bundles: Sequence[Bundle]) -> OperatorList:
    """The operators of all these bundles.

    Raises:
        BundleError: If one is for another target than ExecuTorch, or its program is damaged.
        InputError: If the installed executorch has no kernel for one of the operators.
    """
    called: set[str] = set()
    for bundle in bundles:
        if bundle.manifest.target != "executorch":
            raise BundleError(f"{bundle.path} is for {bundle.manifest.target}; export it with --target executorch")
        called |= called_operators(bundle.path / PROGRAM_FILE)
    called = {name for name in called if not is_in_runtime(name)}
    whole = {name for name in called if name.split("::")[0] in WHOLE_LIBRARIES}
    return OperatorList(tuple(signatures_of(sorted(called - whole))), tuple(sorted(whole)))


def write_list(operators: OperatorList, bundles: Sequence[Bundle], path: str | os.PathLike) -> None:
    """Write the file that `EC_OPERATORS` names.

    Raises:
        BundleError: If it cannot be written.
    """
    lines = [f"{one.operator} {one.kernel} {one.outputs} {', '.join(one.arguments)}" for one in operators.signatures]
    names = ", ".join(bundle.path.resolve().name for bundle in bundles).replace("\n", " ")
    text = _HEADER.format(bundles=names) + "".join(f"{line}\n" for line in sorted([*lines, *operators.whole]))
    try:
        with atomic_path(Path(path)) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise cannot_write(Path(path), error) from error
