"""LoRA: merged into the weights, the original left alone; what cannot be merged is refused with the remedy."""

from __future__ import annotations

from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch

from exportable_cache import export, load
from exportable_cache.errors import InputError, MissingDependencyError, UnsupportedModelError
from exportable_cache.models.loading.loading import load_config, load_model
from exportable_cache.verification.verify import verify

from .support.models import tiny_model, tokens
from .support.oracle import difference, reference_logits

CAPACITY = 48
TARGETED = ["q_proj", "v_proj", "down_proj"]


pytestmark = pytest.mark.usefixtures("fake_backend")


def adapted(seed: int = 0, model: Any = None, **options: Any) -> Any:
    """A tiny model under a LoRA adapter that moves its logits."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 16, "target_modules": TARGETED, **options})
    wrapped = peft.get_peft_model(tiny_model("llama") if model is None else model, config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return wrapped


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=tokens(9)).logits


def gap(left: Any, right: Any) -> float:
    return (logits(left) - logits(right)).abs().max().item()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and an adapter of it, saved apart."""
    path = tmp_path_factory.mktemp("adapters")
    tiny_model("llama").save_pretrained(path / "model")
    adapted().save_pretrained(path / "adapter")
    return path / "model", path / "adapter"


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"target_modules": ["embed_tokens", "lm_head"]}])
def test_adapters_of_a_live_model_are_merged_into_a_copy(options: dict[str, Any]) -> None:
    wrapped = adapted(**options)
    before = {name: tensor.clone() for name, tensor in wrapped.state_dict().items()}
    loaded = load_model(wrapped)
    assert gap(wrapped, tiny_model("llama")) > 0.1
    assert gap(loaded.model, wrapped) < 1e-4 and type(loaded.model).__name__ == "LlamaForCausalLM"
    assert loaded.remarks == ("merged the adapter 'default' (LORA) into the weights",)
    assert loaded.source == "LlamaForCausalLM" and load_config(wrapped) is wrapped.get_base_model().config
    # Whoever trains on goes on as if nothing had been exported.
    after = wrapped.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


def test_only_weights_that_the_adapter_changes_are_copied() -> None:
    wrapped = adapted()
    base, model = wrapped.get_base_model(), load_model(wrapped).model
    shared = {
        name for name, one in model.named_parameters() if one.data_ptr() in {p.data_ptr() for p in base.parameters()}
    }
    assert {name.split(".")[-2] for name in set(dict(model.named_parameters())) - shared} == set(TARGETED)


def test_a_live_model_with_adapters_is_exported(tmp_path: Path) -> None:
    wrapped, lines = adapted(model=tiny_model("llama", dtype=torch.bfloat16)), []
    bundle = export(
        wrapped, "fake", CAPACITY, tmp_path / "out", dtype="float32", progress=lambda line, *_: lines.append(line)
    )
    assert "merged the adapter 'default' (LORA) into the weights" in lines
    assert bundle.manifest.remarks == ["merged the adapter 'default' (LORA) into the weights"]
    assert bundle.manifest.stored_dtype == "bfloat16" and bundle.manifest.verification["stored"] is not None
    # In float32, adapter and all.
    exact = adapted(model=tiny_model("llama", dtype=torch.bfloat16)).float()
    assert (load(bundle.path).prefill(tokens(9)) - logits(exact)[:, -1]).abs().max() < 1e-4


def test_an_adapter_of_a_folder_is_merged(folders: tuple[Path, Path], tmp_path: Path) -> None:
    model, adapter = folders
    bundle = export(model, "fake", CAPACITY, tmp_path / "out", lora=adapter)
    assert bundle.manifest.source == "model + adapter"
    assert bundle.manifest.remarks == ["merged the adapter 'adapter' into the weights"]
    session, ids = load(bundle.path), tokens(CAPACITY)
    expected = reference_logits(adapted().merge_and_unload(), ids, 20)
    assert difference(session.prefill, expected, ids, 20) < 1e-4
    assert verify(bundle.path, model, lora=[adapter]).passed
    assert not verify(bundle.path, model).passed


def test_the_distance_to_the_stored_weights_is_of_the_merged_ones(folders: tuple[Path, Path], tmp_path: Path) -> None:
    tiny_model("llama", dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    bundle = export(tmp_path / "half", "fake", CAPACITY, tmp_path / "out", dtype="float32", lora=folders[1])
    # Rounding to bfloat16, of logits that the adapter moves by more than 1.
    assert 1e-3 < bundle.manifest.verification["stored"]["max_difference"] < 0.5


def test_an_adapter_goes_onto_a_live_model_that_stays_as_it_is(folders: tuple[Path, Path]) -> None:
    model = tiny_model("llama")
    before = logits(model)
    assert gap(load_model(model, lora=[folders[1]]).model, adapted()) < 1e-4
    assert torch.equal(logits(model), before) and not [name for name, _ in model.named_modules() if "lora" in name]


def test_two_adapters_are_refused_with_what_is_possible(folders: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="lora must name at most one adapter, got 2 .*export once for each.*add_weighted_adapter"
    ):
        export("no-such-model", "fake", CAPACITY, tmp_path / "out", lora=[folders[1], folders[1]])


def test_the_option_repeats_so_that_the_second_is_refused_and_not_dropped(folders: tuple[Path, Path]) -> None:
    from typer.testing import CliRunner

    from exportable_cache.cli.app import app

    twice = ["--lora", str(folders[1])] * 2
    result = CliRunner().invoke(app, ["export", str(folders[0]), "-n", "32", "-o", "nowhere", "-t", "pt2", *twice])
    assert result.exit_code == 2 and "lora must name at most one adapter, got 2" in result.stderr


def test_adapters_that_do_not_fit_are_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    model, adapter = folders
    with pytest.raises(
        InputError, match=r"lora must be a folder with adapter_config.json, got '.*model'; pass the folder that peft"
    ):
        load_model(model, lora=[model])
    with pytest.raises(InputError, match="cannot apply the adapter .* to LlamaForCausalLM: .*it was trained for"):
        load_model(tiny_model("llama", hidden_size=64), lora=[adapter])
    with pytest.raises(InputError, match="lacks weights for LlamaForCausalLM"):
        load_model(tiny_model("llama", num_hidden_layers=3), lora=[adapter])
    with pytest.raises(InputError, match=r"holds an adapter .* pass that model, and .* as lora \(--lora\)"):
        load_model(adapter)


def test_adapters_that_do_not_merge_are_refused() -> None:
    peft = pytest.importorskip("peft")
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(UnsupportedModelError, match="PROMPT_TUNING, which does not change weights"):
        load_model(peft.get_peft_model(tiny_model("llama"), prompt).eval())
    with pytest.raises(UnsupportedModelError, match="ties its embeddings to its head.* tie_word_embeddings=False"):
        load_model(adapted(model=tiny_model("llama", tie_word_embeddings=True), target_modules=["embed_tokens"]))
    with pytest.raises(InputError, match=r"PeftModel is in training mode; call model.eval\(\)"):
        load_model(adapted().train())
    inside = tiny_model("llama")
    inside.add_adapter(peft.LoraConfig(target_modules=TARGETED))
    with pytest.raises(UnsupportedModelError, match="has adapters loaded; .*pass their folder as lora"):
        load_model(inside.eval())


def test_merging_without_peft_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"needs peft.*exportable-cache\[lora\]"):
        load_model("demo", lora=[tmp_path])
