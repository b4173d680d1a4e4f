"""The last page of a run: contracts, failures with their logs and the command that repeats them, repeats, budget."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence

from kit.run.contracts import Decision
from kit.run.logs import log_folder
from kit.run.results import Phase, RunResult

PLAIN = re.compile(r"[\w./:\[\],=+@%-]+")


def command_for(nodeid: str) -> str:
    """The command that runs one test again, for a shell: make expands `$`, and passes ARGS to another shell."""
    if PLAIN.fullmatch(nodeid):
        return f'make test ARGS="{nodeid}"'
    return f"make test ARGS={shlex.quote(shlex.quote(nodeid).replace('$', '$$'))}"


def contract_lines(decisions: Iterable[Decision]) -> list[str]:
    return [
        f"contract {one.contract.name}: "
        + (f"runs ({one.reason})" if one.runs else "unchanged since its last successful run; make test-all runs it")
        for one in decisions
    ]


def failure_lines(title: str, failures: Sequence[tuple[Phase, ...]]) -> list[str]:
    """Each test with the message of each of its failures."""
    if not failures:
        return []
    lines = [f"{title}:"]
    for phases in failures:
        nodeid = phases[0].nodeid
        lines.append(f"  {nodeid}")
        for count, phase in enumerate(phases):
            fixture = f" (fixture {phase.fixture})" if phase.fixture else ""
            lines.append(f"      {phase.message or 'no message'}{fixture}")
            if phase.when != "collect":
                lines.append(f"      logs:  {log_folder(nodeid, repeat=count > 0)}/")
        lines.append(f"      again: {command_for(nodeid)}")
    return lines


def last_page(result: RunResult, *, other: Iterable[str] = ()) -> list[str]:
    """`other`: further reasons why the run fails, such as an exceeded budget."""
    problems = [*result.problems(), *other]
    red = result.red() or bool(problems)
    return [
        *failure_lines("failed twice", result.failed_twice()),
        *failure_lines("failed", [(one,) for one in result.failed_once()]),
        *failure_lines("repeated: failed once, then passed by itself", [(one,) for one in result.repeated()]),
        *problems,
        "the run FAILED" if red else "the run passed",
    ]
