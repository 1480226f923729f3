"""A page of docs/upstream, and its script run with the installed release or with the page's change to it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
#: Where a project's repository has what is installed -> the package that it is installed as.
_INSTALLED = {
    "src/transformers/": "transformers",
    "py/torch_tensorrt/": "torch_tensorrt",
    "torch/": "torch",
    "backends/": "executorch.backends",
    "exir/": "executorch.exir",
}

# Finds the changed modules before the installed ones.
_OVERLAY = """
import importlib.abc, importlib.util, sys
class _Changed(importlib.abc.MetaPathFinder):
    files = {files!r}
    def find_spec(self, name, path, target=None):
        file = self.files.get(name)
        return importlib.util.spec_from_file_location(name, file) if file else None
sys.meta_path.insert(0, _Changed())
"""


@dataclass(frozen=True)
class Page:
    """One mistake.

    Attributes:
        path: Of the page.
        sections: Heading of the second level -> text.
    """

    path: Path
    sections: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> Page:
        parts = re.split(r"^## (.*)\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        return cls(path, {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))})

    def block(self, section: str, language: str) -> str:
        """The only block of that language in a section."""
        (found,) = [text for kind, text in _BLOCK.findall(self.sections[section]) if kind == language]
        return found

    @property
    def title(self) -> str:
        return self.sections[""].splitlines()[0].removeprefix("# ")

    def fact(self, name: str) -> str:
        """What the table at the top says of something."""
        (found,) = re.findall(rf"^\| {name} \| (.*) \|$", self.sections[""], re.MULTILINE)
        return found

    @property
    def can_be_applied(self) -> bool:
        """Whether the change is a diff of Python, and so of what is installed; of C++ it is told in words."""
        return "```diff" in self.sections["Change"]

    def run(self, folder: Path, environment: dict[str, str], changed: bool = False) -> subprocess.CompletedProcess[str]:
        """Run the script and then its test in a process of their own.

        Args:
            folder: For what is written.
            environment: Of that process.
            changed: With the page's change to the modules that it names.
        """
        test = self.block("Test", "python")
        (name,) = re.findall(r"^def (test_\w+)\(\)", test, re.MULTILINE)
        overlay = _OVERLAY.format(files=self._write_changed(folder)) if changed else ""
        program = folder / "program.py"
        program.write_text("\n".join([overlay, self.block("Script", "python"), test, f"{name}()"]), encoding="utf-8")
        command = [sys.executable, str(program)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=400, check=False, env=environment, cwd=folder
        )

    def _files(self) -> list[tuple[str, str]]:
        """Path in the project's repository, and the hunks for it."""
        parts = re.split(r"^--- a/\S+\n\+\+\+ b/(\S+)\n", self.block("Change", "diff"), flags=re.MULTILINE)
        assert not parts[0].strip(), f"{self.path.name}: the change does not begin with the name of a file"
        return list(zip(parts[1::2], parts[2::2], strict=True))

    def _write_changed(self, folder: Path) -> dict[str, str]:
        changed = {}
        for number, (name, hunks) in enumerate(self._files()):
            module = module_of(name)
            text = _installed(module).read_text(encoding="utf-8")
            for hunk in re.split(r"^@@.*\n", hunks, flags=re.MULTILINE)[1:]:
                text = _replaced(text, hunk, name)
            file = folder / f"changed_{number}.py"
            file.write_text(text, encoding="utf-8")
            changed[module] = str(file)
        return changed


def module_of(name: str) -> str:
    """`src/transformers/models/x.py` -> `transformers.models.x`."""
    prefix, package = next(item for item in _INSTALLED.items() if name.startswith(item[0]))
    return f"{package}.{name.removeprefix(prefix).removesuffix('.py').replace('/', '.')}"


def _installed(module: str) -> Path:
    """The file of a module. Nothing is imported, as some packages cannot be without a GPU."""
    package, _, rest = module.partition(".")
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations, f"{package} is not installed"
    return Path(next(iter(spec.submodule_search_locations)), *rest.split(".")).with_suffix(".py")


def _replaced(text: str, hunk: str, name: str) -> str:
    lines = hunk.splitlines()
    before, after = ("".join(line[1:] + "\n" for line in lines if line[:1] in (" ", "", sign)) for sign in ("-", "+"))
    assert text.count(before) == 1, f"{name} has these lines {text.count(before)} times:\n{before}"
    return text.replace(before, after)
