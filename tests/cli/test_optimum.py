"""The plug-in of optimum-cli, run by optimum: it exports what `exportable-cache export` exports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from exportable_cache import load
from exportable_cache.bundle.bundle import Bundle

pytest.importorskip("optimum.commands.optimum_cli", reason="optimum is not installed")

ROOT = Path(__file__).parents[2]


def optimum_cli(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run optimum-cli in a process of its own, with the plug-in's folder where pip would install it."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "plugins" / "optimum")])
    return subprocess.run(
        [sys.executable, "-m", "optimum.commands.optimum_cli", *map(str, arguments)],
        capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip


def test_the_bundle_is_that_of_export(demo_bundle: Path, tmp_path: Path) -> None:
    made = optimum_cli(
        "export", "exportable-cache", "--model", "demo", "--task", "text-generation", "--recipe", "xnnpack",
        "--use_custom_sdpa", "--use_custom_kv_cache", "--max_seq_len", 512, "--output_dir", tmp_path / "demo",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    found, expected = Bundle.open(tmp_path / "demo").manifest, Bundle.open(demo_bundle).manifest
    assert (found.target, found.recipe, found.layers) == (expected.target, expected.recipe, expected.layers)
    ids = torch.tensor([list(range(5, 20))])
    assert list(load(tmp_path / "demo").generate(ids, 16)) == list(load(demo_bundle).generate(ids, 16))


def test_flags_are_ours_under_their_names(tmp_path: Path) -> None:
    flags = ("--qlinear", "8da4w", "--qlinear_group_size", 32, "--qembedding", "8w", "--recipe", "portable")
    others = ("--dtype", "float32", "--", "--dry-run", "--json")
    dry = optimum_cli("export", "exportable-cache", "-m", "demo", "-o", tmp_path / "x", *flags, *others)
    assert dry.returncode == 0, dry.stderr
    report = json.loads(dry.stdout)
    assert report["recipe"] == "portable" and report["dtype"] == "float32"
    assert {"linear": "8da4w", "group_size": 32, "embeddings": "8w"}.items() <= report["quantization"].items()
    refused = optimum_cli("export", "exportable-cache", "-m", "demo", "-o", tmp_path / "x", "--qlinear", "fpa4w")
    assert refused.returncode == 2 and "fpa4w" in refused.stderr and "Traceback" not in refused.stderr
    listed = optimum_cli("export", "--help")
    assert "exportable-cache" in listed.stdout
