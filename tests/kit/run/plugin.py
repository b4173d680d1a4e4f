"""Pytest's hooks in each process of a run: the order of files, and the logs of failed tests in `.test-logs/`."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from kit.run.budget import BUDGET, read_budget
from system import BROKERS, RUNNING

FOLDER = ".test-logs"
LONGEST_NAME = 150


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start the files that take longest first, so that none of them is all that a run waits for at its end."""
    if hasattr(config, "workerinput"):
        files = read_budget(config.rootpath / BUDGET).files
        items.sort(key=lambda item: -files.get(item.nodeid.partition("::")[0], 0.0))


class FileScheduling(LoadFileScheduling):
    """xdist's own scheduling by file, without two defects after a crash (pytest-xdist 3.8).

    xdist runs the test that crashed again in each replacement, until it makes no more of them and leaves out the rest.
    And a process starts a test when it knows the next one, or that none follows. xdist gives a replacement one file and
    says nothing more: with a single test in it both sides would wait for ever.
    """

    def remove_node(self, node: Any) -> str | None:
        units = self.assigned_work.pop(node)
        pending = [(unit, nodeid) for unit in units.values() for nodeid, completed in unit.items() if not completed]
        if not pending:
            return None
        unit, crashed = pending[0]
        unit[crashed] = True
        self.workqueue.update({scope: unit for scope, unit in units.items() if not all(unit.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed

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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Processes of the system under test are often the only place where the cause is recorded."""
    report = yield
    if report.failed:
        name = re.sub(r"[^\w.-]+", "-", item.nodeid.removeprefix("tests/")).strip("-")[:LONGEST_NAME]
        report.logs = f"{FOLDER}/{name}{os.environ.get('PENSTOCK_TEST_REPEAT', '')}"  # pyright: ignore[reportAttributeAccessIssue]
        _keep_logs(item, report, item.config.rootpath / report.logs)
        report.sections += [(f"Logs of {system.prefix}", system.logs(20)) for system in RUNNING]
    return report


def _keep_logs(item: pytest.Item, report: pytest.TestReport, folder: Path) -> None:
    """Write the failure's text, and copy the logs of all processes that run now and of the test's own folder."""
    if report.when != "teardown":
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    captured = [f"--- {title}\n{text}" for title, text in report.sections]
    (folder / f"{report.when}.txt").write_text("\n".join([report.longreprtext, *captured]))
    for system in RUNNING:
        _copy((process.log for process in system.processes), folder / (system.prefix.rstrip("-.") or "system"))
    _copy((broker.log for broker in BROKERS), folder / "kafka")
    own = getattr(item, "funcargs", {}).get("tmp_path")
    if isinstance(own, Path):
        _copy(own.rglob("*.log"), folder / "tmp_path")


def _copy(logs: Iterable[Path], into: Path) -> None:
    for log in logs:
        if log.is_file():
            into.mkdir(exist_ok=True)
            shutil.copyfile(log, into / log.name)
