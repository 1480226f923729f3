"""Reference evaluator of TensorRT network definitions, in torch on a CPU."""

from . import attention, convolution, elementwise, indexing, kv_cache, products, reductions, shapes, slices, sources  # noqa: F401  registers
from .evaluator import NetworkEvaluator

__all__ = ["NetworkEvaluator"]
