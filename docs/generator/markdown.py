"""Markdown pieces that the generated pages share."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

HEAD = "<!-- Made by `.venv/bin/python docs/generate.py`: change the source, then run it. -->\n"


def document(title: str, *parts: str) -> str:
    """A whole page: the note that it is generated, the title, the parts with a blank line between them."""
    return "\n\n".join([f"{HEAD}\n# {title}", *(part.strip("\n") for part in parts if part)]) + "\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, with what would end a cell escaped."""
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |"]
    lines += [f"| {' | '.join(cell(value) for value in row)} |" for row in rows]
    return "\n".join(lines)


def cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip() or "–"


def code(text: str) -> str:
    return f"`{text}`"


def literal(value: object) -> str:
    """A JSON value as code."""
    return code(json.dumps(value, ensure_ascii=False))


def anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    bare = re.sub(r"[`*]", "", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", bare).replace(" ", "-")


def link(text: str, heading: str | None = None) -> str:
    return f"[{text}](#{anchor(heading or text)})"
