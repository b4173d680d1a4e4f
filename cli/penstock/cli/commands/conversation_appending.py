"""Messages of a file, appended to a conversation page by page, each page once."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer

from penstock.cli.commands.common import Gateway
from penstock.cli.commands.following import wait_for
from penstock.cli.commands.submitting import MOST_ATTEMPTS, require_completed, submit_once
from penstock.cli.exported import Line, Section, idempotency_key, messages_of, pages, request_of
from penstock.cli.failures import CliFailure


@dataclass(frozen=True, slots=True)
class Appending:
    """`timeout_s`: for each request that appends some."""

    gateway: Gateway
    file: Path
    timeout_s: float

    @contextmanager
    def messages(self, section: Section) -> Generator[Iterator[Line]]:
        """Those of a conversation of the file."""
        with self.file.open("rb") as lines:
            lines.seek(section.start)
            yield messages_of(lines, section)

    def append(self, section: Section, target: str, log_id: str, done: int) -> Iterator[int]:
        """Append all but the first `done` messages; how many are there after each request. Raises CliFailure.

        `log_id` is that of the conversation `target`.
        """
        with self.messages(section) as messages:
            for first, page in pages(messages):
                if first + len(page) > done:
                    self._append(target, log_id, first, page)
                    yield first + len(page)

    def _append(self, target: str, log_id: str, first: int, page: list[Line]) -> None:
        """Have these messages appended, once. A request of an earlier import that failed or was erased is sent anew."""
        body = request_of(page, target)
        for attempt in range(MOST_ATTEMPTS):
            sent = submit_once(self.gateway, body, idempotency_key(log_id, first, body, attempt))
            if sent is None:
                continue
            found = wait_for(self.gateway, sent.request_id, self.timeout_s, lambda line: typer.echo(line, err=True))
            if found["status"] == "completed" or not sent.is_repeat:
                require_completed(sent.request_id, found)
                return
        raise CliFailure(f"{MOST_ATTEMPTS} imports failed at message {first + 1}")
