"""`make gpu-check` where there is no card: it says so, and its checks run in main memory."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import alive, wait_until

PROGRAM = Path(__file__).parents[3] / "benchmarks" / "gpu_check.py"


def gpu_check(*arguments: str, timeout_s: float = 280) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROGRAM), *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_without_a_card_it_says_what_to_look_at_and_ends_with_3() -> None:
    done = gpu_check()
    assert done.returncode == 3, done.stderr
    assert "no card was found" in done.stderr
    assert "nvidia-smi" in done.stderr
    assert json.loads(done.stdout) == {"name": "gpu_check", "ok": None, "reason": "no card was found"}


def test_what_hangs_is_killed_with_all_that_it_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    gpu_check_module = importlib.import_module("gpu_check")
    monkeypatch.setattr(gpu_check_module, "GRACE_S", 0.0)
    file = tmp_path / "pid"
    starts = f"c = subprocess.Popen(['sleep', '600']); pathlib.Path({str(file)!r}).write_text(str(c.pid))"
    hangs = f"import pathlib, subprocess, time; {starts}; time.sleep(600)"
    outcome = gpu_check_module.in_child([sys.executable, "-c", hangs], "turns", 5.0)
    assert (outcome.name, outcome.state) == ("turns", "failed")
    assert "it hung and was killed" in outcome.detail
    pid = int(file.read_text())
    wait_until(lambda: not alive(pid))
    said = 'import json; print(json.dumps({"name": "turns", "state": "ok", "seconds": 1.0}))'
    assert gpu_check_module.in_child([sys.executable, "-c", said], "turns", 60.0).state == "ok"
    died = gpu_check_module.in_child([sys.executable, "-c", "raise SystemExit(5)"], "turns", 60.0)
    assert died.detail == "its process ended with 5 and said nothing"


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("PENSTOCK_TEST_LONG"), reason="four minutes; PENSTOCK_TEST_LONG=1 runs it")
def test_its_checks_run_in_main_memory() -> None:
    """Admission against memory that another program really takes, and an allocation that really fails."""
    done = gpu_check("--device", "cpu", "--only", "admission", "turns", "unload", "out_of_memory")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert [one["state"] for one in told["checks"]] == ["ok"] * 4
    admission = told["checks"][0]["figures"]
    assert admission["free_mib"] < admission["need_mib"] < admission["free_mib"] + admission["foreign_mib"]
