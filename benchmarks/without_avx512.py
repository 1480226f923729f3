"""Run a command as if its processor had no AVX-512 and no AMX, or count samples at such instructions.

    python benchmarks/without_avx512.py python benchmarks/peers.py    # child processes included
    python benchmarks/without_avx512.py --count COMMAND...
    python benchmarks/without_avx512.py --count --as-it-is COMMAND...

Every library of the process queries the processor by CPUID, which is intercepted by benchmarks/hide_avx512.c. It needs
a C compiler and objdump, and disassembles each library the first time (libtorch takes more than a minute). Code that
uses AVX-512 without a query is not affected: llama.cpp has to be built for AVX2. The result is not an older processor:
its clock, caches and other instructions stay.
"""

from __future__ import annotations

import argparse
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
#: glibc queries before any library is loaded, and has its own setting.
_GLIBC = ",".join(f"-AVX512{part}" for part in ("F", "VL", "BW", "DQ", "CD"))


def hidden(folder: Path) -> dict[str, str]:
    """Return the environment variables that hide AVX-512; compiled files stay in the folder.

    Raises:
        RuntimeError: If a tool is missing, or the processor is of another kind.
    """
    missing = [name for name in ("cc", "objdump") if shutil.which(name) is None]
    if missing or os.uname().machine != "x86_64":
        raise RuntimeError(f"hiding AVX-512 needs cc and objdump on x86-64, and here is no {missing or 'such machine'}")
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    source, library = HERE / "hide_avx512.c", folder / "hide_avx512.so"
    if not library.is_file() or library.stat().st_mtime < source.stat().st_mtime:
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return {
        "LD_AUDIT": str(library),
        "HIDE_AVX512_CACHE": str(folder),
        "GLIBC_TUNABLES": f"glibc.cpu.hwcaps={_GLIBC}",
    }


def main() -> None:
    """Run the command, and print the counts on standard error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("artifacts/without_avx512"), help="of what is kept")
    parser.add_argument("--count", action="store_true", help="samples of the process at AVX-512 instructions")
    parser.add_argument("--as-it-is", action="store_true", help="hide nothing")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    chosen = parser.parse_args()
    environment = {**os.environ, **hidden(chosen.folder)}
    if chosen.as_it_is:
        environment |= {"HIDE_AVX512": "0", "GLIBC_TUNABLES": ""}
    with tempfile.TemporaryDirectory() as place:
        counts = Path(place) / "counts"
        if chosen.count:
            environment["HIDE_AVX512_COUNT"] = str(counts)
        code = subprocess.run(chosen.command, env=environment, check=False).returncode
        if chosen.count:
            samples, found = struct.unpack("=2Q", counts.read_bytes())
            print(f"{found} of {samples} samples at AVX-512 instructions", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
