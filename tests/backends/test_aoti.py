"""The `aoti` target: machine code over one set of weights and one cache that is updated in place."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from exportable_cache import ExportableCache, export, load
from exportable_cache.backends.aoti.package import check_operators
from exportable_cache.backends.aoti.target import CODE, CONSTANTS, TABLE
from exportable_cache.common.compat.torch_aoti import call_products_in_cpp
from exportable_cache.errors import BundleError, InputError, UnsupportedModelError
from exportable_cache.program.program import Program
from exportable_cache.program.spec import ProgramSpec

from ..support.models import WINDOW, tiny_model, tokens
from ..support.oracle import difference, reference_logits
from ..support.sessions import AOTI_CAPACITY, aoti_bundle, layer_for_aoti, lowered_session, regional_aoti_bundle

TOLERANCE = 1e-4


# Token by token: a layer alone is one region, a whole method; two equal ones are three. Layers that differ,
# and prompts, are two whole methods. How regions call each other is also tested in test_aoti_regions.py.
@pytest.fixture(
    scope="module",
    params=[
        "mistral of one layer",
        pytest.param("mistral", marks=pytest.mark.full),
        pytest.param("gemma3_text", marks=pytest.mark.full),
    ],
)
def model(request: pytest.FixtureRequest) -> Any:
    if request.param == "mistral of one layer":
        return layer_for_aoti()
    return tiny_model(request.param, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def bundle(model: Any) -> Path:
    return regional_aoti_bundle(model) if model.config.model_type == "mistral" else aoti_bundle(model)


def capacity(model: Any, layer: int) -> int:
    return WINDOW if model.config.model_type == "mistral" or layer == 0 else AOTI_CAPACITY


def worst(session: Any, model: Any) -> float:
    found = []
    for prompt in (3, 7, 8, 9, 24):
        ids = tokens(prompt + 30, seed=prompt)
        reference = reference_logits(model, ids, prompt)
        session.reset()
        found.append(
            difference(
                lambda p: session.decode(p[:, 0]) if p.shape[1] == 1 else session.prefill(p), reference, ids, prompt
            )
        )
    return max(found)


def test_a_loaded_bundle_computes_the_model_past_the_window(bundle: Path, model: Any) -> None:
    assert worst(load(bundle, trust=True), model) <= TOLERANCE


def test_methods_write_one_cache_in_place(bundle: Path) -> None:
    session = load(bundle, trust=True)
    state = session.runner.state
    layers = range(len(session.layers))
    assert set(state) == {f"layers.{layer}.{name}" for layer in layers for name in ("keys", "values")}
    addresses = {name: tensor.data_ptr() for name, tensor in state.items()}
    session.prefill(tokens(5))
    after_prefill = {name: tensor.clone() for name, tensor in state.items()}
    session.decode(tokens(1)[0])
    for name, tensor in state.items():
        assert tensor.data_ptr() == addresses[name]
        changed = (tensor != after_prefill[name]).any(dim=-1).any(dim=1)[0].nonzero().flatten().tolist()
        assert changed == [5], name


def test_two_sessions_do_not_share_a_cache(bundle: Path) -> None:
    first, second = load(bundle, trust=True), load(bundle, trust=True)
    expected = first.prefill(tokens(7))
    second.prefill(tokens(9, seed=1))
    torch.testing.assert_close(first.decode(tokens(1)[0]), second_opinion(bundle))
    assert not torch.equal(expected, second.prefill(tokens(3)))


def second_opinion(bundle: Path) -> torch.Tensor:
    session = load(bundle, trust=True)
    session.prefill(tokens(7))
    return session.decode(tokens(1)[0])


def test_the_methods_are_of_equal_layers_or_whole(bundle: Path, model: Any) -> None:
    table = json.loads((bundle / TABLE).read_text())
    calls = {name: [call["region"] for call in method["calls"]] for name, method in table["methods"].items()}
    kinds = {"mistral": {"decode": [0, 1, 1, 2]}, "gemma3_text": {"decode": [0], "prefill": [1]}}
    alone = model.config.num_hidden_layers == 1
    assert calls == ({"decode": [0]} if alone else kinds[model.config.model_type])
    # Only code of whole methods holds tensors.
    regional = model.config.model_type == "mistral" and not alone
    assert [bool(held) for held in table["regions"]] == ([False] * 3 if regional else [True] * len(calls))


def test_weights_are_stored_once_and_the_cache_not_at_all(bundle: Path, model: Any) -> None:
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert weights <= (bundle / CONSTANTS).stat().st_size <= weights + 32_000
    stored = torch.load(bundle / CONSTANTS, weights_only=True)
    assert sum(name.endswith(("lm_head.weight", "embed_tokens.weight")) for name in stored["weights"]) == 1
    last = model.config.num_hidden_layers - 1
    assert stored["state"][f"layers_{last}_keys"].shape == (1, 2, capacity(model, last), 8)
    assert stored["state"][f"layers_{last}_keys"].untyped_storage().nbytes() == 4


# One layer: rows are the same to every kind of layer, see test_batches.py.
@pytest.mark.full
def test_rows_of_a_batch() -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    session = lowered_session(model, "aoti", 32, batch_size=2)
    ids = tokens(20, batch_size=2)
    reference = reference_logits(model, ids, 6)
    assert (
        difference(lambda p: session.decode(p[:, 0]) if p.shape[1] == 1 else session.prefill(p), reference, ids, 6)
        <= TOLERANCE
    )


def test_a_damaged_package_is_refused(bundle: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(bundle, tmp_path / "bundle")
    (damaged / CODE).write_bytes((bundle / CODE).read_bytes()[:1000])
    with pytest.raises(BundleError):
        load(damaged, trust=True)


def test_an_unknown_option_is_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="target 'aoti' has no option 'form'; it knows buckets, score_length"):
        export(model, "aoti", 64, tmp_path / "bundle", form="explicit")


# Machine code of mixtures runs in tests/parallel/test_machine_code.py, in processes that import no model.
def test_products_of_experts_need_no_python() -> None:
    model = tiny_model("mixtral", num_hidden_layers=1)
    program = Program(model, ExportableCache.from_model(model, 32), ProgramSpec(8))
    module = program.export("decode").graph_module
    with pytest.raises(UnsupportedModelError, match=r"calls transformers::grouped_mm_fallback; export for"):
        check_operators(module)
    call_products_in_cpp(module)
    check_operators(module)
