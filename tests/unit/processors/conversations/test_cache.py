"""The cache of conversations: bounded by bytes, the least recently used leaves first."""

from __future__ import annotations

from kit.records import conversation_message
from penstock.processors.conversations.cache import LogCache
from penstock.processors.conversations.log import ConversationLog


def log(size: int) -> ConversationLog:
    made = ConversationLog("id")
    made.apply(0, b"k", conversation_message(), value_bytes=size)
    return made


def test_what_was_used_least_recently_leaves_when_bytes_run_out() -> None:
    cache = LogCache(3 * log(10_000).size_bytes)
    logs = {name: log(10_000) for name in "abcd"}
    for name in "abc":
        cache.put(name, logs[name])
    cache.put("a", logs["a"])
    cache.put("d", logs["d"])
    assert [cache.get(name) is logs[name] for name in "abcd"] == [True, False, True, True]
    assert cache.used_bytes == sum(logs[name].size_bytes for name in "acd")


def test_one_over_the_limit_drives_no_other_out() -> None:
    cache = LogCache(2 * log(10_000).size_bytes)
    small = log(10_000)
    cache.put("small", small)
    cache.put("huge", log(1_000_000))
    assert cache.get("huge") is None
    assert cache.get("small") is small


def test_a_log_that_grew_is_counted_anew() -> None:
    cache = LogCache(1 << 20)
    grown = log(10)
    cache.put("a", grown)
    grown.apply(1, b"k2", conversation_message(index=1), value_bytes=5_000)
    cache.put("a", grown)
    assert cache.used_bytes == grown.size_bytes
    cache.drop("a")
    assert (cache.used_bytes, len(cache)) == (0, 0)
