"""Trees of conversations, listed in one call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import conversing
from conversing import Json, append, ask, output, worked
from system import NOOP, Process

MODELS = [{**NOOP, "id": "talk", "tasks": ["text_generation", "summarization"], "options": {"echo": True}}]


@pytest.fixture(scope="module")
def here(kafka: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with worked(kafka, tmp_path_factory.mktemp("trees"), MODELS) as system:
        yield system.process("g1")


def say(gateway: Process, conversation: str, *texts: str) -> None:
    append(gateway, conversation, [{"role": "user", "content": text} for text in texts])


def fork(gateway: Process, conversation: str, through: int, fork_id: str) -> None:
    with httpx.Client(base_url=gateway.url, timeout=60) as client:
        conversing.fork(client, conversation, through, fork_id)


def tree(gateway: Process, conversation: str) -> list[Json]:
    answer = httpx.get(f"{gateway.url}/v1/conversations/{conversation}/tree", timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def grown(gateway: Process, root: str) -> None:
    """A deleted root with two forks, one of which has forks of its own, and one of those adds nothing."""
    say(gateway, root, "a0", "a1", "a2")
    ask(gateway, {"task": "summarization", "model": "talk", "conversation_id": root, "payload": {}})
    fork(gateway, root, 1, f"{root}-b")
    say(gateway, f"{root}-b", "b0", "b1")
    fork(gateway, f"{root}-b", 3, f"{root}-c")
    say(gateway, f"{root}-c", "c0")
    fork(gateway, f"{root}-b", 4, f"{root}-d")
    fork(gateway, f"{root}-b", 0, f"{root}-e")
    say(gateway, f"{root}-e", "e0")
    assert httpx.delete(f"{gateway.url}/v1/conversations/{root}", timeout=60).status_code == 200


def test_a_tree_is_the_same_whichever_of_it_is_named(here: Process) -> None:
    grown(here, "all")
    found = tree(here, "all-c")
    assert tree(here, "all-d") == tree(here, "all-e") == found
    assert [(one["id"], one["depth"], one["messages"], one["deleted"]) for one in found] == [
        ("all", 0, 2, True),
        ("all-e", 1, 1, False),
        ("all-b", 1, 2, False),
        ("all-c", 2, 1, False),
        ("all-d", 2, 0, False),
    ]
    assert found[3]["forked_from"] == {"conversation_id": "all-b", "through": 3}
    plain = httpx.get(f"{here.url}/v1/conversations/all-c").json()
    assert {**found[3], "created_at": 0} == {**plain, "created_at": 0, "depth": 2, "messages": 1, "deleted": False}
    assert httpx.get(f"{here.url}/v1/conversations/all/tree").status_code == 404
    lines = output(here, "forks", "--tree", "all-b").splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["all", "all-e", "all-b", "all-c", "all-d"]
    assert "all (deleted)" in lines[1]
