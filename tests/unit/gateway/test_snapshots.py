"""Which gateway writes the snapshot when, and where it lies in the store of artifacts."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from kit.records import REQUESTS, gateway_state, request
from kit.view_gateway import ViewGateway, execute
from penstock.common.artifacts import ArtifactStore
from penstock.common.artifacts.sweep import listing_of, plan
from penstock.common.artifacts.sweeping import Sweeper
from penstock.gateway.view import snapshot_file, snapshot_writer
from penstock.gateway.view.backfill import Backfill
from penstock.gateway.view.snapshot_file import Unusable, take
from penstock.gateway.view.snapshot_import import SnapshotImport
from penstock.gateway.view.snapshot_writer import SnapshotWriter
from penstock.gateway.view.snapshots import OLD_MS, TURN_S, Snapshots, is_due, turn_of
from penstock.gateway.view.store import Store
from penstock.gateway.view.view_file import identity_of, imported_path
from support import wait_until_async

NOW_MS = 10_000_000
STATE = gateway_state("b", kind="gateway", reported_at=NOW_MS)


@pytest.mark.parametrize(
    ("begun_s", "whole_s", "turn", "due"),
    [
        (300, 900, 0, True),
        (299, 900, 0, False),
        (300, 900, 1, False),
        (300 + TURN_S, 900, 1, True),
        (None, 0, 0, True),
        (None, TURN_S - 1, 1, False),
        (None, TURN_S, 1, True),
    ],
)
def test_the_next_in_turn_writes_later(begun_s: float | None, whole_s: float, turn: int, due: bool) -> None:
    """`begun_s`, `whole_s`: so long ago a gateway began to write the snapshot, and the history was known."""
    begun_ms = None if begun_s is None else NOW_MS - int(1000 * begun_s)
    assert is_due(begun_ms, NOW_MS - int(1000 * whole_s), NOW_MS, interval_s=300, turn=turn) is due


@pytest.mark.parametrize(
    ("changes", "turn"),
    [
        ({"id": "a"}, 1),
        ({"id": "c"}, 0),
        ({"id": "a", "kind": "bridge"}, 0),
        ({"id": "a", "version": "2"}, 0),
        ({"id": "a", "reported_at": NOW_MS - 60_000}, 0),
    ],
)
def test_live_gateways_of_the_same_release_write_before(changes: dict[str, Any], turn: int) -> None:
    assert turn_of("b", "1", [STATE, replace(STATE, **changes)], NOW_MS) == turn


def written(folder: Path, cluster: str, change: str = "") -> Snapshots:
    """The snapshot of an empty view, whose file was changed."""
    store = ArtifactStore(folder / "artifacts")
    path = folder / f"{cluster}.sqlite"
    view = Store(path, cluster)
    snapshots = Snapshots(store.places[None], cluster, path)
    execute(path, change)
    snapshots.write(path)
    view.close()
    return snapshots


def test_no_list_sweep_or_quota_of_artifacts_comes_to_it(tmp_path: Path) -> None:
    snapshots = written(tmp_path, "p- 1")
    store = ArtifactStore(tmp_path / "artifacts")
    later_s = 10 * 86_400
    sweeper = Sweeper(store, lambda: store.now_ms() / 1000 + later_s)
    listing, facts = sweeper.look()
    assert listing == listing_of([])
    assert sweeper.apply(plan(listing, facts, sweeper.now_ms(), named={}, conversations=set())) == []
    assert store.used_bytes("default") == 0
    assert snapshots.written_ms() is not None
    assert sorted(one.name for one in tmp_path.glob("*.snapshot*")) == []


def test_those_of_other_versions_are_deleted_when_nobody_writes_them(tmp_path: Path) -> None:
    old, new, other = (written(tmp_path, cluster) for cluster in ("p- 1", "p- 2", "q- 1"))
    now_ms = new.written_ms() or 0
    new.delete_old(now_ms + OLD_MS - 60_000)
    assert old.written_ms() is not None
    new.delete_old(now_ms + OLD_MS + 60_000)
    assert [one.written_ms() is None for one in (old, new, other)] == [True, False, False]


async def test_one_that_is_not_needed_leaves_nothing_that_a_process_takes_for_a_view(tmp_path: Path) -> None:
    """The log is short."""
    written(tmp_path, "cluster")
    path = tmp_path / "young.sqlite"
    snapshots = Snapshots(ArtifactStore(tmp_path / "artifacts").places[None], "cluster", path)
    downloaded = snapshots.read(lambda _: None)
    assert downloaded is not None
    identity = execute(downloaded, "SELECT value FROM meta WHERE name = 'identity'")
    assert identity != [(identity_of("cluster"),)]
    with ViewGateway(path) as young:
        SnapshotImport(snapshots, young.view, young.store).stop()
        await wait_until_async(lambda: not downloaded.exists(), 10, "it is removed")


@pytest.mark.parametrize("another", [False, True])
def test_a_reading_that_ends_early_removes_its_own_file_alone(tmp_path: Path, another: bool) -> None:
    """A gateway that could not connect reads anew, while the first reading still waits for the store."""
    written(tmp_path, "cluster")
    place, path = ArtifactStore(tmp_path / "artifacts").places[None], tmp_path / "young.sqlite"

    def stop(_: int) -> None:
        if another:
            assert Snapshots(place, "cluster", path).read(lambda _: None) is not None
        raise Unusable("it is not needed")

    with pytest.raises(Unusable, match="not needed"):
        Snapshots(place, "cluster", path).read(stop)
    assert imported_path(path).exists() is another


async def begin(folder: Path, young: ViewGateway) -> None:
    """Begin a view from the snapshot of an empty one."""
    snapshots = Snapshots(ArtifactStore(folder / "artifacts").places[None], "cluster", young.path)
    backfill = Backfill({}, {}, 0, NOW_MS)
    young.view.begin_backfill(backfill)
    await SnapshotImport(snapshots, young.view, young.store).run(backfill)


async def test_one_with_rows_of_a_foreign_release_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(tmp_path, "cluster", "INSERT INTO minutes VALUES (1, '[]')")
    with ViewGateway(tmp_path / "young.sqlite") as young:
        await begin(tmp_path, young)
        assert "snapshot.not_used" in caplog.text
        assert young.store.path == young.path


async def test_a_fault_behind_the_change_of_files_is_none_of_the_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else rows would be read from the new file and written to the old one."""
    written(tmp_path, "cluster")
    with ViewGateway(tmp_path / "young.sqlite") as young:
        fault = Mock(side_effect=sqlite3.OperationalError("disk I/O error"))
        monkeypatch.setattr(young.view.known, "begin_from", fault)
        with pytest.raises(sqlite3.OperationalError, match="disk"):
            await begin(tmp_path, young)


async def test_a_gateway_that_cannot_write_lets_the_next_in_turn_do_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots, is_whole = written(tmp_path, "p- 1"), Mock(return_value=True)
    monkeypatch.setattr(snapshots, "write", write := Mock(side_effect=OSError("no space left on device")))
    monkeypatch.setattr(snapshots, "begun_ms", lambda: None)
    monkeypatch.setattr(snapshot_writer, "LOOK_S", 0.01)
    with ViewGateway(tmp_path / "young.sqlite") as young:
        young.read(REQUESTS, request("r"))
        running = asyncio.create_task(SnapshotWriter(snapshots, young.view, young.store, 300, is_whole).run())
        await wait_until_async(lambda: write.called, 10, "the first try")
        is_whole.reset_mock()
        await wait_until_async(lambda: is_whole.call_count > 5, 10, "it looks again")
        running.cancel()
    assert write.call_count == 1


def test_a_view_is_not_copied_to_a_disk_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", Mock(return_value=SimpleNamespace(free=1_000)))
    with pytest.raises(Unusable, match="no room"):
        written(tmp_path, "p- 1")


def test_of_two_that_write_at_once_the_one_that_began_first_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hold what the other one knows to be erased."""

    def slow(read: Path, *where: Any) -> None:
        take(read, *where)
        monkeypatch.setattr(snapshot_file, "take", take)
        written(tmp_path, "p- 1")

    monkeypatch.setattr(snapshot_file, "take", slow)
    with pytest.raises(Unusable, match="another gateway"):
        written(tmp_path, "p- 1")


def test_the_next_in_turn_waits_while_a_snapshot_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[bool] = []

    def look(self: Snapshots) -> int | None:
        begun.append(self.begun_ms() is not None)
        return None

    monkeypatch.setattr(Snapshots, "written_ms", look)
    written(tmp_path, "p- 1")
    assert begun == [True, True]


async def test_those_of_other_versions_are_deleted_though_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = written(tmp_path, "p- 1")
    deleted = list[int]()
    monkeypatch.setattr(snapshots, "delete_old", deleted.append)
    with ViewGateway(tmp_path / "young.sqlite") as young:
        running = asyncio.create_task(SnapshotWriter(snapshots, young.view, young.store, 0.1, lambda: False).run())
        await wait_until_async(lambda: deleted, 10, "old ones are deleted")
        running.cancel()
