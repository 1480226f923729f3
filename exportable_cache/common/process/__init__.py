"""Processes: subprocesses with limits, process-wide settings, and messages of other libraries."""
