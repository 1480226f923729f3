"""Functions that act in traces alone: they give what the originals give, which run everywhere else."""

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextIndexer
from transformers.models.jetmoe.modeling_jetmoe import JetMoeMoE
from transformers.models.seamless_m4t import modeling_seamless_m4t

from exportable_cache.common.patch import ORIGINAL
from exportable_cache.models.patches.families import glm5_next, jetmoe
from exportable_cache.models.patches.mechanisms import speech


def original(function):
    return getattr(function, ORIGINAL, function)


@pytest.mark.parametrize("length", [1, 2, 7])
def test_scores_by_distance(length: int) -> None:
    torch.manual_seed(0)
    module = nn.Module()
    module.linear_pos, module.head_size, module.scaling = nn.Linear(8, 8, bias=False), 4, 0.5
    module.pos_bias_u, module.pos_bias_v = torch.randn(2, 4), torch.randn(2, 4)
    query, key, embeddings = (
        torch.randn(3, 2, length, 4),
        torch.randn(3, 2, length, 4),
        torch.randn(1, 2 * length - 1, 8),
    )
    function = original(modeling_seamless_m4t._apply_relative_position_encoding)
    expected = function(module, query, key, embeddings)
    found = speech._relative_scores(module, query, key, embeddings, original=function)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("tokens", [1, 4, 7, 12])
def test_pools_that_are_complete_are_the_originals(tokens: int) -> None:
    torch.manual_seed(0)
    config = CONFIG_MAPPING["glm5_next_text"](hidden_size=16, index_n_heads=2, index_head_dim=4, index_kpool=4)
    indexer = Glm5NextTextIndexer(config, 0)
    nn.init.normal_(indexer.index_kpool_compress_ape)
    states = torch.randn(2, 12, 9)
    states[..., -1] = 0
    # As in a cache that starts behind two slots of padding in one row.
    states[0, :tokens, -1] = states[1, min(2, tokens - 1) : tokens, -1] = 1
    function = original(Glm5NextTextIndexer.get_pooled_states)
    expected = function(indexer, states)
    found = glm5_next._all_pools(indexer, states, original=function)
    kept = found[2].any(0)
    torch.testing.assert_close(found[1][:, kept], expected[1])
    assert torch.equal(found[2][:, kept], expected[2])
    is_valid = expected[2]
    torch.testing.assert_close(found[0][:, kept][is_valid], expected[0][is_valid])


def test_experts_of_jetmoe() -> None:
    torch.manual_seed(0)
    config = CONFIG_MAPPING["jetmoe"](hidden_size=8, intermediate_size=12, num_local_experts=4, num_experts_per_tok=2)
    layer, states = JetMoeMoE(config), torch.randn(2, 5, 8)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    function = original(JetMoeMoE.forward)
    with torch.no_grad():
        expected = function(layer, states)
        found = jetmoe._feed_forward(layer, states, original=function)
    torch.testing.assert_close(found, expected[0] if isinstance(expected, tuple) else expected)
