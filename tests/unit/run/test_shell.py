"""The runner itself, on a small made-up repository: stages, contracts, repeats, logs, exit status, interrupts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kit.run import __main__ as shell
from support import alive, wait_until

pytestmark = pytest.mark.timeout(900)  # each run starts a dozen processes
TESTS = Path(__file__).parents[2]
FILES = {
    "pyproject.toml": """\
[tool.pytest.ini_options]
addopts = "--import-mode=importlib --strict-markers -p xdist.plugin"
markers = ["alone", "thorough"]
""",
    "tests/conftest.py": 'pytest_plugins = ["kit.run.plugin"]\n',
    "tests/prepare_models.py": 'print("models are prepared")\n',
    "tests/contracts.toml": '[clients]\ntests = ["tests/integration/clients"]\n',
    "tests/unit/test_unit.py": "def test(): pass\n",
    "tests/property/test_property.py": "def test(): pass\n",
    "tests/integration/clients/test_clients.py": "def test(): pass\n",
    "tests/integration/test_alone.py": "import pytest\n@pytest.mark.alone\ndef test(): pass\n",
    # Instead of the real module, which imports clients of Kafka: one system whose process has a log.
    "tests/system.py": """\
from pathlib import Path
from types import SimpleNamespace
LOG = Path("worker.log")
LOG.write_text("the worker's last words")
RUNNING = [SimpleNamespace(prefix="t1-", processes=[SimpleNamespace(log=LOG)], logs=lambda lines: "tail")]
""",
    "tests/integration/test_shared.py": """\
import pytest
from pathlib import Path

@pytest.fixture(scope="module")
def shared():
    first = Path("seen-shared")
    assert first.exists() or first.touch(), "the system did not start"

@pytest.mark.parametrize("number", range(3))
def test(shared, number): pass
""",
}
CRASHES = """\
import os
from pathlib import Path
def test_crashes():
    first = Path("seen-crash")
    if not first.exists():
        first.touch()
        os._exit(1)
"""
BROKEN = "def test_broken(tmp_path):\n    (tmp_path / 'own.log').write_text('mine')\n    assert 1 == 2\n"
LEAVES_CHILDREN = """\
import subprocess, sys, pytest
from pathlib import Path
def child(name):
    found = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    Path(name).with_suffix(".tmp").write_text(str(found.pid))
    Path(name).with_suffix(".tmp").rename(name)
    return found
@pytest.fixture
def kept():
    found = child("kept")
    yield
    found.kill()
    found.wait()
    Path("ended-by-its-fixture").touch()
def test(kept):
    child("forgotten").wait()
"""


@dataclass(frozen=True)
class Run:
    status: int
    output: str


class Repository:
    def __init__(self, root: Path) -> None:
        self.root = root
        for name, text in FILES.items():
            self.write(name, text)

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def start(self, *options: str, processes: str = "0") -> subprocess.Popen[str]:
        own = {
            "PYTHONPATH": os.pathsep.join([str(self.root / "tests"), str(TESTS)]),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_XDIST_AUTO_NUM_WORKERS": processes,
        }
        foreign = ("PENSTOCK_TEST_", "PYTEST_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        command = [sys.executable, "-m", "kit.run", "--processes", processes, *options]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, cwd=self.root, env=inherited | own, **pipes)

    def run(self, *options: str, processes: str = "0") -> Run:
        process = self.start(*options, processes=processes)
        output, _ = process.communicate()
        return Run(process.returncode, output)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    return Repository(tmp_path_factory.mktemp("repository"))


@pytest.fixture(scope="module")
def first(repository: Repository) -> Run:
    """All tests: a shared fixture fails once, and a process crashes once."""
    repository.write("tests/integration/test_crash.py", CRASHES)
    repository.write(".test-logs/of-an-earlier-run/call.txt", "")
    return repository.run("--all", "--budget", processes="1")


@pytest.fixture(scope="module")
def second(repository: Repository, first: Run) -> Run:
    """What a change can affect, with a test that always fails, and one new unit test that does too."""
    repository.write("tests/integration/test_broken.py", BROKEN)
    repository.write("tests/unit/test_unit.py", BROKEN)
    return repository.run()


def closing_lines(run: Run) -> list[str]:
    return re.findall(r"^=+ (.*) in [\d.]+s.* =+$", run.output, re.MULTILINE)


def test_a_run_with_two_repeats_passes(first: Run) -> None:
    assert first.status == 0, first.output
    assert "[run] the run passed" in first.output


def test_all_stages_run_and_pytest_closes_each(first: Run) -> None:
    assert "models are prepared" in first.output
    closing = ["2 passed", "1 failed, 2 passed, 3 errors", "1 passed", "3 passed", "1 passed"]
    assert sorted(closing_lines(first)) == sorted(closing), first.output


def test_both_results_of_a_repeated_test_are_reported(first: Run) -> None:
    page = first.output.partition("repeated: failed once, then passed by itself:")[2]
    for number in range(3):
        assert f"[run]   tests/integration/test_shared.py::test[{number}]\n" in page
    assert page.count("the system did not start") == 3
    assert "(fixture tests/integration/test_shared.py::shared[0])" in page
    assert "crashed while running 'tests/integration/test_crash.py::test_crashes'" in page


def test_the_logs_of_a_failed_test_are_kept(repository: Repository, first: Run, second: Run) -> None:
    logs = repository.root / ".test-logs"
    names = {path.name for path in logs.iterdir()}
    assert names == {
        "integration-test_broken.py-test_broken",
        "integration-test_broken.py-test_broken.repeat",
        "unit-test_unit.py-test_broken",
    }
    folder = logs / "integration-test_broken.py-test_broken"
    assert "assert 1 == 2" in (folder / "call.txt").read_text()
    assert (folder / "t1" / "worker.log").read_text() == "the worker's last words"
    assert (folder / "tmp_path" / "own.log").read_text() == "mine"


def test_a_contract_that_passed_is_recorded_and_left_out_of_the_next_run(first: Run, second: Run) -> None:
    assert "contract clients: runs (all tests run)" in first.output
    assert "tests/contracts.lock records: clients" in first.output
    assert "contract clients: unchanged since its last successful run" in second.output


def test_the_budget_is_written_and_read(repository: Repository, first: Run, second: Run) -> None:
    assert "tests/budget.toml is written" in first.output
    assert '"tests/integration" = {seconds = ' in (repository.root / "tests/budget.toml").read_text()
    assert "has no budget" not in second.output


def test_a_test_that_fails_twice_fails_the_run_and_unit_tests_are_not_repeated(second: Run) -> None:
    assert second.status == 1
    pages = second.output.partition("[run] failed twice:\n")[2].partition("[run] failed:\n")
    for page, nodeid, failures in (
        (pages[0], "tests/integration/test_broken.py::test_broken", 2),
        (pages[2], "tests/unit/test_unit.py::test_broken", 1),
    ):
        assert page.count("assert 1 == 2") == failures
        assert f'[run]       again: make test ARGS="{nodeid}"\n' in page
    assert second.output.count("stage: repeating") == 1
    assert second.output.rstrip().endswith("[run] the run FAILED")


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    repository = Repository(tmp_path)
    for name in ("tests/integration/test_shared.py", "tests/integration/clients/test_clients.py"):
        (tmp_path / name).write_text(LEAVES_CHILDREN if "clients" in name else "")
    process = repository.start()
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_run_and_all_its_processes(
    waiting: subprocess.Popen[str], tmp_path: Path, number: signal.Signals
) -> None:
    pids = [tmp_path / name for name in ("kept", "forgotten")]
    wait_until(lambda: all(path.exists() for path in pids) or waiting.poll() is not None, 120, "the test runs")
    waiting.send_signal(number)
    output, _ = waiting.communicate(timeout=120)
    assert waiting.returncode == shell.INTERRUPTED, output
    assert not any(alive(int(path.read_text())) for path in pids)


def test_contracts_that_did_not_change_are_ignored_by_both_stages() -> None:
    stages = shell.stages("3", ["tests/x"], everything=False)
    assert [one.name for one in stages if "--ignore=tests/x" in one.arguments] == ["integration", "alone"]
    assert [one.name for one in stages if one.repeatable] == ["integration", "alone"]


def test_only_files_with_tests_that_run_alone_are_read_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked = "@pytest.mark.alone\ndef test_times() -> None: ...\n"
    for name, text in (
        ("unit/test_a.py", marked),
        ("x/test_b.py", marked),
        ("x/test_c.py", ""),
        ("y/test_d.py", marked),
    ):
        file = tmp_path / "tests" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.chdir(tmp_path)
    assert shell.files_alone([]) == ["tests/x/test_b.py", "tests/y/test_d.py"]
    assert shell.files_alone(["tests/x"]) == ["tests/y/test_d.py"]
    assert shell.files_alone(["tests/x", "tests/y/test_d.py"]) == ["tests"]
