"""The command `optimum-cli export exportable-cache`, with the flags of `optimum-cli export executorch`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.export.base import ExportCommand

#: Arguments of `exportable-cache export` for their recipes. Other names are passed on as our recipes.
_RECIPES = {
    "xnnpack": ["--delegate", "xnnpack"],
    "coreml": ["--delegate", "coreml"],
}
#: The same for their tasks. Encoder-decoders are known by their config.
_TASKS = {
    "text-generation": [],
    "text2text-generation": [],
    "automatic-speech-recognition": [],
    "image-text-to-text": ["--modalities", "image"],
}


class ExportableCacheCommand(BaseOptimumCLICommand):
    """Exports a model with its cache to a verified bundle."""

    COMMAND = CommandInfo(name="exportable-cache", help="Export a model with its static KV cache to a verified bundle.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        """Add the arguments."""
        add = parser.add_argument
        add("-m", "--model", required=True, help="Hub id, local folder or .gguf file of the model.")
        add("-o", "--output_dir", "--output-dir", required=True, help="Folder to write the bundle to.")
        add("--task", default="text-generation", choices=tuple(_TASKS), help="Task to export the model for.")
        add("--recipe", help=f"{', '.join(_RECIPES)}, or a recipe of exportable-cache: exact, fast, small, portable.")
        add("--max_seq_len", "--max-seq-len", default="1024", help="Tokens that the cache holds; 1024 by default.")
        add("--dtype", help="Dtype of the weights.")
        add("--qlinear", help="Scheme of the linear layers: 8da4w, 8da8w, 8w, 4w.")
        add("--qlinear_group_size", "--qlinear-group-size", help="Number of 4-bit weights that share a scale.")
        add("--qembedding", help="Scheme of the embedding table: 8w, 4w.")
        add(
            "--disable_dynamic_shapes", "--disable-dynamic-shapes", action="store_true", help="Feed prompts one by one."
        )
        add("--use_custom_sdpa", action="store_true", help="Ignored: fused attention is the default.")
        add("--use_custom_kv_cache", action="store_true", help="Ignored: the cache is exportable-cache's.")
        add("--device", default="cpu", choices=("cpu",), help="Must be cpu.")
        add("options", nargs="*", metavar="-- OPTION", help="Further options of `exportable-cache export`, after --.")

    def run(self) -> None:
        """Run `exportable-cache export`."""
        from exportable_cache.cli import main

        sys.argv[:] = ["exportable-cache", "export", *arguments_of(self.args)]
        main()


def arguments_of(given: Namespace) -> list[str]:
    """Return the arguments of `exportable-cache export` for those of optimum-cli."""
    found = [given.model, "--output-dir", given.output_dir, "--max-cache-len", given.max_seq_len, *_TASKS[given.task]]
    if given.recipe is not None:
        found += _RECIPES.get(given.recipe, ["--recipe", given.recipe])
    for flag, value in (
        ("--dtype", given.dtype),
        ("--quantize", given.qlinear),
        ("--group-size", given.qlinear_group_size),
        ("--quantize-embeddings", given.qembedding),
        ("--prefill-chunk", "1" if given.disable_dynamic_shapes else None),
    ):
        if value is not None:
            found += [flag, value]
    return [*found, *given.options]


REGISTER_COMMANDS = [(ExportableCacheCommand, ExportCommand)]
