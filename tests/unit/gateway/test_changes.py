"""Which requests changed since a cursor: what is told, once, of which tenant, and when a list must be read again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.view.changes import Changed, Changes


def noted(*ids: str, most: int = 100) -> tuple[Changes, str]:
    """Changes, and a cursor in front of them."""
    changes = Changes(most)
    cursor = changes.cursor(0)
    for request_id in ids:
        changes.note(("t", request_id))
    return changes, cursor


def since(changes: Changes, cursor: str, *, most: int = 100, now_s: float = 9.0, tenant: str | None = "t") -> Changed:
    return changes.since(cursor, tenant, most, now_s)


def ids(found: Changed) -> list[str]:
    return [request_id for _, request_id in found.keys]


def test_parts_follow_each_other_and_other_tenants_are_not_told() -> None:
    changes, cursor = noted("a", "b", "c")
    changes.note(("other", "d"))
    part = since(changes, cursor, most=2)
    assert (ids(part), part.has_more) == (["a", "b"], True)
    rest = since(changes, part.cursor, most=2)
    assert (ids(rest), rest.has_more) == (["c"], False)
    assert ids(since(changes, cursor, tenant="other")) == ["d"]
    assert ids(since(changes, cursor, tenant=None)) == ["a", "b", "c", "d"]


@given(st.lists(st.sampled_from(["a", "b", "c", "ask", "later", "another asks"]), max_size=60))
def test_an_answer_has_all_that_had_changed_when_the_first_asked_within_the_second(steps: list[str]) -> None:
    """Each once, in the order of their newest changes of then, also if they have changed again since."""
    changes, cursor = noted()
    now_s, until, log = 1.0, 0, list[str]()
    told, marked_s = 0, 0.0
    for step in steps:
        if step == "later":
            now_s += 1
        elif step in ("ask", "another asks"):
            if marked_s != now_s:
                until, marked_s = len(log), now_s
            if step == "another asks":
                changes.cursor(now_s)
                continue
            found = since(changes, cursor, now_s=now_s)
            heard = log[told:until]
            assert ids(found) == [one for at, one in enumerate(heard) if one not in heard[at + 1 :]]
            assert not found.has_more
            cursor, told = found.cursor, until
        else:
            changes.note(("t", step))
            log.append(step)


@pytest.mark.parametrize("cursor", ["", "x-0", "0", "-", "٣", "name"])
def test_a_cursor_of_another_gateway_is_refused(cursor: str) -> None:
    changes, own = noted("a")
    assert changes.since(cursor, "t", 10, 9) is None
    assert changes.since(f"{own}9x", "t", 10, 9) is None
    assert Changes().since(own, "t", 10, 9) is None


def test_many_changes_of_one_tenant_reset_no_other_that_has_heard_of_its_own() -> None:
    changes, cursor = noted("a", most=2)
    heard = since(changes, cursor).cursor
    for request_id in "xyz":
        changes.note(("other", request_id))
    assert ids(since(changes, heard, now_s=10)) == []
    assert changes.since(cursor, "t", 10, 10) is None, "a is not remembered"
    assert changes.since(heard, "other", 10, 10) is None, "nor is x"
    assert changes.since(heard, None, 10, 10) is None


@given(st.lists(st.sampled_from(["a", "b", "c", "ask", "later"]), max_size=60), st.integers(1, 3))
def test_a_reader_of_parts_misses_no_change(steps: list[str], most: int) -> None:
    """However changes and calls fall into seconds, what changed since the reader heard of it comes in the end."""
    changes, cursor = noted(most=3)
    now_s, untold = 1.0, set[str]()
    for step in [*steps, "later", *(["ask"] * 4)]:
        if step == "later":
            now_s += 1
        elif step == "ask":
            found = since(changes, cursor, most=most, now_s=now_s)
            cursor = found.cursor
            untold -= set(ids(found))
        else:
            changes.note(("t", step))
            untold.add(step)
    assert not untold
