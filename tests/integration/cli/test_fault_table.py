"""`penstock bench faults --quick`: real systems are struck, each row is as it must be, and histories say it again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COMMAND = [sys.executable, "-m", "penstock.cli.main", "bench", "faults", "--json"]


def run(*words: str) -> tuple[int, dict[tuple[str, str | None], dict[str, Any]], str]:
    """The exit code, the rows by part and control, and what was said beside."""
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, env=dict(os.environ), check=False)
    rows = json.loads(done.stdout)["rows"] if done.stdout else []
    return done.returncode, {(row["row"], row["control"]): row for row in rows}, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quick_table(tmp_path: Path) -> None:
    patterns = ("no-fault", "wrong-target", "planted-bug", "worker:mid_stream", "gateway:mid_stream", "broker:accepted")
    chosen = [word for pattern in patterns for word in ("--rows", pattern)]
    code, rows, said = run("--quick", *chosen, "--histories", str(tmp_path))
    assert code == 0, said
    assert len(rows) == len(patterns)
    for row in rows.values():
        assert row["as_expected"], row
        assert row["acknowledged"] == 60
        assert (row["visible_twice"], row["seams"], row["restarted"], row["wrong_tokens"]) == (0, 0, 0, 0)
        assert (row["leaked_grants"], row["lag"], row["missing_evidence"]) == (0, 0, [])
    assert rows["none", "no fault"]["repeated"] == 0
    assert not rows["worker", "wrong target"]["proven"]
    assert rows["worker", "planted bug"]["lost"] > 0
    for part in ("worker", "gateway", "broker"):
        struck = rows[part, None]
        assert struck["proven"]
        assert struck["how"][0].endswith("is gone")
        assert struck["in_flight"] >= 30
        assert struck["outcomes"] == 60
        assert struck["lost"] == struck["lag"] == struck["webhooks_missing"] == 0

    assert run("--check", str(tmp_path))[:2] == (0, rows), "the checker alone says the same of the histories"


def test_the_checker_alone_finds_what_was_cut_out_of_a_history(tmp_path: Path) -> None:
    """A row in which a client that polls was never told its outcome."""
    lines = [
        {"what": "row", "at": 0, "row": "none", "moment": "mid_stream", "faults": False, "seed": 1, "commit": "abc"},
        {"what": "expected", "at": 1, "request_id": "a", "text": "x", "streams": False, "client": "poll"},
        {"what": "acknowledged", "at": 1, "request_id": "a"},
    ]
    lines[0] |= {"expected": "clean", "least_in_flight": 0, "count": 1}
    lines[1]["webhook"] = False
    lines += [{"what": "grants", "at": 2, "reserved": 0, "of_models": 0}, {"what": "lag", "at": 2, "records": 0}]
    (tmp_path / "row.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, rows, said = run("--check", str(tmp_path))
    assert code == 1
    assert rows["none", None]["lost"] == 1
    assert "none:mid_stream is lost, not clean" in said
