"""The pages of the documentation, taken apart: links, headings, code blocks, code in the text, command lines."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SHELL = ("", "sh", "bash", "console")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n)+")
_SPAN = re.compile(r"`([^`]+)`")
_PUNCTUATION = set("();<>|&")


@dataclass(frozen=True)
class Page:
    """One Markdown file."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def fences(self) -> list[tuple[str, str]]:
        """(language, text) of each fenced block."""
        return [(language, body) for language, body in _FENCE.findall(self.text)]

    @cached_property
    def prose(self) -> str:
        """The text without code blocks."""
        return _INDENTED.sub("", _FENCE.sub("", self.text))

    @cached_property
    def spans(self) -> list[str]:
        """Code within the text (and within comments of code that is not shell), on one line each."""
        others = "\n".join(body for language, body in self.fences if language not in SHELL)
        return [" ".join(found.split()) for found in _SPAN.findall(self.prose) + _SPAN.findall(others)]

    @cached_property
    def lines(self) -> list[str]:
        """Lines of shell code; one that ends in a backslash goes on."""
        blocks = [body for language, body in self.fences if language in SHELL]
        blocks += _INDENTED.findall(_FENCE.sub("", self.text))
        return "\n".join(blocks).replace("\\\n", " ").splitlines()

    def commands(self, program: str) -> list[list[str]]:
        """The words behind `program` wherever a line of shell code calls it."""
        return [words for line in self.lines for words in calls(line, program)]

    def mentions(self, program: str) -> list[list[str]]:
        """The same in the text: often only a part of a command line."""
        found = [words for span in self.spans if span.startswith(f"{program} ") for words in calls(span, program)]
        return [words for words in found if words]


def calls(line: str, program: str) -> list[list[str]]:
    """The words behind each call of a program in one shell line. Raises ValueError for open quotes around one."""
    lexer = shlex.shlex(line.strip().removeprefix("$ "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:
        if f"{program} " in line:
            raise
        return []
    found: list[list[str]] = []
    command: list[str] = []
    for word in [*words, ";"]:
        if not set(word) <= _PUNCTUATION:
            command.append(word)
            continue
        while command and re.fullmatch(r"\w+=.*", command[0]):
            del command[0]
        if command and command[0].rpartition("/")[2] == program:
            found.append(command[1:])
        command = []
    return found


@pytest.fixture(scope="session")
def pages() -> list[Page]:
    """All pages that a reader sees."""
    top = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
    return [Page(path) for path in [*top, *sorted((ROOT / "docs").rglob("*.md"))]]


@pytest.fixture(scope="session")
def reference(pages: list[Page]) -> dict[str, Page]:
    """The pages of docs/reference by name."""
    return {page.path.name: page for page in pages if page.path.parent.name == "reference"}
