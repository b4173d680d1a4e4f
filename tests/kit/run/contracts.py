"""Contracts: tests that run only when something that they cover has changed since their last successful run.

`tests/contracts.toml` lists for each contract its tests, the files that it covers and the packages that it depends on.
The files are completed by all modules of this repository that tests and covered files import, directly or indirectly.
The packages are completed by their own dependencies. `tests/contracts.lock` holds the digests of the last successful
run.
"""

from __future__ import annotations

import ast
import hashlib
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

MANIFEST = "tests/contracts.toml"
LOCK = "tests/contracts.lock"
IMPORT_ROOTS = ("schemas", "common", "producers", "processors", "gateway", "cli", "tests")
NAMED_CHANGES = 3
DIGEST_LENGTH = 12
HEADER = f"# Digests at the last successful run of each contract of {MANIFEST}; `make test-all` writes this file."

Digests = Mapping[str, str]
"""The digest of each covered file, by its path, and of each package, by `package NAME`."""


class ManifestError(Exception):
    """An entry of the manifest that matches no file or names an unknown package."""


@dataclass(frozen=True, kw_only=True)
class Contract:
    """`tests` are paths of files and folders; `covers` are glob patterns below the repository; `pins` are packages.

    `imports`: what tests and covered files import is covered too.
    """

    name: str
    tests: tuple[str, ...]
    covers: tuple[str, ...]
    pins: tuple[str, ...]
    imports: bool = True

    def has(self, nodeid: str) -> bool:
        file = nodeid.partition("::")[0]
        return any(file == path or file.startswith(f"{path}/") for path in self.tests)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Whether a contract runs, and why. `digests` is empty if the manifest is wrong: nothing can be recorded then."""

    contract: Contract
    runs: bool
    reason: str
    digests: Digests


def load_contracts(root: Path) -> list[Contract]:
    """The contracts of the manifest; none if there is no manifest. Its [every] table applies to each contract."""
    path = root / MANIFEST
    tables: dict[str, dict[str, Any]] = tomllib.loads(path.read_text()) if path.exists() else {}
    every = tables.pop("every", {})

    def merged(table: Mapping[str, Any], key: str) -> tuple[str, ...]:
        return (*table.get(key, ()), *every.get(key, ()))

    return [
        Contract(
            name=name,
            tests=tuple(table["tests"]),
            covers=merged(table, "covers"),
            pins=merged(table, "pins"),
            imports=bool(table.get("imports", True)),
        )
        for name, table in sorted(tables.items())
    ]


def decide(root: Path, contracts: Iterable[Contract], *, everything: bool = False) -> list[Decision]:
    """`everything`: all contracts run, whatever the lock says."""
    lock = root / LOCK
    locked = parse_lock(lock.read_text()) if lock.exists() else {}
    return [_decide(root, contract, locked.get(contract.name), everything) for contract in contracts]


def _decide(root: Path, contract: Contract, locked: Locked | None, everything: bool) -> Decision:
    try:
        digests = digests_of(root, contract)
    except ManifestError as error:
        return Decision(contract=contract, runs=True, reason=str(error), digests={})
    reason = "all tests run" if everything else difference(locked, digests)
    return Decision(contract=contract, runs=reason is not None, reason=reason or "unchanged", digests=digests)


def difference(locked: Locked | None, digests: Digests) -> str | None:
    """What changed since the recorded run; None if nothing did."""
    if locked is None:
        return "no successful run is recorded"
    if total(digests) in locked.totals:
        return None
    changed = [f"{name} is new" if name not in locked.items else f"{name} changed" for name in digests]
    changed = [
        text
        for text, (name, digest) in zip(changed, digests.items(), strict=True)
        if digest not in locked.items.get(name, ())
    ]
    changed += [f"{name} is gone" for name in locked.items if name not in digests]
    if not changed:
        return "the recorded runs were merged and not repeated together"
    more = len(changed) - NAMED_CHANGES
    return ", ".join(changed[:NAMED_CHANGES]) + (f" and {more} more" if more > 0 else "")


def digests_of(root: Path, contract: Contract) -> dict[str, str]:
    files = covered_files(root, contract)
    packages = _packages(root, contract.pins)
    return {
        **{str(path.relative_to(root)): _digest(path.read_bytes()) for path in sorted(files)},
        **{f"package {name}": _digest(text.encode()) for name, text in sorted(packages.items())},
    }


def total(digests: Digests) -> str:
    lines = [f"{name} {digest}\n" for name, digest in sorted(digests.items())]
    return _digest("".join(lines).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:DIGEST_LENGTH]


# --- The covered files ---


def covered_files(root: Path, contract: Contract) -> set[Path]:
    """The contract's tests, the conftest files above them, what its patterns match, and all that these import."""
    found: set[Path] = set()
    for pattern in (*contract.tests, *contract.covers):
        matched = {file for path in root.glob(pattern) for file in _files(path)}
        if not matched:
            raise ManifestError(f"{contract.name}: {pattern} matches no file")
        found |= matched
    above = {folder / "conftest.py" for path in contract.tests for folder in (root / path).parents}
    found |= {path for path in above if path.is_relative_to(root) and path.exists()}
    modules = _Modules(root)
    todo = list(found) if contract.imports else []
    while todo:
        path = todo.pop()
        if path.suffix == ".py":
            todo += (new := modules.imported_by(path) - found)
            found |= new
    return found


def _files(path: Path) -> Iterator[Path]:
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file() and "__pycache__" not in file.parts:
            yield file


class _Modules:
    """The modules of the repository, by name. A package's name stands for its __init__ file."""

    def __init__(self, root: Path) -> None:
        self._paths: dict[str, list[Path]] = defaultdict(list)
        for base in (root / name for name in IMPORT_ROOTS):
            for path in base.rglob("*.py"):
                parts = path.relative_to(base).with_suffix("").parts
                self._paths[".".join(parts).removesuffix(".__init__")].append(path)

    def imported_by(self, file: Path) -> set[Path]:
        """The files that a Python file imports; those of the packages around a module are executed too."""
        try:
            names = _imported_names(file.read_bytes())
        except (SyntaxError, ValueError) as error:
            raise ManifestError(f"the imports of {file} cannot be read: {error}") from None
        found = {path for name in names for path in self._paths.get(name, ())}
        # A test's own folder may be on the path of imports.
        return found | {path for name in names if (path := file.parent / f"{name}.py").is_file()}


@cache
def _imported_names(source: bytes) -> frozenset[str]:
    """Of imports at the top and within functions, with all packages around them; what `from` names may be a module."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level > 1:
                raise ValueError("it imports from a folder above")
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(prefix for name in names for prefix in accumulate(name.split("."), "{}.{}".format))


# --- The packages ---


def _packages(root: Path, names: Sequence[str]) -> dict[str, str]:
    """Version and hashes of the packages and of everything that they depend on, from constraints.txt."""
    if not names:
        return {}
    pins, requirements = parse_constraints((root / "constraints.txt").read_text())
    found: dict[str, str] = {}
    todo = list(names)
    while todo:
        name = todo.pop()
        if name not in pins:
            raise ManifestError(f"the package {name} is not in constraints.txt")
        if name not in found:
            found[name] = pins[name]
            todo += requirements[name]
    return found


def parse_constraints(text: str) -> tuple[dict[str, str], dict[str, list[str]]]:
    """For each package its pin with all hashes, and the packages that it requires (from the `# via` comments)."""
    pins: dict[str, str] = {}
    requirements: dict[str, list[str]] = defaultdict(list)
    name = ""
    for line in text.splitlines():
        if pinned := re.match(r"([A-Za-z0-9._-]+)(\[.*\])?==", line):
            name = pinned[1].lower()
            pins[name] = line
        elif name and (via := re.match(r"\s+#\s+(?:via\s+)?([A-Za-z0-9._-]+)$", line)):
            if via[1] != "via":
                requirements[via[1].lower()].append(name)
        elif name and line.lstrip().startswith("--hash="):
            pins[name] += line
    return pins, requirements


# --- The lock ---


@dataclass(frozen=True)
class Locked:
    """What is recorded of one contract. After a merge there may be several digests of one item."""

    totals: frozenset[str]
    items: Mapping[str, frozenset[str]]


def parse_lock(text: str) -> dict[str, Locked]:
    """Lines that it cannot read are ignored: what they recorded is then unknown, and the contract runs."""
    totals: dict[str, set[str]] = defaultdict(set)
    items: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for line in text.splitlines():
        match line.split("\t"):
            case ["=", name, digest]:
                totals[name].add(digest)
            case [item, digest, names]:
                for name in names.split(","):
                    items[name][item].add(digest)
    return {
        name: Locked(frozenset(found), {item: frozenset(digests) for item, digests in items[name].items()})
        for name, found in totals.items()
    }


def format_lock(recorded: Mapping[str, Digests]) -> str:
    lines = [f"=\t{name}\t{total(digests)}" for name, digests in recorded.items()]
    names: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, digests in sorted(recorded.items()):
        for item in digests.items():
            names[item].append(name)
    lines += [f"{item}\t{digest}\t{','.join(found)}" for (item, digest), found in names.items()]
    return "\n".join([HEADER, *sorted(lines)]) + "\n"


def record(root: Path, passed: Iterable[Decision]) -> list[str]:
    """Write the digests of contracts whose tests have all passed; returns the names of those that were recorded.

    A contract whose files changed during the run is left out: nobody knows which state its tests ran on.
    """
    passed = [one for one in passed if one.digests and digests_of(root, one.contract) == one.digests]
    lock = root / LOCK
    known = {contract.name for contract in load_contracts(root)}
    kept = parse_lock(lock.read_text()) if lock.exists() else {}
    recorded: dict[str, Digests] = {
        name: digests for name, locked in kept.items() if name in known and (digests := _single(locked)) is not None
    }
    recorded |= {one.contract.name: one.digests for one in passed}
    temporary = lock.with_suffix(".tmp")
    temporary.write_text(format_lock(recorded))
    temporary.replace(lock)
    return sorted(one.contract.name for one in passed)


def _single(locked: Locked) -> Digests | None:
    """The digests of one run; None if those of several are mixed."""
    digests = {item: next(iter(found)) for item, found in locked.items.items() if len(found) == 1}
    return digests if total(digests) in locked.totals else None
