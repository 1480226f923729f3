"""Programs lowered to networks, each made once for all tests."""

from __future__ import annotations

from functools import cache

import torch
from transformers import PreTrainedModel

from exportable_cache import ExportableCache, Session
from exportable_cache.backends.tensorrt.evaluator.evaluator import NetworkRunner
from exportable_cache.backends.tensorrt.network import Network
from exportable_cache.backends.tensorrt.options import TensorRTOptions
from exportable_cache.backends.tensorrt.target import backend, engine_networks
from exportable_cache.program.program import Program
from exportable_cache.program.spec import ProgramSpec

from .models import engine_model

CAPACITY = 64
PREFILL = 16


def engine_program(
    family: str,
    dtype: torch.dtype = torch.float32,
    batch_size: int = 1,
    in_place: bool = True,
    engines: str = "shared",
    score_length: int = 0,
) -> tuple[PreTrainedModel, Program, dict[str, Network]]:
    """A tiny model, its program, and the network of each method."""
    # By position, because a call that states a default in another way would make them again.
    return _made(family, dtype, batch_size, in_place, engines, score_length)


@cache
def _made(
    family: str, dtype: torch.dtype, batch_size: int, in_place: bool, engines: str, score_length: int
) -> tuple[PreTrainedModel, Program, dict[str, Network]]:
    model = engine_model(family, dtype)
    options = TensorRTOptions(engines=engines, score_length=score_length)
    program = program_of(model, batch_size, options=options)
    return model, program, engine_networks(program, options, in_place=in_place)


def program_of(
    model: PreTrainedModel,
    batch_size: int = 1,
    cache: ExportableCache | None = None,
    options: TensorRTOptions | None = None,
) -> Program:
    """The program of a model as the target makes it, over `cache` or one of `CAPACITY` slots."""
    if cache is None:
        cache = ExportableCache.from_model(model, CAPACITY, batch_size, attn_implementation=None)
    return Program(model, cache, backend.program_spec(ProgramSpec(PREFILL), options or TensorRTOptions()))


def network_session(model: PreTrainedModel, program: Program, networks: dict[str, Network]) -> Session:
    """A session over networks on the CPU."""
    runner = NetworkRunner(program.methods, networks)
    vocab_size = model.config.vocab_size
    return Session(runner, program.cache.layers, vocab_size, batch_size=program.batch_size, target="tensorrt")
