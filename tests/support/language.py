"""Lint for the words of docstrings, comments, messages and pages; `CONTRIBUTING.md` explains the rules.

Run `python -m tests.support.language [PATH ...]`: it prints one finding a line and exits with 1 if there is any.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
# Everything that people outside read. Tests follow the rules too, but are not checked.
CHECKED = ("exportable_cache", "plugins", "runners", "kernels", "export_scripts", "benchmarks", "docs", "README.md",
           "CHANGELOG.md", "CONTRIBUTING.md", "Makefile")  # fmt: skip
# Generated tables, and reports in the words of the projects they go to.
LEFT_OUT = ("docs/architectures.md", "docs/media.md", "docs/upstream", "benchmarks/results", "build")

# A sentence that begins so has no subject. Prepositions and conjunctions among them, as they hide the verb.
FIRST_WORDS = frozenset(
    "of as its their those these that told what whatever whether which who whose whoever behind beside besides how why "
    "where when if nothing none nobody somebody such also and but or for from with without by to in on at under over "
    "after before until because since while there it they".split()
)
FIRST_PHRASES = ("the same", "one of")
# A function's docstring begins with a verb, so none of these.
NOUN_STARTERS = frozenset("a an the this all every each no any some one two three both".split())

# Pattern -> what to write instead.
WORDS = {
    r"behind(?! (?:a|the) (?:proxy|firewall|flag))": "after",
    r"beside": "alongside, next to, compared with",
    r"but for": "except",
    r"anew": "again, from scratch",
    r"amid": "during",
    r"told": "given, notified, known from; told apart: distinguished",
    r"(?:stands?|stood) for": "represents",
    r"as (?:it is|they are)": "unchanged, uncompiled",
    r"by (?:itself|themselves)": "alone, separately",
    r"in turns": "interleaved",
    r"(?:no|some)body|who(?:so)?ever|whatever": "no caller, another process, any",
    r"(?<!there )(?<!There )(?:is|are|was|were) (?:(?-i:none)\b|no (?!(?:longer|more|less|matter|worse|better)\b))": "is not a valid",
    r"films?": "video",
    r"pictures?": "image",
    r"sounds?": "audio",
    r"as (?:many|much)\b[^.]{0,60}? as may\b": "the limit of N",
    r"go(?:es)? on": "continue",
    r"own (?:attention |linear |native )?(?:kernel|operator)s?": "native kernel, native operator",
    r"number of (?:a|the|its|this) (?:layer|rank|stage)(?! )": "index",
    r"(?<!in )(?<!In )(?<!in-)(?<!of )(?<!take )(?<!takes )(?<!one )(?<!same )(?<!decimal )(?<!first )places?": "index, offset, location, device",
}
PATTERN = re.compile("|".join(rf"(?P<w{index}>\b{word}\b)" for index, word in enumerate(WORDS)), re.IGNORECASE)
REMEDIES = list(WORDS.values())
CODE = re.compile(r"``.*?``|`[^`]*`", re.DOTALL)
FENCE = re.compile(r"^( *)(```|~~~).*?^ *\2[ \t]*$", re.DOTALL | re.MULTILINE)
CPP_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


class Finding(NamedTuple):
    """A sentence to write differently, with its file and line."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def words_in(text: str, path: str, line: int) -> Iterator[Finding]:
    """Yield a finding for each word of `text` that the table replaces; code in backticks is not prose."""
    prose = CODE.sub(lambda code: re.sub(r"[^\n]", "_", code.group()), text)
    for match in PATTERN.finditer(prose):
        remedy = REMEDIES[int(match.lastgroup[1:])]
        yield Finding(path, line + prose.count("\n", 0, match.start()), f"{match.group()!r}: write {remedy}")


def is_property(node: ast.AST) -> bool:
    """Return True if the function is read as an attribute, so that a noun phrase describes it."""
    return any("property" in ast.unparse(decorator) for decorator in getattr(node, "decorator_list", ()))


def first_words(docstring: str, node: ast.AST) -> str | None:
    """Return what is wrong with the beginning of a docstring, or None."""
    beginning = " ".join(docstring.split()[:3]).lower()
    first = re.match(r"[\w']*", beginning).group()
    if first in FIRST_WORDS or beginning.startswith(FIRST_PHRASES):
        return f"a docstring begins with {beginning!r}: begin with a verb, or with a noun and its verb"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_property(node) and first in NOUN_STARTERS:
        return f"a function's docstring begins with {beginning!r}: begin with a verb (Return, Check, Replace ...)"
    return None


def python_findings(path: str, source: str) -> Iterator[Finding]:
    """Yield the findings of a Python file: its docstrings, its other strings of three words or more, its comments."""
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                docstrings.add(id(node.body[0].value))
                problem = first_words(text, node)
                if problem is not None:
                    yield Finding(path, node.body[0].lineno, problem)
                yield from words_in(text, path, node.body[0].lineno)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            if len(re.findall(r"[A-Za-z]{2,}", node.value)) > 2:
                yield from words_in(node.value, path, node.lineno)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from words_in(token.string, path, token.start[0])


def findings_of(path: Path) -> list[Finding]:
    """Return the findings of one file, in the order of its lines."""
    name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        found = python_findings(name, text)
    elif path.suffix in (".cpp", ".h", ".hpp", ".cc"):
        found = (one for match in CPP_COMMENT.finditer(text)
                 for one in words_in(match.group(), name, 1 + text.count("\n", 0, match.start())))  # fmt: skip
    else:
        found = words_in(FENCE.sub(lambda code: "\n" * code.group().count("\n"), text), name, 1)
    return sorted(set(found), key=lambda finding: finding.line)


def checked_files(paths: Sequence[str] = CHECKED) -> Iterator[Path]:
    """Yield the files under `paths` that are checked."""
    for path in paths:
        whole = (ROOT / path).resolve()
        for file in [whole] if whole.is_file() else sorted(whole.rglob("*")):
            name = file.relative_to(ROOT).as_posix()
            known = file.suffix in (".py", ".md", ".cpp", ".h", ".hpp", ".cc") or file.name == "Makefile"
            if file.is_file() and known and not any(f"/{left}/" in f"/{name}/" for left in LEFT_OUT):
                yield file


def main(paths: Sequence[str] = ()) -> int:
    """Print the findings in `paths`, or in everything that is checked; return 1 if there are any."""
    found = [finding for file in checked_files(paths or CHECKED) for finding in findings_of(file)]
    for finding in found:
        print(finding)
    if found:
        print(f"{len(found)} findings; CONTRIBUTING.md explains the rules", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
