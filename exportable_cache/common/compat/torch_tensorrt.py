"""Private names of torch_tensorrt, seen in 2.13.0. Only `backends.tensorrt.upstream` can import them.

| name | without it |
|---|---|
| `torch_tensorrt.dynamo._settings.CompilationSettings` | a network has no build settings |
| `torch_tensorrt.dynamo.conversion._conversion.infer_module_output_dtypes` | TensorRT chooses the dtypes of outputs |
| `torch_tensorrt.dynamo.conversion._ConverterRegistry.DYNAMO_CONVERTERS` | lacking converters are not known |
| `torch_tensorrt.dynamo.conversion._TRTInterpreter.TRTInterpreter` | no network without an engine |
| `TRTInterpreter._construct_trt_network_def`, `_populate_trt_builder_config` | the same |
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def conversion() -> SimpleNamespace:
    """Return CompilationSettings, infer_module_output_dtypes, DYNAMO_CONVERTERS and TRTInterpreter."""
    from torch_tensorrt.dynamo._settings import CompilationSettings
    from torch_tensorrt.dynamo.conversion._conversion import infer_module_output_dtypes
    from torch_tensorrt.dynamo.conversion._ConverterRegistry import DYNAMO_CONVERTERS
    from torch_tensorrt.dynamo.conversion._TRTInterpreter import TRTInterpreter

    return SimpleNamespace(
        CompilationSettings=CompilationSettings,
        infer_module_output_dtypes=infer_module_output_dtypes,
        DYNAMO_CONVERTERS=DYNAMO_CONVERTERS,
        TRTInterpreter=TRTInterpreter,
    )


def construct_network(interpreter: Any) -> None:
    """Convert the graph of a `TRTInterpreter` to a network, without building an engine."""
    interpreter._construct_trt_network_def()


def builder_config(interpreter: Any) -> Any:
    """Return TensorRT's builder config for the settings of a `TRTInterpreter`."""
    return interpreter._populate_trt_builder_config()
