"""Problems: each with its cause and what mends it, and none where nothing is wrong."""

from __future__ import annotations

import asyncio
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints
from unittest.mock import AsyncMock, Mock

import pytest
from typer.testing import CliRunner

from kit.records import gateway_state, model_info, model_state, worker
from penstock.cli.main import app
from penstock.common.desired import Desired
from penstock.gateway.dead_letters.letters import LetterCount
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.limits import Limits
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.routes.operator_answers import Dependency
from penstock.gateway.service.dependencies import Problem, Tried
from penstock.gateway.service.disks import Disk
from penstock.gateway.service.open_transactions import Brokers, Held
from penstock.gateway.service.problem import Action, Found, SinceBook
from penstock.gateway.service.problem_watch import ProblemWatch
from penstock.gateway.service.problems import Load, Seen, problems, summary
from penstock.gateway.view.census import Waiting
from penstock.gateway.view.liveness import judge
from penstock.schemas.errors import BrokerUnavailable
from penstock.schemas.records import DesiredState, DeviceState, GatewayState, ModelInfo, WorkerState

NOW = 10_000_000
LATE = 20_000
GIB = 2**30
CHAT = model_info("chat", aliases=["alias"])
WAITS = [Waiting(task="text_generation", model="chat", pool=None, requests=3, since_ms=NOW - 5_000)]


def live(name: str = "w", *states: Any, **fields: Any) -> WorkerState:
    return worker(name, *(states or (model_state("chat"),)), **{"updated_at": NOW - 1_000, **fields})


def seen(*workers: WorkerState, models: tuple[ModelInfo, ...] = (CHAT,), **facts: Any) -> Seen:
    workers = workers or (live(),)
    judged_ms = facts.setdefault("judged_ms", NOW)
    return Seen(now_ms=NOW, late_ms=LATE, workers=workers, liveness=judge(workers, models, judged_ms, LATE), **facts)


def waits(**fields: Any) -> Waiting:
    return replace(WAITS[0], **fields)


def tenant(limit: int | None = None, **load: Any) -> Seen:
    return seen(tenants={"acme": Load(**load)}, limits={"acme": limit})


def order(kind: str, name: str, **fields: Any) -> Desired:
    known: dict[str, Any] = {"paused": True, "created_at": NOW - 60_000, "created_by": "k1", "action": "pause"}
    return Desired(DesiredState(kind=kind, name=name, **{**known, **fields}), 7)


def device(**fields: Any) -> DeviceState:
    known = {"total_bytes": 80 * GIB, "reserved_bytes": 0, "used_bytes": 0, "limit_bytes": 70 * GIB}
    return DeviceState(device="cuda:0", kind="cuda", **{**known, **fields})


def tells(code: str, facts: Seen, **expected: Any) -> tuple[str, Seen, dict[str, Any]]:
    """Facts with one fault, and what is told of it."""
    return code, facts, expected


def heard(gateway_id: str, ago_ms: int = 0, **fields: Any) -> GatewayState:
    return gateway_state(gateway_id, reported_at=NOW - ago_ms, **fields)


DAY = 86_400_000
CLIENT, REGISTRY = 'kafka.security."ssl.certificate.location"', "schema_registry.certificate_location"
SHORT = {"waiting": {"memory": 2}}
NO = Problem("no")
LOST = live(updated_at=NOW - LATE - 1)
DIED = "the model chat has died and cannot be loaded again"
HELD = [(("t", 2), Held(7, 3, 5)), (("t", 3), Held(9, 1, 6))]
BESIDE_KAFKA: dict[str, Any] = {"behind": "the broker does not answer", "tried": [Tried("orders", 1, NO)]}
TELLS = [
    tells("no_worker", seen(LOST, waiting=WAITS), affects="3 requests wait",
          cause="no worker is alive: w stopped reporting"),
    tells("no_worker", seen(LOST, live("new", state="starting"), running=14),
          affects="0 requests wait; 14 that ran wait for another worker; new is starting",
          cause="no worker is alive: w stopped reporting",
          action=Action(label="see what it waits for", command="penstock workers list")),
    tells("worker_silent", seen(live(), live("gone", updated_at=NOW - 59_000)), subject="gone"),
    tells(
        "worker_silent",  # `Fleet` keeps such a worker
        seen(live(), live("gone", updated_at=NOW - 900_000, assigned=["t/0"])),
        affects="nobody has taken over 1 of its partitions",
    ),
    tells("worker_unwell", seen(live(reason="the broker is away")), cause="the broker is away"),
    tells("gateway_silent", seen(gateways=[heard("gateway-h-2", 7_001)], own_id="gateway-h-1"),
          cause="it has not reported for more than 7 s: pid 7 on h", affects="its clients must call another gateway"),
    tells("bridge_silent", seen(gateways=[heard("bridge-h-2", 7_001)]), affects="no bridge reads the queues"),
    tells("webhooks_silent", seen(gateways=[heard("webhooks-h-1", 9_000), heard("webhooks-h-2")]),
          affects="another process of its kind does its work", subject="webhooks-h-1"),
    tells("summarizer_silent", seen(gateways=[heard("summarizer-h-2", 9_000)]), subject="summarizer-h-2"),
    tells("bridge_unwell", seen(gateways=[heard("bridge-h-2", status="unavailable", reason="missing topics: orders")]),
          cause="missing topics: orders", affects="no bridge reads the queues"),
    tells("bridge_unwell", seen(gateways=[heard("bridge-h-2", status="degraded", reason="limits do not arrive")]),
          cause="limits do not arrive", affects="its work continues, as the cause says"),
    tells("webhooks_late", seen(gateways=[heard("webhooks-h-1", oldest_waiting_at=NOW - 14 * 60_000)]),
          cause="the oldest webhook that waits is 14 min old: its receiver does not take it",
          since_ms=NOW - 14 * 60_000),
    tells("gateway_behind", seen(behind="reading has stopped"), cause="reading has stopped"),
    tells("model_failed",
          seen(live("w", model_state("chat", "failed", reason="2 loads failed", cause="OSError")), waiting=WAITS),
          subject="chat", cause="2 loads failed: OSError", affects="3 requests wait"),
    tells(
        "model_failed",
        seen(live("w", model_state("chat", "failed", reason="it is neither a folder nor a hub id", code="invalid"))),
        action=Action(
            label="correct its entry or its files",
            command="penstock models add chat --replace --engine text --source SOURCE",
        ),
    ),
    tells("model_without_worker", seen(live("w", model_state("other"))), cause="no live worker serves it"),
    tells("pool_without_worker", seen(waiting=[waits(pool="night", model=None)]),
          cause="no live worker is in the pool night"),
    tells("model_unknown", seen(waiting=[waits(model="gpt")]), subject="gpt", affects="3 requests wait"),
    tells("task_without_model", seen(waiting=[waits(task="embedding", model=None)]), subject="embedding",
          affects="3 requests wait", cause="no worker of the common pool serves a model for the task embedding"),
    tells(
        "certificate_expires",
        seen(
            live("w", expiring_certificates={CLIENT: NOW + 3 * DAY}),
            live("gone", updated_at=NOW - 90_000, expiring_certificates={CLIENT: NOW - DAY}),
            gateways=[heard("gateway-h-1", expiring_certificates={CLIENT: NOW + 2 * DAY})],
        ),
        subject=CLIENT,
        affects="new connections are refused from then on: of gateway-h-1, w",
        cause="the certificate expires in 2.0 days, at 1970-01-03T02:46:40.000Z",
        action=Action(label="find its file and renew it", command="penstock config show"),
    ),
    tells("certificate_expires", seen(*(live(f"w{n}", expiring_certificates={REGISTRY: NOW - n}) for n in range(7))),
          affects="new connections are refused from then on: of w0, w1, w2, w3, w4 and 2 more",
          cause="the certificate expired at 1970-01-01T02:46:39.994Z",
          action=Action(label="find its file and renew it, and restart the processes", command="penstock config show")),
    tells("certificate_expires", seen(live("w", expiring_certificates={'kafka.security."ssl.ca.pem"': NOW})),
          action=Action(label="find its file and renew it, and restart the processes", command="penstock config show")),
    tells("files_differ", seen(live("a", model_state("chat"), model_state("extra")), live("b"))),
    tells("artifacts_unusable", seen(tried=[Tried("artifacts", 1, Problem("no", "disk full"))]), cause="no: disk full"),
    tells("orders_unusable", seen(tried=[Tried("orders", 1, NO)])),
    tells("rights_missing", seen(tried=[Tried("rights", 1, NO)])),
    tells("transaction_open", seen(tried=[Tried("transactions", 1, NO)], held=HELD),
          affects="4 records that nobody can read yet",
          cause="a producer has left a transaction open at offset 7 of partition 2 of t and 1 more", since_ms=5),
    tells("kafka_away", seen(live(updated_at=0), brokers=Brokers("k:1", 6_001), waiting=WAITS, **BESIDE_KAFKA),
          subject="k:1", since_ms=NOW - 6_001),
    tells("disk_low", seen(disk=Disk(Path("/data"), 3 << 20, 64 << 20), behind="no view", unwritten="no view"),
          cause="3 MiB of 64 MiB are free", subject="/data"),
    tells("kafka_away", seen(LOST, brokers=Brokers("k:1", 0, LATE), waiting=WAITS),
          cause="the brokers answer again, and no worker has reported yet"),
    tells("no_worker", seen(LOST, brokers=Brokers("k:1", 0, LATE + 1), waiting=WAITS), affects="3 requests wait"),
    tells("model_too_large",
          seen(live("w", model_state("chat", "failed", reason="it needs 9 GiB", code="insufficient_capacity"))),
          cause="it needs 9 GiB"),
    tells("model_failed", seen(live("w", model_state("chat", "failed"), reason=DIED)), cause="its load failed"),
    tells("worker_unwell", seen(live("w", reason=DIED), live("other")), cause=DIED),
    tells("tenant_floods", tenant(outstanding=9_000, urgent=3_000, came_per_s=100, ended_per_s=4),
          affects="3,000 requests of the classes high and medium, 12 min of work or more"),
    tells("keys_file_broken", seen(tried=[Tried("keys", 1, NO)])),
    tells("class_paused", seen(orders=[order("class", "low")], depths={("low", None): 9_310, ("low", "night"): 5}),
          affects="9,310 requests wait", since_ms=NOW - 60_000,
          cause="an order pauses it; the last order is by the key k1"),
    tells("model_paused", seen(orders=[order("model", "chat")], waiting=[waits(model="alias")]),
          affects="3 requests wait"),
    tells("device_short", seen(live(devices=[device()], **SHORT)), affects="2 requests wait"),
    tells("device_short", seen(live(devices=[device(foreign_bytes=8 * GIB)], running=1, **SHORT))),
    tells("dead_letters", seen(letters=[LetterCount(reason="engine_failed", letters=2, since_ms=7)]), since_ms=7),
    tells("dead_letters",
          seen(letters=[LetterCount(reason="engine_failed", letters=2, since_ms=7, newest="CUDA error")]),
          cause="engine_failed: CUDA error"),
    tells("dead_letters_unreadable",
          seen(letters=[LetterCount(reason="bad_avro", letters=2, since_ms=7, redrivable=False)]),
          affects="2 records of the last hour could not be read"),
    tells("tenant_near_limit", tenant(limit=1_000, outstanding=950), cause="950 of 1,000 outstanding requests"),
    tells("auth_failures", seen(unauthenticated_per_s=7.5), affects="nobody yet: each address is slowed on its own"),
    tells("key_topic_unusable", seen(tried=[Tried("key_topic", 1, NO)])),
    tells("audit_unusable", seen(tried=[Tried("audit", 1, NO)])),
    tells("usage_unpublished", seen(tried=[Tried("usage", 1, NO)])),
    tells("nothing_runs", seen(live(waiting={"gpu": 1}), waiting=[waits(requests=1, since_ms=NOW - 31_000)]),
          affects="1 request waits", cause="they wait (gpu), and no worker of the pool runs any"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "facts", "expected"), TELLS, ids=[one[0] for one in TELLS])
def test_a_fault_is_told_with_its_cause(code: str, facts: Seen, expected: dict[str, Any]) -> None:
    (found,) = problems(facts)
    assert found.problem == code
    assert {name: getattr(found, name) for name in expected} == expected
    assert summary(facts, [found]) == "1 problem"


def test_a_certificate_that_expired_is_listed_while_no_broker_answers() -> None:
    own = heard("gateway-h-1", expiring_certificates={CLIENT: NOW - 1})
    found = problems(seen(gateways=[own], brokers=Brokers("k:1", 6_001)))
    assert [one.problem for one in found] == ["kafka_away", "certificate_expires"]


@pytest.mark.parametrize("name", sorted({*get_args(get_type_hints(Dependency)["name"])} - {"transactions"}))
def test_every_dependency_of_a_gateway_has_a_code(name: str) -> None:
    (found,) = problems(seen(tried=[Tried(name, 1, Problem("no"))]))
    assert found.subject == name


@pytest.mark.parametrize("found", [problems(facts)[0] for _, facts, _ in TELLS], ids=[one[0] for one in TELLS])
def test_each_command_is_one_that_there_is(found: Found) -> None:
    words = [word for word in shlex.split(found.action.command) if "=" not in word]
    if words[0] in {"kafka-transactions.sh", "df"}:
        return  # of others; docs/runbook.md has them
    assert words[0] == "penstock"
    options = [word for word in words if word.startswith("--")]
    command = [word for word in words[1:3] if not word.startswith("--") and word.islower() and word.isalpha()]
    if command[0] not in {"models", "workers", "requests", "dlq", "keys"}:
        command = command[:1]
    told = CliRunner().invoke(app, [*command, "--help"])
    assert told.exit_code == 0, told.output
    assert all(option in told.output for option in options)


LONG = [waits(since_ms=NOW - 600_000)]
WELL: dict[str, Seen] = {
    "idle": seen(),
    "requests for an alias, and for any model": seen(
        models=(model_info("chat", aliases=["default"]),), waiting=[waits(model="default"), waits(model=None)]
    ),
    "busy": seen(live(running=4, waiting={"memory": 9}, devices=[device()]), waiting=LONG),
    "a worker that drains": seen(live(), live("old", state="stopping", reason="stopping")),
    "a worker that joins": seen(live(), live("new", state="starting", reason="not a member of the group g yet")),
    "a model that loads": seen(live("w", model_state("chat", "loading"), waiting={"model_loading": 1}), waiting=LONG),
    "requests that are scheduled": seen(live(waiting={"scheduled": 1}), waiting=LONG),
    "a model that is loaded when it is asked for": seen(live("w", model_state("chat", "absent"))),
    "a silent worker whose partitions others have, after a minute": seen(
        live(assigned=["t/0"]), live("gone", updated_at=NOW - 61_000, assigned=["t/0"])
    ),
    "a resumed class": seen(orders=[order("class", "low", paused=False)]),
    "a tenant below its limit": tenant(limit=1_000, outstanding=949),
    "a tenant without a limit": tenant(outstanding=9_000),
    "a burst that is worked off": tenant(outstanding=900, urgent=900, came_per_s=90, ended_per_s=2),
    "a backlog that does not grow": tenant(outstanding=9_000, urgent=9_000, came_per_s=5, ended_per_s=4),
    "a backlog in the class low": tenant(outstanding=90_000, urgent=9_000, came_per_s=0, ended_per_s=4),
    "long requests of which none has ended yet": tenant(outstanding=500, urgent=500, came_per_s=50, ended_per_s=0),
    "workers that had no time to report since Kafka is back": seen(LOST, live("w2"), brokers=Brokers("k:1", 0, LATE)),
    "gateways that have just been heard, are degraded, drain or start": seen(
        gateways=[
            heard("gateway-h-1", 7_000),
            heard("webhooks-h-1", oldest_waiting_at=NOW - 600_000),
            *(heard(f"gateway-h-{status}", status=status) for status in ("degraded", "draining", "starting")),
        ]
    ),
    "this gateway, whose own reports are not taken": seen(gateways=[heard("gateway-h-1", 9_000)], own_id="gateway-h-1"),
    "others, while this gateway hears nothing": seen(
        live(updated_at=NOW - 90_000), gateways=[heard("bridge-h-2", 90_000)], judged_ms=NOW - 85_000
    ),
    "a process of a later release": seen(gateways=[heard("else-h-1", 9_000)]),
    "gateways that had no time to report since Kafka is back": seen(
        gateways=[heard("gateway-h-2", 9_000)], brokers=Brokers("k:1", 0, LATE)
    ),
    "a small disk with room": seen(disk=Disk(Path("/"), 4 << 20, 64 << 20)),
    "dependencies that can be used": seen(tried=[Tried("artifacts", 1), Tried("orders")]),
}


@pytest.mark.parametrize("facts", WELL.values(), ids=WELL)
def test_a_system_that_is_well_has_none(facts: Seen) -> None:
    assert problems(facts) == []
    assert summary(facts, []).startswith("All well: ")


def test_the_summary_of_a_system_that_is_well_has_figures() -> None:
    facts = seen(live(running=1), waiting=[waits(since_ms=NOW - 1_240)], ended_per_s=42.04)
    assert summary(facts, []) == "All well: 42.0 requests/s, nothing waits longer than 1.2 s"
    assert summary(seen(), []) == "All well: 0.0 requests/s, nothing waits"


def test_a_problem_counts_from_when_it_was_first_seen_and_anew_when_it_comes_back() -> None:
    book, look = SinceBook(), Action(label="look", command="penstock status")
    one = Found(problem="worker_unwell", subject="w", affects="a", cause="1 s", action=look)
    assert book.note([replace(one, settles_ms=2)], 4) == [], "it may end by itself"
    assert book.note([one], 5) == [(one, 4)]
    later = replace(one, cause="2 s")
    assert book.note([later], 6) == [(later, 4)], "another cause of one subject is the same problem"
    assert book.note([], 7) == []
    assert book.note([one], 8) == [(one, 8)]
    assert one.to_json(8)["since"] == "1970-01-01T00:00:00.008Z"
    assert replace(one, since_ms=3).to_json(8)["since"] == "1970-01-01T00:00:00.003Z"


@pytest.mark.parametrize(
    ("orders", "told"),
    [
        ([], {"nothing_runs"}),
        ([order("class", "low")], {"class_paused"}),
        ([order("class", "low", pool="night")], {"class_paused", "nothing_runs"}),
    ],
    ids=["nothing else", "explained", "explained for another pool"],
)
def test_a_standstill_is_told_beside_what_does_not_explain_it(orders: list[Desired], told: set[str]) -> None:
    letters = [LetterCount(reason="engine_failed", letters=1, since_ms=7)]
    elsewhere = live("night", pool="night", running=1)
    found = problems(seen(live(), elsewhere, waiting=LONG, letters=letters, orders=orders))
    assert {one.problem for one in found} == {"dead_letters", *told}


def test_many_unknown_names_are_a_few_lines() -> None:
    """Whoever writes to Kafka chooses them."""
    waiting = [waits(model=f"m{number:03}", requests=1 + (number == 99)) for number in range(100)]
    found = problems(seen(waiting=waiting))
    assert len(found) == 21
    assert (found[0].subject, found[-1].affects) == ("m099", "80 requests wait")


@pytest.mark.parametrize(
    ("workers", "told"),
    [((live(state="stopped"),), "no_worker"), ((live(state="starting"),), "no_worker"), ((), "pool_without_worker")],
)
def test_workers_that_stopped_in_order_are_missed_once_requests_wait(
    workers: tuple[WorkerState, ...], told: str
) -> None:
    pool = None if workers else "night"
    facts = {"models": (model_info("chat", pool=pool), *(() if workers else (CHAT,)))}
    idle = problems(seen(*workers, **facts))
    (found,) = problems(seen(*workers, waiting=[waits(pool=pool)], **facts))
    assert (idle, found.problem, found.affects[:15]) == ([], told, "3 requests wait")


def test_a_model_of_another_pool_is_named() -> None:
    models = (CHAT, model_info("big", pool="night"))
    (found,) = problems(seen(models=models, waiting=[waits(model="big")]))
    assert found.cause == "no worker of the common pool serves a model of this name; it is served in the pool night"


def test_the_metric_has_the_list_of_the_last_look() -> None:
    facts, metrics = Mock(), GatewayMetrics()
    assert b'penstock_problems{pool="",problem="gateway_behind",subject=""} 1.0' in metrics.render()
    watch = ProblemWatch(facts, AsyncMock(), Mock(), lambda: [], Allowances(), Path("/"))
    metrics.read_problems = watch.counts
    unknown = [waits(model=f"m{number}", pool=pool) for number, pool in enumerate((None, "night", "a", "b"))]
    models = (CHAT, model_info("chat", pool="night"))
    facts.moment.return_value = seen(live(reason="the broker is away"), models=models, waiting=unknown)
    watch.look()
    facts.moment.return_value = replace(facts.moment.return_value, now_ms=NOW + 10_000)
    watch.look()
    assert {one for one in metrics.render().decode().splitlines() if one.startswith("penstock_problems{")} == {
        'penstock_problems{pool="",problem="model_unknown",subject=""} 1.0',
        'penstock_problems{pool="night",problem="model_unknown",subject=""} 1.0',
        'penstock_problems{pool="other",problem="model_unknown",subject=""} 2.0',
        'penstock_problems{pool="night",problem="pool_without_worker",subject="night"} 1.0',
        'penstock_problems{pool="other",problem="pool_without_worker",subject="other"} 2.0',
        'penstock_problems{pool="",problem="worker_unwell",subject="w"} 1.0',
    }
    facts.moment.return_value = seen(brokers=Brokers("secret:9092", silent_ms=60_000))
    watch.look()
    assert b'penstock_problems{pool="",problem="kafka_away",subject=""} 1.0' in metrics.render()
    facts.moment.return_value = seen()
    watch.look()
    assert b"penstock_problems{" not in metrics.render()


def test_a_fault_of_the_judgement_is_a_problem_and_ends_nothing() -> None:
    facts = Mock()
    watch = ProblemWatch(facts, AsyncMock(), Mock(), lambda: [], Allowances(), Path("/"))
    facts.moment.return_value = seen(waiting=[waits(pool="night")])
    watch.look()
    former = watch.to_json()["data"]
    assert former
    for error in (ValueError("odd"), ValueError("odd"), KeyError("odd")):
        facts.moment.side_effect = error
        watch.look()
        one, *others = watch.to_json()["data"]
        assert (one["problem"], type(error).__name__ in one["cause"]) == ("not_judged", True)
        assert others == former
        assert watch.to_json()["summary"] == f"{1 + len(former)} problems"
    facts.moment.side_effect = None
    watch.look()
    assert watch.to_json()["data"] == former


async def test_what_cannot_be_read_for_a_moment_stays_as_it_was_read() -> None:
    facts, orders, letters = Mock(), AsyncMock(), Mock()
    loads = {"t": Load(outstanding=5), "free": Load(outstanding=5)}
    facts.moment.return_value = seen(tenants=loads)
    facts.live_workers.side_effect = [[live(observed_revision=number)] for number in range(100)]
    limits = {"t": Limits(outstanding=5), "free": Limits()}
    orders.ordered.return_value = [order("class", "low")]
    letters.recent.return_value = [LetterCount(reason="engine_failed", letters=1, since_ms=3)]
    watch = ProblemWatch(facts, orders, letters, lambda: [], Allowances(by_tenant=limits), Path("/"))
    expected = ["class_paused", "dead_letters", "tenant_near_limit"]
    for broken in (None, BrokerUnavailable("away")):
        orders.ordered.side_effect = broken
        await watch.read()
        watch.look()
        assert [one["problem"] for one in watch.to_json()["data"]] == expected
    orders.ordered.side_effect, orders.ordered.return_value, letters.recent.return_value = None, [], []
    facts.moment.return_value = seen()
    running = asyncio.create_task(watch.run())
    try:
        async with asyncio.timeout(5):
            while watch.to_json()["data"]:
                await asyncio.sleep(0.02)
    finally:
        running.cancel()
    assert watch.to_json()["summary"] == "All well: 0.0 requests/s, nothing waits"
