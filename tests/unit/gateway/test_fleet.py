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


OF_W2, EARLIER = info(aliases=["old"], worker_id="w2"), said("w1", model_state("m"))


@pytest.mark.parametrize(
    ("records", "aliases", "unsure"),
    [
        ([OF_W2, said("w2", chat(aliases=["old"]), state="stopped"), said("w1", chat())], [], False),
        ([info(aliases=["other"]), EARLIER], ["other"], False),
        ([info(aliases=["old"]), EARLIER, said("w2", chat(aliases=["new"]))], ["new", "old"], True),
    ],
    ids=["no live worker has it", "a worker of an earlier release tells none", "beside workers of a newer release"],
)  # fmt: skip
def test_which_aliases_are_served(records: list[Any], aliases: list[str], unsure: bool) -> None:
    """The record of a model counts as long as a worker of an earlier release lives."""
    known = fed(*records).known(NOW, LATE)
    assert [sorted(one.aliases) for one in known.models] == [aliases]
    assert bool(known.unsure) is unsure


def test_a_silent_worker_is_missed_while_nobody_has_its_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.gateway.view.fleet.time.time", lambda: NOW / 1000)
    silent = [said(name, ago_ms=ago, assigned=["t/0"]) for name, ago in (("w1", 600_000), ("long", 4_000_000))]
    fleet = fed(*silent, said("gone", ago_ms=600_000, assigned=["t/0"], state="stopped"), said("w2", assigned=["t/1"]))
    fleet.forget_stale_workers(60)
    assert fleet.workers.keys() == {"w1", "w2"}
    hear(fleet, said("w2", assigned=["t/0"]), NOW)
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


def test_news_count_at_once() -> None:
    fleet = fed(info(), said("w1", chat()))
    assert fleet.known(NOW, LATE).models[0].aliases == []
    hear(fleet, said("w2", chat(aliases=["new"])), NOW)
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


HOLDER = DeviceHolder(model="m", bytes=1)
HOLDS = [DeviceState(device="cpu", kind="cpu", total_bytes=9, reserved_bytes=1, used_bytes=1, holders=[HOLDER])]
REMOVED = [said("w1", chat(), ago_ms=9, devices=HOLDS), *(said("w1", ago_ms=ms, devices=HOLDS) for ms in (8, 7))]
LOADED = [said("w1", chat(), ago_ms=20), said("w2", chat(), ago_ms=15)]
STOPPED, RESTARTED, LOST = (("unloaded", "m", f"worker_{why}") for why in ("stopped", "restarted", "lost"))
TWO_PROCESSES = [said("w1", chat(), ago_ms=1_000 - at, started_at=1 + at % 2) for at in range(100)]


@pytest.mark.parametrize(
    ("reports", "found"),
    [
        pytest.param(REMOVED, [], id="a removed model whose memory is held"),
        pytest.param([*REMOVED, said("w1", ago_ms=6)], [("unloaded", "m", "removed")], id="nothing holds its memory"),
        pytest.param([*LOADED, said("w1", ago_ms=10, state="stopped")], [STOPPED], id="its worker stops"),
        pytest.param([*LOADED, said("w1", ago_ms=10, started_at=2)], [RESTARTED], id="its worker starts again"),
        pytest.param([said("w1", chat(), state="stopped")], [], id="stopped: when it was loaded is not known"),
        pytest.param([said("w1", chat(), started_at=2)], [], id="started: when it was loaded is not known"),
        pytest.param([said("w1", chat()), "w1"], [LOST], id="the record is taken away"),
        pytest.param([*LOADED, said("w1", ago_ms=10, state="stopped"), "w1"], [STOPPED], id="of a stopped worker"),
        pytest.param(TWO_PROCESSES, [RESTARTED, ("loaded", "m", None)], id="two processes with one id"),
    ],
)
def test_when_a_model_is_unloaded(reports: list[Any], found: list[tuple[str, str, str | None]]) -> None:
    assert events(fed(*reports)) == found


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


def test_a_worker_counts_that_starts_with_its_clock_set_back() -> None:
    fleet = fed(said("w1", chat(), started_at=5_000))
    hear(fleet, said("w1", started_at=10, updated_at=20), NOW + 70_000)
    assert events(fleet) == [("unloaded", "m", "worker_restarted")]


DECLARED = [
    ModelEntry(id="m", source="x", engine="noop", tasks=CHAT, aliases=["default"]),
    ModelEntry(id="gpu-m", source="x", engine="noop", tasks=CHAT, pool="gpu"),
]


def order(name: str, pool: str | None = None, **fields: Any) -> DesiredState:
    return DesiredState(kind="model", name=name, pool=pool, action="order", created_at=1, **fields)


M, GPU = ("m", None), ("gpu-m", "gpu")
MISSED, OLD = NOW - ABSENT_MS - 1, NOW - HORIZON_MS - 1
ELSE_THERE = said("w2", OTHER, pool="gpu")
SERVES_IT = said("w1", model_state("gpu-m", tasks=CHAT), pool="gpu")
GONE, M_GONE = order("gpu-m", "gpu", removed=True), order("m", "gpu", removed=True)
NEW = order("new", "gpu", entry=json.dumps({"id": "new", "source": "x", "engine": "noop", "tasks": CHAT}))
OF_GPU = {"model": "gpu-m", "pool": "gpu"}


@pytest.mark.parametrize(
    ("records", "orders", "known"),
    [
        pytest.param([], [], {M, GPU}, id="before any worker has lived"),
        pytest.param([said("w1", chat())], [], {GPU}, id="a worker that serves another file knows better"),
        pytest.param([info(), said("w1", chat())], [], {M, GPU}, id="a worker that has written a record"),
        pytest.param([said("w2", pool="gpu")], [], {M}, id="a worker of the pool"),
        pytest.param([info(**OF_GPU, updated_at=OLD), info("left", updated_at=OLD)], [], {M, GPU}, id="a day later"),
        pytest.param([info(**OF_GPU, updated_at=MISSED), ELSE_THERE], [], {M, GPU}, id="killed, beside other files"),
        pytest.param([info(**OF_GPU, updated_at=OLD), ELSE_THERE], [], {M}, id="a day later beside other files"),
        # The first worker after a day without one reports before it writes the record again.
        pytest.param([info(**OF_GPU, updated_at=OLD), SERVES_IT], [], {M, GPU}, id="an old record, a live worker"),
        # Any worker that reads an entry without a pool serves it: in the common pool its requests would wait.
        pytest.param([info(pool="gpu", updated_at=NOW)], [], {("m", "gpu"), GPU}, id="no pool: where it was reported"),
        pytest.param([info(pool="gpu", updated_at=OLD)], [], {("m", "gpu"), GPU}, id="no pool: reported a day ago"),
        pytest.param([info(pool="chat", updated_at=OLD), said("w2", OTHER, pool="chat")], [], {M, GPU}, id="it left"),
        # A request for a removed model would start a worker, which cannot serve it.
        pytest.param([], [GONE], {M}, id="removed from its pool"),
        pytest.param([], [GONE, order("m", removed=True)], set(), id="all are removed"),
        pytest.param([], [order("gpu-m", "other", removed=True), order("m", "gpu", paused=True)], {M, GPU},
                     id="removed from another pool"),
        pytest.param([], [M_GONE], {GPU}, id="no pool: not in the common pool instead"),
        pytest.param([info(pool="chat")], [M_GONE], {("m", "chat"), GPU}, id="no pool: it is in another"),
        pytest.param([], [NEW], {M, GPU, ("new", "gpu")}, id="added"),
        pytest.param([info("new", pool="gpu", updated_at=OLD)], [NEW], {M, GPU, ("new", "gpu")}, id="added long ago"),
    ],
)  # fmt: skip
def test_which_models_of_the_file_are_known(
    records: list[Any], orders: list[DesiredState], known: set[tuple[str, str | None]]
) -> None:
    fleet = fed(*records)
    fleet.declare(DECLARED)
    if orders:
        assert fleet.known(NOW, LATE).models
        fleet.follow(orders)
    assert {(one.model, one.pool) for one in fleet.known(NOW, LATE).models} == known
