"""Keeps the logs of failed tests in `.test-logs/`, one folder for each test."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from penstock.cli.embedded_kafka import EmbeddedKafka
    from system import System

FOLDER = ".test-logs"
REPEAT_VARIABLE = "PENSTOCK_TEST_REPEAT"
"""Set while failed tests run a second time: their logs have folders of their own."""
LONGEST_NAME = 150

BROKERS: list[EmbeddedKafka] = []
"""The brokers that run in this process's session; whoever starts one adds it."""


def log_folder(nodeid: str, *, repeat: bool = False) -> str:
    name = re.sub(r"[^\w.-]+", "-", nodeid.removeprefix("tests/")).strip("-")[:LONGEST_NAME]
    return f"{FOLDER}/{name}{'.repeat' if repeat else ''}"


def keep_logs(item: pytest.Item, report: pytest.TestReport, systems: Iterable[System]) -> None:
    """Write the failure's text, and copy the logs of all processes that run now and of the test's own folder."""
    folder = item.config.rootpath / log_folder(item.nodeid, repeat=REPEAT_VARIABLE in os.environ)
    if report.when != "teardown":
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    captured = [f"--- {title}\n{text}" for title, text in report.sections]
    (folder / f"{report.when}.txt").write_text("\n".join([report.longreprtext, *captured]))
    for system in systems:
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
