"""What is verified where a program cannot run: with the fake target pretending to be for another machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import PreTrainedModel

from exportable_cache import ExportableCache, export
from exportable_cache.backends import TARGETS
from exportable_cache.backends.base import LoweredFile, RunsElsewhere, StandIn
from exportable_cache.backends.live.runner import ModuleRunner
from exportable_cache.backends.pt2.target import FILE, Pt2Backend
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.program.methods import ProgramMethod
from exportable_cache.program.program import Program
from exportable_cache.program.spec import ProgramSpec
from exportable_cache.verification.references import program_of
from exportable_cache.verification.report import VerifyReport
from exportable_cache.verification.verify import verify

from .support.models import tiny_model

CAPACITY = 32
REMARK = "built for the moon; not executed"


class Elsewhere(Pt2Backend):
    """`pt2` whose programs run on another machine; the model itself stands in for them."""

    here = False
    seen: Program | None = None

    def lower(self, program: Program, folder: Path, options) -> list[LoweredFile]:
        """Export a program that this machine runs. Write only a name for another one, because no test opens it."""
        if self.here:
            return super().lower(program, folder, options)
        (folder / FILE).write_text("a program for the moon")
        return [LoweredFile(FILE, "the name of a program")]

    def runs_here(self, description, options) -> bool:
        return self.here

    def stand_in(self, program: Program, description, options, folder: Path) -> StandIn:
        self.seen = program
        cache = ExportableCache.from_model(program.model, CAPACITY)
        runner = ModuleRunner(program.model, cache, ProgramSpec(description.methods["prefill"].max_length))
        return StandIn(runner, REMARK)


backend = Elsewhere()


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    monkeypatch.setitem(TARGETS, "pt2", (__name__, (), None))
    monkeypatch.setattr(backend, "here", False)
    monkeypatch.setattr(backend, "seen", None)
    return backend


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("gemma3_text", num_hidden_layers=1, layer_types=["sliding_attention"])


def exported(model: PreTrainedModel, folder: Path, **options: bool) -> Bundle:
    return export(model, "pt2", CAPACITY, folder, prefill_chunk=8, form="explicit", **options)


@pytest.fixture
def unverified(tmp_path_factory: pytest.TempPathFactory, model: PreTrainedModel) -> Bundle:
    """The bundle of `model`, made once."""
    folder = tmp_path_factory.getbasetemp() / "stand_in"
    return Bundle.open(folder) if folder.exists() else exported(model, folder, verify=False)


def test_the_remark_is_recorded_and_shown(model: PreTrainedModel, tmp_path: Path, elsewhere: Elsewhere) -> None:
    report = VerifyReport(**exported(model, tmp_path / "out").manifest.verification)
    assert report.passed and report.remark == REMARK and str(report).endswith(f"; {REMARK}")
    assert isinstance(elsewhere, RunsElsewhere) and elsewhere.seen is not None
    # What failed was not shown to hold anywhere.
    assert REMARK not in str(replace(report, passed=False))


def test_a_bundle_is_verified_through_a_program_made_from_the_manifest(
    model: PreTrainedModel, unverified: Bundle, elsewhere: Elsewhere
) -> None:
    bundle = unverified
    report = verify(bundle, model, prompts=[3, 12])
    assert report.passed and report.remark == REMARK
    made = elsewhere.seen
    assert made.form == "explicit" and made.methods["prefill"].max_length == 8
    assert [layer["config"] for layer in bundle.manifest.description().layers] == [
        layer.config() for layer in made.cache.layers
    ]


def test_a_program_is_made_anew_with_the_methods_it_had(model: PreTrainedModel, unverified: Bundle) -> None:
    manifest = unverified.manifest
    known = {
        "decode": ProgramMethod("decode", 1, 1),
        "prefill": ProgramMethod("prefill", 2, 8),
        "forward": ProgramMethod("forward", 1, 8),
    }
    for names in (("decode", "prefill"), ("forward",), ("decode", "prefill", "forward")):
        methods = {name: known[name] for name in names}
        program = SimpleNamespace(methods=methods, lora=None)
        described = SimpleNamespace(
            program=program,
            target="pt2",
            options=manifest.options,
            description=lambda methods=methods: replace(manifest.description(), methods=methods),
        )
        assert program_of(described, model).methods == methods


def test_a_program_that_runs_here_is_run(model: PreTrainedModel, tmp_path: Path, elsewhere: Elsewhere) -> None:
    elsewhere.here = True
    report = VerifyReport(**exported(model, tmp_path / "out").manifest.verification)
    assert report.passed and report.remark == "" and elsewhere.seen is None
