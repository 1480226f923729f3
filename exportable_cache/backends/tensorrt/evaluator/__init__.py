"""Reference evaluator of TensorRT network definitions, in torch on a CPU."""

from . import elementwise, products, shapes  # noqa: F401  registers
from .evaluator import NetworkEvaluator

__all__ = ["NetworkEvaluator"]
