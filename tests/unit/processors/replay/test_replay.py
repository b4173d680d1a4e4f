"""Replays: the product's policy against the others and the bound, the trace format, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.processors.core.fleet.ledger import DeviceCapacity
from penstock.processors.hardware.entries import DeviceSection
from penstock.processors.replay import builtin, figures
from penstock.processors.replay.fleet import on_devices
from penstock.processors.replay.policies import POLICIES
from penstock.processors.replay.trace import Request, Trace, TraceModel, checked, read, written
from penstock.processors.replay.world import World
from penstock.schemas.errors import InvalidRequest

SCALE = 0.1


@pytest.mark.parametrize("name", builtin.TRACES)
def test_at_most_half_of_the_switches_of_fifo_and_high_work_waits_no_longer(name: str) -> None:
    rows = {row.policy: row for row in figures.replay(builtin.TRACES[name](scale=SCALE))}
    ours, fifo, bound = rows["penstock"], rows["fifo"], rows["bound"]
    assert ours.switches <= fifo.switches / 2
    assert ours.p95_wait_s["high"] <= fifo.p95_wait_s["high"]
    assert ours.deadline_misses <= fifo.deadline_misses
    for row in rows.values():
        assert row.makespan_s >= bound.makespan_s
        assert row.switches >= bound.switches


@pytest.mark.slow
def test_5000_mixed_requests_take_hardly_longer_than_the_bound() -> None:
    trace = builtin.batch()
    assert len(trace.requests) >= 4900
    ours, bound = figures.replay(trace, ["penstock"])
    assert ours.makespan_s <= 1.1 * bound.makespan_s
    assert ours.deadline_misses == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_ends_all_work_within_the_memory(policy: str) -> None:
    world = World(builtin.chat(scale=0.05))
    world.run(POLICIES[policy](world))
    assert all(job.expired or job.ended_at is not None for job in world.jobs)
    assert not any(replica.running for replica in world.replicas)
    for device in world.trace.devices:
        assert world.ledger.over_bytes(device.device) == 0


def test_two_equal_runs_are_equal() -> None:
    assert figures.replay(builtin.turns(scale=0.05)) == figures.replay(builtin.turns(scale=0.05))


def test_the_bound_of_one_model_is_its_load_and_its_work() -> None:
    device = DeviceCapacity(device="cuda:0", kind="cuda", total_bytes=10)
    model = TraceModel(model="a", bytes=8, load_s=4, slots=2)
    requests = tuple(Request(at_s=0, model="a", priority=1, run_s=3) for _ in range(4))
    trace = checked(Trace(name="t", devices=(device,), models=(model,), requests=requests))
    for row in figures.replay(trace):
        assert (row.makespan_s, row.switches) == (10.0, 1), row.policy


def test_a_written_trace_reads_as_it_was() -> None:
    trace = builtin.chat(scale=0.02)
    again = read(list(written(trace)), "other")
    assert sorted(again.requests, key=repr) == sorted(trace.requests, key=repr)
    assert (again.name, again.devices, again.models, again.foreign) == (
        "chat",
        trace.devices,
        trace.models,
        trace.foreign,
    )


FLEET = json.dumps(
    {
        "devices": [{"device": "cuda:0", "kind": "cuda", "total_bytes": 10}],
        "models": [{"model": "a", "bytes": 8, "load_s": 1, "slots": 1}],
    }
)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "empty"),
        (["{}"], "line 1"),
        ([FLEET, "{"], "line 2"),
        ([FLEET, '{"at_s": 1, "model": "a", "priority": 1}'], "line 2"),
        ([FLEET, '{"at_s": 1, "model": "b", "priority": 1, "run_s": 1}'], "no model b"),
        ([FLEET, '{"at_s": 1, "device": "cuda:7", "foreign_bytes": 1}'], "no device cuda:7"),
        ([FLEET.replace('"bytes": 8', '"bytes": 11')], "could ever hold a"),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_refused_by_its_line(lines: list[str], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        read(lines, "mine")


def test_the_command_writes_traces_and_replays_them(tmp_path: Path) -> None:
    runner = CliRunner()
    arguments = ["bench", "schedule", "--built-in", "turns", "--scale", "0.02", "--write", str(tmp_path)]
    assert runner.invoke(app, arguments).exit_code == 0
    replayed = runner.invoke(app, ["bench", "schedule", "--trace", str(tmp_path / "turns.jsonl"), "--json"])
    rows = json.loads(replayed.stdout)
    assert [row["policy"] for row in rows] == ["fifo", "strict", "penstock", "bound"]
    assert set(figures.COLUMNS) == set(rows[0])
    table = runner.invoke(app, ["bench", "schedule", "--trace", str(tmp_path / "turns.jsonl")])
    assert "p95 wait of high" in table.stdout


CONFIG = """
[[devices]]
kind = "simulated"
name = "card"
total_bytes = 64_000_000_000
reserve_bytes = 4_000_000_000
foreign = [{ after_s = 5, bytes = 1_000_000_000 }]
"""


def test_a_trace_is_replayed_on_the_devices_of_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_CONFIG", raising=False)
    config, file = tmp_path / "penstock.toml", tmp_path / "mine.jsonl"
    config.write_text(CONFIG)
    models = [{"model": name, "bytes": 40_000_000_000, "load_s": 10, "slots": 1} for name in "ab"]
    lines: list[dict[str, object]] = [
        {"trace": "mine", "devices": [{"device": "cuda:0", "kind": "cuda", "total_bytes": 100 << 30}], "models": models}
    ]
    lines += [{"at_s": float(n), "model": "ab"[n % 2], "priority": 5, "run_s": 1.0} for n in range(8)]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    def switches(*more: str) -> dict[str, int]:
        result = CliRunner().invoke(app, ["bench", "schedule", "--trace", str(file), "--json", *more])
        assert result.exit_code == 0, result.output
        return {row["policy"]: row["switches"] for row in json.loads(result.stdout)}

    assert switches()["fifo"] == 2, "both fit the trace's own card"
    assert switches("--fleet", str(config))["fifo"] == 8, "one fits the card of the configuration"
    config.write_text(CONFIG.replace("64_000_000_000", "40_000_000_000"))
    result = CliRunner().invoke(app, ["bench", "schedule", "--trace", str(file), "--fleet", str(config)])
    assert result.exit_code == 1
    assert "no device could ever hold a" in result.stderr


def test_simulated_devices_stand_for_cards_and_bring_what_others_use_of_them() -> None:
    card = DeviceCapacity(device="card", kind="simulated", total_bytes=80 << 30, reserve_bytes=1 << 30)
    host = DeviceCapacity(device="cpu", kind="cpu", total_bytes=16 << 30)
    entry = DeviceSection.model_validate(
        {"kind": "simulated", "name": "card", "total_bytes": 80 << 30, "foreign": [{"after_s": 60, "bytes": 5}]}
    )
    trace = on_devices(builtin.TRACES["chat"](scale=SCALE), [host, card], [entry])
    assert [(one.device, one.kind) for one in trace.devices] == [("card", "cuda"), ("cpu", "cpu")]
    assert [(one.device, one.at_s, one.foreign_bytes) for one in trace.foreign] == [("card", 60, 5)]
