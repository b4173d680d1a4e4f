"""The models that a gateway knows: what all live workers of a pool have, whichever of them wrote last."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from kit.records import CODEC, model_info, model_state, request, worker
from kit.refusals import refused
from penstock.common.model_entry import ModelEntry
from penstock.gateway.service.models import check_abilities, find_model
from penstock.gateway.view.fleet import ABSENT_MS, Fleet
from penstock.schemas.errors import ContextLengthExceeded
from penstock.schemas.records import DesiredState, DeviceHolder, DeviceState, ModelInfo, WorkerState
from penstock.schemas.topics import HORIZON_MS

NOW, LATE = 1_000_000_000, 20_000
CHAT = ["text_generation"]


def fed(*records: ModelInfo | WorkerState | str) -> Fleet:
    """A fleet that has read these records; a text is the tombstone of a worker."""
    fleet = Fleet(CODEC)
    for record in records:
        message: Any = SimpleNamespace(value=None, key=None)
        if isinstance(record, str):
            message.key = record.encode()
            fleet.on_worker(message, NOW)
            continue
        message.value = CODEC.encode(record)
        if isinstance(record, ModelInfo):
            fleet.on_model(message)
        else:
            fleet.on_worker(message, record.updated_at)
    return fleet


def said(name: str = "w1", *states: Any, ago_ms: int = 1_000, **fields: Any) -> WorkerState:
    return worker(name, *states, **{"updated_at": NOW - ago_ms, **fields})


def info(model: str = "m", **fields: Any) -> ModelInfo:
    return model_info(model, **{"updated_at": NOW - ABSENT_MS - 1, "worker_id": "w1", **fields})


def chat(**fields: Any) -> Any:
    return model_state("m", **{"tasks": CHAT, "entry": "a", **fields})


@pytest.mark.parametrize("last", ["w1", "w2"])
def test_an_alias_or_task_of_one_live_worker_is_served_whoever_wrote_last(last: str) -> None:
    """In the middle of a rolling change one worker has the new file and the other the old one."""
    new = chat(aliases=["other"], tasks=[*CHAT, "embedding"], entry="b")
    written = info(aliases=["other"] if last == "w1" else [], worker_id=last)
    known = fed(written, said("w1", new), said("w2", chat())).known(NOW, LATE)
    assert find_model(known.models, "text_generation", "other", None) == "m"
    assert find_model(known.models, "embedding", "m", None) == "m"
    assert known.unsure == {("m", None)}


def test_what_no_live_worker_has_any_more_is_not_served() -> None:
    gone = said("w2", chat(aliases=["old"]), state="stopped")
    (known,) = fed(info(aliases=["old"], worker_id="w2"), gone, said("w1", chat())).known(NOW, LATE).models
    assert known.aliases == []


def test_a_worker_of_an_earlier_release_does_not_tell_and_its_record_counts() -> None:
    (known,) = fed(info(aliases=["other"]), said("w1", model_state("m"))).known(NOW, LATE).models
    assert known.aliases == ["other"]


def test_beside_workers_of_a_newer_release_the_record_of_an_earlier_one_counts() -> None:
    known = fed(info(aliases=["old"]), said("w1", model_state("m")), said("w2", chat(aliases=["new"]))).known(NOW, LATE)
    assert sorted(known.models[0].aliases) == ["new", "old"]
    assert known.unsure


def test_a_silent_worker_is_missed_while_nobody_has_its_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.gateway.view.fleet.time.time", lambda: NOW / 1000)
    silent = [said(name, ago_ms=ago, assigned=["t/0"]) for name, ago in (("w1", 600_000), ("long", 4_000_000))]
    fleet = fed(*silent, said("gone", ago_ms=600_000, assigned=["t/0"], state="stopped"), said("w2", assigned=["t/1"]))
    fleet.forget_stale_workers(60)
    assert fleet.workers.keys() == {"w1", "w2"}
    report: Any = SimpleNamespace(key=None, value=CODEC.encode(said("w2", assigned=["t/0"])))
    fleet.on_worker(report, NOW)
    fleet.forget_stale_workers(60)
    assert fleet.workers.keys() == {"w2"}


@pytest.mark.parametrize(("entries", "error"), [(("a", "a"), ContextLengthExceeded), (("a", "b"), None)])
def test_what_a_model_can_do_is_the_engines_to_say_while_workers_differ(entries: Any, error: Any) -> None:
    states = [said(f"w{number}", chat(entry=entry)) for number, entry in enumerate(entries)]
    known = fed(info(context_window=100), *states).known(NOW, LATE)
    asked = request(model="m", text_generation={"prompt": "p", "max_tokens": 1_000})
    with refused(error):
        check_abilities(known, asked)


HAD = chat()
OTHER = model_state("else", tasks=CHAT)
LONG = ABSENT_MS + 1


@pytest.mark.parametrize(
    ("reports", "known"),
    [
        pytest.param([said("w1", HAD)], True, id="served"),
        pytest.param(
            [said("w1", HAD, ago_ms=LONG, state="stopped"), said("w2", OTHER)], False, id="its worker stopped"
        ),
        pytest.param([said("w1", HAD, ago_ms=LONG), said("w1", OTHER)], False, id="its worker goes on without it"),
        pytest.param([said("w1", HAD, ago_ms=LONG), "w1", said("w2", OTHER)], False, id="its worker left the topic"),
        pytest.param([said("w1", HAD, ago_ms=30_000, state="stopped"), said("w2", OTHER)], True, id="a minute ago"),
        pytest.param([said("w1", HAD, ago_ms=LONG), said("w2", OTHER)], True, id="its worker was killed"),
        pytest.param([said("w1", HAD, ago_ms=LONG, state="stopped")], True, id="no live worker"),
        pytest.param(
            [said("w1", HAD, ago_ms=LONG, state="stopped"), said("w2", OTHER, pool="p")], True, id="none in its pool"
        ),
    ],
)
def test_a_model_is_forgotten_that_its_workers_gave_up_in_order(reports: list[Any], known: bool) -> None:
    """It would leave the gateway degraded for a day. One whose worker died is missed, and comes back with it."""
    fleet = fed(info(), info("else", updated_at=NOW), *reports)
    assert ("m" in {one.model for one in fleet.known(NOW, LATE).models}) is known


def test_nothing_is_known_after_a_day() -> None:
    assert fed(info(updated_at=NOW - 25 * 3_600_000)).known(NOW, LATE).models == []


def test_news_count_at_once() -> None:
    fleet = fed(info(), said("w1", chat()))
    assert fleet.known(NOW, LATE).models[0].aliases == []
    report: Any = SimpleNamespace(key=None, value=CODEC.encode(said("w2", chat(aliases=["new"]))))
    fleet.on_worker(report, NOW)
    assert fleet.known(NOW, LATE).models[0].aliases == ["new"]


# -- loads, unloads and evictions


def events(fleet: Fleet) -> list[tuple[str, str, str | None]]:
    """(event, model, reason), the oldest first."""
    return [(one.event, one.model, one.reason) for one in reversed(fleet.model_events.newest())]


def test_loads_and_evictions_follow_from_the_reports_of_a_worker() -> None:
    reports = [
        (model_state("a"), model_state("b", "absent")),
        (model_state("a"), model_state("b", "loading", reason="its size is measured")),
        (model_state("a", "draining", reason="idle"), model_state("b", "loading", device="cpu", reason="demand")),
        (model_state("a", "unloading", reason="idle"), model_state("b", "loading", device="cpu")),
        (model_state("a", "absent"), model_state("b", load_seconds=2.5, device="cpu")),
        (model_state("a", "absent"), model_state("b", "unloading", reason="desired")),
        (model_state("a", "failed", reason="too large", cause="needs 9 GiB"), model_state("b", "absent")),
        (model_state("a", "loading", device="cpu"), model_state("b", "loading", device="cpu")),
        (model_state("a", "unloading", reason="desired"), model_state("b")),
    ]
    fleet = fed(
        *(said("w1", *states, ago_ms=90 - at, evictions_total=int(at > 2)) for at, states in enumerate(reports))
    )
    assert events(fleet) == [
        ("loading", "b", "demand"),
        ("evicted", "a", "idle"),
        ("loaded", "b", None),
        ("unloaded", "b", "desired"),
        ("failed", "a", "too large"),
        ("loading", "a", None),
        ("loading", "b", None),
        ("unloaded", "a", "desired"),
        ("loaded", "b", None),
    ]
    by_name = {(one.event, one.model): one for one in fleet.model_events.newest()}
    assert by_name["failed", "a"].to_json()["cause"] == "needs 9 GiB"
    assert [one.load_seconds for one in fleet.model_events.newest() if one.event == "loaded"] == [None, 2.5]


def test_a_removed_model_is_unloaded_once_nothing_holds_its_memory() -> None:
    holds = [
        DeviceState(
            device="cpu",
            kind="cpu",
            total_bytes=9,
            reserved_bytes=1,
            used_bytes=1,
            holders=[DeviceHolder(model="m", bytes=1)],
        )
    ]
    reports = [said("w1", chat(), ago_ms=9, devices=holds), *(said("w1", ago_ms=ms, devices=holds) for ms in (8, 7))]
    fleet = fed(*reports)
    assert events(fleet) == []
    hear(fleet, said("w1", ago_ms=6), NOW)
    assert events(fleet) == [("unloaded", "m", "removed")]


@pytest.mark.parametrize(
    ("last", "reason"), [({"state": "stopped"}, "worker_stopped"), ({"started_at": 2}, "worker_restarted")]
)
def test_what_a_worker_had_loaded_is_unloaded_when_it_stops_or_starts_anew(last: dict[str, Any], reason: str) -> None:
    fleet = fed(said("w1", chat(), ago_ms=20), said("w2", chat(), ago_ms=15), said("w1", ago_ms=10, **last))
    assert events(fleet) == [("unloaded", "m", reason)]
    assert events(fed(said("w1", chat(), **last))) == [], "when it was loaded is not known"


def forgotten(fleet: Fleet, monkeypatch: pytest.MonkeyPatch, at_ms: int) -> None:
    """Workers that were silent for a minute are, if others have their partitions."""
    monkeypatch.setattr("penstock.gateway.view.fleet.time.time", lambda: at_ms / 1000)
    fleet.forget_stale_workers(60)


def hear(fleet: Fleet, report: WorkerState, heard_ms: int) -> None:
    message: Any = SimpleNamespace(key=None, value=CODEC.encode(report))
    fleet.on_worker(message, heard_ms)


def test_what_a_worker_had_loaded_that_was_killed_and_forgotten_is_unloaded_at_its_last_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its own clock, as its other events are: here it is ahead."""
    fleet = fed(said("w2", OTHER))
    ahead_ms = NOW + 500_000
    hear(fleet, said("w1", model_state("m", "loading", device="cpu"), updated_at=ahead_ms - 1_000), NOW - 71_000)
    hear(fleet, said("w1", chat(), updated_at=ahead_ms), NOW - 70_000)
    for _ in range(2):
        forgotten(fleet, monkeypatch, NOW)
    assert events(fleet) == [("loaded", "m", None), ("unloaded", "m", "worker_lost")]
    lost = fleet.model_events.newest()[0]
    assert (lost.at_ms, lost.worker_id) == (ahead_ms, "w1")
    hear(fleet, said("w1", chat(), updated_at=ahead_ms + 80_000), NOW + 10_000)
    assert events(fleet)[2:] == [("loaded", "m", None)], "it was alive: this gateway had not heard of it"


def test_what_a_worker_had_loaded_is_unloaded_when_its_record_is_taken_away() -> None:
    assert events(fed(said("w1", chat()), "w1")) == [("unloaded", "m", "worker_lost")]
    assert events(fed(said("w1", chat(), ago_ms=20), said("w1", chat(), ago_ms=10, state="stopped"), "w1")) == [
        ("unloaded", "m", "worker_stopped")
    ]


def test_two_processes_with_one_id_write_one_restart() -> None:
    reports = [said("w1", chat(), ago_ms=1_000 - at, started_at=1 + at % 2) for at in range(100)]
    assert events(fed(*reports)) == [("unloaded", "m", "worker_restarted"), ("loaded", "m", None)]


def test_a_worker_counts_that_starts_with_its_clock_set_back() -> None:
    fleet = fed(said("w1", chat(), started_at=5_000))
    hear(fleet, said("w1", started_at=10, updated_at=20), NOW + 70_000)
    assert events(fleet) == [("unloaded", "m", "worker_restarted")]


DECLARED = [
    ModelEntry(id="m", source="x", engine="noop", tasks=CHAT, aliases=["default"]),
    ModelEntry(id="gpu-m", source="x", engine="noop", tasks=CHAT, pool="gpu"),
]


def declared(*records: ModelInfo | WorkerState | str) -> set[tuple[str, str | None]]:
    """The models that are known, and the pools of each, of a gateway whose file has DECLARED."""
    fleet = fed(*records)
    fleet.declare(DECLARED)
    return {(one.model, one.pool) for one in fleet.known(NOW, LATE).models}


def test_a_model_of_the_file_is_known_before_any_worker_of_its_pool_has_lived() -> None:
    assert declared() == {("m", None), ("gpu-m", "gpu")}
    assert declared(said("w1", chat())) == {("gpu-m", "gpu")}, "a worker that serves another file knows better"
    assert declared(info(), said("w1", chat())) == {("m", None), ("gpu-m", "gpu")}
    assert declared(said("w2", pool="gpu")) == {("m", None)}


def test_a_model_of_the_file_outlives_its_last_worker_by_more_than_a_day() -> None:
    old = {"updated_at": NOW - HORIZON_MS - 1}
    assert declared(info("gpu-m", pool="gpu", **old), info("left", **old)) == {("m", None), ("gpu-m", "gpu")}


def test_a_model_of_the_file_is_not_known_for_good_beside_workers_without_it() -> None:
    """Its worker was killed, and those that live read other files."""
    serves_another = said("w2", model_state("else", tasks=CHAT), pool="gpu")
    missed, old = NOW - ABSENT_MS - 1, NOW - HORIZON_MS - 1
    assert ("gpu-m", "gpu") in declared(info("gpu-m", pool="gpu", updated_at=missed), serves_another)
    assert declared(info("gpu-m", pool="gpu", updated_at=old), serves_another) == {("m", None)}


def test_what_a_live_worker_serves_is_known_however_old_its_record_is() -> None:
    """The first worker after a day without one reports before it writes the record anew."""
    served = said("w1", model_state("gpu-m", tasks=CHAT), pool="gpu")
    assert ("gpu-m", "gpu") in declared(info("gpu-m", pool="gpu", updated_at=NOW - HORIZON_MS - 1), served)


def test_an_entry_without_a_pool_is_where_workers_reported_it() -> None:
    """Any worker that reads it serves it: taken for one of the common pool, its requests would wait there."""
    for at_ms in (NOW, NOW - HORIZON_MS - 1):
        assert declared(info("m", pool="gpu", updated_at=at_ms)) == {("m", "gpu"), ("gpu-m", "gpu")}
    left = info("m", pool="chat", updated_at=NOW - HORIZON_MS - 1)
    assert declared(left, said("w2", OTHER, pool="chat")) == {("m", None), ("gpu-m", "gpu")}


def order(name: str, pool: str | None = None, **fields: Any) -> DesiredState:
    return DesiredState(kind="model", name=name, pool=pool, action="order", created_at=1, **fields)


def after(orders: list[DesiredState], *records: ModelInfo) -> set[tuple[str, str | None]]:
    """As `declared`, with these orders."""
    fleet = fed(*records)
    fleet.declare(DECLARED)
    assert fleet.known(NOW, LATE).models
    fleet.follow(orders)
    return {(one.model, one.pool) for one in fleet.known(NOW, LATE).models}


def test_an_order_removes_a_model_of_the_file_from_its_pool_alone() -> None:
    """A request for it would start a worker, which cannot serve it."""
    gone = order("gpu-m", "gpu", removed=True)
    assert after([gone]) == {("m", None)}
    assert after([gone, order("m", removed=True)]) == set()
    assert after([order("gpu-m", "other", removed=True), order("m", "gpu", paused=True)]) == {
        ("m", None),
        ("gpu-m", "gpu"),
    }


def test_an_entry_without_a_pool_that_an_order_removes_is_not_in_the_common_pool_instead() -> None:
    assert after([order("m", "gpu", removed=True)]) == {("gpu-m", "gpu")}
    assert after([order("m", "gpu", removed=True)], info("m", pool="chat")) == {("m", "chat"), ("gpu-m", "gpu")}


def test_a_model_that_an_order_added_outlives_its_last_worker_by_more_than_a_day() -> None:
    entry = {"id": "new", "source": "x", "engine": "noop", "tasks": CHAT}
    added = order("new", "gpu", entry=json.dumps(entry))
    known = {("m", None), ("gpu-m", "gpu"), ("new", "gpu")}
    assert after([added]) == known
    assert after([added], info("new", pool="gpu", updated_at=NOW - HORIZON_MS - 1)) == known
