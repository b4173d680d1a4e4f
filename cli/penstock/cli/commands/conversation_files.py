"""`penstock conversations export` and `import`: conversations as lines of JSON, and back."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from penstock.cli.commands.common import ARTIFACTS, AsJson, Gateway, print_json
from penstock.cli.commands.following import wait_for
from penstock.cli.commands.submitting import MOST_ATTEMPTS, SILENCE_S, Timeout, require_completed, submit_once
from penstock.cli.exported import (
    Line,
    Section,
    idempotency_key,
    messages_of,
    pages,
    parsed,
    request_of,
    says_the_same,
    sections,
)
from penstock.cli.failures import CliFailure, ExitCode

EVERY = 1_000_000
CONVERSATIONS = "/v1/conversations"


def export(
    gateway: Gateway,
    conversations: Annotated[list[str] | None, typer.Argument(help="Ids of conversations.")] = None,
    pattern: Annotated[str | None, typer.Option(help="All whose ids match this glob, as 'trip-*'.")] = None,
    images: Annotated[
        bool, typer.Option("--images", help="With the bytes of images, for another installation.")
    ] = False,
) -> None:
    """Write conversations to stdout as lines of JSON: for each its facts, then its messages and summaries.

    Examples:

      penstock conversations export trip > trip.jsonl

      penstock conversations export --pattern 'trip-*' --images > trips.jsonl
    """
    if bool(conversations) == (pattern is not None):
        raise CliFailure("name conversations, or many by --pattern", exit_code=ExitCode.USAGE)
    ids = conversations or [
        one["id"] for one in gateway.pages(CONVERSATIONS, EVERY) if fnmatchcase(one["id"], pattern or "")
    ]
    for conversation in ids:
        with exported(gateway, conversation) as lines:
            for number, text in enumerate(lines, 1):
                line = parsed(text, number)
                if images and line.get("images"):
                    line = {**line, "images": [_with_bytes(gateway, image) for image in line["images"]]}
                print_json(line)


@contextmanager
def exported(gateway: Gateway, conversation: str) -> Generator[Iterator[str]]:
    """The lines of a conversation, as the gateway sends them. Raises CliFailure."""
    timeout = httpx.Timeout(30, read=SILENCE_S)
    with gateway.stream("GET", f"{CONVERSATIONS}/{conversation}/export", timeout=timeout) as answer:
        yield answer.iter_lines()


def _with_bytes(gateway: Gateway, image: Line) -> Line:
    artifact_id = image["artifact_id"]
    with gateway.stream("GET", f"{ARTIFACTS}/{artifact_id}/content", timeout=httpx.Timeout(SILENCE_S)) as answer:
        data = answer.read()
    if hashlib.sha256(data).hexdigest() != image["sha256"]:
        raise CliFailure(f"the image {artifact_id} is not what its message refers to: export without --images")
    return {**image, "data": base64.b64encode(data).decode()}


def import_(
    gateway: Gateway,
    file: Annotated[Path, typer.Argument(help="What `penstock conversations export` wrote.", dir_okay=False)],
    new_id: Annotated[
        str | None, typer.Option("--id", help="Another id, where the file holds one conversation.")
    ] = None,
    timeout: Timeout = 900,
    as_json: AsJson = False,
) -> None:
    """Append the messages of exported conversations, to conversations of the same ids unless --id names another.

    A repeat goes on where an import was cut off, and adds nothing to one that is complete. Summaries are left out.
    Example: penstock conversations import trip.jsonl --id trip-copy
    """
    with file.open(encoding="utf-8") as lines:
        found = sections(lines)
    if new_id is not None and len(found) > 1:
        raise CliFailure(f"{file} holds {len(found)} conversations: --id is for one", exit_code=ExitCode.USAGE)
    for section in found:  # of all, before anything is appended
        _require_images(gateway, section)
    for section in found:
        result = Import(gateway, file, section, new_id or section.id, timeout).run()
        if as_json:
            print_json(result)
            continue
        left = f"; {section.summaries} summaries left out" if section.summaries else ""
        typer.echo(f"{result['id']}: {result['messages']} messages, {result['appended']} appended{left}")


def _require_images(gateway: Gateway, section: Section) -> None:
    """Raises CliFailure when an image is neither in the file nor among the artifacts."""
    for artifact_id, digest in section.images.items():
        try:
            found = gateway.call("GET", f"{ARTIFACTS}/{artifact_id}")
        except CliFailure as error:
            if error.unreachable:
                raise
            found = {}
        if found.get("sha256") != digest:
            raise CliFailure(
                f"the image {artifact_id} of {section.id} is not at {gateway.url}: export with --images, where it is"
            )


@dataclass(frozen=True, slots=True)
class Import:
    """One conversation of a file, brought to a gateway. `timeout_s`: for each request that appends some."""

    gateway: Gateway
    file: Path
    section: Section
    target: str
    timeout_s: float

    def run(self) -> Mapping[str, Any]:
        """Append what is not there yet. Raises CliFailure, which says how far it came."""
        self.gateway.call("POST", CONVERSATIONS, body={"id": self.target})
        log_id, there = self._look()
        done = there
        try:
            for first, page in self._pages():
                if first + len(page) <= done:
                    continue
                self._append(log_id, first, page)
                done = first + len(page)
            _, now = self._look()
            if now < self.section.messages:
                raise CliFailure(f"only {now} messages are there")
        except (CliFailure, KeyboardInterrupt) as error:
            said = f"{error}; " if isinstance(error, CliFailure) else ""
            code = error.exit_code if isinstance(error, CliFailure) else ExitCode.INTERRUPTED
            text = f"{said}{done} of {self.section.messages} messages of {self.target} are there: run it again"
            raise CliFailure(text, exit_code=code) from error
        return {
            "id": self.target,
            "messages": self.section.messages,
            "appended": self.section.messages - there,
            "summaries_left_out": self.section.summaries,
        }

    def _look(self) -> tuple[str, int]:
        """The id of the conversation's log, and how many messages of the file it begins with. Raises CliFailure if it
        has others."""
        with ExitStack() as opened:
            lines = opened.enter_context(exported(self.gateway, self.target))
            head = parsed(next(lines), 1)
            there = (
                line for number, text in enumerate(lines, 2) if (line := parsed(text, number))["type"] == "message"
            )
            ours = opened.enter_context(self._messages())
            for count, (own, other) in enumerate(zip_longest(ours, there)):
                if own is None or other is None:
                    return head["log_id"], count
                if not says_the_same(own, other):
                    raise CliFailure(
                        f"message {count + 1} of {self.target} is another than the file's: name a new --id"
                    )
        return head["log_id"], self.section.messages

    @contextmanager
    def _messages(self) -> Generator[Iterator[Line]]:
        with self.file.open(encoding="utf-8") as lines:
            yield messages_of(lines, self.section)

    def _pages(self) -> Iterator[tuple[int, list[Line]]]:
        with self._messages() as messages:
            yield from pages(messages)

    def _append(self, log_id: str, first: int, page: list[Line]) -> None:
        """Have these messages appended, once. A request of an earlier import that failed or was erased is sent anew."""
        body = request_of(page, self.target)
        for attempt in range(MOST_ATTEMPTS):
            sent = submit_once(self.gateway, body, idempotency_key(log_id, first, body, attempt))
            if sent is None:
                continue
            found = wait_for(self.gateway, sent.request_id, self.timeout_s, lambda line: typer.echo(line, err=True))
            if found["status"] == "completed" or not sent.is_repeat:
                require_completed(sent.request_id, found)
                return
        raise CliFailure(f"{MOST_ATTEMPTS} imports failed at message {first + 1}")
