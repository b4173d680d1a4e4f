"""Contracts: tests that run only when something that they cover has changed since their last successful run.

`tests/contracts.toml` lists for each contract its tests and the files that it covers. The files are completed by all
modules of this repository that tests and covered files import, directly or indirectly. `tests/contracts.lock` holds one
digest of all files of each contract, as of its last successful run.
"""

from __future__ import annotations

import ast
import hashlib
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path

MANIFEST = "tests/contracts.toml"
LOCK = "tests/contracts.lock"
IMPORT_ROOTS = ("schemas", "common", "producers", "processors", "gateway", "cli", "tests")
DIGEST_LENGTH = 12
CHECKERS = ("importlinter", "pyright", "ruff")
"""Tables of pyproject.toml that `make check` reads, and no test."""
HEADER = f"# The digest of each contract of {MANIFEST} at its last successful run; `make test-all` writes this file."


@dataclass(frozen=True, kw_only=True)
class Contract:
    """`tests` are paths of files and folders; `covers` are glob patterns below the repository.

    `imports`: what tests and covered files import is covered too.
    """

    name: str
    tests: tuple[str, ...]
    covers: tuple[str, ...]
    imports: bool = True

    def has(self, nodeid: str) -> bool:
        return any(Path(nodeid.partition("::")[0]).is_relative_to(path) for path in self.tests)


def load_contracts(root: Path) -> list[Contract]:
    """The contracts of the manifest; none if there is no manifest. Its [every] table applies to each contract."""
    path = root / MANIFEST
    tables = tomllib.loads(path.read_text()) if path.exists() else {}
    every = tables.pop("every", {}).get("covers", ())
    return [
        Contract(
            name=name,
            tests=tuple(table["tests"]),
            covers=(*table.get("covers", ()), *every),
            imports=table.get("imports", True),
        )
        for name, table in sorted(tables.items())
    ]


def digests(root: Path) -> dict[str, str]:
    """One digest for each contract, of all files that it covers."""
    found: dict[str, str] = {}
    of_file = cache(lambda file: _digest(_content(file)))
    for name, files in covered_files(root).items():
        lines = [f"{file.relative_to(root)} {of_file(file)}\n" for file in sorted(files)]
        found[name] = _digest("".join(lines).encode())
    return found


def _content(file: Path) -> bytes:
    """What can change a test's outcome: no lines of comments, no docstrings, no settings of checkers."""
    content = file.read_bytes()
    if file.suffix == ".py":
        return "\n".join(_code(content.decode())).encode()
    if file.name != "pyproject.toml":
        return content
    tables = tomllib.loads(content.decode())
    tables["tool"] = {name: one for name, one in tables.get("tool", {}).items() if name not in CHECKERS}
    return repr(tables).encode()


def _code(source: str) -> Iterator[str]:
    texts: set[int] = set()
    strings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts.update(range(node.lineno, (node.end_lineno or 0) + 1))
        elif isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno != node.lineno:
            strings.update(range(node.lineno, (node.end_lineno or 0) + 1))
    for number, line in enumerate(source.splitlines(), 1):
        code = line.strip()
        if number not in texts and (number in strings or (code and not code.startswith("#"))):
            yield line


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:DIGEST_LENGTH]


def covered_files(root: Path) -> dict[str, set[Path]]:
    """By contract: its tests, the conftest files above them, what its patterns match, and all that these import."""
    imports = _Imports(root)
    found: dict[str, set[Path]] = {}
    for contract in load_contracts(root):
        files = {file for pattern in (*contract.tests, *contract.covers) for file in _matching(root, pattern)}
        above = {folder / "conftest.py" for path in contract.tests for folder in (root / path).parents}
        files |= {path for path in above if path.is_relative_to(root) and path.exists()}
        todo = list(files) if contract.imports else []
        while todo:
            todo += (new := imports.of(todo.pop()) - files)
            files |= new
        found[contract.name] = files
    return found


def _matching(root: Path, pattern: str) -> set[Path]:
    paths = [file for path in root.glob(pattern) for file in (path.rglob("*") if path.is_dir() else [path])]
    found = {path for path in paths if path.is_file() and "__pycache__" not in path.parts}
    if not found:
        raise SystemExit(f"{MANIFEST}: {pattern} matches no file")
    return found


class _Imports:
    """Which files of the repository a file imports."""

    def __init__(self, root: Path) -> None:
        self._modules = {
            ".".join(path.relative_to(root / base).with_suffix("").parts).removesuffix(".__init__"): path
            for base in IMPORT_ROOTS
            for path in (root / base).rglob("*.py")
        }
        """By name. A package's name stands for its __init__ file."""
        self.of = cache(self._of)

    def _of(self, file: Path) -> set[Path]:
        """The packages around a module are imported too; what `from` names may be a module."""
        found: set[Path] = set()
        for folder, name in _imports(file) if file.suffix == ".py" else ():
            for module in accumulate(name.split("."), "{}.{}".format):
                # A test's own folder may be on the path of imports.
                paths = (self._modules.get(module), folder / f"{module.replace('.', '/')}.py")
                found |= {path for path in paths if path and path.is_file()}
        return found


def _imports(file: Path) -> Iterator[tuple[Path, str]]:
    """Each name that is imported at the top or in a function, with the folder to which it is relative."""
    for node in ast.walk(ast.parse(file.read_bytes(), str(file))):
        if isinstance(node, ast.Import):
            yield from ((file.parent, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = f"{node.module}." if node.module else ""
            yield from ((file.parents[max(node.level - 1, 0)], prefix + alias.name) for alias in node.names)


def read_lock(root: Path) -> dict[str, set[str]]:
    """The recorded digests of each contract: several after a merge. Lines of another form record nothing."""
    found: dict[str, set[str]] = defaultdict(set)
    lock = root / LOCK
    for line in lock.read_text().splitlines() if lock.exists() else ():
        name, _, digest = line.partition(" ")
        found[name].add(digest)
    return found


def record(root: Path, passed: Mapping[str, str]) -> list[str]:
    """Write the digests of contracts whose tests have all passed; returns the names of those that were recorded.

    A contract whose files changed during the run is left out: nobody knows which state its tests ran on.
    """
    now = digests(root)
    recorded = {name: {digest} for name, digest in passed.items() if now[name] == digest}
    kept = read_lock(root) | recorded
    lines = [f"{name} {digest}" for name in now for digest in sorted(kept.get(name, ()))]
    (root / LOCK).write_text("\n".join([HEADER, *lines]) + "\n")
    return sorted(recorded)
