"""The format of exported conversations, without a gateway."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.exported import (
    PAGE_MESSAGES,
    PAGE_SIZE,
    idempotency_key,
    messages_of,
    pages,
    request_of,
    says_the_same,
    sections,
)  # fmt: skip
from penstock.cli.failures import CliFailure

HEAD: dict[str, Any] = {
    "object": "conversation.export", "version": 1, "id": "trip", "log_id": "L", "messages": 1, "summaries": 1
}  # fmt: skip
SAID: dict[str, Any] = {"type": "message", "role": "user", "content": "Hello", "source": {"offset": 4}}
SUMMARY: dict[str, Any] = {"type": "summary", "role": "system", "content": "It was said.", "source": {"offset": 5}}
IMAGE: dict[str, Any] = {"artifact_id": "a", "media_type": "image/png", "size_bytes": 3, "sha256": "d"}


def lines(*values: Any) -> list[bytes]:
    return [json.dumps(value, ensure_ascii=False).encode() + b"\n" for value in values]


def test_a_file_of_several_conversations() -> None:
    other = {**HEAD, "id": "other", "messages": 2, "summaries": 0}
    file = lines(HEAD, {**SAID, "name": "Zoë"}, SUMMARY, other, SAID, {**SAID, "content": "Bye", "images": [IMAGE]})
    first, second = sections(file)
    assert (first.id, first.messages, first.summaries, first.images) == ("trip", 1, 1, {})
    assert (second.id, second.line, second.messages, second.images) == ("other", 4, 2, {"a": "d"})
    whole = b"".join([*file, *lines(SAID)])  # it is longer by now
    assert list(messages_of(whole[first.start :].splitlines(), first)) == [{**SAID, "name": "Zoë"}]
    assert [one["content"] for one in messages_of(whole[second.start :].splitlines(), second)] == ["Hello", "Bye"]


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ([], "the file is empty"),
        ([b"{"], "line 1 is not JSON"),
        ([b"\xff"], "line 1 is not JSON"),
        ([b"[]"], "line 1 is not a JSON object"),
        (lines(SAID), "line 1 is no conversation.export"),
        (lines({**HEAD, "version": 2}), "line 1: files of trees are not read; export each conversation"),
        (lines({**HEAD, "version": 3}), "line 1 is no conversation.export of version 1"),
        (lines(HEAD, SAID), "1 messages and 0 summaries"),  # cut off
        (lines(HEAD, SAID, SUMMARY, SAID), "2 messages and 1 summaries"),
        (lines(HEAD, SAID, {"type": "error", "error": {"message": "erased"}}), "erased"),
        (lines(HEAD, {"type": "message", "role": "user"}), "line 2 is neither"),
        (lines(HEAD, {**SAID, "images": ["a"]}), "line 2 has an image"),
    ],
)
def test_an_incomplete_export_is_refused(file: list[bytes], said: str) -> None:
    with pytest.raises(CliFailure, match=said):
        sections(file)


def test_equal_messages_may_differ_in_ids_places_and_times() -> None:
    one = {**SAID, "images": [IMAGE]}
    assert says_the_same(one, {**one, "source": {"offset": 9}, "images": [{**IMAGE, "artifact_id": "b"}]})
    assert not says_the_same(one, {**one, "images": [{**IMAGE, "sha256": "e"}]})
    assert not says_the_same(one, SAID)
    for name in ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"):
        assert not says_the_same(one, {**one, name: "another"})


def test_an_image_comes_before_the_text_with_its_bytes_where_the_file_has_them() -> None:
    page = [{**SAID, "images": [IMAGE, {**IMAGE, "data": "AAAA"}]}, {**SAID, "content": "", "images": [IMAGE]}]
    body = request_of(page, "copy")
    assert (body["task"], body["conversation_id"]) == ("conversation_items", "copy")
    kept = {"type": "image", "image": {"artifact_id": "a"}}
    brought = {"type": "image", "image": {"data": "AAAA", "media_type": "image/png"}}
    contents = [message["content"] for message in body["payload"]["messages"]]
    assert contents == [[kept, brought, {"type": "text", "text": "Hello"}], [kept]]


@given(st.lists(st.tuples(st.integers(0, PAGE_SIZE[0] // 2), st.integers(0, 5)), max_size=300))
def test_pages_hold_all_messages_in_order_within_their_limits(sizes: list[tuple[int, int]]) -> None:
    messages = [{**SAID, "content": "x" * size, "images": [IMAGE] * images} for size, images in sizes]
    found = list(pages(messages))
    assert [message for _, page in found for message in page] == messages
    assert [first for first, _ in found] == [sum(len(page) for _, page in found[:n]) for n in range(len(found))]
    for _, page in found:
        assert 1 <= len(page) <= PAGE_MESSAGES
        assert sum(len(message["content"]) for message in page) <= PAGE_SIZE[0]
        assert sum(len(message["images"]) for message in page) <= PAGE_SIZE[1]


def test_a_message_too_large_for_a_page_is_alone() -> None:
    messages = [SAID, {**SAID, "content": "x" * PAGE_SIZE[0]}, SAID]
    assert [(first, len(page)) for first, page in pages(messages)] == [(0, 1), (1, 1), (2, 1)]


def test_the_idempotency_key_names_log_place_content_and_attempt() -> None:
    body = request_of([SAID], "copy")
    other = request_of([SUMMARY], "copy")
    named = [("L", 0, body, 0), ("M", 0, body, 0), ("L", 1, body, 0), ("L", 0, other, 0), ("L", 0, body, 1)]
    keys = {idempotency_key(*each) for each in named}
    assert len(keys) == 5
    assert idempotency_key("L", 0, request_of([dict(reversed(SAID.items()))], "copy"), 0) in keys
