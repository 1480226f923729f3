"""Export a model with its cache, verify the result step by step, and generate with it: the whole job in Python.

python export_scripts/export_and_verify.py demo artifacts/demo --prompt "the code of amber is 4821. amber?"
python export_scripts/export_and_verify.py Qwen/Qwen3-0.6B artifacts/qwen --target pt2 --max-cache-len 4096
"""

from __future__ import annotations

import argparse

from exportable_cache import export, load
from exportable_cache.verification.report import VerifyReport


def main() -> None:
    """Export, verify and generate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="demo, a local folder, or a hub id")
    parser.add_argument("output", help="folder of the bundle")
    parser.add_argument("--target", default="executorch")
    parser.add_argument("--max-cache-len", type=int, default=512)
    parser.add_argument("--prompt", default=None, help="text to continue")
    arguments = parser.parse_args()

    # Verification runs before the bundle is written: the eager model and the exported program get the same tokens, with
    # prompts around each sliding window and steps after them, and every logit is compared. A mismatch raises.
    bundle = export(
        arguments.model,
        target=arguments.target,
        max_cache_len=arguments.max_cache_len,
        output_dir=arguments.output,
        overwrite=True,
    )
    print(f"{bundle.path}: {', '.join(bundle.manifest.files)}")
    print(VerifyReport(**bundle.manifest.verification))

    if arguments.prompt is not None:
        session = load(bundle.path, trust=True)  # made a moment ago
        for piece in session.stream_text(arguments.prompt, max_new_tokens=32):
            print(piece, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
