"""Hooks of the documentation's site (mkdocs.yml): its first page is the README, and its links stay inside."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_MARKED_FENCE = re.compile(r"^(\s*```\w+) \w+$", re.MULTILINE)
"""First line of a code block with a word behind its language, which marks it for tests."""
_ELSEWHERE = re.compile(r"\[([^\]]*)\]\((?!docs/|https?:|#)[^)]*\)")
"""Links to files of the repository that are not pages."""


_OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./[^)]*\)")
"""Links of a page to files of the repository outside `docs`, which the site does not have."""


def on_files(files: Any, config: Any) -> Any:
    """Add the README as the first page."""
    from mkdocs.structure.files import File

    text = _ELSEWHERE.sub(r"\1", (ROOT / "README.md").read_text(encoding="utf-8"))
    files.append(File.generated(config, "index.md", content=text.replace("](docs/", "](")))  # links as from inside `docs`
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Remove the words behind the languages of code blocks, which only tests read, and links that lead out of the site."""
    return _OUTSIDE.sub(r"\1", _MARKED_FENCE.sub(r"\1", markdown))
