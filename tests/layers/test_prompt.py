"""Where a prompt ends: its pieces, the tokens behind it, a row that begins anew; and what sessions make of that."""

import pytest
import torch

from exportable_cache import ExportableCache, Session
from exportable_cache.cache.layers import PromptLayer, RowSizes
from exportable_cache.cache.policies import PromptPolicy
from exportable_cache.cache.storage import storage_of
from exportable_cache.errors import InputError
from exportable_cache.program.methods import ProgramMethod, chunk_sizes

from ..zoo.architectures import architectures
from ..zoo.build import cached_logits, tiny_model, tokens
from ..zoo.build import forward as logits_of

METHODS = {"decode": ProgramMethod("decode", 1, 1), "prefill": ProgramMethod("prefill", 2, 3)}


def layer() -> PromptLayer:
    return PromptLayer(PromptPolicy(32, 4), storage_of(torch.float32, None), RowSizes(1, 2, 8, 8))


@pytest.mark.parametrize(
    ("pieces", "ends"),
    [
        ([5, 6, 1, 1], [5, 11, 11, 11]),
        ([1, 4, 1, 3], [1, 5, 5, 5]),
        ([7, 1, 2, 2], [7, 7, 7, 7]),
    ],
)
def test_steps_of_several_tokens_are_the_prompt_until_one_of_one(pieces: list[int], ends: list[int]) -> None:
    one, found = layer(), []
    for count in pieces:
        one.update(torch.zeros(1, 2, count, 8), torch.zeros(1, 2, count, 8))
        found.append(int(one.prompt_length))
    assert found == ends


def test_nothing_is_taken_back() -> None:
    one = layer()
    one.update(torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8))
    with pytest.raises(InputError, match="the prompt's length is not kept"):
        one.crop(-1)
    one.reset()
    assert int(one.prompt_length) == 0


def test_no_piece_of_a_prompt_is_one_token() -> None:
    for length in range(2, 12):
        sizes = chunk_sizes(METHODS, length, keeps_prompt=True)
        assert sum(sizes) == length and 1 not in sizes


@pytest.mark.full
@torch.no_grad()
def test_unlimited_ocr_sees_its_prompt_and_a_window_of_what_follows() -> None:
    model = tiny_model(next(row for row in architectures() if row.model_type == "unlimited_ocr"))
    ids = torch.cat([tokens(seed=0), tokens(seed=1)], dim=1)
    with pytest.raises(InputError, match="prefill_chunk must be at least 3.*got 2"):
        Session.from_model(model, ExportableCache.from_model(model, 64), prefill_chunk=2)
    session = Session.from_model(model, ExportableCache.from_model(model, 64), prefill_chunk=5)
    # Longer than the window of 8, in pieces with a rest of one.
    for prompt in (16, 11):
        session.reset()
        found = [session.prefill(ids[:, :prompt])[0]]
        found += [session.decode(ids[:, position])[0] for position in range(prompt, prompt + 24)]
        expected = cached_logits(model, ids, prompt)
        torch.testing.assert_close(torch.stack(found), expected, atol=1e-4, rtol=0)
    # In one call every token is the prompt's: another result once a window has passed.
    whole = logits_of(model, ids[:, : 11 + 24], {}, use_cache=False)
    assert (whole[-1] - expected[-1]).abs().max() > 1e-3
    rows = Session.from_model(model, ExportableCache.from_model(model, 64, batch_size=2), prefill_chunk=5)
    with pytest.raises(InputError, match="rows of equal length"):
        rows.prefill(torch.ones(2, 3, dtype=torch.int64), torch.tensor([[1, 1, 1], [1, 1, 0]]))
