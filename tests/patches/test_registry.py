"""The registry of patches: complete, for the installed transformers, and checked wherever a model meets a cache."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch
import transformers

from exportable_cache import ExportableCache
from exportable_cache.common.patch import ORIGINAL, Patch
from exportable_cache.errors import UnsupportedModelError
from exportable_cache.models.patches import registry
from exportable_cache.models.patches.registry import COPIED, PATCHES, PREPARATIONS, patch_model, patch_types

from ..support.forked import run_python
from ..support.kinds import kind_model
from ..support.models import tiny_model, tokens
from ..zoo.architectures import architectures
from ..zoo.build import tiny_model as zoo_model

MODELS = Path(transformers.__file__).parent / "models"
#: Models that some supported releases do not have: transformers 5.20 none of these, 5.23 not the second.
NEWER = {"dots3_note", "lara_mini", "mistral_large4"}
ALL = list({(patch.file, patch.name): patch for patches in PATCHES.values() for patch in patches}.values())


def is_there(patch: Patch) -> bool:
    if not (MODELS / patch.file.split(".")[0]).is_dir():
        return False
    owner, name = patch._owner()
    return hasattr(owner, name)


@pytest.mark.parametrize("patch", ALL, ids=lambda patch: f"{patch.file}-{patch.label}")
def test_every_patch_was_written_for_the_installed_source(patch: Patch) -> None:
    """Fails where transformers changed an original: read it, adapt the replacement, and add the digest."""
    if (not patch.needed or patch.file.split(".")[0] in NEWER) and not is_there(patch):
        pytest.skip("this release of transformers has no such model or method")
    assert patch.digest() in patch.digests
    assert patch.reason and re.fullmatch(r"https://github.com/huggingface/.*\.py", patch.link)


def test_every_copy_of_a_replaced_function_has_a_patch() -> None:
    """The scans are copied from modeling file to modeling file: a new model with one needs an entry."""
    known = {(patch.file, patch.name) for patch in ALL}
    for path in MODELS.glob("*/modeling_*.py"):
        functions = set(re.findall(r"^def (\w+)", path.read_text(), re.MULTILINE))
        for function in functions & COPIED:
            assert (f"{path.parent.name}.{path.stem}", function) in known


def test_every_model_type_is_one_of_the_files_configs() -> None:
    for model_type, patches in PATCHES.items():
        for patch in patches:
            folder = MODELS / patch.file.split(".")[0]
            if folder.name in NEWER and not folder.is_dir():
                continue
            sources = [path.read_text() for path in folder.glob("configuration_*.py")]
            found = {name for source in sources for name in re.findall(r'model_type(?:: str)? = "([^"]+)"', source)}
            assert model_type in found


@pytest.mark.parametrize("model_type", sorted(PREPARATIONS))
def test_a_model_that_nobody_prepared_runs_beside_one_that_is(model_type: str) -> None:
    """Both are of the same class, whose methods are replaced: a user's own, and a checkpoint that is compared with."""
    model = zoo_model({one.model_type: one for one in architectures()}[model_type])
    prepared = copy.deepcopy(model)
    patch_model(prepared)
    with torch.no_grad():
        assert torch.equal(model(tokens(9)).logits, prepared(tokens(9)).logits)


def changed(monkeypatch: pytest.MonkeyPatch, model_type: str, **fields: object) -> None:
    """As if transformers had another release: nothing replaced yet, and the patches' fields are others."""
    for patch in PATCHES[model_type]:
        owner, name = patch._owner()
        monkeypatch.setattr(owner, name, getattr(getattr(owner, name), ORIGINAL, getattr(owner, name)))
    monkeypatch.setitem(PATCHES, model_type, tuple(replace(patch, **fields) for patch in PATCHES[model_type]))


def test_a_changed_original_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = kind_model("mamba")
    changed(monkeypatch, "mamba", digests=("0" * 16,))
    with pytest.raises(UnsupportedModelError) as refusal:
        ExportableCache.from_model(model, 16)
    for part in ("mamba_selective_scan", metadata.version("transformers"), "0" * 16, "DynamicCache"):
        assert part in str(refusal.value)
    with pytest.raises(UnsupportedModelError, match="mamba_selective_scan"):
        ExportableCache.from_config(model.config, 16)


def test_a_missing_original_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    changed(monkeypatch, "mamba")
    patch = PATCHES["mamba"][0]
    monkeypatch.setitem(PATCHES, "mamba", (replace(patch, name="scan_of_tomorrow"),))
    with pytest.raises(UnsupportedModelError, match="scan_of_tomorrow of transformers .* does not exist"):
        patch_types(["mamba"])


def test_a_model_of_classes_that_no_patch_reaches_is_refused() -> None:
    """Code from a repository, under the type of a model that needs a patch: found by class name, it was left alone."""
    model = tiny_model("llama")
    model.config.model_type = "mamba"
    with pytest.raises(UnsupportedModelError, match="'mamba' .*mamba_selective_scan.*trust_remote_code"):
        patch_model(model)


def test_an_overlooked_copy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = kind_model("mamba")
    changed(monkeypatch, "mamba")
    monkeypatch.delitem(PATCHES, "mamba")
    with pytest.raises(UnsupportedModelError, match="modeling_mamba has a function 'mamba_selective_scan'.*mamba;"):
        patch_model(model)


def gpt_neo():
    return zoo_model(next(row for row in architectures() if row.model_type == "gpt_neo"))


LATER = """
import sys, torch
from transformers import GPTNeoForCausalLM
from exportable_cache import ExportableCache
folder, order = sys.argv[1:]
if order == "cache first":
    cache = ExportableCache.load(folder + "/cache.safetensors")
model = GPTNeoForCausalLM.from_pretrained(folder + "/model").eval()
if order == "model first":
    cache = ExportableCache.load(folder + "/cache.safetensors")
with torch.no_grad():
    torch.save(model(torch.load(folder + "/ids.pt"), past_key_values=cache).logits, folder + "/logits.pt")
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A GPT-Neo, a cache of its first 20 tokens, 6 further tokens, and their logits without any cache of ours."""
    folder, model, ids = tmp_path_factory.mktemp("saved"), gpt_neo(), tokens(26)
    with torch.no_grad():
        expected = model(ids).logits[:, 20:]
        cache = ExportableCache.from_model(model, 32, attn_implementation=None)
        model(ids[:, :20], past_key_values=cache)
    cache.save(folder / "cache.safetensors")
    model.save_pretrained(folder / "model")
    torch.save(ids[:, 20:], folder / "ids.pt")
    return folder, expected


@pytest.mark.parametrize("order", ["cache first", pytest.param("model first", marks=pytest.mark.full)])
def test_a_saved_cache_of_a_patched_model_goes_on_in_a_fresh_process(saved: tuple, order: str) -> None:
    """Nothing there calls `from_model`: unpatched, its attention takes the newest key to be the last slot."""
    folder, expected = saved
    run_python(LATER, folder, order).check_returncode()
    assert (torch.load(folder / "logits.pt") - expected).abs().max() <= 1e-4


BY_HAND = """
import sys, torch
from transformers import GPTNeoForCausalLM
from exportable_cache import ExportableCache
from exportable_cache.cache.cache import LayeredCache
folder = sys.argv[1]
cache = ExportableCache(LayeredCache.load.__func__(LayeredCache, folder + "/cache.safetensors").layers)
model = GPTNeoForCausalLM.from_pretrained(folder + "/model").eval()
with torch.no_grad():
    torch.save(model(torch.load(folder + "/ids.pt"), past_key_values=cache).logits, folder + "/logits.pt")
"""


def test_a_cache_made_of_layers_meets_its_model_at_its_first_step(saved: tuple) -> None:
    folder, expected = saved
    run_python(BY_HAND, folder).check_returncode()
    assert (torch.load(folder / "logits.pt") - expected).abs().max() <= 1e-4


def test_a_cache_from_the_config_patches_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = kind_model("mamba")
    changed(monkeypatch, "mamba")
    monkeypatch.setattr("exportable_cache.models.layers.specs.model_without_weights", lambda config: model)
    seen = []
    monkeypatch.setattr(registry, "PATCHES", {"mamba": tuple(_Recorded(patch, seen) for patch in PATCHES["mamba"])})
    ExportableCache.from_config(model.config, 16)
    assert "mamba_selective_scan" in seen


class _Recorded:
    def __init__(self, patch: Patch, seen: list[str]) -> None:
        self.patch, self.seen = patch, seen

    def __getattr__(self, name: str) -> object:
        return getattr(self.patch, name)

    def apply(self) -> None:
        self.seen.append(self.patch.label)
        self.patch.apply()
