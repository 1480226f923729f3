"""Run an ExecuTorch bundle of exportable-cache without torch: the C++ runner, by its C interface."""

from .failures import Failure, Status
from .options import Options, Statistics, Stop
from .session import Session

__all__ = ["Failure", "Options", "Session", "Statistics", "Status", "Stop"]
