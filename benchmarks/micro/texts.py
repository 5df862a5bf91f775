"""Text to measure with: the project's own pages."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/serving.md", "docs/reliability.md", "docs/operations.md", "docs/architecture.md")


def own_pages() -> list[str]:
    """The texts of the pages."""
    return [(ROOT / name).read_text() for name in PAGES]
