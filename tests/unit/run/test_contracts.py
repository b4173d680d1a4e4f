"""Contracts run when something that they cover has changed, and never stay out by mistake."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.run.contracts import (
    LOCK,
    MANIFEST,
    Decision,
    Digests,
    decide,
    digests_of,
    load_contracts,
    parse_constraints,
    parse_lock,
    record,
)

ROOT = Path(__file__).parents[3]
FILES = {
    MANIFEST: """\
[every]
covers = ["pyproject.toml"]
[clients]
tests = ["tests/clients", "tests/test_more.py"]
covers = ["common/pkg/*.py"]
pins = ["faust"]
[folders]
tests = ["tests/folders"]
""",
    "pyproject.toml": "",
    "constraints.txt": """\
# made
aiokafka==1.0 \\
    --hash=sha256:aa \\
    --hash=sha256:bb
    # via mode
faust[x]==2.0 \\
    --hash=sha256:cc
    # via a (pyproject.toml)
mode==3.0 \\
    --hash=sha256:dd
    # via
    #   a (pyproject.toml)
    #   faust
other==1.0 \\
    --hash=sha256:ee
""",
    "tests/conftest.py": "import helper\n",
    "tests/helper.py": "",
    "tests/unused.py": "",
    "tests/test_more.py": "def test():\n    from pkg.deep import inner\n",
    "tests/clients/test_a.py": "import beside\n",
    "tests/clients/beside.py": "",
    "tests/clients/go/main.go": "package main",
    "tests/folders/test_b.py": "",
    "common/pkg/covered.py": "import pkg.imported\n",
    "common/pkg/deep/__init__.py": "",
    "common/pkg/deep/inner.py": "import lib.leaf",
    "schemas/lib/__init__.py": "",
    "schemas/lib/leaf.py": "",
    "gateway/other.py": "",
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "common/pkg/imported.py").write_text("")
    record(tmp_path, decide(tmp_path, load_contracts(tmp_path)))
    return tmp_path


def decisions(root: Path) -> dict[str, Decision]:
    return {one.contract.name: one for one in decide(root, load_contracts(root))}


def append(name: str, text: str = "\n") -> Callable[[Path], None]:
    def change(root: Path) -> None:
        path = root / name
        path.write_text((path.read_text() if path.exists() else "") + text)

    return change


def replace(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        path = root / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return change


def test_an_unchanged_contract_does_not_run(repository: Path) -> None:
    assert {name: one.runs for name, one in decisions(repository).items()} == {"clients": False, "folders": False}
    append("tests/unused.py")(repository)
    append("gateway/other.py")(repository)
    (repository / "tests/clients/__pycache__").mkdir()
    append("tests/clients/__pycache__/test_a.pyc")(repository)
    replace("constraints.txt", "sha256:ee", "sha256:ff")(repository)
    assert not any(one.runs for one in decisions(repository).values())
    everything = decide(repository, load_contracts(repository), everything=True)
    assert all(one.runs for one in everything)


@pytest.mark.parametrize(
    ("change", "reason", "folders_run_too"),
    [
        (append("tests/clients/test_a.py"), "tests/clients/test_a.py changed", False),
        (append("tests/clients/beside.py"), "tests/clients/beside.py changed", False),
        (append("tests/clients/go/main.go"), "tests/clients/go/main.go changed", False),
        (append("tests/clients/go/go.sum"), "tests/clients/go/go.sum is new", False),
        (append("tests/clients/conftest.py"), "tests/clients/conftest.py is new", False),
        (append("tests/conftest.py"), "tests/conftest.py changed", True),
        (append("tests/helper.py"), "tests/helper.py changed", True),
        (append("pyproject.toml"), "pyproject.toml changed", True),
        (append("common/pkg/covered.py"), "common/pkg/covered.py changed", False),
        (append("common/pkg/new.py"), "common/pkg/new.py is new", False),
        (append("schemas/lib/leaf.py"), "schemas/lib/leaf.py changed", False),
        (append("schemas/lib/__init__.py"), "schemas/lib/__init__.py changed", False),
        (replace("constraints.txt", "sha256:cc", "sha256:c1"), "package faust changed", False),
        (replace("constraints.txt", "sha256:bb", "sha256:b1"), "package aiokafka changed", False),
        (replace("constraints.txt", "mode==3.0", "mode==3.1"), "package mode changed", False),
        (replace("common/pkg/covered.py", "import pkg.imported", ""), "common/pkg/covered.py changed", False),
        (lambda root: (root / "tests/clients/beside.py").unlink(), "tests/clients/beside.py is gone", False),
        (lambda root: (root / LOCK).unlink(), "no successful run is recorded", True),
        (lambda root: (root / LOCK).write_text("<<<<<<<\n"), "no successful run is recorded", True),
        (replace(MANIFEST, "[clients]", "[renamed]"), "no successful run is recorded", False),
        (replace(MANIFEST, "common/pkg/*.py", "common/nothing/*.py"), "common/nothing/*.py matches no file", False),
        (replace(MANIFEST, '"faust"', '"unknown"'), "the package unknown is not in constraints.txt", False),
    ],
)
def test_a_changed_contract_runs_and_says_why(
    repository: Path, change: Callable[[Path], object], reason: str, folders_run_too: bool
) -> None:
    change(repository)
    found = decisions(repository)
    changed = found.get("clients") or found["renamed"]
    assert changed.runs
    assert reason in changed.reason
    assert found["folders"].runs == folders_run_too


def test_many_changes_are_counted(repository: Path) -> None:
    for number in range(5):
        append(f"tests/clients/new{number}.txt")(repository)
    assert decisions(repository)["clients"].reason.endswith("new2.txt is new and 2 more")


def test_only_contracts_that_passed_are_recorded_anew(repository: Path) -> None:
    append("tests/helper.py")(repository)
    assert record(repository, [decisions(repository)["clients"]]) == ["clients"]
    assert {name: one.runs for name, one in decisions(repository).items()} == {"clients": False, "folders": True}


def test_a_contract_that_changed_during_its_run_is_not_recorded(repository: Path) -> None:
    append("tests/helper.py")(repository)
    before = decisions(repository)["clients"]
    append("tests/clients/test_a.py")(repository)
    assert record(repository, [before]) == []
    assert decisions(repository)["clients"].runs


def test_a_contract_with_an_error_in_the_manifest_is_not_recorded(repository: Path) -> None:
    replace(MANIFEST, "common/pkg/*.py", "common/nothing/*.py")(repository)
    assert record(repository, [decisions(repository)["clients"]]) == []


def test_two_runs_that_are_merged_count_as_none(repository: Path) -> None:
    """Each branch has recorded its own change: nobody has run both together."""
    base = (repository / LOCK).read_text()
    locks = []
    for name in ("tests/clients/test_a.py", "common/pkg/covered.py"):
        before = (repository / name).read_text()
        append(name)(repository)
        record(repository, [decisions(repository)["clients"]])
        locks.append((repository / LOCK).read_text())
        (repository / name).write_text(before)
        (repository / LOCK).write_text(base)
    for name in ("tests/clients/test_a.py", "common/pkg/covered.py"):
        append(name)(repository)
    (repository / LOCK).write_text("".join(sorted({line for lock in locks for line in lock.splitlines(keepends=True)})))
    found = decisions(repository)
    assert found["clients"].reason == "the recorded runs were merged and not repeated together"
    assert not found["folders"].runs
    record(repository, [found["folders"]])
    assert decisions(repository)["clients"].reason == "no successful run is recorded", "the mixture is not kept"


def test_the_lock_has_sorted_lines_without_paths_of_the_machine(repository: Path) -> None:
    text = (repository / LOCK).read_text()
    lines = text.splitlines()[1:]
    assert lines == sorted(lines)
    assert str(repository) not in text
    clients, folders = (parse_lock(text)[name].items.keys() for name in ("clients", "folders"))
    assert clients > folders - {"tests/folders/test_b.py"}


def test_the_packages_of_constraints() -> None:
    pins, requirements = parse_constraints(FILES["constraints.txt"])
    hashes = {name: pin.count("--hash=") for name, pin in pins.items()}
    assert hashes == {"aiokafka": 2, "faust": 1, "mode": 1, "other": 1}
    assert requirements == {"mode": ["aiokafka"], "faust": ["mode"]}


@pytest.fixture(scope="module")
def covered() -> dict[str, Digests]:
    """What each contract of this repository covers. A pattern of the manifest without a match is an error here."""
    return {contract.name: digests_of(ROOT, contract) for contract in load_contracts(ROOT)}


def test_each_contract_covers_its_tests_and_what_they_import(covered: dict[str, Digests]) -> None:
    common = {"tests/conftest.py", "tests/system.py", "tests/support.py", "pyproject.toml", "package confluent-kafka"}
    for contract in (one for one in load_contracts(ROOT) if one.imports):
        assert common <= covered[contract.name].keys()
        assert any(contract.has(name) for name in covered[contract.name])


OF_WORKERS = {"cluster", "deploy", "faust", "older-data", "stock-clients"}
OF_CLIENTS = {"artifact-stores", "deploy", "faust", "older-data", "proxy", "refetch", "stock-clients"}


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("processors/penstock/processors/kafka/membership.py", {*OF_WORKERS, "simulated-log"}),
        (
            "schemas/penstock/schemas/codec.py",
            {*OF_CLIENTS, "apicurio", "client-library", "engines", "simulated-log"},
        ),
        (
            "schemas/penstock/schemas/avro/versions/ResultEvent/v1.avsc",
            {"apicurio", "client-library", "older-data", "stock-clients"},
        ),
        ("gateway/penstock/gateway/view/store.py", {"artifact-stores", "older-data", "proxy", "stock-clients"}),
        ("processors/penstock/processors/core/commit/donemap.py", {*OF_WORKERS, "engines", "simulated-log"}),
        ("processors/penstock/processors/engines/text/backend.py", {"engines", "engines-under-workers"}),
        ("docker-compose.yml", {"deploy"}),
        ("docs/how-to.md", {"docs", "proxy"}),
        ("tests/older/f417c1a.tar.xz", {"older-data"}),
        ("tests/integration/stock/go/go.sum", {"stock-clients"}),
        ("tests/stock_clients.py", {"artifact-stores", "client-library", "proxy", "stock-clients"}),
        ("package aiohttp", {"cluster", "faust", "older-data", "simulated-log"}),
        ("tests/unit/run/test_contracts.py", set()),
    ],
)
def test_what_a_change_makes_run(covered: dict[str, Digests], path: str, names: set[str]) -> None:
    assert {name for name, digests in covered.items() if path in digests} == names


def test_a_contract_knows_its_tests() -> None:
    (contract,) = (one for one in load_contracts(ROOT) if one.name == "stock-clients")
    contract = dataclasses.replace(contract, tests=("tests/a", "tests/b/test_x.py"))
    belongs = ["tests/a/test_y.py::test", "tests/a/deep/test_z.py::test[1]", "tests/b/test_x.py::test"]
    foreign = ["tests/ab/test_y.py::test", "tests/b/test_xy.py::test", "tests/b/test_z.py::test"]
    assert [contract.has(nodeid) for nodeid in belongs + foreign] == [True] * 3 + [False] * 3
