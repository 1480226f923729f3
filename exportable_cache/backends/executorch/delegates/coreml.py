"""The delegate Core ML, for Apple's devices."""

from __future__ import annotations

import warnings
from typing import Any


def partitioner() -> Any:
    """Return the partitioner of the delegate."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import coremltools
        from executorch.backends.apple.coreml.compiler import CoreMLBackend
        from executorch.backends.apple.coreml.partition import CoreMLPartitioner

    specs = CoreMLBackend.generate_compile_specs(
        # The first version with state inside a model.
        minimum_deployment_target=coremltools.target.iOS18,
        compute_precision=coremltools.precision.FLOAT32,
    )
    return CoreMLPartitioner(compile_specs=specs, take_over_mutable_buffer=True)
