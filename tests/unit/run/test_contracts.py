"""Contracts run when something that they cover has changed, and never stay out by mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.run.contracts import LOCK, MANIFEST, Contract, covered_files, digests, load_contracts, read_lock, record

ROOT = Path(__file__).parents[3]
FILES = {
    MANIFEST: """\
[every]
covers = ["pyproject.toml"]
[clients]
tests = ["tests/clients", "tests/test_more.py"]
covers = ["common/pkg/*.py"]
[folders]
tests = ["tests/folders"]
""",
    "pyproject.toml": "",
    "tests/conftest.py": "import helper\n",
    "tests/helper.py": "",
    "tests/unused.py": "",
    "tests/test_more.py": "def test():\n    from pkg.deep import inner\n",
    "tests/clients/test_a.py": "import beside\nfrom ..shared.conftest import thing\n",
    "tests/clients/beside.py": "",
    "tests/clients/go/main.go": "package main",
    "tests/shared/conftest.py": "",
    "tests/folders/test_b.py": "",
    "common/pkg/covered.py": "import pkg.imported\n",
    "common/pkg/deep/__init__.py": "",
    "common/pkg/deep/inner.py": "import lib.leaf",
    "schemas/lib/__init__.py": "",
    "schemas/lib/leaf.py": "",
    "gateway/other.py": "",
}


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def changed(root: Path) -> set[str]:
    locked = read_lock(root)
    return {name for name, digest in digests(root).items() if digest not in locked[name]}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, text in {**FILES, "common/pkg/imported.py": ""}.items():
        write(tmp_path, name, text)
    assert record(tmp_path, digests(tmp_path)) == ["clients", "folders"]
    return tmp_path


BOTH = {"clients", "folders"}
CHANGED = 'changed = "so"\n'


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("tests/unused.py", set()),
        ("gateway/other.py", set()),
        ("tests/clients/__pycache__/test_a.pyc", set()),
        ("tests/clients/test_a.py", {"clients"}),
        ("tests/clients/beside.py", {"clients"}),
        ("tests/clients/go/main.go", {"clients"}),
        ("tests/clients/go/go.sum", {"clients"}),
        ("tests/clients/conftest.py", {"clients"}),
        ("tests/shared/conftest.py", {"clients"}),
        ("tests/conftest.py", BOTH),
        ("tests/helper.py", BOTH),
        ("pyproject.toml", BOTH),
        ("common/pkg/covered.py", {"clients"}),
        ("common/pkg/imported.py", {"clients"}),
        ("common/pkg/new.py", {"clients"}),
        ("schemas/lib/leaf.py", {"clients"}),
        ("schemas/lib/__init__.py", {"clients"}),
        (LOCK, BOTH),
    ],
)
def test_a_contract_runs_if_a_file_that_it_covers_is_changed_or_new(
    repository: Path, name: str, runs: set[str]
) -> None:
    assert changed(repository) == set()
    write(repository, name, CHANGED)
    assert changed(repository) == runs


@pytest.mark.parametrize(
    ("name", "before", "after", "runs"),
    [
        ("tests/helper.py", "x = 1\n", '"""Says."""\n\n# why\nx = 1\n"""What x is."""\n', set()),
        ("tests/helper.py", 'x = """\na\n"""\n', 'x = """\n# a\n\n"""\n', BOTH),
        (
            "tests/helper.py",
            "def f():\n    return 1\n",
            'def f():\n    """One.\n\n    # no.\n    """\n    return 1\n',
            set(),
        ),
        ("tests/helper.py", "x = 1\n", "x = 2\n", BOTH),
        ("pyproject.toml", "[tool.ruff]\nline-length = 1\n", "[tool.importlinter]\nx = 1\n", set()),
        ("pyproject.toml", "[tool.pytest]\nx = 1\n", "[tool.pytest]\nx = 2\n", BOTH),
    ],
)
def test_comments_docstrings_and_settings_of_checkers_make_no_contract_run(
    repository: Path, name: str, before: str, after: str, runs: set[str]
) -> None:
    write(repository, name, before)
    record(repository, digests(repository))
    write(repository, name, after)
    assert changed(repository) == runs


def test_a_contract_runs_if_a_file_is_gone_or_has_another_name(repository: Path) -> None:
    (repository / "tests/clients/beside.py").unlink()
    (repository / "tests/folders/test_b.py").rename(repository / "tests/folders/test_c.py")
    assert changed(repository) == BOTH


def test_only_contracts_that_passed_and_did_not_change_meanwhile_are_recorded(repository: Path) -> None:
    write(repository, "tests/helper.py", CHANGED)
    before = digests(repository)
    write(repository, "tests/folders/test_b.py", CHANGED)
    assert record(repository, before) == ["clients"]
    assert changed(repository) == {"folders"}
    assert record(repository, {}) == []
    assert changed(repository) == {"folders"}


def test_a_pattern_that_matches_nothing_stops_the_run(repository: Path) -> None:
    write(repository, MANIFEST, FILES[MANIFEST].replace("common/pkg", "common/nothing"))
    with pytest.raises(SystemExit, match=r"common/nothing/\*.py matches no file"):
        digests(repository)


def test_of_two_runs_that_are_merged_each_counts_for_its_own_state(repository: Path) -> None:
    """Nobody has run the changes of both together."""
    lock, ours, theirs = repository / LOCK, "tests/clients/test_a.py", "common/pkg/covered.py"
    before = lock.read_text()
    write(repository, ours, CHANGED)
    record(repository, digests(repository))
    lock.write_text(before + lock.read_text())
    assert changed(repository) == set()
    write(repository, ours, FILES[ours])
    assert changed(repository) == set()
    write(repository, theirs, CHANGED)
    assert changed(repository) == {"clients"}


@pytest.fixture(scope="module")
def covered() -> dict[str, set[str]]:
    """What each contract of this repository covers. A pattern of the manifest without a match is an error here."""
    return {name: {str(file.relative_to(ROOT)) for file in files} for name, files in covered_files(ROOT).items()}


def test_each_contract_covers_its_tests_and_what_they_import(covered: dict[str, set[str]]) -> None:
    common = {"tests/conftest.py", "tests/system.py", "tests/support.py", "pyproject.toml", "constraints.txt"}
    for contract in (one for one in load_contracts(ROOT) if one.imports):
        assert common <= covered[contract.name]
        assert any(contract.has(name) for name in covered[contract.name])


OF_CLIENTS = {"artifact-stores", "deploy", "faust", "older-data", "proxy", "refetch", "stock-clients", "update"}


@pytest.mark.parametrize(
    ("path", "names"),
    [
        (
            "schemas/penstock/schemas/codec.py",
            {*OF_CLIENTS, "apicurio", "client-library", "engines", "simulated-log"},
        ),
        (
            "gateway/penstock/gateway/view/store.py",
            {"artifact-stores", "older-data", "proxy", "stock-clients", "update"},
        ),
        ("processors/penstock/processors/engines/text/backend.py", {"engines", "engines-under-workers"}),
        ("docker-compose.yml", {"deploy", "images"}),
        ("docs/how-to/integrations.md", {"docs", "proxy", "update"}),
        ("tests/older/f417c1a.tar.xz", {"older-data"}),
        ("tests/integration/stock/go/go.sum", {"stock-clients"}),
        ("tests/kit/run/plugin.py", set()),
        ("tests/unit/run/test_contracts.py", set()),
    ],
)
def test_what_a_change_makes_run(covered: dict[str, set[str]], path: str, names: set[str]) -> None:
    assert {name for name, files in covered.items() if path in files} == names


def test_a_contract_knows_its_tests() -> None:
    contract = Contract(name="x", tests=("tests/a", "tests/b/test_x.py"), covers=())
    belongs = ["tests/a/test_y.py::test", "tests/a/deep/test_z.py::test[1]", "tests/b/test_x.py::test"]
    foreign = ["tests/ab/test_y.py::test", "tests/b/test_xy.py::test", "tests/b/test_z.py::test"]
    assert [contract.has(nodeid) for nodeid in belongs + foreign] == [True] * 3 + [False] * 3
