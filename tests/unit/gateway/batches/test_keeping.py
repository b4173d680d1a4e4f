"""Batches in a store: what is found, in which order, and which gateway may run one."""

from __future__ import annotations

import io
import json
import uuid
from contextlib import suppress
from dataclasses import replace
from unittest.mock import Mock

import pytest

from kit.records import new_batch
from penstock.common.artifacts import ArtifactStore
from penstock.common.artifacts.places import OpenPlace
from penstock.gateway.batches.checking import Part
from penstock.gateway.batches.keeping import NO_PLACE, BatchStore, Lease
from penstock.gateway.batches.leases import LEASE_S, Leases
from penstock.gateway.batches.records import Batch, Counts, Stop, batch_id_of, batch_name, file_id_of
from penstock.schemas.errors import InvalidRequest, NotFound, TenantLimit


def made(tenant: str = "default", created_ms: int = 1_700_000_000_000) -> Batch:
    return new_batch(tenant, created_ms=created_ms, parts=(Part(1, 0, 10),), counts=Counts(1, 2, 3, 4, 5))


@pytest.fixture
def kept(store: ArtifactStore) -> BatchStore:
    return BatchStore(store)


@pytest.fixture
def open_batch(kept: BatchStore) -> Batch:
    return kept.create(made())


def ids(kept: BatchStore) -> list[str]:
    return [one.batch_id for one in kept.list("default", None, 20)]


def test_a_batch_that_was_written_is_read(kept: BatchStore) -> None:
    batch = made()
    kept.create(batch)
    assert replace(kept.get(batch.key), waiting_for=None) == kept.running(batch.key) == batch
    assert kept.open() == [batch.key]
    assert kept.reader_of("default", batch.input_file_id) == batch.batch_id
    assert kept.reader_of("default", str(uuid.uuid4())) is None
    with pytest.raises(NotFound):
        kept.get(("other", batch.batch_id))
    assert [kept.cancel(batch.key, at).cancelling_at for at in (5, 9)] == [5, 5]
    assert (kept.get(batch.key).status, kept.cancelled_at(batch.key)) == ("cancelling", 5)
    assert [kept.take_lease(batch.key, *lease) for lease in ((1, "a"), (1, "b"), (10, "b"))] == [True, False, True]
    assert kept.lease(batch.key) == Lease(10, "b")
    kept.renew(batch.key, Lease(10, "c"))
    assert kept.lease(batch.key) == Lease(10, "c")


def test_pages_are_of_one_tenant_and_the_newest_first(kept: BatchStore) -> None:
    batches = [made(created_ms=1_700_000_000_000 + n) for n in range(5)]
    for batch in [*batches, made("other")]:
        kept.create(batch)
    newest = [batch.batch_id for batch in reversed(batches)]
    assert ids(kept) == newest
    assert [one.batch_id for one in kept.list("default", newest[1], 2)] == newest[2:5], "one more than the limit"
    with pytest.raises(InvalidRequest):
        kept.list("default", str(uuid.uuid4()), 2)


def test_an_end_is_written_once_and_nothing_else_is_left(kept: BatchStore, open_batch: Batch) -> None:
    key = open_batch.key
    kept.put_part(key, 0, io.BytesIO(b"x"), io.BytesIO(), Counts(1))
    assert kept.take_lease(key, 1, "beat")
    ended = open_batch.ended(None, 7)
    kept.end(ended)
    kept.write(open_batch)  # a runner that lost its lease
    kept.end(open_batch.ended(Stop.CANCELLED, 8))
    assert kept.get(key) == kept.cancel(key, 9) == ended
    assert (kept.open(), kept.parts(key), kept.lease(key)) == ([], {}, None)


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("deletions", range(7))
def test_an_interrupted_end_is_finished_by_the_next_gateway(
    kept: BatchStore, store: ArtifactStore, open_batch: Batch, monkeypatch: pytest.MonkeyPatch, deletions: int
) -> None:
    batch = open_batch
    kept.put_part(batch.key, 0, io.BytesIO(b"x"), io.BytesIO(b"y"), Counts(1))
    assert kept.take_lease(batch.key, 1, "beat")
    ended = batch.ended(None, 7)
    delete, left = OpenPlace.delete, iter(range(deletions))

    def deletes_some(place: OpenPlace, path: str) -> None:
        if next(left, None) is None:
            raise Killed
        delete(place, path)

    with monkeypatch.context() as patched:
        patched.setattr(OpenPlace, "delete", deletes_some)
        with suppress(Killed):
            kept.end(ended)
    assert kept.get(batch.key) == ended
    assert kept.reader_of("default", batch.input_file_id) is None
    kept.create(made("default"), most_open=1)  # it counts no more
    if batch.key in kept.open():
        if kept.running(batch.key) is None:
            kept.forget_unmade(batch.key)
        else:
            kept.end(ended)
    assert store.places[None].names(f"default/.batches/{batch.batch_id}") == ["end.json"]
    assert batch.key not in kept.open()
    assert kept.get(batch.key) == ended


def test_parts_are_whole_and_are_replaced_after_a_failure(kept: BatchStore) -> None:
    key, answers, errors = made().key, io.BytesIO(b"a\n"), io.BytesIO()
    kept.put_part(key, 1, io.BytesIO(), io.BytesIO(b"error of 1\n"), Counts(failed=1))
    kept.put_part(key, 0, answers, errors, Counts(1))
    kept.put_part(key, 1, answers, errors, Counts(1, 1))
    assert kept.parts(key) == {0: Counts(1), 1: Counts(1, 1)}
    assert b"".join(kept.lines_of(key, "out", 3)) == b"a\na\n"
    assert list(kept.lines_of(key, "err", 3)) == []


def test_old_batches_are_forgotten_and_those_that_run_are_not(kept: BatchStore, store: ArtifactStore) -> None:
    bad, ended, runs, later = made(), made(), made(), made(created_ms=1_800_000_000_000)
    for batch in (bad, ended, runs, later):
        kept.create(batch)
    for batch in (bad, ended, later):
        kept.end(batch.ended(None, 1))
    store.places[None].put(f"default/.batches/{bad.batch_id}/end.json", b"{")
    kept.forget_ended(1_750_000_000_000)
    store.places[None].delete(f"default/.batches/{bad.batch_id}/end.json")
    assert set(ids(kept)) == {runs.batch_id, later.batch_id}
    with pytest.raises(NotFound):
        kept.get(ended.key)


@pytest.mark.parametrize(
    ("stop", "status", "time", "errors"),
    [
        (None, "completed", "completed_at", 0),
        (Stop.CANCELLED, "cancelled", "cancelled_at", 0),
        (Stop.EXPIRED, "expired", "expired_at", 0),
        (Stop.REVOKED, "cancelled", "cancelled_at", 1),
        (Stop.NO_INPUT, "failed", "failed_at", 1),
    ],
)
def test_how_a_batch_ends(stop: Stop | None, status: str, time: str, errors: int) -> None:
    ended = replace(made(), in_flight=3, waiting_for={"reason": "paused"}).ended(stop, 7)
    shown = ended.public()
    assert (ended.is_final, shown["status"], shown[time], len(ended.errors)) == (True, status, 7, errors)
    assert shown["penstock"] == {"in_flight": 0, "waiting_for": None}


@pytest.mark.parametrize("name", ["", "batch_", "batch_1", "x", "file-" + "0" * 31, "batch_" + "g" * 32, "batch_../a"])
def test_what_is_no_id_is_not_found(name: str) -> None:
    for parse in (batch_id_of, file_id_of):
        with pytest.raises(NotFound):
            parse(name)
    assert batch_id_of(batch_name(made().batch_id))


def test_a_batch_is_found_at_the_moment_it_ends(
    kept: BatchStore, open_batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    get = OpenPlace.get

    def ends_behind(place: OpenPlace, path: str) -> bytes | None:
        found = get(place, path)
        if path.endswith("end.json"):
            monkeypatch.undo()
            kept.end(open_batch.ended(None, 1))
        return found

    monkeypatch.setattr(OpenPlace, "get", ends_behind)
    assert kept.get(open_batch.key).status == "completed"


def test_what_a_newer_version_wrote_is_read() -> None:
    batch = made()
    found = json.loads(batch.to_json())
    for part in (found, found["counts"], found["parts"][0]):
        part["newer"] = 1
    assert Batch.from_json(json.dumps(found).encode()) == batch
    assert Counts.of({"completed": 3, "newer": 1}) == Counts(3)


def test_a_batch_reports_that_it_waits_for_a_place_or_for_its_turn(kept: BatchStore) -> None:
    kept.create(batch := replace(made(), status="in_progress", in_flight=7))
    assert kept.get(batch.key).waiting_for["reason"] == "tenant_share"
    assert kept.take_lease(batch.key, 1, "beat")
    assert (kept.get(batch.key).in_flight, kept.get(batch.key).waiting_for) == (7, None)
    kept.renew(batch.key, Lease(1, ""))
    found = kept.get(batch.key)
    assert (found.status, found.in_flight, found.waiting_for) == ("in_progress", 0, NO_PLACE)


def test_the_open_batches_of_a_tenant_are_bounded(kept: BatchStore) -> None:
    batches = [made(), made()]
    for batch in batches:
        kept.create(batch, most_open=2)
    with pytest.raises(TenantLimit):
        kept.create(made(), most_open=2)
    kept.create(made("other"), most_open=2)
    kept.end(batches[0].ended(None, 1))
    kept.create(made(), most_open=2)


def test_of_two_batches_with_one_id_the_first_is_kept(kept: BatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = made()
    repeat = replace(batch, created_ms=batch.created_ms + 5, input_file_id=str(uuid.uuid4()))
    assert kept.create(batch) == batch
    assert kept.create(repeat, most_open=1).input_file_id == batch.input_file_id
    find = kept.find
    with monkeypatch.context() as patched:  # at the same moment
        patched.setattr(kept, "find", lambda key: (patched.undo(), None)[1])
        assert kept.create(repeat).created_ms == batch.created_ms
    assert find(batch.key) is not None
    assert kept.reader_of("default", batch.input_file_id) == batch.batch_id
    assert kept.made_ms(batch.key) == batch.created_ms
    ended = batch.ended(None, 7)
    kept.end(ended)
    assert kept.create(repeat) == ended
    assert kept.open() == []
    assert ids(kept) == [batch.batch_id]


def test_a_call_that_was_cut_off_and_repeated_is_one_batch_of_the_list(
    kept: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = made()
    with monkeypatch.context() as patched:
        patched.setattr(OpenPlace, "create", Mock(side_effect=Killed))
        with pytest.raises(Killed):
            kept.create(batch)
    repeat = replace(batch, created_ms=batch.created_ms + 5)
    assert kept.create(repeat) == repeat
    assert [one.created_ms for one in kept.list("default", None, 20)] == [repeat.created_ms]
    assert kept.open() == [batch.key]


# -- leases

KEY = ("default", "b")


def test_a_lease_is_taken_at_once_when_it_is_released_else_when_it_has_not_changed_for_a_while() -> None:
    assert [Leases().to_take(KEY, lease, 0) for lease in (None, Lease(3, ""))] == [1, 4]
    seen = Leases()
    for beat in range(10):
        assert seen.to_take(KEY, Lease(1, f"{beat}"), beat * LEASE_S) is None
    last = 9 * LEASE_S
    assert seen.to_take(KEY, Lease(1, "9"), last + LEASE_S - 0.1) is None
    assert seen.to_take(KEY, Lease(1, "9"), last + LEASE_S) == 2
    seen.keep_only(set())
    assert seen.to_take(KEY, Lease(1, "9"), last + 2 * LEASE_S) is None, "what is gone is forgotten"
