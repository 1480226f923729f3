"""Target `tensorrt`: one engine per method, its cache written in place, built and checked without a GPU."""

from .target import TensorRTBackend

backend = TensorRTBackend()

__all__ = ["TensorRTBackend", "backend"]
