"""The page of what is proven: the column that says where each claim is proven is derived from the named tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/what-is-proven.md"
LEVELS = ("Kafka", "engine", "process", "simulator", "unit")
"""The strongest first; the page says what each means."""
OWN_BROKER = re.compile(r"EmbeddedKafka\(|guarded_broker\(|--kafka-port|\"bench\", \"faults\"")
"""Code of a test that starts Kafka without a shared fixture."""
_ROW = re.compile(r"^\|(?P<claim>.*)\| (?P<where>[^|]*) \| (?P<tests>[^|]*`tests/[^|]*) \|$", re.MULTILINE)


def page() -> str:
    """The page with the column as the tests have it."""
    return with_levels(PAGE.read_text(encoding="utf-8"))


def with_levels(text: str) -> str:
    def row(found: re.Match[str]) -> str:
        files = [ROOT / name for name in re.findall(r"`([^`]+)`", found["tests"])]
        return f"|{found['claim']}| {', '.join(levels(files))} | {found['tests']} |"

    return _ROW.sub(row, text)


def levels(tests: Sequence[Path]) -> list[str]:
    """Where these files or folders run, the strongest first."""
    found = {level(file) for test in tests for file in _files(test)}
    return [name for name in LEVELS if name in found]


def _files(test: Path) -> list[Path]:
    """The file, or all tests of the folder. Raises FileNotFoundError if there are none."""
    if test.is_file():
        return [test]
    if files := sorted(test.rglob("test_*.py")):
        return files
    raise FileNotFoundError(f"{PAGE.name} names {test.relative_to(ROOT)}")


@cache
def level(test: Path) -> str:
    """By the folder of a test file, and by whether its fixtures lead to a broker."""
    folder = test.relative_to(ROOT / "tests").parts[0]
    if folder in ("unit", "property"):
        return "unit"
    if folder == "simulation":
        return "simulator"
    if fixtures(test) & {"kafka", "cluster"} or OWN_BROKER.search(test.read_text(encoding="utf-8")):
        return "Kafka"
    return "engine" if test.parent.name == "engines" else "process"


def fixtures(test: Path) -> set[str]:
    """The fixtures that the tests of a file use, with those that these use."""
    known: dict[str, set[str]] = {}
    for folder in reversed(test.parents):
        if (shared := folder / "conftest.py").is_file():
            known |= dict(_functions(shared, tests=False))
    known |= dict(_functions(test, tests=False))
    found: set[str] = set()
    following = [name for _, names in _functions(test, tests=True) for name in names]
    while following:
        name = following.pop()
        if name not in found:
            found.add(name)
            following += known.get(name, ())
    return found


def _functions(file: Path, *, tests: bool) -> Iterator[tuple[str, set[str]]]:
    """(name, arguments) of the tests of a file, or of its fixtures."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            if node.name.startswith("test_") if tests else any("fixture" in text for text in decorators):
                used = re.findall(r"usefixtures\(([^)]*)\)", " ".join(decorators)) if tests else []
                names = re.findall(r"\w+", " ".join(used))
                yield node.name, {*names, *(argument.arg for argument in [*node.args.args, *node.args.kwonlyargs])}
