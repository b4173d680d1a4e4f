"""Pytest's hooks for a run: reports for the runner, logs of failed tests, the table of times."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from kit.run.budget import BUDGET, TimeTable, parse_budget
from kit.run.logs import keep_logs
from kit.run.results import REPORT_VARIABLE, phase_of, write_phase
from kit.run.sharing import SHARED_SETUPS
from system import RUNNING

_FAILED_FIXTURES: dict[int, tuple[BaseException, str]] = {}
"""By the identity of the exception: pytest raises the same one for each test that uses the fixture."""
_TIMES = TimeTable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start the files that take longest first, so that none of them is all that a run waits for at its end."""
    path = config.rootpath / BUDGET
    if REPORT_VARIABLE in os.environ and path.exists():
        files = parse_budget(path.read_text()).files
        items.sort(key=lambda item: -files.get(item.nodeid.partition("::")[0], 0.0))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Generator[None, object, object]:
    shared = SHARED_SETUPS.running() if fixturedef.scope in ("session", "package") else nullcontext()
    try:
        with shared:
            return (yield)
    except BaseException as error:
        if fixturedef.scope != "function":
            name = f"{fixturedef.baseid}::{fixturedef.argname}[{getattr(request, 'param_index', 0)}]"
            _FAILED_FIXTURES[id(error)] = (error, name)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Processes of the system under test are often the only place where the cause is recorded."""
    report = yield
    report.shared_seconds = SHARED_SETUPS.take()
    if report.failed:
        assert call.excinfo is not None
        report.shared_fixture = _FAILED_FIXTURES.get(id(call.excinfo.value), (None, ""))[1]
        keep_logs(item, report, RUNNING)
        report.sections += [(f"Logs of {system.prefix}", system.logs(20)) for system in RUNNING]
    return report


class FileScheduling(LoadFileScheduling):
    """xdist's own scheduling by file, without its deadlock after a crash.

    A process starts a test when it knows the next one, or that none follows. xdist gives the replacement of a crashed
    process one file and says nothing more: with a single test in it both sides would wait for ever.
    """

    def _reschedule(self, node: Any) -> None:
        if node.shutting_down:
            return
        while self.workqueue and self._pending_of(self.assigned_work[node]) <= 2:
            self._assign_work_unit(node)
        if not self.workqueue:
            node.shutdown()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling | None:
    return FileScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def _reporting(config: pytest.Config) -> Path | None:
    """The file of reports. Only one process writes it: with xdist the one that collects the others' reports."""
    path = os.environ.get(REPORT_VARIABLE)
    return Path(path) if path and not hasattr(config, "workerinput") else None


class _Reporter:
    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        write_phase(self._path, phase_of(report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            write_phase(self._path, phase_of(report))


def pytest_configure(config: pytest.Config) -> None:
    if (path := _reporting(config)) is not None:
        config.pluginmanager.register(_Reporter(path))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _TIMES.add(report.nodeid, report.when or "call", report.duration)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A whole run prints one table of all its stages instead."""
    if REPORT_VARIABLE not in os.environ and (lines := _TIMES.lines()):
        terminalreporter.section("where the time went, over all processes")
        for line in lines:
            terminalreporter.line(line)
