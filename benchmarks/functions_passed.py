"""Functions and files of the package that a prompt passes: `python -m benchmarks.functions_passed [--list]`.

The demo model answers a prompt of eight tokens with two, eagerly. It answers once before, because imports and what is
allocated once do not count. Comprehensions, lambdas and generator expressions count with the function around them.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import exportable_cache
from exportable_cache import ExportableCache, Session
from exportable_cache.demo import demo_path

PACKAGE = str(Path(exportable_cache.__file__).parent)


def functions_passed(call: Callable[[], Any]) -> set[tuple[str, str]]:
    """Return the file and the qualified name of each function of the package that a call runs."""
    found = set()

    def note(frame: Any, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            name = getattr(code, "co_qualname", f"{code.co_firstlineno}:{code.co_name}")
            found.add((code.co_filename.removeprefix(PACKAGE + "/"), name))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def functions_of_a_response() -> set[tuple[str, str]]:
    """Return the functions that a prompt of eight tokens and two new ones pass, on the demo model."""
    model = AutoModelForCausalLM.from_pretrained(demo_path()).eval()
    prompt = torch.randint(0, model.config.vocab_size, (1, 8), generator=torch.Generator().manual_seed(0))
    with Session.from_model(model, ExportableCache.from_model(model, max_cache_len=64)) as session:
        list(session.generate(prompt, max_new_tokens=2))
        session.reset()
        return functions_passed(lambda: list(session.generate(prompt, max_new_tokens=2)))


def main() -> None:
    """Print the counts, and with `--list` the functions of each file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name the functions")
    listed = parser.parse_args().list
    found = functions_of_a_response()
    files = sorted({file for file, _ in found})
    print(f"{len(found)} functions in {len(files)} files")
    for file in files if listed else ():
        names = sorted(name for of, name in found if of == file)
        print(f"{file} ({len(names)}): {', '.join(names)}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
