"""Programs that no test runs use names that are there."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted((*(ROOT / "benchmarks").glob("*.py"), ROOT / "tests" / "prepare_models.py"))


def uses(program: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of what the program imports of the product or of the tests, wherever in it."""
    for node in ast.walk(ast.parse(program.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        first = (node.module or "").split(".")[0]
        if first == "penstock" or (ROOT / "tests" / f"{first}.py").exists():
            yield from ((node.module or "", alias.name) for alias in node.names)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_what_a_program_imports_is_there(program: Path) -> None:
    for module, name in uses(program):
        found = importlib.import_module(module)
        if not hasattr(found, name):
            importlib.import_module(f"{module}.{name}")
