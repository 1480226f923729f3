"""Numbers that a `.pt2` file has for dtypes, layouts and memory formats: torch's schema 8."""

from __future__ import annotations

import torch

#: Major version of the schema; another one may mean something else by the same fields.
SCHEMA_MAJOR = 8

DTYPES = {
    1: torch.uint8,
    2: torch.int8,
    3: torch.int16,
    4: torch.int32,
    5: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    9: torch.complex32,
    10: torch.complex64,
    11: torch.complex128,
    12: torch.bool,
    13: torch.bfloat16,
    28: torch.uint16,
    29: torch.float8_e4m3fn,
    30: torch.float8_e5m2,
    31: torch.float8_e4m3fnuz,
    32: torch.float8_e5m2fnuz,
    33: torch.float8_e8m0fnu,
    34: torch.uint32,
    35: torch.uint64,
}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}

STRIDED = 7
LAYOUTS = {STRIDED: torch.strided}

MEMORY_FORMATS = {
    1: torch.contiguous_format,
    2: torch.channels_last,
    3: torch.channels_last_3d,
    4: torch.preserve_format,
}
