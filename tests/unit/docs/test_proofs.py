"""The page of what is proven says of each claim where its tests run, as the tests themselves have it."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return import_module("generator.proofs")


@pytest.mark.parametrize(
    ("tests", "expected"),
    [
        (["acceptance/test_05_kill9.py"], ["Kafka"]),
        (["integration/cluster/test_three_brokers.py"], ["Kafka"]),
        (["integration/gateway/test_broker_away.py"], ["Kafka"]),
        (["integration/cli/test_fault_table.py", "unit/cli/faults"], ["Kafka", "unit"]),
        (["integration/engines/test_going_on.py", "property/schemas"], ["engine", "unit"]),
        (["integration/gateway_edge/test_slow_clients.py"], ["process"]),
        (["unit/common", "simulation"], ["simulator", "unit"]),
    ],
)
def test_where_a_test_runs(proofs: ModuleType, tests: list[str], expected: list[str]) -> None:
    assert proofs.levels([ROOT / "tests" / name for name in tests]) == expected


def test_fixtures_are_followed_through_files_of_fixtures(proofs: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import pytest\n@pytest.fixture\ndef kafka(): ...\n@pytest.fixture\ndef unused(other): ...\n"
        "@pytest.fixture(scope='module')\ndef system(kafka, *, folder): ...\n"
    )
    (tmp_path / "test_one.py").write_text("def test_one(system, tmp_path): ...\ndef helper(elsewhere): ...\n")
    (tmp_path / "test_two.py").write_text("import pytest\n@pytest.mark.usefixtures('system')\ndef test_two(): ...\n")
    assert proofs.fixtures(tmp_path / "test_one.py") == {"system", "kafka", "folder", "tmp_path"}
    assert proofs.fixtures(tmp_path / "test_two.py") == {"system", "kafka", "folder"}


def test_a_wrong_column_is_mended_and_a_missing_test_is_an_error(proofs: ModuleType) -> None:
    row = "| a claim | {} | `tests/{}` |"
    wrong = row.format("Kafka", "unit/docs/test_proofs.py")
    assert proofs.with_levels(f"# Page\n\n{wrong}\n") == f"# Page\n\n{wrong.replace('Kafka', 'unit')}\n"
    with pytest.raises(FileNotFoundError, match="names tests/unit/nothing"):
        proofs.with_levels(row.format("–", "unit/nothing"))


def test_every_row_with_a_test_has_the_column(proofs: ModuleType) -> None:
    cells = [line.split(" | ")[-2] for line in proofs.page().splitlines() if "`tests/" in line]
    assert len(cells) > 90
    assert {level for cell in cells for level in cell.split(", ")} <= set(proofs.LEVELS)
