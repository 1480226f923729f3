"""Run a command as if its processor had no AVX-512 and no AMX, or count how often it is at such an instruction.

    python benchmarks/without_avx512.py python benchmarks/peers.py    # whatever the command starts, too
    python benchmarks/without_avx512.py --count COMMAND...
    python benchmarks/without_avx512.py --count --as-it-is COMMAND...

Every library of the process is asked for the processor's abilities by CPUID, which answers without AVX-512 then, as
benchmarks/hide_avx512.c says. It needs a C compiler and objdump, and disassembles each library the first time (libtorch
takes more than a minute). What a compiler has put AVX-512 into without asking stays: llama.cpp has to be built for
AVX2. What is left is the same processor, not an older one: its clock, caches and other instructions stay.
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
#: glibc asks before any library is loaded, and has a setting of its own.
_GLIBC = ",".join(f"-AVX512{part}" for part in ("F", "VL", "BW", "DQ", "CD"))


def hidden(folder: Path) -> dict[str, str]:
    """The environment variables that hide AVX-512; what is compiled and found stays in the folder.

    Raises:
        RuntimeError: If a tool is missing, or the processor is another kind.
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
    """Run the command, and say the counts on standard error."""
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
