"""`penstock conversations export` and `import`: conversations as lines of JSON, and back."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import typer

from penstock.cli.commands.api_paths import api_path
from penstock.cli.commands.common import ARTIFACTS, AsJson, Gateway, print_json, raise_for_error
from penstock.cli.commands.following import wait_for
from penstock.cli.commands.long_calls import reporting
from penstock.cli.commands.submitting import SILENCE_S, Timeout, require_completed
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
from penstock.schemas.limits import LIMITS

CONVERSATIONS: Final = "/v1/conversations"
EVERY = 1_000_000
ERASED = 410


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
        with _exported(gateway, conversation) as lines:
            for number, text in enumerate(lines.iter_lines(), 1):
                line = parsed(text, number)
                if images and line.get("images"):
                    line = {**line, "images": [_with_bytes(gateway, image) for image in line["images"]]}
                print_json(line)


def _exported(gateway: Gateway, conversation: str) -> AbstractContextManager[httpx.Response]:
    """The lines of a conversation as the gateway sends them. Raises CliFailure."""
    timeout = httpx.Timeout(30, read=SILENCE_S)
    return gateway.stream("GET", api_path(CONVERSATIONS, conversation, "export"), timeout=timeout)


def _with_bytes(gateway: Gateway, image: Line) -> Line:
    artifact_id = image["artifact_id"]
    with gateway.stream("GET", api_path(ARTIFACTS, artifact_id, "content"), timeout=httpx.Timeout(SILENCE_S)) as answer:
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
    prefix: Annotated[str, typer.Option(help="Put before the id of each conversation.")] = "",
    timeout: Timeout = 900,
    as_json: AsJson = False,
) -> None:
    """Append the messages of exported conversations, to conversations of the same ids unless --id or --prefix says
    otherwise.

    A repeat goes on where an import was cut off, and adds nothing to one that is complete. Summaries are left out.
    Example: penstock conversations import trip.jsonl --id trip-copy
    """
    with file.open("rb") as lines:
        found = sections(lines)
    if new_id is not None and (prefix or len(found) > 1):
        said = "--id is in place of --prefix" if prefix else f"{file} holds {len(found)} conversations: --id is for one"
        raise CliFailure(said, exit_code=ExitCode.USAGE)
    for section in found:  # of all, before anything is appended
        _require_images(gateway, section)
    for section in found:
        target = prefix + section.id if new_id is None else new_id
        result = Import(gateway, file, section, target, timeout).run()
        if as_json:
            print_json(result)
            continue
        summaries = result["summaries_left_out"]
        left = f"; {summaries} summaries left out" if summaries else ""
        typer.echo(f"{result['id']}: {result['messages']} messages, {result['appended']} appended{left}")


def _require_images(gateway: Gateway, section: Section) -> None:
    """Raises CliFailure when an image is neither in the file nor among the artifacts."""
    for artifact_id, digest in section.images.items():
        try:
            found = gateway.call("GET", api_path(ARTIFACTS, artifact_id))
        except CliFailure as error:
            if error.unreachable:
                raise
            found = {}
        if found.get("sha256") != digest:
            raise CliFailure(
                f"the image {artifact_id} of {section.id} is not at {gateway.base_url}:"
                " export with --images, where it is"
            )


@dataclass(frozen=True, slots=True)
class Import:
    """One conversation of a file, brought to a gateway page by page. `timeout_s`: for each page."""

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
        with reporting(lambda: f"{done} of {self.section.messages} messages of {self.target} are there: run it again"):
            with self._messages() as messages:
                for first, page in pages(messages):
                    if first + len(page) > there:
                        self._append(log_id, first, page)
                        done = first + len(page)
            _, now = self._look()
            if now < self.section.messages:
                raise CliFailure(f"only {now} messages are there")
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
            lines = opened.enter_context(_exported(self.gateway, self.target)).iter_lines()
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
        with self.file.open("rb") as lines:
            lines.seek(self.section.start)
            yield messages_of(lines, self.section)

    def _append(self, log_id: str, first: int, page: list[Line]) -> None:
        """Have these messages appended, once. A request of an earlier import that failed or was erased is sent anew.

        `log_id` is that of the conversation.
        """
        body = request_of(page, self.target)
        for attempt in range(LIMITS.max_attempts):
            headers = {"idempotency-key": idempotency_key(log_id, first, body, attempt)}
            answer = self.gateway.answer("POST", "/v1/requests", timeout=SILENCE_S, json=body, headers=headers)
            if answer.status_code == ERASED:
                continue
            raise_for_error(answer)
            request_id, is_repeat = answer.json()["request_id"], "idempotency-replayed" in answer.headers
            found = wait_for(self.gateway, request_id, self.timeout_s, lambda line: typer.echo(line, err=True))
            if found["status"] == "completed" or not is_repeat:
                require_completed(request_id, found)
                return
        raise CliFailure(f"{LIMITS.max_attempts} imports failed at message {first + 1}")
