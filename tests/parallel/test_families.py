"""Families of models whose weights are split in ways of their own, over two and four processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from exportable_cache import ExportableCache, Session
from exportable_cache.pipeline.plan import plan

from ..support.models import tiny_model, tokens
from ..support.oracle import reference_logits
from . import checks
from .checks import CAPACITY, LENGTH, NEW, PROMPT, REPEATED
from .processes import run_ranks

_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_LATENT = {
    **{"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"n_routed_experts": 4, "first_k_dense_replace": 1, "num_key_value_heads": 4, **_EXPERTS},
}
#: Config fields by model type. Four key and value heads, so that four ranks have one each.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    # Of four ranks each two keep the same head; the first has biases.
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2},
    "gemma3_text": {},
    "deepseek_v2": _LATENT,
    "deepseek_v3": {**_LATENT, "n_group": 1, "topk_group": 1},
    "mixtral": {"num_local_experts": 4},
    "qwen3_next": {
        **{"num_experts": 4, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2, **_EXPERTS},
        **{"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
        **{"layer_types": ["linear_attention", "full_attention"]},
    },
}
#: Of each layer, whether ranks have heads of their own of it: not of latents, nor of states, whose projections
#: transformers gathers.
SPLIT = {"deepseek_v2": [False, False], "deepseek_v3": [False, False], "qwen3_next": [False, True]}


def family(name: str) -> Any:
    return tiny_model(name, **{"num_key_value_heads": 4, **FAMILIES[name]})


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("families")
    for name in FAMILIES:
        family(name).save_pretrained(folder / name)
    return run_ranks(folder, request.param, (checks.families,))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("compiled")
    for name in FAMILIES:
        family(name).save_pretrained(folder / name)
    return run_ranks(folder, 2, (checks.compiled_families,))


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_bytes_of_a_family(name: str, found: list[dict[str, Any]]) -> None:
    model = family(name)
    expected = reference_logits(model, tokens(LENGTH), PROMPT)
    whole = ExportableCache.from_model(model, CAPACITY)
    single = Session.from_model(model, whole)
    for one in found:
        result = one["families"][name]
        assert (result["logits"] - expected).abs().max() < 1e-4
        assert torch.equal(result["logits"], found[0]["families"][name]["logits"])
        split = SPLIT.get(name, [True, True])
        heads = model.config.num_key_value_heads
        parts = [min(len(found), heads) if is_split else 1 for is_split in split]
        assert list(result["parts"]) == parts
        for layer, count, given in zip(whole.layers, parts, result["bytes"]):
            shared = layer.cumulative_length.nbytes
            assert given - shared == (layer.nbytes - shared) // count
        assert result["fingerprint"] == single.fingerprint
        planned = plan(model.config, CAPACITY, tensor_parallel=len(found)).tensor_parallel
        assert planned.cache_bytes == sum(result["bytes"])
        assert planned.split_layers == tuple(index for index, is_split in enumerate(split) if is_split)
        assert planned.weights_bytes == result["weights"]
        counts, _ = result["sent"]
        assert sum(counts.values()) == planned.messages
        assert sum(count for kind, count in counts.items() if "reduce" in kind) == planned.sums


@pytest.mark.full
def test_a_rank_that_does_not_come_ends_the_others_within_the_timeout(tmp_path: Path) -> None:
    tiny_model(checks.FAMILY).save_pretrained(tmp_path / checks.FAMILY)
    first, _ = run_ranks(tmp_path, 2, (checks.hangs,), timeout=5)
    assert "RankLostError: a rank does not answer" in first["hangs"]


@pytest.mark.full
def test_compiled_steps_have_their_sums_inside_one_graph(tmp_path: Path) -> None:
    model = tiny_model(checks.FAMILY)
    model.save_pretrained(tmp_path / checks.FAMILY)
    expected = reference_logits(model, tokens(LENGTH), PROMPT)
    session = Session.from_model(model, ExportableCache.from_model(model, CAPACITY))
    greedy = list(session.generate(REPEATED, max_new_tokens=NEW))
    for one in run_ranks(tmp_path, 2, (checks.compiled,)):
        result = one["compiled"]
        assert isinstance(result, dict) and "refused" not in result, result
        assert result["tokens"] == result["several"] == greedy
        assert (result["logits"] - expected).abs().max() < 1e-4
        assert len(result["graphs"]) > 2
        for graph in result["graphs"]:
            sums = sum("all_reduce" in name for name in graph)
            # A launch of three steps has them three times, with a token that is agreed on behind each.
            steps = sum("broadcast" in name for name in graph) or 1
            assert sums == steps * (2 * model.config.num_hidden_layers + 1), graph


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_compiled_steps_of_a_family(name: str, compiled: list[dict[str, Any]]) -> None:
    expected = reference_logits(family(name), tokens(LENGTH), PROMPT)
    for one in compiled:
        result = one["compiled_families"][name]
        assert not isinstance(result, str), result
        assert (result["logits"] - expected).abs().max() < 1e-4
        # Of the prompt and of a token.
        assert len(result["graphs"]) == 2
