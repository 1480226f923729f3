"""One architecture on every target: pass, refused, wrong or error, written down as it is found."""

from __future__ import annotations

import functools
import json
import os
import re
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import PreTrainedModel

from exportable_cache import ExportableCache, Session, export
from exportable_cache.backends import backend_for
from exportable_cache.backends.base import Backend, LoweredFile
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.cache.attention.implementation import Implementations
from exportable_cache.errors import ExportableCacheError, InputError, VerificationError
from exportable_cache.models.layers.specs import vocab_size_of
from exportable_cache.models.patches.mechanisms.rope import fix_rope
from exportable_cache.models.patches.registry import patch_model
from exportable_cache.models.positions import rope_rule
from exportable_cache.models.quantization.quantize import quantize
from exportable_cache.models.quantization.spec import DEFAULT_GROUP_SIZE, Quantization
from exportable_cache.models.quantized_rows import QuantizedRows
from exportable_cache.pipeline.recipes import EXACT, fill_options
from exportable_cache.program.program import Program
from exportable_cache.program.spec import ProgramSpec
from exportable_cache.session.live import changing_rope
from exportable_cache.verification.spec import VerifySpec

from ..support.sessions import describe
from . import peers
from .architectures import Architecture
from .build import (
    LEAST_SPREAD,
    PROMPTS,
    STEPS,
    cached_logits,
    encoder_inputs,
    encoder_options,
    spread,
    tiny_model,
    tokens,
    uncached_logits,
)
from .conditioning import TOLERANCE, has_choices, model_without_choices, movement
from .extended import Extended
from .shrink import SIZES

TARGETS = ("eager", "compiled", "pt2", "executorch", "tensorrt", "coreai")
#: Programs of target `executorch` for devices, by their options. They are asked by name (`--targets static,openvino`).
DEVICES: dict[str, dict[str, str]] = {
    "static": {"form": "static"},
    "openvino": {"delegate": "openvino"},
    "mlx": {"delegate": "mlx"},
}
#: Targets whose programs choose the factors of RoPE by the lengths of rows.
KNOWING_LENGTHS = ("eager", "compiled", "pt2")
#: Programs with quantised weights, asked by name too: compared with the model that has the same ones.
QUANTIZED = {
    f"{target}-{scheme}": Quantization(scheme, embeddings="8w")
    for target in ("tensorrt", "mlx", "openvino")
    for scheme in ("4w", "8w")
}
#: Bundles that `export` writes for target `executorch` with nothing said, and with `--recipe fast`, asked by name too: it
#: fills in the recipe, quantises, lowers with this package's native operators, opens the bundle and verifies it.
RECIPES = {"executorch-native": EXACT, "executorch-fast": "fast"}
#: Sizes of tiny models that groups of 4-bit weights do not divide.
WIDE_RANKS = dict.fromkeys("q_lora_rank kv_lora_rank o_lora_rank linear_head_dim".split(), DEFAULT_GROUP_SIZE)
#: What transformers itself has for the same, see `peers.py`.
PEERS = ("static_cache", "exporter", "dynamo")
#: Its exporters for devices, asked by name too.
PEER_DEVICES = ("openvino_exporter", "mlx_exporter")
#: Columns that are run only if they are asked by name.
BY_NAME = (*RECIPES, *DEVICES, *QUANTIZED, *PEER_DEVICES)
#: Run by default: the targets; what else a session in eager mode is asked, see `extended.py`; and the peers.
COLUMNS = (*TARGETS, "extended", *PEERS)
#: As they are run: what has references of its own, or is none of this package's, before its patches are in.
ORDER = (*PEERS, *PEER_DEVICES, "extended", *TARGETS)
#: Groups of decoders alone, which is what a TensorRT program, and those of the peers' exporters, hold.
DECODER_GROUPS = ("causal", "image", "audio")
MAX_CACHE_LEN = 64
PREFILL_CHUNK = 16
#: Chunk of programs whose prefill takes exactly one chunk, so that each of `PROMPTS` runs both methods.
FIXED_CHUNK = 5
#: Of cells whose model changes its RoPE by the length, where the program does not.
_FIXED_ROPE = f"with rope_length={MAX_CACHE_LEN}"
#: Difference that a report of `export` gives.
_DIFFERENCE = re.compile(r"max \|logit difference\| (\S+)")
#: Its limit.
_LIMIT = re.compile(r"max \|logit difference\| \S+ exceeds ([^\s,]+)")
#: Tokens, the inputs of an encoder, and by prompt length logits [STEPS + 1, vocab].
Case = tuple[torch.Tensor, dict[str, torch.Tensor], dict[int, torch.Tensor]]


@dataclass
class Outcome:
    """Of one target.

    Attributes:
        status: pass, refused (with a reason), wrong (the logits differ), lowered (a program of a peer that cannot be run
            or evaluated here), error (anything else, a crash or a time limit too).
        difference: Largest |logit difference| to the reference, where it ran.
        distance: That of the reference to the model before its weights were quantised, in columns of `QUANTIZED`; of
            `RECIPES`, that of the program.
        reason: Of a refusal or an error.
        where: Last lines of an error's traceback.
        seconds: It took.
        processor_seconds: Of them, those of this process and its children; None in results from before they were told.
        commit: Of the package that it was found with.
    """

    status: str
    difference: float | None = None
    reason: str = ""
    where: list[str] = field(default_factory=list)
    seconds: float = 0.0
    processor_seconds: float | None = None
    commit: str = ""
    distance: float | None = None


def check(architecture: Architecture, targets: list[str], report: Callable[[dict[str, Any]], None]) -> None:
    """Run columns of the table, one model instance for all. `report` gets what is known, again and again, as a dict of JSON."""
    torch.set_num_threads(1)
    facts: dict[str, Any] = {"running": "model"}
    report(facts)
    begun = processor_seconds()
    try:
        model = tiny_model(architecture)
        facts["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        ids = tokens(model)
        inputs = encoder_inputs(model)
        case = ids, inputs, _references(model, ids, inputs, facts)
        facts["spread"] = spread(architecture, model, ids, inputs)
        stopped = None
    except Exception as error:
        stopped = error
    facts["model processor seconds"] = round(processor_seconds() - begun, 2)
    if stopped is not None:
        facts["running"] = None
        facts["targets"] = {
            target: asdict(_timed(functools.partial(_without_reference, architecture, target, stopped)))
            for target in targets
        }
        report(facts)
        return
    weak = {name: moved for name, moved in facts["spread"].items() if not moved > LEAST_SPREAD}
    facts["unfit"] = f"no test: {weak}" if weak else None
    for target in sorted(targets, key=(*ORDER, *BY_NAME).index):
        facts["running"] = target
        report(facts)
        facts.setdefault("targets", {})[target] = asdict(
            _timed(functools.partial(_found, architecture, model, target, case, facts))
        )
    facts["running"] = None
    report(facts)


def _found(
    architecture: Architecture, model: PreTrainedModel, target: str, case: Case, facts: dict[str, Any]
) -> Outcome:
    try:
        if target in (*PEERS, *PEER_DEVICES):
            return _judged(*getattr(peers, target)(model, *case))
        if target == "extended":
            return _extended(architecture, model, facts)
        if target in RECIPES:
            return _by_recipe(architecture, model, target, case)
        return run_case(model, target, case, facts)
    except Exception as error:  # any model's code runs here
        return _outcome_of(error)


def _by_recipe(architecture: Architecture, model: PreTrainedModel, column: str, case: Case) -> Outcome:
    """The column of a recipe; of another tiny model, which the cell names, where this one cannot be asked it.

    Low ranks that groups do not divide become multiples of a group, as those of the true sizes are. Where the reference
    moves past the limit with the last bit of its weights, because experts or keys tie, all are chosen.
    """
    sizes: dict[str, int] = {}
    notes: list[str] = []
    try:
        try:
            return _exported(model, column, case)
        except InputError as error:
            if not str(error).startswith("group_size must divide"):
                raise
        sizes, notes = WIDE_RANKS, [f"with ranks of {DEFAULT_GROUP_SIZE}"]
        with mock.patch.dict(SIZES, sizes):
            model = tiny_model(architecture)
        outcome = _exported(model, column, _case_of(model))
    except DisagreesError as error:
        outcome, moved = _outcome_of(error), _moved(model, column)
        limit = float(found[1]) if (found := _LIMIT.search(outcome.reason)) else float("inf")
        if moved <= limit or not has_choices(architecture):
            return outcome
        with mock.patch.dict(SIZES, sizes):
            model = model_without_choices(architecture)
        notes.append(
            f"with every expert and key chosen: of the tiny model, the reference moves by {moved:.0e} with the last bit of "
            f"its weights, and the program differs by {outcome.difference:.0e}"
        )
        outcome = _exported(model, column, _case_of(model))
    outcome.reason = ", ".join(filter(None, (outcome.reason, *notes)))
    return outcome


def _case_of(model: PreTrainedModel) -> Case:
    ids, inputs = tokens(model), encoder_inputs(model)
    return ids, inputs, _references(model, ids, inputs, {})


def _moved(model: PreTrainedModel, column: str) -> float:
    """How far the reference of `export` moves with the last bit of its weights, over random tokens as it feeds them."""
    quantization = fill_options(RECIPES[column], "executorch", {}).quantization
    reference = model if quantization is None else quantize(model, quantization).model
    generator, inputs = torch.Generator().manual_seed(VerifySpec().seed), encoder_inputs(model)
    lengths = (MAX_CACHE_LEN, *(min(prompt + STEPS, MAX_CACHE_LEN) for prompt in (40, 8, 3)))
    fed = [torch.randint(vocab_size_of(model), (1, length), generator=generator) for length in lengths]

    def logits(one: PreTrainedModel) -> torch.Tensor:
        with QuantizedRows():
            return torch.cat([uncached_logits(one, ids, inputs) for ids in fed])

    return movement(reference, logits)


def _timed(find: Callable[[], Outcome]) -> Outcome:
    start, processor_start = time.monotonic(), processor_seconds()
    outcome = find()
    outcome.seconds = round(time.monotonic() - start, 2)
    outcome.processor_seconds = round(processor_seconds() - processor_start, 2)
    return outcome


def processor_seconds() -> float:
    """That this process has used, and those of its children that have ended: unlike minutes on a clock, they hardly change
    with what else runs.
    """
    return sum(os.times()[:4])


def _judged(difference: float, reason: str = "") -> Outcome:
    return Outcome("pass" if difference <= TOLERANCE else "wrong", difference, reason)


def _extended(architecture: Architecture, model: PreTrainedModel, facts: dict[str, Any]) -> Outcome:
    """`facts` get every check, and the dtypes whose reference has a tie."""
    checks = Extended(architecture, model)
    facts["ill_conditioned"] = checks.ill_conditioned
    # A model that is refused is refused here.
    ExportableCache.from_model(
        model, MAX_CACHE_LEN, attn_implementation=None, **encoder_options(model, encoder_inputs(model))
    )
    findings = checks.findings()
    facts["checks"] = {name: asdict(finding) for name, finding in findings.items()}
    failed = {name: finding for name, finding in findings.items() if finding.status in ("wrong", "error")}
    exact = [found.difference for found in findings.values() if found.limit == TOLERANCE]
    reason = "; ".join(
        f"{name}: {found.reason or f'{found.difference:.0e}, limit {found.limit:.0e}'}"
        for name, found in failed.items()
    )
    status = "error" if any(found.status == "error" for found in failed.values()) else "wrong" if failed else "pass"
    return Outcome(status, max(filter(None, exact), default=None), reason)


def _without_reference(architecture: Architecture, target: str, error: Exception) -> Outcome:
    """A model that runs no text by itself, or not step by step, is to be refused as well."""
    if target in (*PEERS, *PEER_DEVICES):
        return _outcome_of(error, "model: ")
    try:
        ExportableCache.from_model(tiny_model(architecture), MAX_CACHE_LEN, attn_implementation=None)
    except ExportableCacheError as refusal:
        return _outcome_of(refusal)
    except Exception:  # the model cannot even be built, or the refusal is missing: what stopped the reference says more
        pass
    return _outcome_of(error, "model: ")


def _references(
    model: PreTrainedModel, ids: torch.Tensor, inputs: dict[str, torch.Tensor], facts: dict[str, Any]
) -> dict[int, torch.Tensor]:
    """By prompt length: logits [STEPS + 1, vocab]."""
    whole = uncached_logits(model, ids, inputs)
    references, gap = {}, 0.0
    for prompt in sorted({sum(pieces) for pieces in PROMPTS}):
        uncached = whole[prompt - 1 : prompt + STEPS]
        try:
            references[prompt] = cached_logits(model, ids, prompt, inputs)
        except Exception as error:  # models with a cache of their own, or none
            facts["reference"] = f"uncached: {type(error).__name__}: {_first_line(error)}"
            references[prompt] = uncached
        gap = max(gap, (references[prompt] - uncached).abs().max().item())
    #: Above the tolerance, transformers' own cached and uncached logits differ.
    facts["cached against uncached"] = gap
    return references


def run_case(model: PreTrainedModel, column: str, case: Case, facts: dict[str, Any]) -> Outcome:
    """Compare a column of this package with the references of a case."""
    if column in RECIPES:
        return _exported(model, column, case)
    if column in QUANTIZED:
        return _quantized(model, column, case)
    return _run(model, column, case, facts)


def _run(model: PreTrainedModel, target: str, case: Case, facts: dict[str, Any]) -> Outcome:
    fixed = ""
    if target not in KNOWING_LENGTHS and _changes_rope(model):
        model, case = _with_fixed_rope(model, case)
        fixed = _FIXED_ROPE
    ids, inputs, references = case
    options = encoder_options(model, inputs)
    cache = ExportableCache.from_model(model, MAX_CACHE_LEN, attn_implementation=None, **options)
    facts["layers"] = dict(Counter(layer.label for layer in cache.layers))
    facts["patches"] = patch_model(model)
    implementations = Implementations.of(model)
    try:
        with tempfile.TemporaryDirectory() as folder, graphs_without_code() if target == "compiled" else nullcontext():
            session = _session(model, cache, target, Path(folder))
            difference = max(_difference(session, ids, inputs, pieces, references[sum(pieces)]) for pieces in PROMPTS)
    finally:
        implementations.restore()
    return _judged(difference, fixed)


def _changes_rope(model: PreTrainedModel) -> bool:
    rule = rope_rule(model)
    return rule is not None and rule.is_reached(MAX_CACHE_LEN)


def _with_fixed_rope(model: PreTrainedModel, case: Case) -> tuple[PreTrainedModel, Case]:
    """Return the model as a user exports it, with the factors of the longest sequence at every position."""
    model = fix_rope(model, MAX_CACHE_LEN)
    return model, (*case[:2], _references(model, *case[:2], {}))


def _exported(model: PreTrainedModel, column: str, case: Case) -> Outcome:
    """The bundle of a recipe.

    `export` compares it with the model that has the same weights, and keys and values in as many bits. A recipe that
    rounds nothing is compared with the references here, too.
    """
    fixed = ""
    options: dict[str, Any] = encoder_options(model, case[1])
    if _changes_rope(model):
        options["rope_length"], fixed = MAX_CACHE_LEN, _FIXED_ROPE
    with bundle_of(model, column, **options) as bundle:
        if RECIPES[column] != EXACT:
            return verified(bundle, fixed)
        if fixed:
            _, case = _with_fixed_rope(model, case)
        ids, inputs, references = case
        with Session.from_bundle(bundle) as session:
            difference = max(_difference(session, ids, inputs, pieces, references[sum(pieces)]) for pieces in PROMPTS)
    return _judged(difference, fixed)


class DisagreesError(Exception):
    """Raised if `export` writes no bundle, because the program disagrees with the model."""


@contextmanager
def bundle_of(model: PreTrainedModel, column: str, **options: Any) -> Iterator[Bundle]:
    """Yield what `export` writes by the recipe of a column."""
    if fill_options(RECIPES[column], "executorch", {}).options.get("kernels") != "native":
        raise RuntimeError("the native operators are not installed; run `exportable-cache native build`")
    with tempfile.TemporaryDirectory() as folder:
        given = {"max_cache_len": MAX_CACHE_LEN, "recipe": RECIPES[column], **options}
        try:
            bundle = export(model, output_dir=Path(folder) / "bundle", **given)
        except VerificationError as error:
            # Without the folder that was not written.
            raise DisagreesError(str(error).partition(f". {folder}")[0]) from error
        yield bundle


def verified(bundle: Bundle, reason: str = "") -> Outcome:
    """Return what `export` found of a bundle that it wrote."""
    report, quantized = bundle.manifest.verification, bundle.manifest.quantization
    assert report is not None and report["passed"]
    distance = None if quantized is None else quantized.max_difference
    return Outcome("pass", report["max_difference"], reason, distance=distance)


def target_of(column: str) -> str:
    """Return the target of a column, without the scheme of its weights and without its recipe."""
    return column.rpartition("-")[0] if column in (*QUANTIZED, *RECIPES) else column


def _quantized(model: PreTrainedModel, column: str, case: Case) -> Outcome:
    """The program of a quantised copy, against that copy."""
    target = target_of(column)
    backend = backend_for("executorch" if target in DEVICES else target)
    options = backend.options(**DEVICES.get(target, {}))
    experts = getattr(options, "expert_schemes", getattr(backend, "expert_schemes", ()))
    groups = getattr(options, "largest_group", None)
    quantized = quantize(model, QUANTIZED[column].for_target(backend.kept_weights, experts, groups)).model
    ids, inputs, plain = case
    references = _references(quantized, ids, inputs, {})
    outcome = _run(quantized, target, (ids, inputs, references), {})
    outcome.distance = max((references[prompt] - plain[prompt]).abs().max().item() for prompt in plain)
    return outcome


@contextmanager
def graphs_without_code() -> Iterator[None]:
    """One graph per method and no recompilation, through a backend that generates no code: inductor's C++ takes
    minutes.
    """
    backend = torch.compiler.get_default_backend()
    torch._dynamo.reset()
    torch.compiler.set_default_backend("aot_eager")
    try:
        with torch._dynamo.config.patch(error_on_recompile=True):
            yield
    finally:
        torch.compiler.set_default_backend(backend)
        torch._dynamo.reset()


def _session(model: PreTrainedModel, cache: ExportableCache, target: str, folder: Path) -> Session:
    if target == "eager":
        return Session.from_model(model, cache, prefill_chunk=PREFILL_CHUNK)
    if target == "compiled":
        return Session.from_model(model, cache, compile=True, prefill_chunk=PREFILL_CHUNK)
    if target == "tensorrt":
        return _network_session(model, cache)
    backend, options, program, written = _lowered(model, cache, target, folder)
    details = {file.name: dict(file.details) for file in written}
    description = replace(describe(program), details=details)
    if target == "mlx":
        runner = backend.stand_in(program, description, options, folder).runner
    else:
        runner = backend.open(folder, description)
    session = Session(runner, cache.layers, vocab_size_of(model), batch_size=1, target=target)
    session.stepper.rope = changing_rope(model, cache)
    return session


def _lowered(
    model: PreTrainedModel, cache: ExportableCache, target: str, folder: Path
) -> tuple[Backend, Any, Program, list[LoweredFile]]:
    backend = backend_for("executorch" if target in DEVICES else target)
    options = backend.options(**DEVICES.get(target, {}))
    chunk = FIXED_CHUNK if target in ("static", "openvino") else PREFILL_CHUNK
    program = Program(model, cache, backend.program_spec(ProgramSpec(chunk), options))
    return backend, options, program, backend.lower(program, folder, options)


def lower_only(architecture: Architecture, target: str) -> None:
    """Lower a decoder for a target, or export it by the recipe of a column, and run nothing."""
    model = tiny_model(architecture)
    if target in RECIPES:
        with bundle_of(model, target, verify=False):
            return
    cache = ExportableCache.from_model(model, MAX_CACHE_LEN, attn_implementation=None)
    with tempfile.TemporaryDirectory() as folder:
        _lowered(model, cache, target, Path(folder))


def _network_session(model: PreTrainedModel, cache: ExportableCache) -> Session:
    """Over the networks that TensorRT would make plans of, evaluated on the CPU: a plan runs on a GPU only."""
    from exportable_cache.backends.tensorrt.evaluator.evaluator import NetworkRunner
    from exportable_cache.backends.tensorrt.options import TensorRTOptions
    from exportable_cache.backends.tensorrt.target import engine_networks, engine_program_spec

    program = Program(model, cache, engine_program_spec(ProgramSpec(PREFILL_CHUNK)))
    runner = NetworkRunner(program.methods, engine_networks(program, TensorRTOptions()))
    return Session(runner, program.cache.layers, vocab_size_of(model), batch_size=1, target="tensorrt")


@torch.no_grad()
def _difference(
    session: Session,
    ids: torch.Tensor,
    inputs: dict[str, torch.Tensor],
    pieces: tuple[int, ...],
    reference: torch.Tensor,
) -> float:
    session.reset()
    if inputs:
        session.encode(**inputs)
    start = 0
    for count in pieces:
        logits = session.prefill(ids[:, start : start + count])
        start += count
    rows = [logits[0].clone()]
    for position in range(start, start + STEPS):
        rows.append(session.decode(ids[:, position])[0].clone())
    difference = (torch.stack(rows) - reference).abs().max().item()
    return float("inf") if difference != difference else difference


def _outcome_of(error: Exception, prefix: str = "") -> Outcome:
    # What the evaluator of networks does not know is no refusal of the target.
    refused = isinstance(error, ExportableCacheError) and not isinstance(error, VerificationError)
    reason = str(error) if refused else f"{prefix}{type(error).__name__}: {_first_line(error)}"
    frames = traceback.extract_tb((error.__cause__ or error).__traceback__)[-4:]
    where = [f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno} {frame.line}" for frame in frames]
    if isinstance(error, DisagreesError):
        found = _DIFFERENCE.search(str(error))
        return Outcome("wrong", float(found[1]) if found else float("inf"), str(error))
    if isinstance(error, peers.NotEvaluatedError):
        return Outcome("lowered", reason=str(error))
    return Outcome("refused" if refused else "error", reason=reason, where=where)


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else ""


def write_json(path: Path, facts: dict[str, Any]) -> None:
    """Atomically, as the reader may come at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(facts, indent=1))
    temporary.rename(path)


def is_asked(architecture: Architecture, target: str) -> bool:
    """Whether the zoo runs this architecture in this column."""
    of_decoders = target in ("tensorrt", "coreai", *DEVICES, *QUANTIZED, *PEER_DEVICES, "exporter", "dynamo")
    return not of_decoders or architecture.group in DECODER_GROUPS


def read_result(folder: Path, row: Architecture) -> dict[str, Any]:
    """What is known of an architecture; without results yet, no targets."""
    path = folder / f"{row.name}.json"
    facts = json.loads(path.read_text()) if path.exists() else {}
    facts.setdefault("targets", {})
    return facts
