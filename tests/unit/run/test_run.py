"""The runner itself, on a small made-up repository: stages, contracts, repeats, logs, exit status, interrupts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from support import alive, wait_until

pytestmark = pytest.mark.timeout(900)  # each run starts a dozen processes
TESTS = Path(__file__).parents[2]
LONGEST_S = 120.0
ALONE = """\
import os, pytest
from pathlib import Path
@pytest.mark.alone
def test_alone():
    assert os.environ["PYTEST_XDIST_WORKER_COUNT"] == "1" and Path("beside").exists()
"""
FILES = {
    "pyproject.toml": """\
[tool.pytest.ini_options]
addopts = "--import-mode=importlib --strict-markers -p xdist.plugin"
markers = ["alone", "thorough"]
faulthandler_timeout = 10
faulthandler_exit_on_timeout = true
""",
    "tests/conftest.py": 'pytest_plugins = ["kit.run.plugin"]\n',
    "tests/prepare_models.py": 'print("models are prepared")\n',
    "tests/contracts.toml": '[clients]\ntests = ["tests/integration/clients"]\n',
    "tests/unit/test_unit.py": "def test(): pass\n",
    "tests/property/test_property.py": "def test(): pass\n",
    "tests/integration/clients/test_clients.py": "def test(): pass\n",
    # Instead of the real module, which imports clients of Kafka: one system whose process has a log.
    "tests/system.py": """\
from pathlib import Path
from types import SimpleNamespace
LOG = Path("worker.log")
LOG.write_text("the worker's last words")
RUNNING = [SimpleNamespace(prefix="t1-", processes=[SimpleNamespace(log=LOG)], logs=lambda lines: "tail")]
BROKERS = []
""",
    "tests/integration/test_alone_a.py": ALONE,
    "tests/integration/test_alone_b.py": ALONE,
    "tests/integration/test_beside.py": """\
import os, pytest
from pathlib import Path
def test_beside():
    assert os.environ["PYTEST_XDIST_WORKER_COUNT"] == "2"
    Path("beside").touch()
@pytest.mark.thorough
def test_thorough(): pass
""",
    "tests/integration/test_once.py": """\
import os, pytest
from pathlib import Path
@pytest.fixture(scope="module")
def shared():
    first = Path("seen-shared")
    assert first.exists() or first.touch(), "the system did not start"
@pytest.mark.parametrize("number", range(3))
def test_shared(shared, number): pass
def test_once():
    first = Path("seen-once")
    if not first.exists():
        first.touch()
        raise ValueError("only once")
    assert os.environ["PYTEST_XDIST_WORKER_COUNT"] == "1"
""",
}
BROKEN = "def test_broken(tmp_path):\n    (tmp_path / 'own.log').write_text('mine')\n    assert 1 == 2\n"
SLOW = "import time\ndef test(): time.sleep(2)\n"
DIES = "import os, pytest\n@pytest.mark.alone\ndef test_dies(): os._exit(1)\n"
STANDS_STILL = "import ctypes\ndef test_stands_still(): ctypes.PyDLL(None).sleep(600)\n"
WAITS = """\
import os, pytest, time
from pathlib import Path
@pytest.fixture
def started():
    Path("pid.tmp").write_text(str(os.getpid()))
    Path("pid.tmp").rename("pid")
    yield
    Path("ended-by-its-fixture").touch()
def test(started):
    while True: time.sleep(0.1)
"""


class Repository:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.output = root / "output.txt"
        for name, text in FILES.items():
            self.write(name, text)

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    @contextmanager
    def started(self, *options: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
        own = {
            "PYTHONPATH": os.pathsep.join([str(self.root / "tests"), str(TESTS)]),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_XDIST_AUTO_NUM_WORKERS": "1",
        }
        foreign = ("PENSTOCK_TEST_", "PYTEST_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        command = [sys.executable, "-m", "kit.run", "--processes", "2", *options]
        with self.output.open("w") as output:
            pipes: Any = {"stdout": output, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(
                command, cwd=self.root, env=inherited | own | environment, process_group=0, **pipes
            )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def run(self, *options: str, **environment: str) -> tuple[int, str]:
        with self.started(*options, **environment) as process:
            return process.wait(LONGEST_S), self.output.read_text()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    return Repository(tmp_path_factory.mktemp("repository"))


@pytest.fixture(scope="module")
def first(repository: Repository) -> str:
    """All tests: a shared fixture and a test fail once."""
    repository.write(".test-logs/of-an-earlier-run/call.txt", "")
    status, output = repository.run("--all", "--budget")
    assert status == 0, output
    return output


@pytest.fixture(scope="module")
def second(repository: Repository, first: str) -> str:
    """What a change can affect: everything goes wrong."""
    repository.write("tests/unit/test_unit.py", BROKEN)
    repository.write("tests/integration/test_once.py", BROKEN)
    repository.write("tests/integration/test_slow.py", SLOW)
    repository.write("tests/integration/test_accident.py", DIES)
    repository.write("tests/integration/test_stands_still.py", STANDS_STILL)
    status, output = repository.run()
    assert status == 1, output
    (repository.root / ".test-logs").rename(repository.root / "logs-of-second")
    return output


@pytest.fixture(scope="module")
def third(repository: Repository, second: str) -> str:
    """A file of the contract has changed, and a folder takes longer than its budget."""
    for name in ("unit/test_unit.py", "integration/test_once.py"):
        repository.write(f"tests/{name}", "def test(): pass\n")
    for name in ("accident", "stands_still"):
        (repository.root / f"tests/integration/test_{name}.py").unlink()
    repository.write("tests/integration/clients/test_clients.py", "def test(): assert True\n")
    status, output = repository.run("--lock", PENSTOCK_TEST_BUDGET="report")
    assert status == 0, output
    return output


def closing_lines(output: str) -> list[str]:
    return re.findall(r"^=+ (.*) in [\d.]+s.* =+$", output, re.MULTILINE)


def page_of(output: str, title: str) -> str:
    return output.partition(f"[run] {title}:\n")[2]


def test_all_stages_run_the_tests_alone_and_the_repeats_last(first: str) -> None:
    assert "models are prepared" in first
    assert closing_lines(first) == ["2 passed", "1 failed, 3 passed, 3 errors", "2 passed", "4 passed"]
    assert first.rstrip().endswith("[run] the run passed")


def test_both_results_of_a_repeated_test_are_reported(first: str) -> None:
    page = page_of(first, "repeated: failed once, then passed by itself")
    for number in range(3):
        assert f"[run]   tests/integration/test_once.py::test_shared[{number}]\n" in page
    assert page.count("the system did not start") == 3
    assert page.count("only once") == 1


def test_a_contract_that_passed_is_recorded_and_runs_again_after_a_change(first: str, second: str, third: str) -> None:
    runs = [re.findall(r"contracts that run: (\w+)", output) for output in (first, second, third)]
    assert runs == [["clients"], ["none"], ["clients"]]
    assert "test_clients" not in second
    recorded = ["tests/contracts.lock records: clients" in output for output in (first, second, third)]
    assert recorded == [True, False, True]


def test_a_folder_over_its_budget_fails_the_run_or_is_reported(repository: Repository, second: str, third: str) -> None:
    assert '"tests/integration" = {seconds = ' in (repository.root / "tests/budget.toml").read_text()
    pattern = r"^\[run\] tests/integration took \d s; its budget is \d s.*\n.* -> 2.\d s  .*/test_slow.py$"
    assert all(re.search(pattern, output, re.MULTILINE) for output in (second, third)), second + third


def test_a_test_that_fails_twice_fails_the_run(second: str) -> None:
    page = page_of(second, "failed")
    for nodeid in ("unit/test_unit.py::test_broken", "integration/test_once.py::test_broken"):
        entry, _, _ = page.partition(f"[run]   tests/{nodeid}\n")[2].partition("again: ")
        assert entry.count("assert 1 == 2") == 2
        assert f'[run]       again: make test ARGS="tests/{nodeid}"\n' in page
    assert second.rstrip().endswith("[run] the run FAILED")


def test_a_process_that_ends_names_its_test_and_the_others_run(second: str) -> None:
    page = page_of(second, "failed")
    for nodeid in ("test_accident.py::test_dies", "test_stands_still.py::test_stands_still"):
        assert page.count(f"crashed while running 'tests/integration/{nodeid}'") == 1
    assert closing_lines(second) == ["1 failed, 1 passed", "2 failed, 2 passed", "1 failed, 2 passed", "2 failed"]
    assert re.search(r"test_stands_still.py.*, line 2 in test_stands_still", second), "all stacks are shown"


def test_the_logs_of_a_failed_test_are_kept(repository: Repository, second: str) -> None:
    logs = repository.root / "logs-of-second"
    name, other = "integration-test_once.py-test_broken", "unit-test_unit.py-test_broken"
    assert {path.name for path in logs.iterdir()} == {name, f"{name}.repeat", other, f"{other}.repeat"}
    assert "assert 1 == 2" in (logs / name / "call.txt").read_text()
    assert (logs / name / "t1" / "worker.log").read_text() == "the worker's last words"
    assert (logs / name / "tmp_path" / "own.log").read_text() == "mine"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_run_and_its_fixtures(tmp_path: Path, number: signal.Signals) -> None:
    repository = Repository(tmp_path)
    repository.write("tests/integration/clients/test_clients.py", WAITS)
    with repository.started() as process:
        wait_until(lambda: (tmp_path / "pid").exists() or process.poll() is not None, 120, "the test runs")
        # A terminal sends its signal to all processes of the group.
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        assert process.wait(LONGEST_S) == 130, repository.output.read_text()
    assert not alive(int((tmp_path / "pid").read_text()))
    assert (tmp_path / "ended-by-its-fixture").exists()
