"""This package's operators: what they mean, and programs that call them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("executorch", reason="the executorch extra is not installed")

from exportable_cache.backends.executorch.own_operators import check_own_kernels
from exportable_cache.cache.storage import Int4Storage, Int8Storage
from exportable_cache.common.own_kernels import VARIABLE
from exportable_cache.errors import BundleError, MissingDependencyError

STORAGES = {"int8": Int8Storage("float32"), "int4": Int4Storage("float32")}


@pytest.mark.parametrize("stored", ["float32", "int8", "int4"])
@pytest.mark.parametrize("query_length", [1, 5])
def test_the_operator_is_causal_attention_over_what_is_stored(stored: str, query_length: int) -> None:
    heads, kv_heads, capacity, dim, start = 6, 2, 16, 8, 7
    query = torch.randn(1, heads, query_length, dim)
    rows = torch.randn(2, kv_heads, capacity, 1, dim)
    if stored == "float32":
        stored_rows = (rows[0], rows[1])
    else:
        stored_rows = STORAGES[stored].encode(rows[0], rows[1])
        rows = torch.stack(STORAGES[stored].decode(stored_rows))
    filled = rows[:, None, :, : start + query_length, 0]
    mask = torch.ones(query_length, start + query_length, dtype=torch.bool).tril(start)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, filled[0], filled[1], attn_mask=mask, scale=0.3, enable_gqa=True
    )
    found = torch.ops.exportable_cache.causal_attention(query, stored_rows, start, 0.3)
    torch.testing.assert_close(found, expected.transpose(1, 2), atol=1e-6, rtol=1e-5)
    out = torch.empty_like(found)
    torch.ops.exportable_cache.causal_attention.out(query, stored_rows, start, 0.3, out=out)
    assert torch.equal(out, found)


EXPORT = """
import sys
from exportable_cache import export
from exportable_cache.common.own_kernels import load_own_kernels
from tests.support.models import tiny_model
options = {} if sys.argv[1] == "float32" else {"kv_dtype": sys.argv[1]}
# Verified against the eager model with a cache of the same storage, past one chunk and token by token.
export(tiny_model("llama"), "executorch", 64, sys.argv[2], prefill_chunk=16, kernels="own", **options)
assert load_own_kernels().attention_calls > 0
"""


@pytest.fixture(scope="session")
def own_bundle(own_library: Path, tmp_path_factory: pytest.TempPathFactory):
    """`own_bundle("int8")` -> folder of a verified bundle that calls our operators."""

    def make(kv_dtype: str) -> Path:
        folder = tmp_path_factory.mktemp("own") / kv_dtype
        done = subprocess.run(
            [sys.executable, "-c", EXPORT, kv_dtype, folder],
            capture_output=True, text=True, timeout=600, env={**os.environ, VARIABLE: str(own_library)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return folder

    return make


@pytest.mark.parametrize(
    "kv_dtype", ["int8", *(pytest.param(name, marks=pytest.mark.full) for name in ("int4", "float32"))]
)
def test_a_program_with_our_operators_is_the_model_and_says_what_it_needs(own_bundle, kv_dtype: str) -> None:
    folder = own_bundle(kv_dtype)
    assert '"own_full"' in (folder / "manifest.json").read_text()
    code = f"from exportable_cache import load; load({str(folder)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, VARIABLE: "executorch"}
    )
    assert f"{BundleError.__name__}: " in done.stderr and "exportable-cache kernels build" in done.stderr


def test_they_cannot_be_exported_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exportable_cache.backends.executorch.own_operators.load_own_kernels", lambda: None)
    with pytest.raises(MissingDependencyError, match="kernels is 'own'.*exportable-cache kernels build"):
        check_own_kernels()
