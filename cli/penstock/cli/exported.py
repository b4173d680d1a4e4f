"""The format of exported conversations: what a file must hold, when two conversations say the same, and the requests
that append one. Pure.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from penstock.cli.failures import CliFailure

Line = dict[str, Any]

OBJECT = "conversation.export"
VERSION, TREE_VERSION = 1, 2
PAGE_MESSAGES = 100
PAGE_SIZE = (200_000, 16, 20_000_000)
"""What one request appends at most: characters of text, images, and their bytes as base64. A message that is larger
comes alone."""
SAID = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
"""What a message has beside images, and an import repeats."""


@dataclass(kw_only=True, slots=True)
class Section:
    """One conversation of a file: its first line, and where that stands, from 1."""

    head: Line
    line: int
    start: int
    """The byte of the file behind the first line."""
    messages: int = 0
    summaries: int = 0
    images: dict[str, str] = field(default_factory=dict[str, str])
    """Images whose bytes are not in the file: digests by id."""

    @property
    def id(self) -> str:
        return str(self.head["id"])

    def check_whole(self) -> None:
        """Raises CliFailure for a file that was cut off, or was edited."""
        expected = self.head.get("messages"), self.head.get("summaries")
        if (self.messages, self.summaries) != expected:
            raise CliFailure(
                f"line {self.line}: {self.id} has {self.messages} messages and {self.summaries} summaries in this file,"
                f" and its first line says {expected[0]} and {expected[1]}: export it again"
            )


def parsed(line: str | bytes, number: int) -> Line:
    """A line of a file, or of an answer. Raises CliFailure for what is none, and for the error of a gateway."""
    try:
        value = json.loads(line)
    except ValueError as error:
        raise CliFailure(f"line {number} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CliFailure(f"line {number} is not a JSON object")
    found: Line = value
    if found.get("type") == "error":
        raise CliFailure(f"the export did not come to its end: {found.get('error', {}).get('message')}")
    return found


def sections(lines: Iterable[bytes]) -> list[Section]:
    """The conversations of a file. Raises CliFailure unless all of it is as it must be."""
    found: list[Section] = []
    begin = 0
    for number, text in enumerate(lines, 1):
        line = parsed(text, number)
        begin += len(text)
        if "object" in line:
            _check_head(line, number)
            found.append(Section(head=line, line=number, start=begin))
        elif not found:
            raise CliFailure(f"line 1 is no {OBJECT}")
        else:
            _count(found[-1], line, number)
    if not found:
        raise CliFailure(f"the file is empty: it must begin with a {OBJECT}")
    for section in found:
        section.check_whole()
    return found


def _check_head(line: Line, number: int) -> None:
    if (line["object"], line.get("version")) == (OBJECT, TREE_VERSION):
        raise CliFailure(f"line {number}: files of trees are not read; export each conversation of the tree by itself")
    if line["object"] != OBJECT or line.get("version") != VERSION or not isinstance(line.get("id"), str):
        raise CliFailure(f"line {number} is no {OBJECT} of version {VERSION}")


def _count(section: Section, line: Line, number: int) -> None:
    if line.get("type") == "summary":
        section.summaries += 1
        return
    content, role = line.get("content"), line.get("role")
    if line.get("type") != "message" or not isinstance(content, str) or not isinstance(role, str):
        raise CliFailure(f"line {number} is neither a message nor a summary")
    section.messages += 1
    for image in line.get("images", ()):
        if not isinstance(image, dict) or not {"artifact_id", "sha256"} <= image.keys():
            raise CliFailure(f"line {number} has an image without artifact_id and sha256")
        if "data" not in image:
            section.images[image["artifact_id"]] = image["sha256"]


def messages_of(lines: Iterable[bytes], section: Section) -> Iterator[Line]:
    """The messages of one conversation of a file that was checked, from `section.start` on.

    The file may be longer by now.
    """
    checked = itertools.islice(lines, section.messages + section.summaries)
    for number, text in enumerate(checked, section.line + 1):
        if (line := parsed(text, number))["type"] == "message":
            yield line


def says_the_same(one: Line, other: Line) -> bool:
    """Whether two messages are equal but for their ids, places and times."""
    return _said(one) == _said(other)


def _said(line: Line) -> tuple[Any, ...]:
    """What a message says, without its id, place and time."""
    return *(line.get(name) for name in SAID), [image["sha256"] for image in line.get("images", ())]


def pages(messages: Iterable[Line]) -> Iterator[tuple[int, list[Line]]]:
    """What is appended by one request each, with the number of its first message.

    The same messages always make the same pages: a repeat of an import knows its requests again.
    """
    page, first, taken = list[Line](), 0, (0, 0, 0)
    for number, message in enumerate(messages):
        own = _size(message)
        total = tuple(a + b for a, b in zip(taken, own, strict=True))
        if page and (len(page) == PAGE_MESSAGES or any(a > b for a, b in zip(total, PAGE_SIZE, strict=True))):
            yield first, page
            page, first, total = [], number, own
        page.append(message)
        taken = total
    if page:
        yield first, page


def _size(message: Line) -> tuple[int, ...]:
    """Characters of text, images, and characters of images."""
    images = message.get("images", [])
    text = len(json.dumps([message.get(name) for name in SAID]))
    return text, len(images), sum(len(image.get("data", "")) for image in images)


def request_of(page: Iterable[Line], conversation_id: str) -> Line:
    """The request that appends these messages."""
    payload = {"messages": [_message(line) for line in page]}
    return {"task": "conversation_items", "conversation_id": conversation_id, "payload": payload}


def _message(line: Line) -> Line:
    message = {name: line[name] for name in SAID if name in line}
    if images := line.get("images"):
        shown = [{"type": "image", "image": _image(image)} for image in images]
        words = [{"type": "text", "text": line["content"]}] if line["content"] else []
        message["content"] = [*shown, *words]
    return message


def _image(image: Line) -> Line:
    if "data" in image:
        return {"data": image["data"], "media_type": image["media_type"]}
    return {"artifact_id": image["artifact_id"]}


def idempotency_key(log_id: str, first: int, body: Line, attempt: int) -> str:
    """The same for the same messages at the same place of the same conversation, which has one log."""
    text = json.dumps([log_id, first, body, attempt], sort_keys=True)
    return f"import-{hashlib.sha256(text.encode()).hexdigest()}"
