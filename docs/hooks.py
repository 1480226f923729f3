"""A hook of mkdocs. `exclude_docs` keeps this file out of the pages."""

from __future__ import annotations

import re
from typing import Any

_TWO_BRACKETS = re.compile(r"\](?=\[)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Escape brackets in the generated table: its reasons quote tracers, and `L['inputs'][0]` is no link."""
    return _TWO_BRACKETS.sub(r"\\]", markdown) if page.file.src_uri == "architectures.md" else markdown
