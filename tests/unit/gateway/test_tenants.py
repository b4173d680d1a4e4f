"""Counting tenants from the log: never below nothing, the same at every gateway, and a bounded overshoot of two."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.limits.tenants import FORGET_MS, NEW_CONVERSATION_S, Tenants

STEPS = st.lists(st.sampled_from(["ask 0", "ask 1", "follow 0", "follow 1", "end"]), max_size=300)


@given(st.integers(0, 12), STEPS)
def test_two_gateways_overshoot_by_no_more_than_they_have_not_read(limit: int, steps: list[str]) -> None:
    """A log and two gateways that read it whenever they like. What is outstanding is never more than the limit and what
    one of them has yet to read of the other's; so never more than twice the limit."""
    log: list[tuple[str, int]] = []
    gateways = [Tenants(), Tenants()]
    read = [0, 0]
    outstanding = 0

    def follow(one: int) -> None:
        for kind, by in log[read[one] :]:
            if kind == "end":
                gateways[one].ended("t")
            elif by != one:  # its own it counted when the broker acknowledged them
                gateways[one].began("t")
        read[one] = len(log)

    for step in steps:
        name, _, of = step.partition(" ")
        if name == "ask":
            one = int(of)
            unread = sum(1 for kind, by in log[read[one] :] if kind == "begin" and by != one)
            if gateways[one].reserve("t", limit):
                log.append(("begin", one))
                gateways[one].began("t")
                gateways[one].settle("t")
                outstanding += 1
                assert outstanding <= limit + unread
            assert outstanding <= 2 * limit
        elif name == "follow":
            follow(int(of))
        elif outstanding:
            log.append(("end", -1))
            outstanding -= 1
    follow(0)
    follow(1)
    assert [one.of("t").outstanding for one in gateways] == [outstanding, outstanding]


def test_tokens_are_charged_when_requests_end_at_any_gateway() -> None:
    tenants = Tenants(lambda tenant: 600 if tenant == "t" else None)
    bucket = tenants.tokens("t", 100.0)
    assert bucket is not None
    assert bucket.wait_s(100.0) == 0
    tenants.on_outcome("t", "completed", 1_200, 100_000)
    assert bucket.wait_s(100.0) == 60.1, "the debt of a minute, and one more"
    assert bucket.wait_s(161.0) == 0
    tenants.on_outcome("other", "completed", 10**9, 100_000)
    assert tenants.tokens("other", 100.0) is None
    assert tenants.of("t").outcomes == {"completed": 1}


def test_conversations_that_exist_and_those_just_named_count() -> None:
    tenants = Tenants()

    def may_begin(*conversations: str, tenant: str = "t") -> list[bool]:
        return [tenants.may_begin_conversation(tenant, one, 2) for one in conversations]

    tenants.on_conversations("t", {"a"}, 0.0)
    tenants.on_conversations("u", {"x"}, 0.0)
    tenants.on_request("t", "b", 1_000)
    assert may_begin("a", "b", "c") == [True, True, False]
    assert may_begin("c", tenant="u") == [True]
    tenants.on_conversations("t", {"b"}, 10.0)
    assert tenants.of("t").conversations == {"b"}
    assert may_begin("c") == [True]
    tenants.conversation_began("t", "c", 10.0)
    assert may_begin("d") == [False]
    tenants.conversation_gone("t", "b")
    assert may_begin("d") == [True]
    tenants.on_request("t", "c", 11_000)
    tenants.conversation_began("t", "d", 10.0)
    for at_s, named in ((10.0, {"c": 11, "d": 10}), (11.0, {})):
        tenants.on_conversations("t", set(), at_s + NEW_CONVERSATION_S)
        assert tenants.of("t").named == named, "the latest last; one without a conversation is forgotten"


def test_tenants_without_anything_are_forgotten() -> None:
    """A submission on its way counts."""
    tenants = Tenants()
    assert [tenants.reserve(name, 1) for name in ("t", "t", "other")] == [True, False, True]
    tenants.settle("t")
    assert tenants.reserve("t", 1)
    tenants = Tenants()
    for number in range(10):
        tenants.began(f"t{number}")
        tenants.on_request(f"t{number}", None, 1_000)
    tenants.ended("t1")
    for number in range(10):
        tenants.on_conversations(f"t{number}", set(), FORGET_MS / 1000 + 2)
    assert tenants.known().keys() == {f"t{number}" for number in range(10)} - {"t1"}
