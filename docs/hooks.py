"""Hooks of mkdocs. `exclude_docs` keeps this file out of the pages."""

from __future__ import annotations

import re
from typing import Any

_TWO_BRACKETS = re.compile(r"\](?=\[)")
# A page's folder is at most one level below docs/, so these links leave it.
_OUTSIDE = re.compile(r"\[([^]]*)\]\((?:\.\./)+((?:benchmarks|runners|kernels)/[^)#\s]+)[^)]*\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links to files that are not pages by their paths.

    In the generated table of architectures, also escape brackets, because `L['inputs'][0]` would be a link.
    """
    markdown = _OUTSIDE.sub(r"\1 (`\2`)", markdown)
    return _TWO_BRACKETS.sub(r"\\]", markdown) if page.file.src_uri == "architectures.md" else markdown
