"""Keys as records: rotated, changed, expired; and the book that folds the topic of keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.document.described_routes import ROUTES
from penstock.gateway.edge.key_book import KeyBook
from penstock.gateway.edge.key_records import MOST_GRACE_S, KeyRecord, digest_of, new_key
from penstock.gateway.edge.keys import KeyRing, change_key, create_key, list_keys, rotate_key
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.callers import Caller
from penstock.gateway.limits.limits import Limits
from penstock.schemas.errors import BrokerUnavailable, Conflict, InvalidRequest, PenstockError
from penstock.schemas.records import KeyState

NOW = 1_000_000


def key(**fields: Any) -> tuple[KeyRecord, str]:
    return new_key(NOW, **{"tenant": "acme", **fields})


def test_a_rotated_secret_works_until_its_grace_is_over() -> None:
    record, first = key(limits={"outstanding": 3})
    record, second = record.rotated(60, NOW)
    record, third = record.rotated(600, NOW + 10)

    def works(at_s: float) -> list[bool]:
        return [record.matches(digest_of(secret), at_s) for secret in (first, second, third)]

    assert works(NOW + 59) == [True, True, True]
    assert works(NOW + 60) == [False, True, True]
    assert works(NOW + 610) == [False, False, True]
    assert KeyRecord.from_dict(json.loads(json.dumps(record.to_dict()))) == record
    last, _ = record.rotated(0, NOW + 20)
    assert (last.former, last.limits, last.key_id) == ((), Limits(outstanding=3), record.key_id)
    for grace_s in (-1, MOST_GRACE_S + 1):
        with pytest.raises(ValueError, match="grace_s"):
            record.rotated(grace_s, NOW)


def test_an_expired_key_works_no_more_and_is_not_rotated_and_others_of_its_file_stay(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    secrets = [create_key(file), create_key(file)]
    key_id = list_keys(file)[0].key_id
    assert change_key(file, key_id, lambda one: replace(one, expires_at=NOW))
    assert rotate_key(file, "none", 0) is None
    expired, other = list_keys(file)
    assert [KeyRing(file).find(secret) for secret in secrets] == [None, other]
    with pytest.raises(Conflict, match="has expired"):
        rotate_key(file, key_id, 0)
    assert list_keys(file) == [expired, other]
    with pytest.raises(InvalidRequest, match="expires_at has passed"):
        key(expires_at=NOW)


def test_no_hash_leaves_with_what_operators_see() -> None:
    record = key(expires_at=NOW + 90)[0].rotated(60, NOW)[0]
    shown = record.to_json("topic")
    assert {record.digest, record.former[0].digest}.isdisjoint(json.dumps(shown).split('"'))
    times = [shown["created_at"], *shown["former_until"], shown["expires_at"]]
    assert times == ["1970-01-12T13:46:40.000Z", "1970-01-12T13:47:40.000Z", "1970-01-12T13:48:10.000Z"]
    assert record.digest not in repr(record)
    assert record.former[0].digest not in repr(record)


WRONG: list[dict[str, Any]] = [
    *({"scopes": []}, {"scopes": ["root"]}, {"max_priority": -1}, {"max_priority": 1_001}, {"rate": 0}),
    *({"limits": {"speed": 1}}, {"tenant": "No"}),
]


@pytest.mark.parametrize("fields", WRONG, ids=str)
def test_a_wrong_key_is_not_made_and_leaves_no_file_and_no_key_becomes_wrong(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "keys.json"
    makers: list[Callable[[], object]] = [lambda: key(**fields), lambda: key()[0].changed(fields)]
    if "limits" not in fields:
        makers.append(lambda: create_key(file, **fields))
    for make in makers:
        with pytest.raises((ValueError, PenstockError), match=next(iter(fields)).removesuffix("s")):
            make()
    assert not file.exists()


WIDER: list[tuple[dict[str, Any], set[str]]] = [
    ({}, {"expires_at", "max_priority", "requests_per_s", "models", "outstanding"}),
    ({"expires_at": NOW + 60}, {"expires_at", "max_priority", "requests_per_s", "models", "outstanding"}),
    ({"expires_at": NOW + 40, "max_priority": 4, "rate": 2, "limits": {"models": ["a"], "outstanding": 0}}, set()),
    (
        {"expires_at": NOW + 50, "max_priority": 3, "rate": 3, "limits": {"models": [], "outstanding": 5}},
        {"requests_per_s"},
    ),
    (
        {"expires_at": NOW + 50, "max_priority": 2, "rate": 2, "limits": {"models": ["c"], "outstanding": 6}},
        {"max_priority", "models", "outstanding"},
    ),
    (
        {"expires_at": NOW + 50, "limits": {"requests_per_s": 1, "max_priority": 3, "models": ["a"], "outstanding": 5}},
        set(),
    ),
]


@pytest.mark.parametrize(("fields", "wider"), WIDER)
def test_in_what_a_key_gives_more_than_another(fields: dict[str, Any], wider: set[str]) -> None:
    narrow = {"expires_at": NOW + 50, "max_priority": 3, "rate": 2, "limits": {"models": ["a", "b"], "outstanding": 5}}
    assert key(**fields)[0].wider_than(key(**narrow)[0]) == wider
    assert not key(**narrow)[0].wider_than(key()[0])


def test_of_two_changes_of_one_version_the_first_counts() -> None:
    book, first = KeyBook(), key(version=1)[0]

    def put(record: KeyRecord) -> KeyRecord | None:
        book.apply(f"key/{record.key_id}", state("key", record.key_id, record.to_dict()))
        return book.get(record.key_id)

    assert put(first) == first
    rotated, changed = first.updated("one").rotated(0, NOW)[0], first.updated("two").changed({"rate": 1})
    assert put(rotated) == rotated
    assert put(changed) == rotated
    again = rotated.updated("one")
    assert put(again) == again
    assert (again.version, again.to_json("topic")["updated_by"]) == (3, "one")


def state(kind: str, subject: str, entry: Any = None) -> KeyState:
    return KeyState(kind=kind, id=subject, updated_at=1, entry=None if entry is None else json.dumps(entry))


def test_the_book_folds_the_topic() -> None:
    book, told = KeyBook(unread="not yet"), list[Any]()
    book.on_limits = lambda tenant, limits: told.append((tenant, limits))
    record, _ = key()
    with pytest.raises(BrokerUnavailable, match="not yet"):
        book.get(record.key_id)
    book.unread = None
    name = f"key/{record.key_id}"
    kept = state("key", record.key_id, record.to_dict())
    book.apply(name, kept)
    assert book.get(record.key_id) == record
    book.apply(name, None)
    assert book.get(record.key_id) is None
    book.apply(name, kept)
    book.apply(f"revoked/{record.key_id}", state("UNKNOWN", ""))
    book.apply(name, kept)
    assert book.get(record.key_id) is None, "what is written behind a revocation changes nothing"
    book.apply("key/odd", state("key", "odd", {"tenant": "acme", "sha256": "x", "limits": {"of a newer release": 1}}))
    assert book.get("odd") is None
    book.apply("tenant/acme", state("tenant", "acme", {"outstanding": 1}))
    book.apply("later/x", state("later", "x"))
    assert told == [("acme", {"outstanding": 1})]

    other = KeyBook(unread="being read")
    other.apply("key/second", state("key", "second", record.to_dict()))
    other.apply("tenant/busy", state("tenant", "busy", {"streams": 2}))
    told.clear()
    book.replace(other)
    assert told == [("acme", None), ("busy", {"streams": 2})]
    assert book.get("second") is not None
    book.apply("tenant/busy", None)
    assert (told[-1], book.limits) == (("busy", None), {})
    assert not book.is_revoked(record.key_id), "of a topic that was made again nothing of before holds"


@pytest.mark.parametrize("entry", ["null", "[1]", "x", "[]", '{"tenant": 3}', '{"outstanding": {}}'])
def test_a_record_that_cannot_be_read_counts_as_none(entry: str) -> None:
    book, allowances = KeyBook(), Allowances()
    book.on_limits = allowances.order
    for kind, good in (("key", key()[0].to_dict()), ("tenant", {"outstanding": 1})):
        book.apply(f"{kind}/acme", state(kind, "acme", good))
        book.apply(f"{kind}/acme", KeyState(kind=kind, id="acme", updated_at=1, entry=entry))
    assert book.get("acme") is None
    assert allowances.limits_of("acme") == Limits()


def test_an_order_about_limits_reads_those_of_its_tenant_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """5,000 orders took minutes when each read all of them."""
    book, allowances, read = KeyBook(), Allowances(), list[Any]()
    from_dict = Limits.from_dict
    monkeypatch.setattr(Limits, "from_dict", lambda values: read.append(values) or from_dict(values))
    book.on_limits = allowances.order
    orders = [{"outstanding": number} for number in range(20)]
    for number, order in enumerate(orders):
        book.apply(f"tenant/t{number}", state("tenant", f"t{number}", order))
    assert read == orders


def test_ordered_limits_stand_before_configured_ones_at_once() -> None:
    allowances = Allowances(defaults=Limits(outstanding=5, streams=2), by_tenant={"big": Limits(outstanding=50)})
    caller = Caller(tenant="acme", key_id="k")
    assert allowances.with_priority(caller).max_priority == 0
    allowances.order("acme", {"max_priority": 4, "streams": None})
    allowances.order("big", {"of a newer release": 1})
    assert allowances.limits_of("acme") == Limits(outstanding=5, max_priority=4)
    assert allowances.limits_of("big") == Limits(outstanding=50)
    assert allowances.with_priority(caller).max_priority == 4, "nothing of before is remembered"
    allowances.order("acme", None)
    assert allowances.with_priority(caller).max_priority == 0


def test_every_call_of_an_operator_that_changes_something_is_recorded() -> None:
    """A new route under the scope `admin` is, without a word about it; no other route is."""
    audited = {key for key, declared in ROUTES.items() if declared.rules.is_audited(key[0])}
    of_operators = {key for key in ROUTES if key[1].startswith("/v1/admin/")}
    assert audited == {key for key in of_operators if key[0] not in ("GET", "HEAD")}
    assert {("POST", "/v1/admin/keys"), ("POST", "/v1/admin/dlq/purge"), ("POST", "/v1/admin/models")} <= audited
