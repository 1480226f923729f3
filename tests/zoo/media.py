"""Pictures, film and sound of every architecture that takes them: tiny whole models against themselves. `make zoo-media`, or
`python -m tests.zoo.media --help`.

Each kind of each architecture is fed in prompts with one item and with two, amid text, and compared with the whole model in
eager attention, teacher-forced. Results are one JSON file each in `artifacts/zoo-media/`; what is there is not run again.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import importlib
import json
import multiprocessing
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch.nn.utils.parametrize import is_parametrized
from transformers import DynamicCache, PreTrainedModel

from exportable_cache import ExportableCache, Session
from exportable_cache.backends import backend_for
from exportable_cache.cache.storage import Storage, storage_of
from exportable_cache.models.layers.specs import vocab_size_of
from exportable_cache.models.positions import text_model_of
from exportable_cache.models.quantization.quantize import quantize
from exportable_cache.models.quantized_rows import ExactActivations, QuantizedRows, is_quantized
from exportable_cache.pipeline.recipes import fill_options
from exportable_cache.program.inputs.modalities import EncoderModality, modalities_of
from exportable_cache.program.inputs.modality import Modality, joined_items
from exportable_cache.program.inputs.probe import prompt_with
from exportable_cache.program.program import Program
from exportable_cache.program.spec import ProgramSpec
from exportable_cache.verification.references import RoundingCache

from ..support.sessions import describe
from . import check
from .architectures import Architecture, architectures
from .build import encoder_inputs, tiny_model, tokens
from .check import RECIPES, TOLERANCE, Outcome, _outcome_of, bundle_of, write_json
from .media_items import TOWERS, axis_of, item, kinds_of, seen_by
from .media_table import take_up_media, write_media_table
from .overrides import OVERRIDES
from .shrink import FIRST_TOKEN, VOCAB

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "artifacts" / "zoo-media"
TARGETS = ("eager", "pt2", "executorch")
LIMITS = {"eager": 200, "pt2": 400, "executorch": 600, **dict.fromkeys(RECIPES, 400)}
STEPS = 12
#: Text tokens around items: one item, two, and one behind a chunk of text.
PROMPTS = ((2, 3), (3, 2, 5), (18, 2))


def media_rows() -> list[Architecture]:
    """Architectures that take pictures, film or sound beside text."""
    rows = [row for row in architectures() if row.group in ("image", "audio")]
    return rows + [row for row in architectures() if row.model_type in ("audioflamingo3", "musicflamingo")]


def tiny_media_model(row: Architecture) -> PreTrainedModel:
    """A random whole model whose towers fit together."""
    merged = {name: {**OVERRIDES.get(name, {}), **fields} for name, fields in TOWERS.items()}
    with mock.patch.dict(OVERRIDES, merged), mock.patch.dict("tests.zoo.build.DECODERS", clear=True):
        return tiny_model(row)


def check_media(row: Architecture, kind: str, target: str, model: PreTrainedModel | None = None) -> Outcome:
    """One kind of one architecture on one target."""
    start = time.monotonic()
    try:
        model = tiny_media_model(row) if model is None else model
        outcome = _run_encoder(model, target) if is_encoder_input(model, kind) else _run(model, kind, target)
    except Exception as error:  # any model's code runs here
        outcome = _outcome_of(error)
    outcome.seconds = round(time.monotonic() - start, 1)
    return outcome


@torch.no_grad()
def _run(model: PreTrainedModel, kind: str, target: str) -> Outcome:
    example = item(model, kind)
    (modality,) = modalities_of(model, {kind: example})
    if isinstance(modality, EncoderModality):
        return _run_among_text(model, modality, example, target)
    prompts = [prompt_of(model, modality, example, pieces) for pieces in PROMPTS]
    exact, model = model, with_weights_of(model, target)
    following = torch.randint(FIRST_TOKEN, VOCAB, (1, STEPS), generator=torch.Generator().manual_seed(5))
    storage = storage_of(model.dtype, "int8") if model is not exact else None
    with QuantizedRows():
        references = [reference(model, prompt, following, storage) for prompt in prompts]
    other = dict(prompts[0])
    for name in (spec.name for spec in modality.inputs):
        other[name] = other[name].flip(-1)
    moved = (reference(model, other, following) - references[0]).abs().max().item()
    if not moved > 1e-2:
        raise RuntimeError(f"no test: another item moves the logits by {moved:.1e}")
    longest = max(prompt["input_ids"].shape[1] for prompt in prompts)
    options = {"max_cache_len": longest + STEPS + 4}
    cache = ExportableCache.from_model(model, **options)
    chunk = longest if modality.facts.sees else 16
    with _session(exact, cache, modality, target, chunk, modalities={kind: example}, **options) as session:
        difference = 0.0
        for prompt, expected in zip(prompts, references):
            session.reset()
            given = {name: tensor for name, tensor in prompt.items() if "token_type" not in name}
            rows = [session.prefill(**given)] + [session.decode(following[:, step]) for step in range(STEPS)]
            difference = max(difference, (torch.stack(rows, 1) - expected).abs().max().item())
    limit = TOLERANCE * max(1.0, max(expected.abs().max().item() for expected in references) / 10)
    distance = None
    if model is not exact:
        with ExactActivations():
            without = [reference(model, prompt, following) for prompt in prompts]
        limit = max(limit, _limit_of_rounding(references, without))
        exactly = [reference(exact, prompt, following) for prompt in prompts]
        distance = max((one - other).abs().max().item() for one, other in zip(exactly, references))
    mechanism = mechanism_of(modality)
    return Outcome("pass" if difference <= limit else "wrong", difference, mechanism, distance=distance)


def with_weights_of(model: PreTrainedModel, target: str) -> PreTrainedModel:
    """A model with the weights that a target's program has: `model`, or its quantised copy.

    Tables of the copy are in float, because whole models read their rows in ways that only programs replace.
    """
    quantization = fill_options(RECIPES.get(target), "executorch", {}).quantization
    if quantization is None:
        return model
    quantized = quantize(model, quantization).model
    for module in quantized.modules():
        if isinstance(module, torch.nn.Embedding) and is_quantized(module.weight):
            rows = module.weight.dequantize()
            if is_parametrized(module, "weight"):
                module.__class__ = type(module).__base__
            else:
                del module.weight
            module.weight = rows
    return quantized


def _limit_of_rounding(rounded: list[torch.Tensor], without: list[torch.Tensor]) -> float:
    """Return how far two correct programs may be that round activations, as `export` does."""
    return 2 * max((one - other).abs().max().item() for one, other in zip(rounded, without))


def is_encoder_input(model: PreTrainedModel, kind: str) -> bool:
    """Return True if items are the input of an encoder, so that a prompt has one and no placeholders."""
    return model.config.is_encoder_decoder and model.main_input_name in item(model, kind)


def _run_encoder(model: PreTrainedModel, target: str) -> Outcome:
    """Check a model whose encoder takes the item, as the zoo of architectures does."""
    ids, inputs = tokens(model), encoder_inputs(model)
    outcome = check.run_case(model, target, (ids, inputs, check._references(model, ids, inputs, {})), {})
    outcome.reason = "encoder"
    return outcome


def _run_among_text(
    model: PreTrainedModel, modality: Modality, example: dict[str, torch.Tensor], target: str
) -> Outcome:
    """Check an item among the text of an encoder-decoder's encoder, which takes one for each prompt."""
    ids, difference = tokens(model), 0.0
    exact, model, cases = model, with_weights_of(model, target), []
    limit, distance = TOLERANCE, None
    for pieces in (pieces for pieces in PROMPTS if len(pieces) == 2):
        inputs = prompt_of(model, modality, example, pieces)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        with QuantizedRows():
            references = check._references(model, ids, inputs, {})
        other = {name: tensor if tensor.dtype == torch.int64 else tensor.flip(-1) for name, tensor in inputs.items()}
        moved = (check._references(model, ids, other, {})[6] - references[6]).abs().max().item()
        if not moved > 1e-2:
            raise RuntimeError(f"no test: another item moves the logits by {moved:.1e}")
        if model is not exact:
            with ExactActivations():
                without = check._references(model, ids, inputs, {})
            limit = max(limit, _limit_of_rounding(list(references.values()), list(without.values())))
            exactly = check._references(exact, ids, inputs, {})
            distance = max(distance or 0.0, *((exactly[n] - references[n]).abs().max().item() for n in exactly))
        cases.append((inputs, references))
    length = max(inputs["input_ids"].shape[1] for inputs, _ in cases)
    options = {"max_cache_len": check.MAX_CACHE_LEN, "max_encoder_len": length}
    cache = ExportableCache.from_model(model, **options, attn_implementation=None)
    options["modalities"] = {modality.kind: example}
    with _session(exact, cache, modality, target, check.PREFILL_CHUNK, **options) as session:
        for inputs, references in cases:
            for pieces in check.PROMPTS:
                given = check._difference(session, ids, inputs, pieces, references[sum(pieces)])
                difference = max(difference, given)
    status = "pass" if difference <= limit else "wrong"
    return Outcome(status, difference, "places in the encoder", distance=distance)


def mechanism_of(modality: Modality) -> str:
    """By what items reach the decoder."""
    found = ["cross-attention" if modality.facts.tiles else "places"]
    if modality.facts.fixed:
        found.append("sizes")
    if modality.extra_features:
        found.append("features beside")
    if modality.facts.positions:
        found.append(f"{len(modality.facts.positions)} axes")
    if modality.facts.sees:
        found.append(f"sees {modality.facts.sees}")
    return ", ".join(found)


def prompt_of(
    model: PreTrainedModel, modality: Modality, example: dict[str, torch.Tensor], pieces: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    items = [item(model, modality.kind, seed) for seed in range(1, len(pieces))]
    together = joined_items(items, axis_of(model))
    given = prompt_with(model, modality.kind, pieces, modality.tokens, modality.token_id, **together)
    random = torch.randint(
        FIRST_TOKEN, VOCAB, given["input_ids"].shape, generator=torch.Generator().manual_seed(sum(pieces))
    )
    # Special tokens stay: placeholders, and what stands around items.
    given["input_ids"] = torch.where(given["input_ids"] < FIRST_TOKEN, given["input_ids"], random)
    given |= seen_by(given["input_ids"], modality.token_id, together)
    if modality.facts.sees == "prompt":
        given["token_type_ids"] = torch.zeros_like(given["input_ids"])
    return given


@torch.no_grad()
def reference(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], following: torch.Tensor, storage: Storage | None = None
) -> torch.Tensor:
    """Logits of the whole model in eager attention after the prompt and after each later token, [1, STEPS + 1, vocab].

    Keys and values are rounded like `storage`.
    """
    for module in model.modules():
        if "rope_deltas" in module.__dict__:
            # Those of an earlier prompt would count.
            module.rope_deltas = None
    cache = partial(RoundingCache, storage) if storage else DynamicCache
    cache = cache(config=model.config.get_text_config())
    rows = [model(**inputs, past_key_values=cache, use_cache=True).logits[:, -1]]
    # What the last token of the prompt sees, later ones see.
    later = {name: tensor[:, -1:] for name, tensor in inputs.items() if name == "cross_attention_mask"}
    for position in range(following.shape[1]):
        given = {"input_ids": following[:, position : position + 1], **later}
        rows.append(text_model_of(model)(**given, past_key_values=cache, use_cache=True).logits[:, -1])
    return torch.stack(rows, dim=1)


@contextmanager
def _session(
    model: PreTrainedModel, cache: ExportableCache, modality: Modality, target: str, chunk: int, **options: Any
) -> Iterator[Session]:
    """A session over `cache`, or over the bundle that `export` writes of these options."""
    if target in RECIPES:
        with bundle_of(model, target, **options) as bundle, Session.from_bundle(bundle) as found:
            yield found
        return
    placeholders = {modality.method.name: modality.token_id}
    if target == "eager":
        with mock.patch("exportable_cache.session.live.modalities_of", lambda *_: (modality,)):
            with Session.from_model(
                model, cache, prefill_chunk=chunk, modalities=[modality.kind], buckets=False
            ) as found:
                yield found
        return
    backend = backend_for(target)
    spec = backend.program_spec(ProgramSpec(chunk, modalities=(modality,)), backend.options())
    program = Program(model, cache, spec)
    if "encode" in program.methods:
        placeholders = {}
    elif not modality.facts.tiles:
        # Every prompt here has an item, and goes through as embeddings.
        program.methods.pop("prefill"), program.modules.pop("prefill")
    with tempfile.TemporaryDirectory() as folder:
        backend.lower(program, Path(folder), backend.options())
        runner = backend.open(Path(folder), describe(program))
        yield Session(
            runner, cache.layers, vocab_size_of(model), batch_size=1, target=target, placeholders=placeholders
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo.media", description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="model types, comma-separated")
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument(
        "--kinds", default="image,video,audio", help="comma-separated; what takes one alone runs always"
    )
    parser.add_argument("--redo", action="store_true", help="run again what has a result")
    parser.add_argument("--status", help="run again what has one of these results, comma-separated")
    parser.add_argument(
        "--keep", action="store_true", help="begin with what docs/media.json has: run only what is missing there"
    )
    parser.add_argument("--table", action="store_true", help="only write docs/media.md from the results there are")
    arguments = parser.parse_args()
    if arguments.keep:
        take_up_media(RESULTS)
    if not arguments.table:
        transformers.logging.set_verbosity_error()
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        only = arguments.only.split(",") if arguments.only else None
        _import_backends(arguments.targets.split(","))
        for row in media_rows():
            if only is None or row.model_type in only:
                _run_row(row, arguments)
    write_media_table(RESULTS)


def _import_backends(targets: list[str]) -> None:
    """Once, not in each process apart: a third of the time of a model."""
    for target in targets:
        if target != "eager":
            target = check.target_of(target)
            for name in ("lowering.lower", "runner") if target == "executorch" else ("archive", "runner"):
                importlib.import_module(f"exportable_cache.backends.{target}.{name}")
            torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)).run_decompositions()


def read_media(model_type: str) -> dict[str, Any]:
    """What is known of an architecture: outcomes by kind and target."""
    path = RESULTS / f"{model_type}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _run_row(row: Architecture, arguments: argparse.Namespace) -> None:
    targets = arguments.targets.split(",")
    known = read_media(row.model_type)
    statuses = arguments.status.split(",") if arguments.status else []
    jobs = [("", "kinds")] if not known or arguments.redo else []
    for _, step in jobs:
        found = _apart(row, "", step, 120)
        known = {kind: known.get(kind, {}) for kind in found} if isinstance(found, list) else {"": {"eager": found}}
    for kind in known:
        for target in targets if kind and (kind in arguments.kinds or len(known) == 1) else ():
            old = known[kind].get(target)
            if old is not None and not arguments.redo and old["status"] not in statuses:
                continue
            if target != "eager" and known[kind].get("eager", {}).get("status") != "pass":
                continue
            known[kind][target] = _apart(row, kind, target, LIMITS[target])
            # Another run may have written since.
            written = read_media(row.model_type)
            known = {each: {**written.get(each, {}), **known[each]} for each in known} if not arguments.redo else known
            write_json(RESULTS / f"{row.model_type}.json", known)
            told = known[kind][target]
            print(
                row.model_type,
                kind,
                target,
                told["status"],
                told["difference"],
                told["reason"][:300],
                told["where"][-1:],
                flush=True,
            )
    write_json(RESULTS / f"{row.model_type}.json", known)


def _apart(row: Architecture, kind: str, target: str, limit: int) -> Any:
    """In a process of its own, which may die or hang."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(row, kind, target, writer), daemon=True)
    process.start()
    writer.close()
    lost = asdict(Outcome("error", reason=f"no result within {limit} s"))
    try:
        return reader.recv() if reader.poll(limit) else lost
    except EOFError:
        return asdict(Outcome("error", reason="the process died"))
    finally:
        process.kill()
        process.join()


def _child(row: Architecture, kind: str, target: str, writer: Any) -> None:
    torch.set_num_threads(1)
    log = os.open(os.devnull, os.O_WRONLY)
    os.dup2(log, 2)
    if target == "kinds":
        try:
            writer.send(list(kinds_of(tiny_media_model(row))))
        except Exception as error:
            writer.send(asdict(_outcome_of(error)))
        return
    writer.send(asdict(check_media(row, kind, target)))


if __name__ == "__main__":
    main()
