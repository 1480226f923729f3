"""Programs for tensor parallelism: one per rank, lowered one after the other in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..bundle.builder import parameter_bytes
from ..bundle.entries import RankedProgram
from ..bundle.manifest_file import rank_folder
from ..common.compat.torch_distributed import placeholder_group
from ..errors import UnsupportedModelError
from ..models.layers.specs import layer_specs_from_config, layer_specs_from_model
from ..models.loading.without_weights import model_without_weights
from ..parallel.heads import parts_of_heads
from ..parallel.plan import check_tensor_parallel
from ..parallel.rank_model import RankOf, part_of_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedConfig, PreTrainedModel

    from ..backends.base import LoweredFile
    from ..common.progress import Progress
    from ..program.program import Program

    MakeProgram = Callable[[PreTrainedModel], Program]
    Lower = Callable[[Program, Path], list[LoweredFile]]


def check_ranks(config: PreTrainedConfig, size: int) -> None:
    """Check by its config that a model can be split evenly over ranks.

    Raises:
        InputError, UnsupportedModelError: See `check_tensor_parallel`; or if it is an encoder-decoder.
    """
    model = None if getattr(config, "is_encoder_decoder", False) else model_without_weights(config)
    if model is None:
        raise UnsupportedModelError(
            f"tensor_parallel is not supported for {config.model_type!r}, because it is an encoder-decoder or cannot "
            "be built without its weights; leave it out"
        )
    check_tensor_parallel(model, layer_specs_from_config(config, model), size)


def lower_ranks(
    model: PreTrainedModel, size: int, folder: Path, make: MakeProgram, lower: Lower, progress: Progress
) -> tuple[Program, list[LoweredFile], RankedProgram]:
    """Lower the program of every rank into a separate folder.

    Args:
        model: The whole model.
        size: Number of ranks.
        folder: Folder of the bundle.
        make: Makes the program of a rank's part of the model.
        lower: Writes a program into a folder.
        progress: Called for each rank.

    Returns:
        The program of rank 0, the files of all ranks, and their entry in the manifest.
    """
    files: list[LoweredFile] = []
    parts: tuple[int, ...] = ()
    first, most = None, 0
    for rank in range(size):
        progress(f"lowering rank {rank} of {size}", rank, size)
        one = RankOf(rank, size)
        part = part_of_model(model, one)
        if rank == 0:
            parts = parts_of_heads(part, layer_specs_from_model(part)[0], one, layer_specs_from_config)
        made = make(part)
        (folder / rank_folder(rank)).mkdir()
        with placeholder_group(rank, size):
            lowered = lower(made, folder / rank_folder(rank))
        files += [replace(file, name=f"{rank_folder(rank)}/{file.name}") for file in lowered]
        most = max(most, parameter_bytes(part))
        first = made if first is None else first
    assert first is not None
    return first, files, RankedProgram(size=size, parts_of_heads=list(parts), weights_bytes=most)
