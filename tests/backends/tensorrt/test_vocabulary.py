"""A reduced vocabulary in a network: fewer rows of the head, and minus infinity for the other tokens."""

from __future__ import annotations

import copy

import pytest
import torch

from exportable_cache.models.vocabulary import keep_tokens
from exportable_cache.verification.verify import verify_session

pytest.importorskip("exportable_cache.backends.tensorrt.upstream", reason="no tensorrt extra is installed")

from exportable_cache.backends.tensorrt.options import TensorRTOptions
from exportable_cache.backends.tensorrt.target import engine_networks

from ...support.models import VOCAB
from .models import engine_model
from .programs import network_session, program_of

KEPT = (2, 5, 7, 31, 64, 65, 100, 127)


def test_networks_equal_a_model_with_fewer_logits() -> None:
    """Compare in float16; a head with another row must not pass."""
    fewer = keep_tokens(engine_model("llama", torch.float16, num_hidden_layers=1), KEPT)
    program = program_of(fewer)
    networks = engine_networks(program, TensorRTOptions())
    session = network_session(fewer, program, networks)
    report = verify_session(session, fewer, prompts=[3, 20], decode_steps=8)
    assert report.passed and 0 < report.tolerance < 1, str(report)
    assert session.prefill(torch.tensor([[1, 9]])).isfinite().nonzero()[:, 1].tolist() == list(KEPT)
    # The table is whole, the head has the kept rows.
    tables = sorted(one.numel() // 32 for one in networks["decode"].constants.values() if 32 in one.shape)
    assert 8 in tables and tables.count(VOCAB) == 1
    other = copy.deepcopy(fewer)
    other.lm_head.weight.data[3] += 0.3
    assert not verify_session(session, other, prompts=[3], decode_steps=8).passed
