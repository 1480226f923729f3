"""Import torch_tensorrt with or without a GPU, and on torch with or without CUDA; no other module imports it.

torch_tensorrt 2.13.0 asks torch.cuda for a device while it is imported, although building a network and a plan needs
none (https://github.com/pytorch/TensorRT, py/torch_tensorrt/_enums.py and _Device.py). These queries are answered
during the import only. With a GPU, nothing is patched.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from ...common.compat.torch import cuda_properties, without_fake_classes
from ...common.compat.torch_tensorrt import conversion
from ...common.patch import torch_patch

_NO_DEVICE = "it fails where there is no GPU, and torch_tensorrt calls it while it is imported"
_CAPABILITY = torch_patch("cuda", "get_device_capability", _NO_DEVICE, "bbba0f873dce8dbc")
_DEVICE = torch_patch("cuda", "current_device", _NO_DEVICE, "c3055302ad3eb33f")
#: Functions of torch that are replaced while torch_tensorrt is imported.
PATCHES = (_CAPABILITY, _DEVICE)
# They link libtorch_cuda. Without CUDA they are hidden, so that torch_tensorrt takes its branch for "no C++ runtime".
_CUDA_LIBRARIES = frozenset({"libtorchtrt.so", "libtorchtrt_runtime.so"})


@contextmanager
def fake_cuda_queries() -> Iterator[None]:
    """Answer the import's queries of torch.cuda inside the block, unless there is a GPU."""
    if torch.cuda.is_available():
        yield
        return
    is_file = os.path.isfile
    with ExitStack() as stack:
        stack.enter_context(_CAPABILITY.during(lambda original: lambda *args, **kwargs: (0, 0)))
        stack.enter_context(_DEVICE.during(lambda original: lambda: 0))
        if torch.version.cuda is None:
            stack.enter_context(
                mock.patch.object(
                    os.path, "isfile", lambda path: os.path.basename(str(path)) not in _CUDA_LIBRARIES and is_file(path)
                )
            )
            stack.enter_context(cuda_properties())
        yield


@contextmanager
def _quiet_import() -> Iterator[None]:
    """Suppress the import's messages about unused features (no C++ runtime, no modelopt, no TensorRT-LLM).

    The import also redirects the warnings of the process to its logger, which is undone.
    """
    previous, show = logging.root.manager.disable, warnings.showwarning
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(previous)
        if warnings.showwarning is not show:
            logging.captureWarnings(False)


with _quiet_import(), fake_cuda_queries():
    # torch_tensorrt comes first: it puts tensorrt_rtx under the name tensorrt where that is installed
    # isort: off
    import torch_tensorrt
    import tensorrt as trt

    # isort: on
    from torch_tensorrt.dynamo.conversion import ConversionContext, ConverterPriority, dynamo_tensorrt_converter
    from torch_tensorrt.dynamo.conversion.converter_utils import cast_trt_tensor, get_trt_tensor, set_layer_name
    from torch_tensorrt.dynamo.lowering import get_decompositions, post_lowering, pre_export_lowering
    from torch_tensorrt.dynamo.partitioning import construct_submodule_inputs

    _private = conversion()
    CompilationSettings, TRTInterpreter = _private.CompilationSettings, _private.TRTInterpreter
    DYNAMO_CONVERTERS, infer_module_output_dtypes = _private.DYNAMO_CONVERTERS, _private.infer_module_output_dtypes

__all__ = [
    "DYNAMO_CONVERTERS",
    "CompilationSettings",
    "ConversionContext",
    "ConverterPriority",
    "TRTInterpreter",
    "fake_cuda_queries",
    "cast_trt_tensor",
    "construct_submodule_inputs",
    "dynamo_tensorrt_converter",
    "get_decompositions",
    "get_trt_tensor",
    "infer_module_output_dtypes",
    "post_lowering",
    "pre_export_lowering",
    "register_engine_operator",
    "set_layer_name",
    "torch_tensorrt",
    "trt",
]


def register_engine_operator() -> None:
    """Register `torch.ops.tensorrt.no_op_placeholder_for_execute_engine`, which holds a plan in a graph.

    Its module also describes the C++ engine class, which exists only if torch_tensorrt's library loads.
    """
    has_engines = torch_tensorrt.ENABLED_FEATURES.torch_tensorrt_runtime
    with ExitStack() as stack:
        if not has_engines:
            stack.enter_context(without_fake_classes())
        from torch_tensorrt.dynamo.runtime.meta_ops import register_meta_ops  # noqa: F401


_LOGGER = "torch_tensorrt [TensorRT Conversion Context]"

# Ignored: after every error TensorRT queries the CUDA runtime, which fails without a GPU, and torch_tensorrt's slice
# converter gives several layers one name.
_NOISE = re.compile(r"catchCudaError|Failed attempt to rename a layer")


class _Collector(logging.Filter):
    """Log filter that collects errors and shows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        """Collect an error."""
        message = record.getMessage()
        if record.levelno >= logging.ERROR and not _NOISE.search(message):
            self.errors.append(message)
        return False


@contextmanager
def collected_errors() -> Iterator[list[str]]:
    """Yield the errors that TensorRT logs inside the block, in order, for error messages.

    Nothing of its log is shown.
    """
    logger, collector = logging.getLogger(_LOGGER), _Collector()
    logger.addFilter(collector)
    try:
        yield collector.errors
    finally:
        logger.removeFilter(collector)
