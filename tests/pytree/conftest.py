"""Registers transformers' caches around a test; checks that an older release is the one that was asked for."""

from __future__ import annotations

import importlib.metadata
import os

import pytest
import torch


def pytest_configure(config):
    wanted = os.environ.get("EXPORTABLE_CACHE_TRANSFORMERS")
    found = importlib.metadata.version("transformers")
    if wanted and found != wanted:
        raise pytest.UsageError(f"this environment was made for transformers {wanted} but has {found}")


@pytest.fixture
def registered():
    """transformers' caches registered by us, from a clean registry; other tests find them as they were."""
    from exportable_cache.pytree import _torch_private, cache_classes, is_ours, register_transformers_caches

    def clean():
        for cls in cache_classes():
            _torch_private.remove_node(cls)

    before = any(is_ours(cls) for cls in cache_classes())
    clean()
    yield register_transformers_caches()
    clean()
    if before:
        register_transformers_caches()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
