"""Trees of conversations, brought from a file to a gateway: the same forks at the same places, no message twice."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from penstock.cli.commands.api_paths import api_path
from penstock.cli.commands.common import Gateway, raise_for_error
from penstock.cli.commands.conversation_appending import Appending
from penstock.cli.commands.long_calls import reporting
from penstock.cli.commands.submitting import SILENCE_S
from penstock.cli.exported import Line, Section, parsed, says_the_same
from penstock.cli.exported_trees import Append, Delete, Found, Make, Step, Tree, steps
from penstock.cli.failures import CliFailure

CONVERSATIONS: Final = "/v1/conversations"
AT_ONCE = 8
"""Steps at a time: a fork waits for its topic most of its time."""


@dataclass(frozen=True, slots=True)
class TreeImport:
    """`prefix` stands before the id of each conversation here."""

    gateway: Gateway
    file: Path
    tree: Tree
    prefix: str
    timeout_s: float
    appended: dict[str, int] = field(default_factory=dict[str, int])

    def run(self) -> Iterator[Mapping[str, Any]]:
        """Build what is not there yet; what is there of each conversation. Raises CliFailure."""
        with reporting(lambda: "a part of the tree may be there: run it again"):
            before: list[Step] = []
            while todo := steps(self.tree, self._look()):
                if todo == before:
                    raise CliFailure(f"{self._target(todo[0].section.id)} is not as it was made: something changes it")
                with ThreadPoolExecutor(AT_ONCE) as pool:
                    list(pool.map(self._do, todo))  # one that fails takes those along that have not begun
                before = todo
        for section in self.tree.sections:
            yield {
                "id": self._target(section.id),
                "messages": section.messages,
                "appended": self.appended.get(section.id, 0),
                "summaries_left_out": section.summaries,
            }

    def _do(self, step: Step) -> None:
        target = self._target(step.section.id)
        match step:
            case Make(parent_id=None):
                self.gateway.call("POST", CONVERSATIONS, body={"id": target})
            case Make(parent_id=str(parent), through=through):
                path = api_path(CONVERSATIONS, self._target(parent), "fork")
                self.gateway.call("POST", path, body={"through": through, "id": target}, timeout_s=SILENCE_S)
            case Append(section=section, found=found):
                appending = Appending(self.gateway, self.file, self.timeout_s)
                for done in appending.append(section, target, found.log_id, found.done):
                    self.appended[section.id] = done - found.done
            case Delete():
                self.gateway.call("DELETE", api_path(CONVERSATIONS, target), timeout_s=SILENCE_S)
            case _:
                raise AssertionError(step)

    def _target(self, section_id: str) -> str:
        return self.prefix + section_id

    # -- what is there

    def _look(self) -> dict[str, Found]:
        """By id of the file. Raises CliFailure for conversations that are others than the file's."""
        root = self.tree.sections[0]
        first_living = next(one for one in self.tree.sections if not one.is_deleted)
        for one in (first_living, root):  # where the root is deleted already, the other is there
            target = self._target(one.id)
            if self._exists(target):
                timeout = httpx.Timeout(30, read=SILENCE_S)
                path = api_path(CONVERSATIONS, target, "export")
                with self.gateway.stream("GET", path, timeout=timeout, tree="true") as answer:
                    return self._compare(answer.iter_lines())
        return {}

    def _exists(self, target: str) -> bool:
        answer = self.gateway.answer("GET", api_path(CONVERSATIONS, target))
        if answer.status_code == 404:
            return False
        raise_for_error(answer)
        return True

    def _compare(self, lines: Iterator[str]) -> dict[str, Found]:
        sections = {self._target(one.id): one for one in self.tree.sections}
        appending = Appending(self.gateway, self.file, self.timeout_s)
        found: dict[str, Found] = {}
        for head, messages in _taken_apart(lines):
            if (section := sections.get(head["id"])) is None:
                continue  # a fork that the file does not know
            self._require_same_place(section, head)
            offsets, done = list[int](), 0
            with appending.messages(section) as own:
                for line in messages:
                    offsets.append(line["source"]["offset"])
                    if (mine := next(own, None)) is None:
                        continue
                    if not says_the_same(mine, line):
                        raise CliFailure(
                            f"message {done + 1} that {head['id']} adds is another than the file's: name a new --prefix"
                        )
                    done += 1
            found[section.id] = Found(
                log_id=head["log_id"], is_deleted=head.get("deleted", False), done=done, offsets=offsets
            )
        return found

    def _require_same_place(self, section: Section, head: Line) -> None:
        """Raises CliFailure for a conversation that goes on from another, or from another message."""
        made_of, here = self.tree.made_of[section.id], head.get("forked_from")
        expected = None if made_of is None else (self._target(made_of[0]), section.inherited)
        if expected != (None if here is None else (here["conversation_id"], here["messages"])):
            raise CliFailure(f"{head['id']} is here, and is no such fork as in the file: name a new --prefix")


def _taken_apart(lines: Iterator[str]) -> Iterator[tuple[Line, Iterator[Line]]]:
    """The first line of each conversation of an export, and its messages."""
    count = 0

    def number(line: Line) -> int:
        nonlocal count
        count += "object" in line
        return count

    for _, group in itertools.groupby((parsed(text, at) for at, text in enumerate(lines, 1)), number):
        yield next(group), (line for line in group if line["type"] == "message")  # noqa: B031 (the rest of it)
