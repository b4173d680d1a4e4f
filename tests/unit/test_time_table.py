"""The table of where a test run's time goes."""

from __future__ import annotations

from time_table import TimeTable


def test_rooms_are_added_up_the_longest_first() -> None:
    table = TimeTable()
    assert table.lines() == []
    for number in range(2):
        table.add(f"tests/integration/worker/test_a.py::test_{number}", "setup", 1.0)
        table.add(f"tests/integration/worker/test_a.py::test_{number}", "call", 2.0)
    table.add("tests/acceptance/test_01.py::test", "call", 9.5)
    table.add("tests/unit/cli/test_b.py::test", "call", 0.4)
    heading, first, second = table.lines()
    assert heading.split() == ["seconds", "setup", "call", "teardown", "tests", "room"]
    assert first.split() == ["9.5", "0.0", "9.5", "0.0", "1", "tests/acceptance"]
    assert second.split() == ["6.0", "2.0", "4.0", "0.0", "2", "tests/integration/worker"]
    table.add("tests/acceptance/test_02.py::test", "call", 61.0)
    assert table.lines()[-1].split() == ["61.0", "tests/acceptance/test_02.py"]
