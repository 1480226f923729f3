"""The processor that this runs on, as the system describes it."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")


@functools.cache
def cpu_fields() -> dict[str, str]:
    """Of the first processor; empty where the system has no such file."""
    fields: dict[str, str] = {}
    if _CPU_INFO.is_file():
        for line in _CPU_INFO.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    return fields


def processor_name() -> str:
    """As the processor calls itself, with family and model where it gives them."""
    fields = cpu_fields()
    name = fields.get("model name") or platform.processor() or platform.machine()
    numbers = ", ".join(f"{key} {fields[key]}" for key in ("cpu family", "model") if key in fields)
    return f"{name} ({numbers})" if numbers else name


def instructions() -> str:
    """What the processor can do, as far as the system says. Code compiled for one may be illegal for another, even if
    both bear the same name: a virtual machine may hide some.
    """
    fields = cpu_fields()
    return fields.get("flags") or fields.get("Features") or fields.get("isa") or ""
