"""What the manifest says of an engine. A plan shows none of it without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from ...errors import BundleError
from .options import describe_capabilities
from .signature import STATE_IN

#: Field of a file's details that lists its engines.
ENGINES = "engines"


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Input(_Entry):
    """A network input with its optimisation profile: the three shapes are equal where it is static."""

    name: str
    dtype: str
    min_shape: list[int]
    opt_shape: list[int]
    max_shape: list[int]


class Output(_Entry):
    """A network output; -1 stands for a size known at run time only."""

    name: str
    dtype: str
    shape: list[int]


class EngineRecord(_Entry):
    """One engine.

    Attributes:
        method: Which it runs.
        inputs, outputs: To be bound by name.
        aliases: Output name -> name of the input whose memory it shares: both are bound to one address.
        capabilities: It was built for, as 80; none for TensorRT's portable default.
        layers: Number of network layers by kind.
        network: sha256 of what the plan was built from, see `Network.digest`.
        builder: TensorRT package and version.
    """

    method: str
    inputs: list[Input]
    outputs: list[Output]
    aliases: dict[str, str]
    capabilities: list[int]
    layers: dict[str, int]
    network: str
    builder: str

    @property
    def built_for(self) -> str:
        """`SM 80, 86`."""
        return describe_capabilities(self.capabilities)

    @property
    def state(self) -> list[Input]:
        """The inputs that hold the cache."""
        return [tensor for tensor in self.inputs if tensor.name.startswith(STATE_IN)]


def details_of(*records: EngineRecord) -> dict[str, Any]:
    """What a file that holds these engines has in the manifest."""
    return {ENGINES: [record.model_dump() for record in records]}


def records_of(details: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, EngineRecord]]:
    """File name and record of each method's engine.

    Args:
        details: By file name, as `details_of` made them; files without engines are passed over.

    Raises:
        BundleError: If one does not describe an engine.
    """
    records = {}
    for file, fields in details.items():
        for entry in fields.get(ENGINES, []):
            try:
                record = EngineRecord.model_validate(entry)
            except ValidationError as error:
                where = ".".join(str(part) for part in error.errors()[0]["loc"])
                raise BundleError(
                    f"the manifest does not describe the engine in {file}: {where}; export the model again"
                ) from error
            records[record.method] = (file, record)
    return records
