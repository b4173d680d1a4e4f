"""`make gpu-check`: what Penstock promises of a card, tried on a real one, in one command within eight minutes.

It needs a card, its driver and torch; no Kafka and no network. It prints a table and one line of JSON. Exit code 0: all
is well, 1: a check failed, 3: there is no card. `--device cpu` runs the same checks in main memory.

Each check runs in a process of its own, which is killed with all that it started when its time is over: what hangs in a
driver cannot be asked to end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import common  # noqa: F401  (it puts tests/ on the path)
import psutil
from gpu_checks import CHECKS, Check, Failed
from gpu_site import MIB, Site, find

LIMIT_S = 480.0
GRACE_S = 10.0
"""So long after its time a check may say that it was late, before it is killed."""
OK, FAILED, NO_CARD = 0, 1, 3
ADVICE = """\
gpu-check: {what}.
  - `nvidia-smi` must list the card: else the driver is not installed, or this container was started without the card
    (docker run --gpus all …).
  - CUDA_VISIBLE_DEVICES must name it, or not be set.
  - To run the same checks in main memory: make gpu-check ARGS="--device cpu\""""


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What came of one check. `state`: ok, failed, or left out when the time was over."""

    name: str
    state: str
    seconds: float = 0.0
    detail: str = ""
    figures: dict[str, Any] = field(default_factory=dict[str, Any])


def run(site: Site, names: list[str], limit_s: float) -> list[Outcome]:
    """The checks one after the other, each with what is left of the time."""
    give_up = time.monotonic() + limit_s
    found: list[Outcome] = []
    for name in names:
        left_s = give_up - time.monotonic()
        if left_s <= 0:
            found.append(Outcome(name=name, state="left out", detail=f"{limit_s:g} s were over"))
            continue
        print(f"  {name} …", file=sys.stderr, flush=True)
        found.append(in_child([sys.executable, __file__, *_told(site, name, left_s)], name, left_s))
    return found


def _told(site: Site, name: str, left_s: float) -> list[str]:
    return ["--check", name, "--device", site.device.device, "--folder", str(site.folder), "--limit-s", str(left_s)]


def in_child(command: list[str], name: str, left_s: float) -> Outcome:
    """What the last line of a process says of a check; it is killed with its children when the time is over."""
    began, timed_out = time.monotonic(), False
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    family: list[psutil.Process] = []
    try:
        told, _ = child.communicate(timeout=left_s + GRACE_S)
    except subprocess.TimeoutExpired:
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(child.pid).children(recursive=True)
        child.kill()
        for one in family:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        told, _ = child.communicate()
        timed_out = True
    seconds = time.monotonic() - began
    with suppress(IndexError, ValueError, TypeError):
        return Outcome(**json.loads(told.splitlines()[-1]))
    late = f"it hung and was killed: it took longer than the {left_s:.0f} s that were left"
    detail = late if timed_out else f"its process ended with {child.returncode} and said nothing"
    return Outcome(name=name, state="failed", seconds=seconds, detail=detail)


async def _one(site: Site, name: str, check: Check, left_s: float) -> Outcome:
    began = time.monotonic()
    try:
        figures, state, detail = await asyncio.wait_for(check(site), left_s), "ok", ""
    except Failed as error:
        figures, state, detail = {}, "failed", str(error)
    except TimeoutError as error:
        figures, state, detail = {}, "failed", str(error) or f"it took longer than the {left_s:.0f} s that were left"
    except Exception as error:
        logging.getLogger("gpu_check").exception("check.failed name=%s", name)
        figures, state, detail = {}, "failed", f"{type(error).__name__}: {error}"
    return Outcome(name=name, state=state, seconds=time.monotonic() - began, detail=detail, figures=figures)


def _child(name: str, device: str, folder: Path, limit_s: float) -> int:
    """One check in this process; its outcome is the last line."""
    site = find(device, folder)
    if site is None:
        outcome = Outcome(name=name, state="failed", detail=f"{device} is not there any more")
    else:
        outcome = asyncio.run(_one(site, name, CHECKS[name], limit_s))
    print(json.dumps(asdict(outcome)), flush=True)
    return OK


def table(outcomes: list[Outcome]) -> str:
    rows = [["check", "state", "seconds", "figures"]]
    for one in outcomes:
        figures = ", ".join(f"{name} {_shown(value)}" for name, value in one.figures.items())
        rows.append([one.name, one.state, f"{one.seconds:.1f}", one.detail or figures])
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows
    )


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cuda:0, cuda:1, … as Penstock names them, or cpu; default: the freest card")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS), help="only these checks")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds for all of them")
    parser.add_argument("--check", choices=list(CHECKS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    if arguments.check is not None:
        return _child(arguments.check, arguments.device, arguments.folder, arguments.limit_s)
    with tempfile.TemporaryDirectory(prefix="penstock-gpu-check-") as folder:
        try:
            site = find(arguments.device, Path(folder))
            problem = f"there is no card {arguments.device}" if arguments.device else "no card was found"
            if site is not None and not site.on_cpu:
                import torch

                problem = "torch sees no card: its wheel is for the CPU, or does not fit the driver"
                site = site if torch.version.cuda is not None else None
        except ImportError as error:
            site, problem = None, f"{error.name} is not installed (make install)"
        if site is None:
            print(ADVICE.format(what=problem), file=sys.stderr)
            print(json.dumps({"name": "gpu_check", "ok": None, "reason": problem}))
            return NO_CARD
        title = f"{site.device.device} ({site.device.title}, {site.device.total_bytes / MIB:.0f} MiB)"
        print(f"gpu-check on {title}", file=sys.stderr)
        outcomes = run(site, arguments.only, arguments.limit_s)
    ok = all(one.state == "ok" for one in outcomes)
    print(table(outcomes))
    checks = [asdict(one) for one in outcomes]
    print(
        json.dumps(
            {"name": "gpu_check", "ok": ok, "device": site.device.device, "title": site.device.title, "checks": checks}
        )
    )
    return OK if ok else FAILED


if __name__ == "__main__":
    sys.exit(main())
