"""Fixtures of what is compiled."""

from ..support.compiling import inductor, loaded  # noqa: F401
