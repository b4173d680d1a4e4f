"""The crash journal: what ran at a death is counted, an orderly end is no death, cut lines are passed over."""

from __future__ import annotations

from pathlib import Path

from penstock.processors.kafka.journal import CrashJournal

KEY = ("topic", 0, 7)


def run_and_die(path: Path) -> None:
    journal = CrashJournal(path)
    journal.started(KEY, "r1")
    journal.flush()


def test_deaths_are_counted_from_life_to_life(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for life in range(3):
        journal = CrashJournal(path)
        assert journal.deaths(KEY, "r1") == life
        journal.started(KEY, "r1")
        journal.started(("topic", 0, 8), "r2")
        journal.finished(("topic", 0, 8), "r2")
        journal.flush()
        # no close: killed
    journal = CrashJournal(path)
    assert journal.deaths(KEY, "r1") == 3
    assert journal.deaths(("topic", 0, 8), "r2") == 0
    assert journal.deaths(KEY, "another request at this offset") == 0


def test_a_finish_ends_the_count(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    run_and_die(path)
    journal = CrashJournal(path)
    assert journal.deaths(KEY, "r1") == 1
    journal.started(KEY, "r1")
    journal.finished(KEY, "r1")
    journal.flush()
    assert CrashJournal(path).deaths(KEY, "r1") == 0


def test_an_orderly_end_is_no_death(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = CrashJournal(path)
    journal.started(KEY, "r1")
    journal.close(orderly=True)
    assert CrashJournal(path).deaths(KEY, "r1") == 0


def test_a_cut_line_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    run_and_die(path)
    with path.open("a") as file:
        file.write("S topic 0 9 r9\nF topi")
    journal = CrashJournal(path)
    assert journal.deaths(KEY, "r1") == 1
    assert journal.deaths(("topic", 0, 9), "r9") == 1


def test_a_long_life_compacts_its_file(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = CrashJournal(path)
    journal.started(KEY, "r1")
    for offset in range(100_000):
        journal.started(("a-topic-with-a-long-name", 3, offset), "x" * 36)
        journal.finished(("a-topic-with-a-long-name", 3, offset), "x" * 36)
        if offset % 100 == 0:
            journal.flush()
    journal.flush()
    assert path.stat().st_size < 9 << 20
    assert CrashJournal(path).deaths(KEY, "r1") == 1


def test_what_is_dropped_is_no_death_but_earlier_ones_count(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    run_and_die(path)
    journal = CrashJournal(path)
    journal.started(KEY, "r1")
    journal.dropped(KEY, "r1")
    assert journal.deaths(KEY, "r1") == 1
    journal.flush()
    assert CrashJournal(path).deaths(KEY, "r1") == 1


def test_a_disorderly_close_counts_what_ran(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = CrashJournal(path)
    journal.started(KEY, "r1")
    journal.close(orderly=False)
    assert CrashJournal(path).deaths(KEY, "r1") == 1
