"""Facts of conversations as a gateway looks them up: what is unwritten is the event loop's, the file is a thread's."""

from __future__ import annotations

import threading
from typing import Any, cast

from penstock.common.settings import KafkaSettings
from penstock.gateway.service.conversation_facts import FactsOfConversations
from penstock.gateway.threads import Threads
from penstock.schemas.codec import default_codec
from penstock.schemas.records import ConversationFacts

CODEC = default_codec()


def record(conversation_id: str, title: str, topic_id: str = "id") -> bytes:
    facts = ConversationFacts(tenant="t", conversation_id=conversation_id, updated_at=0, topic_id=topic_id, title=title)
    return CODEC.encode(facts)


class View:
    """Records who asks it."""

    def __init__(self) -> None:
        self.unwritten: dict[str, bytes | None] = {}
        self.written: dict[str, bytes] = {}
        self.asked: list[tuple[str, int]] = []

    def unwritten_facts(self, keys: list[str]) -> dict[str, bytes | None]:
        self.asked.append(("unwritten", threading.get_ident()))
        return {key: self.unwritten[key] for key in keys if key in self.unwritten}

    def written_facts(self, keys: list[str]) -> dict[str, bytes]:
        self.asked.append(("written", threading.get_ident()))
        return {key: self.written[key] for key in keys if key in self.written}


async def test_the_loop_looks_first_and_what_it_has_goes_before_the_file() -> None:
    view, threads = View(), Threads()
    view.written = {f"t.{name}": record(name, "old") for name in ("changed", "gone", "same", "former")}
    view.unwritten = {"t.changed": record("changed", "new"), "t.gone": None, "t.broken": b"\0nothing"}
    facts = FactsOfConversations(
        cast(Any, None), cast(Any, view), cast(Any, None), cast(Any, None), KafkaSettings(), CODEC, threads
    )
    try:
        names = ["changed", "gone", "same", "former", "broken", "none"]
        found = await facts.of_many("t", {name: "another" if name == "former" else "id" for name in names})
    finally:
        threads.close()
    assert {name: one.title for name, one in found.items()} == {"changed": "new", "same": "old"}
    assert [what for what, _ in view.asked] == ["unwritten", "written"]
    assert view.asked[0][1] == threading.get_ident() != view.asked[1][1]


def test_changes_of_one_conversation_come_one_after_the_other() -> None:
    facts = FactsOfConversations(
        cast(Any, None),
        cast(Any, None),
        cast(Any, None),
        cast(Any, None),
        KafkaSettings(),
        CODEC,
        cast(Any, None),
    )
    first = facts.changing("t", "c")
    assert facts.changing("t", "c") is first
    assert facts.changing("u", "c") is not first
