"""Other systems to measure beside: each in an environment that is made here once, in the user's cache."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common import Figures

from penstock.cli.paths import cache_dir, exclusive
from system import eventually, free_port

CELERY = ("celery[redis]==5.7.0", "redis==8.1.0")
HERE = Path(__file__).parent
WORKERS, THREADS = 2, 4


class PeerMissing(Exception):
    """The peer cannot be measured here; the message says what to install."""


def environment(name: str, requirements: tuple[str, ...]) -> Path:
    """The bin folder of a virtual environment with these requirements. Raises PeerMissing."""
    folder = cache_dir() / "bench-peers" / f"{name}-{'-'.join(requirements)}".replace("/", "_")
    with exclusive(folder.with_suffix(".lock")):
        done = folder / ".installed"
        if not done.exists():
            print(f"making an environment with {', '.join(requirements)}", file=sys.stderr, flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *requirements]
            installed = subprocess.run(pip, capture_output=True, text=True, check=False)
            if installed.returncode != 0:
                raise PeerMissing(f"{name} cannot be installed: {installed.stderr.strip()[-300:]}")
            done.touch()
    return folder / "bin"


def redis_server() -> str:
    """Debian's redis-server, installed when this user may. Raises PeerMissing."""
    if found := shutil.which("redis-server"):
        return found
    if os.getuid() == 0 and shutil.which("apt-get"):
        for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", "redis-server"]):
            subprocess.run(["apt-get", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        if found := shutil.which("redis-server"):
            return found
    raise PeerMissing("redis-server is not installed: apt-get install redis-server")


class CeleryPeer:
    """Two Celery workers of threads on a Redis of their own, and a client that fills their queue."""

    def __init__(self, folder: Path) -> None:
        bin_folder, port = environment("celery", CELERY), free_port()
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        env = {**os.environ, "BENCH_REDIS_URL": f"redis://127.0.0.1:{port}/0"}
        env.pop("PYTHONPATH", None)  # ours is not for that environment
        redis = [redis_server(), "--port", str(port), "--save", "", "--appendonly", "no", "--dir", str(folder)]
        self._start("redis", redis, env)
        celery = [
            str(bin_folder / "celery"),
            "-A",
            "celery_app",
            "worker",
            "--pool=threads",
            f"--concurrency={THREADS}",
        ]
        quiet = ["--loglevel=WARNING", "--without-gossip", "--without-mingle", "--without-heartbeat"]
        for number in range(WORKERS):
            self._start(f"worker-{number}", [*celery, *quiet, "-n", f"w{number}@bench"], env)
        ping = [str(bin_folder / "celery"), "-A", "celery_app", "inspect", "ping", "--timeout=3", "--json"]

        def all_answer() -> bool:
            done = subprocess.run(ping, cwd=HERE, env=env, capture_output=True, text=True, check=False)
            return done.stdout.count("pong") >= WORKERS

        eventually(all_answer, 60, lambda: self._words("worker-0"))
        self._client = subprocess.Popen(
            [str(bin_folder / "python"), str(HERE / "celery_client.py")],
            cwd=HERE,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._processes.append(self._client)

    def _start(self, name: str, command: list[str], env: dict[str, str]) -> None:
        with (self._folder / f"{name}.log").open("wb") as log:
            self._processes.append(subprocess.Popen(command, cwd=HERE, env=env, stdout=log, stderr=subprocess.STDOUT))

    def _words(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")[-2_000:]

    def measure(self, count: int) -> Figures:
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        self._client.stdin.write(f"{count}\n".encode())
        self._client.stdin.flush()
        line = self._client.stdout.readline()
        assert line, f"Celery's client ended\n{self._words('worker-0')}"
        return json.loads(line)

    def close(self) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait()


@contextmanager
def celery_peer() -> Iterator[CeleryPeer]:
    """Raises PeerMissing when it cannot be had here."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        peer = CeleryPeer(Path(folder))
        try:
            yield peer
        finally:
            peer.close()
