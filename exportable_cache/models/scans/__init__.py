"""Recurrences over a step of several tokens, without a loop over them and without asking how many they are.

Each starts from a state, gives the outputs and the next state, and is exact for any number of tokens, so one exported
graph serves a whole prompt, its continuation, and every length. Reference: the sequential recurrence, in tests/scans.
"""

from .bound import doublings, longest_step
from .delta_rule import delta_rule
from .matrix_memory import matrix_memory
from .selective import linear_recurrence, selective_scan
from .state_space import state_space_scan
from .weighted_values import weighted_values

__all__ = [
    "delta_rule",
    "doublings",
    "linear_recurrence",
    "longest_step",
    "matrix_memory",
    "selective_scan",
    "state_space_scan",
    "weighted_values",
]
