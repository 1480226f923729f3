"""A spread of the zoo that shows every kind of layer. The whole: `make zoo`, or `pytest -m zoo tests/zoo`."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from typing import Any

import pytest

from exportable_cache.backends.tensorrt.evaluator import NetworkEvaluator
from exportable_cache.common.native.kernels import chosen_path
from exportable_cache.errors import VerificationError

from .architectures import GROUPS, LEFT_OUT, Architecture, architectures
from .build import PROMPTS
from .check import BY_NAME, FIXED_CHUNK, RECIPES, TARGETS, DisagreesError, Outcome, check, is_asked
from .run import run_apart
from .sample import KINDS, kinds, sample

#: Model types of the spread, by what they show.
SPREAD = {
    "full": "llama gpt2 opt phi falcon bloom mpt bert megatron-bert biogpt whisper",
    "sliding": "mistral gemma2 gemma3_text cohere2 gpt_oss olmo3 modernbert-decoder",
    "chunked": "llama4_text",
    "shared keys": "gemma3n_text gemma4_text",
    "latent keys": "deepseek_v2 deepseek_v3",
    "indexed": "glm_moe_dsa dots3_note_text",
    "experts": "mixtral qwen3_moe olmoe dbrx longcat_flash",
    "convolution": "lfm2_moe",
    "states": "mamba mamba2 falcon_mamba",
    "codebooks": "musicgen dia kyutai_speech_to_text",
    "states and keys": "jamba bamba qwen3_next falcon_h1 zamba2 granitemoehybrid",
}
#: Lowered for ExecuTorch as well: each takes a quarter of a minute.
ON_EXECUTORCH = ("gemma2", "mixtral", "mamba2")
#: Refused by name, and what the reason must say.
REFUSED = {
    "xlnet": "`mems`",
    "idefics": "cross-attention",
    "udop": "`bbox`",
}


def row_of(model_type: str) -> Architecture:
    return next(row for row in architectures() if row.model_type == model_type)


def outcomes(model_type: str, targets: list[str]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    check(row_of(model_type), targets, facts.update)
    assert facts.get("unfit") is None
    return facts


#: Of the spread, those that every run takes.
ALWAYS = ("mistral",)


@pytest.mark.parametrize(
    "model_type",
    [
        name if name in ALWAYS else pytest.param(name, marks=pytest.mark.full)
        for name in " ".join(SPREAD.values()).split()
    ],
)
def test_the_spread_passes(model_type: str) -> None:
    targets = ["eager", "pt2", *(["executorch"] if model_type in ON_EXECUTORCH else [])]
    if "executorch" in targets:
        pytest.importorskip("executorch", reason="the executorch extra is not installed")
    found = outcomes(model_type, targets)["targets"]
    assert {target: outcome["status"] for target, outcome in found.items()} == dict.fromkeys(targets, "pass"), found


@pytest.mark.full
def test_compiled_methods_are_one_graph_each() -> None:
    found = outcomes("gemma2", ["compiled"])["targets"]["compiled"]
    assert found["status"] == "pass", found


@pytest.mark.full
def test_networks_of_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    """They pass; what their evaluator does not know is an error, no refusal of the target's."""
    pytest.importorskip("exportable_cache.backends.tensorrt.upstream", reason="no tensorrt extra is installed")
    found = outcomes("mistral", ["tensorrt"])["targets"]["tensorrt"]
    assert found["status"] == "pass", found

    def lacks(*args: Any) -> None:
        raise VerificationError("layer 'x' is of kind LOOP, which the reference evaluator does not know")

    monkeypatch.setattr(NetworkEvaluator, "run", lacks)
    found = outcomes("mistral", ["tensorrt"])["targets"]["tensorrt"]
    assert found["status"] == "error" and "LOOP" in found["reason"], found


@pytest.mark.skipif(chosen_path() is None, reason="the native operators are not installed")
@pytest.mark.parametrize("column", ["executorch-native", pytest.param("executorch-fast", marks=pytest.mark.full)])
def test_what_export_writes_by_default(column: str) -> None:
    pytest.importorskip("executorch", reason="the executorch extra is not installed")
    found = outcomes("mistral", [column])["targets"][column]
    assert found["status"] == "pass", found
    assert (found["distance"] is None) is (column == "executorch-native")


@pytest.mark.skipif(chosen_path() is None, reason="the native operators are not installed")
@pytest.mark.parametrize("column", RECIPES)
def test_what_export_does_not_write_is_wrong(column: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def disagrees(*args: Any, recipe: str, **options: Any) -> None:
        raise VerificationError(f"{recipe}: max |logit difference| 5.0e-01 exceeds 1e-04")

    monkeypatch.setattr("tests.zoo.check.export", disagrees)
    found = outcomes("mistral", [column])["targets"][column]
    assert (found["status"], found["difference"]) == ("wrong", 0.5), found
    assert found["reason"].startswith(f"{RECIPES[column]}: "), found


@pytest.mark.skipif(chosen_path() is None, reason="the native operators are not installed")
@pytest.mark.parametrize(("moved", "status"), [(0.01, "wrong"), (0.3, "pass")])
def test_where_experts_tie_all_are_chosen(moved: float, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference moves by less than the limit, or by more; only the latter says nothing of the program."""

    def exported(model: Any, *args: Any) -> Outcome:
        if model.config.num_experts_per_tok < model.config.num_local_experts:
            raise DisagreesError("NOT verified: max |logit difference| 2.2e-01 exceeds 5e-02, root mean square 1e-01")
        return Outcome("pass", 1e-6)

    monkeypatch.setattr("tests.zoo.check._exported", exported)
    monkeypatch.setattr("tests.zoo.check.movement", lambda *args: moved)
    found = outcomes("mixtral", ["executorch-native"])["targets"]["executorch-native"]
    assert found["status"] == status, found
    assert ("with every expert and key chosen" in found["reason"]) is (status == "pass"), found


@pytest.mark.full
@pytest.mark.parametrize(("column", "package"), [("openvino_exporter", "openvino"), ("mlx_exporter", "mlx.core")])
def test_exporters_of_transformers_for_devices(column: str, package: str) -> None:
    """A plain model passes past its window, so that an error elsewhere is not one of how they are called here."""
    pytest.importorskip(package, reason=f"{package} is not installed")
    pytest.importorskip("executorch", reason="the executorch extra is not installed")
    found = outcomes("mistral", [column])["targets"][column]
    assert found["status"] == "pass", found


def test_a_sample_has_every_kind_and_no_row_twice() -> None:
    rows = [row for row in architectures() if row.group == "causal"]
    by_kind = kinds(rows)
    chosen = [row.name for row in sample(rows, 2)]
    assert len(set(chosen)) == len(chosen)
    assert Counter(by_kind[name] for name in chosen) == dict.fromkeys(KINDS, 2)
    named = {
        "llama": "dense",
        "mixtral": "experts",
        "deepseek_v3": "latent keys",
        "mamba": "recurrent",
        "jamba": "hybrid",
    }
    assert {name: by_kind[f"causal-{name}"] for name in named} == named


def test_some_targets_are_asked_of_decoders_alone() -> None:
    rows = {row.name: row for row in architectures()}
    for target in (*TARGETS, *BY_NAME):
        asked = {name for name, row in rows.items() if is_asked(row, target)}
        assert {"causal-llama", "image-llava"} <= asked
        of_decoders = target not in RECIPES and target in ("tensorrt", "coreai", *BY_NAME)
        assert asked.isdisjoint({"seq2seq-t5", "speech-whisper"}) is of_decoders
        assert of_decoders or asked == set(rows)


def test_fixed_chunks_run_both_methods() -> None:
    assert all(any(piece >= FIXED_CHUNK for piece in pieces) for pieces in PROMPTS)


@pytest.mark.full
def test_an_encoder_of_windows_is_one_graph() -> None:
    found = outcomes("led", ["compiled"])["targets"]["compiled"]
    assert found["status"] == "pass", found


def test_a_row_tells_processor_seconds_of_children_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*args: Any) -> Outcome:
        subprocess.run([sys.executable, "-c", "sum(range(10_000_000))"], check=True)
        time.sleep(0.3)
        return Outcome("pass", 0.0)

    monkeypatch.setattr("tests.zoo.check._run", busy)
    found = outcomes("llama", ["eager"])
    seconds, processor = (found["targets"]["eager"][name] for name in ("seconds", "processor_seconds"))
    assert 0.05 < processor < seconds - 0.25, found
    assert found["model processor seconds"] > 0


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_cannot_be_right_is_refused(model_type: str) -> None:
    found = outcomes(model_type, ["eager"])["targets"]["eager"]
    assert found["status"] == "refused" and REFUSED[model_type] in found["reason"]


def test_the_list_is_transformers_own() -> None:
    rows = architectures()
    assert len({row.name for row in rows}) == len(rows)
    assert len({row.class_name for row in rows}) == len(rows)
    listed = {
        class_name
        for mapping in GROUPS.values()
        for model_type, class_name in mapping.items()
        if model_type not in LEFT_OUT
    }
    assert listed == {row.class_name for row in rows}


@pytest.mark.zoo
@pytest.mark.parametrize("row", architectures(), ids=lambda row: row.name)
def test_the_whole(row: Architecture) -> None:
    found = run_apart(row, [target for target in TARGETS if is_asked(row, target)])["targets"]
    assert {outcome["status"] for outcome in found.values()} <= {"pass", "refused"}, found
