"""The mutants of a function, and a run that finds which test kills which."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mutation.__main__ import mutants


def changes(source: str) -> list[tuple[int, str]]:
    return [(one.lines.stop - 1, ast.unparse(one.new)) for one in mutants(ast.parse(source))]


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("return a < b", ["return", "a <= b"]),
        ("if a and not b: pass", ["True", "False", "a or not b", "not b", "a", "b"]),
        ("a = b if c else d", ["True", "False"]),
        ("a = [b for b in c if d]", ["True"]),
        ("a += 1", ["pass", "2"]),
        ("a = b + 'x'", ["b - 'x'", "'x~'"]),
        ("self.a = f(b, c=d)", ["pass", "f(b)"]),
        ("await f()", ["pass"]),
        ("raise E", ["pass"]),
        ("'a text'", []),
        ("return None", []),
    ],
)
def test_a_statement_has_these_changes(line: str, changed: list[str]) -> None:
    assert changes(f"async def f():\n    {line}") == [(2, one) for one in changed]


def test_the_lines_of_a_change_are_those_that_its_tests_run() -> None:
    source = "@d('x')\ndef f(a: 'A' = 1, *, b=True) -> 'B':\n    '''Text.'''\n    if a:\n        g()\n\nx = 1 + 1\n"
    assert changes(source) == [(5, "False"), (5, "2"), (4, "True"), (4, "False"), (5, "pass")]


SOURCE = """
def half(a=3):
    return a // 2
def emptied(a):
    while a:
        a.pop()
"""
TESTS = """
from penstock.halves import emptied, half
def test_one(): assert half(2) == 1
def test_two(): assert half(2) == 1 and half(6) == 3
def test_default(): assert half() == 1
def test_loop(): assert emptied([1]) is None
def test_red(): assert False
"""


def test_a_run_names_all_killers_of_each_mutant(tmp_path: Path) -> None:
    (tmp_path / "penstock").mkdir()
    target, out = tmp_path / "penstock/halves.py", tmp_path / "out"
    target.write_text(SOURCE)
    (tmp_path / "test_it.py").write_text(TESTS)
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{root}"}
    command = [sys.executable, "-m", "tests.mutation", "--target", str(target), "--out", str(out), "test_it.py"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=120)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    killers = {row["change"]: {name.split("::")[1] for name in row["killers"]} for row in rows}
    of_half = {"test_one", "test_two", "test_default"}
    assert killers == {
        "3 → 4": {"test_default"},
        "return a // 2 → return": of_half,
        "a // 2 → a * 2": of_half,
        "2 → 3": {"test_one", "test_two"},
        "a → True": {"test_loop"},
        "a → False": set(),
        "a.pop() → pass": {"test_loop"},
    }, "a test that does not end has failed, and one that fails without a change is not used"
