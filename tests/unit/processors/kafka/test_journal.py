"""The crash journal: what ran at a death is counted, an orderly end is no death, cut lines are passed over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.processors.kafka import journal as journals
from penstock.processors.kafka.journal import CrashJournal
from penstock.schemas.records import Attempt, AttemptError

KEY = ("topic", 0, 7)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def journal(path: Path) -> CrashJournal:
    return CrashJournal(path)


@pytest.mark.parametrize(
    ("lives", "deaths"),
    [
        (["started flush"], 1),
        (["started flush"] * 3, 3),
        (["started close"], 1),  # a fault closes the journal too
        (["started flush orderly_stop close"], 0),
        (["started flush ended started flush"], 1),  # a retry in place
        (["started flush", "started ended flush"], 1),
        (["started flush", "started flush ended flush"], 1),
        (["started flush", "started ended forget_deaths flush"], 0),
        (["started flush", "started flush ended flush", "forget_deaths flush"], 0),
    ],
)
def test_deaths_that_the_next_life_reads(path: Path, lives: list[str], deaths: int) -> None:
    """Each life is the calls of its journal in order. Only an outcome (`forget_deaths`) ends the count."""
    for life in lives:
        journal = CrashJournal(path)
        for call in life.split():
            getattr(journal, call)(*((KEY, "r1") if call in ("started", "ended", "forget_deaths") else ()))
        assert "forget_deaths" not in life or journal.deaths(KEY, "r1") == 0
    journal = CrashJournal(path)
    assert journal.deaths(KEY, "r1") == deaths
    assert journal.deaths(KEY, "another request at this offset") == 0


@pytest.mark.parametrize(
    ("text", "deaths"),
    [
        ("S topic 0 7 a\nS topic 0 9 c\nF topi", [1, 0, 1]),  # cut
        ("S topic 0 7 a\nS topic 0 8 b\nE topic 0 8 b\nA topic 0 7 {cut\n", [1, 0, 0]),
        # of an older version
        (
            "D topic 0 7 2 a\nS topic 0 7 a\nS topic 0 8 b\nF topic 0 8 b\n"
            "S topic 0 9 c\nF topic 0 9 c\nD topic 0 9 4 c\n",
            [3, 0, 4],
        ),
    ],
)
def test_files_that_a_death_cut_or_that_older_releases_wrote(path: Path, text: str, deaths: list[int]) -> None:
    path.write_text(text)
    journal = CrashJournal(path)
    assert [journal.deaths(("topic", 0, 7 + n), name) for n, name in enumerate("abc")] == deaths
    assert len(journal.attempts(KEY, "a").attempts) == 1


def live_long(journal: CrashJournal, runs: int) -> None:
    """Each run stands in the file: a flush comes between its start and its end."""
    for offset in range(runs):
        journal.started(("topic", 3, offset), "x" * 36)
        journal.flush()
        journal.ended(("topic", 3, offset), "x" * 36)
        journal.flush()


def test_a_long_life_compacts_its_file_now_and_then(
    path: Path, journal: CrashJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "_COMPACT_AT_BYTES", 10_000)
    rewritten, replace = list[Path](), Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, target: [rewritten.append(self), replace(self, target)][1])
    journal.started(KEY, "r1")
    live_long(journal, 1_000)
    assert path.stat().st_size < 11_000
    assert 5 <= len(rewritten) <= 15, "about 100 bytes for each run"
    assert CrashJournal(path).deaths(KEY, "r1") == 1


def test_a_file_that_cannot_be_replaced_is_written_on(
    tmp_path: Path, path: Path, journal: CrashJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "_COMPACT_AT_BYTES", 10_000)
    with monkeypatch.context() as broken:
        broken.setattr(Path, "replace", refuse)
        live_long(journal, 200)
    other = os.open(tmp_path / "another file", os.O_WRONLY | os.O_CREAT)  # it would get the number of a closed one
    journal.started(KEY, "r1")
    journal.flush()
    os.close(other)
    assert (tmp_path / "another file").read_bytes() == b""
    assert CrashJournal(path).deaths(KEY, "r1") == 1


def test_more_lines_than_a_dead_disk_may_hold_up_are_written_as_a_whole(
    path: Path, journal: CrashJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "_MOST_LINES", 3)
    journal.started(KEY, "r1")
    failed = Attempt(attempt=1, worker_id="w 1", error=AttemptError(code="overloaded", message="a full server"))
    for number in range(10):
        journal.attempt_ended(("topic", 0, number), "r2", failed)
    journal.flush()
    again = CrashJournal(path)
    assert again.deaths(KEY, "r1") == 1
    assert all(again.attempts(("topic", 0, number), "r2") is not None for number in range(10))


def test_what_ran_and_ended_between_two_flushes_is_never_written(path: Path, journal: CrashJournal) -> None:
    for offset in range(1000):
        journal.started(("topic", 0, offset), "r")
        journal.ended(("topic", 0, offset), "r")
    journal.flush()
    assert path.stat().st_size == 0


def test_a_disk_that_refuses_ends_no_worker_and_is_made_up_for(
    path: Path, journal: CrashJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr(os, "write", refuse)
        journal.started(KEY, "r1")
        journal.flush()
    journal.flush()
    assert CrashJournal(path).deaths(KEY, "r1") == 1


def test_a_write_that_took_half_is_continued(
    path: Path, journal: CrashJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:5]))
    journal.started(KEY, "r1")
    journal.started(("topic", 0, 8), "r2")
    journal.flush()
    again = CrashJournal(path)
    assert (again.deaths(KEY, "r1"), again.deaths(("topic", 0, 8), "r2")) == (1, 1)


def refuse(*_: object) -> int:
    raise OSError(28, "No space left on device")


def test_the_attempts_of_a_request_go_on_from_life_to_life(path: Path) -> None:
    """What failed, with its words; what died, with what is known: which worker, and since when."""
    journal = CrashJournal(path, "w 1")
    journal.started(KEY, "r1", 1)
    journal.flush()
    journal.ended(KEY, "r1")
    failed = Attempt(attempt=1, worker_id="w 1", error=AttemptError(code="overloaded", message="a full server\n"))
    journal.attempt_ended(KEY, "r1", failed)
    journal.started(KEY, "r1", 2)
    journal.flush()
    # no close: killed
    for life in (CrashJournal(path, "w 2"), CrashJournal(path, "w 3")):
        history = life.attempts(KEY, "r1")
        assert history.attempts[0] == failed
        died = history.attempts[1]
        assert (died.attempt, died.worker_id, died.ended_at) == (2, "w 1", None)
        assert died.error.code == "engine_failed"
        assert died.started_at is not None
        assert len(history.attempts) == 2
    life.forget_deaths(KEY, "r1")
    life.flush()
    assert CrashJournal(path).attempts(KEY, "r1") is None
