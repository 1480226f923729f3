"""docs/upstream: every page is whole, and what it reports is still so in what is installed."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from .support.upstream_pages import Page, module_of

pytestmark = pytest.mark.project

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "upstream"
INDEX = (FOLDER / "index.md").read_text(encoding="utf-8")
PAGES = [pytest.param(Page.read(path), id=path.stem) for path in sorted(FOLDER.glob("*.md")) if path.name != "index.md"]
SECTIONS = ["", "What happens", "Script", "What should happen", "Cause", "Change", "Test"]
#: Projects whose packages are not everywhere.
OPTIONAL = {"ExecuTorch": "executorch", "Torch-TensorRT": "tensorrt_rtx", "llguidance": "llguidance"}


def test_there_are_pages() -> None:
    assert len(PAGES) >= 10


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_its_parts(page: Page) -> None:
    assert list(page.sections) == SECTIONS
    assert page.title and all(text.strip() for text in page.sections.values())
    assert re.search(r"\d+\.\d+\.\d+", page.fact("seen in"))
    assert re.search(r"\]\(https://github\.com/\S+/blob/v\S+\)", page.sections["Cause"]), "no link to what is wrong"
    assert page.block("Script", "text").strip() not in ("", "OUTPUT")
    for section in ("Script", "Test"):
        compile(page.block(section, "python"), page.path.name, "exec")
    assert len(re.findall(r"^def test_\w+\(\):", page.block("Test", "python"), re.MULTILINE)) == 1


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_files_of_ours_that_exist(page: Page) -> None:
    (file,) = re.findall(r"^`(\S+)`$", page.fact("our workaround"))
    assert (ROOT / file).is_file()


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_in_the_index_and_the_navigation(page: Page) -> None:
    (row,) = [line for line in INDEX.splitlines() if f"]({page.path.name})" in line]
    project, _, seen, file, state = [cell.strip() for cell in row.strip("|").split("|")]
    assert project == page.fact("project") and state == page.fact("state")
    assert file == page.fact("our workaround") and page.fact("seen in").startswith(seen)
    assert f": upstream/{page.path.name}\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_the_index_names_no_page_that_is_not_there() -> None:
    named = re.findall(r"\]\(([\w-]+\.md)\)", INDEX)
    assert sorted(named) == sorted(page.values[0].path.name for page in PAGES)


def test_where_a_change_belongs() -> None:
    assert module_of("src/transformers/models/a/b.py") == "transformers.models.a.b"
    assert module_of("backends/xnnpack/a.py") == "executorch.backends.xnnpack.a"
    assert module_of("torch/export/a.py") == "torch.export.a"


def run(page: Page, folder: Path, changed: bool) -> subprocess.CompletedProcess[str]:
    package = OPTIONAL.get(page.fact("project"))
    if package is not None:
        pytest.importorskip(package)
    return page.run(folder, {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, changed)


@pytest.mark.canary
@pytest.mark.parametrize("page", PAGES)
def test_it_is_still_wrong(page: Page, tmp_path: Path) -> None:
    """Fails once upstream is right: then the page and the workaround that it names can go."""
    done = run(page, tmp_path, changed=False)
    assert done.stdout, done.stderr
    assert done.returncode != 0 and re.search(r"^(AssertionError|ValueError)", done.stderr, re.MULTILINE), done.stderr


@pytest.mark.canary
@pytest.mark.parametrize("page", [one for one in PAGES if one.values[0].can_be_applied])
def test_the_change_mends_it(page: Page, tmp_path: Path) -> None:
    done = run(page, tmp_path, changed=True)
    assert done.returncode == 0, done.stderr
