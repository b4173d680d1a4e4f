"""The core imports the standard library, `penstock.schemas` and itself: no other room, and no other package."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import penstock.processors.core

CORE = Path(penstock.processors.core.__file__).parent
OURS = ("penstock.schemas", "penstock.processors.core")


def allowed(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names or module.startswith(OURS)


def imported(source: str) -> set[str]:
    """The modules that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_the_core_imports_nothing_but_schemas() -> None:
    files = sorted(CORE.rglob("*.py"))
    assert len(files) > 20
    wrong = [(file.name, module) for file in files for module in imported(file.read_text()) if not allowed(module)]
    assert not wrong
