"""Celery on Redis under the fault table's harness: the same requests, moments, proofs and checker.

    .venv/bin/python benchmarks/celery_faults.py --in-flight 60 --histories found

`docs/fault-table.md` has the settings and the figures. Redis and Celery come from the packages that `peers.py` names.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from peers import CELERY, HERE, environment, redis_server

from penstock.cli.faults.histories import History
from penstock.cli.faults.loads import Load, load_of
from penstock.cli.faults.matrix import Plan, plans
from penstock.cli.faults.moments import NotReached, wait_for
from penstock.cli.faults.runner import Run, keep_logs
from penstock.cli.faults.site import Supervised
from penstock.cli.faults.targets import GONE, STOPPED, Target
from penstock.cli.local_system import penstock_command
from penstock.cli.paths import free_port
from penstock.cli.readiness import Readiness
from penstock.cli.supervisor import Part, command_part
from penstock.schemas.codec import default_codec
from penstock.schemas.records import Origin, ResultEvent

ROWS = (
    *("no-fault", "worker:queued", "worker:mid_stream", "worker:result_commit", "engine:mid_stream"),
    *("broker:queued", "broker:mid_stream", "broker:result_commit", "worker+broker:mid_stream"),
)
PIECE_CHARS = 16
"""As the no-op engine echoes."""
LAST_LOOK_S = 60.0


class Site(Supervised):
    """A Redis that keeps its data, and one Celery worker, which stops itself after `stop_at` results."""

    def __init__(self, folder: Path, options: argparse.Namespace, *, slots: int, stop_at: int) -> None:
        super().__init__()
        port = free_port()
        self._bin = environment("celery", CELERY)
        ours = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        url = f"redis://127.0.0.1:{port}/0"
        self._env = {**ours, "BENCH_REDIS_URL": url, "BENCH_VISIBILITY_S": str(options.visibility_s)}
        redis = [redis_server(), "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder)]
        redis += ["--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--maxmemory-policy", "noeviction"]
        celery = [str(self._bin / "celery"), "--workdir", str(HERE), "-A", "celery_faults_app", "worker"]
        celery += ["-n", "w@faults", "--loglevel=INFO", f"--pool={options.pool}", f"--concurrency={slots}"]
        part, log = partial(command_part, grace_s=5.0), folder / "worker.log"
        env = {**self._env, "BENCH_STOP_AT": str(stop_at)}
        self.parts: dict[str, Part] = {
            "broker": part(
                "broker", redis, log=folder / "broker.log", look=lambda _: _look(_answers(port)), env=lambda: self._env
            ),
            "worker": part(
                "worker", celery, log=log, look=lambda _: _look(" ready." in log.read_text()), env=lambda: env
            ),
        }
        self.start(*self.parts.values())

    def clients(self) -> subprocess.Popen[bytes]:
        command = [str(self._bin / "python"), str(HERE / "celery_faults_client.py")]
        return subprocess.Popen(command, env=self._env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def targets(self, part: str) -> list[Target]:
        """The pool's processes are the engines."""
        process = self.parts["worker" if part == "engine" else part].process
        assert process is not None
        return Target(process.pid).children() if part == "engine" else [Target(process.pid)]


def _look(ready: bool) -> Readiness:
    return Readiness(status="ready" if ready else "starting")


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0) as redis:
        redis.sendall(b"PING\r\n")
        return redis.recv(64).startswith(b"+PONG")
    return False


def run_row(plan: Plan, run: Run, options: argparse.Namespace) -> None:
    """Leave the history of one row, and its logs."""
    history = History(run.history_of(plan))
    facts: dict[str, Any] = {"row": plan.row, "moment": plan.moment, "control": plan.control, "expected": plan.expected}
    facts |= {"count": run.count, "seed": run.seed, "commit": run.commit, "least_in_flight": run.count // 2}
    history.note("row", faults=plan.row != "none", **facts)
    # The rows of `engine` of the table run a real model: here each row has the no-op engine's texts and pace.
    load = load_of(replace(plan, row="worker"), run.count, "", random.Random(f"{run.seed} {plan.name}"))
    slots = min(run.count, load.models[0]["options"]["slots"])
    with tempfile.TemporaryDirectory(prefix="penstock-celery-") as folder:
        try:
            site = Site(Path(folder), options, slots=slots, stop_at=int(load.faults.partition("@")[2] or 0))
            try:
                _play(plan, run, load, site, history, options.settled_s)
            finally:
                site.stop()
        except Exception as error:
            history.note("fault", target=plan.row, how=f"{type(error).__name__}: {error}", proven=False)
        finally:
            keep_logs(Path(folder), run.logs_of(plan))
            history.close()


def _play(plan: Plan, run: Run, load: Load, site: Site, history: History, settled_s: float) -> None:
    clients = site.clients()
    hearing = threading.Thread(target=_hear, args=(clients, history), daemon=True)
    hearing.start()
    try:
        assert clients.stdin is not None
        asked = [{"name": f"{run.seed}-{one.number}", "text": one.text, "streams": one.streams} for one in load.asked]
        pace = {"piece_chars": PIECE_CHARS, "delay_s": load.models[0]["options"]["delay_ms"] / 1_000}
        clients.stdin.write(json.dumps({"asked": asked, **pace}).encode() + b"\n")
        clients.stdin.flush()
        try:
            _reach(plan.moment, site, history, load)
            for part in plan.strikes:
                _strike(part, site, history)
        except NotReached as error:
            history.note("fault", target=plan.row, how=str(error), proven=False)
        for worker in site.targets("worker"):
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGCONT)
        try:
            clients.wait(settled_s)
        except subprocess.TimeoutExpired:
            history.note("not_settled", how=f"not within {settled_s:.0f} s: every request has its outcome")
        clients.stdin.close()
        if code := clients.wait(LAST_LOOK_S):
            history.note("not_settled", how=f"the clients ended with {code}")
    finally:
        clients.kill()
        hearing.join()
    history.note("grants", reserved=0, of_models=0)  # Celery has no such thing


def _hear(clients: subprocess.Popen[bytes], history: History) -> None:
    assert clients.stdout is not None
    for line in clients.stdout:
        entry = json.loads(line)
        history.note(**(_record(entry) if entry["what"] == "result" else entry))


def _record(entry: dict[str, Any]) -> dict[str, Any]:
    """What stands in the result backend, as the record that the checker folds."""
    at_ms = int(entry["at"] * 1_000)
    place = Origin(topic="celery", partition=0, offset=0, append_time_ms=at_ms)
    known: dict[str, Any] = {"tenant": "default", "kind": "terminal", "attempt": 1, "epoch": 1, "worker_id": "w"}
    known |= {"task": "text_generation", "created_at": at_ms, "origin": place, "status": entry["status"]}
    event = ResultEvent(request_id=entry["request_id"], text_generation={"text": entry["text"]}, **known)
    value = base64.b64encode(default_codec().encode(event)).decode()
    facts = {"request_id": entry["request_id"], "at": entry["at"], "value": value}
    return {"what": "record", "partition": 0, "offset": 0, **facts}


def _reach(moment: str, site: Site, history: History, load: Load) -> None:
    """Return at the moment. Raises NotReached."""
    (worker,), named, streams = site.targets("worker"), history.named, sum(one.streams for one in load.asked)
    seen: dict[str, Callable[[], bool]] = {
        "queued": lambda: bool(named["piece"] or named["outcome"]),
        "mid_stream": lambda: len(named["piece"]) >= 0.9 * streams,
        "result_commit": lambda: worker.state == STOPPED,
    }
    asyncio.run(wait_for(lambda: len(named["acknowledged"]) >= len(load.asked), "all requests are acknowledged"))
    asyncio.run(wait_for(seen[moment], moment))


def _strike(part: str, site: Site, history: History) -> None:
    """Send SIGKILL, to the worker with its pool, and look in `/proc` whether the target is gone."""
    targets = site.targets(part)
    for target in targets:
        os.killpg(target.pid, signal.SIGKILL) if part == "worker" else target.signal(signal.SIGKILL)
    gone = bool(targets) and all(target.has_come_to(GONE) for target in targets)
    pids = ", ".join(str(target.pid) for target in targets[:3]) + (", …" if len(targets) > 3 else "")
    how = f"/proc: {part} ({len(targets)}: {pids}) {'is gone' if gone else 'runs on'}"
    history.note("fault", target=part, how=how, proven=gone)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--in-flight", type=int, default=60, help="requests of each row")
    parser.add_argument("--rows", action="append", help="PART:MOMENT, * stands for any; may be given again")
    parser.add_argument("--histories", type=Path, help="the folder of histories and logs")
    parser.add_argument("--visibility-s", type=int, default=30, help="the visibility timeout; Celery's own is 3600")
    parser.add_argument("--settled-s", type=float, default=240, help="so long after the fault every outcome may take")
    parser.add_argument("--pool", choices=["prefork", "threads"], default="prefork")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):  # a shell starts what runs in its background with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    folder = options.histories or Path(tempfile.mkdtemp(prefix="penstock-celery-histories-"))
    commit = subprocess.check_output(["git", "rev-parse", "--short=12", "HEAD"], cwd=HERE, text=True).strip()
    run = Run(folder=folder, count=options.in_flight, seed=1, commit=commit)
    for plan in plans(quick=False, patterns=options.rows or ROWS):
        if plan.name in ROWS:
            print(plan.name, file=sys.stderr, flush=True)
            run_row(plan, run, options)
    print(f"histories and logs: {folder}", file=sys.stderr, flush=True)
    check = [*penstock_command("bench"), "faults", "--check", str(folder)]
    return subprocess.call([*check, "--json"] if options.json else check)


if __name__ == "__main__":
    sys.exit(main())
