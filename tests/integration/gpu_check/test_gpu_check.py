"""`make gpu-check` where there is no card: it says so, and its checks run in main memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
