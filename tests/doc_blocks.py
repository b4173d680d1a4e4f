"""The code blocks of a page of the documentation, in order, each with its section."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SHELL = ("", "sh", "bash", "console")
_PARTS = re.compile(
    r"^#+ (?P<heading>[^\n]+)$|^```(?P<language>\w*)\n(?P<fenced>.*?)^```$|(?<=\n\n)(?P<indented>(?: {4}[^\n]*\n)+)",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    section: str
    language: str
    """Empty for shell code that is indented."""
    text: str


def blocks(page: Path) -> Iterator[Block]:
    """Fenced and indented code."""
    section = ""
    for part in _PARTS.finditer(page.read_text(encoding="utf-8")):
        if heading := part["heading"]:
            section = heading
        elif part["fenced"] is not None:
            yield Block(section, part["language"], part["fenced"])
        else:
            yield Block(section, "", re.sub(r"^ {4}", "", part["indented"], flags=re.M))
