"""A mutation run: which changes of the product does no test notice, and which tests notice nothing of their own?

    .venv/bin/python -m tests.mutation --target gateway/penstock/gateway/limits --out F tests/unit/gateway

One process imports the product and collects the tests. A child traces them once, to learn which tests run each line.
Then each mutant gets a child, which puts the changed code into the live function and runs all tests of the changed
lines. F gets one JSON line for each mutant: `mutant` (file:line#number), `change`, `ran` (number of tests), `killers`
(node ids of the tests that failed), and `lost` if the child gave no answer. A second run skips the mutants in F.
Code at module level is not changed: it has run. Property tests try 15 fixed examples.
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import json
import os
import resource
import select
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import pytest
from hypothesis import Phase, settings

PYTEST = ["-q", "-s", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=0"]
CHILD_BYTES, CHILD_S = 6 << 30, 900
COMPARED: dict[type[ast.AST], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
COMPUTED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult}
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Mutant(NamedTuple):
    """One change of an outermost function. A test that runs none of `lines` cannot notice it."""

    function: Function
    qualified: str
    old: ast.AST
    new: ast.AST
    lines: range
    number: int


def mutants(node: ast.AST, prefix: str = "") -> Iterator[Mutant]:
    """Yields the mutants of all functions and methods of a module."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            for number, (old, new, lines) in enumerate(_within(child, child)):
                yield Mutant(child, prefix + child.name, old, new, lines, number)
        else:
            yield from mutants(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)


def _within(node: ast.AST, statement: ast.stmt) -> Iterator[tuple[ast.AST, ast.AST, range]]:
    statement = node if isinstance(node, ast.stmt) else statement
    for old, new in _changes(node):
        # Every call of a function uses its defaults. The body of a compound statement does not belong to its test.
        last = vars(statement if isinstance(statement, Function) else old)["end_lineno"]
        yield old, new, range(statement.lineno, last + 1)
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            is_text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if isinstance(child, ast.AST) and name not in ("annotation", "returns", "decorator_list") and not is_text:
                yield from _within(child, statement)


def _with(node: ast.AST, **fields: Any) -> ast.AST:
    changed = copy.copy(node)
    vars(changed).update(fields)
    return changed


def _changes(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    match node:
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            yield from ((test, ast.Constant(value=value)) for value in (True, False))
        case ast.comprehension(ifs=conditions):
            yield from ((condition, ast.Constant(value=True)) for condition in conditions)
        case ast.Compare(ops=[one]) if type(one) in COMPARED:
            yield node, _with(node, ops=[COMPARED[type(one)]()])
        case ast.BoolOp(op=one, values=values):
            yield node, _with(node, op=ast.And() if isinstance(one, ast.Or) else ast.Or())
            for value in values:
                rest = [other for other in values if other is not value]
                yield node, _with(node, values=rest) if len(rest) > 1 else rest[0]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, operand
        case ast.BinOp(op=one) if type(one) in COMPUTED:
            yield node, _with(node, op=COMPUTED[type(one)]())
        case ast.Constant(value=bool() as value):
            yield node, _with(node, value=not value)
        case ast.Constant(value=int() | float() | str() as value):
            yield node, _with(node, value=value + "~" if isinstance(value, str) else value + 1)
        case ast.Call(keywords=keywords):
            named = [one for one in keywords if one.arg is not None]
            yield from ((node, _with(node, keywords=[one for one in keywords if one is not out])) for out in named)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant) or value.value is not None:
            yield node, _with(node, value=None)
        case ast.Raise() | ast.AugAssign() | ast.Delete() | ast.Expr(value=ast.Call() | ast.Await()):
            yield node, ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, ast.Pass()


class Run:
    """A pytest plugin that runs the tests once for each mutant, in place of once."""

    def __init__(self, targets: list[Path], out: Path) -> None:
        self._targets = {str(target.resolve()): target for target in targets}
        self._out = out
        self._current = ""
        self._failed: list[str] = []
        self._seconds: dict[str, float] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        # The conftest has loaded its own profile. The modules of tests, whose decorators read the default, come later.
        fast: dict[str, Any] = {"phases": [Phase.explicit, Phase.generate], "report_multiple_bugs": False}
        settings.register_profile("mutation", max_examples=15, derandomize=True, database=None, deadline=None, **fast)
        settings.load_profile("mutation")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for target in self._targets.values():
            parts = target.with_suffix("").parts
            __import__(".".join(part for part in parts[parts.index("penstock") :] if part != "__init__"))
        traced: Any = _in_child(lambda: self._traced(session.items))
        self._seconds = traced["seconds"]
        items = [item for item in session.items if item.nodeid not in traced["failed"]]
        print(f"{len(items)} tests; not used, for they fail: {traced['failed']}", flush=True)
        live = defaultdict[Any, list[FunctionType]](list)
        for one in gc.get_objects():
            if isinstance(one, FunctionType):
                live[_key(one.__code__)].append(one)
        gc.freeze()  # a collection in a child would copy every page of its parent
        done = [json.loads(line)["mutant"] for line in self._out.read_text().splitlines()] if self._out.exists() else []
        for path, target in self._targets.items():
            tree = ast.parse(target.read_text())
            for one in mutants(tree):
                if (name := f"{target}:{getattr(one.old, 'lineno', one.lines.start)}#{one.number}") in done:
                    continue
                reached = {test for line in one.lines for test in traced["ran"][path].get(str(line), [])}
                chosen = [item for item in items if item.nodeid in reached]
                first_line = min(part.lineno for part in (one.function, *one.function.decorator_list))
                work = partial(self._tried, tree, one, live[path, one.qualified, first_line], chosen)
                found = _in_child(work) if chosen else {"killers": []}
                change = " → ".join(" ".join(ast.unparse(node).split())[:90] for node in (one.old, one.new))
                row = {"mutant": name, "change": change, "ran": len(chosen), **(found or {"killers": [], "lost": True})}
                with self._out.open("a") as file:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
        return True

    def _traced(self, items: list[pytest.Item]) -> dict[str, Any]:
        ran: dict[str, dict[int, dict[str, None]]] = {path: defaultdict(dict) for path in self._targets}

        def trace(frame: FrameType, *_: object) -> Any:
            if (lines := ran.get(frame.f_code.co_filename)) is not None:
                lines[frame.f_lineno][self._current] = None
            return None if lines is None else trace

        threading.settrace(trace)
        sys.settrace(trace)
        self._run(items)
        return {"failed": self._failed, "seconds": self._seconds, "ran": ran}

    def _tried(
        self, tree: ast.Module, one: Mutant, functions: list[FunctionType], items: list[pytest.Item]
    ) -> dict[str, Any]:
        # `deepcopy` puts what the memo has in the place of the old node.
        memo: dict[int, Any] = {id(one.old): ast.copy_location(one.new, one.old)}
        module = ast.fix_missing_locations(copy.deepcopy(tree, memo))
        arguments: ast.arguments = memo[id(one.function)].args
        was = functions[0].__code__
        codes: list[CodeType] = [compile(module, was.co_filename, "exec")]
        for code in codes:
            codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        code = next(code for code in codes if _key(code) == _key(was))
        for function in functions:
            function.__code__ = code
            pairs = zip(arguments.defaults, function.__defaults__ or (), strict=True)
            function.__defaults__ = tuple(new.value if isinstance(new, ast.Constant) else old for new, old in pairs)
            named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            changed = {name.arg: new.value for name, new in named if isinstance(new, ast.Constant)}
            function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), **changed}
        self._run(items)
        return {"killers": self._failed}

    def _run(self, items: list[pytest.Item]) -> None:
        for item, following in zip(items, [*items[1:], None], strict=True):
            self._current, started, failed = item.nodeid, time.monotonic(), item.session.testsfailed
            vars(item)["repr_failure"] = str  # tracebacks take longer than most tests
            # Repeated, for a test whose teardown does not end either.
            signal.setitimer(signal.ITIMER_REAL, 3 + 4 * self._seconds.get(item.nodeid, 60), 3)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._failed += [item.nodeid] * (item.session.testsfailed > failed)
            self._seconds.setdefault(item.nodeid, time.monotonic() - started)


def _key(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _in_child(work: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the result of `work` in a fork of this process, or None if the fork fails or does not end in time."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        try:
            os.setsid()
            for descriptor in (0, 1, 2):
                os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
            signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it takes too long"))
            resource.setrlimit(resource.RLIMIT_AS, (CHILD_BYTES, CHILD_BYTES))
            Path(f"/dev/fd/{writer}").write_text(json.dumps(work(), default=list))
        finally:
            os._exit(0)
    os.close(writer)
    if not select.select([reader], [], [], CHILD_S)[0]:
        os.killpg(child, signal.SIGKILL)
    with os.fdopen(reader) as file:
        answer = file.read()
    os.waitpid(child, 0)
    return json.loads(answer) if answer else None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="tests.mutation", description=__doc__)
    parser.add_argument("--target", type=Path, action="append", required=True, help="a file or folder of the product")
    parser.add_argument("--out", type=Path, required=True, metavar="F")
    parser.add_argument("tests", nargs="+")
    chosen = parser.parse_args()
    files = [file for one in chosen.target for file in (sorted(one.rglob("*.py")) if one.is_dir() else [one])]
    with tempfile.TemporaryDirectory() as base:
        run = Run(files, chosen.out)
        raise SystemExit(pytest.main([*PYTEST, f"--basetemp={base}/t", *chosen.tests], plugins=[run]))
