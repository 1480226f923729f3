"""What every test shares: no network, one thread, and the exported demo model."""

from __future__ import annotations

import os

# Before anything imports torch or huggingface_hub, which read them once. Tiny models are fastest on one thread.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
# Tables and help as wide as the assertions about them expect, whatever terminal the tests run in.
os.environ["COLUMNS"] = "160"
for _name in ("EXPORTABLE_CACHE_DEBUG", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(_name, None)

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

DEMO_MAX_CACHE_LEN = 512

_ON_REQUEST = {
    "zoo": "the whole zoo takes an hour or more: run it with -m zoo, or make zoo",
    "slow": "takes more than a minute: run it with -m slow",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what takes long, saying so, unless it was asked for by its marker."""
    for marker, reason in _ON_REQUEST.items():
        if marker not in (config.option.markexpr or ""):
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def demo_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the demo model exported and verified for ExecuTorch with `DEMO_MAX_CACHE_LEN`. Read it only."""
    pytest.importorskip("executorch")
    from exportable_cache import export

    folder = tmp_path_factory.mktemp("bundles") / "demo"
    return export("demo", target="executorch", max_cache_len=DEMO_MAX_CACHE_LEN, output_dir=folder).path
