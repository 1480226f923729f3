"""Operators of this package's compiled kernels, and the build of those kernels."""
